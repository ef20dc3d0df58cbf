"""Group commands in sections of the help."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click


class Group(click.Group):
    """A group whose help lists its commands in the order in which they were added."""

    def list_commands(self, context: click.Context) -> list[str]:
        """Return the names of all commands."""
        # click sorts by name.
        return list(self.commands)


class Verbs(Group):
    """Group of all commands, in sections.

    Args:
        sections: title → the commands under it, in the order of the help.
    """

    def __init__(self, *args: Any, sections: Mapping[str, Sequence[click.Command]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sections = sections
        for one in (command for commands in sections.values() for command in commands):
            self.add_command(one)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write every section of the help."""
        widest = max(map(len, self.commands))
        for title, commands in self._sections.items():
            with formatter.section(title):
                limit = formatter.width - widest - 6  # what click leaves of a line after the names
                rows = [(f"{one.name:<{widest}}", one.get_short_help_str(limit)) for one in commands]
                formatter.write_dl(rows)
