"""The command line: every command prints a table, or with `--json` one document on stdout; progress goes to stderr.

Exit status: 0 done, 1 the input is wrong, 2 usage, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
import warnings

import click

from featcal import __version__
from featcal.cli import measure, repair, score, show, start, study, suite, write
from featcal.cli.terminal import say
from featcal.system.errors import FeatcalError, InputError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="featcal")
@click.pass_context
def commands(context: click.Context) -> None:
    """See where a merged model went wrong, repair it in closed form, ship the checkpoint.

    SUITE is the name of an embedded suite or the path of a suite file.
    """
    if context.invoked_subcommand not in _SHARING and os.environ.get("WORLD_SIZE", "1") != "1":
        raise InputError(
            f"this is one of {os.environ['WORLD_SIZE']} processes (WORLD_SIZE), of which each would do all of "
            f"'{context.invoked_subcommand}': only {', '.join(_SHARING)} shares its work; start this without torchrun"
        )


_SHARING = ("calibrate",)
"""Commands that several processes run together."""


for _room in (suite, start, measure, repair, score, study, write, show):
    for _command in _room.COMMANDS:
        commands.add_command(_command)
commands.add_command(write.export, "convert")


def main() -> None:
    """Entry point: maps every outcome to its exit status."""
    warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", FutureWarning)  # torch's own rules for jvp
    try:
        sys.exit(commands.main(standalone_mode=False) or 0)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except FeatcalError as error:
        say(f"featcal: {error}", err=True)
        sys.exit(1)
    except (KeyboardInterrupt, click.Abort):
        click.echo("featcal: interrupted; nothing half-written was left under the output name", err=True)
        sys.exit(130)
