"""Rollouts with `generate` of transformers.

python -m peers.generate --model M --data D --work W1 --result R      (in benchmarks/)
"""

from __future__ import annotations

import time

import torch
from peers.inputs import arguments, processor, step_inputs
from transformers import AutoModelForImageTextToText
from works import gpu_peak_gib, sequences, write_result


def main() -> None:
    args = arguments(__doc__)
    work, gpu = args.work, torch.cuda.is_available()
    made = processor(args.model)
    model = AutoModelForImageTextToText.from_pretrained(args.model, dtype=torch.bfloat16 if gpu else torch.float32)
    model = model.to("cuda" if gpu else "cpu").eval()
    steps = []
    for step in range(args.steps):
        first = step == 0 and args.steps > 1
        new = min(16, work["new"]) if first else work["new"]  # the first one only warms up
        prompts, images = step_inputs(args.data, work, step, made)
        began = time.perf_counter()
        batch = made(text=prompts, images=images, padding=True, return_tensors="pt")
        with torch.no_grad():
            output = model.generate(
                **batch.to(model.device),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                repetition_penalty=1.0,
                min_new_tokens=new,
                max_new_tokens=new,
                num_return_sequences=work["samples"],
            )
        if gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        given = batch["input_ids"].shape[1]
        assert output.shape == (sequences(work), given + new), output.shape
        steps.append(
            {
                "rollout": seconds,
                "sequences": len(output),
                "images": len(batch["image_grid_thw"]),
                "prompt_tokens": float(batch["attention_mask"].sum(1).float().mean()),
                "generated": output[:, given:].numel(),
                "peak_gib": gpu_peak_gib(),
            }
        )
    write_result(args.result, steps)


if __name__ == "__main__":
    main()
