"""The data of the overlapped step: its settings, its progress in one backward pass, and the update of one bucket."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.futures import Future

from onecopy.comm.agreement import FirstFailure
from onecopy.comm.work import InFlight
from onecopy.ddp_hooks.bucket_assignment import DDPBucketAssignment
from onecopy.step.parameter_groups import OptionsSnapshot


@dataclass(frozen=True, slots=True)
class OverlapSettings:
    """The settings of the hook and of DDP on which the overlapped step depends.

    Attributes:
        passes_before_overlap: how many backward passes DDP needs to rebuild its buckets.
        interleaved: update each bucket as soon as it is reduced, instead of all after the last one.
        unused_params: whether a backward pass may leave parameters without a gradient.
    """

    passes_before_overlap: int
    interleaved: bool
    unused_params: bool


@dataclass(slots=True)
class OverlapInfo:
    """The progress of the overlapped step in one backward pass.

    Attributes:
        options: the inner optimizer's options before the update.
        waiting: the updates of buckets that have not been given to the worker yet.
        broadcasts: the broadcasts of updated parameters in flight.
        update_failure: a failure of this rank's own update. This rank goes on with all collectives, and the status
            flags at the end tell the other ranks.
        collective_failure: a failure of a collective, or the error that the status flags raised. No collective follows.
    """

    options: OptionsSnapshot
    update_failure: FirstFailure
    waiting: list[BucketUpdate] = field(default_factory=list)
    broadcasts: InFlight = field(default_factory=InFlight)
    collective_failure: FirstFailure = field(default_factory=FirstFailure)

    def wait_for_broadcasts(self) -> None:
        """Wait for all broadcasts of updated parameters."""
        self.broadcasts.drain()


@dataclass(frozen=True, slots=True)
class BucketUpdate:
    """The update of one bucket in one backward pass.

    Attributes:
        index: the index of the bucket.
        assignment: which rank owns which range of the bucket.
        buffer: the bucket's gradients.
        reduced: the future of the user's hook, which gives the reduced gradients.
        done: the future that ``backward()`` waits for; None except for the last bucket.
        has_gradient: by parameter in the bucket, whether this rank has a gradient, and later whether any rank has.
        settings: the settings at the time of the backward pass.
    """

    index: int
    assignment: DDPBucketAssignment
    buffer: Tensor
    reduced: Future[Any]
    done: Future[Any] | None
    has_gradient: dict[int, bool]
    settings: OverlapSettings
