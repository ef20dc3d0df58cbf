"""Estimate the memory of a calibration from shapes, and the share that a limit leaves for token states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from featcal.calibration.block_statistics import likely_groups
from featcal.calibration.precision import product_dtype, solve_dtype, sum_dtype
from featcal.formats.weights import TensorInfo, Weights
from featcal.models.adapter import Stage
from featcal.models.compute import has_own_memory
from featcal.models.whole_forward import samples_together, tape_bytes
from featcal.suite.calibration_options import CalibrationConfig
from featcal.system.errors import InputError
from featcal.system.progress import SLACK, rss_bytes

STARTED = 200 * 2**20
"""Bytes that libraries allocate once they compute: thread pools, kernels, packed operands."""


@dataclass(frozen=True)
class MemoryLimits:
    """Bytes that a calibration stays within; None sets no limit."""

    process: int | None = None
    """Limit of the process's resident memory; token states beyond it go to files."""
    device: int | None = None
    """Limit of the device's memory; token states beyond it go to the process's memory."""


def block_bytes(stages: tuple[Stage, ...], merged: Weights, config: CalibrationConfig, batch: int, tasks: int) -> int:
    """Return the bytes that the largest block takes during calibration, or the layers before the blocks if they take
    more.

    Args:
        batch: tokens of the largest batch.
    """
    places = ((stage, i) for stage in stages for i in range(len(stage.blocks)))
    blocks = (working_bytes(stage, i, merged.info, config, batch, tasks) for stage, i in places)
    return max(*blocks, *(2 * _outer_bytes(stage, merged.info) for stage in stages))


def state_budget(working: int, limit: int) -> int:
    """Return the bytes that token states may take so that the whole process stays within `limit`.

    Args:
        working: see `block_bytes`.
        limit: bytes of resident memory.

    Raises:
        InputError: the limit is below the need of one block; the message states the need.
    """
    return _leave("--max-memory", rss_bytes() + STARTED, working, limit)


def device_budget(device: torch.device, working: int, limit: int) -> int:
    """Return the bytes that token states may take on a device so that its memory stays within `limit`.

    Raises:
        InputError: the device shares the processor's memory, or the limit is below the need of one block; the message
            states the need.
    """
    if not has_own_memory(device):
        raise InputError(f"--max-device-memory: {device} has no memory of its own; use --max-memory")
    return _leave("--max-device-memory", torch.cuda.memory_allocated(device), working, limit)


def _leave(option: str, used: int, working: int, limit: int) -> int:
    needed = used + int(SLACK * working)
    if needed > limit:
        raise InputError(
            f"{option}: one block needs about {needed / 2**30:.2f} GiB with what is loaded already, the limit is "
            f"{limit / 2**30:.2f} GiB; raise it, or lower batch_size"
        )
    return limit - needed


def working_bytes(
    stage: Stage, index: int, info: Mapping[str, TensorInfo], config: CalibrationConfig, tokens: int, tasks: int
) -> int:
    """Return the bytes of one block during calibration: weights, moments, the solve, one batch's features.

    Args:
        tokens: of the largest batch.
    """
    features, block = 4, stage.blocks[index]
    products = product_dtype(torch.float32, config)
    accumulator, summed = sum_dtype(products).itemsize, solve_dtype(products).itemsize
    modules = {**block.maps, **(block.routers if config.routers else {})}
    squares = [group.inputs**2 for group in likely_groups(stage, index, config.routers)]
    rectangles = [m.weight.numel() for m in modules.values()]
    parameters = sum(m.weight.numel() for m in modules.values())
    stored = sum(info[name].dtype.itemsize for name in block.names) / len(block.names)
    weights = int(parameters * (3 * stored + 3 * features))
    weights += 2 * features * parameters if config.weigh_tokens else 0  # task vectors beside the base's
    sums = summed * (sum(squares) + parameters)
    one_task = accumulator * (sum(squares) + parameters + max(squares) + max(rectangles))
    # A prior has sums of its own beside the matrix, and of adapters what is not extrapolated; rounding takes errors and
    # rounded weights beside the solution.
    matrices, maps = (3, 6) if config.mu else (2, 5)
    maps += 2 if config.is_quantized else 0
    solve = 8 * (matrices * max(squares) + maps * max(rectangles) + parameters)
    if config.decisions:  # every task's own sums, half a matrix and its targets, and three matrices to solve with
        own = torch.promote_types(products, torch.float32).itemsize
        solve += own * (tasks * (max(squares) / 2 + max(rectangles)) + 3 * max(squares) + 4 * max(rectangles))
    in_flight = features * tokens * block.features
    # A task is folded into the sums before they are solved, so the two do not add up.
    return int(weights + sums + max(one_task + in_flight, solve))


def gradient_bytes(stages: tuple[Stage, ...], tokens: int, samples: int) -> int:
    """Return the bytes of one expert's blocks and of the features for their gradients, if errors are weighed by
    decisions.

    Args:
        tokens: of a sample.
        samples: of a task.
    """
    maps = (module for stage in stages for block in stage.blocks for module in block.maps.values())
    weights = sum(int(module.weight.numel()) for module in maps)
    return 4 * weights + min(samples, samples_together(stages, tokens)) * tape_bytes(stages, tokens)


def _outer_bytes(stage: Stage, info: Mapping[str, TensorInfo]) -> int:
    """Return the bytes of embeddings and other layers before a stage: as stored, and in the compute dtype."""
    return sum(torch.Size(info[name].shape).numel() * (info[name].dtype.itemsize + 4) for name in stage.outer)
