"""What a step exchanges: one file for each kind."""
