"""Commands that score models."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from featcal.cli import opening
from featcal.cli.options import DRAWN, MODEL, SCORED, SUITE
from featcal.cli.terminal import bar, say, say_problems, show
from featcal.errors import InputError
from featcal.progress import keep_memory
from featcal.words import percent, points

if TYPE_CHECKING:
    from featcal.suite import Suite


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
    from featcal.recording import hash_of, looking
    from featcal.runs import History
    from featcal.views import View

    if harness is not None:
        given = click.get_current_context().get_parameter_source
        ignored = [
            name
            for name in ("split", "samples", "answers", "seed", "device")
            if given(name) is not ParameterSource.DEFAULT
        ]
        if ignored:
            raise InputError(f"--{', --'.join(ignored)} mean nothing to lm-eval; put its own options in --lm-eval-args")
        _evaluate_with_harness(opening.loaded(suite), model, harness.split(","), shlex.split(lm_eval_args), as_json)
        return
    session, view = opening.session(suite, device), View(samples, split, seed)
    named, history = session.named(model), History()
    with looking(session, [named], view, "featcal evaluate", history):
        scores = session.scores(named, view, bar())
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
@click.option("--model", "models", multiple=True, required=True, help="A, then once more B; as for evaluate.")
@SCORED
@DRAWN
def compare(
    suite: str, models: tuple[str, ...], split: str, samples: int | None, seed: int, device: str, as_json: bool
) -> None:
    """Score two models on the same samples: the difference B - A with its interval, and the samples that turned.

    The interval is of 95 % (bootstrap over samples, within tasks), p that of the exact McNemar test; both say nothing
    of other calibration seeds. Of a rank correlation there is the interval alone: no answer of it is right or wrong.
    """
    from featcal.recording import looking
    from featcal.runs import History
    from featcal.views import View

    if len(models) != 2:
        raise click.UsageError("give --model twice: first A, then B")
    session, view, history = opening.session(suite, device), View(samples, split, seed), History()
    a, b = map(session.named, models)
    with looking(session, (a, b), view, "featcal compare", history):
        found = session.compared(a, b, view, bar()).to_json()
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
    expert's. Broken is what is clearly worse than both the expert and the model it is held against.
    """
    keep_memory()
    session = opening.session(suite, device)
    found = session.canary(session.named(model), session.named(against), seed, bar())
    columns = ("loops", "ended", "perplexity", "distance")
    rows = [
        (task, who, *("" if value is None else value for value in (getattr(reading, name) for name in columns)))
        for task, one in found.tasks.items()
        for who, reading in (("expert", one.expert), (against, one.against), (model, one.model))
    ]
    show(found.to_json(), as_json, rows, ("task", "model", *columns))
    for reason in found.reasons:
        say(f"broken: {reason}", err=True, colour="red")
    if require and found.broken:
        raise SystemExit(1)


COMMANDS = (evaluate, compare, canary)
