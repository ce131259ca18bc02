"""Every row of the table, cell by cell."""

import pytest

from saccade.algorithms.build import resolve
from saccade.algorithms.describe import describe, options_in_effect, resolved_options
from saccade.config import AlgorithmConfig
from saccade.config.schema.presets import PRESETS

NONE = (0.0, "k3", "loss")
GRPO = ("grpo", {"std_eps": 1e-6})


def clip(low: float = 0.2, high: float = 0.2, dual: float = 0.0):
    return ("clip", {"clip_low": low, "clip_high": high, "dual_clip": dual, "delta": 0.0})


COV = {"cov_fraction": 2e-4}
TRUST = {"clip_low": 0.2, "clip_high": 0.2, "weight_cap": 20.0}
BAND = {"clip_low": 0.2, "clip_high": 0.2, "cov_low": 1.0, "cov_high": 5.0}
WEIGHED = {"weight_floor": 0.0, "weight_cap": 5.0}
DRIFT = {"clip_low": 0.2, "clip_high": 0.2, "drift_coef": 1e-3, "drift_cap": 2.0}
WHITE = {"whiten": True, "whiten_std": True}
DRPO = {"reward_range": (0.0, 1.0), "std_eps": 1e-6, "drpo_renorm": "std", "drpo_kl_damp": 0.0}
GPG = {"gpg_alpha": "nonconstant", "gpg_alpha_max": float("inf"), "gpg_divisor": "one", "std_eps": 1e-6}

# preset, n, updates, advantage, policy loss, aggregation, KL (coefficient, kind, place)
ROWS = [
    ("ppo", 1, 1, ("gae", {"gamma": 1, "lam": 0.95, **WHITE}), clip(), "token_mean", (0.01, "k1", "reward")),
    ("grpo", 8, 1, GRPO, clip(), "seq_mean", (0.04, "k3", "loss")),
    ("dr_grpo", 8, 1, ("no_std", {}), clip(), "fixed", NONE),
    ("dapo", 16, 1, GRPO, clip(high=0.28), "token_mean", NONE),
    ("gspo", 8, 1, GRPO, ("gspo", {"clip_low": 3e-4, "clip_high": 4e-4}), "seq_mean", NONE),
    ("gmpo", 8, 1, GRPO, ("gmpo", {"clip_low": 0.4, "clip_high": 0.4}), "seq_mean", NONE),
    ("cispo", 16, 1, GRPO, ("cispo", WEIGHED), "token_mean", NONE),
    (*("sapo", 8, 1, GRPO), *(("sapo", {"tau_positive": 1.0, "tau_negative": 1.05}), "seq_mean", NONE)),
    (*("cpgd", 8, 1, ("cpgd", {"cpgd_weight": "std", "std_eps": 1e-6})), *(("cpgd", DRIFT), "token_mean", NONE)),
    ("rloo", 4, 1, ("rloo", {}), clip(), "token_mean", (0.01, "k1", "reward")),
    ("remax", 1, 1, ("remax", {}), ("pg", {}), "seq_sum", (0.01, "k1", "reward")),
    ("reinforce", 1, 1, ("reinforce", {"gamma": 1.0, **WHITE, "whiten": False}), ("pg", {}), "token_mean", NONE),
    (
        *("reinforce_pp", 1, 1, ("reinforce_pp", {"gamma": 1.0, **WHITE})),
        *(clip(), "token_mean", (1e-3, "k1", "reward")),
    ),
    (*("reinforce_pp_baseline", 8, 1, ("reinforce_pp_baseline", WHITE)), *(clip(), "token_mean", (1e-3, "k2", "loss"))),
    (*("grpo_passk", 8, 1, ("grpo_passk", {"std_eps": 1e-6, "divide_by_std": True})), *(clip(), "token_mean", NONE)),
    ("gpg", 8, 1, ("gpg", GPG), ("pg", {}), "token_mean", NONE),
    ("opo", 8, 1, ("opo", {}), ("pg", {}), "token_mean", NONE),
    ("drpo", 5, 1, ("drpo", DRPO), clip(0.2, 0.3, 3), "token_mean", (1e-4, "k3", "loss")),
    ("max_rl", 8, 1, ("max_rl", {}), clip(), "token_mean", NONE),
    (*("gdpo", 8, 1, ("gdpo", {"std_eps": 1e-6, "gdpo_whiten": "seq"})), *(clip(), "token_mean", NONE)),
    ("clip_cov", 8, 1, GRPO, ("clip_cov", BAND | COV), "token_mean", NONE),
    ("kl_cov", 8, 1, GRPO, ("kl_cov", COV | {"cov_coef": 1.0}), "token_mean", NONE),
    ("dapo_forking", 16, 1, GRPO, clip(high=0.28), "token_mean", NONE),
    ("topr", 8, 1, ("no_std", {}), ("topr", {"topr_split": "reward"}), "token_mean", NONE),
    (*("kimi", 8, 1, ("no_std", {})), *(("kimi", {"kimi_tau": 0.1, "kimi_level": "token"}), "token_mean", NONE)),
    ("dppo_tv", 8, 1, ("no_std", {}), ("dppo_tv", TRUST), "token_mean", NONE),
    # other systems
    ("easyr1", 5, 4, GRPO, clip(0.2, 0.3, 3), "token_mean", (1e-2, "k3", "loss")),
    (*("lmm_r1", 16, 1, ("gae", {"gamma": 1.0, "lam": 1.0, **WHITE})), *(clip(), "token_mean", (0.01, "k1", "reward"))),
    ("r1v", 8, 1, ("grpo", {"std_eps": 1e-4}), clip(), "seq_mean", (0.04, "k3", "loss")),
    ("mini_o3", 16, 8, GRPO, clip(0.2, 0.3), "seq_mean", NONE),
    ("lightrft", 8, 1, ("grpo", {"std_eps": 1e-9}), clip(), "seq_mean", (0.01, "k3", "loss")),
    ("qoq_med", 5, 1, ("drpo", DRPO), clip(0.2, 0.3, 3), "token_mean", (1e-4, "k3", "loss")),
]


@pytest.mark.parametrize("cells", ROWS, ids=[row[0] for row in ROWS])
def test_rows(algorithm, cells):
    assert {row[0] for row in ROWS} == set(PRESETS)
    preset, samples, updates, advantage, loss, aggregation, kl = cells
    row = algorithm(f"preset={preset}")
    assert row.warnings == ()
    assert row.estimator.formula in describe(row) and row.paper in describe(row)
    assert (row.samples_per_prompt, row.updates_per_step) == (samples, updates)
    assert (row.advantage, row.estimator.options) == advantage
    assert (row.policy_loss, row.loss.options) == loss
    assert row.aggregation == aggregation
    assert (row.kl.coef, row.kl.kind, row.kl.place) == kl
    assert row.needs_reference == (kl[0] > 0)
    # What few rows have.
    assert row.entropy_top == (0.2 if preset == "dapo_forking" else 0)
    assert row.filter.dynamic == (preset in ("dapo", "dapo_forking", "mini_o3"))
    assert (row.overlong.buffer > 0) == (preset in ("dapo", "dapo_forking"))
    assert row.reward_clip == ((-10, 10) if preset == "lmm_r1" else None)
    assert row.exclude_status == (("overturn",) if preset == "mini_o3" else ())
    assert row.needs_critic == (preset in ("ppo", "lmm_r1"))
    assert (row.entropy_coef, row.corrections, row.hot_first_token.temperature) == (0, (), 0)
    assert (row.denominator, row.drop_constant, row.adv_clip) == ("original", False, 0)


def test_dapo_has_the_pieces_of_its_paper(algorithm):
    row = algorithm("preset=dapo", max_tokens=20480)
    assert (row.filter.dynamic, row.filter.low, row.filter.high) == (True, 0.01, 0.99)
    assert (row.filter.max_rounds, row.filter.on_exhausted) == (10, "train_partial")
    assert (row.overlong.buffer, row.overlong.factor) == (4096, 1.0)
    assert algorithm("preset=dapo", max_tokens=2048).overlong.buffer == 409
    assert algorithm("preset=dapo", max_tokens=32768).overlong.buffer == 4096


def test_add_ons_are_laid_over_a_row(algorithm):
    row = algorithm("preset=[mini_o3,tis,fire,overturn_mask,entropy_top,dual_clip]")
    assert [(c.name, c.options) for c in row.corrections] == [("tis.token", {"low": 0, "high": 2})]
    hot = row.hot_first_token
    assert (hot.temperature, hot.first_token, hot.cap) == (10, "is", 2)
    assert (row.exclude_status, row.entropy_top) == (("overturn",), 0.2)
    assert row.loss.options["dual_clip"] == 3 and row.loss.options["clip_high"] == 0.3
    assert row.paper == "2509.07969, 2410.21236, 2509.07969, 2506.01939, 1912.09729"
    assert row.about == PRESETS["mini_o3"]["about"]
    assert "The safe start. Here with kl.coef=0.0. (arXiv" in describe(algorithm("kl.coef=0"))
    (icepop,) = algorithm("preset=[grpo,icepop]").corrections
    assert icepop.options == {"low": 0.5, "high": 5}
    bounded = algorithm("preset=[drpo,delta]").loss.options  # it replaces what bounds the same
    assert (bounded["delta"], bounded["dual_clip"]) == (4, 0)
    masks = algorithm("preset=[grpo,tis]", "correct=[seq_mask]")
    assert [c.name for c in masks.corrections] == ["seq_mask"]  # the config overrides any cell


# gpg has a limit of infinity, which args have no word for.
@pytest.mark.parametrize("preset", [*sorted(PRESETS.keys() - {"gpg"}), ("dapo", "tis")])
def test_the_cells_that_are_shown_are_all_of_the_row(preset):
    row = resolve(AlgorithmConfig(preset=preset), max_tokens=1024)
    batch = {"samples_per_prompt": row.samples_per_prompt, "updates_per_step": row.updates_per_step}
    over_grpo = resolve(AlgorithmConfig(**options_in_effect(row)), max_tokens=1024, **batch)
    over_grpo = over_grpo.model_copy(update={"reward_clip": row.reward_clip})
    assert resolved_options(over_grpo) == resolved_options(row)
