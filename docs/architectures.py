"""Write the tables of docs/architectures/every-class.md: what featcal says to every class of transformers.

python docs/architectures.py          # prints them
python docs/architectures.py --write  # puts them into the page
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from featcal.models.families.decoder_facts import FACTS, with_classifier
from featcal.models.families.encoder_facts import ENCODERS
from featcal.models.families.registry import architecture_for, supported_types
from featcal.models.families.vision_language_facts import VISION_LANGUAGE
from featcal.system.errors import InputError

PAGE = Path(__file__).parent / "architectures" / "every-class.md"
START, END = "<!-- tables: python docs/architectures.py --write -->", "<!-- end of the tables -->"
OTHERS = {
    "clip": "CLIPModel", "clip_vision_model": "CLIPVisionModelWithProjection", "siglip": "SiglipModel",
    "siglip_vision_model": "SiglipVisionModel",
    "siglip2": "Siglip2Model", "vit": "ViTForImageClassification", "deit": "DeiTForImageClassification",
    "dinov2": "Dinov2ForImageClassification", "dinov3_vit": "DINOv3ViTModel", "swin": "SwinForImageClassification",
    "convnext": "ConvNextForImageClassification", "resnet": "ResNetForImageClassification",
    "t5": "T5ForConditionalGeneration", "umt5": "UMT5ForConditionalGeneration", "mt5": "MT5ForConditionalGeneration",
    "bart": "BartForConditionalGeneration", "whisper": "WhisperForConditionalGeneration",
    "bert": "BertForSequenceClassification", "roberta": "RobertaForSequenceClassification",
    "deberta-v2": "DebertaV2ForSequenceClassification", "modernbert": "ModernBertForSequenceClassification",
    "mpnet": "MPNetModel", "gemma3": "Gemma3ForConditionalGeneration",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration", "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration",
}  # fmt: skip
"""Main vision, encoder, encoder-decoder and vision-language classes by `model_type`."""
FOUND = Path(__file__).parents[1] / "tests" / "models" / "test_found_decoders.py"
CLASSIFIERS = {facts.model_type for facts in FACTS if with_classifier(facts)}


def tables() -> str:
    """Both tables as Markdown, with the version that they are of."""
    causal = {
        kind: names if isinstance(names, str) else ", ".join(names)
        for kind, names in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items())
    }
    lines = [f"transformers {transformers.__version__}: {len(causal)} causal language models.", ""]
    for title, classes in (("causal language model", causal), ("vision, encoder and others", OTHERS)):
        lines += [f"| {title} | `model_type` | |", "|---|---|---|"]
        lines += [f"| {name} | `{kind}` | {verdict(kind)} |" for kind, name in classes.items()]
        lines.append("")
    return "\n".join(lines)


def verdict(kind: str) -> str:
    """What featcal says to a model of a type with its default configuration."""
    named = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    try:
        architecture_for(default_config(kind) | {"architectures": [named]}, "base")
    except InputError as error:
        said = str(error).removeprefix("base: ").partition(";")[0]
        return f"refused: {said}"
    if kind not in supported_types():
        tested = "; tests/models/test_found_decoders.py" if f'"{kind}": (' in FOUND.read_text(encoding="utf-8") else ""
        return f"read [without a row](../architectures.md#language-models-without-a-row){tested}"
    if kind in {facts.model_type for facts in FACTS}:
        heads = ", with a classifier per task too (tests/models/test_decoder_heads.py)" if kind in CLASSIFIERS else ""
        return f"**accepted**; tests/models/test_decoders.py{heads}"
    if kind in {facts.model_type for facts in ENCODERS}:
        return "**accepted**; tests/models/test_encoders.py"
    if kind in {facts.model_type for facts in VISION_LANGUAGE}:
        return "**accepted**; tests/models/test_vision_language.py"
    file = "formats/test_checkpoints.py" if kind.startswith("clip") else "models/test_architectures.py"
    return f"**accepted**; tests/{file}"


def default_config(kind: str) -> dict[str, Any]:
    """Content of `config.json` as far as the library has defaults for it."""
    name = CONFIG_MAPPING_NAMES.get(kind)
    try:
        content: dict[str, Any] = getattr(transformers, str(name))().to_dict()
    except Exception:  # some have no defaults
        content = {}
    return {**content, "model_type": kind}


def filled(page: str) -> str:
    """The page with the tables of the installed transformers between its marks."""
    before, rest = page.split(START)
    return f"{before}{START}\n\n{tables()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(tables())
