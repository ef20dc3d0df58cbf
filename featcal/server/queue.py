"""Keep the queue: one SQLite file that pages, the manager and workers read and write, and a folder for every result.

A job is identified by its computation (`Order.key`): a second request for the same finds the same job, and later its
result. Visitors take turns. Nothing in here imports torch.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from featcal.system.errors import InputError
from featcal.system.json_files import read_json
from featcal.system.sandbox import jobs_folder

QUEUED, RUNNING = "queued", "running"
DONE, FAILED, CANCELLED, DIED = "done", "failed", "cancelled", "died"
RESULT = "result.json"
"""Name of a job's document in its folder."""
WAITING = 30.0
"""Seconds that a reader or writer waits for the others."""
KEPT_BYTES = 20 * 2**30
"""Bytes of disk for all results together; the oldest go first, the newest stays."""
KEPT_DAYS = 30.0
"""Days that jobs which have ended are listed and their results kept."""
_TABLE = """
CREATE TABLE IF NOT EXISTS jobs (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  key TEXT NOT NULL, kind TEXT NOT NULL, suite TEXT NOT NULL, args TEXT NOT NULL, cwd TEXT NOT NULL,
  visitor TEXT NOT NULL, state TEXT NOT NULL DEFAULT 'queued', turn INTEGER NOT NULL DEFAULT 0,
  cancel INTEGER NOT NULL DEFAULT 0, pid INTEGER, message TEXT NOT NULL DEFAULT '',
  label TEXT NOT NULL DEFAULT '', done INTEGER NOT NULL DEFAULT 0, total INTEGER NOT NULL DEFAULT 0,
  asked REAL NOT NULL, started REAL, since REAL, progressed REAL, ended REAL
)
"""
_NEXT = """
SELECT * FROM jobs WHERE state = 'queued'
ORDER BY (SELECT MAX(turn) FROM jobs AS own WHERE own.visitor = jobs.visitor), id LIMIT 1
"""
"""Query of the oldest job of the visitor whose last turn is longest ago."""


@dataclass(frozen=True)
class JobOrder:
    """Work that is to be computed."""

    kind: str
    """A name in `kinds.KINDS`."""
    suite: str
    """The name of an embedded or ready suite, or the absolute path of a suite file."""
    args: Mapping[str, Any]
    """Any JSON value; its meaning depends on the kind."""
    cwd: str
    """The folder that relative paths in `args` start from."""
    key: str
    """Hexadecimal digits; equal for jobs with the same result."""


@dataclass(frozen=True)
class Job:
    """An order in the queue, as it was when it was looked at. Times are seconds since the epoch."""

    id: int
    order: JobOrder
    folder: Path
    """Folder of its result, its log and nothing else."""
    visitor: str
    """The visitor who asked for it first."""
    state: str
    """"queued", "running", or how it ended: "done", "failed" (it said why), "cancelled" or "died" (it could not)."""
    message: str
    """Reason why it failed or died."""
    label: str
    """Name of the step that it is at, as `Progress` has it."""
    done: int
    """Number of steps that are done."""
    total: int
    pid: int | None
    """Number of its process, while it runs."""
    asked: float
    started: float | None
    since: float | None
    """Time at which the first step of `label` began."""
    progressed: float | None
    """Time at which a step was last reported as done."""
    ended: float | None

    @property
    def is_over(self) -> bool:
        return self.state not in (QUEUED, RUNNING)

    @property
    def log(self) -> Path:
        """Return the log file of its process; a job that did not start has none."""
        return self.folder / "log.txt"

    def seconds_left(self, now: float) -> float | None:
        """Estimate the seconds left of the current step at its pace so far; None before its first part is done."""
        if self.state != RUNNING or not self.done or self.since is None or self.progressed is None:
            return None
        step = (self.progressed - self.since) / self.done
        return max(0.0, self.progressed + step * (self.total - self.done) - now)


class Queue:
    """The jobs of this user on this machine.

    Args:
        folder: where they are kept; left out, in the user's cache folder, where the rules of the process say.

    Raises:
        InputError: from every method: the folder cannot be written, or the file in it is not a queue.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = (folder or jobs_folder()).absolute()
        self._file = self.folder / "queue.sqlite"

    def submit(self, order: JobOrder, visitor: str) -> Job:
        """Put an order in line, or find it in line or running and not about to end; return the job that will do it."""
        with self._transaction() as rows:
            found = rows.execute(
                "SELECT * FROM jobs WHERE key = ? AND state IN ('queued', 'running') AND cancel = 0", [order.key]
            ).fetchone()
            if found is None:
                args = json.dumps(dict(order.args), sort_keys=True)
                given = [order.key, order.kind, order.suite, args, order.cwd, visitor, time.time()]
                rows.execute(
                    "INSERT INTO jobs (key, kind, suite, args, cwd, visitor, asked) VALUES (?, ?, ?, ?, ?, ?, ?)", given
                )
                found = rows.execute("SELECT * FROM jobs WHERE id = last_insert_rowid()").fetchone()
            return self._job(found)

    def find(self, order: JobOrder) -> Job | None:
        """Return the last job for an order, whatever became of it."""
        found = self._read("SELECT * FROM jobs WHERE key = ? ORDER BY id DESC LIMIT 1", order.key)
        return found[0] if found else None

    def get(self, identity: int) -> Job | None:
        # Beyond 64 bits SQLite takes no number.
        found = self._read("SELECT * FROM jobs WHERE id = ?", identity) if abs(identity) < 2**63 else []
        return found[0] if found else None

    def jobs(self) -> list[Job]:
        """Return all known jobs: those that run, those in line in their order, then the last to end first."""
        return self._read(
            "SELECT * FROM jobs ORDER BY CASE state WHEN 'running' THEN 0 WHEN 'queued' THEN 1 ELSE 2 END, "
            "COALESCE(-ended, id), id"
        )

    def result(self, order: JobOrder) -> dict[str, Any] | None:
        """Return the document that a job for this order has left; None if none has."""
        file = self._folder(order.key) / RESULT
        return read_json(file) if file.is_file() else None

    def busy(self) -> bool:
        """Say whether anything is in line or called running."""
        return bool(self._read("SELECT * FROM jobs WHERE state IN ('queued', 'running') LIMIT 1"))

    def claim(self) -> Job | None:
        """Take the next job in turn, for the manager; it counts as running from now on."""
        with self._transaction() as rows:
            found = rows.execute(_NEXT).fetchone()
            if found is None:
                return None
            turn = rows.execute("SELECT MAX(turn) + 1 FROM jobs").fetchone()[0]
            now = time.time()
            rows.execute(
                "UPDATE jobs SET state = 'running', turn = ?, started = ?, since = ?, progressed = ? WHERE id = ?",
                [turn, now, now, now, found["id"]],
            )
            return self._job(rows.execute("SELECT * FROM jobs WHERE id = ?", [found["id"]]).fetchone())

    def runs_as(self, identity: int, pid: int) -> None:
        """Record the process of a job, for the manager."""
        self._write("UPDATE jobs SET pid = ? WHERE id = ?", pid, identity)

    def report(self, identity: int, label: str, done: int, total: int) -> None:
        """Record how far a job is, for the worker."""
        now = time.time()
        self._write(
            "UPDATE jobs SET since = CASE WHEN label = ? THEN since ELSE ? END, label = ?, done = ?, total = ?, "
            "progressed = ? WHERE id = ?",
            *(label, now, label, done, total, now, identity),
        )

    def cancel(self, identity: int) -> None:
        """Cancel a job: at once while it is in line, else as soon as the manager sees it."""
        with self._transaction() as rows:
            rows.execute("UPDATE jobs SET cancel = 1 WHERE id = ?", [identity])
            rows.execute(
                "UPDATE jobs SET state = 'cancelled', ended = ? WHERE id = ? AND state = 'queued'",
                [time.time(), identity],
            )

    def is_cancel_requested(self, identity: int) -> bool:
        """Say whether a visitor cancelled the job."""
        return bool(self._read("SELECT * FROM jobs WHERE id = ? AND cancel = 1", identity))

    def end(self, identity: int, state: str, message: str = "") -> None:
        """End a running job; one that has ended stays as it is."""
        self._write(
            "UPDATE jobs SET state = ?, message = ?, ended = ?, pid = NULL WHERE id = ? AND state = 'running'",
            *(state, message, time.time(), identity),
        )

    def end_all(self, message: str) -> None:
        """End whatever is called running as died: the manager that would know of it is gone."""
        self._write(
            "UPDATE jobs SET state = 'died', message = ?, ended = ?, pid = NULL WHERE state = 'running'",
            *(message, time.time()),
        )

    def forget(self, identity: int) -> None:
        """Take a job that has ended off the list, and its result off the disk if no other job has it."""
        with self._transaction() as rows:
            found = rows.execute("SELECT * FROM jobs WHERE id = ?", [identity]).fetchone()
            if found is None or not self._job(found).is_over:
                return
            rows.execute("DELETE FROM jobs WHERE id = ?", [identity])
            if rows.execute("SELECT 1 FROM jobs WHERE key = ?", [found["key"]]).fetchone() is None:
                shutil.rmtree(self._folder(found["key"]), ignore_errors=True)

    def tidy(self) -> None:
        """Delete jobs that ended long ago, and the oldest results while all together take more than `KEPT_BYTES`,
        except those that an unfinished job reads."""
        jobs = self.jobs()
        ended = [job for job in jobs if job.is_over]  # the last one first
        # The model of a job can be the checkpoint that another one left.
        read = json.dumps([dict(job.order.args) for job in jobs if not job.is_over])
        sizes = {job.folder: 0 for job in ended}
        for folder in sizes:
            with suppress(OSError):  # somebody removes it just now
                sizes[folder] = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        taken = 0
        for place, job in enumerate(ended):
            taken += sizes.pop(job.folder, 0)  # tries of one order share a folder
            old = time.time() - (job.ended or 0.0) > 86400 * KEPT_DAYS
            if job.folder.name not in read and (old or (taken > KEPT_BYTES and place)):
                self.forget(job.id)

    def _folder(self, key: str) -> Path:
        return self.folder / "results" / key[:32]

    def _read(self, query: str, *values: Any) -> list[Job]:
        with self._open() as rows:
            return [self._job(row) for row in rows.execute(query, values)]

    def _write(self, query: str, *values: Any) -> None:
        with self._transaction() as rows:
            rows.execute(query, values)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Make every change in the `with` or none; no other process writes meanwhile."""
        with self._open() as rows:
            # Take the write lock now: two that read first and write later would find each other locked out.
            rows.execute("BEGIN IMMEDIATE")
            with rows:
                yield rows

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """Open a connection of its own for every use, so that threads and processes share nothing but the file."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # isolation_level None: Python begins no transactions of its own.
            rows = sqlite3.connect(self._file, timeout=WAITING, isolation_level=None)
            try:
                rows.row_factory = sqlite3.Row
                rows.execute(_TABLE)
                yield rows
            finally:
                rows.close()
        except (OSError, sqlite3.Error) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise InputError(
                f"jobs cannot be stored in {self.folder}: {why}; set FEATCAL_CACHE to a folder that can be written"
            ) from error

    def _job(self, row: sqlite3.Row) -> Job:
        kept = dict(row)
        order = JobOrder(kept["kind"], kept["suite"], json.loads(kept["args"]), kept["cwd"], kept["key"])
        entries = {field.name: kept[field.name] for field in fields(Job) if field.name in kept}
        return Job(order=order, folder=self._folder(order.key), **entries)
