"""Run the command line: every command prints a table, or with `--json` one document on stdout; progress goes to stderr.

Exit status: 0 done, 1 the input is wrong, 2 usage, 130 interrupted.
"""

from __future__ import annotations

import os
import sys

import click

from featcal import __version__
from featcal.cli import history, measure, repair, score, show, start, study, suite, write
from featcal.cli.groups import Group, Verbs
from featcal.cli.terminal import say
from featcal.system.environment import hush_hub_clients, ignore_own_warnings_of_torch, let_threads_sleep
from featcal.system.errors import FeatcalError, InputError

_SUITE = Group(
    "suite",
    help="List suites and make suite files.",
    commands=[suite.list_suites, start.init, suite.import_, suite.export_pool],
)
_STUDY = Group(
    "study",
    help="Measure many calibrations and methods, or one of them closely.",
    commands=[
        repair.sweep,
        study.budget,
        study.corrupt,
        study.schedule,
        study.ablate,
        study.tasks,
        study.paper,
        measure.features,
        repair.conditioning,
        score.canary,
    ],
)
_HISTORY = Group(
    "history",
    help="List, name, pin and delete what was measured.",
    commands=[history.list_runs, history.rename, history.pin, history.delete],
)
SECTIONS = {
    "Find what is wrong": (suite.check, measure.drift, start.diagnose, show.app, show.mcp),
    "Repair it": (write.merge, repair.calibrate, repair.select),
    "See what it gives": (score.evaluate, score.compare, show.report),
    "Hand it on": (write.export, write.push, write.replay),
    "More commands": (_SUITE, _STUDY, _HISTORY),
}
"""Commands in the order of a working day."""


@click.group(
    cls=Verbs,
    sections=SECTIONS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="featcal")
@click.pass_context
def commands(context: click.Context) -> None:
    """See where a merged model went wrong, repair it in closed form, ship the checkpoint.

    SUITE is the name of a suite that comes with featcal, or the path of a suite file. A model is named alike
    everywhere: base, merged, expert, calibrated:lam=0.05, a method, or a folder.
    """
    # torchrun sets WORLD_SIZE; its processes would race for one output folder.
    if context.invoked_subcommand not in _SHARING and os.environ.get("WORLD_SIZE", "1") != "1":
        raise InputError(
            f"this is one of {os.environ['WORLD_SIZE']} processes (WORLD_SIZE), of which each would do all of "
            f"'{context.invoked_subcommand}': only {', '.join(_SHARING)} shares its work; start this without torchrun"
        )
    if context.invoked_subcommand != show.app.name:  # which lets threads wait longer (`server.launch`)
        let_threads_sleep()


_SHARING = ("calibrate",)
"""Commands that several processes run together."""


def main() -> None:
    """Run a command line, and end with the exit status of its outcome."""
    ignore_own_warnings_of_torch()
    hush_hub_clients()
    try:
        # Standalone, click would print its own errors and never let a FeatcalError through to the clause below.
        sys.exit(commands.main(standalone_mode=False) or 0)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except FeatcalError as error:
        say(f"featcal: {error}", err=True)
        sys.exit(1)
    # click turns the interrupt of a prompt into its own exception.
    except (KeyboardInterrupt, click.Abort):
        click.echo("featcal: interrupted; nothing half-written was left under the output name", err=True)
        sys.exit(130)
