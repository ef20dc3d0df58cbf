"""Parse the names of a suite's models: one grammar for page addresses, `--model` and Python."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from featcal.suite.methods import (
    ALL,
    PLAIN,
    REFERENCE,
    WITH_OPTIONS,
    is_merger,
    is_method,
    method,
    method_names,
)
from featcal.system.errors import InputError
from featcal.system.formatting import did_you_mean, shorten

_MOST = 8
"""Most models that may be stacked in a name; two or three are useful."""
_AND = "+"
"""Sign between names of blocks, kinds of maps or tasks in the name of a model; its options are separated by commas."""
_ESCAPED = re.compile(r"[%+,:=@]|\A\s|\s\Z|\Aa(?=ll\Z)")
"""Parts of a name that are written as %XX: signs of the grammar, spaces at the ends, and the beginning of "all"."""


def grammar() -> str:
    """Return a description of the names of models; no method is imported."""
    return (
        "base, merged, expert (every expert on its own task), expert:TASK, "
        "calibrated[:lam=0.05,rho=2,alpha=0.3,…][@MODEL], anchor:rho=2[@MODEL], "
        f"a method[:scale=0.6,…], some of them on a model[@MODEL] ({', '.join(method_names())}), "
        "or a checkpoint (folder or Hub id)"
    )


def takes_options(kind: str) -> bool:
    """Say whether models of a kind have options; all methods do."""
    return kind in WITH_OPTIONS or is_method(kind)


def acts_on_another(kind: str) -> bool:
    """Say whether a name of this kind can name the model that it acts on, after an @: `calibrated:rho=1@tsv-m`."""
    return kind in WITH_OPTIONS or (is_method(kind) and not is_merger(kind) and method(kind).on_another)


@dataclass(frozen=True)
class ModelName:
    """A parsed name of a model. It never means a folder of the same name, which must be written `./ties`: so a new
    folder cannot change the meaning of a name.

    Args:
        kind: "base", "merged", "expert", "calibrated", "anchor", a method, or `REFERENCE`.
        options: values as they were written.
        task: of one expert; None for every expert on its own task, and for other kinds.
    """

    kind: str
    options: tuple[tuple[str, str], ...] = ()
    task: str | None = None
    of: str | None = None
    """Name of the model that one of a kind that `acts_on_another` starts from; "merged" by default."""


def model_name(text: str) -> ModelName:
    """Split a name into its parts.

    Raises:
        InputError: options that are not `name=value`, are given twice or are empty, an incomplete name, or too many
            models stacked.

    >>> model_name("task-arithmetic:scale=0.6")
    ModelName(kind='task-arithmetic', options=(('scale', '0.6'),), task=None, of=None)
    >>> model_name("calibrated@tsv-m").of, model_name("calibrated").of
    ('tsv-m', 'merged')
    >>> model_name("runs/my-model").kind
    'reference'
    """
    # Otherwise "ties,scale=1", a comma typed for the colon, would be taken for the name of a folder.
    word, _, rest = text.partition(",")
    if takes_options(word.strip()) and "=" in rest:
        raise InputError(
            f"model '{shorten(text)}': options follow a colon, as in {word.strip()}:"
            f"{shorten(rest.strip())} (write ./{shorten(text)} for a folder of that name)"
        )
    own, at, below = text.partition("@")
    if not acts_on_another(own.partition(":")[0]):
        # An @ in a reference is a revision: `owner/name@main`.
        own, at = text, ""
    if at and not below:
        raise InputError(f"model '{shorten(text)}' names no model after @; leave @ out for the merged model")
    if at and below.count("@") >= _MOST:
        raise InputError(f"model '{shorten(text)}' is stacked on more than {_MOST} others; write one of them first")
    kind, colon, rest = own.partition(":")
    if kind == "expert":
        if colon and not rest:
            raise InputError(
                "model 'expert:' names no task; write expert:TASK, or expert for every one on its own task"
            )
        return ModelName(kind, task=rest or None)
    if kind in PLAIN and not colon:
        return ModelName(kind)
    if not takes_options(kind):
        return ModelName(REFERENCE)
    options: dict[str, str] = {}
    for part in rest.split(",") if colon else ():
        name, equals, value = (one.strip() for one in part.partition("="))
        if not (name and equals and value):
            raise InputError(f"model '{shorten(text)}': '{shorten(part)}' is not an option such as scale=0.6")
        if name in options:
            raise InputError(f"model '{shorten(text)}': {shorten(name)} is given twice")
        options[name] = value
    of = (below or "merged") if acts_on_another(kind) else None
    return ModelName(kind, tuple(options.items()), of=of)


def name_on(text: str, of: str) -> str:
    """Return the name of a model that acts on another one; the suite's own merge is left out.

    >>> name_on("anchor:rho=2", "ties"), name_on("anchor:rho=2", "merged")
    ('anchor:rho=2@ties', 'anchor:rho=2')
    """
    return text if of == "merged" else f"{text}@{of}"


def reference_in(text: str) -> str | None:
    """Return the folder or Hub id that a model is or starts from; None if that is the suite's own.

    >>> reference_in("svc:alpha=0.1@runs/my-model")
    'runs/my-model'
    """
    name = model_name(text)
    if name.of is not None:
        return reference_in(name.of)
    return text if name.kind == REFERENCE else None


def parts_of(text: str) -> tuple[str, ...] | None:
    """Return the names of blocks, kinds of maps or tasks in an option's value; None for all of them.

    >>> parts_of("block 0+a%2Bb"), parts_of("all")
    (('block 0', 'a+b'), None)
    """
    return None if text == ALL else split_names(text, _AND)


def format_parts(parts: Sequence[str] | None) -> str:
    """Return the value that `parts_of` reads.

    >>> format_parts(["block 0", "a+b"]), format_parts(["all"])
    ('block 0+a%2Bb', '%61ll')
    """
    return ALL if parts is None else join_names(parts, _AND)


def split_names(text: str, between: str) -> tuple[str, ...]:
    """Return the names that `join_names` has joined.

    >>> split_names("a%2Cb,c", ",")
    ('a,b', 'c')
    """
    return tuple(unquote(one) for one in text.split(between))


def join_names(names: Sequence[str], between: str) -> str:
    """Join names into one text from which `split_names` gets them back, whatever signs they contain.

    Args:
        between: separator: one of the signs of the grammar.
    """
    return between.join(_ESCAPED.sub(lambda sign: _quote(sign[0]), name) for name in names)


def _quote(text: str) -> str:
    """Return a text with every byte of its UTF-8 encoding as %XX."""
    return "".join(f"%{byte:02X}" for byte in text.encode())


def _value_of(text: str, kind: type, what: str) -> bool | int | float | str:
    """Convert the text of an option's value to its type.

    Raises:
        InputError: the text is not of that type; the message begins with `what`.
    """
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise InputError(f"{what} is true or false, not '{shorten(text)}'")
        return text.lower() == "true"
    try:
        value: int | float | str = kind(text)
    except ValueError as error:
        raise InputError(f"{what} is a {'whole number' if kind is int else 'number'}, not '{shorten(text)}'") from error
    return value


def read_options(name: ModelName, types: Mapping[str, type]) -> dict[str, Any]:
    """Return the options of a name with their values converted; options that choose parts as names, or None for all
    parts.

    Raises:
        InputError: an option that is not among `types`, or a value of another type.
    """
    for option, _ in name.options:
        if option not in types:
            raise InputError(
                f"model '{name.kind}' has no option '{shorten(option)}'; it takes {', '.join(types)}."
                f"{did_you_mean(option, types)}"
            )
    return {
        option: parts_of(text)
        if types[option] is tuple
        else _value_of(text, types[option], f"model '{name.kind}': {option}")
        for option, text in name.options
    }
