"""A choice is kept cell by cell: it goes on where it ended, and processes share it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from selecting import ASKED, REPAIRS, SHORT, contest_of, scores_of
from tiny_clip import TASKS

from featcal import select
from featcal.evaluation.heads import ClassificationHead
from featcal.family.opening import Family
from featcal.formats.weights import Overlay
from featcal.models.model import Model
from featcal.studies.selection import choose
from featcal.studies.selection.candidates import CandidateModel
from featcal.studies.selection.cells import Cells, FoldCell, folder_of
from featcal.studies.selection.held_out_samples import FOLDS, Fold
from featcal.system.errors import InputError
from featcal.system.resources import cache_folder


@pytest.mark.slow
def test_a_choice_that_was_ended_goes_on_to_the_same_end(
    many: Family, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, short: None
) -> None:
    made: list[CandidateModel] = []
    real = Fold.values

    def counted(fold: Fold, tried: CandidateModel, *more: Any) -> Any:
        if len(made) == 7:
            raise KeyboardInterrupt
        made.append(tried)
        return real(fold, tried, *more)

    monkeypatch.setattr(Fold, "values", counted)
    cells = FOLDS * SHORT
    with pytest.raises(KeyboardInterrupt):
        select(many, ASKED)
    made.append(made[0])  # past the end that was planted
    resumed = select(many, ASKED)
    assert len(made) - 1 == cells
    monkeypatch.setenv("FEATCAL_CACHE", str(tmp_path / "another"))
    whole = select(many, ASKED)
    assert len(made) - 1 == 2 * cells
    assert (scores_of(resumed), resumed.model, resumed.margin) == (scores_of(whole), whole.model, whole.margin)
    more = select(many, ASKED, starts=["tsv-m"])
    assert len(made) - 1 == 2 * cells + 2 * FOLDS  # the two of the start alone
    assert {one.model for one in whole.candidates} < {one.model for one in more.candidates}


KILLED = """
import json, os, signal, sys
import torch
torch.set_num_threads(1)
from featcal import CalibrationConfig, load_suite, open_family, select
from featcal.studies.selection import choose

plan = choose.plan_candidates
choose.plan_candidates = lambda *given: plan(*given)[:3]

def at_the_seventh(label, done, total):
    if (label, done) == ("select", 7):
        os.kill(os.getpid(), signal.SIGKILL)

asked = CalibrationConfig(**json.loads(sys.argv[2]))
select(open_family(load_suite(sys.argv[1]), device="cpu"), asked, progress=at_the_seventh)
"""


@pytest.mark.nightly  # one that is ended goes on in CI, and one of `compare` that is killed
@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
def test_a_choice_whose_process_was_killed_goes_on(
    many: Family, many_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, short: None
) -> None:
    asked = json.dumps(asdict(ASKED))
    ended = subprocess.run([sys.executable, "-c", KILLED, many_file, asked], check=False)
    assert ended.returncode == -9
    made: list[CandidateModel] = []
    real = Fold.values

    def counted(fold: Fold, tried: CandidateModel, *more: Any) -> Any:
        made.append(tried)
        return real(fold, tried, *more)

    monkeypatch.setattr(Fold, "values", counted)
    resumed = select(many, ASKED)
    assert len(made) == FOLDS * SHORT - 7
    monkeypatch.setenv("FEATCAL_CACHE", str(tmp_path / "another"))
    assert scores_of(select(many, ASKED)) == scores_of(resumed)


@pytest.mark.slow
def test_processes_share_the_cells(many: Family, monkeypatch: pytest.MonkeyPatch, scored: Any) -> None:
    """Nobody computes what another computes; who finds nothing else to do waits for it."""
    seen = scored(lambda tried: 0.5, 0.05)
    contest = contest_of(many)
    another, name = Cells(folder_of(contest)), contest.names[0]
    theirs = FoldCell(dict.fromkeys(TASKS, (0.25,) * 4), "", 1.0)
    with another.claim(name, 0) as mine, Cells(folder_of(contest)).claim(name, 0) as also:
        assert (mine, also) == (True, False)
        waited: list[float] = []

        def finish(seconds: float) -> None:
            waited.append(seconds)
            another.put(name, 0, theirs)

        monkeypatch.setattr(choose.time, "sleep", finish)
        found = select(many, ASKED)
    assert len(waited) == 1
    assert len(seen) == FOLDS * (REPAIRS + 1) - 1
    (default,) = (one for one in found.candidates if one.model == name)
    assert default.score is not None
    assert default.score.values["pets"][:4] == (0.25,) * 4
    with another.claim(name, 0) as again:  # a process that ends lets its claim go
        assert again
    assert not list(cache_folder().rglob("*.lock"))


@pytest.mark.slow
def test_a_damaged_cell_is_computed_again(many: Family, scored: Any) -> None:
    seen = scored(lambda tried: 0.5, 0.05)
    select(many, ASKED)
    cells = len(seen)
    file = next((cache_folder() / "selections").rglob("*.json"))
    file.write_text(file.read_text()[:40])
    select(many, ASKED)
    assert len(seen) == cells + 1
    assert json.loads(file.read_text())["failure"] == ""


def test_a_folder_that_cannot_be_used_is_named(many: Family, own_cache: Path) -> None:
    own_cache.write_text("a file")
    with pytest.raises(InputError, match=r"cannot be stored in .*selections.*; set FEATCAL_CACHE to a folder"):
        select(many, ASKED)


@pytest.mark.slow
def test_cells_belong_to_models_samples_and_options(many: Family, tmp_path: Path) -> None:
    """Every tensor that features or scores are made of tells one choice from another: the projection, which lies
    outside the tower, and the text tower, which makes the heads, too."""
    first, projection = folder_of(contest_of(many)), many.adapter.head[0]
    assert first == folder_of(contest_of(many)) == folder_of(contest_of(many, replace(ASKED, lam=0.5, batch_size=8)))
    longer = {name: task.model_copy(update={"max_target_length": 7}) for name, task in many.suite.tasks.items()}
    described = replace(many.origin, config={**many.origin.config, "rope_theta": 7})
    moved = {projection: many.base.read([projection])[projection] + 0.1}
    heads = contest_of(many)
    assert heads.criterion.heads is not None
    other_text = {
        task: tuple(replace(one, prompts=one.prompts.flip(0)) for one in pair)  # type: ignore[type-var]
        for task, pair in heads.criterion.heads.items()
    }
    others = [
        folder_of(contest_of(many, replace(ASKED, seed=7))),
        folder_of(contest_of(many, replace(ASKED, samples=8))),
        folder_of(contest_of(many, replace(ASKED, biases=False))),
        folder_of(contest_of(replace(many, merged=many.base))),
        folder_of(contest_of(replace(many, suite=many.suite.model_copy(update={"tasks": longer})))),
        folder_of(contest_of(replace(many, origin=described))),
        folder_of(contest_of(replace(many, base=Overlay("base", many.base, moved)))),
        folder_of(replace(heads, criterion=replace(heads.criterion, heads=other_text))),  # type: ignore[arg-type]
    ]
    assert len({first, *others}) == 9
    assert folder_of(contest_of(many, starts=("tsv-m",))) == first
    head = ClassificationHead(torch.ones(3, 8))
    brought = Model(many.merged, heads=dict.fromkeys(TASKS, head))  # an object, told by nothing
    with_heads = replace(many, merged=brought, experts={t: Model(e, heads={t: head}) for t, e in many.experts.items()})
    assert folder_of(contest_of(with_heads)) is None
