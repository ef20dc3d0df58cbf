"""Two-dimensional maps of feature clouds. UMAP runs in a process of its own: its first use compiles for seconds.

Run as a program this file is that process: it reads pickled clouds from stdin and writes results to stdout.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from featcal.figures.maps import Points, pca_map

__all__ = ["Map", "MapWorker", "Points", "pca_map", "umap_map"]

NEIGHBOURS = 15
TRUST_NEIGHBOURS = 10
QUIET = 5.0
"""Seconds without a run of any page after which compiling disturbs nobody."""


class Map(NamedTuple):
    """A UMAP, its trustworthiness, and that of `pca_map` on the same cloud."""

    points: Points
    trust: float
    pca_trust: float


def umap_map(features: Points) -> Map:
    """UMAP of the rows with cosine distance."""
    from sklearn.manifold import trustworthiness
    from umap import UMAP

    neighbours = min(NEIGHBOURS, len(features) - 1)
    reducer = UMAP(n_neighbors=neighbours, min_dist=0.15, metric="cosine", random_state=42, n_jobs=1)
    points = np.asarray(reducer.fit_transform(features), dtype=np.float32)
    near = max(1, min(TRUST_NEIGHBOURS, (len(features) - 1) // 2))
    trust = [float(trustworthiness(features, flat, n_neighbors=near)) for flat in (points, pca_map(features))]
    return Map(points, *trust)


class MapWorker:
    """The process that runs `umap_map`, one cloud after the other, at low priority.

    Not `multiprocessing`: its child would run the main module again, and under streamlit that is the app.
    """

    def __init__(self) -> None:
        self._lock, self._starting = threading.Lock(), threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._timer: threading.Timer | None = None

    def wait(self) -> None:
        """A page runs: do not start now."""
        if self._timer is not None:
            self._timer.cancel()

    def start_when_quiet(self) -> None:
        """Start the process, which compiles first, `QUIET` seconds from now unless a page runs before."""
        self.wait()
        if self._process is None:
            self._timer = threading.Timer(QUIET, self._started)
            self._timer.daemon = True
            self._timer.start()

    def submit(self, features: Points) -> Future[Map]:
        """Start the map of a cloud; the future fails with RuntimeError if the process does."""
        future: Future[Map] = Future()
        threading.Thread(target=self._serve, args=(features, future), daemon=True).start()
        return future

    def _serve(self, features: Points, future: Future[Map]) -> None:
        with self._lock:
            try:
                process = self._started()
                assert process.stdin is not None
                assert process.stdout is not None
                pickle.dump(features, process.stdin)
                process.stdin.flush()
                future.set_result(Map(*pickle.load(process.stdout)))
            except (OSError, EOFError, pickle.UnpicklingError) as error:
                future.set_exception(RuntimeError(f"the map process ended: {error}"))

    def close(self) -> None:
        """End the process and give its pipes back."""
        self.wait()
        if self._process is not None:
            self._process.kill()
            with suppress(BrokenPipeError):  # what was never read is of no use to anyone
                self._process.communicate()
            self._process = None

    def _started(self) -> subprocess.Popen[bytes]:
        """The process, started if there is none or if it has ended."""
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
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root)


def _run() -> None:
    """Compile on a small cloud, then serve until stdin closes; whatever libraries print goes to stderr."""
    out, sys.stdout = sys.stdout.buffer, sys.stderr
    with suppress(OSError):  # a courtesy that some systems refuse
        if hasattr(os, "SCHED_IDLE"):  # Linux: only what nobody else wants, a slider above all
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        elif hasattr(os, "nice"):
            os.nice(19)
    umap_map(np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32))
    while True:
        try:
            features = pickle.load(sys.stdin.buffer)
        except (EOFError, pickle.UnpicklingError):  # the app is gone, perhaps in the middle of a cloud
            return
        pickle.dump(tuple(umap_map(features)), out)
        out.flush()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt, BrokenPipeError):
        _run()
