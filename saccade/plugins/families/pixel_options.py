"""Options of an image processor that follow from a pixel budget, for those that make as many tokens of a small picture
as of a large one: they cut it by its shape, or enlarge it. What its folder says is the most.

    options_of(processor.image_processor)(3136, 401_408)   # {"min_patches": 1, "max_patches": 2, "allowed_patches": …}
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

Options = Mapping[str, Any]
ALLOWED = "allowed_"  # how names begin in what a run saves: what the model came with, so that a later run may show more
SOFT_TOKENS = (70, 140, 280, 560, 1120)  # of which a Gemma 4 has one


def options_of(processor: Any) -> Callable[[int, int], Options] | None:
    """(min_pixels, max_pixels) → options of a call. None: it has no such option."""
    return next((bound for bind in (_tiles, _edge, _soft_tokens) if (bound := bind(processor))), None)


def call_options(options: Options) -> dict[str, Any]:
    return {name: value for name, value in options.items() if not name.startswith(ALLOWED)}


def _tiles(processor: Any) -> Callable[[int, int], Options] | None:
    """InternVL, Aya: tiles have the pixels of the budget together, that of the whole picture not counted."""
    size: Any = getattr(processor, "size", None)
    most = getattr(processor, "max_patches", None)
    if most is None or not getattr(size, "height", None):
        return None
    fewest, most = getattr(processor, f"{ALLOWED}patches", None) or (getattr(processor, "min_patches", None), most)
    area = size.height * size.width

    def within(low: int, high: int) -> Options:
        largest = min(most, max(1, high // area))
        found = {"max_patches": largest, f"{ALLOWED}patches": [fewest, most]}
        return found if fewest is None else {"min_patches": min(largest, max(fewest, -(-low // area))), **found}

    return within


def _edge(processor: Any) -> Callable[[int, int], Options] | None:
    """SmolVLM, Idefics 3: the longest edge is a number of whole tiles, the one nearest to the root of the budget."""
    allowed, side = (getattr(processor, name, None) for name in (f"{ALLOWED}size", "max_image_size"))
    most = allowed["longest_edge"] if allowed else getattr(getattr(processor, "size", None), "longest_edge", None)
    if not (most and side and getattr(processor, "do_image_splitting", False)):
        return None
    tile = side["longest_edge"]

    def within(low: int, high: int) -> Options:
        edge = min(most, tile * max(1, round(math.sqrt(high) / tile)))
        return {"size": {"longest_edge": edge}, f"{ALLOWED}size": {"longest_edge": most}}

    return within


def _soft_tokens(processor: Any) -> Callable[[int, int], Options] | None:
    """Gemma 4."""
    name = "max_soft_tokens"
    most = getattr(processor, f"{ALLOWED}{name}", None) or getattr(processor, name, None)
    if most is None:
        return None
    area = (processor.patch_size * processor.pooling_kernel_size) ** 2

    def within(low: int, high: int) -> Options:
        fitting = [count for count in SOFT_TOKENS if count <= min(most, high // area)]
        return {name: max(fitting, default=SOFT_TOKENS[0]), f"{ALLOWED}{name}": most}

    return within
