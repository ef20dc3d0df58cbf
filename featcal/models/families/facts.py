"""Make an adapter's class from a row of a table of facts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

import transformers

from featcal.models.adapter import Adapter

Kind = TypeVar("Kind", bound=Adapter)


class Facts(Protocol):
    """The facts that every row of every table has."""

    @property
    def model_type(self) -> str: ...
    @property
    def config(self) -> Any: ...
    @property
    def model(self) -> Any: ...
    @property
    def defaults(self) -> Mapping[str, Any]: ...


def class_of(facts: Facts, kind: type[Kind], name: str, **own: object) -> type[Kind]:
    """Return the adapter of one row of facts.

    Args:
        kind: the class that all rows of the table have in common.
        name: of the kind, before the model type.
        own: further attributes of the class.

    Raises:
        AttributeError: the installed transformers has no class of that name.
    """
    config, model = (getattr(transformers, one) if isinstance(one, str) else one for one in (facts.config, facts.model))
    attributes = {
        "family": facts.model_type,
        "facts": facts,
        "config_class": config,
        "model_class": model,
        "classes": (model.__name__,),
        "defaults": facts.defaults,
    }
    return type(f"{name} of {facts.model_type}", (kind,), attributes | own)


def named_class(config: Mapping[str, Any]) -> str:
    """Return the class of transformers that a `config.json` names, with any head; "AutoModel" for the stack alone."""
    named = next(iter(config.get("architectures") or ()), "")
    return named if hasattr(transformers, named) else "AutoModel"
