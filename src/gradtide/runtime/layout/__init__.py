"""What lies where: parameters in flat buffers, buckets of these, tensors of rank 0."""
