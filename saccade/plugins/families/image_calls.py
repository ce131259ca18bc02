"""An image processor that is called alone. What a processor does for a picture beside that (checks of options, text,
tokens) takes twice as long, and gives the same for every picture of a size.

Nothing is assumed: it notes how the processor calls it, and makes such a call itself only where that gave the same
arrays to the bit, and all others were those of a blank picture, for the first three sizes.

    calls = processor.image_processor = ImageCalls(processor.image_processor)
    whole = processor(text=[text], images=[picture])         # noted
    calls.compare(picture, options, size, whole, blank)      # the same without the processor?
    calls.made(picture, options, blank)                      # from now on
"""

import threading
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from saccade.plugins.families.picture_rows import PictureRow

ENOUGH = 3  # sizes


class Call(NamedTuple):
    nested: int  # lists around a picture
    options: Mapping[str, Any]
    names: Collection[str] = ()  # of the arrays of a row, in order
    found: Collection[str] = ()  # also of those that the processor reads itself


class ImageCalls:
    def __init__(self, own: Any) -> None:
        self.own = own
        self._noted = threading.local()
        self._calls: dict[str, dict[Any, Call] | None] = {}  # by pixel budget: sizes that agreed; None: one did not

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def __call__(self, images: Any = None, **options: Any) -> Any:
        self._noted.call = images, options
        return self.own(images, **options)

    def made(self, picture: Any, budget: Mapping[str, Any], blank: PictureRow) -> PictureRow | None:
        """The arrays of a picture; `blank`: those of an empty one of its size. None as long as nothing is known, and
        for a size with other arrays, or with so many tokens that not all of theirs were kept.
        """
        calls = self._calls.get(repr(budget))
        if not calls or len(calls) < ENOUGH:
            return None
        call = next(iter(calls.values()))
        found = self._alone(picture, call, blank)
        return PictureRow({name: found[name] for name in call.names}) if found.keys() == call.found else None

    def compare(
        self, picture: Any, budget: Mapping[str, Any], size: tuple[Any, ...], whole: PictureRow, blank: PictureRow
    ) -> None:
        """Note whether the arrays that the processor has just made of a picture in this thread come without it, too."""
        known, key = self._calls.get(repr(budget), {}), repr(budget)
        if known is None or size in known:
            return
        images, options = self._noted.__dict__.pop("call", (None, {}))
        nested = 0
        while isinstance(images, list) and len(images) == 1:
            images, nested = images[0], nested + 1
        call = Call(nested, options | {"return_tensors": "pt"})
        try:
            found = self._alone(picture, call, blank) if images is picture else {}
        except Exception:  # whatever it lacks
            found = {}
        same = found.keys() >= whole.keys() and all(
            found[name].dtype == value.dtype and np.array_equal(found[name], value) for name, value in whole.items()
        )
        self._calls[key] = {**known, size: call._replace(names=[*whole], found={*found})} if same else None

    def _alone(self, picture: Any, call: Call, blank: PictureRow) -> dict[str, np.ndarray]:
        for _ in range(call.nested):
            picture = [picture]
        return {**blank, **arrays(self.own(picture, **call.options))}


def arrays(made: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Tensors as arrays; there are none of bfloat16, and nothing is lost."""
    found = {name: value for name, value in made.items() if isinstance(value, torch.Tensor)}
    return {name: (value.float() if value.is_floating_point() else value).numpy() for name, value in found.items()}
