"""An environment of your own: guess a number, told "higher" or "lower" after every guess.

    saccade rl run.yaml env.name=examples/my_environment.py:Guess env.args='{most: 64}'

and a tool of your own, which any policy can call beside the crop tool:

    saccade rl run.yaml env.name=crop env.tools=[examples/my_environment.py:brighten]

Every episode gets an instance in a process of its own; whatever happens there costs one episode.
Try it from the folder of the repository:

    $ python examples/my_environment.py
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence

import numpy as np

from saccade.media.images import decode
from saccade.types import Media, Message, Sample


class Guess:
    def __init__(self, most: int = 64) -> None:
        self.most = most

    def reset(self, sample: Sample, seed: int) -> Sequence[Message]:
        """The conversation that the policy continues. All that is random comes from the seed."""
        self.number = random.Random(seed).randint(1, self.most)
        return (Message(role="user", parts=(f"Guess my number between 1 and {self.most}.",)),)

    def step(self, message: Message) -> tuple[Sequence[Message], float | None, bool, dict]:
        """What is said next, the reward of this turn or None, whether it is over, and notes."""
        found = re.findall(r"\d+", message.text)
        if not found:
            return (), 0.0, True, {"end_reason": "eos_no_answer"}
        guess = int(found[-1][:6])
        if guess == self.number:
            return (), 1.0, True, {"guess": guess}
        hint = "higher" if guess < self.number else "lower"
        return (Message(role="user", parts=(f"It is {hint}.",)),), None, False, {"guess": guess}

    def close(self) -> None:
        """Give back what reset took: files, connections, a browser."""


def brighten(source: str, factor: float = 2.0, *, images: Mapping[str, Media]) -> np.ndarray:
    """Shows a picture brighter; source is its name, such as original_image."""
    if source not in images or not 0 < factor <= 8:
        raise ValueError(f"source is one of {', '.join(images)}, factor between 0 and 8")
    return np.clip(decode(images[source]) * factor, 0, 255).astype(np.uint8)


if __name__ == "__main__":
    game = Guess()
    (question,) = game.reset(Sample(id="demo", messages=()), seed=7)
    print(question.text)
    low, high, done = 1, game.most, False
    while not done:
        guess = (low + high) // 2
        said, reward, done, _ = game.step(Message(role="assistant", parts=(str(guess),)))
        print(guess, "->", said[0].text if said else f"right, reward {reward}")
        low, high = (guess + 1, high) if said and "higher" in said[0].text else (low, guess - 1)
