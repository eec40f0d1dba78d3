"""Whether selecting entries pays: selectors' times beside the time on the wire."""
