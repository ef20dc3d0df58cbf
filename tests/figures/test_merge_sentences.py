"""Sentences about a merge that someone else made, from numbers alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from featcal.family.ingredients import LayerContents, Makeup
from featcal.figures.verdict.faults import FILES, Commands, MergeFindings, judge_merge
from featcal.figures.verdict.findings import Findings, LayerFinding
from featcal.figures.verdict.sentences import MERGE, NOTHING, OPTIONS, REPAIR, Verdict
from featcal.preflight.beside_weights import FileDifference

COMMANDS = Commands("cp a b/", "merge again", "merge smaller", "calibrate", "select")
FEATURES = Findings(
    "The merge", "6 texts", layers=(LayerFinding("block 0", 0.7, 0.3, 0.1),), final=0.3, repaired_final=0.2
)
WRONG = FileDifference("rope", "Rotary positions differ.", True, ("config.json",))


def contents(moved: float = 1.0, rounding: float = 0.0, explained: float = 1.0, **coefficients: float) -> Makeup:
    parts = {task: abs(weight) * 2 * moved for task, weight in coefficients.items()}
    layer = LayerContents("block 0", coefficients, moved, 1.5, explained, 10.0, rounding, (), False, parts)
    return Makeup((layer,) * 3)


def findings(given: Makeup, **options: Any) -> MergeFindings:
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
            "use it as it is, or calibrate it, which moves it closer to the experts: calibrate",
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


def test_weights_that_were_lost_are_not_found_by_a_smaller_scale() -> None:
    own = judge_merge(findings(contents(a=0.5, b=0.01), stated=None, method=""))
    assert own.next == MERGE
    assert said(own)["next"].startswith("Next: calibration cannot mend this; merge again: merge")


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
        ({"a": 0.06, "b": 0.06}, {"a": 0.06, "b": 0.06}, True, set()),  # a small scale is no loss
        ({"a": 0.06, "b": 0.06}, None, False, set()),  # nor a small t
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


FAR = tuple(replace(HEALTHY.layers[0], layer=f"block {i}", moved=10.0 if i == 2 else 1.0) for i in range(5))


def test_a_layer_that_lies_far_is_a_fault_unless_its_recipe_asks_for_it() -> None:
    far = replace(HEALTHY, layers=FAR)
    fault = judge_merge(findings(far))
    assert said(fault)["far"] == (
        "block 2 lies 10 times as far from the base as the other layers: it was not merged as they were."
    )
    assert (fault.next, fault.sentences[0].numbers["broken"]) == (MERGE, True)
    asked = judge_merge(findings(far, stated=None, is_exact=False, is_uneven=True))
    assert said(asked)["uneven"] == (
        "block 2 lies 10 times as far from the base as the other layers; its recipe gives layers values of their own."
    )
    assert (asked.next, "far" in said(asked), asked.sentences[0].numbers["broken"]) == (REPAIR, False, False)


def test_a_layer_of_model_stock_is_held_against_its_own_share() -> None:
    asked = replace(HEALTHY, layers=tuple(replace(one, stocked=one.moved, stock=0.5) for one in FAR))
    stock = {"stated": None, "is_exact": False, "method": "model_stock"}
    assert judge_merge(findings(asked, **stock)).sentences[0].numbers["broken"] is False
    even = replace(HEALTHY, layers=tuple(replace(one, stocked=1.0, stock=0.5) for one in FAR))
    assert said(judge_merge(findings(even, **stock)))["far"] == (
        "block 2 lies 10 times as far from the base as the other layers, each measured by its share in model_stock: it "
        "was not merged as they were."
    )


def test_an_expert_of_some_layers_alone_is_not_absent_where_the_recipe_says_so() -> None:
    layers = [replace(one, coefficients={"a": 1.0, "b": b}, parts={"a": 1.0, "b": b}) for one, b in zip(
        contents().layers, (0.0, 0.0, 1.0), strict=True
    )]  # fmt: skip
    partly = replace(contents(), layers=tuple(layers))
    assert "absent" in said(judge_merge(findings(partly, stated=None)))
    assert "absent" not in said(judge_merge(findings(partly, stated=None, is_uneven=True)))
    never = contents(a=1.0, b=0.0)
    assert "absent" in said(judge_merge(findings(never, stated=None, is_uneven=True)))


@pytest.mark.parametrize(
    ("method", "is_uneven", "why"),
    [
        ("task_arithmetic", False, ""),
        ("task_arithmetic", True, ", since its recipe gives tensors values of their own"),
        ("ties", True, ", which ties does to single values"),
        ("dare_linear", False, ", which dare_linear does to single values"),
        ("slerp", False, ", since slerp keeps lengths, which no sum does"),
    ],
)
def test_only_what_the_method_does_is_laid_to_it(method: str, is_uneven: bool, why: str) -> None:
    given = findings(
        contents(explained=0.8, a=0.5, b=0.25), stated=None, is_exact=False, method=method, is_uneven=is_uneven
    )
    assert said(judge_merge(given))["contents"].endswith(f"60 % of its way from the base is no sum of theirs{why}.")


def test_rounding_of_the_merge_itself_is_named() -> None:
    rounded = replace(contents(explained=0.8, rounding=0.5, a=0.5, b=0.25), computed="bfloat16")
    text = said(judge_merge(findings(rounded, stated=None, is_exact=False)))["contents"]
    assert text.endswith("is no sum of theirs, but rounding to bfloat16, in which it was merged.")


def test_model_stock_that_is_nearly_the_base_is_not_merged_again_by_its_recipe() -> None:
    near = contents(moved=0.1, explained=0.02, a=0.01, b=0.01)
    near = replace(near, layers=tuple(replace(one, stock=0.02) for one in near.layers))
    verdict = judge_merge(findings(near, stated=None, is_exact=False, method="model_stock"))
    text = said(verdict)
    assert verdict.sentences[0].numbers["broken"] is False
    assert text["state"] == "m is as its method makes it, and that is nearly the base."
    assert text["stock"] == (
        "model_stock goes 0.02 of the way from the base to the experts' mean, by the angle between their task vectors: "
        "at right angles it stays at the base; merging again gives the same, and task_arithmetic, ties or linear would "
        "not."
    )
    assert (verdict.next, "absent" in text) == (MERGE, False)
    assert text["next"] == "Next: merge by a method that does not go by the angle: merge smaller"
    # Where the rule asks for more, it is what another method's would be.
    alike = replace(near, layers=tuple(replace(one, stock=0.8) for one in near.layers))
    found = judge_merge(findings(alike, stated=None, is_exact=False, method="model_stock"))
    assert found.sentences[0].numbers["broken"] is True
    assert "merging again" not in said(found)["stock"]
    assert "absent" not in said(judge_merge(findings(contents(a=0.4, b=0.4), stated=None, method="model_stock")))
    exact = replace(near, layers=tuple(replace(one, moved=0.0) for one in near.layers))
    assert judge_merge(findings(exact, stated=None, method="model_stock")).sentences[0].numbers["broken"] is False


def test_without_a_base_nothing_is_said_of_it() -> None:
    unknown = replace(contents(a=0.75, b=0.25), start="the expert 'a'", is_base_known=False)
    given = {"base_finals": {}, "stated": {"a": 0.75, "b": 0.25}, "method": "linear"}
    text = said(judge_merge(findings(unknown, **given)))
    assert text["contents"] == "By its weights it is 0.75 of 'a' and 0.25 of 'b', as its recipe says."
    assert text["files"] == "Tokenizer, chat template and configuration are those of the expert 'a'."
    assert text["worst"] == "Worst task: 'b'; features differ from the expert's by 30 % of their norm."
    assert "no recipe names it" in text["origin"]
    assert "rho 1" in text["origin"]
    missed = said(judge_merge(findings(unknown, **given, missed_base="me/gone")))["origin"]
    assert "its experts name 'me/gone', which is neither on this machine nor available from the Hub" in missed
    assert "the base is" not in " ".join(text.values())
    far = findings(unknown, **given, finals={"a": 1.5, "b": 1.0})
    assert "no features at all would be nearer" in said(judge_merge(far))["state"]
    start = replace(unknown, layers=tuple(replace(one, moved=0.0) for one in unknown.layers))
    assert (
        said(judge_merge(findings(start, **given)))["absent"]
        == "Its weights are those of the expert 'a': nothing was merged."
    )


def test_a_base_that_was_looked_up_is_named() -> None:
    text = said(judge_merge(findings(HEALTHY, found_base="me/base")))["origin"]
    assert text == "Its base is 'me/base': the recipe names none, and all its experts name this one."
    assert "origin" not in said(judge_merge(findings(HEALTHY)))


def test_whole_layers_of_an_expert_are_not_too_little_of_it() -> None:
    layers = [replace(one, coefficients=own) for one, own in zip(
        contents().layers, ({"a": 1.0, "b": 0.0}, {"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}), strict=True
    )]  # fmt: skip
    spliced = replace(contents(), layers=tuple(layers))
    verdict = judge_merge(findings(spliced, stated=None, method="passthrough"))
    assert verdict.sentences[0].numbers["broken"] is False
    assert said(verdict)["contents"] == "By its weights it is whole layers of its experts: 2 of 'a' and 1 of 'b'."
    assert judge_merge(findings(spliced, stated=None, method="linear")).sentences[0].numbers["broken"] is True
