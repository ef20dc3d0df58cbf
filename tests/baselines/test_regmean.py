"""RegMean and RegMean++ against plain float64 computations with transformers and hooks alone, and what they promise."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from lanes import rows
from library_references import Reference, inputs_of, linears_of, reference_of
from tiny_clip import TASKS
from torch import Tensor

from featcal import evaluate
from featcal.baselines.common.baseline import baseline_options
from featcal.baselines.common.fit import fit
from featcal.baselines.regmean import RegMean, merged_weight
from featcal.baselines.regmean_plus_plus import RegMeanPlusPlus
from featcal.calibration.calibrate import expert_passes
from featcal.calibration.closed_form import SolveError
from featcal.cli import featcal_command
from featcal.family.opening import Family
from featcal.models.lane import WalkCache
from featcal.session.model_ref import resolve_model
from featcal.session.session import Session
from featcal.suite.name_grammar import model_name
from featcal.system.errors import InputError, NumericalError
from featcal.testing.reference import Sample

FEW = {"samples": 12, "reduce": 0.9}


@pytest.fixture(
    scope="module",
    params=rows(["clip", "t5-gated", "llama-plain"], quick=("clip",), slow=("t5-gated", "llama-plain")),
)
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_suite_file: Path, tiny64: Family
) -> tuple[Reference, Sequence[str]]:
    return reference_of(request.param, tmp_path_factory.mktemp(request.param), tiny_suite_file.parent, tiny64)


def grams(model: Any, samples: Sequence[Sample], names: Sequence[str]) -> dict[str, Tensor]:
    """The mean of x x^T over all tokens of all samples, by the name of the map that x is given to."""
    return {name: x.mT @ x / len(x) for name, x in inputs_of(model, samples, names).items()}


def regression(experts: Mapping[str, Any], own: Mapping[str, Mapping[str, Tensor]], name: str, reduce: float) -> Tensor:
    """(sum W_i G~_i) (sum G~_i)^-1."""
    scaled = {task: torch.where(torch.eye(len(g[name])) == 1, g[name], reduce * g[name]) for task, g in own.items()}
    answers = [experts[task].get_submodule(name).weight @ gram for task, gram in scaled.items()]
    return torch.linalg.solve(sum(scaled.values()), sum(answers), left=False)  # type: ignore[call-overload,no-any-return]


@torch.no_grad()
def expected(reference: Reference, blocks: Sequence[str], reduce: float, streamed: bool) -> dict[str, Tensor]:
    """Every tensor of the merged model by its name."""
    experts, samples = reference.experts, reference.samples["calibration"]
    merged = deepcopy(next(iter(experts.values())))
    for name, parameter in merged.named_parameters():
        parameter.copy_(torch.stack([one.get_parameter(name) for one in experts.values()]).mean(0))
    for block in blocks:
        names = list(linears_of(merged, block))
        own = {}
        for task, expert in experts.items():
            seen = deepcopy(merged) if streamed else expert
            if streamed:
                seen.get_submodule(block).load_state_dict(expert.get_submodule(block).state_dict())
            own[task] = grams(seen, samples[task], names)
        for name in names:
            merged.get_submodule(name).weight.copy_(regression(experts, own, name, reduce))
    return dict(merged.named_parameters())


@pytest.mark.parametrize("kind", [RegMean, RegMeanPlusPlus])
def test_every_tensor(reference: tuple[Reference, Sequence[str]], kind: type[RegMean]) -> None:
    """Padding counts for nothing: the reference has none."""
    models, blocks = reference
    ours = fit(models.exact, kind(**FEW)).weights.read(models.exact.adapter.tower)
    theirs = expected(models, blocks, 0.9, kind is RegMeanPlusPlus)
    for name, tensor in ours.items():
        torch.testing.assert_close(
            tensor, theirs[name].detach(), rtol=1e-8, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("kind", [RegMean, RegMeanPlusPlus])
def test_one_expert_alone_is_returned(tiny64: Family, kind: type[RegMean]) -> None:
    task = TASKS[0]
    suite = tiny64.suite.model_copy(update={"tasks": {task: tiny64.suite.tasks[task]}})
    family = replace(tiny64, suite=suite, experts={task: tiny64.experts[task]})
    found = fit(family, kind(**FEW)).weights.read(family.adapter.tower)
    for name, tensor in family.experts[task].read(family.adapter.tower).items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-12)


def test_of_the_diagonal_alone_it_is_an_average_by_energy() -> None:
    generator = torch.Generator().manual_seed(1)
    weights, energies = (torch.rand(3, *shape, generator=generator, dtype=torch.float64) for shape in ((4, 5), (5,)))
    average = weights.mean(0)
    found = merged_weight(energies.sum(0).diag(), (weights * energies[:, None]).sum(0), average)
    torch.testing.assert_close(found, (weights * energies[:, None]).sum(0) / energies.sum(0))


def test_an_input_that_no_expert_has_keeps_the_average() -> None:
    gram = torch.tensor([[2.0, 1.0, 0.0], [1.0, 2.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    expert, average = torch.tensor([[1.0, 2.0, 3.0]]).double(), torch.tensor([[5.0, 5.0, 5.0]]).double()
    torch.testing.assert_close(merged_weight(gram, expert @ gram, average), torch.tensor([[1.0, 2.0, 5.0]]).double())


def test_inputs_that_others_determine_are_an_error(tiny64: Family) -> None:
    rows = torch.randn(2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with pytest.raises(SolveError, match="singular"):
        merged_weight(rows.mT @ rows, torch.ones(1, 3).double(), torch.zeros(1, 3).double())
    one = fit(tiny64, RegMean(samples=1, reduce=0.9))  # the diagonal makes up for it
    assert one.record["tasks"][TASKS[0]]["samples"] == 1
    with pytest.raises(NumericalError, match=r"block 0: .*singular.*lower reduce or use more samples"):
        fit(tiny64, RegMean(samples=1, reduce=1.0))


def test_the_plain_regression_is_a_minimum(tiny64: Family) -> None:
    """sum_i mean |W x - W_i x|^2 over the expert's own inputs: its gradient, by autograd, is 0 at the solution."""
    found = fit(tiny64, RegMean(samples=12, reduce=1.0)).weights
    passes = expert_passes(tiny64, RegMean(samples=12).counting)
    stage = tiny64.adapter.stages[0]
    block, name = stage.blocks[0], f"{stage.blocks[0].name}.mlp.fc1.weight"
    start = found.read([name])[name]
    weights = {
        "solution": start.clone(),
        "average": torch.stack([e.read([name])[name] for e in tiny64.experts.values()]).mean(0),
    }
    gradients = {}
    for called, weight in weights.items():
        weight.requires_grad_()
        loss = torch.zeros((), dtype=torch.float64)
        for one in passes.values():
            tensors = tiny64.compute.place(one.weights.read([*stage.outer, *block.names]))
            for batch in one.batches:
                seen: list[Tensor] = []
                hook = block.module.get_submodule("mlp.fc1").register_forward_pre_hook(lambda _, x: seen.append(x[0]))  # noqa: B023
                with torch.no_grad():
                    block.run(block.local(tensors), stage.first_call(tensors, batch, None))
                hook.remove()
                loss = loss + (seen[0] @ (weight - tensors[name]).mT).square().sum(-1).mean()
        gradients[called] = float(torch.autograd.grad(loss, weight)[0].norm())
    assert gradients["solution"] < 1e-10 * gradients["average"]


def test_names(tiny: Family) -> None:
    assert resolve_model("regmean:samples=8", tiny).name == "regmean:samples=8,seed=42,reduce=0.95"
    assert baseline_options(model_name("regmean++:reduce=0.5"), tiny) == RegMeanPlusPlus(reduce=0.5)
    for name, message in {
        "regmean:reduce=2": r"reduce is 2; it lies in \[0, 1\]",
        "regmean++:samples=0": "samples is 0; it is at least 1",
        "regmean:scale=1": "no option 'scale'; it takes samples, seed, reduce",
    }.items():
        with pytest.raises(InputError, match=message):
            evaluate(tiny, name)


def test_a_session_keeps_it_and_its_samples(tiny: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(tiny)
    name = session.resolve("regmean:samples=8")
    first = session.fit.weights(name)
    assert session.fit.weights("regmean:seed=42,samples=8") is first
    again = fit(tiny, RegMean(samples=8), experts=expert_passes(tiny, RegMean(samples=8).counting, WalkCache(2**26)))
    names = tiny.adapter.tower
    for tensor, other in zip(first.read(names).values(), again.weights.read(names).values(), strict=True):
        assert tensor.equal(other)
    assert session.measure.scores(name).average == evaluate(tiny, again).average


WRITTEN = ("regmean:samples=8,reduce=0.5", "regmean++:samples=8", "lot:samples=8", "esm:samples=8", "fisher:samples=4")


@pytest.mark.parametrize("name", rows(WRITTEN, quick=WRITTEN[:1], slow=WRITTEN))
def test_merge_writes_it(name: str, tiny_suite_file: Path, tiny: Family, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = CliRunner().invoke(
        featcal_command, ["merge", str(tiny_suite_file), "--method", name, "--out", str(out), "--json"]
    )
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["verified"] == "reloaded"
    assert document["model"] == resolve_model(name, tiny).name
    assert evaluate(tiny, str(out)).average == evaluate(tiny, name).average


def test_merge_refuses_what_means_nothing_to_it(tiny_suite_file: Path, tmp_path: Path) -> None:
    failed = CliRunner().invoke(
        featcal_command,
        ["merge", str(tiny_suite_file), "--method", "regmean", "--scale", "1", "--out", str(tmp_path / "o")],
    )
    assert failed.exit_code == 2
    assert "regmean has no --scale; leave it out" in failed.output
