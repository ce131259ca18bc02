"""What a run says of its rows before it starts, and how long they are."""

import json
from dataclasses import replace

import pytest

from saccade.checks.steps import algorithm_of
from saccade.config import DataConfig, DataSource, load
from saccade.data import datasets
from saccade.data.stream import Stream
from saccade.models.families import load_family
from saccade.plugins.check_data import check_data
from saccade.plugins.check_data.length_cache import cached_lengths
from saccade.plugins.check_data.row_warnings import unknown_words
from saccade.recipes import questions
from saccade.recipes.engines import settings_of
from saccade.recipes.run_parts import make_scorer
from saccade.registry import HOOKS
from saccade.rewards.reward_sample import RewardSample
from saccade.types import Message, Sample


def read(folder, name, *questions):
    path = folder / name
    rows = [{"question": question, "answer": "2"} for question in questions]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return datasets.load([DataSource(path=str(path))], DataConfig())


def test_rows_that_repeat_in_a_step_or_in_validation_are_told(tmp_path, family_of, said):
    family = family_of("qwen2_5_vl")
    train, val = (read(tmp_path, "a.jsonl", "1+1?", "3-1?"), read(tmp_path, "b.jsonl", "1+1?", "4-2?"))
    stream = Stream(train, seed=0, config=DataConfig())
    HOOKS["warn_of_rows"](load({"train.prompts_per_step": 2}), family, stream, [train])
    assert f"2 of 2 different rows of {tmp_path / 'a.jsonl'} (data.val) are in" in said.pop()
    HOOKS["warn_of_rows"](load({"train.prompts_per_step": 5}), family, stream, [val])
    assert "a step takes each 2.5 times; try train.prompts_per_step=2" in said[0]
    assert f"1 of 2 different rows of {tmp_path / 'b.jsonl'} (data.val) are in data.train" in said[1]


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({"env.name": "sokoban_step"}, 3),
        ({"reward.by_source": {"games": "lmmr1_sokoban", "default": "math"}}, 3),
        ({"reward.by_source": {"games": "math", "default": "lmmr1_sokoban"}}, 0),  # a level may be anything else
    ],
)
def test_levels_that_are_no_game_are_bad_rows(options, refused, tmp_path, family_of):
    levels = ["#####\n#@$.#\n#####", "#####\n#@ *#\n#####", "hard"]
    rows = [{"question": "Push.", "level": level, "data_source": "games"} for level in levels]
    rows.append({"question": "Push where?", "data_source": "games"})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = load(
        {"run.out": str(tmp_path), "data.train": str(tmp_path / "rows.jsonl")}
        | {"data.max_bad_fraction": 0.9}
        | options
    )
    data = questions.load_prompts(config, config.data.train, family_of("qwen2_5_vl"))
    reasons = [row.reason for row in data.quarantined]
    solved = "level: a level is solved at its start: every box stands on a goal"
    assert len(data.samples) == 4 - refused and len(reasons) == refused
    if refused:
        assert reasons[0] == solved and "a level has no cells" in reasons[1]
        assert "level: the row has no such column" in reasons[2]


def test_a_prompt_beyond_the_positions_of_the_model_is_left_out(tmp_path, family_of):
    rows = [{"question": "a" * length, "answer": "1"} for length in (10, 4_000)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = load(
        {"run.out": str(tmp_path), "data.train": str(tmp_path / "rows.jsonl")} | {"data.max_prompt_tokens": 16_384}
    )
    family = replace(family_of("qwen2_5_vl"), max_positions=2_048)
    data = questions.load_prompts(config, config.data.train, family)
    assert len(data.samples) == 1 and len(data.overlong) == 1
    room = "the model's own limit of length"
    assert data.overlong[0].reason.endswith(f"tokens, {room} is 2047")
    assert f"1 row over {room} (2047 tokens, data.overlong=drop) left out" in data.summary


def test_a_share_of_words_that_the_tokenizer_does_not_know_is_told(tmp_path, family_of, word_model, said):
    words, bytes_ = load_family(word_model), family_of("qwen2_5_vl")
    known, strange = ["how many red ?"], "how many teapots ?"
    rare = read(tmp_path, "rare.jsonl", *known * 99, strange)  # one word in 400
    common = read(tmp_path, "common.jsonl", *known, strange)
    assert unknown_words(words, rare.samples) is None
    assert unknown_words(bytes_, common.samples) is None  # it spells them
    stream = Stream(common, seed=0, config=DataConfig())
    options = load({"train.prompts_per_step": 1})
    HOOKS["warn_of_rows"](options, words, stream, [])
    assert len(said) == 1
    assert "does not know 12% of the words of these rows, such as 'teapots': all of" in said[0]
    options = {"model.path": word_model, "data.train": str(tmp_path / "common.jsonl")}
    [note] = check_data.run(options | {"prompt.instruction": ""}).notes
    assert said[0] == f"WARNING: {note}"


def test_the_length_limit_of_an_episode_is_that_of_all_its_turns(tmp_path, rl_config):
    changes = {"env.name": "mine.py:Mine", "env.max_turns": 5, "algorithm.preset": "dapo", "rollout.max_tokens": 10}
    config = load(rl_config(tmp_path) | changes)
    with make_scorer(config, algorithm_of(config)) as scorer:
        for length, penalty in ((40, 0.0), (45, -0.5), (50, -1.0)):
            sample = RewardSample(id="a", response="1", answer="9", length=length, max_tokens=10)
            assert scorer.score([sample])[0].parts["overlong"] == penalty


def test_an_engine_takes_every_row_that_passes_the_data_check(family_of):
    def asked(*options):
        settings = settings_of(load(None, list(options)), family_of("qwen2_5_vl"))
        return settings.max_images, settings.max_pixels

    assert asked() == (64, 2_000_000)
    assert asked("data.max_images=100", "data.max_pixels=2000000") == (100, 2_000_000)
    assert asked("env.eval.max_images=80", "data.max_pixels=5000") == (80, 2_000_000)


@pytest.fixture
def counted(family_of, image, tmp_path):
    family = family_of("qwen2_5_vl")
    config = load({"run.out": str(tmp_path)})
    calls = []

    def render(messages):
        calls.append(messages)
        return family.render(messages)

    def lengths(samples, kind="prompt"):
        calls.clear()
        with cached_lengths(config.run, family, kind, lambda sample: sample, render) as length:
            return [length(sample) for sample in samples], len(calls)

    return lengths, image


def test_a_second_start_renders_nothing(counted):
    lengths, image = counted
    rows = [
        Sample(id="a", messages=(Message(role="user", parts=(image(56, 56, 0), "how many?")),)),
        Sample(id="b", messages=(Message(role="user", parts=("2 + 2?",)),)),
    ]
    first, rendered = lengths(rows)
    again, rendered_again = lengths(rows)
    assert first == again and rendered == 2 and rendered_again == 0


def test_another_size_budget_or_wording_is_counted_anew(counted):
    lengths, image = counted
    picture = image(112, 112, 0)
    ask = lambda media, text: Sample(  # noqa: E731
        id="a", messages=(Message(role="user", parts=(media, text)),)
    )
    (full,), _ = lengths([ask(picture, "x")])
    (small,), rendered = lengths([ask(replace(picture, max_pixels=56 * 56), "x")])
    assert rendered == 1 and full - small == 16 - 4
    assert lengths([ask(picture, "xy")])[1] == 1
    assert lengths([ask(picture, "x")], kind="dialogue")[1] == 1
