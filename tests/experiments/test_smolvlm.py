"""The small model that sees, from nothing: a random one on a CPU."""

import json
import shutil
from argparse import Namespace
from pathlib import Path

import pytest

from experiments.pages import read
from experiments.smolvlm import base, pictures, run
from experiments.smolvlm.page import WHAT


def test_it_runs_from_nothing_and_its_weights_travel_as_what_has_changed(tmp_path: Path) -> None:
    run.main(["--tiny", "--out", str(tmp_path)])
    found = read(tmp_path / "results")
    assert {(name, kind) for name, kinds in found["answers"][0]["tables"].items() for kind in kinds} == WHAT.keys()
    assert (tmp_path / "RESULTS.md").read_text().count("[0.0, 79.3]") == len(WHAT)  # one item of each, not one right
    (trained,) = tmp_path.glob("test/second-0/checkpoints/step-1")
    again = base.unpack(tmp_path / "language", tmp_path / "packed", tmp_path / "again", tower=base.SMALL)
    assert base.digest(base.weights(again)) == base.digest(base.weights(trained))
    sent = base.weights(tmp_path / "packed", base.PARTS)
    fixed = "language_model.model.embed_tokens.weight"
    assert fixed in base.weights(trained) and fixed not in sent and any("vision_tower" in name for name in sent)
    asked = [json.loads(line)["answer"] for line in (tmp_path / "held_out" / "unseen.jsonl").read_text().splitlines()]
    rows = [json.loads(line) for line in (tmp_path / "first.jsonl").read_text().splitlines()]
    read_out = [turn["content"] for row in rows[2::3] for turn in row["messages"] if turn["role"] == "assistant"]
    assert all(pictures.unseen(word) for answer in asked for word in answer.split())
    assert not any(pictures.unseen(word) for text in read_out for word in text.split() if len(word) > 2)
    shutil.copytree(tmp_path / "language", tmp_path / "other" / "language")
    asked_for = Namespace(out=tmp_path / "other", packed=tmp_path / "packed", model=None, gguf=None, tiny=False)
    with pytest.raises(SystemExit, match="is not the model that was packed"):
        base.start_model(asked_for)
    assert not (tmp_path / "other" / "model").exists()  # which the next call would take
