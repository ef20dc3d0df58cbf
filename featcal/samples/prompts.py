"""Fill class prompts for the text tower."""

from __future__ import annotations

from collections.abc import Sequence


def class_prompts(class_names: Sequence[str], templates: Sequence[str]) -> list[str]:
    """Return every template filled with every name, those of one class together.

    >>> class_prompts(["cat", "dog"], ["a {}", "the {}"])
    ['a cat', 'the cat', 'a dog', 'the dog']
    """
    return [template.replace("{}", name) for name in class_names for template in templates]


def prompt_positions(prompts: int, samples: range, total: int) -> list[int]:
    """Return the position of the prompt for each sample: all prompts in turn, or, if there are more prompts than
    samples, evenly spread ones.

    >>> prompt_positions(3, range(2, 6), 8), prompt_positions(10, range(4), 4)
    ([2, 0, 1, 2], [0, 2, 5, 7])
    """
    return [position * prompts // total if prompts > total else position % prompts for position in samples]
