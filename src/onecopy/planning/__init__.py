"""Memory, traffic and step time on machines that are not here."""
