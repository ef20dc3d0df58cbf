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
"""Visitor name of agents in the queue, where visitors take turns."""
_ABOUT = "agent"
"""Key of a job's arguments for data of its answers: the command, and odd names of the suite."""
POLL = 0.5
"""Seconds between two checks of a job that a call waits for."""


def names_in(suite: Suite) -> list[str]:
    """Return the names from a suite file: its own, tasks, references of models."""
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
            f"not in the local cache, and agents download nothing: {refs}; `hf download` fetches a "
            "model, and any featcal command that you run on the suite all of it"
        )
    return Session(found.family, one_shot=True)


@dataclass(frozen=True)
class Wanted:
    """A job that an agent requests.

    Args:
        kind, suite, args: as `server.kinds` has them.
        seconds, memory: estimates, memory in bytes.
        command: the equivalent command line.
        fresh: run it again even if it was done before, because its output folder must be new.
    """

    kind: str
    suite: str
    args: Mapping[str, Any]
    seconds: float
    memory: int
    command: str
    fresh: bool = False


def start(wanted: Wanted, access: Access, names: Sequence[str]) -> dict[str, Any]:
    """Submit a job, or find it running or finished; return the answer with its number.

    Args:
        names: names from the suite file.

    Raises:
        InputError: it exceeds the limits of a job, or the queue is full.
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
    """Return a job, after it has ended or so many seconds have passed.

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
    """Request the end of a job, and return it; a running one may take seconds to end."""
    Queue().cancel(job.id)
    return find_job(job.id)


def read_result(job: Job) -> dict[str, Any]:
    """Return the document of a finished job.

    Raises:
        InputError: it has not ended, or has no document.
    """
    document = Queue().result(job.order) if job.state == DONE else None
    if document is None:
        why = f": {job.message}" if job.message else ""
        raise InputError(f"job {job.id} has no result, it is {job.state}{why}")
    return document


def describe_job(job: Job) -> dict[str, Any]:
    """Describe the state of a job."""
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
    """Return the command line that is equivalent to a job."""
    return str(job.order.args.get(_ABOUT, {}).get("command", ""))


def job_names(job: Job) -> list[str]:
    """Return the names from the suite file of a job."""
    return list(job.order.args.get(_ABOUT, {}).get("names", ()))
