"""The virtual clock: requests and the network, in seconds."""
