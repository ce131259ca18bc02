"""Two ranks with a divided optimizer against one process that has all batches, and the files of any number of ranks.

One pair of processes runs all cases.
"""

import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from saccade.algorithms.build import resolve
from saccade.config import AlgorithmConfig, LoraConfig, TrainConfig
from saccade.errors import EnvironmentProblem
from saccade.forest.batch import Batch
from saccade.forest.packing import pack
from saccade.models import lora
from saccade.models.families import Family, load_family
from saccade.models.heads import attach_score
from saccade.models.load import freeze, load_model
from saccade.plugins.imitation.imitation_sources import DistillationLoss
from saccade.plugins.offload import host_state
from saccade.plugins.ranks.divided import DividedOptimizer
from saccade.system.contents import write_files
from saccade.trainer import Loss, Scoring
from saccade.trainer import optimizer as optimizers
from saccade.trainer.local import LocalTrainer
from saccade.trainer.losses import PolicyLoss, ValueLoss
from saccade.trainer.optimizer import Optimizer
from saccade.trainer.optimizer_files import load_optimizer, optimizer_file
from saccade.types import Metrics
from tests.ranks.processes import on_ranks

GRPO = AlgorithmConfig(preset="grpo", kl={"coef": 0.1})  # type: ignore[arg-type]  # so that a reference counts
POLICY = PolicyLoss(resolve(GRPO, max_tokens=64), Scoring())
VISION, EXPERTS, GENERIC = "qwen2_5_vl", "mixtral", "gemma3"
TRAIN = TrainConfig(eps=1e-3)  # else the first steps of Adam blow up rounding
Tensors = dict[str, torch.Tensor]
LOADED: dict[Any, Any] = {}  # models by folder and dtype


@dataclass(frozen=True)
class Case:
    """Forests 0 to 3 have images, 4 and 5 are text only."""

    deal: tuple[tuple[int, ...], ...] = ((0, 4), (1,))
    train: TrainConfig = TRAIN
    dtype: torch.dtype = torch.float32
    family: str = VISION
    loss: Loss = POLICY
    change: Callable[[Any, Family], None] = lambda model, family: None
    checkpointing: bool = False
    packed: bool = False  # weights of 4 bits
    taught: bool = False  # by another model, instead of `loss`


def adapt(model: Any, family: Family, dropout: float = 0.0) -> None:
    lora.add(model, family, LoraConfig(rank=4, dropout=dropout), seed=0)
    generator = torch.Generator().manual_seed(1)
    for parameter in lora.adapters(model).values():  # no longer zero, else half of them had no gradient
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


CASES = {
    "text on one rank": Case(((0, 1), (4,))),
    "three and one": Case(((0, 1, 4), (5,))),
    "two and none": Case(((0, 4), ())),
    "no image anywhere": Case(((4,), (5,)), TrainConfig(optimizer="adamw_bf16")),
    "out of memory": Case(),
    "frozen tower": Case(change=lambda model, family: freeze(model, family, "freeze:vision")),
    "only a tower": Case(((0, 4), (5,)), change=lambda model, family: freeze(model, family, "freeze:llm")),
    "critic": Case(loss=ValueLoss(0.2), change=lambda model, family: attach_score(model, seed=0)),
    "kahan": Case(train=TrainConfig(optimizer="adamw_bf16")),
    "bf16": Case(((0,), (4,)), TrainConfig(grad_norm=1e9), torch.bfloat16),  # not clipped: equal to the bit
    "nan": Case(),
    "generic": Case(((0, 1), (2,)), family=GENERIC),  # of which one has text alone
    "experts": Case(((0,), (1, 2)), train=TrainConfig(aux_coef=0.1, eps=1e-3), family=EXPERTS),
} | ({"lora": Case(change=adapt)} if find_spec("peft") else {})
if find_spec("peft") and find_spec("bitsandbytes"):
    CASES["qlora"] = Case(change=adapt, packed=True)


def offloaded(case: Case) -> Case:
    return replace(case, train=case.train.model_copy(update={"offload": True}))


CASES |= {f"{name} offloaded": offloaded(CASES[name]) for name in ("bf16", "critic", "lora") if name in CASES}
SMALL = {"a": 9001, "b": 70, "c": 5000}  # numbers of parameters


def made(
    case: Case, family: Family, optimizer: type[Optimizer] = Optimizer, backend: type[LocalTrainer] = LocalTrainer
) -> LocalTrainer:
    torch.backends.mkldnn.set_flags(True)  # a case in bf16 may have turned it off, see `same_kernels`
    model = fresh(family, case.dtype, case.packed)
    case.change(model, family)
    return backend(model, family, case.train, optimizer=optimizer, checkpointing=case.checkpointing)


def fresh(family: Family, dtype: torch.dtype, packed: bool = False) -> Any:
    """A copy: to read the files takes ten times as long."""
    key, cpu = (family.path, dtype, packed), torch.device("cpu")
    if key not in LOADED:
        options = lora.four_bit_options(family, dtype, cpu) if packed else None
        LOADED[key] = load_model(family, dtype=dtype, device=cpu, options=options)
    return deepcopy(LOADED[key])


def moved(model: Any, family: Family) -> None:
    for place, parameter in enumerate(model.parameters()):
        parameter.data += 0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(place))


def teacher_beside(student: Any) -> LocalTrainer:
    """Another model, where and as the student is."""
    moved(model := fresh(student.family, student.dtype), student.family)
    return type(student)(model, student.family, **({"size": student.size} if hasattr(student, "size") else {}))


def train(backend: LocalTrainer, case: Case, batches: list[Batch], steps: int = 2) -> Any:
    """Gradients of the first step, the metrics of each, whether it was skipped, and the weights after all that are not
    packed.
    """
    optimizer, gradients = backend.optimizer, dict[str, Any]()
    assert optimizer is not None
    step = optimizer.step

    def seen(lr: float, *, norm: torch.Tensor) -> None:
        for name, gradient in () if gradients else optimizer.gradients.items():
            gradients[name] = optimizer.ranges()[name], gradient.detach().clone().reshape(-1)
        step(lr, norm=norm)

    optimizer.step = seen  # type: ignore[method-assign]
    loss = DistillationLoss(teacher_beside(backend), 0.3) if case.taught else case.loss
    updates = [backend.train_step(batches, loss, lr=1e-3) for _ in range(steps)]
    found = {name: p.detach() for name, p in backend.model.named_parameters() if p.is_floating_point()}
    weights = {name: getattr(p, "full_tensor", p.clone)() for name, p in found.items()}  # gathered if sharded
    return gradients, [u.metrics for u in updates], [u.skipped for u in updates], weights


# -- a rank ------------------------------------------------------------------------------------------


def on_rank(rank: int, folder: Path, paths: dict[str, str], forests: dict[str, list[Batch]]) -> dict[str, Any]:
    families = {name: load_family(path) for name, path in paths.items()}
    host_state.CHUNK, found = 4096, dict[str, Any]()  # of which a parameter may have many
    for name, case in CASES.items():
        optimizers.LARGE = 1 if name == "three and one" else 8_000_000  # every gradient is added by a hook
        backend = made(case, families[case.family], DividedOptimizer)
        batches = dealt(name, forests)[rank]
        if name == "out of memory" and rank == 1:
            full = Mock(side_effect=chain([torch.OutOfMemoryError("simulated")] * 2, repeat(None)))  # also a half is
            backend.model.get_submodule("model.language_model.layers.1").register_forward_pre_hook(full)
        assert isinstance(backend.optimizer, DividedOptimizer)
        found[name] = *train(backend, case, batches), backend.optimizer.same_everywhere()
        if name in ("critic", "lora") and rank == 0:
            write_files(folder / name, [*backend.model_files(), *backend.state_files()])
    stored = {"bf16": CASES["bf16"], "kahan": CASES["kahan"]}
    if "lora" in CASES:
        stored["dropout"] = Case(change=partial(adapt, dropout=0.5))
    make = partial(made, optimizer=DividedOptimizer)
    for name, case in stored.items():
        found[f"files of {name}"] = resumed(folder / "files" / name, rank, case, make, families[VISION], forests)
    found["offload"] = [
        equal(*(stepped(kind, offload) for offload in (False, True))) for kind in ("adamw", "adamw_bf16")
    ]
    host_state.free_host_bytes = lambda: 12 * (sum(SMALL.values()) - 64)  # each rank has half of what all need
    try:
        stepped("adamw", offload=True)
    except EnvironmentProblem as error:
        found["too little"] = str(error)
    found["small"] = [small(kind, DividedOptimizer) for kind in ("adamw", "adamw_bf16")]
    return found


def small(kind: Any, optimizer: type[Optimizer]) -> Any:
    """Weights, what is owned and counted of three numbers: too few for a second rank."""
    parameter = torch.nn.Parameter(torch.ones(3))
    one = optimizer([("p", parameter)], TrainConfig(optimizer=kind), lr_scale=lambda name: 1.0)
    for _ in range(2):
        one.begin()
        one.start_micro_batch()
        parameter.sum().backward()
        one.end_micro_batch()
        one.reduce(finite=True)
        one.step(0.1, norm=one.norm())
    return parameter.tolist(), one.ranges(), one.updates()


def stepped(kind: Any, offload: bool) -> Tensors:
    """Weights and state after steps in which every rank has gradients of its own."""
    draw = torch.Generator().manual_seed(dist.get_rank())
    named = {name: torch.nn.Parameter(torch.linspace(-1, 1, count).bfloat16()) for name, count in SMALL.items()}
    one = DividedOptimizer(named.items(), TrainConfig(optimizer=kind, offload=offload), lr_scale=lambda name: 1.0)
    for _ in range(3):
        one.begin()
        one.start_micro_batch()
        sum((p * torch.randn(p.shape, generator=draw).bfloat16()).sum() for p in named.values()).backward()  # type: ignore
        one.end_micro_batch()
        one.reduce(finite=True)
        one.step(0.1, norm=one.norm())
    return {name: p.detach() for name, p in named.items()} | one.state()


def resumed(folder: Path, rank: int, case: Case, make: Any, family: Family, forests: Any) -> list[bool]:
    """From two ranks to one process and back: whether the state is the same, and the next weights."""
    batches = [forests[VISION][place] for place in ((0,), (4,))[rank]]
    first = make(case, family)
    before = train(first, case, batches, steps=2)[-1]
    write_files(folder / "two", first.state_files())
    dist.barrier()
    if rank == 0:
        alone = made(offloaded(case), family)
        alone.load_state(folder / "two")
        write_files(folder / "one", alone.state_files())
    dist.barrier()
    second = make(case, family)
    if not second._weights_are_state:
        for mine, other in zip(second.model.parameters(), first.model.parameters(), strict=True):
            mine.data.copy_(other.data)
    second.load_state(folder / "one")
    same = equal(first.optimizer.state(), second.optimizer.state())
    after = [train(backend, case, batches, steps=1)[-1] for backend in (first, second)]
    return [same, equal(*after), not equal(before, after[0])]


def equal(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def dealt(name: str, forests: dict[str, list[Batch]], cases: dict[str, Case] = CASES) -> list[list[Batch]]:
    """The batches of each rank."""
    case = cases[name]
    parts = [[forests[case.family][place] for place in places] for places in case.deal]
    if name == "nan":
        parts[1][0] = replace(parts[1][0], advantages=np.full(parts[1][0].target_count, np.nan, np.float32))
    return parts


# -- one process, and what both found ----------------------------------------------------------------


@pytest.fixture(scope="module")
def forests(family_of: Any, grow: Any) -> dict[str, list[Batch]]:
    rng = np.random.default_rng(0)

    def forest(name: str, uid: int, images: int) -> Batch:
        family = family_of(name)
        group = grow(rng, family, uid=f"g{uid}", depth=1, images=images)
        [one] = pack([group], micro_tokens=9999)
        drawn = {c: rng.standard_normal(one.target_count).astype(np.float32) for c in ("values", "returns")}
        drawn |= {"ref_logprobs": -2 * rng.random(one.target_count, np.float32)}
        return replace(one, scales=np.full(one.target_count, 0.01, np.float32), **drawn)

    return {
        VISION: [forest(VISION, uid, int(uid < 4)) for uid in range(6)],
        EXPERTS: [forest(EXPERTS, uid, 0) for uid in range(3)],
        GENERIC: [forest(GENERIC, uid, int(uid < 2)) for uid in range(3)],
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: Any, family_of: Any, forests: dict[str, list[Batch]]) -> Any:
    """By case: what one process finds, and what each of two ranks finds; and their folder."""
    folder = tmp_path_factory.mktemp("ranks")
    return *beside_ranks(on_rank, folder, family_of, forests, CASES), folder


def beside_ranks(
    main: Any, folder: Path, family_of: Any, forests: Any, cases: dict[str, Case], *, ranks: int = 2
) -> Any:
    """What this process finds, and what `main(rank, folder, paths of the models, forests)` returns in some ranks."""

    def alone() -> dict[str, Any]:
        return {
            name: train(made(case, family_of(case.family)), case, [*chain(*dealt(name, forests, cases))])
            for name, case in cases.items()
            if name == plain(name)
        }

    paths = {name: family_of(name).path for name in forests}
    return on_ranks(main, folder, paths, forests, beside=alone, size=ranks)


def plain(name: str) -> str:
    """The case that one process trains in the same way."""
    return re.sub("^(sharded|hybrid) | offloaded$", "", name)


def distance(got: Tensors, wanted: Tensors) -> float:
    """The largest difference of a tensor, over the norm of all."""
    assert got.keys() == wanted.keys()
    whole = torch.stack([tensor.double().norm() for tensor in wanted.values()]).norm()
    return max(float((got[name].double() - wanted[name].double()).norm() / whole) for name in wanted)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_as_one_process_does(results: Any, name: str) -> None:
    alone = results[0][plain(name)]
    require_same_training(name, alone, [found[name] for found in results[1]], exact="bf16" in name)


def test_state_in_main_memory_changes_no_bit(results: Any) -> None:
    assert [found["offload"] for found in results[1]] == [[True, True]] * 2


def test_state_of_all_ranks_of_a_machine_must_fit_into_its_main_memory(results: Any) -> None:
    for found in results[1]:
        assert found["too little"].startswith("train.offload: the optimizer's state takes")
        assert found["too little"].endswith("try train.optimizer=adamw_bf16, train.offload=false or more machines")


def require_same_training(name: str, alone: Any, ranks: list[Any], *, exact: bool = False, near: float = 1e-6) -> None:
    gradients, metrics, skipped, weights = alone
    assert all(found[2] == skipped == [name == "nan"] * 2 and found[4] for found in ranks)
    assert all(equal(ranks[0][3], found[3]) for found in ranks)
    summed = {key: torch.full_like(gradient, torch.nan) for key, (_, gradient) in gradients.items()}
    for found in ranks:
        for key, ((first, end), gradient) in found[0].items():
            summed[key][first:end] = gradient
    if exact:
        assert equal(ranks[0][3], weights) and all(torch.equal(summed[key], g) for key, (_, g) in gradients.items())
    elif name != "nan":
        assert distance(summed, {key: gradient for key, (_, gradient) in gradients.items()}) <= near
        assert distance(ranks[0][3], weights) <= near
    for step, wanted in enumerate(metrics):
        merged = Metrics()
        merged.merge(*(found[1][step] for found in ranks))
        if name == "out of memory":
            assert merged.means()["mem/oom_splits"] == (2 if step == 0 else 0)
            del merged.sums["mem/oom_splits"], wanted.sums["mem/oom_splits"]
        close = partial(pytest.approx, rel=10 * near, abs=near, nan_ok=True)
        assert merged.means() == close(wanted.means())
        assert merged.sums == {key: close(v) for key, v in wanted.sums.items()}


def test_weights_that_are_views_are_written_whole(results: Any) -> None:
    _, (found, _), folder = results
    assert equal(load_file(folder / "critic" / "weights.safetensors"), found["critic"][3])
    if "lora" in found:
        stored = load_file(folder / "lora" / "adapter" / "adapter_model.safetensors")
        weights = {f"base_model.model.{n.replace('.default.', '.')}": w for n, w in found["lora"][3].items()}
        assert stored and all(torch.equal(weights[name], tensor) for name, tensor in stored.items())


def test_state_goes_from_two_ranks_to_one_process_and_back(results: Any) -> None:
    _, ranks, folder = results
    checked = [name for name in ranks[0] if name.startswith("files of ")]
    assert len(checked) >= 2
    for name in checked:  # state, the next weights, and that they moved
        assert [found[name] for found in ranks] == [[True] * 3] * 2, name
    files = sorted(path.name for path in (folder / "files" / "bf16" / "two").iterdir())
    assert files == ["optimizer-000-of-002.safetensors", "optimizer-001-of-002.safetensors"]


def test_a_rank_may_have_nothing_to_step(results: Any) -> None:
    ranks = [found["small"] for found in results[1]]
    for kind, of_one, of_other in zip(("adamw", "adamw_bf16"), *ranks, strict=True):
        assert of_one[0] == of_other[0] == small(kind, Optimizer)[0] and of_one[0][0] < 1
        assert [of_one[1:], of_other[1:]] == [({"p": (0, 3)}, 2), ({}, 2)]


def test_files_of_three_ranks_are_read_and_incomplete_ones_refused(tmp_path: Path) -> None:
    def fresh() -> Optimizer:
        named = {"matrix": torch.nn.Parameter(torch.ones(40, 5)), "bias": torch.nn.Parameter(torch.ones(7))}
        return Optimizer(named.items(), TRAIN, lr_scale=lambda name: 1.0)

    one, other = fresh(), fresh()
    for tensor in one.state().values():
        tensor.copy_(torch.rand(tensor.shape))
    cuts: list[Any] = [{"matrix": (0, 64)}, {"matrix": (64, 128)}, {"matrix": (128, 200), "bias": (0, 7)}]

    def write(rank: int, ranges: dict[str, tuple[int, int]]) -> None:
        state = {}
        for key, tensor in one.state().items():
            kind, _, name = key.partition("/")
            if name in ranges:
                first, end = ranges[name]
                state[key] = tensor if kind == "step" else tensor.reshape(-1)[first:end].clone()
        part: Any = SimpleNamespace(rank=rank, world=3, ranges=lambda: ranges, state=lambda: state)
        write_files(tmp_path, [optimizer_file(part, copy=True)])

    for rank, ranges in enumerate(cuts):
        write(rank, ranges)
    load_optimizer(other, tmp_path)
    assert equal(one.state(), other.state())
    for wrong in ((60, 128), (64, 120)):
        write(1, {"matrix": wrong})
        with pytest.raises(EnvironmentProblem, match="every number of exp_avg/matrix exactly once"):
            load_optimizer(other, tmp_path)
    (tmp_path / "optimizer-001-of-003.safetensors").unlink()
    with pytest.raises(EnvironmentProblem, match=r"optimizer-001-of-003\.safetensors is missing"):
        load_optimizer(other, tmp_path)
