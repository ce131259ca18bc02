"""Rollouts of saccade without training: prompts with images in, sampled tokens with log-probs out.

    python benchmarks/rollout.py --work W1,prompts=64 --model runs/3b --data runs/data/train.jsonl

Unlike decode.py this is the whole rollout phase of a step, without rewards.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from rl_step import config
from works import gpu_peak_gib, parse, write_result

from saccade.config import load
from saccade.engines.embedded import EmbeddedEngine
from saccade.recipes import model_setup, questions, run_parts
from saccade.rollout.collect import collect


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=parse, required=True)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True, help="rows that works.py wrote")
    parser.add_argument("--result", type=Path)
    parser.add_argument("overrides", nargs="*", help="options such as rollout.max_sequences=256")
    args = parser.parse_args()
    work, steps = args.work, []
    with tempfile.TemporaryDirectory() as scratch:
        settings = config(Path(scratch), args.model, args.data, work, args.steps)
        loaded = load(settings, args.overrides)
        model_setup.quiet_libraries()
        family = model_setup.family_of(loaded, args.model)
        data = questions.load_prompts(loaded, loaded.data.train, family)
        model = model_setup.load_policy(loaded, family, train="full")
        engine = EmbeddedEngine(model, family, max_sequences=loaded.rollout.max_sequences)
        for step in range(args.steps):
            began = time.perf_counter()
            groups = collect(
                engine,
                data.samples[work["prompts"] * step :][: work["prompts"]],
                run_parts.episode_setup(loaded, family, run_parts.rollout_sampling(loaded), f"benchmark/{step}"),
                repeats=work["samples"],
            )
            engine.sleep()
            seconds = time.perf_counter() - began
            made = [trajectory for group in groups for trajectory in group.trajectories]
            prompts = [len(t.ids) - t.response_length for t in made]
            steps.append(
                {
                    "rollout": seconds,
                    "sequences": len(made),
                    "images": len({span.media.key for t in made for span in t.media}),
                    "prompt_tokens": sum(prompts) / len(prompts),
                    "generated": sum(t.response_length for t in made),
                    "peak_gib": gpu_peak_gib(),
                }
            )
    write_result(args.result, steps)


if __name__ == "__main__":
    main()
