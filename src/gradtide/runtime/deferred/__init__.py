"""Gradients and updates that are not here yet, and the message that tells of them."""
