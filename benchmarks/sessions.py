"""Many sessions at once, over several suites, runs overtaken at random: `python benchmarks/sessions.py`.

Speaks streamlit's own protocol over its websocket, no browser. Every session moves sliders, turns switches, changes
pages and suites; some moves come before the run of the last one has finished. Fails when a session is shown an error,
or when equal options gave different numbers. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import shutil
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import browser
import measure
import numpy as np
import yaml
from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg
from websockets.sync.client import ClientConnection, connect

from featcal.system.resources import embedded_suites

PATIENCE = 300.0
"""Seconds without a word from the server after which a session gives up."""
OVERTAKEN = 0.35
"""Share of moves that do not wait for the run before them."""
VISITS = {"drift": 4, "calibrate": 6, "features": 3, "cosines": 3, "accuracy": 0.5, "models": 0.5}
"""Page → how often it is chosen, relative to the others."""
CHANGES: dict[str, Sequence[Any]] = {
    "lam": (["0.02"], ["0.05"], ["0.1"]),
    "rho": (["1"], ["1.5"], ["2"]),
    "alpha": (["0.2"], ["0.3"]),
    "samples": (["16"], ["32"]),
    "n": ("16 samples per task", "32 samples per task"),
}
"""Key of a widget → values that it is moved to, few enough for sessions to meet."""
START = "samples=16&n=16"
TIMES = ("calibration took",)
"""Cards whose number is a time."""
IMPROVING = ("feature-map",)
"""Charts that another process draws anew when it is ready."""
TOLERANCE = 1e-4
"""Largest difference of figures that count as equal, relative to the largest of their trace."""
Numbers = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Shown:
    """What a finished run has put on a page."""

    options: tuple[Any, ...]
    """Page, suite, the values of all widgets and what the page says of the model."""
    numbers: Numbers
    """Of cards and charts, by their names."""


@dataclass(frozen=True)
class Wanted:
    """How much has to happen, however fast the machine is, and the seconds after which it is given up."""

    compared: int = 0
    overtaken: int = 0
    seconds: float = math.inf


AS_MUCH_AS_COMES = Wanted()


@dataclass
class Log:
    """What happened to all sessions."""

    errors: Counter[str] = field(default_factory=Counter)
    waits: list[float] = field(default_factory=list)
    """Seconds from a move to the end of its run, of moves that were not overtaken."""
    moves: int = 0
    overtaken: int = 0
    compared: int = 0
    """Runs whose options another run had before."""
    differing: list[str] = field(default_factory=list)
    _seen: dict[tuple[Any, ...], Numbers] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def finished(self, shown: Shown, seconds: float) -> None:
        """A run ended without an error: its numbers are to be those of earlier runs with its options."""
        with self._lock:
            self.waits.append(seconds)
            before = self._seen.setdefault(shown.options, shown.numbers)
            if before is not shown.numbers:
                self.compared += 1
                self.differing += [f"{name}: {shown.options}" for name in differences(before, shown.numbers)]

    def failed(self, what: str) -> None:
        with self._lock:
            self.errors[what] += 1

    def asked(self) -> None:
        with self._lock:
            self.moves += 1

    def overtook(self) -> None:
        with self._lock:
            self.overtaken += 1

    def has(self, wanted: Wanted) -> bool:
        """Whether enough has happened to say something."""
        return self.compared >= wanted.compared and self.overtaken >= wanted.overtaken

    @property
    def good(self) -> bool:
        """No error, no number that another session saw differently, and some that could have been."""
        return not self.errors and not self.differing and self.compared > 0

    def document(self) -> dict[str, Any]:
        """Counts and waiting times."""
        waits = sorted(self.waits)
        return {
            "moves": self.moves,
            "overtaken": self.overtaken,
            "errors": dict(self.errors.most_common()),
            "compared": self.compared,
            "differing": self.differing[:20],
            "waits": {
                "median": statistics.median(waits),
                "nine_tenths": waits[math.ceil(0.9 * len(waits)) - 1],
                "max": waits[-1],
            }
            if self.waits
            else None,
        }


class Session:
    """A visitor who speaks the protocol as a browser does: it sends the values of the widgets that it sees."""

    def __init__(self, socket: ClientConnection, log: Log) -> None:
        self.failed = False
        """Whether the run so far shows an error."""
        self.pages: dict[str, str] = {}
        """Name of a page → its hash."""
        self._socket, self._log = socket, log
        self._page = ""
        self._values: dict[str, Any] = {}
        """Id of a widget → its value."""
        self._elements: dict[tuple[int, ...], Any] = {}

    def open(self, page: str, query: str) -> None:
        """Come by an address."""
        message = BackMsg()
        message.rerun_script.page_name, message.rerun_script.query_string = page, query
        self._socket.send(message.SerializeToString())

    def move(self, page: str | None = None) -> None:
        """Ask for a run with the values as they are now: of another page, or of this one."""
        message = BackMsg()
        message.rerun_script.page_script_hash = self._page if page is None else self.pages[page]
        for name, value in self._values.items():
            state = message.rerun_script.widget_states.widgets.add(id=name)
            if isinstance(value, bool):
                state.bool_value = value
            elif isinstance(value, str):
                state.string_value = value
            elif value and isinstance(value[0], str):
                state.string_array_value.data.extend(value)
            else:
                state.double_array_value.data.extend(value)
        self._socket.send(message.SerializeToString())

    def wait_for_start(self) -> None:
        """Until the run that was asked for last has begun."""
        while (message := self._receive(math.inf)).WhichOneof("type") != "new_session":
            pass
        self._page = message.new_session.page_script_hash
        self._elements, self.failed = {}, False

    def wait_for_end(self, until: float = math.inf) -> bool:
        """Take in what the run shows until it ends; False where the moment `until` comes first."""
        while True:
            try:
                message = self._receive(until)
            except TimeoutError:
                if time.monotonic() < until:
                    raise
                return False
            kind = message.WhichOneof("type")
            if kind == "delta":
                self._draw(tuple(message.metadata.delta_path), message.delta)
            elif kind == "navigation":
                self.pages = {one.url_pathname: one.page_script_hash for one in message.navigation.app_pages}
            elif kind == "script_finished":
                if message.script_finished == ForwardMsg.FINISHED_EARLY_FOR_RERUN:
                    self.wait_for_start()  # the page itself asked for another run
                    continue
                present = {widget.id for widget in self.widgets().values()}
                self._values = {name: value for name, value in self._values.items() if name in present}
                return True

    def widgets(self) -> dict[str, Any]:
        """Key of every widget on the page → what the server sent of it."""
        kinds = ("slider", "checkbox", "selectbox", "button_group")
        ours = [getattr(one, kind) for one in self._elements.values() if (kind := one.WhichOneof("type")) in kinds]
        return {key_of(widget.id): widget for widget in ours}

    def set(self, widget: Any, value: Any) -> None:
        """Move a widget; `move` then says so."""
        self._values[widget.id] = value

    def shown(self) -> Shown:
        """The page as it is."""
        values = sorted((key, str(self._values[widget.id])) for key, widget in self.widgets().items())
        said, numbers = [], {}
        for element in self._elements.values():
            kind = element.WhichOneof("type")
            if kind == "button" and "λ" in element.button.label and "ρ" in element.button.label:
                said.append(element.button.label)
            elif kind == "metric" and element.metric.label not in TIMES:
                words = f"{element.metric.body} {element.metric.delta}"
                numbers[element.metric.label] = [float(one) for one in re.findall(r"-?\d+\.?\d*", words)]
            elif kind == "plotly_chart" and key_of(element.plotly_chart.id) not in IMPROVING:
                traces = json.loads(element.plotly_chart.spec)["data"]
                name = key_of(element.plotly_chart.id)
                numbers |= {f"{name} {i}": heights(trace) for i, trace in enumerate(traces)}
        return Shown((self._page, *values, *said), numbers)

    def _receive(self, until: float) -> ForwardMsg:
        wait = min(PATIENCE, max(0.0, until - time.monotonic()))
        return ForwardMsg.FromString(self._socket.recv(timeout=wait))

    def _draw(self, path: tuple[int, ...], delta: Any) -> None:
        for inside in [one for one in self._elements if one[: len(path)] == path]:
            del self._elements[inside]  # what was there is replaced, with all that it held
        if delta.WhichOneof("type") != "new_element":
            return
        element = self._elements[path] = delta.new_element
        kind = element.WhichOneof("type")
        if kind in ("slider", "checkbox", "selectbox", "button_group"):
            widget = getattr(element, kind)
            if widget.set_value or widget.id not in self._values:
                self._values[widget.id] = value_of(kind, widget)
        elif kind == "exception":
            self._fail(f"{element.exception.type}: {element.exception.message}")
        elif kind == "alert" and element.alert.format == element.alert.ERROR:
            self._fail(element.alert.body)

    def _fail(self, what: str) -> None:
        self.failed = True
        self._log.failed(what[:160])


def key_of(identity: str) -> str:
    """The key that the app gave an element, out of streamlit's id for it."""
    return identity.split("-", 2)[-1]


def value_of(kind: str, widget: Any) -> Any:
    """The value that the server gives a widget, as the widget sends it back."""
    if kind == "checkbox":
        return bool(widget.value if widget.set_value else widget.default)
    if kind == "selectbox":
        return str(widget.raw_value if widget.set_value else widget.options[widget.default])
    if kind == "button_group":
        return list(widget.raw_values) if widget.set_value else [widget.options[i].content for i in widget.default]
    if widget.options:
        return list(widget.raw_value) if widget.set_value else [widget.options[int(i)] for i in widget.default]
    return list(widget.value if widget.set_value else widget.default)


def heights(trace: Mapping[str, Any]) -> list[float]:
    """The numbers of a trace, row by row those of a heat map, of a chart with names on its y-axis those along x."""
    for values in (trace.get(axis) for axis in "zyx"):
        flat = [one for row in values or () for one in (row if isinstance(row, list) else [row])]
        if flat and not any(isinstance(one, str) for one in flat):
            return [math.nan if one is None else float(one) for one in flat]
    return []


def differences(one: Numbers, other: Numbers) -> list[str]:
    """Names under which two pages show different numbers, or only one of them shows any."""
    found = []
    for name in {*one, *other}:
        a, b = (np.array(numbers.get(name, [math.inf]), dtype=float) for numbers in (one, other))
        scale = float(np.nanmax(np.abs(a), initial=1e-12))
        if a.shape != b.shape or not np.allclose(a, b, rtol=0, atol=TOLERANCE * scale, equal_nan=True):
            found.append(name)
    return sorted(found)


def visit(address: str, suites: Sequence[str], over: Callable[[], bool], dice: random.Random, log: Log) -> None:
    """One session that moves until `over`, and waits for its last run."""
    with connect(f"ws{address.removeprefix('http')}/_stcore/stream", subprotocols=["streamlit"], max_size=None) as ws:
        session = Session(ws, log)
        session.open(dice.choice([*VISITS]), f"suite={dice.choice(suites)}&{START}")
        while True:
            asked = time.monotonic()
            log.asked()
            session.wait_for_start()
            hasty = not over() and dice.random() < OVERTAKEN
            if session.wait_for_end(asked + dice.uniform(0.05, 1.5) if hasty else math.inf):
                if not session.failed:
                    log.finished(session.shown(), time.monotonic() - asked)
                if over():
                    return
                time.sleep(dice.uniform(0, 0.5))
            else:
                log.overtook()
            change(session, suites, dice)


def change(session: Session, suites: Sequence[str], dice: random.Random) -> None:
    """Go to another page, or move one widget of this one."""
    widgets = {key.rsplit("-", 1)[-1]: widget for key, widget in session.widgets().items()}
    offered = [key for key in (*CHANGES, "suite", "task") if key in widgets]
    if session.pages and (not offered or dice.random() < 0.4):
        session.move(dice.choices([*VISITS], [*VISITS.values()])[0])
        return
    if offered:
        key = dice.choice(offered)
        values = {"suite": suites, "task": widgets[key].options if key == "task" else ()}.get(key) or CHANGES[key]
        session.set(widgets[key], dice.choice(values))
    session.move()


def load(
    server: browser.Server,
    suites: Sequence[str],
    sessions: int,
    seconds: float,
    seed: int = 0,
    wanted: Wanted = AS_MUCH_AS_COMES,
) -> Log:
    """All sessions at once, for `seconds` and then until enough has happened.

    Raises:
        TimeoutError: the server said nothing for `PATIENCE` seconds, or too little had happened in `wanted.seconds`.
    """
    log, began = Log(), time.monotonic()

    def over() -> bool:
        passed = time.monotonic() - began
        return passed > wanted.seconds or (passed > seconds and (bool(log.errors) or log.has(wanted)))

    with ThreadPoolExecutor(sessions) as pool:
        running = [
            pool.submit(visit, server.address, suites, over, random.Random(f"{seed} {number}"), log)
            for number in range(sessions)
        ]
    for one in running:
        one.result()
    if not log.errors and not log.has(wanted):
        raise TimeoutError(
            f"in {wanted.seconds:.0f} s {log.compared} runs were compared and {log.overtaken} overtaken, "
            f"fewer than {wanted.compared} and {wanted.overtaken}"
        )
    return log


def other_scale(folder: Path) -> str:
    """A copy of clip-mini whose merge has the scale 0.4; returns the path of its suite file."""
    suite = folder / "other-scale" / "suite.yaml"
    shutil.copytree(embedded_suites()["clip-mini"].parent, suite.parent)
    content = yaml.safe_load(suite.read_text(encoding="utf-8"))
    content["merged"]["scale"] = 0.4
    suite.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return str(suite)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        suites = ["clip-mini", "t5-mini", other_scale(folder)]
        server = stack.enter_context(browser.running_app(folder))
        log = load(server, suites, options.sessions, options.seconds, options.seed)
        memory = measure.tree_memory(server.pid)
    measure.show(
        {
            "sessions": options.sessions,
            "suites": len(suites),
            "seconds": options.seconds,
            **log.document(),
            "memory": None if memory is None else vars(memory),
            "machine": measure.machine(),
        }
    )
    if not log.good:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
