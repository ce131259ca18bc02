"""What a judge of two things may say: words for prompts and demonstrations, known to the reward.

>>> VERDICTS["video"][1]
'Video 2 is better'
"""

from __future__ import annotations

from collections.abc import Mapping

# First, second, neither.
VERDICTS: Mapping[str, tuple[str, str, str]] = {
    medium: (
        f"{medium.capitalize()} 1 is better",
        f"{medium.capitalize()} 2 is better",
        f"Both {medium}s are equally good",
    )
    for medium in ("image", "video", "audio", "response")
}
