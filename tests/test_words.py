"""Names and sizes in messages."""

from __future__ import annotations

import pytest

from featcal.words import readable, some


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
