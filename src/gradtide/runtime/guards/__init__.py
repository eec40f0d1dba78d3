"""What is refused: a set-up, what is not finite, ranks that have come apart."""
