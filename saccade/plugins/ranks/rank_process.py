"""A rank: a process with one GPU that holds the models of a run and the engine that generates with
the policy's own weights. Started by a `Rank`:

    $ python -m saccade.plugins.ranks.rank_process

The main thread trains and drives the engine, as in a replica; another thread writes files.
"""

import gc
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed

from saccade.checks.steps import algorithm_of
from saccade.config import Config, load
from saccade.engines import Capabilities, Engine
from saccade.engines.builders import build
from saccade.errors import EnvironmentProblem, MicroBatchTooLarge, SaccadeError, TrainingError
from saccade.forest.batch import Batch, Forest
from saccade.models.load import gpu_memory, pick_device, pick_dtype
from saccade.plugins.engines.replicas.replica_process import Worker, describe_error, reporting
from saccade.plugins.engines.weight_transfer import served
from saccade.plugins.engines.weights import shared
from saccade.plugins.ranks import preflight
from saccade.plugins.ranks.by_rows import by_rows_of, make_whole
from saccade.plugins.ranks.layouts import numbers_in
from saccade.plugins.ranks.loss_codec import decode_loss
from saccade.plugins.ranks.machines import host_name
from saccade.plugins.ranks.rank_rewards import Question, rate
from saccade.plugins.ranks.sequence import TRAINERS
from saccade.plugins.ranks.stalls import note_collectives, whereabouts
from saccade.plugins.ranks.team import RankSettings
from saccade.plugins.reward_models.learned_reward import LearnedReward, load_learned
from saccade.plugins.reward_models.reward_card import RewardCard, write_card
from saccade.plugins.reward_models.reward_losses import bound_scale
from saccade.plugins.reward_models.reward_rows import rows_of
from saccade.recipes import model_setup
from saccade.recipes.engines import settings_of
from saccade.registry import HOOKS
from saccade.system.codec import Arrays, decode
from saccade.system.contents import File, spare_bytes, write_files
from saccade.system.disk import refusal
from saccade.system.process import Block, Channel, connect, listen
from saccade.trainer import Loss, Scoring

# Calls that the rank answers; all others are methods of its engine.
CALLS = (
    *("add_part", "drop_part", "add_reward", "rate", "update_weights", "blend", "recomputed_share"),
    *("logprobs", "values", "train_step", "measure"),
    *("share", "unshare", "negate", "restore", "weight_shapes"),
    *("write_card", "spare_bytes", "saved_bytes", "collect", "write", "load_state"),
)
Outputs = Sequence[Any]  # two arrays per batch
WAIT_LIMIT = 3600.0  # seconds until a collective times out


class NoEngine:
    """For ranks that do not generate, or not yet: a sharded model gets its whole copy at the first `update_weights`."""

    pending = 0

    def capabilities(self) -> Capabilities:
        return Capabilities(support=True, shares_weights=True)


class RankWorker(Worker):
    """The calls that a rank answers, by name. `part`: policy, reference, critic, teacher or ema."""

    def __init__(self, settings: RankSettings, channel: Channel) -> None:
        self.settings = settings
        self.config, device = _looked(settings)
        family = model_setup.family_of(self.config, model_setup.start_folder(self.config))
        packed = self.config.model.train == "qlora"  # then the policy is not sharded, and the engine uses it directly
        each = 0.5 if packed else pick_dtype(self.config.model.dtype, device).itemsize
        by_rows = None if packed else by_rows_of(self.config.train, device)
        needed = numbers_in(Path(family.path), ranks=by_rows.group.size() if by_rows else 1, tower_of=family.tower_of)
        preflight.require_room(Path(family.path), each * needed, device)
        model = model_setup.load_policy(self.config, family, folder=settings.folder, divided=True)
        self.family = family
        self._attach(model)
        self.policy = model_setup.learner(self.config, model, family)
        self.parts: dict[str, Any] = {"policy": self.policy}
        self.rewards: dict[str, LearnedReward] = {}  # by the path of the reward term
        self.algorithm = algorithm_of(self.config) if settings.command == "rl" else None
        self.divided = by_rows is not None  # whether the policy is sharded; other models may be when it is not
        self.copy: Any = None  # whole copy of a sharded policy, to generate with
        self._given_back: list[tuple[Any, torch.Size]] = []  # weights of the copy whose memory was freed, and shapes
        silent = self.divided or settings.command == "reward-model"
        engine: Any = NoEngine() if silent else self._engine_over(model)
        super().__init__(engine, channel)
        self._forests: dict[str, Forest] = {}  # by the controller's names for them
        self._collected: dict[tuple[str, str], list[File]] = {}
        self._shared, self._negated = ExitStack(), ExitStack()

    def perform(self, block: Block) -> Any:
        call, given = block.row["call"], block.row["arguments"]
        if call not in CALLS:
            with within_memory():
                return super().perform(block)
        if "questions" in given:
            given["questions"] = decode(tuple[Question, ...], given["questions"], block.arrays)
        if "batches" in given:
            held, new = given.pop("held"), given.pop("forests")
            self._forests = {name: self._forests[name] for name in held}
            self._forests |= {name: decode(Forest, row, block.arrays) for name, row in new.items()}
            given |= {"batches": [self._batch(row, block.arrays) for row in given["batches"]]}
        halved = call == "train_step" and self.parts[given["part"]].retries_on_oom  # the trainer splits forests itself
        with within_memory(smaller=not halved and not given.keys().isdisjoint(("batches", "questions"))):
            return getattr(self, call)(**given)

    def _advance(self) -> None:
        with within_memory(f"{self.settings.who}: "):
            super()._advance()

    def _batch(self, row: Mapping[str, Any], arrays: Arrays) -> Batch:
        columns = {name.rpartition("/")[2]: arrays[name] for name in row["columns"]}
        return Batch(forest=self._forests[row["forest"]], **columns)

    # -- models --

    @property
    def start(self) -> Path | None:
        """The checkpoint that the run continues from."""
        return Path(self.settings.folder) if self.settings.folder else None

    def _attach(self, model: Any) -> None:
        """Attach the score head of a scalar reward model."""
        if self.settings.command == "reward-model" and self.config.reward_model.kind == "scalar":
            rows = rows_of(self.config, self.family)
            rows.attach(model, card=rows.card(self.start, ()), stored=self.start)

    def add_part(self, part: str) -> None:
        if part == "ema":
            self.parts |= HOOKS["average"](self.config, self.family, self.policy, self.start, self._attach)
        else:
            loader = model_setup.BESIDE[part]
            self.parts[part] = loader(self.config, self.family, self.algorithm, self.policy)

    def drop_part(self, part: str) -> None:
        del self.parts[part]
        gc.collect()  # a trainer and its prefetcher reference each other
        torch.cuda.empty_cache()

    def add_reward(self, path: str) -> None:
        by_rows, (trainer, _) = by_rows_of(self.config.train, self.policy.device), TRAINERS[self.config.train.layout]
        self.rewards[path] = load_learned(self.config, path, by_rows=by_rows, trainer=trainer)

    def rate(self, path: str, questions: Sequence[Question]) -> Any:
        return rate(self.rewards[path], questions)

    def _engine_over(self, model: Any) -> Engine:
        return build(replace(settings_of(self.config, self.family), engine="embedded"), self.family, model)

    def update_weights(self, version: int) -> None:
        if self.divided:
            if self.copy is None:
                self.copy = model_setup.load_policy(self.config, self.family, folder=self.settings.folder, divided=True)
                make_whole(self.copy.parameters())
                self.engine = self._engine_over(self.copy)
            for weight, shape in self._given_back:
                weight.data = weight.new_empty(shape)
            self.policy.fill(self.copy, frozen=bool(self._given_back))  # type: ignore[attr-defined]
            self._given_back = []
        self.engine.update_weights(self.policy, version)

    def logprobs(self, part: str, batches: Sequence[Batch], scoring: Mapping[str, Any]) -> Outputs:
        return _each(batches, lambda pieces: self.parts[part].logprobs(pieces, Scoring(**scoring)))

    def values(self, part: str, batches: Sequence[Batch]) -> Outputs:
        return _each(batches, self.parts[part].values)

    def train_step(self, part: str, batches: Sequence[Batch], loss: Mapping[str, Any], **options: Any) -> Any:
        decoded = self._loss(loss)
        if self.config.train.offload and self.copy is not None and not self._given_back:
            self._given_back = [(weight, weight.shape) for weight in self.copy.parameters()]
            for weight, _ in self._given_back:  # freed until `update_weights`, before the next generation
                weight.data = weight.new_empty(0)
        update = self.parts[part].train_step(_pieces(batches), decoded, **options)
        bound_scale(self.parts[part], decoded)
        for name, gib in gpu_memory().items():  # peaks since the last update; the maximum over ranks
            update.metrics.add_max(name, gib)
        tokens = sum(batch.tokens for batch in batches)
        found = {"sums": update.metrics.sums, "maxima": update.metrics.maxima, "skipped": update.skipped}
        return found | {"tokens": tokens}

    def measure(self, part: str, batches: Sequence[Batch], loss: Mapping[str, Any]) -> Any:
        found = self.parts[part].measure(_pieces(batches), self._loss(loss))
        return {"sums": found.sums, "maxima": found.maxima}

    def _loss(self, row: Mapping[str, Any]) -> Loss:
        return decode_loss(row, self.algorithm, self.parts.get("teacher"))

    def blend(self, part: str, share: float) -> None:
        self.parts[part].blend(self.policy.local_weights(), share)

    def recomputed_share(self, part: str) -> Any:
        return self.parts[part].recomputed_share()

    # -- weights and files --

    def share(self, turn: int, direct: bool) -> tuple[Any, ...]:
        """The first rank shares a copy of the weights until `unshare`: returns where it is, and checksums of some."""
        if self.settings.rank:
            if self.divided:
                self.policy.help_gather()  # type: ignore[attr-defined]
            return ()
        offer, checksums = self._shared.enter_context(shared(self.policy, turn=turn, direct=direct))
        return offer | self._shared.enter_context(served(offer["paths"])), checksums

    def unshare(self) -> None:
        self._shared.close()

    def negate(self, part: str, tower: str) -> str:
        return self._negated.enter_context(self.parts[part].negated(tower))

    def restore(self, part: str) -> None:
        self._negated.close()

    def write_card(self, part: str, card: Mapping[str, Any]) -> None:
        write_card(self.policy.model, RewardCard(**card))

    def weight_shapes(self, part: str) -> list[Any]:
        return self.parts[part].weight_shapes()

    def spare_bytes(self, part: str) -> int:
        return spare_bytes()

    def saved_bytes(self, part: str) -> int:
        """The bytes that this rank writes."""
        if self.settings.rank == 0:
            return self.parts[part].saved_bytes()
        optimizer = self._optimizer(part)
        return sum(tensor.nbytes for tensor in optimizer.state().values()) if optimizer else 0

    def collect(self, part: str, kind: str, copy: bool) -> None:
        """Collect the files that this rank writes for the `model` or the `state` of a part: its share of the optimizer
        state; the first rank also everything else.
        """
        one, optimizer = self.parts[part], self._optimizer(part)
        if optimizer is not None and not optimizer.same_everywhere():
            raise TrainingError(f"the weights of the {part} differ between ranks; continue from the last checkpoint")
        mine = self.settings.rank == 0 or (kind == "state" and optimizer is not None)
        files = one.state_files if kind == "state" else one.model_files
        # All ranks take part in gathering sharded weights.
        found = list(files(copy=copy)) if mine or self.config.train.layout != "whole" else []
        self._collected[part, kind] = found if mine else []

    def _optimizer(self, part: str) -> Any:
        return getattr(self.parts[part], "optimizer", None)

    def write(self, part: str, kind: str, folder: str) -> None:
        place = Path(folder)
        try:
            place.mkdir(exist_ok=True)  # in a folder of the controller, which all machines must see
            write_files(place, self._collected.pop((part, kind)))
        except Exception as error:  # any error is sent as the answer, because the controller waits for one
            raise EnvironmentProblem(f"{place}: {refusal(error) or repr(error)}") from error

    def load_state(self, part: str, folder: str) -> None:
        self.parts[part].load_state(Path(folder))


@contextmanager
def within_memory(who: str = "", *, smaller: bool = False) -> Iterator[None]:
    """Turn an out-of-memory error into one that ends the run, because it would recur; with `smaller`, into one after
    which the run may start again with smaller micro-batches.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        asked = f"{who}{str(error).partition('. GPU')[0]}"
        if smaller:
            fix = "train.micro_tokens and model.checkpointing=on; run.restarts=1 does both"
            raise MicroBatchTooLarge(f"{asked}; use a smaller {fix}") from error
        raise EnvironmentProblem(f"{asked}; `saccade estimate` shows which options make room") from error


def _pieces(batches: Sequence[Batch]) -> list[Batch]:
    return [piece for batch in batches for piece in batch.pieces()]


def _each(batches: Sequence[Batch], read: Callable[[list[Batch]], Sequence[Any]]) -> Outputs:
    """Call `read` on the pieces of all batches, and concatenate its outputs for each batch."""
    found = iter(read(_pieces(batches)))
    return [[np.concatenate(c) for c in zip(*islice(found, len(b.forest.pieces)), strict=True)] for b in batches]


def answer_at_once(worker: Worker, inbox: queue.SimpleQueue[Block], rest: queue.SimpleQueue[Block]) -> None:
    """Answer `where` and `write` outside of the main thread, which may wait for another rank; pass on the rest."""
    writer = ThreadPoolExecutor(1, thread_name_prefix="files")
    while True:
        block = inbox.get()
        call = block.row.get("call")
        if call == "where":
            worker.channel.send({"result": whereabouts(), "id": block.row["id"]})
        elif call == "write":
            writer.submit(worker.answer, block)
        else:
            rest.put(block)


class Visitor(Worker):
    """The rank that `saccade doctor` starts: it joins the others and holds no model."""

    def __init__(self, settings: RankSettings, channel: Channel) -> None:
        _, self.device = _looked(settings)
        super().__init__(NoEngine(), channel)  # type: ignore[arg-type]

    def perform(self, block: Block) -> Any:
        if block.row["call"] != "sum_speed":
            return super().perform(block)
        kinds = dict(kind.split(":") for kind in distributed.get_backend_config().split(","))
        return {"host": host_name(), "backend": kinds[self.device.type], "speed": preflight.sum_speed(self.device)}


def _looked(settings: RankSettings) -> tuple[Config, torch.device]:
    """Check a sum over all ranks and the files that they must see; returns config and device."""
    config = load(settings.options, command=settings.command)
    model_setup.quiet_libraries()
    preflight.require_sum(device := model_setup.device_of(config.run))
    preflight.require_seen(settings.seen, settings.rank)
    return config, device


def join(settings: RankSettings) -> None:
    """Join the process group of all ranks."""
    store = distributed.TCPStore(settings.host, settings.port, is_master=False)
    cuda = pick_device(settings.options.get("run", {}).get("device", "auto")).type == "cuda"
    gpu = cuda and f"{host_name()} {torch.cuda.get_device_properties(0).uuid}"
    store.set(f"gpu-{settings.rank}", gpu or "")
    shared = preflight.meet(store, settings.hosts)
    backend = "gloo" if not gpu or shared else "cpu:gloo,cuda:nccl"
    limit = timedelta(seconds=WAIT_LIMIT)
    note_collectives()
    distributed.init_process_group(backend, store=store, rank=settings.rank, world_size=settings.size, timeout=limit)


def serve(channel: Channel, controller: str | None = None) -> None:
    """Do what the controller asks until it ends the run. `controller`: its address, if it did not start this process
    itself.
    """
    inbox = listen(channel, tied=controller is None)
    settings = RankSettings(**inbox.get().row["settings"])
    settings = replace(settings, host=controller or settings.host)
    workers = reporting(channel)
    try:
        join(settings)
        with within_memory():
            worker: Worker = (Visitor if settings.command == "doctor" else RankWorker)(settings, channel)
    except SaccadeError as error:
        error.args = (f"{settings.who}: {error}",)
        channel.send({"failed": describe_error(error)})
        sys.stderr.flush()
        os._exit(error.exit_code)  # a thread may be stuck in nccl
    workers.append(worker)
    channel.send({"ready": True})
    orders: queue.SimpleQueue[Block] = queue.SimpleQueue()
    threading.Thread(target=answer_at_once, args=(worker, inbox, orders), name="orders", daemon=True).start()
    worker.run(orders)


if __name__ == "__main__":
    serve(connect(tied=True))
