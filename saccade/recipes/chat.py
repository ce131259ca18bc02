"""Talking with a model: in the terminal, over a file of conversations, or as an endpoint.

saccade chat models/Qwen2.5-VL-3B-Instruct
saccade chat run.yaml --batch conversations.json --out answers.json
saccade chat models/Qwen2.5-VL-3B-Instruct --serve
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from saccade.config import Config
from saccade.data.chats import Picture, RowError, arrange, read_chat
from saccade.data.prompts import text_or_file
from saccade.disk import require_writable
from saccade.engines import Engine, generate, progress
from saccade.errors import ConfigError, DataError, SaccadeError, TrainingError
from saccade.media.images import open_media
from saccade.media.kinds import KINDS, open_any
from saccade.models.families import Family
from saccade.recipes import models, parts
from saccade.recipes.engines import answering_engine, answering_family, model_name, room
from saccade.rollout.episode import noise_key
from saccade.serving.text_stream import TextStream
from saccade.types import Completion, Media, Message, Request, Sampling

Say = Callable[[str], None]
KEY = "chat"


@dataclass(kw_only=True)
class Talk:
    """A conversation in the terminal and how it is carried on."""

    config: Config
    family: Family
    engine: Engine
    sampling: Sampling
    greedy: bool
    messages: list[Message] = field(default_factory=list)
    pictures: list[Media] = field(default_factory=list)  # for the next message
    turns: int = 0


def talk(config: Config, *, greedy: bool = False, say: Say | None = None) -> None:
    """Reads lines until `exit` or the end of the input."""
    say = say or _print
    with suppress(ImportError):
        import readline  # noqa: F401  arrow keys in input()
    with _opened(config) as (family, engine):
        state = Talk(
            config=config,
            family=family,
            engine=engine,
            sampling=_sampling(config, greedy=False),
            greedy=greedy,
        )
        _clear(state, "")
        say(f"{model_name(config, engine)}: {', '.join(COMMANDS)}, exit\n")
        for line in _lines():
            command, _, rest = line.partition(" ")
            try:
                if command in COMMANDS:
                    say(COMMANDS[command](state, rest.strip()) + "\n")
                elif command.startswith("/"):
                    say(f"{command} is unknown; there are {', '.join(COMMANDS)}, exit\n")
                else:
                    _answer(state, line, say)
            except TrainingError:  # of the weights, whatever the line
                raise
            except SaccadeError as error:  # of this line; the conversation goes on
                say(f"{error}\n")


def _lines() -> Iterator[str]:
    prompt = "\n> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return
        if line in ("exit", "quit"):
            return
        if line:
            yield line


def _answer(state: Talk, line: str, say: Say) -> None:
    asked = Message(role="user", parts=(*state.pictures, line))
    messages = (*state.messages, asked)
    request = _request(KEY, messages, state.family, _heated(state.sampling, state.greedy))
    noise = noise_key(state.config.run.seed, KEY, state.turns)
    text, _ = _stream(state, replace(request, noise=noise), say)
    say("\n")
    state.messages = [*messages, Message(role="assistant", parts=(text,))]
    state.pictures, state.turns = [], state.turns + 1


def _stream(state: Talk, request: Request, say: Say) -> tuple[str, Completion]:
    """Says the answer as it comes; Ctrl-C ends it where it is."""
    stream, text, engine = TextStream(state.family.decode), "", state.engine
    done: list[Completion] = []
    with _interruptible() as pressed:
        engine.submit(request)
        while not done:
            if pressed.is_set():
                pressed.clear()
                engine.abort(request.key)
            done = engine.poll()
            ids = done[0].ids if done else progress(engine, request.key)
            piece = stream.finish(ids) if done else stream.add(ids)
            text += piece
            say(piece)
    return text, done[0]


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Tells of Ctrl-C, which would leave caches half written if it struck within an engine's step;
    a second one strikes all the same.
    """
    pressed = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # signals go to another
        yield pressed
        return
    before = signal.getsignal(signal.SIGINT)

    def press(*_: Any) -> None:
        pressed.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


# -- commands of the terminal ----------------------------------------------------------------------


def _image(state: Talk, path: str) -> str:
    if not path:
        raise ConfigError("/image: give a file, such as /image photo.jpg")
    place = Path(path).expanduser().absolute()
    media = open_media(place, limits=state.config.data)
    state.pictures.append(media)
    return f"{media.width}x{media.height}, goes with the next message"


def _series(state: Talk, path: str) -> str:
    if not path:
        raise ConfigError("/series: give a file, such as /series ecg.npy")
    if state.family.series is None:
        raise ConfigError("/series: this model has no encoder; try model.series.encoder=patches")
    media = KINDS["series"].open(Path(path).expanduser().absolute(), limits=state.config.data)
    state.family.measure(media)  # refuses other leads than the encoder reads
    state.pictures.append(media)
    return f"{media.height} leads of {media.width} samples, go with the next message"


def _clear(state: Talk, _: str) -> str:
    own = state.config.prompt.system
    state.messages = [Message(role="system", parts=(text_or_file(own),))] if own else []
    state.pictures = []
    return "a new conversation"


def _system(state: Talk, text: str) -> str:
    state.messages = [m for m in state.messages if m.role != "system"]
    if text:
        state.messages.insert(0, Message(role="system", parts=(text,)))
    return "system message set" if text else "no system message"


def _greedy(state: Talk, _: str) -> str:
    state.greedy = not state.greedy
    return "greedy" if state.greedy else f"temperature {state.sampling.temperature:g}"


def _save(state: Talk, path: str) -> str:
    if not path:
        raise ConfigError("/save: give a file, such as /save chat.json")
    if Path(path).exists():
        raise ConfigError(f"/save: {path} exists; give a new name, nothing is overwritten")
    if not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"/save: the folder of {path} does not exist")
    require_writable(path, "/save", file=True)
    _write([{"messages": _transcript(state.messages)}], Path(path))
    return f"saved to {path}"


COMMANDS: Mapping[str, Callable[[Talk, str], str]] = {
    "/image": _image,
    "/series": _series,
    "/system": _system,
    "/greedy": _greedy,
    "/clear": _clear,
    "/save": _save,
}


# -- a file of conversations -----------------------------------------------------------------------


def answer_file(
    config: Config, path: Path, out: Path | None = None, *, greedy: bool = False
) -> list[dict[str, Any]]:
    """Answers to all conversations of a JSON list; images are files beside it or data URLs."""
    conversations = [
        _conversation(item, f"{path}[{i}]", path.absolute().parent, config)
        for i, item in enumerate(_read(path))
    ]
    if out is not None and out.exists():
        raise ConfigError(f"--out {out} exists; give a new file, nothing is overwritten")
    if out is not None and not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: its folder does not exist; try --out {out.name}")
    if out is not None:
        require_writable(out, "--out", file=True)
    with _opened(config) as (family, engine):
        sampling = _sampling(config, greedy=greedy)
        requests = [
            replace(
                _request(f"{path}[{i}]", messages, family, sampling),
                noise=noise_key(config.run.seed, KEY, i),
            )
            for i, messages in enumerate(conversations)
        ]
        completions = generate(engine, requests)
        answered = [
            {
                "messages": _transcript(
                    [*messages, Message(role="assistant", parts=(family.decode(c.ids),))]
                ),
                "finish": c.finish,
                "tokens": len(c.ids),
            }
            for messages, c in zip(conversations, completions, strict=True)
        ]
    _write(answered, out)
    return answered


def _read(path: Path) -> list[Any]:
    if not path.is_file():
        raise ConfigError(f"--batch {path}: no such file; give a JSON list of conversations")
    try:
        items = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"--batch {path} is not JSON: {error}") from None
    if not isinstance(items, list) or not items:
        raise ConfigError(f"--batch {path}: give a list of conversations, such as [[{{...}}]]")
    return items


def _conversation(item: Any, where: str, folder: Path, config: Config) -> tuple[Message, ...]:
    written = item.get("messages") if isinstance(item, Mapping) else item
    try:
        turns = arrange(read_chat(written), [], prepend=True)
    except RowError as error:
        raise ConfigError(f"{where}: {error}") from None
    if turns[-1][0] == "assistant":
        raise ConfigError(f"{where}: ends with the assistant; end with what it should answer")

    def part(piece: Any) -> str | Media:
        if not isinstance(piece, Picture):
            return piece
        options = {"min_pixels": piece.min_pixels, "max_pixels": piece.max_pixels, **piece.options}
        try:
            return open_any(piece.kind, piece.source, options, base=folder, limits=config.data)
        except DataError as error:
            raise ConfigError(f"{where}: {error}") from None

    messages = [
        Message(role=role, parts=tuple(part(piece) for piece in pieces))  # type: ignore[arg-type]
        for role, pieces in turns
    ]
    if config.prompt.system and messages[0].role != "system":
        messages.insert(0, Message(role="system", parts=(text_or_file(config.prompt.system),)))
    return tuple(messages)


def _transcript(messages: Sequence[Message]) -> list[dict[str, Any]]:
    def part(item: str | Media) -> dict[str, str]:
        if isinstance(item, str):
            return {"type": "text", "text": item}
        return {"type": item.kind, item.kind: item.path or f"sha256:{item.hash}"}

    return [
        {"role": m.role, "content": [part(p) for p in m.parts] if m.media else m.text}
        for m in messages
    ]


def _write(answered: Sequence[Any], out: Path | None) -> None:
    text = json.dumps(answered, indent=2, ensure_ascii=False) + "\n"
    if out is None:
        print(text, end="")
    else:
        out.write_text(text, encoding="utf-8")
        print(f"wrote {len(answered)} answers to {out}")


# -- an endpoint -----------------------------------------------------------------------------------


def serve(
    config: Config,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: bool = True,
    greedy: bool = False,
    say: Say | None = None,
) -> None:
    """Serve until it is interrupted. The engine runs in this thread, the server in another."""
    from saccade.serving.chat_endpoint import Served, chat_app
    from saccade.serving.engine_hub import Hub
    from saccade.serving.http_server import make_token, running, shown_token

    say = say or _print
    secret = make_token(host, wanted=token)
    with _opened(config) as (family, engine):
        served = Served(
            family=family,
            model=model_name(config, engine),
            sampling=_sampling(config, greedy=greedy),
            data=config.data,
            logprobs=engine.capabilities().logprobs,
        )
        hub = Hub(engine)
        with running(chat_app(hub, served, token=secret), host, port) as address:
            say(f"{served.model} at {address}/v1\n")
            shown = shown_token(secret)
            say(f"page:  {address}/{f'#token={shown}' if secret else ''}\n")
            if secret:
                say(f"token: {shown}\n")
            hub.run()


# -- what they share -------------------------------------------------------------------------------


@contextmanager
def _opened(config: Config) -> Iterator[tuple[Family, Engine]]:
    models.quiet_libraries()
    family = answering_family(config)
    with closing(answering_engine(config, family)) as engine:
        yield replace(family, max_positions=room(config, family)), engine


def _request(key: str, messages: Sequence[Message], family: Family, sampling: Sampling) -> Request:
    rendered = family.chat.render(messages, family.measure, generation=True)
    room = family.max_positions - len(rendered)
    if room < 1:
        raise ConfigError(
            f"{key}: {len(rendered)} tokens where prompt and answer have {family.max_positions}; "
            "/clear begins anew, a lower data.max_pixels shrinks images; with vllm and sglang a "
            "higher data.max_prompt_tokens makes room, up to env.max_total_tokens"
        )
    return Request(
        key=key,
        ids=rendered.ids,
        media=rendered.media,
        messages=tuple(messages),
        sampling=replace(sampling, max_tokens=min(sampling.max_tokens, room)),
    )


def _sampling(config: Config, *, greedy: bool) -> Sampling:
    return _heated(replace(parts.rollout_sampling(config), support=False), greedy)


def _heated(sampling: Sampling, greedy: bool) -> Sampling:
    return replace(sampling, temperature=0.0, top_p=1.0, top_k=-1) if greedy else sampling


def _print(text: str) -> None:
    print(text, end="", flush=True)
