"""Check and complete a folder for another program: `featcal check --for` and `featcal export --for`."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from featcal.cli.options import block
from featcal.cli.terminal import print_json, print_message, say_notes
from featcal.preflight.handover.runtimes import SOURCES, SUPPORT, TARGETS
from featcal.system.formatting import some
from featcal.system.json_files import read_json

if TYPE_CHECKING:
    from featcal.preflight.handover.check import Checked, Handover

T = TypeVar("T")


def target_options(what: str, left_out: str) -> Callable[[T], T]:
    """Return `--for` and `--base` of a command.

    Args:
        what: action of the command for the named program.
        left_out: action without a program.
    """
    return block(
        click.option(
            "--for",
            "targets",
            multiple=True,
            type=click.Choice(TARGETS),
            help=f"{what} for this program; may be repeated.  [{left_out}]",
        ),
        click.option(
            "--base",
            metavar="REF",
            help="With --for: the base, a folder or an id in the Hub's local cache.  [the record's or the card's]",
        ),
    )


def check_folder(path: Path, targets: Sequence[str], base: str | None, as_json: bool) -> int:
    """Print all obstacles between a folder and some programs; return the exit status."""
    from featcal.preflight.handover.check import check_for

    found = check_for(path, targets, base)
    if as_json:
        print_json(found.to_json())
    else:
        show_handovers(found)
    return 0 if found.is_ready else 1


def show_handovers(found: Checked) -> None:
    """Print problems on stderr, and notes, files and the next commands on stdout."""
    for one in found.handovers:
        _show(one, found)


def _show(one: Handover, found: Checked) -> None:
    place = f"{found.folder.path} for {one.target}"
    if one.problems:
        lines = [f"{place}: {len(one.problems)} problem(s)", *(f"  - {own.sentence}" for own in one.problems)]
        for line in lines:
            print_message(line, err=True)
    else:
        print_message(f"{place}: no problems found")
    for note in one.notes:
        print_message(f"  note: {note}")
    for name, content in one.files.items():
        # To the letter: blanks in front of a line would be part of a template.
        print_message(f"  {name}, as featcal export --for {one.target} writes it:\n\n{content}")
    if one.commands:
        print_message("  next:")
    for command in one.commands:
        print_message(f"    {command}")


def export_folder(folder: str, targets: Sequence[str], base: str | None, out: Path, as_json: bool) -> None:
    """Write a model with the files of its base that some programs need; check the written folder."""
    from featcal.export.write import rewrite
    from featcal.formats.locate import checkpoint_folder
    from featcal.preflight.handover.check import check_for, complete_folder

    path = checkpoint_folder(folder, Path.cwd(), "model to export")
    added, origin = complete_folder(path, targets, out, base)
    document = rewrite(path, out, added)
    found = check_for(Path(document["out"]), targets, origin)
    document |= {"added": sorted(added), **found.to_json()}
    say_notes({"notes": document["notes"]})
    if as_json:
        print_json(document)
        return
    print_message(
        f"written to {document['out']}; added: {some(sorted(added)) if added else 'nothing, for nothing was missing'}"
    )
    show_handovers(found)


def say_where_to(out: str) -> None:
    """Print the command that checks a written folder for other programs that can run its class, and its weights if they
    are packed."""
    config = read_json(Path(out) / "config.json") if (Path(out) / "config.json").is_file() else {}
    named = config.get("architectures")
    known = SUPPORT.get(named[0]) if isinstance(named, list) and named else None
    taken = ["vllm"] if "quantization_config" in config else SOURCES
    targets = [target for target in taken if getattr(known, target, False)]
    if targets:
        wanted = [word for target in targets for word in ("--for", target)]
        print_message(f"to hand it on: {shlex.join(['featcal', 'check', out, *wanted])}")
