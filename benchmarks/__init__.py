"""Floor, peers and ours in turn in one process; ``python -m benchmarks`` writes docs/benchmarks/index.md."""
