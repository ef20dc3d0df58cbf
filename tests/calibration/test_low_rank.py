"""Changes that are cut down to a low rank: the optimum of their objective, and what they leave out."""

from __future__ import annotations

import pytest
import torch
from clip_config import clip_config
from tiny_clip import TASKS
from torch import Tensor

from featcal.calibration.calibrate import calibrate_family, expert_passes
from featcal.calibration.low_rank import Limits, truncate
from featcal.calibration.repair import fit_repair
from featcal.family.opening import Family
from featcal.models.adapter import walking
from featcal.models.walk import BlockwiseForward
from featcal.system.errors import InputError, NumericalError


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drawn(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """A change, and second moments of fewer inputs than there are directions, with a ridge."""
    x = random(1, columns - 2, columns) * torch.arange(1.0, columns + 1)
    return random(0, rows, columns), x.mT @ x + 1e-3 * torch.eye(columns, dtype=torch.float64)


def objective(product: Tensor, change: Tensor, metric: Tensor) -> Tensor:
    apart = change - product
    return (apart @ metric * apart).sum()


@pytest.mark.parametrize(("rows", "columns"), [(5, 7), (7, 5)])
def test_it_is_the_optimum_of_its_objective(rows: int, columns: int) -> None:
    """No product that is optimised from another start comes lower, and the share left out is what the product says."""
    change, metric = drawn(rows, columns)
    for rank in (1, 3):
        found = truncate(change, metric, Limits(rank))
        least = objective(found.up @ found.down, change, metric)
        assert found.left_out == pytest.approx(float(least), rel=1e-9)
        assert found.total == pytest.approx(float(objective(torch.zeros_like(change), change, metric)), rel=1e-12)
        # Least squares in turn for either factor, which ends in the optimum from almost every start.
        down = random(2, rank, columns)
        for _ in range(400):
            up = change @ metric @ down.mT @ torch.linalg.inv(down @ metric @ down.mT)
            down = torch.linalg.solve(up.mT @ up, up.mT @ change)
        other = objective(up @ down, change, metric)
        torch.testing.assert_close(least, other, rtol=1e-7, atol=0)
        torch.testing.assert_close(found.up @ found.down, up @ down, rtol=1e-4, atol=1e-5)


def test_a_full_rank_is_the_change_itself() -> None:
    """In directions that no input has, too: nothing is divided by their moments."""
    change, metric = drawn(5, 7)
    for limits in (Limits(7), Limits(energy=1.0)):
        found = truncate(change, metric, limits)
        torch.testing.assert_close(found.up @ found.down, change, rtol=1e-12, atol=1e-12)
        assert found.left_out == 0
        assert found.down.shape[0] == 5
    identity = torch.eye(7, dtype=torch.float64)
    left, values, right = torch.linalg.svd(change, full_matrices=False)
    plain = truncate(change, identity, Limits(2))
    torch.testing.assert_close(plain.up @ plain.down, left[:, :2] * values[:2] @ right[:2], rtol=1e-12, atol=1e-12)


def test_energy_asks_for_the_smallest_rank() -> None:
    change, metric = torch.diag(torch.tensor([3.0, 2.0, 1.0]).double()), torch.eye(3, dtype=torch.float64)
    ranks = [truncate(change, metric, Limits(energy=one)).down.shape[0] for one in (0.1, 9 / 14, 0.65, 0.93, 0.999)]
    assert ranks == [1, 1, 2, 3, 3]
    both = truncate(change, metric, Limits(rank=1, energy=0.9))
    assert (both.down.shape[0], both.left_out / both.total) == (1, pytest.approx(5 / 14))


def test_limits_and_metrics_that_mean_nothing_are_refused() -> None:
    for said, why in (({}, "a rank, or the energy"), ({"rank": 0}, "at least 1"), ({"energy": 1.5}, "at most 1")):
        with pytest.raises(InputError, match=why):
            Limits(**said)  # type: ignore[arg-type]
    change, metric = drawn(3, 4)
    with pytest.raises(NumericalError, match="larger lam"):
        truncate(change, metric - 10 * torch.eye(4), Limits(1))
    with pytest.raises(NumericalError, match="larger lam"):
        truncate(change * torch.inf, metric, Limits(1))


def test_the_metric_is_of_what_the_finished_model_gives(tiny64: Family) -> None:
    """What a repair leaves out of a map is the distance of its outputs on the deployed inputs, tasks by Eq. (14)."""
    config = clip_config(samples=6)
    result = calibrate_family(tiny64, config)
    passes = expert_passes(tiny64, config)
    found = fit_repair(tiny64, result.weights, config, passes, "merged", Limits(3))
    block = tiny64.adapter.blocks()[0]
    inputs = {task: gathered(tiny64, result.weights, task, config.samples) for task in TASKS}
    for name in ("self_attn.k_proj", "mlp.fc2"):
        weight = f"{block.name}.{name}.weight"
        models = (result.weights, tiny64.merged, found.weights)
        calibrated, merged, cut = (one.read([weight])[weight] for one in models)
        lost = whole = 0.0
        for x in (inputs[task][name] for task in TASKS):
            gram = x.mT @ x / len(x)
            metric = gram / gram.norm()
            lost += float(objective(cut, calibrated, metric))
            whole += float(objective(merged, calibrated, metric))
        ridge = config.lam + config.eps
        lost += ridge * float((calibrated - cut).square().sum())
        whole += ridge * float((calibrated - merged).square().sum())
        own = next(one for one in found.cuts if one.map == name)
        assert own.left_out == pytest.approx(lost, rel=1e-9)
        assert own.total == pytest.approx(whole, rel=1e-9)
        assert 0 < own.left_out < own.total
        assert own.rank == 3
    assert found.lost_share == pytest.approx(sum(c.left_out for c in found.cuts) / sum(c.total for c in found.cuts))


def gathered(family: Family, model: object, task: str, samples: int) -> dict[str, Tensor]:
    """The inputs of all linear maps of the first block, one row per token."""
    one = expert_passes(family, clip_config(samples=samples))[task]
    walk = {task: one.copy_for_one_walk(model)}  # type: ignore[arg-type]
    stage = family.adapter.stages[0]
    block = stage.blocks[0]
    with walking(family.adapter):
        lanes = BlockwiseForward(family.run(), "test", walk, {})
        lanes.enter(stage)
        lane = lanes.experts[task]
        steps = [*lane.walk(stage, block, lane.tensors(block), inputs=[*block.linears])]
    return {name: torch.cat([step.inputs[name].flatten(0, 1) for step in steps]) for name in block.linears}
