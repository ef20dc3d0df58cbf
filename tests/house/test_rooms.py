"""How the house is cut: its rooms and which way they depend, read from the code without running it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest
from sources import ROOT, trees

import featcal

PACKAGE = Path(featcal.__file__).parent
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
MOST_ROOMS, MOST_FLOORS, MOST_ARROWS = 23, 13, 170
"""Packages of featcal/, `featcal` itself and the app; the longest way down; pairs of rooms of which one imports the
other."""
MOST_LOOSE = 3
"""Files that lie at the top of featcal/."""
MOST_PARAMETERS = 7
"""Of a function, `self` and `cls` not counted, `*args` and `**options` as one each. Click's commands are left out:
every option is a parameter."""
MOST_LINES = 60
"""From `def` to the last line, its docstring included."""
MOST_STEPS = 6
"""Of a call path from a command to its equation."""
DOOR = "featcal.__main__"
"""`python -m featcal`: one call of the command line, on no floor."""
WHOLE = {"app": "app", "pages": "app"}
"""The app is one room: a page is a file that Streamlit finds by its place."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def imported(tree: ast.AST) -> Iterator[str]:
    """Every module that is imported anywhere: at the top, in functions, for type checkers alone, or by its name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in trees() else str(node.module) for name in whole)
        elif isinstance(node, ast.Call) and "import_module" in (
            getattr(node.func, "id", ""),
            getattr(node.func, "attr", ""),
        ):
            yield from (one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str))


def room(module: str) -> str:
    """The package below featcal/ that a module lies in, `featcal` for its public names, else `app`."""
    top, _, inside = module.partition(".")
    return WHOLE.get(top) or inside.partition(".")[0] or top


@cache
def arrows() -> dict[str, list[str]]:
    """The modules that each module imports."""
    return {module: sorted({name for name in imported(tree) if name in trees()}) for module, tree in trees().items()}


@cache
def rooms() -> dict[str, set[str]]:
    """The other rooms that each room imports."""
    found: dict[str, set[str]] = {room(module): set() for module in trees() if module != DOOR}
    for module, others in arrows().items():
        if module != DOOR:
            found[room(module)] |= {room(other) for other in others} - {room(module)}
    return found


def functions() -> Iterator[tuple[str, Function]]:
    for module, tree in trees().items():
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
    assert len(trees()) > 80
    assert "featcal.formats.checkpoint" in arrows()["featcal.formats.locate"]
    assert "featcal.server.launch" in arrows()["featcal.cli.show"]  # in a function
    assert "featcal.family.opening" in arrows()["featcal"]  # for type checkers alone
    assert "calibration" in rooms()["app"]


def test_no_module_is_in_a_circle() -> None:
    try:
        TopologicalSorter(arrows()).prepare()
    except CycleError as error:
        raise AssertionError(" <- ".join(error.args[1])) from None


def test_rooms_are_few_and_depend_one_way() -> None:
    floors: dict[str, int] = {}
    try:
        for one in TopologicalSorter(rooms()).static_order():
            floors[one] = 1 + max((floors[other] for other in rooms()[one]), default=0)
    except CycleError as error:
        raise AssertionError(" <- ".join(error.args[1])) from None
    assert len(rooms()) <= MOST_ROOMS
    assert max(floors.values()) <= MOST_FLOORS
    assert sum(map(len, rooms().values())) <= MOST_ARROWS
    assert arrows()[DOOR] == ["featcal.cli"]


def test_the_floors_of_the_architecture_page_are_true() -> None:
    """Every room stands in its table, above all that it imports."""
    floors = {name: int(floor) for floor, name in re.findall(r"^\| (\d+) \| `(?:featcal/)?(\w+)/", PAGE, re.MULTILINE)}
    assert floors.keys() == rooms().keys()
    upwards = [
        f"{module} imports {other}"
        for module, others in arrows().items()
        for other in others
        if module != DOOR and room(module) != room(other) and floors[room(other)] >= floors[room(module)]
    ]
    assert upwards == []


def test_nothing_lies_loose() -> None:
    loose = {file.name for file in PACKAGE.iterdir() if file.is_file()}
    assert loose <= {"__init__.py", "__main__.py", "py.typed"}
    assert len(loose) <= MOST_LOOSE
    assert not [name for name in rooms() if name not in ("featcal", "app") and not (PACKAGE / name).is_dir()]


def test_every_room_says_what_it_is_for() -> None:
    faces = {module: tree for module, tree in trees().items() if (PACKAGE.parent / module.replace(".", "/")).is_dir()}
    assert [module for module, tree in faces.items() if module != "pages" and not ast.get_docstring(tree)] == []


def test_every_module_stands_in_the_readme_of_its_room() -> None:
    """By its name between backticks; a file of these two rooms is a method, which other pages list."""
    left_out = []
    for page in (ROOT / "app" / "README.md", *PACKAGE.glob("*/README.md")):
        spans = re.findall(r"`([^`]+)`", page.read_text(encoding="utf-8"))
        said = {word for span in spans for word in re.findall(r"\w+", span)}
        stems = {file.stem for file in page.parent.glob("*.py")} - {"__init__"}
        if page.parent.name not in ("baselines", "mergers"):
            left_out += [f"{page.parent.name}: {stem}" for stem in sorted(stems - said)]
    assert left_out == []


def test_only_launch_knows_streamlit_and_nothing_knows_the_app() -> None:
    above = {"streamlit", "app", "pages", "tests", "benchmarks"}
    found = {name: above & {one.split(".")[0] for one in imported(tree)} for name, tree in trees().items()}
    assert {name: own for name, own in found.items() if own and name.startswith("featcal")} == {
        "featcal.server.launch": {"streamlit"}
    }


def test_doors_for_other_programs_stand_on_public_names_alone() -> None:
    """And nothing stands on a door, so that one may be added without another arrow."""
    assert rooms()["integrations"] == {"featcal"}
    assert [name for name, others in rooms().items() if "integrations" in others] == []


def test_the_closed_form_knows_torch_alone() -> None:
    own = {one.split(".")[0] for one in imported(trees()["featcal.calibration.closed_form"])}
    assert own <= {"__future__", "collections", "math", "jaxtyping", "torch"}


def test_no_function_takes_too_much() -> None:
    counts = {name: parameters(one) for name, one in functions() if not is_command(one)}
    assert {name: count for name, count in counts.items() if count > MOST_PARAMETERS} == {}


def test_every_function_fits_a_screen() -> None:
    lines = {name: int(one.end_lineno or 0) - one.lineno + 1 for name, one in functions()}
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}


def defined(step: str) -> tuple[str, Function]:
    """The module and the code of `module.function` or `module.Class.method`."""
    module = next(
        ".".join(step.split(".")[:n]) for n in range(step.count("."), 0, -1) if ".".join(step.split(".")[:n]) in trees()
    )
    body: list[ast.stmt] = trees()[module].body
    *holders, last = step.removeprefix(f"{module}.").split(".")
    for holder in holders:
        body = next(one.body for one in body if isinstance(one, ast.ClassDef) and one.name == holder)
    return module, next(one for one in body if isinstance(one, Function) and one.name == last)


def known(module: str) -> dict[str, str]:
    """What a module calls by its own names: name → where that is defined, imports in functions included."""
    tree = trees()[module]
    names = {one.name: f"{module}.{one.name}" for one in tree.body if isinstance(one, Function | ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def reach(names: dict[str, str]) -> set[str]:
    """The classes that a module knows, and those of what their properties give, as `Measurements` of
    `session.measure`."""
    found = set(names.values())
    for module, _, name in (one.rpartition(".") for one in names.values()):
        holders = [one for one in trees()[module].body if isinstance(one, ast.ClassDef)] if module in trees() else []
        for one in (one for holder in holders if holder.name == name for one in holder.body):
            if (
                isinstance(one, Function)
                and one.returns is not None
                and "property" in map(ast.unparse, one.decorator_list)
            ):
                found.add(known(module).get(ast.unparse(one.returns), ""))
    return found


def calls(function: Function, names: dict[str, str]) -> set[str]:
    """Everything that a function calls, by where it is defined; a method of something by `.name` alone."""
    found = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found.add(names.get(node.func.id, node.func.id))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of = names.get(ast.unparse(node.func.value))
            found |= {f".{node.func.attr}"} if of is None else {f"{of}.{node.func.attr}"}
    return found


def test_the_call_paths_of_the_architecture_page_are_true() -> None:
    """From a command to its equation, each step whole: the function itself, or a method of a class that the module of
    the step before it knows or reaches by a property."""
    paths = [re.findall(r"`([\w.]+)`", line) for line in PAGE.splitlines() if line.startswith("From the command to ")]
    assert [path[-1].rpartition(".")[2] for path in paths] == ["split_drift", "weight_by_factor"]
    for path in paths:
        assert len(path) <= MOST_STEPS
        for step, following in pairwise(f"featcal.{one}" for one in path):
            module, function = defined(step)
            names = known(module)
            holder, _, method = following.rpartition(".")
            through = f".{method}" if holder in reach(names) and holder not in trees() else following
            assert {following, through} & calls(function, names), f"{step} does not call {following}"
        defined(f"featcal.{path[-1]}")


def test_every_module_with_shapes_in_annotations_is_checked(pytestconfig: pytest.Config) -> None:
    """Names, not packages: checking a package would import all of it before the first test."""
    shaped = {
        module
        for module, tree in trees().items()
        if module.startswith("featcal") and any(name.startswith("jaxtyping") for name in imported(tree))
    }
    assert {*pytestconfig.getoption("jaxtyping_packages").split(",")} == {*shaped, "beartype.beartype"}
