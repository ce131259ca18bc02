"""What is refused, and that what a refusal suggests is accepted."""

import pytest

from saccade.algorithms.describe import describe
from saccade.config.schema import AlgorithmConfig, options
from saccade.config.schema.section import extra

# What is written, what the refusal says of it, and what it says to write instead; "; " stands between options.
CONTRADICTIONS = [
    ("train.samples_per_prompt=1", "train.samples_per_prompt=1: advantage grpo", "train.samples_per_prompt=8"),
    ("preset=reinforce; filter.dynamic=true", "filter.dynamic would keep no group", "train.samples_per_prompt=8"),
    ("kl.kind=k1", "algorithm.kl.kind=k1", "kl.kind=k1+"),
    (
        "filter.dynamic=true; filter.low=0.9; filter.high=0.1",
        "algorithm.filter.low: 0.9 is not below 0.1",
        "filter.low=0.01; filter.high=0.99",
    ),
    ("overlong.buffer=2048", "algorithm.overlong.buffer=2048", "overlong.buffer=409"),
    ("args.dual_clip=0.5", "algorithm.args.dual_clip=0.5", "args.dual_clip=3"),
    ("args={dual_clip: 3, delta: 4}", "algorithm.args.delta=4", "args.dual_clip=3; args.delta=0"),
    ("entropy_target=0.2; entropy_range=[0.1,0.1]", "algorithm.entropy_range", "entropy_range=[0,0.05]"),
    ("entropy_target=0.2; entropy_coef=0.5", "algorithm.entropy_coef=0.5 is outside", "entropy_coef=0"),
    ("preset=dapo; exclude_status=[truncated]", "algorithm.exclude_status=[truncated]", "overlong.buffer=0"),
    ("correct=[tis.token,icepop]", "algorithm.correct: tis.token and icepop", "correct=[tis.token]"),
    ("policy_loss=vespo; correct=[tis.sequence]", "algorithm.correct: policy loss vespo", "correct=[tis.token]"),
    ("preset=drpo; kl.coef=0; args.drpo_kl_damp=0.75", "algorithm.args.drpo_kl_damp", "kl.coef=1e-4"),
    ("preset=gdpo; kl.coef=0.01; kl.place=reward", "algorithm.kl.place=reward", "kl.place=loss"),
    ("preset=max_rl; kl.coef=0.1; kl.place=reward", "needs rewards >= 0", "kl.place=loss"),
    ("kl.controller=adaptive; kl.horizon=1", "algorithm.kl.horizon=1 is so short", "kl.horizon=10240"),
    # corrections and their bounds
    ("correct=[reject.token.k1]", "reject.token.k1 needs low and high", "args={low: 0.97, high: 1.03}"),
    # old log-probs
    ("preset=rloo; old=detach", "algorithm.old=detach", "old=recompute"),
    ("old=detach; train.updates_per_step=4", "exact only with train.updates_per_step=1", "old=recompute"),
    # options that the functions of the row do not read
    ("policy_loss=pg; args.clip_low=0.1", "algorithm.args.clip_low: has no effect", "policy_loss=clip"),
    ("preset=rloo; args.std_eps=1e-4", "algorithm.args.std_eps: has no effect", "advantage=grpo"),
    ("args.fixed_length=9", "algorithm.args.fixed_length: has no effect", "aggregation=fixed"),
    ("policy_loss=cispo; args={weight_floor: 2, weight_cap: 1}", "floor: 2 is not below 1", "args.weight_floor=0"),
    ("preset=[gspo,dual_clip]", "dual_clip has no effect", "policy_loss=clip"),
    ("kl.kind=k2; args.kl_clamp=zero", "algorithm.args.kl_clamp: has no effect", "kl.kind=k3"),
    ("kl.coef=0; args.kl_clamp=zero", "algorithm.args.kl_clamp: has no effect", "kl.coef=0.01"),
    ("args.whiten=true", "algorithm.args.whiten: has no effect", "advantage=reinforce_pp_baseline"),
    (
        "preset=reinforce_pp; args={whiten: false, whiten_std: false}",
        "algorithm.args.whiten_std: has no effect",
        "args.whiten=true",
    ),
    ("policy_loss=sapo; args.clip=0.1", "algorithm.args.clip_low: has no effect", "policy_loss=clip"),
    ("args.reward_range=[0,2]", "algorithm.args.reward_range: has no effect", "advantage=drpo"),
    ("preset=drpo; args.reward_range=[2,1]", "algorithm.args.reward_range: 2", "args.reward_range=[0,1]"),
    # what says only what there is
    ("correct=[{name: opsm, high: 2, threshold: 0.1}]", "algorithm.correct: opsm has no high; it reads threshold", ""),
    ("correct=[{name: tis.token, high: -1}]", "algorithm.correct.high: expects at least 0", ""),
    ("args={adv_clip: 5}", "algorithm.args: adv_clip is an option: write algorithm.adv_clip=", ""),
    ("args={clip_hihg: 0.3}", "algorithm.args=clip_hihg: no such name; did you mean 'clip_high'?", ""),
    ("args={clip_high: wide}", "args.clip_high: expects a number, got 'wide' (its default is 0.2)", ""),
    ("args={clip_high: true}", "args.clip_high: expects a number, got 'true' (its default is 0.2)", ""),
    ("preset=ppo; args={gamma: 1.5}", "args.gamma: expects at most 1, got 1.5", ""),
    ("advantage=nowhere.py:name", "nowhere.py does not exist or is no .py file; write file.py:name", ""),
    ("filter.function=mine", "algorithm.filter.function=mine: no such function; write file.py:name", ""),
    ("preset=[grpo,tiss]", "did you mean 'tis'?", ""),
    ("preset=gropo", "algorithm.preset=gropo: no such name; did you mean 'grpo'? ", ""),
    ("kl.kind=k33", "algorithm.kl.kind=k33: no such name; did you mean 'k3'? ", ""),
    ("correct=[tis.tokens]", "algorithm.correct=tis.tokens: no such name; did you mean 'tis.token'? ", ""),
    ("exclude_status=[overturned]", "exclude_status=overturned: no such name; did you mean 'overturn'? ", ""),
    ("preset=tis", "is added to a row, as in [grpo, tis]", ""),
]
# For each condition of the schema: an option, set where it does nothing, and the way out.
UNUSED = [
    ("preset=dapo; kl.kind=k3", "kl.kind", "kl.coef=0.01"),
    ("preset=rloo; kl.ratio_correct=true", "kl.ratio_correct", "kl.coef=0.01; kl.place=loss"),
    ("kl.target=0.2", "kl.target", "kl.controller=adaptive"),
    ("kl.update_every=9", "kl.update_every", "kl.update=copy"),
    ("kl.update=copy; kl.ema=0.5", "kl.ema", "kl.update=ema"),
    ("filter.low=0.1", "filter.low", "filter.dynamic=true"),
    ("overlong.factor=2", "overlong.factor", "overlong.buffer=512"),
    (
        "preset=ppo; exclude_status=[void]; excluded_in_baseline=true",
        "excluded_in_baseline",
        "advantage=grpo; train.samples_per_prompt=8",
    ),
    ("excluded_in_baseline=true", "excluded_in_baseline", "exclude_status=[overturn]"),
    ("entropy_step=0.01", "entropy_step", "entropy_target=0.2"),
    ("entropy_scope=sequence", "entropy_scope", "entropy_top=0.2"),
    ("self_normalise=true; correct=[seq_mask]", "self_normalise", "correct=[tis.token]"),
    ("denominator=kept", "denominator", "entropy_top=0.2"),
    ("hot_first_token.top_k=5", "hot_first_token.top_k", "hot_first_token.temperature=10"),
    (
        "preset=[grpo,fire]; hot_first_token.first_token=mask; hot_first_token.cap=3",
        "hot_first_token.cap",
        "hot_first_token.first_token=is",
    ),
    ("critic.lr=1e-5", "critic.lr", "advantage=gae"),
]


def test_each_condition_is_among_the_refusals():
    conditions = {name: extra(field)["when"] for name, field in options(AlgorithmConfig)}
    seen = {condition for _, name, _ in UNUSED for condition in conditions[name]}
    assert seen == {condition for when in conditions.values() for condition in when}


@pytest.mark.parametrize(
    ("overrides", "says", "works"),
    CONTRADICTIONS + [(given, f"algorithm.{name}: has no effect", works) for given, name, works in UNUSED],
)
def test_a_refusal_names_the_field_and_what_works(algorithm, refused, overrides, says, works):
    message = refused(*overrides.split("; "))
    assert says in message
    works = works.split("; ") if works else []
    assert all((w if w.startswith("train.") else f"algorithm.{w}") in message for w in works), message
    if works:
        algorithm(*overrides.split("; "), *works)


def test_add_ons_go_with_rows_of_one_update(algorithm, refused):
    for preset in ("gpg", "opo", "r1v"):
        assert algorithm(f"preset={preset}").old == "detach"
        assert [c.name for c in algorithm(f"preset=[{preset},tis]").in_loss] == ["tis.token"]
        assert "use train.updates_per_step=1" in refused(f"preset={preset}", updates_per_step=2)


def test_a_loss_away_from_its_aggregation_is_warned_of(algorithm):
    (warning,) = algorithm("preset=gspo", "aggregation=token_mean").warnings
    assert "seq_mean" in warning
    assert warning in describe(algorithm("preset=gspo", "aggregation=token_mean"))


def test_what_is_switched_off_is_no_misunderstanding(algorithm, refused):
    assert not algorithm("preset=ppo", "drop_constant=false").drop_constant
    assert "drop_constant" in refused("preset=ppo", "drop_constant=true")
