"""Choose without labels whether and how a merge is repaired."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import chain

from featcal.calibration.calibrate import config_for
from featcal.calibration.config import resolve
from featcal.family.opening import Family, ensure_family
from featcal.session.session import Session
from featcal.studies.selection.candidates import MERGED, Tried, plan_candidates
from featcal.studies.selection.cells import Cell, Cells, folder_of
from featcal.studies.selection.held_out_samples import FOLDS, Contest, Fold, calibration_samples, folds
from featcal.studies.selection.judge import Score, criterion_of, margin
from featcal.studies.selection.outcome import Candidate, Selection
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.schema import Suite
from featcal.system.errors import FeatcalError, NumericalError
from featcal.system.progress import Progress, silent

FEWEST = 2 * FOLDS
"""Samples per task below which held-out ones say too little."""
POLL = 0.2
"""Seconds between two looks at cells that other processes compute."""
SELECT = "select"
"""Label of the progress."""


def select(
    suite: Suite | Family | Session,
    config: CalibrationConfig | None = None,
    *,
    starts: Sequence[str] = (),
    device: str = "auto",
    progress: Progress = silent,
) -> Selection:
    """Choose whether and how a merge is repaired, by how often what is fitted on three quarters of the calibration
    samples gives the experts' decisions on the fourth. Nothing but calibration samples is read, and no label is used.

    The default, "informed" at its defaults, stays unless another candidate (`candidates.plan_candidates`) is better by
    more than the paired interval; of several the best is taken. What was found is kept in the user's cache folder
    (FEATCAL_CACHE), so that a choice that was ended goes on, and processes that make the same one share the work.

    Args:
        suite: a session keeps the chosen model.
        config: its samples, seed, switches and parts are those of all candidates, its recipe and numbers are one of
            them. Left out, the suite's own, else the paper's.
        starts: names of other merges, such as "tsv-m": each is tried as it is and calibrated.
        device: "auto", "cpu" or "cuda", for a suite.
        progress: is told the cells, candidates times folds, that are done.

    Raises:
        InputError: a start is not a merge, the cache folder cannot be used, or models or samples are not usable.
        NumericalError: no candidate could be scored.
    """
    session = suite if isinstance(suite, Session) else Session(ensure_family(suite, device))
    family = session.family
    asked = resolve(config or config_for(family), family.adapter, family.suite.tasks)
    plan = plan_candidates(family, asked, starts)
    default = plan[0].config
    assert default is not None
    drawn = calibration_samples(session, asked)
    samples = {task: len(one) for task, one in drawn.items()}
    few = [f"'{task}' ({count})" for task, count in samples.items() if count < FEWEST]
    if few:
        note = f"fewer than {FEWEST} calibration samples of {', '.join(few)}: too few to tell; the default is kept"
        return Selection(family, default, MERGED, default, (), None, {}, samples, (note,), 0.0, None)
    criterion = criterion_of(family, drawn)
    contest = Contest(session, asked, drawn, plan, criterion)
    cells = Cells(folder_of(contest))
    _work(contest, cells, progress)
    candidates = _rank(contest, cells)
    chosen = _choose(candidates, contest.names[0])
    started = time.perf_counter()
    calibrated = None
    if chosen.config is not None:
        calibrated = session.fit.calibrate(chosen.config if chosen.start == MERGED else chosen.model, progress)
    seconds = sum(one.seconds for one in candidates) + time.perf_counter() - started
    notes = tuple(filter(None, (criterion.note, _ANSWERS if session.is_text else "")))
    dealt = {
        task: tuple(tuple(one.indices[position] for position in fold) for fold in folds(len(one), asked.seed, task))
        for task, one in drawn.items()
    }
    chose = chosen.start, chosen.config, tuple(candidates), chosen.margin
    return Selection(family, default, *chose, dealt, samples, notes, seconds, calibrated)


_ANSWERS = (
    "answers of the calibration samples are tokens that the models read, as in every calibration; held-out samples are "
    "answered by the experts, and no given answer is compared with"
)


def _work(contest: Contest, cells: Cells, progress: Progress) -> None:
    """Compute every cell that nobody has computed, fold after fold; wait for those that others compute."""
    names = contest.names
    # Fold after fold, so that what experts compute on one is there for every candidate.
    todo = [(fold, number) for fold in range(FOLDS) for number in range(len(names))]
    total, held = len(todo), dict[int, Fold]()
    while todo := [(fold, number) for fold, number in todo if cells.get(names[number], fold) is None]:
        idle = True
        for fold, number in todo:
            with cells.claim(names[number], fold) as mine:
                # Looked at again: another process may have finished it between the list and the lock.
                if not mine or cells.get(names[number], fold) is not None:
                    continue
                idle = False
                done = fold * len(names) + number
                progress(SELECT, done, total)

                def report(*_: object, done: int = done) -> None:
                    progress(SELECT, done, total)

                if fold not in held:  # one at a time: what experts compute on it takes the memory
                    held.clear()
                    held[fold] = Fold(contest, fold)
                cells.put(names[number], fold, *_cell(held[fold], contest.plan[number], report))
        if idle:
            time.sleep(POLL)
    progress(SELECT, total, total)


def _cell(held: Fold, tried: Tried, progress: Progress) -> tuple[Cell, bool]:
    """Compute a cell, and say whether another process would find the same: what is wrong with a disk may pass."""
    started = time.perf_counter()
    try:
        return Cell(held.values(tried, progress), "", time.perf_counter() - started), True
    except FeatcalError as error:  # these options cannot be calibrated with: the table says so
        return Cell({}, str(error), time.perf_counter() - started), isinstance(error, NumericalError)


def _rank(contest: Contest, cells: Cells) -> list[Candidate]:
    """Put the cells of every candidate together, the best first."""
    found: list[Candidate] = []
    default: Score | None = None
    for name, tried in zip(contest.names, contest.plan, strict=True):
        own = [cell for fold in range(FOLDS) if (cell := cells.get(name, fold)) is not None]
        failure, score, held = next((cell.failure for cell in own if cell.failure), ""), None, None
        if not failure:
            values = {task: tuple(chain.from_iterable(cell.values[task] for cell in own)) for task in contest.drawn}
            score = Score(contest.criterion.name, values)
            default = default if found else score
            held = None if default is None else margin(default, score)
        seconds = sum(cell.seconds for cell in own)
        found.append(Candidate(name, tried.start, tried.config, score, held, failure, seconds))
    return sorted(found, key=lambda one: float("inf") if one.score is None else -one.score.value)


def _choose(candidates: Sequence[Candidate], default: str) -> Candidate:
    """Take the best of those that are better than the default beyond the interval, else the default.

    Args:
        candidates: the best first.
        default: its name; where it failed, the best of all is taken.

    Raises:
        NumericalError: none has a score.
    """
    scored = [one for one in candidates if one.score is not None]
    if not scored:
        raise NumericalError("; ".join(f"{one.model}: {one.failure}" for one in candidates))
    # Sorted by score: the first beyond the interval is the best of them.
    own = next((one for one in scored if one.model == default), scored[0])
    return next((one for one in scored if one.margin is not None and one.margin.low > 0), own)
