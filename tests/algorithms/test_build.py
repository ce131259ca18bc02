from pathlib import Path

import pytest
import torch

from saccade.algorithms.advantages import compute
from saccade.algorithms.corrections import apply
from saccade.algorithms.describe import describe
from saccade.algorithms.table import find
from saccade.config.schema.presets import ADD_ONS, PRESETS
from saccade.errors import ConfigError
from saccade.plugins.more_algorithms.explain import explain
from saccade.recipes import run_parts

ROOT = Path(__file__).resolve().parents[2]


def test_cells_of_a_row_hold_for_its_own_entry_and_until_they_are_replaced(algorithm):
    assert algorithm("policy_loss=gspo").loss.options["clip_high"] == 4e-4
    assert algorithm("preset=dapo", "policy_loss=gspo").aggregation == "seq_mean"
    assert algorithm("preset=rloo", "kl.place=loss").kl.kind == "k3"
    assert algorithm("kl.place=reward").kl.kind == "k1"
    assert algorithm("preset=dapo", "args.clip_low=0.1").loss.options["clip_high"] == 0.28
    assert algorithm("preset=r1v", "advantage=cpgd").estimator.options["std_eps"] == 1e-6
    other = algorithm("preset=lmm_r1", "advantage=grpo")  # its eps is for all estimators that divide
    assert other.estimator.options == {"std_eps": 1e-9} and other.reward_clip == (-10, 10)
    assert algorithm("preset=dapo_forking", "entropy_top=0").entropy_top == 0
    assert algorithm("preset=dapo", "overlong.buffer=0").overlong.buffer == 0
    assert not algorithm("preset=dapo", "filter.dynamic=false").filter.dynamic
    assert algorithm("preset=mini_o3", prompts_per_step=3).updates_per_step == 3  # one for each prompt at most
    assert algorithm("preset=mini_o3", updates_per_step=2).updates_per_step == 2


@pytest.mark.parametrize(("overrides", "options"), [
    (["args.clip=0.1"], {"clip_low": 0.1, "clip_high": 0.1}),  # one width sets both
    (["preset=dapo", "args.clip=0.1"], {"clip_low": 0.1, "clip_high": 0.1}),
    (["args.clip=0.1", "args.clip_high=0.3"], {"clip_low": 0.1, "clip_high": 0.3}),  # and each can be set beside it
    (["preset=drpo", "args.dual_clip=0"], {"dual_clip": 0}),  # a zero switches a cell off
    (["preset=dr_grpo"], {"fixed_length": 2048}),  # the longest response
    (["preset=dr_grpo", "args.fixed_length=100"], {"fixed_length": 100}),
])  # fmt: skip
def test_options_of_functions(algorithm, overrides, options):
    row = algorithm(*overrides)
    assert options.items() <= (row.loss.options | row.aggregate.options).items()


def test_values_in_args_are_held_against_the_function(algorithm, refused):
    row = algorithm("preset=gpg", "args={gpg_divisor: std, gpg_alpha_max: 2}")
    assert row.estimator.options["gpg_divisor"] == "std"
    assert algorithm("policy_loss=vespo", "args.vespo_positive=[1,2]").loss.options["vespo_positive"] == (1, 2)
    for given, says in (
        ("gpg_divisor=stdd", "algorithm.args.gpg_divisor: expects 'one' or 'std'"),
        ("gpg_alpha_max=0", "algorithm.args.gpg_alpha_max: expects more than 0, got 0"),
        ("gpg_alpha_max=much", "algorithm.args.gpg_alpha_max: expects a number, got 'much'"),
    ):
        assert says in refused("preset=gpg", f"args.{given}")
    assert "algorithm.args=gpg_alfa: no such name; did you mean 'gpg_alpha'?" in refused(
        "preset=gpg", "args={gpg_alfa: one}"
    )


@pytest.mark.parametrize(("overrides", "reason"), [
    ([], None),
    (["preset=rloo"], "algorithm.kl.place=reward"),
    (["entropy_top=0.2"], "algorithm.entropy_top=0.2"),
    (["preset=kl_cov"], "algorithm.policy_loss=kl_cov"),
    (["correct=[tis.token,seq_mask]"], "algorithm.correct=[tis.token, seq_mask]"),
    (["correct=[tis.token]", "self_normalise=true"], "algorithm.correct=[tis.token]"),
    (["correct=[icepop]"], "algorithm.correct=[icepop]"),
    (["preset=drpo", "args.drpo_kl_damp=0.75"], "algorithm.args.drpo_kl_damp"),
    (["preset=dapo", "filter.keep_surplus=true"], "algorithm.filter.keep_surplus"),
    (["preset=[grpo,fire]"], "algorithm.hot_first_token.first_token=is"),
    # These need nothing before training.
    (["preset=[grpo,fire]", "hot_first_token.first_token=mask"], None),
    (["correct=[{name: opsm, threshold: 0.1}]"], None),
    (["correct=[tis.sequence]"], None),
])  # fmt: skip
def test_what_needs_old_log_probs_before_training(algorithm, refused, overrides, reason):
    assert algorithm(*overrides).old == ("detach" if reason is None else "recompute")
    for old in ("detach", "rollout") if reason else ():
        assert f"{reason} needs old log-probs before training" in refused(*overrides, f"old={old}")
    assert "algorithm.correct=[tis.token] needs old" in refused("correct=[tis.token]", "old=rollout")


def test_old_log_probs_of_several_updates(algorithm):
    assert algorithm(updates_per_step=4).old == algorithm("preset=easyr1").old == "recompute"
    assert algorithm("old=rollout", updates_per_step=4).old == "rollout"
    assert algorithm("preset=rloo", "kl.coef=0", updates_per_step=1).old == "detach"


@pytest.mark.parametrize(("overrides", "old", "chosen", "says"), [
    ([], "detach", ["tis.token"], None),
    (["preset=[grpo,icepop]"], "recompute", ["icepop"], None),  # the preset's own
    (["preset=[grpo,icepop]", "correct=[tis.sequence]"], "detach", ["tis.sequence"], None),
    (["preset=easyr1"], "recompute", ["tis.token"], None),
    (["old=rollout"], "rollout", [], None),
    (["correct=[]"], "detach", [], "use algorithm.correct=[tis.token] or algorithm.old=rollout"),
    (["correct=[seq_mask]"], "recompute", ["seq_mask"], "use algorithm.correct=[tis.token] or algorithm.old=rollout"),
    # These have no ratio that would weigh.
    (["preset=reinforce"], "detach", ["tis.token"], None),
    (["preset=reinforce", "old=rollout"], "rollout", [], "use algorithm.correct=[tis.token] algorithm.old=auto"),
    (["preset=cpgd", "old=rollout"], "rollout", [], "use algorithm.correct=[tis.token] algorithm.old=auto"),
    (["preset=cpgd", "correct=[]"], "detach", [], "use algorithm.correct=[tis.token]"),
    # These are made for old tokens.
    (["preset=topr"], "rollout", [], None),
    (["preset=kimi", "correct=[]"], "rollout", [], None),
    (["preset=dppo_tv", "train.updates_per_step=2"], "rollout", [], None),
    (["policy_loss=dro"], "rollout", [], None),
    (["preset=[topr,tis]"], "detach", ["tis.token"], None),
    (["preset=topr", "old=recompute"], "recompute", ["tis.token"], None),
    (["preset=[topr,fire]"], "recompute", ["tis.token"], None),  # it needs old log-probs before training
])  # fmt: skip
def test_what_weighs_the_tokens_of_rollouts_ahead(algorithm, caplog, overrides, old, chosen, says):
    row = algorithm(*overrides, "rollout.ahead=1")
    assert (row.old, [c.name for c in row.corrections], row.allows_older) == (old, chosen, not says)
    run_parts.check_algorithm(row, None, [], ahead=1)
    assert [text.split("; to weigh them, ")[1] for text in caplog.messages] == [says] * bool(says)
    run_parts.check_algorithm(row, None, [])
    assert len(caplog.messages) == bool(says)
    assert algorithm("preset=topr").old == "detach" and "kimi                   old=rollout" in explain()


MINE = '''
from saccade.algorithms.corrections import Correction
from saccade.algorithms.table import Entry

def squared(new, inputs, *, clip_low=0.1, sharpness=2.0):
    """|new - old|^sharpness"""
    return (new - inputs.old).abs() ** sharpness * clip_low, {}

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

def far(new, ref, *, delta=0.5):
    return (new - ref) * delta

def near(mismatch, *, high, margin=0.0):
    return Correction(keep=mismatch.delta.abs() <= high + margin)

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


def test_an_advantage_of_your_own(algorithm, refused, golden):
    path = ROOT / "examples" / "my_advantage.py"
    row = algorithm(f"advantage={path}:median")
    inputs = golden.members(rewards=(0, 0, 1, 5), groups=torch.tensor([0, 0, 0, 0]))
    values = compute(row.estimator, inputs).values
    assert values[golden.position == 0].tolist() == [-0.5, -0.5, 0.5, 4.5]
    constant = compute(row.estimator, golden.members(rewards=(1, 1, 0, 1)))
    assert constant.values[golden.sequence < 2].abs().sum() == 0
    assert "R - median_g" in describe(row)
    assert "compares the members of a group" in refused(f"advantage={path}:median", samples_per_prompt=1)
    assert "there is median_baseline" in refused(f"advantage={path}:medain")


def test_a_bare_function_has_its_own_keyword_parameters_as_options(algorithm, mine, monkeypatch):
    monkeypatch.chdir(mine.parent)
    row = algorithm(
        "policy_loss=mine.py:squared", "aggregation=mine.py:halves", "args.clip_low=0.3", "args.fixed_length=2"
    )
    monkeypatch.chdir(mine.parent.parent)  # found again from any folder
    assert row.loss.options == {"clip_low": 0.3, "sharpness": 2.0}
    assert row.loss.formula == "|new - old|^sharpness"
    lengths = torch.tensor([3, 0])
    scale = row.aggregate(lengths, None, None)
    assert scale.tolist() == [0.25, 0.0]
    assert "fixed_length=2" in describe(row) and "sharpness=2" in describe(row)


def test_options_of_your_own_are_given_by_args(algorithm, refused, mine):
    row = algorithm(f"policy_loss={mine}:squared", "args={sharpness: 3}")
    assert row.loss.options == {"clip_low": 0.1, "sharpness": 3}
    assert row.estimator.options == {"std_eps": 1e-6}
    message = refused(f"policy_loss={mine}:squared", "args={sharpnes: 3}")
    assert "algorithm.args=sharpnes" in message and "'sharpness'" in message
    # An option of the built-in losses that this one does not have.
    message = refused(f"policy_loss={mine}:squared", "args.clip_high=0.3")
    assert "algorithm.args.clip_high: has no effect" in message
    # One that only estimators have, but this loss reads.
    assert algorithm(f"policy_loss={mine}:tall", "args.gamma=0.9").loss.options == {"gamma": 0.9}


def test_a_kl_of_your_own(algorithm, refused, mine):
    row = algorithm(f"kl.kind={mine}:distance", "args={steepness: 2}")
    assert row.kl.kind == f"{mine}:distance" and row.divergence.options == {"steepness": 2}
    gap = torch.tensor([0.5, -1.0])
    found = row.divergence(gap, 0 * gap)
    assert found.tolist() == [0.5, 2.0]
    assert "steepness u^2" in describe(row)
    assert "algorithm.args.kl_clamp" in refused(f"kl.kind={mine}:distance", "args.kl_clamp=zero")
    message = refused(f"kl.kind={mine}:unfit")
    assert "its gradient does not lead to the reference" in message
    assert algorithm(f"kl.kind={mine}:unfit", "kl.place=reward").kl_in_reward
    assert "no function 'number' in" in refused(f"kl.kind={mine}:number")
    own = (f"kl.kind={mine}:far", "kl.coef=0.01")  # an argument is that of one function
    assert algorithm(*own).divergence.options == {"delta": 0.5}
    assert f"algorithm.args.delta: policy_loss=clip and kl.kind={mine}:far read it" in refused("args.delta=4", *own)


def test_a_correction_of_your_own(algorithm, refused, mine, golden):
    assert "near needs high; for example algorithm.args={high: 1.03}" in refused(f"correct=[{mine}:near]")
    row = algorithm(f"correct=[{{name: {mine}:near, high: 0.03}}]", "args={margin: 0.01}")
    (correction,) = row.corrections
    assert correction.options == {"high": 0.03, "margin": 0.01} and row.old == "recompute"
    found = apply([correction], golden.mismatch)
    assert found.keep is not None and torch.equal(found.keep, golden.mismatch.delta.abs() <= 0.04)
    message = refused(f"correct=[{{name: {mine}:near, low: 0.1, high: 1}}]")
    assert "has no low; it reads high, margin" in message
    message = refused(f"correct=[tis.token,{mine}:weighing]")
    assert "both weigh tokens" in message and "algorithm.correct=[tis.token]" in message
    assert algorithm(f"correct=[{mine}:weighing]", "self_normalise=true").self_normalise


def test_the_listing_names_every_row_and_add_on():
    rows, extras, ahead = explain().split("\n\n")
    assert [line.split()[0] for line in rows.splitlines()] == ["preset", *PRESETS]
    assert ahead.startswith("ahead: ") and explain("gpg").endswith("with rollout.ahead: refused")
    assert [line.split()[0] for line in extras.splitlines()[1:]] == [*ADD_ONS]


MISTAKES = """
import torch
from saccade.algorithms.corrections import Correction

def members(inputs): return inputs.scores
def number(inputs): return 1.0
def nan(inputs): return inputs.per_token(inputs.scores) * float("nan")
def fails(inputs): raise KeyError("gone")

def mean(new, inputs): return (-inputs.advantages * new).mean(), {}
def bare(new, inputs): return -inputs.advantages * new
def detached(new, inputs): return (-inputs.advantages * new).detach(), {}
def flag(new, inputs): return -inputs.advantages * new, {"half": 0.5}

def one(lengths, trajectory, group): return torch.ones(())
def scalar(new, ref): return (new - ref).mean()
def mask(mismatch): return mismatch.live
def short(mismatch): return Correction(keep=mismatch.live[:2])
"""


@pytest.mark.parametrize(("axis", "name", "reason"), [
    ("advantage", "members", r"returned a tensor of \[4\], not \[18\].*f\(inputs\)"),
    ("advantage", "number", "returned a float instead of a tensor"),
    ("advantage", "nan", "returned numbers that are not finite"),
    ("advantage", "fails", "raised KeyError: 'gone'"),
    ("policy_loss", "mean", r"returned a tensor of \[\], not \[18\]"),
    ("policy_loss", "bare", "returned a Tensor instead of a pair"),
    ("policy_loss", "detached", "returned losses without a gradient"),
    ("policy_loss", "flag", "returned a float instead of a tensor as half"),
    ("kl.kind", "scalar", r"returned a tensor of \[\]"),
    ("aggregation", "one", r"returned a tensor of \[\]"),
    ("correct", "mask", "returned a Tensor instead of a Correction"),
    ("correct", "short", r"returned a tensor of \[2\], not \[18\] as keep"),
])  # fmt: skip
def test_a_mistake_names_the_function_the_reason_and_the_form_that_works(golden, tmp_path, axis, name, reason):
    (tmp_path / "mine.py").write_text(MISTAKES)
    new = golden.new.clone().requires_grad_()
    arguments = {
        "advantage": (golden.members(),), "policy_loss": (new, golden.inputs()), "kl.kind": (new, golden.ref),
        "aggregation": (torch.tensor([6, 4, 5, 3]), None, None), "correct": (golden.mismatch,),
    }  # fmt: skip
    with pytest.raises(ConfigError, match=rf"algorithm.{axis}=\S+:{name} {reason}"):
        find(axis, {}, f"{tmp_path}/mine.py:{name}")(*arguments[axis])
