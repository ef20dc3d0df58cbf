"""Read YAML files that others wrote."""

from __future__ import annotations

import re
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from featcal.system.errors import InputError
from featcal.system.paths import require_plain

MOST_BYTES, MOST_VALUES, MOST_DEEP = 4 << 20, 30_000, 40
"""Limits of a YAML file: bytes, values (with every alias expanded), and levels of nesting."""


def read_yaml(file: Path) -> Any:
    """Return the content of a YAML file.

    Raises:
        InputError: it cannot be read, is not YAML, or goes beyond `MOST_BYTES`, `MOST_VALUES` or `MOST_DEEP`; the
            message says where, and quotes nothing of it.
    """
    require_plain(file, most=MOST_BYTES)
    try:
        return parse_yaml(file.read_text(encoding="utf-8"), str(file))
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: not valid YAML: byte {error.start} is not UTF-8") from None
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}") from error


def parse_yaml(text: str, label: str) -> Any:
    """Return the content of a YAML text, with the errors of `read_yaml`; `label` names it in them."""
    try:
        return deepcopy(_parse(text))
    except yaml.YAMLError as error:
        raise InputError(f"{label}: {_yaml_problem(error)}") from None  # the cause quotes a line
    except (ValueError, LookupError, AttributeError):  # PyYAML's own, from values that a tag calls something else
        raise InputError(f"{label}: not valid YAML: a value does not have the type of its tag or form") from None


@lru_cache(maxsize=16)  # the app reads its suite file for every page
def _parse(text: str) -> Any:
    loader = _UniqueKeyLoader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def _yaml_problem(error: yaml.YAMLError) -> str:
    """Describe the error and its place, without quoting the file."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return f"not valid YAML: a character at position {getattr(error, 'position', 0)} that YAML does not allow"
    if error.context == "expected a single document in the stream":
        where = "" if error.problem_mark is None else f" in line {error.problem_mark.line + 1}"
        return (
            f"a second document begins{where}; featcal reads one, so give each a file of its own (a recipe that merges "
            "the output of another one needs that output first: run it, and name its folder)"
        )
    # PyYAML puts words of the file between quotes, which a message must not repeat.
    parts = [re.split("[\"']", part)[0].strip(" ,;") for part in (error.context, error.problem) if part]
    mark = error.problem_mark or error.context_mark
    return "not valid YAML: " + ", ".join(parts) + (f", line {mark.line + 1}, column {mark.column + 1}" if mark else "")


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML's safe subset, in which a duplicate key is an error and not a silent loss of the first, and which takes no
    more time and memory than a suite file needs, whatever its aliases expand to."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._deep = self._values = 0
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Build a node and count its values; an alias counts as all that it names."""
        aliased, mark = self.check_event(yaml.AliasEvent), self.peek_event().start_mark  # type: ignore[no-untyped-call]
        before, self._deep = self._values, self._deep + 1
        if self._deep > MOST_DEEP:
            raise yaml.MarkedYAMLError(problem=f"it is nested deeper than {MOST_DEEP} levels", problem_mark=mark)
        node = super().compose_node(parent, index)
        if aliased and id(node) not in self._sizes:
            raise yaml.MarkedYAMLError(problem="an alias is inside the value that it names", problem_mark=mark)
        self._values += self._sizes[id(node)] if aliased else 1
        if self._values > MOST_VALUES:
            raise yaml.MarkedYAMLError(problem=f"it holds more than {MOST_VALUES} values", problem_mark=mark)
        # Nodes live as long as the loader, so an id belongs to one of them.
        self._sizes.setdefault(id(node), self._values - before)
        self._deep -= 1
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Build a mapping and refuse a key that it has twice."""
        # Here, before `<<` is resolved: that puts keys into the node which the mapping may then override.
        node = super().compose_mapping_node(anchor)
        seen: dict[str, yaml.Node] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            first = seen.setdefault(key.value, key)
            if first is not key:
                where = f"a key occurs twice, first in line {first.start_mark.line + 1} and again"
                raise yaml.MarkedYAMLError(problem=where, problem_mark=key.start_mark)
        return node
