"""Choose, without labels, whether and how to repair a merge."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

from featcal.calibration.calibrate import CalibrationResult, config_for
from featcal.calibration.config import resolve_options
from featcal.family.opening import Family
from featcal.session.session import Session, ensure_session
from featcal.studies.selection.candidates import MERGED, CandidateModel, merges_to_try, plan_candidates
from featcal.studies.selection.cells import Cells, FoldCell, folder_of
from featcal.studies.selection.held_out_samples import FOLDS, Fold, SelectionProblem, draw_unlabelled_samples
from featcal.studies.selection.judge import Score, criterion_of, margin
from featcal.studies.selection.outcome import Candidate, Selection
from featcal.suite.calibration_options import CalibrationConfig
from featcal.suite.schema import Suite
from featcal.system.errors import FeatcalError, NumericalError
from featcal.system.progress import Progress, silent

FEWEST = 2 * FOLDS
"""Smallest number of samples per task with which held-out samples are enough."""
ALWAYS = 2
"""Number of candidates that are tried even in the shortest time: "informed" at its defaults and the merged model as it
is."""
POLL = 0.2
"""Seconds between two checks for the cells of other processes."""
SELECT = "select"
"""Label of the progress."""


def select(
    suite: Suite | Family | Session,
    config: CalibrationConfig | None = None,
    *,
    of: str = MERGED,
    starts: str | Sequence[str] = (),
    minutes: float | None = None,
    device: str = "auto",
    progress: Progress = silent,
) -> Selection:
    """Choose whether and how to repair a merge, by the probability that candidates, fitted on three quarters of the
    calibration samples, give to the experts' decisions on the fourth. Only calibration samples are read, and no label.

    The default, "informed" with errors weighed by decisions, or without them where a model has no decisions or too few
    samples, stays unless another candidate (`candidates.plan_candidates`) is better by more than the paired interval;
    of several the best is chosen. Results are stored in the user's cache folder
    (FEATCAL_CACHE), so that an interrupted choice continues, and processes that make the same choice share the work.

    Args:
        suite: a session caches the chosen model.
        config: requested options; samples, seed, switches and parts apply to all candidates; recipe and numbers form
            one candidate. By default the suite's own, else the paper's.
        of: name of the merge on which all recipes are tried; by default the suite's own.
        starts: names of other merges, such as "tsv-m", or a single name: each is tried as it is and calibrated.
        minutes: approximate time limit; every merger that needs neither samples nor training is then a start too,
            unless starts are named. A quarter of the time goes to the first fold, the rest to the candidates that are
            best on it. None tries all.
        device: "auto", "cpu" or "cuda", for a suite.
        progress: called with the number of finished cells (candidates times folds).

    Raises:
        InputError: a start is not a merge, minutes are not above 0, the cache folder cannot be used, or models or
            samples are not usable.
        NumericalError: no candidate could be scored.

    >>> import featcal
    >>> featcal.select(featcal.load_suite("lm-mini"), featcal.CalibrationConfig(samples=4)).config.recipe
    'informed'
    """
    session = ensure_session(suite, device)
    family, merges = session.family, merges_to_try(minutes)
    asked = resolve_options(config or config_for(family), family.adapter, family.suite.tasks)
    plan = plan_candidates(family, asked, [starts] if isinstance(starts, str) else starts or merges, of)
    merge, default = plan[0].start, plan[0].config
    assert default is not None
    drawn = draw_unlabelled_samples(session, asked)
    samples = {task: len(one) for task, one in drawn.items()}
    if note := _note_too_few(samples):
        return Selection(family, default, merge, default, (), None, {}, samples, (note,), 0.0, None, merge)
    contest = SelectionProblem(session, asked, drawn, plan, criterion_of(family, drawn))
    cells = Cells(folder_of(contest))
    tried = _score_all(contest, cells, progress) if minutes is None else _score_best(contest, cells, minutes, progress)
    candidates, standing = _rank(contest, cells, tried)
    chosen = _choose(candidates, contest.names[standing])
    calibrated, took = _calibrate(session, chosen, progress)
    seconds = sum(one.seconds for one in candidates) + took
    notes = _write_notes(contest, len(plan) - len(tried), minutes)
    chose = chosen.start, chosen.config, tuple(candidates), chosen.margin
    default = plan[standing].config or default
    return Selection(family, default, *chose, contest.positions, samples, notes, seconds, calibrated, merge)


_ANSWERS = (
    "answers of the calibration samples are tokens that the models read, as in every calibration; held-out samples are "
    "answered by the experts, and no given answer is compared with"
)


def _calibrate(session: Session, chosen: Candidate, progress: Progress) -> tuple[CalibrationResult | None, float]:
    """Return the chosen calibration, None if the choice is a merge, and the seconds that it took."""
    started, calibrated = time.perf_counter(), None
    if chosen.config is not None:
        calibrated = session.fit.calibrate(session.resolve(chosen.config, chosen.start), progress)
    return calibrated, time.perf_counter() - started


def _write_notes(contest: SelectionProblem, untried: int, minutes: float | None) -> tuple[str, ...]:
    """Return what a reader of the choice has to know of its criterion, samples and time."""
    answers = _ANSWERS if contest.session.is_text else ""
    return tuple(filter(None, (contest.criterion.note, answers, _note_untried(untried, minutes))))


def _note_too_few(samples: Mapping[str, int]) -> str:
    """Return a note on the tasks with fewer than `FEWEST` samples; empty if there are none."""
    few = [f"'{task}' ({count})" for task, count in samples.items() if count < FEWEST]
    what = f"fewer than {FEWEST} calibration samples of {', '.join(few)}: too few to tell; the default is kept"
    return what if few else ""


def _note_untried(count: int, minutes: float | None) -> str:
    """Return a note on the number of candidates for which the time was too short; empty if there are none."""
    return "" if not count else f"{count} candidates did not fit into {minutes:g} minutes; with more, this goes on"


def _score_all(contest: SelectionProblem, cells: Cells, progress: Progress) -> list[int]:
    """Try every candidate on every fold, and return their numbers."""
    numbers = list(range(len(contest.plan)))
    _work(contest, cells, numbers, range(FOLDS), progress)
    return numbers


def _score_best(contest: SelectionProblem, cells: Cells, minutes: float, progress: Progress) -> list[int]:
    """Try as many candidates on the first fold as a quarter of the time allows, and on the other folds as many of the
    best as fit into the rest; return the numbers of those that were tried on all. The first two are always tried."""
    started, numbers, names = time.monotonic(), range(len(contest.plan)), contest.names
    _work(contest, cells, numbers, [0], progress, until=started + 60 * minutes / FOLDS)
    found = {number: cell for number in numbers if (cell := cells.get(names[number], 0)) is not None}
    left = started + 60 * minutes - time.monotonic()

    def remaining(number: int) -> float:
        missing = sum(cells.get(names[number], fold) is None for fold in range(1, FOLDS))
        return missing * found[number].seconds

    def value(number: int) -> float:
        return -float("inf") if found[number].failure else Score(contest.criterion.name, found[number].values).value

    kept = [number for number in found if number < ALWAYS]
    left -= sum(map(remaining, kept))
    for number in sorted(found.keys() - set(kept), key=value, reverse=True):
        if (left := left - remaining(number)) < 0:
            break
        kept.append(number)
    _work(contest, cells, sorted(kept), range(1, FOLDS), progress)
    return sorted(kept)


def _work(
    contest: SelectionProblem,
    cells: Cells,
    numbers: Sequence[int],
    folds: Sequence[int],
    progress: Progress,
    until: float | None = None,
) -> None:
    """Compute every missing cell, fold after fold; wait for those that other processes compute.

    Args:
        numbers: positions of the candidates.
        until: reading of the monotonic clock after which only cells of the first candidates are begun.
    """
    names = contest.names
    # Fold after fold, so that what experts compute on one is there for every candidate.
    todo = [(fold, number) for fold in folds for number in numbers]
    total, held = len(todo), dict[int, Fold]()
    place = {one: done for done, one in enumerate(todo)}

    def is_wanted(fold: int, number: int) -> bool:
        in_time = until is None or number < ALWAYS or time.monotonic() < until
        return in_time and cells.get(names[number], fold) is None

    while todo := [one for one in todo if is_wanted(*one)]:
        idle = True
        for fold, number in todo:
            with cells.claim(names[number], fold) as mine:
                # Looked at again: another process may have finished it between the list and the lock.
                if not mine or not is_wanted(fold, number):
                    continue
                idle = False
                done = place[fold, number]
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


def _cell(held: Fold, tried: CandidateModel, progress: Progress) -> tuple[FoldCell, bool]:
    """Compute a cell, and say whether another process would get the same result: a disk error may be temporary."""
    started = time.perf_counter()
    try:
        return FoldCell(held.values(tried, progress), "", time.perf_counter() - started), True
    except FeatcalError as error:  # these options cannot be calibrated with: the table says so
        return FoldCell({}, str(error), time.perf_counter() - started), isinstance(error, NumericalError)


def _rank(contest: SelectionProblem, cells: Cells, numbers: Sequence[int]) -> tuple[list[Candidate], int]:
    """Combine the cells of candidates, the best first, each with its margin from the default; return also the
    default's number, the first of `contest.standing` that has a score."""
    found: dict[int, Candidate] = {}
    for number in numbers:
        name, tried = contest.names[number], contest.plan[number]
        own = [cell for fold in range(FOLDS) if (cell := cells.get(name, fold)) is not None]
        failure, score = next((cell.failure for cell in own if cell.failure), ""), None
        if not failure:
            values = {task: tuple(chain.from_iterable(cell.values[task] for cell in own)) for task in contest.drawn}
            score = Score(contest.criterion.name, values)
        seconds = sum(cell.seconds for cell in own)
        found[number] = Candidate(name, tried.start, tried.config, score, None, failure, seconds)
    standing = next((one for one in contest.standing if one in found and found[one].score is not None), 0)
    against = found[standing].score
    held = [
        one if one.score is None or against is None else replace(one, margin=margin(against, one.score))
        for one in found.values()
    ]
    return sorted(held, key=lambda one: float("inf") if one.score is None else -one.score.value), standing


def _choose(candidates: Sequence[Candidate], default: str) -> Candidate:
    """Choose the best of those that are better than the default beyond the interval, else the default.

    Args:
        candidates: the best first.
        default: its name; if it failed, the best of all is chosen.

    Raises:
        NumericalError: no candidate has a score.
    """
    scored = [one for one in candidates if one.score is not None]
    if not scored:
        raise NumericalError("; ".join(f"{one.model}: {one.failure}" for one in candidates))
    # Sorted by score: the first beyond the interval is the best of them.
    own = next((one for one in scored if one.model == default), scored[0])
    return next((one for one in scored if one.margin is not None and one.margin.low > 0), own)
