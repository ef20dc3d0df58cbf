"""List known facts about programs that run models, with their source and date.

An entry that is missing is unknown, not impossible: these programs add architectures every week.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

TARGETS = ("gguf", "vllm", "ollama", "sentence-transformers")
"""Programs and formats for which a folder can be checked, by their names on the command line."""
READ = "November 2026"
"""Date at which the sources were read."""
SOURCES: Mapping[str, str] = {
    "gguf": "TEXT_MODEL_MAP in conversion/__init__.py of github.com/ggml-org/llama.cpp, names as in gguf 0.19",
    "vllm": "vllm/model_executor/models/registry.py of github.com/vllm-project/vllm",
    "ollama": "LoadModelMetadata in convert/convert.go of github.com/ollama/ollama",
}
"""Source of every table below."""


@dataclass(frozen=True)
class Support:
    """Facts about one class of transformers in other programs."""

    gguf: str = ""
    """Name of its architecture in GGUF files of llama.cpp's converter; empty if unknown."""
    vllm: bool = False
    """True if vLLM's registry has it."""
    ollama: bool = False
    """True if `ollama create` converts its safetensors itself."""
    pieces: tuple[str, ...] = ()
    """Files of sentencepiece of which the converters need one, because they cannot use the vocabulary of
    tokenizer.json."""
    spared_by: str = ""
    """A `tokenizer_class` with which llama.cpp's converter reads tokenizer.json instead of `pieces`."""


_SPM = ("tokenizer.model",)
SUPPORT: Mapping[str, Support] = {
    "LlamaForCausalLM": Support("llama", vllm=True, ollama=True),
    "MistralForCausalLM": Support("llama", vllm=True),
    "Ministral3ForCausalLM": Support("mistral3", ollama=True),
    "MixtralForCausalLM": Support("llama", vllm=True, ollama=True),
    "Qwen2ForCausalLM": Support("qwen2", vllm=True, ollama=True),
    "Qwen3ForCausalLM": Support("qwen3", vllm=True),
    "Qwen3MoeForCausalLM": Support("qwen3moe", vllm=True),
    "Qwen2VLForConditionalGeneration": Support("qwen2vl", vllm=True),
    "Qwen2_5_VLForConditionalGeneration": Support("qwen2vl", vllm=True, ollama=True),
    "GemmaForCausalLM": Support("gemma", vllm=True, ollama=True, pieces=_SPM),
    "Gemma2ForCausalLM": Support("gemma2", vllm=True, ollama=True, pieces=_SPM),
    "Gemma3ForCausalLM": Support("gemma3", vllm=True, ollama=True, pieces=_SPM),
    "Gemma3ForConditionalGeneration": Support("gemma3", vllm=True, ollama=True, pieces=_SPM),
    "Phi3ForCausalLM": Support("phi3", vllm=True, ollama=True, pieces=_SPM, spared_by="GPT2Tokenizer"),
    "GPT2LMHeadModel": Support("gpt2", vllm=True),
    "SmolLM3ForCausalLM": Support("smollm3", vllm=True),
    "ArceeForCausalLM": Support("arcee", vllm=True),
    "Ernie4_5ForCausalLM": Support("ernie4_5", vllm=True),
    "HunYuanDenseV1ForCausalLM": Support("hunyuan-dense", vllm=True),
    "GlmForCausalLM": Support("chatglm", vllm=True),
    "Glm4ForCausalLM": Support("glm4", vllm=True),
    "Exaone4ForCausalLM": Support("exaone4", vllm=True),
    "SeedOssForCausalLM": Support("seed_oss", vllm=True),
    "Olmo2ForCausalLM": Support("olmo2", vllm=True),
    "Olmo3ForCausalLM": Support("olmo2", vllm=True, ollama=True),
    "OlmoeForCausalLM": Support("olmoe", vllm=True),
    "T5ForConditionalGeneration": Support("t5", pieces=("tokenizer.model", "spiece.model")),
    "BertModel": Support("bert", vllm=True, ollama=True),
    "BertForSequenceClassification": Support("bert", vllm=True),
    "RobertaModel": Support("bert", vllm=True),
    "RobertaForSequenceClassification": Support("bert", vllm=True),
    "CLIPModel": Support(vllm=True),
    "SiglipModel": Support(vllm=True),
}
"""Class in `config.json` → known facts; the classes that featcal writes."""

VOCABULARIES = ("BPE", "Unigram", "WordPiece")
"""Kinds of vocabulary of tokenizer.json for which llama.cpp has a tokenizer."""
OLLAMA_SPLITS: Mapping[str, str] = {
    "d98f9631be1e9607a9848c26c1f9eac1aa9fc21ac6ba82a2fc0741af9780a48f": "llama-bpe",
    "03df5c5863ad70781dcfdef491ead25140f895fe8010964be0daefe27be32b02": "deepseek-llm",
    "21cde974d587f0d54dc8d56b183cc1e6239600172035c68fbd6d4b9f8da0576e": "deepseek-coder",
    "1ff7f41064896984db5d1bb6ff64fa4bc29007d08c1b439e505b7392777a319e": "qwen2",
}
"""SHA-256 of the regular expressions of a tokenizer.json's Split pre-tokenizers, in order → Ollama's name for them
(parseTokenizer in convert/tokenizer.go). Others are replaced by its default, with a warning in the server's log."""
OUT_TYPES: Mapping[str, str] = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
"""Dtype of stored weights → `--outtype` of llama.cpp's converter, which rounds float32 to float16 by default; these are
the only dtypes that the converters read directly."""


def note_unknown(target: str, named: str) -> str:
    """Return the note for a class that a target's table does not have."""
    return (
        f"unknown whether {target} runs {named}: it is not in its table as featcal read it in {READ} "
        f"({SOURCES[target]})"
    )
