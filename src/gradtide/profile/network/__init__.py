"""What requests take between the ranks of a cluster, and beside them."""
