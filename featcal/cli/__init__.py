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
from featcal.cli.terminal import print_message
from featcal.system.environment import hush_hub_clients, ignore_own_warnings_of_torch, let_threads_sleep
from featcal.system.errors import FeatcalError, InputError

_SUITE = Group(
    "suite",
    help="List suites and make suite files.",
    commands=[suite.list_suites, start.init_command, suite.import_command, suite.export_pool_command],
)
_STUDY = Group(
    "study",
    help="Measure many calibrations and methods, or one of them closely.",
    commands=[
        repair.sweep_command,
        study.budget_command,
        study.corrupt_command,
        study.schedule_command,
        study.ablate_command,
        study.tasks_command,
        study.paper_command,
        measure.features_command,
        repair.conditioning_command,
        score.canary_command,
    ],
)
_HISTORY = Group(
    "history",
    help="List, name, pin and delete what was measured.",
    commands=[history.list_runs, history.rename_command, history.pin_command, history.delete_command],
)
SECTIONS = {
    "Find what is wrong": (
        suite.check_command,
        measure.drift_command,
        start.diagnose_command,
        show.app_command,
        show.mcp_command,
    ),
    "Repair it": (write.merge_command, repair.calibrate_command, repair.select_command),
    "See what it gives": (score.evaluate_command, score.compare_command, show.report_command),
    "Hand it on": (write.export_command, write.push_command, write.replay_command),
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
def featcal_command(context: click.Context) -> None:
    """See where a merged model went wrong, repair it in closed form, ship the checkpoint.

    SUITE is the name of a suite that comes with featcal, or the path of a suite file. A model is named alike
    everywhere: base, merged, expert, calibrated:lam=0.05, a method, or a folder.
    """
    # torchrun sets WORLD_SIZE; its processes would race for one output folder.
    if context.invoked_subcommand not in _SHARING and os.environ.get("WORLD_SIZE", "1") != "1":
        raise InputError(
            f"'{context.invoked_subcommand}' cannot share its work: each of the {os.environ['WORLD_SIZE']} processes "
            f"(WORLD_SIZE) would do all of it. Start it without torchrun; only {', '.join(_SHARING)} can use several"
        )
    if context.invoked_subcommand != show.app_command.name:  # which lets threads wait longer (`server.launch`)
        let_threads_sleep()


_SHARING = ("calibrate",)
"""Commands that several processes run together."""


def main() -> None:
    """Run a command line, and end with the exit status of its outcome."""
    ignore_own_warnings_of_torch()
    hush_hub_clients()
    try:
        # Standalone, click would print its own errors and never let a FeatcalError through to the clause below.
        sys.exit(featcal_command.main(standalone_mode=False) or 0)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except FeatcalError as error:
        print_message(f"featcal: {error}", err=True)
        sys.exit(1)
    # click turns the interrupt of a prompt into its own exception.
    except (KeyboardInterrupt, click.Abort):
        click.echo("featcal: interrupted; no model is half-written under its name", err=True)
        sys.exit(130)
