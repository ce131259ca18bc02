"""Episodes with tools, in message space."""

import json

import numpy as np
import pytest
from PIL import Image

from saccade.config import EnvConfig
from saccade.environments import EnvContext, UserCode, build, instruction, problems, stop_strings, sweep_problems
from saccade.media.images import decode
from saccade.plugins.verifiers.extract import extract
from saccade.types import Message, Sample

CONTEXT = EnvContext(answer=lambda text: extract(text, ["answer_tag"]) or None)


def said(text: str) -> Message:
    return Message(role="assistant", parts=(text,))


def box(*numbers, source="original_image") -> str:
    call = json.dumps({"bbox_2d": list(numbers), "source": source})
    return f"<think>closer</think><grounding>{call}</grounding>"


def named(name: str, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture
def begin(image):
    def begun(context=CONTEXT, user=None, pictures=1, **options):
        environment = build(EnvConfig(**{"name": "crop"} | options), context, user)
        shown = [image(200, 100, seed) for seed in range(pictures)]
        sample = Sample(id="s", messages=(Message(role="user", parts=(*shown, "Where?")),))
        assert environment.reset(sample, 0) == sample.messages
        return environment

    return begun


def test_numbers_of_observations_do_not_shift_after_an_invalid_call(begin):
    environment = begin()
    first = environment.step(said(box(0, 0, 0.5, 0.5)))
    assert first.messages[0].role == "user" and not first.done and first.reward is None
    assert "Result of request 1: observation_1." in first.messages[0].text
    bad = environment.step(said(box(0, 0, 0.5, 0.5, source="observation_2")))
    assert bad.messages[0].text == (
        "Request 2 failed: there is no picture observation_2; there are original_image, "
        "observation_1. Correct it, or answer."
    )
    assert bad.messages[0].media == ()
    third = environment.step(said(box(0, 0, 0.5, 0.5, source="observation_1")))
    assert "Result of request 3: observation_2." in third.messages[0].text
    assert third.messages[0].media[0].box == (0, 0, 50, 25)
    end = environment.step(said("<think>so</think><answer>left</answer>"))
    assert end.done and end.info["end_reason"] == "answered"
    noted = end.info["tool_calls"]
    found = [(c["turn"], c["ok"], c["reason"], c["observation"]) for c in noted]
    assert found == [(1, True, "", 1), (2, False, "source", None), (3, True, "", 2)]
    assert noted[2]["lineage"] == ["original_image", "observation_1"]
    assert noted[2]["media"] == third.messages[0].media[0].hash
    assert noted[2]["box"] == [0, 0, 0.5, 0.5] and noted[2]["pixels"] == [0, 0, 50, 25]
    text = box(0, 0, 0.5, 0.5)
    start, stop = noted[0]["span"]
    assert text[start:stop] == noted[0]["text"] and noted[0]["text"].endswith("</grounding>")
    assert end.info["tool_counts"] == {"calls": 3, "failed": 1, "noop": 0}
    json.dumps(end.info)  # plain data


def test_how_a_turn_ends(begin):
    answers = "<answer>7</answer>", "I mention <grounding> and say <answer>7</answer>"
    ends = dict.fromkeys(answers, "answered")
    for text, reason in (ends | dict.fromkeys(("nothing", "<answer></answer>", ""), "eos_no_answer")).items():
        step = begin().step(said(text))
        assert (step.done, step.info["end_reason"]) == (True, reason), text
        assert step.info["tool_calls"] == []
    for text in ("<grounding>{", box(0, 0, 1, 1) + "\n", "<answer>7</answer>" + box(0, 0, 1, 1)):
        assert not begin().step(said(text)).done, text


def test_every_reason_has_its_words_and_is_counted(begin):
    environment = begin(call="tool_call", invalid_call_penalty=0.25)
    calls = {
        "<tool_call>{'name': zoom}</tool_call>": "json",
        "<tool_call>" + "x" * 5000 + "</tool_call>": "too_long",
        "<tool_call>{": "unclosed",
        "<tool_call>{'name': 'zoom', 'arguments': {'a': 1e999}}</tool_call>": "number",
        named("rm -rf", path="/"): "unknown_tool",
        "<tool_call>{'name': 'zoom', 'arguments': [1]}</tool_call>": "arguments",
        named("zoom"): "source",
        named("zoom", source="original_image"): "box",
        named("zoom", source="original_image", bbox_2d=[0, 0, 0.001, 1]): "too_small",
        named("zoom", source="original_image", bbox_2d=[0, 0, 1, 1], label="all"): "",
    }
    for text, reason in calls.items():
        step = environment.step(said(text))
        assert step.reward == (-0.25 if reason else None)
        assert step.info["tool_calls"][-1]["reason"] == reason
        shown = step.messages[0].text
        assert ("failed: " in shown) == bool(reason) and "{" not in shown, shown
    assert step.info["tool_counts"] == {"calls": 10, "failed": 9, "noop": 1}


def test_several_calls_in_a_turn(begin):
    one = named("zoom", source="original_image", bbox_2d=[0, 0, 0.5, 1])
    two = named("zoom", source="observation_1", bbox_2d=[0, 0, 0.5, 1])
    first_only = begin(call="tool_call").step(said(one + two))
    assert len(first_only.messages[0].media) == 1
    three = begin(call="tool_call", parallel_calls=3).step(said(one + two + "<tool_call>{}</tool_call>" + two))
    (message,) = three.messages
    assert [m.box for m in message.media] == [(0, 0, 100, 100), (0, 0, 50, 100)]
    assert [c["ok"] for c in three.info["tool_calls"]] == [True, True, False]
    assert stop_strings(EnvConfig(name="crop", call="tool_call", parallel_calls=3)) == ()
    assert stop_strings(EnvConfig(name="sokoban_step")) == stop_strings(EnvConfig()) == ()
    assert stop_strings(EnvConfig(name="crop")) == ("</grounding>",)
    assert stop_strings(EnvConfig(name="calculator")) == ("</tool_call>",)


def test_what_a_tool_says_is_wrapped_unless_the_template_has_a_place_for_it(begin):
    call = named("zoom", source="original_image", bbox_2d=[0, 0, 0.5, 1])
    plain = begin(call="tool_call").step(said(call)).messages[0]
    assert plain.role == "user" and plain.parts[0] == "<tool_response>\n"
    assert plain.parts[-1] == "\n</tool_response>"
    tool = EnvContext(answer=CONTEXT.answer, role="tool")
    wrapped = begin(tool, call="tool_call").step(said(call)).messages[0]
    assert wrapped.role == "tool" and "tool_response" not in wrapped.text
    assert begin(tool).step(said(box(0, 0, 0.5, 1))).messages[0].role == "user"


def test_a_calculator(begin):
    environment = begin(name="calculator", pictures=0)
    for expression, shown in {
        "2 * (3 + 4)": "Result of request 1: 14",
        "0.1 + 0.2": "Result of request 2: 0.3",
        "1/3": "Result of request 3: 0.3333333333",
        "-2^2 * -.5E1 - 2^-1^2 / 1": "Result of request 4: 19.5",
        "2**0.5": "Request 5 failed: only whole powers are possible. Correct it, or answer.",
        "9^9^9^9": "Request 6 failed: too large. Correct it, or answer.",
        "1/(2-2)": "Request 7 failed: division by zero. Correct it, or answer.",
        "().__class__": "Request 8 failed: '.__class__' is not arithmetic; "
        "numbers, + - * / ^ and ( ) are. Correct it, or answer.",
        "(" * 300: "Request 9 failed: too deeply nested. Correct it, or answer.",
    }.items():
        step = environment.step(said(named("calculate", expression=expression)))
        assert step.messages[0].text == f"<tool_response>\n{shown}\n</tool_response>"
    assert environment.step(said(named("calculate", expression=7))).info["tool_calls"][-1]["reason"] == "arguments"


def test_arguments_of_the_wrong_type_are_told_to_the_policy(begin):
    def search(
        words: str,
        limit: int = 3,
        tags: list[str] = (),
        exact: bool = None,  # noqa: RUF013
        other: "Unknown" = 1,  # noqa: F821
        share: "float | None" = 0.5,
        **more: int,
    ) -> str:
        return words.upper()

    play = begin(user=UserCode(tools={"search": search}), call="tool_call", tools=["m.py:search"])

    def heard(name, **arguments):
        step = play.step(said(named(name, **arguments)))
        return step.messages[0].text, step.info["tool_calls"][-1]["reason"]

    text, reason = heard("search", words=5)
    assert "failed: words must be str, not int; the tool is (words: str, limit: int = 3" in text
    assert reason == "arguments"
    for wrong in ({"limit": 2.5}, {"limit": True}, {"limit": None}, {"tags": [1]}, {"share": "x"}):
        assert heard("search", words="a", **wrong)[1] == "arguments", wrong
    for right in ({"limit": 2}, {"tags": ["x"]}, {"exact": None}, {"other": []}, {"share": None}, {"extra": "x"}):
        assert "A" in heard("search", words="a", **right)[0], right


def test_functions_of_ones_own(begin, image):
    def search(words: str, limit: int = 3) -> str:
        """Finds things. Slowly."""
        if not words:
            raise ValueError("nothing to look for")
        return f"{words} x{limit}"

    def mirror(source: str, images) -> np.ndarray:
        """Shows a picture from behind."""
        return decode(images[source])[:, ::-1]

    def seal() -> Image.Image:
        return Image.new("RGB", (30, 30), "red")

    def crash() -> str:
        raise OSError("the disk is full")

    user = UserCode(tools={f.__name__: f for f in (search, mirror, seal, crash)})
    environment = begin(user=user, call="tool_call", tools=["m.py:search"])
    texts = {
        named("search", words="cats"): "Result of request 1: cats x3",
        named("search", words=""): "Request 2 failed: nothing to look for.",
        named("search", word="cats"): "Request 3 failed: missing a required argument: 'words'",
    }
    for call, text in texts.items():
        assert text in environment.step(said(call)).messages[0].text
    shown = environment.step(said(named("mirror", source="original_image"))).messages[0]
    assert (decode(shown.media[0]) == decode(image(200, 100, 0))[:, ::-1]).all()
    assert shown.media[0].min_pixels == 40_000 and "observation_1" in shown.text
    zoomed = named("zoom", source="observation_1", bbox_2d=[0, 0, 0.5, 1])
    assert environment.step(said(zoomed)).messages[0].media[0].parent == shown.media[0].hash
    assert environment.step(said(named("seal"))).info["tool_calls"][-1]["observation"] == 3
    with pytest.raises(OSError, match="disk"):
        environment.step(said(named("crash")))
    told = instruction(EnvConfig(name="tools", tools=["m.py:search"]), user.descriptions)
    assert "- search: Finds things. Slowly; arguments words: str, limit: int = 3." in told
    assert "- mirror: Shows a picture from behind; arguments source: str." in told


def test_what_the_policy_is_told():
    crop = instruction(EnvConfig(name="crop", coordinates="milli"), {})
    assert '<grounding>{"bbox_2d": [x0, y0, x1, y1], "source": "original_image"}' in crop
    assert "thousandths" in crop and "{coordinates}" not in crop
    assert "calculate: evaluates" in instruction(EnvConfig(name="calculator"), {})
    assert instruction(EnvConfig(), {}) == instruction(EnvConfig(name="crop", instruction=""), {}) == ""
    assert instruction(EnvConfig(name="crop", instruction="Zoom!"), {}) == "Zoom!"


def test_options_that_contradict_each_other():
    for options, field in (
        ({"name": "cave"}, "env.name='cave': no such environment; use single_turn"),
        ({"name": "crop", "call": "action"}, "env.call"),
        ({"name": "crop", "call": "grounding", "parallel_calls": 2}, "env.parallel_calls"),
        ({"name": "my.py:World", "tools": ["a.py:f"]}, "env.tools"),
        ({"name": "tools"}, "env.tools"),
        ({"name": "crop", "args": {"a": 1}}, "env.args"),
        ({"name": "crop", "min_pixels": 10**7}, "env.min_pixels"),
    ):
        found = list(problems(EnvConfig(**options)))
        assert len(found) == 1 and found[0].startswith(field), (options, found)
    crop = EnvConfig(name="crop")
    assert next(sweep_problems(crop, [0, 5])).startswith("val.turns: a limit is at least one turn")
    assert next(sweep_problems(EnvConfig(), [2, 5])).startswith("val.turns: has no effect")
    for options in ({"name": "crop", "tools": ["a.py:f"]}, {"name": "crop", "parallel_calls": 4}):
        assert not list(problems(EnvConfig(**options)))
