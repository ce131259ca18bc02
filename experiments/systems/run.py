"""Do engine, processes and scheduling change what a run learns? One GRPO run of the quickstart's task with the embedded
engine, in two processes, with rollouts ahead of training, and with vLLM. Does all: scenes, models, all arms and seeds,
RESULTS.md and its picture. With one thread per process, as below, it needs no GPU and no second core.

    OMP_NUM_THREADS=1 python experiments/systems/run.py     # also runs the vLLM arm if vLLM is installed
    python experiments/systems/run.py --arms ranks ahead    # only these, and the cold start
    python experiments/systems/run.py --page                # writes the page of the stored results
    python experiments/systems/run.py --tiny                # two steps, in seconds
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # the source tree is enough, no install needed

from experiments.arms import Job, command_line, options_of, run_and_write  # noqa: E402
from experiments.systems.page import write_page  # noqa: E402
from saccade.plugins.families import tiny_kinds  # noqa: E402
from saccade.plugins.quickstart import quickstart  # noqa: E402

SIZE = {"demonstrations": 400, "prompts": 2000, "evaluation": 600}
TINY = {"demonstrations": 64, "prompts": 16, "evaluation": 8}
# Options that an arm changes in rl.yaml. The others are compared with the first.
ARMS: dict[str, tuple[str, ...]] = {
    "embedded": (),
    "ahead": ("rollout.ahead=1",),
    "ranks": ("run.gpus=2",),
    "vllm": ("rollout.engine=vllm",),
    "beside": ("rollout.ahead=1", "rollout.replicas=1"),
    "order": ("data.order=sequential",),  # not shuffled: shows how much runs with one engine vary
}


def jobs_of(args: argparse.Namespace, every: Mapping[str, tuple[str, ...]]) -> list[Job]:
    """A cold start of each seed, from its own random weights; every arm starts from it."""
    out, seeds = args.out.resolve(), [100] if args.dev else args.seeds
    data = quickstart.draw_data(out / "data", TINY if args.tiny else SIZE, 0)
    arms = {arm: options for arm, options in every.items() if arm != "vllm" or find_spec("vllm")}
    jobs = []
    for seed in seeds:
        model = tiny_kinds.build("qwen2_5_vl", out / f"model-{seed}", words=quickstart.WORDS, seed=seed)
        given = {"model.path": model, "data.train": data["demonstrations"]}
        shown = options_of(HERE, args, ["sft.yaml"], given)
        jobs.append(Job(arm="cold", seed=seed, command="sft", options=shown))
        asked = options_of(HERE, args, ["rl.yaml"], {"data.train": data["train"], "data.val": data["val"]})
        for arm, options in arms.items():
            jobs.append(Job(arm=arm, seed=seed, command="rl", options=(*asked, *options), after="cold"))
    return jobs


def main(argv: Sequence[str] | None = None) -> None:
    args = command_line(__doc__, "systems").parse_args(argv)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; all keys and values of a step take 30 MiB
    run_and_write([] if args.page else jobs_of(args, ARMS), args, HERE, write_page)


if __name__ == "__main__":
    main()
