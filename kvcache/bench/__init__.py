"""What ``kvcache bench`` measures, and how."""
