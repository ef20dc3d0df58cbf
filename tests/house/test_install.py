"""What is installed with featcal alone, what every extra adds, and that the code keeps to it, read and not run."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache

import pytest
from core_packages import OPTIONAL, brought, core, imported
from sources import trees

from featcal.system.extras import EXTRAS

MOST = 45
"""Packages that the core brings beside torch and what torch brings itself."""
PARTS = {"markupsafe": "jinja2", "choreographer": "kaleido"}
"""Packages that come with one of an extra, and are imported beside it alone."""
GUESTS = {"gguf", "IPython", "fusion_bench", "omegaconf"}
"""Packages of no extra, used where somebody has them."""
GUARDS = ("require_packages", "is_installed", "find_spec")
"""Functions that say whether a package is there, called before it is imported."""


def test_the_core_is_small() -> None:
    found, torchs = core(), brought(["torch"])
    heavy = {"streamlit", "plotly", "torchvision", "open-clip-torch", "pyarrow", "scipy", "scikit-learn"}
    assert heavy & found == set()
    assert 20 < len(found - torchs) <= MOST, sorted(found - torchs)


def test_extras_bring_what_is_said_of_them() -> None:
    beside, everything = core() - brought(["torch"]), brought(["featcal[all]"])
    for package, extra in EXTRAS.items():
        own = brought([f"featcal[{extra}]"])
        assert package in imported(own) - imported(beside), extra
        assert own <= everything, extra
    assert {*EXTRAS.values(), "all", "dev"} <= {*OPTIONAL}
    assert everything < brought(["featcal[dev]"])


class Imports(ast.NodeVisitor):
    """Every import of a module, with the function that it is in (None at the top) and what was asked before it.

    Imports for type checkers alone are left out.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.found: list[tuple[str, bool, set[str]]] = []
        """(what is imported, whether in a function, packages that were asked for before it there)"""
        self._asked: list[set[str]] = []
        self.visit(tree)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._asked.append({*self._asked[-1]} if self._asked else set())
        self.generic_visit(node)
        self._asked.pop()

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) != "TYPE_CHECKING":
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        given = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        if name in GUARDS and self._asked:
            self._asked[-1] |= {*given}
        elif name == "import_module":
            self._add(given)
        self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self._add([one.name for one in node.names])

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        whole = [f"{node.module}.{one.name}" for one in node.names]
        self._add([one if one in trees() else str(node.module) for one in whole])

    def _add(self, modules: list[str]) -> None:
        inside = bool(self._asked)
        self.found += [(one, inside, {*self._asked[-1]} if inside else set()) for one in modules]


def package(module: str) -> str:
    top = module.partition(".")[0]
    return PARTS.get(top, top)


@cache
def product() -> dict[str, list[tuple[str, bool, set[str]]]]:
    return {module: Imports(tree).found for module, tree in trees().items() if module.startswith("featcal")}


def needed_at_import(imports: dict[str, list[tuple[str, bool, set[str]]]]) -> dict[str, set[str]]:
    """What every module of featcal needs of `EXTRAS` to be imported, itself and by what it imports at its top."""
    found = {module: {package(one) for one, inside, _ in own if not inside} & EXTRAS.keys() for module, own in
             imports.items()}  # fmt: skip
    changed = True
    while changed:
        changed = False
        for module, own in imports.items():
            more = {name for one, inside, _ in own if not inside for name in found.get(one, ())} - found[module]
            found[module] |= more
            changed |= bool(more)
    return found


def unasked(imports: dict[str, list[tuple[str, bool, set[str]]]]) -> Iterator[str]:
    """Say where a package of an extra is imported, or a module that needs one, and nobody asked whether it is there."""
    at_import = needed_at_import(imports)
    for module, own in imports.items():
        for one, inside, asked in own:
            needs = at_import.get(one, {package(one)} & EXTRAS.keys())
            if inside and needs - asked:
                yield f"{module} imports {one}, which needs {', '.join(sorted(needs - asked))}"


def test_every_import_is_of_the_core_or_asks_first() -> None:
    imports = product()
    known = {*imported(core()), *EXTRAS, *GUESTS, *sys.stdlib_module_names, "featcal"}
    found = {f"{module}: {one}" for module, own in imports.items() for one, *_ in own if package(one) not in known}
    assert found == set()
    assert [*unasked(imports)] == []


@pytest.mark.slow
def test_modules_that_need_an_extra_to_be_imported_are_charts_and_reports() -> None:
    """So a command that shows none of them never meets one."""
    found = {module for module, needs in needed_at_import(product()).items() if needs}
    assert "featcal.figures.charts" in found
    assert {one for one in found if not one.startswith("featcal.figures.")} == set()
    assert {one for one in found if not one.startswith("featcal.figures.report.") and not one.endswith("charts")} == {
        "featcal.figures.theme"
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def f():\n    import plotly", ["m imports plotly, which needs plotly"]),
        ("def f():\n    require_packages('kaleido')\n    import plotly", ["m imports plotly, which needs plotly"]),
        ("def f():\n    import plotly\n    require_packages('plotly')", ["m imports plotly, which needs plotly"]),
        ("def f():\n    require_packages('jinja2', 'plotly')\n    import plotly.subplots, jinja2", []),
        ("def f():\n    from featcal.figures import charts", ["m imports featcal.figures.charts, which needs plotly"]),
        ("if TYPE_CHECKING:\n    import plotly\ndef f():\n    import torch", []),
    ],
)
def test_what_would_be_wrong_is_found(text: str, said: list[str]) -> None:
    assert [*unasked(product() | {"m": Imports(ast.parse(text)).found})] == said
