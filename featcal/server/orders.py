"""Make orders: one request of a visitor of a suite, identified by a key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from featcal.server.kinds import KINDS
from featcal.server.queue import Job, JobOrder, Queue
from featcal.session.fingerprint import Stamp, model_stamp, suite_stamp
from featcal.studies.history import current_maker
from featcal.suite.name_grammar import reference_in
from featcal.suite.schema import load_suite
from featcal.system.errors import InputError
from featcal.system.fingerprints import json_digest
from featcal.system.resources import code_digest, embedded_suites, ready_suites
from featcal.system.sandbox import server_rules


def order(kind: str, suite: str, args: Mapping[str, Any], stamp: Stamp | None = None) -> JobOrder:
    """Make the order of some work on a suite.

    Its key covers the suite's text, all its files as they are now, those of the models that `args` names and featcal's
    code: where any of these changes, an earlier result is not taken for this order's.

    Args:
        suite: the name of an embedded or ready suite, or the path of a suite file.
        args: as `KINDS` has them for the kind.
        stamp: of the suite, where it is known.

    Raises:
        InputError: an unknown kind, or a suite that cannot be read.
    """
    if kind not in KINDS:
        raise InputError(f"there is no kind of job '{kind}'; the kinds are {', '.join(KINDS)}")
    known = {**ready_suites(), **embedded_suites()}
    place = suite if suite in known else str(Path(suite).expanduser().absolute())
    files = suite_stamp(load_suite(place)) if stamp is None else stamp
    here = Path.cwd()
    references = filter(None, map(reference_in, _models(args)))
    read = [one for reference in references for one in model_stamp(reference, here)]
    # The working folder belongs to the key: relative paths in the arguments mean other files elsewhere.
    identity = [kind, files, dict(args), str(here), read, code_digest(), current_maker("")]
    key = json_digest(identity)
    return JobOrder(kind, place, args, str(here), key)


def submit(queue: Queue, wanted: JobOrder, visitor: str) -> Job:
    """Put an order in line and return the job that will do it.

    Raises:
        InputError: on a shared server, one more than a visitor, or all of them, may have in line.
    """
    rules, known = server_rules(), queue.find(wanted)
    if rules is not None and (known is None or known.is_over):
        waiting = [job.visitor for job in queue.jobs() if not job.is_over]
        if waiting.count(visitor) >= rules.jobs:
            raise InputError(
                f"you have {rules.jobs} unfinished jobs, which is all that this server accepts from one visitor"
            )
        if len(waiting) >= rules.all_jobs:
            raise InputError(
                f"{rules.all_jobs} jobs are waiting, which is all that this server accepts; try again later"
            )
    return queue.submit(wanted, visitor)


def _models(args: Mapping[str, Any]) -> list[str]:
    """Return the names of all models that the arguments of any kind of job name."""
    several = (*args.get("models", ()), *args.get("methods", ()))
    return [str(name) for name in (args.get("model", "merged"), *several)]


def require_current(asked: JobOrder, when: str) -> None:
    """Raise where anything that the result of an order depends on has changed since it was asked for.

    Args:
        when: it would have changed, for the message.

    Raises:
        InputError: something changed, or the suite cannot be read.
    """
    if order(asked.kind, asked.suite, asked.args).key != asked.key:
        raise InputError(
            f"{when}, the suite, a file that it reads, or featcal itself has changed, so the result would not belong "
            "to "
            "this order; order it again"
        )
