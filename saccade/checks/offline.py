"""What a config alone can say against learning from demonstrations.

>>> list(demonstrations(load(None, ["train.sft_coef=1"])))
['data.demonstrations: train.sft_coef needs some; try data.demonstrations=shown.jsonl']
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from saccade.config import Config


def folder(field: str, path: str) -> Iterator[str]:
    if not path.startswith("tiny:") and not (Path(path) / "config.json").is_file():
        reason = "has no config.json" if Path(path).is_dir() else "is not a folder"
        saved = [p.parent for p in (Path(path) / "checkpoints").glob("step-*/config.json")]
        newest = max(saved, key=lambda p: p.stat().st_mtime, default=None)
        if (Path(path) / "adapter_config.json").is_file():  # the merged model lies around it
            reason, newest = "is an adapter", Path(path).absolute().parent
        advice = "give a Hugging Face model folder that is on this disk"
        yield f"{field}: {path} {reason}; {f'try {field}={newest}' if newest else advice}"


def imitation(config: Config) -> Iterator[str]:
    sft = config.sft
    if sft.teacher is not None:
        yield from folder("sft.teacher", sft.teacher)
    if sft.reward_tag is not None and not _shows_reward(sft.reward_tag):
        yield (
            f"sft.reward_tag: {sft.reward_tag!r} does not show a reward; try sft.reward_tag='<reward {{reward:.1f}}>'"
        )


def _shows_reward(tag: str) -> bool:
    try:
        return tag.format(reward=0.25) != tag.format(reward=100.0)
    except (LookupError, ValueError, AttributeError):
        return False


def demonstrations(config: Config) -> Iterator[str]:
    rows, coef = config.data.demonstrations, config.train.sft_coef
    if coef and not rows:
        yield "data.demonstrations: train.sft_coef needs some; try data.demonstrations=shown.jsonl"
