from dataclasses import replace

import pytest
import torch

from saccade.algorithms.advantages import ADVANTAGES, AdvantageInputs, compute, whitened

NAN = float("nan")
PRINTED = 6e-7  # half a unit of the sixth digit, and a little
ONE_GROUP = torch.zeros(4, dtype=torch.int64)


def float64(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def with_everything(golden, **changes):
    """The rows, with what only some estimators read."""
    row = golden.sequence.double()
    inputs = golden.members(**changes)
    extras = {
        "values": 0.1 * (row + golden.position).cos(), "greedy": float64(0.2, 0.2, 0.7, 0.7),
        "components": inputs.rewards[:, None], "component_weights": float64(1),
        "domain_weights": float64(16, 16, 2.56, 2.56), "drift": float64(1, 2, 3, 4),
    }  # fmt: skip
    return replace(inputs, **{k: v for k, v in extras.items() if k not in changes})


def first_tokens(golden, name, options=None, **changes):
    result = compute(ADVANTAGES[name].with_options(options or {}), with_everything(golden, **changes))
    return result.values[golden.position == 0].tolist()


DEAD = {"rewards": (1, 1, 0.5, 2)}
# Of DEAD twice -0.75 and 0.75: half of the members, and of the groups.
TWICE = (0, 0, -1.5, 1.5)


@pytest.mark.parametrize(("name", "options", "changes", "expected"), [
    ("grpo", {}, {}, (0.707106, -0.707106, -0.707106, 0.707106)),
    ("cpgd", {}, {}, (0.707106, -0.707106, -0.707106, 0.707106)),
    ("reinforce_pp_baseline", {}, {}, (0.823299, -0.736636, -1.126620, 1.213283)),
    ("reinforce_pp", {}, {}, (0.291399, -1.207224, -0.457913, 1.790022)),
    ("grpo_passk", {}, {}, (1.414212, 0, 0, 1.414212)),
    ("drpo", {}, {}, (1.209362, -1.209362, -0.193498, 0.193498)),
    ("no_std", {}, {}, (0.5, -0.5, -0.75, 0.75)),
    ("rloo", {}, {}, (1, -1, -1.5, 1.5)),
    ("opo", {}, {}, (0.4, -0.6, -0.5625, 0.9375)),
    ("gpg", {}, {}, (0.5, -0.5, -0.75, 0.75)),
    ("max_rl", {}, {}, (1, -1, -0.6, 0.6)),
    ("reinforce", {}, {}, (1, 0, 0.5, 2)),
    ("remax", {}, {}, (0.8, -0.2, -0.2, 1.3)),
    ("gpg", {"gpg_alpha": "nonzero_rewards"}, {}, (2 / 3, -2 / 3, -1, 1)),
    ("gpg", {"gpg_alpha": "nonzero_rewards", "gpg_alpha_max": 1.25}, {}, (0.625, -0.625, -0.9375, 0.9375)),
    ("gpg", {"gpg_divisor": "std"}, {}, (0.707106, -0.707106, -0.707106, 0.707106)),
    ("gpg", {}, DEAD, TWICE),
    ("cpgd", {"cpgd_weight": "clip_filter"}, DEAD, TWICE),
    ("cpgd", {"cpgd_weight": "none"}, DEAD, (0, 0, -0.75, 0.75)),
    ("max_rl", {}, {"rewards": (1, 0, 0, 0), "groups": ONE_GROUP}, (3, -1, -1, -1)),
    ("reinforce", {"gamma": 0.5}, {}, (0.5**5, 0, 0.5**5, 0.5)),  # of 6, 4, 5 and 3 tokens
])  # fmt: skip
def test_golden_values(golden, name, options, changes, expected):
    assert first_tokens(golden, name, options, **changes) == pytest.approx(expected, abs=PRINTED)


def test_each_turn_has_the_credit_of_what_came_after_it():
    """Two members of two turns, which differ in the first, and one of one turn."""
    sequence, turns = torch.tensor([0, 0, 0, 1, 1, 1, 2]), torch.tensor([0, 0, 1, 0, 1, 1, 0])
    inputs = AdvantageInputs(
        rewards=float64(3, 1, 0), groups=torch.zeros(3, dtype=torch.int64), live=torch.ones(3, dtype=torch.bool),
        baseline=torch.ones(3, dtype=torch.bool), lengths=torch.tensor([3, 3, 1]), sequence=sequence,
        token_penalties=torch.zeros(7, dtype=torch.float64), turns=turns, earned=float64([2, 0], [0, 0], [0, 0]),
    )  # fmt: skip
    values = compute(ADVANTAGES["turn_grpo"], inputs).values
    first = float64(3, 1, 0)  # returns from the first turn on
    best, middle, worst = ((first - first.mean()) / (first.std() + 1e-6)).tolist()
    assert values.tolist() == pytest.approx([best, best, 0, middle, 0, 0, worst])
    later = replace(inputs, rewards=float64(4, 1, 0))  # now also the end differs: 2 and 1 from the second turn on
    values = compute(ADVANTAGES["turn_grpo"].with_options({"gamma": 0.5}), later).values
    assert values[2].item() == pytest.approx(-values[4].item()) == pytest.approx(0.5 / (0.5**0.5 + 1e-6))
    plain = replace(inputs, turns=None, earned=None)  # of one turn it is grpo
    both = [compute(ADVANTAGES[name], plain).values.tolist() for name in ("turn_grpo", "grpo")]
    assert both[0] == pytest.approx(both[1])


def test_max_rl_takes_no_negative_rewards(golden):
    with pytest.raises(ValueError, match="rewards >= 0"):
        first_tokens(golden, "max_rl", rewards=(1, -1, 0, 0))


def test_kl_in_the_reward_enters_token_returns_token_by_token(golden):
    penalties = 0.1 * (golden.old - golden.ref)
    inputs = golden.members(token_penalties=penalties)
    values = compute(ADVANTAGES["reinforce_pp"], inputs).values
    assert values[golden.position == 0].tolist() == pytest.approx(
        (0.305033, -1.236308, -0.488092, 1.791780), abs=PRINTED
    )
    assert values[golden.sequence == 0].tolist() == pytest.approx(
        (0.305033, 0.319734, 0.305033, 0.274447, 0.256096, 0.266852), abs=PRINTED
    )


def test_gae(golden):
    inputs, options = with_everything(golden), {"gamma": 0.99, "lam": 0.95}
    raw = compute(ADVANTAGES["gae"].with_options({**options, "whiten": False}), inputs)
    assert raw.values[golden.sequence == 0].tolist() == pytest.approx(
        (0.630667, 0.720019, 0.866823, 0.981625, 1.007268, 0.971634), abs=PRINTED
    )
    white = compute(ADVANTAGES["gae"].with_options(options), inputs)
    assert white.values[golden.sequence == 0].tolist() == pytest.approx(
        (-0.179579, -0.038984, 0.192015, 0.372656, 0.413007, 0.356935), abs=PRINTED
    )
    assert white.values[golden.position == 0].tolist() == pytest.approx(
        (-0.179579, -1.271954, -0.495216, 1.764489), abs=PRINTED
    )
    for result in (raw, white):  # the critic learns returns from before whitening
        assert result.returns is not None
        assert result.returns[golden.sequence == 0].tolist() == pytest.approx(
            (0.730667, 0.774049, 0.825209, 0.882625, 0.941904, 1.0), abs=PRINTED
        )
        assert result.returns[golden.sequence == 3].tolist() == pytest.approx((1.767166, 1.882404, 2.0), abs=PRINTED)


TERMS = {
    "rewards": (1.5, 0.5, 1, 0.5),
    "components": float64([1, 1], [0, 1], [1, 0], [0, 1]),
    "component_weights": float64(1, 0.5),
}


@pytest.mark.parametrize(
    ("whitening", "expected"),
    [("seq", (1.095275, -1.095275, 0.547638, -0.547638)), ("token", (1.013198, -1.418477, 0.405279, -0.810558))],
)
def test_gdpo_puts_every_term_on_its_own_scale(golden, whitening, expected):
    values = first_tokens(golden, "gdpo", {"gdpo_whiten": whitening}, **TERMS)
    assert values == pytest.approx(expected, abs=PRINTED)


def test_a_constant_term_is_silent_and_only_constant_terms_make_a_constant_group(golden):
    # In group 0 the terms cancel in the sum; in group 1 only the first differs.
    terms = float64([1, 0], [0, 1], [1, 3], [0, 3])
    changes = {"components": terms, "component_weights": float64(1, 1), "rewards": (1, 1, 4, 3)}
    result = compute(ADVANTAGES["gdpo"], with_everything(golden, **changes))
    assert (result.counts["constant_low"], result.counts["constant_high"]) == (0, 0)
    assert first_tokens(golden, "gdpo", **changes)[:2] == pytest.approx((0, 0), abs=1e-12)
    alone = {"components": terms[:, :1].where(torch.tensor([[0], [0], [1], [1]]) > 0, 0)}
    alone |= {"component_weights": float64(1), "rewards": (0, 0, 1, 0)}
    assert first_tokens(golden, "gdpo", **changes) == pytest.approx(first_tokens(golden, "gdpo", **alone), abs=1e-12)
    assert compute(ADVANTAGES["gdpo"], with_everything(golden, **alone)).counts["constant_low"] == 1


def test_drpo_can_keep_the_size_of_grpo(golden):
    grpo = float64(*first_tokens(golden, "grpo"))
    scaled = float64(*first_tokens(golden, "drpo", {"drpo_renorm": "rms"}))
    assert scaled.norm() == pytest.approx(grpo.norm().item(), abs=1e-12)
    ratio = (scaled / grpo)[0] / (scaled / grpo)[2]
    assert ratio.item() == pytest.approx(1.7241379 / 0.2758621, abs=1e-5)


def test_drpo_counts_a_group_once_and_dead_groups_not_at_all():
    """Weights 9 and 3 have mean 6, however many members; that of the dead group does not count."""
    everybody, ones = torch.ones(8, dtype=torch.bool), torch.ones(8, dtype=torch.int64)
    inputs = AdvantageInputs(
        rewards=float64(1, 0, 0, 0, 1, 0, 1, 1), groups=torch.tensor([0, 0, 0, 0, 1, 1, 2, 2]), live=everybody,
        baseline=everybody, lengths=ones, sequence=torch.arange(8), token_penalties=torch.zeros(8).double(),
        domain_weights=float64(9, 9, 9, 9, 3, 3, 1000, 1000),
    )  # fmt: skip
    values = compute(ADVANTAGES["drpo"], inputs).values
    plain = compute(ADVANTAGES["grpo"], inputs).values
    weighted = plain * float64(1.5, 1.5, 1.5, 1.5, 0.5, 0.5, 0, 0)
    assert torch.allclose(values, weighted / (weighted.std() + 1e-6), atol=1e-12)
    extreme = replace(inputs, domain_weights=float64(*[1e9] * 4, 1, 1, 1, 1))
    values = compute(ADVANTAGES["drpo"].with_options({"drpo_renorm": "rms"}), extreme).values
    ratio = (values / plain)[0] / (values / plain)[4]
    assert ratio.item() == pytest.approx(2 / 0.1)  # 2e-9 of the mean is raised to 0.1


def test_whitening_which_is_an_option_where_the_estimator_allows_it(golden):
    live = torch.ones(18, dtype=torch.bool)
    white = whitened(golden.advantages, live)[golden.position == 0]
    assert white.tolist() == pytest.approx((1.053208, -1.113391, -0.842566, 0.782383), abs=PRINTED)
    shifted = whitened(golden.advantages, live, whiten_std=False)
    assert torch.allclose(shifted, golden.advantages - golden.advantages.mean(), atol=1e-12)
    equal, some = torch.full((8,), 0.1, dtype=torch.float64), torch.arange(8) < 7
    assert not whitened(equal, some).any()  # their mean is off by 1e-17, which the scale would make 1e-13
    inputs = golden.members()
    turned_on = compute(ADVANTAGES["reinforce"].with_options({"whiten": True}), inputs)
    assert torch.equal(turned_on.values, compute(ADVANTAGES["reinforce_pp"], inputs).values)
    turned_off = compute(ADVANTAGES["reinforce_pp"].with_options({"whiten": False}), inputs)
    assert torch.equal(turned_off.values, compute(ADVANTAGES["reinforce"], inputs).values)


@pytest.mark.parametrize("value", [0.0, NAN])
def test_an_excluded_member_is_in_no_statistic(golden, value):
    excluded = {
        "rewards": (1, 0, value, 1),
        "groups": ONE_GROUP,
        "live": torch.tensor([True, True, False, True]),
        "baseline": torch.tensor([True, True, False, True]),
    }
    assert first_tokens(golden, "grpo", **excluded) == pytest.approx((0.577349, -1.154699, 0, 0.577349), abs=PRINTED)
    assert first_tokens(golden, "rloo", **excluded) == [0.5, -1, 0, 0.5]
    returned = excluded | {"rewards": (1, 0, 0, 1), "baseline": torch.ones(4, dtype=torch.bool)}
    assert first_tokens(golden, "grpo", **returned) == pytest.approx((0.866024, -0.866024, 0, 0.866024), abs=PRINTED)


@pytest.mark.parametrize("name", [name for name, entry in ADVANTAGES.items() if entry.group])
@pytest.mark.parametrize("std_eps", [1e-6, 0.0])
def test_a_constant_group_gets_exactly_zero(golden, name, std_eps):
    third = 0.1 + 0.2  # differs from 0.3 by a rounding residue
    inputs = with_everything(golden, rewards=(0.3, third, 0.5, 2))
    result = compute(ADVANTAGES[name].with_options({"std_eps": std_eps}), inputs)
    assert (result.values[golden.sequence < 2] == 0).all()
    assert result.values[golden.sequence >= 2].abs().max() > 0
    assert result.live.all()
    assert (result.counts["constant_low"], result.counts["constant_high"]) == (1, 0)
    dropped = compute(ADVANTAGES[name], inputs, drop_constant=True)
    assert dropped.live.tolist() == [False, False, True, True]


@pytest.mark.parametrize("name", list(ADVANTAGES))
def test_a_lone_member_with_a_biased_baseline_is_not_blown_up(golden, name):
    """Three excluded members in its baseline: no spread over live members to divide by."""
    inputs = with_everything(golden, groups=ONE_GROUP, live=torch.tensor([True, False, False, False]))
    assert compute(ADVANTAGES[name].with_options({"drpo_kl_damp": 0.75}), inputs).values.abs().max() < 10


def test_the_clip_comes_last_and_is_counted_before_it_acts(golden):
    result = compute(ADVANTAGES["rloo"], golden.members(), adv_clip=1.2)
    assert result.values.abs().max() == 1.2
    assert result.clip_frac == pytest.approx(8 / 18)  # rows of 5 and 3 tokens
    off = compute(ADVANTAGES["rloo"], golden.members(), adv_clip=0.0)
    assert off.values.abs().max() == 1.5 and off.clip_frac == 0


def test_everything_excluded_leaves_nothing(golden):
    nobody = torch.zeros(4, dtype=torch.bool)
    for entry in ADVANTAGES.values():
        result = compute(entry, with_everything(golden, live=nobody, baseline=nobody))
        assert result.values.abs().sum() == 0 and not result.live.any()
