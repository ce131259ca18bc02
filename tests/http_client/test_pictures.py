"""Images on their way to an endpoint."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from saccade.http_client.pictures import Pictures, encode
from saccade.media.images import ImageError
from saccade.types import Media


def test_one_image_does_not_wait_for_another(tmp_path: Path, image: Callable[..., Media]) -> None:
    """The first is read from a pipe that nobody has written to yet."""
    slow, quick = image(56, 56, 1), image(56, 56, 2)
    os.mkfifo(tmp_path / "slow.png")
    piped = replace(slow, data=None, path=str(tmp_path / "slow.png"))
    pictures, found = Pictures(), []
    # Daemons, so that a failure does not hang.
    asking = [
        threading.Thread(target=lambda: found.append(pictures(piped)), daemon=True)
        for _ in range(3)
    ]
    for thread in asking:
        thread.start()
    other = threading.Thread(target=lambda: found.append(pictures(quick)), daemon=True)
    other.start()
    other.join(20)
    assert found == [encode(quick)]
    (tmp_path / "slow.png").write_bytes(slow.data or b"")  # read once, or the second would hang
    for thread in asking:
        thread.join(20)
    assert found[1:] == [encode(slow)] * 3


@pytest.mark.parametrize("kind", ["video", "audio"])
def test_what_is_no_image_is_refused_by_name(image: Callable[..., Media], kind: str) -> None:
    still = image(56, 56)
    more = {"frames": (0, 1), "fps": 1.0} if kind == "video" else {}
    with pytest.raises(ImageError, match=f"sent images, and no {kind}"):
        encode(replace(still, kind=kind, **more))
