"""Candidates and their scores in a file: an Optuna study that survives a kill and that several processes may work on.

Of every process that computes a candidate the system knows, by a lock on a file beside the study: what a process that
died had begun is begun again. What is suggested next depends on the seed, on how many candidates there were and on
their scores, so one process alone always makes the same study, however often it was ended.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage, RDBStorage
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from featcal.errors import FeatcalError, InputError
from featcal.locks import locked
from featcal.progress import Progress
from featcal.selection.candidates import Options, parameters, suggested
from featcal.selection.held_out import Score
from featcal.selection.journal import ENDING, journal

PATIENCE = 60.0
"""Seconds to wait for another process that takes or gives back a candidate."""
POLL = 0.2
"""Seconds between two looks at candidates that other processes compute."""
SELECT = "select"
"""What progress is called."""
_OPTIONS, _TURN, _SCORE, _FAILURE, _SECONDS = "options", "turn", "score", "failure", "seconds"


@dataclass(frozen=True)
class Candidate:
    """Options that were tried."""

    options: Options
    score: Score | None
    """None where the calibration failed."""
    failure: str
    """Why it did; else ""."""
    seconds: float
    """What calibrating and measuring took."""


class Study:
    """One study of a file, opened by `opened`.

    Args:
        file: several studies may be in it.
        name: tells one from the others.
        seed: decides, with what was found so far, what is suggested next.
    """

    def __init__(self, file: Path, name: str, seed: int) -> None:
        self._file, self._name, self._seed = file, name, seed
        with self._turn():
            self._storage = _storage(file)
            try:
                self._study = optuna.create_study(storage=self._storage, study_name=name, load_if_exists=True)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Let the file go."""
        if isinstance(self._storage, RDBStorage):
            self._storage.remove_session()
            self._storage.engine.dispose()

    def plan(self, options: Sequence[Options]) -> None:
        """Put candidates in line that are to be tried before any are suggested; those it knows stay as they are."""
        with self._turn():
            known = [trial.user_attrs[_OPTIONS] for trial in self._candidates()]
            for one in options:
                if dict(one) not in known:
                    self._put_in_line(one, len(self._candidates()))

    @contextmanager
    def taken(self, most: int, progress: Progress) -> Iterator[tuple[Trial, Options] | None]:
        """The next candidate, this process's own as long as the `with` lasts; None once `most` are done, whoever did
        them. Where all that is left is computed by others, it waits for them."""
        while True:
            progress(SELECT, min(len(self.found()), most), most)
            with ExitStack() as claims:
                with self._turn():
                    trial, working = self._next(most)
                    if trial is not None:
                        claims.enter_context(self._claimed(trial.number))
                if trial is not None or not working:
                    yield None if trial is None else (trial, trial.user_attrs[_OPTIONS])
                    return
            time.sleep(POLL)

    def put(self, trial: Trial, seconds: float, found: Score | FeatcalError) -> None:
        """What became of a candidate that was taken: its score, or why there is none."""
        trial.set_user_attr(_SECONDS, seconds)
        if isinstance(found, Score):
            trial.set_user_attr(_SCORE, asdict(found))
            self._study.tell(trial, found.value)
        else:
            trial.set_user_attr(_FAILURE, str(found))
            self._study.tell(trial, state=TrialState.FAIL)

    def found(self) -> list[Candidate]:
        """Every candidate that is done, in the order in which they were thought of."""
        done = [trial for trial in self._candidates() if trial.state.is_finished()]
        return [_candidate(trial.user_attrs) for trial in done]

    def _next(self, most: int) -> tuple[Trial | None, bool]:
        """A candidate to be computed, and whether others compute some; to be called in one's turn."""
        for one in self._candidates():
            if one.state == TrialState.RUNNING and self._is_free(one.number):  # whoever took it has died
                self._put_in_line(one.user_attrs[_OPTIONS], one.user_attrs[_TURN])
                self._study.tell(one.number, state=TrialState.FAIL)
        candidates = self._candidates()
        waiting = any(one.state == TrialState.WAITING for one in candidates)
        if not waiting and len(candidates) >= most:
            return None, any(one.state == TrialState.RUNNING for one in candidates)
        if not waiting:
            self._put_in_line(self._suggest(candidates), len(candidates))
        trial = self._study.ask()
        suggested(trial.suggest_categorical, trial.suggest_float)  # so that it knows its parameters
        return trial, True

    def _suggest(self, candidates: Sequence[FrozenTrial]) -> dict[str, Any]:
        """Options that were not tried, by what is known of those that were: the same for the same seed."""
        sampler = optuna.samplers.TPESampler(seed=self._seed + len(candidates))
        known = optuna.create_study(sampler=sampler)
        for one in candidates:
            if one.state == TrialState.COMPLETE:
                known.add_trial(
                    optuna.create_trial(params=one.params, distributions=one.distributions, value=one.value)
                )
        trial = known.ask()
        return suggested(trial.suggest_categorical, trial.suggest_float)

    def _put_in_line(self, options: Options, turn: int) -> None:
        self._study.enqueue_trial(parameters(options), user_attrs={_OPTIONS: dict(options), _TURN: turn})

    def _candidates(self) -> list[FrozenTrial]:
        """One trial per candidate, in the order in which they were thought of; a process that died left its own."""
        trials = self._study.get_trials(deepcopy=False)
        kept = [one for one in trials if one.state != TrialState.FAIL or _FAILURE in one.user_attrs]
        return sorted(kept, key=lambda trial: int(trial.user_attrs[_TURN]))

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Nobody else takes a candidate meanwhile.

        Raises:
            InputError: somebody does, and does not end.
        """
        with locked(self._file.with_name(f"{self._file.name}.lock"), PATIENCE) as mine:
            if not mine:
                raise InputError(f"{self._file} has been locked for {PATIENCE:.0f} s; end the process that has it")
            yield

    @contextmanager
    def _claimed(self, number: int) -> Iterator[None]:
        claim = self._claim(number)
        with locked(claim, PATIENCE):
            try:
                yield
            finally:
                with suppress(OSError):  # a system that keeps open files; it lies there empty then
                    claim.unlink()

    def _claim(self, number: int) -> Path:
        return self._file.with_name(f"{self._file.name}.{self._name[:8]}-{number}.lock")

    def _is_free(self, number: int) -> bool:
        with locked(self._claim(number), 0.0) as free:
            return free


def _storage(file: Path) -> RDBStorage | JournalStorage:
    if file.suffix == ENDING:
        return journal(file, PATIENCE)
    return RDBStorage(f"sqlite:///{file}", engine_kwargs={"connect_args": {"timeout": PATIENCE}})


def _candidate(kept: Mapping[str, Any]) -> Candidate:
    score = None
    if _SCORE in kept:
        distances, sizes = ({t: tuple(of) for t, of in kept[_SCORE][name].items()} for name in ("distances", "sizes"))
        score = Score(kept[_SCORE]["criterion"], distances, sizes)
    return Candidate(kept[_OPTIONS], score, kept.get(_FAILURE, ""), kept[_SECONDS])


@contextmanager
def opened(file: Path, name: str, seed: int) -> Iterator[Study]:
    """A study of a file, which is made where there is none: a journal, where its name ends in `.journal`, for a disk
    that machines share, else a SQLite database.

    Raises:
        InputError: the file cannot be read or written, or is something else.
    """
    said = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        with _named(file, OSError, sqlite3.Error, ValueError):  # of a journal that holds something else
            file.parent.mkdir(parents=True, exist_ok=True)
            study = Study(file.absolute(), name, seed)
        try:
            with _named(file):
                yield study
        finally:
            study.close()
    finally:
        optuna.logging.set_verbosity(said)


@contextmanager
def _named(file: Path, *others: type[Exception]) -> Iterator[None]:
    """What is wrong with the file of a study becomes an error that names it."""
    kinds: tuple[type[Exception], ...] = (SQLAlchemyError, optuna.exceptions.OptunaError, *others)
    try:
        yield
    except kinds as error:
        why = error.strerror if isinstance(error, OSError) else str(error).partition("\n")[0]
        raise InputError(f"study {file}: {why}; give another file with --study") from error
