"""Open pools of tensors, in a safetensors file or in memory: preprocessed pictures, or token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from featcal.samples.pool import Pool
from featcal.suite.source import Source
from featcal.system.errors import InputError
from featcal.system.formatting import did_you_mean
from featcal.system.paths import require_plain


def tensors_pool(found: Mapping[str, Tensor], source: Source) -> Pool:
    """Return a pool of pictures `[n, 3, H, W]` (floating-point) with class indices, or of token ids `[n, T]` with mask
    and target ids or class indices.

    Args:
        found: the tensors that the options "key", "labels" and "mask" of the source name.

    Raises:
        InputError: shapes that do not belong together.
    """
    names = _tensor_names(source)
    values = found["key"]
    if values.ndim == 2 and not values.is_floating_point() and not values.is_complex():
        return _tokens(found, names)
    if values.ndim != 4:
        raise InputError(
            f"'{source.key}' has shape {list(values.shape)} and holds {values.dtype}, expected "
            "[n, channels, height, width], or whole numbers [n, tokens]"
        )
    if not values.is_floating_point():
        raise InputError(
            f"'{source.key}' holds {values.dtype}: pictures in a file of tensors are preprocessed, in floating point; "
            "raw ones go into 'arrays' (.npz) or a folder"
        )
    if source.mask is not None:
        raise InputError(f"'mask' belongs to token ids; '{source.key}' holds pictures")
    labels = found["labels"].numpy() if "labels" in found else None
    return Pool(len(values), labels, None, tensors=lambda wanted: values[list(wanted)])


def read_tensors(file: Path, source: Source) -> dict[str, Tensor]:
    """Return the tensors of a file that a source names, under the options that name them.

    Raises:
        InputError: the file cannot be read, or a tensor is missing.
    """
    from safetensors import SafetensorError, safe_open

    names = {option: name for option, name in _tensor_names(source).items() if name is not None}
    require_plain(file)
    try:
        with safe_open(file, framework="pt") as handle:
            known = list(handle.keys())
            for name in names.values():
                if name not in known:
                    raise InputError(f"{file} has no tensor '{name}'.{did_you_mean(name, known)}")
            return {option: handle.get_tensor(name) for option, name in names.items()}
    except (SafetensorError, OSError, TypeError, MemoryError) as error:
        raise InputError(f"{file} is not a whole safetensors file ({error})") from error


def _tensor_names(source: Source) -> dict[str, str | None]:
    return {"key": source.key, "labels": source.labels, "mask": source.mask}


def _tokens(found: Mapping[str, Tensor], names: Mapping[str, str | None]) -> Pool:
    inputs = {"key": "input_ids", "mask": "attention_mask", "labels": "labels"}
    ids = found["key"]
    classes = found["labels"].numpy() if "labels" in found and found["labels"].ndim == 1 else None
    found = {option: tensor for option, tensor in found.items() if option != "labels" or classes is None}
    for option, tensor in found.items():
        if tensor.ndim != 2 or len(tensor) != len(ids) or tensor.is_floating_point() or tensor.is_complex():
            raise InputError(
                f"'{names[option]}' is {tensor.dtype} {list(tensor.shape)}, expected whole numbers [{len(ids)}, tokens]"
            )
    if "mask" in found and found["mask"].shape != ids.shape:
        raise InputError(f"'{names['mask']}' has shape {list(found['mask'].shape)}, the token ids {list(ids.shape)}")

    def tokens(wanted: Sequence[int]) -> dict[str, Tensor]:
        return {inputs[option]: tensor[list(wanted)].long() for option, tensor in found.items()}

    return Pool(len(ids), classes, None, tokens=tokens)
