"""Read folders of sentence-transformers: a model of transformers, how a text is prepared before the model reads it, and
how its states are pooled to one embedding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from featcal.system.errors import InputError
from featcal.system.json_files import read_json, read_json_rows

MODULES_FILE = "modules.json"
LENGTH_FILE = "sentence_bert_config.json"
NO_LIMIT = 10**9
"""Number of tokens beyond every limit; tokenizers without one write 10^30."""
PROMPTS_FILE = "config_sentence_transformers.json"
POOLING = "sentence_pooling"
"""Option of a configuration that holds the kind of pooling: "mean", "first", or a description of another kind."""
WEIGHED = "sentence_modules"
"""Option of a configuration that holds the kinds of the modules with weights of their own, outside the model's."""
TEXT = "sentence_text"
"""Option of a configuration that holds `SentenceText` as a dictionary."""
_WITHOUT_WEIGHTS = ("Transformer", "Pooling", "Normalize")
_MODES = {"mean": "mean", "mean_tokens": "mean", "cls": "first", "cls_token": "first"}
_KINDS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
"""Words that older versions used in the name of `LENGTH_FILE`."""
_OWN_PROMPTS = ("query", "document")
"""Prompts that every model has; they are empty unless its files define them."""
_FILES = {
    "prompt": PROMPTS_FILE, "max_seq_length": f"{LENGTH_FILE} or tokenizer", "do_lower_case": LENGTH_FILE,
}  # fmt: skip
"""Field of `SentenceText` → the file that defines it."""
_NOT_APPLIED = ("processing_kwargs", "processor_kwargs", "tokenizer_args", "tokenizer_name_or_path")
"""Options of `LENGTH_FILE` that change how texts are read, in ways that featcal does not support."""


@dataclass(frozen=True)
class SentenceText:
    """Changes that sentence-transformers makes to a text before its model reads it."""

    prompt: str
    """Text that is put before every input; "" for none."""
    max_seq_length: int | None
    """Number of tokens to which a text is cut; None if no file states it."""
    do_lower_case: bool

    @classmethod
    def from_folder(cls, folder: Path) -> SentenceText:
        """Read the default prompt, the length and the case of texts.

        Raises:
            InputError: a file is damaged, or names a default prompt that it does not define.
        """
        options, named = _text_options(folder), _read(folder / PROMPTS_FILE)
        stated, default = named.get("prompts") or {}, named.get("default_prompt_name")
        if not isinstance(stated, Mapping):
            raise InputError(f"{folder / PROMPTS_FILE}: prompts are a mapping of names to texts; get the file again")
        prompts = {**dict.fromkeys(_OWN_PROMPTS), **stated}
        if default is not None and str(default) not in prompts:
            raise InputError(
                f"{folder / PROMPTS_FILE}: default_prompt_name is {default!r}, the prompts are "
                f"{', '.join(prompts)}; name one of them, or none"
            )
        prompt = prompts.get(str(default)) or ""
        return cls(str(prompt), _length(folder, options.get("max_seq_length")), bool(options.get("do_lower_case")))

    def differences(self, other: SentenceText, says_length: bool) -> list[str]:
        """List the differences in how another model prepares its texts, each with the file that defines it.

        Args:
            says_length: whether the length of texts is set elsewhere.
        """
        own, theirs = asdict(self), asdict(other)
        if says_length or None in (self.max_seq_length, other.max_seq_length):
            own["max_seq_length"] = theirs["max_seq_length"]
        return [
            f"{name} is {theirs[name]!r} by its {_FILES[name]}, {value!r} by the base's"
            for name, value in own.items()
            if theirs[name] != value
        ]


def reads_lower_case(folder: Path) -> bool:
    """Say whether a folder belongs to sentence-transformers and its texts are converted to lower case."""
    return bool(_modules(folder)) and SentenceText.from_folder(folder).do_lower_case


def read_in_lower_case(tokenizer: Any) -> None:
    """Make a tokenizer convert every text to lower case first, as `do_lower_case` does.

    Raises:
        InputError: the tokenizer is written in Python and has no such step.
    """
    from tokenizers.normalizers import Lowercase, Sequence

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise InputError(f"do_lower_case needs a fast tokenizer, not a {type(tokenizer).__name__}; save one beside it")
    own, is_list = backend.normalizer, isinstance(backend.normalizer, Sequence)
    steps = [*own] if is_list else [own] if own is not None else []
    if not any(isinstance(one, Lowercase) for one in steps):
        backend.normalizer = Sequence([Lowercase(), *steps])


def module_folders(folder: Path) -> list[str]:
    """Return the folders inside a sentence-transformers folder with options of its modules; none for other models."""
    listed = (_path(module) for module in _modules(folder))
    return [path for path in listed if path and (folder / path / "config.json").is_file()]


def sentence_options(folder: Path) -> dict[str, Any]:
    """Return the pooling of a sentence-transformers folder, and how it prepares texts, as options of its configuration;
    {} for other models.

    Raises:
        InputError: its files are damaged.
    """
    modules = _modules(folder)
    if not modules:
        return {}
    text = SentenceText.from_folder(folder)
    pooling = _otherwise(folder, text) or _pooling(folder, modules)
    return {POOLING: pooling, WEIGHED: _list_weighed(modules), TEXT: asdict(text)}


def _otherwise(folder: Path, text: SentenceText) -> str:
    """Name an option that changes embeddings in a way that featcal does not support; "" if there is none."""
    if found := [name for name in _NOT_APPLIED if _text_options(folder).get(name)]:
        return f"{', '.join(found)} in {LENGTH_FILE}"
    if (task := _text_options(folder).get("transformer_task", "feature-extraction")) != "feature-extraction":
        return f"the transformer_task '{task}' in {LENGTH_FILE}"
    if _read(folder / PROMPTS_FILE).get("truncate_dim") is not None:
        return f"truncate_dim in {PROMPTS_FILE}"
    pooled = [_read(folder / _path(one) / "config.json") for one in _modules(folder) if _path(one)]
    if text.prompt and any(one.get("include_prompt") is False for one in pooled):
        return "a default prompt that include_prompt: false keeps out of its pooling"
    return ""


def _module_kinds(modules: list[Mapping[str, Any]]) -> list[str]:
    return [str(module.get("type", "")).rpartition(".")[2] for module in modules]


def _list_weighed(modules: list[Mapping[str, Any]]) -> list[str]:
    return [kind for kind in _module_kinds(modules) if kind not in _WITHOUT_WEIGHTS]


def _pooling(folder: Path, modules: list[Mapping[str, Any]]) -> str:
    kinds, others = _module_kinds(modules), _list_weighed(modules)
    if others or _path(modules[0]):
        return f"{', '.join(others) or 'a Transformer'} in {MODULES_FILE}"
    paths = [_path(module) for module, kind in zip(modules, kinds, strict=True) if kind == "Pooling"]
    modes = [mode for path in paths for mode in _modes(read_json(folder / path / "config.json"))]
    return _MODES.get(modes[0], modes[0]) if len(modes) == 1 else f"pooling by {', '.join(modes) or 'nothing'}"


def _text_options(folder: Path) -> Mapping[str, Any]:
    """Return the options of a folder's Transformer, from the first of its files that has any."""
    found = (_read(folder / LENGTH_FILE.replace("bert", kind)) for kind in _KINDS)
    return next(filter(None, found), {})


def _length(folder: Path, stated: Any) -> int | None:
    """Return the number of tokens to which texts are cut: as stated, else the largest
    number that tokenizer and model take.
    """
    if stated is None:
        most = (
            _read(folder / "tokenizer_config.json").get("model_max_length"),
            _read(folder / "config.json").get("max_position_embeddings"),
        )
        return min((int(one) for one in most if isinstance(one, int | float) and 0 < one < NO_LIMIT), default=None)
    if isinstance(stated, bool) or not isinstance(stated, int) or stated < 1:
        raise InputError(f"{folder / LENGTH_FILE}: max_seq_length is {stated!r}, not a number of tokens; correct it")
    return stated


def _read(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def _modules(folder: Path) -> list[Mapping[str, Any]]:
    file = folder / MODULES_FILE
    return [*read_json_rows(file)] if file.is_file() else []


def _path(module: Mapping[str, Any]) -> str:
    """Return the folder of a module, which must be directly inside the model's folder."""
    return Path(str(module.get("path", ""))).name


def _modes(config: Mapping[str, Any]) -> list[str]:
    """Return the active kinds of pooling: from flags in older folders, from one name in newer ones."""
    if isinstance(config.get("pooling_mode"), str):
        return [config["pooling_mode"]]
    return [
        name.removeprefix("pooling_mode_") for name, on in config.items() if name.startswith("pooling_mode_") and on
    ]
