"""Mixtures of experts: what the checks of every decoder (`test_decoders`) do not show. An expert of a mixture is called
a member, since a task's expert is a model."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lanes import rows
from several import calibrated
from tiny_decoders import ROWS, fresh, tiny_decoder
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from featcal import (
    CalibrationConfig,
    Family,
    InputError,
    NumericalError,
    calibrate,
    calibrate_to_folder,
    load_suite,
    open_family,
)
from featcal import cli as command_line
from featcal.calibration.calibrate import expert_passes
from featcal.calibration.closed_form import linear_weight
from featcal.calibration.memory import working_bytes
from featcal.calibration.routed_group import ExpertSlot, RoutedGroup
from featcal.calibration.token_rows import TokenRows
from featcal.drift.source import measure_sources
from featcal.models.adapter import Call
from featcal.models.families.mixture import SHARES, TOKENS, Mixture, separate_members
from featcal.models.lane import BlockStep
from featcal.preflight.check import check_suite
from featcal.suite.schema import CalibrationDefaults
from featcal.testing.reference import every_token, inputs
from featcal.testing.trial import TASKS, Trial

KINDS = ("mixtral", "qwen3_moe")
MEMBERS = 6


@pytest.fixture(autouse=True)
def without_canary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("featcal.calibration.calibrate._generation", lambda *_: {})


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trial]:
    """By kind, each written once."""
    return cache(lambda kind: fresh(kind, tmp_path_factory.mktemp(kind)))


@pytest.fixture(params=rows(KINDS, quick=("qwen3_moe",), slow=("mixtral",)))
def trial(request: pytest.FixtureRequest, trials: Callable[[str], Trial]) -> Trial:
    return trials(request.param)


@pytest.fixture
def qwen(trials: Callable[[str], Trial]) -> Trial:
    return trials("qwen3_moe")


def tensors_of(family: Family, member: str, block: str) -> list[str]:
    """Canonical names of a member's weights, given its name inside a block."""
    found = next(one for one in family.adapter.blocks() if one.name == block)
    return [f"{found.stored_name(name)}.weight" for name in found.maps if name.startswith(f"{member}.")]


def routed_tokens(trial: Trial, block: str, folder: str = "merged") -> dict[str, list[int]]:
    """How many calibration tokens a model's router sends to every member of a block, by task: by the library alone,
    sample by sample."""
    model, found = trial.library(folder), dict[str, list[int]]()
    for task in TASKS:
        chosen: list[Tensor] = []
        experts = model.get_submodule(f"{block}.mlp.experts")
        handle = experts.register_forward_pre_hook(lambda _, args, seen=chosen: seen.append(args[1]))
        with torch.no_grad():
            for sample in trial.single_samples(task):
                model(**sample)
        handle.remove()
        found[task] = torch.cat(chosen).flatten().bincount(minlength=MEMBERS).tolist()
    return found


def test_starved_members_and_routers_stay_as_merged_and_are_listed(
    trial: Trial, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other weight of a member moves."""
    family, out = trial.family, tmp_path / "out"
    words = ["calibrate", str(trial.root / "suite.yaml"), "--out", str(out), "--device", "cpu", "--lam", "0.05"]
    monkeypatch.setattr(sys, "argv", ["featcal", *words])
    with pytest.raises(SystemExit, match="0"):
        command_line.main()
    said, record = capsys.readouterr().err, json.loads((out / "featcal.json").read_text())
    ours, merged = (model.read(family.adapter.tower) for model in (family.model(str(out)), family.merged))
    left = [(block, member) for block, own in record["starved"].items() for member in own]
    starved = {name for block, member in left for name in tensors_of(family, member, block)}
    routers, blocks = set(family.adapter.uncalibrated_names()), family.adapter.blocks()
    inside = {f"{block.stored_name(n)}.weight" for block in blocks for n in block.maps if n not in block.linears}
    assert set() < starved < inside
    assert {name.rpartition(".experts")[0] or name.partition(".gate")[0] for name in inside | routers} == {
        name.removesuffix(".gate.weight") for name in routers
    }
    assert {name for name in inside | routers if ours[name].equal(merged[name])} == starved | routers
    first = blocks[0].name
    widest = max(size for name in tensors_of(family, "mlp.experts.0", first) for size in merged[name].shape)
    counts = [sum(own) for own in zip(*routed_tokens(trial, first).values(), strict=True)]
    few = [i for i in range(MEMBERS) if counts[i] < widest]
    assert record["starved"][first] == [f"mlp.experts.{i}" for i in few]
    for text in (said, (out / "README.md").read_text(), *record["notes"]):
        assert f"{len(left)} experts of mixtures keep the merged weights" in text
        assert f"block 0: {', '.join(map(str, few))}" in text


def test_scores_are_those_of_the_librarys_usual_kernels(trial: Trial) -> None:
    """Which are not the plain loop over experts that the checks compare with."""
    library = AutoModelForCausalLM.from_pretrained(trial.root / "base").eval()
    inputs = trial.padded_inputs(TASKS[0])
    with torch.no_grad():
        scores = trial.scores(library, inputs)
    torch.testing.assert_close(trial.compute_scores(trial.family.base, inputs), scores, rtol=1e-5, atol=1e-5)


def test_padding_counts_for_nothing(qwen: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding is routed too, and counts for no member: other tokens there change nothing but rounding."""
    exact, original = qwen.exact, Family.samples
    before = calibrate(exact, qwen.config())

    def scribbled(self: Family, *args: Any, **kwargs: Any) -> Any:
        drawn = original(self, *args, **kwargs)
        ids, mask = drawn.inputs["input_ids"].clone(), drawn.inputs["attention_mask"]
        ids[mask == 0] = 7
        return replace(drawn, inputs={**drawn.inputs, "input_ids": ids})

    monkeypatch.setattr(Family, "samples", scribbled)
    after = calibrate(exact, qwen.config())
    assert after.record["starved"] == before.record["starved"]
    for name, tensor in before.weights.read(exact.adapter.tower).items():
        torch.testing.assert_close(after.weights.read([name])[name], tensor, rtol=1e-9, atol=1e-10)


def test_only_what_is_chosen_is_calibrated_and_listed(qwen: Trial) -> None:
    family = qwen.family
    merged = family.merged.read(family.adapter.tower)
    moved, starved = {}, {}
    for maps in ("attention", "mlp"):
        made = calibrate(family, qwen.config(maps=maps, blocks="block 0", routers=True))
        ours = made.weights.read(family.adapter.tower)
        moved[maps] = {tuple(name.split(".")[2:5]) for name in ours if not ours[name].equal(merged[name])}
        starved[maps] = made.record.get("starved", {})
    assert moved["attention"] == {("0", "self_attn", f"{name}_proj") for name in "qkvo"}
    assert moved["mlp"] == {("0", "mlp", "experts"), ("0", "mlp", "gate")}
    assert not starved["attention"]
    assert {one.rpartition(".")[0] for one in starved["mlp"].pop("model.layers.0")} == {"mlp.experts"}
    assert not starved["mlp"]


def router_objective(weight: Tensor, trial: Trial, name: str, config: CalibrationConfig) -> Tensor:
    """sum_i 1 / ||G_i|| mean ||W x - W_i t||^2 + lam ||W - W_anc||^2 of a router in the first block of Algorithm 1,
    whose inputs x are the merged model's; all by the library alone."""
    base, merged = (trial.models[which].get_parameter(f"{name}.weight") for which in ("base", "merged"))
    total = config.lam * (weight - config.rho * merged - (1 - config.rho) * base).square().sum()
    for task, expert in trial.experts.items():
        samples = trial.single_samples(task)
        (x, _), (x_expert, _) = (
            inputs(model, [name], samples, every_token)[name] for model in (trial.models["merged"], expert)
        )
        target = torch.lerp(x, x_expert, config.alpha) @ expert.get_parameter(f"{name}.weight").T
        error = (x @ weight.T - target).square().sum(1).mean()
        total = total + error / torch.linalg.matrix_norm(x.T @ x / len(x))
    return total


@pytest.mark.slow
def test_a_router_minimises_the_objective_of_every_map(qwen: Trial) -> None:
    """By the gradient; every router moves, and what it scores with is what the folder holds."""
    config, names = qwen.config(routers=True, eps=0.0), qwen.exact.adapter.uncalibrated_names()
    ours, merged = (model.read(names) for model in (calibrate(qwen.exact, config).weights, qwen.exact.merged))
    assert len(names) == 2
    assert not any(ours[name].equal(merged[name]) for name in names)
    (first, _), router = names, names[0].removesuffix(".weight")
    slope = []
    for weight in (ours[first], merged[first]):
        point = weight.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(router_objective(point, qwen, router, config), point)
        slope.append(float(gradient.abs().max()))
    assert slope[0] < 1e-6 * slope[1]  # the library's norms are in float32


def test_piece_by_piece_a_router_is_solved_before_its_experts(qwen: Trial) -> None:
    """So which of them are starved is by the tokens that the calibrated router sends, not by the merged one's."""
    made, first = calibrate(qwen.family, qwen.config(recipe="refined", routers=True)), qwen.blocks[0]
    made.save(qwen.root / "routed")
    few = {}
    for folder in ("routed", "merged"):
        counts = [sum(own) for own in zip(*routed_tokens(qwen, first, folder).values(), strict=True)]
        few[folder] = [f"mlp.experts.{place}" for place in range(MEMBERS) if counts[place] < 20]
    assert made.record["starved"].get(first, []) == few["routed"] != few["merged"]


def test_models_without_such_a_router_refuse_to_calibrate_one(tmp_path: Path) -> None:
    """A dense model; and a router of its own kind stays as merged, whose scores are not its weight times the state."""
    dense = fresh("llama", tmp_path)
    for refused in (
        lambda: dense.config(routers=True),
        lambda: calibrate(dense.family, CalibrationConfig(routers=True)),
    ):
        with pytest.raises(InputError, match="routers: a llama model is not affected by this option; leave it out"):
            refused()
    with pytest.raises(InputError, match="augment, patch_weight: a llama model is not affected by this option"):
        calibrate(dense.family, CalibrationConfig(augment=1, patch_weight=0.5))
    block = tiny_decoder(ROWS["qwen3_moe"]).model.layers[0]
    for bias, known in ((None, "mlp.gate"), (nn.Parameter(torch.zeros(MEMBERS)), "")):
        block.mlp.experts, block.mlp.gate.bias = Library(MEMBERS, INNER, WIDTH), bias
        separate_members(nn.ModuleList([block]), "mlp.experts", NAMES, 2, "mlp.gate")
        assert block.mlp.experts.router == known


def test_an_interrupted_run_gives_the_same_bits_and_lists_what_it_left(qwen: Trial, tmp_path: Path) -> None:
    def stop(label: str, done: int, total: int) -> None:
        if done == 1:
            raise KeyboardInterrupt

    config = qwen.config(routers=True)
    whole = calibrate(qwen.family, config)
    with pytest.raises(KeyboardInterrupt):
        calibrate_to_folder(qwen.family, config, tmp_path / "out", progress=stop)
    document = calibrate_to_folder(qwen.family, config, tmp_path / "out", resume=True)
    assert document["starved"] == whole.record["starved"]
    names = qwen.family.adapter.tower
    written = qwen.family.model(str(tmp_path / "out")).read(names)
    for name, tensor in whole.weights.read(names).items():
        assert torch.equal(written[name], tensor), name


def test_a_model_that_is_not_loaded_whole_is_written_by_blocks(
    trial: Trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file for every block, verified with one block in memory; the library loads them."""
    monkeypatch.setattr("featcal.calibration.calibrate.can_reload", lambda *_: False)
    document = calibrate_to_folder(trial.family, trial.config(), tmp_path / "out")
    assert document["verified"] == "streamed"
    assert sum(name.endswith(".safetensors") for name in document["written"]) == len(trial.blocks) + 1
    library, inputs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval(), trial.padded_inputs(TASKS[0])
    with torch.no_grad():
        scores = trial.scores(library, inputs)
    ours = trial.compute_scores(trial.family.model(str(tmp_path / "out")), inputs)
    torch.testing.assert_close(ours, scores, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_several_ranks_give_the_tensors_of_one(qwen: Trial, size: int, tmp_path: Path) -> None:
    """Two ranks have a task each; three share one, so a member may get tokens from one rank's part alone."""
    config = qwen.config(routers=True)
    one = calibrate_to_folder(qwen.family, config, tmp_path / "one")
    calibrated(qwen.family, config, tmp_path / "several", size).check()
    record = json.loads((tmp_path / "several" / "featcal.json").read_text())
    assert record["starved"] == one["starved"]
    names = qwen.family.adapter.tower
    ours, theirs = (qwen.family.model(str(tmp_path / name)).read(names) for name in ("several", "one"))
    for name in names:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-6)


def test_sources_are_measured_of_what_all_tokens_pass(qwen: Trial) -> None:
    """Maps of members are left out, since every source sends them other tokens, and so are routers."""
    config = qwen.config(routers=True)
    passes = expert_passes(qwen.family, config)
    found = measure_sources(qwen.family, calibrate(qwen.family, config).weights, config, passes)
    names = {name for one in found for name in one.modules.split(", ")}
    assert names == {name for block in qwen.family.adapter.blocks() for name in block.linears}
    assert min(one.excess for one in found) > -1e-9


def test_preflight_names_the_routers_unless_they_are_calibrated(qwen: Trial) -> None:
    suite = load_suite(qwen.root / "suite.yaml")
    (note,) = [note for note in check_suite(suite).notes if "belong to no linear map" in note]
    assert "2 tensors" in note
    assert "'model.layers.0.mlp.gate.weight'" in note
    asked = suite.model_copy(update={"calibration": CalibrationDefaults(routers=True)})
    assert not [note for note in check_suite(asked).notes if "belong to no linear map" in note]


def test_statistics_of_a_router_take_memory(qwen: Trial) -> None:
    (stage,), info = qwen.family.adapter.stages, qwen.family.merged.info
    off, on = (working_bytes(stage, 0, info, qwen.config(routers=routers), 64, 2) for routers in (False, True))
    assert on - off >= 8 * (16 * 16 + MEMBERS * 16)  # a Gram matrix and targets in float64


def test_parameters_that_a_token_passes() -> None:
    """Two of six members."""
    (dense, mixed) = (tiny_decoder_block(index) for index in (1, 0))
    assert {share for _, share in dense.token_shares()} == {1.0}
    inside = [share for module, share in mixed.token_shares() if module in {*mixed.mixtures["mlp.experts"].modules()}]
    assert inside == [pytest.approx(1 / 3)] * 18
    # inputs and twice the outputs of q, k, v, o and of gate, up, down
    attention = (16 + 48) + 2 * (16 + 24) + (24 + 32)
    assert mixed.features == pytest.approx(attention + 6 / 3 * (2 * (16 + 40) + 20 + 32))


def tiny_decoder_block(index: int) -> Any:
    from featcal.models.families.registry import adapter_for

    config = tiny_decoder(ROWS["qwen3_moe"]).config.to_dict()
    return adapter_for(config, (), torch.device("cpu"), "base").blocks()[index]


def test_stacked_experts_are_refused(tmp_path: Path) -> None:
    """A layout that transformers 5 can write, and 4 cannot read."""
    made = fresh("mixtral", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    model.save_pretrained(tmp_path / "merged", save_original_format=False)
    with pytest.raises(
        InputError, match=r"^merged: the experts of a layer are stacked in one tensor \('model\.layers\."
    ):
        open_family(load_suite(made.root / "suite.yaml"), "cpu")


def test_other_numbers_of_chosen_members_are_refused(tmp_path: Path) -> None:
    made = fresh("qwen3_moe", tmp_path)
    file = tmp_path / "experts" / TASKS[0] / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_experts_per_tok": 3}))
    with pytest.raises(InputError, match="expert 'left': num_experts_per_tok is 3"):
        open_family(load_suite(made.root / "suite.yaml"), "cpu")


class Library(nn.Module):
    """The library's module, as far as a mixture reads it."""

    def __init__(self, members: int, inner: int, width: int) -> None:
        super().__init__()
        self.down_proj = nn.Parameter(torch.empty(members, width, inner))
        self.act_fn = nn.SiLU()


WIDTH, INNER, NAMES = 3, 4, ("gate", "up", "down")


def seat(place: int = 0) -> ExpertSlot:
    return ExpertSlot("mix", Mixture(Library(3, INNER, WIDTH), NAMES, 2), place)


def model(seed: int) -> dict[str, Tensor]:
    """Weights of member 0 by their names in the block."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"gate": (INNER, WIDTH), "up": (INNER, WIDTH), "down": (WIDTH, INNER)}
    return {
        f"mix.0.{name}.weight": torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }


class Task:
    """What the router makes of n tokens, the student's state and the expert's, and the expert."""

    def __init__(self, seed: int, sent: int, tokens: int = 40) -> None:
        generator = torch.Generator().manual_seed(seed)
        draw = {"generator": generator, "dtype": torch.float64}
        self.student, self.expert = (torch.randn(tokens, WIDTH, **draw) for _ in range(2))  # type: ignore[arg-type]
        self.shares = torch.rand(tokens, 3, **draw)  # type: ignore[arg-type]
        self.shares[sent:, 0] = 0
        self.shares[:, 2] = 0
        self.weights, self.model = torch.ones(tokens, dtype=torch.float64), model(seed)

    def count(self, group: RoutedGroup, config: CalibrationConfig, part: slice = slice(None)) -> None:
        shares, states = self.shares[part], self.student[part]
        rows = shares[:, 0].nonzero().squeeze(1)
        inputs = {"mix.shares": shares, "mix.0.gate": states[rows], "mix.0.up": states[rows]}
        call = Call((states,), {})
        step = BlockStep(call, call, {f"mix.{TOKENS}": self.expert[part]}, {})
        tokens = TokenRows.from_weights(self.weights[part][None], len(states))
        group.update(inputs, step, self.model, tokens, len(self.shares), config)


CONFIG = CalibrationConfig(lam=0.05, rho=1.5, alpha=0.3)


def entering() -> RoutedGroup:
    return RoutedGroup(("gate", "up"), "tokens", seat())


def objective(weight: Tensor, tasks: list[Task], anchor: Tensor) -> Tensor:
    """sum_i (N s_i / sum s) / ||G_i|| mean ||W x - W_i t||^2 + lam ||W - W_anc||^2, the mean by g^2."""
    parts, shares = [], []
    for one in tasks:
        g2, all_g2 = one.shares[:, 0].square(), one.shares.square().sum()
        shares.append(g2.sum() / all_g2)
        if not g2.any():
            continue
        share = g2 / g2.sum()
        own = torch.cat([one.model["mix.0.gate.weight"], one.model["mix.0.up.weight"]])
        target = CONFIG.alpha * one.expert + (1 - CONFIG.alpha) * one.student
        gram = torch.linalg.matrix_norm(one.student.T @ (share[:, None] * one.student))
        errors = (one.student @ weight.T - target @ own.T).square().sum(1)
        parts.append(shares[-1] / gram * (share @ errors))
    total = len(tasks) / torch.stack(shares).sum() * torch.stack(parts).sum()
    return total + CONFIG.lam * (weight - anchor).square().sum()


@pytest.mark.parametrize("sent", [(30, 20), (25, 1), (25, 0)])
def test_the_solution_minimises_what_the_theory_says(sent: tuple[int, int]) -> None:
    """By the gradient, where a task sends many tokens, one, or none."""
    config, group = replace(CONFIG, eps=0.0), entering()
    tasks = [Task(seed, count) for seed, count in enumerate(sent)]
    for one in tasks:
        one.count(group, config)
        group.end_task(one.model, config)
    merged, base = model(8), model(9)
    solved = group.solve(merged, base, config)
    stack = lambda found: torch.cat([found["mix.0.gate.weight"], found["mix.0.up.weight"]])  # noqa: E731
    anchor = config.rho * stack(merged) + (1 - config.rho) * stack(base)
    weight = stack(solved).requires_grad_()
    (gradient,) = torch.autograd.grad(objective(weight, tasks, anchor), weight)
    assert float(gradient.abs().max()) < 1e-12


def test_tasks_that_route_alike_count_as_in_any_map() -> None:
    """With the same shares in every task the solution is Eq. (17) with one weight per task and the same lam."""
    config, group = replace(CONFIG, eps=0.0), entering()
    tasks = [Task(0, 30), Task(1, 30)]
    tasks[1].shares = tasks[0].shares
    gram, target = torch.zeros(WIDTH, WIDTH).double(), torch.zeros(2 * INNER, WIDTH).double()
    for one in tasks:
        one.count(group, config)
        group.end_task(one.model, config)
        w = one.shares[:, :1].square() / one.shares[:, 0].square().sum()
        own = torch.cat([one.model["mix.0.gate.weight"], one.model["mix.0.up.weight"]])
        mixed = config.alpha * one.expert + (1 - config.alpha) * one.student
        single = one.student.T @ (w * one.student)
        omega = 1 / torch.linalg.matrix_norm(single)
        gram, target = gram + omega * single, target + omega * own @ mixed.T @ (w * one.student)
    solved = group.solve(model(8), model(8), config)
    anchor = torch.cat([model(8)["mix.0.gate.weight"], model(8)["mix.0.up.weight"]])
    expected = linear_weight(gram, target, anchor, config.lam, 0.0)
    torch.testing.assert_close(torch.cat([*solved.values()]), expected, rtol=1e-12, atol=1e-12)


def test_parts_of_a_task_are_merged() -> None:
    """Counted apart, the second part without a token for the member; and whole."""
    one, other, whole = entering(), entering(), entering()
    task = Task(0, 20)
    task.count(one, CONFIG, slice(0, 25))
    task.count(other, CONFIG, slice(25, None))
    assert other.current.counted == 0
    one.merge_part(other.current)
    task.count(whole, CONFIG)
    assert one.current.mass == pytest.approx(whole.current.mass)
    found = []
    for group in (one, whole):
        group.end_task(task.model, CONFIG)
        found.append(group.solve(model(8), model(9), CONFIG))
    for name, tensor in found[1].items():
        torch.testing.assert_close(found[0][name], tensor, rtol=1e-12, atol=1e-12)


def test_a_member_is_starved_below_its_widest_input() -> None:
    for sent, solved in ((INNER - 1, False), (INNER, True)):
        group, task = entering(), Task(0, sent)
        task.count(group, CONFIG)
        group.end_task(task.model, CONFIG)
        assert group.is_starved != solved
        assert bool(group.solve(model(8), model(9), CONFIG)) == solved


def test_values_that_are_not_finite_are_seen_but_not_under_padding() -> None:
    for place, seen in ((0, True), (39, False)):
        group, task = entering(), Task(0, 30)
        task.weights[39] = 0
        task.shares[place, 0] = torch.nan
        task.count(group, CONFIG)
        group.end_task(task.model, CONFIG)
        assert bool(group.finite()) != seen
        if seen:
            with pytest.raises(NumericalError, match="features are not finite"):
                group.solve(model(8), model(9), CONFIG)


@torch.no_grad()
def test_every_member_is_called_also_without_a_token() -> None:
    """Hooks see an input of no rows, and the sum is that of the others."""
    mixture = Mixture(Library(3, INNER, WIDTH), NAMES, 2)
    for parameter in mixture.parameters():
        parameter.normal_()
    seen: dict[str, tuple[int, ...]] = {}
    for name, module in mixture.named_modules():
        if name:
            module.register_forward_pre_hook(lambda _, args, name=name: seen.update({name: tuple(args[0].shape)}))
    states, index = torch.randn(5, WIDTH), torch.tensor([[0, 1]] * 5)
    shares = torch.tensor([[0.75, 0.25]] * 5)
    found = mixture(states, index, shares)
    assert (seen["2"], seen["2.down"], seen["0.gate"]) == ((0, WIDTH), (0, INNER), (5, WIDTH))
    assert (seen[TOKENS], seen[SHARES]) == ((5, WIDTH), (5, 3))
    expected = 0.75 * by_hand(mixture.members[0], states) + 0.25 * by_hand(mixture.members[1], states)
    torch.testing.assert_close(found, expected)


def by_hand(member: Any, states: Tensor) -> Tensor:
    own: Mapping[str, Tensor] = dict(member.named_parameters())
    gate, up = (states @ own[f"{name}.weight"].T for name in ("gate", "up"))
    made: Tensor = (gate * gate.sigmoid() * up) @ own["down.weight"].T
    return made


def test_the_number_of_experts_is_said_for_both_versions_of_transformers(qwen: Trial, tmp_path: Path) -> None:
    """Version 5 writes `num_local_experts` alone, version 4 reads `num_experts` and would take 128."""
    calibrate(qwen.family, qwen.config()).save(tmp_path / "out")
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "num_experts" not in json.loads((qwen.root / "merged" / "config.json").read_text())
    assert said["num_experts"] == said["num_local_experts"] == MEMBERS
