"""Run one job in a process of low priority that ends with its manager."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import FrameType

from featcal.server.kinds import KINDS, Work
from featcal.server.launch import SPINS
from featcal.server.orders import require_current
from featcal.server.queue import DONE, FAILED, RESULT, Job, Queue
from featcal.system.atomic_files import put
from featcal.system.environment import let_threads_sleep
from featcal.system.errors import FeatcalError
from featcal.system.progress import Progress, keep_memory

OFTEN = 0.25
"""Seconds between two reports of progress."""
NICE = 10
"""Added niceness: a tenth of a core when other processes are busy, and every idle core."""
FIRST_NEEDED = ("featcal.session.session", "featcal.models.families.clip", "transformers.models.clip.modeling_clip")
CANCELLED = 143
"""Exit status of a worker that was cancelled: 128 and the number of the signal, as shells use it."""


def work(queue: Queue, identity: int) -> int:
    """Do a job and return the exit status. Its document is complete or not there, and made of the files that were there
    when it was asked for."""
    job = queue.get(identity)
    if job is None:
        return 1
    order, file = job.order, job.folder / RESULT
    job.folder.mkdir(parents=True, exist_ok=True)
    try:
        require_current(order, "while this was in line")
        document = KINDS[order.kind](Work(order.suite, order.args, job.folder, _make_progress(queue, job)))
        require_current(order, "while this ran")
        put(file, json.dumps(document, allow_nan=False))
    except FeatcalError as error:
        print(f"featcal: {error}", file=sys.stderr)
        queue.end(identity, FAILED, str(error))
        return 1
    except Exception as error:
        traceback.print_exc()
        queue.end(identity, FAILED, f"{type(error).__name__}, which featcal did not expect; the log says where")
        return 1
    queue.end(identity, DONE)
    return 0


def _make_progress(queue: Queue, job: Job) -> Progress:
    """Make a reporter that tells the log every step, and the queue some of them."""
    last_label, moment = "", 0.0

    def report(label: str, done: int, total: int) -> None:
        nonlocal last_label, moment
        now = time.monotonic()
        print(f"{time.strftime('%H:%M:%S')} {label}: {done} of {total}", file=sys.stderr, flush=True)
        if label != last_label or now - moment > OFTEN or done == total:
            queue.report(job.id, label, done, total)
            last_label, moment = label, now

    return report


def leave_a_core() -> None:
    """Set one thread less than there are cores, unless the environment says how many."""
    # To be set before torch is imported, which reads it then.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores - 1)))
    let_threads_sleep(SPINS)


def be_modest() -> None:
    """Lower the priority of this process from now on, so that pages respond first."""
    # To be called before torch has threads, which inherit the niceness; some systems refuse the courtesy.
    with suppress(OSError):
        if hasattr(os, "nice"):
            os.nice(NICE)
    # Linux may weigh sessions, and not the processes of different ones, against each other. Ours is the manager's: a
    # worker that was started in somebody's terminal leaves the other programs there alone.
    if hasattr(os, "getsid") and os.getsid(0) != os.getppid():
        return
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(NICE), encoding="ascii")


def _end_with_manager() -> None:
    """End at once when the manager does: another one would take the next job beside this one."""
    os.read(0, 1)  # the other end is the manager's, who never writes; not sys.stdin, whose lock outlives this thread
    os._exit(1)


def _end_politely(number: int, frame: FrameType | None) -> None:
    """Leave every `with` on the way out."""
    sys.exit(CANCELLED)


def run_worker(folder: str, identity: str) -> int:
    """Run a job in this process; SystemExit is raised inside it when the process is asked to end."""
    threading.Thread(target=_end_with_manager, daemon=True).start()
    signal.signal(signal.SIGTERM, _end_politely)
    leave_a_core()
    keep_memory()
    for name in FIRST_NEEDED:  # a few seconds of one core, at once and not for minutes where the machine is busy
        import_module(name)
    be_modest()
    return work(Queue(Path(folder)), int(identity))


if __name__ == "__main__":
    sys.exit(run_worker(*sys.argv[1:]))
