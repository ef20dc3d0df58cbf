"""What the theme promises to readers: contrast of its own colours, and nothing from another host."""

from __future__ import annotations

import re
import sys
import tomllib

import pytest

from featcal.system.resources import bundle_root

sys.path.insert(0, str(bundle_root()))


APP = bundle_root() / "app"
LOOK = tomllib.loads((APP / ".streamlit" / "config.toml").read_text(encoding="utf-8"))["theme"]
STYLE = (APP / "style.css").read_text(encoding="utf-8")
Colour = tuple[float, ...]


def rgb(name: str) -> Colour:
    return tuple(int(name[place : place + 2], 16) / 255 for place in (1, 3, 5))


def over(front: Colour, back: Colour, share: float) -> Colour:
    return tuple(share * a + (1 - share) * b for a, b in zip(front, back, strict=True))


def luminance(colour: Colour) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: Colour, other: Colour) -> float:
    """WCAG's ratio, 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_that_of_the_standard() -> None:
    assert contrast(rgb("#000000"), rgb("#FFFFFF")) == pytest.approx(21)
    assert contrast(rgb("#767676"), rgb("#FFFFFF")) == pytest.approx(4.54, abs=0.005)


@pytest.mark.parametrize("which", ["light", "dark"])
def test_text_of_every_kind_stands_out_from_its_ground(which: str) -> None:
    colours = {name: rgb(value) for name, value in LOOK[which].items() if isinstance(value, str)}
    on_buttons = re.search(r"stBaseButton-primary[^}]*light-dark\((#\w{6}), (#\w{6})\)", STYLE)
    assert on_buttons
    grounds = {"page": colours["backgroundColor"], "sidebar": rgb(LOOK[which]["sidebar"]["backgroundColor"])}
    text, primary = colours["textColor"], colours["primaryColor"]
    ratios = {
        "a button": contrast(rgb(on_buttons[1 if which == "light" else 2]), primary),
        "text in a field": contrast(text, colours["secondaryBackgroundColor"]),
    }
    for place, ground in grounds.items():
        ratios |= {
            f"text, {place}": contrast(text, ground),
            f"caption, {place}": contrast(over(text, ground, 0.6), ground),
            f"tick of a chart, {place}": contrast(over(text, ground, 0.8), ground),
            f"link, {place}": contrast(colours["linkColor"], ground),
            f"chosen option, {place}": contrast(primary, over(primary, ground, 0.1)),
        }
    assert {what: round(ratio, 2) for what, ratio in ratios.items() if ratio < 4.5} == {}
