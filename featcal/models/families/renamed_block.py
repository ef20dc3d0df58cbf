"""Read and write a block whose names in files differ from those in the library's class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from featcal.models.adapter import Block


@dataclass(frozen=True)
class NamedBlock(Block):
    """A block whose names in files may differ from those in its class: `names` are those in files."""

    place: str
    """Path of the module in the library's whole model."""
    renamed: Mapping[str, str] = field(compare=False)
    """Modules inside the block → their names in files."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "names", tuple(f"{self.name}.{name}" for name in self._own()))

    @property
    def path(self) -> str:
        return self.place

    def stored_name(self, module: str) -> str:
        return f"{self.name}.{self.renamed.get(module, module)}"

    def renamed_paths(self) -> dict[str, str]:
        """Return the names in files of the parameters of all modules that are stored under another name, by their
        paths in the library's whole model."""
        found = {}
        for stored, parts in self._own().items():
            for name in parts:
                if f"{self.path}.{name}" != f"{self.name}.{stored}":
                    found[f"{self.path}.{name}"] = f"{self.name}.{stored}"
        return found

    def _own(self) -> dict[str, dict[str, int]]:
        """Return, by name in files (without the block's prefix), the parameters stored in
        that tensor, with their numbers of rows.
        """
        found: dict[str, dict[str, int]] = {}
        for name, parameter in self.module.named_parameters():
            module, _, kind = name.rpartition(".")
            found.setdefault(f"{self.renamed.get(module, module)}.{kind}", {})[name] = len(parameter)
        return found

    def local(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors of the block under their names inside it; parts of one stored tensor are views of it."""
        local: dict[str, Tensor] = {}
        for stored, parts in self._own().items():
            if (whole := tensors.get(f"{self.name}.{stored}")) is not None:
                # Views and not copies: solving a part in place writes into the whole tensor.
                local |= zip(parts, torch.split(whole, [*parts.values()]), strict=True)
        return local

    def canonical(self, local: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors under their names in files; a stored tensor that packs several parts needs all of them."""
        found = {}
        for stored, parts in self._own().items():
            own = [local[name] for name in parts if name in local]
            if own:
                found[f"{self.name}.{stored}"] = own[0] if len(parts) == 1 else torch.cat(own)
        return found
