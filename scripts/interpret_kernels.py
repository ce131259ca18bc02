"""Compares the embedded engine with and without its Triton kernels in Triton's interpreter, to test a
changed kernel without a GPU. Needs the package triton; takes a few minutes.

    python scripts/interpret_kernels.py
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

import tempfile
import warnings
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter

from saccade.engines import generate
from saccade.engines.embedded import EmbeddedEngine, kv_cache
from saccade.models.families import load_family
from saccade.models.load import load_model
from saccade.plugins.families import tiny_kinds
from saccade.types import Completion, Message, Request, Sampling

FREE = Sampling(temperature=1.0, ignore_eos=True)
WINDOWS = {"use_sliding_window": True, "sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]}
MODELS = {
    "all tokens": ("qwen2", {}),
    "windows": ("qwen2", WINDOWS),
    "states": ("qwen3_5_text", {}),
    "latents": ("kimi_k25", {}),  # keys larger than values
}
SETTINGS = {
    "free": FREE,
    "greedy": replace(FREE, temperature=0.0),
    "top_k": replace(FREE, top_k=5, support=True),
    "top_p": replace(FREE, top_p=0.8, support=True),
}
patch_tensor = interpreter._patch_lang_tensor


def with_index(tensor: Any, scope: Any) -> None:
    """Let the interpreter's scalars be an index: they are arrays of one, which numpy 2.4 refuses."""
    patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def main() -> None:
    warnings.filterwarnings("ignore", category=RuntimeWarning)  # log(0), which a GPU computes silently
    interpreter._patch_lang_tensor = with_index
    kv_cache.KVCache._budget = lambda self: 1 << 24  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as scratch:
        for seen, (name, sampling) in product(MODELS, SETTINGS.items()):
            kind, changes = MODELS[seen]
            family = load_family(str(tiny_kinds.build(kind, Path(scratch) / seen, **changes)))
            model = load_model(family, dtype=torch.float32, device=torch.device("cpu"))
            prompts = [family.render([Message(role="user", parts=("Why? " * n,))]) for n in (2, 7)]
            asked = [
                Request(
                    key=f"{number}/{repeat}",
                    ids=prompt.ids,
                    sampling=replace(sampling, max_tokens=3 + 2 * repeat),
                    noise=10 * number + repeat,
                )
                for number, prompt in enumerate(prompts)
                for repeat in range(2)
            ]
            answers = []
            for kernels in (False, True):
                kv_cache.use_kernels = lambda shape, on=kernels: on  # type: ignore[assignment]
                answers.append(generate(EmbeddedEngine(model, family, max_sequences=8), asked))
            for plain, kernels in zip(*answers, strict=True):
                assert told(plain) == told(kernels), f"{name}: {told(plain)}, {told(kernels)}"
                assert np.abs(plain.logprobs - kernels.logprobs).max() < 1e-5, name
            print(f"{seen}, {name}: the same {sum(len(a.ids) for a in answers[0])} tokens")


def told(answer: Completion) -> tuple[list[int], list[list[int]]]:
    return answer.ids.tolist(), [kept.tolist() for kept in answer.support or ()]


if __name__ == "__main__":
    main()
