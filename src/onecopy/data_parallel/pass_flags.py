"""The status flags that ranks exchange at the end of a backward pass: a few bytes for each parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice

from torch import Tensor

from onecopy.data_parallel.gradient_buckets import GradientBucket, GradState
from onecopy.errors import PeerFailedError, RanksDisagreeError

FlagsByBucket = list[list[bool]]
"""One flag for each parameter of each bucket."""


@dataclass(frozen=True, slots=True)
class PassFlags:
    """The flags of one rank, or the flags that are set on any rank (the maximum of each byte).

    Attributes:
        failed: the pass has failed.
        present: the parameter has a gradient.
        trainable: the parameter has ``requires_grad=True``.
        frozen: the parameter has ``requires_grad=False``.
    """

    failed: bool
    present: FlagsByBucket
    trainable: FlagsByBucket
    frozen: FlagsByBucket

    @property
    def replaces_others(self) -> bool:
        """Whether this rank knows without the other ranks' flags which parameters have a gradient on any rank.

        That is so if it has a gradient for each parameter that is not frozen: parameters are frozen on all ranks.
        """
        return all(
            has or is_frozen
            for present, frozen in zip(self.present, self.frozen, strict=True)
            for has, is_frozen in zip(present, frozen, strict=True)
        )

    @property
    def sizes(self) -> list[int]:
        """The number of parameters of each bucket."""
        return [len(flags) for flags in self.present]

    def to_row(self) -> list[bool]:
        """All flags in one row, as they are exchanged."""
        return [self.failed, *chain(*self.present, *self.trainable, *self.frozen)]

    @classmethod
    def from_row(cls, row: Sequence[int], sizes: Sequence[int]) -> PassFlags:
        """The flags of a row that was exchanged, for buckets with these numbers of parameters."""
        flags = iter([bool(flag) for flag in row])
        failed = next(flags)
        present, trainable, frozen = ([list(islice(flags, size)) for size in sizes] for _ in range(3))
        return cls(failed, present, trainable, frozen)


def local_flags(buckets: Sequence[GradientBucket], failed: bool) -> PassFlags:
    """This rank's flags at the end of a pass."""
    arrived = GradState.ARRIVED
    present = [
        [state is arrived or has for state, has in zip(bucket.states, bucket.has_reduced_grad, strict=True)]
        for bucket in buckets
    ]
    trainable = [[param.requires_grad for param in bucket.params] for bucket in buckets]
    frozen = [[not flag for flag in flags] for flags in trainable]
    return PassFlags(failed, present, trainable, frozen)


def frozen_on_some_ranks(buckets: Sequence[GradientBucket], flags: PassFlags) -> RanksDisagreeError | None:
    """The error for a parameter that is frozen on some ranks only, or None if there is no such parameter.

    Without the error, the gradients of the other ranks alone would train it.
    """
    for bucket, trainable, frozen in zip(buckets, flags.trainable, flags.frozen, strict=True):
        for name, param, is_trainable, is_frozen in zip(bucket.names, bucket.params, trainable, frozen, strict=True):
            if is_trainable and is_frozen:
                return RanksDisagreeError(
                    f"rank {bucket.policy.collectives.group_rank}: parameter {name!r} is frozen on some ranks and not "
                    f"on others (on this rank requires_grad={param.requires_grad}). Call requires_grad_() for it on "
                    "all ranks or on none, and zero the gradients."
                )
    return None


def check_row(buckets: Sequence[GradientBucket], found: list[PassFlags], row: Tensor) -> None:
    """Raise if a row of all ranks' flags tells of a failure; else append the flags to ``found``."""
    flags = PassFlags.from_row(row.tolist(), [len(bucket.params) for bucket in buckets])
    if flags.failed:
        here = buckets[0].policy.collectives.group_rank
        raise PeerFailedError(
            f"rank {here}: a backward() failed on another rank; see its own error, and load a checkpoint before going "
            "on"
        )
    disagreement = frozen_on_some_ranks(buckets, flags)
    if disagreement is not None:
        raise disagreement
    found.append(flags)
