"""What the residuals of the drift ledger can see: faults of the walk, planted one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from open_clip_models import suite_as_open_clip
from tiny_text import write_text_suite
from torch import Tensor

from featcal import load_suite, measure_drift, open_family
from featcal.drift.ledger import TaskDrift
from featcal.drift.streams import LayerTransition, cross
from featcal.family.opening import Family
from featcal.models.adapter import Call
from featcal.models.families.t5 import T5EncoderStage
from featcal.models.lane import ModelStream


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return open_family(load_suite(write_text_suite(tmp_path_factory.mktemp("t5"), "t5")), "cpu")


def measured(family: Family, **options: Any) -> list[TaskDrift]:
    return list(measure_drift(family, split="test", samples=8, **options).tasks.values())


def wrong_model(self: LayerTransition) -> Tensor:
    """The model's own state where the expert's belongs."""
    return self.after[1] if self.run is None or self.before is None else self.run(self.before[1])


def wrong_sample(self: LayerTransition) -> Tensor:
    """Each sample's state taken for another one's."""
    return self.after[1] if self.run is None or self.before is None else self.run(self.before[0].flip(0))


def left_out(original: Callable[..., Any]) -> Callable[..., Any]:
    """The model's stream is not carried through the second block."""

    def walk(lane: Any, stage: Any, block: Any, *rest: Any) -> Iterator[Any]:
        for position, step in enumerate(original(lane, stage, block, *rest)):
            if block is stage.blocks[1] and not lane._fixed:
                lane.calls.put(position, step.call)
                yield replace(step, after=step.call)
            else:
                yield step

    return walk


@pytest.fixture(params=["wrong model", "wrong sample", "block left out", "no mask", "dropout"])
def fault(request: pytest.FixtureRequest, t5: Family, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    model: Any = t5.adapter
    if request.param == "wrong model":
        monkeypatch.setattr(LayerTransition, "run_on_expert", wrong_model)
    elif request.param == "wrong sample":
        monkeypatch.setattr(LayerTransition, "run_on_expert", wrong_sample)
    elif request.param == "block left out":
        monkeypatch.setattr(ModelStream, "_walk", left_out(ModelStream._walk))
    elif request.param == "no mask":
        first = T5EncoderStage.first_call

        def unmasked(*args: Any) -> Call:
            call = first(*args)
            return Call((call.hidden_state, torch.zeros_like(call.args[1]), *call.args[2:]), call.kwargs)

        monkeypatch.setattr(T5EncoderStage, "first_call", unmasked)
        monkeypatch.setattr("featcal.models.walk.check_first_batch", lambda *_: None)  # which would refuse it
    else:
        torch.manual_seed(0)
        model.model.train()
    yield
    model.model.eval()


def test_residuals_are_rounding_without_a_fault(t5: Family) -> None:
    """In float32, and above 0: two computations agree, not one number with itself."""
    for task in measured(t5):
        assert 0 < task.identity_residual < 1e-5


@pytest.mark.usefixtures("fault")
def test_a_planted_fault_shows_in_the_identity_residual(t5: Family) -> None:
    for task in measured(t5):
        assert task.identity_residual > 1e-2


def test_drift_before_a_layer_is_checked_as_well(tiny: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong incoming drift changes neither m nor p, but the response r = p - e_before."""
    crossed = cross

    def swapped(*args: Any) -> Iterator[LayerTransition]:
        for crossing in crossed(*args):
            on_expert, before = crossing.run_on_expert(), crossing.before
            turned = LayerTransition(**{**vars(crossing), "before": before and (before[1], before[0])})
            object.__setattr__(turned, "run_on_expert", lambda on_expert=on_expert: on_expert)
            yield turned

    def largest() -> float:
        skips = [layer.skip_residual for task in measured(tiny) for layer in task.layers]
        return max(float(one.max()) for one in skips if one is not None)

    assert largest() < 1e-5
    monkeypatch.setattr("featcal.drift.decomposition.cross", swapped)
    assert all(task.identity_residual < 1e-5 for task in measured(tiny))
    assert largest() > 0.5


@pytest.mark.parametrize("options", [{"sublayers": True}, {"tokens": "class"}, {"attribution": True}])
def test_residuals_are_rounding_whatever_is_measured(tiny: Family, options: dict[str, Any]) -> None:
    for task in measured(tiny, **options):
        assert 0 < task.identity_residual < 1e-5


@pytest.mark.parametrize("kind", ["t5", "llama"])
def test_residuals_of_sublayers_of_text_models(kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    family = open_family(load_suite(write_text_suite(tmp_path_factory.mktemp(kind), kind)), "cpu")
    assert all(0 < task.identity_residual < 1e-5 for task in measured(family, sublayers=True))


def test_residuals_of_open_clip_models(tiny_suite_file: Any, tmp_path: Any) -> None:
    family = open_family(load_suite(suite_as_open_clip(tiny_suite_file, tmp_path)), "cpu")
    for sublayers in (False, True):
        assert all(0 < task.identity_residual < 1e-5 for task in measured(family, sublayers=sublayers))


def test_fast_features_show_their_rounding(tiny: Family) -> None:
    """bfloat16 has 8 bits; the residual says how much of the parts that leaves."""
    for task in measured(open_family(tiny.suite, "cpu", "fast")):
        assert 1e-3 < task.identity_residual < 0.5


def test_without_drift_there_is_no_residual(t5: Family) -> None:
    same = Family(**{**vars(t5), "merged": t5.base, "experts": dict.fromkeys(t5.experts, t5.base)})
    for task in measured(same):
        assert task.identity_residual == 0
        assert all(layer.skip_residual is None or float(layer.skip_residual.max()) == 0 for layer in task.layers)
