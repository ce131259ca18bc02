r"""Response formats (extractors, a strict check, a renderer), and shaping terms of a reward that do not depend on the
answer: length limits, repetition, tool use.

The instructions that ask for a format are part of the prompts, not of this file.

    >>> FORMATS["think_boxed"].render("4")
    '<think>The answer is known.</think> \\boxed{4}'
    >>> overlong(RewardSample(id="a", response="", length=1792, max_tokens=2048), buffer=512).value
    -0.5
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from saccade.plugins.verifiers.choice import single_letter
from saccade.plugins.verifiers.extract import ANSWER_LINE, ANSWER_LINE_WINDOW, NUMBER, answer_scope, last_boxed
from saccade.plugins.verifiers.grounding import read_boxes
from saccade.rewards.combine import TIMES_OUTCOME
from saccade.rewards.reward_sample import RewardSample
from saccade.rewards.verifiers import ResponseFormat, Verifier
from saccade.types import Score


def check_think_answer(sample: RewardSample, *, gap: str = "space") -> bool:
    """Thought, then answer, each tag once, both non-blank, and no text before, between or after them."""
    if gap not in ("space", "none"):
        raise ValueError(f"gap is 'space' or 'none', not {gap!r}")
    return _thought_then("answer", sample.text, gap)


def check_grounding(sample: RewardSample) -> bool:
    """Every turn is a thought and one tool call; the last turn is a thought and the answer."""
    turns = [f"<think>{turn}" if sample.think_prefilled else turn for turn in sample.turns or (sample.response,)]
    return _thought_then("answer", turns[-1]) and all(
        _thought_then("grounding", turn) and "answer>" not in turn for turn in turns[:-1]
    )


def _thought_then(tag: str, text: str, gap: str = "space") -> bool:
    """Whether the text is `<think>…</think><tag>…</tag>`, each once, both non-blank, and nothing else."""
    once = all(text.count(each) == 1 for each in ("<think>", "</think>", f"<{tag}>", f"</{tag}>"))
    between = "" if gap == "none" else r"\s*"
    shape = rf"<think>(.*?)</think>{between}<{tag}>(.*)</{tag}>"
    match = re.fullmatch(shape, text.strip(), re.DOTALL) if once else None  # slow with many tags
    return match is not None and all(map(str.strip, match.groups()))


def check_think_boxed(sample: RewardSample, *, lenient: bool = False) -> bool:
    r"""One thought first, then a non-blank `\boxed{}` with balanced braces."""
    text = sample.text.strip()
    if lenient:
        text = re.sub(r"<\s*(?:(/)\s*)?think\s*>", r"<\1think>", text)
    if text.count("<think>") != 1 or text.count("</think>") != 1 or not text.startswith("<think>"):
        return False
    thought, _, rest = text[len("<think>") :].partition("</think>")
    return bool(thought.strip() and (last_boxed(rest) or "").strip())


def check_boxes_json(sample: RewardSample) -> bool:
    """A fenced JSON list of boxes with labels, followed by the format `think_boxed`."""
    fence, think, rest = sample.response.strip().partition("<think>")
    block = re.fullmatch(r"```json\n(.*)\n```\s*", fence, re.DOTALL)
    found = read_boxes(block[1]) if block else None
    if found is None or not all(item.label for item in found):
        return False
    return check_think_boxed(replace(sample, response=think + rest, think_prefilled=False))


def check_boxed(sample: RewardSample) -> bool:
    r"""A non-blank `\boxed{}` with balanced braces after the thought, if there is one."""
    return bool((last_boxed(_scope(sample)) or "").strip())


def check_answer_line(sample: RewardSample) -> bool:
    """The last line is `Answer: …`."""
    line = _last_line(sample)
    mark = ANSWER_LINE.match(line) if len(line) <= ANSWER_LINE_WINDOW else None
    return mark is not None and bool(line[mark.end() :].strip(" *"))


def check_hash(sample: RewardSample) -> bool:
    """The last line is `#### number`."""
    mark, _, number = _last_line(sample).partition(" ")
    return mark == "####" and NUMBER.fullmatch(number.strip().lstrip("$")) is not None


def check_letter(sample: RewardSample) -> bool:
    """Only one option letter, bare or in the answer tag."""
    text = re.sub(r"\A<answer>(.*)</answer>\Z", r"\1", _scope(sample).strip(), flags=re.DOTALL)
    return single_letter(text, sample.choices) is not None


def _scope(sample: RewardSample) -> str:
    return answer_scope(sample.response, sample.think_prefilled)


def _last_line(sample: RewardSample) -> str:
    return _scope(sample).strip().rpartition("\n")[2].strip()


THOUGHT = "<think>The answer is known.</think>"


def _boxes(gold: str) -> str:
    return f"```json\n{gold if read_boxes(gold) else []}\n```\n{THOUGHT} \\boxed{{{gold}}}"


TAGGED = ResponseFormat(
    order=("answer_tag",), check=check_think_answer, render=f"{THOUGHT}\n<answer>{{}}</answer>".format
)
FORMATS = {
    "think_answer": TAGGED,
    "counting": TAGGED,  # with another instruction in the prompt
    "grounding": replace(TAGGED, check=check_grounding),  # the environment's prompt asks for tool calls
    "think_boxed": ResponseFormat(
        order=("boxed",), check=check_think_boxed, render=f"{THOUGHT} \\boxed{{{{{{}}}}}}".format
    ),
    "boxed": ResponseFormat(order=("boxed",), check=check_boxed, render=r"So it is \boxed{{{}}}.".format),
    "boxes_json": ResponseFormat(order=("boxed",), check=check_boxes_json, render=_boxes),
    "answer_line": ResponseFormat(order=("answer_line",), check=check_answer_line, render="Answer: {}".format),
    "hash": ResponseFormat(order=("hash",), check=check_hash, render="#### {}".format),
    "letter": ResponseFormat(order=("answer_tag", "letter"), check=check_letter, render=str),
    "direct": ResponseFormat(order=("whole",), render=str),
    # The user writes the instruction, so all common places are searched.
    "none": ResponseFormat(order=("answer_tag", "boxed", "answer_line", "whole"), render="<answer>{}</answer>".format),
}


# Words; in scripts without spaces every character is a word.
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\s\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]+")


def overlong(sample: RewardSample, *, buffer: int = 0, factor: float = 1.0, limit: int | None = None) -> Score:
    """factor·max(-1, min(0, (limit - buffer - length)/buffer)): a penalty for the last `buffer` tokens."""
    limit = limit or sample.max_tokens
    if not 0 < buffer < limit:
        example = f"such as {{verifier: overlong, args: {{buffer: {max(1, limit // 4)}}}}}"
        raise ValueError(f"overlong needs 0 < buffer < {limit} (the token limit), {example}; got {buffer}")
    excess = (limit - buffer - sample.length) / buffer
    return Score(kind="value", value=factor * max(-1.0, min(0.0, excess)))


def repetition(sample: RewardSample, *, n: int = 4, max_penalty: float = 1.0) -> Score:
    """-max_penalty·(1 - distinct/all), over all n-grams of words."""
    if n < 1:
        raise ValueError(f"repetition needs n of at least 1, got {n}")
    words = WORD.findall(sample.response.lower())
    runs = list(zip(*(words[start:] for start in range(n)), strict=False))
    share = 1 - len(set(runs)) / len(runs) if runs else 0.0
    return Score(kind="value", value=-max_penalty * share)


def length(sample: RewardSample, *, target: int | None = None, band: Sequence[int] | None = None) -> Score:
    """min(1, tokens/target), or, with band = [low, high], 1 inside and 0 outside."""
    if target is not None and band is None:
        return Score(kind="value", value=min(1.0, sample.length / target))
    if band is not None and target is None:
        return Score(kind="value", value=float(band[0] <= sample.length <= band[1]))
    raise ValueError("length needs either target, such as 512, or band, such as [64, 512]")


def tool_use(
    sample: RewardSample, *, penalty: float = 0.1, mode: str = "once", bonus: float = 0.0, only_if_correct: bool = True
) -> Score:
    """-penalty once if tools were called, or (`mode` per_call) for every call; +bonus if a call succeeded.
    With `only_if_correct` both are multiplied by the outcome.
    """
    if mode not in ("once", "per_call"):
        raise ValueError(f"mode is once or per_call, not {mode!r}")
    calls = len(sample.tool_calls)
    succeeded = any(call.get("ok", True) if isinstance(call, Mapping) else True for call in sample.tool_calls)
    value = bonus * succeeded - penalty * (min(calls, 1) if mode == "once" else calls)
    return Score(kind="value", value=value, info={TIMES_OUTCOME: True} if only_if_correct else {})


ROWS = FORMATS | {
    each.__name__: Verifier(function=each, kind="shaping", needs_answer=False)
    for each in (overlong, repetition, length, tool_use)
}
