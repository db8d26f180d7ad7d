"""Memory and traffic of a training step, computed for machines that are not available."""
