from __future__ import annotations

import pytest
import torch

from saccade.algorithms.advantages import (
    ADVANTAGES,
    AdvantageInputs,
    AdvantageOptions,
    compute,
    whiten,
)

NAN = float("nan")


def first_tokens(golden, name, **changes):
    values = compute(ADVANTAGES[name], golden.members(**changes)).values
    return values[golden.position == 0].tolist()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", (0.707106, -0.707106, -0.707106, 0.707106)),
        ("no_std", (0.5, -0.5, -0.75, 0.75)),
        ("rloo", (1, -1, -1.5, 1.5)),
        ("opo", (0.4, -0.6, -0.5625, 0.9375)),
        ("reinforce_pp_baseline", (0.823299, -0.736636, -1.126620, 1.213283)),
        ("reinforce_pp", (0.291399, -1.207224, -0.457913, 1.790022)),
        ("gpg", (0.5, -0.5, -0.75, 0.75)),
        ("grpo_passk", (1.414212, 0, 0, 1.414212)),
        ("max_rl", (1, -1, -0.6, 0.6)),
        ("reinforce", (1, 0, 0.5, 2)),
    ],
)
def test_golden_values(golden, name, expected):
    assert first_tokens(golden, name) == pytest.approx(expected, abs=6e-7)


def test_exact_values_of_grpo_to_1e_minus_7(golden):
    deviation = 0.5**0.5  # of rewards 1 and 0; of 0.5 and 2 it is 1.5 times that
    small, large = 0.5 / (deviation + 1e-6), 0.75 / (1.5 * deviation + 1e-6)
    expected = (small, -small, -large, large)
    assert first_tokens(golden, "grpo") == pytest.approx(expected, abs=1e-12)


def test_values_with_another_std_eps(golden):
    options = AdvantageOptions(std_eps=1e-4)
    assert first_tokens(golden, "grpo", options=options) == pytest.approx(
        (0.7070068, -0.7070068, -0.7070401, 0.7070401), abs=1e-7
    )
    assert first_tokens(golden, "batch_std", options=options) == pytest.approx(
        (0.5854715, -0.5854715, -0.8782072, 0.8782072), abs=1e-7
    )


def test_gpg_can_count_non_zero_rewards(golden):
    options = AdvantageOptions(alpha="nonzero_rewards")
    expected = (2 / 3, -2 / 3, -1, 1)
    assert first_tokens(golden, "gpg", options=options) == pytest.approx(expected, abs=1e-12)


def test_kl_in_the_reward_enters_token_returns_token_by_token(golden):
    penalties = 0.1 * (golden.old - golden.ref)
    inputs = golden.members(token_penalties=penalties)
    values = compute(ADVANTAGES["reinforce_pp"], inputs).values
    assert values[golden.position == 0].tolist() == pytest.approx(
        (0.305033, -1.236308, -0.488092, 1.791780), abs=6e-7
    )
    assert values[golden.sequence == 0].tolist() == pytest.approx(
        (0.305033, 0.319734, 0.305033, 0.274447, 0.256096, 0.266852), abs=6e-7
    )


def test_kl_in_the_reward_enters_outcomes_before_the_baseline(golden):
    penalties = torch.full((18,), 0.1, dtype=torch.float64)  # 0.6, 0.4, 0.5, 0.3 per row
    assert first_tokens(golden, "no_std", token_penalties=penalties) == pytest.approx(
        (0.4, -0.4, -0.85, 0.85), abs=1e-12
    )


def test_discount_counts_sampled_tokens(golden):
    inputs = golden.members(options=AdvantageOptions(gamma=0.5))
    values = compute(ADVANTAGES["reinforce"], inputs).values
    assert values[golden.sequence == 3].tolist() == [0.5, 1, 2]
    assert values[golden.sequence == 0].tolist() == [0.5**k for k in (5, 4, 3, 2, 1, 0)]


def test_max_rl_weighs_hard_prompts(golden):
    one_group = torch.zeros(4, dtype=torch.int64)
    assert first_tokens(golden, "max_rl", rewards=(1, 0, 0, 0), groups=one_group) == [3, -1, -1, -1]
    with pytest.raises(ValueError, match="rewards >= 0"):
        first_tokens(golden, "max_rl", rewards=(1, -1, 0, 0))


def test_whitening(golden):
    live = torch.ones(18, dtype=torch.bool)
    white = whiten(golden.advantages, live)[golden.position == 0]
    assert white.tolist() == pytest.approx((1.053208, -1.113391, -0.842566, 0.782383), abs=6e-7)


@pytest.mark.parametrize("value", [0.0, NAN])
def test_an_excluded_member_is_in_no_statistic(golden, value):
    excluded = {
        "rewards": (1, 0, value, 1),
        "groups": torch.zeros(4, dtype=torch.int64),
        "live": torch.tensor([True, True, False, True]),
        "baseline": torch.tensor([True, True, False, True]),
    }
    assert first_tokens(golden, "grpo", **excluded) == pytest.approx(
        (0.577349, -1.154699, 0, 0.577349), abs=6e-7
    )
    assert first_tokens(golden, "rloo", **excluded) == [0.5, -1, 0, 0.5]
    returned = excluded | {"rewards": (1, 0, 0, 1), "baseline": torch.ones(4, dtype=torch.bool)}
    assert first_tokens(golden, "grpo", **returned) == pytest.approx(
        (0.866024, -0.866024, 0, 0.866024), abs=6e-7
    )


@pytest.mark.parametrize("name", [name for name, entry in ADVANTAGES.items() if entry.group])
def test_a_constant_group_gets_exactly_zero(golden, name):
    third = 0.1 + 0.2  # differs from 0.3 by a rounding residue
    inputs = golden.members(rewards=(0.3, third, 0.5, 2))
    result = compute(ADVANTAGES[name], inputs)
    assert (result.values[golden.sequence < 2] == 0).all()
    assert result.values[golden.sequence >= 2].abs().max() > 0
    assert result.live.all()
    assert (result.constant_low, result.constant_high) == (1, 0)
    dropped = compute(ADVANTAGES[name], inputs, drop_constant=True)
    assert dropped.live.tolist() == [False, False, True, True]


def test_a_group_shrunk_to_one_member_does_not_train(golden):
    excluded = torch.tensor([True, False, True, True])
    result = compute(ADVANTAGES["rloo"], golden.members(live=excluded, baseline=excluded))
    assert result.live.tolist() == [False, False, True, True]
    assert result.singleton == 1
    assert result.values[golden.sequence < 2].abs().sum() == 0
    alone = compute(ADVANTAGES["reinforce"], golden.members(live=excluded, baseline=excluded))
    assert alone.live.tolist() == excluded.tolist() and alone.singleton == 0


def test_the_clip_comes_last_and_is_counted_before_it_acts(golden):
    result = compute(ADVANTAGES["rloo"], golden.members(), adv_clip=1.2)
    assert result.values.abs().max() == 1.2
    assert result.clip_frac == pytest.approx(8 / 18)  # rows of 5 and 3 tokens


def test_everything_excluded_leaves_nothing(golden):
    nobody = torch.zeros(4, dtype=torch.bool)
    for entry in ADVANTAGES.values():
        result = compute(entry, golden.members(live=nobody, baseline=nobody))
        assert result.values.abs().sum() == 0 and not result.live.any()


def test_a_member_without_tokens_is_as_if_absent(golden):
    inputs = golden.members()
    more = AdvantageInputs(
        rewards=torch.cat([inputs.rewards, torch.tensor([5.0], dtype=torch.float64)]),
        groups=torch.tensor([0, 0, 1, 1, 0]),
        live=torch.ones(5, dtype=torch.bool),
        baseline=torch.ones(5, dtype=torch.bool),
        lengths=torch.tensor([6, 4, 5, 3, 0]),
        sequence=inputs.sequence,
        token_penalties=inputs.token_penalties,
    )
    for entry in ADVANTAGES.values():
        assert torch.equal(compute(entry, more).values, compute(entry, inputs).values)
    assert compute(ADVANTAGES["grpo"], more).live.tolist() == [True] * 4 + [False]
