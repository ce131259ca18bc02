"""A reward of your own: near misses earn a little, and long-winded thoughts cost a little.

    reward:
      terms:
        - verifier: examples/my_reward.py:close_count
          args: {width: 3}
        - format:think_answer

Try it from the folder of the repository:

    $ python examples/my_reward.py
"""

from __future__ import annotations

from saccade.plugins.verifiers.extract import extract
from saccade.plugins.verifiers.numbers import single_number
from saccade.rewards.reward_sample import RewardSample
from saccade.types import Score

PLACES = ["answer_tag", "boxed"]


def close_count(sample: RewardSample, width: int = 3) -> Score:
    """1 for the right count, less for a count that is off by fewer than `width`.

    The part `accuracy` is the outcome: filters, accuracy and the self-test read it, so that half
    marks never count as right.
    """
    found = extract(sample.response, PLACES, think_prefilled=sample.think_prefilled)
    guess = single_number(found or "")
    gold = single_number(str(sample.answer))
    if gold is None:
        return Score(kind="abstain", reason="gold_unparseable")
    if guess is None:
        return Score(kind="value", value=0.0, parts={"accuracy": 0.0}, reason="no_answer")
    value = max(0.0, 1.0 - abs(float(guess - gold)) / width)
    return Score(kind="value", value=value, parts={"accuracy": float(value == 1)}, extracted=found)


def brevity(samples: list[RewardSample], target: int = 256) -> list[float]:
    """A batch function: 0 up to `target` tokens, then falling to -1 at twice as many.

    Use it with `shaping: true`. It sees any number of samples at a time, so each result depends on
    its own sample only.
    """
    return [-min(1.0, max(0.0, sample.length / target - 1)) for sample in samples]


if __name__ == "__main__":
    for text in ("<answer>7</answer>", "<answer>6</answer>", "<answer>none</answer>"):
        print(text, close_count(RewardSample(id="demo", response=text, answer="7")).value)
