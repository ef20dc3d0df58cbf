"""Statistics that were counted apart and added up are those that were counted in one go."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import lanes
import pytest
import torch
from tiny_text import write_text_suite
from torch import Tensor, nn

from featcal.calibration.block_statistics import BlockStatistics, likely_groups, linear_groups
from featcal.calibration.gram import Gram
from featcal.calibration.linear_group import LinearGroup
from featcal.calibration.norm_groups import NormGroup
from featcal.calibration.token_rows import TaskRows, TokenRows, find_token_rows
from featcal.family.opening import Family, open_family
from featcal.models.adapter import Batch, Call, Stage
from featcal.models.capture import capture_inputs, capture_outputs
from featcal.models.lane import BlockStep
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.schema import load_suite
from featcal.system.errors import InputError, NumericalError

CONFIG = CalibrationConfig(lam=0.05, rho=1.5, alpha=0.3)
TASKS, WIDTH = 4, 8
CPU = torch.device("cpu")
NOWHERE = Call((torch.zeros(()),), {})
ROUTES = {"inputs": (20, 30), "outputs": (4, 30), "mixed": (2, 7)}
"""Output rows, and tokens of a task, for which a route is the cheapest."""
DTYPES = [
    pytest.param(torch.float64, 1e-12, id="float64"),
    pytest.param(torch.float32, 1e-5, id="float32", marks=pytest.mark.slow),
]


class Counted:
    """Random tasks of one kind of group: what `any_split` needs to count their tokens, here or there."""

    def __init__(self, tokens: int, weighted: bool, dtype: torch.dtype, seed: int) -> None:
        self.generator, self.tokens, self.dtype = torch.Generator().manual_seed(seed), tokens, dtype
        self.x, self.x_expert = (self.random(TASKS, tokens, WIDTH) + 0.3 for _ in range(2))
        few = torch.randint(0, 2, (TASKS, tokens), generator=self.generator)
        self.weights = 0.01 + 0.99 * few if weighted else torch.ones(TASKS, tokens)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.dtype)


class Linears(Counted):
    """Two linear maps with one input."""

    def __init__(self, route: str, biased: bool, weighted: bool, dtype: torch.dtype, seed: int) -> None:
        rows, tokens = ROUTES[route]
        super().__init__(tokens, weighted, dtype, seed)
        self.modules = {name: nn.Linear(WIDTH, rows // 2, bias=biased) for name in ("q", "k")}
        kinds = ("weight", "bias") if biased else ("weight",)

        def model() -> dict[str, Tensor]:
            shapes = {"weight": (rows // 2, WIDTH), "bias": (rows // 2,)}
            return {f"{name}.{kind}": self.random(*shapes[kind]) for name in self.modules for kind in kinds}

        self.models = [model() for _ in range(TASKS + 2)]

    def new(self) -> LinearGroup:
        return LinearGroup(list(self.modules), "all", self.modules)

    def count(self, group: Any, task: int, chosen: list[int]) -> None:
        x, x_expert, own = self.x[task, chosen], self.x_expert[task, chosen], self.models[task]
        outputs = {n: nn.functional.linear(x_expert, own[f"{n}.weight"], own.get(f"{n}.bias")) for n in self.modules}
        trace = BlockStep(NOWHERE, NOWHERE, dict.fromkeys(self.modules, x_expert), outputs)
        rows = TokenRows.from_weights(self.weights[task, chosen][None], len(chosen))
        group.update(dict.fromkeys(self.modules, x), trace, own, rows, self.tokens, CONFIG)


class Norms(Counted):
    """One norm."""

    def __init__(self, norm: type[nn.Module], weighted: bool, dtype: torch.dtype, seed: int) -> None:
        super().__init__(30, weighted, dtype, seed)
        self.module = norm(WIDTH)
        self.models = [{f"norm.{name}": self.random(WIDTH) for name in ("weight", "bias")} for _ in range(TASKS + 2)]

    def new(self) -> NormGroup:
        return NormGroup("norm", "all", self.module, CPU)

    def count(self, group: Any, task: int, chosen: list[int]) -> None:
        rows = TokenRows.from_weights(self.weights[task, chosen][None], len(chosen))
        group.update({"norm": self.x[task, chosen]}, rows)


def in_one(problem: Any) -> dict[str, Tensor]:
    group = problem.new()
    for task in range(TASKS):
        problem.count(group, task, list(range(problem.tokens)))
        group.end_task(problem.models[task], CONFIG)
    solved: dict[str, Tensor] = group.solve(*problem.models[-2:], CONFIG)
    return solved


def any_split(problem: Any, processes: int, seed: int) -> dict[str, Tensor]:
    """Tasks go to one process or token by token to all; added up in any order."""
    dice = random.Random(seed)
    ended: list[Any] = []
    for task in dice.sample(range(TASKS), TASKS):
        home = dice.randrange(processes)
        places = [dice.randrange(processes) if task % 2 == 0 else home for _ in range(problem.tokens)]
        parts = [problem.new() for _ in range(processes)]
        for place, part in enumerate(parts):
            mine = [token for token in range(problem.tokens) if places[token] == place]
            for batch in (mine[: len(mine) // 2], mine[len(mine) // 2 :]):
                if batch:
                    problem.count(part, task, batch)
        whole, *others = (parts[place] for place in dice.sample(sorted(set(places)), len(set(places))))
        for other in others:
            whole.merge_part(other.current)
        whole.end_task(problem.models[task], CONFIG)
        ended.append(whole)
    first, *rest = dice.sample(ended, TASKS)
    for group in rest:
        first.sums.merge(group.sums)
    solved: dict[str, Tensor] = first.solve(*problem.models[-2:], CONFIG)
    return solved


def assert_near(ours: Mapping[str, Tensor], right: Mapping[str, Tensor], tolerance: float) -> None:
    assert ours.keys() == right.keys()
    for name, tensor in right.items():
        assert float((ours[name] - tensor).norm() / tensor.norm()) < tolerance, name


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("weighted", [False, True], ids=["alike", "weighted"])
@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "biases"])
@pytest.mark.parametrize("route", ROUTES)
def test_linear_maps_counted_in_parts(
    route: str, biased: bool, weighted: bool, dtype: torch.dtype, tolerance: float
) -> None:
    for seed in range(4):
        problem = Linears(route, biased, weighted, dtype, seed)
        assert problem.new().route(problem.tokens) == route
        right = in_one(problem)
        for processes in (2, 3):
            assert_near(any_split(problem, processes, seed), right, tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("weighted", [False, True], ids=["alike", "weighted"])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_norms_counted_in_parts(norm: type[nn.Module], weighted: bool, dtype: torch.dtype, tolerance: float) -> None:
    for seed in range(4):
        problem = Norms(norm, weighted, dtype, seed)
        right = in_one(problem)
        for processes in (2, 3):
            assert_near(any_split(problem, processes, seed), right, tolerance)


def test_parts_of_unlike_tasks_weigh_as_the_whole_task() -> None:
    """Omega of a whole task is not the sum of those of its halves: a task ended twice would count too much."""
    problem = Linears("outputs", True, False, torch.float64, 0)
    halves = list(range(10)), list(range(10, 30))
    problem.x[0, halves[1]] *= 100
    one, other = problem.new(), problem.new()
    for group, half in zip((one, other), halves, strict=True):
        problem.count(group, 0, half)
    one.merge_part(other.current)
    one.end_task(problem.models[0], CONFIG)
    whole = problem.new()
    problem.count(whole, 0, list(range(30)))
    whole.end_task(problem.models[0], CONFIG)
    assert_near(*(group.solve(*problem.models[-2:], CONFIG) for group in (one, whole)), 1e-12)


def test_another_size_or_dtype_is_neither_broadcast_nor_rounded() -> None:
    one = Gram.zeros(300, CPU, torch.float64)
    with pytest.raises(InputError, match=r"\[299, 256\] of torch\.float64 cannot be added to \[300, 256\]"):
        one.merge(Gram.zeros(299, CPU, torch.float64))
    with pytest.raises(InputError, match=r"of torch\.float32 cannot be added to \[300, 256\] of torch\.float64"):
        one.merge(Gram.zeros(300, CPU, torch.float32))


def test_a_task_ends_when_every_token_was_counted_once() -> None:
    problem = Linears("outputs", True, False, torch.float32, 0)

    def part(tokens: int) -> LinearGroup:
        group = problem.new()
        problem.count(group, 0, list(range(tokens)))
        return group

    with pytest.raises(InputError, match="q, k: 15 of a task's 30 tokens were counted"):
        part(15).end_task(problem.models[0], CONFIG)
    twice = part(15)
    twice.merge_part(part(16).current)
    with pytest.raises(InputError, match="q, k: 31 of a task's 30 tokens were counted"):
        twice.end_task(problem.models[0], CONFIG)
    with pytest.raises(NumericalError, match="no token of a task has weight"):
        problem.new().end_task({}, CONFIG)


def test_a_part_of_a_task_knows_of_the_whole() -> None:
    batches = [{"all": TokenRows.from_weights(None, 6), "class": TokenRows.from_weights(None, 2)}] * 3
    one, other, none = TaskRows(batches[:2]), TaskRows(batches[2:]), TaskRows([])
    counts = [one.counts(), other.counts(), none.counts()]
    assert counts == [{"all": 12, "class": 4}, {"all": 6, "class": 2}, {}]
    for rows, own in ((one, 12), (other, 6)):
        assert rows.count("all") == own
        part = rows.part_of("cars", counts)
        assert (part.count("all"), part.count("class"), part.task, part.batches) == (18, 6, "cars", rows.batches)
    assert none.part_of("cars", counts).count("all") == 18


@pytest.fixture(
    scope="module",
    params=lanes.rows(["clip", "t5", "llama", "llama-biased"], quick=("clip",), slow=("t5", "llama", "llama-biased")),
)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny: Family) -> Family:
    if request.param == "clip":
        return tiny
    return open_family(load_suite(write_text_suite(tmp_path_factory.mktemp("s"), request.param)), "cpu")


class Block:
    """A block of a real model with the batches of its tasks: what Algorithm 1 counts in it."""

    def __init__(self, family: Family, stage: int, index: int) -> None:
        self.stage: Stage = family.adapter.stages[stage]
        self.index, self.block = index, self.stage.blocks[index]
        self.family, self.config = family, replace(CONFIG, rmsnorms=True)
        self.merged, self.base = (self.block.local(one.read(self.block.names)) for one in (family.merged, family.base))
        self.tasks = {task: self._task(task, stage) for task in family.suite.tasks}

    def _task(self, task: str, stage: int) -> SimpleNamespace:
        samples = self.family.samples(task, "calibration", 8, 0).inputs
        batches = [{name: tensor[i : i + 2] for name, tensor in samples.items()} for i in range(0, 8, 2)]
        expert = self.family.experts[task]
        calls = [[self._call(model, stage, batch) for batch in batches] for model in (self.family.merged, expert)]
        tensors = self.block.local(expert.read(self.block.names))
        rows = find_token_rows(self.stage, calls[0], batches, self.config)
        return SimpleNamespace(calls=calls, tensors=tensors, rows=rows, batches=range(len(batches)))

    def _call(self, model: Any, stage: int, batch: Batch) -> Call:
        call: Call | None = None
        for one in self.family.adapter.stages[: stage + 1]:
            call = one.first_call(model.read(one.outer), batch, call)
        assert call is not None
        return call

    def count(self, moments: BlockStatistics, task: str, positions: Any, rows: TaskRows) -> None:
        of = self.tasks[task]
        for place, position in enumerate(positions):
            with capture_inputs(moments.modules) as inputs:
                self.block.run(self.merged, of.calls[0][position])
            with capture_inputs(moments.modules) as theirs, capture_outputs(self.block.linears) as outputs:
                self.block.run(of.tensors, of.calls[1][position])
            moments.see(inputs)
            moments.update(rows, place, inputs, BlockStep(NOWHERE, NOWHERE, theirs, outputs), of.tensors)

    def new(self) -> BlockStatistics:
        return BlockStatistics(self.stage, self.index, self.config)

    def in_one(self) -> BlockStatistics:
        moments = self.new()
        for task, of in self.tasks.items():
            self.count(moments, task, of.batches, of.rows)
            moments.end_task(of.tensors)
        return moments

    def part(self, moments: BlockStatistics, task: str, positions: list[int]) -> None:
        of = self.tasks[task]
        rows = TaskRows([of.rows.batches[i] for i in positions])
        self.count(moments, task, positions, rows.part_of(task, [of.rows.counts()]))


def solved_by(moments: BlockStatistics, block: Block) -> dict[str, Tensor]:
    found = (group.solve(block.merged, block.base, block.config) for group in moments.groups)
    return {name: tensor for one in found for name, tensor in one.items()}


@torch.no_grad()
def test_a_block_counted_in_parts(family: Family) -> None:
    """One process has a finished task, and both have a part of another."""
    block = Block(family, len(family.adapter.stages) - 1, len(family.adapter.stages[-1].blocks) - 1)
    (finished, split), left, right = block.tasks, block.new(), block.new()
    of = block.tasks[finished]
    block.count(right, finished, of.batches, of.rows)
    right.end_task(of.tensors)
    block.part(left, split, [0, 3])
    block.part(right, split, [2, 1])
    for group, other in zip(right.groups, left.groups, strict=True):
        group.merge_part(other.current)
    right.end_task(block.tasks[split].tensors)
    assert {name for one in right.groups for name in one.names} == set(right.modules)
    assert_near(solved_by(right, block), solved_by(block.in_one(), block), 1e-5)


@torch.no_grad()
def test_groups_are_told_from_shapes_as_they_are_found(family: Family) -> None:
    for number, stage in enumerate(family.adapter.stages):
        for index, block in enumerate(stage.blocks):
            counted = Block(family, number, index)
            call = counted.tasks[next(iter(counted.tasks))].calls[0][0]
            with capture_inputs(block.linears) as inputs:
                block.run(counted.merged, call)
            likely, true = likely_groups(stage, index), linear_groups(stage, index, inputs)
            assert [(one.names, one.weighting) for one in likely] == [(one.names, one.weighting) for one in true]
