"""Named algorithms: each a row of options that it changes, none with code of its own.

Names are those of the config's `algorithm` section, besides `samples_per_prompt` and
`updates_per_step` of `train` and `reward_clip` (`reward.clip`). What the user gives wins over any
of them. Cells of an axis (`clip_high` …) hold only while the row's own function is in place. An
add-on is a row that is laid over another one: `algorithm.preset=[grpo, tis]`.

    >>> cells_of({"preset": "dapo", "clip_low": 0.1})["algorithm"]["clip_high"]
    0.28
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from saccade.errors import ConfigError
from saccade.registry import Table

Row = dict[str, Any]
# Which function of the row a cell was chosen for.
AXIS_OF = {
    **dict.fromkeys(("clip_low", "clip_high", "dual_clip", "delta"), "policy_loss"),
    **dict.fromkeys(("std_eps", "args"), "advantage"),
}
ELSEWHERE = {
    "samples_per_prompt": ("train", "samples_per_prompt"),
    "updates_per_step": ("train", "updates_per_step"),
    "reward_clip": ("reward", "clip"),
}
NOT_OPTIONS = ("about", "paper", "on_policy", "always", "longest_share")


def row_of(preset: Iterable[str]) -> Row:
    """The row with its add-ons laid over it: sections are merged, lists joined."""
    name, *add_ons = preset
    if name in ADD_ONS:
        raise ConfigError(f"algorithm.preset={name}: is added to a row, as in [grpo, {name}]")
    if name not in PRESETS:
        raise _unknown(name, PRESETS)
    row = dict(PRESETS[name])
    always = dict(row.get("always", {}))
    for add_on in add_ons:
        if add_on not in ADD_ONS:
            raise _unknown(add_on, ADD_ONS)
        for key, value in ADD_ONS[add_on].items():
            if key == "paper":
                row["paper"] = ", ".join(filter(None, [row["paper"], value]))
            elif key in ("correct", "exclude_status"):
                row[key] = (*row.get(key, ()), *(v for v in value if v not in row.get(key, ())))
            elif key != "about":
                always[key] = value
    return row | {"always": always}


def cells_of(given: Row) -> dict[str, dict[str, Any]]:
    """What a preset sets, by section, where the `algorithm` section holds what is `given`."""
    row = row_of(given["preset"])
    cells: dict[str, Any] = {}
    for name, value in row.items():
        axis = AXIS_OF.get(name)
        in_place = axis is None or given.get(axis) in (None, row.get(axis, "clip"))
        if name not in NOT_OPTIONS and in_place:
            cells[name] = value
    cells |= row["always"]
    if isinstance(kl := cells.get("kl"), Mapping) and given.get("kl", {}).get("place") not in (None, kl.get("place")):
        cells["kl"] = {name: value for name, value in kl.items() if name != "kind"}
    if given.get("clip") is not None:
        cells |= dict.fromkeys(("clip_low", "clip_high"), given["clip"])
    found: dict[str, dict[str, Any]] = {"algorithm": {}}
    for name, value in cells.items():
        section, leaf = ELSEWHERE.get(name, ("algorithm", name))
        found.setdefault(section, {})[leaf] = value
    return found


def _unknown(name: str, known: Iterable[str]) -> ConfigError:
    if "+" in name:
        return ConfigError(
            f"algorithm.preset={name}: add-ons are a list now; write algorithm.preset=[{name.replace('+', ', ')}]"
        )
    near = get_close_matches(name.lower().replace(" ", ""), [*known], n=1, cutoff=0.5)
    guess = f"did you mean {near[0]!r}? " if near else ""
    return ConfigError(f"algorithm.preset={name}: no such name; {guess}Expected one of {', '.join(known)}")


# Every row says `about` (what it is, when to use it) and `paper` (arXiv ids, empty for folklore).
_ROWS: dict[str, Row] = {
    "grpo": {
        "about": "Group-normalised rewards, KL to the reference. The safe start.",
        "paper": "2402.03300",
        "advantage": "grpo",
        "aggregation": "seq_mean",
        "kl": {"coef": 0.04, "kind": "k3", "place": "loss"},
    },
    "dr_grpo": {
        "about": "GRPO without its length and difficulty biases. When answers grow without reason.",
        "paper": "2503.20783",
        "advantage": "no_std",
        "aggregation": "fixed",
    },
    "dapo": {
        "about": "Wider upper clip, dynamic sampling, overlong penalty. For long reasoning.",
        "paper": "2503.14476",
        "samples_per_prompt": 16,
        "advantage": "grpo",
        "clip_high": 0.28,
        "filter": {"dynamic": True},
        # 4096 of 20480 in the paper: the same share of a shorter limit.
        "overlong": {"buffer": 4096},
        "longest_share": 0.2,
    },
    "gspo": {
        "about": "One ratio per sequence. Steady on mixture-of-experts and long answers.",
        "paper": "2507.18071",
        "advantage": "grpo",
        "policy_loss": "gspo",
        "aggregation": "seq_mean",
    },
    "gmpo": {
        "about": "Geometric mean of token ratios. Less sensitive to outlier tokens.",
        "paper": "2507.20673",
        "advantage": "grpo",
        "policy_loss": "gmpo",
        "aggregation": "seq_mean",
    },
    "cispo": {
        "about": "Clips the weight, not the gradient: rare pivotal tokens keep learning.",
        "paper": "2506.13585",
        "samples_per_prompt": 16,
        "advantage": "grpo",
        "policy_loss": "cispo",
    },
    "sapo": {
        "about": "A smooth gate in place of the clip.",
        "paper": "2511.20347",
        "advantage": "grpo",
        "policy_loss": "sapo",
        "aggregation": "seq_mean",
    },
    "cpgd": {
        "about": "Clips the log-ratio and holds the drift from the old policy. Against collapse.",
        "paper": "2505.12504",
        "advantage": "cpgd",
        "policy_loss": "cpgd",
    },
    "rloo": {
        "about": "Leave-one-out baseline, KL in the reward. Unbiased, good with few samples.",
        "paper": "2402.14740",
        "samples_per_prompt": 4,
        "advantage": "rloo",
        "kl": {"coef": 0.01, "kind": "k1", "place": "reward"},
    },
    "remax": {
        "about": "A greedy response is the baseline. Two rollouts per prompt, no critic.",
        "paper": "2310.10505",
        "samples_per_prompt": 1,
        "advantage": "remax",
        "policy_loss": "pg",
        "aggregation": "seq_sum",
        "kl": {"coef": 0.01, "kind": "k1", "place": "reward"},
    },
    "reinforce": {
        "about": "Plain policy gradient, no baseline. For comparison.",
        "paper": "",
        "samples_per_prompt": 1,
        "advantage": "reinforce",
        "policy_loss": "pg",
    },
    "reinforce_pp": {
        "about": "Returns with KL per token, whitened over the step. For one sample per prompt.",
        "paper": "2501.03262",
        "samples_per_prompt": 1,
        "advantage": "reinforce_pp",
        "kl": {"coef": 1e-3, "kind": "k1", "place": "reward"},
    },
    "reinforce_pp_baseline": {
        "about": "Group mean removed, then whitened over the step. For lopsided groups.",
        "paper": "2501.03262",
        "advantage": "reinforce_pp_baseline",
        "kl": {"coef": 1e-3, "kind": "k2", "place": "loss"},
    },
    "ppo": {
        "about": "A critic values every token. For one sample per prompt; costs a second model.",
        "paper": "1707.06347, 1506.02438",
        "samples_per_prompt": 1,
        "advantage": "gae",
        "kl": {"coef": 0.01, "kind": "k1", "place": "reward"},
    },
    "grpo_passk": {
        "about": "Rewards only the best of a group. Optimises pass@k.",
        "paper": "2503.19595",
        "advantage": "grpo_passk",
    },
    "gpg": {
        "about": "Policy gradient rescaled for dead groups. Minimal, strictly on-policy.",
        "paper": "2504.02546",
        "advantage": "gpg",
        "policy_loss": "pg",
        "on_policy": True,
    },
    "opo": {
        "about": "Policy gradient with the baseline of least variance. Strictly on-policy.",
        "paper": "2505.23585",
        "advantage": "opo",
        "policy_loss": "pg",
        "on_policy": True,
    },
    "max_rl": {
        "about": "Divides by the success rate: hard prompts weigh more. Rewards must be >= 0.",
        "paper": "2602.02710",
        "advantage": "max_rl",
    },
    "gdpo": {
        "about": "Every reward term is normalised on its own. For terms of different spread.",
        "paper": "2601.05242",
        "advantage": "gdpo",
    },
    "drpo": {
        "about": "Rare domains and hard prompts weigh more. For mixtures; rows have a `domain`.",
        "paper": "2506.00711",
        "samples_per_prompt": 5,
        "advantage": "drpo",
        "clip_high": 0.3,
        "dual_clip": 3.0,
        "kl": {"coef": 1e-4, "kind": "k3", "place": "loss"},
    },
    "kl_cov": {
        "about": "Holds the few tokens that would collapse the entropy near the old policy.",
        "paper": "2505.22617",
        "advantage": "grpo",
        "policy_loss": "kl_cov",
    },
    "clip_cov": {
        "about": "Leaves out a few tokens that would collapse the entropy.",
        "paper": "2505.22617",
        "advantage": "grpo",
        "policy_loss": "clip_cov",
    },
    "dapo_forking": {
        "about": "DAPO on the fifth of tokens with the highest entropy, where answers fork.",
        "paper": "2506.01939",
        "samples_per_prompt": 16,
        "advantage": "grpo",
        "clip_high": 0.28,
        "filter": {"dynamic": True},
        "overlong": {"buffer": 4096},
        "longest_share": 0.2,
        "entropy_top": 0.2,
    },
    "topr": {
        "about": "Good samples are imitated, bad ones pushed with a capped weight. Old samples.",
        "paper": "2503.14286",
        "advantage": "no_std",
        "policy_loss": "topr",
    },
    "kimi": {
        "about": "Policy gradient with a squared distance to the old policy in place of a clip.",
        "paper": "2501.12599",
        "advantage": "no_std",
        "policy_loss": "kimi",
    },
    "dppo_tv": {
        "about": "Masks by the change of probability, not of ratio: rare tokens keep learning.",
        "paper": "2602.04879",
        "advantage": "no_std",
        "policy_loss": "dppo_tv",
    },
    # The effective objectives of other systems, their defects fixed.
    "easyr1": {
        "about": "EasyR1's objective: GRPO by token mean, wide clip, four updates per step.",
        "paper": "",
        "samples_per_prompt": 5,
        "updates_per_step": 4,
        "advantage": "grpo",
        "clip_high": 0.3,
        "dual_clip": 3.0,
        "kl": {"coef": 1e-2, "kind": "k3", "place": "loss"},
    },
    "lmm_r1": {
        "about": "LMM-R1's objective: PPO with lambda 1; also with advantage rloo, grpo, no_std.",
        "paper": "",
        "samples_per_prompt": 16,
        "advantage": "gae",
        "args": {"lam": 1.0},
        "always": {"std_eps": 1e-9},  # of the estimators that divide, in place of gae
        "reward_clip": (-10.0, 10.0),
        "kl": {"coef": 0.01, "kind": "k1", "place": "reward"},
    },
    "r1v": {
        "about": "R1-V's objective: strictly on-policy GRPO with KL.",
        "paper": "",
        "advantage": "grpo",
        "std_eps": 1e-4,
        "aggregation": "seq_mean",
        "on_policy": True,
        "kl": {"coef": 0.04, "kind": "k3", "place": "loss"},
    },
    "mini_o3": {
        "about": "Mini-o3's objective: over-turn episodes left out, dead groups refilled.",
        "paper": "2509.07969",
        "samples_per_prompt": 16,
        "updates_per_step": 8,
        "advantage": "grpo",
        "clip_high": 0.3,
        "aggregation": "seq_mean",
        "exclude_status": ("overturn",),
        # Dropped where the std of outcomes is below 1e-4, that is where they are constant.
        "filter": {"dynamic": True, "low": float("-inf"), "high": float("inf")},
    },
    "lightrft": {
        "about": "LightRFT's objective: GRPO with a small KL.",
        "paper": "",
        "advantage": "grpo",
        "std_eps": 1e-9,
        "aggregation": "seq_mean",
        "kl": {"coef": 0.01, "kind": "k3", "place": "loss"},
    },
}
_ROWS["qoq_med"] = _ROWS["drpo"] | {"about": "QoQ-Med's objective, that is drpo."}
PRESETS: Table[Row] = Table("presets", _ROWS)

ADD_ONS: dict[str, Row] = {
    "fire": {
        "about": "A hot first token, for variety.",
        "paper": "2410.21236",
        "hot_first_token": {"temperature": 10.0},
    },
    "tis": {
        "about": "Token weights for what the engine sampled differently, at most 2.",
        "paper": "",
        "correct": ({"name": "tis.token"},),
    },
    "icepop": {
        "about": "The same weights, and tokens outside [0.5, 5] dropped.",
        "paper": "",
        "correct": ({"name": "icepop"},),
    },
    "overturn_mask": {
        "about": "Episodes that ran out of turns do not train.",
        "paper": "2509.07969",
        "exclude_status": ("overturn",),
    },
    "entropy_top": {
        "about": "Policy loss on the fifth of tokens with the highest entropy.",
        "paper": "2506.01939",
        "entropy_top": 0.2,
    },
    "dual_clip": {"about": "Bounds the loss of bad tokens.", "paper": "1912.09729", "dual_clip": 3.0},
    "delta": {
        "about": "Bounds the free ratio.",
        "paper": "2505.07291",
        "delta": 4.0,
        "dual_clip": 0.0,  # it bounds the same
    },
}
