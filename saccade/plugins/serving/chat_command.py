"""Chat with a model: in the terminal, over a file of conversations, or as an HTTP endpoint.

saccade chat models/Qwen2.5-VL-3B-Instruct
saccade chat run.yaml --batch conversations.json --out answers.json
saccade chat models/Qwen2.5-VL-3B-Instruct --serve
"""

import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from saccade.config import Config, PromptConfig
from saccade.data.chats import RowError
from saccade.data.formats import FORMATS, read_row
from saccade.data.prompts import text_or_file
from saccade.engines import Engine, generate
from saccade.errors import ConfigError, DataError, SaccadeError, TrainingError
from saccade.media.kinds import KINDS, open_any
from saccade.models.families import Family
from saccade.plugins.evaluation.answering import answering_engine, answering_family, model_name, room
from saccade.plugins.reports.rollout_record import message_record
from saccade.plugins.serving.text_stream import TextStream
from saccade.recipes import model_setup, run_parts
from saccade.rollout.episode import noise_key
from saccade.system.disk import require_new
from saccade.types import Completion, Media, Message, Request, Sampling

Say = Callable[[str], None]
KEY = "chat"


@dataclass(kw_only=True)
class ChatState:
    """A loaded model and the state of a conversation in the terminal."""

    config: Config
    family: Family
    engine: Engine
    sampling: Sampling
    greedy: bool
    messages: list[Message] = field(default_factory=list)
    pending_media: list[Media] = field(default_factory=list)  # media for the next message
    turns: int = 0

    def current_sampling(self) -> Sampling:
        return replace(self.sampling, temperature=0.0, top_p=1.0, top_k=-1) if self.greedy else self.sampling

    def request(self, key: str, messages: Sequence[Message], noise: int) -> Request:
        rendered = self.family.chat.render(messages, self.family.measure, generation=True)
        most, asked, sampling = self.family.max_positions, len(rendered), self.current_sampling()
        if asked >= most:
            helps = "/clear begins anew; lower data.max_pixels, or with vllm and sglang raise data.max_prompt_tokens"
            raise ConfigError(f"{key}: {asked} tokens where prompt and answer have {most}; {helps}")
        sampling = replace(sampling, max_tokens=min(sampling.max_tokens, most - asked))
        said, noise = tuple(messages), noise_key(self.config.run.seed, KEY, noise)
        return Request(key=key, ids=rendered.ids, media=rendered.media, messages=said, sampling=sampling, noise=noise)


@contextmanager
def _opened(config: Config, *, greedy: bool) -> Iterator[ChatState]:
    model_setup.quiet_libraries()
    family = answering_family(config)
    sampling = replace(run_parts.rollout_sampling(config), support=False)
    with closing(answering_engine(config, family)) as engine:
        family = replace(family, max_positions=room(config, family))
        yield ChatState(config=config, family=family, engine=engine, sampling=sampling, greedy=greedy)


def _preamble(prompt: PromptConfig) -> tuple[Message, ...]:
    system = prompt.of("").system
    return (Message(role="system", parts=(text_or_file(str(system)),)),) if system else ()


_say: Say = partial(print, end="", flush=True)


def talk(config: Config, *, greedy: bool = False) -> None:
    """Answer lines from stdin until `exit` or the end of the input."""
    with suppress(ImportError):
        import readline  # noqa: F401  arrow keys in input()
    with _opened(config, greedy=greedy) as state:
        _clear(state, "")
        _say(f"{model_name(config.model, state.engine)}: {', '.join(COMMANDS)}, exit\n")
        for line in _lines():
            command, _, rest = line.partition(" ")
            try:
                if command in COMMANDS:
                    _say(COMMANDS[command](state, rest.strip()) + "\n")
                elif command.startswith("/"):
                    _say(f"{command} is unknown; expected one of {', '.join(COMMANDS)}, exit\n")
                else:
                    _answer(state, line, _say)
            except TrainingError:  # an error of the weights would repeat for every line
                raise
            except SaccadeError as error:  # an error of this line; the conversation continues
                _say(f"{error}\n")


def _lines() -> Iterator[str]:
    prompt = "\n> " if sys.stdin.isatty() else ""
    with suppress(EOFError):
        while (line := input(prompt).strip()) not in ("exit", "quit"):
            if line:
                yield line


def _answer(state: ChatState, line: str, say: Say) -> None:
    """Stream the answer to a line; Ctrl-C cuts it off."""
    messages = (*state.messages, Message(role="user", parts=(*state.pending_media, line)))
    request = state.request(KEY, messages, state.turns)
    stream, text, engine = TextStream(state.family.decode), "", state.engine
    done: list[Completion] = []
    with _interruptible() as pressed:
        engine.submit(request)
        while not done:
            if pressed.is_set():
                pressed.clear()
                engine.abort(request.key)
            done = engine.poll()
            ids = done[0].ids if done else engine.progress(request.key)
            piece = stream.finish(ids) if done else stream.add(ids)
            text += piece
            say(piece)
    say("\n")
    state.messages = [*messages, Message(role="assistant", parts=(text,))]
    state.pending_media, state.turns = [], state.turns + 1


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Context manager: the first Ctrl-C only sets the event, as an exception inside an engine's step could leave caches
    half written. A second Ctrl-C interrupts as usual.
    """
    pressed, before = threading.Event(), signal.getsignal(signal.SIGINT)

    def press(*_: Any) -> None:
        pressed.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


# -- commands of the terminal ----------------------------------------------------------------------


def _attach(kind: str, example: str, state: ChatState, path: str) -> str:
    media = KINDS[kind].open(_file(path, f"/{kind} {example}"), limits=state.config.data)
    if kind == "series" and state.family.series is None:
        raise ConfigError("/series: this model has no encoder; try model.series.encoder=patches")
    state.family.measure(media)  # refuses a series with other channels than the encoder reads
    state.pending_media.append(media)
    return f"{media.width}x{media.height}, goes with the next message"


def _clear(state: ChatState, _: str) -> str:
    state.messages, state.pending_media = list(_preamble(state.config.prompt)), []
    return "a new conversation"


def _system(state: ChatState, text: str) -> str:
    first = [Message(role="system", parts=(text,))] if text else []
    state.messages = first + [m for m in state.messages if m.role != "system"]
    return "system message set" if text else "no system message"


def _greedy(state: ChatState, _: str) -> str:
    state.greedy = not state.greedy
    return "greedy" if state.greedy else f"temperature {state.sampling.temperature:g}"


def _save(state: ChatState, path: str) -> str:
    file = _file(path, "/save chat.json")
    require_new(file, "/save")
    _write([{"messages": _transcript(state.messages)}], file)
    return f"saved to {path}"


def _file(path: str, example: str) -> Path:
    if not path:
        raise ConfigError(f"{example.partition(' ')[0]}: give a file, such as {example}")
    return Path(path).expanduser().absolute()


COMMANDS: Mapping[str, Callable[[ChatState, str], str]] = {
    "/image": partial(_attach, "image", "photo.jpg"),
    "/series": partial(_attach, "series", "ecg.npy"),
    "/system": _system,
    "/greedy": _greedy,
    "/clear": _clear,
    "/save": _save,
}


# -- a file of conversations -----------------------------------------------------------------------


def answer_file(config: Config, path: Path, out: Path | None = None, *, greedy: bool = False) -> None:
    """Write answers to the conversations of a JSON list; images are data URLs, or paths relative to its folder. A
    conversation that cannot be answered gets an error in its place; if there is one, this raises at the end.
    """
    items, rows, asked = _read(path), dict[int, dict[str, Any]](), dict[int, tuple[Message, ...]]()
    for index, item in enumerate(items):
        with _reported(rows, index):
            asked[index] = _conversation(item, f"{path}[{index}]", path.absolute().parent, config)
    if out is not None:
        require_new(out, "--out")
    if asked:
        with _opened(config, greedy=greedy) as state:
            requests: dict[int, Request] = {}
            for index, messages in asked.items():
                with _reported(rows, index):
                    requests[index] = state.request(f"{path}[{index}]", messages, index)
            done = generate(state.engine, list(requests.values())) if requests else []
            for index, answer in zip(requests, done, strict=True):
                said = Message(role="assistant", parts=(state.family.decode(answer.ids),))
                text = _transcript([*asked[index], said])
                rows[index] = {"messages": text, "finish": answer.finish, "tokens": len(answer.ids)}
    failed = [rows[index]["error"] for index in sorted(rows) if "error" in rows[index]]
    if len(failed) < len(items):
        _write([rows[index] for index in sorted(rows)], out)
    if failed:
        raise ConfigError("\n".join([*failed, f"{len(failed)} of {len(items)} conversations were not answered"]))


@contextmanager
def _reported(rows: dict[int, dict[str, Any]], index: int) -> Iterator[None]:
    try:
        yield
    except SaccadeError as error:
        rows[index] = {"error": str(error)}


def _read(path: Path) -> list[Any]:
    try:
        items = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--batch {path} is not JSON that can be read: {error}") from None
    if not isinstance(items, list) or not items:
        raise ConfigError(f"--batch {path}: give a list of conversations, such as [[{{...}}]]")
    return items


def _conversation(item: Any, where: str, folder: Path, config: Config) -> tuple[Message, ...]:
    """Reads an item as a row of the data format `messages`; its file paths are relative to `folder`."""

    def open_image(source: Any, *, kind: str = "image", **options: Any) -> Media:
        return open_any(kind, source, options, base=folder, limits=config.data)

    row = item if isinstance(item, Mapping) else {"messages": item}
    try:
        messages = read_row(row, FORMATS["messages"], config.data, open_image=open_image).messages
    except (RowError, DataError) as error:
        raise ConfigError(f"{where}: {error}") from None
    if messages[-1].role == "assistant":
        raise ConfigError(f"{where}: ends with the assistant; end with what it should answer")
    return messages if messages[0].role == "system" else (*_preamble(config.prompt), *messages)


def _transcript(messages: Sequence[Message]) -> list[dict[str, Any]]:
    name = lambda media: media.path or f"sha256:{media.hash}"  # noqa: E731
    return [message_record(m, name) if m.media else {"role": m.role, "content": m.text} for m in messages]


def _write(answered: Sequence[Any], out: Path | None) -> None:
    text = json.dumps(answered, indent=2, ensure_ascii=False) + "\n"
    if out is None:
        print(text, end="")
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
        print(f"wrote {sum('error' not in row for row in answered)} answers to {out}")


# -- an endpoint -----------------------------------------------------------------------------------


def serve(config: Config, *, host: str, port: int, token: bool, greedy: bool) -> None:
    """Serve until interrupted. The engine runs in this thread, the HTTP server in a background thread."""
    from saccade.plugins.serving.chat_endpoint import Served, chat_app
    from saccade.plugins.serving.engine_hub import Hub
    from saccade.plugins.serving.http_server import make_token, running, shown_token

    secret = make_token(host, wanted=token)
    with _opened(config, greedy=greedy) as state:
        name, sampling = model_name(config.model, state.engine), state.current_sampling()
        logprobs = state.engine.capabilities().logprobs
        served = Served(family=state.family, model=name, sampling=sampling, data=config.data, logprobs=logprobs)
        hub = Hub(state.engine)
        with running(chat_app(hub, served, token=secret), host, port) as address:
            shown = shown_token(secret)
            _say(f"{served.model} at {address}/v1\npage:  {address}/{f'#token={shown}' if secret else ''}\n")
            _say(f"token: {shown}\n" if secret else "")
            hub.run()
