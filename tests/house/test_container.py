"""The container's recipe, read and not built: what it copies is there, nothing runs as root, nothing is fetched by name
that may change."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml

from featcal.cli import featcal_command

ROOT = Path(__file__).resolve().parents[2]
Step = tuple[str, str]


def steps(text: str) -> list[Step]:
    """Every instruction of a Dockerfile with its words, lines joined, comments left out."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [
        (name.upper(), words.strip())
        for line in joined.splitlines()
        if line.strip()
        for name, _, words in [line.strip().partition(" ")]
    ]


def problems(text: str, root: Path) -> list[str]:
    """What is wrong with a Dockerfile, in words."""
    found: list[str] = []
    done = steps(text)
    last = max(i for i, (name, _) in enumerate(done) if name == "FROM")
    stages = {words.split()[2] for name, words in done if name == "FROM" and " AS " in words}
    for name, words in done:
        if name == "FROM" and words.split()[0] not in stages and re.search(r"(:latest|^[^:@]+)$", words.split()[0]):
            found.append(f"no fixed image: {words}")
        if name == "ADD":
            found.append(f"ADD: {words}")
        if name == "COPY" and "--from=" not in words:
            *sources, _ = words.split()
            found += [f"not there: {one}" for one in sources if not (root / one).exists()]
        if name == "RUN" and re.search(r"install (?:-\S+ )*uv(?!==)", words):
            found.append(f"not pinned: {words}")
    users = [i for i, (name, words) in enumerate(done) if name == "USER" and i > last]
    if not users or done[users[-1]][1] in ("root", "0"):
        found.append("runs as root")
    elif any(name == "RUN" for name, _ in done[users[-1] :]):
        found.append("installs after it has given up its rights")
    found += [f"no {name}" for name in ("HEALTHCHECK", "VOLUME", "ENTRYPOINT") if name not in dict(done[last:])]
    return found


TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def test_the_recipe_is_sound() -> None:
    assert problems(TEXT, ROOT) == []


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("FROM python:3.11-slim\n", "FROM python:latest\n", "no fixed image: python:latest"),
        ("FROM python:3.11-slim\n", "FROM python\n", "no fixed image: python"),
        ("USER featcal\n", "", "runs as root"),
        ("USER featcal\n", "USER root\n", "runs as root"),
        ("USER featcal\n", "USER featcal\nRUN pip install x\n", "installs after it has given up its rights"),
        ("uv==0.13.9", "uv", "not pinned: python -m pip install"),
        ("HEALTHCHECK", "LABEL", "no HEALTHCHECK"),
        ("COPY data ./data", "COPY datum ./data", "not there: datum"),
        ("COPY data ./data", "ADD https://e.x/data.tar /data", "ADD: https://e.x/data.tar /data"),
    ],
)
def test_what_would_be_wrong_is_found(before: str, after: str, said: str) -> None:
    assert before in TEXT
    found = problems(TEXT.replace(before, after), ROOT)
    assert len(found) == 1
    assert found[0].startswith(said)


def test_everything_that_is_copied_reaches_the_builder_and_nothing_else() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert ignored[0] == "*"
    allowed = {one[1:] for one in ignored if one.startswith("!")}
    copied = {
        one for name, words in steps(TEXT) if name == "COPY" and "--from" not in words for one in words.split()[:-1]
    }
    assert copied == allowed
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = {"featcal", *project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]}
    assert needed | {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]} <= copied


def test_the_lock_without_what_drives_a_gpu_still_has_the_rest() -> None:
    (pattern,) = re.findall(r"grep -v -E '([^']+)'", TEXT)
    names = [re.split(r"[=<>~ ;\[]", line)[0] for line in (ROOT / "requirements.lock").read_text().splitlines()]
    left = {name for name in names if not re.match(pattern, name)}
    assert {"torch", "torchvision", "streamlit", "transformers"} <= left
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for one in project["dependencies"]:
        assert re.split(r"[>=<]", one)[0].replace("_", "-").lower() in left, one
    assert not [name for name in left if "nvidia" in name or name.startswith("cu")]


def test_the_container_starts_a_command_that_there_is_and_asks_it_how_it_is() -> None:
    said = dict(steps(TEXT))
    program, command, *options = json.loads(said["ENTRYPOINT"])
    assert program == "featcal"
    known = {option for parameter in featcal_command.commands[command].params for option in parameter.opts}
    assert {one for one in options if one.startswith("--")} <= known
    root = options[options.index("--root") + 1]
    assert root in json.loads(said["VOLUME"])
    assert "/_stcore/health" in said["HEALTHCHECK"]
    assert f":{said['EXPOSE']}/" in said["HEALTHCHECK"]
    # what featcal, numba and libraries write by themselves lies on a volume
    places = dict(one.split("=", 1) for one in shlex.split(said["ENV"]))
    for name in ("HOME", "FEATCAL_CACHE", "NUMBA_CACHE_DIR"):
        assert any(places[name].startswith(volume) for volume in json.loads(said["VOLUME"]) if volume != root)


def test_the_recipe_of_a_space_says_what_the_image_does() -> None:
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    (front,) = re.findall(r"```yaml\n---\n(.*?)---\n```", page, re.DOTALL)
    said = yaml.safe_load(front)
    assert said["sdk"] == "docker"
    assert str(said["app_port"]) == dict(steps(TEXT))["EXPOSE"]
    licence = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license"]
    assert said["license"] == licence.lower()
