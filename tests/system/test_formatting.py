"""Names and sizes in messages."""

from __future__ import annotations

import numpy as np
import pytest

from featcal.system.formatting import percent, printable, readable, some


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1.5 * 2**30, "1.5 GiB"),
        (2**40, "1.0 TiB"),
        (2**51, "2048.0 TiB"),
    ],
)
def test_sizes_take_the_unit_that_fits(count: float, text: str) -> None:
    assert readable(count) == text


def test_names_beyond_the_first_are_counted() -> None:
    assert some(["a", "b"]) == "'a', 'b'"
    assert some(list("abcdef"), 3) == "'a', 'b', 'c' and 3 more"


def test_a_terminal_gets_nothing_to_obey() -> None:
    text = "a\tb\nc é 猫 \x1b[31mred\x07 \x9b2J \r\u202egnp.exe\u2066 \udcff\x7f"
    shown = r"\x1b[31mred\x07 \x9b2J \r\u202egnp.exe\u2066 \udcff\x7f"
    assert printable(text) == "a\tb\nc é 猫 " + shown
    assert printable("x" * 4001, 4000) == "x" * 4000 + " … (1 more characters)"


def test_halves_are_rounded_up_whatever_their_binary_form_is() -> None:
    """Every share of 500 questions, and the mean over four tasks: against whole numbers."""
    for count in range(2001):
        expected = (count * 1000 + 1000) // 2000  # tenths of a per cent, half up
        assert percent(count / 2000) == f"{expected // 10}.{expected % 10}"
    right = [(325, 326, 260, 292), (383, 384, 316, 318)]
    halves = [np.float64(sum(count / 500 for count in counts) / 4) for counts in right]
    assert [percent(half) for half in halves] == ["60.2", "70.1"]
    assert [f"{100 * half:.1f}" for half in halves] == ["60.2", "70.0"]  # what a float's own rounding makes of them
    assert percent(-0.0625) == "-6.3"
