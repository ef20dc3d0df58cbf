"""Match names of classes: which name of one list means the same class as a name of another.

Data sets, suite files and heads each list the classes of a task, in an order and a spelling of their own. Names are
equal if they differ only in case, blanks, `_` and `-`. Whole numbers, `LABEL_3`, `class_3` and `class 3` are numbers:
they mean the class with that number, counted from 0.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from featcal.system.formatting import some

MOST_NAMED = 20
"""Most names that a note or a problem lists."""
_NUMBER = re.compile(r"\s*(?:(label|class)[\s_-]*)?(\d{1,9})\s*", re.ASCII | re.IGNORECASE)
_DIGITS = re.compile(r"\d+")
MOST_DIGITS = 32
"""Digits to which numbers in names are padded, to sort them by value."""
_SPELLING = re.compile(r"[\s_-]+")


@dataclass(frozen=True)
class ClassList:
    """The classes of a task, in the order of one list."""

    names: tuple[str, ...]
    whose: str
    """Name of the list in messages, such as "the source"."""
    is_sorted: bool = False
    """True if the order is only that of the names, because the list has no numbers."""
    renames: bool = False
    """True if the list may rename classes that a data set has numbered, as prompts do."""


@dataclass(frozen=True)
class Matching:
    """Positions of the names of one list in another."""

    places: tuple[int, ...] = ()
    """Position of every name in the other list; empty with a problem."""
    note: str = ""
    """Sentence with the pairs of names, if no names are shared."""
    problem: str = ""
    """Problem, if the match is ambiguous."""


def number_of(name: str) -> int | None:
    """Return the number that a class name denotes; None if it is a word.

    >>> [number_of(name) for name in ("7", "LABEL_10", "class 3", "-1", "route 66")]
    [7, 10, 3, None, None]
    """
    found = _NUMBER.fullmatch(name)
    return None if found is None else int(found[2])


def sort_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return every name once, sorted by their numbers if all are numbers, else as text.

    >>> sort_names(["10", "9", "9"]), sort_names(["b10", "b9"])
    (('9', '10'), ('b10', 'b9'))
    """
    words = sorted(set(names))
    numbers = {name: number for name in words if (number := number_of(name)) is not None}
    return tuple(sorted(words, key=numbers.__getitem__) if len(numbers) == len(words) else words)


def find_missing_names(names: Sequence[str], *lists: Sequence[str]) -> tuple[str, ...]:
    """Return the classes of other lists that a list lacks, each once, sorted by `sort_names`.

    Spelling counts only where a list has two classes that differ in nothing else.

    >>> find_missing_names(("circle", "square"), ("Circle", "Red_cross"), ("red cross",))
    ('Red_cross',)
    """
    every = (names, *lists)
    key = _key if all(len({_key(name) for name in one}) == len(one) for one in every) else str
    known, missing = {key(name) for name in names}, dict[Hashable, str]()
    for name in chain.from_iterable(lists):
        if key(name) not in known:
            missing.setdefault(key(name), name)
    return sort_names(missing.values())


def match_names(ours: ClassList, theirs: ClassList) -> Matching:
    """Find the position in `theirs` of every name of `ours`.

    Identical names decide first, then equal names, then numbers. If two lists share nothing, positions decide, with a
    note. Two lists that share only some names are a problem, unless one numbers the classes, the other renames them,
    and no shared name has another position.

    >>> match_names(ClassList(("No", "yes"), "a"), ClassList(("YES", "maybe", "no"), "b")).places
    (2, 0)
    """
    names, others = ours.names, theirs.names
    if names == others:  # two classes of one name have different places
        return Matching(tuple(range(len(names))))
    if set(names) <= set(others):
        return Matching(_find(names, others))
    if _is_numbering(others):
        return _match_numbering(ours, theirs)
    keys, known = _keys(names, others)
    if set(keys) <= set(known):
        return Matching(_find(keys, known))
    if set(keys) & set(known):
        numbered = theirs.renames and not ours.is_sorted
        if numbered and all(key not in known or known.index(key) == place for place, key in enumerate(keys)):
            return _match_places(ours, theirs)
        return _problem(ours, theirs, "they share some and not all")
    numbers = _indices(names, len(others))
    if numbers is None:
        return _match_places(ours, theirs)
    note = f"the classes of {ours.whose} are numbers and stand for those of {theirs.whose}: "
    return Matching(numbers, note + _pairs(ours, theirs, numbers))


def _match_numbering(ours: ClassList, theirs: ClassList) -> Matching:
    """Match names with a list that only numbers its classes."""
    numbers = _indices(ours.names, len(theirs.names)) if ours.is_sorted else None
    if numbers is None:
        return _match_places(ours, theirs)
    note = (
        f"the classes of {ours.whose} are numbers and are counted so, '2' as class 2; an expert that was trained on "
        "names sorted as text ('0', '1', '10', …, '2') counts them in another order: give 'classes' in its order"
    )
    # Up to ten numbers both orders are one.
    return Matching(numbers, "" if ours.names == tuple(sorted(ours.names)) else note)


def _match_places(ours: ClassList, theirs: ClassList) -> Matching:
    """Match names by position, with a note unless both lists only number their classes."""
    names, others = ours.names, theirs.names
    if len(names) != len(others) and (ours.is_sorted or not theirs.renames):
        return _problem(ours, theirs, "they share none")
    if ours.is_sorted and not _are_numbers(names) and names != tuple(sorted(names, key=_natural_key)):
        return _problem(ours, theirs, "they share none and are in another order as text than by the numbers in them")
    places = tuple(range(len(names)))
    # The numbers of a data set are those that a head counts which has no names.
    counted = not ours.is_sorted and not theirs.renames and _is_numbering(others)
    if counted and all(number_of(one) in (None, place) for place, one in enumerate(names)):
        return Matching(places)
    order = ""
    if not counted and len(names) == len(others) and _are_numbers(names):
        places, order = _find(names, sort_names(names)), ", in the order of their numbers"
    note = f"the classes of {ours.whose} and of {theirs.whose} are matched by their places{order}: "
    return Matching(places, note + _pairs(ours, theirs, places))


def _problem(ours: ClassList, theirs: ClassList, why: str) -> Matching:
    first, second = (f"{len(one.names)} classes ({some(one.names, MOST_NAMED)})" for one in (ours, theirs))
    if _is_numbering(theirs.names) and not theirs.renames:
        remedy = "give 'classes', all of them in the order of the head"
    else:
        remedy = "name them alike, in the data or, where labels are numbers, with 'classes'"
    # Of numbers that lack 0 nobody knows whether '1' is the first class or the second.
    from_zero = "; numbers may be written LABEL_1, which count from 0" if _are_numbers(ours.names) else ""
    both = f"{ours.whose} has {first} and {theirs.whose} {second}"
    return Matching(problem=f"{both}: {why}, and which belongs to which is ambiguous; {remedy}{from_zero}")


def _pairs(ours: ClassList, theirs: ClassList, places: Sequence[int]) -> str:
    """Describe the pairs of names."""
    pairs = [
        f"'{name}' is '{theirs.names[place]}'"
        for name, place in zip(ours.names, places, strict=True)
        if place < len(theirs.names)
    ]
    more = f" and {len(pairs) - MOST_NAMED} more" if len(pairs) > MOST_NAMED else ""
    return ", ".join(pairs[:MOST_NAMED]) + more


def _keys(names: Sequence[str], others: Sequence[str]) -> tuple[Sequence[Hashable], Sequence[Hashable]]:
    """Return names of two lists in the form of comparison: unchanged if two names of a list would become equal."""
    keys, known = ([_key(name) for name in one] for one in (names, others))
    unique = len(set(keys)) == len(keys) and len(set(known)) == len(known)
    return (keys, known) if unique else (names, others)


def _key(name: str) -> Hashable:
    """Return a name without arbitrary spelling: its number, or its letters."""
    # Folders of a Mac have accents as characters of their own.
    letters = _SPELLING.sub("", unicodedata.normalize("NFC", name).casefold())
    return letters or name if (number := number_of(name)) is None else number


def _find(keys: Sequence[Hashable], known: Sequence[Hashable]) -> tuple[int, ...]:
    places = {key: place for place, key in enumerate(known)}
    return tuple(places[key] for key in keys)


def _are_numbers(names: Sequence[str]) -> bool:
    return all(number_of(name) is not None for name in names)


def _natural_key(name: str) -> str:
    """Return a sort key for a name: as text, with the numbers in it by value."""
    return _DIGITS.sub(lambda found: found[0].zfill(MOST_DIGITS), name)


def _is_numbering(names: Sequence[str]) -> bool:
    """Say whether a list only numbers its classes, as a head without names does."""
    return all(number_of(name) == place for place, name in enumerate(names))


def _indices(names: Sequence[str], count: int) -> tuple[int, ...] | None:
    """Return names as indices of so many classes; None if they may not be indices, such as numbers from 1."""
    found = [one for name in names if (one := _NUMBER.fullmatch(name))]
    numbers = [int(one[2]) for one in found]
    if len(found) < len(names) or len(set(numbers)) < len(numbers) or max(numbers, default=0) >= count:
        return None
    # `LABEL_n` is transformers' own and counts from 0, also where 0 is missing.
    return tuple(numbers) if 0 in numbers or all((one[1] or "").lower() == "label" for one in found) else None
