"""Settings and fixtures of all tests: one thread per process, no network, the folder of real data, tiny models."""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import saccade.models  # noqa: F401  before transformers: else a torchvision for CUDA fails on a CPU
from saccade.types import Group, Media, MediaSpan, Message, Sample, Source, Trajectory

if TYPE_CHECKING:  # torch is imported by the tests that need it
    from saccade.models.families import Family

# Before torch is imported anywhere: two workers with a thread each are faster than two with many.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# bitsandbytes, which peft imports, compiles functions that no test calls: this saves seconds in each process.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# Objects of torch and transformers live on; scanning them for garbage takes a seventh of the tests' time.
gc.set_threshold(50_000, 20, 100)
# No test needs durability, and thousands of fsyncs take milliseconds each.
os.fsync = lambda _: None  # type: ignore[assignment]

with suppress(ImportError):  # the environment of vLLM has no hypothesis
    from hypothesis import settings

    # The same examples in every run; --hypothesis-profile=default looks for new ones.
    settings.register_profile("repeatable", derandomize=True)
    settings.load_profile("repeatable")

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data beside the repository; tests that need it are skipped without it."""
    folder = REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no folder of real data beside the repository")
    return folder


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Seeds torch, so that random numbers do not depend on the earlier tests of the process."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def quick_models() -> None:
    """Makes configs of transformers cheap to read, and to print, as type checks do for a message nobody is shown, and
    draws no first numbers for a model without storage, which is filled from a folder.
    """
    config = getattr(sys.modules.get("transformers.configuration_utils"), "PreTrainedConfig", None)
    if config is not None and config.__getattribute__.__name__ != "<lambda>":
        own, plain, config.__repr__ = config.__getattribute__, object.__getattribute__, object.__repr__
        config.__getattribute__ = lambda self, name: (
            own(self, name)  # fields that differ by layer
            if "_heterogeneity_spec" in plain(self, "__dict__")
            else plain(self, plain(self, "attribute_map").get(name, name))
        )
        init = sys.modules["torch.nn.init"]
        for name in ("kaiming_uniform_", "uniform_", "normal_"):
            fill = getattr(init, name)
            setattr(init, name, lambda tensor, *a, fill=fill, **k: tensor if tensor.is_meta else fill(tensor, *a, **k))


@pytest.fixture(autouse=True)
def same_kernels() -> Iterator[None]:
    """Turns oneDNN on again after each test: on a CPU without bfloat16, torch switches it off for all types at the
    first product in bfloat16, and later tests would round differently from a fresh process.
    """
    yield
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.backends.mkldnn.set_flags(True)


@pytest.fixture
def said() -> Iterator[list[str]]:
    """A list that collects the messages of the package, as a terminal would show them."""
    from saccade.run.messages import shown_by

    texts: list[str] = []
    with shown_by(texts.append):
        yield texts


@pytest.fixture(scope="session")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train.jsonl (24 scenes to count), val.jsonl (8), shown.jsonl (24 answered)."""
    from saccade.plugins.quickstart import counting

    folder = tmp_path_factory.mktemp("scenes")
    rows = {
        name: counting.counting_split(n, seed=n, colours=("red", "blue"))
        for name, n in {"train": 24, "val": 8, "shown": 25}.items()
    }
    rows["shown"] = [counting.demonstrated(sample) for sample in rows["shown"][:24]]
    for name, samples in rows.items():
        counting.write_jsonl(samples, folder, name=name)
    return folder


@pytest.fixture
def counting(tmp_path: Path) -> Path:
    """A file of 24 questions about pictures."""
    from saccade.plugins.quickstart.counting import TEACHING_COLOURS, counting_split, write_jsonl

    return write_jsonl(counting_split(24, seed=0, colours=TEACHING_COLOURS), tmp_path / "counting")


@pytest.fixture
def described(tmp_path: Path) -> Path:
    """A model folder that holds only a config."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen2_vl"}')
    return tmp_path / "model"


@pytest.fixture
def rewards_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs verifiers in this process: none hangs here, and a process takes a second to start."""
    from saccade.rewards.verifiers import VERIFIERS

    for name, verifier in VERIFIERS.items():
        monkeypatch.setitem(VERIFIERS, name, dataclasses.replace(verifier, isolated=False))


@pytest.fixture(scope="session")
def word_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random vision model whose vocabulary is the words of the scenes: answers are short."""
    from saccade.plugins.families.tiny import build
    from saccade.plugins.quickstart.quickstart import WORDS

    return build("qwen2_5_vl", tmp_path_factory.mktemp("words"), words=WORDS)


def _options(model: str, rows: Path, **more: Any) -> Callable[..., dict[str, Any]]:
    """Returns a function of a folder and options (__ for a dot) that makes configs of four small steps."""
    always: dict[str, Any] = {
        "run.max_steps": 4, "run.device": "cpu", "model.path": model, "data.train": str(rows), "prompt.instruction": "",
        "train.prompts_per_step": 4, "track.tensorboard": False,
    }  # fmt: skip

    def config(out: Path, **changes: Any) -> dict[str, Any]:
        given = {name.replace("__", "."): value for name, value in (more | changes).items()}
        return always | {"run.out": str(out)} | given

    return config


@pytest.fixture(scope="session")
def rl_config(scenes: Path, word_model: str) -> Callable[..., dict[str, Any]]:
    """Four steps of GRPO that take a second. About one random answer in five counts as right."""
    count = {"verifier": "count", "args": {"order": ["last_number"], "tolerance": 1}}
    sizes = {"rollout__max_tokens": 6, "train__samples_per_prompt": 4, "train__lr": 5e-3}
    return _options(word_model, scenes / "train.jsonl", prompt__format="direct", reward__terms=[count], **sizes)


@pytest.fixture(scope="session")
def sft_config(scenes: Path, word_model: str) -> Callable[..., dict[str, Any]]:
    """Four supervised steps on the answered scenes, with a constant rate: two steps are the first half of four."""
    schedule = {"train__lr": 2e-3, "train__schedule": "constant", "train__warmup": 0}
    return _options(word_model, scenes / "shown.jsonl", **schedule)


@pytest.fixture(scope="session")
def tensors() -> Callable[[Path | str], dict[str, Any]]:
    """Every tensor of a model folder, by name."""

    def read(folder: Path | str) -> dict[str, Any]:
        from safetensors.torch import load_file

        files = sorted(Path(folder).glob("*.safetensors"))
        return {name: t for file in files for name, t in load_file(file).items()}

    return read


@pytest.fixture(scope="session")
def damage() -> Callable[[Path], str]:
    """Puts one NaN into a folder's weights; returns how the name of that tensor ends."""
    import torch
    from safetensors.torch import load_file, save_file

    def put(folder: Path) -> str:
        weights = load_file(folder / "model.safetensors")
        end = "layers.0.mlp.down_proj.weight"
        next(weight for name, weight in weights.items() if name.endswith(end))[0, 0] = torch.nan
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return end

    return put


@pytest.fixture(scope="session")
def same_weights(tensors: Callable[..., dict[str, Any]]) -> Callable[..., bool]:
    """Whether two model folders hold the same tensors, bit by bit."""

    def same(one: Path | str, other: Path | str) -> bool:
        a, b = tensors(one), tensors(other)
        return a.keys() == b.keys() and all(bool((a[name] == b[name]).all()) for name in a)

    return same


@pytest.fixture(scope="session")
def numbers() -> Callable[[Path], list[dict[str, Any]]]:
    """The metrics of a run, without those that depend on time or on the machine's memory."""

    def read(folder: Path) -> list[dict[str, Any]]:
        from saccade.run.loggers import read_metrics

        measured = ("time", "perf/", "mem/")
        return [
            {name: value for name, value in row.items() if not name.startswith(measured)}
            for row in read_metrics(folder)
        ]

    return read


@pytest.fixture
def resumed(
    tmp_path: Path, same_weights: Callable[..., bool], numbers: Callable[[Path], list[dict[str, Any]]]
) -> Callable[..., tuple[Path, Path]]:
    """Runs a config, repeats its last step from the checkpoint before, asserts equal bits; returns both checkpoints."""

    def run(recipe: Callable[..., Any], config: dict[str, Any]) -> tuple[Path, Path]:
        whole, again = (tmp_path / name for name in ("whole", "again"))
        recipe(config | {"run.out": str(whole), "save.every": 1})
        shutil.copytree(whole, again)
        last = f"run/checkpoints/step-{config['run.max_steps']}"
        shutil.rmtree(again / last)
        recipe(config | {"run.out": str(again), "save.every": 1, "run.resume": "auto"})
        names = [
            sorted(p.relative_to(out / last) for p in (out / last).rglob("*") if p.is_file()) for out in (whole, again)
        ]
        assert names[0] == names[1] and same_weights(whole / last, again / last)
        for name in (name for name in names[0] if name.parts[0] in ("state", "adapter")):
            assert (whole / last / name).read_bytes() == (again / last / name).read_bytes(), name
        assert numbers(whole / "run") == numbers(again / "run")
        return whole / last, again / last

    return run


LONGEST = ("tests/peers", "tests/test_", "tests/trainer", "tests/models", "tests/recipes")
WAITING = ("tests/ranks/", "tests/engines/replicas/")  # these mostly wait for processes
BETWEEN = 7  # computing files between two waiting ones


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Orders the files, which workers take whole (groups of xdist 3.8 are lost with pytest 9.2): long ones first, so
    that none is left at the end, and waiting ones spread out, so that one worker waits while the others compute.
    """
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)

    def begins(path: Path, folders: tuple[str, ...]) -> bool:
        return path.relative_to(REPOSITORY).as_posix().startswith(folders)

    order = sorted((p for p in files if not begins(p, WAITING)), key=lambda path: not begins(path, LONGEST))
    for number, path in enumerate(path for path in files if begins(path, WAITING)):
        order.insert(number * (BETWEEN + 1), path)
    items[:] = [item for path in order for item in files[path]]
    gc.freeze()


@pytest.fixture(scope="session")
def family_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    """The family bound to a tiny model folder, built once; its weights come from `load`."""

    @functools.cache
    def bound(name: str) -> Family:
        from saccade.models.families import load_family
        from saccade.plugins.families.tiny_kinds import build

        return load_family(build(name, tmp_path_factory.mktemp(name)))

    return bound


@pytest.fixture(scope="session")
def load(family_of: Callable[[str], Family]) -> Callable[..., Any]:
    """A fresh copy of the weights of a tiny model, by default in fp32."""

    def fresh(name: str, dtype: str = "float32") -> Any:
        import torch

        from saccade.models.load import load_model

        return load_model(family_of(name), dtype=getattr(torch, dtype), device=torch.device("cpu"))

    return fresh


@pytest.fixture(scope="session")
def stock(family_of: Callable[[str], Family]) -> Callable[..., Any]:
    """The same weights in the model class of transformers: the independent reference."""

    @functools.cache
    def loaded(name: str, dtype: str = "float32") -> Any:
        import torch
        import transformers

        family = family_of(name)
        auto = getattr(transformers, family.spec.auto_class)
        model = auto.from_pretrained(family.path, dtype=getattr(torch, dtype), attn_implementation="sdpa")
        return model.eval()

    return loaded


@pytest.fixture(scope="session")
def image() -> Callable[..., Media]:
    """A noisy picture; another seed is another picture of the same size."""

    @functools.cache
    def made(width: int = 56, height: int = 56, seed: int = 0) -> Media:
        from saccade.media.images import open_media

        pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
        return open_media(pixels)

    return made


@pytest.fixture
def on_disk(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Callable[[Media], Media]:
    """Files inside rows are spilled to TMPDIR, whatever their size; returns a function that spills one."""
    from saccade.media import blob_file

    monkeypatch.setenv("TMPDIR", str(tmp_path_factory.mktemp("spill")))
    monkeypatch.setattr(blob_file, "IN_MEMORY", 0)
    return blob_file.Spill()


@pytest.fixture(scope="session")
def grow(image: Callable[..., Media]) -> Callable[..., Group]:
    """A random group whose members share prefixes at several depths."""

    def grown(rng: np.random.Generator, family: Family, *, uid="g", size=4, images=1, depth=3) -> Group:
        def piece(source: int, pictures: Sequence[Media]) -> Pieces:
            return text(family, rng, int(rng.integers(1, 9)), source, pictures)

        def pictures(count: int) -> list[Media]:
            sizes = [(56, 56), (84, 56), (140, 84)]
            return [image(*sizes[rng.integers(3)], int(rng.integers(3))) for _ in range(count)]

        trunk = piece(Source.PROMPT, pictures(images))
        members = [trunk] * size
        for _ in range(depth):
            shown = pictures(1) if images and rng.random() < 0.5 else []
            pool = [
                [*piece(Source.POLICY, ()), *piece(Source.OBSERVATION, shown)] for _ in range(int(rng.integers(1, 3)))
            ]
            if shown:  # equal ids, another picture
                other = image(shown[0].width, shown[0].height, 7)
                pool.append([(i, s, other if m else None) for i, s, m in pool[0]])
            members = [m if rng.random() < 0.2 else [*m, *pool[int(rng.integers(len(pool)))]] for m in members]
        members = [[*m, *piece(Source.POLICY, ())] if rng.random() < 0.8 else m for m in members]
        members = [m if any(s == Source.POLICY for _, s, _ in m) else [*m, *piece(Source.POLICY, ())] for m in members]
        if size > 2:
            members[1] = members[0]  # an exact duplicate
            members[2] = [*members[0], *piece(Source.POLICY, ())]  # a continuation of it
        trajectories = tuple(to_trajectory(family, m, uid, r, rng) for r, m in enumerate(members))
        sample = Sample(id=uid, messages=(Message(role="user", parts=("x",)),))
        return Group(sample=sample, uid=uid, trajectories=trajectories)

    return grown


Pieces = list[tuple[int, int, "Media | None"]]  # id, source, the picture that starts here


def text(family: Family, rng: np.random.Generator, length: int, source: int, pictures: Sequence[Media]) -> Pieces:
    pieces: Pieces = [(int(i), source, None) for i in rng.integers(0, 200, length)]
    for picture in pictures:
        _, tokens = family.measure(picture)
        pad = family.chat.placeholder
        assert pad is not None
        pieces += [(pad, source, picture), *[(pad, source, None)] * (tokens - 1)]
        pieces.append((int(rng.integers(0, 200)), source, None))
    return pieces


def to_trajectory(family: Family, pieces: Pieces, uid: str, repeat: int, rng: np.random.Generator) -> Trajectory:
    sources = np.array([s for _, s, _ in pieces], np.int8)
    policy = sources == Source.POLICY
    spans = []
    for start, (_, _, picture) in enumerate(pieces):
        if picture is not None:
            grid, tokens = family.measure(picture)
            spans.append(MediaSpan(media=picture, start=start, length=tokens, grid=grid))
    return Trajectory(
        sample_id=uid, repeat=repeat, ids=np.array([i for i, _, _ in pieces], np.int64), sources=sources,
        logprobs=np.where(policy, -1.0, np.nan).astype(np.float32), versions=np.where(policy, 0, -1).astype(np.int32),
        media=tuple(spans), advantages=rng.standard_normal(int(policy.sum())).astype(np.float32),
    )  # fmt: skip
