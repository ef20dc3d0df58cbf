"""A suite of tiny models of one architecture, as featcal opens it and as the library alone has it."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from featcal.calibration.calibrate import config_for
from featcal.calibration.config import REFINED, CalibrationConfig
from featcal.family import Family, open_family
from featcal.formats.weights import InMemory, Weights
from featcal.models.compute import Compute
from featcal.models.decoder_facts import DecoderFacts, DecoderPart
from featcal.suite import load_suite
from featcal.testing.reference import Options, Piece, Sample, every_token, inputs

TASKS = ("left", "right")
COUNT, LONGEST, SHORTEST = 5, 12, 4
"""Samples of a task; tokens of a text, padding aside."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Trial:
    """Base, merged model and two experts near each other, and padded texts of random tokens."""

    facts: DecoderFacts
    root: Path
    model_class: Any

    @cached_property
    def family(self) -> Family:
        """As anybody opens it."""
        return open_family(load_suite(self.root / "suite.yaml"), "cpu")

    @cached_property
    def exact(self) -> Family:
        """The same in float64."""
        family = self.family

        def double(model: Weights) -> InMemory:
            held = model.read(family.adapter.tower)
            return InMemory(model.label, {name: tensor.double() for name, tensor in held.items()})

        return replace(
            family,
            compute=Compute(CPU, torch.float64),
            base=double(family.base),
            merged=double(family.merged),
            experts={task: double(expert) for task, expert in family.experts.items()},
        )

    def library(self, folder: str, dtype: torch.dtype = torch.float64) -> Any:
        """A model as the library loads it, with its own plainest attention."""
        return self.model_class.from_pretrained(self.root / folder, dtype=dtype, attn_implementation="eager").eval()

    @cached_property
    def models(self) -> Mapping[str, Any]:
        """ "base" and "merged" by the library in float64."""
        return {name: self.library(name) for name in ("base", "merged")}

    @cached_property
    def experts(self) -> Mapping[str, Any]:
        return {task: self.library(f"experts/{task}") for task in TASKS}

    def padded(self, task: str, split: str = "calibration") -> dict[str, Tensor]:
        """Model inputs of all samples of a task, padded on the right."""
        drawn = load_file(self.root / "samples.safetensors")
        return {"input_ids": drawn[f"{task}.{split}.ids"], "attention_mask": drawn[f"{task}.{split}.mask"]}

    def alone(self, task: str) -> list[Sample]:
        """Every calibration sample by itself, without padding, in the order in which featcal draws them."""
        padded = self.padded(task)
        ids, mask = padded["input_ids"], padded["attention_mask"]
        order = self.family.samples(task, "calibration", None, CalibrationConfig.seed).indices
        return [{"input_ids": ids[i : i + 1, : int(mask[i].sum())]} for i in order]

    @property
    def blocks(self) -> list[str]:
        """Names of all blocks in the library's model."""
        return [block.name for block in self.family.adapter.blocks()]

    def config(self, **options: Any) -> CalibrationConfig:
        """Options with a ridge that is not tiny; all samples, in batches that do not divide them."""
        return config_for(self.family, **{"lam": 0.05, "rho": 1.5, "alpha": 0.3, "batch_size": 4, **options})

    def options(self, config: CalibrationConfig) -> Options:
        """The same for the reference."""
        stage = self.family.adapter.stages[0]
        kinds = ((torch.nn.LayerNorm,) if config.layernorms else ()) + (
            (stage.norm,) if config.rmsnorms and stage.norm else ()
        )
        axis = 1 if stage.head_axis is None else stage.head_axis - 1
        o = Options(config.lam, config.rho, config.alpha, norms=kinds, beta=config.beta)
        return replace(o, norm_offset=self.facts.norm_offset, head_axis=axis)

    def pieces(self, config: CalibrationConfig) -> list[Piece]:
        """What is fitted together, in order, with the module that is given the stream which it writes into."""
        if config.recipe != REFINED:
            return [([block], None) for block in self.blocks]
        found: list[Piece] = []
        one = self.alone(TASKS[0])[:1]
        for block in self.blocks:
            called = inputs(self.models["base"], [block], one, every_token)
            for part in self.facts.parts:
                found += _pieces_of(block, part, list(called), self.facts)
        return found


def _pieces_of(block: str, part: DecoderPart, called: list[str], facts: DecoderFacts) -> list[Piece]:
    """Of one residual part: norm, maps that share an input, norms of heads, output map, norm behind it.

    Args:
        called: modules of the block with tensors of their own, in the order of their calls.
    """
    inside = f"{block}.{part.module}."
    within = [name for name in called if name.startswith(inside)]
    pieces: list[Piece] = [([f"{block}.{part.norm}"], None)] if part.norm else []
    together: set[str] = set()
    for name in within[:-1]:
        shared = next((names for names in facts.shared if name.removeprefix(f"{block}.") in names), None)
        names = [name] if shared is None else [f"{block}.{one}" for one in shared]
        if name not in together:
            pieces.append((names, None))
        together |= {*names}
    stream = f"{block}.{part.norm}" if part.norm else within[0]
    pieces.append((within[-1:], None if part.post_norm else stream))
    return [*pieces, *([([f"{block}.{part.post_norm}"], None)] if part.post_norm else [])]


def write_trial(model: Any, facts: DecoderFacts, root: Path, dtype: torch.dtype = torch.float32) -> Trial:
    """Write a suite folder of models near each other.

    Args:
        model: gives shapes and configuration; it is left as it is.
        dtype: of the files.
    """
    base = deepcopy(model).float()
    generator = torch.Generator().manual_seed(3)
    _scatter(base, facts, generator)
    rows = base.get_submodule(f"{facts.stack}.{facts.embedding}").weight.shape[0]
    experts = {task: _near(base, generator) for task in TASKS}
    merged = deepcopy(base)
    with torch.no_grad():
        for name, parameter in merged.named_parameters():
            parameter.copy_(sum(expert.get_parameter(name) for expert in experts.values()) / len(experts))
    for folder, one in {"base": base, "merged": merged, **{f"experts/{t}": e for t, e in experts.items()}}.items():
        one.to(dtype).save_pretrained(root / folder)
    samples: dict[str, Tensor] = {}
    tasks: dict[str, Any] = {}
    for task in TASKS:
        tasks[task] = {"expert": f"experts/{task}"}
        for split in ("calibration", "test"):
            mask = torch.arange(LONGEST) < _lengths(generator)
            ids = torch.randint(3, rows, (COUNT, LONGEST), generator=generator) * mask
            samples |= {f"{task}.{split}.ids": ids, f"{task}.{split}.mask": mask.long()}
            tasks[task][split] = {
                "tensors": "samples.safetensors", "key": f"{task}.{split}.ids", "mask": f"{task}.{split}.mask"
            }  # fmt: skip
    save_file(samples, root / "samples.safetensors")
    content = {"name": f"trial-{facts.model_type}", "base": "base", "merged": "merged", "tasks": tasks}
    (root / "suite.yaml").write_text(yaml.safe_dump(content))
    return Trial(facts, root, type(model))


def _lengths(generator: torch.Generator) -> Tensor:
    lengths = torch.randint(SHORTEST, LONGEST, (COUNT, 1), generator=generator)
    lengths[0] = LONGEST
    return lengths


@torch.no_grad()
def _scatter(model: Any, facts: DecoderFacts, generator: torch.Generator) -> None:
    """Random weights of a size that makes every layer matter."""
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1:
            scale = "norm" in name.split(".")[-2] or ".ln_" in name
            parameter.copy_((1 - facts.norm_offset if scale and name.endswith("weight") else 0) + 0.2 * noise)
        else:
            parameter.copy_(noise * (1.0 if facts.embedding in name else 0.3))


@torch.no_grad()
def _near(base: Any, generator: torch.Generator, distance: float = 0.3) -> Any:
    """A model whose every tensor is moved by noise of relative size `distance`."""
    moved = deepcopy(base)
    for parameter in moved.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.add_(distance * noise * parameter.norm() / noise.norm())
    return moved
