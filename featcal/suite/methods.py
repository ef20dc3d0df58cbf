"""Find the methods that make a model from a suite's experts; each is one class or function.

A method is a frozen dataclass whose fields are its options, under `register_method`, or, of tensors alone, a function
whose keyword parameters are its options, under `mergers.common.merger.merger`. featcal's own are files: the one
called tsv-m is in `featcal/mergers/tsv_m.py`, regmean++ in `featcal/baselines/regmean_plus_plus.py`. Other packages add
methods by entry points of the group `featcal.methods`, named like the method, that point to it. The names are therefore
known without imports; a method's code is imported when the method is used.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import ClassVar, TypeVar
from uuid import uuid4

from featcal.suite.options import MethodOptions
from featcal.system.errors import InputError
from featcal.system.extras import load_entry_point
from featcal.system.fingerprints import digest_code
from featcal.system.formatting import did_you_mean

SAMPLES, LABELS, TEST_DATA, TRAINING, MODULES, TASK = NEEDS = (
    "samples",
    "labels",
    "test data",
    "training",
    "modules",
    "task",
)
"""What a method needs. SAMPLES: calibration samples. LABELS: their labels, or answers that are read as tokens.
TEST_DATA: samples of the test split. TRAINING: steps of gradient descent. MODULES: modules or whole models per task.
TASK: the task of every sample when the model is used."""
PROPOSED = ("calibrated:recipe=refined", "calibrated:recipe=informed")
"""Calibrations by featcal's own recipes, on which comparisons run methods that act on another model."""
GROUP = "featcal.methods"
"""Group of the entry points by which packages add methods."""
INSTALLED = f"A method of your own is imported first, or brought by an installed package's entry point '{GROUP}'."
"""Said of unknown methods."""
MERGER, BASELINE = "merger", "baseline"
_FOLDERS = {MERGER: "mergers", BASELINE: "baselines"}
PLAIN, WITH_OPTIONS = ("base", "merged"), ("calibrated", "anchor")
EXPERT = "expert"
"""Name for every expert on its own task; scores are shares of its scores."""
NAMED = (*PLAIN, EXPERT, *WITH_OPTIONS)
"""Names of models that no method makes."""
REFERENCE, ALL = "reference", "all"
"""REFERENCE: kind of every text that is not a name, a folder or Hub id. ALL: the text for all methods, or all parts."""


class Method(MethodOptions):
    """A method and its options: base class of `Merger` and `Baseline`, which define the inputs that it gets."""

    role: ClassVar[str]
    """`MERGER`: works on tensors only, wherever a suite is merged; or `BASELINE`, which may use samples."""
    on_another: ClassVar[bool] = False
    """True if it acts on a merged model, which a name can give after an @."""
    about: ClassVar[About]


@dataclass(frozen=True)
class About:
    """Description of a method apart from its options: summary, paper and needs."""

    summary: str
    """Effect of the method, as a phrase in Markdown."""
    paper: str = ""
    """arXiv number, or an address."""
    needs: tuple[str, ...] = ()
    """Needs of the method, some of `NEEDS`."""
    compared: tuple[str, ...] = ()
    """Names of its models in the comparison of all methods; by default its own name."""
    note: str = ""
    """Warning for a name that has another meaning in other tools."""
    mergekit: str = ""
    """The `merge_method` of mergekit that equals it."""

    @property
    def link(self) -> str:
        """Return the paper as a link in Markdown; "" where there is none."""
        if not self.paper or "://" in self.paper:
            return self.paper and f"[paper]({self.paper})"
        return f"[arXiv {self.paper}](https://arxiv.org/abs/{self.paper})"


Kind = TypeVar("Kind", bound=type[Method])
_REGISTERED: dict[str, type[Method]] = {}
_CODE: dict[str, str] = {}
"""Digest of the code of methods that were registered from elsewhere, by module."""


def register_method(
    name: str,
    summary: str,
    *,
    paper: str = "",
    needs: tuple[str, ...] = (),
    compared: tuple[str, ...] = (),
    note: str = "",
    mergekit: str = "",
) -> Callable[[Kind], Kind]:
    """Return the decorator that registers a method in this process: for names of models, suite files, `featcal merge`,
    comparisons and the app. `featcal.testing.check_method` checks that the method behaves as declared.

    Args:
        name: small letters, digits, - and +; a second class with that name in the same module replaces the first.

    Raises:
        InputError: the name is not possible or belongs to another method, or the decorated class is not a method.

    >>> import featcal
    >>> from dataclasses import dataclass
    >>> from featcal.testing import check_method
    >>> @featcal.register_method("first-expert", "the base plus the first task vector")
    ... @dataclass(frozen=True)
    ... class FirstExpert(featcal.Merger):
    ...     def merge(self, given):
    ...         return given.base + next(given.vectors())
    >>> try:
    ...     check_method("first-expert")
    ... except AssertionError as error:
    ...     print(error)
    experts in another order: 'a' is another
    """

    def register(kind: Kind) -> Kind:
        if not (isinstance(kind, type) and issubclass(kind, Method) and hasattr(kind, "role")):
            raise InputError(f"method '{name}': {kind!r} is not a Merger or Baseline; derive a class from one of them")
        if "__dataclass_fields__" not in vars(kind):  # its options would be those of its base class
            raise InputError(
                f"method '{name}': {kind.__name__} is not a dataclass; write @dataclass(frozen=True) above it"
            )
        if not re.fullmatch(r"[a-z][a-z0-9+-]*", name) or name in (*NAMED, REFERENCE, ALL):
            raise InputError(
                f"'{name}' cannot be the name of a method: use small letters, digits, - and +, and not the name of a "
                "model"
            )
        elsewhere = _REGISTERED[name].__module__ if name in _REGISTERED else _place_of(name)
        if elsewhere not in (None, kind.__module__):
            raise InputError(f"there is a method '{name}' already; give {kind.__qualname__} another name")
        kind.kind, kind.about = name, About(summary, paper, needs, compared, note, mergekit)
        _REGISTERED[name] = kind
        # Packages that bring methods are told by `system.versions.extension_versions`, imported or not.
        if (elsewhere is None and name not in _entry_points()) or kind.__module__ in _CODE:
            _CODE[kind.__module__] = _digest_module(kind.__module__)
        return kind

    return register


def _digest_module(name: str) -> str:
    """Return 12 digits of the SHA-256 of a module's code as it is imported; without a file, as in a notebook, a value
    that no other definition has."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return uuid4().hex[:12] if file is None else digest_code([Path(file)])[:12]


def methods_code() -> Mapping[str, str]:
    """Return a digest of the code of every module that registered methods of its own, which change what is measured."""
    return dict(sorted(_CODE.items()))


def method(name: str) -> type[Method]:
    """Return the class of a method.

    Raises:
        InputError: no method has that name, or its package cannot be imported.
    """
    place, brought = _place_of(name), _entry_points().get(name, ())
    if len(brought) + (place is not None) > 1:
        whose = ", ".join(one.value for one in brought)
        raise InputError(f"more than one method is called '{name}': remove the package with {whose}")
    if name not in _REGISTERED and place is not None:
        import_module(place)
    elif name not in _REGISTERED and brought:
        _load(name, brought[0])
    if name not in _REGISTERED:
        known = method_names()
        raise InputError(f"no method '{name}'; there are {', '.join(known)}.{did_you_mean(name, known)} {INSTALLED}")
    return _REGISTERED[name]


def is_method(name: str) -> bool:
    """Say whether a method has that name; nothing is imported."""
    return name in _REGISTERED or _place_of(name) is not None or name in _entry_points()


def is_merger(name: str) -> bool:
    """Say whether a name is that of a merger; none of featcal's own methods is imported."""
    if _place_of(name) is not None:
        # The folder tells the role, so nothing is imported: modules of methods need torch, which `--help` can spare.
        return name in _own(MERGER)
    return is_method(name) and method(name).role == MERGER


def is_baseline(name: str) -> bool:
    """Say whether a name is that of a baseline; none of featcal's own methods is imported."""
    return is_method(name) and not is_merger(name)


def method_names() -> tuple[str, ...]:
    """Return the names of all methods: featcal's own mergers, its baselines, then others; nothing is imported."""
    return tuple(dict.fromkeys([*_own(MERGER), *_own(BASELINE), *_REGISTERED, *_entry_points()]))


def merger_names() -> tuple[str, ...]:
    """Return the names of all mergers; none of featcal's own methods is imported."""
    return tuple(filter(is_merger, method_names()))


def baseline_names() -> tuple[str, ...]:
    """Return the names of all baselines; none of featcal's own methods is imported."""
    return tuple(filter(is_baseline, method_names()))


def _load(name: str, brought: EntryPoint) -> None:
    whose, _ = load_entry_point(brought, "method")
    if name not in _REGISTERED:
        raise InputError(f"{whose}: {brought.value} registers no method '{name}'")


def _place_of(name: str) -> str | None:
    """Return the module of one of featcal's own methods."""
    return next((own[name] for own in map(_own, _FOLDERS) if name in own), None)


@cache
def _own(role: str) -> Mapping[str, str]:
    """Return names and modules of featcal's own methods of a role: one file of a folder per method."""
    folder = Path(__file__).parent.parent / _FOLDERS[role]
    stems = sorted(file.stem for file in folder.glob("*.py") if file.stem != "__init__")
    return {_name_of(stem): f"featcal.{_FOLDERS[role]}.{stem}" for stem in stems}


def _name_of(stem: str) -> str:
    """Return the name of the method in a file.

    >>> _name_of("tsv_m"), _name_of("regmean_plus_plus")
    ('tsv-m', 'regmean++')
    """
    return stem.replace("_plus", "+").replace("_", "-")


@cache
def _entry_points() -> Mapping[str, tuple[EntryPoint, ...]]:
    """Return the entry points of installed packages by the name of the method; several if packages share a name."""
    points = entry_points(group=GROUP)
    return {name: tuple(one for one in points if one.name == name) for name in sorted(points.names)}
