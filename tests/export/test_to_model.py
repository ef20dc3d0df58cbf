"""What a result hands over is what `from_pretrained` makes of its saved folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from objects import assert_same_model, clip_objects
from tiny_clip import write_suite
from tiny_decoders import fresh
from tiny_text import write_text_suite

import featcal
from featcal.export.merge_result import MergeResult
from featcal.session.session import Session
from featcal.system.errors import InputError

FEW = featcal.CalibrationConfig(samples=8)


def _loaded(folder: Path) -> Any:
    import transformers

    named = transformers.AutoConfig.from_pretrained(folder).architectures[0]
    return getattr(transformers, named).from_pretrained(folder)


@pytest.mark.parametrize("kind", ["clip", "t5", "t5-tied", "llama-tied", "half"])
def test_calibrated(kind: str, tmp_path: Path) -> None:
    root = tmp_path / "suite"
    text = ("t5", torch.bfloat16) if kind == "half" else (kind, torch.float32)
    file = write_suite(root) if kind == "clip" else write_text_suite(root, text[0], dtype=text[1])
    result = featcal.calibrate(featcal.load_suite(file), FEW)
    result.save(tmp_path / "out")
    assert_same_model(result.to_model(), _loaded(tmp_path / "out"))
    assert next(result.to_model().parameters()).dtype is text[1]


@pytest.mark.parametrize("kind", ["gemma", "qwen3_moe"])
def test_names_in_modules_are_others(kind: str, tmp_path: Path) -> None:
    """Experts of a mixture are one tensor in the module and many in files."""
    merged = featcal.merge(fresh(kind, tmp_path / "suite").family, "task-arithmetic:scale=0.4")
    merged.save(tmp_path / "out")
    assert_same_model(merged.to_model(), _loaded(tmp_path / "out"))


@pytest.mark.slow
def test_merged_of_objects(tmp_path: Path) -> None:
    given = clip_objects(write_suite(tmp_path / "suite"))
    merged = featcal.merge(method="ties:scale=0.4,density=0.3", **{k: v for k, v in given.items() if k != "merged"})
    assert isinstance(merged, MergeResult)
    assert merged.recipe.scale == 0.4
    record = merged.save(tmp_path / "out")
    assert record["inputs"]["base"].keys() == {"CLIPModel in memory"}
    assert_same_model(merged.to_model(), _loaded(tmp_path / "out"))
    scores = featcal.evaluate(merged.family, merged)
    assert scores.to_json()["tasks"] == featcal.evaluate(merged.family, "merged").to_json()["tasks"]


def test_fitted(tmp_path: Path) -> None:
    session = Session(featcal.open_family(featcal.load_suite(write_suite(tmp_path / "suite")), "cpu"))
    fitted = session.fit.baseline("regmean:samples=8")
    fitted.save(tmp_path / "out")
    assert_same_model(fitted.to_model(), _loaded(tmp_path / "out"))
    with pytest.raises(InputError, match=r"its adapters, maps or heads of .* have no place in a checkpoint"):
        session.fit.baseline("surgery:samples=8,steps=1").to_model()


def test_the_model_is_ones_own(tmp_path: Path) -> None:
    """Whoever trains it on changes neither the result nor the base that was given."""
    given = clip_objects(write_suite(tmp_path / "suite"))
    objects = {name: given[name] for name in ("base", "experts", "samples")}
    before = {name: tensor.clone() for name, tensor in given["base"].state_dict().items()}
    result = featcal.calibrate("task-arithmetic", FEW, **objects)
    first, model = result.to_model(), result.to_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in given["base"].state_dict().items())
    assert_same_model(result.to_model(), first)


def test_merge_says_what_is_missing(tmp_path: Path) -> None:
    suite = featcal.load_suite(write_suite(tmp_path / "suite"))
    assert featcal.merge(suite).recipe.scale == 0.5
    with pytest.raises(InputError, match="merge: give a suite, or base, not both"):
        featcal.merge(suite, base="base")
    with pytest.raises(InputError, match=r"merge: nothing to merge; give a suite, or base= and experts="):
        featcal.merge(base="base")
    with pytest.raises(InputError, match="no merge method 'tie'"):
        featcal.merge(suite, "tie")


def test_other_libraries_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = featcal.merge(featcal.load_suite(write_suite(tmp_path / "suite")))
    monkeypatch.setattr(type(result.family.adapter), "library", "timm")
    with pytest.raises(InputError, match="to_model gives models of transformers, and this is one of timm; save it"):
        result.to_model()
