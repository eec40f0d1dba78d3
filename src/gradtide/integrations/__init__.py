"""gradtide behind other people's seams."""
