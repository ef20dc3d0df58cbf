"""The app's explanations are Markdown and formulas that the browser can draw."""

from __future__ import annotations

import re

import pytest
from explanations import EXPLANATIONS

KATEX = {
    *(
        "alpha",
        "beta",
        "delta",
        "Delta",
        "ell",
        "eta",
        "gamma",
        "lambda",
        "mu",
        "omega",
        "rho",
        "tau",
        "propto",
        "top",
        "sigma",
        "theta",
        "varepsilon",
    ),
    *("Big", "cdot", "cdots", "dfrac", "frac", "ge", "infty", "langle", "le", "rangle", "sqrt", "sum", "text"),
    *("top", ",", "|", "{", "}"),
}
"""Commands that KaTeX knows, of which a new formula may need more: add it here once it was seen in a browser."""


def formulas(markdown: str) -> list[str]:
    """What stands between dollars, as remark-math reads it: `$$` on a line of its own, or `$` within a paragraph."""
    found, rest = [], []
    for paragraph in re.split(r"\n\s*\n", markdown):
        lines = paragraph.strip("\n").split("\n")
        if lines[0] == "$$" and lines[-1] == "$$" and len(lines) > 2:
            found.append("\n".join(lines[1:-1]))
        else:
            rest.append(paragraph)
    for paragraph in rest:
        assert "$$" not in paragraph, f"a displayed formula needs its own lines: {paragraph!r}"
        assert paragraph.count("$") % 2 == 0, f"an odd number of dollars: {paragraph!r}"
        found += re.findall(r"\$([^$]+)\$", paragraph)
    return found


def test_there_is_an_explanation_for_every_chart() -> None:
    assert len(EXPLANATIONS) >= 12
    assert all("**What this shows.**" in one for one in EXPLANATIONS.values())


@pytest.mark.parametrize("name", EXPLANATIONS)
def test_formulas_are_formulas_and_text_is_text(name: str) -> None:
    for formula in formulas(EXPLANATIONS[name]):
        assert set(re.findall(r"\\([A-Za-z]+|.)", formula)) <= KATEX, formula
        bare = re.sub(r"\\[{}]", "", formula)
        assert bare.count("{") == bare.count("}"), formula
        assert "**" not in formula
    outside = re.sub(r"\$[^$]+\$", "", EXPLANATIONS[name].replace("$$", "$"))
    assert "\\" not in outside, f"a formula without dollars: {outside!r}"


@pytest.mark.parametrize("broken", ["a\n$$x\ny$$\nb", "costs $5", "**a** $x$ and $y"])
def test_the_check_of_formulas_finds_broken_ones(broken: str) -> None:
    with pytest.raises(AssertionError):
        formulas(broken)
