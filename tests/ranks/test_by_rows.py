"""Two ranks read a model that they divide: neither ever has all of it, and nothing else changes."""

import shutil
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from saccade.config import LoraConfig
from saccade.forest import attention
from saccade.models import lora
from saccade.models.families import load_family
from saccade.models.load import load_model
from saccade.plugins.ranks import by_rows
from saccade.plugins.ranks.layouts import numbers_in
from saccade.plugins.ranks.sharded import ShardedTrainer
from saccade.system.contents import write_files
from tests.ranks.processes import on_ranks
from tests.ranks.test_divided import equal

LAYERS = 8
load = partial(load_model, dtype=torch.float32, device=torch.device("cpu"))


def held(model: Any) -> int:
    """Bytes of all weights that this process has."""
    parts = [getattr(p, "_local_tensor", p).detach() for p in model.parameters()]
    parts += [p.rows for p in model.parameters() if hasattr(p, "rows")]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in parts}.values())


def is_there(weights: Any) -> bool:
    return not any(weight.isnan().any() for weight in weights)


def adapted(model: Any) -> dict[str, torch.Tensor]:
    lora.add(model, load_family(model.name_or_path), LoraConfig(rank=2), seed=0)
    return lora.copy_adapters(model)


def on_rank(rank: int, folder: Path, deep: str, tied: str) -> dict[str, Any]:
    family, ids = load_family(deep), torch.arange(1, 9)[None]
    plan = attention.forest_plan(np.array([0, 8]), np.array([-1]), ids.device, torch.float32)
    given = {"input_ids": ids, "position_ids": ids, "attention_plan": plan, "use_cache": False}
    whole, part = load(family), by_rows.ByRows(dist.group.WORLD)
    model: Any = load(family, by_rows=part)
    found = {"read": (held(model), held(whole))}
    with torch.no_grad():
        wanted = whole(**given).logits
        with part.running(model):
            found["logits"] = torch.equal(model(**given).logits, wanted)
    seen = [(is_there(piece.parameters()), is_there(model.lm_head.parameters())) for piece in part.pieces(model)]
    found["pieces"] = seen, is_there(model.parameters())
    gather, most = by_rows.all_gather, [0]

    def counted(everything: Any, *arguments: Any, **options: Any) -> None:
        gather(everything, *arguments, **options)
        most.append(held(model) + everything.nbytes)

    by_rows.all_gather = counted
    backend = ShardedTrainer(model, family)
    found["most"] = max(most)
    write_files(folder / f"written-{rank}", backend.model_files(copy=True))
    if find_spec("peft"):
        found["adapters"] = [adapted(each) for each in (load(family), load(family, by_rows=part))]
    twice: Any = load(load_family(tied), by_rows=part)
    found["tied"] = twice.lm_head.weight is twice.model.embed_tokens.weight
    return found


@pytest.fixture(scope="module")
def read(tmp_path_factory: Any, family_of: Any) -> Any:
    """Of a mixture of experts, which transformers joins as it reads them, with more layers than one; and of a decoder
    whose files have its one embedding twice, in another dtype.
    """
    import transformers

    folder = tmp_path_factory.mktemp("by_rows")
    shutil.copytree(family_of("mixtral").path, deep := folder / "deep")
    config = transformers.AutoConfig.from_pretrained(deep, num_hidden_layers=LAYERS)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(deep)
    shutil.copytree(family_of("qwen3").path, tied := folder / "tied")
    stored = {name: tensor.bfloat16() for name, tensor in load_file(tied / "model.safetensors").items()}
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    save_file(stored, tied / "model.safetensors", {"format": "pt"})
    config = transformers.AutoConfig.from_pretrained(tied, tie_word_embeddings=True)
    config.save_pretrained(tied)
    _, ranks = on_ranks(on_rank, folder / "ranks", str(deep), str(tied))
    return ranks, folder


def test_no_rank_ever_has_all_weights(read: Any) -> None:
    ranks, folder = read
    allowed = 4 * numbers_in(folder / "deep", ranks=2, tower_of=lambda name: "llm")
    for rank in ranks:
        rows, whole = rank["read"]
        assert whole == 4 * numbers_in(folder / "deep") and rows == pytest.approx(whole / 2, rel=0.02)
        assert whole / 2 < rank["most"] <= allowed < 0.75 * whole


def test_a_model_of_which_ranks_have_rows_computes_the_same(read: Any) -> None:
    for rank in read[0]:
        assert rank["logits"] and rank["tied"]
        for one, other in [rank["adapters"]] if "adapters" in rank else []:
            assert one and equal(one, other)
        layers, (_, beside) = rank["pieces"][0][:-1], rank["pieces"][0][-1]
        assert layers == [(True, False)] * LAYERS and beside and not rank["pieces"][1]


def test_what_was_read_by_rows_is_written_to_the_bit(read: Any, tensors: Any) -> None:
    _, folder = read
    written, given = tensors(folder / "ranks" / "written-0"), tensors(folder / "deep")
    assert equal(written, given)
