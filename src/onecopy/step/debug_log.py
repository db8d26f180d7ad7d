"""Log messages for TORCH_DISTRIBUTED_DEBUG=INFO or DETAIL."""

from __future__ import annotations

import logging

from onecopy.common.torch_private import debug_enabled
from onecopy.step.engine import Engine

logger = logging.getLogger(__name__)


def log_layout(engine: Engine) -> None:
    """Log the shards and messages of this rank, and on rank 0 the whole layout."""
    if not debug_enabled():
        return
    layout, group_rank = engine.layout, engine.collectives.group_rank
    logger.info(
        "rank %d owns %d of %d elements in %d shards; %d messages a step",
        group_rank,
        layout.elements_per_rank[group_rank],
        sum(layout.elements_per_rank),
        len(layout.owned_by(group_rank)),
        engine.sharing.messages,
    )
    if group_rank == 0:
        logger.info("%s", layout)
