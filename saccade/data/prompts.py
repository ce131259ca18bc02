"""Build the prompt of a sample: system message, template, choices, instruction.

Each is added once: a text that the row already contains is not repeated. Images keep their place in the text.
Templates run in Jinja's sandbox.

    >>> asked = apply(sample, PromptConfig(), instruction=instruction_for("think_answer"))
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from saccade.config import PromptConfig
from saccade.data.formats import LETTERS
from saccade.errors import ConfigError
from saccade.types import Media, Message, Sample

if TYPE_CHECKING:
    from jinja2 import Template

TEXTS_FILE = Path(__file__).with_name("prompts.yaml")
FINAL_PROMPT = "worded"  # a column that is true if the row's prompt is final: nothing is added
OPTIONS = re.compile(r"[\s(]*[A-Z]([\s,;&.()]+[A-Z])*[\s.:)]*")  # letters and nothing else, such as (B) or A, C
LABEL = re.compile(r"[\s(]*[A-Za-z][.:)]+\s+")  # before the text of an option
MARK = re.compile("\0(\\d+)\0")  # stands for an image while a template handles the text


# -- shipped texts ---------------------------------------------------------------------------------


def instruction_for(format: str) -> str:
    """The instruction of a response format."""
    texts = _texts()
    if format not in texts:
        raise ConfigError(f"prompt.format={format}: unknown; choose one of {', '.join(texts)}")
    return re.sub(r"\{(\w+)\}", lambda found: texts.get(found[1], found[0]), texts[format])


def texts_hash() -> str:
    """Fingerprint of all shipped texts, for the manifest."""
    return hashlib.sha256(TEXTS_FILE.read_bytes()).hexdigest()


@cache
def _texts() -> dict[str, str]:
    return yaml.safe_load(TEXTS_FILE.read_text(encoding="utf-8"))


# -- applying --------------------------------------------------------------------------------------


def apply(sample: Sample, config: PromptConfig, *, instruction: str, choices_seed: int = 0) -> Sample:
    """The sample with everything that `config` (resolved for its data_source) adds to its prompt. `choices_seed` seeds
    the order of options under prompt.permute_choices.
    """
    if sample.extra.get(FINAL_PROMPT):
        return sample
    if config.permute_choices:
        sample = permute_choices(sample, choices_seed)
    first = next(index for index, message in enumerate(sample.messages) if message.role == "user")
    messages = list(sample.messages)
    messages[first] = replace(messages[first], parts=_question(sample, messages[first], config, instruction))
    if config.system and not any(message.role == "system" for message in messages):
        messages.insert(0, Message(role="system", parts=(text_or_file(str(config.system)),)))
    return replace(sample, messages=tuple(messages))


def _question(sample: Sample, message: Message, config: PromptConfig, instruction: str) -> tuple[str | Media, ...]:
    lines = [f"({LETTERS[index]}) {choice}" for index, choice in enumerate(sample.choices)]
    text = "".join(part if isinstance(part, str) else f"\0{index}\0" for index, part in enumerate(message.parts))
    source = _file(config.template, "prompt.template") if config.template else "{{ content }}"
    template, uses = sandboxed(source, "prompt.template")
    if "choices" not in uses:
        text = _added(text, "\n".join(lines), "after")
    if config.template:
        row = {**sample.extra, "id": sample.id, "data_source": sample.data_source}
        try:
            text = template.render(
                content=text, choices=lines, instruction=instruction, answer_format=config.format, row=row
            )
        except Exception as error:  # an unknown variable, a violation of the sandbox, a mistake
            raise ConfigError(f"prompt.template={config.template}: {error}") from None
    if "instruction" not in uses:
        text = _added(text, instruction, config.position)
    return _parts(text, message, config.template)


def _added(text: str, addition: str, position: str) -> str:
    """Text with an addition on separate lines. Images at the start stay there."""
    if not addition or addition in text:
        return text
    if position == "after":
        return f"{text}\n{addition}"
    leading = re.match("(\0\\d+\0\\s*)*", text)
    assert leading is not None
    return f"{leading[0]}{addition}\n{text[leading.end() :]}"


def _parts(text: str, message: Message, template: str | None) -> tuple[str | Media, ...]:
    """Split a text with marks into text and images; refuses lost, repeated or reordered images."""
    pieces = MARK.split(text)
    marks = [int(piece) for piece in pieces[1::2]]
    if marks != [index for index, part in enumerate(message.parts) if isinstance(part, Media)]:
        what = "images of the row are lost, doubled or moved; write {{ content }} exactly once"
        raise ConfigError(f"prompt.template={template}: {what}")
    pieces[1::2] = [message.parts[index] for index in marks]
    return tuple(piece for piece in pieces if piece)


def text_or_file(value: str) -> str:
    """The text of `prompt.system`, read from a file if it names a .txt or .md file."""
    is_file_name = "\n" not in value and Path(value).suffix in (".txt", ".md")
    return _file(os.path.expanduser(value), "prompt.system") if is_file_name else value


def _file(path: str, option: str) -> str:
    if not Path(path).is_file():
        raise ConfigError(f"{option}={path}: the file does not exist")
    return Path(path).read_text(encoding="utf-8").rstrip("\n")


# -- templates -------------------------------------------------------------------------------------


@cache
def sandboxed(source: str, option: str, **settings: Any) -> tuple[Template, frozenset[str]]:
    """A template and the variables that it uses. `settings` go to Jinja; errors begin with `option`."""
    from jinja2 import StrictUndefined, TemplateSyntaxError, meta
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, **settings)
    try:
        used = meta.find_undeclared_variables(environment.parse(source))
        return environment.from_string(source), frozenset(used)
    except TemplateSyntaxError as error:
        raise ConfigError(f"{option}: line {error.lineno}: {error.message}") from None


# -- choices ---------------------------------------------------------------------------------------


def permute_choices(sample: Sample, seed: int) -> Sample:
    """Shuffle the options, seeded per sample. Unchanged are options that are letters, as these refer to the image, and
    options that the question itself lists, as it fixes their order.
    """
    are_letters = all(choice.strip().upper() in set(LETTERS) for choice in sample.choices)
    asked = "".join(message.text for message in sample.messages)
    if len(sample.choices) < 2 or are_letters or all(choice in asked for choice in sample.choices):
        return sample
    drawn = int(hashlib.sha256(f"{seed}:{sample.id}".encode()).hexdigest()[:16], 16)
    return reordered(sample, np.random.default_rng(drawn).permutation(len(sample.choices)).tolist())


def reordered(sample: Sample, order: Sequence[int]) -> Sample:
    """Reorder the options. A gold in letters is remapped: (B), or A, C. A gold such as `B. a cat` becomes `a cat`."""
    moved = {LETTERS[old]: LETTERS[new] for new, old in enumerate(order)}
    choices = tuple(sample.choices[old] for old in order)
    texts = {choice.casefold(): choice for choice in choices}

    def follow(gold: Any) -> Any:
        if isinstance(gold, tuple):
            return tuple(map(follow, gold))
        text = LABEL.sub("", gold or "").strip().casefold()
        if gold is None or gold in choices or text in texts:
            return texts.get(text, gold)
        letters = re.findall("[A-Z]", gold.upper()) if OPTIONS.fullmatch(gold.upper()) else []
        if not letters or not moved.keys() >= {*letters}:
            return gold
        named = iter(sorted(moved[letter] for letter in letters))
        return re.sub("[A-Z]", lambda _: next(named), gold.upper().strip())

    return replace(sample, choices=choices, answer=follow(sample.answer))
