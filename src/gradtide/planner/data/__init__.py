"""Devices and documents: what traces and networks are made of."""
