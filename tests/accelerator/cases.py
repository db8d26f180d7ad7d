"""The table of training programs that must give the same on the simulated accelerator as on the CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from onecopy import MixedPrecision
from tests.accelerator import programs
from tests.accelerator.training import (
    MUON,
    Blocks,
    Case,
    OneAfterAnother,
    Partial,
    TwoStreams,
    adamw,
    after_backward,
    half_frozen,
    interleaved,
    level_1,
    level_2,
    level_3,
    loop,
    sent_as_fp16,
)

HALF = torch.bfloat16
CLIPPING = 2e-6
"""The norm is added up in another order than on the CPU."""

OVERLAP = {"overlap_forward": True}
UNUSED = {"find_unused_parameters": True}
VIEWS = {"gradient_as_bucket_view": True}
STATIC = {"static_graph": True}
MASTERS: dict[str, Any] = {"master_weights": True}
BOTH: dict[str, Any] = {**MASTERS, "offload": "cpu"}
FP16 = MixedPrecision(reduce_dtype=torch.float16)
FP64 = MixedPrecision(reduce_dtype=torch.float64)
FP16_SUMS = 1e-3
"""The backend adds up in fp16; between pairs of ranks the sum is in fp32."""

BF16 = MixedPrecision(param_dtype=HALF)
BF16_OVERLAP = {"mixed_precision": BF16, **OVERLAP}
BF16_FP32 = MixedPrecision(param_dtype=HALF, reduce_dtype=torch.float32)
HALF_ROUNDING = 2e-2
GUARDED: dict[str, Any] = {"nonfinite": "skip", "check_replicas_every": 2}
ONE_AT_A_TIME = 800
"""A size of buckets with which one layer is in each, or two small ones."""

SPOILED, UNFROZEN = loop(programs.spoiled), programs.unfrozen_on_another_stream
LEFT_AND_RIGHT = 2000
"""A size of buckets with which both layers of :class:`TwoStreams` are in one, and the first layer is in another."""

CASES = [
    # Level 1
    Case("level 1", level_1),
    Case("level 1 by parameter", level_1, parts=adamw(shard_by="parameter")),
    Case("level 1 bucket views", level_1, parts=adamw(parameters_as_bucket_view=True)),
    Case("level 1 Muon", level_1, parts=MUON),
    Case("level 1 no_sync", level_1, loop(programs.accumulated)),
    Case("level 1 several passes", level_1, loop(programs.synchronised_each_time)),
    Case("level 1 clipped", level_1, loop(programs.clipped), tolerance=CLIPPING),
    Case("level 1 scaled", level_1, loop(programs.scaled, 6), tolerance=CLIPPING),
    Case("level 1 master weights", level_1, parts=adamw(**MASTERS), dtype=HALF),
    Case("level 1 offloaded master weights", level_1, parts=adamw(**BOTH), dtype=HALF),
    Case("level 1 written", level_1, loop(programs.written("copied")), parts=adamw(**MASTERS), dtype=HALF),
    Case("level 1 refreshed", level_1, loop(programs.written("refreshed")), parts=adamw(**BOTH), dtype=HALF),
    Case("level 1 replaced", level_1, loop(programs.written("replaced")), parts=adamw(offload="cpu")),
    Case("level 1 offload", level_1, parts=adamw(offload="cpu")),
    Case("level 1 Join", level_1, programs.uneven),
    Case("level 1 frozen and unused", level_1, model=Partial, wrap=UNUSED),
    Case("level 1 two streams", level_1, model=TwoStreams, bucket=LEFT_AND_RIGHT),
    Case("level 1 consolidated", level_1, programs.consolidated),
    Case("level 1 saved", level_1, programs.saving(blocking=True)),
    Case("level 1 saved in background", level_1, programs.saving(blocking=False)),
    Case("level 1 guarded", level_1, SPOILED, parts=adamw(**GUARDED)),
    # The overlap hooks
    Case("after backward", after_backward),
    Case("interleaved", interleaved),
    Case("after backward master weights", after_backward, parts=adamw(**MASTERS), dtype=HALF),
    Case("interleaved static graph", interleaved, wrap=STATIC),
    Case("after backward views", after_backward, wrap=VIEWS),
    Case("interleaved no_sync", interleaved, loop(programs.accumulated)),
    Case("interleaved frozen and unused", interleaved, model=Partial, wrap=UNUSED),
    Case("after backward offload", after_backward, parts=adamw(offload="cpu")),
    Case("interleaved two streams", interleaved, model=TwoStreams, bucket=LEFT_AND_RIGHT),
    Case("interleaved side stream", interleaved, programs.on_a_side_stream),
    # Level 2
    Case("level 2", level_2),
    Case("level 2 views", level_2, wrap=VIEWS),
    Case("level 2 static graph", level_2, wrap=STATIC),
    Case("level 2 zeroed in place", level_2, loop(programs.zeroed_in_place)),
    Case("level 2 never zeroed", level_2, loop(programs.never_zeroed), tolerance=CLIPPING),
    Case("level 2 never zeroed views", level_2, loop(programs.never_zeroed), wrap=VIEWS, tolerance=CLIPPING),
    Case("level 2 averaging backend", level_2, tolerance=CLIPPING, averages=True),
    Case("level 2 sent as fp16", sent_as_fp16, tolerance=HALF_ROUNDING),
    Case("level 2 Muon", level_2, parts=MUON),
    Case("level 2 several passes", level_2, loop(programs.synchronised_each_time), tolerance=CLIPPING),
    Case("level 2 no_sync", level_2, loop(programs.accumulated)),
    Case("level 2 clipped", level_2, loop(programs.clipped), tolerance=CLIPPING),
    Case("level 2 scaled", level_2, loop(programs.scaled, 6), tolerance=CLIPPING),
    Case("level 2 master weights", level_2, parts=adamw(**MASTERS), dtype=HALF),
    Case("level 2 Join", level_2, programs.uneven),
    Case("level 2 frozen and unused", level_2, model=Partial, wrap=UNUSED),
    Case("level 2 two streams", level_2, model=TwoStreams, bucket=LEFT_AND_RIGHT),
    Case("level 2 side stream", level_2, programs.on_a_side_stream),
    Case("level 2 saved", level_2, programs.saving(blocking=True)),
    # Level 3
    Case("level 3", level_3),
    Case("level 3 overlap", level_3, wrap=OVERLAP),
    Case("level 3 Muon overlap", level_3, parts=MUON, wrap=OVERLAP),
    Case("level 3 no_sync", level_3, loop(programs.accumulated), wrap=OVERLAP),
    Case("level 3 several passes", level_3, loop(programs.synchronised_each_time), tolerance=CLIPPING),
    Case("level 3 mixed passes", level_3, loop(programs.mixed_accumulation), wrap=OVERLAP, tolerance=CLIPPING),
    Case("level 3 clipped", level_3, loop(programs.clipped), tolerance=CLIPPING),
    Case("level 3 scaled", level_3, loop(programs.scaled, 6), wrap=OVERLAP, tolerance=CLIPPING),
    Case("level 3 bf16", level_3, wrap={"mixed_precision": BF16}),
    Case("level 3 bf16 reduced in fp32 overlap", level_3, wrap={"mixed_precision": BF16_FP32, **OVERLAP}),
    Case("level 3 bf16 averaging", level_3, wrap=BF16_OVERLAP, tolerance=HALF_ROUNDING, averages=True),
    Case("level 3 averaging", level_3, loop(programs.clipped), tolerance=CLIPPING, averages=True),
    Case("level 3 sent as fp16", level_3, wrap={"mixed_precision": FP16}, tolerance=FP16_SUMS),
    Case("level 3 sent as fp64", level_3, wrap={"mixed_precision": FP64}, tolerance=CLIPPING),
    Case("level 3 offload overlap", level_3, parts=adamw(offload="cpu"), wrap=OVERLAP),
    Case("level 3 mesh 2x2 overlap", level_3, wrap={"mesh": (2, 2), **OVERLAP}, worlds=(4,)),
    Case("level 3 mesh 1x2", level_3, wrap={"mesh": (1, 2)}, worlds=(2,)),
    Case("level 3 mesh 2x1", level_3, wrap={"mesh": (2, 1)}, worlds=(2,)),
    Case("level 3 buffers", level_3, model=partial(Blocks, norm=nn.BatchNorm1d)),
    Case("level 3 frozen and unused overlap", level_3, model=Partial, wrap=OVERLAP),
    Case("level 3 two streams", level_3, model=TwoStreams, bucket=LEFT_AND_RIGHT, wrap=OVERLAP),
    Case("level 3 unfrozen two streams", level_3, UNFROZEN, model=half_frozen(TwoStreams), bucket=ONE_AT_A_TIME),
    Case("level 3 unfrozen", level_3, UNFROZEN, model=half_frozen(OneAfterAnother), bucket=ONE_AT_A_TIME),
    Case("level 3 side stream", level_3, programs.on_a_side_stream, wrap=OVERLAP),
    Case("level 3 evaluation", level_3, loop(programs.with_evaluation), wrap=OVERLAP),
    Case("level 3 consolidated", level_3, programs.consolidated, wrap=OVERLAP),
    Case("level 3 saved", level_3, programs.saving(blocking=True)),
    Case("level 3 saved in background", level_3, programs.saving(blocking=False), wrap=OVERLAP),
    Case("level 3 guarded", level_3, SPOILED, parts=adamw(**GUARDED), wrap=OVERLAP),
    Case("level 3 guarded mesh", level_3, SPOILED, parts=adamw(**GUARDED), wrap={"mesh": (2, 1)}, worlds=(2,)),
]
BY_NAME = {case.name: case for case in CASES}
