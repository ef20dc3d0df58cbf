"""Hold the state of a visitor's pages: one frozen value for all pages, and its form in the address bar. No streamlit
here."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, make_dataclass, replace
from typing import Any, get_args, get_type_hints

from app.first_page import HOME_SUITE, SAMPLES
from featcal.suite import calibration_options
from featcal.suite.calibration_options import CAUTIOUS, OWN, PARTIAL, SWITCHES, CalibrationConfig, Option
from featcal.suite.name_grammar import join_names, split_names
from featcal.system.formatting import exactly, shorten

CALIBRATED = "calibrated"
"""Name of the repair: the merge on the table (`app.on_table`), calibrated with the selection's own options."""
NOTHING = "nothing"
"""Value for "no model to compare with"."""
OPTIONS: Mapping[str, Option] = {name: one for name, one in calibration_options.OPTIONS.items() if one.label}
"""Options of a calibration that can be chosen here: those with a label."""
MOST_PICKED = 200
"""Samples that can be picked, so that an address stays one."""
SWEEP = ("sweep_lam", "sweep_rho", "sweep_alpha")
ASKED_FOR = ("booked", "conditioning", "spread", "sources", "every")
"""Switches of charts that take longer."""
OF_A_SUITE = (
    *("task", "layer", "merge", "beside", "picked", "picked_of", "sample", "sort", "run", "against", "runs_only"),
    *("slice_class", "slice_answers"),
    *ASKED_FOR,
    *OPTIONS,
    *SWEEP,
)
"""The fields that mean nothing in another suite."""


def _field_type(option: Option) -> Any:
    return (tuple[str, ...] if option.kind is tuple else option.kind) | None


_Chosen: Any = make_dataclass("_Chosen", [(name, _field_type(one), None) for name, one in OPTIONS.items()], frozen=True)


@dataclass(frozen=True, kw_only=True)
class PageSelection(_Chosen):  # type: ignore[misc]
    """Everything that was chosen, `OPTIONS` among it; None leaves a field to the suite. Fields are names in the
    address."""

    suite: str = HOME_SUITE
    """An embedded name, or the path of a suite file."""
    task: str | None = None
    layer: str | None = None
    n: int = SAMPLES
    """Samples per task that models are measured on."""
    merge: str = "merged"
    """The one subject, the merge under repair, by its name (`featcal.suite.name_grammar`)."""
    beside: str = CALIBRATED
    """The model that it is compared with, by its name: its repair with the options below (`app.on_table`), any other,
    or `NOTHING`."""
    picked: tuple[int, ...] = ()
    """Samples of the task, in the order in which they are drawn; `MOST_PICKED` at most."""
    picked_of: str | None = None
    """The split whose samples are picked; None is the one that models are measured on."""
    over: str | None = None
    units: str | None = None
    parts: str | None = None
    tab: str | None = None
    """The view of a layer on the Drift page."""
    bench: str | None = None
    """The tab of the Calibrate page."""
    shelf: str | None = None
    """The tab of the Models and data page."""
    sample: str | None = None
    """Number of the one sample that a tab of the Drift page shows."""
    tokens: str | None = None
    sources: bool = False
    booked: bool = False
    """True to show the change of attribution."""
    conditioning: bool = False
    spread: bool = False
    """True to compare three calibration seeds."""
    map: str | None = None
    colour: str | None = None
    frame: str | None = None
    every: bool = False
    """True to show the small map of every task."""
    distance: str | None = None
    sweep_lam: str | None = None
    """Values of a sweep, as they were typed."""
    sweep_rho: str | None = None
    sweep_alpha: str | None = None
    run: str | None = None
    """A run of the history, by its id."""
    against: str | None = None
    """The run to compare with."""
    across: str | None = None
    """The number or option that runs and methods are drawn over on the Calibrate page."""
    runs_colour: str | None = None
    runs_score: str | None = None
    """The score that colours runs on the Runs page."""
    runs_only: tuple[str, ...] = ()
    """Values of columns that runs are filtered by (`featcal.figures.run_tables.filters`)."""
    runs_group: str | None = None
    flips: str | None = None
    slice_class: str | None = None
    """The right answer of the samples that could be selected next."""
    slice_answers: str | None = None
    """One part by who is right, in words (`featcal.figures.sample_slices`)."""
    slice_margin: str | None = None
    sort: str | None = None

    def options(self) -> dict[str, Any]:
        """Return the options of a calibration that were chosen."""
        return {name: value for name in OPTIONS if (value := getattr(self, name)) is not None}

    @property
    def cautious(self) -> bool:
        """Say whether alpha and beta are those that `cautious` is short for."""
        return {"alpha": self.alpha, "beta": self.beta} == CAUTIOUS

    def change(self, **changed: Any) -> PageSelection:
        """Return the selection with other values; a new suite resets every field that belongs to a suite, a new recipe
        its numbers. `cautious=True` sets `CAUTIOUS`'s numbers, False restores the recipe's own."""
        if "cautious" in changed:
            changed |= CAUTIOUS if changed.pop("cautious") else dict.fromkeys(CAUTIOUS)
        if changed.get("suite", self.suite) != self.suite:
            changed = {name: getattr(HOME, name) for name in OF_A_SUITE} | changed
        if changed.get("recipe", self.recipe) != self.recipe:
            changed = dict.fromkeys(OWN) | changed
        if any(changed.get(name, getattr(self, name)) != getattr(self, name) for name in ("task", "n")):
            changed = {"picked": (), "sample": None} | changed
        if "picked" in changed:
            changed = {"picked_of": None} | changed
        return replace(self, **changed)

    def to_query(self) -> dict[str, str]:
        """Return the query of the address bar: every field that is not at its default."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: _format_value(value) for name, value in named.items() if value != getattr(HOME, name)}


HOME = PageSelection()
"""Selection that the app opens on."""


def from_query(query: Mapping[str, str]) -> tuple[PageSelection, list[str]]:
    """Read the selection that an address asks for, and one sentence for every part of it that cannot be used.

    Unknown names are ignored.
    """
    chosen: dict[str, Any] = {}
    problems = []
    for name, kind in get_type_hints(PageSelection).items():
        if name not in query:
            continue
        try:
            read = _READ[kind if kind in _READ else get_args(kind)[0]]
            zero = query[name] == "0" and name in OPTIONS and OPTIONS[name].kind is int and OPTIONS[name].least == 0
            chosen[name] = 0 if zero else read(query[name])
        except ValueError:
            problems.append(
                f"The address asks for {name} = {shorten(query[name], 40)!r}, which is not a valid value; left out."
            )
    return HOME.change(**chosen), problems


def file_words(config: CalibrationConfig, defaults: CalibrationConfig) -> str:
    """Return words for the name of a file or folder of a calibrated model: numbers, and switches that were turned.

    >>> from featcal.suite.calibration_options import CalibrationConfig
    >>> own = CalibrationConfig(lam=0.05, rho=2.1, alpha=0.3, samples=64)
    >>> file_words(replace(own, biases=False), own)
    'lam0.05-rho2.1-alpha0.3-n64-no-biases'
    >>> file_words(replace(own, blocks=("block 0", "block 2"), maps=("mlp",)), own)
    'lam0.05-rho2.1-alpha0.3-n64-block-0-block-2-mlp'
    >>> file_words(replace(own, recipe="refined", beta=0.5), own)
    'refined-lam0.05-rho2.1-alpha0.3-beta0.5-n64'
    """
    numbers = {"lam": config.lam, "rho": config.rho, "alpha": config.alpha}
    numbers |= {name: getattr(config, name) for name in ("beta", "mu", "decisions") if getattr(config, name)}
    numbers |= {"n": config.samples}
    numbers |= {"copies": config.augment} if config.augment else {}
    numbers |= {"seed": config.seed} if config.seed != defaults.seed else {}
    parts = [re.sub(r"[^\w.]+", "-", ", ".join(names)).strip("-.") for names in chosen_parts(config).values()]
    named = (f"{name}{exactly(value)}" for name, value in numbers.items())
    recipe = [] if config.recipe == "paper" else [config.recipe]
    return "-".join([*recipe, *named, *turned_switches(config, defaults), *(part[:60] for part in parts)])


def chosen_parts(config: CalibrationConfig) -> dict[str, tuple[str, ...]]:
    """Return the blocks, kinds of maps and tasks that were chosen, where not all are calibrated."""
    return {name: tuple(getattr(config, name)) for name in PARTIAL if getattr(config, name) is not None}


def turned_switches(config: CalibrationConfig, defaults: CalibrationConfig) -> list[str]:
    """Return the switches that differ from the suite's defaults, as options of the command line.

    >>> from featcal.suite.calibration_options import CalibrationConfig
    >>> turned_switches(CalibrationConfig(biases=False, completion_only=True), CalibrationConfig())
    ['no-biases', 'completion-only']
    """
    found = [name for name in SWITCHES if getattr(config, name) != getattr(defaults, name)]
    return [f"{'' if getattr(config, name) else 'no-'}{name.replace('_', '-')}" for name in found]


def _format_value(value: Any) -> str:
    if isinstance(value, tuple):
        return join_names([str(one) for one in value], ",")
    return str(value).lower() if isinstance(value, bool) else exactly(value) if isinstance(value, float) else str(value)


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


def _count(text: str) -> int:
    if not 0 < int(text) < 2**31:
        raise ValueError(text)
    return int(text)


def _finite(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError(text)
    return float(text)


def _parse_picked(text: str) -> tuple[int, ...]:
    found = tuple(dict.fromkeys(int(one) for one in text.split(",")))
    if len(found) > MOST_PICKED or not all(0 <= one < 2**31 for one in found):
        raise ValueError(text)
    return found


def _names(text: str) -> tuple[str, ...]:
    if not text.strip():
        raise ValueError(text)
    return split_names(text, ",")


_READ: Mapping[Any, Callable[[str], Any]] = {
    bool: _flag,
    int: _count,
    float: _finite,
    str: str,
    tuple[int, ...]: _parse_picked,
    tuple[str, ...]: _names,
}
"""Kind of a field → its value from text; ValueError if the text does not hold one."""
