"""The config that `saccade init` writes, with a comment beside each line."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

Guess = tuple[str, str, str]  # a verifier, its arguments, why
Line = tuple[str, str]  # of the config, and its comment
AFTER = """\
algorithm:
  preset: grpo                       # `saccade algorithms` lists the others
train:
  prompts_per_step: PROMPTS          # different questions in one step
  samples_per_prompt: 8              # answers to each, compared with one another
  updates_per_step: 1                # strictly on-policy: the steadiest choice
  micro_tokens: 16384                # memory of one pass; lower it when memory runs out
  # lr: 1.0e-6                       # that of rl for models from 1B to 7B; sft and dpo have their own
save:
  every: 50                          # steps between checkpoints
"""


@dataclass(frozen=True, kw_only=True)
class Page:
    """Facts about the model and the rows that the config is written from."""

    advice: str
    name: str
    model: str
    model_type: str
    data: str
    format: str
    about: str
    keys: Mapping[str, str]  # data.keys
    budgets: Sequence[tuple[int, str]]  # (data.max_pixels, why)
    rewards: Mapping[str, Guess]  # by data_source, or one for all under the empty name
    prompts: int  # of a step
    played: bool  # a game gives the rewards
    gpus: int  # of this machine


def run_page(page: Page) -> str:
    held: list[Line] = [
        ("run:", ""),
        (f"  name: {_quoted(page.name)}", "the run folder is runs/NAME"),
        *([(f"  gpus: {page.gpus}", "all of this machine; 1 trains on one of them")] if page.gpus > 1 else []),
        ("model:", ""),
        (f"  path: {_quoted(page.model)}", f"family {page.model_type}"),
        ("  train: full", "freeze:vision trains the language half only and needs less memory"),
        ("data:", ""),
        (f"  train: {_quoted(page.data)}", f"{page.format} rows, {page.about}"),
        ("  # val: test.jsonl", "held-out rows; without them only training reward is known"),
        (f"  # format: {page.format}", "what the columns say; only needed when they are ambiguous"),
        *([("  keys:", "columns whose names do not tell what they hold")] if page.keys else []),
        *((f"    {role}: {_quoted(column)}", "") for role, column in page.keys.items()),
        *((f"  max_pixels: {pixels}", why) for pixels, why in page.budgets),
        ("  max_prompt_tokens: 2048", "longer prompts are dropped and counted"),
        ("prompt:", ""),
        ("  format: think_answer", "reasoning in <think>, the answer in <answer>"),
        ("rollout:", ""),
        ("  max_tokens: 1024", "longest response; raise it when many are truncated"),
        *(PLAYED if page.played else _rewards(page.rewards)),
    ]
    lines = [f"{text:<36} # {comment}" if comment else text for text, comment in held]
    after = AFTER.replace("PROMPTS", f"{page.prompts:<7}")
    return "\n".join([f"# Written by `saccade init`. Next: {page.advice}", *lines, after])


PLAYED = (("env:", ""), ("  name: sokoban_step", "an image after each turn; the game gives the rewards"))


def _rewards(rewards: Mapping[str, Guess]) -> Iterator[Line]:
    yield "reward:", ""
    if "" not in rewards:
        yield "  by_source:", "terms by data_source"
    for source, (verifier, arguments, why) in rewards.items():
        deeper = "  " * bool(source)
        name = _quoted(source) if source else "terms"
        yield f"{deeper}  {name}:", "added up; the first is the accuracy that is reported"
        yield f"{deeper}    - verifier: {verifier}", why
        if arguments:
            yield f"{deeper}      args: {arguments}", "words are no mathematics"
        yield f"{deeper}    - verifier: format:think_answer", "keeps the answer where it is found"
        yield f"{deeper}      weight: 0.2", "small, so that form never outweighs being right"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
