"""Real training side by side, for a time: which loss is there when."""
