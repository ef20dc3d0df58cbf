"""Errors weighed by the experts' decisions: the directions by finite differences, the solution by its gradient, what is
refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from clip_config import clip_config
from safetensors.torch import load_file
from tiny_decoders import fresh
from tiny_encoders import ROWS, tiny_encoder
from tiny_text import text_suite
from torch import Tensor

from featcal import CalibrationConfig, InputError, NumericalError, calibrate_to_folder, load_suite
from featcal.calibration import closed_form, decisions
from featcal.calibration.block_preview import build_preview
from featcal.calibration.block_statistics import BlockStatistics
from featcal.calibration.calibrate import calibrate_family, expert_passes
from featcal.calibration.conditioning import measure_conditioning
from featcal.calibration.decisions import (
    ENOUGH,
    KEPT,
    OutputMetric,
    TaskShare,
    add_directions,
    bias_in_metrics,
    principal_rows,
    weigh_by_decisions,
)
from featcal.calibration.gram import Gram
from featcal.calibration.linear_group import LinearGroup
from featcal.evaluation.evaluate import heads_of
from featcal.family.opening import Family, batches_of, open_family
from featcal.formats.weights import InMemory, Overlay, Weights
from featcal.models import whole_forward
from featcal.models.compute import Compute, computing
from featcal.models.features import final_features
from featcal.models.whole_forward import spread_samples, tape_bytes
from featcal.testing.trial import TASKS, Trial, write_trial

ON = {"recipe": "informed", "decisions": 0.9}


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """U itself, a row per sample, in place of its principal directions."""
    monkeypatch.setattr(decisions, "principal_rows", lambda rows: rows)


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last digits, in place of as far as scores see."""
    monkeypatch.setattr(decisions, "ENOUGH", 1e-10)


def bert(root: Path) -> Trial:
    return write_trial(tiny_encoder(ROWS["bert"]), ROWS["bert"], root)


def doubled(family: Family) -> Family:
    """The family in float64, with the experts' heads."""

    def double(model: Weights) -> Weights:
        return InMemory(model.label, {name: tensor.double() for name, tensor in model.read(model.info).items()})

    experts = {task: double(expert) for task, expert in family.experts.items()}
    compute = Compute(torch.device("cpu"), torch.float64)
    return replace(family, compute=compute, base=double(family.base), merged=double(family.merged), experts=experts)


def margins(family: Family, task: str, name: str, shift: Tensor) -> Tensor:
    """Margins of a task's expert on its samples, with a shift added to the bias of a map."""
    expert, bias = family.experts[task], f"{name}.bias"
    moved = Overlay("moved", expert, {bias: expert.read([bias])[bias] + shift})
    drawn = family.samples(task, "calibration", None, 42)
    features = final_features(family.adapter, moved, {}, batches_of(drawn, 3, torch.device("cpu")), family.compute)
    head = heads_of(family, {task: expert}, "calibration")[task]
    assert head is not None
    best = head.scores(features).topk(2, dim=1).values
    return best[:, 0] - best[:, 1]


@pytest.mark.usefixtures("all_rows")
@pytest.mark.parametrize("inside", ["attention.self.value", "output.dense"])
def test_directions_are_the_slopes_of_the_margins(inside: str, tmp_path: Path) -> None:
    family = doubled(bert(tmp_path).family)
    name = next(n for b in family.adapter.blocks()[:1] for n in map(b.stored_name, b.linears) if n.endswith(inside))
    config = CalibrationConfig(samples=5, batch_size=4)
    passes = add_directions(family, family.run(), expert_passes(family, config))
    for task, one in passes.items():
        rows = one.directions[name]
        along, step = noise(3, rows.shape[1]), 1e-5
        slope = (margins(family, task, name, step * along) - margins(family, task, name, -step * along)) / (2 * step)
        # Batches of one shape: the samples stand in another order.
        torch.testing.assert_close((rows @ along).sort().values, slope.sort().values, rtol=1e-6, atol=1e-9)
        assert float(slope.abs().max()) > 1e-3


def test_every_other_answer_is_a_rival_in_its_turn() -> None:
    best, second = torch.tensor([7, 3, 7, 7]), torch.tensor([1, 1, 1, 1])
    assert decisions._choose_rivals(best, second, [3, 5, 7], range(4)).tolist() == [3, 7, 3, 5]
    assert decisions._choose_rivals(best, second, [3, 5, 7], range(1, 5)).tolist() == [5, 5, 5, 3]
    assert decisions._choose_rivals(best, second, [7], range(4)).tolist() == [1, 7, 1, 1]


@pytest.mark.usefixtures("all_rows")
def test_directions_of_text_do_not_depend_on_the_batches(tmp_path: Path) -> None:
    """Batches of other sizes leave other padding, so that the samples stand in another order."""
    family = doubled(fresh("llama", tmp_path).family)
    found = []
    for size in (8, 2):
        passes = expert_passes(family, CalibrationConfig(samples=8, batch_size=size))
        found.append(add_directions(family, family.run(), passes))
    for task in TASKS:
        for name, rows in found[0][task].directions.items():
            other = found[1][task].directions[name]
            torch.testing.assert_close(other.mT @ other, rows.mT @ rows, rtol=1e-8, atol=1e-12)


def test_rivals_of_text_are_the_first_tokens_of_all_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, asked = fresh("llama", tmp_path).family, set()
    monkeypatch.setattr(
        decisions, "_choose_rivals", lambda best, second, answers, _: asked.add(tuple(answers)) or second
    )
    add_directions(family, family.run(), expert_passes(family, CalibrationConfig(samples=5, batch_size=4)))
    first = set()
    for task, expert in family.experts.items():
        batches = batches_of(family.samples(task, "calibration", 5, 42), 4, family.compute.device)
        features = final_features(family.adapter, expert, family.head(), batches, family.compute)
        tensors = family.compute.place(expert.read(family.adapter.tower))
        first |= {*family.adapter.output(tensors, features).argmax(1).tolist()}
    assert asked == {tuple(sorted(first))}
    assert len(first) > 2


def test_rivals_of_text_are_answers_to_samples_from_all_over_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source that is sorted by class has one answer only at its beginning."""
    family, taken = fresh("llama", tmp_path).family, dict[str, list[int]]()
    monkeypatch.setattr(decisions, "ANSWERED", 3)
    passes = expert_passes(family, CalibrationConfig(samples=8, batch_size=3))

    def look(one: Any, most: int) -> Any:
        found = spread_samples(one, most)
        taken[one.task] = [one.indices[sample.number] for sample in found]
        return found

    monkeypatch.setattr(decisions, "spread_samples", look)
    decisions.find_answers(family.run(), passes, dict.fromkeys(TASKS))
    for task in TASKS:
        rising = sorted(passes[task].indices)
        assert sorted(taken[task]) == [rising[0], rising[len(rising) // 2], rising[-1]]


@pytest.mark.parametrize("kind", ["t5", "llama"])
def test_every_token_of_an_answer_is_a_decision_in_its_turn(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sample n takes token n of its answer, counted round, with the library's own scores of it."""
    family = open_family(load_suite(text_suite(tmp_path, kind)), "cpu")
    passes = expert_passes(family, CalibrationConfig(samples=6, batch_size=4))
    seen: dict[tuple[str, int], int] = {}

    def record(best: Tensor, second: Tensor, _: object, turns: Sequence[int]) -> Tensor:
        seen.update({(task, turn): token for turn, token in zip(turns, best.tolist(), strict=True)})
        return second

    monkeypatch.setattr(decisions, "_choose_rivals", record)
    for task, one in passes.items():
        add_directions(family, family.run(), {task: one})
        drawn = family.samples(task, "calibration", 6, 42)
        adapter: Any = family.adapter
        model = adapter.whole(family.compute.place(family.experts[task].read(adapter.tower)), family.base_folder)
        for turn in range(len(drawn)):
            own = {name: tensor[turn : turn + 1] for name, tensor in drawn.inputs.items()}
            if kind == "t5":
                labels = own["labels"][own["labels"] >= 0][None]
                logits = model(input_ids=own["input_ids"], attention_mask=own["attention_mask"], labels=labels).logits
                places = list(range(labels.shape[1]))
            else:
                logits = model(input_ids=own["input_ids"], attention_mask=own["attention_mask"]).logits
                places = [int(place) - 1 for place in own["completion_mask"][0].nonzero()]
            assert len(places) == 2  # a word, and the end
            assert seen[task, turn] == int(logits[0, places[turn % len(places)]].argmax()), (task, turn)


def problem(tasks: int = 3, outputs: int = 7, inputs: int = 5) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Gram matrices, targets and directions by task."""
    rows = [noise(i, 30, inputs) for i in range(tasks)]
    grams = [one.T @ one / 30 for one in rows]
    return grams, [noise(20 + i, outputs, inputs) for i in range(tasks)], [noise(40 + i, 4, outputs) for i in range(3)]


def metric(rows: Tensor, share: float) -> Tensor:
    """S by its definition."""
    m = rows.shape[1]
    return (1 - share) * torch.eye(m, dtype=torch.float64) + share * m * rows.T @ rows / rows.square().sum()


def keep(rows: Tensor) -> Tensor:
    """The principal directions that count, by another decomposition."""
    _, sizes, along = torch.linalg.svd(rows, full_matrices=False)
    kept = torch.cumsum(sizes.square(), 0) - sizes.square() < KEPT * sizes.square().sum()
    return torch.diag(sizes[kept]) @ along[kept]


@pytest.mark.parametrize(("second", "third", "count"), [(0.0905, 0.0095, 2), (0.0895, 0.0105, 3)])
def test_the_fewest_directions_count_that_hold_99_of_100(second: float, third: float, count: int) -> None:
    rows = torch.tensor([0.9, second, third], dtype=torch.float64).sqrt().diag()
    kept = principal_rows(rows)
    torch.testing.assert_close(kept.mT @ kept, torch.diag((rows @ rows).diagonal() * (torch.arange(3) < count)))
    factor = OutputMetric.from_rows(kept, 0.9).factor
    assert factor.shape == (3, count)
    assert float(factor.square().sum()) == pytest.approx(0.9 * 3)  # however many they are


def test_half_of_the_samples_may_have_no_gradient() -> None:
    """Float32 finds no eigenvectors of one in ten such Gram matrices, with Intel's library at least."""
    for seed in range(40):
        drawn = torch.Generator().manual_seed(seed)
        rows = torch.randn(256, 1, generator=drawn) @ torch.randn(1, 128, generator=drawn)
        rows[torch.randperm(256, generator=drawn)[:128]] = 0
        rows /= 2 * rows.norm()
        kept = principal_rows(rows)
        assert (kept.shape, kept.dtype) == ((1, 128), torch.float32)
        torch.testing.assert_close(kept.mT @ kept, rows.mT @ rows, atol=1e-7, rtol=1e-4)


def solve(
    metrics: list[OutputMetric], grams: list[Tensor], targets: list[Tensor], anchor: Tensor, lam: float, known: Tensor
) -> Tensor:
    """The solution, with a prior that is `known` on the left."""
    left = torch.stack(grams).sum(0) + known
    factor = closed_form.left_factor(left.clone, lam, 0.0)
    plain = closed_form.weight_by_factor(factor, torch.stack(targets).sum(0), anchor, lam)
    tasks = [TaskShare(one, Gram([gram]), target) for one, gram, target in zip(metrics, grams, targets, strict=True)]
    return weigh_by_decisions(tasks, plain, factor, left.clone, lam)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("share", [0.3, 0.9, 0.99])
@computing
def test_the_solution_minimises_the_objective(share: float) -> None:
    grams, targets, rows = problem()
    anchor, lam, known = noise(9, 7, 5), 0.01, 0.1 * torch.eye(5).double()
    metrics = [OutputMetric.from_rows(principal_rows(one), share) for one in rows]
    weight = solve(metrics, grams, targets, anchor, lam, known).requires_grad_()
    dense = [metric(keep(one), share) for one in rows]
    parts = [
        torch.trace(s @ (w @ g @ w.T - 2 * t @ w.T))
        for s, w, g, t in zip(dense, [weight] * 3, grams, targets, strict=True)
    ]
    total = torch.stack(parts).sum() + torch.trace(weight @ known @ weight.T) + lam * (weight - anchor).square().sum()
    (slope,) = torch.autograd.grad(total, weight)
    assert float(slope.norm()) < 1e-5 * float(weight.detach().norm())
    torch.testing.assert_close(metrics[0].dense(), dense[0])


@pytest.mark.usefixtures("exact")
@computing
def test_tasks_that_see_alike_are_solved_as_without() -> None:
    """One S for all, and nothing else: it cancels."""
    grams, targets, rows = problem()
    anchor = noise(9, 7, 5)
    metrics = [OutputMetric.from_rows(principal_rows(rows[0]), 0.9)] * 3
    found = solve(metrics, grams, targets, anchor, 0.0, torch.zeros(5, 5).double())
    plain = torch.linalg.solve(torch.stack(grams).sum(0), torch.stack(targets).sum(0).mT).mT
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6)


@computing
def test_the_bias_minimises_its_objective() -> None:
    anchor, lam, rows = noise(0, 6), 0.05, [noise(1 + i, 3, 6) for i in range(2)]
    metrics = [OutputMetric.from_rows(principal_rows(rows[0]), 0.8), None]
    omegas, wanted = [torch.tensor(0.3).double(), torch.tensor(0.7).double()], [noise(5, 6), noise(6, 6)]
    errors = [omega * own for omega, own in zip(omegas, wanted, strict=True)]
    bias = bias_in_metrics(metrics, omegas, errors, anchor, lam).requires_grad_()
    dense = [metric(keep(rows[0]), 0.8), torch.eye(6, dtype=torch.float64)]
    parts = [w * (bias - y) @ (one @ (bias - y)) for w, y, one in zip(omegas, wanted, dense, strict=True)]
    (slope,) = torch.autograd.grad(torch.stack(parts).sum() + lam * (bias - anchor).square().sum(), bias)
    assert float(slope.norm()) < 1e-12


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("options", [{}, {"recipe": "refined"}])
def test_every_map_of_a_calibration_has_gradient_0(options: dict[str, str], tmp_path: Path) -> None:
    """In the metrics of the experts' own directions, read from the passes and not from the solver."""
    family = doubled(bert(tmp_path).family)
    config = CalibrationConfig(**ON | options, lam=0.01, samples=5, batch_size=4)
    seen: list[BlockStatistics] = []
    made = calibrate_family(family, config, watch=lambda one: seen.append(one.with_config(one.config)))
    passes, checked = add_directions(family, family.run(), expert_passes(family, config)), 0
    for statistics in seen:
        block, old = statistics.block, {n: family.merged.read([n])[n] for n in statistics.block.names}
        merged, base = block.local(old), block.local(family.base.read(block.names))
        solved = block.local(made.weights.read(block.names))
        for group in (one for one in statistics.groups if isinstance(one, LinearGroup)):
            for place, name in enumerate(group.names):
                slope = slope_of(group, place, (solved, merged, base), made.config, [
                    passes[task].directions.get(block.stored_name(name)) for task in TASKS
                ])  # fmt: skip
                assert slope < 1e-4, (str(group), name)
                checked += 1
    assert checked == 12


def slope_of(
    group: LinearGroup,
    place: int,
    models: tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]],
    config: CalibrationConfig,
    directions: list[Tensor | None],
) -> float:
    """Norm of the gradient of J at the solved weight of one map, beside that of the right-hand side."""
    name, sums = group.names[place], group.sums
    weight, merged, base = (one[f"{name}.weight"] for one in models)
    anchor = config.rho * merged + (1 - config.rho) * base
    slope, scale = (config.lam + config.eps) * weight - config.lam * anchor, config.lam * anchor
    for (own, _), rows in zip(sums.apart, directions, strict=True):
        m = len(weight)
        s = torch.eye(m, dtype=torch.float64) if rows is None else metric(rows, config.decisions)
        target = own.target[m * place : m * (place + 1)]
        slope, scale = slope + s @ (weight @ own.gram.full(torch.float64) - target), scale + s @ target
    if sums.priors:
        prior = sums.priors[place]
        slope = slope + config.mu * (weight @ prior.gram.full(torch.float64) - prior.target(base, config.rho))
    return float(slope.norm() / scale.norm())


def test_pictures_and_continued_text_have_decisions_too(tiny: Family, tmp_path: Path) -> None:
    for family in (tiny, fresh("llama", tmp_path).family):
        config = CalibrationConfig(**ON, samples=5, batch_size=4)
        moved, plain = (calibrate_family(family, one).weights for one in (config, replace(config, decisions=0.0)))
        names = [f"{n}.weight" for b in family.adapter.blocks() for n in map(b.stored_name, b.linears)]
        apart = [not moved.read([n])[n].allclose(plain.read([n])[n], rtol=1e-4) for n in names]
        assert sum(apart) >= len(names) - 2


@pytest.mark.slow
def test_rounded_weights_stay_as_near_as_without(tmp_path: Path) -> None:
    family = fresh("llama", tmp_path).family
    names = [f"{n}.weight" for b in family.adapter.blocks() for n in map(b.stored_name, b.linears)]

    def lost(share: float) -> tuple[Weights, Tensor]:
        config = CalibrationConfig(**{**ON, "decisions": share}, samples=5, batch_size=4)
        whole = calibrate_family(family, config).weights
        rounded = calibrate_family(family, replace(config, quantize="int8", group_size=0)).weights
        apart = [(rounded.read([n])[n] - whole.read([n])[n]).norm() / whole.read([n])[n].norm() for n in names]
        return rounded, torch.stack(apart)

    (weighed, far), (plain, near) = lost(0.7), lost(0.0)
    assert 0 < float(far[0]) < 1.2 * float(near[0])  # later maps are fitted to rounded ones
    assert float(far.max()) < 1.5 * float(near.max())
    assert not weighed.read(names)[names[0]].allclose(plain.read(names)[names[0]], rtol=1e-3)


def test_without_gradients_it_is_said(tiny: Family) -> None:
    with torch.inference_mode(), pytest.raises(InputError, match=r"decisions: its gradients .* torch\.inference_mode"):
        calibrate_family(tiny, CalibrationConfig(**ON, samples=5))


@pytest.mark.parametrize("share", [0.7, 0.9])
def test_what_is_left_is_a_hundredth_of_the_plain_residual(share: float) -> None:
    """Of what the outputs that a V reaches are asked, in the system itself."""
    grams, targets, rows = problem()
    anchor, lam = noise(9, 7, 5), 0.01
    metrics = [OutputMetric.from_rows(principal_rows(one), share) for one in rows]
    weight = solve(metrics, grams, targets, anchor, lam, torch.zeros(5, 5).double())
    left = torch.stack(grams).sum(0) + lam * torch.eye(5).double()
    plain = torch.linalg.solve(left, (torch.stack(targets).sum(0) + lam * anchor).mT).mT
    reached, _ = torch.linalg.qr(torch.cat([one.factor for one in metrics], dim=1))

    def residual(weight: Tensor) -> float:
        parts = [metric(keep(one), share) @ (t - weight @ g) for one, t, g in zip(rows, targets, grams, strict=True)]
        return float((reached.mT @ (torch.stack(parts).sum(0) + lam * (anchor - weight))).norm())

    assert 0 < residual(weight) <= 1.001 * ENOUGH * residual(plain)


def never(_: str) -> bool:
    return False


def test_a_shift_that_all_keys_share_has_no_direction(tiny: Family, tmp_path: Path) -> None:
    """It cancels in the softmax unless keys turn with their position; what is measured of it is rounding."""
    cases: list[tuple[Family, Callable[[str], bool]]] = [
        (tiny, lambda name: name.endswith("k_proj")),
        (bert(tmp_path / "bert").family, lambda name: name.endswith("attention.self.key")),
        (open_family(load_suite(text_suite(tmp_path / "t5", "t5"))), lambda name: name.endswith(".k")),
        (fresh("llama", tmp_path / "llama").family, never),
    ]
    for family, idle in cases:
        passes = add_directions(family, family.run(), expert_passes(family, CalibrationConfig(samples=5)))
        maps = {block.stored_name(name) for block in family.adapter.blocks() for name in block.linears}
        for one in passes.values():
            assert maps - one.directions.keys() == {name for name in maps if idle(name)}, one.task


def test_a_search_that_does_not_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    grams, targets, rows = problem()
    anchor = noise(9, 7, 5)
    monkeypatch.setattr(decisions, "MOST_STEPS", 2)
    metrics = [OutputMetric.from_rows(principal_rows(one), 0.99) for one in rows]
    with pytest.raises(NumericalError, match=r"2 steps of conjugate gradients leave .*; lower decisions, or raise lam"):
        solve(metrics, grams, targets, anchor, 0.01, torch.eye(5).double())


def test_a_gradient_that_is_not_finite_is_an_error(tmp_path: Path) -> None:
    family = bert(tmp_path).family
    name = family.adapter.closing[0] if family.adapter.closing else family.adapter.blocks()[-1].names[0]
    expert = family.experts["left"]
    broken = Overlay("broken", expert, {name: torch.full_like(expert.read([name])[name], torch.nan)})
    family = replace(family, experts={**family.experts, "left": broken})
    passes = expert_passes(family, CalibrationConfig(samples=5))
    with pytest.raises(NumericalError, match="margins of expert 'left' is not finite"):
        add_directions(family, family.run(), passes)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"recipe": "paper"}, r"decisions is 0\.9; it belongs to the recipe 'refined' or 'informed'"),
        ({"routers": True}, r"decisions is 0\.9: routers cannot go with it"),
        ({"decisions": 1.0}, "decisions is 1"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        CalibrationConfig(**{**ON, **options})  # type: ignore[arg-type]


def test_a_mixture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="decisions: a mixtral model is a mixture"):
        calibrate_family(fresh("mixtral", tmp_path).family, CalibrationConfig(**ON, samples=4))


@pytest.mark.slow
def test_a_limit_of_memory_changes_nothing(tiny: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, one_expert = clip_config(**ON, samples=4), tape_bytes(tiny.adapter.stages, 17)
    calibrate_to_folder(tiny, config, tmp_path / "free")
    # Gradients of one sample at a time.
    monkeypatch.setattr(whole_forward, "TAPE", one_expert)
    monkeypatch.setattr("featcal.calibration.calibrate.state_budget", lambda *_: 2000)
    monkeypatch.setattr("featcal.calibration.calibrate.can_reload", lambda *_: True)
    bound = calibrate_to_folder(tiny, config, tmp_path / "bound", max_memory=1)
    assert bound["spilled_bytes"] > 0
    free, limited = (load_file(tmp_path / out / "model.safetensors") for out in ("free", "bound"))
    for name, tensor in free.items():
        # Rounding of the gradients, which the search spreads over a map: single entries differ by more.
        assert (limited[name] - tensor).norm() <= 1e-3 * tensor.norm(), name


@pytest.mark.parametrize("measure", [measure_conditioning, lambda family, config: _hold(family, config)])
def test_what_needs_one_matrix_per_map_says_so(
    tiny: Family, measure: Callable[[Family, CalibrationConfig], object]
) -> None:
    with pytest.raises(InputError, match="decisions"):
        measure(tiny, clip_config(**ON, samples=4))


def _hold(family: Family, config: CalibrationConfig) -> object:
    passes = expert_passes(family, config)
    return build_preview(family.run(), config, family.merged, family.adapter.block_layers()[0], passes, passes)
