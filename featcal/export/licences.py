"""Read licence and language from the cards of a suite's models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from featcal.family.opening import Family
from featcal.formats.card_data import read_card_data
from featcal.system.formatting import printable, some

BASE, MERGED = "base", "merged"
"""Names, among the models with a licence, of the base, and of the merged model if the base is not known."""
_NAMED_APART = "other"
"""The Hub's word for a licence whose name is in `license_name`."""
Licences = Mapping[str, str | None]
"""Model, "base" or "expert TASK" → the Hub's word for its licence; None if its files state none."""


def read_licences(family: Family) -> dict[str, str | None]:
    """Return the licence that every model's card states, else its `config.json`; for an adapter its own.

    A licence "other" is returned by its name. A model in memory has no known licence.
    """
    first = BASE if family.is_base_known else MERGED
    found = {first: licence_of(base_card(family)) or _words(family.origin.config.get("license"))}
    for task, weights in family.experts.items():
        files = getattr(weights, "files", ())
        # The adapter's own file is the last one: after those of the model that it stands on.
        found[f"expert {task}"] = licence_of(read_card_data(files[-1].parent)) if files else None
    return found


def base_card(family: Family) -> dict[str, Any]:
    """Return the front matter of the base's card, or of the merged model's if the base is not known."""
    return read_card_data(family.origin.folder)


def licence_of(data: Mapping[str, Any]) -> str | None:
    """Return the licence in a card's front matter; "other" by its name, several joined with "and", None without one."""
    licence = " and ".join(_all_words(data.get("license"))) or None
    return _words(data.get("license_name")) or licence if licence == _NAMED_APART else licence


def licence_fields(data: Mapping[str, Any]) -> dict[str, str | list[str]]:
    """Return the fields of a card's front matter that are about its licence."""
    names = ("license_name", "license_link") if licence_of({"license": data.get("license")}) == _NAMED_APART else ()
    fields: dict[str, str | list[str]] = {name: value for name in names if (value := _words(data.get(name)))}
    if stated := _all_words(data.get("license")):
        fields["license"] = stated if len(stated) > 1 else stated[0]
    return fields


def language_of(data: Mapping[str, Any]) -> list[str] | None:
    """Return the languages in a card's front matter; None without any."""
    return _all_words(data.get("language")) or None


def main_licence(licences: Licences) -> tuple[str, str | None]:
    """Return in words the model whose licence is the reference for the others, and the licence in its files."""
    role, words = (BASE, "the base") if BASE in licences else (MERGED, "the merged model")
    return words, licences.get(role)


def licence_conflicts(licences: Licences) -> list[str]:
    """Return one sentence for every licence that differs from the base's, or from the merged model's if the base is not
    known."""
    whose, base = main_licence(licences)
    others: dict[str, list[str]] = {}
    for model, licence in licences.items():
        if licence is not None and base is not None and licence.lower() != base.lower():
            others.setdefault(licence, []).append(model)
    return [
        f"{some(models)}: the licence is {licence}, {whose}'s is {base}; read both before you publish what was made "
        "of them"
        for licence, models in others.items()
    ]


def licence_warnings(licences: Licences) -> list[str]:
    """Return sentences on licences that differ, and on models whose files state none."""
    silent = [model for model, licence in licences.items() if licence is None]
    gaps = [f"no licence is stated in the files of {some(silent)}"] if silent else []
    return [*licence_conflicts(licences), *gaps]


def _all_words(stated: object) -> list[str]:
    return [text for one in (stated if isinstance(stated, list) else [stated]) if (text := _words(one))]


def _words(value: object) -> str | None:
    """Return a value of front matter as one line of text; None if it is not text, or too long for a name."""
    text = " ".join(printable(value).split()) if isinstance(value, str) else ""
    return text if 0 < len(text) <= 200 else None
