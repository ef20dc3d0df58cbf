"""Which way the rooms of featcal/ depend, and how long its functions may be: read from the code, without running it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

import featcal

ROOT = Path(featcal.__file__).parent
FLOORS = (
    ("errors", "locks", "machine", "progress", "resources", "results", "stamps", "versions", "whole_files", "words"),
    ("shared",),
    ("paths", "ranks", "views"),
    ("jsons",),
    ("schema",),
    ("reproduce",),
    ("suite",),
    ("formats",),
    ("models",),
    ("importers", "mergers", "tasks"),
    ("family",),
    ("canary", "card", "draft", "left_out", "lineage", "origin"),
    ("beginning", "export"),
    ("calibration", "evaluation"),
    ("baselines",),
    ("drift", "merging"),
    ("preflight",),
    ("suite_files",),
    ("model_ids",),
    ("session",),
    ("measure", "replay"),
    ("testing",),
    ("runs",),
    ("recording",),
    ("selection", "studies", "sweep"),
    ("figures",),
    ("clouds",),
    ("report",),
    ("jobs",),
    ("featcal", "launch"),
    ("cli",),
    ("__main__",),
)
"""Packages and modules of featcal/ from the bottom up: a room knows its own modules and those of the floors below it.
`featcal` is the public API, whose names arrive when they are used."""
MOST_PARAMETERS = 7
"""Of a function, `self` and `cls` not counted, `*args` and `**options` as one each. Click's commands are left out:
every option is a parameter."""
MOST_LINES = 60
"""From `def` to the last line, its docstring included."""

TREES = {
    ".".join(("featcal", *file.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): ast.parse(
        file.read_text(encoding="utf-8")
    )
    for file in sorted(ROOT.rglob("*.py"))
    if "_bundle" not in file.parts  # the wheel's copy of the app
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def imported(tree: ast.AST) -> Iterator[str]:
    """Every module that is imported anywhere: at the top, in functions, for type checkers alone, or by its name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in TREES else str(node.module) for name in whole)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str))


ARROWS = {module: sorted({name for name in imported(tree) if name in TREES}) for module, tree in TREES.items()}


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else module


def functions() -> Iterator[tuple[str, Function]]:
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, Function):
                yield f"{module}.{node.name}", node


def parameters(function: Function) -> int:
    given = function.args
    named = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len([one for one in named if one not in ("self", "cls")]) + bool(given.vararg) + bool(given.kwarg)


def is_command(function: Function) -> bool:
    decorators = (one.func for one in function.decorator_list if isinstance(one, ast.Call))
    return any(isinstance(one, ast.Attribute) and one.attr == "command" for one in decorators)


def test_modules_are_found() -> None:
    """Else every other test here would pass whatever the code is."""
    assert len(TREES) > 80
    assert "featcal.formats.checkpoint" in ARROWS["featcal.formats.locate"]
    assert "featcal.launch" in ARROWS["featcal.cli.showing"]  # in a function
    assert "featcal.family" in ARROWS["featcal"]  # for type checkers alone


def test_no_module_is_in_a_circle() -> None:
    try:
        TopologicalSorter(ARROWS).prepare()
    except CycleError as error:
        raise AssertionError(" <- ".join(error.args[1])) from None


def test_every_room_has_its_floor() -> None:
    known = [one for floor in FLOORS for one in floor]
    assert len(known) == len(set(known))
    assert {room(module) for module in TREES} - {*known} == set()


def test_rooms_know_only_those_below() -> None:
    floor = {one: height for height, rooms in enumerate(FLOORS) for one in rooms}
    upwards = [
        f"{module} imports {other}"
        for module, others in ARROWS.items()
        for other in others
        if room(module) != room(other) and floor[room(other)] >= floor[room(module)]
    ]
    assert upwards == []


def test_only_launch_knows_streamlit_and_the_app() -> None:
    above = {"streamlit", "app", "pages", "tests", "benchmarks"}
    assert {module for module, tree in TREES.items() if above & {one.split(".")[0] for one in imported(tree)}} == {
        "featcal.launch"
    }


def test_no_function_takes_too_much() -> None:
    counts = {name: parameters(one) for name, one in functions() if not is_command(one)}
    assert {name: count for name, count in counts.items() if count > MOST_PARAMETERS} == {}


def test_every_function_fits_a_screen() -> None:
    lines = {name: int(one.end_lineno or 0) - one.lineno + 1 for name, one in functions()}
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}


def homes() -> dict[str, Function]:
    """Functions of modules and methods of classes by their whole names."""
    found: dict[str, Function] = {}
    for module, tree in TREES.items():
        for node in tree.body:
            members = node.body if isinstance(node, ast.ClassDef) else [node]
            within = f"{module}.{node.name}" if isinstance(node, ast.ClassDef) else module
            found |= {f"{within}.{one.name}": one for one in members if isinstance(one, Function)}
    return found


def known(module: str) -> dict[str, str]:
    """What the names in a module stand for: whole names of what it imports, anywhere in it, and of its own."""
    tree, found = TREES[module], dict[str, str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    own = (node.name for node in tree.body if isinstance(node, Function | ast.ClassDef))
    return found | {name: f"{module}.{name}" for name in own}


def calls(home: str, following: str) -> bool:
    """Whether a function, or one nested in it, calls another, both by their whole names; of a method of another object
    than itself its class must be one that the module knows."""
    written = homes()
    module = next(home[:end] for end in range(len(home), 0, -1) if home[:end] in TREES)
    names, within = known(module), home.rpartition(".")[0]
    target, method = following.rpartition(".")[::2]
    for node in ast.walk(written[home]):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and names.get(node.func.id) == following:
            return True
        if isinstance(node.func, ast.Attribute) and node.func.attr == method:
            owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
            if target == (within if owner == "self" else names.get(owner, "")):
                return True
            if target not in TREES and owner not in ("self", *names) and target in names.values():
                return True
    return False


PATHS = (
    ("cli.measuring.drift", "drift.parts.take_apart", 5),
    ("cli.repairing.calibrate", "calibration.closed_form.linear_weight", 8),
)
"""First and last function of the paths on the architecture page, and how many there are at most."""


def test_the_call_paths_of_the_architecture_page_are_true() -> None:
    """From a command to its equation; each step is called in the body of the one before it."""
    page = (ROOT.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    paths = [re.findall(r"`([\w.]+)`", line) for line in page.splitlines() if line.startswith("From the command to ")]
    for path, (first, last, most) in zip(paths, PATHS, strict=True):
        assert (path[0], path[-1]) == (first, last)
        assert len(path) <= most
        for home, following in pairwise(f"featcal.{step}" for step in path):
            assert following in homes(), f"there is no {following}"
            assert calls(home, following), f"{home} does not call {following}"


def test_calls_are_told_apart_by_whole_names() -> None:
    solve = "featcal.calibration.owners.solve"
    assert calls("featcal.calibration.forward_order.calibrate_blocks", solve)
    assert not calls(
        "featcal.calibration.forward_order.calibrate_blocks", "featcal.calibration.linear_group.LinearGroup.solve"
    )
    assert not calls(solve, "featcal.calibration.linear_group.LinearGroup.solve")
    assert calls("featcal.calibration.owners._solved", "featcal.calibration.linear_group.LinearGroup.solve")


def test_every_module_with_shapes_in_annotations_is_checked(pytestconfig: pytest.Config) -> None:
    """Names, not packages: checking a package would import all of it before the first test."""
    shaped = {module for module, tree in TREES.items() if any(name.startswith("jaxtyping") for name in imported(tree))}
    assert {*pytestconfig.getoption("jaxtyping_packages").split(",")} == {*shaped, "beartype.beartype"}
