"""The word that ranks exchange at the end of a backward pass: a few bytes for each parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice

from onecopy.data_parallel.gradient_buckets import Bucket
from onecopy.errors import PeerFailedError, RanksDisagreeError

Rows = list[list[bool]]
"""A flag for each parameter, bucket by bucket."""


@dataclass(frozen=True, slots=True)
class PassFlags:
    """Flags of one rank, or those that hold on any rank: the largest of each byte.

    Attributes:
        failed: the pass has failed.
        present: the parameter has a gradient.
        kept: it had a reduced gradient before the pass.
        trainable: it needs a gradient.
        frozen: it needs none. Both are False on a rank without inputs, which does not follow what the others freeze.
    """

    failed: bool
    present: Rows
    kept: Rows
    trainable: Rows
    frozen: Rows

    @property
    def sizes(self) -> list[int]:
        """How many parameters the buckets have."""
        return [len(row) for row in self.present]

    def word(self) -> list[bool]:
        """All flags in a row."""
        return [self.failed, *chain(*self.present, *self.kept, *self.trainable, *self.frozen)]

    @classmethod
    def of_word(cls, word: Sequence[int], sizes: Sequence[int]) -> PassFlags:
        """The flags of a word, for buckets with so many parameters each."""
        flags = iter([bool(flag) for flag in word])
        failed = next(flags)
        present, kept, trainable, frozen = ([list(islice(flags, size)) for size in sizes] for _ in range(4))
        return cls(failed, present, kept, trainable, frozen)


def flags_of(buckets: Sequence[Bucket], failed: bool, active: bool) -> PassFlags:
    """This rank's flags at the end of a pass; ``active`` is False on a rank that has run out of inputs."""
    present = [[a or k for a, k in zip(bucket.arrived, bucket.kept, strict=True)] for bucket in buckets]
    if not active:
        kept, trainable, frozen = ([[False] * len(bucket.params) for bucket in buckets] for _ in range(3))
        return PassFlags(failed, present, kept, trainable, frozen)
    trainable = [[param.requires_grad for param in bucket.params] for bucket in buckets]
    frozen = [[not flag for flag in row] for row in trainable]
    return PassFlags(failed, present, [bucket.kept for bucket in buckets], trainable, frozen)


def frozen_on_some(buckets: Sequence[Bucket], agreed: PassFlags) -> RanksDisagreeError | None:
    """The error to raise if a parameter is frozen on some ranks only: the others' gradients alone would train it."""
    for bucket, trainable, frozen in zip(buckets, agreed.trainable, agreed.frozen, strict=True):
        for name, param, one, other in zip(bucket.names, bucket.params, trainable, frozen, strict=True):
            if one and other:
                return RanksDisagreeError(
                    f"rank {bucket.policy.collectives.group_rank}: parameter {name!r} is frozen on some ranks and not "
                    f"on others (on this rank requires_grad={param.requires_grad}). Call requires_grad_() for it on "
                    "all ranks or on none, and zero the gradients."
                )
    return None


def failure_of_last(buckets: Sequence[Bucket], word: Sequence[int]) -> Exception | None:
    """What went wrong in an earlier pass, by its word that is read late."""
    last = PassFlags.of_word(word, [len(bucket.params) for bucket in buckets])
    if last.failed:
        return PeerFailedError("the previous backward() failed on another rank; see its own error")
    return frozen_on_some(buckets, last)
