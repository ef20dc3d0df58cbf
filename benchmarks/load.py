"""Visitors of a shared server, each with options of his own: `python benchmarks/load.py`.

Every visitor speaks streamlit's protocol over its websocket (`sessions`), looks at one calibration of his own on
several pages, thinks for a moment, and goes on. Counts errors; holds what every page showed against the same page of a
server that has this visitor alone (cross-talk); follows the memory of the server. Prints JSON, fails on an error, a
difference, or memory beyond what the server was given.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import browser
import measure
from sessions import Log, Numbers, Session, Shown, differences
from websockets.sync.client import connect

PAGES = {"drift": 4, "calibrate": 4, "cosines": 2, "accuracy": 1, "suite": 1}
"""Page → how often it is chosen, relative to the others."""
FIRST = "calibrate"
SUITES = ("clip-mini", "t5-mini")
THINKING = (1.0, 6.0)
"""Seconds between the end of a run and the next move."""
LIBRARIES = 1.5 * 2**30
"""Bytes of a server beside its suites and their results, as docs/serving.md has it."""
MOST_ALIKE = 0.05
"""Share of pairs of visitors whose calibrations may show the same drift; more, and cross-talk could not be seen."""


@dataclass
class Visitor:
    """One of many, and what he saw."""

    query: str
    """His options as an address has them."""
    seen: dict[tuple[Any, ...], Numbers] = field(default_factory=dict)
    """What a page showed first, by page and everything that is set there."""
    changed: list[str] = field(default_factory=list)
    """What a later look at the same page showed otherwise."""

    def look(self, shown: Shown) -> None:
        before = self.seen.setdefault(shown.options, shown.numbers)
        self.changed += differences(before, shown.numbers)


def visitors(count: int) -> list[Visitor]:
    """As many as there are options for: every one has another calibration.

    >>> len({one.query for one in visitors(60)})
    60
    """
    lams, rhos, alphas = ("0.02", "0.05", "0.1"), ("1", "1.5", "2", "2.5"), ("0.1", "0.2", "0.3", "0.4", "0.5")
    own = itertools.product(alphas, rhos, lams)
    named = [f"lam={lam}&rho={rho}&alpha={alpha}" for alpha, rho, lam in itertools.islice(own, count)]
    if len(named) < count:
        raise ValueError(f"there are options for {len(named)} visitors, not for {count}")
    return [Visitor(f"suite={SUITES[i % 2]}&n=16&samples=16&beside=calibrated&{one}") for i, one in enumerate(named)]


def visit(address: str, who: Visitor, pages: Callable[[], str | None], log: Log, pause: Callable[[], None]) -> None:
    """Look at one page after the other, until there is none."""
    with connect(f"ws{address.removeprefix('http')}/_stcore/stream", subprotocols=["streamlit"], max_size=None) as ws:
        session, page = Session(ws, log), pages()
        asked = time.monotonic()
        session.open(page or "drift", who.query)
        while page is not None:
            log.asked()
            session.wait_for_start()
            session.wait_for_end()
            if not session.failed:
                shown = session.shown()
                log.finished(Shown((who.query, *shown.options), shown.numbers), time.monotonic() - asked)
                who.look(shown)
            pause()
            page = pages()
            asked = time.monotonic()
            if page is not None:
                session.move(page)


def chosen(dice: random.Random, until: float) -> Iterator[str]:
    """Pages at random, until a moment; first the one that is held against a visitor alone."""
    yield FIRST
    while time.monotonic() < until:
        yield dice.choices([*PAGES], [*PAGES.values()])[0]


@contextmanager
def memory_of(pid: int, every: float) -> Iterator[list[tuple[float, int]]]:
    """Seconds and bytes (shared pages once) of a server and its processes, every so many seconds inside the `with`."""
    seen: list[tuple[float, int]] = []
    over, began = threading.Event(), time.monotonic()

    def watch() -> None:
        while True:
            now = measure.tree_memory(pid)
            if now is not None:
                seen.append((time.monotonic() - began, int(now.pss or now.rss)))
            if over.wait(every):
                return

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def load(server: browser.Server, everyone: Sequence[Visitor], seconds: float, seed: int = 0) -> Log:
    """All visitors at once."""
    log, until = Log(), time.monotonic() + seconds

    def one(number: int) -> None:
        dice = random.Random(f"{seed} {number}")
        pages = chosen(dice, until)
        time.sleep(dice.uniform(0, THINKING[1]))  # nobody comes at the very same moment
        visit(
            server.address,
            everyone[number],
            lambda: next(pages, None),
            log,
            lambda: time.sleep(dice.uniform(*THINKING)),
        )

    with ThreadPoolExecutor(len(everyone)) as pool:
        for done in [pool.submit(one, number) for number in range(len(everyone))]:
            done.result()
    return log


def alone(server: browser.Server, everyone: Sequence[Visitor], page: str) -> list[Visitor]:
    """Every visitor on a page of a server where nobody else is."""
    again = [Visitor(who.query) for who in everyone]
    for who in again:
        visit(server.address, who, iter([page, None]).__next__, Log(), lambda: None)
    return again


def against(everyone: Sequence[Visitor], again: Sequence[Visitor]) -> tuple[int, list[str]]:
    """On how many pages the same visitors were both times, and what these showed otherwise."""
    held, found = 0, []
    for who, other in zip(everyone, again, strict=True):
        for options in who.seen.keys() & other.seen.keys():
            held += 1
            found += [f"{name}: {who.query}" for name in differences(who.seen[options], other.seen[options])]
    return held, found


def alike(everyone: Sequence[Visitor]) -> float:
    """Share of pairs of visitors of one suite who saw the same numbers, of visitors who saw one page each."""
    by_suite: dict[str, list[Numbers]] = {}
    for who in everyone:
        by_suite.setdefault(who.query.split("&")[0], []).extend(who.seen.values())
    pairs = [pair for seen in by_suite.values() for pair in itertools.combinations(seen, 2)]
    return sum(not differences(one, other) for one, other in pairs) / len(pairs) if pairs else 0.0


def bounded(memory: Sequence[tuple[float, int]]) -> dict[str, float | None]:
    """Bytes at first, most and last, and what a straight line through the second half grows by in an hour; None
    for what too few looks say nothing of."""
    half = [one for one in memory if one[0] >= memory[-1][0] / 2]
    slope = measure.line([t for t, _ in half], [float(b) for _, b in half]).slope if len(half) > 2 else None
    sizes = [size for _, size in memory]
    return {
        "first": sizes[0] if sizes else None,
        "most": max(sizes, default=None),
        "last": sizes[-1] if sizes else None,
        "growth_per_hour": None if slope is None else 3600 * slope,
    }


def waiting(log: Log) -> dict[str, float] | None:
    """Seconds of all looks together; None where none was finished."""
    waits = sorted(log.waits)
    if not waits:
        return None
    p95 = waits[math.ceil(0.95 * len(waits)) - 1]
    return {"median": statistics.median(waits), "p95": p95, "worst": waits[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-memory", type=float, default=4.0, help="GiB that the server gives suites")
    options = parser.parse_args()
    everyone = visitors(options.sessions)
    with tempfile.TemporaryDirectory() as folder:
        rules = ("--shared", "--root", folder, "--server.address=127.0.0.1", f"--max-memory={options.max_memory}GiB")
        with (
            browser.running_app(Path(folder), options=rules) as server,
            memory_of(server.pid, every=5.0) as memory,
        ):
            log = load(server, everyone, options.seconds, options.seed)
        with browser.running_app(Path(folder), options=rules) as server:
            again = alone(server, everyone, FIRST)
    held, differing = against(everyone, again)
    document = log.document() | {
        "held_against_a_visitor_alone": held,
        "cross_talk": [*differing, *(one for who in everyone for one in who.changed)][:20],
        "alike": alike(again),
    }
    document["waits"] = waiting(log)
    taken = bounded(memory)
    measure.show(
        {
            "sessions": options.sessions,
            "suites": list(SUITES),
            "seconds": options.seconds,
            **document,
            "memory": taken,
            "machine": measure.machine(),
        }
    )
    within = taken["most"] is not None and taken["most"] <= LIBRARIES + options.max_memory * 2**30
    # Everybody is on the first page both times; fewer means that one of the two looks ended in an error.
    all_held = held >= len(everyone)
    if log.errors or document["cross_talk"] or not all_held or not within or document["alike"] > MOST_ALIKE:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
