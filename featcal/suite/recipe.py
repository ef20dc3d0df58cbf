"""Read the recipe of a merge in a suite file: the method, and the options that differ from its defaults."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import Field as OptionField
from typing import Any, Literal

from pydantic import (
    ConfigDict,
    ValidationError,
    create_model,
    field_validator,
    model_serializer,
    model_validator,
)

from featcal.suite.methods import Method, is_merger, merger_names, method
from featcal.suite.options import facts_of, options_of_class, type_of
from featcal.suite.strict import Strict
from featcal.system.errors import InputError
from featcal.system.formatting import did_you_mean, shorten

Dtype = Literal["float32", "bfloat16", "float16"]
DTYPE = "dtype"
"""The option of every merger: storage dtype of the merged model; the base's own when left out."""


class MergeRecipe(Strict):
    """Merge the experts on the fly instead of reading a merged checkpoint: a `method`, `dtype` and its options."""

    model_config = ConfigDict(extra="allow")
    method: str

    @field_validator("method")
    @classmethod
    def _is_a_merger(cls, name: str) -> str:
        if not is_merger(name):
            *names, last = (f"'{one}'" for one in merger_names())
            near = did_you_mean(name, merger_names())
            raise ValueError(f"Input should be {', '.join(names)} or {last}{near and f'.{near}'}")
        return name

    @model_validator(mode="after")
    def _options_are_the_methods(self) -> MergeRecipe:
        try:
            kind = method(self.method)
            given = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
            _require_known(given, kind)
            read = _content_of(kind).model_validate(given).model_dump(exclude_unset=True, exclude_none=True)
            # The model is frozen; values as the method's types read them take the place of those of YAML.
            object.__setattr__(self, "__pydantic_extra__", read)
            self.options()
        except InputError as error:
            raise ValueError("; ".join(error.problems)) from error
        return self

    @model_serializer
    def _write(self) -> dict[str, Any]:
        # Sorted, so that a suite's hash does not depend on the order in which options are typed.
        return {"method": self.method, **dict(sorted(self.settings.items()))}

    @property
    def settings(self) -> dict[str, Any]:
        """Return all keys of the recipe besides the method: its options, and `dtype`."""
        return dict(self.model_extra or {})

    @property
    def dtype(self) -> Dtype | None:
        """Return the storage dtype of the merged model; None means the base's own."""
        return self.settings.get(DTYPE)

    @property
    def options_by_task(self) -> dict[str, Mapping[str, float]]:
        """Return the options that are given per task."""
        return {name: value for name, value in self.settings.items() if isinstance(value, Mapping)}

    def options(self) -> Method:
        """Return the method with all its options.

        Raises:
            InputError: options that exclude each other, or a method that can no longer be imported.
        """
        return method(self.method)(**{name: value for name, value in self.settings.items() if name != DTYPE})

    @property
    def method_text(self) -> str:
        """Return the method with all its options, as `featcal merge --method` reads it.

        Raises:
            InputError: as `options`.
        """
        name = self.options().name
        return name if self.dtype is None else f"{name}{',' if ':' in name else ':'}{DTYPE}={self.dtype}"

    @property
    def notes(self) -> list[str]:
        """Return warnings about a method's name that has another meaning in other tools."""
        note = method(self.method).about.note
        return [f"merged: {note}"] if note else []

    def misfits(self, tasks: Collection[str]) -> list[str]:
        """List the reasons why the recipe does not fit experts of these tasks; empty if it fits."""
        problems = []
        for option, given in self.options_by_task.items():
            missing = [f"'{task}'" for task in tasks if task not in given]
            foreign = [f"'{task}'" for task in given if task not in tasks]
            if missing:
                problems.append(f"merged.{option}: give one for every task; missing {', '.join(missing)}")
            if foreign:
                problems.append(f"merged.{option}: no task {', '.join(foreign)}; there are {', '.join(tasks)}")
        return problems


def explain_recipe(error: ValidationError) -> InputError:
    """Return an error that explains the problems of a recipe, option by option."""
    problems: dict[str, list[tuple[str, str]]] = {}
    for one in error.errors():
        text = str(one["msg"]).removeprefix("Value error, ")
        problems.setdefault(f"{one['loc'][0]}: " if one["loc"] else "", []).append((one["type"], text))
    plain = {  # of an option that may be given by task, what is wrong with one number
        place: [text for kind, text in texts if kind != "dict_type"] or [text for _, text in texts]
        for place, texts in problems.items()
    }
    return InputError(*(f"{place}{text}" for place, texts in plain.items() for text in texts))


def _require_known(given: Mapping[str, Any], kind: type[Method]) -> None:
    """Raise InputError for options that a method does not have."""
    known = (*(one.name for one in options_of_class(kind)), DTYPE)
    foreign = sorted(name for name in given if name not in known)
    if foreign:
        names, near = ", ".join(f"'{shorten(name, 60)}'" for name in foreign), did_you_mean(foreign[0], known)
        also = f" ({kind.about.note})" if kind.about.note else ""
        takes = f"which takes {', '.join(known)}"
        verb, them = ("is not an option", "it") if len(foreign) == 1 else ("are not options", "them")
        raise InputError(f"{names} {verb} of {kind.kind}, {takes}; remove {them}{also}{near and f'.{near}'}")


def _content_of(kind: type[Method]) -> type[Strict]:
    """Return the pydantic model that reads the options of a method in a suite file."""
    options: dict[str, Any] = {one.name: (_annotation(one), None) for one in options_of_class(kind)}
    return create_model(kind.kind, __base__=Strict, dtype=(Dtype | None, None), **options)


def _annotation(one: OptionField[Any]) -> Any:
    """Return the type annotation of an option in a suite file; the method itself checks the range."""
    value: Any = type_of(one)
    if not facts_of(one).by_task:
        return value | None
    return dict[str, value] | None if one.default is None else value | dict[str, value] | None
