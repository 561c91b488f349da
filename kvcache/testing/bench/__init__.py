"""What ``kvcache bench`` measures, and how: ``measure`` and ``Contender``."""
