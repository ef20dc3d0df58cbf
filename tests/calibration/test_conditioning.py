"""How well the linear systems of a calibration are posed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from clip_config import clip_config
from tiny_clip import BLOCKS, TASKS

from featcal.calibration.calibrate import calibrate_family, config_for
from featcal.calibration.conditioning import conditioning_of, measure_conditioning
from featcal.calibration.gram import Gram
from featcal.calibration.linear_group import LinearGroup
from featcal.calibration.linear_statistics import LinearSums
from featcal.family.opening import Family
from featcal.formats.weights import Overlay
from featcal.session.session import Session
from featcal.suite.calibration_options import CalibrationConfig
from featcal.system.errors import NumericalError

CONFIG = clip_config(samples=12, batch_size=5)
RANKED = (("informed", 0.1), ("refined", 0.0))
PATCHES = 10  # 3 x 3 and the class token


def test_numbers_of_a_known_matrix() -> None:
    group = LinearGroup(["q"], "all", {"q": torch.nn.Linear(4, 2)})
    gram = Gram.zeros(4, torch.device("cpu"), torch.float64)
    turn = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))[0]
    gram.add_rows(torch.diag(torch.tensor([3.0, 1.0, 0.5, 0.0], dtype=torch.float64).sqrt()) @ turn)
    sums = LinearSums.zeros(torch.zeros(2, 4, dtype=torch.float64), torch.float64)
    sums.gram, sums.tokens, group._sums = gram, 3, sums
    (found,) = conditioning_of("block 7", group, CalibrationConfig(lam=0.5, eps=0.0, mu=0.0))
    assert (found.layer, found.maps, found.width, found.tokens) == ("block 7", "q", 4, 3)
    assert found.smallest == pytest.approx(0.5, abs=1e-12)
    assert found.largest == pytest.approx(3.5, rel=1e-12)
    assert found.condition == pytest.approx(7.0, rel=1e-12)
    assert found.effective_rank == pytest.approx(3 / 3.5 + 1 / 1.5 + 0.5, rel=1e-12)
    assert group.sums is sums  # nothing was used up
    assert found.to_json()["condition"] == found.condition
    assert replace(found, smallest=0.0).to_json()["condition"] is None  # JSON has no infinity


def system(gram: torch.Tensor, tokens: int = 3) -> LinearGroup:
    """Linear maps of one input whose Gram matrix is this."""
    group = LinearGroup(["q", "k"], "all", {name: torch.nn.Linear(len(gram), 2) for name in ("q", "k")})
    sums = LinearSums.zeros(torch.zeros(4, len(gram), dtype=torch.float64), torch.float64)
    sums.gram, sums.tokens, group._sums = Gram([gram.double()]), tokens, sums
    return group


def test_directions_without_data_and_ridge_decide_nothing() -> None:
    (found,) = conditioning_of(
        "block 7", system(torch.diag(torch.tensor([2.0, 0.0]))), CalibrationConfig(lam=0.0, eps=0.0, mu=0.0)
    )
    assert (found.effective_rank, found.smallest, found.condition) == (1.0, 0.0, float("inf"))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_matrix_that_is_not_finite_is_an_error_with_its_names(bad: float) -> None:
    gram = torch.eye(3)
    gram[1, 1] = bad
    with pytest.raises(NumericalError, match="block 7: q, k: the left matrix is not finite"):
        list(conditioning_of("block 7", system(gram), clip_config()))


def test_eigenvalues_that_are_not_finite_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some backends give NaN where the processor's raises."""
    monkeypatch.setattr(torch.linalg, "eigvalsh", lambda _: torch.tensor([torch.nan, 1.0], dtype=torch.float64))
    with pytest.raises(NumericalError, match="block 7: q, k: eigenvalues of the left matrix are not finite"):
        list(conditioning_of("block 7", system(torch.eye(2)), clip_config()))


def test_a_task_whose_features_overflow_is_named_with_block_and_map(tiny: Family) -> None:
    task, name = TASKS[-1], tiny.adapter.blocks()[0].name
    weight = f"{name}.mlp.fc1.weight"
    stored = tiny.experts[task].read([weight])[weight]
    large = Overlay("large", tiny.experts[task], {weight: torch.full_like(stored, 3e38)})
    family = replace(tiny, experts={**tiny.experts, task: large})
    with pytest.raises(NumericalError, match=rf"block 0, task '{task}': .*mlp\.fc1.* not finite"):
        measure_conditioning(family, CONFIG)


def test_every_system_is_there_and_bounded(tiny: Family) -> None:
    found = measure_conditioning(tiny, CONFIG)
    assert len(found) == 4 * (BLOCKS - 1) + 5
    assert [one.layer for one in found[::4]][:BLOCKS] == ["block 0", "block 1", "block 2"]
    for one in found:
        assert CONFIG.lam <= one.smallest * (1 + 1e-6) <= one.largest
        assert one.condition <= 1 + len(TASKS) / CONFIG.lam  # Frobenius norms of the parts are 1
        assert one.tokens == len(TASKS) * 12 * PATCHES
        assert 0 < one.effective_rank < one.width
    strong = measure_conditioning(tiny, replace(CONFIG, lam=10.0))
    assert all(weak.effective_rank > one.effective_rank for weak, one in zip(found[:4], strong[:4], strict=True))


def test_maps_with_priors_have_systems_of_their_own(tiny: Family) -> None:
    """Where the samples say nothing of a direction, the task vectors may."""
    few = clip_config(recipe="informed", samples=1)
    informed, refined = (measure_conditioning(tiny, replace(few, recipe=r, mu=mu)) for r, mu in RANKED)
    assert len(informed) == len({(one.layer, one.maps) for one in informed}) == 6 * BLOCKS
    by_map = {(one.layer, name): one for one in refined for name in one.maps.split(", ")}
    for one in informed:
        assert one.effective_rank > by_map[one.layer, one.maps].effective_rank
        assert one.condition <= 1 + (1 + few.mu) * len(TASKS) / few.lam


def test_parts_have_systems_of_their_own(tiny: Family) -> None:
    found = measure_conditioning(tiny, replace(CONFIG, blocks=("block 1",), maps=("mlp",), tasks=("pets",)))
    assert [(one.layer, one.maps) for one in found] == [("block 1", "mlp.fc1"), ("block 1", "mlp.fc2")]
    assert {one.tokens for one in found} == {12 * PATCHES}


def test_a_session_measures_it_once_and_calibrates_alike(tiny: Family) -> None:
    own = Session(tiny)
    assert own.fit.conditioning(CONFIG) is own.fit.conditioning(CONFIG)
    assert own.fit.conditioning(CONFIG) == measure_conditioning(tiny, CONFIG)
    ours, theirs = (
        one.weights.read(tiny.adapter.tower) for one in (own.fit.calibrate(CONFIG), calibrate_family(tiny, CONFIG))
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_systems_of_a_calibration_of_another_model_are_its_own(tiny: Family) -> None:
    own = Session(tiny)
    expected = measure_conditioning(own.fit.family_with("base"), replace(config_for(tiny), samples=6))
    assert own.fit.conditioning("calibrated:samples=6@base") == expected
    assert own.fit.conditioning("calibrated:samples=6") != expected
