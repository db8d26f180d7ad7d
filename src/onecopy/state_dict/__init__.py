"""Converts sharded optimizer state to the plain optimizer's state dict and back, and for DCP."""
