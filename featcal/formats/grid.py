"""Read and pack quantised weights, integers times scales, in the layout "pack-quantized" of compressed-tensors.

A linear map is stored as `weight_packed` (integers of 4 or 8 bits, packed into int32), `weight_scale` (one scale per
row and group of columns, in the dtype of the model) and `weight_shape`; `quantization_config` in config.json describes
it. transformers and vLLM read this layout. The package compressed-tensors does the packing; `pip install
featcal[quantize]` installs it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from featcal.formats.checkpoint import Checkpoint
from featcal.formats.weights import Canonical, Overlay, TensorInfo
from featcal.system.errors import InputError
from featcal.system.extras import require_packages

SETTINGS = "quantization_config"
"""Key of `config.json` for the quantisation of the weights."""
SCALE = "_scale"
"""Ending of the name of a weight's scales, after that of the weight."""
_PACKED, _SHAPE = "_packed", "_shape"
_FORMAT = "pack-quantized"


@dataclass(frozen=True)
class QuantizationGrid:
    """The possible values of weights: integers of `bits` bits times a scale, symmetric about 0."""

    bits: int
    """Bits of an integer: 4 or 8."""
    group: int
    """Columns of a row that share a scale; 0 for the whole row."""

    def columns(self, inputs: int) -> int:
        """Return the number of columns that share a scale, in a matrix with the given number of columns."""
        return self.group or inputs

    def scale(self, weight: Tensor) -> Tensor:
        """Return the scale of every row `[m, 1]` with which its largest value lies on the grid, or half a step
        beyond the end of the grid; 1 for a row of zeros.
        """
        largest = weight.abs().amax(dim=1, keepdim=True)
        return torch.where(largest > 0, largest / (2**self.bits - 1) * 2, 1.0)

    def round(self, weight: Tensor, scale: Tensor) -> Tensor:
        """Return the nearest values on the grid in the dtype of `weight`, with the rounding of the scale's dtype."""
        low = -(2 ** (self.bits - 1))
        whole = (weight / scale.to(weight)).round().clamp(low, -low - 1)
        # The product is made in the dtype of the scales, as every reader of the files makes it.
        return (whole.to(scale.dtype) * scale).to(weight)

    def pack(self, weight: Tensor, scale: Tensor) -> dict[str, Tensor]:
        """Return the tensors of a linear map with a quantised weight `[m, d]`, by the ending of their names."""
        # float32: in bfloat16 the quotient could lie half a step beside its whole number.
        found = _library().compress({"weight": weight.float(), "weight_scale": scale.float()}, self._scheme())
        packed = {name.removeprefix("weight"): tensor for name, tensor in found.items()}
        return {_PACKED: packed[_PACKED], _SHAPE: packed[_SHAPE], SCALE: scale}

    def packed_info(self, dense: TensorInfo) -> dict[str, TensorInfo]:
        """Return shape and dtype of the tensors that `pack` makes from a weight."""
        rows, columns = dense.shape
        return {
            _PACKED: TensorInfo((rows, math.ceil(columns * self.bits / 32)), torch.int32),
            _SHAPE: TensorInfo((2,), torch.int64),
            SCALE: TensorInfo((rows, columns // self.columns(columns)), dense.dtype),
        }

    def unpack(self, packed: Mapping[str, Tensor]) -> Tensor:
        """Return the weight that `pack` has packed, in the dtype of its scales."""
        weight: Tensor = _library().decompress({f"weight{end}": t for end, t in packed.items()}, self._scheme())[
            "weight"
        ]
        return weight

    def settings(self, ignored: Sequence[str]) -> dict[str, Any]:
        """Return the entry of `config.json` for a model with packed linear maps.

        Args:
            ignored: linear maps of the library's class that are not packed.
        """
        require_packages("compressed_tensors", label="quantised weights")
        import compressed_tensors
        from compressed_tensors.quantization import QuantizationConfig

        entries = QuantizationConfig(
            config_groups={"group_0": self._scheme()},
            ignore=[*ignored],
            format=_FORMAT,
            quantization_status="compressed",
        ).model_dump(mode="json")
        version = compressed_tensors.__version__
        return {**entries, "version": version, "quant_method": "compressed-tensors", "sparsity_config": {}}

    def _scheme(self) -> Any:
        require_packages("compressed_tensors", label="quantised weights")
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

        shared = {"strategy": "group", "group_size": self.group} if self.group else {"strategy": "channel"}
        args = QuantizationArgs(num_bits=self.bits, type="int", symmetric=True, dynamic=False, **shared)
        return QuantizationScheme(targets=["Linear"], weights=args)

    @classmethod
    def read(cls, settings: Any, what: str) -> QuantizationGrid:
        """Return the grid in the `quantization_config` of a `config.json`.

        Raises:
            InputError: it does not describe weights on one symmetric grid in this layout; the message begins with
                `what`.
        """
        problem = InputError(
            f"{what}: its weights are quantised in a way that featcal does not read; it reads compressed-tensors' "
            f"{_FORMAT} with one group of linear maps, whole numbers of 4 or 8 bits, symmetric, nothing else quantised"
        )
        try:
            (group,) = settings["config_groups"].values()
            weights = group["weights"]
            more = settings.get("kv_cache_scheme") or settings.get("transform_config")
            plain = settings.get("format") == _FORMAT and not more
            plain = plain and not group.get("input_activations") and not group.get("output_activations")
            plain = plain and weights["type"] == "int" and weights["symmetric"] and not weights.get("dynamic")
            grid = cls(weights["num_bits"], (weights.get("group_size") or 0) if weights["strategy"] == "group" else 0)
            plain = plain and weights["strategy"] in ("group", "channel") and grid.bits in (4, 8) and grid.group >= 0
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise problem from error
        if not plain:
            raise problem
        return grid


def _library() -> Any:
    """Return the class of compressed-tensors that packs and unpacks.

    Raises:
        InputError: the package is not installed.
    """
    require_packages("compressed_tensors", label="quantised weights")
    from compressed_tensors.compressors import BaseCompressor

    return BaseCompressor.get_value_from_registry(_FORMAT)


def require_dense(config: Mapping[str, Any], label: str) -> None:
    """Raise InputError for a model with quantised weights, by its `config.json`."""
    if SETTINGS in config:
        raise InputError(f"{label}: its weights are quantised; give the model that it was quantised from")


def dense_names(stored: Sequence[str]) -> list[str]:
    """Return the names of the dense tensors that stored tensors represent."""
    return list(dict.fromkeys(name.removesuffix(_ending(name)) for name in stored))


def _ending(stored: str) -> str:
    """Return the ending that a stored name has after the name of its weight; "" for tensors
    that are not part of a packed weight.
    """
    return next((end for end in (_PACKED, SCALE, _SHAPE) if stored.endswith(f".weight{end}")), "")


@dataclass(frozen=True)
class OnGrid(Overlay):
    """A model with some quantised weights; `replaced` also contains their scales, under the
    name of the weight with "_scale".
    """

    grid: QuantizationGrid

    @cached_property
    def scales(self) -> Mapping[str, str]:
        """Return the quantised weights, and the names of their scales."""
        return {name: f"{name}{SCALE}" for name in self.info if f"{name}{SCALE}" in self.replaced}

    def packed_info(self) -> dict[str, dict[str, TensorInfo]]:
        """Return shape and dtype of the stored tensors of each of these weights, by name."""
        own = self.info
        return {
            name: {f"{name}{end}": info for end, info in self.grid.packed_info(own[name]).items()}
            for name in self.scales
        }

    def pack(self, name: str) -> dict[str, Tensor]:
        """Return the stored tensors of one of these weights by name."""
        found = self.read([name, self.scales[name]])
        packed = self.grid.pack(found[name], found[self.scales[name]])
        return {f"{name}{end}": tensor for end, tensor in packed.items()}


class PackedCheckpoint:
    """A folder of packed weights, read as a model of dense weights.

    Args:
        folder, label, canonical: see `Checkpoint`.
        grid: the grid of the weights.
    """

    def __init__(self, folder: Path, label: str, canonical: Canonical, grid: QuantizationGrid) -> None:
        require_packages("compressed_tensors", label="quantised weights")
        self.folder, self.label, self._grid = folder, label, grid

        def name_stored(stored: str) -> str | None:
            end = _ending(stored)
            name = canonical(stored.removesuffix(end))
            return name and f"{name}{end}"

        self._stored = Checkpoint(folder, label, name_stored)
        self.files, self.leftovers = self._stored.files, self._stored.leftovers
        self._packed = [n.removesuffix(_PACKED) for n in self._stored.info if n.endswith(_PACKED)]
        self._info = self._find_info()

    def _find_info(self) -> dict[str, TensorInfo]:
        """Return shape and dtype of all dense tensors.

        Raises:
            InputError: a packed weight without its scales or its shape.
        """
        found = dict(self._stored.info)
        shapes = self._stored.read(f"{name}{_SHAPE}" for name in self._packed)
        for name in self._packed:
            if f"{name}{SCALE}" not in found:
                raise InputError(f"{self.label}: '{name}{SCALE}' is missing from {self.folder}")
            scales = found[f"{name}{SCALE}"]
            shape = tuple(map(int, shapes[f"{name}{_SHAPE}"]))
            found[name] = TensorInfo(shape, scales.dtype)
            for end in (_PACKED, _SHAPE, SCALE):
                del found[f"{name}{end}"]
        return found

    @property
    def info(self) -> Mapping[str, TensorInfo]:
        return self._info

    @property
    def scales(self) -> list[str]:
        """Return the names of the scales, which `read` returns too."""
        return [f"{name}{SCALE}" for name in self._packed]

    def repeats(self, stored: str, name: str) -> bool:
        """Say whether a redundant stored tensor equals the tensor `name` in every value."""
        return self._stored.repeats(stored, name)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        packed, wanted = set(self._packed), list(names)
        ends = (_PACKED, SCALE, _SHAPE)
        stored = [f"{n}{end}" for n in wanted for end in (ends if n in packed else ("",))]
        tensors = self._stored.read(stored)
        for name in packed & set(wanted):
            tensors[name] = self._grid.unpack({end: tensors[f"{name}{end}"] for end in ends})
        return {name: tensors[name] for name in wanted}
