"""A hook for mmengine's Runner: gathers the optimizer state on rank 0 before each save."""

from __future__ import annotations

from typing import Any

from mmengine.hooks import Hook


class ConsolidatedCheckpoints(Hook):
    """Lets ``CheckpointHook`` save sharded optimizers, whenever it saves.

    Use it as ``custom_hooks=[dict(type=ConsolidatedCheckpoints)]``. ``Runner.save_checkpoint`` is called on all ranks
    and writes on rank 0. This hook puts a consolidation before it.
    """

    def before_train(self, runner: Any) -> None:
        """Put the consolidation before ``runner.save_checkpoint``."""
        save, wrapper = runner.save_checkpoint, runner.optim_wrapper
        wrappers = list(wrapper.values()) if hasattr(wrapper, "values") else [wrapper]  # an OptimWrapperDict has values

        def consolidate_and_save(*arguments: Any, **options: Any) -> None:
            for each in wrappers:
                if hasattr(each.optimizer, "consolidate_state_dict"):
                    each.optimizer.consolidate_state_dict()
            save(*arguments, **options)

        runner.save_checkpoint = consolidate_and_save
