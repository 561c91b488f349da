"""Building blocks of models, written once on Tensor."""
