"""The examples in docstrings say what comes out, and every public name has one."""

from __future__ import annotations

import ast
import doctest
import inspect
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from cpu_seconds import METER

import featcal
from featcal.models.families import registry

ROOT = Path(__file__).parents[2]
TESTING = ROOT / "featcal" / "testing" / "__init__.py"
PUBLIC = {
    **{name: f"featcal.{name}" for name in featcal.__all__},
    **{
        node.name: f"featcal.testing.{node.name}"
        for node in ast.parse(TESTING.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    },
}
"""Names that users import, and where from."""
MODULES = [
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for top in ("featcal", "app")
    for file in sorted((ROOT / top).rglob("*.py"))
    if "_bundle" not in file.parts and ">>> " in file.read_text(encoding="utf-8")
]
LONGEST = 2.0
"""Most seconds of the processor that an example may take on the reference machine."""


def find_public(name: str) -> Any:
    module, _, own = PUBLIC[name].rpartition(".")
    return getattr(import_module(module), own)


def run_examples(tests: list[doctest.DocTest]) -> int:
    """Run examples, and return how many there were."""
    runner = doctest.DocTestRunner()
    for one in tests:
        runner.run(one)
    assert runner.failures == 0
    return runner.tries


@pytest.mark.parametrize("name", MODULES)
def test_examples_are_true(name: str) -> None:
    tests = [one for one in doctest.DocTestFinder().find(import_module(name)) if one.examples]
    assert tests
    run_examples([one for one in tests if one.name.removeprefix(f"{name}.") not in PUBLIC])


def test_examples_are_found() -> None:
    assert len(MODULES) >= 60


def test_every_public_name_has_an_example() -> None:
    assert len(PUBLIC) >= 50
    assert [one for one in PUBLIC if ">>> " not in (inspect.getdoc(find_public(one)) or "")] == []


@pytest.fixture(scope="module")
def opened() -> Iterator[None]:
    """Imports and a suite that is open, which no example is charged with."""
    session = featcal.open_session("lm-mini")
    featcal.measure_drift(session, samples=8)
    yield
    del session


@pytest.mark.slow
@pytest.mark.usefixtures("opened")
@pytest.mark.parametrize("name", PUBLIC)
def test_an_example_of_a_public_name_runs_as_it_stands(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the names of its module, quickly, and with no trace in the tables of methods and architectures."""
    monkeypatch.setattr(registry, "_FACTS", dict(registry._FACTS))
    thing = find_public(name)
    tests = doctest.DocTestFinder(recurse=False).find(thing, name, globs={"__name__": "__main__"})
    started = time.process_time()
    assert run_examples(tests) > 0
    assert (time.process_time() - started) / METER.slowness < LONGEST
