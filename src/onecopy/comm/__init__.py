"""Communication between ranks: process groups, transports, agreement, status flags, packing, buffers, streams."""
