"""How docstrings begin, and how often a comment gives a reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from sources import texts, trees

FRAGMENTS = ("What ", "Whether ", "How ", "Which ", "Where ", "The same ", "As ")


def docstrings(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the name of everything that has a docstring, and the docstring."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "name", "module"), text


def fragments(tree: ast.AST) -> list[str]:
    """Return the names of what has a docstring that only goes on from somewhere else."""
    return [name for name, text in docstrings(tree) if text.startswith(FRAGMENTS)]


def test_every_docstring_is_understood_alone() -> None:
    found = {module: fragments(tree) for module, tree in trees().items()}
    assert {module: names for module, names in found.items() if names} == {}
    assert fragments(ast.parse('def f():\n    """What it is."""\n')) == ["f"]


def count_lines(text: str, tree: ast.AST) -> tuple[int, int]:
    """Return the lines of code of a module, docstrings aside, and its comments; one of several lines counts once."""
    prose = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, int(node.end_lineno or 0) + 1)
    }
    code, comments, above = 0, 0, False
    for number, line in enumerate(text.splitlines(), 1):
        alone = line.lstrip().startswith("# ")
        code += bool(line.strip()) and not alone and number not in prose
        comments += not above if alone else "  # " in line
        above = alone
    return code, comments


def test_comments_are_counted() -> None:
    text = '"""About.\n\nMore."""\n\n# one,\n# the same\nx = 1\n\ny = 2  # another\n'
    assert count_lines(text, ast.parse(text)) == (2, 2)


def test_reasons_stand_at_the_line() -> None:
    """Two comments to a hundred lines of code."""
    counted = [count_lines(text, trees()[module]) for module, text in texts().items()]
    code, comments = (sum(column) for column in zip(*counted, strict=True))
    assert comments >= 0.02 * code
