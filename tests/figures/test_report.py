"""The report: complete or absent, names are text, nothing is asked of anyone, and its commands give its numbers."""

from __future__ import annotations

import base64
import errno
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from reproducing import document
from suite_edits import Edit
from tiny_text import write_text_suite

from featcal import cli
from featcal.evaluation.evaluate import TaskScore
from featcal.family.opening import Family
from featcal.figures.report import html, svg
from featcal.figures.report.content import ReportTable
from featcal.figures.report.models import name_models
from featcal.figures.report.samples import MOST, SIDE, pick_thumbnails
from featcal.figures.report.write import write_report
from featcal.figures.theme import Shown
from featcal.samples.sources import Samples
from featcal.session.measurements import Measurements
from featcal.session.session import Session
from featcal.suite.views import EvaluationSamples
from featcal.system.errors import InputError
from featcal.system.formatting import exactly, p_value

pytestmark = pytest.mark.slow

HOSTILE = '<script>alert(1)</script>"><img src=x>'
MODELS = ("merged", "calibrated:lam=0.1,rho=1.5,samples=6")
LABELS = ("merged", "calibrated, paper, λ 0.1 ρ 1.5 n 6")
"""What charts call them."""


@dataclass
class Page(HTMLParser):
    """A page taken apart: its elements with their attributes, and what stands in them."""

    elements: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    inner: list[tuple[str, dict[str, str | None], list[str]]] = field(default_factory=list)
    words: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._open: list[tuple[str, dict[str, str | None], list[str]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in ("script", "style", "pre"):
            self._open.append((tag, dict(attrs), []))

    def handle_endtag(self, tag: str) -> None:
        if self._open and self._open[-1][0] == tag:
            self.inner.append(self._open.pop())

    def handle_data(self, data: str) -> None:
        (self._open[-1][2] if self._open else self.words).append(data)

    def inside(self, tag: str, **having: str) -> list[str]:
        return ["".join(text) for name, own, text in self.inner if name == tag and having.items() <= own.items()]

    @property
    def figures(self) -> dict[str, Any]:
        (found,) = self.inside("script", id="figures")
        figures: dict[str, Any] = json.loads(found)
        return figures


def parsed(file: Path) -> Page:
    page = Page()
    page.feed(file.read_text(encoding="utf-8"))
    page.close()
    return page


@pytest.fixture(scope="module")
def report(tiny_suite_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Page:
    out = tmp_path_factory.mktemp("reports") / "report.html"
    models = [word for model in MODELS for word in ("--model", model)]
    arguments = ["report", str(tiny_suite_file), *models, "--eval-samples", "6", "--out", str(out), "--json"]
    said = CliRunner().invoke(cli.featcal_command, arguments, catch_exceptions=False)
    document = json.loads(said.stdout)
    verdict = document.pop("verdict")
    assert document == {"out": str(out), "figures": [], "bytes": out.stat().st_size, "notes": []}
    assert sorted(out.parent.iterdir()) == [out]
    page = parsed(out)
    assert page.words[page.words.index(verdict[0]) :][: len(verdict)] == verdict
    return page


@pytest.fixture(scope="module")
def session(tiny: Family) -> Session:
    return Session(tiny)


def addresses(page: Page) -> Iterator[str]:
    """Everything in a page that a browser might fetch or go to."""
    for _, attributes in page.elements:
        for name in ("src", "href", "srcset", "action", "formaction", "data", "poster", "xlink:href", "ping"):
            if name in attributes:
                yield str(attributes[name])
        yield from re.findall(r"url\(([^)]*)\)", str(attributes.get("style", "")))
    for style in page.inside("style"):
        assert "@import" not in style
        yield from re.findall(r"url\(([^)]*)\)", style)


def test_no_request_is_possible(report: Page) -> None:
    assert {one for one in addresses(report) if not one.startswith(("#", "data:"))} == set()
    assert not {"link", "iframe", "object", "embed", "base", "form"} & {tag for tag, _ in report.elements}
    (policy,) = (one["content"] for tag, one in report.elements if one.get("http-equiv") == "Content-Security-Policy")
    rules = dict(rule.strip().split(" ", 1) for rule in str(policy).split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["img-src"] == "data: blob:"
    assert set(rules) == {"default-src", "script-src", "style-src", "img-src", "base-uri", "form-action"}
    assert "unsafe" not in rules["script-src"]
    assert "http" not in str(policy)


def test_a_written_repair_is_judged_as_the_repair_that_it_is(session: Session, tmp_path: Path) -> None:
    """Its record says so: no report on it advises to repair the merge."""
    session.fit.calibrate(MODELS[1]).save(tmp_path / "repaired")
    on, about = EvaluationSamples(8), []
    for number, model in enumerate((MODELS[1], str(tmp_path / "repaired"))):
        out = tmp_path / f"{number}.md"
        about.append(write_report(session, "tiny", out, models=("merged", model), on=on)["verdict"])
        assert "Calibration of" in out.read_text()
    assert about[0] == about[1]


def test_it_is_a_document_for_all(report: Page) -> None:
    tags = [tag for tag, _ in report.elements]
    assert tags.count("h1") == 1
    assert dict(report.elements)["html"]["lang"] == "en"
    charts = [one for tag, one in report.elements if one.get("class") == "chart"]
    assert {one["id"] for one in charts} == set(report.figures)
    assert len(charts) == 6  # scores, drift twice, attribution, a map for each of two tasks
    assert all(one["role"] == "img" and len(str(one["aria-label"])) > 20 for one in charts)
    (style,) = report.inside("style")
    assert "prefers-color-scheme: dark" in style
    assert "@media print" in style
    ids = [one["id"] for _, one in report.elements if "id" in one]
    assert len(ids) == len(set(ids))
    assert {str(one["href"])[1:] for tag, one in report.elements if tag == "a"} <= set(ids)


def test_what_others_wrote_is_text(edit_suite: Edit, tmp_path: Path) -> None:
    def rename(content: dict[str, Any]) -> None:
        for task in content["tasks"].values():
            task["classes"] = [HOSTILE, "dog", "fish"]
        content["tasks"] = {HOSTILE: content["tasks"]["pets"], "signs": content["tasks"]["signs"]}
        content |= {"name": HOSTILE, "description": HOSTILE}

    suite = edit_suite(rename)
    out = tmp_path / "report.html"
    arguments = [
        "report",
        str(suite),
        *("--model", "base", "--model", "merged"),
        "--eval-samples",
        "4",
        "--out",
        str(out),
    ]
    CliRunner().invoke(cli.featcal_command, arguments, catch_exceptions=False)
    page = parsed(out)
    assert [tag for tag, _ in page.elements].count("script") == 3
    assert "img" not in [tag for tag, _ in page.elements]
    assert any(f"{HOSTILE}; base: " in words for words in page.words)  # the class of a sample that turned
    assert HOSTILE in page.words  # suite, task
    drawn = json.dumps(page.figures, ensure_ascii=False)
    assert "&lt;script&gt;" in drawn
    assert "<" not in re.sub(r"<br>|<extra>|</extra>", "", drawn)

    assert CliRunner().invoke(cli.featcal_command, [*arguments[:-1], str(out.with_suffix(".md"))]).exit_code == 0
    text = re.sub(r"(?ms)^```.*?^```", "", out.with_suffix(".md").read_text(encoding="utf-8"))
    assert re.findall(r"(?<!\\)<", text) == []


def test_three_figures_come_from_their_commands(report: Page) -> None:
    blocks = [block.splitlines() for block in report.inside("pre", **{"class": "command"})]
    found = {what: [document(line) for line in lines] for what, lines in zip(PARTS, blocks, strict=True)}
    figures = report.figures

    scores = dict(zip((*LABELS, "base", "expert"), found["scores"], strict=True))
    dots = {one["name"]: one for one in figures["scores"]["data"] if "name" in one}
    assert set(dots) == set(scores)
    for model, one in scores.items():
        values = {task: 100 * found["value"] for task, found in one["tasks"].items()}
        drawn = dict(zip(numbers(dots[model]["customdata"]), numbers(dots[model]["x"]), strict=True))
        assert drawn == pytest.approx({**values, "average": 100 * one["average"]})

    lines = traces(figures["drift"])
    for model, one in zip(LABELS, found["drift"], strict=True):
        layers = np.array([[row["relative_drift"] for row in task["layers"]] for task in one["tasks"].values()])
        assert lines[f"drift, {model}"] == pytest.approx(layers.mean(0), rel=1e-5)

    falls = [one for one in figures["attribution"]["data"] if one["type"] == "waterfall"]
    for trace, one in zip(falls, found["attribution"], strict=True):
        booked = np.array(
            [
                [row["share"] * task["layers"][-1]["relative_drift"] for row in task["layers"]]
                for task in one["tasks"].values()
            ]
        )
        assert trace["y"][-1] is None  # the total
        assert trace["y"][:-1] == pytest.approx(booked.mean(0), rel=1e-4, abs=1e-6)


PARTS = ("scores", "flips", "drift", "attribution", "features")
"""Sections with commands, in their order."""


def traces(figure: dict[str, Any]) -> dict[str, list[float]]:
    """Name → heights; plotly writes numbers as base64 where it has arrays of them."""
    drawn = (one for one in figure["data"] if one["type"] == "scatter")  # of bars two models share a name
    return {one["name"]: numbers(one["y"]) for one in drawn}


def numbers(given: Any) -> list[float]:
    if isinstance(given, dict):
        read: list[float] = np.frombuffer(base64.b64decode(given["bdata"]), given["dtype"]).tolist()
        return read
    return list(given)


def test_settings_say_what_the_numbers_depend_on(report: Page) -> None:
    words = " ".join(report.words)
    for needed in (MODELS[1].split(",")[0], "rho", "patch_weight", "validation", "torch", "model.safetensors"):
        assert needed in words
    assert "None" not in words.split()  # parts that were not chosen
    assert len(re.findall(r"\b[0-9a-f]{64}\b", words)) == 1 + 3  # suite; base and two experts


def drawn(figures: Any, folder: Path) -> dict[str, str]:
    """What `svg.write_figures` does, without a browser."""
    files = {figure.name: f"{figure.name}.svg" for figure in figures}
    for file in files.values():
        (folder / file).write_text("<svg/>")
    return files


def test_markdown_names_its_figures(session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(svg, "can_draw", lambda: True)
    monkeypatch.setattr(svg, "write_figures", drawn)
    out = tmp_path / "my report (1).md"
    said = write_report(session, "tiny", out, models=MODELS, on=EvaluationSamples(4))
    text = out.read_text(encoding="utf-8")
    linked = re.findall(r"^!\[.*\]\((\S+)\)$", text, re.MULTILINE)
    assert linked == [name.replace(" ", "%20").replace("(1)", "%281%29") for name in said["figures"]]
    assert all((tmp_path / name).is_file() for name in said["figures"])
    assert sorted(one.name for one in tmp_path.iterdir()) == ["my report (1)-figures", "my report (1).md"]
    assert re.search(r"^\| average \|( \d+\.\d \|){4} [+-]?−?\d+\.\d \|$", text, re.MULTILINE)


def test_differences_are_written_as_by_compare(session: Session, tiny_suite_file: Path, tmp_path: Path) -> None:
    """Every row: scores, difference, interval, p, counts."""
    out = tmp_path / "report.md"
    write_report(session, "tiny", out, models=MODELS, on=EvaluationSamples(4))
    lines = out.read_text(encoding="utf-8").splitlines()
    (head,) = (i for i, line in enumerate(lines) if "McNemar p" in line and line.startswith("|"))
    arguments = ["compare", str(tiny_suite_file), "--model", MODELS[0], "--model", MODELS[1]]
    said = CliRunner().invoke(cli.featcal_command, arguments, catch_exceptions=False).stdout.splitlines()
    assert len(said) == 4  # a header, two tasks, the average
    for shown, printed in zip(lines[head + 2 :], said[1:], strict=False):
        task, *numbers = shown.strip("| ").split(" | ")
        row = printed.split()
        assert [task, *numbers[:6], *numbers[7:]] == [row[0], *row[2:12]]
        assert (numbers[6] == "True") is printed.rstrip().endswith("within noise")


def test_numbers_of_a_table() -> None:
    """Halves go up, a small p stays a number, what is not defined is a dash, and counts are whole beside it."""
    frame = pd.DataFrame(
        {"task": ["t", "ranks"], "a": [58.15, -2.65], "a, %": [0.25, 1], "p": [4.7e-8, None], "fixed": [5, None]}
    )
    table = ReportTable("c", frame, digits=1, formats={"p": p_value, "fixed": exactly})
    assert table.rows == [["t", "58.2", "0.3", "4.7e-08", "5"], ["ranks", "-2.7", "1.0", "–", "–"]]
    undefined = ReportTable("c", pd.DataFrame({"p": [None, None]}), formats={"p": p_value})
    assert undefined.rows == [["–"], ["–"]]


def test_markdown_without_a_browser_says_what_it_needs(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(svg, "can_draw", lambda: False)
    out = tmp_path / "report.md"
    said = write_report(session, "tiny", out, models=("merged",), on=EvaluationSamples(4))
    assert said["notes"] == [svg.NEEDS]
    assert said["figures"] == []
    assert "![" not in out.read_text(encoding="utf-8")
    assert "featcal\\[report\\]" in out.read_text(encoding="utf-8")


@pytest.mark.parametrize("ending", [".html", ".md"])
def test_complete_or_absent(ending: str, session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(svg, "can_draw", lambda: True)
    monkeypatch.setattr(svg, "write_figures", stopped)
    monkeypatch.setattr(os, "link", stopped)
    with pytest.raises(KeyboardInterrupt):
        write_report(session, "tiny", tmp_path / f"report{ending}", models=("merged",), on=EvaluationSamples(4))
    assert list(tmp_path.iterdir()) == []


def test_figures_go_with_the_report_that_could_not_be_written_and_nobody_elses(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    others = tmp_path / "report-figures.partial"
    others.mkdir()
    monkeypatch.setattr(svg, "can_draw", lambda: True)
    monkeypatch.setattr(svg, "write_figures", drawn)
    monkeypatch.setattr(os, "fsync", refused)
    with pytest.raises(InputError, match=r"cannot write .*report\.md: No space left"):
        write_report(session, "tiny", tmp_path / "report.md", models=("merged",), on=EvaluationSamples(4))
    assert list(tmp_path.iterdir()) == [others]


def test_places_that_cannot_be_written(session: Session, tmp_path: Path) -> None:
    taken = tmp_path / "taken.html"
    taken.write_text("mine")
    (tmp_path / "other-figures").mkdir()
    for out, said in (
        (taken, "already exists"),
        (tmp_path / "other.md", "other-figures already exists"),
        (tmp_path / "report.pdf", "ends in .html"),
        (tmp_path / "nowhere" / "report.html", "is not a folder"),
    ):
        with pytest.raises(InputError, match=said):
            write_report(session, "tiny", out)
    assert taken.read_text() == "mine"


def test_a_suite_without_answers_has_a_report(edit_suite: Edit, tmp_path: Path) -> None:
    def forget(content: dict[str, Any]) -> None:
        for task in content["tasks"].values():
            for split in ("calibration", "validation", "test"):
                del task[split]["labels"]

    out = tmp_path / "report.html"
    arguments = ["report", str(edit_suite(forget)), "--model", "merged", "--eval-samples", "4", "--out", str(out)]
    CliRunner().invoke(cli.featcal_command, arguments, catch_exceptions=False)
    page = parsed(out)
    assert any(words.startswith("There are none: task 'pets'") for words in page.words)
    assert set(page.figures) == {"drift", "drift-tasks", "attribution", "features-1", "features-2"}


def test_what_cannot_be_scored_for_another_reason_is_said(
    tiny: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise InputError("task 'pets': label 9 has no class, the head scores 3")

    session = Session(tiny)
    monkeypatch.setattr(Measurements, "scores", fails)
    with pytest.raises(InputError, match="label 9 has no class"):
        write_report(session, "tiny", tmp_path / "report.html", models=["merged"], on=EvaluationSamples(4))
    assert list(tmp_path.iterdir()) == []


def test_a_language_model(tmp_path: Path) -> None:
    suite = write_text_suite(tmp_path / "s", "t5")
    out = tmp_path / "report.html"
    arguments = ["report", str(suite), "--model", "merged", "--eval-samples", "2", "--out", str(out)]
    CliRunner().invoke(cli.featcal_command, arguments, catch_exceptions=False)
    assert "drift" in parsed(out).figures


def test_models_that_would_look_alike_are_refused(session: Session, tmp_path: Path) -> None:
    three = [f"calibrated:lam={lam}" for lam in (0.1, 0.2, 0.3)]
    with pytest.raises(InputError, match=r"calibrated:lam=0\.1, calibrated:lam=0\.2, calibrated:lam=0\.3 would"):
        write_report(session, "tiny", tmp_path / "report.html", models=three)
    two = name_models(["merged", *three[:2], "task-arithmetic:scale=0.2"], session)
    assert [(one.role, one.second) for one in two if isinstance(one, Shown)] == [
        ("merged", False), ("calibrated", False), ("calibrated", True), ("merged", True),
    ]  # fmt: skip
    swapped = name_models(["ties", "tsv-m"], session), name_models(["tsv-m", "ties"], session)
    for found in swapped:  # colours stay where models change places
        assert {str(one): one.second for one in found if isinstance(one, Shown)} == {"ties": False, "tsv-m": True}


@pytest.mark.parametrize(
    ("model", "label"),
    [
        ("calibrated", "calibrated"),
        ("calibrated:lam=0.05,rho=2,alpha=0.3", "calibrated, paper"),
        ("calibrated@ties", "calibrated, paper, of ties"),
        ("calibrated:lam=10", "calibrated, paper, λ 10"),
        ("calibrated:lam=0.0001,rho=2.37,alpha=0.3@ties", "calibrated, paper, λ 0.0001 ρ 2.37, of ties"),
        ("calibrated:lam=1@calibrated:lam=2", "calibrated, paper, λ 1, of calibrated, paper, λ 2"),
        ("polished:steps=2@calibrated:recipe=informed", "polished, steps 2, of calibrated, informed"),
        ("anchor:rho=2@calibrated:lam=1@ties", "anchor, rho 2, of calibrated, paper, λ 1, of ties"),
        ("polished@ties:scale=0.6", "polished, of ties, scale 0.6"),
        ("calibrated:samples=8,seed=7", "calibrated, paper, n 8 seed 7"),
        ("calibrated:biases=false,blocks=block 0,maps=mlp", "calibrated, paper, biases false blocks block 0 maps mlp"),
        ("calibrated:recipe=informed", "calibrated, informed"),
        ("calibrated:recipe=informed,beta=0.2,mu=0.3,decisions=0.7", "calibrated, informed, β 0.2 μ 0.3 δ 0.7"),
    ],
)
def test_a_label_names_the_options_that_are_not_the_suites_own(session: Session, model: str, label: str) -> None:
    assert list(name_models([model], session)) == [label]


@pytest.mark.parametrize(
    "models",
    [
        ("calibrated:lam=0.1", "calibrated:lam=10"),
        ("calibrated:samples=8", "calibrated:samples=64"),
        ("calibrated@ties:scale=0.6", "calibrated@ties:scale=0.7"),
        ("calibrated:rho=1@/" + "a" * 90, "calibrated:rho=1@/" + "a" * 91),  # cut, and equal
    ],
)
def test_no_two_models_have_one_label(session: Session, models: tuple[str, str]) -> None:
    found, swapped = name_models(models, session), name_models(models[::-1], session)
    assert len(found) == len(swapped) == 2
    if not any("(B)" in label for label in found):  # the same label, whichever stands beside it
        assert found == swapped


def samples(count: int, **given: Any) -> Samples:
    labels = torch.zeros(count, dtype=torch.int64)
    return Samples("t", "test", {}, labels, tuple(range(10, 10 + count)), ("cat", "dog"), **{"images": None, **given})


def test_thumbnails_are_few_and_small() -> None:
    count = 40
    pictures = [np.full((300, 200, 3), i, np.uint8) for i in range(count)]
    before = torch.tensor([1] * 5 + [0] * 35)
    after = torch.tensor([0] * 5 + [1] * 30 + [0] * 5)
    right = torch.zeros(count, dtype=torch.int64)
    pair = {"A": TaskScore("accuracy", 0.9, before, right), "B": TaskScore("accuracy", 0.2, after, right)}
    found = list(pick_thumbnails(samples(count, images=pictures), pair))
    assert [one.caption.split(",")[0] for one in found] == ["fixed"] * 5 + ["broken"] * (MOST - 5)
    assert found[0].caption == "fixed, sample 10: cat; A: dog, B: cat"
    for i, one in zip([*range(5), *range(5, MOST)], found, strict=True):
        scheme, content = str(one.picture).split(",")
        assert scheme == "data:image/png;base64"
        image = Image.open(BytesIO(base64.b64decode(content)))
        assert image.size == (SIDE * 2 // 3, SIDE)
        assert image.getpixel((3, 3)) == (i, i, i)


def test_a_script_in_a_figure_cannot_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import plotly.graph_objects as go

    from featcal.figures.report.content import Figure, ReportContent, ReportSection

    chart = go.Figure(layout={"title": {"text": "</script><script>alert(1)</script><!--"}})
    part = ReportSection("t", "s", (Figure("one", chart, "alt"),))
    page = Page()
    page.feed(html.report_page(ReportContent("s", "", "now", (), (part,), ())))
    assert [tag for tag, _ in page.elements].count("script") == 3
    assert page.figures["one"]["layout"]["title"]["text"] == "</script><script>alert(1)</script><!--"
