"""Read LoRA experts: a base and a peft adapter folder, merged tensor by tensor when they are read.

A LoRA adds `s · B A` to a weight W (Hu et al., LoRA, Sec. 4.1), with `s = alpha / r`, or `alpha / √r` if it is
rank-stabilised (rsLoRA). Anything that cannot be reproduced exactly from the files is refused, never approximated.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from featcal.formats.checkpoint import make_safetensors, open_file, read_header
from featcal.formats.peft import CONFIG_FILE, HEADLESS, AdapterPlan, Change, read_adapter_config, task_type, weight_file
from featcal.formats.weights import ANOTHER_FILE, Canonical, Stored, TensorInfo, check_finite, dtype_of
from featcal.system.errors import InputError
from featcal.system.paths import local_path


class LoraWeights:
    """A base with a LoRA adapter, as `Weights`: only the tensors asked for are read and computed.

    Tensors that the adapter changes are float32 (float64 over a float64 base), as `info` says: unlike those of peft's
    `merge_and_unload`, they are not rounded to the dtype of a half-precision base. All other tensors are the base's
    own. Covered exactly: LoRA of linear maps, convolutions and embeddings, rsLoRA, rank and alpha patterns, trained
    biases (`bias`, `lora_bias`) and whole modules (`modules_to_save`), which the base may lack, such as the classifier
    of a task.

    Args:
        base: the model that the adapter was trained on.
        folder: holds `adapter_config.json` and `adapter_model.safetensors`, or `.bin`, as peft saves them.
        label: name of the model in messages.
        canonical: maps a tensor's name in the adapted model to its canonical name; None for one without a place.
        aliases: other names of tensors that several modules share → those tensors.

    Raises:
        InputError: the adapter is a variant that cannot be reproduced exactly (DoRA, PiSSA, any unknown option, an
            embedding trained separately from the head tied to it), or has tensors that are unknown, have a wrong shape,
            or change a tensor that the base lacks; the message lists every problem.
    """

    def __init__(
        self, base: Stored, folder: Path, label: str, canonical: Canonical, aliases: Mapping[str, str]
    ) -> None:
        self.label = label
        self.folder = folder
        self._base = base
        self.adapter = read_adapter_config(folder, label)
        self._file = weight_file(folder, label)
        self._read_from = make_safetensors(self._file, label)
        self._header = read_header(self._read_from, label)
        tied = {} if task_type(folder) in HEADLESS else aliases
        plan = AdapterPlan(self._file, self._header, self.adapter, base.info, canonical, tied)
        if problems := plan.fill():
            raise InputError(*(f"{label}: {problem}" for problem in problems))
        self.changes: Mapping[str, Change] = plan.changes
        """The adapter's changes by canonical name."""
        self.ignored_modules: Sequence[str] = plan.ignored_modules
        """Modules whose updates are in the file but not selected by its config, so that peft ignores them."""
        self._added, self._repeated = plan.added, plan.repeated

    def transposed_names(self, names: Collection[str]) -> list[str]:
        """Return the names of tensors to which the transposed product of two factors is added."""
        return [name for name in names if name in self.changes and self.changes[name].transposed]

    @property
    def files(self) -> list[Path]:
        """Return every file on which the tensors depend: the base's, the adapter's config and its weights."""
        return [*self._base.files, self.folder / CONFIG_FILE, self._file]

    @property
    def leftovers(self) -> Mapping[str, Path]:
        """Return stored names of tensors that repeat others, in the base or beside the adapter's own."""
        return {**self._base.leftovers, **dict.fromkeys(self._repeated, self._file)}

    def repeats(self, stored: str, name: str) -> bool:
        """Say whether a tensor that was left out equals the tensor `name` in every value."""
        if stored not in self._repeated:
            return self._base.repeats(stored, name)
        own = self.read([name])[name]
        with open_file(self._read_from, self.label) as handle:
            return own.equal(handle.get_tensor(self._repeated[stored]).to(own.dtype))

    @property
    def declared_base(self) -> str | None:
        """Return the base and `@revision` that the adapter's config names; it may be a path on another machine."""
        name, revision = self.adapter.base_model_name_or_path, self.adapter.revision
        return f"{name}@{revision}" if name and revision else name or None

    @cached_property
    def info(self) -> Mapping[str, TensorInfo]:
        base = self._base.info
        added = {
            name: TensorInfo(self._header[key][0], dtype_of(self._header[key][1], f"{self.label}: tensor '{key}'"))
            for name, key in self._added.items()
        }
        # A tensor that is stored whole may have another number of rows than the base's.
        shapes = {
            name: base[name].shape if change.value is None else self._header[change.value][0]
            for name, change in self.changes.items()
        }
        return {
            **base,
            **added,
            **{name: TensorInfo(shape, _compute_dtype(base[name])) for name, shape in shapes.items()},
        }

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        wanted = list(names)
        tensors = self._base.read(name for name in wanted if name not in self._added) | self._read_added(wanted)
        changed = {name: self.changes[name] for name in wanted if name in self.changes}
        if not changed:
            return tensors
        with open_file(self._read_from, self.label) as handle:
            for name, change in changed.items():
                dtype = self.info[name].dtype
                # To float32 before the product, not after: in half precision B A itself would be rounded.
                own = {key: handle.get_tensor(key).to(dtype) for key in change.stored_names()}
                tensors[name] = change.apply(tensors[name].to(dtype), own)
                what = ", ".join(f"'{key}'" for key in own)
                check_finite(tensors[name], f"{self.label}: tensor '{name}' with {what} of {self._file}", ANOTHER_FILE)
        return tensors

    def factors(self, names: Iterable[str]) -> dict[str, tuple[Tensor, Tensor]]:
        """Return scale * B `[m, r]` and A `[r, d]` of the linear maps whose only change is this product, in the
        adapter's dtype."""
        changed = {name: change for name, change in self.changes.items() if change.is_product}
        found: dict[str, tuple[Tensor, Tensor]] = {}
        with open_file(self._read_from, self.label) as handle:
            for name in (name for name in names if name in changed):
                right, left = (handle.get_tensor(key) for key in changed[name].factors)
                if right.ndim == left.ndim == 2:
                    found[name] = changed[name].scale * left, right
        return found

    def _read_added(self, wanted: Iterable[str]) -> dict[str, Tensor]:
        """Return the tensors that the base does not have, as stored in the adapter file."""
        own = {name: self._added[name] for name in wanted if name in self._added}
        if not own:
            return {}
        with open_file(self._read_from, self.label) as handle:
            tensors: dict[str, Tensor] = {name: handle.get_tensor(key) for name, key in own.items()}
        for name, tensor in tensors.items():
            check_finite(tensor, f"{self.label}: tensor '{own[name]}' of {self._file}", ANOTHER_FILE)
        return tensors


def split_lora(ref: str, root: Path | None = None) -> tuple[str, str | None]:
    """Split `BASE+ADAPTER` into (BASE, ADAPTER), each a folder or Hub id with an optional `@revision`, or (ref, None).

    Args:
        root: folder from which relative paths start; a reference that is itself a folder is not split, and among
            several `+` the one between two folders is used.

    Raises:
        InputError: several `+` are possible, or one side of it is empty. >>>
            split_lora("google/flan-t5-large+someone/sst2-lora@v2") ('google/flan-t5-large', 'someone/sst2-lora@v2')
    """

    def is_folder(part: str) -> bool:
        return root is not None and local_path(part, root, "model").is_dir()

    if "+" not in ref or is_folder(ref):
        return ref, None
    parts = ref.split("+")
    ways = [("+".join(parts[:n]).strip(), "+".join(parts[n:]).strip()) for n in range(1, len(parts))]
    if len(ways) > 1:
        found = [sum(map(is_folder, way)) for way in ways]
        ways = [way for way, count in zip(ways, found, strict=True) if count == max(found) > 0]
    if len(ways) != 1 or not all(ways[0]):
        raise InputError(f"'{ref}' is not BASE+ADAPTER; give one base and one adapter with one '+' between them")
    return ways[0]


def _compute_dtype(info: TensorInfo) -> torch.dtype:
    return torch.promote_types(info.dtype, torch.float32)
