"""Cold-start rows: played in the environment, read back to the tokens that an episode has."""

import json

import numpy as np
import pytest

from saccade.config import load
from saccade.errors import DataError
from saccade.models.families import load_family
from saccade.plugins.evaluation.results import read_lines
from saccade.plugins.families import tiny
from saccade.plugins.quickstart.counting import write_jsonl
from saccade.plugins.visual_search import coldstart
from saccade.plugins.visual_search.search_expert import AGAIN, call, demonstration
from saccade.plugins.visual_search.search_scenes import search_split
from saccade.recipes import questions, run_parts
from saccade.recipes.sft import dialogue
from saccade.rollout.episode import EpisodeSetup, Limits, episode
from saccade.types import Completion, Message, Request, Sample, Sampling, Source

ENV = ["env.name=crop", "env.min_pixels=3136", "env.max_pixels=3136"]
LEVELS = ("easy", "medium", "hard")


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    return load_family(tiny.build("qwen2_5_vl", tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scenes")
    rows = {level: search_split(6, seed=1, level=level, view=56) for level in LEVELS}
    return {level: write_jsonl(rows[level], folder, name=level, budgets=True) for level in LEVELS}


@pytest.mark.parametrize(("level", "stops"), [("medium", False), ("hard", True)])
def test_sft_and_rl_read_the_same_tokens(level, stops, scenes, family, tmp_path):
    """What `saccade sft` trains on is, id by id, what the episode loop makes of the same turns."""
    options = [*ENV, f"data.train={scenes[level]}"]
    coldstart.run(load(None, options), scenes[level], tmp_path / "cold", mistakes=0.4)
    sft = load(None, [*ENV, f"data.train={tmp_path / 'cold' / 'train.jsonl'}", "sft.max_tokens=4000"])
    demonstrated = questions.load_dialogues(sft, sft.data.train, family).samples
    asked = questions.load_prompts(load(None, options), load(None, options).data.train, family).samples
    assert len(demonstrated) == len(asked) == 6
    failures = 0
    for question, row in zip(asked, demonstrated, strict=True):
        texts = [m.text for m in row.messages if m.role == "assistant"]
        lived = run_episode(question, texts, family, sft, stops=stops)
        (taught,) = dialogue(row, family, "assistant").trajectories
        assert lived.end_reason == "answered" and lived.turns == len(texts)
        np.testing.assert_array_equal(taught.ids, lived.ids)
        assert [(s.start, s.length, s.grid) for s in taught.media] == [(s.start, s.length, s.grid) for s in lived.media]
        # An end of turn behind a stop string is the template's in RL; nothing else differs.
        differs = taught.sources != lived.sources
        assert set(lived.sources[differs]) <= {int(Source.TEMPLATE)}
        assert differs.sum() == (len(texts) - 1 if stops else 0)
        failures += lived.info["tool_counts"]["failed"]
    assert failures > 0  # wrong calls and their error observations are among them


def run_episode(sample, texts, family, config, *, stops):
    """The episode loop with a policy that writes these turns."""
    world, limits = (
        run_parts.environments_of(config, family),
        Limits(max_turns=6, max_images=12, max_total_tokens=4000),
    )
    play = EpisodeSetup(environment=world, family=family, sampling=Sampling(max_tokens=400), limits=limits, seed="0")
    steps, reply = episode(sample, 0, sample.id, play), None
    for text in texts:
        request = steps.send(reply)
        assert isinstance(request, Request)
        ids = family.chat.tokenizer.encode(text, add_special_tokens=False)
        if not (stops and text.endswith("</grounding>")):
            ids.append(family.chat.end_of_turn)
        zeros = {"logprobs": np.zeros(len(ids), np.float32), "versions": np.zeros(len(ids), np.int32)}
        reply = Completion(key=request.key, ids=np.array(ids), finish="stop", **zeros)
    with pytest.raises(StopIteration) as end:
        steps.send(reply)
    return end.value.value


def test_where_a_question_ends_depends_on_what_follows_it():
    def asked(roles, *options):
        names = {"u": "user", "a": "assistant", "t": "tool"}
        messages = tuple(Message(role=names[role], parts=("x",)) for role in roles)  # type: ignore[arg-type]
        ask = questions.prompt_builder(load(None, ["prompt.instruction=", *options]))
        return "".join(m.role[0] for m in ask(Sample(id="1", messages=messages)).messages)

    assert asked("uaua") == "uau" and asked("uau") == "uau"  # a chat
    assert asked("uata") == asked("uaua", *ENV) == "u"  # an episode
    assert asked("uau", *ENV) == "uau"  # a question after a chat


def test_trajectories_of_others_are_played_again(scenes, tmp_path, capsys):
    first = coldstart.run(load(None, ENV), scenes["medium"], tmp_path / "a", verifier="exact")
    (tmp_path / "a" / "train.md").write_text("---\nlicense:\n- mit\n---\n")  # as in a set of the hub
    again = coldstart.run(load(None, ENV), tmp_path / "a" / "train.jsonl", tmp_path / "b")
    card = (tmp_path / "b" / "train.md").read_text()
    assert all(one in card for one in ("6 conv", "train.jsonl b env.name=crop env.min_pixels=3136", "inputs: mit ("))
    assert first == again == {"written": 6} and capsys.readouterr().out == ""
    coldstart.run(load(None), scenes["medium"], tmp_path / "c")  # pixels that nobody chose are told
    assert "set env.min_pixels=3136 env.max_pixels=3136" in capsys.readouterr().out
    assert read_lines(tmp_path / "a" / "train.jsonl") == read_lines(tmp_path / "b" / "train.jsonl")


def test_what_must_not_be_taught_is_set_aside(scenes, tmp_path):
    look = f"<think>Small.</think>{call((0, 0, 0.5, 0.5), 'original_image')}"
    answer = "<think>Now.</think><answer>{}</answer>"
    wrong = f"<think>Small.</think>{call((0, 0, 0.5, 0.5), 'observation_9')}"
    turns = {
        "written": [wrong, look, answer], "failed_call": [look, wrong, answer], "wrong": [look, answer.format("none")],
        "no_answer": [look, "<think>Now.</think>"], "answer_before_the_end": [answer, look],
        "too_many_turns": [look] * 6 + [answer],
    }  # fmt: skip
    rows = []
    for question, texts in zip(read_lines(scenes["easy"]), turns.values(), strict=False):
        said = [{"from": "human", "value": question.pop("problem")}]
        for text in texts:
            said.append({"from": "gpt", "value": text.replace("{}", str(question["answer"]))})
            said.append({"from": "human", "value": "seen"})
        image = question["images"][0] | {"path": str(scenes["easy"].parent / question["images"][0]["path"])}
        rows.append(question | {"conversations": said[:-1], "images": [image]})
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    counts = coldstart.run(load(None, ENV), path, tmp_path / "cold", verifier="exact")
    assert counts == dict.fromkeys(turns, 1)


def test_the_searcher_writes_calls_as_the_environment_reads_them(scenes, tmp_path):
    config = load(None, [*ENV, "env.coordinates=milli", "env.call=tool_call"])
    counts = coldstart.run(config, scenes["hard"], tmp_path / "cold", mistakes=0.5)
    assert counts == {"written": 6}
    for row in read_lines(tmp_path / "cold" / "train.jsonl"):
        said = [turn["value"] for turn in row["conversations"] if turn["from"] == "gpt"]
        looks = [text for text in said[:-1] if AGAIN not in text]
        assert len(row["images"]) == 1 + len(looks)  # every look shows something
        assert "<tool_call>" in said[0]


def test_a_failed_run_leaves_no_set_and_the_next_one_goes_ahead(scenes, tmp_path):
    rows, none = tmp_path / "rows.jsonl", tmp_path / "none.jsonl"
    good = read_lines(scenes["easy"])[0]
    picture = good["images"][0] | {"path": str(scenes["easy"].parent / good["images"][0]["path"])}
    plain = {"problem": "What?", "answer": "3"}  # no scene: raises after the first row is written
    rows.write_text("".join(json.dumps(row) + "\n" for row in (good | {"images": [picture]}, plain)))
    none.write_text(json.dumps({"conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "3"}]}))
    for source, problem in ((rows, "no scene of"), (none, "no row became a trajectory")):
        with pytest.raises(DataError, match=problem):
            coldstart.run(load(None, ENV), source, tmp_path / "cold")
        assert not (tmp_path / "cold" / "train.jsonl").exists()
    assert coldstart.run(load(None, ENV), scenes["easy"], tmp_path / "cold") == {"written": 6}
    assert len(read_lines(tmp_path / "cold" / "train.jsonl")) == 6


OWN = """
from pathlib import Path
from saccade.types import Message
class Echo:
    def reset(self, sample, seed):
        self.sample = sample
        return sample.messages
    def step(self, message):
        if "crash" in message.text:
            raise RuntimeError("no more")
        if "<answer>" in message.text:
            return [], None, True, {}
        return [Message(role="user", parts=("heard",))], None, False, {}
    def close(self):
        with Path(__file__).with_name("closed").open("a") as file:
            file.write("x")
def weigh(thing):
    return f"{thing} weighs 3"
"""


def test_environments_and_tools_of_the_user_are_played(tmp_path, capsys):
    own = tmp_path / "own.py"
    own.write_text(OWN)
    weigh = '<tool_call>{"name": "weigh", "arguments": {"thing": "It"}}</tool_call>'
    rows = tmp_path / "rows.jsonl"
    with rows.open("w") as file:
        for first in (weigh, f"{weigh} crash"):
            said = ["What is it?", first, "seen", "<answer>3</answer>"]
            turns = [{"from": ("human", "gpt")[index % 2], "value": value} for index, value in enumerate(said)]
            file.write(json.dumps({"conversations": turns, "answer": "3"}) + "\n")
    config = load({"env": {"name": f"{own}:Echo"}})
    counts = coldstart.run(config, rows, tmp_path / "a")
    assert counts == {"written": 1, "env_error": 1}
    assert "RuntimeError" in capsys.readouterr().out
    assert (tmp_path / "closed").read_text() == "xx"
    (row,) = read_lines(tmp_path / "a" / "train.jsonl")
    assert row["conversations"][2]["value"] == "heard"
    config = load({"env": {"name": "tools", "tools": [f"{own}:weigh"]}})
    assert coldstart.run(config, rows, tmp_path / "b") == {"written": 2}
    for row in read_lines(tmp_path / "b" / "train.jsonl"):
        assert "It weighs 3" in row["conversations"][2]["value"]


def test_a_searcher_finds_what_it_looks_for():
    """Every demonstration ends with a look at the target; one that is misread teaches nothing."""
    make = coldstart.env_setup.environments(load(None, ENV).env, order=("answer_tag",))
    # One call of three fails against the plan, and not the last.
    row = search_split(1, seed=2, level="easy", view=56)[0]
    look, wrong = (call((0, 0, 0.5, 0.5), name) for name in ("original_image", "observation_9"))
    texts = [wrong, look, look, "<answer>1</answer>"]
    for planned, reason in ((0, "failed_call"), (1, ""), (None, "")):  # planned by nobody: theirs
        assert coldstart.replay(row, texts, make(), most=6, planned=planned)[1] == reason
    for level in LEVELS:
        for row in search_split(5, seed=2, level=level, view=56):
            turns = demonstration(row, np.random.default_rng(1), turns=6, mistakes=0.2)
            played, reason = coldstart.replay(row, turns, make(), most=6)
            assert reason == ""
            x0, y0, x1, y1 = played.media[-1].box
            tx0, ty0, tx1, ty1 = row.extra["box"]
            assert x0 <= tx0 and y0 <= ty0 and tx1 <= x1 and ty1 <= y1
