"""Rollouts by vLLM alone, with the log-prob of every token as a trainer needs it.

python -m peers.vllm_generate --model M --data D --work W1 --result R      (in benchmarks/)
"""

from __future__ import annotations

import os
import time

import torch
from peers.inputs import arguments, processor, step_inputs
from works import sequences, write_result

# vLLM's default sampler is compiled at the first call, and the compiler may be missing.
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
SHARE = ("--memory", {"type": float, "default": 0.6, "help": "share of the GPU that vLLM takes"})
# On a CPU (the dry run of the tiny model): float32, nothing compiled.
ON_CPU = {"dtype": "float32", "enforce_eager": True}
ON_GPU = {"dtype": "bfloat16"}


def main() -> None:
    from vllm import LLM, SamplingParams

    args = arguments(__doc__, [SHARE])
    work, gpu = args.work, torch.cuda.is_available()
    longest = work["prompt"] + work["new"] + 64
    llm = LLM(
        model=args.model,
        max_model_len=max(4096, longest),
        max_num_seqs=min(512, sequences(work)),
        limit_mm_per_prompt={"image": 1},
        seed=0,
        **(ON_GPU | {"gpu_memory_utilization": args.memory} if gpu else ON_CPU),
    )
    sampling = SamplingParams(
        n=work["samples"], temperature=1.0, max_tokens=work["new"], ignore_eos=True, logprobs=0, detokenize=False
    )
    made, steps = processor(args.model), []
    for step in range(args.steps):
        prompts, images = step_inputs(args.data, work, step, made)
        asked = [
            {"prompt": prompt, "multi_modal_data": {"image": image}}
            for prompt, image in zip(prompts, images, strict=True)
        ]
        began = time.perf_counter()
        found = llm.generate(asked, sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        answers = [answer for request in found for answer in request.outputs]
        lengths = [len(request.prompt_token_ids) for request in found]
        steps.append(
            {
                "rollout": seconds,
                "sequences": len(answers),
                "images": len(images),
                "prompt_tokens": sum(lengths) / len(lengths),
                "generated": sum(len(answer.token_ids) for answer in answers),
            }
        )
    write_result(args.result, steps)


if __name__ == "__main__":
    main()
