"""Named algorithms: each a row of cells, none with code of its own.

A row names an entry of each axis and the options that differ from `COMMON` or from the entry's own
defaults. Option names are those of the config's `algorithm` section, which overrides any cell. The
cells of an axis (`clip_high` …) hold only while the row's own entry is in place. Knows nothing of
what the names mean.

    >>> PRESETS["dapo"]["clip_high"]
    0.28
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COMMON: Mapping[str, Any] = {
    "samples_per_prompt": 8,
    "policy_loss": "clip",
    "aggregation": "token_mean",
    "adv_clip": None,
    "entropy_coef": 0.0,
    "old": "auto",
    "drop_constant": False,
    "exclude_status": (),
    "excluded_in_baseline": False,
    "kl": {"coef": 0.0, "place": "loss", "clamp": "bounded"},
    "filter": {
        "dynamic": False,
        "low": 0.01,
        "high": 0.99,
        "max_rounds": 10,
        "on_exhausted": "train_partial",
        "function": None,
    },
    "overlong": {"buffer": 0, "factor": 1.0, "largest_share": 1.0},
}

# What KL is estimated with when neither the config nor the row says so.
KIND_OF_PLACE: Mapping[str, str] = {"loss": "k3", "reward": "k1"}

# Every row says `about` (what it is, when to use it) and `paper` (arXiv id, empty for folklore).
PRESETS: dict[str, Mapping[str, Any]] = {
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
        "overlong": {"buffer": 4096, "largest_share": 0.2},
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
    "rloo": {
        "about": "Leave-one-out baseline, KL in the reward. Unbiased, good with few samples.",
        "paper": "2402.14740",
        "samples_per_prompt": 4,
        "advantage": "rloo",
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
        "old": "detach",
    },
    "opo": {
        "about": "Policy gradient with the baseline of least variance. Strictly on-policy.",
        "paper": "2505.23585",
        "advantage": "opo",
        "policy_loss": "pg",
        "old": "detach",
    },
    "max_rl": {
        "about": "Divides by the success rate: hard prompts weigh more. Rewards must be >= 0.",
        "paper": "2602.02710",
        "advantage": "max_rl",
    },
}
