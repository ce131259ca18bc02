"""Corrections as columns of the forests; a hot first token, which has its own."""

from dataclasses import replace

import numpy as np
import pytest

from saccade.algorithms import annotate
from saccade.algorithms.corrections import effective_sample_size
from tests.algorithms.by_member import FIRST, KEYS, NO_KL, exact, loss_of, rows


@pytest.mark.parametrize(("overrides", "value"), [
    (["correct=[{name: icepop, low: 0.97, high: 1.03}]"], 0.06566720),
    (["correct=[{name: icepop, low: 0.97, high: 1.03}]", "denominator=kept"], 0.16885852),
    (["entropy_top=0.2"], 0.11624419),
    (["entropy_top=0.2", "denominator=kept"], 0.52309886),
    (["correct=[{name: tis.token, low: 0.97, high: 1.03}]"], -0.01514937),
    (["correct=[seq_mask_tis]"], -0.34281679),
    (["correct=[tis.token]", "args.dual_clip=3"], -0.01421687),
    (["correct=[tis.sequence]", "args.dual_clip=3"], -0.01688046),
    (["correct=[{name: opsm, threshold: 0.01}]"], -0.22400677),
])  # fmt: skip
def test_reference_values_over_forests(algorithm, written, golden, overrides, value):
    row = algorithm(*NO_KL, *overrides, "old=recompute")
    for packing in ({}, {"budget": 8}, {"flip": True}, {"budget": 8, "flip": True}):
        (batches,) = annotate.add_corrections(written(row, **packing), row)[0]
        assert len(batches) == (4 if "budget" in packing else 1)
        loss, _ = loss_of(row, batches, rows(golden.new))
        assert loss == pytest.approx(value, abs=3e-7)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean", "seq_sum", "group_mean"])
def test_over_what_was_kept_the_factors_make_up_for_the_rest(algorithm, written, records, aggregation):
    """With a mean the factors of the kept tokens add up to 1; the KL keeps its denominator."""
    correct = "correct=[{name: reject.token.k1, low: 0.97, high: 1.03}]"
    row = algorithm(*NO_KL[1:3], f"aggregation={aggregation}", correct, "denominator=kept")
    before = written(row)
    updates = annotate.add_corrections(before, row)[0]
    assert records.column(updates, "scales") == records.column(before, "scales")
    scales, keep = (records.flat(updates, name) for name in ("scales", "keep"))
    kept = np.array([sum(np.array(k) > 0) for k in records.column(updates, "keep").values()])
    total = kept.sum() / (kept > 0).sum() if aggregation == "seq_sum" else 1.0
    assert (scales * keep).sum() == exact(total)


def test_weights_average_to_one_in_each_update(algorithm, written, records, golden):
    row = algorithm(*NO_KL, "correct=[tis.token]", "self_normalise=true", updates_per_step=2)
    plain = row.model_copy(update={"self_normalise": False})
    before, after = (annotate.add_corrections(written(row, updates=2, budget=8), one)[0] for one in (plain, row))
    assert [len(batches) for batches in after] == [2, 2]
    for raw, normal in zip(before, after, strict=True):
        one, other = (records.flat([batches], "weights") for batches in (raw, normal))
        assert other.mean() == exact(1.0)
        assert other.tolist() == exact((one / one.mean()).tolist())


@pytest.mark.parametrize("correct", ["tis.token", "tis.sequence", "tis.geometric"])
def test_the_loss_corrects_as_columns_do(algorithm, written, golden, correct):
    """With one optimizer step per batch no pass is needed for them."""
    before, inside = (algorithm(*NO_KL, f"correct=[{correct}]", f"old={old}") for old in ("recompute", "detach"))
    updates = written(before, budget=8)
    (columns,), count = annotate.add_corrections(updates, before)
    (plain,), nothing = annotate.add_corrections(updates, inside)
    assert plain[0].weights is None and not nothing().means()
    loss, _ = loss_of(before, columns, rows(golden.old))
    here = [replace(batch, old_logprobs=None) for batch in plain]
    found, log = loss_of(inside, here, rows(golden.old))
    assert found == exact(loss) and found != pytest.approx(loss_of(algorithm(*NO_KL), here, rows(golden.old))[0])
    counted = {name: value for name, value in count().means().items() if "/text" not in name}
    assert {name: log[name] for name in counted} == exact(counted)


def test_the_effective_sample_size_is_that_of_the_weights(algorithm, written, golden):
    row = algorithm(*NO_KL, "correct=[tis.token]", "old=recompute")
    metrics = annotate.add_corrections(written(row), row)[1]
    weights = (golden.old - golden.rollout).exp()
    log = metrics().means()
    assert log["mismatch/ess"] == exact(effective_sample_size(weights[golden.live]))
    assert log["mismatch/ess"] == exact((weights.sum() ** 2 / (18 * (weights**2).sum())).item())
    assert log["mismatch/is_weight_mean"] == exact(0.99365108)
    assert log["mismatch/is_weight_max"] == exact(weights.max().item())


def test_a_hot_first_token_is_weighed_by_its_own_gap(algorithm, written, records, golden):
    row = algorithm(*NO_KL, "preset=[grpo,fire]", "hot_first_token.cap=1.02")
    before = written(row)
    updates = annotate.add_corrections(before, row)[0]
    weights = records.flat(updates, "weights")
    expected = np.ones(18)
    expected[FIRST] = (golden.old - golden.rollout).exp().clamp(max=1.02)[FIRST]
    assert (expected[FIRST] == 1.02).any() and (expected[FIRST] < 1.02).any()
    assert weights.tolist() == exact(expected.tolist())
    # The gap is by design, so it is none of the mismatch.
    rollout = records.flat(updates, "rollout_logprobs")
    replaced = golden.rollout.clone()
    replaced[FIRST] = golden.old[FIRST]
    assert rollout.tolist() == exact(replaced.tolist())
    _, log = loss_of(row, updates[0], rows(golden.new))
    gap = (golden.old - replaced).abs()
    assert log["mismatch/logp_gap_mean"] == exact(gap.mean().item(), 1e-5)


def test_corrections_do_not_see_the_gap_of_a_hot_first_token(algorithm, written, records, golden):
    row = algorithm(*NO_KL, "preset=[grpo,fire]", "hot_first_token.cap=1.02", "correct=[tis.sequence]")
    updates = annotate.add_corrections(written(row), row)[0]
    weights = records.column(updates, "weights")
    gaps = rows(golden.old - golden.rollout)
    for key in KEYS:
        others = float(np.exp(sum(gaps[key][1:])))
        first = min(float(np.exp(gaps[key][0])), 1.02)
        assert weights[key] == exact([others * first] + [others] * (len(gaps[key]) - 1), 1e-5)


@pytest.mark.parametrize(
    ("aggregation", "scale"),
    [("token_mean", [1 / 14] * 4), ("seq_mean", [1 / (4 * n) for n in (5, 3, 4, 2)]), ("seq_sum", [1 / 4] * 4)],
)
def test_a_masked_first_token_is_in_no_denominator(algorithm, written, records, aggregation, scale):
    row = algorithm(*NO_KL[:3], f"aggregation={aggregation}", "preset=[grpo,fire]", "hot_first_token.first_token=mask")
    updates, metrics = written(row, measured=True)
    for key, value in zip(KEYS, scale, strict=True):
        found = records.column(updates, "scales")[key]
        assert found[0] == 0 and found[1:] == exact([value] * (len(found) - 1))
        assert records.column(updates, "advantages")[key][0] == 0
    log = metrics().means()
    assert (log["policy/live_tokens"], log["policy/live_sequences"]) == (14, 4)
    assert annotate.add_corrections(updates, row)[0] is updates
