"""Write the command lines and the Python code that give the numbers of a measurement."""

from __future__ import annotations

import shlex

from featcal.figures.commands import sweeps
from featcal.figures.commands.measurement import ChartSource
from featcal.suite.views import EvaluationSamples

_OF_ALL_MODELS = ("compare", "study features")
"""Commands that take all models at once."""


def command_lines(measured: ChartSource) -> tuple[str, ...]:
    """Return the command lines: one per model if the command takes one at a time, one per grid for a sweep.

    >>> on = EvaluationSamples(64, "test")
    >>> command_lines(ChartSource("attribution", "clip-mini", ("merged", "calibrated:lam=0.1"), on))[1]
    'featcal drift clip-mini --model calibrated:lam=0.1 --attribution --eval-samples 64 --split test --seed 42 --json'
    """
    command = measured.kind.command
    if command == "study sweep":
        return sweeps.sweep_command_lines(measured)
    if command in _OF_ALL_MODELS:
        return (_command(measured, *measured.models),)
    return tuple(_command(measured, model) for model in measured.models)


def python_lines(measured: ChartSource) -> str:
    """Return the lines of Python that print the numbers.

    >>> print(python_lines(ChartSource("scores", "clip-mini", ("base", "merged"), EvaluationSamples(None, "test"))))
    from featcal import evaluate, open_session
    <BLANKLINE>
    session = open_session('clip-mini')
    for model in ('base', 'merged'):
        scores = evaluate(session, model, samples=None, split='test', seed=42)
        print(model, scores.to_frame(), sep="\\n")
    """
    command = measured.kind.command
    if command == "study sweep":
        return sweeps.sweep_python_lines(measured)
    return _lines_of_all(measured) if command in _OF_ALL_MODELS else _lines_per_model(measured)


def _command(measured: ChartSource, *models: str) -> str:
    kind = measured.kind
    named = [word for model in models for word in ("--model", model)]
    parts = ["featcal", *kind.command.split(), measured.suite, *named, *kind.flags]
    parts += [] if measured.tokens == "all" else ["--tokens", measured.tokens]
    parts += ["--sublayers"] if measured.sublayers else []
    parts += [] if measured.sample is None else ["--sample", str(measured.sample)]
    if kind.command == "study features" and measured.task is not None:
        parts += ["--task", measured.task]
    if measured.layer is not None and (kind.command == "study features" or measured.what == "tokens"):
        parts += ["--layer", measured.layer]
    # What is measured of a calibration's own samples has them in the calibration's name.
    parts += [] if kind.command == "study conditioning" else measured.on.flags()
    return shlex.join([*parts, "--json"])


def _lines_per_model(measured: ChartSource) -> str:
    kind = measured.kind
    made = [
        *_arguments(measured.on, kind.command == "evaluate"),
        *([] if measured.tokens == "all" else [f"tokens={measured.tokens!r}"]),
        *(["sublayers=True"] if measured.sublayers else []),
        *(f"{name}=True" for name in kind.keywords),
    ]
    function, name = ("evaluate", "scores") if kind.command == "evaluate" else ("measure_drift", "ledger")
    needs, drawn = name in kind.read, ", on)" in kind.read
    used = [*([function] if needs else []), *(["EvaluationSamples"] if drawn else []), "open_session"]
    lines = [
        f"from featcal import {', '.join(sorted(used, key=_sort_key))}",
        "",
        f"session = open_session({measured.suite!r})",
        *([f"on = EvaluationSamples({', '.join(_arguments(measured.on, True))})"] if drawn else []),
        *([f"sample = {measured.sample}"] if "(sample" in kind.read else []),
        *([f"layer = {measured.layer!r}"] if "layer)" in kind.read else []),
        f"for model in {measured.models!r}:",
        *([f"    {name} = {function}(session, model, {', '.join(made)})"] if needs else []),
        f'    print(model, {kind.read}, sep="\\n")',
    ]
    return "\n".join(lines)


def _lines_of_all(measured: ChartSource) -> str:
    kind = measured.kind
    function, read, made = "compare", kind.read, []
    if kind.command == "study features":
        function, made = "FeatureMaps", ["maps = FeatureMaps.from_names(session, models, on)"]
        chosen = {"tasks": measured.task, "layers": measured.layer}
        asked = [f"{name}={(one,)!r}" for name, one in chosen.items() if one is not None]
        read = f"{read}({', '.join([*asked, *(f'{name}=True' for name in kind.keywords)])})"
    lines = [
        f"from featcal import {', '.join(sorted([function, 'EvaluationSamples', 'open_session'], key=_sort_key))}",
        "",
        f"session = open_session({measured.suite!r})",
        f"on = EvaluationSamples({', '.join(_arguments(measured.on, True))})",
        f"models = {measured.models!r}",
        *made,
        f'print(models, {read}, sep="\\n")',
    ]
    return "\n".join(lines)


def _sort_key(name: str) -> tuple[bool, str]:
    """Sort classes first."""
    return not name[0].isupper(), name


def _arguments(on: EvaluationSamples, whole: bool) -> list[str]:
    """Write a view as arguments: a split only if it was chosen, "samples=None" only if the default is not all."""
    arguments = [] if on.samples is None and not whole else [f"samples={on.samples!r}"]
    arguments += [] if on.split is None else [f"split={on.split!r}"]
    return [*arguments, f"seed={on.seed!r}"]
