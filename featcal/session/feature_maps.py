"""Compare features of the experts and of models after every layer: distances, and positions on a map."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from featcal.models.adapter import LAST_LAYER
from featcal.session import projection
from featcal.session.model_ref import ModelRef
from featcal.session.open_suite import ResultKind
from featcal.session.projection import Points, draw_points, pca_map
from featcal.session.session import Session
from featcal.suite.methods import EXPERT
from featcal.suite.views import EvaluationSamples
from featcal.system.errors import InputError, NumericalError
from featcal.system.formatting import did_you_mean
from featcal.system.progress import Progress, silent

Values = NDArray[np.float64]
_VIEW = EvaluationSamples()
_CLOUD, _PCA = ResultKind[tuple[list[int], Points]]("cloud"), ResultKind[Points]("PCA of a cloud")


@dataclass(frozen=True)
class FeatureMaps:
    """Features of the experts and of models on the same samples of every task.

    All layers except the head share one map, on which positions after different layers are comparable; the head has a
    map of its own, because its features have another width.

    Args:
        models: by their names in charts and tables; the expert first, and at least one other.

    >>> import featcal
    >>> maps = featcal.FeatureMaps.from_names(
    ...     featcal.open_session("lm-mini"), ["merged"], featcal.EvaluationSamples(8)
    ... )
    >>> maps.to_frame(["sentiment"], ["head"])[["model", "sample", "distance"]].round(2).tail(2)
         model  sample  distance
    14  merged       6      0.80
    15  merged       7      0.48
    """

    session: Session
    models: Mapping[str, ModelRef]
    on: EvaluationSamples

    @staticmethod
    def from_names(session: Session, names: Sequence[str], on: EvaluationSamples = _VIEW) -> FeatureMaps:
        """Make the maps of the expert and the models with these names.

        Raises:
            InputError: no model besides the expert, or an unknown name.
        """
        others = [name for name in names if name != EXPERT]
        if not others:
            raise InputError("features: name at least one model beside the expert")
        return FeatureMaps(session, {name: session.resolve(name) for name in (EXPERT, *others)}, on)

    def map_layers(self, layer: str) -> list[str]:
        """Return the layers that share a map with this one, in forward order."""
        return [LAST_LAYER] if layer == LAST_LAYER else visible_layers(self.session)[:-1]

    def key(self, *more: Hashable) -> Hashable:
        """Return a cache key for the features of these models."""
        return (*(model.key for model in self.models.values()), self.on, *more)

    def features(self, task: str, layer: str, progress: Progress = silent) -> dict[str, dict[str, Tensor]]:
        """Return features `[n, d]` of a task: by layer of the map of `layer`, then by model.

        Raises:
            InputError: a model or the samples cannot be used.
            NumericalError: a feature that is zero or not finite.
        """
        if layer != LAST_LAYER:
            found = {
                n: self.session.measure.layer_features(one, task, self.on, progress) for n, one in self.models.items()
            }
            by_layer = {behind: {name: one[behind] for name, one in found.items()} for behind in self.map_layers(layer)}
            return _sound(by_layer, task)
        others = {name: model for name, model in self.models.items() if not model.is_every_expert}
        last = {
            name: self.session.measure.features(model, self.on, progress).tasks[task] for name, model in others.items()
        }
        # A walk of any model has the features of its experts beside its own, so "expert" costs none.
        expert = next(iter(last.values())).expert_features
        return _sound({LAST_LAYER: {n: last[n].model_features if n in last else expert for n in self.models}}, task)

    def cloud(self, task: str, layer: str, alone: bool = False) -> tuple[list[int], Points]:
        """Return the ids of the samples on a layer's map, and its features of unit norm: layer by layer, model by
        model, sample by sample, padded with zeros for layers that are narrower than others.

        Args:
            alone: the map shows only this layer; it is one of many small ones, one per task.
        """

        def make() -> tuple[list[int], Points]:
            layers = [layer] if alone else self.map_layers(layer)
            # `MOST_POINTS` is for what one page shows: one map of all layers, or a small one of each task.
            together = (len(self.session.tasks) if alone else len(layers)) * len(self.models)
            ids = draw_points(len(self.session.viewable_samples(task, self.on)), together)
            found = self.features(task, layer)
            parts = [
                projection.pool_models({name: one[ids] for name, one in found[behind].items()}) for behind in layers
            ]
            width = max(part.shape[1] for part in parts)  # a vision tower's states are narrower than the decoder's
            return ids, np.concatenate([np.pad(part, ((0, 0), (0, width - part.shape[1]))) for part in parts])

        return self.session.get_or_make(_CLOUD, self._key_of_map(task, layer, alone), make)

    def pca(self, task: str, layer: str, alone: bool = False) -> Points:
        """Return `[rows, 2]`: the projection of the rows of `cloud` on the two directions of their largest variance."""
        key = self._key_of_map(task, layer, alone)
        return self.session.get_or_make(_PCA, key, lambda: pca_map(self.cloud(task, layer, alone)[1]))

    def to_frame(
        self,
        tasks: Sequence[str] = (),
        layers: Sequence[str] = (),
        *,
        alone: bool = False,
        pooled: bool = False,
        progress: Progress = silent,
    ) -> pd.DataFrame:
        """Return one row per task, layer, model and sample, in the order of a map: `task`, `layer`, `model`, `sample`,
        position on the PCA map (`x`, `y`; missing for samples that are not on it), `cosine` to the expert's feature,
        and `distance` of the two at unit norm.

        Args:
            tasks, layers: by name, a block also by the prefix of its tensors; empty means all (`visible_layers`).
            alone: every layer has a map of its own.
            pooled: a last column `feature`: the feature itself, of unit norm.

        Raises:
            InputError: there is no such task or layer, or a model or the samples cannot be used.
            NumericalError: a feature that is zero or not finite.
        """
        names = self.session.family.adapter.block_names()
        chosen = _select_known("layer", [names.get(one, one) for one in layers], visible_layers(self.session))
        frames = [
            self._layer_frame(task, layer, found, alone, pooled)
            for task in _select_known("task", tasks, self.session.tasks)
            for first in dict.fromkeys(self.map_layers(layer)[0] for layer in chosen)
            for layer, found in self.features(task, first, progress).items()
            if layer in chosen
        ]
        return pd.concat(frames, ignore_index=True)

    def _layer_frame(
        self, task: str, layer: str, features: Mapping[str, Tensor], alone: bool, pooled: bool
    ) -> pd.DataFrame:
        """Return the rows of one task after one layer."""
        layers = [layer] if alone else self.map_layers(layer)
        ids, _ = self.cloud(task, layer, alone)
        flat = self.pca(task, layer, alone).reshape(len(layers), len(self.models), -1, 2)[layers.index(layer)]
        cosines, distances = compare_with_expert(features)
        frames = []
        for name, places in zip(self.models, flat, strict=True):
            at = np.full((len(cosines[name]), 2), np.nan)
            at[ids] = places
            numbers = {"x": at[:, 0], "y": at[:, 1], "cosine": cosines[name], "distance": distances[name]}
            frame = pd.DataFrame({"task": task, "layer": layer, "model": name, "sample": range(len(at)), **numbers})
            frames.append(
                frame.assign(feature=list(projection.pool_models({name: features[name]}))) if pooled else frame
            )
        return pd.concat(frames)

    def _key_of_map(self, task: str, layer: str, alone: bool) -> Hashable:
        return self.key(task, (layer,) if alone else tuple(self.map_layers(layer)), alone)


def visible_layers(session: Session) -> list[str]:
    """Return the layers whose features can be shown: those that differ from sample to sample."""
    adapter = session.family.adapter
    # In front of the blocks a class token is the same for every sample, so all points would lie on one.
    same = adapter.class_token_layers()
    return [layer for layer in adapter.layers() if layer not in same]


def compare_with_expert(features: Mapping[str, Tensor]) -> tuple[dict[str, Values], dict[str, Values]]:
    """Return cosine to the expert's feature, and distance of the two at unit norm, per model: `[n]`, in float64."""
    unit = {name: normalize(own.double(), dim=1) for name, own in features.items()}
    expert = unit[EXPERT]
    return (
        {name: cosine_similarity(own, expert).numpy() for name, own in unit.items()},
        {name: (own - expert).norm(dim=1).numpy() for name, own in unit.items()},
    )


def nearest_samples(features: Mapping[str, Tensor], sample: int, count: int) -> dict[str, list[int]]:
    """Return the nearest samples to one sample by cosine, per model, nearest first, in the full space of the features;
    the sample itself is left out."""
    found = {}
    for name, own in features.items():
        unit = normalize(own.double(), dim=1)
        cosines = unit @ unit[sample]
        cosines[sample] = -2.0
        found[name] = cosines.topk(min(count, len(own) - 1)).indices.tolist()
    return found


def clouds_json(clouds: FeatureMaps, frame: pd.DataFrame) -> dict[str, Any]:
    """Return the public document of `featcal study features --json`: `FeatureMaps.to_frame` by task and layer."""
    tasks: dict[str, Any] = {}
    for (task, layer), rows in frame.groupby(["task", "layer"], sort=False):
        entry = tasks.setdefault(str(task), {"samples": int(rows["sample"].max()) + 1, "layers": []})
        points = [_point(row) for row in rows.drop(columns=["task", "layer"]).to_dict("records")]
        entry["layers"].append({"layer": layer, "points": points})
    session = clouds.session
    asked = {"split": clouds.on.split or session.split, "seed": clouds.on.seed, "models": list(clouds.models)}
    return {"suite": session.family.suite.name, **asked, "tasks": tasks}


def _point(row: Mapping[Hashable, Any]) -> dict[str, Any]:
    """Return a sample in the form of the document; without a position if it is not on the map."""
    here = {str(name): None if name in ("x", "y") and np.isnan(value) else value for name, value in row.items()}
    return here | {"feature": row["feature"].tolist()} if "feature" in row else here


def _select_known(what: str, asked: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return the known names that were requested, in their own order; all if none were requested.

    Raises:
        InputError: an unknown name.
    """
    for name in asked:
        if name not in known:
            raise InputError(f"{what} '{name}': only {', '.join(known)} can be shown.{did_you_mean(name, known)}")
    return [name for name in known if name in asked or not asked]


def _sound(found: dict[str, dict[str, Tensor]], task: str) -> dict[str, dict[str, Tensor]]:
    """Return the features, after a check that each has a direction.

    Raises:
        NumericalError: one is zero or not finite.
    """
    for layer, models in found.items():
        for name, one in models.items():
            norms = one.norm(dim=1)
            if not bool((norms.isfinite() & (norms > 0)).all()):
                raise NumericalError(
                    f"task '{task}', {layer}: a feature of model '{name}' is zero or not finite, so it has no "
                    "direction; look at the model's tensors, or leave the model out"
                )
    return found
