"""Charts as data: what stands on axes and in legends, without drawing."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

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


def excess_of(block: str, modules: str, source: str, excess: float, minimum: float) -> SourceExcess:
    return SourceExcess(block, modules, source, excess, excess, 0.0, 0.0, 0.0, minimum, excess / minimum)


def test_sources_are_summed_per_layer_of_every_stage() -> None:
    found = [
        excess_of(block, modules, "stale", excess, 2 * excess)
        for block in ("encoder.block.0", "decoder.block.0")
        for modules, excess in (("q", 1.0), ("o", 3.0))
    ]
    frame = ledger_tables.sources(found, {"encoder.block.0": LAYERS[1], "decoder.block.0": LAYERS[3]})
    assert sorted(frame["layer"]) == ["decoder block 0", "encoder block 0"]
    assert list(frame["excess"]) == [4.0, 4.0]
    assert list(frame["relative"]) == [0.5, 0.5]


def test_every_source_is_relative_to_its_own_deployed_minimum() -> None:
    """`snapshot` has another deployed objective than the others, and so another minimum."""
    found = [
        excess_of("b", "q", "prefix", 0.0, 1.0),
        excess_of("b", "q", "stale", 0.05, 1.0),
        excess_of("b", "q", "snapshot", 0.45, 1.5),
        excess_of("b", "o", "prefix", 0.0, 3.0),
        excess_of("b", "o", "stale", 0.15, 3.0),
        excess_of("b", "o", "snapshot", 0.0, 3.0),
    ]
    frame = ledger_tables.sources(found, {"b": "block 0"}).set_index("source")
    assert frame["relative"].to_dict() == pytest.approx({"prefix": 0.0, "stale": 0.05, "snapshot": 0.1})
