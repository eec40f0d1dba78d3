"""The scheme `auto`: profile the first steps, plan, and switch."""
