"""A Lightning strategy whose checkpoints are written by all ranks, without gathering the state on one of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import DDPStrategy

from onecopy import checkpoint as checkpoints
from onecopy.checkpoint.directories import committed, folder_name, step_of
from onecopy.data_parallel import ShardedDataParallel
from onecopy.errors import CheckpointError


class ShardedStrategy(DDPStrategy):
    """Trains with DDP or ShardedDataParallel and saves with :func:`onecopy.checkpoint.save`.

    A checkpoint is a directory: the model and the optimizers as :func:`onecopy.checkpoint.save` writes them, and a file
    with everything else that Lightning saves. Any number of ranks can load it. In hooks such as
    ``on_save_checkpoint`` the entries ``state_dict`` and ``optimizer_states`` of the checkpoint are empty.

    Args:
        *arguments: arguments of ``DDPStrategy``.
        shard_gradients: wrap the module in :class:`onecopy.ShardedDataParallel` instead of DDP. All optimizers must be
            a :class:`onecopy.ZeroRedundancyOptimizer`.
        wrapper_options: with ``shard_gradients``, arguments of ShardedDataParallel, such as ``overlap_forward``.
        **options: arguments of ``DDPStrategy``. Without ``shard_gradients`` DDP's own are among them.
    """

    def __init__(
        self,
        *arguments: Any,
        shard_gradients: bool = False,
        wrapper_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self.shard_gradients = shard_gradients
        self.wrapper_options = dict(wrapper_options or {})
        self._loaded_folder: Path | None = None

    def configure_ddp(self) -> None:
        """Wrap the module in DDP; ShardedDataParallel needs the optimizers, which are made later."""
        if not self.shard_gradients:
            super().configure_ddp()

    def setup_optimizers(self, trainer: Any) -> None:
        """Make the optimizers, and with ``shard_gradients`` wrap the module."""
        super().setup_optimizers(trainer)
        if self.shard_gradients:
            self.model = ShardedDataParallel(self.lightning_module, self.optimizers, **self.wrapper_options)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients without reducing them."""
        if isinstance(self.model, ShardedDataParallel):
            with self.model.no_sync():
                yield
        else:
            with super().block_backward_sync():
                yield

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return nothing: :meth:`save_checkpoint` saves the model itself."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:  # noqa: ARG002 - Lightning passes it
        """Return nothing: :meth:`save_checkpoint` saves the optimizers themselves."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save the model, the optimizers and the rest of a checkpoint to a directory; all ranks write."""
        root, step = Path(filepath), int(checkpoint["global_step"])
        replaced = root.with_name(f"{root.name}.replaced")
        if self.is_global_zero and any(step_of(folder) >= step for folder in committed(root)):
            # This step was saved here before, or training has gone back: load_checkpoint would take the later one.
            shutil.rmtree(replaced, ignore_errors=True)
            root.rename(replaced)
        # The step's directory is committed last, so that a directory without its file is never found.
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint, _rest_of(root / folder_name(step)), storage_options)
        self.barrier()
        optimizers = self.optimizers if "optimizer_states" in checkpoint else None
        checkpoints.save(root, step, model=self.lightning_module, optimizer=optimizers, keep=1)
        if self.is_global_zero:
            for file in set(root.glob(_rest_of(root / "*").name)) - {_rest_of(root / folder_name(step))}:
                file.unlink()
            shutil.rmtree(replaced, ignore_errors=True)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load all but the states of model and optimizers; an ordinary file of Lightning is loaded whole."""
        root = Path(checkpoint_path)
        self._loaded_folder = None
        if root.is_dir():
            self._loaded_folder = checkpoints.latest(root)
            if self._loaded_folder is None:
                raise CheckpointError(f"{root} has no complete checkpoint")
            checkpoint_path = _rest_of(self._loaded_folder)
        loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        return loaded

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the model; all ranks make this call together."""
        if self._loaded_folder is None:
            super().load_model_state_dict(checkpoint, strict)
        else:
            checkpoints.load(self._loaded_folder, model=self.lightning_module, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers; all ranks make this call together."""
        if self._loaded_folder is None:
            super().load_optimizer_state_dict(checkpoint)
        else:
            # With the model, because the state is saved under the names of the model.
            module = self.lightning_module
            checkpoints.load(self._loaded_folder, model=module, optimizer=self.optimizers, strict=module.strict_loading)

    def teardown(self) -> None:
        """Wait for parameters in flight and unwrap the module."""
        if isinstance(self.model, ShardedDataParallel):
            for optimizer in self.optimizers:
                optimizer.wait()
            self.model = self.lightning_module
        super().teardown()


def _rest_of(folder: Path) -> Path:
    """The file with everything of a checkpoint but the states of model and optimizers."""
    return folder.parent / f"lightning-{folder.name}.ckpt"
