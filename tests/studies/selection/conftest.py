"""A suite with many samples, planted scores and short plans for every test of a choice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from selecting import SHORT, Values, write_many
from tiny_clip import TASKS

from featcal import load_suite, open_family
from featcal.family.opening import Family
from featcal.studies.selection import choose
from featcal.studies.selection.candidates import CandidateModel, plan_candidates
from featcal.studies.selection.held_out_samples import Fold


@pytest.fixture(scope="module")
def many_file(tmp_path_factory: pytest.TempPathFactory, tiny_suite_file: Path) -> Path:
    return write_many(tmp_path_factory.mktemp("many") / "suite", tiny_suite_file)


@pytest.fixture(scope="module")
def many(many_file: Path) -> Family:
    return open_family(load_suite(many_file), device="cpu")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No test finds what another one has kept."""
    monkeypatch.setenv("FEATCAL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few candidates, for choices in which nothing is planted; those of starts stay."""

    def few(*given: Any) -> list[CandidateModel]:
        plan = plan_candidates(*given)
        return [*plan[:SHORT], *(one for one in plan if one.start != "merged")]

    monkeypatch.setattr(choose, "plan_candidates", few)


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> Callable[[Values, float], list[CandidateModel]]:
    """Let every candidate have scores with a mean of one's own and noise that is the same in every test; what was
    scored is in the list, fold after fold."""

    def plant(value: Values, spread: float) -> list[CandidateModel]:
        seen: list[CandidateModel] = []

        def values(fold: Fold, tried: CandidateModel, *_: Any) -> dict[str, tuple[float, ...]]:
            seen.append(tried)
            rng = np.random.default_rng(len(seen))
            return {task: tuple(value(tried) + spread * rng.standard_normal(len(fold.held[task]))) for task in TASKS}

        monkeypatch.setattr(Fold, "values", values)
        return seen

    return plant
