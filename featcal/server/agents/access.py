"""Hold the permissions of agents, as set by the person who started the server, and refuse everything else."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from featcal.suite.methods import TEST_DATA, TRAINING, is_method, method
from featcal.suite.name_grammar import model_name
from featcal.system.errors import InputError
from featcal.system.formatting import duration, readable, shorten
from featcal.system.paths import local_path
from featcal.system.sandbox import require_in_roots, require_links_inside, server_rules

TEST = "test"
_ON_TEST = re.compile(r"\btest (split|samples|pictures|texts)\b|\bsplit:? test\b", re.IGNORECASE)
"""Words in a report about scores on the test split, also in the data at the head of a card."""


@dataclass(frozen=True)
class Access:
    """Permissions of the agents of a server; the rules of its process (`system.sandbox`) set the folders, the memory
    and the use of the Hub.

    Args:
        write: whether new folders may be written below the roots.
        test: whether agents may measure on the test split, or read its scores.
        seconds: most estimated work of one job.
    """

    write: bool = False
    test: bool = False
    seconds: float = 3600.0

    def require_new_folder(self, out: str) -> Path:
        """Return the absolute path of a folder to write.

        Raises:
            InputError: the server is read-only, or the folder is there already or not below a root.
        """
        if not self.write:
            raise InputError(
                "this server is read-only, so nothing is written; the person who started it can allow new folders "
                "with featcal mcp --allow-write; or run the command yourself"
            )
        place = Path(out).absolute()
        require_in_roots(place, "out")
        if os.path.lexists(place):  # lexists: a broken link is in the way too
            raise InputError("out exists already, and nothing is overwritten; name another folder")
        return place

    def require_split(self, split: str) -> None:
        """Raise InputError for the test split if it is not allowed."""
        if split == TEST and not self.test:
            raise InputError(
                "the test split is closed here, because choosing by test scores makes them too optimistic; measure on "
                "validation. The person who started the server can open it with featcal mcp --allow-test"
            )

    def require_model(self, name: str) -> None:
        """Check that a model may be named.

        Raises:
            InputError: a malformed name, a method that reads the test split without permission, or one that trains,
                whose time cannot be estimated.
        """
        part: str | None = name
        while part is not None:
            parsed = model_name(part)
            needs = method(parsed.kind).about.needs if is_method(parsed.kind) else ()
            if TEST_DATA in needs:
                self.require_split(TEST)
            if TRAINING in needs:
                raise InputError(
                    f"model '{shorten(name)}': {parsed.kind} trains, so its duration cannot be estimated; run it "
                    "on the command line, or name a method in closed form"
                )
            part = parsed.of

    def require_limits(self, seconds: float, memory: int, command: str) -> None:
        """Raise InputError for a job that exceeds the limits of time or memory.

        Args:
            seconds, memory: estimates, memory in bytes.
            command: the equivalent command line.
        """
        rules = server_rules()
        problems = []
        if seconds > self.seconds:
            problems.append(
                f"this takes about {duration(seconds)}, and a job may take {duration(self.seconds)} (--max-minutes)"
            )
        if rules is not None and memory > rules.max_memory:
            problems.append(
                f"this needs about {readable(memory)} of memory, and a job may need {readable(rules.max_memory)} "
                "(--max-memory)"
            )
        if problems:
            raise InputError(f"{'; '.join(problems)}: take fewer samples, or leave it to a person: {command}")

    def require_open(self, content: Any) -> None:
        """Raise InputError if a document, or a text, has forbidden scores of the test split."""
        if not self.test and _is_on_test(content):
            self.require_split(TEST)


def _is_on_test(content: Any) -> bool:
    if isinstance(content, Mapping):
        return content.get("split") == TEST or any(map(_is_on_test, content.values()))
    if isinstance(content, list):
        return any(map(_is_on_test, content))
    return isinstance(content, str) and _ON_TEST.search(content) is not None


def resolve_shared_path(named: str, label: str) -> Path:
    """Return the path of a folder or file that an agent names; a folder must not have links that lead outside the
    allowed folders.

    Raises:
        InputError: it leads elsewhere, or nothing is there.
    """
    place = local_path(named, Path.cwd(), label)
    if not place.exists():
        raise InputError(f"{label}: nothing is there; paths start from the first folder that this server shares")
    require_links_inside(place, label)
    return place
