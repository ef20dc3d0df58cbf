"""Write the model card that travels with an exported checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from featcal.formats.hub import hub_model
from featcal.suite.recipe import MergeRecipe
from featcal.suite.schema import Suite

_CITATION = """```bibtex
@article{featcal,
  title = {FeatCal: Feature Calibration for Post-Merging Models},
  author = {Gu, Yanggan and Cai, Shuo and Wang, Zihao and Wang, Wenjun and Wang, Yuanyi and Wang, Pengkai and
            Huang, Sirui and Lu, Su and Wu, Jianmin and Yang, Hongxia},
  journal = {arXiv preprint arXiv:2605.13030},
  year = {2026}
}
```"""


def model_card(
    suite: Suite,
    title: str,
    what: str,
    settings: Mapping[str, Any],
    library: str = "transformers",
    merged_name: str = "merged",
) -> str:
    """Write front matter for the Hub and a short account of how the weights were made.

    Only references that cannot be local folders are named as base models: their repositories in the front matter, which
    the Hub reads, and the references as given in the account.

    Args:
        merged_name: name of the merged model that the weights were made of, where it is not the suite's.
    """
    refs = [suite.base, *(task.expert for task in suite.tasks.values())]
    on_hub = [one for ref in refs if (one := hub_model(ref)) is not None and not (suite.root / ref).exists()]
    front: dict[str, Any] = {"library_name": library, "tags": ["merge", "featcal"]}
    if on_hub:
        front |= {"base_model": list(dict.fromkeys(one.repo for one in on_hub)), "base_model_relation": "merge"}
    merged = suite.merged
    recipe = merged.model_dump(exclude_none=True) if isinstance(merged, MergeRecipe) else "a merged checkpoint"
    of = recipe if merged_name == "merged" else merged_name
    known = {"models on the Hub": ", ".join(one.ref for one in on_hub)} if on_hub else {}
    rows = "\n".join(f"| {name} | {value} |" for name, value in {**known, **settings}.items())
    header = yaml.safe_dump(front, sort_keys=False)
    return f"""---
{header}---
# {title}

{what}

| | |
|---|---|
| suite | {suite.name} |
| tasks | {", ".join(suite.tasks)} |
| merged model | {of} |
{rows}

Versions, hashes of all inputs and the samples that were used are in `featcal.json`, with what was measured.

{_CITATION}
"""
