"""Start jobs for agents, with their estimates first, and follow them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from featcal.server.manager import ensure_manager
from featcal.server.orders import order, submit
from featcal.server.queue import DONE, RUNNING, Job, Queue
from featcal.suite.schema import Suite, load_suite, references
from featcal.system.errors import InputError

if TYPE_CHECKING:
    from featcal.server.agents.access import Access
    from featcal.session.session import Session

VISITOR = "agent"
"""Who asks, for turns in the queue: agents have one of their own."""
_ABOUT = "agent"
"""Key of a job's arguments that its answers are made with: the command, and odd names of the suite."""
POLL = 0.5
"""Seconds between two looks at a job that somebody waits for."""


def names_in(suite: Suite) -> list[str]:
    """Return the names that a suite file gave: its own, tasks, references of models."""
    return [suite.name, *suite.tasks, *map(str, references(suite).values())]


def open_checked_suite(suite: str) -> Session:
    """Open a suite for estimates, after `featcal check` found nothing wrong.

    Raises:
        InputError: every problem of the suite, or that parts of it are still on the Hub.
    """
    from featcal.preflight.check import check_suite
    from featcal.session.session import Session

    found = check_suite(load_suite(suite), probe=False)
    if found.problems:
        raise InputError(*found.problems)
    if found.family is None:
        refs = ", ".join(one.ref for one in found.downloads)
        raise InputError(
            f"these are on the Hub and not in its local cache, and agents fetch nothing: {refs}; hf download fetches a "
            "model, and the first command that a person runs on the suite all of it"
        )
    return Session(found.family, one_shot=True)


@dataclass(frozen=True)
class Wanted:
    """A piece of work that an agent asks for.

    Args:
        kind, suite, args: as `server.kinds` has them.
        seconds, memory: by the estimates, memory in bytes.
        command: does the same on the command line.
        fresh: to be done again even where it was done before, since what it writes must not be there yet.
    """

    kind: str
    suite: str
    args: Mapping[str, Any]
    seconds: float
    memory: int
    command: str
    fresh: bool = False


def start(wanted: Wanted, access: Access, names: Sequence[str]) -> dict[str, Any]:
    """Put work in line, or find it there or done; return the answer with its number.

    Args:
        names: that the suite's file gave.

    Raises:
        InputError: it would take more than a job may, or there are as many jobs as the server takes.
    """
    from featcal.preflight.estimates import START

    seconds = START + wanted.seconds
    access.require_limits(seconds, wanted.memory, wanted.command)
    queue, about = Queue(), {"command": wanted.command, "names": list(names)}
    asked = order(wanted.kind, wanted.suite, {**wanted.args, _ABOUT: about})
    job = queue.find(asked)
    if job is None or wanted.fresh or job.state != DONE or queue.result(asked) is None:
        job = submit(queue, asked, VISITOR)
        ensure_manager(queue)
    return {
        "job": job.id,
        "state": job.state,
        "estimate": {"seconds": round(seconds), "memory_bytes": wanted.memory},
        "next": f"job(id={job.id}, wait=30), then job(id={job.id}, action='result')",
    }


def find_job(identity: int, wait: float = 0.0) -> Job:
    """Return a job as it is, after it has ended or so many seconds have passed.

    Raises:
        InputError: no such job.
    """
    queue, until = Queue(), time.monotonic() + wait
    while True:
        job = queue.get(identity)
        if job is None:
            known = ", ".join(str(one.id) for one in queue.jobs()[:10])
            raise InputError(f"there is no job {identity}; the last ones are {known or 'none'}")
        if job.is_over or time.monotonic() >= until:
            return job
        ensure_manager(queue)
        time.sleep(POLL)


def cancel(job: Job) -> Job:
    """Ask for the end of a job, and return it as it is then: one that runs may take seconds to end."""
    Queue().cancel(job.id)
    return find_job(job.id)


def read_result(job: Job) -> dict[str, Any]:
    """Return the document that a job has left.

    Raises:
        InputError: it has not ended, or it left none.
    """
    document = Queue().result(job.order) if job.state == DONE else None
    if document is None:
        why = f": {job.message}" if job.message else ""
        raise InputError(f"job {job.id} has no result, it is {job.state}{why}")
    return document


def describe_job(job: Job) -> dict[str, Any]:
    """Return where a job is."""
    now = time.time()
    found: dict[str, Any] = {"job": job.id, "kind": job.order.kind, "state": job.state}
    if job.state == RUNNING:
        left = job.seconds_left(now)
        found |= {"step": job.label or "starting", "done": job.done, "of": job.total}
        found |= {"seconds": round(now - (job.started or now)), "seconds_left": None if left is None else round(left)}
    elif job.is_over and job.started is not None:
        found["seconds"] = round((job.ended or job.started) - job.started)
    return found | ({"message": job.message} if job.message else {})


def command_of(job: Job) -> str:
    """Return the command that does what a job does."""
    return str(job.order.args.get(_ABOUT, {}).get("command", ""))


def job_names(job: Job) -> list[str]:
    """Return the names that the suite of a job gave."""
    return list(job.order.args.get(_ABOUT, {}).get("names", ()))
