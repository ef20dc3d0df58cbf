"""Define the options of a method: fields of a frozen value, with default, range and help."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import Field, asdict, dataclass, field, fields
from numbers import Integral, Real
from typing import Any, ClassVar

from featcal.system.errors import InputError
from featcal.system.formatting import exactly, shorten

_FACTS = "facts"
_KINDS: Mapping[type, tuple[str, type | tuple[type, ...]]] = {
    bool: ("True or False", bool),
    int: ("a whole number", Integral),
    float: ("a number", Real),
    str: ("a text", str),
    tuple: ("a list of names", (str, list, tuple)),
}
"""Name of every type of option in words, and the Python types that may be given for it."""


@dataclass(frozen=True)
class OptionFacts:
    """Facts about one option of a method."""

    help: str
    above: float | None = None
    least: float | None = None
    below: float | None = None
    most: float | None = None
    by_task: bool = False
    """True if a suite file may give one value per task; it must if the default is None."""

    def holds(self, value: float) -> bool:
        """Say whether a number is in the range, and finite."""
        return (
            math.isfinite(value)
            and (self.above is None or value > self.above)
            and (self.least is None or value >= self.least)
            and (self.below is None or value < self.below)
            and (self.most is None or value <= self.most)
        )

    def require(self, name: str, value: Any, kind: type[Any]) -> Any:
        """Check a value's kind and range and return it, a number as Python's own; `name` is the option's.

        Raises:
            InputError: it is not of the kind, or outside the range.
        """
        what, kinds = _KINDS[kind]
        # Python's bool is an int.
        fits = issubclass(type(value), kinds) and (type(value) is bool) is (kind is bool)
        if not fits or (kind is tuple and not all(isinstance(one, str) for one in value)):
            raise InputError(f"{name} is {shorten(repr(value))}; give {what}")
        if kind not in (int, float):
            return value
        if not self.holds(value):
            raise InputError(f"{name} is {exactly(value)}; it {self.sentence(kind)}")
        # One of NumPy's could not be written to a record.
        return value if type(value) in (int, float) else kind(value)

    def interval(self) -> str:
        """Return the range in mathematical notation, such as "(0, 1]"; "" if it has no bound."""
        low, high = (
            (self.least if self.above is None else self.above),
            (self.most if self.below is None else self.below),
        )
        if low is None and high is None:
            return ""
        left = "(−∞" if low is None else f"{'[' if self.above is None else '('}{low:g}"
        return f"{left}, " + ("∞)" if high is None else f"{high:g}{']' if self.below is None else ')'}")

    def sentence(self, kind: type) -> str:
        """Describe the values that an option of a type can have, as the end of a sentence that begins with "it"."""
        interval = self.interval()
        if interval and "∞" not in interval:
            return f"lies in {interval}"
        bound = f"is above {self.above:g}" if self.above is not None else ""
        bound = f"is at least {self.least:g}" if self.least is not None else bound
        return bound or "is finite" if kind is int or not bound else f"{bound} and finite"


def option(
    default: Any,
    help: str,
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    most: float | None = None,
    by_task: bool = False,
) -> Any:
    """Return the field of an option; its type is that of the default, a number, true or false.

    Args:
        help: one sentence without its full stop; lists show default and range after it.
        above, least, below, most: the bounds of a number; it is always finite.
        by_task: a suite file may give one value per task. With the default None it can give only that, and the method
            gets None by default.

    >>> import featcal
    >>> @featcal.merger("sum-of-vectors", "the base plus the sum of the task vectors")
    ... def sum_of_vectors(given, *, scale: float = featcal.option(0.3, "factor of the sum", above=0, most=2)):
    ...     return given.base + scale * sum(given.vectors())
    >>> try:
    ...     featcal.merge(featcal.load_suite("lm-mini"), "sum-of-vectors:scale=3")
    ... except featcal.InputError as error:
    ...     print(error)
    sum-of-vectors: scale is 3; it lies in (0, 2]
    """
    return field(default=default, metadata={_FACTS: OptionFacts(help, above, least, below, most, by_task)})


@dataclass(frozen=True)
class MethodOptions:
    """Options that distinguish a model of a method from other models of it.

    Raises:
        InputError: a value of another type or outside its range; the message names the option.
    """

    kind: ClassVar[str]
    """The method's name, which `register_method` gives."""

    def __post_init__(self) -> None:
        problems: list[str] = []
        for one in options_of_class(type(self)):
            value, facts = getattr(self, one.name), facts_of(one)
            by_task = facts.by_task and isinstance(value, Mapping)
            for single in value.values() if by_task else (value,):
                try:
                    if single is not None:
                        single = facts.require(f"{self.kind}: {one.name}", single, type_of(one))
                except InputError as error:
                    problems.append(str(error))
                if not by_task:
                    object.__setattr__(self, one.name, single)
        if problems:
            raise InputError(*problems)

    @property
    def name(self) -> str:
        """Return the model's name with every option that a name can express."""
        options = [f"{option}={format_value(value)}" for option, value in asdict(self).items() if _can_be_said(value)]
        return f"{self.kind}:{','.join(options)}" if options else self.kind


def options_of_class(kind: type[MethodOptions]) -> list[Field[Any]]:
    """Return the options of a method in the order in which it names them."""
    return [one for one in fields(kind) if _FACTS in one.metadata]


def facts_of(one: Field[Any]) -> OptionFacts:
    """Return the facts about an option of a method."""
    facts: OptionFacts = one.metadata[_FACTS]
    return facts


def type_of(one: Field[Any]) -> type:
    """Return the type of an option's value, or of one task's value if it has one per task."""
    return float if one.default is None else type(one.default)


def format_value(value: float | str) -> str:
    """Return the value of an option as a person types it."""
    return exactly(value) if isinstance(value, float) else str(value).lower()


def _can_be_said(value: Any) -> bool:
    return value is not None and not isinstance(value, Mapping)
