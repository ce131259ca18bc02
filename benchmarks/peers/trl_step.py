"""Whole GRPO steps of TRL, split into phases; generation by transformers, or by vLLM in the same
process.

python -m peers.trl_step --model M --data D --work W1 --result R --engine vllm   (in benchmarks/)

`rollout`: weight sync and generation; `prepare`: everything until the first forward (rewards,
processing of images, old log-probs if TRL needs them); `update`: the rest.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from typing import Any

os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

import torch
from datasets import Dataset, Image
from peers.inputs import arguments, placeholder_ids, processor
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from works import Work, gpu_peak_gib, read_rows, sequences, write_result

OPTIONS = [
    ("--engine", {"choices": ["transformers", "vllm"], "default": "transformers"}),
    ("--micro", {"type": int, "default": 8, "help": "sequences of one forward and backward"}),
    ("--recompute", {"action": "store_true", "help": "recompute activations, as TRL does unless told otherwise"}),
    ("--memory", {"type": float, "default": 0.3, "help": "share of the GPU that vLLM takes"}),
]


def rows(args: Any) -> Dataset:
    found = [row for step in range(args.steps) for row in read_rows(args.data, args.work, step)]
    return Dataset.from_dict(
        {
            "prompt": [[{"role": "user", "content": text}] for text, _ in found],
            "image": [str(path) for _, path in found],
        }
    ).cast_column("image", Image())


def score(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [float(sum(ids) % 7) for ids in completion_ids]


def generation(engine: str, work: Work, banned: list[int], memory: float) -> dict[str, Any]:
    """Options for exactly `new` tokens per response, without placeholders."""
    if engine == "transformers":
        return {"generation_kwargs": {"min_new_tokens": work["new"], "suppress_tokens": banned}}
    return {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": memory,
        "vllm_max_model_length": max(4096, work["prompt"] + work["new"] + 64),
        "generation_kwargs": {
            "min_tokens": work["new"],
            "ignore_eos": True,
            "logit_bias": dict.fromkeys(banned, -100.0),
        },
    }


class Meter(TrainerCallback):
    """Seconds and counts of each step, from the end of the previous one."""

    def __init__(self, trainer: GRPOTrainer, work: Work, banned: list[int]) -> None:
        self.trainer, self.work, self.banned = trainer, work, set(banned)
        self.steps: list[dict[str, Any]] = []
        self.now: Counter[str] = Counter()
        self.trained: list[torch.Tensor] = []
        self.time("_generate_single_turn", "rollout", self.count)
        self.time("_generate_and_score_completions", "prepare")
        compute_loss = trainer._compute_loss

        def counted(model: Any, inputs: Any) -> Any:
            self.trained.append(inputs["completion_mask"].sum())  # read at the end of the step
            self.now["seen"] += len(inputs["image_grid_thw"])
            return compute_loss(model, inputs)

        trainer._compute_loss = counted

    def time(self, method: str, name: str, look: Any = None) -> None:
        inner = getattr(self.trainer, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = self.clock()
            result = inner(*args, **kwargs)
            self.now[name] += self.clock() - began
            if look is not None:
                look(args[0], result[0])
            return result

        setattr(self.trainer, method, timed)

    def count(self, prompts: list[list[int]], answers: list[list[int]]) -> None:
        self.now["sequences"] += len(answers)
        self.now["prompt_tokens"] += sum(map(len, prompts)) / len(prompts)
        self.now["generated"] += sum(map(len, answers))
        bad = sum(token in self.banned for ids in answers for token in ids)
        assert not bad, f"{bad} placeholders were sampled"

    @staticmethod
    def clock() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.began = self.clock()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        end, now = self.clock(), self.now
        whole, self.began = end - self.began, end
        self.steps.append(
            {
                "whole": whole,
                "rollout": now["rollout"],
                "prepare": now["prepare"] - now["rollout"],
                "update": whole - now["prepare"],
                "sequences": now["sequences"],
                "images": now["seen"] // self.work["samples"],  # TRL repeats the image for each sample
                "prompt_tokens": now["prompt_tokens"],
                "generated": now["generated"],
                "trained": int(sum(self.trained)),
                "peak_gib": gpu_peak_gib(),
            }
        )
        print("step", len(self.steps), self.steps[-1], flush=True)
        now.clear()
        self.trained.clear()


def main() -> None:
    args = arguments(__doc__, OPTIONS)
    work, gpu = args.work, torch.cuda.is_available()
    micro, banned = min(args.micro, sequences(work)), placeholder_ids(args.model)
    with tempfile.TemporaryDirectory() as scratch:
        settings = GRPOConfig(
            output_dir=scratch,
            max_steps=args.steps,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=sequences(work) // micro,
            num_generations=work["samples"],
            max_completion_length=work["new"],
            temperature=1.0,
            beta=0.0,
            learning_rate=1e-6,
            shuffle_dataset=False,
            save_strategy="no",
            report_to=[],
            logging_steps=1,
            bf16=gpu,
            use_cpu=not gpu,
            optim="adamw_torch_fused",
            gradient_checkpointing=args.recompute,
            gradient_checkpointing_kwargs={"use_reentrant": False},
            model_init_kwargs={"dtype": "bfloat16" if gpu else "float32", "attn_implementation": "sdpa"},
            **generation(args.engine, work, banned, args.memory),
        )
        trainer = GRPOTrainer(
            model=args.model,
            reward_funcs=score,
            args=settings,
            train_dataset=rows(args),
            processing_class=processor(args.model),
        )
        meter = Meter(trainer, work, banned)
        trainer.add_callback(meter)
        trainer.train()
    write_result(args.result, meter.steps, micro=micro)


if __name__ == "__main__":
    main()
