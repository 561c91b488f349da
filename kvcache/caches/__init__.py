"""The caches: causal, windows, encoder, recurrent, wrapper, and branches of their sequences."""
