"""What names of classes mean: spelling, numbers, order, and what nobody can tell."""

from __future__ import annotations

from typing import Any

import pytest

from featcal.samples.class_names import ClassList, Matching, match_names, number_of, sort_names

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven")
NUMBERS = tuple(map(str, range(12)))
LABELS = tuple(f"LABEL_{number}" for number in range(12))
FROM_ONE = tuple(map(str, range(1, 13)))
MNLI = ("entailment", "neutral", "contradiction")


def match(ours: tuple[str, ...], theirs: tuple[str, ...], *, counted: bool = True, renames: bool = False) -> Matching:
    """Names that are counted in sorted order, or that a data set has numbered, against a head's or the suite's."""
    ours = sort_names(ours) if counted else ours
    return match_names(ClassList(ours, "the task", counted), ClassList(theirs, "the head", renames=renames))


@pytest.mark.parametrize(
    ("name", "number"),
    [("7", 7), ("07", 7), (" 7 ", 7), ("LABEL_10", 10), ("label 3", 3), ("Class-3", 3), ("class3", 3)]
    + [(word, None) for word in ("-1", "1.0", "seven", "class", "b7", "7b", "", "٣", "1" * 5000)],
)
def test_names_that_are_numbers(name: str, number: int | None) -> None:
    assert number_of(name) == number


def test_numbers_are_sorted_by_value_and_names_as_text() -> None:
    assert sort_names(NUMBERS[::-1]) == NUMBERS
    assert sort_names(("class_10", "class_9")) == ("class_9", "class_10")
    assert sort_names(("10", "9", "nine")) == ("10", "9", "nine")
    assert sort_names(("b", "B", "a")) == ("B", "a", "b")


SAME: dict[str, tuple[Any, Any, bool, list[int]]] = {
    "in another order and spelling": (MNLI, ("CONTRADICTION", "Neutral", "ENTAILMENT"), False, [2, 1, 0]),
    "blanks and signs": (("golden_retriever", "Basset Hound"), ("basset-hound", "golden retriever"), False, [1, 0]),
    "accents of a Mac": (("cafe\u0301", "bar"), ("bar", "caf\u00e9"), False, [1, 0]),
    "a part of the other's": (("maybe", "yes"), ("no", "Yes", "Maybe"), True, [2, 1]),
    "numbers with words around them": (("1", "2", "10"), ("class_10", "class 2", "Class 1"), True, [2, 1, 0]),
    "numbers of a head without names": (NUMBERS, LABELS, True, list(range(12))),
    "a number is missing": (("0", "2", "11"), LABELS, True, [0, 2, 11]),
    "0 is missing, and the names say that they count from it": (("LABEL_1", "LABEL_10"), LABELS, True, [1, 10]),
    "0 is missing, and both have names": (("3", "10"), NUMBERS, True, [3, 10]),
    "spelt alike where letters alone are not enough": (("a b", "a_b"), ("a_b", "A B", "a b"), False, [2, 0]),
    "upper and lower case are two": (("A", "a"), ("a", "A"), False, [1, 0]),
    "numbered as a head without names counts": (MNLI, LABELS[:3], False, [0, 1, 2]),
}


@pytest.mark.parametrize(("ours", "theirs", "counted", "places"), SAME.values(), ids=SAME)
def test_the_same_names_are_found(ours: Any, theirs: Any, counted: bool, places: list[int]) -> None:
    found = match(ours, theirs, counted=counted)
    assert (list(found.places), found.problem) == (places, "")


def test_numbers_beyond_9_may_have_been_counted_as_text() -> None:
    """As torchvision's ImageFolder counts folders; up to 9 both orders are one."""
    assert "sorted as text" in match(NUMBERS, LABELS).note
    assert match(NUMBERS[:10], LABELS[:10]).note == match(LABELS, LABELS).note == ""


BY_PLACE: dict[str, tuple[Any, Any, dict[str, bool], list[int], str]] = {
    "numbers count words": (NUMBERS, WORDS, {}, list(range(12)), "'2' is 'two', '3' is 'three'"),
    "with one missing": (("0", "3", "11"), WORDS, {}, [0, 3, 11], "'0' is 'zero', '3' is 'three', '11' is 'eleven'"),
    "numbers from 1": (FROM_ONE, WORDS, {}, list(range(12)), "in the order of their numbers: '1' is 'zero'"),
    "numbers from 1 for a head": (FROM_ONE, LABELS, {}, list(range(12)), "'10' is 'LABEL_9'"),
    "words": (("dog", "cat"), ("a cat", "a dog"), {"renames": True}, [0, 1], "'cat' is 'a cat', 'dog' is 'a dog'"),
    "words for a head without names": (("dog", "cat"), LABELS[:2], {}, [0, 1], "'cat' is 'LABEL_0'"),
    "a data set whose numbers were sorted as text":
        (tuple(sorted(NUMBERS)), WORDS, {"counted": False}, [0, 1, 10, 11, *range(2, 10)], "'10' is 'ten'"),
    "from 1": (tuple(sorted(FROM_ONE)), WORDS, {"counted": False}, [0, 9, 10, 11, *range(1, 9)], "'10' is 'nine'"),
    "for a head without names, which counts as the data set does":
        (tuple(sorted(NUMBERS)), LABELS, {"counted": False}, list(range(12)), "'10' is 'LABEL_2'"),
    "other words for a part of what a data set has numbered":
        (("cat", "automobile"), ("cat", "car"), {"counted": False, "renames": True}, [0, 1], "'automobile' is 'car'"),
}  # fmt: skip


@pytest.mark.parametrize(("ours", "theirs", "options", "places", "note"), BY_PLACE.values(), ids=BY_PLACE)
def test_places_are_taken_only_with_a_note(ours: Any, theirs: Any, options: Any, places: list[int], note: str) -> None:
    found = match(ours, theirs, **options)
    assert (list(found.places), found.problem) == (places, "")
    assert note in found.note


def test_numbers_in_words_that_sort_alike_as_text_are_no_matter() -> None:
    """Signs in front of digits, years, zeros in front."""
    ours = ("Audi S-Line", "Audi S4 2007", "Audi S4 2012", "bus 09", "bus 10")
    assert match(ours, WORDS[:5], renames=True).places == (0, 1, 2, 3, 4)


UNKNOWN: dict[str, tuple[Any, Any, dict[str, bool]]] = {
    "in part the same": (("a", "b", "c"), ("A", "B", "d"), {}),
    "in part, at other places of a data set": (("cat", "dog"), ("a dog", "cat"), {"counted": False, "renames": True}),
    "in part, at the same places of sorted names": (("cat", "dog"), ("cat", "a dog"), {"renames": True}),
    "in part, for a head": (("cat", "dog"), ("cat", "a dog"), {"counted": False}),
    "more than there are": (("a", "b", "c"), ("b", "a"), {"counted": False}),
    "fewer, and none the same": (("cat", "dog"), ("a", "b", "c"), {"renames": True}),
    "fewer than a head without names": (MNLI[:2], LABELS[:3], {"counted": False}),
    "numbers in words, which people and programs sort otherwise": (("b1", "b2", "b10"), WORDS[:3], {"renames": True}),
    "also for a head without names": (("b1", "b2", "b10"), LABELS[:3], {}),
    "from 0 or from 1": (FROM_ONE[:-1], LABELS, {}),
    "from 0 or from 1, with words": (FROM_ONE[:-1], WORDS, {"renames": True}),
}


@pytest.mark.parametrize(("ours", "theirs", "options"), UNKNOWN.values(), ids=UNKNOWN)
def test_what_nobody_can_tell_is_a_problem_with_both_lists(ours: Any, theirs: Any, options: Any) -> None:
    found = match(ours, theirs, **options)
    assert (found.places, found.note) == ((), "")
    assert all(f"'{name}'" in found.problem for name in (*ours, *theirs))
    assert ("LABEL_1, which count from 0" in found.problem) == ("1" in ours)


def test_long_lists_are_cut() -> None:
    many = tuple(f"n{number:03d}" for number in range(1000))
    assert match(many, tuple(f"m{number}" for number in range(1000))).note.endswith("and 980 more")
    assert len(match(many, ("n1", "x")).problem) < 600


def test_equal_lists_match_place_by_place_also_where_a_name_comes_twice() -> None:
    """A crane is a bird and a machine."""
    names = ("crane", "dog", "crane")
    assert match_names(ClassList(names, "a"), ClassList(names, "b")).places == (0, 1, 2)
