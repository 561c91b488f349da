"""What a sequence held: taken, cut, joined, restored, serialized."""
