"""Coefficients of task vectors, map by map, against least squares over all rows with transformers and hooks alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lanes import rows
from library_references import Reference, inputs_of, linears_of, reference_of
from tiny_clip import TASKS
from torch import Tensor

from featcal import evaluate
from featcal.baselines.coefficients import Coefficients, best
from featcal.baselines.common.fit import fit
from featcal.family.opening import Family
from featcal.formats.weights import InMemory
from featcal.session.model_ref import resolve_model

FEW = Coefficients(samples=12)


@pytest.fixture(
    scope="module",
    params=rows(["clip", "t5-gated", "llama-plain"], quick=("clip",), slow=("t5-gated", "llama-plain")),
)
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_suite_file: Path, tiny64: Family
) -> tuple[Reference, Sequence[str]]:
    return reference_of(request.param, tmp_path_factory.mktemp(request.param), tiny_suite_file.parent, tiny64)


def rows_and_answers(
    name: str, given: Mapping[str, Mapping[str, Tensor]], moved: Mapping[str, Mapping[str, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Of one map what every task vector makes of all inputs, `[rows, tasks]`, and what is wanted, `[rows]`; a row per
    token and output, weighted so that every task's Gram matrix has norm 1."""
    columns, wanted = [], []
    for task, own in given.items():
        x = own[name] / len(own[name]) ** 0.5
        x = x / torch.linalg.matrix_norm(x.mT @ x).sqrt()
        columns.append(torch.stack([(x @ one[f"{name}.weight"].mT).flatten() for one in moved.values()], dim=1))
        wanted.append((x @ moved[task][f"{name}.weight"].mT).flatten())
    return torch.cat(columns), torch.cat(wanted)


@torch.no_grad()
def expected(reference: Reference, blocks: Sequence[str]) -> tuple[dict[str, Tensor], dict[str, dict[str, float]]]:
    """Every tensor of the merged model by its name; J by map at c, at 0 and at Task Arithmetic's coefficients."""
    experts, samples = reference.experts, reference.samples["calibration"]
    base, losses = dict(reference.models["base"].named_parameters()), {}
    moved = {task: {name: p - base[name] for name, p in one.named_parameters()} for task, one in experts.items()}
    merged = deepcopy(reference.models["base"])
    for name, parameter in merged.named_parameters():
        parameter.add_(torch.stack([own[name] for own in moved.values()]).mean(0))
    for block in blocks:
        names = list(linears_of(merged, block))
        given = {task: inputs_of(merged, samples[task], names) for task in experts}
        for name in names:
            rows, wanted = rows_and_answers(name, given, moved)
            c = torch.linalg.lstsq(rows, wanted[:, None], driver="gelsd").solution[:, 0]
            tries = {"best": c, "none": 0 * c, "arithmetic": 0 * c + 0.3, "average": 0 * c + 1 / len(c)}
            losses[name] = {kind: float((rows @ one - wanted).square().sum()) for kind, one in tries.items()}
            for kind in (kind for kind in ("weight", "bias") if f"{name}.{kind}" in base):
                step = sum(one * own[f"{name}.{kind}"] for one, own in zip(c.tolist(), moved.values(), strict=True))
                merged.get_parameter(f"{name}.{kind}").copy_(base[f"{name}.{kind}"] + step)
    return dict(merged.named_parameters()), losses


def test_every_tensor(reference: tuple[Reference, Sequence[str]]) -> None:
    """And what the record says of the objective: never above that of the coefficients of Task Arithmetic."""
    models, blocks = reference
    found = fit(models.exact, FEW)
    theirs, losses = expected(models, blocks)
    for name, tensor in found.weights.read(models.exact.adapter.tower).items():
        torch.testing.assert_close(
            tensor, theirs[name].detach(), rtol=1e-7, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}"
        )
    captured = found.record["captured"]
    assert captured.keys() == losses.keys() == found.record["coefficients"].keys()
    for name, loss in losses.items():
        assert captured[name] == pytest.approx(1 - loss["best"] / loss["none"], abs=1e-8)
        assert loss["best"] <= min(loss.values()) + 1e-12
        assert (1 - captured[name]) * loss["none"] <= loss["arithmetic"] + 1e-9


def test_a_task_alone_is_its_expert(tiny64: Family) -> None:
    task = TASKS[0]
    suite = tiny64.suite.model_copy(update={"tasks": {task: tiny64.suite.tasks[task]}})
    family = replace(tiny64, suite=suite, experts={task: tiny64.experts[task]})
    found = fit(family, FEW)
    for name, tensor in family.experts[task].read(family.adapter.tower).items():
        torch.testing.assert_close(found.weights.read([name])[name], tensor, rtol=1e-9, atol=1e-9)
    for name, own in found.record["coefficients"].items():
        assert own == {task: pytest.approx(1)}
        assert found.record["captured"][name] == pytest.approx(1)


def test_equal_experts_share_and_one_that_stayed_has_none(tiny64: Family) -> None:
    """Of many solutions the shortest: halves; and what all experts left alone is the base's."""
    one = tiny64.experts[TASKS[0]]
    equal = fit(replace(tiny64, experts=dict.fromkeys(TASKS, one)), FEW)
    for own in equal.record["coefficients"].values():
        assert own == dict.fromkeys(TASKS, pytest.approx(0.5))
    still = InMemory("base", tiny64.base.read(tiny64.adapter.tower))
    found = fit(replace(tiny64, experts={TASKS[0]: one, TASKS[1]: still}), FEW)
    assert all(own[TASKS[1]] == 0 and 0 < own[TASKS[0]] < 1 for own in found.record["coefficients"].values())
    nobody = fit(replace(tiny64, experts=dict.fromkeys(TASKS, still)), FEW)
    for name, tensor in nobody.weights.read(tiny64.adapter.tower).items():
        torch.testing.assert_close(tensor, still.tensors[name], rtol=1e-12, atol=1e-12)
    assert {*nobody.record["captured"].values()} == {1.0}


def test_the_optimum_has_no_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    vectors = [*torch.randn(3, 5, 4, generator=generator, dtype=torch.float64)]
    roots = torch.randn(3, 9, 4, generator=generator, dtype=torch.float64)
    grams = [root.mT @ root for root in roots]
    total = grams[0] + grams[1] + grams[2]
    answer = torch.stack([tau @ gram for tau, gram in zip(vectors, grams, strict=True)]).sum(0)
    c, gain = best([tau @ total for tau in vectors], vectors, answer)
    leaf = c.clone().requires_grad_()

    def objective(c: Tensor) -> Tensor:
        merged = torch.einsum("k,kmd->md", c, torch.stack(vectors))
        terms = [(((t - merged) @ g) * (t - merged)).sum() for t, g in zip(vectors, grams, strict=True)]
        return torch.stack(terms).sum()

    objective(leaf).backward()
    assert leaf.grad is not None
    assert float(leaf.grad.abs().max()) < 1e-10
    assert float(objective(torch.zeros(3).double()) - objective(c)) == pytest.approx(gain)


def test_a_model_like_any_other(tiny: Family, tmp_path: Path) -> None:
    assert resolve_model("coefficients:samples=8", tiny).name == "coefficients:samples=8,seed=42"
    found = fit(tiny, FEW)
    written = found.save(tmp_path / "out")
    assert written["coefficients"] == found.record["coefficients"]
    assert evaluate(tiny, "coefficients:samples=12").average == evaluate(tiny, str(tmp_path / "out")).average
