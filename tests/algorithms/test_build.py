from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from saccade.algorithms.advantages import compute
from saccade.algorithms.algorithm import AXES
from saccade.algorithms.build import from_config, old_mode, resolve, why_recompute
from saccade.algorithms.checks import CONDITIONS
from saccade.algorithms.corrections import CORRECTIONS, apply
from saccade.algorithms.describe import describe, explain
from saccade.algorithms.kl import KINDS
from saccade.algorithms.presets import ADD_ONS, PRESETS
from saccade.algorithms.table import call
from saccade.config import AlgorithmConfig, load
from saccade.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
MAX_TOKENS = 2048


def algorithm(*overrides: str, max_tokens: int = MAX_TOKENS, **changes):
    """Overrides of the `algorithm` section; those of others are written in full."""
    sections = ("train.", "rollout.", "algorithm.")
    full = [o if o.startswith(sections) else f"algorithm.{o}" for o in overrides]
    config = load(None, [f"rollout.max_tokens={max_tokens}", *full])
    train = config.train.model_copy(update=changes)
    return from_config(config.model_copy(update={"train": train}))


def refused(*overrides: str, **changes) -> str:
    with pytest.raises(ConfigError) as refusal:
        algorithm(*overrides, **changes)
    return str(refusal.value)


# -- presets ---------------------------------------------------------------------------------------

NONE = (0.0, "k3", "loss")
GRPO = ("grpo", {"std_eps": 1e-6})


def clip(low: float = 0.2, high: float = 0.2, dual: float = 0.0):
    return ("clip", {"clip_low": low, "clip_high": high, "dual_clip": dual, "delta": 0.0})


COV = {"cov_fraction": 2e-4}
BAND = {"clip_low": 0.2, "clip_high": 0.2, "cov_low": 1.0, "cov_high": 5.0}
WEIGHED = {"weight_bound": "cap", "weight_cap": 5.0, "clip_low": 0.2, "clip_high": 0.2}
DRIFT = {"clip_low": 0.2, "clip_high": 0.2, "drift_coef": 1e-3, "drift_cap": 2.0}
DRPO = {"std_eps": 1e-6, "drpo_renorm": "std", "drpo_kl_damp": 0.0}
GPG = {
    "gpg_alpha": "nonconstant",
    "gpg_alpha_max": float("inf"),
    "gpg_divisor": "one",
    "std_eps": 1e-6,
}

# preset, n, updates, advantage, policy loss, aggregation, KL (coefficient, kind, place)
ROWS = [
    ("ppo", 1, 1, ("gae", {"gamma": 1, "lam": 0.95}), clip(), "token_mean", (0.01, "k1", "reward")),
    ("grpo", 8, 1, GRPO, clip(), "seq_mean", (0.04, "k3", "loss")),
    ("dr_grpo", 8, 1, ("no_std", {}), clip(), "fixed", NONE),
    ("dapo", 16, 1, GRPO, clip(high=0.28), "token_mean", NONE),
    ("gspo", 8, 1, GRPO, ("gspo", {"clip_low": 3e-4, "clip_high": 4e-4}), "seq_mean", NONE),
    ("gmpo", 8, 1, GRPO, ("gmpo", {"clip_low": 0.4, "clip_high": 0.4}), "seq_mean", NONE),
    ("cispo", 16, 1, GRPO, ("cispo", WEIGHED), "token_mean", NONE),
    (
        *("sapo", 8, 1, GRPO),
        *(("sapo", {"tau_positive": 1.0, "tau_negative": 1.05}), "seq_mean", NONE),
    ),
    (
        *("cpgd", 8, 1, ("cpgd", {"cpgd_weight": "std", "std_eps": 1e-6})),
        *(("cpgd", DRIFT), "token_mean", NONE),
    ),
    ("rloo", 4, 1, ("rloo", {}), clip(), "token_mean", (0.01, "k1", "reward")),
    ("remax", 1, 1, ("remax", {}), ("pg", {}), "seq_sum", (0.01, "k1", "reward")),
    ("reinforce", 1, 1, ("reinforce", {"gamma": 1.0}), ("pg", {}), "token_mean", NONE),
    (
        *("reinforce_pp", 1, 1, ("reinforce_pp", {"gamma": 1.0})),
        *(clip(), "token_mean", (1e-3, "k1", "reward")),
    ),
    (
        *("reinforce_pp_baseline", 8, 1, ("reinforce_pp_baseline", {})),
        *(clip(), "token_mean", (1e-3, "k2", "loss")),
    ),
    (
        *("grpo_passk", 8, 1, ("grpo_passk", {"std_eps": 1e-6, "divide_by_std": True})),
        *(clip(), "token_mean", NONE),
    ),
    ("gpg", 8, 1, ("gpg", GPG), ("pg", {}), "token_mean", NONE),
    ("opo", 8, 1, ("opo", {}), ("pg", {}), "token_mean", NONE),
    ("drpo", 5, 1, ("drpo", DRPO), clip(0.2, 0.3, 3), "token_mean", (1e-4, "k3", "loss")),
    ("max_rl", 8, 1, ("max_rl", {}), clip(), "token_mean", NONE),
    (
        *("gdpo", 8, 1, ("gdpo", {"std_eps": 1e-6, "gdpo_whiten": "seq"})),
        *(clip(), "token_mean", NONE),
    ),
    ("clip_cov", 8, 1, GRPO, ("clip_cov", BAND | COV), "token_mean", NONE),
    ("kl_cov", 8, 1, GRPO, ("kl_cov", COV | {"cov_coef": 1.0}), "token_mean", NONE),
    ("dapo_forking", 16, 1, GRPO, clip(high=0.28), "token_mean", NONE),
    ("topr", 8, 1, ("no_std", {}), ("topr", {"topr_split": "reward"}), "token_mean", NONE),
    (
        *("kimi", 8, 1, ("no_std", {})),
        *(("kimi", {"kimi_tau": 0.1, "kimi_level": "token"}), "token_mean", NONE),
    ),
    (
        *("dppo_tv", 8, 1, ("no_std", {})),
        ("dppo_tv", {"clip_low": 0.2, "clip_high": 0.2, "weight_cap": 20.0}),
        *("token_mean", NONE),
    ),
    # other systems
    ("easyr1", 5, 4, GRPO, clip(0.2, 0.3, 3), "token_mean", (1e-2, "k3", "loss")),
    (
        *("lmm_r1", 16, 1, ("gae", {"gamma": 1.0, "lam": 1.0})),
        *(clip(), "token_mean", (0.01, "k1", "reward")),
    ),
    ("r1v", 8, 1, ("grpo", {"std_eps": 1e-4}), clip(), "seq_mean", (0.04, "k3", "loss")),
    ("mini_o3", 16, 8, GRPO, clip(0.2, 0.3), "seq_mean", NONE),
    ("lightrft", 8, 1, ("grpo", {"std_eps": 1e-9}), clip(), "seq_mean", (0.01, "k3", "loss")),
    ("qoq_med", 5, 1, ("drpo", DRPO), clip(0.2, 0.3, 3), "token_mean", (1e-4, "k3", "loss")),
]


def test_the_table_below_is_the_whole_table():
    assert {row[0] for row in ROWS} == set(PRESETS)


@pytest.mark.parametrize("cells", ROWS, ids=[row[0] for row in ROWS])
def test_rows(cells):
    preset, samples, updates, advantage, loss, aggregation, kl = cells
    row = algorithm(f"preset={preset}")
    assert (row.samples_per_prompt, row.updates_per_step) == (samples, updates)
    assert (row.advantage, row.advantage_options) == advantage
    assert (row.policy_loss, row.loss_options) == loss
    assert row.aggregation == aggregation
    assert (row.kl.coef, row.kl.kind, row.kl.place) == kl
    assert row.needs_reference == (kl[0] > 0)
    # What few rows have.
    assert row.whiten == (preset in ("ppo", "lmm_r1", "reinforce_pp", "reinforce_pp_baseline"))
    assert row.entropy.top == (0.2 if preset == "dapo_forking" else 0)
    assert row.filter.dynamic == (preset in ("dapo", "dapo_forking", "mini_o3"))
    assert (row.overlong.buffer > 0) == (preset in ("dapo", "dapo_forking"))
    assert row.reward_clip == ((-10, 10) if preset == "lmm_r1" else None)
    assert row.exclude_status == (("overturn",) if preset == "mini_o3" else ())
    assert row.needs_critic == (preset in ("ppo", "lmm_r1"))
    assert (row.entropy.coef, row.corrections, row.fire.temperature) == (0, (), 0)
    assert (row.denominator, row.drop_constant, row.adv_clip) == ("original", False, 0)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_row_resolves_and_crosses_a_process(preset):
    row = algorithm(f"preset={preset}")
    assert pickle.loads(pickle.dumps(row)) == row
    assert row.warnings == ()
    text = explain(preset)
    assert row.advantage in text and row.estimator.formula in text and row.paper in text


def test_a_critic_has_the_numbers_of_its_paper():
    critic = algorithm("preset=ppo").critic
    assert (critic.lr, critic.clip, critic.warmup_steps) == (9e-6, 0.2, 0)
    assert (critic.bootstrap_truncated, critic.path) == (False, None)


def test_strictly_on_policy_rows_refuse_more_updates():
    for preset in ("gpg", "opo", "r1v"):
        assert algorithm(f"preset={preset}").old == "detach"
        assert "train.updates_per_step=4" in refused(f"preset={preset}", updates_per_step=4)


def test_lmm_r1_keeps_its_eps_for_the_estimators_that_divide():
    for advantage, options in (("grpo", {"std_eps": 1e-9}), ("rloo", {}), ("no_std", {})):
        row = algorithm("preset=lmm_r1", f"advantage={advantage}")
        assert row.advantage_options == options and not row.whiten
        assert row.kl_in_reward and row.reward_clip == (-10, 10)
    assert algorithm("preset=lmm_r1", "advantage=reinforce_pp").whiten


def test_dapo_has_the_pieces_of_its_paper():
    row = algorithm("preset=dapo", max_tokens=20480)
    assert (row.filter.dynamic, row.filter.low, row.filter.high) == (True, 0.01, 0.99)
    assert (row.filter.max_rounds, row.filter.on_exhausted) == (10, "train_partial")
    assert (row.overlong.buffer, row.overlong.factor) == (4096, 1.0)
    assert algorithm("preset=dapo", max_tokens=2048).overlong.buffer == 409
    assert algorithm("preset=dapo", max_tokens=32768).overlong.buffer == 4096


def test_add_ons_are_laid_over_a_row():
    row = algorithm("preset=mini_o3+tis+fire+overturn_mask+entropy_top+dual_clip")
    assert [(c.name, c.options) for c in row.corrections] == [("tis.token", {"low": 0, "high": 2})]
    assert (row.fire.temperature, row.fire.first_token, row.fire.cap) == (10, "is", 2)
    assert (row.exclude_status, row.entropy.top) == (("overturn",), 0.2)
    assert row.loss_options["dual_clip"] == 3 and row.loss_options["clip_high"] == 0.3
    assert row.paper == "2509.07969, 2410.21236, 2509.07969, 2506.01939, 1912.09729"
    assert row.about == PRESETS["mini_o3"]["about"]
    (icepop,) = algorithm("preset=grpo+icepop").corrections
    assert icepop.options == {"low": 0.5, "high": 5}
    assert algorithm("preset=grpo+delta").loss_options["delta"] == 4
    masks = algorithm("preset=grpo+tis", "correct=[seq_mask]")
    assert [c.name for c in masks.corrections] == ["seq_mask"]  # the config overrides any cell


# -- options ---------------------------------------------------------------------------------------


def test_a_row_s_cells_hold_only_for_its_own_entry():
    assert algorithm("policy_loss=gspo").loss_options["clip_high"] == 4e-4
    assert algorithm("preset=dapo", "policy_loss=gspo").aggregation == "seq_mean"
    assert algorithm("preset=rloo", "kl.place=loss").kl.kind == "k3"
    assert algorithm("kl.place=reward").kl.kind == "k1"
    assert algorithm("preset=dapo", "clip_low=0.1").loss_options["clip_high"] == 0.28
    assert algorithm("preset=r1v", "advantage=cpgd").advantage_options["std_eps"] == 1e-6


def test_one_width_sets_both_and_each_can_be_set_beside_it():
    for preset in ("grpo", "dapo"):
        options = algorithm(f"preset={preset}", "clip=0.1").loss_options
        assert (options["clip_low"], options["clip_high"]) == (0.1, 0.1)
    options = algorithm("clip=0.1", "clip_high=0.3").loss_options
    assert (options["clip_low"], options["clip_high"]) == (0.1, 0.3)


def test_a_zero_switches_a_cell_off():
    assert algorithm("preset=drpo", "dual_clip=0").loss_options["dual_clip"] == 0
    assert algorithm("preset=dapo_forking", "entropy_top=0").entropy.top == 0
    assert algorithm("preset=dapo", "overlong.buffer=0").overlong.buffer == 0
    assert not algorithm("preset=dapo", "filter.dynamic=false").filter.dynamic


def test_fixed_length_is_the_longest_response_unless_given():
    def length(*overrides: str) -> int:
        row = algorithm("preset=dr_grpo", *overrides, max_tokens=512)
        return row.aggregation_options["fixed_length"]

    assert (length(), length("fixed_length=100")) == (512, 100)


def test_the_whole_config_says_how_it_trains():
    config = load(None, ["train.updates_per_step=4", "train.samples_per_prompt=5"])
    row = from_config(config)
    assert (row.old, row.samples_per_prompt, row.overlong.max_tokens) == ("recompute", 5, 2048)


def test_a_row_makes_at_most_one_update_per_prompt():
    assert algorithm("preset=mini_o3", prompts_per_step=3).updates_per_step == 3
    assert algorithm("preset=mini_o3", updates_per_step=2).updates_per_step == 2


def test_every_option_of_a_built_in_function_is_a_field():
    for table in AXES.values():
        for entry in table.values():
            assert set(entry.options) <= set(AlgorithmConfig.model_fields)


# -- refusals --------------------------------------------------------------------------------------

MISSPELT = [  # field, wrong, right
    ("preset", "gropo", "grpo"),
    ("preset", "grpo+tiss", "grpo+tis"),
    ("advantage", "rlo", "rloo"),
    ("policy_loss", "clipp", "clip"),
    ("aggregation", "tokenmean", "token_mean"),
    ("kl.kind", "k33", "k3"),
    ("correct", "tis.tokens", "tis.token"),
    ("exclude_status", "overturned", "overturn"),
]
# What is written, what the refusal says of it, and what it says to write instead.
CONTRADICTIONS = [
    (
        ["train.samples_per_prompt=1"],
        "train.samples_per_prompt=1: advantage grpo",
        ["train.samples_per_prompt=8"],
    ),
    (["train.samples_per_prompt=1"], "advantage grpo", ["algorithm.preset=reinforce_pp"]),
    (
        ["preset=reinforce", "filter.dynamic=true"],
        "algorithm.filter.dynamic would keep no group",
        ["train.samples_per_prompt=8"],
    ),
    (
        ["preset=reinforce", "filter.dynamic=true"],
        "train.samples_per_prompt=1",
        ["algorithm.filter.dynamic=false"],
    ),
    (["kl.kind=k1"], "algorithm.kl.kind=k1", ["algorithm.kl.kind=k1+"]),
    (["kl.kind=abs"], "algorithm.kl.kind=abs", ["algorithm.kl.place=reward"]),
    (
        ["filter.dynamic=true", "filter.low=0.9", "filter.high=0.1"],
        "algorithm.filter.low=0.9",
        ["algorithm.filter.low=0.01", "algorithm.filter.high=0.99"],
    ),
    (["overlong.buffer=2048"], "algorithm.overlong.buffer=2048", ["algorithm.overlong.buffer=409"]),
    (
        ["preset=dapo", "exclude_status=[truncated]"],
        "algorithm.exclude_status=[truncated]",
        ["algorithm.overlong.buffer=0"],
    ),
    (
        ["preset=dapo", "exclude_status=[truncated]"],
        "algorithm.exclude_status=[truncated]",
        ["algorithm.exclude_status=[]"],
    ),
    (["dual_clip=0.5"], "algorithm.dual_clip=0.5", ["algorithm.dual_clip=3"]),
    (["dual_clip=1"], "algorithm.dual_clip=1", ["algorithm.dual_clip=3"]),
    (["delta=1"], "algorithm.delta=1", ["algorithm.delta=3"]),
    (
        ["dual_clip=3", "delta=4"],
        "algorithm.delta=4",
        ["algorithm.dual_clip=3", "algorithm.delta=0"],
    ),
    (
        ["preset=drpo+delta"],
        "algorithm.delta=4",
        ["algorithm.dual_clip=3", "algorithm.delta=0"],
    ),
    (
        ["entropy_target=0.2", "entropy_range=[0.1,0.1]"],
        "algorithm.entropy_range",
        ["algorithm.entropy_range=[0,0.05]"],
    ),
    (
        ["preset=drpo", "reward_range=[1,0]"],
        "algorithm.reward_range",
        ["algorithm.reward_range=[0,1]"],
    ),
    (
        ["correct=[tis.token,icepop]"],
        "algorithm.correct: tis.token and icepop",
        ["algorithm.correct=[tis.token]"],
    ),
    (
        ["correct=[{name: icepop, low: 2, high: 1}]"],
        "algorithm.correct: icepop has low=2",
        ["algorithm.correct=[{name: icepop, low: 0.97, high: 1.03}]"],
    ),
    (
        ["preset=drpo", "kl.coef=0", "drpo_kl_damp=0.75"],
        "algorithm.drpo_kl_damp",
        ["algorithm.kl.coef=1e-4"],
    ),
    (
        ["preset=drpo", "kl.coef=0", "drpo_kl_damp=0.75"],
        "algorithm.drpo_kl_damp",
        ["algorithm.drpo_kl_damp=0"],
    ),
    (
        ["preset=gdpo", "kl.coef=0.01", "kl.place=reward"],
        "algorithm.kl.place=reward",
        ["algorithm.kl.place=loss"],
    ),
    # corrections and their bounds
    (
        ["correct=[reject.token.k1]"],
        "algorithm.correct: reject.token.k1 needs low and high",
        ["algorithm.correct=[{name: reject.token.k1, low: 0.97, high: 1.03}]"],
    ),
    (
        ["correct=[{name: reject.seq_sum.k1, high: 1.1}]"],
        "reject.seq_sum.k1 needs low",
        ["algorithm.correct=[{name: reject.seq_sum.k1, high: 1.1, low: 0.97}]"],
    ),
    (
        ["correct=[reject.seq_max.k3]"],
        "algorithm.correct: reject.seq_max.k3 needs high",
        ["algorithm.correct=[{name: reject.seq_max.k3, high: 1.03}]"],
    ),
    (
        ["correct=[opsm]"],
        "algorithm.correct: opsm needs threshold",
        ["algorithm.correct=[{name: opsm, threshold: 0.01}]"],
    ),
    # old log-probs
    (["preset=rloo", "old=detach"], "algorithm.old=detach", ["algorithm.old=recompute"]),
    (["preset=rloo", "old=rollout"], "algorithm.old=rollout", ["algorithm.old=recompute"]),
    (
        ["old=detach", "train.updates_per_step=4"],
        "train.updates_per_step=4",
        ["algorithm.old=recompute"],
    ),
    # options that the functions of the row do not read
    (["policy_loss=pg", "clip_low=0.1"], "algorithm.clip_low", ["algorithm.policy_loss=clip"]),
    (["preset=rloo", "std_eps=1e-4"], "algorithm.std_eps", ["algorithm.advantage=grpo"]),
    (["fixed_length=9"], "algorithm.fixed_length", ["algorithm.aggregation=fixed"]),
    (["policy_loss=gspo", "dual_clip=3"], "algorithm.dual_clip", ["algorithm.policy_loss=clip"]),
    (["preset=gspo+dual_clip"], "+dual_clip has no effect", ["algorithm.policy_loss=clip"]),
    (["preset=cispo+delta"], "+delta has no effect", ["algorithm.policy_loss=clip"]),
]
# For each row of CONDITIONS: an option of it, set where it does nothing, and the way out.
UNUSED = [
    (["preset=dapo", "kl.kind=k3"], "kl.kind", ["algorithm.kl.coef=0.01"]),
    (["preset=dapo", "kl.place=reward"], "kl.place", ["algorithm.kl.coef=0.01"]),
    (["preset=dapo", "kl.clamp=zero"], "kl.clamp", ["algorithm.kl.coef=0.01"]),
    (["preset=dapo", "kl.controller=adaptive"], "kl.controller", ["algorithm.kl.coef=0.01"]),
    (["preset=dapo", "kl.update=copy"], "kl.update", ["algorithm.kl.coef=0.01"]),
    (
        ["kl.kind=k2", "kl.clamp=zero"],
        "kl.clamp",
        ["algorithm.kl.kind=k3", "algorithm.kl.place=loss"],
    ),
    (
        ["preset=rloo", "kl.clamp=zero"],
        "kl.clamp",
        ["algorithm.kl.kind=k3", "algorithm.kl.place=loss"],
    ),
    (
        ["preset=rloo", "kl.ratio_correct=true"],
        "kl.ratio_correct",
        ["algorithm.kl.coef=0.01", "algorithm.kl.place=loss"],
    ),
    (["kl.target=0.2"], "kl.target", ["algorithm.kl.controller=adaptive"]),
    (["kl.horizon=500"], "kl.horizon", ["algorithm.kl.controller=adaptive"]),
    (["kl.update_every=9"], "kl.update_every", ["algorithm.kl.update=copy"]),
    (["kl.update=copy", "kl.ema=0.5"], "kl.ema", ["algorithm.kl.update=ema"]),
    (["filter.low=0.1"], "filter.low", ["algorithm.filter.dynamic=true"]),
    (["filter.high=0.9"], "filter.high", ["algorithm.filter.dynamic=true"]),
    (["filter.max_rounds=3"], "filter.max_rounds", ["algorithm.filter.dynamic=true"]),
    (["filter.on_exhausted=stop"], "filter.on_exhausted", ["algorithm.filter.dynamic=true"]),
    (["filter.keep_surplus=true"], "filter.keep_surplus", ["algorithm.filter.dynamic=true"]),
    (["overlong.factor=2"], "overlong.factor", ["algorithm.overlong.buffer=512"]),
    (
        ["preset=reinforce", "drop_constant=true"],
        "drop_constant",
        ["algorithm.advantage=grpo", "train.samples_per_prompt=8"],
    ),
    (
        ["preset=ppo", "exclude_status=[void]", "excluded_in_baseline=true"],
        "excluded_in_baseline",
        ["algorithm.advantage=grpo", "train.samples_per_prompt=8"],
    ),
    (
        ["excluded_in_baseline=true"],
        "excluded_in_baseline",
        ["algorithm.exclude_status=[overturn]"],
    ),
    (["whiten=true"], "whiten", ["algorithm.advantage=reinforce_pp"]),
    (
        ["preset=reinforce", "whiten_std=false"],
        "whiten_std",
        ["algorithm.advantage=reinforce_pp"],
    ),
    (
        ["preset=reinforce_pp", "whiten=false", "whiten_std=false"],
        "whiten_std",
        ["algorithm.whiten=true"],
    ),
    (["policy_loss=sapo", "clip=0.1"], "clip", ["algorithm.policy_loss=clip"]),
    (["preset=cispo", "clip=0.1"], "clip", ["algorithm.weight_bound=around_one"]),
    (["preset=cispo", "clip_low=0.1"], "clip_low", ["algorithm.weight_bound=around_one"]),
    (["preset=cispo", "clip_high=0.1"], "clip_high", ["algorithm.weight_bound=around_one"]),
    (
        ["preset=cispo", "weight_bound=delta", "weight_cap=4"],
        "weight_cap",
        ["algorithm.weight_bound=cap"],
    ),
    (["reward_range=[0,2]"], "reward_range", ["algorithm.advantage=drpo"]),
    (["entropy_step=0.01"], "entropy_step", ["algorithm.entropy_target=0.2"]),
    (["entropy_range=[0,0.1]"], "entropy_range", ["algorithm.entropy_target=0.2"]),
    (["entropy_scope=sequence"], "entropy_scope", ["algorithm.entropy_top=0.2"]),
    (["self_normalise=true"], "self_normalise", ["algorithm.correct=[tis.token]"]),
    (
        ["self_normalise=true", "correct=[seq_mask]"],
        "self_normalise",
        ["algorithm.correct=[tis.token]"],
    ),
    (["denominator=kept"], "denominator", ["algorithm.entropy_top=0.2"]),
    (["fire.top_k=5"], "fire.top_k", ["algorithm.fire.temperature=10"]),
    (["fire.first_token=mask"], "fire.first_token", ["algorithm.fire.temperature=10"]),
    (["fire.cap=3"], "fire.cap", ["algorithm.fire.temperature=10"]),
    (
        ["preset=grpo+fire", "fire.first_token=mask", "fire.cap=3"],
        "fire.cap",
        ["algorithm.fire.first_token=is"],
    ),
    (["critic.lr=1e-5"], "critic.lr", ["algorithm.advantage=gae"]),
    (["critic.clip=0.5"], "critic.clip", ["algorithm.advantage=gae"]),
    (["critic.warmup_steps=5"], "critic.warmup_steps", ["algorithm.advantage=gae"]),
    (
        ["critic.bootstrap_truncated=true"],
        "critic.bootstrap_truncated",
        ["algorithm.advantage=gae"],
    ),
    (["critic.path=somewhere"], "critic.path", ["algorithm.advantage=gae"]),
]


def test_each_condition_is_among_the_refusals():
    conditions = {name for names, *_ in CONDITIONS for name in names}
    assert {name for _, name, _ in UNUSED} == conditions
    for names, _, reason, remedy in CONDITIONS:
        found = [w for w in UNUSED if w[1] in names and all(part in remedy for part in w[2])]
        assert found, (reason, remedy)


@pytest.mark.parametrize(
    ("overrides", "says", "works"),
    CONTRADICTIONS
    + [
        (given, f"algorithm.{name} is set but has no effect", works)
        for given, name, works in UNUSED
    ],
)
def test_a_refusal_names_the_field_and_what_works(overrides, says, works):
    message = refused(*overrides)
    assert says in message
    assert all(override in message for override in works), message
    algorithm(*overrides, *works)


@pytest.mark.parametrize(("field", "wrong", "right"), MISSPELT)
def test_a_name_that_is_nearly_right(field, wrong, right):
    listed = field in ("correct", "exclude_status")
    message = refused(f"{field}=[{wrong}]" if listed else f"{field}={wrong}")
    assert f"algorithm.{field}={wrong}" in message
    assert f"did you mean '{right.rpartition('+')[2]}'? Known: " in message
    algorithm(f"{field}=[{right}]" if listed else f"{field}={right}")


def test_the_refusals_that_say_only_what_there_is():
    message = refused("correct=[{name: opsm, high: 2, threshold: 0.1}]")
    assert "algorithm.correct: opsm has no high; it reads threshold" in message
    message = refused("correct=[{name: icepop, threshold: 0.1}]")
    assert "icepop has no threshold; it reads low, high" in message
    message = refused("args={clip_lo: 0.1}")
    assert "algorithm.args=clip_lo" in message and "'clip_low'" in message
    message = refused("args={clip_low: 0.1}")
    assert "algorithm.args: clip_low is an option: write algorithm.clip_low=" in message
    message = refused("advantage=nowhere.py:name")
    assert "algorithm.advantage: file " in message and "nowhere.py does not exist" in message
    assert "algorithm.filter.function=mine" in refused("filter.function=mine")
    for given in ("advantage=nowhere.py:name", "filter.function=mine"):
        assert "write file.py:name" in refused(given)


def test_old_log_probs_that_would_be_wrong_are_refused():
    for updates, epochs in ((4, 1), (1, 2)):
        with pytest.raises(ConfigError, match=r"use 1 and 1, or algorithm\.old=recompute"):
            old_mode("detach", updates, epochs)
    for old in ("detach", "rollout"):
        assert "algorithm.kl.place=reward needs old log-probs" in refused(
            "preset=rloo", f"old={old}"
        )


def test_warnings():
    (warning,) = algorithm("delta=1.1").warnings
    assert "algorithm.delta=1.1" in warning and "delta=4" in warning
    assert algorithm("delta=4").warnings == ()
    (warning,) = algorithm("preset=gspo", "aggregation=token_mean").warnings
    assert "seq_mean" in warning
    assert warning in describe(algorithm("preset=gspo", "aggregation=token_mean"))


# -- old log-probs ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "updates", "epochs", "mode"),
    [
        ([], 1, 1, "detach"),
        ([], 4, 1, "recompute"),
        ([], 1, 2, "recompute"),
        (["old=recompute"], 1, 1, "recompute"),
        (["old=rollout"], 4, 1, "rollout"),
        (["preset=rloo"], 1, 1, "recompute"),
        (["preset=rloo", "kl.coef=0"], 1, 1, "detach"),
        (["preset=gpg"], 1, 1, "detach"),
        (["preset=easyr1"], None, 1, "recompute"),
    ],
)
def test_old_log_probs(overrides, updates, epochs, mode):
    row = algorithm(*overrides, updates_per_step=updates, epochs_per_batch=epochs)
    assert row.old == mode


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ([], None),
        (["preset=rloo"], "algorithm.kl.place=reward"),
        (["entropy_top=0.2"], "algorithm.entropy_top=0.2"),
        (["preset=kl_cov"], "algorithm.policy_loss=kl_cov"),
        (["preset=clip_cov"], "algorithm.policy_loss=clip_cov"),
        (["correct=[tis.token,seq_mask]"], "algorithm.correct=[tis.token, seq_mask]"),
        (["correct=[tis.token]", "self_normalise=true"], "algorithm.correct=[tis.token]"),
        (["preset=drpo", "drpo_kl_damp=0.75"], "algorithm.drpo_kl_damp"),
        (["preset=dapo", "filter.keep_surplus=true"], "algorithm.filter.keep_surplus"),
        (["preset=grpo+fire"], "algorithm.fire.first_token=is"),
        # These need nothing before training.
        (["preset=grpo+fire", "fire.first_token=mask"], None),
        (["correct=[{name: opsm, threshold: 0.1}]"], None),
        (["preset=drpo"], None),
        (["entropy_coef=0.01"], None),
        (["kl.ratio_correct=true"], None),
    ],
)
def test_what_needs_old_log_probs_before_training(overrides, reason):
    row = algorithm(*overrides)
    why = why_recompute(row)
    assert why == (reason and f"{reason} needs old log-probs before training")
    assert row.old == ("detach" if reason is None else "recompute")
    if reason is not None:
        for old in ("detach", "rollout"):
            assert why in refused(*overrides, f"old={old}")


# -- functions of your own -------------------------------------------------------------------------

MINE = '''
from saccade.algorithms.corrections import Correction
from saccade.algorithms.table import Entry

def squared(new, inputs, *, clip_low=0.1, sharpness=2.0):
    """|new - old|^sharpness"""
    return (new - inputs.old).abs() ** sharpness * clip_low, {}

def bare(new, inputs, *, beta):
    return beta * new, {}

def tall(new, inputs, *, gamma=0.5):
    return gamma * new, {}

def halves(lengths, trajectory, group, *, fixed_length):
    return (lengths > 0) * 0.5 / fixed_length

def distance(new, ref, *, steepness=1.0):
    """steepness u^2"""
    return steepness * (new - ref) ** 2

def linear(new, ref):
    return new - ref

unfit = Entry(function=linear, formula="u", in_loss=False)

def near(mismatch, *, high, margin=0.0):
    return Correction(keep=mismatch.delta.abs() <= high + margin)

def far(mismatch, *, cut):
    return Correction(keep=mismatch.delta.abs() > cut)

def weigh(mismatch):
    return Correction(weights=mismatch.ratio)

weighing = Entry(function=weigh, formula="exp(delta)", weighs=True)
number = 3
'''


@pytest.fixture
def mine(tmp_path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def test_an_advantage_of_your_own(golden):
    path = ROOT / "examples" / "my_advantage.py"
    row = algorithm(f"advantage={path}:median")
    inputs = golden.members(rewards=(0, 0, 1, 5), groups=torch.tensor([0, 0, 0, 0]))
    values = compute(row.estimator, inputs).values
    assert values[golden.position == 0].tolist() == [-0.5, -0.5, 0.5, 4.5]
    constant = compute(row.estimator, golden.members(rewards=(1, 1, 0, 1)))
    assert constant.values[golden.sequence < 2].abs().sum() == 0
    assert "R - median_g" in describe(row)
    assert "compares the members of a group" in refused(
        f"advantage={path}:median", samples_per_prompt=1
    )
    assert "did you mean 'median'" in refused(f"advantage={path}:medain")


def test_a_bare_function_has_its_own_keyword_parameters_as_options(mine, monkeypatch):
    monkeypatch.chdir(mine.parent)
    row = algorithm(
        "policy_loss=mine.py:squared",
        "aggregation=mine.py:halves",
        "clip_low=0.3",
        "fixed_length=2",
    )
    monkeypatch.chdir(mine.parent.parent)  # found again from any folder
    assert row.loss_options == {"clip_low": 0.3, "sharpness": 2.0}
    assert row.loss.formula == "|new - old|^sharpness"
    lengths = torch.tensor([3, 0])
    scale = call(row.aggregate.function, lengths, None, None, options=row.aggregation_options)
    assert scale.tolist() == [0.25, 0.0]
    assert "fixed_length=2" in describe(row) and "sharpness=2" in describe(row)


def test_options_of_your_own_are_given_by_args(mine):
    row = algorithm(f"policy_loss={mine}:squared", "args={sharpness: 3}")
    assert row.loss_options == {"clip_low": 0.1, "sharpness": 3}
    assert row.advantage_options == {"std_eps": 1e-6}
    message = refused(f"policy_loss={mine}:squared", "args={sharpnes: 3}")
    assert "algorithm.args=sharpnes" in message and "'sharpness'" in message
    # An option of the built-in losses that this one does not have.
    message = refused(f"policy_loss={mine}:squared", "clip_high=0.3")
    assert "algorithm.clip_high is set but has no effect" in message
    # One that only estimators have, but this loss reads.
    assert algorithm(f"policy_loss={mine}:tall", "gamma=0.9").loss_options == {"gamma": 0.9}


def test_an_option_without_a_default_must_be_given(mine):
    message = refused(f"policy_loss={mine}:bare")
    assert "needs beta" in message and "algorithm.args={beta: 1}" in message
    assert algorithm(f"policy_loss={mine}:bare", "args={beta: 1}").loss_options == {"beta": 1}
    assert ":bare needs beta" in refused(f"aggregation={mine}:bare")
    message = refused(f"correct=[{mine}:far]")
    assert "far needs cut" in message and "algorithm.args={cut: 1}" in message
    (correction,) = algorithm(f"correct=[{mine}:far]", "args={cut: 1}").corrections
    assert correction.options == {"cut": 1}


def test_a_kl_of_your_own(mine):
    row = algorithm(f"kl.kind={mine}:distance", "args={steepness: 2}")
    assert row.kl.kind == f"{mine}:distance" and row.kl.options == {"steepness": 2}
    gap = torch.tensor([0.5, -1.0])
    found = call(row.divergence.function, gap, 0 * gap, options=row.kl.options)
    assert found.tolist() == [0.5, 2.0]
    assert "steepness u^2" in describe(row)
    assert "algorithm.kl.clamp" in refused(f"kl.kind={mine}:distance", "kl.clamp=zero")
    message = refused(f"kl.kind={mine}:unfit")
    assert "its gradient does not lead to the reference" in message
    assert algorithm(f"kl.kind={mine}:unfit", "kl.place=reward").kl_in_reward
    assert "did you mean 'distance'" in refused(f"kl.kind={mine}:distanc")
    assert "number in" in refused(f"kl.kind={mine}:number")


def test_a_correction_of_your_own(mine, golden):
    message = refused(f"correct=[{mine}:near]")
    assert f"near, high: {1.03}}}]" in message
    row = algorithm(f"correct=[{{name: {mine}:near, high: 0.03}}]", "args={margin: 0.01}")
    (correction,) = row.corrections
    assert correction.options == {"high": 0.03, "margin": 0.01} and row.old == "recompute"
    found = apply([(correction.entry, correction.options)], golden.mismatch)
    assert torch.equal(found.keep, golden.mismatch.delta.abs() <= 0.04)
    message = refused(f"correct=[{{name: {mine}:near, low: 0.1, high: 1}}]")
    assert "has no low; it reads high, margin" in message
    message = refused(f"correct=[tis.token,{mine}:weighing]")
    assert "both weigh tokens" in message and "algorithm.correct=[tis.token]" in message
    assert algorithm(f"correct=[{mine}:weighing]", "self_normalise=true").self_normalise


@pytest.mark.parametrize("name", CORRECTIONS)
def test_every_correction_can_be_chosen(name):
    needed = {"low": 0.9, "high": 1.1, "threshold": 0.1}
    bounds = {key: needed[key] for key in CORRECTIONS[name].options}
    config = AlgorithmConfig(correct=[{"name": name, **bounds}])
    row = resolve(config, max_tokens=9)
    assert row.corrections[0].options == bounds
    assert row.old == ("detach" if name == "opsm" else "recompute")
    assert CORRECTIONS[name].formula in describe(row)


# -- in words --------------------------------------------------------------------------------------


def test_the_listing_names_every_row_and_add_on():
    rows, _, extras = explain().partition("\n\n")
    assert [line.split()[0] for line in rows.splitlines()] == list(PRESETS)
    assert [line.split()[0] for line in extras.splitlines()[1:]] == [f"+{n}" for n in ADD_ONS]


def test_resolving_and_describing_import_no_torch():
    code = (
        "import sys; from saccade.algorithms.describe import explain; explain('dapo');"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_no_algorithm_has_code_of_its_own():
    for file in (ROOT / "saccade").rglob("*.py"):
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.strip().startswith(("if ", "elif ")):
                assert not any(f'"{name}"' in line for name in PRESETS), (file, line)


def test_the_documentation_names_every_row_and_entry():
    text = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    names = [*PRESETS, *KINDS, *(name for table in AXES.values() for name in table)]
    assert [name for name in names if f"`{name}`" not in text] == []


def test_default_config_is_grpo():
    assert resolve(AlgorithmConfig(), max_tokens=9).preset == "grpo"
