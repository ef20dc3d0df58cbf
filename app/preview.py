"""Keep the first chart for the next start: the drift table of the embedded suite, drawn before torch is loaded.

The measurement is kept under a hash of the suite's files, of featcal's code and of its version, so a changed file is
measured anew. Nothing in here imports torch, which takes seconds.
"""

from __future__ import annotations

import hashlib
import sys
from io import StringIO
from pathlib import Path

import pandas as pd

import featcal
from featcal.system.atomic_files import put
from featcal.system.resources import cache_folder, code_digest, data_path

HOME_SUITE = "clip-mini"
"""Suite that the app opens on."""
SAMPLES = 64
"""Samples per task that models are measured on unless the user says otherwise."""


def keep(table: pd.DataFrame) -> None:
    """Keep the drift table of the merged model; a folder that cannot be written only costs the next start time."""
    file = _file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        put(file, str(table.to_json(orient="table", index=False)))
    except OSError as error:
        # A cache that cannot be written costs the next start some seconds, which is no reason to stop.
        print(f"featcal: the first chart is not kept in {file.parent}: {error.strerror}", file=sys.stderr)


def read_kept() -> pd.DataFrame | None:
    """Read the drift table of these very files, if it was measured before."""
    file = _file()
    if not file.is_file():
        return None
    return pd.read_json(StringIO(file.read_text(encoding="utf-8")), orient="table")


def _file() -> Path:
    """Return the file that keeps the measurement of the suite and the code as they are now."""
    digest = hashlib.sha256(f"{featcal.__version__} {SAMPLES} {code_digest()}".encode())
    suite = data_path(HOME_SUITE)
    for path in sorted(suite.rglob("*")):
        if path.suffix in (".safetensors", ".json", ".yaml", ".npz"):
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
    return cache_folder() / f"{HOME_SUITE}-{digest.hexdigest()[:24]}.json"
