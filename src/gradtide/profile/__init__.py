"""What this machine, model and network are like, measured before training."""
