"""Find the ingredients of a merged model, from mergekit's configuration or the card beside its weights.

If neither names the base, it is searched in the experts' own cards and configurations. Arguments override all files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from featcal.authoring.ancestors import find_common_ancestors, is_named_by_all, is_reachable
from featcal.authoring.common import model_reference, start_folders, task_names
from featcal.authoring.from_mergekit import MergedModels, is_configuration, read_contents
from featcal.formats.card_data import read_card_data, read_card_text
from featcal.formats.hub import CARD_FILE, RECIPE_FILE, RECORD_FILE, hub_model
from featcal.formats.lora import split_lora
from featcal.formats.open_clip_config import PREFIXES
from featcal.system.errors import InputError
from featcal.system.formatting import some
from featcal.system.json_files import read_json
from featcal.system.paths import local_path
from featcal.system.yaml_files import parse_yaml, read_yaml

NEW_TOKENS = 32
"""Most tokens that an expert writes after a beginning: the limit for an answer of a task without one."""
BEGINNINGS = (
    "The history of the city began",
    "Once upon a time there was",
    "Question: What is the capital of France?\nAnswer:",
    "Question: A train travels 60 miles in 90 minutes. How fast is it?\nAnswer:",
    "def fibonacci(n):",
    "import numpy as np\n",
    "SELECT name, count(*) FROM",
    "Dear Sir or Madam,",
    "The main difference between a virus and a bacterium is",
    "To solve the equation 3x + 5 = 20, we first",
    "Translate to German: Good morning, how are you?",
    "Summarize: The committee met on Tuesday to discuss the budget.",
    "Is this review positive or negative? The film was a waste of time.",
    "Three tips for learning a new language:\n1.",
    "According to the report published in 2019,",
    "The patient presented with a fever and",
    "In the second quarter the company's revenue",
    "The theorem states that for every",
    "Write a short poem about the sea.",
    "Q: Why is the sky blue?\nA:",
    "Ingredients:\n- 2 cups of flour",
    "She opened the door and saw",
    "The court held that the defendant",
    "Explain photosynthesis to a child.",
    "Does it follow? All birds have wings. A robin is a bird. A robin has wings.",
    "The weather tomorrow will be",
    "User: I cannot log in to my account.\nAssistant:",
    "class Stack:\n    def __init__(self):",
    "Correct the grammar: She go to school yesterday.",
    "The population of Japan in 2020 was",
    "First, install the package. Then",
    "He argued that freedom",
)
"""Beginnings of texts of many kinds, for experts without prompts."""


@dataclass(frozen=True)
class Origins:
    """The models of a merge, as references of a suite file, and where they were found.

    Args:
        base: None if nothing names it.
        where: the file that names them; "" if all are arguments.
        contents: of mergekit's configuration, if there is one.
        found: the base is neither given nor in that file: the experts name it.
        missed: the ancestor that the experts name, if it is neither on this machine nor available from the Hub.
    """

    base: str | None
    experts: Mapping[str, str]
    where: str = ""
    contents: MergedModels | None = None
    found: bool = False
    missed: str = ""

    @property
    def coefficients(self) -> Mapping[str, float] | None:
        """Return the coefficient of every expert in the merge, by its recipe; None if the recipe has none."""
        stated = None if self.contents is None else self.contents.coefficients
        return stated if stated is not None and stated.keys() == self.experts.keys() else None

    def facts(self) -> dict[str, Any]:
        """Return what is known about how the merge was made, by the fields of the verdict's `Recipe`."""
        known = {"found_base": self.base if self.found else None, "missed_base": self.missed}
        if self.contents is None:
            return known
        names = ("is_exact", "method", "notes", "is_uneven", "dtype")
        return {**known, "stated": self.coefficients, **{name: getattr(self.contents, name) for name in names}}


def find_origins(folder: Path, base: str | None, experts: Mapping[str, str], asks_hub: bool = False) -> Origins:
    """Find the models of which the merged model in a folder was made.

    Args:
        base: overrides the files.
        experts: task → reference; for tasks of the recipe they replace single experts, otherwise all of them.
        asks_hub: whether to ask the Hub for experts' cards that are not in its local cache.

    Raises:
        InputError: neither the files nor the arguments name experts, or a reference is impossible; the message says
            what to give.
    """
    if base is not None and experts:
        found = _read_files(folder, strict=False)
        contents = found.contents if found is not None else None
        return Origins(base, experts, "", contents)
    found = _read_files(folder, strict=True)
    if found is None and not experts:
        raise InputError(
            f"{folder} does not name the models that it was merged from: it has no {RECIPE_FILE}, and its {CARD_FILE} "
            "names no base "
            "models of a merge; give --base REFERENCE, and --expert NAME=REFERENCE once per expert"
        )
    found = found or Origins(None, {})
    named = {name: ref for name, ref in found.experts.items() if base is None or ref != base}
    named = {**named, **experts} if experts.keys() <= named.keys() else dict(experts)
    if not named:
        raise InputError(f"{folder / found.where} names no expert; give --expert NAME=REFERENCE once per expert")
    base = base or found.base
    stated = {} if base is None else {"--base": base}
    _require_places({**stated, **{f"--expert {name}": ref for name, ref in named.items()}}, folder / found.where)
    whole = Origins(base, named, found.where, found.contents)
    if base is not None:
        return whole
    # Of a card's list the base may be one, and is then no expert.
    is_list = found.contents is None and not experts
    known = _look_for_base(whole, is_list, asks_hub)
    if is_list and known.base is None:
        raise InputError(
            f"{folder / found.where} names {some([*named.values()], 8)}, but not the model that they were fine-tuned "
            "from; give it with --base REFERENCE; it may be one of these"
        )
    return known


def _look_for_base(origins: Origins, is_list: bool, asks_hub: bool) -> Origins:
    """Add the base that the experts name to the models of a merge, if there is one and it is available.

    Args:
        is_list: whether one of the experts may be the base.
    """
    experts = origins.experts
    if is_list:
        for name, ref in experts.items():
            others = {task: one for task, one in experts.items() if task != name}
            if others and is_named_by_all(ref, others.values(), asks_hub):
                return replace(origins, base=ref, experts=others, found=True)
    ancestors = find_common_ancestors([*experts.values()], asks_hub)
    base = next((one for one in ancestors if is_reachable(one, asks_hub)), None)
    missed = next(iter(ancestors), "") if base is None else ""
    return replace(origins, base=base, found=base is not None, missed=missed)


def sample_source(count: int | None) -> dict[str, Any]:
    """Return the source of texts that experts write, in the form of a suite file.

    Args:
        count: most texts per task; None for one per beginning.
    """
    return {"self_generated": {"prompts": [*BEGINNINGS[:count]], "tokens": NEW_TOKENS}}


def _read_files(folder: Path, strict: bool) -> Origins | None:
    """Read the ingredients from the files of a merged model; None if they name none.

    Args:
        strict: raise InputError for a configuration with mistakes, rather than ignore it.
    """
    try:
        found = _read_configuration(folder)
    except InputError:
        if strict:
            raise
        return None
    if found is not None:
        where, contents = found
        return Origins(contents.base, contents.experts, where, contents)
    data = read_card_data(folder)
    stated, tags = data.get("base_model"), data.get("tags") or ()
    listed = stated if isinstance(stated, list) else [stated] if stated else []
    names = [model_reference(str(one), None, start_folders(folder)) for one in listed]
    is_merge = data.get("base_model_relation") == "merge" or (isinstance(tags, list) and "merge" in tags)
    if not is_merge or not names:
        return None
    # featcal's own cards begin with the base where they name all models; on others' the order means nothing.
    complete = len(names) > 1 and _count_models(folder) in (0, len(names))
    base = names[0] if "featcal" in tags and complete else None
    experts = [one for one in dict.fromkeys(names) if one != base]
    return Origins(base, dict(zip(task_names(experts), experts, strict=True)), CARD_FILE)


def _count_models(folder: Path) -> int:
    """Return the number of base and experts in featcal's own record of a folder; 0 without one."""
    file = folder / RECORD_FILE
    inputs = read_json(file).get("inputs") if file.is_file() else None
    return sum(one == "base" or one.startswith("expert ") for one in inputs) if isinstance(inputs, dict) else 0


def _read_configuration(folder: Path) -> tuple[str, MergedModels] | None:
    """Return mergekit's configuration, from its file or as quoted in the card, and the name of that file."""
    file = folder / RECIPE_FILE
    if file.is_file():
        content, where = read_yaml(file), RECIPE_FILE
    else:
        blocks = re.findall(r"^```ya?ml\n(.*?)^```", read_card_text(folder), re.DOTALL | re.MULTILINE)
        recipes = [one for one in blocks if re.search(r"^merge_method:", one, re.MULTILINE)]
        if len(recipes) != 1:  # of several steps none alone says what the weights were made of
            return None
        content, where = parse_yaml(recipes[0], str(folder / CARD_FILE)), CARD_FILE
    if not isinstance(content, dict) or not is_configuration(content):
        return None
    return where, read_contents(content, start_folders(folder), str(folder / where))


def _require_places(references: Mapping[str, str], file: Path) -> None:
    """Raise InputError for references that are neither folders nor ids on the Hub, and name the option that corrects
    them."""
    problems = [
        f"{file} names '{ref}', which is no folder where this command runs, beside the weights or above them; say "
        f"where it is with {option}{'=' if option.startswith('--expert') else ' '}FOLDER"
        for option, ref in references.items()
        if not ref.startswith(PREFIXES) and not all(map(_can_be, filter(None, split_lora(ref, Path.cwd()))))
    ]
    if problems:
        raise InputError(*problems)


def _can_be(part: str) -> bool:
    return local_path(part, Path.cwd(), "model").is_dir() or hub_model(part) is not None
