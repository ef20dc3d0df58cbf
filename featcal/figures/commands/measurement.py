"""Identify the measurement that gives a chart's numbers: its kind, samples and models."""

from __future__ import annotations

from dataclasses import dataclass, field

from featcal.suite.views import EvaluationSamples


@dataclass(frozen=True)
class Kind:
    """A measurement.

    Args:
        command: of the command line.
        flags: further flags of this measurement.
        keywords: further keywords of the function in Python.
        where: of the numbers in the command's document; TASK is every task, `[]` every entry of a list.
        read: of the numbers in Python, from `ledger`, `scores` or `maps`, `session` and `model` or `models`.
        note: a remark for the reader of command and lines; "" for none.
    """

    command: str
    flags: tuple[str, ...]
    keywords: tuple[str, ...]
    where: str
    read: str
    note: str = ""


_LAYERS = "tasks.TASK.layers[]"
_POINTS = "tasks.TASK.layers[].points[]"
_MIRRORED = "On another machine an axis may be mirrored: a direction of largest variance has no sign."
_UMAP = (
    "UMAP's places are not among them: they change with its version and with the last digit of its input. `feature` is "
    "what the map is made of, of unit norm and in the order in which UMAP takes it; `x` and `y` are its PCA map."
)
_KINDS = {
    "drift": Kind("drift", (), (), _LAYERS, "ledger.to_frame()"),
    "attribution": Kind("drift", ("--attribution",), ("attribution",), _LAYERS, "ledger.to_frame()"),
    "cosines": Kind(
        "drift",
        (),
        (),
        "tasks.TASK.final.cosine",
        "{task: float(one.cosine.mean()) for task, one in ledger.tasks.items()}",
    ),
    "samples": Kind(
        "drift",
        ("--per-sample",),
        (),
        "tasks.TASK.per_sample[]",
        "{task: one.sample_rows() for task, one in ledger.tasks.items()}",
    ),
    "decisions": Kind("drift", ("--output",), ("output",), "tasks.TASK.output", 'ledger.to_json()["tasks"]'),
    "margins": Kind(
        "drift",
        ("--margins", "--per-sample"),
        ("output",),
        "tasks.TASK.margins[], tasks.TASK.per_sample[]",
        "{task: one.margins() for task, one in ledger.tasks.items()}",
    ),
    "gains": Kind(
        "drift",
        ("--output",),
        ("output",),
        "tasks.TASK.layers[], tasks.TASK.final.cosine, tasks.TASK.output",
        'ledger.to_json()["tasks"]',
    ),
    "answer gains": Kind(
        "drift",
        (),
        (),
        "tasks.TASK.layers[], tasks.TASK.final.cosine",
        'ledger.to_json()["tasks"]',
        "Scores are of whole answers here: `featcal evaluate` gives them, with the same models and samples.",
    ),
    "task vectors": Kind(
        "drift",
        ("--task-vectors",),
        (),
        "task_vector_cosines",
        "session.measure.vector_cosines(model)",
    ),
    "weights": Kind(
        "drift",
        ("--task-vectors",),
        (),
        "tasks.TASK.weights[]",
        "{task: [one.to_json() for one in layers] for task, layers in session.measure.weight_changes(model).items()}",
    ),
    "depth": Kind(
        "drift",
        ("--depth",),
        (),
        "tasks.TASK.depth[]",
        "{task: session.measure.depth(model, task, on).to_json() for task in session.tasks}",
    ),
    "course": Kind(
        "drift",
        ("--depth",),
        (),
        "tasks.TASK.course[]",
        "{task: session.measure.depth(model, task, on).course(sample) for task in session.tasks}",
    ),
    "tokens": Kind(
        "drift",
        ("--tokens", "each"),
        (),
        "tasks.TASK.tokens[]",
        "{task: session.measure.tokens(model, task, on).rows(sample, layer) for task in session.tasks}",
    ),
    "maps": Kind("drift", ("--maps",), (), "tasks.TASK.maps[]", "session.measure.maps(model, on)"),
    "sources": Kind("drift", ("--source",), (), "sources[]", "session.fit.sources(model)"),
    "scores": Kind("evaluate", (), (), "tasks.TASK.value", "scores.to_frame()"),
    "answers": Kind(
        "evaluate",
        ("--answers",),
        (),
        "tasks.TASK.answers[]",
        "{task: one.answers() for task, one in scores.tasks.items()}",
    ),
    "differences": Kind("compare", (), (), "tasks.TASK", "compare(session, *models, on=on).to_frame()"),
    "features": Kind("study features", (), (), _POINTS, "maps.to_frame", _MIRRORED),
    "small maps": Kind("study features", ("--own-map",), ("alone",), _POINTS, "maps.to_frame", _MIRRORED),
    "UMAP": Kind("study features", ("--pooled",), ("pooled",), _POINTS, "maps.to_frame", _UMAP),
    "small UMAPs": Kind(
        "study features", ("--own-map", "--pooled"), ("alone", "pooled"), _POINTS, "maps.to_frame", _UMAP
    ),
    "conditioning": Kind("study conditioning", (), (), "systems[]", "session.fit.conditioning(model)"),
    "sweep": Kind("study sweep", (), (), "points[]", "point.found"),
}
KINDS = tuple(_KINDS)


@dataclass(frozen=True)
class ChartSource:
    """The origin of a chart's numbers.

    Args:
        what: one of `KINDS`.
        suite: an embedded name or the path of a suite file.
        models: the names of the shown models (`suite.name_grammar`).
        on: samples, their split and the seed that draws them.
        tokens: "all", or "class" where norms are over the class token alone.
        sublayers: whether attention and MLP are layers of their own.
        task, layer: the one that features are shown of; None is every one.
        sample: the one that is shown, by its place among those of its task; None where all are.
    """

    what: str
    suite: str
    models: tuple[str, ...]
    on: EvaluationSamples = field(default_factory=EvaluationSamples)
    tokens: str = "all"
    sublayers: bool = False
    task: str | None = None
    layer: str | None = None
    sample: int | None = None

    @property
    def kind(self) -> Kind:
        """Return the kind of measurement that `what` names."""
        return _KINDS[self.what]
