"""Charts as data: what stands on axes and in legends, without drawing."""

from __future__ import annotations

import numpy as np
import pandas as pd

from app import charts, ledger_tables, theme
from featcal.drift.source import SourceExcess

LAYERS = ["encoder embeddings", "encoder block 0", "decoder embeddings", "decoder block 0", "head"]


def test_layers_of_an_encoder_decoder_have_short_ticks_and_full_names() -> None:
    figure = charts.drift_compared({"merged": pd.Series(range(5), index=LAYERS)})
    assert list(figure.layout.xaxis.ticktext) == ["enc emb", "enc 0", "dec emb", "dec 0", "head"]
    assert list(figure.layout.xaxis.tickvals) == LAYERS
    assert list(figure.data[0].x) == LAYERS


def test_a_map_by_answers_colours_them_alike_in_every_model() -> None:
    points = {model: np.zeros((3, 2)) for model in ("expert", "merged")}
    figure = charts.feature_map(points, ["a", "b", "c"], False, "PCA", ["yes", "no", "yes"])
    clouds = {trace.name: trace for trace in figure.data if len(trace.x) == 3}
    assert set(clouds) == {"expert", "merged"}
    no, yes = theme.OTHERS[:2]
    for model, cloud in clouds.items():
        assert list(cloud.marker.color) == [yes, no, yes]
        assert cloud.marker.symbol == theme.SYMBOL[model]
    legend = [trace.name for trace in figure.data if trace.showlegend is not False]
    assert legend == ["expert", "merged", "no", "yes"]


def test_a_map_by_models_has_one_colour_each() -> None:
    figure = charts.feature_map({"expert": np.zeros((3, 2))}, ["a", "b", "c"], False, "PCA")
    assert [trace.marker.color for trace in figure.data] == [theme.COLOUR["expert"]]


def test_answers_never_look_like_a_model() -> None:
    assert not set(theme.OTHERS) & {theme.COLOUR[role] for role in theme.ROLES}


def test_sources_are_summed_per_layer_of_every_stage() -> None:
    found = [
        SourceExcess(block, modules, "stale", excess, excess, 0.0, 0.0, 0.0, relative)
        for block in ("encoder.block.0", "decoder.block.0")
        for modules, excess, relative in (("q", 1.0, 0.5), ("o", 3.0, 0.5))
    ]
    frame = ledger_tables.sources(found, {"encoder.block.0": LAYERS[1], "decoder.block.0": LAYERS[3]})
    assert sorted(frame["layer"]) == ["decoder block 0", "encoder block 0"]
    assert list(frame["excess"]) == [4.0, 4.0]
    assert list(frame["relative"]) == [0.5, 0.5]
