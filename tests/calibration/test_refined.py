"""The recipe "refined": its defaults, its cost, what it leaves alone. Its tensors are held against an independent
computation in the tests of every architecture."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_clip import in_float64
from tiny_text import write_text_suite
from torch import Tensor, nn

from featcal import CalibrationConfig, load_suite, measure_drift, open_family
from featcal.calibration import closed_form
from featcal.calibration.block_statistics import BlockStatistics
from featcal.calibration.calibrate import calibrate_family, config_for, expert_passes
from featcal.calibration.residual_parts import ResidualPart
from featcal.family.opening import Family
from featcal.models.activations import ActivationStore, CallList
from featcal.models.adapter import Block, Call
from featcal.models.compute import computing
from featcal.models.lane import ModelStream, run_block
from featcal.session.model_names import name_calibration
from featcal.session.model_ref import resolve_model
from featcal.session.session import Session
from featcal.suite.calibration_options import CalibrationConfig as Config
from featcal.system.errors import InputError

REFINED = Config(recipe="refined", lam=1e-2, alpha=0.6, beta=0.5, samples=8, batch_size=4)


def family_of(kind: str, tiny: Family, tmp_path: Path) -> Family:
    return tiny if kind == "clip" else open_family(load_suite(write_text_suite(tmp_path, kind)), "cpu")


def test_defaults_depend_on_the_recipe_and_the_number_of_samples(tiny: Family, tmp_path: Path) -> None:
    few, many = (config_for(tiny, recipe="refined", samples=n) for n in (8, 64))
    assert (few.lam, few.rho, few.alpha, few.beta) == (0.05, 2.0, 0.3, 0.5)
    assert (many.lam, many.rho, many.alpha, many.beta) == (0.001, 2.0, 0.6, 0.5)
    assert config_for(tiny, recipe="refined", samples=32, lam=1.0).lam == 1.0
    assert config_for(tiny).recipe == "paper"
    assert config_for(tiny).beta == 0
    text = family_of("llama", tiny, tmp_path)
    assert config_for(text, recipe="refined", samples=8).alpha == 0.6
    advised = text.suite.model_copy(update={"calibration": text.suite.calibration.model_copy(update={"lam": 3.0})})
    assert config_for(replace(text, suite=advised)).lam == 3.0
    assert config_for(replace(text, suite=advised), recipe="refined", samples=64).lam == 0.001


def test_its_name_says_what_differs(tiny: Family) -> None:
    config = config_for(tiny, recipe="refined", samples=12, beta=0.25)
    name = name_calibration(config, tiny)
    assert "recipe=refined,beta=0.25" in name
    assert resolve_model(name, tiny).config == config
    assert resolve_model("calibrated:recipe=refined,samples=64", tiny).config == config_for(
        tiny, recipe="refined", samples=64
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"recipe": "better"}, "recipe is 'better'; choose paper or refined"),
        ({"beta": 0.5}, "beta is 0.5; it belongs to the recipe 'refined'"),
        ({"recipe": "refined", "beta": 1.5}, "beta is 1.5; it lies in"),
        ({"recipe": "refined", "beta": 0.5, "alpha": 0.0}, "alpha is 0: beta above 0 needs the experts' features"),
    ],
)
def test_options_that_mean_nothing(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        CalibrationConfig(**options)


@pytest.mark.parametrize("kind", ["clip", "t5-gated", "llama-plain"])
def test_identical_models_are_a_fixed_point(kind: str, tiny: Family, tmp_path: Path) -> None:
    family = in_float64(family_of(kind, tiny, tmp_path))
    same = replace(family, merged=family.base, experts=dict.fromkeys(family.experts, family.base))
    done = calibrate_family(same, replace(REFINED, eps=0.0, rmsnorms=kind != "clip")).weights
    for name, tensor in same.base.read(same.adapter.tower).items():
        torch.testing.assert_close(done.read([name])[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["clip", "t5-gated", "t5-relu", "llama-plain", "llama-biased"])
def test_residual_parts_in_a_row_are_the_block(kind: str, tiny: Family, tmp_path: Path) -> None:
    """Also in what the next block is told beside the state, such as T5's position bias."""
    family = family_of(kind, tiny, tmp_path)
    adapter, weights = family.adapter, family.merged.read(family.adapter.tower)
    batch = family.samples(next(iter(family.suite.tasks)), "calibration", 3, 0).inputs
    call: Call | None = None
    with torch.no_grad():
        for stage in adapter.stages:
            call = stage.first_call({name: weights[name] for name in stage.outer}, batch, call)
            for block in stage.blocks:
                after, own = call, block.local(weights)
                for part in stage.sublayers(block, own).values():
                    after = part(after)
                call = run_block(stage, block, own, call)
                assert after.kwargs.keys() == call.kwargs.keys()
                for ours, theirs in zip(after.args, call.args, strict=True):
                    assert type(ours) is type(theirs)
                    if isinstance(ours, Tensor):
                        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_the_student_runs_through_no_more_blocks_than_with_the_paper_s_recipe(tiny: Family) -> None:
    """Counted in products of linear maps, the experts' and those that find out how a block falls apart included."""
    work = dict.fromkeys(("paper", "refined"), 0)
    linears = [linear for block in tiny.adapter.blocks() for linear in block.linears.values()]
    cost: dict[nn.Module, int] = {linear: linear.weight.numel() for linear in linears}
    for recipe in work:
        config = replace(REFINED, recipe=recipe, beta=0.5 if recipe == "refined" else 0.0, batch_size=2)

        def counted(module: nn.Module, args: tuple[Tensor], _: Tensor, recipe: str = recipe) -> None:
            work[recipe] += args[0].shape[0] * args[0].shape[1] * cost[module]

        handles = [linear.register_forward_hook(counted) for linear in linears]
        calibrate_family(tiny, config, experts=expert_passes(tiny, config))
        for handle in handles:
            handle.remove()
    assert 0 < work["refined"] < work["paper"]


@computing
def test_the_target_of_an_output_map_is_the_minimiser_of_its_objective() -> None:
    """sum over tasks of omega / N ||W a + c - y||^2 + lam ||W - anchor||^2 with y = W_i (alpha b + (1 - alpha) a) + b_i
    + beta (h_exp - h): gradient 0 at the closed form."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    tasks, n, d, m, lam, alpha, beta = 3, 30, 4, 5, 0.3, 0.6, 0.5
    own, theirs, gap = random(tasks, n, d), random(tasks, n, d), random(tasks, n, m)
    weights, anchor = random(tasks, m, d), random(m, d)
    targets = (alpha * theirs + (1 - alpha) * own) @ weights.mT + beta * gap
    grams = own.mT @ own / n
    omegas = torch.stack([closed_form.task_weight(torch.linalg.matrix_norm(gram), 0.0) for gram in grams])
    left = (omegas[:, None, None] * grams).sum(0)
    right = (omegas[:, None, None] * (targets.mT @ own / n)).sum(0)
    solved = closed_form.linear_weight(left, right, anchor, lam, 0.0).requires_grad_()
    fit = (omegas[:, None, None] / n * (own @ solved.mT - targets).square()).sum()
    (slope,) = torch.autograd.grad(fit + lam * (solved - anchor).square().sum(), solved)
    assert float(slope.norm()) < 1e-12


def test_parts_that_are_not_chosen_stay_as_merged(tiny: Family) -> None:
    config = replace(REFINED, blocks=("block 1",), maps=("mlp",), layernorms=False)
    done = calibrate_family(tiny, config).weights.read(tiny.adapter.tower)
    merged = tiny.merged.read(tiny.adapter.tower)
    changed = {name for name, tensor in done.items() if not tensor.equal(merged[name])}
    prefix = tiny.adapter.blocks()[1].name
    assert changed == {f"{prefix}.mlp.{name}.{kind}" for name in ("fc1", "fc2") for kind in ("weight", "bias")}


def test_it_lowers_the_final_drift_more_than_the_paper_s(tiny: Family) -> None:
    drift = {}
    for recipe in ("paper", "refined"):
        model = calibrate_family(tiny, config_for(tiny, recipe=recipe, samples=12))
        ledger = measure_drift(tiny, model.weights, split="calibration")
        drift[recipe] = [task.layers[-1].relative_drift for task in ledger.tasks.values()]
    assert all(ours < theirs for ours, theirs in zip(drift["refined"], drift["paper"], strict=True))


@pytest.mark.parametrize("recipe", ["refined", "informed"])
def test_feature_sources_are_of_the_paper_s_recipe(recipe: str, tiny: Family) -> None:
    with pytest.raises(InputError, match="feature sources need the recipe 'paper'"):
        Session(tiny).fit.sources(config_for(tiny, recipe=recipe, samples=8))


def test_pieces_of_a_part_are_modules_with_one_input() -> None:
    norm, state, inner = (torch.zeros(1, 1, 2) for _ in range(3))
    part = ResidualPart("attention", {"norm": norm, "q": state, "k": state, "out": inner}, "norm", "out")
    assert part.pieces == [("norm",), ("q", "k"), ("out",)]


def test_what_counted_pieces_needed_of_the_experts_leaves_memory(tiny: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    held, hold = list[CallList](), ActivationStore.hold

    def note(store: ActivationStore, calls: Iterable[Call] = ()) -> CallList:
        held.append(hold(store, calls))
        return held[-1]

    monkeypatch.setattr(ActivationStore, "hold", note)
    counted, left = list[set[str]](), list[set[str]]()

    def watch(piece: BlockStatistics) -> None:
        traces = [call.kwargs for calls in held for call in calls if "outputs" in call.kwargs]
        counted.append({name for group in piece.linears for name in group.names})
        left.append({name for trace in traces for name in trace["outputs"]})

    calibrate_family(tiny, replace(REFINED, blocks=("block 0",)), watch=watch)
    assert set.union(*counted) > left[0]
    for place, names in enumerate(left):
        assert names <= set().union(*counted[place + 1 :])
    assert left[0]
    assert not left[-1]


def test_a_piece_reads_of_the_experts_what_it_counts(tiny: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of all experts, kept until its last piece, would be memory that grows with their number."""
    block, read, tensors = tiny.adapter.blocks()[0], list[list[str]](), ModelStream.tensors

    def noting(lane: ModelStream, asked: Block, modules: Collection[str] | None = None) -> dict[str, Tensor]:
        found = tensors(lane, asked, modules)
        if asked == block and lane.weights is next(iter(tiny.experts.values())):
            read.append(sorted(found))
        return found

    monkeypatch.setattr(ModelStream, "tensors", noting)
    calibrate_family(tiny, config_for(tiny, recipe="informed", samples=4))
    whole = [one for one in read if len(one) == len(block.names)]
    pieces = [name for one in read if len(one) < len(block.names) for name in one]
    assert len(whole) == 2  # one of them to find the residual parts
    assert sorted(pieces) == whole[0]
