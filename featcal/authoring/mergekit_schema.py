"""Describe the keys of a mergekit configuration (version 0.1.5), with the types of its documentation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator

from featcal.authoring.common import model_reference
from featcal.suite.strict import Strict
from featcal.system.errors import InputError
from featcal.system.formatting import did_you_mean


def _split(separator: str, first: str, second: str) -> BeforeValidator:
    """Read 'a<separator>b' as the mapping {first: a, second: b}."""

    def split(content: Any) -> Any:
        if not isinstance(content, str):
            return content
        before, _, after = content.partition(separator)
        return {first: before, second: after or None}

    return BeforeValidator(split)


class ModelPath(Strict):
    path: str
    revision: str | None = None


ModelPlace = Annotated[ModelPath, _split("@", "path", "revision")]


class MergekitModel(Strict):
    """A model with or without a LoRA adapter: `path[@revision][+lora[@revision]]`, or a mapping with these keys."""

    model: ModelPlace
    lora: ModelPlace | None = None

    def to_reference(self, starts: Sequence[Path] = ()) -> str:
        """Return the reference in the form of a suite file; relative folders start from one of `starts`."""
        parts = [self.model] if self.lora is None else [self.model, self.lora]
        return "+".join(model_reference(part.path, part.revision, starts) for part in parts)


ModelRef = Annotated[MergekitModel, _split("+", "model", "lora")]
Parameters = Annotated[
    dict[str, Any], BeforeValidator(lambda content: {} if content is None else content), Field(default_factory=dict)
]


class Input(Strict):
    model: ModelRef
    parameters: Parameters


class SliceInput(Input):
    layer_range: tuple[int, int]


class Slice(Strict):
    sources: list[SliceInput]
    base_model: ModelRef | None = None
    residual_weight: float | None = None
    parameters: Parameters


class Module(Strict):
    models: list[Input] | None = None
    slices: list[Slice] | None = None
    parameters: Parameters


class Tokenizer(Strict):
    source: Any = "union"
    tokens: dict[str, Any] | None = None
    pad_to_multiple_of: int | None = None


class Configuration(Strict):
    merge_method: str
    models: list[Input] | None = None
    slices: list[Slice] | None = None
    modules: dict[str, Module] | None = None
    base_model: ModelRef | None = None
    parameters: Parameters
    dtype: str | None = None
    out_dtype: str | None = None
    tokenizer_source: Any = None
    tokenizer: Tokenizer | None = None
    chat_template: str | None = None

    @model_validator(mode="after")
    def _one_list_of_models(self) -> Configuration:
        kinds = [kind for kind in ("models", "slices", "modules") if getattr(self, kind) is not None]
        if len(kinds) != 1:
            raise ValueError(f"give exactly one of models, slices, modules (found {', '.join(kinds) or 'none'})")
        return self

    def inputs(self) -> Iterator[MergekitModel]:
        """Yield every model that is named as an input, with repetitions."""
        parts: list[Configuration | Module] = [self, *(self.modules or {}).values()]
        for part in parts:
            yield from (one.model for one in part.models or [])
            yield from (source.model for one in part.slices or [] for source in one.sources)


def validate_configuration(content: dict[str, Any], label: str) -> Configuration:
    """Return the configuration, or raise an InputError with all of its mistakes; `label` names the file."""
    try:
        return Configuration.model_validate(content)
    except ValidationError as error:
        raise InputError(*(f"{label}: {_explain(one)}" for one in error.errors())) from error


def _explain(error: Any) -> str:
    place = ".".join(map(str, error["loc"])) or "(top level)"
    if error["type"] != "extra_forbidden":
        return f"{place}: {str(error['msg']).removeprefix('Value error, ')}"
    nested: tuple[type[BaseModel], ...] = (Input, SliceInput, Slice, Module, MergekitModel, ModelPath, Tokenizer)
    schemas = nested if len(error["loc"]) > 1 else (Configuration,)
    known = {field for schema in schemas for field in schema.model_fields}
    return f"{place}: unknown key.{did_you_mean(str(error['loc'][-1]), sorted(known))}"
