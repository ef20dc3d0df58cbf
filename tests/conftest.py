"""Set the tests up: nothing outside is asked, nothing of the user's is touched; and what most of them share."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # no test may look outside
os.environ["STREAMLIT_BROWSER_GATHER_USAGE_STATS"] = "false"
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
os.environ["FEATCAL_CACHE"] = tempfile.mkdtemp(prefix="featcal-tests-")  # never the user's own
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parent / "fixtures" / "host"), os.environ.get("PYTHONPATH")])
)

import sys
from collections.abc import Callable, Iterator
from typing import Any

import core_alone
import cpu_seconds
import pytest
import torch
import turns
import yaml
from command_line import Run
from hypothesis import settings
from suite_edits import Edit
from tiny_clip import in_float64, write_suite

from featcal.evaluation import generation_check
from featcal.family.opening import Family, open_family
from featcal.suite import methods
from featcal.suite.schema import Suite, load_suite

settings.register_profile("untimed", deadline=None)  # a busy machine is not a defect
settings.load_profile("untimed")
torch.set_num_threads(1)  # the models are tiny: threads would only wait for each other


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(cpu_seconds)
    config.pluginmanager.register(turns)
    if core_alone.ALONE:
        config.pluginmanager.register(core_alone)


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """Content of files by its size: compressed bytes can hold the time, and every process must see the same names."""
    return f"{len(val)} bytes" if isinstance(val, bytes) else None


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Fork what forks the processes of tests, if any that was imported needs it, before a test has run."""
    if used := sys.modules.get("clean_process"):
        used.start()


CACHE = Path(os.environ["FEATCAL_CACHE"])


@pytest.fixture(autouse=True)
def forget_checkpoints() -> Iterator[None]:
    """Take away the list of the checkpoints that a test wrote: the app would show the next test their warnings."""
    yield
    shutil.rmtree(CACHE / "checkpoints", ignore_errors=True)


@pytest.fixture(autouse=True)
def forget_registrations() -> Iterator[None]:
    """Take away the methods that a test registers, whose code is part of the identity of later jobs and runs; featcal's
    own stay, since a module is imported only once."""
    before, code = {*methods._REGISTERED}, dict(methods._CODE)
    yield
    methods._CODE.clear()
    methods._CODE.update(code)
    for name, kind in [*methods._REGISTERED.items()]:
        if name not in before and not kind.__module__.startswith("featcal."):
            del methods._REGISTERED[name]


TOKENS = generation_check.TOKENS
# Every text model that is written has its generation checked, and 64 tokens of tiny models take four times as long as
# all else of such a test.
generation_check.TOKENS = 4


@pytest.fixture
def all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let models write as many tokens as users get, where a test is about the answers."""
    monkeypatch.setattr(generation_check, "TOKENS", TOKENS)


@pytest.fixture(scope="session")
def tiny_suite_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Suite file of the tiny models; shared, so never to be changed."""
    return write_suite(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Files that the page that was run last offers, by their names."""
    import streamlit as st

    found: dict[str, Any] = {}
    draw: Callable[..., bool] = st.delta_generator.DeltaGenerator.download_button

    def noted(place: Any, label: str, data: Any, name: str, *args: Any, **kwargs: Any) -> bool:
        found[name] = data
        return draw(place, label, data, name, *args, **kwargs)

    monkeypatch.setattr(st.delta_generator.DeltaGenerator, "download_button", noted)
    return found


@pytest.fixture(scope="module")
def instant_maps() -> Iterator[None]:
    """The app without its process for maps, pages whole at once; what it keeps of a suite lasts for a module, as it
    does for visitors."""
    from functools import cache

    import streamlit
    from app_pages import InstantMaps
    from streamlit.components.v2 import manifest_scanner
    from streamlit.runtime.scriptrunner.script_cache import ScriptCache
    from streamlit.testing.v1 import local_script_runner

    from app import afterwards, state

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(state, "MapWorker", InstantMaps)
        patched.setattr(afterwards, "draw_later", lambda key, version, draw: draw())  # no browser asks for it
        # every AppTest would look through all installed packages again, which takes longer than most pages
        patched.setattr(manifest_scanner, "scan_component_manifests", cache(manifest_scanner.scan_component_manifests))
        patched.setattr(local_script_runner, "ScriptCache", cache(ScriptCache))
        yield
    streamlit.cache_resource.clear()


@pytest.fixture
def own_suite_file(tmp_path: Path, tiny_suite_file: Path) -> Path:
    """A copy of the tiny suite that a test may break."""
    import shutil

    shutil.copytree(tiny_suite_file.parent, tmp_path / "own")
    return tmp_path / "own" / "suite.yaml"


@pytest.fixture(scope="session")
def tiny_suite(tiny_suite_file: Path) -> Suite:
    return load_suite(tiny_suite_file)


@pytest.fixture(scope="session")
def tiny(tiny_suite: Suite) -> Family:
    """The tiny suite opened, float32."""
    return open_family(tiny_suite, device="cpu")


@pytest.fixture(scope="session")
def tiny64(tiny: Family) -> Family:
    """The tiny suite with every tensor in float64, for identities that hold to rounding."""
    return in_float64(tiny)


@pytest.fixture
def edit_suite(own_suite_file: Path) -> Edit:
    """Change the content of a suite file and write it back."""

    def edit(change: Callable[[dict[str, Any]], None]) -> Path:
        content = yaml.safe_load(own_suite_file.read_text())
        change(content)
        own_suite_file.write_text(yaml.safe_dump(content))
        return own_suite_file

    return edit


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line in this process: (exit status, stdout, stderr)."""

    def command(*arguments: object) -> tuple[int, str, str]:
        from featcal import cli

        monkeypatch.setattr(sys, "argv", ["featcal", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        captured = capsys.readouterr()
        return int(stopped.value.code or 0), captured.out, captured.err

    return command
