"""A Llama-family model and its generation loop, written once on ml.nn."""
