"""A training's steps on the virtual clock: what they do, and what that takes."""
