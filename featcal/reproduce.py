"""What the numbers of a chart come from, as the command and as the lines of Python that give the same numbers.

Charts and tables are made of a few measurements. Which one, on which samples and of which models is one small value;
the command prints a JSON document with the numbers in it, `where` says at which place.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field

from featcal.views import View


@dataclass(frozen=True)
class _Kind:
    """A measurement.

    Args:
        command: of the command line.
        flags: what this measurement needs beyond the command's own options.
        keywords: the same of `measure_drift`.
        where: of the numbers in the document; TASK is every task, `[]` every entry of a list.
        read: of the numbers in Python, from `ledger` or `scores`, `session` and `model`.
    """

    command: str
    flags: tuple[str, ...]
    keywords: tuple[str, ...]
    where: str
    read: str


_LAYERS = "tasks.TASK.layers[]"
_PAIR = "differences"
"""The kind that is of two models at once."""
_KINDS = {
    "drift": _Kind("drift", (), (), _LAYERS, "ledger.to_frame()"),
    "attribution": _Kind("drift", ("--attribution",), ("attribution",), _LAYERS, "ledger.to_frame()"),
    "growth": _Kind("drift", (), (), _LAYERS, "ledger.to_frame()"),
    "cosines": _Kind(
        "drift",
        (),
        (),
        "tasks.TASK.final.cosine",
        "{task: float(one.cosine.mean()) for task, one in ledger.tasks.items()}",
    ),
    "samples": _Kind(
        "drift",
        ("--per-sample",),
        (),
        "tasks.TASK.per_sample[]",
        "{task: one.per_sample() for task, one in ledger.tasks.items()}",
    ),
    "decisions": _Kind("drift", ("--output",), ("output",), "tasks.TASK.output", 'ledger.to_json()["tasks"]'),
    "margins": _Kind(
        "drift",
        ("--margins", "--per-sample"),
        ("output",),
        "tasks.TASK.margins[], tasks.TASK.per_sample[]",
        "{task: one.margins() for task, one in ledger.tasks.items()}",
    ),
    "gains": _Kind(
        "drift", ("--output",), ("output",), "tasks.TASK.final.cosine, tasks.TASK.output", 'ledger.to_json()["tasks"]'
    ),
    "task vectors": _Kind(
        "drift", ("--task-vectors",), (), "task_vector_cosines", "session.vector_cosines(session.named(model))"
    ),
    "sources": _Kind("drift", ("--source",), (), "sources[]", "session.sources(session.named(model))"),
    "scores": _Kind("evaluate", (), (), "tasks.TASK.value", "scores.to_frame()"),
    "answers": _Kind(
        "evaluate",
        ("--answers",),
        (),
        "tasks.TASK.answers[]",
        "{task: one.answers() for task, one in scores.tasks.items()}",
    ),
    _PAIR: _Kind("compare", (), (), "tasks.TASK", "compare(session, *models, view=view).to_frame()"),
}
KINDS = tuple(_KINDS)


@dataclass(frozen=True)
class Measured:
    """What the numbers of a chart come from.

    Args:
        what: one of `KINDS`.
        suite: an embedded name or the path of a suite file.
        models: the names of the models that are shown (`schema.model_name`).
        on: samples, their split and the seed that draws them.
        tokens: "all", or "class" where norms are over the class token alone.
        sublayers: whether attention and MLP are layers of their own.
    """

    what: str
    suite: str
    models: tuple[str, ...]
    on: View = field(default_factory=View)
    tokens: str = "all"
    sublayers: bool = False

    @property
    def where(self) -> str:
        """At which place of the command's JSON document the numbers stand; TASK is every task."""
        return _KINDS[self.what].where


def commands(measured: Measured) -> tuple[str, ...]:
    """The command lines, one per model; of a pair of models one.

    >>> commands(Measured("attribution", "clip-mini", ("merged", "calibrated:lam=0.1"), View(64, "validation")))[1]
    'featcal drift clip-mini --model calibrated:lam=0.1 --attribution --samples 64 --split validation --seed 42 --json'
    """
    if measured.what == _PAIR:
        return (_command(measured, *measured.models),)
    return tuple(_command(measured, model) for model in measured.models)


def _command(measured: Measured, *models: str) -> str:
    kind, on = _KINDS[measured.what], measured.on
    named = [word for model in models for word in ("--model", model)]
    parts = ["featcal", kind.command, measured.suite, *named, *kind.flags]
    parts += [] if measured.tokens == "all" else ["--tokens", measured.tokens]
    parts += ["--sublayers"] if measured.sublayers else []
    for name, given in (("samples", on.samples), ("split", on.split), ("seed", on.seed)):
        parts += [] if given is None else [f"--{name}", str(given)]
    return shlex.join([*parts, "--json"])


def python(measured: Measured) -> str:
    """The lines of Python.

    >>> print(python(Measured("scores", "clip-mini", ("base", "merged"), View(None, "test"))))
    from featcal import evaluate, open_session
    <BLANKLINE>
    session = open_session('clip-mini')
    for model in ('base', 'merged'):
        scores = evaluate(session, model, samples=None, split='test', seed=42)
        print(model, scores.to_frame(), sep="\\n")
    """
    kind = _KINDS[measured.what]
    if measured.what == _PAIR:
        return _python_of_pair(measured)
    made = [
        *_arguments(measured.on, kind.command == "evaluate"),
        *([] if measured.tokens == "all" else [f"tokens={measured.tokens!r}"]),
        *(["sublayers=True"] if measured.sublayers else []),
        *(f"{name}=True" for name in kind.keywords),
    ]
    function, name = ("evaluate", "scores") if kind.command == "evaluate" else ("measure_drift", "ledger")
    needs = name in kind.read
    lines = [
        f"from featcal import {', '.join(sorted([*([function] if needs else []), 'open_session']))}",
        "",
        f"session = open_session({measured.suite!r})",
        f"for model in {measured.models!r}:",
        *([f"    {name} = {function}(session, model, {', '.join(made)})"] if needs else []),
        f'    print(model, {kind.read}, sep="\\n")',
    ]
    return "\n".join(lines)


def _python_of_pair(measured: Measured) -> str:
    lines = [
        "from featcal import View, compare, open_session",
        "",
        f"session = open_session({measured.suite!r})",
        f"view = View({', '.join(_arguments(measured.on, True))})",
        f"models = {measured.models!r}",
        f'print(models, {_KINDS[_PAIR].read}, sep="\\n")',
    ]
    return "\n".join(lines)


def _arguments(on: View, whole: bool) -> list[str]:
    """Of a view; a split that is left to the suite is not said, but a whole split is where that is the default."""
    said = [] if on.samples is None and not whole else [f"samples={on.samples!r}"]
    said += [] if on.split is None else [f"split={on.split!r}"]
    return [*said, f"seed={on.seed!r}"]
