"""Sessions over a radix tree of snapshots."""
