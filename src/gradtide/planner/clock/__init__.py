"""The virtual clock: a step's actions, requests and the network, in seconds."""
