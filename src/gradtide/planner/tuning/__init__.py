"""Finding out during training which fusion suits it."""
