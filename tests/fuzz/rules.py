"""Which programs make sense: plain DDP runs them, and no level says that it refuses them."""

from __future__ import annotations

from collections.abc import Callable

from tests.fuzz.levels import OFF, OTHER_REFUSED, REFUSED
from tests.fuzz.operations import EditState, LateHook, Move, Reload
from tests.fuzz.optimizers import CLASSES
from tests.fuzz.programs import KEEPING, Program


def allowed(program: Program) -> bool:
    """Whether a program makes sense: plain DDP runs it, and no level of it says that it refuses it."""
    return all(rule(program) for rule in RULES)


def _parts_are_there(program: Program) -> bool:
    names = {part.name for part in program.parts}
    return all(operation.about in names | {""} for operation in program.operations)


def _unused_are_found(program: Program) -> bool:
    found = ("find_unused_parameters", "True") in program.ddp
    return found or not program.has_unused


def _nothing_is_refused(program: Program) -> bool:
    level = program.levels[0]
    for operation in program.operations:
        if isinstance(operation, Move):
            level = program.levels[operation.to]
        elif operation.features & (REFUSED[level.kind] | OFF.keys()):
            return False
    return True


def _types_go_together(program: Program) -> bool:
    mixed = program.has("fp64") or program.has("bf16")
    if program.dtype != "float32" and mixed:
        return False  # they have another type than the rest
    if not program.exact and program.narrow:
        return False  # there rounding is as large as an update
    clips = "clipping" in program.features
    if program.narrow and clips and program.scatters:
        return False  # torch rounds the norm of bf16 gradients, and ours rounds the factor for each type
    # torch's GradScaler takes float32 gradients.
    scales = "a GradScaler" in program.features
    return not (scales and (mixed or program.dtype != "float32"))


def _class_fits(program: Program) -> bool:
    chosen = CLASSES[program.optimizer]
    if not program.exact and chosen.smooth is None:
        return False
    if program.optimizer == "Adafactor" and program.has("empty"):
        return False  # torch divides by its number of elements
    mixed = program.has("fp64") or program.has("bf16")
    if program.optimizer == "Adafactor" and mixed:
        return False  # torch takes the eps of the first parameter's type for all of them: onecopy refuses it
    if program.optimizer == "SGD" and program.narrow and ("fused", "True") in program.options:
        return False  # torch's kernel for bf16 reads momentum that it has not written
    cuts = ("shard_by", '"element"') in program.levels[0].arguments
    if program.matrices and (cuts or chosen.matrices or not program.exact):
        return False
    return not chosen.matrices or all(part.is_like.matrices for part in program.parts)


def _norms_exist(program: Program) -> bool:
    """torch has no largest element of an empty gradient."""
    largest = "clipping by the largest" in program.features
    return not (largest and program.has("empty"))


def _groups_are_added_once(program: Program) -> bool:
    late = program.added
    if len(set(late)) < len(late):
        return False
    if late and (program.scheduler or program.moves):
        return False  # torch's schedulers do not know new groups; a new optimizer would have to be given them again
    if late and "rolling back" in program.features:
        return False  # a load adds an option to torch's defaults, which groups that are added later then have
    # torch refuses names where a group is empty.
    return not (len(program.groups) > 1 and len(program.parts) - len(late) - len(program.of_other) < 2)


def _second_optimizer_fits(program: Program) -> bool:
    fits = not program.features & OTHER_REFUSED and not set(program.of_other) & set(program.added)
    return fits or not program.of_other


def _hooks_see_the_same(program: Program) -> bool:
    """Hooks are lost with the model of a checkpoint, and at level 3 they see the gradient of a pass only."""
    if any(isinstance(operation, LateHook) for operation in program.operations) and program.moves:
        return False
    accumulates = program.features & {"several synchronising passes", *KEEPING}
    scatters = program.has_level("scatter") and program.has("sometimes")  # a hook that runs on some ranks only
    return not (
        (scatters or program.has_level("sharded"))
        and accumulates
        and "an edit of param.grad in each pass" in program.features
    )


def _kept_state_is_current(program: Program) -> bool:
    """State that was kept is edited only while it is the state: a load replaces it."""
    kept = False
    for operation in program.operations:
        if isinstance(operation, (Reload, Move)) or operation.features & {"another state", "rolling back", "Join"}:
            kept = False
        elif isinstance(operation, EditState):
            if operation.kept and not kept:
                return False
            kept = operation.keeps or (kept and not operation.replaces)
    return True


def _buffers_are_equal(program: Program) -> bool:
    """A checkpoint has rank 0's buffers: without broadcasts the other ranks' would be lost."""
    if not program.has("batch_norm"):
        return True
    if program.moves and not program.broadcasts_buffers:
        return False
    if "rolling back" in program.features:
        return False  # only rank 0's come back
    # After a join context DDP goes on sending the last rank's buffers, and in the pass after one without gradients it
    # sends none. A new DDP sends rank 0's before its first pass.
    changes = {"Join", "evaluation", "evaluation mode"}
    return not (program.moves and any(operation.features & changes for operation in program.operations))


RULES: tuple[Callable[[Program], bool], ...] = (
    _parts_are_there,
    _unused_are_found,
    _nothing_is_refused,
    _types_go_together,
    _class_fits,
    _norms_exist,
    _groups_are_added_once,
    _second_optimizer_fits,
    _hooks_see_the_same,
    _kept_state_is_current,
    _buffers_are_equal,
)
