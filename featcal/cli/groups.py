"""Group commands, and renew commands and options that have other names now."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import click

from featcal.cli.terminal import say

_MOVED: Mapping[str, str] = {
    "suites": "suite list",
    "init": "suite init",
    "import": "suite import",
    "export-pool": "suite export-pool",
    "convert": "export",
    "sweep": "study sweep",
    "budget": "study budget",
    "corrupt": "study corrupt",
    "schedule": "study schedule",
    "ablate": "study ablate",
    "tasks": "study tasks",
    "features": "study features",
    "conditioning": "study conditioning",
    "canary": "study canary",
    "runs rename": "history rename",
    "runs pin": "history pin",
    "runs delete": "history delete",
    "runs": "history list",
}
"""Old names of commands, which still run, with the new ones."""
_GONE: Mapping[str, str] = {"polish": "featcal merge SUITE --method polished:steps=30@MODEL --out DIR"}
"""Commands that are gone, each with the command line that does its work."""
Renewal = str | Callable[[str], Sequence[str]]
"""New name of an option, or a function that turns its value into new words."""


class Group(click.Group):
    """A group whose help lists its commands in the order in which they were added."""

    def list_commands(self, context: click.Context) -> list[str]:
        """Return the names of all commands."""
        # click sorts by name.
        return list(self.commands)


class Verbs(Group):
    """Group of all commands, in sections, which also takes their old names.

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
                limit = formatter.width - widest - 6  # what click leaves of a line behind the names
                rows = [(f"{one.name:<{widest}}", one.get_short_help_str(limit)) for one in commands]
                formatter.write_dl(rows)

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that is asked for, by its new name or its old one, and the words behind it."""
        if args[0] in _GONE:
            context.fail(f"'{args[0]}' is not a command any more; write {_GONE[args[0]]}")
        # Two words first: "runs rename" must not be read as the old name "runs".
        for length in (2, 1):
            old = " ".join(args[:length])
            if old in _MOVED:
                _say_new_name(context, old, f"featcal {_MOVED[old]}")
                args = [*_MOVED[old].split(), *args[length:]]
                break
        return super().resolve_command(context, args)


class Command(click.Command):
    """A command that still takes old names of its options, and says the new ones.

    Args:
        old: old flag → the new one, or a function that turns its value into new words.
    """

    def __init__(self, *args: Any, old: Mapping[str, Renewal], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._old = old

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """Read the arguments after their old names are replaced."""
        return super().parse_args(context, list(self._renew(context, args)))

    def _renew(self, context: click.Context, args: Sequence[str]) -> Iterator[str]:
        words = iter(args)
        for word in words:
            if word == "--":  # options end here
                yield word
                yield from words
                return
            flag, equals, value = word.partition("=")
            new = self._old.get(flag)
            if new is None or (context.resilient_parsing and callable(new)):  # half a value of a line to complete
                yield word
            elif isinstance(new, str):
                say_new_flag(context, flag, new)
                yield f"{new}{equals}{value}"
            else:
                say_new_flag(context, flag, "--model, once for every model")
                yield from new(value if equals else next(words, ""))


def name_models(text: str) -> list[str]:
    """Return a list of models with commas between as the words of `--model`.

    >>> name_models("ties:scale=1,density=0.2,merged")
    ['--model', 'ties:scale=1,density=0.2', '--model', 'merged']
    """
    from featcal.studies.method_lists import parse_methods

    return [word for name in parse_methods(text) for word in ("--model", name)]


_EVAL_SAMPLES = "--eval-samples"
OF_MEASUREMENTS: Mapping[str, Renewal] = {"--samples": _EVAL_SAMPLES}
OF_STUDIES: Mapping[str, Renewal] = {"--n": _EVAL_SAMPLES, "--methods": name_models}
"""Old options of commands that measure models, and of those that measure many."""


def say_new_flag(context: click.Context, old: str, new: str) -> None:
    """Say on stderr what an option of the running command is called now."""
    _say_new_name(context, f"{_path(context)} {old}", new)


def _say_new_name(context: click.Context, old: str, new: str) -> None:
    if not context.resilient_parsing:  # a shell that completes a line asks for no advice
        say(f"featcal {old} is now {new}", err=True)


def _path(context: click.Context) -> str:
    """Return the running command's name without the program's: "study sweep"."""
    names: list[str] = []
    while context.parent is not None:
        names.insert(0, str(context.info_name))
        context = context.parent
    return " ".join(names)
