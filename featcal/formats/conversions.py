"""Define commands that convert a folder into one that featcal reads, for the messages that refuse the folder."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping
from pathlib import Path

_LIGHTNING = (
    "import sys, torch",
    "from safetensors.torch import save_file",
    'w = torch.load(sys.argv[1], map_location="cpu", weights_only=True)["state_dict"]',
    'p = "model." if all(k.startswith("model.") for k in w) else ""',
    'save_file({k.removeprefix(p): v.clone().contiguous() for k, v in w.items()}, sys.argv[2], {"format": "pt"})',
)
_LOAD = (
    "base, out = sys.argv[1:]",
    'm = getattr(t, t.AutoConfig.from_pretrained(base).architectures[0]).from_pretrained(base, dtype="auto")',
)
_UNTIE = (
    "import sys, torch, transformers as t",
    *_LOAD,
    "m.config.tie_word_embeddings = m.config.get_text_config().tie_word_embeddings = False",
    "h = m.get_output_embeddings()",
    "h.weight = torch.nn.Parameter(h.weight.detach().clone())",
    "m.save_pretrained(out)",
    "t.AutoProcessor.from_pretrained(base).save_pretrained(out)",
)
_SAVE_ANEW = ("import sys, transformers as t", *_LOAD, *_UNTIE[-2:])


def python_line(*steps: str) -> str:
    """Return the command that runs steps of Python, quoted for a shell."""
    return shlex.join(["python", "-c", "; ".join(steps)])


UNTIE = f"{python_line(*_UNTIE)} MODEL UNTIED"
"""Command that gives a model a separate head, if its head is tied to its embedding."""
SAVE_ANEW = f"{python_line(*_SAVE_ANEW)} BASE ANEW"
"""Command by which transformers loads a model and writes it anew, tensors that are tied once."""
_RUNS_CODE = ", where you trust it, since it is pickled and loading it can run code"
_DEEPSPEED = "python -m deepspeed.utils.zero_to_fp32 FOLDER FOLDER --safe_serialization"
_TRAINING_STATES = (
    (r"global_step\d+", "DeepSpeed", _RUNS_CODE, _DEEPSPEED),
    (r"zero_to_fp32\.py", "DeepSpeed", _RUNS_CODE, _DEEPSPEED),
    (r"pytorch_model_fsdp_\d+", "FSDP", _RUNS_CODE, "accelerate merge-weights FOUND FOLDER"),
    (r".*\.distcp", "FSDP", _RUNS_CODE, "accelerate merge-weights FOLDER FOLDER"),
    (r".*\.ckpt", "Lightning", ", reading tensors only", f"{python_line(*_LIGHTNING)} FOUND FILE"),
)
"""Files and folders of a training run that are not a model yet: the tool, a remark, and the
command that converts them.
"""


def explain_training_state(folder: str | Path, names: Collection[str]) -> str:
    """Explain the training state in a folder, and how to convert it to a model; "" if there is none.

    Args:
        names: names of the files and folders inside; whole weights among them count as the model.
    """
    if any(name.startswith("pytorch_model") and name.endswith(".bin") for name in names):
        return ""
    for pattern, whose, caution, command in _TRAINING_STATES:
        found = max((name for name in names if re.fullmatch(pattern, name)), default=None)
        if found is not None:
            place = Path(folder).as_posix()
            paths = {"FOUND": f"{place}/{found}", "FOLDER": place, "FILE": f"{place}/model.safetensors"}
            words = [paths.get(word, word) for word in shlex.split(command)]
            return f"it holds a checkpoint of {whose} ('{found}'); convert that{caution}:\n    {shlex.join(words)}"
    return ""


def untie_base(aliases: Mapping[str, str]) -> str:
    """Explain how to save a base whose head is tied to its embedding with a separate head; "" if more than the head is
    tied.

    Args:
        aliases: other names of tensors that several modules share → those tensors.
    """
    if len(aliases) != 1:
        return ""
    return (
        "embedding and head were trained separately, but the base ties them. Save the base with a head of its own, "
        "and give "
        "UNTIED as the base of the suite and in front of every '+'; save experts that tie theirs in the same way:\n"
        f"    {UNTIE}"
    )
