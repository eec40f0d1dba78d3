"""Data-parallel PyTorch training over networks that cannot keep up."""
