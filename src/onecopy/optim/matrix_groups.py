"""Which parameters of a model a matrix optimizer, such as Muon, updates, and which another one does."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import Tensor, nn

HEAD_NAMES = frozenset(
    {"lm_head", "head", "output", "output_layer", "unembed", "unembedding", "embed_out", "classifier"}
)
"""Names of modules that are taken for the output head without being told."""

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)

Choose = Callable[[str, Tensor], bool | None]


class ParameterGroups(list[dict[str, Any]]):
    """Parameter groups for an optimizer, which print as a table.

    Attributes:
        table: the table.
    """

    table: str = ""

    def __str__(self) -> str:
        return self.table


def matrix_groups(
    model: nn.Module,
    matrix: dict[str, Any],
    other: dict[str, Any] | None = None,
    *,
    head: str | None = "auto",
    convolutions: bool = False,
    choose: Collection[str] | Choose | None = None,
) -> ParameterGroups:
    """Divide a model's trainable parameters into a group for a matrix optimizer and a group for all others.

    Hidden weight matrices go to the first group. Embeddings, the output head (tied to the embedding or not), norms,
    biases and all other parameters of one dimension go to the second group. A group without parameters is left out.

    Example::

        groups = matrix_groups(
            model, matrix={"optimizer_class": torch.optim.Muon, "lr": 0.02}, other={"lr": 3e-4, "weight_decay": 0.1}
        )
        optimizer = ZeroRedundancyOptimizer(groups, torch.optim.AdamW)

    Args:
        model: the model, wrapped or not.
        matrix: the options of the first group.
        other: the options of the second group.
        head: the name of the module that is the output head, or None if there is none. By default it is the linear
            module that has as many rows as an embedding, or a usual name. If a model has neither, its last linear
            module may be a head: then this raises and names it.
        convolutions: whether weights with more than two dimensions are matrices, with all dimensions after the first
            flattened into one. The class of the first group must do that, as :class:`onecopy.optim.Muon` does.
        choose: names of further parameters of the second group, or a function of a name and a parameter that returns
            True for the first group, False for the second, and None to leave it to the rules.

    Returns:
        The groups, with named parameters. They print as a table of all parameters, with the reason for each.
    """
    owners = _owners(model)
    heads = _heads(model, owners, head)
    decide = _override(choose, {name for name, _ in model.named_parameters()})
    rows, members = [], {True: list[tuple[str, Tensor]](), False: list[tuple[str, Tensor]]()}
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        chosen = decide(name, param)
        is_matrix, reason = (chosen, "chosen") if chosen is not None else _by_rule(param, owners, heads, convolutions)
        members[is_matrix].append((name, param))
        rows.append((name, str(tuple(param.shape)), is_matrix, reason))
    groups = ParameterGroups(
        {**options, "params": members[is_matrix]}
        for is_matrix, options in ((True, matrix), (False, other or {}))
        if members[is_matrix]
    )
    groups.table = _table(rows, matrix, other or {})
    return groups


def _owners(model: nn.Module) -> dict[int, list[tuple[str, nn.Module]]]:
    """The modules that each parameter is in, by ``id()``; a tied parameter is in several."""
    owners: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        for param in module.parameters(recurse=False):
            owners.setdefault(id(param), []).append((name, module))
    return owners


def _heads(model: nn.Module, owners: dict[int, list[tuple[str, nn.Module]]], head: str | None) -> set[int]:
    """The parameters of the output head, by ``id()``."""
    modules = dict(model.named_modules())
    if head is None:
        return set()
    if head != "auto":
        found = [name for name in modules if name == head or name.endswith(f".{head}")]
        if len(found) != 1:
            raise ValueError(f"head={head!r} must name one module of the model, but it names {found or 'none'}")
        return {id(param) for param in modules[found[0]].parameters()}
    rows = {module.num_embeddings for module in modules.values() if isinstance(module, EMBEDDINGS)}
    linear = {name: module for name, module in modules.items() if isinstance(module, nn.Linear)}
    tied = {name for name, each in linear.items() if any(isinstance(m, EMBEDDINGS) for _, m in owners[id(each.weight)])}
    named = {
        name for name, each in linear.items() if name.rpartition(".")[2] in HEAD_NAMES or each.out_features in rows
    }
    if linear and not tied | named:
        last = list(linear)[-1]
        raise ValueError(
            f"{last!r} is the last linear module, and may be the output head, whose weight a matrix optimizer must not "
            f"update: pass head={last!r} if it is, or head=None if the model has no head"
        )
    return {id(param) for name in tied | named for param in linear[name].parameters()}


def _override(choose: Collection[str] | Choose | None, known: set[str]) -> Choose:
    """The function that decides before the rules do."""
    if choose is None:
        return lambda _name, _param: None
    if callable(choose):
        return choose
    names = {choose} if isinstance(choose, str) else set(choose)
    if names - known:
        raise ValueError(f"choose names {min(names - known)!r}, which is not a parameter of the model")
    return lambda name, _param: False if name in names else None


def _by_rule(
    param: Tensor, owners: dict[int, list[tuple[str, nn.Module]]], heads: set[int], convolutions: bool
) -> tuple[bool, str]:
    """Whether a parameter is a hidden matrix, and the reason."""
    if param.ndim < 2:
        return False, f"{param.ndim}-D"
    if any(isinstance(module, EMBEDDINGS) for _, module in owners[id(param)]):
        return False, "embedding"
    if id(param) in heads:
        return False, "output head"
    if param.ndim > 2:
        return convolutions, f"{param.ndim}-D" + (", flattened" if convolutions else "")
    return True, "hidden matrix"


def _table(rows: Iterable[tuple[str, str, bool, str]], matrix: dict[str, Any], other: dict[str, Any]) -> str:
    titles = {True: _class_name(matrix), False: _class_name(other)}
    cells = [("parameter", "shape", "class", "why")]
    cells += [(name, shape, titles[is_matrix], reason) for name, shape, is_matrix, reason in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(4)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
    )


def _class_name(options: dict[str, Any]) -> str:
    found = options.get("optimizer_class", "the optimizer's")
    return found if isinstance(found, str) else found.__name__
