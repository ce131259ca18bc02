"""Files are collected first and written later, as they were when they were collected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from saccade.contents import held, pretrained, tensor_file, text_file, write_files


def test_copies_stand_still_and_tied_ones_stay_one() -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    tensors = {"a": weight, "tied": weight, "part": weight[:1], "turned": weight.T}
    copies = held(tensors, copy=True)
    assert copies["a"] is copies["tied"] and copies["a"].data_ptr() != weight.data_ptr()
    assert len({copy.data_ptr() for copy in copies.values()}) == 3
    weight.zero_()
    assert copies["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert copies["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]
    same = held(tensors, copy=False)
    assert {tensor.data_ptr() for tensor in same.values()} == {weight.data_ptr()}


def test_files_go_where_their_path_says(tmp_path: Path) -> None:
    turned = torch.arange(6.0).reshape(2, 3).T
    files = [("a/b/t.safetensors", tensor_file({"t": turned})), ("note.json", text_file("{}"))]
    write_files(tmp_path / "new", files)
    assert torch.equal(load_file(tmp_path / "new/a/b/t.safetensors")["t"], turned)
    assert (tmp_path / "new" / "note.json").read_text() == "{}"


def test_a_model_is_written_as_it_was(
    load: Callable[..., Any], tmp_path: Path, tensors: Callable[..., dict[str, Any]]
) -> None:
    model = load("qwen2")
    later = pretrained(model, held(model.state_dict(), copy=True))
    model.save_pretrained(tmp_path / "now")
    model.config.note = {"of": "another step"}
    model.score = torch.nn.Linear(2, 2)
    del model.model.layers[0]
    for parameter in model.parameters():
        parameter.data.zero_()
    later(tmp_path / "later")
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        assert (tmp_path / "now" / name).read_bytes() == (tmp_path / "later" / name).read_bytes()
