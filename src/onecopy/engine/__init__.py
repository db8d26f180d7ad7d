"""One training step: the local optimizer, its storage, and what travels between ranks."""
