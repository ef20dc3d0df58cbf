"""Read conversations from rows, and write them as text by the base's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from featcal.formats.in_memory import name_place
from featcal.samples.pool import Conversation, TextExample
from featcal.samples.prepare import Modality, token_ids, tokenizer_of
from featcal.system.errors import InputError
from featcal.system.formatting import some

Turn = Mapping[str, Any]
_FORMS = (("role", "content"), ("from", "value"))
"""Keys of a turn for role and content: OpenAI's and ShareGPT's."""
_ROLES = {
    "system": "system", "developer": "developer", "user": "user", "human": "user", "assistant": "assistant",
    "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
}  # fmt: skip
"""Names of roles in data sets, mapped to those of chat templates."""
_TOOLS = ("tool", "function", "function_call", "observation", "ipython")
_CALLS = ("tool_calls", "function_call")
_CLOCK = """{% macro strftime_now(format) %}\
{{ format|replace('%d', '26')|replace('%b', 'Jul')|replace('%B', 'July')|replace('%m', '07')|replace('%Y', '2024')\
|replace('%A', 'Friday') }}{% endmacro %}
"""
"""Replaces the clock of chat templates: the date that Llama's template uses without a clock."""


def read_example(row: Mapping[str, Any], columns: Sequence[str], place: str) -> TextExample:
    """Return the conversation in some columns of a row: lists of turns, and texts.

    A text in the last of several columns is the assistant's, one in a column called "system" the system's, others are
    the user's and form one turn, line by line; empty ones are skipped.

    Raises:
        ValueError: there are no turns, or one is empty, of an unknown role, or not text alone.
    """
    if row.get("tools"):
        raise ValueError("the conversation uses tools, which featcal does not read; leave the row out")
    turns: list[Turn] = []
    for column in columns:
        value = row.get(column)
        blank = not value or (isinstance(value, str) and not value.strip())
        if blank and column == columns[-1]:
            raise ValueError(f"column '{column}' is empty")
        if isinstance(value, list):
            turns += [_read_turn(turn, number) for number, turn in enumerate(value, start=len(turns) + 1)]
        elif value is not None and (len(columns) == 1 or not isinstance(value, str)):
            raise ValueError(f"column '{column}' holds a {type(value).__name__}, expected a list of turns")
        elif not blank:
            role = "system" if column == "system" else "assistant" if column == columns[-1] else "user"
            before = f"{turns.pop()['content']}\n" if turns and turns[-1]["role"] == role == "user" else ""
            turns.append({"role": role, "content": f"{before}{value}"})
    *read, last = turns
    answered = last["role"] == "assistant"
    read = read if answered else turns
    if not read:
        raise ValueError("there is no turn before the answer")
    words = "\n".join(f"{turn['role']}: {turn['content']}" for turn in read)
    return TextExample(words, last["content"] if answered else None, conversation=Conversation(tuple(turns), place))


def _read_turn(turn: Any, number: int) -> Turn:
    """Return a turn in the form of chat templates, with its other keys.

    Raises:
        ValueError: it is not a turn, is empty, of an unknown role or a tool, or not only text.
    """
    form = next((form for form in _FORMS if isinstance(turn, Mapping) and turn.keys() >= {*form}), None)
    if form is None:
        has = f"has the keys {some(list(turn))}" if isinstance(turn, Mapping) else f"is a {type(turn).__name__}"
        raise ValueError(f"turn {number} {has}, expected 'role' and 'content', or 'from' and 'value'")
    role = str(turn[form[0]])
    if role in _TOOLS or any(turn.get(call) for call in _CALLS):
        raise ValueError(f"turn {number} calls a tool or answers for one, which is not read; leave the row out")
    if role not in _ROLES:
        raise ValueError(f"turn {number} is of '{role}'; known are {', '.join(_ROLES)}")
    content = turn[form[1]]
    parts = content if isinstance(content, list) else [{"type": "text", "text": "" if content is None else content}]
    kinds = [one.get("type") if isinstance(one, Mapping) else type(one).__name__ for one in parts]
    if any(kind != "text" or not isinstance(one.get("text"), str) for kind, one in zip(kinds, parts, strict=True)):
        raise ValueError(f"turn {number} holds {some([str(one) for one in kinds])}; only text is read")
    words = "".join(one["text"] for one in parts)
    if not words.strip():
        raise ValueError(f"turn {number} is empty; leave it out")
    # Such as the thoughts of an assistant, which some templates write.
    more = {key: value for key, value in turn.items() if key not in form and value is not None}
    return {**more, "role": _ROLES[role], "content": words}


def write_turns(examples: Sequence[TextExample], folder: Path, modality: Modality) -> list[TextExample]:
    """Return conversations as the text that the chat template of the base in `folder` writes.

    The input is the text before the last answer, and the answer follows directly: both together are the whole
    conversation. If a template prompts for an answer with text that it leaves out of finished answers (such as
    `<think>`), the input ends where the two diverge.

    Raises:
        InputError: a model that is not a decoder, a base without a chat template, or a conversation that its template
            refuses or whose input it writes differently once the answer follows.
    """
    if modality != "causal":
        raise InputError("conversations are for decoders; give the source 'input', and 'target' or 'label'")
    tokenizer = tokenizer_of(folder)
    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:
        raise InputError(
            f"base: {name_place(folder)} has no chat template, which conversations need; put the chat_template.jinja "
            "of the experts into its folder, or give texts as templates: input: '{prompt}', target: '{completion}'"
        ) from error
    template = _CLOCK + template if "strftime_now" in template else template
    return [_write_example(example, tokenizer, template) for example in examples]


def _write_example(example: TextExample, tokenizer: Any, template: str) -> TextExample:
    assert example.conversation is not None
    turns, place = example.conversation.turns, example.conversation.place

    def write(some_turns: Sequence[Turn], asks: bool) -> str:
        options = {"chat_template": template, "tokenize": False, "add_generation_prompt": asks}
        return str(tokenizer.apply_chat_template([*some_turns], **options))

    try:
        if example.target is None:
            whole = asked = before = write(turns, True)
        else:
            whole, asked, before = write(turns, False), write(turns[:-1], True), write(turns[:-1], False)
    # A template is a program that others wrote: it may raise anything.
    except Exception as error:
        raise InputError(f"{place}: the base's chat template does not take this conversation ({error})") from error
    begun = _shared_length(whole, asked)
    if begun < min(len(asked), len(before)):
        raise InputError(
            f"{place}: the base's chat template writes the turns before the last answer differently when the answer "
            "follows, so input and answer cannot be separated; write the texts yourself and give 'input' and 'target'"
        )
    # As `apply_chat_template` tokenizes them; a token across the border belongs to the answer.
    ids, read = token_ids(tokenizer, [whole, asked], special=False)
    border = _shared_length(ids, read)
    ids, answer = ids[:border], ids[border:]
    if example.target is None:
        return TextExample(whole, None, tokens=(ids, answer))
    # What the metrics hold generated answers against, which are decoded so.
    target = str(tokenizer.decode(answer, skip_special_tokens=True, clean_up_tokenization_spaces=False)).strip()
    if not target:
        raise InputError(f"{place}: the base's chat template leaves the answer out")
    return TextExample(whole[:begun], target, tokens=(ids, answer))


def _shared_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of the common beginning of two sequences."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
