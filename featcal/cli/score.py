"""Score models from the command line."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from featcal.cli import opening
from featcal.cli.completion import complete_model
from featcal.cli.options import DRAWN, MODEL, SCORED, SUITE, models_option, note_folders
from featcal.cli.study import SHOWN, run_study
from featcal.cli.terminal import (
    bar,
    print_document,
    print_message,
    print_models_json,
    print_table,
    say_notes,
    say_problems,
)
from featcal.suite.methods import ALL
from featcal.system.errors import InputError
from featcal.system.formatting import p_value, percent, points

if TYPE_CHECKING:
    from featcal.evaluation.evaluate import Scores
    from featcal.session.session import Session
    from featcal.studies.history import History
    from featcal.suite.schema import Suite
    from featcal.suite.views import EvaluationSamples


@click.command()
@SUITE
@models_option("Score this model; may be repeated:", ["merged"])
@SCORED
@click.option(
    "--card",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Score the model in this written folder, the model before it and the experts, and write the scores into its "
    "card.  [no card]",
)
@click.option("--answers", is_flag=True, help="Add each sample's answer and the right one to the document of --json.")
@click.option(
    "--lm-eval", "harness", metavar="TASKS", help="Score on these tasks of lm-evaluation-harness.  [the suite's tasks]"
)
@click.option("--lm-eval-args", default="", help="Further options of the harness, in one string.  [none]")
@DRAWN
def evaluate_command(
    suite: str,
    models: tuple[str, ...],
    split: str | None,
    eval_samples: int | None,
    card: Path | None,
    answers: bool,
    harness: str | None,
    lm_eval_args: str,
    seed: int,
    device: str,
    as_json: bool,
) -> None:
    """Score models on every task of a suite.

    --card writes the scores into a folder's card, with the 95 % interval of the gain over the model that was
    calibrated. --lm-eval scores on tasks of lm-evaluation-harness instead.

    --json prints one document for one model, and {"models": [...]} with a document for each of several.
    """
    from featcal.suite.views import EvaluationSamples

    if harness is not None:
        _require_unset("split", "eval_samples", "card", "answers", "seed", "device")
        if len(models) > 1:
            raise click.UsageError("lm-eval scores one model; give --model once")
        try:
            arguments = shlex.split(lm_eval_args)
        except ValueError as error:
            raise click.UsageError(f"--lm-eval-args cannot be read: {error}") from error
        _evaluate_with_harness(opening.load(suite), models[0], harness.split(","), arguments, as_json)
        return
    if lm_eval_args:
        raise click.UsageError("--lm-eval-args needs --lm-eval")
    if answers and not as_json:
        raise click.UsageError("--answers needs --json: only the JSON document has answers")
    session = opening.open_suite_session(suite, device, one_shot=len(models) == 1 and card is None)
    on = EvaluationSamples(eval_samples, opening.scored_split(session, split), seed)
    named = _scores_of(session, models, on) if card is None else _scores_into_card(session, card, on)
    say_notes({"notes": dict.fromkeys(note for scores in named.values() for note in scores.notes)})
    documents = []
    for model, scores in named.items():
        documents.append(scores.to_json() | {"model": model})  # as it was asked for: labels leave options out
        if answers:
            for task, one in scores.tasks.items():
                documents[-1]["tasks"][task]["answers"] = one.answers()
        rows = [(task, s.metric, percent(s.value), str(s.n)) for task, s in scores.tasks.items()]
        rows.append(("average", "", percent(scores.average), ""))
        if not as_json:
            if len(named) > 1:
                print_message(f"{'' if len(documents) == 1 else chr(10)}{model}:")
            print_table(rows, ("task", "metric", "%", "n"))
    if as_json:
        print_models_json(documents)


def _scores_into_card(session: Session, folder: Path, on: EvaluationSamples) -> dict[str, Scores]:
    """Rewrite the card of a folder with its scores, and return the scores by the name of the model."""
    from featcal.formats.hub import CARD_FILE
    from featcal.studies.history import History
    from featcal.studies.scored_card import score_into_card

    if click.get_current_context().get_parameter_source("models") is not ParameterSource.DEFAULT:
        raise click.UsageError("--card determines which models are scored; leave --model out")
    history = History()
    found = score_into_card(session, folder, on, history, progress=bar())
    _say_looks(session, on, history)
    print_message(f"the scores are in {folder / CARD_FILE}", err=True)
    return {scores.model: scores for scores in found}


def _say_looks(session: Session, on: EvaluationSamples, history: History) -> None:
    """Print on stderr how often the suite's test split was used, if this run used it again."""
    from featcal.studies.recording import hash_of

    if on.split == "test":
        looks = history.looks(hash_of(session))
        print_message(f"looks at this suite's test split so far: {looks.times}, at {looks.models} model(s)", err=True)
        say_problems(history)


def _require_unset(*names: str) -> None:
    """Raise InputError for options of the running command that the harness would ignore."""
    context = click.get_current_context()
    flags = {str(param.name): param.opts[0] for param in context.command.params}
    # By source, not by value: a default that is typed out was meant too.
    given = [flags[name] for name in names if context.get_parameter_source(name) is not ParameterSource.DEFAULT]
    if given:
        raise InputError(f"{', '.join(given)} have no effect on lm-eval; give its own options with --lm-eval-args")


def _scores_of(session: Session, models: Sequence[str], view: EvaluationSamples) -> dict[str, Scores]:
    """Return the scores of each model, and report uses of the test split on stderr."""
    from featcal.studies.history import History
    from featcal.studies.recording import count_looks

    history, named = History(), {model: session.resolve(model) for model in models}
    # Counted around the work: whoever chooses by test scores should see how often.
    with count_looks(session, list(named.values()), view, "featcal evaluate", history):
        found = {text: session.measure.scores(model, view, bar()) for text, model in named.items()}
    _say_looks(session, view, history)
    return found


_OF_TABLES = {"seeds", "out", "as_csv", "as_markdown"}
"""Options of `featcal compare` that ask for a table, beside --table."""


@click.command()
@SUITE
@models_option("Compare this model; to be repeated:", or_all=True)
@click.option("--table", is_flag=True, help="Compare two models in a table as well.")
@click.option("--samples", type=int, help="Calibration samples per task of the models in a table.  [64]")
@SCORED
@click.option("--seed", default=42, show_default=True, help="Seed of the samples on which two models are compared.")
@click.option("--seeds", help="Calibration seeds of a table, between commas.  [42,43,44]")
@SHOWN
def compare_command(suite: str, models: tuple[str, ...], table: bool, **options: Any) -> None:
    """Compare two models sample by sample, or many in one table.

    Exactly two models, without an option that belongs to a table (--table, --seeds, --out, --csv, --markdown), are
    compared sample by sample: the difference B - A with its interval, and the samples that B gets right and A does not,
    or the other way. The interval is of 95 % (bootstrap over samples, within tasks), p that of the exact McNemar test;
    neither covers other calibration seeds. A rank correlation has only the interval, because its answers are not right
    or wrong.

    Otherwise it prints a table: scores (average, share of the experts', worst task), drift and cosine of the final
    features, cost and needs of each model, with the 95 % interval over calibration seeds. The cache folder keeps every
    finished row, so an interrupted table continues where it stopped. The row of a method that cannot be used says why.
    """
    context = click.get_current_context()
    given = {name for name in options if context.get_parameter_source(name) is not ParameterSource.DEFAULT}
    if not models:
        raise click.UsageError(f"name the models with --model, once for every model; --model {ALL} means every method")
    if table or len(models) != 2 or ALL in models or given & _OF_TABLES:
        if "seed" in given:
            raise click.UsageError("--seed has no effect on a table; give its calibration seeds with --seeds")
        _compare_in_table(suite, models, **options)
        return
    if "samples" in given:
        raise click.UsageError(
            "--samples sets the calibration samples of a table and needs --table; the scored samples are set by "
            "--eval-samples"
        )
    _compare_two(
        suite, models, **{name: options[name] for name in ("split", "eval_samples", "seed", "device", "as_json")}
    )


def _compare_in_table(suite: str, models: tuple[str, ...], *, samples: int | None, **options: Any) -> None:
    """Print the table of `featcal compare`."""
    from featcal.studies.compare import compare_methods
    from featcal.studies.plan import SAMPLES

    # A table has calibration seeds of its own; `seed` belongs to the comparison of two models.
    del options["seed"]
    run_study(
        compare_methods, suite, (), {**options, "models": models, "samples": SAMPLES if samples is None else samples}
    )


def _compare_two(
    suite: str,
    models: tuple[str, ...],
    split: str | None,
    eval_samples: int | None,
    seed: int,
    device: str,
    as_json: bool,
) -> None:
    """Print the comparison of `featcal compare --model A --model B`."""
    from featcal.studies.history import History
    from featcal.studies.recording import count_looks
    from featcal.suite.views import EvaluationSamples

    session, history = opening.open_suite_session(suite, device, one_shot=False), History()
    view = EvaluationSamples(eval_samples, opening.scored_split(session, split), seed)
    a, b = map(session.resolve, models)
    with count_looks(session, (a, b), view, "featcal compare", history):
        compared = session.measure.compare(a, b, view, bar())
    say_notes({"notes": compared.notes})
    say_problems(history)
    found = compared.to_json()
    rows = [_comparison(*row) for row in ({**found["tasks"], "average": found["average"]}).items()]
    header = ("task", "n", "A, %", "B, %", "B - A", "from", "to", "p", "fixed", "broken", "right", "wrong", "")
    print_document(found, as_json, rows, header)
    if not as_json:
        print_message(
            f"A {found['a']}, B {found['b']}; {found['split']} split; {found['draws']} bootstrap draws", err=True
        )


def _comparison(task: str, one: Mapping[str, Any]) -> list[str]:
    """Return one row of `featcal compare`: scores in %, their difference and its interval in points, p and counts."""
    counts = ("-" if one[name] is None else str(one[name]) for name in ("fixed", "broken", "both_right", "both_wrong"))
    return [
        task,
        str(one["n"]),
        *(percent(one[name]) for name in ("a", "b")),
        *(points(one[name]) for name in ("difference", "low", "high")),
        "-" if one["p"] is None else p_value(one["p"]),
        *counts,
        "within noise" if one["within_noise"] else "",
    ]


def _evaluate_with_harness(suite: Suite, model: str, tasks: list[str], arguments: list[str], as_json: bool) -> None:
    """Print the scores of one model on tasks of lm-evaluation-harness."""
    from featcal.evaluation.lm_eval import run_lm_eval
    from featcal.formats.locate import checkpoint_folder

    if model == "merged" and not isinstance(suite.merged, str):
        raise InputError("the merged model is a recipe; write it with featcal merge and give the folder with --model")
    if model == "expert":
        raise InputError("lm-eval scores one model; give an expert's folder with --model")
    refs = {one: ref for one, ref in (("base", suite.base), ("merged", suite.merged)) if isinstance(ref, str)}
    # Paths in a suite file start at its folder, paths on the command line at the current one.
    root = suite.root if model in refs else Path.cwd()
    document: dict[str, Any] = {"suite": suite.name, "model": model}
    document |= run_lm_eval(checkpoint_folder(refs.get(model, model), root, f"model '{model}'"), tasks, arguments)
    found = document["tasks"].items()
    # A perplexity is no share.
    rows = [
        (task, s["metric"], percent(s["value"]) if 0 <= s["value"] <= 1 else f"{s['value']:.4g}", str(s["n"]))
        for task, s in found
    ]
    print_document(document, as_json, rows, ("task", "metric", "%", "n"))


@click.command()
@SUITE
@MODEL
@click.option(
    "--against",
    default="merged",
    show_default=True,
    callback=note_folders,
    shell_complete=complete_model,
    help="Compare with this model, named as for --model.",
)
@click.option("--require", is_flag=True, help="End with status 1 if generation is broken.")
@DRAWN
def canary_command(suite: str, model: str, against: str, require: bool, seed: int, device: str, as_json: bool) -> None:
    """Check that a language model still generates.

    The prompts come from the calibration samples. It counts the model's greedy answers of up to 64 tokens that loop,
    that are empty and that end by themselves. It measures the perplexity of each expert's answers under the model, and
    the distance between the model's and the expert's distributions of the next token. Generation is broken if one of
    these is clearly worse than both the expert's and that of --against; for a perplexity, by more than two standard
    errors over prompts.
    """
    from featcal.evaluation.generation_check import note_unchecked

    session = opening.open_suite_session(suite, device)
    found = session.measure.canary(model, against, seed, bar())
    columns = ("loops", "empty", "ended", "perplexity", "distance")
    rows = [
        (task, who, *("" if value is None else value for value in (getattr(reading, name) for name in columns)))
        for task, one in found.tasks.items()
        for who, reading in {"expert": one.expert, against: one.against, model: one.model}.items()
    ]
    print_document(found.to_json(), as_json, rows, ("task", "model", *columns))
    for note in note_unchecked(session.family):
        print_message(f"note: {note}", err=True)
    for reason in found.reasons:
        print_message(f"broken: {reason}", err=True, colour="red")
    if require and found.is_broken:
        raise SystemExit(1)
