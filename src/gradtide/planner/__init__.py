"""What a step would cost elsewhere: traces, networks, an engine on a virtual clock."""
