"""Values that must be equal on all ranks: layouts and options, in a construction and in the vote of every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from onecopy.comm.agreement import Fact, Vote, check_vote, start_vote, vote_at_once, vote_row
from onecopy.comm.collectives import Collectives
from onecopy.comm.status_flags import DeferredFlags
from onecopy.common.digests import flag_digest
from onecopy.layout import Layout, ShardBy
from onecopy.step.checks import GradientProbe
from onecopy.step.nonfinite import NonfiniteGuard
from onecopy.step.parameter_groups import Group, first_places, names_of, options_of, shown_group
from onecopy.step.several_classes import KEY as CLASS_KEY

CALL = "step()"
"""The name of the call in which the ranks vote on a step, except inside a backward pass."""

COMPARED = ("layouts", "parameters with a gradient", "options in param_groups")
"""What the digests of a step are of, in their order."""


@dataclass(frozen=True, slots=True)
class StepFacts:
    """The values that must be equal on all ranks in a step."""

    layout: Layout
    layout_digest: int
    has_gradient: Sequence[bool]
    groups: Sequence[Group]

    def digests(self) -> list[int]:
        """A digest of the layout, of the parameters that have a gradient, and of the groups' options."""
        options = repr([sorted(options_text(group).items()) for group in self.groups]).encode(errors="backslashreplace")
        return [self.layout_digest, flag_digest([bytes(self.has_gradient)]), flag_digest([options])]

    def as_text(self) -> list[Fact]:
        """The same as text, for the error."""
        return [
            *(
                Fact(f"parameter {spec.name!r}", f"{'a' if has else 'no'} gradient, {spec.describe()}")
                for spec, has in zip(self.layout.params, self.has_gradient, strict=True)
            ),
            *group_facts(self.groups),
            Fact("ownership", str(self.layout_digest)),
        ]


class StepStatus:
    """The vote of a step, read at once on the CPU.

    On an accelerator it is read one step later, so that the host does not wait. A rank that failed raises at once,
    after it has taken part in the step's collectives; the other ranks raise in their next step, before they send.

    Attributes:
        queue: votes that are read later, in the order of their exchange.
        replicas: with a mesh, the ranks that have the same shards in other replicas.
        is_deferred: whether votes are read later unless a call says at once.
    """

    def __init__(
        self, collectives: Collectives, queue: DeferredFlags | None = None, replicas: Collectives | None = None
    ) -> None:
        self.is_deferred = collectives.defers_host_reads
        self._collectives, self.replicas = collectives, replicas
        self.queue = DeferredFlags() if queue is None else queue
        self._last = 0  # the number in the queue of the vote of the last step

    def check_previous(self) -> None:
        """Wait for all votes that have not been read, and raise if they tell of a failure."""
        self.queue.check_all()

    def check_last_step(self) -> None:
        """Wait for the vote of the last step, and check it and all that have arrived."""
        self.queue.check_through(self._last)
        self.queue.check_arrived()

    def exchange(
        self,
        facts: StepFacts | None,
        failure: Exception | None,
        call: str = CALL,
        probe: GradientProbe | None = None,
        guard: NonfiniteGuard | None = None,
        at_once: bool | None = None,
    ) -> None:
        """Vote, and raise on every rank if a rank failed or if the ranks differ.

        ``facts`` is None if they were compared before in this step. By default ``is_deferred`` says when it is read.
        """
        collectives = self._collectives
        at_once = not self.is_deferred if at_once is None else at_once
        if at_once:
            self.queue.check_all()  # a rank that has failed takes part in no vote
        else:
            self.queue.check_through(self._last)
        found = guard.take_flag() if guard is not None else None
        probed = probe.take() if probe is not None else None
        digests = [] if facts is None else facts.digests()
        row = vote_row(
            collectives,
            call,
            failure is not None,
            digests,
            at_once=at_once,
            number=0 if found is None else found,
            probes=probed,
        )

        def check(values: Tensor) -> None:
            vote = Vote(values.tolist())
            check_vote(vote, collectives, call, failure, COMPARED, None if facts is None else facts.as_text)
            if guard is not None:
                guard.found(vote.number)
            if probe is not None:
                probe.compare(vote.probes)

        if at_once:
            vote_at_once(collectives, row, call, self.replicas)
            check(row)
        else:
            self._last = self.queue.put(row, start_vote(collectives, row, call, self.replicas), check)


def layout_facts(layout: Layout, shard_by: ShardBy | None, classes: Sequence[Fact] = ()) -> list[Fact]:
    """The parameters of a layout, the classes of their groups, and the owners of their shards."""
    policy = f"function {getattr(shard_by, '__qualname__', '')}" if callable(shard_by) else str(shard_by)
    owners: dict[int, list[str]] = {}
    for shard in layout.shards:
        owners.setdefault(shard.param, []).append(f"[{shard.start}:{shard.stop}) on rank {shard.owner}")
    return [
        Fact("number of ranks", str(layout.world_size)),
        *(Fact(f"parameter {spec.index} ({spec.name!r})", spec.describe()) for spec in layout.params),
        *classes,
        Fact("shard_by", policy),
        *(Fact(f"owners of {spec.name!r}", ", ".join(owners[spec.index])) for spec in layout.params),
    ]


def optimizer_facts(
    optimizer_class: type, layout: Layout, shard_by: ShardBy | None, groups: Sequence[Group], **options: object
) -> list[Fact]:
    """The arguments that must be equal on all ranks that construct an optimizer."""
    return [
        Fact("optimizer class", f"{optimizer_class.__module__}.{optimizer_class.__qualname__}"),
        *(Fact(name, str(value)) for name, value in options.items()),
        *sharding_facts(layout, shard_by, groups, groups),
    ]


def sharding_facts(
    layout: Layout, shard_by: ShardBy | None, groups: Sequence[Group], inner_groups: Sequence[Group]
) -> list[Fact]:
    """The layout, the positions of repeated parameters in each group, and the options of the inner optimizer."""
    classes = [
        Fact(f"{CLASS_KEY} of {shown_group(position, names_of(group, position))}", inner[CLASS_KEY])
        for position, (group, inner) in enumerate(zip(groups, inner_groups, strict=True))
        if CLASS_KEY in inner
    ]
    facts = layout_facts(layout, shard_by, classes)
    for position, group in enumerate(groups):
        again = sorted(set(range(len(group["params"]))) - set(first_places(group["params"])))
        facts += [Fact(f"repeated parameters of group {position}", str(again))] if again else []
    return [*facts, *group_facts(inner_groups)]


def group_facts(groups: Sequence[Group]) -> list[Fact]:
    """The options of every group."""
    return [
        Fact(f"parameter group {position}", f"{key}={text}")
        for position, group in enumerate(groups)
        for key, text in sorted(options_text(group).items())
    ]


def options_text(group: Group) -> dict[str, str]:
    """A group's options as text. Equal options have equal text on all machines."""
    return {str(key): _option_text(value) for key, value in options_of(group).items()}


def _option_text(value: object) -> str:
    if isinstance(value, Tensor):
        # Reading it from an accelerator (capturable) would make the host wait in every step.
        content = value.tolist() if value.device.type == "cpu" else value.device.type
        return f"tensor({content}, {value.dtype})"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__}({', '.join(map(_option_text, value))})"
    if isinstance(value, dict):
        return f"dict({', '.join(f'{key}={_option_text(item)}' for key, item in value.items())})"
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)
    return f"a {type(value).__qualname__}"  # its repr may hold an address, which differs between ranks
