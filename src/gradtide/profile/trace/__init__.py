"""How long the parts of a model's own step take."""
