"""What engines share of a request."""

import numpy as np
import pytest

from saccade.engines import collapsed, require_finite, require_room
from saccade.errors import ConfigError, TrainingError
from saccade.types import MediaSpan, Request, Sampling


def test_one_placeholder_stands_for_an_image(image):
    ids = np.array([1, 9, 9, 9, 2, 9, 9, 3])
    spans = (
        MediaSpan(media=image(), start=1, length=3, grid=(1, 2, 6)),
        MediaSpan(media=image(), start=5, length=2, grid=(1, 2, 4)),
    )
    assert collapsed(Request(key="a", ids=ids, media=spans)) == [1, 9, 2, 9, 3]
    assert collapsed(Request(key="a", ids=ids)) == ids.tolist()


def test_what_does_not_fit_is_refused_with_options_that_make_room():
    request = Request(key="a", ids=np.arange(60), sampling=Sampling(max_tokens=40))
    require_room(request, 100)
    with pytest.raises(ConfigError, match=r"60 .* 40 .* 99 .*raise data\.max_prompt_tokens"):
        require_room(request, 99)


def test_log_probs_that_are_no_numbers_are_refused():
    require_finite(np.array([-1.0, -2.0], np.float32))
    for value in (np.nan, -np.inf):
        with pytest.raises(TrainingError, match=r"not finite; `saccade doctor MODEL` names"):
            require_finite(np.array([-1.0, value], np.float32))
