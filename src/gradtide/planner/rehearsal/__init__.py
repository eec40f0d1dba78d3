"""Collectives that are rehearsed once: what they ask for, and what they compute."""
