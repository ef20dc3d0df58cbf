"""Suites as featcal opens them and as transformers alone has them, in float64 and without padding; what must agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from reference_drift import State, drift, run
from reference_source import excesses
from safetensors.torch import load_file
from tiny_text import ROWS, TASKS, write_text_expert, write_text_suite
from torch import Tensor
from transformers import CLIPConfig, CLIPVisionModelWithProjection, LlamaForCausalLM, T5ForConditionalGeneration

from conftest import BLOCKS, in_float64
from featcal import CalibrationConfig, Family, calibrate, load_suite, measure_drift, open_family
from featcal.calibration.calibrate import expert_passes
from featcal.drift.source import measure_sources
from featcal.models.lane import Kept
from featcal.testing.reference import Options, Sample

COUNT = 10
"""Samples per task."""
T5_BLOCKS = [f"{stack}.block.{i}" for stack in ("encoder", "decoder") for i in range(2)]
CLIP_BLOCKS = [f"vision_model.encoder.layers.{i}" for i in range(BLOCKS)]
LLAMA_BLOCKS = [f"model.layers.{i}" for i in range(3)]


@dataclass(frozen=True)
class Reference:
    """The same suite twice: opened by featcal, and as the library's own models."""

    float32: Family
    """As anybody opens it."""
    exact: Family
    """The same in float64."""
    models: Mapping[str, Any]
    """"base" and "merged"."""
    experts: Mapping[str, Any]
    samples: Mapping[str, Mapping[str, list[Sample]]]
    """By split and task: every sample alone, without padding, in the order of its file."""


def padded_samples(kind: str, seed: int) -> dict[str, Tensor]:
    """Sentences of 3 to 9 tokens, padded to the longest, with answers of 1 to 5 tokens."""
    generator = torch.Generator().manual_seed(100 + seed)
    lengths = torch.randint(3, 10, (COUNT, 1), generator=generator)
    answers = torch.randint(1, 6, (COUNT, 1), generator=generator)
    ids = torch.randint(3, ROWS, (COUNT, 14), generator=generator)
    position = torch.arange(14)
    if kind.startswith("t5"):
        mask = (position[:9] < lengths).long()
        return {"ids": ids[:, :9] * mask, "mask": mask, "labels": ids[:, 9:].where(position[:5] < answers, -100)}
    mask = (position < lengths + answers).long()
    return {"ids": ids * mask, "mask": mask, "labels": ids.where((position >= lengths) & (mask == 1), -100)}


def alone(drawn: Mapping[str, Tensor], prefix: str, decoder_only: bool) -> list[Sample]:
    """Every row of a file's tensors as a sample of its own, its padding cut off."""
    found = []
    for ids, mask, labels in zip(*(drawn[f"{prefix}.{name}"] for name in ("ids", "mask", "labels")), strict=True):
        length = int(mask.sum())
        targets = labels[:length] if decoder_only else labels[labels != -100]
        found.append({"input_ids": ids[None, :length], "labels": targets[None]})
    return found


def text_reference(root: Path, kind: str, loader: Any) -> Reference:
    """A suite whose merged model is a checkpoint near the base like the experts, not a mean of anything."""
    file = write_text_suite(root, kind, samples_of=padded_samples)
    write_text_expert(root / "merged", load_file(root / "base" / "model.safetensors"), kind, seed=9)
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "merged": "merged"}))
    drawn = load_file(root / "samples.safetensors")

    def load(folder: str) -> Any:
        return loader.from_pretrained(root / folder, dtype=torch.float64).eval()

    family = open_family(load_suite(file), "cpu")
    return Reference(
        family,
        in_float64(family),
        {name: load(name) for name in ("base", "merged")},
        {task: load(f"experts/{task}") for task in TASKS},
        {
            split: {task: alone(drawn, f"{task}.{split}", kind.startswith("llama")) for task in TASKS}
            for split in ("calibration", "test")
        },
    )


def clip_reference(root: Path, family: Family) -> Reference:
    """The tiny suite once more, as transformers has it.

    Args:
        family: the suite, in float64.
    """
    config = CLIPConfig.from_pretrained(root / "base")
    config.vision_config.projection_dim = config.projection_dim
    base = load_file(root / "base" / "model.safetensors")

    def load(folder: str) -> Any:
        model = CLIPVisionModelWithProjection(config.vision_config).double().eval()
        stored = {**base, **load_file(root / folder / "model.safetensors")}
        model.load_state_dict({name: stored[name] for name in model.state_dict()})
        return model

    drawn = load_file(root / "samples.safetensors")
    tasks = tuple(family.suite.tasks)
    pictures = {task: drawn[f"{task}.calibration"].double().split(1) for task in tasks}
    samples: dict[str, list[Sample]] = {task: [{"pixel_values": one} for one in own] for task, own in pictures.items()}
    experts = {task: load(f"experts/{task}") for task in tasks}
    return Reference(family, family, {"base": load("base")}, experts, {"calibration": samples})


def reference_of(kind: str, root: Path, tiny: Path, family: Family) -> tuple[Reference, Sequence[str]]:
    """A suite of an architecture with the names of its blocks: the tiny one ("clip"), or one written to `root`.

    Args:
        tiny: folder of the tiny suite.
        family: it, in float64.
    """
    if kind == "clip":
        return clip_reference(tiny, family), CLIP_BLOCKS
    causal = kind.startswith("llama")
    loader = LlamaForCausalLM if causal else T5ForConditionalGeneration
    return text_reference(root, kind, loader), LLAMA_BLOCKS if causal else T5_BLOCKS


def linears_of(model: Any, block: str) -> dict[str, torch.nn.Linear]:
    """Linear maps of a block of the library's model by their names in it."""
    found = model.get_submodule(block).named_modules()
    return {f"{block}.{name}": one for name, one in found if isinstance(one, torch.nn.Linear)}


@torch.no_grad()
def inputs_of(model: Any, samples: Sequence[Sample], names: Sequence[str]) -> dict[str, Tensor]:
    """What modules are given, `[tokens, width]`, by their names."""
    seen: dict[str, list[Tensor]] = {name: [] for name in names}
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(lambda _, args, name=name: seen[name].append(args[0][0]))
        for name in names
    ]
    for sample in samples:
        model(**sample)
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(given) for name, given in seen.items()}


def calibration_samples(reference: Reference, config: CalibrationConfig) -> dict[str, list[Sample]]:
    """Those that a run draws."""
    drawn = {
        t: reference.exact.samples(t, "calibration", config.samples, config.seed).indices for t in reference.experts
    }
    return {task: [reference.samples["calibration"][task][i] for i in indices] for task, indices in drawn.items()}


def assert_calibrated_alike(reference: Reference, config: CalibrationConfig, theirs: Mapping[str, Tensor]) -> None:
    """Every tensor of the model is the reference's or, if that left it alone, the merged model's own.

    RMSNorms of the library round to float32 inside, whatever they are given; where they are calibrated that shows.
    The message lists the tensors that are too far apart, the furthest first.
    """
    tower = reference.exact.adapter.tower
    expected = {**reference.exact.merged.read(tower), **theirs}
    assert theirs.keys() < set(tower)
    for family, tolerance in ((reference.exact, 1e-5 if config.rmsnorms else 1e-9), (reference.float32, 1e-4)):
        ours = calibrate(family, config).weights.read(tower)
        apart = {name: float((ours[name] - right).norm() / right.norm()) for name, right in expected.items()}
        wrong = sorted(((gap, name) for name, gap in apart.items() if not gap <= tolerance), reverse=True)
        message = ", ".join(f"{name} {gap:.1e}" for gap, name in wrong)
        assert not wrong, f"{family.compute.dtype}, {len(wrong)} tensors: {message}"


def assert_drift_alike(reference: Reference, states: Mapping[str, State], last: Callable[[Sample], int]) -> None:
    """Every number of every layer, task and sample of the ledger is that of the reference.

    Args:
        last: position of a sample's final feature.
    """
    ledger = measure_drift(reference.exact, split="test", samples=6, attribution=True)
    for task, samples in reference.samples["test"].items():
        ours, model, expert = ledger.tasks[task], reference.models["merged"], reference.experts[task]
        assert [layer.layer for layer in ours.layers] == list(states)
        assert ours.attribution is not None
        for index, sample in enumerate(samples[position] for position in ours.indices):
            theirs = drift(model, expert, sample, states, last(sample))
            for layer, telescoped in zip(ours.layers, ours.attribution.telescoped, strict=True):
                own = {name: getattr(layer, name) for name in theirs[layer.layer] if name != "telescoped"}
                numbers = {name: float(value[index]) for name, value in own.items()}
                numbers["telescoped"] = float(telescoped[index])
                assert numbers == pytest.approx(theirs[layer.layer], rel=1e-6, abs=1e-7), (task, index, layer.layer)


@torch.no_grad()
def assert_relative_drift_alike(reference: Reference, states: Mapping[str, State]) -> None:
    """What a calibration records is ||h_cal - h_exp|| / ||h_exp|| over all samples and tokens after a block.

    Args:
        states: by the block that they are the state after; others are not looked at.
    """
    result = calibrate(reference.exact)
    student = deepcopy(reference.models["merged"])
    for name, tensor in result.weights.read(reference.exact.adapter.tower).items():
        student.get_parameter(name).copy_(tensor)
    for task, samples in reference.samples["calibration"].items():
        pairs = [[run(model, sample, states) for model in (student, reference.experts[task])] for sample in samples]
        for block in states:
            calibrated, expert = (torch.cat([pair[i][block][0].flatten() for pair in pairs]) for i in (0, 1))
            expected = float((calibrated - expert).norm() / expert.norm())
            assert result.record["relative_drift"][block][task] == pytest.approx(expected, rel=1e-7), (block, task)


def assert_excesses_alike(reference: Reference, blocks: Sequence[str]) -> None:
    """Every number of Prop. 8 for every group of linear maps and every feature source."""
    config = CalibrationConfig(lam=0.05, rho=0.5, alpha=0.3, batch_size=4)
    passes = expert_passes(reference.exact, config, Kept(2**26))
    model = calibrate(reference.exact, config, experts=passes).weights
    ours = measure_sources(reference.exact, model, config, passes)
    groups = {f"{one.block}: {one.modules}": tuple(f"{one.block}.{n}" for n in one.modules.split(", ")) for one in ours}
    theirs = excesses(
        reference.models,
        reference.experts,
        reference.samples["calibration"],
        blocks,
        model.read(reference.exact.adapter.tower),
        list(groups.items()),
        Options(config.lam, config.rho, config.alpha),
    )
    assert len(ours) == len(theirs) == 5 * len(groups)
    for one in ours:
        expected = theirs[f"{one.block}: {one.modules}", one.source]
        numbers = {name: getattr(one, name) for name in expected}
        assert numbers == pytest.approx(expected, rel=1e-6, abs=1e-9), (one.block, one.modules, one.source)
