"""One closed step on margins: its system by autograd's Jacobian, leave-one-out errors by leaving one out, its guard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command_line import Run
from tiny_decoders import fresh
from torch import Tensor

from featcal import evaluate
from featcal.baselines import margin_step
from featcal.baselines.common.fit import fit
from featcal.baselines.margin_step import FLOOR, MarginStep, solve_kernel
from featcal.calibration.calibrate import expert_passes
from featcal.evaluation.evaluate import heads_of
from featcal.family.opening import Family
from featcal.models.adapter import walking
from featcal.models.whole_forward import final, spread_samples
from featcal.suite.calibration_options import CalibrationConfig
from featcal.system.errors import InputError
from featcal.system.json_files import read_json

ALWAYS = MarginStep(samples=4, guard=-1e9)
ON_THE_SAME = CalibrationConfig(samples=4, patch_weight=1.0)


def names_of(family: Family) -> list[str]:
    return [block.stored_name(name) for block in family.adapter.blocks() for name in block.linears]


def margins_of(family: Family) -> tuple[Callable[[Mapping[str, Tensor]], Tensor], Tensor, Tensor]:
    """The margins of all samples as a function of the weights, what they are short of, and the mean of each task's."""
    run, passes = family.run(), expert_passes(family, ON_THE_SAME)
    heads = heads_of(family, {task: one.weights for task, one in passes.items()}, "calibration")
    stored = run.compute.place(family.merged.read(family.adapter.tower))

    def score(task: str, tensors: Mapping[str, Tensor]) -> Tensor:
        head = heads[task]
        assert head is not None
        return torch.cat([head.scores(final(run, tensors, batch)) for batch in passes[task].batches])

    best, rivals, wanted, scales = {}, {}, [], []
    for task, one in passes.items():
        theirs = score(task, run.compute.place(one.weights.read(family.adapter.tower)))
        best[task] = theirs.argmax(1, keepdim=True)
        rivals[task] = score(task, stored).scatter(1, best[task], -torch.inf).argmax(1, keepdim=True)
        wanted.append((theirs.gather(1, best[task]) - theirs.gather(1, rivals[task]))[:, 0])
        scales.append(wanted[-1].abs().mean().expand(len(theirs)))

    def margins(weights: Mapping[str, Tensor]) -> Tensor:
        every = []
        for task in passes:
            scores = score(task, {**stored, **weights})
            every.append((scores.gather(1, best[task]) - scores.gather(1, rivals[task]))[:, 0])
        return torch.cat(every)

    return margins, torch.cat(wanted) - margins({}), torch.cat(scales)


def metrics_of(family: Family, seen_by_all: set[str]) -> dict[str, Tensor]:
    """A_l of every map, from inputs that hooks see: of maps that are not in `seen_by_all` those of the class token."""
    run, passes, given = family.run(), expert_passes(family, ON_THE_SAME), dict[str, list[Tensor]]()
    stored = run.compute.place(family.merged.read(family.adapter.tower))
    maps = {block.stored_name(name): one for block in family.adapter.blocks() for name, one in block.linears.items()}
    for one in passes.values():
        own: dict[str, list[Tensor]] = {name: [] for name in maps}
        handles = [
            module.register_forward_pre_hook(lambda _, inputs, kept=own[name]: kept.append(inputs[0]))
            for name, module in maps.items()
        ]
        for batch in one.batches:
            final(run, stored, batch)
        for handle in handles:
            handle.remove()
        for name, inputs in own.items():
            x = torch.cat(inputs)
            rows = x.flatten(0, 1) if name in seen_by_all else x[:, 0]
            given.setdefault(name, []).append(rows.mT @ rows)
    found = {}
    for name, moments in given.items():
        total = torch.stack([one / one.norm() for one in moments]).sum(0)
        found[name] = total / total.diagonal().mean() + FLOOR * torch.eye(len(total)).double()
    return found


def test_the_step_is_the_smallest_that_the_linearised_margins_ask_for(
    tiny64: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `torch.func.jacrev` of all margins by all weights: its ridge objective has gradient 0 at the step."""
    monkeypatch.setattr(margin_step, "SKETCHED", 0)
    found, names = fit(tiny64, ALWAYS), names_of(tiny64)
    last = tiny64.adapter.blocks()[-1]
    alone = {last.stored_name(name) for name in last.linears if not name.endswith(("k_proj", "v_proj"))}
    weights = [f"{name}.weight" for name in names]
    before, after = tiny64.merged.read(weights), found.weights.read(weights)
    with walking(tiny64.adapter):
        metrics = metrics_of(tiny64, {*names} - alone)
        margins, short, scales = margins_of(tiny64)
        slopes = torch.func.jacrev(margins)({name: tensor.double() for name, tensor in before.items()})
    change = {name: (after[f"{name}.weight"] - before[f"{name}.weight"]).double() for name in names}
    left = short - torch.stack([(slopes[f"{n}.weight"] * change[n]).sum((1, 2)) for n in names]).sum(0)
    inverse = {name: torch.linalg.inv(metrics[name]) for name in names}
    squares = [torch.einsum("nmd,de,nme->n", own := slopes[f"{n}.weight"], inverse[n], own) for n in names]
    ridge = found.record["ridge"] * float((torch.stack(squares).sum(0) / scales.square()).mean())
    moved = 0
    for name in names:
        pull = torch.einsum("n,nmd->md", left / scales.square(), slopes[f"{name}.weight"])
        if float(pull.norm()) > 1e-9:  # keys: a shift of all of them changes nothing, their weights do
            error = (ridge * change[name] @ metrics[name] - pull).norm() / pull.norm()
            assert float(error) < 1e-3, name
            moved += 1
    assert moved == len(names)


def test_a_step_is_taken_where_its_error_is_small_enough_alone(tiny: Family) -> None:
    found = fit(tiny, ALWAYS)
    r2 = found.record["leave_one_out_r2"]
    assert found.record | {"taken": True, "rows": 4 * len(tiny.experts)} == found.record
    kept, taken = fit(tiny, replace(ALWAYS, guard=r2)), fit(tiny, replace(ALWAYS, guard=r2 - 1e-6))
    assert (kept.record["taken"], taken.record["taken"]) == (False, True)
    for name in tiny.merged.info:
        assert kept.weights.read([name])[name].equal(tiny.merged.read([name])[name])
        assert taken.weights.read([name])[name].equal(found.weights.read([name])[name])


def test_few_samples_of_every_task_do(tiny: Family) -> None:
    assert fit(tiny, replace(ALWAYS, rows=len(tiny.experts) * 2)).record["rows"] == len(tiny.experts) * 2


def test_a_part_of_the_samples_is_spread_over_their_source(tiny: Family) -> None:
    """Pictures in folders come class by class: the first ones would be of a few classes."""
    one = next(iter(expert_passes(tiny, CalibrationConfig(samples=4)).values()))
    batches = [{"x": torch.arange(5)}, {"x": torch.arange(5, 9)}]
    one = replace(one, batches=batches, indices=(80, 10, 60, 30, 40, 50, 20, 70, 0))
    assert [int(sample.inputs["x"]) for sample in spread_samples(one, 3)] == [0, 4, 8]
    assert [sample.number for sample in spread_samples(one, 9)] == [*range(9)]


def test_a_sketch_estimates_the_kernel(tiny64: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = []
    for directions in (0, 400):
        monkeypatch.setattr(margin_step, "SKETCHED", directions)
        monkeypatch.setattr(margin_step, "solve_kernel", lambda k, r: kernels.append(k) or solve_kernel(k, r))
        fit(tiny64, ALWAYS)
    exact, estimated = kernels
    assert float((estimated - exact).norm() / exact.norm()) < 0.1


def test_text_has_margins_between_answers(tmp_path: Path) -> None:
    family = fresh("llama", tmp_path).family
    found = fit(family, ALWAYS)
    assert found.record["taken"]
    assert found.record["rows"] == 4 * len(family.experts)


def test_a_mixture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="margin-step: a mixtral model is a mixture"):
        fit(fresh("mixtral", tmp_path).family, ALWAYS)


def test_errors_of_leaving_one_out_are_those_of_leaving_it_out() -> None:
    noise = torch.Generator().manual_seed(0)
    rows, wanted = (torch.randn(*size, generator=noise, dtype=torch.float64) for size in ((9, 6), (9,)))
    kernel = rows @ rows.mT
    found = solve_kernel(kernel, wanted)
    best = -torch.inf
    for ridge in margin_step.RIDGES:
        errors = []
        for one in range(9):
            kept = [n for n in range(9) if n != one]
            inside = kernel[kept][:, kept] + ridge * kernel.diagonal().mean() * torch.eye(8).double()
            errors.append(wanted[one] - kernel[one, kept] @ torch.linalg.solve(inside, wanted[kept]))
        r2 = 1 - float(torch.stack(errors).square().sum() / wanted.square().sum())
        if r2 > best:
            best, which = r2, ridge
    assert (found.ridge, found.r2) == (which, pytest.approx(best, rel=1e-9))
    nothing = solve_kernel(kernel, torch.zeros_like(wanted))  # the model's margins are the experts' already
    assert (nothing.r2, nothing.coefficients.abs().max()) == (0.0, 0.0)


@pytest.mark.slow
def test_merge_writes_it_and_says_whether_it_was_taken(
    tiny: Family, tiny_suite_file: Path, run: Run, tmp_path: Path
) -> None:
    name = "margin-step:samples=4,guard=-1000@calibrated:samples=4"
    code, shown, _ = run("merge", tiny_suite_file, "--method", name, "--out", tmp_path / "out", "--device", "cpu")
    record = read_json(tmp_path / "out" / "featcal.json")
    assert code == 0
    assert [line.split() for line in shown.splitlines()[:2]] == [
        ["leave-one-out", "R2", "step"],
        [f"{record['leave_one_out_r2']:.3f}", "taken"],
    ]
    assert evaluate(tiny, str(tmp_path / "out")).average == evaluate(tiny, name).average
