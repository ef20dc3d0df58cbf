"""Estimate peak memory, disk and time of a calibration from shapes, without measuring it."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from featcal.calibration.block_statistics import likely_groups
from featcal.calibration.config import calibrated_blocks, calibrated_maps, select_tasks
from featcal.calibration.memory import gradient_bytes, working_bytes
from featcal.calibration.precision import product_dtype, solve_dtype
from featcal.evaluation.generation_check import JOINED, PROMPTS, ROOM, TOGETHER, TOKENS
from featcal.formats.weights import TensorInfo
from featcal.models.adapter import Adapter, Block, Stage
from featcal.models.compute import DTYPES, computing
from featcal.models.linear_maps import widths
from featcal.preflight.samples import DrawSize
from featcal.suite.calibration_options import CalibrationConfig
from featcal.system.progress import SLACK, available_bytes

LIBRARIES = int(0.75 * 2**30)
"""Resident memory of torch, transformers and featcal before a weight is read, measured on Linux."""
START = 8.0
"""Seconds from the start of the command to the first forward pass: imports, headers, tokenizer."""
CALL = 4e-3
"""Seconds of a block per batch and stream besides its arithmetic: small operations, hooks, copies."""
EFFICIENCY = 0.5
"""Share of a matrix product's speed that whole blocks reach: attention, norms and activations move memory."""
DISK_SPEED = 300e6
"""Bytes per second of weights read and written."""
GENERATION_SPEED = 5e9
"""Bytes of float32 weights per second that a token of 16 to 40 answers takes, with two threads."""
FORWARDS = 3
"""Number of passes of every batch through every block: the expert, the student for
statistics, the calibrated student.
"""
WITH_DECISIONS = 2.0
"""Factor of the time of a calibration with errors weighed by decisions: 1.5 to 2.0, measured at B/32 and on the
embedded suites (docs/theory/recipes.md)."""
SLOW = 1.25
"""Ratio of the speeds of float32 and bfloat16 products from which on "fast" counts as slow; smaller ratios are
chance."""


@dataclass(frozen=True)
class Estimates:
    """Memory, disk and time of a calibration with the suite's options on this machine's processor."""

    memory_bytes: int
    memory_available_bytes: int | None
    disk_bytes: int
    disk_free_bytes: int
    seconds: float
    """Seconds of the command, its start included."""
    start_seconds: float
    """Seconds of these before the first forward pass of a new process; a running process does not need them."""
    samples: int
    """Most samples per task."""
    generation_seconds: float
    """Most seconds beside these of the check that the model still generates (`evaluation.generation_check`), if no
    answer ends early; 0 for models that generate nothing."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def estimate(
    adapter: Adapter,
    info: Mapping[str, TensorInfo],
    drawn: Mapping[str, DrawSize],
    config: CalibrationConfig,
    models_read: int,
    out: Path,
) -> Estimates:
    """Estimate a calibration on the processor.

    Args:
        info: tensors of the merged model.
        drawn: size of the calibration draw of each task.
        models_read: checkpoints that it reads.
        out: folder on the disk that is written to.
    """
    blocks, drawn = adapter.blocks(), select_tasks(config, drawn)
    stored = sum(one.nbytes for one in info.values())
    tokens = sum(one.samples * one.tokens for one in drawn.values())
    widest = max((one.tokens for one in drawn.values()), default=0.0)
    batch = int(widest * config.batch_size)
    states = int(2 * 4 * tokens * _width(blocks))
    inputs = int(sum(one.samples * one.bytes for one in drawn.values()))
    working = max(working_bytes(stage, i, info, config, batch, len(drawn)) for stage, i in _places(adapter))
    if config.decisions:
        kept = (gradient_bytes(adapter.stages, math.ceil(one.tokens), one.samples) for one in drawn.values())
        working = max(working, *kept)
    calibrating = inputs + states + int(SLACK * working)
    # The written model is loaded back beside the one in memory; the token states are gone by then.
    verifying = inputs + 2 * stored
    generating = stored + generation_bytes(adapter, info, drawn) if adapter.generates else 0
    return Estimates(
        LIBRARIES + max(calibrating, verifying, generating),
        available_bytes(),
        stored,
        shutil.disk_usage(out).free,
        START + calibration_seconds(adapter, drawn, config) + (models_read + 1) * stored / DISK_SPEED,
        START,
        max((one.samples for one in drawn.values()), default=0),
        generation_seconds(adapter, info, drawn) if adapter.generates else 0.0,
    )


def generation_seconds(adapter: Adapter, info: Mapping[str, TensorInfo], drawn: Mapping[str, DrawSize]) -> float:
    """Estimate the seconds in which experts, merged and calibrated model answer the prompts of `drawn` with `TOKENS`
    tokens, and in which their probabilities along the experts' answers are computed."""
    weights = sum(math.prod(one.shape) for one in info.values())
    tokens = sum(min(PROMPTS, one.samples) * (one.tokens + TOKENS) for one in drawn.values())
    steps = TOKENS * (len(drawn) + 2 * math.ceil(tokens / JOINED))
    read = 3 * 2 * _passed_parameters(adapter) * tokens / (EFFICIENCY * gemm_rate(torch.float32))
    return read + steps * 4 * weights / GENERATION_SPEED


def generation_bytes(adapter: Adapter, info: Mapping[str, TensorInfo], drawn: Mapping[str, DrawSize]) -> int:
    """Estimate the memory of a whole float32 model that answers prompts, with the experts' probabilities along their
    answers and the scores of one batch, before and after the softmax and as probabilities."""
    weights = sum(math.prod(one.shape) for one in info.values())
    answer = 4 * TOKENS * max(info[name].shape[0] for name in adapter.vocabulary)
    kept = min(len(drawn) * PROMPTS * answer, ROOM + PROMPTS * answer)
    return 4 * weights + kept + 3 * TOGETHER * answer


def probe_seconds(adapter: Adapter, drawn: Mapping[str, DrawSize], samples: int) -> float:
    """Estimate the seconds of every expert's forward pass on `samples` of every task."""
    parameters = _passed_parameters(adapter)
    tokens = samples * sum(one.tokens for one in drawn.values())
    passes = len(drawn) ** 2 * len(adapter.blocks())
    return len(drawn) * 2 * parameters * tokens / (EFFICIENCY * gemm_rate(torch.float32)) + passes * CALL


@computing
def gemm_rate(dtype: torch.dtype) -> float:
    """Measure floating-point operations per second of a square matrix product here and now, the best of three."""
    side = 512
    a = torch.ones(side, side, dtype=dtype)
    times = []
    for _ in range(4):
        started = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - started)
    # The first product starts threads and fills caches; of the rest the best is the least disturbed.
    return float(2 * side**3 / min(times[1:]))


def scoring_seconds(
    adapter: Adapter, drawn: Mapping[str, DrawSize], batch_size: int, answers: Mapping[str, int]
) -> float:
    """Estimate the seconds of one model's forward passes over `drawn`, in a process with the open model.

    Args:
        answers: by task, tokens of the longest generated answer; tasks without generated answers are left out.
    """
    parameters = _passed_parameters(adapter)
    tokens = sum(one.samples * one.tokens for one in drawn.values())
    steps = sum(-(-one.samples // batch_size) * (1 + answers.get(task, 0)) for task, one in drawn.items())
    return 2 * parameters * tokens / (EFFICIENCY * gemm_rate(torch.float32)) + steps * len(adapter.blocks()) * CALL


def calibration_seconds(adapter: Adapter, drawn: Mapping[str, DrawSize], config: CalibrationConfig) -> float:
    """Estimate the seconds of a calibration with open models and without cached states of experts.

    Blocks and maps that the options leave out are only walked through; tasks that they leave out are not.
    """
    drawn, chosen = select_tasks(config, drawn), calibrated_blocks(adapter, config)
    tokens = [int(one.samples * one.tokens) for one in drawn.values()]
    batches = sum(-(-one.samples // config.batch_size) for one in drawn.values())
    features = DTYPES[config.precision]
    products = product_dtype(features, config)
    solve = solve_dtype(products)
    counts = dict.fromkeys((features, products, solve), 0.0)
    passes = 0
    for stage, index in _places(adapter):
        solved = stage.blocks[index].name in chosen
        own = FORWARDS if solved else FORWARDS - 1
        passes += own
        in_forward, in_products, in_solve = _operations(stage, index, tokens, config if solved else None)
        counts[features] += own * in_forward
        counts[products] += in_products
        counts[solve] += in_solve
    arithmetic = math.fsum(count / (EFFICIENCY * gemm_rate(dtype)) for dtype, count in counts.items())
    return (arithmetic + passes * batches * CALL) * (WITH_DECISIONS if config.decisions else 1)


def note_slow_precision(config: CalibrationConfig, device: torch.device) -> list[str]:
    """Return a note if "fast" is slower than "exact": on processors without instructions for bfloat16."""
    if config.precision != "fast" or device.type != "cpu":
        return []
    slower = gemm_rate(torch.float32) / gemm_rate(DTYPES["fast"])
    if slower < SLOW:
        return []
    return [
        f"precision fast is slow on this processor, which multiplies bfloat16 {slower:.3g} times as slowly as float32; "
        "precision exact is faster"
    ]


def _operations(
    stage: Stage, index: int, tokens: Sequence[int], config: CalibrationConfig | None
) -> tuple[float, float, float]:
    """Count operations of one forward of a block, of its moments and targets, and of its solve.

    Args:
        tokens: of each task.
        config: options that choose among its maps; None if nothing of the block is calibrated.
    """
    maps = {} if config is None else calibrated_maps(stage, stage.blocks[index], config)
    forward, products, solve = 0.0, 0.0, 0.0
    for group in likely_groups(stage, index, config is not None and config.routers):
        d, m = group.inputs, group.outputs
        own = [group.expected_tokens(n) for n in tokens]
        forward += 2 * d * m * sum(own)
        if group.names[0] not in maps:
            continue
        products += sum(n * d**2 + 2 * group.costs(n)[group.route(n)] for n in own)
        # One Cholesky factorisation per system and two triangular solves per output.
        solve += d**3 / 3 + 2 * m * d**2
    return forward, products, solve


def _passed_parameters(adapter: Adapter) -> int:
    """Count the weights of all linear maps that a token passes."""
    return sum(int(one.weight.numel() * share) for block in adapter.blocks() for one, share in block.token_shares())


def _places(adapter: Adapter) -> list[tuple[Stage, int]]:
    """Return every block, as its stage and its number there."""
    return [(stage, i) for stage in adapter.stages for i in range(len(stage.blocks))]


def _width(blocks: list[Block]) -> int:
    return max(min(widths(module)[0] for module in block.linears.values()) for block in blocks)
