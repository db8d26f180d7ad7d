"""The error and warning classes for failures that concern several ranks, and for checkpoints.

A mistake in the arguments is a ``TypeError`` or a ``ValueError``, as in torch. Every message names the rank, the
parameter and a remedy where there is one.
"""

from __future__ import annotations


class OnecopyError(RuntimeError):
    """The base class of onecopy's errors."""


class RanksDisagreeError(OnecopyError):
    """The ranks have different parameters, options or gradients, or are in different calls."""


class PeerFailedError(OnecopyError):
    """Another rank failed, and this rank raises too instead of waiting for it forever."""


class NonfiniteError(OnecopyError):
    """A gradient in ``step()`` or a parameter in ``checkpoint.save()`` has an infinity or a NaN."""


class GradientsNotReducedWarning(UserWarning):
    """Nothing averages the gradients of the ranks: probably the model is not in DistributedDataParallel."""


class CheckpointError(OnecopyError):
    """A checkpoint could not be written or read."""


class CorruptCheckpointError(CheckpointError):
    """Files of a checkpoint are damaged, missing, or different from the files that were written."""


class CheckpointMismatchError(CheckpointError, ValueError):
    """A checkpoint does not fit the model or the optimizer it is loaded into."""
