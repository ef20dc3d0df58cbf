"""Commands that measure many models alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from featcal.cli import opening
from featcal.cli.options import DEVICE, JSON, SPLIT, SUITE, block
from featcal.cli.terminal import bar, say, show
from featcal.system.errors import InputError

if TYPE_CHECKING:
    from featcal.session.session import Session
    from featcal.studies.plan import Plan
    from featcal.studies.store import Rows
    from featcal.studies.study import Study

SHOWN = block(
    click.option("--out", type=click.Path(path_type=Path), help="File for the JSON document; must not exist."),
    click.option("--csv", "as_csv", is_flag=True, help="Print CSV: a row for every model and seed, with everything."),
    click.option("--markdown", "as_markdown", is_flag=True, help="Print the table as Markdown."),
    DEVICE,
    JSON,
)
"""How every study ends."""
METHODS = click.option("--methods", help="Names of models between commas, in place of the usual ones.")
SEEDS = click.option("--seeds", help="Calibration seeds between commas.  [42,43,44]")
SAMPLES = click.option("--samples", default=64, show_default=True, help="Calibration samples per task.")
SCORED = block(
    click.option("--n", type=int, help="Samples per task to score.  [all]"),
    click.option("--split", type=SPLIT, default="test", show_default=True, help="Of them."),
)
STUDY = block(METHODS, SEEDS, SAMPLES, SCORED, SHOWN)
Forms = Mapping[str, bool]
_KEPT = "Finished rows are kept in the cache folder, so a study that was interrupted goes on where it stopped."


def run_study(
    study: Callable[[Session, Plan], Study],
    suite: str,
    asked: Mapping[str, Any],
    *,
    out: Path | None,
    device: str,
    **forms: bool,
) -> None:
    """Run a study as the options of its command say, and show it.

    Args:
        asked: methods, seeds, samples, n and split.
        forms: as_json, as_csv and as_markdown, of which one at most.

    Raises:
        InputError: the file is there already, or as the study.
    """
    from featcal.studies.method_lists import parse_methods
    from featcal.studies.method_lists import seeds as numbers
    from featcal.studies.plan import SEEDS as USUAL
    from featcal.studies.plan import Plan, views
    from featcal.studies.store import Rows

    if sum(forms.values()) > 1:
        raise click.UsageError("give one of --json, --csv and --markdown")
    if out is not None and out.exists():
        raise InputError(f"{out} exists; name another file")
    rows = Rows()
    seeds = USUAL if asked["seeds"] is None else numbers(asked["seeds"])
    on = views(asked["n"], asked["split"])
    plan = Plan(parse_methods(asked["methods"]), seeds, asked["samples"], on, rows, bar())
    _show(study(opening.session(suite, device, one_shot=False), plan), rows, out, forms)


def _show(study: Study, rows: Rows, out: Path | None, forms: Forms) -> None:
    """A study on stdout, in one form, in a file, and where pages find it."""
    from featcal.figures import study_tables
    from featcal.studies.library import keep
    from featcal.system.atomic_files import put_new

    if out is not None:
        try:
            put_new(out, study.text())
        except OSError as error:
            raise InputError(f"{out} cannot be written: {error.strerror}; name another file") from error
    for problem in filter(None, [*rows.problems, keep(study)]):
        say(f"warning: {problem}", err=True)
    if forms["as_csv"]:
        click.echo(study_tables.row_table(study).to_csv(index=False), nl=False)
    elif forms["as_markdown"]:
        click.echo(study_tables.markdown(study.summaries()), nl=False)
    else:
        cells, header = study_tables.text_cells(study.summaries())
        show(study.to_json() if forms["as_json"] else None, forms["as_json"], cells, header)


def _split_up(options: dict[str, Any], usual: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is asked for, with the usual methods where none are named, and how it is shown."""
    asked = {name: options.pop(name) for name in ("methods", "seeds", "samples", "n", "split")}
    return {**asked, "methods": asked["methods"] or ",".join(usual)}, options


def _whole(text: str | None, name: str) -> list[int] | None:
    """The whole numbers of a list with commas between; None where there is no list.

    Raises:
        InputError: something else.
    """
    if text is None:
        return None
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() for word in words):
        raise InputError(f"{name}: give whole numbers between commas, such as 2,4,8")
    return [int(word) for word in words]


@click.command(epilog=_KEPT)
@SUITE
@click.option("--counts", help="Calibration samples per task, between commas.  [8,16,32,64,128,256,512]")
@METHODS
@SEEDS
@SCORED
@SHOWN
def budget(suite: str, counts: str | None, **options: Any) -> None:
    """Measure how many calibration samples methods need (Fig. 3, Table 12)."""
    from featcal.studies import budget as of

    asked, shown = _split_up({**options, "samples": 1}, of.METHODS)
    given = _whole(counts, "counts")
    run_study(lambda session, plan: of.budget(session, plan, given or of.COUNTS), suite, asked, **shown)


@click.command(epilog=_KEPT)
@SUITE
@click.option("--kinds", help="gaussian-noise, motion-blur, fog, between commas.  [all]")
@click.option("--severities", help="1 to 5, between commas.  [3]")
@STUDY
def corrupt(suite: str, kinds: str | None, severities: str | None, **options: Any) -> None:
    """Measure what calibration on corrupted pictures costs; test pictures stay clean (Table 6, Fig. 4)."""
    from featcal.studies import corrupt as of
    from featcal.suite.source import CORRUPTIONS

    asked, shown = _split_up(options, of.METHODS)
    chosen = CORRUPTIONS if kinds is None else [one.strip() for one in kinds.split(",") if one.strip()]
    levels = _whole(severities, "severities") or of.SEVERITIES
    run_study(lambda session, plan: of.corrupt(session, plan, chosen, levels), suite, asked, **shown)


@click.command(epilog=_KEPT)
@SUITE
@STUDY
def schedule(suite: str, **options: Any) -> None:
    """Measure what the forward order is worth: against stale and parallel features (Prop. 8, whole models).

    stale fits every block behind one that is still the merged model's, parallel all of them on the merged model's
    features; each takes as many calibrations as there are blocks.
    """
    from featcal.studies import schedule as of

    asked, shown = _split_up(options, of.METHODS)
    run_study(of.schedule, suite, asked, **shown)


@click.command(epilog=_KEPT)
@SUITE
@STUDY
def ablate(suite: str, **options: Any) -> None:
    """Measure what parts of both recipes are worth: biases, norms, token weights, maps, anchor, alpha, beta."""
    from featcal.studies import ablate as of

    asked, shown = _split_up(options, ("merged",))
    run_study(of.ablate, suite, asked, **shown)


@click.command("tasks", epilog=_KEPT)
@SUITE
@click.option("--counts", help="Numbers of tasks between commas.  [2, doubled up to all]")
@STUDY
def tasks(suite: str, counts: str | None, **options: Any) -> None:
    """Measure methods on the suite's first tasks alone, merged anew, for rising numbers of tasks."""
    from featcal.studies import tasks as of

    asked, shown = _split_up(options, of.METHODS)
    given = _whole(counts, "counts")
    run_study(lambda session, plan: of.tasks(session, plan, given), suite, asked, **shown)


COMMANDS = (budget, corrupt, schedule, ablate, tasks)
