"""Training that can be killed at any moment: checkpoints, schedule, optimizers, a start that suits few pictures."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed
from torch import Tensor, nn

CHECKPOINT_EVERY = 120.0
"""Seconds."""
WARM_UP = 100
"""Steps in which the rate rises to its peak."""
COOLING = 0.25
"""Last share of the steps, in which the rate falls to zero; up to there a run does not depend on its length."""


def train(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], loss: Callable[[int], Tensor], count: int, file: Path
) -> None:
    """Take `count` steps on `loss(step)`, which draws its own pictures by the number of the step.

    A file that an earlier process left is gone on from; it is written anew every two minutes. Among several
    processes (torch.distributed) gradients are averaged and the first one writes.
    """
    shared = torch.distributed.is_initialized()
    first = not shared or torch.distributed.get_rank() == 0
    start = restore(model, optimizers, file)
    if first and start:
        how = "is finished and stays as it is" if start >= count else f"goes on after step {start}"
        print(f"{file.stem}: {how}, with the seed that {file} began with", flush=True)
    peaks = [[group["lr"] for group in one.param_groups] for one in optimizers]
    trained = [p for p in model.parameters() if p.requires_grad]
    saved, shown = time.monotonic(), (start, time.monotonic())
    for step in range(start, count):
        for one, rates in zip(optimizers, peaks, strict=True):
            for group, peak in zip(one.param_groups, rates, strict=True):
                group["lr"] = peak * rate(step, count)
            one.zero_grad()
        value = loss(step)
        value.backward()
        if shared:
            _average([p.grad for p in trained if p.grad is not None])
        nn.utils.clip_grad_norm_(trained, 1.0)
        for one in optimizers:
            one.step()
        if first and step % 50 == 49:
            speed = (step + 1 - shown[0]) / (time.monotonic() - shown[1])
            shown = (step + 1, time.monotonic())
            print(f"{file.stem}: step {step + 1} of {count}, loss {value.item():.3f}, {speed:.2f} steps/s", flush=True)
        if first and (time.monotonic() - saved > CHECKPOINT_EVERY or step + 1 == count):
            _save(model, optimizers, peaks, step + 1, file)
            saved = time.monotonic()


def _average(gradients: list[Tensor]) -> None:
    """The mean over all processes, in place."""
    flat = torch.cat([one.flatten() for one in gradients])
    torch.distributed.all_reduce(flat)
    flat /= torch.distributed.get_world_size()
    for one, part in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
        one.copy_(part.view_as(one))


def rate(step: int, count: int) -> float:
    """Share of the peak rate: up, level, and down to zero."""
    return min((step + 1) / WARM_UP, 1.0, (count - step) / (COOLING * count))


def _save(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], peaks: list[list[float]], step: int, file: Path
) -> None:
    for one, rates in zip(optimizers, peaks, strict=True):
        for group, peak in zip(one.param_groups, rates, strict=True):
            group["lr"] = peak
    part = file.with_suffix(".part")
    torch.save({"step": step, "model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}, part)
    os.replace(part, file)


def restore(model: nn.Module, optimizers: list[torch.optim.Optimizer], file: Path) -> int:
    """Load a checkpoint, if there is one; the number of steps taken so far."""
    if not file.exists():
        return 0
    content = torch.load(file, weights_only=True)
    model.load_state_dict(content["model"])
    for one, state in zip(optimizers, content["optimizers"], strict=False):
        one.load_state_dict(state)
    return int(content["step"])


def optimizers(
    blocks: Iterable[nn.Parameter], others: Iterable[nn.Parameter], muon: float, adam: float, decay: float
) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for everything else; weight decay on matrices only."""
    inside, outside = list(blocks), list(others)
    matrices = [p for p in inside if p.ndim == 2]
    rest = [p for p in inside if p.ndim != 2] + outside
    groups = [
        {"params": [p for p in rest if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in rest if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return [
        torch.optim.Muon(matrices, lr=muon, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([g for g in groups if g["params"]], lr=adam, betas=(0.9, 0.98)),
    ]


@torch.no_grad()
def mimetic(vision: nn.Module, heads: int, generator: torch.Generator) -> None:
    """Attention that starts near "look at tokens like me, and take away their mean" (Trockman and Kolter 2023).

    Query and key products begin at 0.7 (I + Z), value and output products at 0.4 (Z - I), Z noise; places are
    two-dimensional sinusoids; patch vectors begin with the variance of the places.
    """
    width = vision.embeddings.position_embedding.weight.shape[1]
    part = width // heads
    for block in vision.encoder.layers:
        attention = block.self_attn
        for head in range(heads):
            rows = slice(head * part, (head + 1) * part)
            noise = torch.randn(width, width, generator=generator) / math.sqrt(width)
            u, s, vh = torch.linalg.svd(0.7 * (torch.eye(width) + noise))
            attention.q_proj.weight[rows] = s[:part, None].sqrt() * u[:, :part].T
            attention.k_proj.weight[rows] = s[:part, None].sqrt() * vh[:part]
        noise = torch.randn(width, width, generator=generator) / math.sqrt(width)
        u, s, vh = torch.linalg.svd(0.4 * (noise - torch.eye(width)))
        attention.v_proj.weight.copy_(s[:, None].sqrt() * vh)
        attention.out_proj.weight.copy_(u * s.sqrt())
    embeddings = vision.embeddings
    patch = embeddings.patch_embedding.weight
    patch.copy_(torch.randn(patch.shape, generator=generator) / math.sqrt(patch[0].numel()))
    side = math.isqrt(embeddings.position_embedding.weight.shape[0] - 1)
    embeddings.position_embedding.weight[1:] = _places(side, width)


def _places(side: int, width: int) -> Tensor:
    """Sinusoids of row and column [side * side, width]."""
    quarter = width // 4
    waves = torch.arange(side)[:, None] * (1 / 100 ** (torch.arange(quarter) / quarter))
    line = torch.cat([waves.sin(), waves.cos()], 1)
    return torch.cat([line.repeat_interleave(side, 0), line.repeat(side, 1)], 1)
