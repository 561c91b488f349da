"""Trains the small Llama that ships in `kvcache_engine/tiny`: run `python examples/train_tiny`."""
