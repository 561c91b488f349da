"""What is to be run on the day a GPU is at hand: ``python -m benchmarks.gpu``; docs/devices.md says how."""
