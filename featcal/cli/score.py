"""Commands that score models."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from featcal.cli import opening
from featcal.cli.options import DRAWN, MODEL, SCORED, SPLIT, SUITE
from featcal.cli.study import SHOWN, run_study
from featcal.cli.terminal import bar, say, say_problems, show
from featcal.system.errors import InputError
from featcal.system.formatting import percent, points
from featcal.system.progress import keep_memory

if TYPE_CHECKING:
    from featcal.suite.schema import Suite


@click.command()
@SUITE
@MODEL
@SCORED
@click.option("--answers", is_flag=True, help="With --json: what the model said and what is right, sample by sample.")
@click.option("--lm-eval", "harness", metavar="TASKS", help="Tasks of lm-evaluation-harness instead of the suite's.")
@click.option("--lm-eval-args", default="", help="Further options of the harness, in one string.")
@DRAWN
def evaluate(
    suite: str,
    model: str,
    split: str,
    samples: int | None,
    answers: bool,
    harness: str | None,
    lm_eval_args: str,
    seed: int,
    device: str,
    as_json: bool,
) -> None:
    """Score a model on every task of a suite, or on tasks of lm-evaluation-harness."""
    from featcal.studies.history import History
    from featcal.studies.recording import count_looks, hash_of
    from featcal.suite.views import EvaluationSamples

    if harness is not None:
        given = click.get_current_context().get_parameter_source
        ignored = [
            name
            for name in ("split", "samples", "answers", "seed", "device")
            if given(name) is not ParameterSource.DEFAULT
        ]
        if ignored:
            raise InputError(f"--{', --'.join(ignored)} mean nothing to lm-eval; put its own options in --lm-eval-args")
        _evaluate_with_harness(opening.load(suite), model, harness.split(","), shlex.split(lm_eval_args), as_json)
        return
    if answers and not as_json:
        raise click.UsageError("--answers are in the JSON document alone; add --json")
    session, view = opening.session(suite, device), EvaluationSamples(samples, split, seed)
    named, history = session.resolve(model), History()
    with count_looks(session, [named], view, "featcal evaluate", history):
        scores = session.measure.scores(named, view, bar())
    if split == "test":
        looks = history.looks(hash_of(session))
        say(f"looks at this suite's test split so far: {looks.times}, at {looks.models} model(s)", err=True)
        say_problems(history)
    rows = [(task, s.metric, percent(s.value), str(s.n)) for task, s in scores.tasks.items()]
    rows.append(("average", "", percent(scores.average), ""))
    document = scores.to_json()
    if answers:
        for task, one in scores.tasks.items():
            document["tasks"][task]["answers"] = one.answers()
    show(document, as_json, rows, ("task", "metric", "%", "n"))


@click.command()
@SUITE
@click.option("--model", "models", multiple=True, help="A, then once more B; as for evaluate.")
@click.option("--methods", help="Names of models between commas, or all: the table of them.")
@click.option("--split", type=SPLIT, default="test", show_default=True)
@click.option(
    "--samples",
    type=int,
    help="Of two models: samples per task to score.  [all]  Of a table: calibration samples per task.  [64]",
)
@click.option("--n", type=int, help="Of a table: samples per task to score.  [all]")
@click.option("--seed", default=42, show_default=True, help="Of two models: decides which samples are drawn.")
@click.option("--seeds", help="Of a table: calibration seeds.  [42,43,44]")
@SHOWN
def compare(suite: str, models: tuple[str, ...], methods: str | None, **options: Any) -> None:
    """Compare two models sample by sample, or many methods in one table.

    With --model twice: the difference B - A with its interval, and the samples that turned. The interval is of 95 %
    (bootstrap over samples, within tasks), p that of the exact McNemar test; both say nothing of other calibration
    seeds. Of a rank correlation there is the interval alone: no answer of it is right or wrong.

    With --methods: scores (average, share of the experts', worst task), drift and cosine of the final features, what
    making a model costs and what it needs, with the 95 % interval over calibration seeds. Every finished row is kept
    in the cache folder, so a table that was interrupted goes on where it stopped. A method that cannot be used is a
    row that says why.
    """
    given = click.get_current_context().get_parameter_source
    foreign = ("seed",) if methods else ("n", "seeds", "out", "as_csv", "as_markdown")
    if bool(models) == bool(methods):
        raise click.UsageError("give --model twice, or --methods")
    meant = [name.removeprefix("as_") for name in foreign if given(name) is not ParameterSource.DEFAULT]
    if meant:
        raise click.UsageError(f"--{', --'.join(meant)} mean nothing with --{'methods' if methods else 'model'}")
    if methods:
        _methods(suite, methods, **options)
    else:
        kept = ("split", "samples", "seed", "device", "as_json")
        _two_models(suite, models, **{name: options[name] for name in kept})


def _methods(
    suite: str, methods: str, *, split: str, samples: int | None, n: int | None, seeds: str | None, **shown: Any
) -> None:
    """The table of `featcal compare --methods`."""
    from featcal.studies.compare import compare_methods
    from featcal.studies.plan import SAMPLES

    del shown["seed"]
    asked = {"methods": methods, "seeds": seeds, "samples": SAMPLES if samples is None else samples}
    run_study(compare_methods, suite, {**asked, "n": n, "split": split}, **shown)


def _two_models(
    suite: str, models: tuple[str, ...], split: str, samples: int | None, seed: int, device: str, as_json: bool
) -> None:
    """The comparison of `featcal compare --model A --model B`."""
    from featcal.studies.history import History
    from featcal.studies.recording import count_looks
    from featcal.suite.views import EvaluationSamples

    if len(models) != 2:
        raise click.UsageError("give --model twice: first A, then B")
    session, view, history = opening.session(suite, device), EvaluationSamples(samples, split, seed), History()
    a, b = map(session.resolve, models)
    with count_looks(session, (a, b), view, "featcal compare", history):
        found = session.measure.compare(a, b, view, bar()).to_json()
    say_problems(history)
    rows = [_comparison(*row) for row in ({**found["tasks"], "average": found["average"]}).items()]
    header = ("task", "n", "A, %", "B, %", "B - A", "from", "to", "p", "fixed", "broken", "right", "wrong", "")
    show(found, as_json, rows, header)
    if not as_json:
        say(f"A {found['a']}, B {found['b']}; {found['split']} split; {found['draws']} bootstrap draws", err=True)


def _comparison(task: str, one: Mapping[str, Any]) -> list[str]:
    """One row of `featcal compare`: scores in %, their difference with its interval in points, test and counts."""
    counts = ("-" if one[name] is None else str(one[name]) for name in ("fixed", "broken", "both_right", "both_wrong"))
    return [
        task,
        str(one["n"]),
        *(percent(one[name]) for name in ("a", "b")),
        *(points(one[name]) for name in ("difference", "low", "high")),
        "-" if one["p"] is None else f"{one['p']:.2g}",
        *counts,
        "within noise" if one["within_noise"] else "",
    ]


def _evaluate_with_harness(suite: Suite, model: str, tasks: list[str], arguments: list[str], as_json: bool) -> None:
    from featcal.evaluation.lm_eval import run_lm_eval
    from featcal.formats.locate import checkpoint_folder

    if model == "merged" and not isinstance(suite.merged, str):
        raise InputError("the merged model is a recipe; write it with featcal merge and give the folder with --model")
    if model == "expert":
        raise InputError("lm-eval scores one model; give an expert's folder with --model")
    refs = {"base": suite.base, **({"merged": suite.merged} if isinstance(suite.merged, str) else {})}
    root = suite.root if model in refs else Path.cwd()
    document: dict[str, Any] = {"suite": suite.name, "model": model}
    document |= run_lm_eval(checkpoint_folder(refs.get(model, model), root, f"model '{model}'"), tasks, arguments)
    rows = [(task, s["metric"], percent(s["value"]), str(s["n"])) for task, s in document["tasks"].items()]
    show(document, as_json, rows, ("task", "metric", "%", "n"))


@click.command()
@SUITE
@MODEL
@click.option("--against", default="merged", show_default=True, help="What the model is held against; as --model.")
@click.option("--require", is_flag=True, help="Exit status 1 where generation is broken.")
@DRAWN
def canary(suite: str, model: str, against: str, require: bool, seed: int, device: str, as_json: bool) -> None:
    """Check that a language model still generates, on prompts from the calibration samples.

    Its greedy answers of up to 64 tokens: how many go round in loops, how many end by themselves. The answers of each
    task's expert: their perplexity under the model, and how far its distributions of the next token are from the
    expert's. Broken is what is clearly worse than both the expert and the model it is held against; a perplexity, what
    is so beyond two standard errors over prompts.
    """
    from featcal.evaluation.generation_check import note_unchecked

    keep_memory()
    session = opening.session(suite, device)
    found = session.measure.canary(session.resolve(model), session.resolve(against), seed, bar())
    columns = ("loops", "ended", "perplexity", "distance")
    rows = [
        (task, who, *("" if value is None else value for value in (getattr(reading, name) for name in columns)))
        for task, one in found.tasks.items()
        for who, reading in {"expert": one.expert, against: one.against, model: one.model}.items()
    ]
    show(found.to_json(), as_json, rows, ("task", "model", *columns))
    for note in note_unchecked(session.family):
        say(f"note: {note}", err=True)
    for reason in found.reasons:
        say(f"broken: {reason}", err=True, colour="red")
    if require and found.is_broken:
        raise SystemExit(1)


COMMANDS = (evaluate, compare, canary)
