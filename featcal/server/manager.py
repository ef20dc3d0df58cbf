"""Take jobs in turn, one at a time, and run each in a process of its own: the manager, itself a small process.

A process that finds jobs but no manager starts one (`ensure_manager`); it ends when the queue is empty, and outlives
the server that started it. Nothing in here imports torch.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from featcal.server.queue import CANCELLED, DIED, FAILED, RESULT, Job, Queue
from featcal.system.locks import try_lock
from featcal.system.resources import bundle_root

POLL = 0.1
"""Seconds between two looks at a worker and at whether its job is to be cancelled."""
GRACE = 5.0
"""Seconds that a worker has to tidy up when its job is cancelled, before it is killed."""
AGAIN = 3.0
"""Seconds after which a second manager is started where the first has not come up."""
WORKER = ("-m", "featcal.server.worker")
"""Arguments of Python that run a job; the queue's folder and the job's number follow."""
_LOCK = "manager.lock"
_TURN = 2.0
"""Seconds that a new manager waits for the lock, which others hold for a moment to see whether it is free."""
_started: dict[Path, tuple[float, subprocess.Popen[bytes]]] = {}


def ensure_manager(queue: Queue) -> None:
    """Start a manager if there are jobs and no manager runs; called each time a job is looked at."""
    moment, last = _started.get(queue.folder, (-AGAIN, None))
    if last is not None:
        last.poll()  # else one that has ended stays in the table of processes
    if time.monotonic() - moment < AGAIN or not queue.busy():
        return
    # The system takes the lock back when its process ends, so no process number has to be believed.
    with try_lock(queue.folder / _LOCK, 0.0) as free:
        pass
    if free:
        with (queue.folder / "manager.txt").open("ab") as output:
            # -P: a module in the folder that the app was started in must not shadow one of ours.
            command = [sys.executable, "-P", "-m", "featcal.server.manager", str(queue.folder)]
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=_environment(), **_detach_options()
            )
        _started[queue.folder] = time.monotonic(), process


def manage(queue: Queue) -> None:
    """Run all jobs of the queue, unless another manager does."""
    while True:
        with try_lock(queue.folder / _LOCK, _TURN) as mine:
            if not mine:
                return
            queue.end_all("the computer or the manager of jobs was stopped while it ran; start it again")
            while (job := queue.claim()) is not None:
                _run(queue, job)
                queue.tidy()
        if not queue.busy():  # after the lock was given back: who put a job in line just now saw it taken
            return


def _run(queue: Queue, job: Job) -> None:
    """Run one job in its process, to its end."""
    job.folder.mkdir(parents=True, exist_ok=True)
    (job.folder / RESULT).unlink(missing_ok=True)
    with job.log.open("wb") as output:
        # stdin is a pipe that nobody writes to: its end tells the worker that this manager is gone.
        command = [sys.executable, "-P", *WORKER, str(queue.folder), str(job.id)]
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=output, cwd=job.order.cwd, env=_environment()
            )
        except OSError as error:
            queue.end(job.id, FAILED, f"no process can be started in {job.order.cwd}: {error.strerror}")
            return
    queue.runs_as(job.id, process.pid)
    cancel_moment: float | None = None
    while process.poll() is None:
        if cancel_moment is None and queue.is_cancel_requested(job.id):
            process.terminate()
            cancel_moment = time.monotonic()
        elif cancel_moment is not None and time.monotonic() - cancel_moment > GRACE:
            process.kill()
        time.sleep(POLL)
    if (
        cancel_moment is not None and (ended := queue.get(job.id)) is not None and not ended.is_over
    ):  # it may have been done first
        _leave_the_log(job.folder)
        queue.end(job.id, CANCELLED)
    # No effect where the worker has said how its job ended: `end` changes running jobs alone.
    queue.end(job.id, DIED, _explain_status(process.returncode))
    assert process.stdin is not None
    process.stdin.close()


def _explain_status(status: int) -> str:
    """Explain the exit status of a process that did not say how its job ended."""
    if status >= 0:
        return f"its process ended with status {status} and no result; see the log"
    with suppress(ValueError):
        name = signal.Signals(-status).name
        hint = " (the system does that where memory runs out)" if name == "SIGKILL" else ""
        return f"its process was ended by {name}{hint}; start it again, with fewer samples where memory is short"
    return f"its process was ended by signal {-status}; start it again"


def _leave_the_log(folder: Path) -> None:
    """Remove everything of a cancelled job but its log."""
    for left in folder.iterdir():
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        elif left.name != "log.txt":
            left.unlink(missing_ok=True)


def _environment() -> dict[str, str]:
    """Return the environment of this process, with the path where children find featcal wherever they are started."""
    found = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(bundle_root())]))
    return {**os.environ, "PYTHONPATH": found}


def _detach_options() -> dict[str, Any]:
    """Return options that keep a process alive when the one that started it is stopped with Ctrl-C."""
    if sys.platform == "win32":
        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.CREATE_NO_WINDOW}
    return {"start_new_session": True}


if __name__ == "__main__":
    manage(Queue(Path(sys.argv[1])))
