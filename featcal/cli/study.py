"""Run studies from the command line: they measure many models in the same way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from featcal.cli import opening
from featcal.cli.options import DEVICE, JSON, JSON_FILE, SCORED, SUITE, NewPath, block, models_option
from featcal.cli.terminal import bar, print_json, print_message, print_table, require_new_file, write_document
from featcal.system.errors import InputError

if TYPE_CHECKING:
    from featcal.session.session import Session
    from featcal.studies.plan import StudyPlan
    from featcal.studies.store import Rows
    from featcal.studies.study import Study

SHOWN = block(
    JSON_FILE,
    click.option("--csv", "as_csv", is_flag=True, help="Print CSV: a row for every model and seed, with everything."),
    click.option("--markdown", "as_markdown", is_flag=True, help="Print the table as Markdown."),
    DEVICE,
    JSON,
)
"""The last options of every study."""
_MODELS = models_option("Measure this model; may be repeated:", left_out="the study's usual ones", or_all=True)
_SEEDS = click.option("--seeds", help="Calibration seeds between commas.  [42,43,44]")
_SAMPLES = click.option("--samples", default=64, show_default=True, help="Calibration samples per task.")
_STUDY = block(_MODELS, _SEEDS, _SAMPLES, SCORED, SHOWN)
_KEPT = "Finished rows are kept in the cache folder, so an interrupted study continues where it stopped."
Forms = Mapping[str, bool]


def run_study(
    study: Callable[[Session, StudyPlan], Study], suite: str, usual: Sequence[str], options: dict[str, Any]
) -> None:
    """Run a study with the options of its command, and print it.

    Args:
        usual: models to measure if none are named.
        options: models, seeds, samples, eval_samples, split, out and device; the others are forms of the output, of
            which at most one is true.

    Raises:
        InputError: the file exists, or the study cannot run.
    """
    from featcal.studies.compare import named_methods
    from featcal.studies.store import Rows

    models, out, device = (options.pop(name) for name in ("models", "out", "device"))
    drawn = {name: options.pop(name) for name in ("seeds", "samples", "eval_samples", "split")}
    if sum(options.values()) > 1:
        raise click.UsageError("--json, --csv and --markdown exclude each other; give one")
    # Before the work, which may take hours.
    require_new_file(out)
    rows = Rows()
    session = opening.open_suite_session(suite, device, one_shot=False)
    plan = _plan(session, named_methods(session, models or usual), rows, **drawn)
    _show(study(session, plan), rows, out, options)


def _plan(
    session: Session,
    methods: Sequence[str],
    rows: Rows,
    seeds: str | None,
    samples: int,
    eval_samples: int | None,
    split: str | None,
) -> StudyPlan:
    from featcal.studies.plan import SEEDS, StudyPlan, views

    drawn, on = whole_numbers(seeds, "seeds") or SEEDS, views(eval_samples, opening.scored_split(session, split))
    return StudyPlan(methods, drawn, samples, on, rows, bar())


def _show(study: Study, rows: Rows, out: Path | None, forms: Forms) -> None:
    """Print a study in one form, write it to a file if one is named, and keep it for the app."""
    from featcal.figures import study_tables

    # The file first: a closed pipe on stdout must not cost the result.
    write_document(out, study.text())
    _keep(study, rows)
    if forms["as_csv"]:
        click.echo(study_tables.row_table(study).to_csv(index=False), nl=False)
    elif forms["as_markdown"]:
        click.echo(study_tables.markdown(study.summaries()), nl=False)
    elif forms["as_json"]:
        print_json(study.to_json())
    else:
        print_table(*study_tables.text_cells(study.summaries()))


def _keep(study: Study, rows: Rows) -> None:
    """Keep a study for the app, and report on stderr if that fails."""
    from featcal.studies.library import keep_study

    for problem in filter(None, [*rows.problems, keep_study(study)]):
        print_message(f"warning: {problem}", err=True)


def whole_numbers(text: str | None, name: str) -> tuple[int, ...] | None:
    """Return the whole numbers of a list with commas between, each once; None if there is no list.

    Raises:
        InputError: an entry that is not a whole number, or no entry.
    """
    if text is None:
        return None
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() for word in words):
        raise InputError(f"{name}: give whole numbers from 0 on between commas, such as 2,4,8")
    return tuple(dict.fromkeys(map(int, words)))


@click.command(epilog=_KEPT)
@SUITE
@click.option("--counts", help="Calibration samples per task, between commas.  [8,16,32,64,128,256,512]")
@_MODELS
@_SEEDS
@SCORED
@SHOWN
def budget_command(suite: str, counts: str | None, **options: Any) -> None:
    """Measure how many calibration samples methods need.

    This is Fig. 3 and Table 12 of the paper.
    """
    from featcal.studies import budget as of

    given = whole_numbers(counts, "counts") or of.COUNTS
    run_study(lambda session, plan: of.study_budget(session, plan, given), suite, of.METHODS, {**options, "samples": 1})


@click.command(epilog=_KEPT)
@SUITE
@click.option("--kinds", help="gaussian-noise, motion-blur and fog, some of them between commas.  [all]")
@click.option("--severities", help="Severities from 1 to 5, between commas.  [3]")
@_STUDY
def corrupt_command(suite: str, kinds: str | None, severities: str | None, **options: Any) -> None:
    """Measure the effect of corrupted calibration pictures.

    Test pictures stay clean (Table 6 and Fig. 4 of the paper).
    """
    from featcal.studies import corrupt as of
    from featcal.suite.source import CORRUPTIONS

    chosen = CORRUPTIONS if kinds is None else [one.strip() for one in kinds.split(",") if one.strip()]
    levels = whole_numbers(severities, "severities") or of.SEVERITIES
    run_study(lambda session, plan: of.study_corruption(session, plan, chosen, levels), suite, of.METHODS, options)


@click.command(epilog=_KEPT)
@SUITE
@_STUDY
def schedule_command(suite: str, **options: Any) -> None:
    """Compare the forward order with stale and parallel features.

    It scores whole models (Prop. 8). "stale" fits every block on the output of a block of the merged model, "parallel"
    fits all blocks on the merged model's features; each takes as many calibrations as there are blocks.
    """
    from featcal.studies import schedule as of

    run_study(of.study_schedule, suite, of.METHODS, options)


@click.command(epilog=_KEPT)
@SUITE
@_STUDY
def ablate_command(suite: str, **options: Any) -> None:
    """Leave out parts of the recipes one by one.

    Parts are biases, norms, token weights, kinds of maps, anchor, alpha and beta.
    """
    from featcal.studies import ablate as of

    run_study(of.study_ablation, suite, ("merged",), options)


@click.command(epilog=_KEPT)
@SUITE
@click.option("--counts", help="Numbers of tasks between commas.  [2, doubled up to all]")
@_STUDY
def tasks_command(suite: str, counts: str | None, **options: Any) -> None:
    """Measure methods on the suite's first 2, 4, 8, … tasks.

    It merges the experts of these tasks anew.
    """
    from featcal.studies import tasks as of

    given = whole_numbers(counts, "counts")
    run_study(lambda session, plan: of.study_task_counts(session, plan, given), suite, of.METHODS, options)


@click.command(epilog=_KEPT)
@SUITE
@models_option("Measure this row of the table; may be repeated:", left_out="all rows that there is a model of")
@_SEEDS
@click.option("--samples", default=256, show_default=True, help="Calibration samples per task; the paper has 256.")
@SCORED
@click.option("--out", type=NewPath(), help="Write a page of Markdown to this file; must not exist.  [no file]")
@DEVICE
@JSON
def paper_command(
    suite: str, models: tuple[str, ...], out: Path | None, device: str, as_json: bool, **drawn: Any
) -> None:
    """Measure the paper's tables, next to the printed scores.

    It merges, calibrates and scores a suite of one of the paper's tables by the paper's protocol. Every score is next
    to the printed one, with a 95 % interval and a verdict on whether both agree.
    """
    from featcal.studies.paper import printed_scores

    require_new_file(out)
    # Before models are fetched.
    printed = printed_scores(opening.load(suite).name)
    session = opening.open_suite_session(suite, device, one_shot=False)
    from featcal.figures import paper_page
    from featcal.studies.reproduce import reproduce, table_models
    from featcal.studies.store import Rows

    rows = Rows()
    found = reproduce(session, _plan(session, models or table_models(printed), rows, **drawn), printed)
    write_document(out, paper_page.paper_page(found))
    _keep(found.study, rows)
    if as_json:
        print_json(found.to_json())
        return
    print_message(found.printed.table.name)
    print_table(paper_page.cell_rows(found.cells), paper_page.HEADER)
    for sentence in [*found.departures, *(f"not measured: {one}" for one in found.missing)]:
        print_message(f"note: {sentence}", err=True)
    print_message(found.summary())
