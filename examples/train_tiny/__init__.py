"""Trains the small Llama that ships in `kvcache/runner/tiny`: run `python examples/train_tiny`."""
