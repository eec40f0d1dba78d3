"""A slow cluster emulated on one machine, and what is measured on it."""
