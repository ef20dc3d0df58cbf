"""Complete suites and names of models in a shell."""

from __future__ import annotations

from glob import escape, glob

import click
from click.shell_completion import CompletionItem

from featcal.suite.methods import ALL, NAMED, method_names
from featcal.system.resources import embedded_suites, ready_suites


def complete_suite(context: click.Context, param: click.Parameter, begun: str) -> list[CompletionItem]:
    """Return the suites that come with featcal, then YAML files in the folder before the cursor and one below it."""
    names = [name for name in (*embedded_suites(), *ready_suites()) if name.startswith(begun)]
    # Half a word may hold characters of a pattern, which are meant as they are.
    files = (file for pattern in ("*.yaml", "*/*.yaml") for file in glob(f"{escape(begun)}{pattern}"))
    return [CompletionItem(one) for one in [*names, *sorted(files)]]


def complete_model(context: click.Context, param: click.Parameter, begun: str) -> list[CompletionItem]:
    """Return the names of models with this beginning, without their options; after an @ those of the model below."""
    above, at, last = begun.rpartition("@")
    names = (*NAMED, *method_names())
    return [CompletionItem(f"{above}{at}{name}") for name in names if name.startswith(last)]


def complete_models(context: click.Context, param: click.Parameter, begun: str) -> list[CompletionItem]:
    """Return the names of `complete_model`, and those of all methods."""
    return complete_model(context, param, begun) + [CompletionItem(ALL)] * ALL.startswith(begun)
