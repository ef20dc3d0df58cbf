"""Where the numbers of the app's tables stand in what their commands print."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from conftest import CLASSES
from featcal.figures.maps import pca_map

Documents = Mapping[str, dict[str, Any]]
"""What the commands print: by what the table calls the model, where a command takes one at a time, else by number."""
Pairs = Iterator[tuple[Any, Any]]
"""A column of the table, and the same numbers out of the document."""


def part(frame: Any, model: str) -> Any:
    return frame[frame["model"] == model]


def mean(found: dict[str, Any], read: Callable[[dict[str, Any]], float | None]) -> list[float]:
    """Over tasks, layer by layer; layers that have no such number are left out."""
    values = [[read(layer) for layer in task["layers"]] for task in found["tasks"].values()]
    return [float(np.mean(column)) for column in zip(*values, strict=True) if None not in column]


def drift_per_layer(frame: Any, found: Documents) -> Pairs:
    for model, one in found.items():
        yield part(frame, model)["drift"], mean(one, lambda layer: layer["relative_drift"])
        for name in ("mismatch", "propagation"):
            yield part(frame, model)[name], mean(one, lambda layer, n=name: layer[n] / layer["expert_norm"])
        yield part(frame, model)["alignment"], mean(one, lambda layer: layer["alignment"])


def drift_per_task(frame: Any, found: Documents) -> Pairs:
    (layer,) = set(frame["layer"])
    for model, one in found.items():
        of_layer = [next(at for at in task["layers"] if at["layer"] == layer) for task in one["tasks"].values()]
        yield part(frame, model)["drift"], [at["drift"] / at["expert_norm"] for at in of_layer]
        yield part(frame, model)["mismatch"], [at["mismatch"] / at["expert_norm"] for at in of_layer]


def attribution(frame: Any, found: Documents) -> Pairs:
    for model, one in found.items():
        yield part(frame, model)["share"], mean(one, lambda layer: layer["share"])
        yield part(frame, model)["telescoped share"], mean(one, lambda layer: layer["telescoped_share"])
        booked = [
            [layer["share"] * task["layers"][-1]["relative_drift"] for layer in task["layers"]]
            for task in one["tasks"].values()
        ]
        yield part(frame, model)["contribution"], np.mean(booked, axis=0)


def growth(frame: Any, found: Documents) -> Pairs:
    for model, one in found.items():
        for name in ("gamma", "eta", "response", "certified_growth"):
            yield part(frame, model)[name], mean(one, lambda layer, n=name: layer.get(n))


def decisions(frame: Any, found: Documents) -> Pairs:
    for model, one in found.items():
        for name in ("score_drift", "bound", "margin", "certified", "agreement", "accuracy"):
            yield part(frame, model)[name], [task["output"][name] for task in one["tasks"].values()]


def margins(frame: Any, found: Documents) -> Pairs:
    for model, one in found.items():
        task = one["tasks"]["signs"]
        yield frame["expert margin"], [row["margin"] for row in task["margins"]]
        names = {"margin": "model_margin", "score change": "score_change", "certified": "certified", "agrees": "agrees"}
        for column, name in names.items():
            yield frame[f"{model} {column}"], [row[name] for row in task["margins"]]
        for name in ("drift", "cosine"):
            yield frame[f"{model} {name}"], [row[name] for row in task["per_sample"]]


def feature_sources(frame: Any, found: Documents) -> Pairs:
    (one,) = found.values()
    for _, row in frame.iterrows():
        same = [it for it in one["sources"] if (it["block"], it["source"]) == (row["block"], row["source"])]
        assert same
        yield row["excess"], sum(it["excess"] for it in same)


def drift_before_and_after(frame: Any, found: Documents) -> Pairs:
    for model, one in found.items():
        yield frame[model], mean(one, lambda layer: layer["relative_drift"])


def scores_before_and_after(frame: Any, found: Documents) -> Pairs:
    for model, one in found.items():
        yield frame[model][:-1], [100 * task["output"]["accuracy"] for task in one["tasks"].values()]
        yield frame["expert"][:-1], [100 * task["output"]["expert_accuracy"] for task in one["tasks"].values()]


def mean_cosines(frame: Any, found: Documents) -> Pairs:
    for model, one in found.items():
        yield frame[model], [task["final"]["cosine"] for task in one["tasks"].values()]


def cosines(frame: Any, found: Documents) -> Pairs:
    for model, one in found.items():
        yield frame[model], [row["cosine"] for row in one["tasks"]["signs"]["per_sample"]]


def points(frame: Any, found: Documents, columns: Mapping[str, str], task: str = "signs") -> Pairs:
    """Columns of a table of features, and the same of the points in the document of `featcal features`."""
    (one,) = found.values()
    (layer,) = one["tasks"][task]["layers"]
    assert list(dict.fromkeys(frame["model"])) == ["expert", "merged", "calibrated"][-len(set(frame["model"])) :]
    for model, name in zip(("expert", "merged", "calibrated"), one["models"], strict=True):
        rows = [point for point in layer["points"] if point["model"] == name]
        assert len(rows) == 8
        for column, key in columns.items():
            if model in set(frame["model"]):
                yield part(frame, model)[column], [row[key] for row in rows]


def distances(frame: Any, found: Documents) -> Pairs:
    return points(frame, found, {"cosine": "cosine", "L2 distance": "distance"})


def feature_map(frame: Any, found: Documents) -> Pairs:
    return points(frame, found, {"PCA 1": "x", "PCA 2": "y"})


def small_maps(frame: Any, found: Documents) -> Pairs:
    for task, of_task in frame.groupby("task"):
        yield from points(of_task, found, {"PCA 1": "x", "PCA 2": "y"}, str(task))


def umap_input(frame: Any, found: Documents) -> Pairs:
    """The map process of these tests gives the PCA of what it gets: all layers of the document but the head."""
    (one,) = found.values()
    *layers, head = one["tasks"]["signs"]["layers"]
    assert head["layer"] == "head"
    flat = pca_map(np.array([point["feature"] for layer in layers for point in layer["points"]], dtype=np.float32))
    place = [layer["layer"] for layer in layers].index("block 1")
    own = flat.reshape(len(layers), -1, 2)[place]
    yield frame["UMAP 1"], own[:, 0]
    yield frame["UMAP 2"], own[:, 1]


def small_umap_inputs(frame: Any, found: Documents) -> Pairs:
    (one,) = found.values()
    for task, of_task in frame.groupby("task"):
        (layer,) = one["tasks"][task]["layers"]
        flat = pca_map(np.array([point["feature"] for point in layer["points"]], dtype=np.float32))
        yield of_task["UMAP 1"], flat[:, 0]
        yield of_task["UMAP 2"], flat[:, 1]


def change_of_drift(frame: Any, found: Documents) -> Pairs:
    columns = [
        [layer["relative_drift"] for task in one["tasks"].values() for layer in task["layers"]]
        for one in found.values()
    ]
    yield from changes(frame, columns)


def change_of_attribution(frame: Any, found: Documents) -> Pairs:
    columns = [
        [
            layer["share"] * task["layers"][-1]["relative_drift"]
            for task in one["tasks"].values()
            for layer in task["layers"]
        ]
        for one in found.values()
    ]
    yield from changes(frame, columns)


def changes(frame: Any, columns: list[list[float]]) -> Pairs:
    before, after = columns
    yield frame["before"], before
    yield frame["after"], after
    yield frame["change"], np.subtract(after, before)


def anchor_only(frame: Any, found: Documents) -> Pairs:
    assert list(found) == ["merged", "anchor only, rho 1.5", "calibrated"] == list(frame["model"])
    for model, one in found.items():
        tasks = list(one["tasks"].values())
        yield part(frame, model)["final drift"], np.mean([task["layers"][-1]["relative_drift"] for task in tasks])
        yield part(frame, model)["cosine"], np.mean([task["final"]["cosine"] for task in tasks])
        yield part(frame, model)["score, %"], 100 * np.mean([task["output"]["accuracy"] for task in tasks])


def spread(frame: Any, found: Documents) -> Pairs:
    assert list(found) == ["seed 42", "seed 43", "seed 44"]
    scores = [[100 * task["output"]["accuracy"] for task in one["tasks"].values()] for one in found.values()]
    rows = np.array([[*own, np.mean(own)] for own in scores])
    for model, own in zip(found, rows, strict=True):
        yield frame[model], own
    yield frame["mean"], rows.mean(0)
    yield frame["lowest"], rows.min(0)
    yield frame["highest"], rows.max(0)
    yield frame["range"], rows.max(0) - rows.min(0)


def conditioning(frame: Any, found: Documents) -> Pairs:
    (one,) = found.values()
    assert list(frame["maps"]) == [row["maps"] for row in one["systems"]]
    for name in ("width", "tokens", "smallest", "largest", "condition", "effective_rank"):
        yield frame[name], [row[name] for row in one["systems"]]


def sweep(frame: Any, found: Documents) -> Pairs:
    measured = {run["model"]: run["measured"][0] for one in found.values() for run in one["points"]}
    assert set(frame["model"]) == set(measured)
    assert len([name for name in measured if name.startswith("calibrated")]) == 3  # the page's own beside the sweep's
    for _, row in frame.iterrows():
        scores = [100 * one["value"] for one in measured[row["model"]]["scores"].values()]
        yield (row["mean"], row["worst"]), (np.mean(scores), min(scores))
        if row["model"] != "expert":
            yield row["drift"], np.mean([*measured[row["model"]]["drift"].values()])


def selected(frame: Any, found: Documents) -> Pairs:
    assert list(frame["sample"]) == [1, 4]
    for model, one in found.items():
        task = one["tasks"]["signs"]
        margins, rows = ([task[name][i] for i in (1, 4)] for name in ("margins", "per_sample"))
        yield frame["expert margin"], [row["margin"] for row in margins]
        yield frame[f"{model} margin"], [row["model_margin"] for row in margins]
        for name in ("drift", "cosine"):
            yield frame[f"{model} {name}"], [row[name] for row in rows]


def selected_answers(frame: Any, found: Documents) -> Pairs:
    for model, one in found.items():
        answers = [one["tasks"]["signs"]["answers"][i] for i in (1, 4)]
        yield frame[model].map(CLASSES.index), [row["said"] for row in answers]
        yield frame["right"].map(CLASSES.index), [row["right"] for row in answers]


def differences(frame: Any, found: Documents) -> Pairs:
    (one,) = found.values()
    for name in ("a", "b", "difference", "low", "high", "p", "fixed", "broken"):
        yield frame[name], [task[name] for task in (*one["tasks"].values(), one["average"])]


def gains(frame: Any, found: Documents) -> Pairs:
    before, after = (list(one["tasks"].values()) for one in found.values())
    gained = [(a["final"]["cosine"], b["final"]["cosine"]) for a, b in zip(before, after, strict=True)]
    yield frame["cosine gain"], [b - a for a, b in gained]
    right = [(a["output"]["accuracy"], b["output"]["accuracy"]) for a, b in zip(before, after, strict=True)]
    yield frame["score gain"], [100 * (b - a) for a, b in right]


def task_vectors(frame: Any, found: Documents) -> Pairs:
    for model, one in found.items():
        yield frame[model], list(one["task_vector_cosines"].values())


def accuracy(frame: Any, found: Documents) -> Pairs:
    assert set(found) == {"base", "merged", "calibrated", "expert"}
    for model, one in found.items():
        yield frame[model], [100 * v for v in (*(t["value"] for t in one["tasks"].values()), one["average"])]


def flips(frame: Any, found: Documents) -> Pairs:
    before, after = (found[model]["tasks"]["signs"]["answers"] for model in ("merged", "calibrated"))
    rows = [
        (row["said"] == row["right"], next_["said"] == next_["right"]) for row, next_ in zip(before, after, strict=True)
    ]
    yield frame["sample"], [i for i, (was, now) in enumerate(rows) if was != now]
    yield frame["flip"] == "fixed", [now for was, now in rows if was != now]


CHARTS: dict[str, dict[str, Callable[[Any, Documents], Pairs]]] = {
    "drift": {
        "drift per layer": drift_per_layer,
        "drift per task at block 1": drift_per_task,
        "attribution": attribution,
        "growth": growth,
        "decisions": decisions,
        "margins signs": margins,
        "feature sources": feature_sources,
    },
    "calibrate": {
        "drift before and after": drift_before_and_after,
        "scores before and after": scores_before_and_after,
        "change of drift": change_of_drift,
        "change of attribution": change_of_attribution,
        "anchor only": anchor_only,
        "spread over seeds": spread,
        "conditioning": conditioning,
    },
    "cosines": {
        "mean cosines": mean_cosines,
        "cosines signs": cosines,
        "gains": gains,
        "task vector cosines": task_vectors,
    },
    "accuracy": {
        "accuracy": accuracy,
        "differences": differences,
        "flips signs": flips,
        "selected samples signs": selected_answers,
    },
    "features": {
        "map signs block 1": feature_map,
        "distances signs block 1": distances,
        "maps of all tasks block 1": small_maps,
    },
    "head": {"map signs head": feature_map, "distances signs head": distances, "selected samples signs": selected},
    "UMAP": {
        "map signs block 1": umap_input,
        "distances signs block 1": distances,
        "maps of all tasks block 1": small_umap_inputs,
    },
    "runs": {"sweep": sweep},
}
"""What is opened → what its tables are of → how their numbers are found in the documents."""
