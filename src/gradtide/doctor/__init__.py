"""Whether training would work here: reach, names, versions, limits, and the network."""
