"""Which recipe for a training script as it stands: it is run for a few steps."""
