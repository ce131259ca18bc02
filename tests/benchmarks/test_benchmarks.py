"""What of the benchmarks can be wrong unnoticed: the same work, what is asked, what tables divide by what."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from saccade.forest.packing import pack

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))


def part(system, seconds, **changes):
    """Two steps of T1: 8 sequences of 8 tokens; the first one is slower."""
    done = {"sequences": 8, "images": 2, "prompt_tokens": 24.0, "generated": 64, "trained": 64}
    step = {"rollout": seconds / 2, "update": seconds / 4, "whole": seconds, **done, **changes}
    return {
        "system": system, "status": "ok", "work": "T1",
        "asked": {"prompts": 2, "samples": 4, "side": 56, "prompt": 24, "new": 8},
        "steps": [step | {"whole": 99.0}, step], "gpu_gib": None, "machine": {"device": "CPU"},
    }  # fmt: skip


def test_works_are_written_as_a_name_and_changes():
    from works import parse

    assert parse("W1")["prompts"] == 16
    assert parse("W1,prompts=64,new=8") == parse("W1") | {"prompts": 64, "new": 8}
    with pytest.raises(SystemExit, match="tokens=3: write one of prompts"):
        parse("W1,tokens=3")


def test_other_work_is_found():
    from compare import differences

    def found(**change):
        return differences({"saccade-w1": part("saccade", 1.0), "trl-w1": part("trl", 5.0, **change)})

    assert found() == []
    assert found(generated=63) == ["trl-w1: 63 generated, not 64"]
    (said,) = found(prompt_tokens=25.0)
    assert said.startswith("T1: prompts differ in length")


def test_table_leaves_the_first_step_out_and_divides_by_saccade():
    from compare import table

    parts = {
        "saccade-w1": part("saccade", 1.0),
        "trl-w1": part("trl", 5.0),
        "vllm-w1": {"system": "vllm", "status": "absent", "reason": "no module vllm"},
    }
    _, _, ours, theirs, absent = table(parts).splitlines()
    assert "| 1.00 s | 0.50 s | 0.25 s | 0.25 s | 128 |" in ours
    assert "| 5.00 s | 2.50 s | 1.25 s | 1.25 s | 26 |" in theirs
    assert theirs.endswith("| 5.00 | 5.00 |")
    assert absent == "vllm-w1: absent, no module vllm"
    parts["trl-w1"]["machine"] = {"device": "CPU", "card": "another"}
    assert "ratios are inside of one" in table(parts) and "| 5.00 | 5.00 |" not in table(parts)


def test_steps_of_a_tiny_model_do_what_is_asked(tmp_path, monkeypatch):
    from compare import differences
    from rl_step import main
    from works import parse

    from saccade.run.checkpointer import Checkpointer
    from saccade.run.training_run import Run
    from saccade.trainer.local import LocalTrainer

    replaced = ((LocalTrainer, "train_step"), (Run, "phase"), (Run, "save"), (Checkpointer, "due"))
    for owner, name in replaced:
        monkeypatch.setattr(owner, name, getattr(owner, name))
    options = ["--size", "tiny", "--work", "T1", "--steps", "2", "--result", str(tmp_path / "result.json")]
    monkeypatch.setattr(sys, "argv", ["rl_step.py", *options])
    main()
    found = json.loads((tmp_path / "result.json").read_text())
    about = {"system": "saccade", "status": "ok", "work": "T1", "asked": parse("T1"), "gpu_gib": None}
    assert differences({"saccade-w1": about | found}) == []
    assert [step["trained"] for step in found["steps"]] == [64, 64]


def test_the_clocks_of_an_update_are_at_methods_that_exist():
    from update import CLOCKED

    from saccade.trainer.local import LocalTrainer

    assert [method for method in CLOCKED if not hasattr(LocalTrainer, method)] == []


def test_rows_have_the_length_that_the_work_asks_for(tmp_path):
    from model import build
    from works import parse, read_rows, write_rows

    from saccade.media.images import open_media
    from saccade.models.families import load_family
    from saccade.types import Message

    model = build(tmp_path / "model", "tiny")
    work = parse("T2")
    path = write_rows(tmp_path / "data", model, work, steps=2)
    text, image = read_rows(path, work, step=1)[0]
    message = Message(role="user", parts=(open_media(image), text))
    assert len(load_family(model).render([message]).ids) == work["prompt"]
    assert image.name == "2.png"


def test_turns_are_the_same_with_and_without_the_cache_of_those_before(tmp_path):
    import torch
    from model import build
    from multi_turn import compare
    from works import parse

    from saccade.engines.embedded import EmbeddedEngine
    from saccade.media.images import open_media
    from saccade.models.families import load_family
    from saccade.models.load import load_model
    from saccade.types import Message, Sample

    family = load_family(build(tmp_path / "model", "tiny"))
    engine = EmbeddedEngine(load_model(family, dtype=torch.float32, device=torch.device("cpu")), family)
    noise = np.random.default_rng(0).integers(0, 255, (112, 112, 3), dtype=np.uint8)
    asked = Message(role="user", parts=(open_media(noise), "How many"))
    work = parse("T2,prompts=1,samples=2,new=8")
    found = compare(engine, family, [Sample(id="a", messages=(asked,))], work, 3, repeats=1)
    on, off = found["reuse"], found["no_reuse"]
    assert found["same_episodes"] == 1
    assert on["turns"] == off["turns"] == on["images"] == 6 and on["generated"] == off["generated"]
    assert 0 < on["occupancy"] <= 1
    # With the cache: the prompt once for both, then what is new in each turn.
    assert off["prefilled"] > 2 * on["prefilled"]


def test_a_killed_worker_of_the_reward_service_loses_and_doubles_nothing(monkeypatch):
    import reward_service

    monkeypatch.setattr(reward_service, "at_home", lambda *_: 0.0)  # to compare with, which takes seconds
    results = reward_service.measure(24, workers=1)
    for way in ("one request per sample", "batching client"):
        assert results[way]["right"] == 24 and results[way]["killed"] == 1
    assert results["scored"] == {"asked": 72, "logged": 72}
    assert results["workers_replaced"] == 2 and results["errors"] == 0


def test_the_controller_serves_ranks_that_compute_nothing(tmp_path, monkeypatch):
    """And builds no tree of a forest while they wait."""
    from controller import WORK, RankTrainer, measure, table

    train_step, built = RankTrainer.train_step, []

    def watched(self, batches, *arguments, **options):
        found = train_step(self, batches, *arguments, **options)
        built.extend("trees" in vars(batch.forest) for batch in batches)
        return found

    monkeypatch.setattr(RankTrainer, "train_step", watched)
    found = measure(2, WORK | {"prompts": 2, "samples": 2, "new": 8}, tmp_path)
    assert len(found) == 9 and all(seconds > -0.01 for seconds in found.values()) and built and not any(built)
    lines = table({2: {"pack": 0.1, "metrics": 0.01}}, step=5.5).splitlines()
    assert lines[-2:] == ["| all | 110 |", "| of a step of 5.5 s | 2.0% |"]


def test_a_forest_travels_to_a_rank_once(tmp_path):
    from controller import WORK, make_groups, start_team

    batches = pack(make_groups(4, WORK | {"new": 8}), micro_tokens=500)
    team, _ = start_team(1, tmp_path)
    [rank] = team._alive()
    first, again = ({}, {})
    sent = rank._sent(batches, first)
    assert len(sent["forests"]) == len(batches) == 4 and sent["held"] == []
    known = rank._sent(batches[:1], again)
    assert known["forests"] == {} and [*again] == ["0/rollout_logprobs"]
    assert len(known["held"]) == 4 and known["batches"][0]["forest"] == sent["batches"][0]["forest"]
    del batches[1:]
    assert rank._sent(batches, {})["held"] == known["held"][:1]  # what is gone here is given up there
    team.close()
