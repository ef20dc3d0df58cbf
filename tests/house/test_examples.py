"""The examples in docstrings say what comes out."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = [
    ".".join(file.relative_to(ROOT).with_suffix("").parts)
    for top in ("featcal", "app")
    for file in sorted((ROOT / top).rglob("*.py"))
    if "_bundle" not in file.parts and ">>> " in file.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_are_true(name: str) -> None:
    found = doctest.testmod(import_module(name))
    assert found.attempted > 0
    assert found.failed == 0


def test_examples_are_found() -> None:
    assert len(MODULES) >= 40
