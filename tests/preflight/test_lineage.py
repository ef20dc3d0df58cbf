"""Experts that come from the base and such that do not: by weights, names of tensors, and what their config says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from fake_hub import FakeHub
from lanes import cases_by_message
from safetensors.torch import load_file, save_file
from suite_edits import Edit
from tiny_text import CONFIGS, write_text_base, write_text_expert

from featcal.family.ancestry import UNRELATED, measure_lineage
from featcal.family.differences import list_differences
from featcal.family.opening import Family, open_family
from featcal.formats.weights import InMemory
from featcal.preflight.check import check_suite
from featcal.suite.schema import load_suite


def test_distance_is_that_of_the_noise(tiny_suite_file: Path) -> None:
    """The experts were made by noise of relative size 0.3: cosine 1 / sqrt(1.09)."""
    family = open_family(load_suite(tiny_suite_file), device="cpu")
    found, damaged = measure_lineage(family, dict(family.experts))
    assert damaged == {}
    for one in found.models.values():
        assert one.distance[1:] == pytest.approx([0.3] * 3, rel=1e-3)
        assert one.cosine[1:] == pytest.approx([1.09**-0.5] * 3, abs=0.02)


@pytest.mark.parametrize("suite", ["clip-mini", "t5-mini", "lm-mini"])
def test_the_threshold_lies_between_descendants_and_strangers(suite: str) -> None:
    family = open_family(load_suite(suite), device="cpu")
    generator = torch.Generator().manual_seed(0)
    tensors = family.base.read(family.adapter.tower)
    stranger = InMemory("stranger", {n: torch.randn(t.shape, generator=generator) for n, t in tensors.items()})
    found, _ = measure_lineage(family, {**family.experts, "stranger": stranger})
    cosines = {name: one.cosine for name, one in found.models.items()}
    assert max(map(abs, cosines.pop("stranger"))) < 0.1 * UNRELATED
    assert min(min(one) for one in cosines.values()) > 0.9 > UNRELATED


def test_copies_and_outliers_are_noted(own_suite_file: Path, edit_suite: Edit) -> None:
    root = own_suite_file.parent

    def change(content: dict[str, Any]) -> None:
        for name in ("near", "far", "twin", "still"):
            content["tasks"][name] = {**content["tasks"]["pets"], "expert": f"experts/{name}"}

    edit_suite(change)
    shutil.copytree(root / "experts" / "pets", root / "experts" / "twin")
    base = load_file(root / "base" / "model.safetensors")
    config = root / "experts" / "pets" / "config.json"
    for name, factor in {"near": 1.01, "far": 2.9, "still": 1.0}.items():
        (root / "experts" / name).mkdir()
        tower = {n: factor * t for n, t in base.items() if n.startswith("vision_model.") and t.is_floating_point()}
        save_file(tower, root / "experts" / name / "model.safetensors")
        shutil.copy(config, root / "experts" / name)
    found = check_suite(load_suite(own_suite_file), probe=False)
    assert found.problems == ()
    notes = "\n".join(found.notes)
    assert "expert 'still': its weights are those of the base" in notes
    assert "expert 'far': 6 times as far from the base as the other experts (1.90 of its norm against 0.30)" in notes
    assert "expert 'twin': exactly as far from the base as expert 'pets': the same file twice?" in notes
    assert "expert 'near'" not in notes


RENAMES = {
    "'base_model.model' added": lambda n: f"base_model.model.{n}",
    "'visual.trunk' in place of 'vision_model'": lambda n: n.replace("vision_model.", "visual.trunk."),
    "24 tensors look renamed, 'attn' in place of 'self_attn'": lambda n: n.replace(".self_attn.", ".attn."),
    "a tensor looks renamed, 'fc_1'": lambda n: n.replace("layers.1.mlp.fc1.weight", "layers.1.mlp.fc_1.weight"),
}


@pytest.mark.parametrize(("rename", "message"), cases_by_message(RENAMES))
def test_likely_renames(tiny: Family, rename: Callable[[str], str], message: str) -> None:
    tensors = {rename(name): t for name, t in tiny.experts["pets"].read(tiny.adapter.tower).items()}
    (problem,) = list_differences(tiny.adapter, InMemory("x", tensors))
    assert message in problem


def test_a_name_that_is_no_rename(tiny: Family) -> None:
    tensors = tiny.experts["pets"].read(tiny.adapter.tower)
    name = "vision_model.post_layernorm.bias"
    moved = {n: t for n, t in tensors.items() if n != name} | {"something.else": tensors[name]}
    assert [p.split(":")[1].strip() for p in list_differences(tiny.adapter, InMemory("x", moved))] == [
        "missing tensors",
        "one tensor that the base's architecture does not have, and no stage would run",
    ]


def test_another_declared_base_is_noted(tmp_path: Path, hub: Callable[..., FakeHub]) -> None:
    base = write_text_base(tmp_path / "base", "t5")
    write_text_expert(tmp_path / "expert", base, "t5", 1)
    config = tmp_path / "expert" / "config.json"
    config.write_text(json.dumps(CONFIGS["t5"] | {"_name_or_path": "google/t5-other"}))
    hub({"some/t5": tmp_path / "base"})
    content = {"name": "x", "base": "some/t5", "merged": {"method": "simple-averaging"}}
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump(content | {"tasks": {"a": {"expert": "expert"}}}))
    notes = "\n".join(check_suite(load_suite(tmp_path / "suite.yaml")).notes)
    assert "expert 'a': its config.json names 'google/t5-other' as its base, the suite's is 'some/t5'" in notes
