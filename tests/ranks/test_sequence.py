"""Four ranks that compute forests in two groups, or all together, against one process; and runs of two ranks that share
every forest.
"""

import os
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from saccade.algorithms.build import resolve
from saccade.config import AlgorithmConfig, TrainConfig, load
from saccade.errors import ConfigError
from saccade.forest.batch import Batch, Forest
from saccade.forest.packing import pack
from saccade.models.families import Family, load_family
from saccade.models.heads import attach_score, blocks_of
from saccade.models.load import freeze
from saccade.plugins.families.tiny import build
from saccade.plugins.imitation.imitation_sources import teacher_of
from saccade.plugins.preferences.preference_losses import PreferenceLoss
from saccade.plugins.ranks.divided import DividedOptimizer
from saccade.plugins.ranks.machines import HOST
from saccade.plugins.ranks.sequence import HybridSequence, bounds_of, stretch, trainer_class
from saccade.recipes import rl
from saccade.trainer import Scoring
from saccade.trainer.losses import PolicyLoss, ValueLoss
from tests.ranks import test_divided as divided
from tests.ranks.test_divided import EXPERTS, VISION, Case, made, require_same_training, train
from tests.ranks.test_ranks import STORED, require_alike, require_same_weights, sampled

DEEP, WIDE, PAIRS = "qwen3_vl", "four heads", "pairs"  # forests and models beside those of `test_divided`
SHARED = {WIDE: VISION, PAIRS: VISION}  # whose tokens they have


def policy(preset: str, **options: Any) -> PolicyLoss:
    config = AlgorithmConfig(preset=preset, kl={"coef": 0.1}, **options)  # type: ignore[arg-type]
    return PolicyLoss(resolve(config, max_tokens=64), Scoring(temperature=0.7))


GRPO, SIMPO = policy("grpo"), PreferenceLoss(loss="simpo", options={}, nll_coef=0.1, count=2, chosen_tokens=9)
CRITIC = Case(((1, 2), ()), loss=ValueLoss(0.2), change=lambda model, family: attach_score(model, seed=0))
CASES = {  # forests of the first and of the second group; 0 and 1 have images
    "images and text": Case(((0, 1), (2,)), loss=GRPO),
    "recomputed": Case(((0,), (1, 2)), loss=GRPO, checkpointing=True),
    "only a tower": Case(((0, 2), (3,)), loss=GRPO, change=lambda model, family: freeze(model, family, "freeze:llm")),
    "whole sequences": Case(((0,), (2,)), loss=policy("gspo")),
    "entropy": Case(((2,), (3,)), loss=policy("grpo", entropy_coef=0.1)),  # no image anywhere
    "critic": CRITIC,
    "nan": Case(((0,), (2,)), loss=GRPO),
    "pairs": Case(((0,), (1,)), family=PAIRS, loss=SIMPO),
    "teacher": Case(((0,), (2,)), taught=True),
    "features of many layers": Case(((0,), (1,)), family=DEEP, loss=GRPO),
    "experts": Case(((0,), (1,)), family=EXPERTS, loss=GRPO),
    "more heads": Case(((0,), (2,)), family=WIDE, loss=GRPO),
    "all four": Case(((0, 4), ()), family=WIDE, loss=GRPO, checkpointing=True),
} | ({"lora": Case(((0,), (2,)), loss=GRPO, change=divided.adapt)} if find_spec("peft") else {})
LAYOUTS = {f"sharded {name}": "sharded" for name in ("images and text", "only a tower", "recomputed")}
LAYOUTS |= {"hybrid critic": "hybrid"}  # each group is a machine
CASES |= {name: CASES[name.partition(" ")[2]] for name in LAYOUTS}


def size_of(name: str) -> int:
    return 4 if name == "all four" else 2


# -- a rank ------------------------------------------------------------------------------------------


def on_rank(rank: int, folder: Path, paths: dict[str, str], forests: dict[str, list[Batch]]) -> dict[str, Any]:
    families = {name: load_family(path) for name, path in paths.items()}
    found: dict[str, Any] = {}
    os.environ[HOST] = f"machine-{rank // 2}"

    def backend(name: str) -> Any:
        options, case = TrainConfig(sequence_parallel=size_of(name), layout=LAYOUTS.get(name, "whole")), CASES[name]  # type: ignore[arg-type]
        return made(case, families[case.family], DividedOptimizer, trainer_class(options))  # type: ignore[arg-type]

    for name, case in CASES.items():
        parts = divided.dealt(name, forests, CASES)
        found[name] = *train(backend(name), case, parts[rank // size_of(name)]), True
    critic, reader = backend("critic"), backend("images and text")
    found["values"] = critic.values(forests[VISION][:2])
    found["logprobs"] = reader.logprobs(forests[VISION][:2], Scoring())
    found["measured"] = critic.measure([forests[VISION][rank // 2]], CRITIC.loss)
    found["recomputed layers"] = agreed_layers(reader, forests[VISION][0], rank)
    try:
        made(CRITIC, families[VISION], DividedOptimizer, partial(HybridSequence, size=4))  # type: ignore[arg-type]
    except ConfigError as error:
        found["two machines"] = str(error)
    return found


def agreed_layers(backend: Any, batch: Batch, rank: int) -> list[bool]:
    """Where the memory of one rank is short: the layers that compute again."""
    backend.model.gradient_checkpointing_enable({"use_reentrant": False})
    backend.model.train()
    backend.recompute = SimpleNamespace(planned=True, spare=0.0)
    first, second = blocks_of(backend.model)
    first.gradient_checkpointing, second.gradient_checkpointing = rank == 1, rank > 1
    backend.score(batch, Scoring())[0].sum().backward()
    return [first.gradient_checkpointing, second.gradient_checkpointing]


# -- one process, and what all found -----------------------------------------------------------------


@pytest.fixture(scope="module")
def families(family_of: Any, tmp_path_factory: Any) -> dict[str, Family]:
    wide = build(VISION, tmp_path_factory.mktemp("wide"), text={"num_attention_heads": 4, "num_key_value_heads": 2})
    known = {name: family_of(name) for name in (VISION, EXPERTS, DEEP)}
    return known | {WIDE: load_family(wide), PAIRS: known[VISION]}


@pytest.fixture(scope="module")
def forests(families: dict[str, Family], grow: Any) -> dict[str, list[Batch]]:
    rng = np.random.default_rng(1)

    def forest(name: str, images: int, size: int = 4) -> Batch:
        groups = [grow(rng, families[name], uid=f"{n}", depth=1, images=images, size=size) for n in range(2)]
        [one] = pack(groups, micro_tokens=9999, ends=True)
        new = {c: rng.standard_normal(one.target_count).astype(np.float32) for c in ("advantages", "values", "returns")}
        known = {c: -2 * rng.random(one.target_count, np.float32) for c in ("old_logprobs", "ref_logprobs")}
        return replace(one, scales=np.full(one.target_count, 0.01, np.float32), **new, **known)

    found = {VISION: [forest(VISION, n) for n in (2, 1, 0, 0)], EXPERTS: [forest(EXPERTS, 0) for _ in range(2)]}
    found |= {DEEP: [forest(DEEP, 1), forest(DEEP, 0)], PAIRS: [forest(VISION, n, size=2) for n in (1, 0)]}
    zero = np.zeros(1, np.int64)
    three = Forest(  # fewer tokens than ranks
        rows=np.arange(20, 23),
        row_lengths=zero + 3,
        sampled_runs=np.array([[1, 3]]),
        lengths=zero + 2,
        keys=(("short", 0),),
        groups=zero,
        media_lists=((),),
        media_index=zero,
        with_ends=True,
    )
    short = Batch(forest=three, **{name: np.ones(2, np.float32) for name in ("advantages", "scales", "ref_logprobs")})
    return found | {WIDE: [*found[VISION], short]}


@pytest.fixture(scope="module")
def results(tmp_path_factory: Any, families: dict[str, Family], forests: dict[str, list[Batch]]) -> Any:
    """By case: what one process finds, and what each of four ranks finds."""
    folder = tmp_path_factory.mktemp("sequence")
    return divided.beside_ranks(on_rank, folder, families.__getitem__, forests, CASES, ranks=4)


@pytest.mark.parametrize("name", CASES)
def test_groups_of_ranks_train_as_one_process_does(results: Any, name: str) -> None:
    require_same_training(name, results[0][divided.plain(name)], [found[name] for found in results[1]])


def test_every_rank_of_a_group_reads_the_whole_forest(results: Any, families: Any, forests: Any) -> None:
    _, ranks = results
    critic = made(CRITIC, families[VISION])
    values = critic.values(forests[VISION][:2])
    logprobs = made(Case(), families[VISION]).logprobs(forests[VISION][:2], Scoring())
    for found in ranks:
        for name, wanted in (("values", values), ("logprobs", logprobs)):
            for pair, other in zip(found[name], wanted, strict=True):
                for mine, theirs in zip(pair, other, strict=True):
                    np.testing.assert_allclose(mine, theirs, atol=1e-5)
    measured = critic.measure(forests[VISION][:2], CRITIC.loss)
    merged = divided.Metrics()
    merged.merge(*(found["measured"] for found in ranks))
    assert merged.means() == pytest.approx(measured.means(), rel=1e-5)
    assert merged.sums == {name: pytest.approx(pair, rel=1e-5) for name, pair in measured.sums.items()}


def test_a_layer_that_one_rank_computes_again_all_of_its_group_do(results: Any) -> None:
    found = [rank["recomputed layers"] for rank in results[1]]
    assert found == [[True, False], [True, False], [False, True], [False, True]]


def counting(ids: np.ndarray, media: Any) -> np.ndarray:
    return np.arange(len(ids))[None]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_stretches_cover_a_forest_once(forests: dict[str, list[Batch]], size: int) -> None:
    batch = forests[VISION][0]
    kept = tuple(np.array([target]) for target in range(batch.target_count))
    batch = replace(batch, forest=replace(batch.forest, support=kept))
    parts, bounds = [stretch(batch, place, size) for place in range(size)], bounds_of(batch, size)
    lengths = {part.tokens for part in parts}
    assert max(lengths) - min(lengths) <= 1 and sum(part.tokens for part in parts) == batch.tokens
    np.testing.assert_array_equal(np.concatenate([part.ids for part in parts]), batch.ids)
    np.testing.assert_array_equal(
        np.concatenate([part.positions(counting) for part in parts], 1), batch.positions(counting)
    )
    order = np.argsort([int(one[0]) for part in parts for one in part.support or ()])
    predictors = np.concatenate([part.predictors + start for part, start in zip(parts, bounds[:-1], strict=True)])
    np.testing.assert_array_equal(predictors[order], batch.predictors)
    np.testing.assert_array_equal(np.concatenate([part.targets for part in parts])[order], batch.targets)
    shown = [(s.start + b, s.end + b) for part, b in zip(parts, bounds[:-1], strict=True) for s in part.media]
    assert {*shown} == {(span.start, span.end) for span in batch.media}
    cut = [bound for bound in bounds for span in batch.media if span.start < bound < span.end]
    assert len(shown) == len(batch.media) + len(cut) and (cut or size == 1)


# -- runs --------------------------------------------------------------------------------------------


def test_two_ranks_that_share_forests_run_as_one_process(
    tmp_path: Path, rl_config: Any, tensors: Any, forked_ranks: None
) -> None:
    more = {"algorithm.preset": ["ppo"], "algorithm.kl.coef": 0.05, "train.updates_per_step": 2} | STORED
    start = partial(rl_config, tmp_path, run__max_steps=2)
    rl.run(start(run__name="one") | more)
    rl.run(start(run__name="two", run__gpus=2, train__sequence_parallel=2) | more)
    one, two = tmp_path / "one", tmp_path / "two"
    assert sampled(two) == sampled(one)
    require_alike(two, one)
    require_same_weights(*(tensors(run / "checkpoints" / "step-2") for run in (two, one)))


def test_what_cannot_be_divided_is_refused(tmp_path: Path, rl_config: Any, results: Any, families: Any) -> None:
    taught = {"model.path": families[WIDE].path, "sft.teacher": families[VISION].path, "run.gpus": 4}
    with pytest.raises(ConfigError, match=f"4 does not divide 2 heads of attention of {families[VISION].path}; try"):
        teacher_of(load(taught, ["train.sequence_parallel=4"], "sft"), families[WIDE])
    assert all("4 GPUs are on several machines" in found["two machines"] for found in results[1])
    for gpus, size, aux, message in (
        (4, 3, 0.0, r"3 does not divide run\.gpus=4; try train.sequence_parallel=2"),
        (4, 4, 0.0, r"4 does not divide 2 heads of attention of .*; try 1 or 2"),
        (2, 2, 0.1, r"train\.aux_coef: .* try train.aux_coef=0"),
    ):
        with pytest.raises(ConfigError, match=message):
            rl.run(rl_config(tmp_path, run__gpus=gpus, train__sequence_parallel=size, train__aux_coef=aux))
