"""What the page on models in memory says of Python runs as it stands, on tiny models built of configurations."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from objects import assert_same_model, near
from PIL import Image
from tiny_clip import SIDE, clip_in_memory
from tiny_text import library_model, tiny_tokenizer

import featcal

PAGE = Path(__file__).resolve().parents[2] / "docs" / "suites.md"
CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)


def _examples() -> list[str]:
    section = PAGE.read_text(encoding="utf-8").partition("\n## Python objects\n")[2].partition("\n## ")[0]
    return CODE.findall(section)


def _pictures(seed: int) -> list[Image.Image]:
    pixels = np.random.default_rng(seed).integers(0, 255, (12, SIDE, SIDE, 3), dtype=np.uint8)
    return [Image.fromarray(one) for one in pixels]


def _pairs(seed: int) -> list[tuple[str, str]]:
    drawn = np.random.default_rng(seed).integers(0, 27, (8, 5))
    return [(" ".join(f"w{word}" for word in row), ["no", "yes"][row[0] % 2]) for row in drawn.tolist()]


@pytest.mark.slow
def test_models_and_samples_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The examples without a suite file: a CLIP, and a T5."""
    from transformers import CLIPModel, T5ForConditionalGeneration

    monkeypatch.chdir(tmp_path)
    base, _, processor = clip_in_memory()
    names: dict[str, Any] = {"base": base, "processor": processor, "cars": near(base, 1), "digits": near(base, 2)}
    names |= {"car_pictures": _pictures(1), "digit_pictures": _pictures(2)}
    examples = _examples()
    exec(examples[0], names)
    assert type(names["model"]) is CLIPModel
    assert_same_model(names["model"], CLIPModel.from_pretrained(tmp_path / "calibrated"))
    family, result = names["result"].family, names["result"]
    cosines = [featcal.measure_drift(family, one).macro_cosine for one in ("merged", result)]
    assert cosines[1] > cosines[0]

    t5 = library_model("t5-tied")
    names |= {"t5": t5, "sentiment": near(t5, 1), "grammar": near(t5, 2), "tokenizer": tiny_tokenizer("t5")}
    texts = ("rated_films", "judged_sentences", "rated_films_test", "judged_sentences_test")
    names |= {name: _pairs(seed) for seed, name in enumerate(texts)}
    exec(examples[1], names)
    out = capsys.readouterr().out
    assert "sentiment" in out
    assert [float(number) for number in out.splitlines()[-1].split()] == [
        featcal.evaluate(names["suite"], one).average for one in ("merged", names["calibrated"])
    ]
    merged = T5ForConditionalGeneration.from_pretrained(tmp_path / "merged")
    assert_same_model(featcal.merge(names["suite"], "ties:scale=0.4").to_model(), merged)
    assert not torch.equal(merged.shared.weight, t5.shared.weight)


def test_no_example_is_left_out() -> None:
    assert len(_examples()) == 2
