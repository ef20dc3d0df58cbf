"""A plain calibration of CLIP with the cost structure of the paper's own code, to measure featcal against anywhere.

`python benchmarks/reference.py SUITE --samples 32` does one run in this process and prints JSON. What makes its cost:
every expert is resident as a whole model; per block the student runs twice and every expert once; every linear map
has its own Gram matrix and cross moment (query, key and value three times the same) per task, kept for all tasks
until the block is solved by float32 LU; batches of 16, token states cached on the CPU as lists.
"""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import stage
import torch
from torch import Tensor, nn
from transformers import CLIPVisionConfig
from transformers.models.clip.modeling_clip import CLIPVisionModelWithProjection

from featcal.family.opening import Family
from featcal.formats.checkpoint import read_config
from featcal.formats.weights import Weights
from featcal.suite.calibration_options import CalibrationConfig

BATCH = 16
PREFIX = "vision_model."
KEYS_AND_VALUES = ("self_attn.k_proj", "self_attn.v_proj")
Tensors = Mapping[str, Tensor]


@dataclass
class LinearStatistics:
    """Weighted sums of one linear map for one task: a are the student's inputs, t the targets' (Eqs. 10 and 13)."""

    weight: Any = 0.0
    gram: Any = 0.0
    cross: Any = 0.0
    mean: Any = 0.0
    target_mean: Any = 0.0

    def add(self, student: Tensor, expert: Tensor, weights: Tensor, alpha: float) -> None:
        target = alpha * expert + (1 - alpha) * student
        weighted = student * weights[:, None]
        self.weight = self.weight + weights.sum()
        self.gram = self.gram + weighted.T @ student
        self.cross = self.cross + target.T @ weighted
        self.mean = self.mean + weights @ student
        self.target_mean = self.target_mean + weights @ target


@dataclass
class NormStatistics:
    """Weighted sums of a LayerNorm's normalised inputs for one task."""

    weight: Any = 0.0
    mean: Any = 0.0
    square: Any = 0.0

    def add(self, student: Tensor, weights: Tensor, eps: float) -> None:
        z = nn.functional.layer_norm(student, student.shape[-1:], eps=eps)
        self.weight = self.weight + weights.sum()
        self.mean = self.mean + weights @ z
        self.square = self.square + weights @ z.square()


@torch.no_grad()
def calibrate(
    family: Family, pixels: Mapping[str, Tensor], options: CalibrationConfig, device: str = "cpu"
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Calibrate every block of a vision tower.

    Args:
        pixels: `[n, 3, H, W]` for every task.

    Returns:
        All tensors of the calibrated tower by canonical name, and seconds by stage.
    """
    clock = Clock(device)
    with clock("load"):
        anchors = {"merged": _tower(family, family.merged), "base": _tower(family, family.base)}
        student = copy.deepcopy(anchors["merged"])
        models = {task: _tower(family, expert) for task, expert in family.experts.items()}
    with clock("embeddings"):
        ours = {task: _embedded(student, images, device) for task, images in pixels.items()}
        theirs = {task: _embedded(models[task], images, device) for task, images in pixels.items()}
    blocks = student.encoder.layers
    for index, block in enumerate(blocks):
        last = index == len(blocks) - 1
        block.to(device)
        statistics: dict[str, dict[str, Any]] = {}
        for task, model in models.items():
            expert = model.encoder.layers[index].to(device)
            statistics[task] = _collect(block, expert, ours[task], theirs[task], last, options, device, clock)
            expert.to("cpu")
        with clock("solve"):
            sides = {name: dict(model.encoder.layers[index].named_parameters()) for name, model in anchors.items()}
            own = {task: dict(model.encoder.layers[index].named_parameters()) for task, model in models.items()}
            block.load_state_dict(_solve(block, statistics, own, sides, options, device))
        if not last:
            with clock("student forward"):
                for stream in ours.values():
                    for position, hidden in enumerate(stream):
                        stream[position] = block(hidden.to(device), None).cpu()
        block.to("cpu")
    return {f"{PREFIX}{name}": tensor for name, tensor in student.state_dict().items()}, dict(clock.seconds)


class Clock:
    """Adds up seconds by stage."""

    def __init__(self, device: str) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._cuda = device.startswith("cuda")

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        if self._cuda:
            torch.cuda.synchronize()
        self.seconds[stage] += time.perf_counter() - started


def _tower(family: Family, weights: Weights) -> Any:
    """A whole model of its own, in memory, float32."""
    config = read_config(family.base_folder, "base")
    with torch.device("meta"):
        tower = CLIPVisionModelWithProjection(CLIPVisionConfig(**config.get("vision_config", config))).vision_model
    tower.to_empty(device="cpu")
    embeddings = tower.embeddings
    embeddings.position_ids = torch.arange(embeddings.num_positions).expand((1, -1))
    tensors = weights.read(family.adapter.tower)
    tower.load_state_dict({name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()})
    return tower.eval()


def _embedded(tower: Any, images: Tensor, device: str) -> list[Tensor]:
    """States before block 0, in batches on the CPU."""
    tower.embeddings.to(device)
    tower.pre_layrnorm.to(device)
    return [tower.pre_layrnorm(tower.embeddings(part.to(device))).cpu() for part in torch.split(images, BATCH)]


def _collect(
    block: Any,
    expert: Any,
    ours: Sequence[Tensor],
    theirs: list[Tensor],
    last: bool,
    options: CalibrationConfig,
    device: str,
    clock: Clock,
) -> dict[str, Any]:
    """One task's statistics of every module; the expert's stream moves on by one block."""
    found: dict[str, Any] = {}
    for position, (student_states, expert_states) in enumerate(zip(ours, theirs, strict=True)):
        with clock("student forward"), _inputs(block) as student:
            block(student_states.to(device), None)
        with clock("expert forward"), _inputs(expert) as target:
            theirs[position] = expert(expert_states.to(device), None).cpu()
        with clock("moments"):
            for name, module in _calibrated(block).items():
                weights = _token_weights(student[name], last and name not in KEYS_AND_VALUES, options.patch_weight)
                rows = student[name].flatten(0, 1)
                if isinstance(module, nn.LayerNorm):
                    found.setdefault(name, NormStatistics()).add(rows, weights, module.eps)
                else:
                    statistics = found.setdefault(name, LinearStatistics())
                    statistics.add(rows, target[name].flatten(0, 1), weights, options.alpha)
    return found


def _calibrated(block: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in block.named_modules() if isinstance(module, nn.Linear | nn.LayerNorm)}


def _token_weights(states: Tensor, class_token: bool, patch_weight: float) -> Tensor:
    weights = torch.ones(states.shape[:2], device=states.device)
    if class_token:
        weights[:, 1:] = patch_weight
    return weights.flatten()


@contextmanager
def _inputs(block: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Inside the `with`, a run of the block fills name → input of every calibrated module."""
    seen: dict[str, Tensor] = {}

    def remember(name: str) -> Any:
        return lambda _, args: seen.__setitem__(name, args[0])

    handles = [module.register_forward_pre_hook(remember(name)) for name, module in _calibrated(block).items()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _solve(
    block: nn.Module,
    statistics: Mapping[str, Mapping[str, Any]],
    experts: Mapping[str, Tensors],
    anchors: Mapping[str, Tensors],
    options: CalibrationConfig,
    device: str,
) -> dict[str, Tensor]:
    """New tensors of a block; every module is solved for itself."""

    def anchor(name: str) -> Tensor:
        mixed: Tensor = options.rho * anchors["merged"][name] + (1 - options.rho) * anchors["base"][name]
        return mixed.to(device)

    new: dict[str, Tensor] = {}
    for name, module in _calibrated(block).items():
        weight, bias = f"{name}.weight", f"{name}.bias"
        own = [(statistics[task][name], e[weight].to(device), e[bias].to(device)) for task, e in experts.items()]
        solve = _layernorm if isinstance(module, nn.LayerNorm) else _linear
        new[weight], new[bias] = solve(own, anchor(weight), anchor(bias), options)
    return new


def _linear(
    tasks: Sequence[tuple[LinearStatistics, Tensor, Tensor]], anchor: Tensor, shift: Tensor, options: CalibrationConfig
) -> tuple[Tensor, Tensor]:
    """Eqs. (17) and (55)."""
    left = (options.lam + options.eps) * torch.eye(anchor.shape[1], device=anchor.device)
    right, omegas = options.lam * anchor, []
    for moments, weight, _ in tasks:
        gram, cross = moments.gram / moments.weight, moments.cross / moments.weight
        omegas.append(1 / gram.norm().clamp_min(options.eps))
        left = left + omegas[-1] * gram
        right = right + omegas[-1] * weight @ cross
    solved = torch.linalg.solve(left.T, right.T).T
    bias = options.lam * shift
    for omega, (moments, weight, own) in zip(omegas, tasks, strict=True):
        target = own + weight @ (moments.target_mean / moments.weight)
        bias = bias + omega * (target - solved @ (moments.mean / moments.weight))
    return solved, bias / (sum(omegas) + options.lam)


def _layernorm(
    tasks: Sequence[tuple[NormStatistics, Tensor, Tensor]], anchor: Tensor, shift: Tensor, options: CalibrationConfig
) -> tuple[Tensor, Tensor]:
    """Eq. (59)."""
    a11, a12, a22 = options.lam, torch.zeros_like(anchor), len(tasks) + options.lam
    scale_target, shift_target = options.lam * anchor, options.lam * shift
    for moments, gamma, beta in tasks:
        mean, square = moments.mean / moments.weight, moments.square / moments.weight
        a11, a12 = a11 + square, a12 + mean
        scale_target = scale_target + square * gamma + mean * beta
        shift_target = shift_target + mean * gamma + beta
    determinant = (a11 * a22 - a12 * a12).clamp_min(options.eps)
    return (
        (a22 * scale_target - a12 * shift_target) / determinant,
        (a11 * shift_target - a12 * scale_target) / determinant,
    )


def prepare(family: Family, options: CalibrationConfig, device: str) -> stage.Work:
    """A worker's run: pictures in memory, everything else from its files."""
    pixels = {
        task: family.samples(task, "calibration", options.samples, options.seed).inputs["pixel_values"]
        for task in family.suite.tasks
    }
    return lambda: calibrate(family, pixels, options, device)


if __name__ == "__main__":
    stage.main(prepare, "The reference: one calibration in this process.")
