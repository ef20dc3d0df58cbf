"""Compute two-dimensional maps of feature clouds. UMAP runs in a separate process, because its first use compiles for
seconds.

Run as a program, this file is that process: it reads pickled clouds from stdin and writes results to stdout.
"""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from featcal.session.projection import SEED, Points

__all__ = ["MapWorker", "Points", "trust", "umap_map"]
NEIGHBOURS = 15
TRUST_NEIGHBOURS = 10
TRUST_POINTS = 1000
"""Number of points whose neighbours are compared for the trustworthiness of a map."""
QUIET = 5.0
"""Seconds without a run of any page after which compiling disturbs no visitor."""


def umap_map(features: Points) -> Points:
    """Map `[n, k]` to `[n, 2]` by UMAP of the rows with cosine distance."""
    from umap import UMAP

    neighbours = min(NEIGHBOURS, len(features) - 1)
    reducer = UMAP(n_neighbors=neighbours, min_dist=0.15, metric="cosine", random_state=SEED, n_jobs=1)
    return np.asarray(reducer.fit_transform(features), dtype=np.float32)


def trust(features: Points, flat: Points) -> float:
    """Measure the trustworthiness of a map (Venna and Kaski), 0 to 1: are neighbours on it true neighbours?

    1 - 2 / (n k (2 n - 3 k - 1)) times the sum, over all points and their k = `TRUST_NEIGHBOURS` nearest ones on the
    map, of how far beyond k these rank by distance in the full space. With more than `TRUST_POINTS` points the sum is
    over that many of them, drawn with `SEED`, with neighbours among all points. NaN with fewer than 4 points.

    Args:
        features: `[n, d]`.
        flat: `[n, 2]`, the map.
    """
    n = len(features)
    near = min(TRUST_NEIGHBOURS, (n - 1) // 2)
    if n < 4:
        return float("nan")
    looked_at = np.arange(n) if n <= TRUST_POINTS else np.random.default_rng(SEED).permutation(n)[:TRUST_POINTS]
    # Centred and in float64: squares of distances far from the origin cancel to noise.
    spaces = [np.asarray(one - one.mean(0), dtype=np.float64) for one in (features, flat)]
    beyond = 0
    # A few rows at a time: all distances of 20,000 points would take gigabytes.
    for rows in np.array_split(looked_at, -(-len(looked_at) // 50)):
        full, mapped = (_distances(space, rows) for space in spaces)
        closest = np.argpartition(mapped, near - 1, axis=1)[:, :near]
        reach = np.take_along_axis(full, closest, axis=1)
        rank = 1 + (full[:, None, :] < reach[:, :, None]).sum(2)
        beyond += int(np.maximum(rank - near, 0).sum())
    return 1 - 2 * beyond / (len(looked_at) * near * (2 * n - 3 * near - 1))


def _distances(points: NDArray[np.float64], rows: NDArray[np.intp]) -> NDArray[np.float64]:
    """Return squared distances `[rows, n]` of some points to all; infinite to themselves."""
    squares = np.square(points).sum(1)
    found: NDArray[np.float64] = squares[rows, None] + squares - 2 * points[rows] @ points.T
    found[np.arange(len(rows)), rows] = np.inf
    return found


class MapWorker:
    """The process that runs `umap_map`, one cloud after the other, at low priority; the latest request comes first."""

    def __init__(self) -> None:
        self._lock, self._starting = threading.Lock(), threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._timer: threading.Timer | None = None
        self._asked: list[tuple[Sequence[Points], Future[list[Points]]]] = []

    def put_off_start(self) -> None:
        """Postpone the start while a page runs."""
        if self._timer is not None:
            self._timer.cancel()

    def start_when_quiet(self) -> None:
        """Start the process, which compiles first, `QUIET` seconds from now unless a page runs before."""
        self.put_off_start()
        if self._process is None:
            self._timer = threading.Timer(QUIET, self._ensure_process)
            self._timer.daemon = True
            self._timer.start()

    def submit(self, clouds: Sequence[Points]) -> Future[list[Points]]:
        """Start the maps of some clouds; the future fails with RuntimeError if the process does."""
        future: Future[list[Points]] = Future()
        self._asked.append((clouds, future))
        threading.Thread(target=self._serve, daemon=True).start()
        return future

    def _serve(self) -> None:
        with self._lock:
            # The last one asked: nobody waits for maps of layers or options that were passed over.
            clouds, future = self._asked.pop()
            try:
                process = self._ensure_process()
                assert process.stdin is not None
                assert process.stdout is not None
                pickle.dump(clouds, process.stdin)
                process.stdin.flush()
                future.set_result(pickle.load(process.stdout))
            except (OSError, EOFError, pickle.UnpicklingError) as error:
                future.set_exception(RuntimeError(f"the map process ended: {error}"))

    def close(self) -> None:
        """End the process and close its pipes."""
        self.put_off_start()
        if self._process is not None:
            self._process.kill()
            with suppress(BrokenPipeError):  # what was never read is of no use to anyone
                self._process.communicate()
            self._process = None

    def __del__(self) -> None:
        """End the process, because streamlit drops cached objects without closing them."""
        if not sys.is_finalizing():  # then the process ends by itself, with its input
            self.close()

    def _ensure_process(self) -> subprocess.Popen[bytes]:
        """Return the process, started if there is none or if it has ended."""
        with self._starting:
            if self._process is not None and self._process.poll() is not None:
                self.close()
            if self._process is None:
                self._process = self._start()
            return self._process

    @staticmethod
    def _start() -> subprocess.Popen[bytes]:
        root = str(Path(__file__).resolve().parents[1])
        command = [sys.executable, "-m", "app.maps"]
        # Not `multiprocessing`: its child would run the main module again, and under streamlit that is the app.
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root)


def _run() -> None:
    """Warm up on a small cloud, then serve until the app ends; output of libraries goes to stderr."""
    out, sys.stdout = sys.stdout.buffer, sys.stderr
    with suppress(OSError):  # a courtesy that some systems refuse
        if hasattr(os, "SCHED_IDLE"):  # Linux: only what nobody else wants, a slider above all
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        elif hasattr(os, "nice"):
            os.nice(19)
    asked: queue.SimpleQueue[Sequence[Points]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(asked,), daemon=True).start()
    umap_map(np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32))
    while True:
        pickle.dump([umap_map(cloud) for cloud in asked.get()], out)
        out.flush()


def _read(asked: queue.SimpleQueue[Sequence[Points]]) -> None:
    """Pass on the app's requests; end the process when the app ends, also during compilation."""
    with suppress(EOFError, pickle.UnpicklingError):
        while True:
            asked.put(pickle.load(sys.stdin.buffer))
    os._exit(0)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt, BrokenPipeError):
        _run()
