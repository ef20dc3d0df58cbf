"""Pages while a calibration of B/32's size runs as a job: `python benchmarks/jobs.py --visits 20`.

A second session goes round the pages of clip-mini, first alone, then beside the job; every visit is timed from asking
for a page to the end of its run, over streamlit's own protocol without a browser. Then the job is cancelled. Prints
JSON: median and worst of the visits, seconds from cancel to the end of the job's process, blocks finished meanwhile.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import browser
import families
import measure
import sessions
from websockets.sync.client import connect

from featcal.server.manager import ensure_manager
from featcal.server.orders import order
from featcal.server.queue import Job, Queue

ROUND = ("drift", "calibrate", "features", "cosines", "accuracy", "models")
SHAPES = {"b32": families.B32, "small": families.SMALL}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--visits", type=int, default=20)
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--samples", type=int, default=64, help="per task, of the calibration that runs as a job")
    parser.add_argument("--shape", choices=SHAPES, default="b32", help="small: to try the script itself")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "featcal-benchmarks")
    options = parser.parse_args()
    suite = families.clip_suite(options.work, SHAPES[options.shape], options.tasks, options.samples)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        os.environ["FEATCAL_CACHE"] = str(folder)
        server = stack.enter_context(browser.running_app(folder))
        address = f"ws{server.address.removeprefix('http')}/_stcore/stream"
        socket = stack.enter_context(connect(address, subprotocols=["streamlit"], max_size=None))
        visitor = sessions.Session(socket, sessions.Log())
        visitor.open("drift", "samples=64&n=64")
        finish(visitor)
        visits(visitor, len(ROUND))  # the first of each page computes
        alone = visits(visitor, options.visits)
        queue, job = started(suite, options.samples)
        beside = visits(visitor, options.visits)
        running = queue.get(job.id)
        if running is None or running.is_over:
            raise SystemExit(f"the job ended before the visits did: {running}; take more --samples")
        ended = cancelled(queue, running)
    measure.show(
        {
            "shape": options.shape,
            "tasks": options.tasks,
            "samples": options.samples,
            "alone": summary(alone),
            "beside_the_job": summary(beside),
            "cancel": ended,
            "machine": measure.machine(),
        }
    )


def started(suite: Path, samples: int) -> tuple[Queue, Job]:
    """A calibration in the queue, which has finished its first block."""
    queue = Queue()
    job = queue.submit(order("calibrate", str(suite), {"options": {"samples": samples}}), "another visitor")
    ensure_manager(queue)
    return queue, wait(queue, job, lambda one: one.done >= 1 or one.is_over)


def cancelled(queue: Queue, running: Job) -> dict[str, Any]:
    """Cancel the job; what that took."""
    asked = time.monotonic()
    queue.cancel(running.id)
    last = wait(queue, running, lambda one: one.is_over)
    seconds = time.monotonic() - asked
    step = ((running.progressed or 0.0) - (running.since or 0.0)) / max(1, running.done)
    return {"seconds": seconds, "blocks": last.done - running.done, "seconds_per_block": step, "state": last.state}


def wait(queue: Queue, job: Job, fits: Callable[[Job], bool]) -> Job:
    while True:
        found = queue.get(job.id)
        if found is None:
            raise SystemExit("the job is gone")
        if fits(found):
            return found
        time.sleep(0.02)


def visits(visitor: sessions.Session, count: int) -> list[tuple[str, float]]:
    """Page and seconds of visits in turn."""
    seen = []
    for number in range(count):
        name = ROUND[number % len(ROUND)]
        asked = time.monotonic()
        visitor.move(name)
        finish(visitor)
        seen.append((name, time.monotonic() - asked))
        measure.say(f"{name}: {seen[-1][1]:.2f} s")
        time.sleep(0.3)
    return seen


def finish(visitor: sessions.Session) -> None:
    visitor.wait_for_start()
    visitor.wait_for_end()
    if visitor.failed:
        raise SystemExit("a page shows an error")


def summary(seen: list[tuple[str, float]]) -> dict[str, Any]:
    seconds = [one for _, one in seen]
    by_page = {name: max(one for page, one in seen if page == name) for name, _ in seen}
    return {"visits": len(seen), "median": statistics.median(seconds), "worst": max(seconds), "worst_by_page": by_page}


if __name__ == "__main__":
    main()
