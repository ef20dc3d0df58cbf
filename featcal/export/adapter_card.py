"""Write the model card of an adapter."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from featcal.export.card import CITATION, describe_licence, find_on_hub, suite_word
from featcal.export.card_parts import LICENCE, mark
from featcal.export.licences import base_card, language_of, licence_fields
from featcal.family.opening import Family
from featcal.formats.hub import HubModel
from featcal.suite.recipe import MergeRecipe
from featcal.system.formatting import code_block, escape_markdown, percent
from featcal.system.in_memory import is_held


def start_on_hub(family: Family, over: str) -> HubModel | None:
    """Return the model on the Hub under an adapter; None if it is, or may be, a local folder."""
    ref = family.suite.base if over == "base" else family.suite.merged
    is_another = over == "merged" and family.merged_name != "merged"
    if ref is None or isinstance(ref, MergeRecipe) or is_held(ref) or is_another:
        return None
    return find_on_hub(ref, family.suite)


def adapter_card(family: Family, record: Mapping[str, Any], loaded_as: str) -> str:
    """Write the card of an adapter's folder: front matter for the Hub, and the loss of every layer.

    Args:
        record: content of its `featcal.json`.
        loaded_as: the class of transformers under the adapter.
    """
    from huggingface_hub import ModelCard, ModelCardData

    base, entry = base_card(family), record["adapter"]
    data = ModelCardData(
        **licence_fields(base),
        base_model=entry["base_model"],
        language=language_of(base),
        library_name="peft",
        tags=["lora", "featcal"],
        **({"base_model_relation": "adapter"} if entry["base_model"] else {}),
    )
    parts = [
        f"# {escape_markdown(family.suite.name)}, {_title(entry)}",
        _account(entry),
        f"## Load it\n\n{code_block(_loading(entry['base_model'], loaded_as), 'python')}",
        f"## What is left out\n\n{_table(record)}",
        f"## How it was made\n\n{code_block(_command(record), 'bash')}\n\nwhere `DIR` is the calibrated folder.",
        f"## Licence\n\n{mark(LICENCE, describe_licence(record['licences']))}",
        "Versions, hashes of all inputs and the options of the calibration are in `featcal.json`.",
        CITATION,
    ]
    text = "\n\n".join(parts)
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n{text}\n"))


def _title(entry: Mapping[str, Any]) -> str:
    return "repair as an adapter" if entry["of"] == "merged" else "calibrated merge as an adapter"


def _account(entry: Mapping[str, Any]) -> str:
    over = "the merged model" if entry["of"] == "merged" else "the base"
    whole = entry["whole"]
    line = (
        f"A LoRA over {over} that makes a calibrated model of it. Of every linear map it holds what does most to the "
        f"map's own inputs; {percent(entry['left_out'])} % of what the whole change does to them, in squares, is left "
        "out."
    )
    if whole:
        line += f" {len(whole)} modules that are no linear maps are saved whole."
    return line


def _loading(over: str | None, loaded_as: str) -> str:
    place = over or "MODEL"
    return (
        f"from peft import PeftModel\nfrom transformers import {loaded_as}\n\n"
        f'model = PeftModel.from_pretrained({loaded_as}.from_pretrained("{place}"), "ADAPTER")'
    )


def _table(record: Mapping[str, Any]) -> str:
    lines = ["| layer | rank | left out, % |", "|---|---:|---:|"]
    for row in record["layers"]:
        low, high = row["rank"]
        ranks = str(low) if low == high else f"{low} to {high}"
        lines.append(f"| {escape_markdown(row['layer'])} | {ranks} | {percent(row['left_out'])} |")
    return "\n".join(lines)


def _command(record: Mapping[str, Any]) -> str:
    entry = record["adapter"]
    limits = [
        part for name in ("rank", "energy") if entry[name] is not None for part in (f"--{name}", f"{entry[name]:g}")
    ]
    named = [] if record["suite_file"]["shipped"] else ["--suite", suite_word(record)]
    return shlex.join(
        ["featcal", "export", "DIR", "--as", "adapter", "--of", entry["of"], *limits, *named, "--out", "adapter"]
    )
