"""An OpenAI-compatible server on kvcache's engine: run `python examples/server`."""
