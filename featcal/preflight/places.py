"""Where the models of a suite are: found without fetching anything."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from featcal.errors import InputError
from featcal.models.checkpoint import HUB_FILES, INDEX_FILE, Checkpoint, resolve
from featcal.models.locate import OPEN_CLIP, Located, locate
from featcal.models.lora import LoraWeights, split_lora
from featcal.models.peft_files import parse_adapter_config
from featcal.models.weights import Stored
from featcal.preflight.remote import Download, RemoteModel, Unreachable, remote_data, remote_model
from featcal.tasks.schema import Source
