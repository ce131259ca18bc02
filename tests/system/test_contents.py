"""Files are collected first and written later, as they were when they were collected."""

from collections import defaultdict

import pytest
import torch
from safetensors.torch import load_file

from saccade.system import contents
from saccade.system.contents import host_copies, on_host, pretrained, spare_bytes, tensor_file, text_file, write_files


def test_copies_stand_still_and_tied_ones_stay_one():
    weight = torch.arange(6.0).reshape(2, 3)
    tensors = {"a": weight, "tied": weight, "part": weight[:1], "turned": weight.T}
    copies = host_copies(tensors, copy=True)
    assert copies["a"] is copies["tied"] and copies["a"].data_ptr() != weight.data_ptr()
    assert len({copy.data_ptr() for copy in copies.values()}) == 3
    weight.zero_()
    assert copies["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert copies["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]
    same = host_copies(tensors, copy=False)
    assert {tensor.data_ptr() for tensor in same.values()} == {weight.data_ptr()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.uint8])
def test_the_memory_of_a_copy_is_used_again(dtype, monkeypatch):
    monkeypatch.setattr(contents, "_SPARE", defaultdict(list))
    large = (torch.arange(contents.LEAST_SPARE + 4096).reshape(2, -1).T % 7).to(dtype)
    first, second = on_host(large, copy=True), on_host(large, copy=True)
    places = {first.data_ptr(), second.data_ptr()}
    assert len(places) == 2 and torch.equal(first, large) and torch.equal(second, large)
    part, address = first[1:], first.data_ptr()
    del first
    assert spare_bytes() == 0  # a part of it is in use
    del part
    assert spare_bytes() == large.nbytes
    third = on_host(~large if dtype == torch.bool else large + 1, copy=True)
    assert third.data_ptr() == address and spare_bytes() == 0
    assert torch.equal(second, large) and not torch.equal(third, large)


def test_files_go_where_their_path_says(tmp_path):
    turned = torch.arange(6.0).reshape(2, 3).T
    files = [("a/b/t.safetensors", tensor_file({"t": turned})), ("note.json", text_file("{}"))]
    write_files(tmp_path / "new", files)
    assert torch.equal(load_file(tmp_path / "new/a/b/t.safetensors")["t"], turned)
    assert (tmp_path / "new" / "note.json").read_text() == "{}"


def test_a_model_is_written_as_it_was(load, tmp_path, tensors):
    model = load("qwen2")
    later = pretrained(model, host_copies(model.state_dict(), copy=True))
    model.save_pretrained(tmp_path / "now")
    model.config.note = {"of": "another step"}
    model.score = torch.nn.Linear(2, 2)
    del model.model.layers[0]
    for parameter in model.parameters():
        parameter.data.zero_()
    later(tmp_path / "later")
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        assert (tmp_path / "now" / name).read_bytes() == (tmp_path / "later" / name).read_bytes()
