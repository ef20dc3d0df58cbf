"""Check generation options and chat template, and translate the template for Ollama."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from featcal.preflight.handover.folder import CONFIG, GENERATION, OPTIONS, TEMPLATE, Folder, Obstacle
from featcal.preflight.handover.tokenizer import token_texts
from featcal.preflight.tokenizers import token_text

_ROLES = ("system", "user", "assistant")
_CONVERSATIONS = (
    ("user",),
    ("user", "assistant", "user"),
    ("system", "user"),
    ("system", "user", "assistant", "user", "assistant", "user"),
)
"""Conversations that the translated template must write exactly."""


def check_generation(folder: Folder, base: Folder | None) -> Iterator[Obstacle]:
    """Yield generation options that are lost, or that name missing tokens."""
    if base is not None and base.has(GENERATION) and not folder.has(GENERATION):
        yield Obstacle(
            "generation",
            f"{GENERATION} is missing, which the base has: the tokens at which answers end are in it; copy it",
            (GENERATION,),
        )
    for file in (GENERATION, CONFIG):
        ends = _ids(folder.json(file).get("eos_token_id"))
        beyond = [one for one in ends if folder.rows and one >= folder.rows]
        if beyond:
            yield Obstacle(
                "generation", f"{file}: eos_token_id names token {beyond[0]}, the embedding has {folder.rows} rows"
            )


def check_template(folder: Folder, base: Folder | None) -> Iterator[Obstacle]:
    """Yield a chat template that the base has and the folder does not."""
    if base is not None and base.template is not None and folder.template is None:
        yield Obstacle(
            "chat template",
            "there is no chat template, and the base has one: programs would guess how turns are marked; copy it",
            (TEMPLATE,),
        )


def end_tokens(folder: Folder) -> list[str]:
    """Return the texts of the tokens at which answers end, by the generation options and the configuration."""
    ids = {file: folder.json(file).get("eos_token_id") for file in (GENERATION, CONFIG)}
    return list(token_texts(folder, ids).values())


@dataclass(frozen=True)
class Turns:
    """A chat template as texts before and after every turn; not every template has this form."""

    start: str
    before: dict[str, str]
    after: dict[str, str]
    prompt: str
    """Text after the last turn, with which the model's answer begins."""

    def write(self, roles: Sequence[str]) -> str:
        """Return a conversation with the contents of `_content`, ready for an answer."""
        turns = (f"{self.before[one]}{_content(i, one)}{self.after[one]}" for i, one in enumerate(roles))
        return f"{self.start}{''.join(turns)}{self.prompt}"

    def to_go(self) -> str | None:
        """Return the template in the Go syntax of Ollama; None if a text would be read as syntax."""
        cases = [
            f'{{{{ {word} eq .Role "{role}" }}}}{self.before[role]}{{{{ .Content }}}}{self.after[role]}'
            for word, role in zip(("if", "else if", "else if"), _ROLES, strict=True)
        ]
        texts = (self.start, *self.before.values(), *self.after.values(), self.prompt)
        if any(sign in text for text in texts for sign in ("{{", "}}", '"""')):
            return None
        return f"{self.start}{{{{ range .Messages }}}}{''.join(cases)}{{{{ end }}}}{{{{ end }}}}{self.prompt}"


def find_turns(folder: Folder) -> Turns | None:
    """Return the chat template as turns, inferred by rendering conversations; None unless the turns reproduce several
    other conversations exactly.

    A start token that the tokenizer adds by itself is left out: Ollama adds it, too.
    """
    template = folder.template
    if isinstance(template, list):
        template = next((one.get("template") for one in template if one.get("name") == "default"), None)
    if not isinstance(template, str):
        return None
    options = folder.json(OPTIONS)
    tokens = {
        name: token_text(options.get(name)) or "" for name in ("bos_token", "eos_token", "pad_token", "unk_token")
    }
    try:
        found = _split(template, tokens)
        same = all(found.write(roles) == _render(template, tokens, roles, True) for roles in _CONVERSATIONS)
    # A template is a program that others wrote: it may raise anything.
    except Exception:
        return None
    if not same:
        return None
    return Turns("", found.before, found.after, found.prompt) if found.start == tokens["bos_token"] else found


def _split(template: str, tokens: dict[str, str]) -> Turns:
    """Infer the texts around the turns by rendering the chat template with sentinel messages; undefined for templates
    of another form."""
    roles = ("system", "user", "assistant", "user")
    pieces = _pieces(_render(template, tokens, roles, True), roles)
    after = {"user": _pieces(_render(template, tokens, roles, False), roles)[-1]}
    after["assistant"] = _pieces(_render(template, tokens, roles[:3], False), roles[:3])[-1]
    before = {
        "assistant": pieces[2].removeprefix(after["user"]),
        "user": pieces[3].removeprefix(after["assistant"]),
    }
    after["system"] = pieces[1].removesuffix(before["user"])
    start = _pieces(_render(template, tokens, ("user",), False), ("user",))[0].removesuffix(before["user"])
    before["system"] = pieces[0].removeprefix(start)
    return Turns(start, before, after, pieces[4].removeprefix(after["user"]))


def _pieces(text: str, roles: Sequence[str]) -> list[str]:
    """Return the texts before, between and after the contents; ValueError if a content is missing."""
    ends = [0]
    for i, role in enumerate(roles):
        at = text.index(_content(i, role), ends[-1])
        ends += [at, at + len(_content(i, role))]
    ends.append(len(text))
    return [text[first:last] for first, last in list(pairwise(ends))[::2]]


def _content(number: int, role: str) -> str:
    return f"Words{number}of{role}"


def _render(template: str, tokens: dict[str, str], roles: Sequence[str], prompt: bool) -> str:
    """Return a conversation as transformers writes it, in its sandbox."""
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [{"role": role, "content": _content(i, role)} for i, role in enumerate(roles)]
    found: Any = render_jinja_template(
        conversations=[messages], chat_template=template, add_generation_prompt=prompt, **tokens
    )
    return str(found[0][0])


def _ids(stated: Any) -> list[int]:
    return [one for one in (stated if isinstance(stated, list) else [stated]) if isinstance(one, int)]
