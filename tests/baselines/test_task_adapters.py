"""Adapters per task: the experts' maps at full rank, the optimum below it, and folders that peft and featcal load."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_clip import TASKS as PICTURES
from tiny_text import TASKS, text_suite

from featcal import evaluate, load_suite, open_family
from featcal.baselines.adapters import Adapters
from featcal.baselines.common.fit import fit
from featcal.evaluation.evaluate import task_features
from featcal.export.to_model import to_library_model
from featcal.family.opening import Family, batches_of
from featcal.models.adapter import Adapter
from featcal.models.model import Model, task_weights
from featcal.session.session import Session
from featcal.suite.schema import CalibrationDefaults
from featcal.system.errors import InputError

FEW = {"samples": 5}
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's own


def map_names(adapter: Adapter) -> list[str]:
    return [f"{block.stored_name(name)}.weight" for block in adapter.blocks() for name in block.linears]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Session:
    return Session(open_family(load_suite(text_suite(tmp_path_factory.mktemp("llama"), "llama")), "cpu"))


def test_a_full_rank_is_the_expert_in_every_map_and_the_model_elsewhere(tiny64: Family) -> None:
    made = fit(tiny64, Adapters(rank=1000, **FEW)).weights
    maps = {*map_names(tiny64.adapter)}
    for task, expert in tiny64.experts.items():
        own = task_weights(made, task)
        found, theirs, merged = (one.read(tiny64.adapter.tower) for one in (own, expert, tiny64.merged))
        for name in tiny64.adapter.tower:
            torch.testing.assert_close(found[name], theirs[name] if name in maps else merged[name], rtol=0, atol=1e-12)


def test_more_rank_leaves_less_out_and_every_task_has_its_own(tiny64: Family) -> None:
    shares = [fit(tiny64, Adapters(rank=rank, **FEW)).record["left_out"] for rank in (1, 4, 1000)]
    for task in PICTURES:
        assert 1 > shares[0][task] > shares[1][task] > 0
        assert shares[2][task] == pytest.approx(0, abs=1e-15)
    made = fit(tiny64, Adapters(rank=4, **FEW)).weights
    drawn = tiny64.samples(PICTURES[0], "test", 4, 0)
    batches = batches_of(drawn, 4, tiny64.compute.device)
    first, second, plain = (
        task_features(tiny64, model, task, batches)
        for model, task in ((made, PICTURES[0]), (made, PICTURES[1]), (tiny64.merged, PICTURES[0]))
    )
    assert float((first - second).abs().max()) > 1e-3
    assert float((first - plain).abs().max()) > 1e-3


def test_what_a_suite_recommends_for_calibrations_is_not_taken(tiny64: Family) -> None:
    """The method's name does not say it, and its rows are kept by the name."""
    advised = tiny64.suite.model_copy(update={"calibration": CalibrationDefaults.model_validate({"lam": 10.0})})
    shares = [fit(one, Adapters(rank=1, **FEW)).record["left_out"] for one in (tiny64, replace(tiny64, suite=advised))]
    assert shares[0] == shares[1]


@pytest.mark.slow
def test_written_folders_load_with_peft_and_as_base_and_adapter(llama: Session, tmp_path: Path) -> None:
    """The model, and a LoRA per task over it; generated answers are those that the session scored."""
    peft = pytest.importorskip("peft")
    made = llama.fit.baseline("adapters:rank=3,samples=5")
    content = made.save(tmp_path / "out")
    assert content["adapters"] == {task: f"adapters/{task}" for task in TASKS}
    assert f"adapters/{TASKS[0]}/adapter_model.safetensors" in content["written"]
    family = llama.family
    assert isinstance(made.weights, Model)
    for task in TASKS:
        folder = tmp_path / "out/adapters" / task
        read = family.model(f"{tmp_path / 'out'}+{folder}")
        own = task_weights(made.weights, task).read(family.adapter.tower)
        for name, tensor in read.read(family.adapter.tower).items():
            torch.testing.assert_close(tensor, own[name], rtol=1e-6, atol=1e-6)
        model = peft.PeftModel.from_pretrained(to_library_model(family, family.container, family.merged), folder)
        inputs = dict(family.adapter.probe())
        with torch.no_grad():
            logits = model(**inputs).logits
            expected = to_library_model(family, family.container, task_weights(made.weights, task))(**inputs).logits
        assert float((logits - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
        config = json.loads((folder / "adapter_config.json").read_text())
        assert (config["r"], config["bias"], config["lora_bias"], config["modules_to_save"]) == (3, "none", False, None)


@pytest.mark.slow
def test_it_is_scored_generates_and_drifts_like_any_model(llama: Session) -> None:
    name = "adapters:rank=1000,samples=5"
    scores = llama.measure.scores(name).tasks
    for task in TASKS:
        own = task_weights(llama.fit.weights(name), task)
        alone = evaluate(llama, own).tasks[task]
        assert scores[task].predictions == alone.predictions
    drift, features = llama.measure.drift(name), llama.measure.features(name)
    for task in TASKS:
        last = drift.tasks[task].layers[-1].relative_drift
        assert last == pytest.approx(features.tasks[task].layers[-1].relative_drift, rel=1e-4)
        assert last < llama.measure.features("merged").tasks[task].layers[-1].relative_drift
    assert llama.measure.canary(name).tasks.keys() == {*TASKS}


def test_what_has_modules_already_is_refused(tiny: Family) -> None:
    made = fit(tiny, Adapters(rank=2, **FEW)).weights
    with pytest.raises(InputError, match="maps, heads or adapters of its own"):
        fit(tiny.with_merged(made, "adapted"), Adapters(rank=2, **FEW))
