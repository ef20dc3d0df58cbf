"""Name the extra that installs each optional package, and load what other packages bring."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from typing import Any

from featcal.system.errors import InputError

EXTRAS: Mapping[str, str] = {
    "streamlit": "app",
    "umap": "app",
    "torchvision": "clip",
    "open_clip": "clip",
    "timm": "clip",
    "plotly": "report",
    "jinja2": "report",
    "kaleido": "report",
    "datasets": "hub",
    "pyarrow": "hub",
    "compressed_tensors": "quantize",
    "mcp": "mcp",
}
"""Package, as it is imported → the smallest extra of featcal that installs it."""


class MissingPackage(InputError):
    """A package of an extra that is not installed; the message is one sentence with the command that installs it."""


def is_installed(package: str) -> bool:
    """Say whether a package is here, without importing it."""
    if package in sys.modules:
        return sys.modules[package] is not None
    return find_spec(package) is not None


def require_packages(*packages: str, label: str = "") -> None:
    """Check that packages are here before they are imported.

    Args:
        packages: some of `EXTRAS`, as they are imported.
        label: what needs them.

    Raises:
        MissingPackage: one is not here; the message is `say_missing` of the first.
    """
    for package in packages:
        if not is_installed(package):
            raise MissingPackage(say_missing(package, label))


def say_missing(package: str, label: str = "") -> str:
    """Return one sentence: the missing package, and the command that installs it.

    >>> say_missing("datasets", "data set 'owner/name'")
    'data set \\'owner/name\\': datasets is not installed; install it with: pip install "featcal[hub]"'
    """
    front = f"{label}: " if label else ""
    return f"{front}{package} is not installed; install it with: {install_command(package)}"


def install_command(package: str) -> str:
    """Return the command that installs a package with featcal.

    >>> install_command("kaleido")
    'pip install "featcal[report]"'
    """
    return f'pip install "featcal[{EXTRAS[package]}]"'


def load_entry_point(brought: EntryPoint, kind: str) -> tuple[str, Any]:
    """Load the object that an installed package brings, and return it after the words that name it in messages.

    Args:
        kind: what the package brings, such as "method".

    Raises:
        InputError: the package cannot be imported.
    """
    whose = f"{kind} '{brought.name}' of the package {brought.dist.name if brought.dist else brought.value}"
    try:
        return whose, brought.load()
    except Exception as error:  # code of others, which may fail in any way
        raise InputError(
            f"{whose} cannot be imported ({type(error).__name__}: {error}); repair or remove it"
        ) from error
