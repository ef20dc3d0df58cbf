"""Check whether open_clip weights need QuickGELU or GELU, because the wrong one gives wrong features without an error.

featcal refuses files that contradict each other; if the files leave the question open, the preflight report has a note.
"""

from __future__ import annotations

from functools import lru_cache

from featcal.formats.located_model import Located
from featcal.formats.open_clip_config import quick_gelu
from featcal.system.errors import InputError
from featcal.system.extras import require_packages

_OPENAI_ONLY = "input_resolution"
"""Name of a tensor that only OpenAI's own state dicts contain."""


def check_activation(located: Located, source: str) -> None:
    """Check that the files do not prove that the weights need another activation.

    Args:
        source: name of the weight file, or path or Hub id of the folder.

    Raises:
        InputError: the files prove it.
    """
    model_cfg = located.config["model_cfg"]
    folders, slash, name = source.rstrip("/").rpartition("/")
    name = name.partition("@")[0]  # without the revision
    says, whole = quick_gelu(model_cfg), f"{folders}{slash}{name}"
    why = None
    if _OPENAI_ONLY in located.names and not says:
        why = f"the weights are OpenAI's own (they hold '{_OPENAI_ONLY}'), which use QuickGELU"
    elif _registered_weights().get(whole, says) != says:
        why = f"'{whole}' is a weight file of open_clip, trained with {'GELU' if says else 'QuickGELU'}"
    elif "quick_gelu" not in model_cfg and "quickgelu" in name.lower().replace("_", "").replace("-", "") and not says:
        why = f"the name '{name}' says QuickGELU"
    if why is None:
        return
    arch = located.config.get("arch")
    other = f"{arch}-quickgelu" if not says else str(arch).removesuffix("-quickgelu")
    what = f"take architecture '{other}'" if arch else f'set "quick_gelu": {str(not says).lower()} in its config'
    raise InputError(
        f"{located.label}: {why}, but {arch or 'open_clip_config.json'} says {'QuickGELU' if says else 'GELU'}; {what}"
    )


@lru_cache(maxsize=1)
def _registered_weights() -> dict[str, bool]:
    """Return, by file name and Hub id, whether open_clip's pretrained weights use QuickGELU."""
    require_packages("open_clip")
    import open_clip

    known: dict[str, bool] = {}
    for model, tag in open_clip.list_pretrained():
        entry = open_clip.get_pretrained_cfg(model, tag)
        for place in (str(entry.get("url") or "").rsplit("/", 1)[-1], str(entry.get("hf_hub") or "").strip("/")):
            # OpenAI's files are TorchScript, and many people give their own files such names.
            if place and tag != "openai":
                known[place] = bool(entry.get("quick_gelu", False))
    return known


def activation_note(located: Located) -> str | None:
    """Return a warning if the files do not declare the activation of the training; else None."""
    require_packages("open_clip")
    import open_clip

    model_cfg, arch = located.config["model_cfg"], located.config.get("arch")
    if quick_gelu(model_cfg):
        return None
    if arch is None:
        if "quick_gelu" in model_cfg:
            return None
        return (
            f"{located.label}: open_clip_config.json does not say 'quick_gelu', so GELU is used; weights that come "
            "from OpenAI's need true"
        )
    twin = f"{arch}-quickgelu"
    tags = open_clip.list_pretrained_tags_by_model(twin)
    if not tags:
        return None
    return (
        f"{located.label}: GELU, as {arch} says; if the weights come from {', '.join(tags)}, they need {twin} and "
        "would give wrong features without an error"
    )
