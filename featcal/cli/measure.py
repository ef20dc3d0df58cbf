"""Measure features from the command line."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Unpack

import click

from featcal.cli import opening
from featcal.cli.options import DRAWN, MAX_MEMORY, MEASURED, SUITE, models_option
from featcal.cli.terminal import bar, print_json, print_message, print_models_json, print_table
from featcal.system.progress import Progress

if TYPE_CHECKING:
    from featcal.session.session import Session
    from featcal.suite.views import DriftKeywords


EACH = "each"
"""The choice of `--tokens` that shows the drift of every token of a sample."""


@click.command()
@SUITE
@models_option("Measure this model; may be repeated:", ["merged"])
@MEASURED
@click.option(
    "--tokens",
    type=click.Choice(["all", "class", EACH]),
    default="all",
    show_default=True,
    help="Tokens included in norms. 'each': all, and for the sample of --sample also the drift of every single token: "
    "of the patches and class token of a picture, or of the tokens of a text.",
)
@click.option("--sublayers", is_flag=True, help="Show attention and MLP of every block as separate layers (Prop. 4).")
@click.option("--attribution", is_flag=True, help="Attribute the final drift to the layers that caused it (Prop. 2).")
@click.option("--output", is_flag=True, help="Measure score drift, its bound and the change of the loss (Props. 3, 7).")
@click.option("--margins", is_flag=True, help="Show sample by sample which decisions cannot have changed (Eq. 44).")
@click.option("--per-sample", is_flag=True, help="Show drift, cosine and distance to the expert sample by sample.")
@click.option(
    "--task-vectors",
    is_flag=True,
    help="Show the cosine of the model's task vector to each expert's (Fig. 2d), and the norms of both by layer.",
)
@click.option("--source", is_flag=True, help="Measure the cost of fitting on other feature sources (Prop. 8).")
@click.option(
    "--depth",
    is_flag=True,
    help="Show how many decisions agree with the expert's final one after every block, read through the model's last "
    "norm and head. Heads are made for the last layer: after others they only show where decisions change.",
)
@click.option(
    "--sample",
    type=int,
    help="With --depth: show the top answers of this sample after every block. With --tokens each: show the tokens of "
    "this sample.  [no sample]",
)
@click.option("--layer", help="With --tokens each: show the tokens after this layer, such as 'block 0'.  [all]")
@click.option(
    "--maps",
    is_flag=True,
    help="Show the mismatch of every linear map inside the blocks, each on the input of "
    "the expert's own map, and its share in the change from the merged model.",
)
@MAX_MEMORY
@DRAWN
def drift_command(
    suite: str,
    models: tuple[str, ...],
    margins: bool,
    per_sample: bool,
    task_vectors: bool,
    source: bool,
    maps: bool,
    depth: bool,
    sample: int | None,
    layer: str | None,
    max_memory: int | None,
    device: str,
    as_json: bool,
    **measured: Unpack[DriftKeywords],
) -> None:
    """Split drift into local mismatch and propagation, by layer.

    Drift is the distance of a model's features to the expert's, on the samples of each task.

    --json prints one document for one model, and {"models": [...]} with a document for each of several.
    """
    chosen = {"margins": margins, "per_sample": per_sample, "task_vectors": task_vectors, "source": source}
    chosen |= {"maps": maps, "depth": depth}
    chosen["tokens"] = measured["tokens"] == EACH
    more = {name for name, is_chosen in chosen.items() if is_chosen}
    shown = _SampleAndLayer(sample, layer)
    _refuse_together(more, shown, max_memory)
    measured["tokens"] = "all" if "tokens" in more else measured["tokens"]
    session = opening.open_suite_session(
        suite, device, one_shot=len(models) == 1 and not more & _LOOKS.keys(), max_memory=max_memory
    )
    # Margins are read off the score drift (Eq. 44).
    measured["output"] = measured["output"] or margins
    documents = [_measure_drift(session, model, more, shown, bar(), **measured) | {"model": model} for model in models]
    columns = ["layer", "relative_drift", "drift", "mismatch", "propagation"]
    columns += ["share"] if measured["attribution"] else []
    # Tables come after all models were measured, so a failure leaves no half output.
    for one in documents if not as_json else ():
        if len(models) > 1:
            print_message(f"{'' if one is documents[0] else chr(10)}{one['model']}:")
        entries = [(task, layer) for task, entry in one["tasks"].items() for layer in entry["layers"]]
        print_table([(task, *(layer[key] for key in columns)) for task, layer in entries], ("task", *columns))
        _show_more(one)
    if as_json:
        print_models_json(documents)


_LOOKS = {
    "source": "--source holds every calibrated block",
    "maps": "--maps holds what every linear map gets",
    "depth": "--depth holds features after every block",
    "tokens": "--tokens each holds the states of whole batches",
}
"""Measures that do not respect a memory limit, and why."""


@dataclass(frozen=True)
class _SampleAndLayer:
    """Return the sample and layer to show for measures per sample; None for no sample, and for all layers."""

    sample: int | None
    layer: str | None


def _refuse_together(more: Collection[str], shown: _SampleAndLayer, max_memory: int | None) -> None:
    """Raise UsageError for mutually exclusive options."""
    for name, why in _LOOKS.items():
        if name in more and max_memory is not None:
            raise click.UsageError(f"{why} in memory; leave out --max-memory")
    if shown.sample is not None and not {"depth", "tokens"} & {*more}:
        raise click.UsageError("--sample needs --depth or --tokens each")
    if "tokens" in more and shown.sample is None:
        raise click.UsageError("--tokens each needs --sample, the sample whose tokens it shows")
    if shown.layer is not None and "tokens" not in more:
        raise click.UsageError("--layer needs --tokens each")


def _measure_drift(
    session: Session,
    model: str,
    more: Collection[str],
    shown: _SampleAndLayer,
    progress: Progress,
    **measured: Unpack[DriftKeywords],
) -> dict[str, Any]:
    """Return the document of one model's drift.

    Args:
        more: further measures, some of "margins", "per_sample", "task_vectors", "source", "maps", "depth", "tokens".
    """
    from featcal.calibration.calibrate import config_for
    from featcal.session.api import measure_drift
    from featcal.suite.views import EvaluationSamples

    sources = {}
    if "source" in more:  # first, so that a model that has none is refused before anything else is measured
        own = config_for(session.family, samples=measured["samples"], seed=measured["seed"])
        found = session.fit.sources(own if model == "merged" else model, progress)
        sources = {"sources": [asdict(one) for one in found]}
    ledger = measure_drift(session, model, progress=progress, **measured)
    view = EvaluationSamples(measured["samples"], measured["split"], measured["seed"])
    document = ledger.to_json()
    for name, task in ledger.tasks.items():
        entry = document["tasks"][name]
        entry |= {"margins": task.margins()} if "margins" in more else {}
        entry |= {"per_sample": task.sample_rows()} if "per_sample" in more else {}
    if "maps" in more:
        for name, rows in session.measure.maps(model, view, progress).items():
            document["tasks"][name]["maps"] = [row.to_json() for row in rows]
    for task, entry in document["tasks"].items() if "depth" in more else ():
        depth = session.measure.depth(model, task, view, progress)
        entry |= {"depth": depth.to_json()} | ({} if shown.sample is None else {"course": depth.course(shown.sample)})
    if "tokens" in more and shown.sample is not None:
        for task, entry in document["tasks"].items():
            entry["tokens"] = session.measure.tokens(model, task, view, progress).rows(shown.sample, shown.layer)
    if "task_vectors" in more:
        document["task_vector_cosines"] = session.measure.vector_cosines(model)
        for name, changes in session.measure.weight_changes(model).items():
            document["tasks"][name]["weights"] = [one.to_json() for one in changes]
    return document | sources


@click.command()
@SUITE
@models_option("Show this model beside the expert; may be repeated:", ["merged"])
@click.option("--task", "tasks", multiple=True, help="Show this task; may be repeated.  [all]")
@click.option("--layer", "layers", multiple=True, help="Show this layer, such as 'block 0'; may be repeated.  [all]")
@click.option("--own-map", is_flag=True, help="Make a map for every layer; otherwise all but the head share one.")
@click.option("--pooled", is_flag=True, help="Add the features themselves, of unit norm, to the document of --json.")
@MEASURED
@DRAWN
def features_command(
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
    """Compare features with the experts', layer by layer.

    The table has cosine and distance; --json adds positions on a PCA map.

    A feature is the class token's state after a layer, or the mean over tokens if there is no class token; the head's
    are the final features. One map shows all models and the expert. The table has means over samples, --json every
    sample.
    """
    from featcal.session.feature_maps import FeatureMaps, clouds_json
    from featcal.suite.methods import EXPERT
    from featcal.suite.views import EvaluationSamples

    if pooled and not as_json:
        raise click.UsageError("--pooled needs --json: only the JSON document has these features")
    session = opening.open_suite_session(suite, device, one_shot=False)
    clouds = FeatureMaps.from_names(session, models, EvaluationSamples(samples, split, seed))
    frame = clouds.to_frame(tasks, layers, alone=own_map, pooled=pooled, progress=bar())
    others = frame[frame["model"] != EXPERT].groupby(["task", "layer", "model"], sort=False)
    means = others[["cosine", "distance"]].mean().reset_index()
    if as_json:
        print_json(clouds_json(clouds, frame))
    else:
        print_table(means.to_numpy().tolist(), list(means))


def _show_more(document: Mapping[str, Any]) -> None:
    """Print every table that was measured besides drift by layer."""
    measured = {task: entry["output"] for task, entry in document["tasks"].items() if "output" in entry}
    if measured:
        click.echo()
        columns = list(next(iter(measured.values())))
        print_table([(task, *entry.values()) for task, entry in measured.items()], ("task", *columns))
    if "task_vector_cosines" in document:
        click.echo()
        print_table(list(document["task_vector_cosines"].items()), ("task", "cosine of task vectors"))
    for name in ("weights", "margins", "per_sample", "maps", "depth", "course", "tokens"):
        each = [{"task": t, **row} for t, entry in document["tasks"].items() for row in entry.get(name, ())]
        if each:
            click.echo()
            print_table([list(row.values()) for row in each], list(each[0]))
    if "sources" in document:
        click.echo()
        columns = ["block", "modules", "source", "excess", "middle", "relative", "coupling"]
        print_table([[one[key] for key in columns] for one in document["sources"]], columns)
