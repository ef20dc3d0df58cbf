"""The suite ``lm-mini``: its files by themselves, experts that know their task, and the story that its card tells."""

from __future__ import annotations

import gzip
import importlib.util
import json
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from app_pages import PAGES, healthy, opened
from lanes import rows
from safetensors.torch import load_file
from tiny_text import scaled
from torch import Tensor
from transformers import AutoTokenizer, Qwen3ForCausalLM

from featcal import CalibrationConfig, Session, evaluate, measure_drift, open_session
from featcal.calibration.calibrate import config_for

FOLDER = Path(__file__).resolve().parents[2] / "data" / "lm-mini"
SUITE: dict[str, Any] = yaml.safe_load((FOLDER / "suite.yaml").read_text())
TASKS = tuple(SUITE["tasks"])
MODELS = {"base": FOLDER / SUITE["base"]} | {task: FOLDER / SUITE["tasks"][task]["expert"] for task in TASKS}
EMBEDDING = "model.embed_tokens.weight"
PAD, END, START = 0, 1, 2
SPLITS = {"calibration": 256, "validation": 128, "test": 500}
BROKEN = CalibrationConfig(lam=1e-9, rho=0.5, alpha=0.15, samples=4)
REPAIRED = {"paper": 0.25, "refined": 0.4}
"""Share of the gap between merged model and experts that a recipe closes at least."""


@cache
def texts(task: str, split: str) -> list[tuple[str, str]]:
    """Prompts and answers, as the suite file asks for them."""
    source = SUITE["tasks"][task][split]
    with gzip.open(FOLDER / source["jsonl"], "rt") as lines:
        rows = [row for row in map(json.loads, lines) if row["split"] == source["split"]]
    return [(source["input"].format(**row), source["target"].format(**row)) for row in rows]


@cache
def weights(name: str) -> dict[str, Tensor]:
    return load_file(MODELS[name] / "model.safetensors")


@pytest.fixture(scope="module")
def session() -> Session:
    return open_session("lm-mini")


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script that made the folder."""
    monkeypatch.syspath_prepend(FOLDER)
    spec = importlib.util.spec_from_file_location("lm_mini_build", FOLDER / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_stays_small() -> None:
    files = [path for path in FOLDER.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) <= 10e6


def test_texts_are_those_of_the_script_and_nobody_trained_on_them(build: ModuleType, tmp_path: Path) -> None:
    build.write_texts(tmp_path)
    assert build.TASKS == TASKS
    for task in TASKS:
        file = f"{task}.jsonl.gz"
        assert gzip.decompress((tmp_path / file).read_bytes()) == gzip.decompress((FOLDER / file).read_bytes())
        assert {split: len(texts(task, split)) for split in SPLITS} == SPLITS
        held = {prompt for split in SPLITS for prompt, _ in texts(task, split)}
        assert len(held) == sum(SPLITS.values())
        rows = build.pool(task, plain=True) + build.pool(task, plain=False)
        assert not held & {SUITE["tasks"][task]["test"]["input"].format(**row) for row in rows}


@pytest.mark.parametrize("task", TASKS)
def test_every_word_is_known_and_comes_back(task: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODELS["base"])
    for prompt, answer in texts(task, "test"):
        numbers = tokenizer(prompt)["input_ids"]
        said = tokenizer(answer, add_special_tokens=False)["input_ids"]
        assert numbers[0] == START
        assert not {tokenizer.unk_token_id, END} & {*numbers, *said}
        assert len(numbers) + len(said) + 1 <= tokenizer.model_max_length
        assert tokenizer.decode([*said, END], skip_special_tokens=True) == answer


@pytest.mark.parametrize("name", MODELS)
def test_models_are_qwen3_whose_output_layer_is_the_embedding(name: str) -> None:
    model, report = Qwen3ForCausalLM.from_pretrained(MODELS[name], dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), report
    assert {tensor.dtype for tensor in weights(name).values()} == {torch.float16}
    assert "lm_head.weight" not in weights(name)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    settings = model.generation_config
    assert (settings.pad_token_id, settings.eos_token_id, settings.bos_token_id) == (PAD, END, START)


@pytest.mark.parametrize("task", TASKS)
def test_experts_leave_the_embedding_alone_and_move_every_map(task: str) -> None:
    base, expert = weights("base"), weights(task)
    assert set(base) == set(expert)
    same = {name for name in base if torch.equal(base[name], expert[name])}
    assert EMBEDDING in same
    moved = {name for name in base if base[name].ndim == 2} - same
    assert len(moved) == 4 * 7  # every linear map of four blocks


@pytest.mark.slow
def test_the_story_of_the_card(session: Session) -> None:
    """A base that knows what is asked, experts above 95 %, Task Arithmetic damaged; both recipes repair much of it."""
    base, merged, expert = (evaluate(session, one, samples=200).average for one in ("base", "merged", "expert"))
    assert 0.3 < base < merged
    assert expert > 0.95
    assert merged < expert - 0.15
    before = measure_drift(session)
    for recipe, repaired in REPAIRED.items():
        config = config_for(session.family, recipe=recipe)
        assert config.samples == 64
        made = session.fit.calibrate(config)
        assert evaluate(session, made, samples=200).average >= merged + repaired * (expert - merged)
        after = measure_drift(session, made)
        for task in TASKS:
            assert after.tasks[task].identity_residual <= 1e-4
            assert after.tasks[task].layers[-1].relative_drift < before.tasks[task].layers[-1].relative_drift


@pytest.mark.parametrize(
    "seed", [pytest.param(42, marks=pytest.mark.nightly), pytest.param(43, marks=pytest.mark.slow)]
)
@pytest.mark.usefixtures("all_tokens")
def test_the_canary_is_green_at_the_defaults_and_red_on_a_broken_repair(seed: int, session: Session) -> None:
    """On the prompts of `featcal study canary` and on those that a calibration draws, another seed."""
    for recipe in ("paper", "refined"):
        assert session.measure.canary(config_for(session.family, recipe=recipe), seed=seed).reasons == ()
    assert session.measure.canary(scaled(session.fit.weights("merged"), 0.5), seed=seed).is_broken
    if seed == 43:
        assert session.measure.canary(BROKEN, seed=seed).is_broken


@pytest.mark.usefixtures("instant_maps")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", rows(PAGES, quick=(), slow=("accuracy", "models")))
def test_every_page_works_on_it(page: str) -> None:
    assert healthy(opened("lm-mini", page, n="16"))
