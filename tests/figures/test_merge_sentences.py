"""Sentences about a merge that someone else made, from numbers alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from featcal.family.ingredients import Contents, LayerContents
from featcal.figures.verdict.faults import FILES, Commands, MergeFindings, judge_merge
from featcal.figures.verdict.findings import Findings, LayerFinding
from featcal.figures.verdict.sentences import MERGE, NOTHING, OPTIONS, REPAIR, Verdict
from featcal.preflight.beside_weights import Difference

COMMANDS = Commands("cp a b/", "merge again", "merge smaller", "calibrate", "select")
FEATURES = Findings(
    "The merge", "6 texts", layers=(LayerFinding("block 0", 0.7, 0.3, 0.1),), final=0.3, repaired_final=0.2
)
WRONG = Difference("rope", "Rotary positions differ.", True, ("config.json",))


def contents(moved: float = 1.0, rounding: float = 0.0, explained: float = 1.0, **coefficients: float) -> Contents:
    layer = LayerContents("block 0", coefficients, moved, 1.5, explained, 10.0, rounding, (), False)
    return Contents((layer,) * 3)


def findings(given: Contents, **options: Any) -> MergeFindings:
    plain = MergeFindings(
        "m", (), given, COMMANDS, {"a": 0.5, "b": 0.25}, True, "task_arithmetic", (), FEATURES,
        finals={"a": 0.2, "b": 0.3}, base_finals={"a": 0.4, "b": 0.4}, drift={"block 0": 0.1, "head": 0.25},
    )  # fmt: skip
    return replace(plain, **options)


def said(verdict: Verdict) -> dict[str, str]:
    return {one.about: one.text for one in verdict.sentences}


HEALTHY = contents(a=0.5, b=0.25)


@pytest.mark.parametrize(
    ("options", "step", "command", "state"),
    [
        (
            {},
            REPAIR,
            "use it as it is, or calibrate it, which brings it nearer to the experts: calibrate",
            "is healthy",
        ),
        ({"features": replace(FEATURES, repaired_final=0.4)}, OPTIONS, "other options may: select", "is healthy"),
        ({"features": replace(FEATURES, final=0.0)}, NOTHING, "nothing needs repair.", "is healthy"),
        ({"differences": (WRONG,)}, FILES, "copy the base's files: cp a b/", "sound in its weights; the files"),
        ({"finals": {"a": 0.5, "b": 0.5}}, REPAIR, "Next: calibrate it", "the base is nearer to the experts"),
        (
            {"finals": {"a": 0.9, "b": 1.2}, "base_finals": {"a": 2.0, "b": 2.0}},
            REPAIR,
            "Next: calibrate it",
            "no features at all",
        ),
        ({"features": None, "failure": "head: inf"}, MERGE, "with a smaller scale: merge smaller", "is not finite"),
    ],
)
def test_numbers_decide_what_is_said_and_what_is_next(
    options: dict[str, Any], step: str, command: str, state: str
) -> None:
    verdict = judge_merge(findings(HEALTHY, **options))
    assert verdict.next == step
    assert command in said(verdict)["next"]
    assert state in said(verdict)["state"]


def test_a_scale_that_the_recipe_asks_for_is_not_merged_by_it_again() -> None:
    given = contents(explained=15.0, moved=15.0, a=5.0, b=2.5)
    own = said(judge_merge(findings(given, stated={"a": 5.0, "b": 2.5})))
    assert own["scale"].endswith("10.0 times as far from the base as the sum of their task vectors does.")
    assert own["next"].endswith("merge again with a smaller scale: merge smaller")
    other = said(judge_merge(findings(given)))
    assert other["scale"].endswith("as the sum of their task vectors does, 10.0 times as far as its recipe says.")
    assert other["next"].endswith("merge again: merge again")
    less = said(judge_merge(findings(contents(a=0.25, b=0.125))))
    assert "carry it 0.50 times as far" in less["scale"]


@pytest.mark.parametrize(
    ("coefficients", "stated", "is_exact", "found"),
    [
        ({"a": 0.5, "b": 0.25}, {"a": 0.5, "b": 0.5}, False, set()),  # one value that is off is no exchange
        ({"a": 0.9, "b": 0.6}, {"a": 0.5, "b": 0.25}, False, set()),  # what trimming does
        ({"a": 0.5, "b": 0.01}, {"a": 0.5, "b": 0.01}, True, set()),  # meant to be faint
        ({"a": 0.5, "b": 0.01}, None, False, {"absent"}),
        ({"a": 0.45, "b": 0.9}, {"a": 0.5, "b": 0.25}, False, {"swapped"}),
        ({"a": -0.5, "b": 0.5}, {"a": -0.5, "b": 0.5}, True, set()),
        ({"a": 0.02, "b": 0.01}, {"a": 0.5, "b": 0.25}, True, {"absent"}),
    ],
)
def test_amounts_are_held_against_the_recipe(
    coefficients: dict[str, float], stated: dict[str, float] | None, is_exact: bool, found: set[str]
) -> None:
    verdict = judge_merge(findings(contents(**coefficients), stated=stated, is_exact=is_exact))
    assert {one.about for one in verdict.sentences} & {"absent", "swapped", "scale"} == found
    assert verdict.sentences[0].numbers["broken"] == bool(found)


def test_rounding_is_not_taken_for_another_model() -> None:
    rounded = contents(explained=0.8, rounding=0.5, a=0.5, b=0.0)
    own = said(judge_merge(findings(rounded)))
    assert "(0.00 of its task vector)." in own["absent"]
    assert own["contents"].endswith("; 60 % of its way from the base is no sum of theirs, but rounding to its dtype.")
    strange = said(judge_merge(findings(contents(explained=0.8, a=0.5, b=0.0))))
    assert "60 % of its way from the base comes from none of the experts: another model" in strange["absent"]
