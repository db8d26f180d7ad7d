"""Estimates of memory, traffic and step time for machines that are not available."""
