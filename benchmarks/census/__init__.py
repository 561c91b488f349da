"""What works, type by type: whole libraries of models with our caches."""
