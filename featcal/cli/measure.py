"""Commands that measure features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Unpack

import click

from featcal.cli import opening
from featcal.cli.options import DRAWN, MAX_MEMORY, MODEL, SUITE, view_options
from featcal.cli.terminal import bar, show
from featcal.suite.name_grammar import grammar
from featcal.system.progress import keep_memory

if TYPE_CHECKING:
    from featcal.suite.views import DriftKeywords


@click.command()
@SUITE
@MODEL
@view_options()
@click.option(
    "--tokens", type=click.Choice(["all", "class"]), default="all", show_default=True, help="Tokens in norms."
)
@click.option("--sublayers", is_flag=True, help="Attention and MLP of every block as layers of their own (Prop. 4).")
@click.option("--attribution", is_flag=True, help="Book the final drift to the layers that caused it (Prop. 2).")
@click.option("--output", is_flag=True, help="Score drift, its bound and loss change (Props. 3 and 7).")
@click.option("--margins", is_flag=True, help="Which decisions cannot have changed, sample by sample (Eq. 44).")
@click.option("--per-sample", is_flag=True, help="Drift, cosine and distance to the expert, sample by sample.")
@click.option("--task-vectors", is_flag=True, help="Cosine of the model's task vector to each expert's (Fig. 2d).")
@click.option("--source", is_flag=True, help="What fitting on other feature sources would cost (Prop. 8).")
@MAX_MEMORY
@DRAWN
def drift(
    suite: str,
    model: str,
    margins: bool,
    per_sample: bool,
    task_vectors: bool,
    source: bool,
    max_memory: int | None,
    device: str,
    as_json: bool,
    **measured: Unpack[DriftKeywords],
) -> None:
    """Split a model's feature drift into local mismatch and propagation, per layer and task."""
    from featcal.calibration.calibrate import config_for
    from featcal.session.api import measure_drift

    if source and max_memory is not None:
        raise click.UsageError("--source holds every calibrated block in memory; leave out --max-memory")
    if max_memory is None:
        keep_memory()
    progress = bar()
    session = opening.session(suite, device, max_memory=max_memory)
    measured["output"] = measured["output"] or margins
    sources = {}
    if source:  # first: what has none is refused before anything else is measured
        own = config_for(session.family, samples=measured["samples"], seed=measured["seed"])
        calibrated = session.resolve(own if model == "merged" else model)
        sources = {"sources": [asdict(one) for one in session.fit.sources(calibrated, progress)]}
    ledger = measure_drift(session, model, progress=progress, **measured)
    document = ledger.to_json()
    for name, task in ledger.tasks.items():
        entry = document["tasks"][name]
        entry |= {"margins": task.margins()} if margins else {}
        entry |= {"per_sample": task.sample_rows()} if per_sample else {}
    if task_vectors:
        document["task_vector_cosines"] = session.measure.vector_cosines(session.resolve(model))
    document |= sources
    columns = ["layer", "relative_drift", "drift", "mismatch", "propagation"]
    columns += ["share", "contribution"] if measured["attribution"] else []
    entries = [(task, layer) for task, entry in document["tasks"].items() for layer in entry["layers"]]
    show(document, as_json, [(task, *(layer[key] for key in columns)) for task, layer in entries], ("task", *columns))
    if not as_json:
        _show_more(document)


@click.command()
@SUITE
@click.option(
    "--model", "models", multiple=True, default=["merged"], show_default=True, help=f"Once per model: {grammar()}."
)
@click.option("--task", "tasks", multiple=True, help="Once per task.  [all]")
@click.option("--layer", "layers", multiple=True, help="Once per layer, as `featcal drift` names them.  [all]")
@click.option("--own-map", is_flag=True, help="A map for every layer; otherwise all but the head share one.")
@click.option("--pooled", is_flag=True, help="With --json: the features themselves, of unit norm.")
@view_options()
@DRAWN
def features(
    suite: str,
    models: tuple[str, ...],
    tasks: tuple[str, ...],
    layers: tuple[str, ...],
    own_map: bool,
    pooled: bool,
    samples: int,
    split: str | None,
    seed: int,
    device: str,
    as_json: bool,
) -> None:
    """Show where features of the experts and of models lie: cosine and distance to the expert's, and a PCA map.

    A feature is the class token's state behind a layer, or the mean over tokens where there is none; the head's are
    the final ones. The map is of all models together, the expert among them. The table has means over samples, --json
    every sample.
    """
    from featcal.session.feature_maps import EXPERT, FeatureMaps, clouds_json
    from featcal.suite.views import EvaluationSamples

    if pooled and not as_json:
        raise click.UsageError("--pooled features are in the JSON document alone; add --json")
    keep_memory()
    session = opening.session(suite, device, one_shot=False)
    clouds = FeatureMaps.from_names(session, models, EvaluationSamples(samples, split, seed))
    frame = clouds.to_frame(tasks, layers, alone=own_map, pooled=pooled, progress=bar())
    others = frame[frame["model"] != EXPERT].groupby(["task", "layer", "model"], sort=False)
    means = others[["cosine", "distance"]].mean().reset_index()
    show(clouds_json(clouds, frame) if as_json else None, as_json, means.to_numpy().tolist(), list(means))


def _show_more(document: Mapping[str, Any]) -> None:
    """Tables of output drift, task vectors, samples and feature sources, where they were measured."""
    measured = {task: entry["output"] for task, entry in document["tasks"].items() if "output" in entry}
    if measured:
        click.echo()
        columns = list(next(iter(measured.values())))
        show({}, False, [(task, *entry.values()) for task, entry in measured.items()], ("task", *columns))
    if "task_vector_cosines" in document:
        click.echo()
        show({}, False, list(document["task_vector_cosines"].items()), ("task", "cosine of task vectors"))
    each = [{"task": t, **row} for t, entry in document["tasks"].items() for row in entry.get("per_sample", ())]
    if each:
        click.echo()
        show({}, False, [list(row.values()) for row in each], list(each[0]))
    if "sources" in document:
        click.echo()
        columns = ["block", "modules", "source", "excess", "middle", "relative", "coupling"]
        show({}, False, [[one[key] for key in columns] for one in document["sources"]], columns)


COMMANDS = (drift, features)
