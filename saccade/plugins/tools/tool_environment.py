"""An environment with tools: the policy writes calls, sees their results, and continues until it answers.

A turn with a complete call is a call; without one it is an answer if it contains one. A failed call
uses up its turn, and the policy is told the reason. An image that a tool returns gets the next observation
number, so that it can be zoomed into. All calls are listed under `tool_calls` of the episode's info. Code
written by the model is never run.

    env = ToolEnvironment(EnvConfig(name="crop"), context, {"zoom": zoom})
"""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from PIL import Image
from pydantic import TypeAdapter, ValidationError

from saccade.config import EnvConfig
from saccade.environments import EnvContext, Kind, Step, UserCode
from saccade.environments.texts import render_parts, render_text
from saccade.media.images import open_media
from saccade.plugins.tools import calls
from saccade.plugins.tools.calculator import calculate
from saccade.plugins.tools.calls import CallError, CallSpan
from saccade.plugins.tools.crop import EpisodeImages, zoom
from saccade.types import Media, Message, Sample

# The result of a tool: a text or an image, and facts for the record.
ToolResult = tuple[str | Media, Mapping[str, Any]]
Tool = Callable[[Mapping[str, Any], EpisodeImages, EnvConfig, int], ToolResult]


def function_tool(function: Callable[..., Any]) -> Tool:
    """Wrap a user's function as a tool: it gets arguments by name and returns a text or an image. The policy sees the
    message of a ValueError; any other exception ends the episode. A parameter `images` gets the images so far by name.
    """
    signature = typed = inspect.signature(function)
    with suppress(Exception):  # a string annotation may not be resolvable
        typed = inspect.signature(function, eval_str=True)
    wanted = {name: parameter.annotation for name, parameter in typed.parameters.items()}

    def call(arguments: Mapping[str, Any], views: EpisodeImages, env: EnvConfig, unit: int) -> ToolResult:
        given = dict(arguments)
        if "images" in signature.parameters:
            given["images"] = dict(views.media)
        try:
            signature.bind(**given)
        except TypeError as error:
            raise CallError("arguments", problem=f"{error}; the tool is {typed}") from None
        for name in arguments:
            value, kind = given[name], wanted.get(name, Any)
            if not _fits(value, kind) and value is not signature.parameters[name].default:
                what = kind.__name__ if type(kind) is type else kind
                problem = f"{name} must be {what}, not {type(value).__name__}; the tool is {typed}"
                raise CallError("arguments", problem=problem)
        try:
            result = function(**given)
        except ValueError as error:
            raise CallError("tool", problem=str(error)[:200]) from error
        return _content(result, env), {}

    return call


def _fits(value: Any, annotation: Any) -> bool:
    """Whether a JSON value has the annotated type; True if the annotation is not a type that pydantic can check."""
    try:
        TypeAdapter(annotation).validate_json(json.dumps(value), strict=True)
    except ValidationError:
        return False
    except Exception:  # not a type
        pass
    return True


def _content(result: Any, env: EnvConfig) -> str | Media:
    if isinstance(result, Media):
        return result
    if isinstance(result, Image.Image | np.ndarray | bytes):
        return open_media(result, min_pixels=env.min_pixels, max_pixels=env.max_pixels)
    return str(result)


class ToolEnvironment:
    def __init__(self, env: EnvConfig, context: EnvContext, tools: Mapping[str, Tool]) -> None:
        assert env.call is not None
        self.env, self.context, self.tools = env, context, tools
        self.call: str = env.call
        self.turn = 0
        self.calls: list[dict[str, Any]] = []

    def reset(self, sample: Sample, seed: int) -> Sequence[Message]:
        self.views = EpisodeImages(sample.media)
        return sample.messages

    def step(self, message: Message) -> Step:
        self.turn += 1
        text = message.text
        spans = calls.find(text, self.call, self.env.parallel_calls)
        answered = (not spans or spans[0].body is None) and self.context.answer(text)
        if answered or not spans:
            reason = "answered" if answered else "eos_no_answer"
            return Step((), None, True, {**self._info(), "end_reason": reason})
        parts: list[str | Media] = []
        for span in spans:
            parts += ("\n",) if parts else ()
            parts += self._run_call(span, text)
        penalty = -self.env.invalid_call_penalty * sum(not call["ok"] for call in self.calls[-len(spans) :])
        return Step((self._observation(parts),), penalty or None, False, self._info())

    def close(self) -> None:
        pass

    def _run_call(self, span: CallSpan, text: str) -> Sequence[str | Media]:
        """Run a call and record it; returns the text and image that the policy sees."""
        shown = text[span.start : span.end][: calls.LONGEST]
        record: dict[str, Any] = {"turn": self.turn, "name": None, "args": None}
        record |= {"span": [span.start, span.end], "text": shown, "ok": False, "reason": "", "observation": None}
        self.calls.append(record)
        number = len(self.calls)
        try:
            record["name"], record["args"] = name, arguments = self._read(span)
            content, facts = self.tools[name](arguments, self.views, self.env, self.context.unit)
        except CallError as error:
            record["reason"] = error.reason
            return render_parts("error", k=number, reason=render_text(error.reason, **error.facts))
        record |= {"ok": True, **facts}
        if isinstance(content, str):
            return render_parts("result", k=number, text=content)
        place, name = self.views.add(content, facts.get("source"))
        record |= {"observation": place, "media": content.hash, "lineage": list(self.views.lineage[name])}
        return render_parts("observation", k=number, name=name, image=content)

    def _read(self, span: CallSpan) -> tuple[str, Mapping[str, Any]]:
        """Returns (name of the tool, arguments); raises CallError."""
        body = calls.read(span.body)
        if self.call == "grounding":
            return "zoom", body
        name, arguments = body.get("name"), body.get("arguments", {})
        if not isinstance(name, str) or name not in self.tools:
            raise CallError("unknown_tool", name=str(name)[:40], known=", ".join(self.tools))
        if not isinstance(arguments, dict):
            raise CallError("arguments", problem='"arguments" is an object')
        return name, arguments

    def _observation(self, parts: Sequence[str | Media]) -> Message:
        if self.call == "tool_call" and self.context.role == "user":
            parts = ("<tool_response>\n", *parts, "\n</tool_response>")
        return Message(role=self.context.role if self.call == "tool_call" else "user", parts=tuple(parts))

    def _info(self) -> dict[str, Any]:
        failed = sum(not call["ok"] for call in self.calls)
        noop = sum(bool(call.get("noop")) for call in self.calls)
        counts = {"calls": len(self.calls), "failed": failed, "noop": noop}
        return {"tool_calls": [dict(call) for call in self.calls], "tool_counts": counts}


TOOLS: Mapping[str, Tool] = {"zoom": zoom, "calculate": function_tool(calculate)}


def kind(call: tuple[str, ...], tools: tuple[str, ...] = ()) -> Kind:
    """An environment with these tools and the user's."""

    def explain(env: EnvConfig, user_tools: Mapping[str, str]) -> str:
        coordinates = render_text(env.coordinates)
        if env.call == "grounding":
            return render_text("crop_grounding", coordinates=coordinates)
        turn = render_text("several_calls", k=env.parallel_calls) if env.parallel_calls > 1 else render_text("one_call")
        described = [*(render_text(name, coordinates=coordinates) for name in tools), *user_tools.values()]
        return "\n".join([render_text("tools", turn=turn), *(f"- {line}" for line in described)])

    def make(env: EnvConfig, context: EnvContext, user: UserCode) -> ToolEnvironment:
        ours = {name: TOOLS[name] for name in tools}
        return ToolEnvironment(env, context, ours | {name: function_tool(f) for name, f in user.tools.items()})

    return Kind(calls=call, tools=tools, explain=explain, make=make)


CROP = kind(("grounding", "tool_call"), ("zoom",))
CALCULATOR = kind(("tool_call",), ("calculate",))
USER_TOOLS = kind(("tool_call",))
