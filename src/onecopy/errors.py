"""Errors that name the rank, the parameter and what to do next.

A mistake in the arguments is a ``TypeError`` or a ``ValueError``, as in torch. The classes here are for what only
happens between ranks.
"""

from __future__ import annotations


class OnecopyError(RuntimeError):
    """Base of the errors that concern more than one rank."""


class RanksDisagreeError(OnecopyError):
    """The ranks were given different parameters, options or gradients, or are at different calls."""


class PeerFailedError(OnecopyError):
    """Another rank failed; this one stops with it instead of waiting for it forever."""


class CheckpointError(OnecopyError):
    """A checkpoint could not be written or read."""


class CorruptCheckpointError(CheckpointError):
    """Files of a checkpoint are damaged, missing, or not what was written."""


class CheckpointMismatchError(CheckpointError, ValueError):
    """A checkpoint does not fit the model or the optimizer it is loaded into."""
