"""The verdict: a table of findings and the sentences that they make, and sentences held against what was measured."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from command_line import Run, document
from lanes import rows
from tiny_text import write_text_suite

from featcal.evaluation.comparison import Comparison, Counts, Difference, compare_scores
from featcal.evaluation.evaluate import Scores
from featcal.family.opening import open_family
from featcal.figures import ledger_tables, tables
from featcal.figures.verdict import sentences
from featcal.figures.verdict.findings import Findings, LayerFinding
from featcal.figures.verdict.measure import diagnose_model, examine, repair_of
from featcal.figures.verdict.sentences import Verdict, judge_numbers
from featcal.session.fits import Fits
from featcal.session.session import Session
from featcal.suite.schema import load_suite
from featcal.suite.views import DriftOptions, EvaluationSamples
from featcal.system.errors import NumericalError


def between(a: float, b: float, low: float, high: float, p: float = 0.0) -> Difference:
    """From a score to another; p 0 stands for 20 answers that all changed one way, 1 for as many in both."""
    turned = Counts(10, 10, 0, 0) if p else Counts(20, 0, 0, 0)
    return Difference("accuracy", 100, a, b, low, high, turned)


def compared(average: Difference, **tasks: Difference) -> Comparison:
    return Comparison("suite", "validation", "a", "b", 5000, 42, tasks or {"only": average}, average)


LAYERS = (
    LayerFinding("embeddings", 0.0, 0.0, 0.0),
    LayerFinding("block 0", 0.4, 0.25, 0.0),
    LayerFinding("block 1", 0.6, 0.2, 0.31),
)
HURT = Findings(
    "The merge",
    "100 validation samples per task",
    "accuracy",
    lost=compared(
        between(0.95, 0.7, -0.3, -0.2),
        cats=between(0.9, 0.8, -0.2, -0.05),
        dogs=between(1.0, 0.6, -0.5, -0.3),
    ),
    gained=compared(between(0.5, 0.7, 0.1, 0.3)),
    taught=compared(between(0.5, 0.95, 0.4, 0.5), cats=between(0.5, 0.9, 0.3, 0.5), dogs=between(0.5, 1.0, 0.4, 0.6)),
    layers=LAYERS,
    final=0.73,
    repaired=compared(between(0.7, 0.8, 0.05, 0.15)),
    repaired_final=0.5,
    repair_samples="64",
)
"""A merge that lost much, and is repaired in part."""
EVERY = {
    "kept": "The merge keeps 74 % of its experts' accuracy: 70.0 % on average over 2 tasks, the experts 95.0 % "
    "(-25.0 points, -30.0 to -20.0).",
    "base": "The base model scores 50.0 %, so merging has gained something (+20.0 points, +10.0 to +30.0).",
    "worst": "Worst task: 'dogs', 60.0 %, its expert 100.0 % (-40.0 points, -50.0 to -30.0).",
    "drift": "Final features differ from the experts' by 73 % of the expert feature's norm.",
    "cause": "Block 1 causes the largest part of it, 60 %, then block 0 with 40 %; most of the drift after block 1 is "
    "inherited: 0.31 from earlier layers, 0.20 its own mismatch.",
    "repair": "Calibrating with 64 samples per task raises the average accuracy to 80.0 % (+10.0 points, +5.0 to "
    "+15.0), which closes 40 % of the gap to the experts.",
    "repaired drift": "It lowers the final drift: from 0.73 to 0.50.",
    "next": "Next: repair it; a calibration needs neither labels nor training.",
    "samples": "Measured on 100 validation samples per task; 95 % bootstrap intervals over these samples.",
}
HEALTHY = replace(
    HURT,
    lost=compared(
        between(0.95, 0.94, -0.03, 0.01), cats=between(0.9, 0.9, 0, 0), dogs=between(1.0, 0.98, -0.04, 0.0, p=1)
    ),
    repaired=compared(between(0.94, 0.945, -0.01, 0.02)),
)
SWAPPED = replace(
    HURT,
    taught=compared(
        between(0.5, 0.7, 0.1, 0.3),
        cats=between(0.5, 0.3, -0.3, -0.1),
        dogs=between(0.5, 0.45, -0.15, 0.05),
        birds=between(0.4, 0.9, 0.4, 0.6),
    ),
)
SCALE_2 = replace(
    HURT,
    lost=compared(between(0.95, 0.12, -0.9, -0.8)),
    gained=compared(between(0.65, 0.12, -0.6, -0.5)),
    repaired=compared(between(0.12, 0.41, 0.2, 0.35)),
    final=1.41,
    repaired_final=1.04,
)
NOISY = replace(
    HURT,
    gained=compared(between(0.65, 0.7, -0.01, 0.08)),
    repaired=compared(between(0.7, 0.71, 0.001, 0.02, p=1)),
    layers=(LayerFinding("block 0", 1.0, 0.3, 0.29),),
)
WORSE = replace(HURT, repaired=compared(between(0.7, 0.6, -0.15, -0.05)), repaired_final=0.8)
BETTER = replace(HURT, lost=compared(between(0.9, 0.95, 0.02, 0.08)), repaired=None, repaired_final=None)
LEFT_ONE = replace(HEALTHY, lost=compared(between(0.95, 0.94, -0.03, 0.01), dogs=between(1.0, 0.8, -0.3, -0.1)))
UNSCORED = Findings("The merge", "9 samples", no_scores="no labels", layers=LAYERS, final=0.73, repaired_final=0.5)
EXPERT = replace(HEALTHY, layers=(), final=0.0, repaired=None, repaired_final=None)
TABLE: Mapping[str, tuple[Findings, str, Mapping[str, str]]] = {
    "hurt": (HURT, sentences.REPAIR, EVERY),
    "healthy": (
        HEALTHY,
        sentences.NOTHING,
        {
            "kept": "The merge keeps what its experts know: accuracy 94.0 % on average over 2 tasks, the experts "
            "95.0 % (-1.0 points, -3.0 to +1.0, within noise).",
            "worst": "No task loses more than noise; 'dogs' loses most (-2.0 points, -4.0 to +0.0).",
            "repair": "Calibrating with 64 samples per task changes the average accuracy to 94.5 % (+0.5 points, -1.0 "
            "to +2.0), which is within noise.",
            "next": "Next: nothing needs repair.",
        },
    ),
    "an expert swapped": (
        SWAPPED,
        sentences.CHECK,
        {
            "experts": "Check the file of the expert of cats (30.0 %, base 50.0 %) and the expert of dogs (45.0 %, "
            "base 50.0 %, within noise): on its own task an expert should be better than the base model.",
            "next": "Next: check the expert of cats, dogs, before anything is repaired.",
        },
    ),
    "scale 2": (
        SCALE_2,
        sentences.MERGE,
        {
            "kept": "The merge keeps 13 % of its experts' accuracy: 12.0 % on its only task, the experts 95.0 % "
            "(-83.0 points, -90.0 to -80.0).",
            "base": "The base model scores 65.0 %, so merging has done harm (-53.0 points, -60.0 to -50.0), as it "
            "does where its scale is too large.",
            "drift": "Final features differ from the experts' by 141 % of the expert feature's norm (no features at "
            "all would be nearer).",
            "next": "Next: merge again with a smaller scale; even calibrated it is below the base model.",
        },
    ),
    "within noise": (
        NOISY,
        sentences.OPTIONS,
        {
            "base": "Merging gains 5.0 points against the base (65.0 %), within noise (-1.0 to +8.0).",
            "cause": "Block 0 causes the largest part of it, 100 %; the drift after block 0 is as much inherited "
            "(0.29) as its own mismatch (0.30).",
            "repair": "Calibrating with 64 samples per task changes the average accuracy to 71.0 % (+1.0 points, +0.1 "
            "to +2.0), which is within noise.",
            "next": "Next: try other options; with these, the gain of calibration is within noise.",
        },
    ),
    "embeddings": (
        replace(HURT, layers=(LayerFinding("embeddings", 0.7, 0.5, 0.0), LayerFinding("block 0", 0.3, 0.2, 0.4))),
        sentences.REPAIR,
        {
            "cause": "Embeddings cause the largest part of it, 70 %, then block 0 with 30 %; all the drift after "
            "embeddings (0.50) is its own mismatch, since nothing comes in."
        },
    ),
    "calibration harms": (
        WORSE,
        sentences.OPTIONS,
        {
            "repair": "Calibrating with 64 samples per task does harm: it lowers the average accuracy to 60.0 % (-10.0 "
            "points, -15.0 to -5.0).",
            "repaired drift": "It does not lower the final drift: from 0.73 to 0.80.",
            "next": "Next: try other options; with these, calibration does harm.",
        },
    ),
    "better than its experts": (
        BETTER,
        sentences.NOTHING,
        {
            "kept": "The merge is better than its experts: accuracy 95.0 % on its only task, the experts 90.0 % "
            "(+5.0 points, +2.0 to +8.0)."
        },
    ),
    "healthy on average": (
        LEFT_ONE,
        sentences.NOTHING,
        {"next": "Next: nothing needs repair on average; look at dogs before you hand the model on."},
    ),
    "no labels": (
        UNSCORED,
        sentences.REPAIR,
        {
            "kept": "There are no scores, so what follows is of features alone: no labels",
            "repaired drift": "Calibrating lowers the final drift: from 0.73 to 0.50.",
        },
    ),
    "no labels, no gain": (
        replace(UNSCORED, repaired_final=0.8),
        sentences.OPTIONS,
        {"next": "Next: try other options; with these, calibration does not lower the drift."},
    ),
    "an expert below the base within noise": (
        replace(HURT, taught=compared(between(0.5, 0.95, 0.4, 0.5), cats=between(0.5, 0.49, -0.1, 0.08))),
        sentences.REPAIR,
        {
            "experts": "Check the file of the expert of cats (49.0 %, base 50.0 %, within noise): on its own task an "
            "expert should be better than the base model."
        },
    ),
    "an expert itself": (
        EXPERT,
        sentences.NOTHING,
        {"drift": "The final features are those of the experts: nothing drifts."},
    ),
}


def said(verdict: Verdict) -> dict[str, str]:
    return {one.about: one.text for one in verdict.sentences}


@pytest.mark.parametrize("case", TABLE)
def test_the_table_of_sentences(case: str) -> None:
    found, step, expected = TABLE[case]
    verdict = judge_numbers(found)
    words = said(verdict)
    assert {about: words.get(about) for about in expected} == expected
    assert verdict.next == step
    assert 3 <= len(verdict.lines) <= 10
    assert Verdict.from_json(verdict.to_json()) == verdict


def test_nothing_is_said_of_what_is_not_measured() -> None:
    assert judge_numbers(Findings("The merge", whole=False)).lines == ()
    early = judge_numbers(replace(HURT, layers=(), final=None, repaired=None, repaired_final=None, whole=False))
    assert list(said(early)) == ["kept", "base", "worst"]
    assert list(said(judge_numbers(HURT))) == list(EVERY)
    late = judge_numbers(replace(HURT, repaired=None, repaired_final=None, no_repair="it takes about 2 h."))
    assert said(late)["repair"] == "The gain of calibration is not measured: it takes about 2 h."
    assert late.next == sentences.REPAIR
    other = judge_numbers(replace(HURT, repaired=None, repaired_final=None, repairable=False))
    assert (other.next, said(other)["next"]) == (
        sentences.NOTHING, "Next: nothing; only a merge that is not calibrated yet is repaired."
    )  # fmt: skip


def test_a_folder_is_called_by_its_name_and_not_by_its_path(tiny_session: Session) -> None:
    folder = tiny_session.family.suite.root / "experts" / tiny_session.tasks[0]
    found = next(examine(tiny_session, str(folder), EvaluationSamples(2), unscored="not asked"))
    assert (found.model, next(examine(tiny_session, "ties", EvaluationSamples(2), unscored="not asked")).model) == (
        folder.name, "ties"
    )  # fmt: skip


def test_what_is_booked_adds_up_where_a_task_does_not_drift(tiny_session: Session) -> None:
    """An expert on its own task: nothing there has a share of nothing."""
    task = tiny_session.tasks[0]
    ledger = tiny_session.measure.drift(f"expert:{task}", DriftOptions(8, attribution=True))
    frame = ledger_tables.attribution_table(ledger, tables.ALL_TASKS)
    assert float(frame["final"][0]) > 0
    assert float(frame["contribution"].sum()) == pytest.approx(float(frame["final"][0]), rel=1e-4)
    assert not ledger_tables.attribution_table(ledger, task)["contribution"].any()


def test_sentences_need_no_torch() -> None:
    code = "import sys, featcal.figures.verdict.sentences; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def scored(session: Session, model: str, on: EvaluationSamples) -> Scores:
    return session.measure.scores(model, on)


def assert_scored(session: Session, on: EvaluationSamples, verdict: Verdict, model: str = "merged") -> None:
    """Every score and difference is that of a measurement made by itself, and stands in the words."""
    found = {one.about: one for one in verdict.sentences}
    repair = repair_of(session, model)
    assert repair is not None
    own, base, expert = (scored(session, name, on) for name in (model, "base", "expert"))
    for about, a, b in (("kept", expert, own), ("base", base, own), ("repair", own, scored(session, repair.name, on))):
        average, numbers = compare_scores(a, b).average, list(found[about].numbers.values())
        assert numbers[:5] == pytest.approx([a.average, b.average, b.average - a.average, average.low, average.high])
        assert numbers[5] is average.is_within_noise
        assert f"{100 * b.average + 1e-9:.1f} %" in found[about if about != "base" else "kept"].text
    lost = {task: one.value - expert.tasks[task].value for task, one in own.tasks.items()}
    assert lost[str(found["worst"].numbers["task"])] == min(lost.values()) == found["worst"].numbers["difference"]


def assert_measured(session: Session, on: EvaluationSamples, verdict: Verdict, model: str = "merged") -> None:
    """Every number about drift is that of a measurement made by itself, and stands in the words."""
    found = {one.about: one for one in verdict.sentences}
    repair = repair_of(session, model)
    assert repair is not None
    ledger = session.measure.drift(model, DriftOptions(on.samples, on.split, on.seed, attribution=True))
    booked = ledger_tables.attribution_table(ledger, tables.ALL_TASKS)
    most = booked.loc[booked["share"].idxmax()]
    assert booked["contribution"].sum() == pytest.approx(most["final"], rel=1e-4)  # the waterfall adds up (Prop. 2)
    assert found["drift"].numbers == {"final": pytest.approx(most["final"])}
    assert (found["cause"].numbers["layer"], found["cause"].numbers["share"]) == (
        most["layer"],
        pytest.approx(most["share"]),
    )
    largest = f"{most['layer']} causes the largest part of it, {100 * most['share']:.0f} %"
    assert largest in found["cause"].text[0].lower() + found["cause"].text[1:]
    layers = tables.layer_rows(tables.drift_table(ledger), tables.ALL_TASKS, relative=True).set_index("layer")
    assert found["cause"].numbers["mismatch"] == layers["mismatch"][most["layer"]]
    assert found["cause"].numbers["propagation"] == layers["propagation"][most["layer"]]
    after = tables.relative_drift_table(session.measure.features(repair.name, on)).iloc[-1]
    assert found["repaired drift"].numbers == {"final": pytest.approx(most["final"]), "calibrated": after}
    assert len(verdict.lines) <= 10


@pytest.fixture(params=rows(("clip", "t5", "llama"), quick=["clip"], slow=["t5", "llama"]))
def tiny_session(request: pytest.FixtureRequest, tiny_suite_file: Path, tmp_path: Path) -> Session:
    """A session of a tiny suite of a family."""
    file = tiny_suite_file if request.param == "clip" else write_text_suite(tmp_path / "suite", request.param)
    return Session(open_family(load_suite(file), "cpu"))


def test_sentences_are_the_measured_numbers(tiny_session: Session) -> None:
    on = EvaluationSamples(8)
    steps = list(examine(tiny_session, "merged", on, repair_of(tiny_session, "merged")))
    verdict = judge_numbers(steps[-1])
    assert [one.whole for one in steps] == [False, False, True]
    assert [one.final is not None for one in steps] == [False, True, True]
    for before, after in pairwise(judge_numbers(one).lines for one in steps):  # a command prints them one by one
        assert after[: len(before)] == before
    assert_measured(tiny_session, on, verdict)
    if tiny_session.is_text:  # their samples are tokens without answers
        assert "There are no scores" in verdict.lines[0]
    else:
        assert_scored(tiny_session, on, verdict)


@pytest.mark.slow
@pytest.mark.parametrize("suite", ["clip-mini", "t5-mini", "lm-mini"])
def test_sentences_about_the_embedded_suites(suite: str) -> None:
    session, on = Session(open_family(load_suite(suite), "cpu")), EvaluationSamples(64)
    verdict = diagnose_model(session, "merged", on, repair_of(session, "merged"))
    assert_measured(session, on, verdict)
    assert_scored(session, on, verdict)
    assert verdict.next == sentences.REPAIR
    assert "within noise" not in said(verdict)["kept"] + said(verdict)["repair"]


@pytest.mark.slow
def test_what_is_wrong_is_said_of_the_embedded_suite() -> None:
    session, on = Session(open_family(load_suite("clip-mini"), "cpu")), EvaluationSamples(64)
    twice = "task-arithmetic:scale=2"
    verdict = diagnose_model(session, twice, on, repair_of(session, twice))
    assert verdict.next == sentences.MERGE
    assert "no features at all would be nearer" in said(verdict)["drift"]
    suite = load_suite("clip-mini")
    tasks = dict(suite.tasks)
    digits, letters = tasks["digits"], tasks["letters"]
    tasks["digits"] = digits.model_copy(update={"expert": letters.expert})
    tasks["letters"] = letters.model_copy(update={"expert": digits.expert})
    swapped = diagnose_model(Session(open_family(suite.model_copy(update={"tasks": tasks}), "cpu")), "merged", on)
    assert swapped.next == sentences.CHECK
    assert re.findall(r"the expert of (\w+)", said(swapped)["experts"]) == ["digits", "letters"]
    one = suite.model_copy(update={"tasks": {"colors": suite.tasks["colors"]}})
    healthy = diagnose_model(Session(open_family(one, "cpu")), "task-arithmetic:scale=0.9", on)
    assert healthy.next == sentences.NOTHING


def test_what_is_known_is_printed_before_the_calibration(
    run: Run, tiny_suite_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise NumericalError("no trustworthy solution")

    monkeypatch.setattr(Fits, "record", fail)
    code, out, err = run("diagnose", tiny_suite_file, "--eval-samples", "4")
    assert (code, out.count("Final features differ"), out.count("Calibrating")) == (1, 1, 0)
    assert "no trustworthy solution" in err


def test_a_command_prints_the_lines(run: Run, tiny_suite_file: Path) -> None:
    asked = ("diagnose", tiny_suite_file, "--eval-samples", "4")
    code, out, _ = run(*asked)
    assert code == 0
    session = Session(open_family(load_suite(tiny_suite_file), "cpu"))
    verdict = diagnose_model(session, "merged", EvaluationSamples(4), repair_of(session, "merged"))
    assert out.splitlines() == list(verdict.lines)
    several = document(run(*asked, "--model", "merged", "--model", "base", "--json"))["models"]
    assert [one["model"] for one in several] == ["merged", "base"]
    assert several[0]["sentences"] == verdict.to_json()["sentences"]
    assert (several[0]["split"], several[0]["samples"], several[0]["next"]) == ("validation", 4, verdict.next)
    assert "base" not in {one["about"] for one in several[1]["sentences"]}  # nothing is to be said of base and base
    code, _, err = run(*asked, "--out", "report.html")
    assert code == 2
    assert "leave out --base, --expert" in err
