"""Optimizer state to the plain optimizer's state dict and back, and to torch.distributed.checkpoint."""
