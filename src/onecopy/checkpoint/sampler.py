"""A batch sampler that goes on where a checkpoint was saved, on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class ResumableSampler:
    """A batch sampler for a ``DataLoader``, whose position in the data is one number for all ranks.

    The samples of all epochs form one sequence. In each epoch every sample occurs once. Each batch has the next
    ``batch_size`` samples of the sequence, and the ranks divide it among them. So the batches do not depend on the
    number of ranks. The last batch of an epoch is filled up with the first samples of the next one.

    A data loader fetches batches before they are trained. So the position counts calls of :meth:`advance`: make one
    after each batch.

    Example::

        sampler = checkpoint.ResumableSampler(len(dataset), batch_size=256)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=4)
        for epoch in range(sampler.epoch, epochs):
            for inputs, targets in loader:
                ...
                optimizer.step()
                sampler.advance()

    Attributes:
        position: the number of samples that all ranks together have trained, in all epochs.

    Args:
        dataset_size: the number of samples in the data set.
        batch_size: the number of samples in a batch of all ranks together. With a multiple of the number of ranks each
            rank has equally many of them. Otherwise some ranks have one more than others.
        seed: the seed of the order of the samples.
        shuffle: whether each epoch has another random order.
        group_rank: the place of this rank among the ranks that divide a batch (default: its rank in the default
            process group).
        world_size: the number of these ranks (default: all ranks; without torch.distributed, this process).
    """

    def __init__(
        self,
        dataset_size: int,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        group_rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if not 1 <= batch_size <= dataset_size:
            raise ValueError(f"batch_size must be from 1 to dataset_size={dataset_size}, got {batch_size}")
        if (group_rank is None) != (world_size is None):
            raise ValueError("group_rank and world_size must be given together, or neither of them")
        if group_rank is not None and world_size is not None and not 0 <= group_rank < world_size:
            raise ValueError(f"group_rank must be from 0 to {world_size - 1} for world_size={world_size}: {group_rank}")
        self.dataset_size = dataset_size
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.position = 0
        self._group_rank = group_rank
        self._world_size = world_size
        self._fetched = 0
        self._finished_pass: int | None = None  # where the last complete pass began
        self._order: tuple[int, Tensor] | None = None

    @property
    def epoch(self) -> int:
        """The number of the epoch in which the position is, from 0 on."""
        return self.position // self.dataset_size

    def __len__(self) -> int:
        """The number of batches up to the end of this epoch, with the batch that contains its last sample."""
        left = self.dataset_size - self.position % self.dataset_size
        return -(-left // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's part of each batch, from the position up to the end of the epoch."""
        if self._finished_pass == self.position:
            raise RuntimeError(
                "all batches of this epoch have been taken, but advance() was not called, so the same batches would "
                "follow: call sampler.advance() after each batch that was trained"
            )
        group_rank, world_size = self._ranks()
        if self.batch_size < world_size:
            raise ValueError(
                f"batch_size={self.batch_size} is the number of samples of all ranks together, and less than the "
                f"{world_size} ranks: give each rank a sample"
            )
        self._finished_pass = None
        return self._batches(self.position, len(self), group_rank, world_size)

    def advance(self) -> None:
        """Count one batch as trained. All ranks call this after each batch."""
        if self.position + self.batch_size > self._fetched:
            raise RuntimeError("advance() was called more often than batches were taken: call it once for each batch")
        self.position += self.batch_size

    def state_dict(self) -> dict[str, Any]:
        """Return the position, equal on all ranks, for :func:`onecopy.checkpoint.capture`."""
        return {
            "position": self.position,
            "dataset_size": self.dataset_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on at a saved position, on any number of ranks and with any batch size.

        Raises:
            ValueError: if the position was saved for another data set size, seed or ``shuffle``.
        """
        for name in ("dataset_size", "seed", "shuffle"):
            if state_dict[name] != getattr(self, name):
                raise ValueError(
                    f"the position was saved with {name}={state_dict[name]!r}, and this sampler has "
                    f"{name}={getattr(self, name)!r}: the order of the samples is another one"
                )
        self.position = self._fetched = state_dict["position"]
        self._finished_pass = None

    def _ranks(self) -> tuple[int, int]:
        if self._group_rank is not None and self._world_size is not None:
            return self._group_rank, self._world_size
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        return 0, 1

    def _batches(self, first: int, count: int, group_rank: int, world_size: int) -> Iterator[list[int]]:
        for start in range(first, first + count * self.batch_size, self.batch_size):
            stop = start + self.batch_size
            self._fetched = stop
            yield [self._sample(place) for place in range(start + group_rank, stop, world_size)]
        self._finished_pass = first

    def _sample(self, place: int) -> int:
        """The sample at a place of the sequence of all epochs."""
        epoch, place_in_epoch = divmod(place, self.dataset_size)
        if not self.shuffle:
            return place_in_epoch
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            self._order = epoch, torch.randperm(self.dataset_size, generator=generator)
        return int(self._order[1][place_in_epoch])
