"""What if: a training step by many schemes on many clusters, on the virtual clock."""
