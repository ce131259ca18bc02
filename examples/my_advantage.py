"""An advantage of your own: the group's median in place of its mean.

    saccade rl run.yaml algorithm.advantage=examples/my_advantage.py:median

A built-in estimator looks the same: a function of the step's members that gives one number per
policy token, and an `Entry` that says what it is. `inputs` is documented at `AdvantageInputs`.
"""

from __future__ import annotations

from torch import Tensor

from saccade.algorithms.advantages import AdvantageInputs
from saccade.algorithms.table import Entry


def median_baseline(inputs: AdvantageInputs) -> Tensor:
    centred = inputs.scores.clone()
    for group in inputs.groups.unique():
        members = (inputs.groups == group) & inputs.baseline
        if members.any():
            centred[members] -= inputs.scores[members].quantile(0.5)
    return inputs.per_token(centred)


# `group=True` asks for the rules of groups: a constant group gets exactly 0, a lone member does not
# train, and samples_per_prompt=1 is refused. The bare function would work too, without those rules.
median = Entry(function=median_baseline, formula="R - median_g", group=True)
