"""Groups on disk: they come back as they were, and no image is written twice."""

from dataclasses import replace

import numpy as np
import pytest

from saccade.engines.embedded import EmbeddedEngine
from saccade.environments import Step
from saccade.errors import DataError
from saccade.forest.packing import pack
from saccade.media.images import crop, decode
from saccade.rollout.stored import group_files, load_groups
from saccade.system.contents import write_files
from saccade.types import Message, Sample, Sampling
from tests.system.test_codec import same


def finder(groups):
    return {group.sample.id: group.sample for group in groups}.__getitem__


@pytest.fixture
def collected(model, family, image, brief, play_with, scripted):
    """Three turns with a crop of a question's picture and one of the environment, truncated sampling, a baseline."""

    def step(turn, *shown):
        info = {"calls": ("zoom",), "board": object(), "moves": np.int64(turn)}
        return Step((Message(role="user", parts=(*shown, "more")),), 0.5, turn == 3, info)

    class Zooms(scripted):
        def reset(self, sample, seed):
            self.steps[0] = step(1, crop(sample.media[0], (0, 0, 84, 56)))
            return super().reset(sample, seed)

    samples = [
        Sample(id=f"q{n}", messages=(Message(role="user", parts=(image(140, 84, n), "Where?")),)) for n in range(2)
    ]
    sampling = Sampling(max_tokens=40, top_k=60, support=True, first=(9, -1))
    options = {"sampling": sampling, "seed": "3", "repeats": 2, "greedy": True}
    later = step(2, image(56, 56, 9)), step(3)
    return play_with(EmbeddedEngine(model, family), samples, lambda: Zooms([None, *later]), **options)


def test_rollouts_train_as_before(tmp_path, family, collected):
    write_files(tmp_path, group_files(collected))
    loaded = load_groups(tmp_path, finder(collected))
    for one, other in zip(collected, loaded, strict=True):
        assert (one.uid, one.greedy.key) == (other.uid, other.greedy.key)
        assert one.sample is other.sample and not other.greedy.trained
        for member, again in zip(one.trajectories, other.trajectories, strict=True):
            info = {k: v for k, v in member.info.items() if k != "board"}
            same(replace(member, info=info | {"calls": ["zoom"]}), again)
    before, after = (pack(groups, micro_tokens=9999) for groups in (collected, loaded))
    for one, other in zip(before, after, strict=True):
        for name in ("ids", "predictors", "targets", "sequence", "rollout_logprobs"):
            assert getattr(one, name).tobytes() == getattr(other, name).tobytes()
        assert one.positions(family.positions).tobytes() == other.positions(family.positions).tobytes()
        assert one.media == other.media


def test_media_get_their_file_from_the_sample(tmp_path, collected, image):
    """As when the data set has moved: the content is the same, the path is not."""
    write_files(tmp_path, group_files(collected))
    file = tmp_path / "moved.png"
    file.write_bytes(image(140, 84, 0).data)
    moved = replace(image(140, 84, 0), path=str(file), data=None)
    other = {"q1": collected[1].sample, "q0": replace(collected[0].sample, messages=())}
    other["q0"] = replace(other["q0"], messages=(Message(role="user", parts=(moved,)),))
    first = load_groups(tmp_path, other.__getitem__)[0]
    assert first.sample is other["q0"]
    media = [span.media for span in first.trajectories[0].media]
    assert [m.path for m in media[:2]] == [str(file)] * 2 and media[1].box == (0, 0, 84, 56)
    assert decode(media[1]).shape == (56, 84, 3)
    gone = {name: replace(sample, messages=()) for name, sample in other.items()}
    with pytest.raises(DataError, match=r"sample q0: its image [0-9a-f]{12} .*data\.train"):
        load_groups(tmp_path, gone.__getitem__)


def test_other_versions_are_refused(tmp_path):
    write_files(tmp_path, group_files([]))
    assert load_groups(tmp_path, finder([])) == []
    (tmp_path / "groups.json").write_text("[]")
    with pytest.raises(DataError, match="another version of saccade; resume with that version"):
        load_groups(tmp_path, finder([]))
