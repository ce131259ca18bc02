"""Estimates the gain of speculative decoding with prompt lookup (drafts copied from the text so far): tokens per decode
step, and the speedup of a GRPO step. Nothing is generated.

    python benchmarks/drafts.py gsm8k.test.jsonl.gz docs/*.md saccade/trainer/*.py

The given text stands for responses of a policy: answers after their questions (`question` and `answer` of rows), or
whole files. A byte-level BPE of 16,000 tokens, with single digits, is trained on it. The draft at a position is what
followed the last earlier occurrence of the last three tokens, else two; a draft token is accepted if the sampled token
equals it, so sampling stays exact. Response lengths are those of ahead.py (log-normal, median 400, one in a hundred
8,192); decode steps take the times of the 3B shape in docs/performance.md, with one batch row per draft token.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

ROWS, MILLISECONDS = (1, 8, 32, 64, 128, 512), (2.79, 2.79, 2.89, 3.22, 3.96, 8.50)  # batch size, time of a decode step
UPDATE, ANSWERS, LATER = 7.3, 128, 2.3263  # seconds; responses per step; z-value of one in a hundred


def read(path: Path) -> list[tuple[str, str]]:
    """Pairs of a prompt (may be empty) and a response."""
    if ".jsonl" not in path.name:
        return [("", path.read_text())]
    text = (gzip.open if path.suffix == ".gz" else open)(path, "rt").read()
    return [(row["question"] + "\n", row["answer"]) for row in map(json.loads, text.splitlines())]


def tokens_a_step(known: Sequence[int], written: Sequence[int], drafted: int) -> float:
    """Tokens per decode step: one is sampled, and the draft tokens before the first mismatch are accepted."""
    ids, place, steps = [*known, *written], max(1, len(known)), 0
    begin, last, noted = place, dict[tuple[int, ...], int](), 0
    while place < len(ids):
        for end in range(noted + 1, place):  # an n-gram that ends at `place` is not an earlier occurrence
            last |= {tuple(ids[end - n : end]): end for n in (2, 3) if end >= n}
        noted = max(noted, place - 1)
        found = next((last[key] for n in (3, 2) if (key := tuple(ids[place - n : place])) in last), None)
        draft = [] if found is None else ids[found : min(found + drafted, place)]
        right = next((n for n, (a, b) in enumerate(zip(draft, ids[place:], strict=False)) if a != b), len(draft))
        place, steps = place + min(right, len(ids) - place - 1) + 1, steps + 1
    return (len(ids) - begin) / steps


def seconds(lengths: np.ndarray, tokens: float, drafted: int, few: int) -> float:
    """Seconds of a rollout phase whose engine uses drafts only while at most `few` responses are unfinished."""
    ends = np.sort(lengths)
    live = ANSWERS - np.arange(ANSWERS)
    work = np.diff(ends, prepend=0)  # tokens per response while this many are unfinished
    small = live <= few
    rows, a_step = np.where(small, live * (1 + drafted), live), np.where(small, tokens, 1.0)
    return float((work / a_step * np.interp(rows, ROWS, MILLISECONDS)).sum()) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--drafted", type=int, nargs="*", default=[2, 4, 8])
    args = parser.parse_args()
    kinds: dict[str, list[tuple[str, str]]] = {}
    for path in args.files:
        kinds.setdefault(path.name if ".jsonl" in path.name else path.suffix, []).extend(read(path))
    tokenizer = Tokenizer(models.BPE())
    split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Sequence(split), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=16_000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator((a + b for pairs in kinds.values() for a, b in pairs), trainer)
    spread, rng = math.log(8192 / 400) / LATER, np.random.default_rng(0)
    lengths = (400 * np.exp(spread * rng.standard_normal((200, ANSWERS)))).astype(int).clip(8, 8192)
    plain = float(np.mean([seconds(each, 1.0, 0, 0) for each in lengths]))
    for kind, pairs in kinds.items():
        texts = [[tokenizer.encode(text).ids for text in pair] for pair in pairs]
        size = np.array([len(written) for _, written in texts], dtype=float)
        for drafted in args.drafted:
            tokens = size.sum() / sum(n / tokens_a_step(*text, drafted) for n, text in zip(size, texts, strict=True))
            times = {
                few: np.mean([seconds(each, tokens, drafted, few) for each in lengths]) for few in (1, 4, 8, 16, 32)
            }
            few = min(times, key=lambda few: times[few])
            found = {
                "text": kind,
                "mean_tokens": round(size.mean()),
                "drafted": drafted,
                "tokens_per_step": round(float(tokens), 3),
                "rollout_s": [round(plain, 1), round(float(times[few]), 1)],
                "while_left": few,
                "step": round((plain + UPDATE) / float(times[few] + UPDATE), 3),
            }
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
