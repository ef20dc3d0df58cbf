"""The forge's workflows, read and not run: YAML that says what the project says, and steps that call what there is."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from featcal.cli import featcal_command

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MINORS = [one.rpartition(" ")[2] for one in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", one)]
"""Python's versions that featcal is for."""
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([\w-]+):", MAKEFILE, re.MULTILINE))
VARIABLES = set(re.findall(r"^(\w+) [?:]?=", MAKEFILE, re.MULTILINE))
TOOLS = {"python", "uv", "uvx", "pip-audit", "docker", "curl", "sudo", "gh", "tar"}
"""Programs that a runner has or an earlier step installs."""


def workflow(file: Path) -> dict[str, Any]:
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    content["on"] = content.pop(True)  # YAML 1.1 reads the key as a truth value
    return content


def runs(content: dict[str, Any]) -> Iterator[str]:
    for job in content["jobs"].values():
        for step in job.get("steps", ()):
            assert ("run" in step) != ("uses" in step)
            if "run" in step:
                yield step["run"]


def unknown(command: str) -> str:
    """What a step calls that there is not; "" where it calls what there is."""
    program, *words = shlex.split(command)
    if program == "make":
        return " ".join(word for word in words if word not in TARGETS and word.partition("=")[0] not in VARIABLES)
    if Path(program).name == "featcal":
        return "" if words[0] in featcal_command.commands else words[0]
    for before, after in pairwise(words):
        if before in ("--requirement", "-r") and not (ROOT / after).is_file():
            return after
    return "" if program in TOOLS else program


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_step_calls_what_there_is(file: Path) -> None:
    content = workflow(file)
    assert content["permissions"] == {"contents": "read"}
    called = list(runs(content))
    assert called
    assert [one for one in map(unknown, called) if one] == []


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        ("make check nothing", "nothing"),
        ("make test NOTHING=slow", "NOTHING=slow"),
        ("make test LANE=slow", ""),
        ("featcal nothing clip-mini", "nothing"),
        ("pip-audit -r nothing.lock", "nothing.lock"),
        ("nothing", "nothing"),
        ("make test", ""),
    ],
)
def test_what_there_is_not_is_found(command: str, missing: str) -> None:
    assert unknown(command) == missing


def test_every_action_has_a_version() -> None:
    used = [
        step["uses"]
        for file in FILES
        for job in workflow(file)["jobs"].values()
        for step in job.get("steps", ())
        if "uses" in step
    ]
    assert len(used) > 10
    assert [one for one in used if not re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)", one)] == []


def test_the_matrix_is_what_the_project_says_it_runs_on() -> None:
    content = workflow(ROOT / ".github" / "workflows" / "tests.yml")
    matrix = content["jobs"]["matrix"]["strategy"]["matrix"]
    assert {one.split("-")[0] for one in matrix["os"]} == {"ubuntu", "macos", "windows"}
    assert matrix["python"] == MINORS
    assert PROJECT["requires-python"] == f">={MINORS[0]}"
    (lowest,) = [one for one in runs({"jobs": {"lowest": content["jobs"]["lowest"]}}) if "lowest-direct" in one]
    assert lowest.endswith('".[dev]"')
    text = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    for name in ("torch", "transformers"):
        (bound,) = [one.partition(">=")[2] for one in PROJECT["dependencies"] if one.startswith(f"{name}>=")]
        assert f"{name} {bound}" in text


def test_only_what_was_checked_is_published_and_without_a_stored_token() -> None:
    jobs = workflow(ROOT / ".github" / "workflows" / "release.yml")["jobs"]
    needs = {"publish": "sign", "sign": ["audit", "install"], "install": "build", "docs": "publish", "page": "publish"}
    assert {name: job["needs"] for name, job in jobs.items() if "needs" in job} == needs
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert jobs["sign"]["permissions"] == {"attestations": "write", "id-token": "write"}
    assert jobs["install"]["strategy"]["matrix"]["python"] == MINORS
    assert "secrets." not in "".join(file.read_text() for file in FILES)
    assert workflow(ROOT / ".github" / "workflows" / "release.yml")["on"] == {"push": {"tags": ["v*"]}}
    assert jobs["audit"]["uses"] == "./.github/workflows/audit.yml"
    for job in ("audit", "docs"):
        assert "workflow_call" in workflow(ROOT / jobs[job]["uses"])["on"]


FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


@pytest.mark.parametrize("file", FORMS, ids=lambda file: file.name)
def test_a_form_for_issues_asks_for_what_a_command_prints(file: Path) -> None:
    form = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= {*form} <= {"name", "description", "body", "labels"}
    fields = [one for one in form["body"] if one["type"] != "markdown"]
    assert len({one["id"] for one in fields}) == len(fields)
    asked = {one["id"]: one["attributes"]["description"] for one in fields if one["validations"]["required"]}
    called = re.findall(r"`featcal (.*?)`", asked["check"])
    assert "check SUITE --json" in called
    for one in called:
        command, *words = one.split()
        known = {option for parameter in featcal_command.commands[command].params for option in parameter.opts}
        assert {word for word in words if word.startswith("-")} <= known


def test_the_security_page_links_to_what_there_is() -> None:
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert "private vulnerability reporting" in page
    for link in re.findall(r"\]\(([^)#]+)\)", page):
        assert (ROOT / link).exists(), link
