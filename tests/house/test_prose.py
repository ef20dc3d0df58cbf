"""How docstrings begin, and how often a comment gives a reason."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = [file for room in ("featcal", "app", "pages") for file in sorted((ROOT / room).rglob("*.py"))]
FRAGMENTS = ("What ", "Whether ", "How ", "Which ", "Where ", "The same ", "As ")


def docstrings(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the name of everything that has a docstring, and the docstring."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "name", "module"), text


def fragments(source: str) -> list[str]:
    """Return the names of what has a docstring that only goes on from somewhere else."""
    return [name for name, text in docstrings(ast.parse(source)) if text.startswith(FRAGMENTS)]


def test_every_docstring_is_understood_alone() -> None:
    found = {str(file.relative_to(ROOT)): fragments(file.read_text(encoding="utf-8")) for file in FILES}
    assert {file: names for file, names in found.items() if names} == {}
    assert fragments('def f():\n    """What it is."""\n') == ["f"]


def test_reasons_stand_at_the_line() -> None:
    """Two comments to a hundred lines of code; a comment of several lines is one."""
    code = comments = 0
    for file in FILES:
        source = file.read_text(encoding="utf-8")
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
        lines = [token.start[0] for token in tokens if token.type == tokenize.COMMENT]
        comments += sum(line - 1 not in lines for line in lines)
        ignored = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
        strings = {n for one in ast.walk(ast.parse(source)) if is_docstring(one) for n in span(one)}
        code += len({token.start[0] for token in tokens if token.type not in ignored} - strings)
    assert comments >= 0.02 * code


def is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def span(node: ast.AST) -> range:
    return range(node.lineno, node.end_lineno + 1)  # type: ignore[attr-defined]
