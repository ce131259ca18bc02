"""Evaluation: one path in training and afterwards; intervals, rates, files to score again."""

import json
import signal
import threading
import weakref

import numpy as np
import pytest

import saccade
from saccade.config import load
from saccade.errors import ConfigError, DataError, Interrupted, RewardError, SelfTestError
from saccade.plugins.evaluation import evaluate
from saccade.plugins.evaluation.results import read_lines as lines
from saccade.plugins.evaluation.results import read_summary
from saccade.plugins.reports.episodes import is_evaluation
from saccade.plugins.view.run_index import Runs
from saccade.plugins.view.view_server import list_runs, show_run
from saccade.recipes import rl, sft
from saccade.recipes.evaluator import Result, describe
from saccade.run.statistics import mean_interval, pass_at_k
from saccade.system import devices
from tests.browser import page_data

SAMPLES, THERE = "eval/samples.jsonl", "its results are in"


@pytest.fixture(scope="module")
def taught(tmp_path_factory, sft_config):
    """A model that has learned the format, and a little counting."""
    out = tmp_path_factory.mktemp("taught")
    sft.run(sft_config(out, run__max_steps=20, train__prompts_per_step=12, train__lr=4e-3))
    return str(out / "run" / "checkpoints" / "step-20")


@pytest.fixture(scope="module")
def judged(taught, scenes, rl_config):
    def config(out, **changes):
        options = rl_config(out, model__path=taught, data__val=str(scenes / "val.jsonl"))
        options |= {"prompt.format": "think_answer", "rollout.max_tokens": 14}
        options |= {"reward.terms": ["count", {"verifier": "format:think_answer", "weight": 0.2}]}
        return options | {name.replace("__", "."): value for name, value in changes.items()}

    return config


def test_the_score_in_training_is_that_of_the_checkpoint(tmp_path, judged):
    config = judged(tmp_path, run__max_steps=2, val__every=2, val__n=3, train__lr=1e-4)
    row = rl.run(config)
    path = tmp_path / "run" / "checkpoints" / "step-2"
    result = saccade.evaluate(config, f"model.path={path}", out=tmp_path / "eval")
    inside = {k.removeprefix("val/val/"): v for k, v in row.items() if k.startswith("val/val/")}
    assert [*result["val"].pop("by_k")] == ["1", "2", "3"] and result == {"val": inside}
    assert 0 < result["val"]["accuracy"] < 1


@pytest.fixture(scope="module")
def four(tmp_path_factory, judged):
    out = tmp_path_factory.mktemp("four")
    result = evaluate.run(judged(out, val__n=4), out=out / "eval")
    return result["val"], out / "eval"


def test_metrics_and_fields_of_four_samples(four):
    metrics, folder = four
    rows = lines(folder / "samples.jsonl")
    assert len(rows) == 8 * 4 and metrics["items"] == 8
    scores = {row["id"]: [r["score"] for r in rows if r["id"] == row["id"]] for row in rows}
    values = [np.array(v) for v in scores.values()]
    assert metrics["avg@4"] == metrics["accuracy"] == pytest.approx(np.mean(values))
    assert metrics["pass@4"] == pytest.approx(np.mean([pass_at_k(4, int(v.sum()), 4) for v in values]))
    assert (metrics["ci_low"], metrics["ci_high"]) == pytest.approx(mean_interval(values))
    assert metrics["ci_low"] <= metrics["accuracy"] <= metrics["ci_high"]
    said = describe(Result(name="val", groups=(), metrics=metrics))
    assert f"]  avg@4 {metrics['avg@4']:.3f}  pass@4 {metrics['pass@4']:.3f}  parse_rate" in said
    thinking = ["<think>" in r["response"] and "</think>" in r["response"] for r in rows]
    assert metrics["parse_rate"] == np.mean([r["extracted"] is not None for r in rows])
    assert metrics["think_rate"] == pytest.approx(np.mean(thinking), abs=0.1)
    assert metrics["truncated_frac"] == np.mean([r["status"] == "truncated" for r in rows])
    assert metrics["response_mean"] == np.mean([r["tokens"] for r in rows])
    assert metrics["format"] == np.mean([r["parts"]["format"] for r in rows])
    assert metrics["error_rate"] == metrics["abstain_rate"] == 0
    assert json.loads((folder / "results.json").read_text()) == {"val": metrics}
    fields = "set id repeat data_source prompt response think_prefilled extracted gold choices score reward parts"
    assert set(rows[0]) == {*f"{fields} tokens turns said tool_calls end_reason status reason media extra".split()}
    assert rows[0]["set"] == "val" and rows[0]["data_source"] == "counting" and len(rows[0]["media"]) == 1
    assert rows[0]["prompt"] == "how many objects?" and rows[0]["gold"] in "123456"


def test_an_evaluation_says_what_was_evaluated(four, judged, taught, tmp_path, scenes):
    """In its folder, its report and the viewer; a run is shown as a run."""
    folder = four[1]
    assert load(folder / "config.yaml") == load(judged(folder.parent, val__n=4))
    manifest = json.loads((folder / "manifest.json").read_text())
    (held,) = manifest["sets"]
    assert (held["name"], held["rows"], len(held["hash"]), manifest["command"]) == ("val", 8, 64, "eval")
    assert manifest["weights"] and manifest["packages"]["torch"] and manifest["starts"][0]["argv"]
    report = page_data(folder / "report.html")
    sampling = "4 answers, temperature 1, top_p 1, at most 14 tokens"
    tiles = {"model": taught, "engine": "embedded", "prompt": "think_answer", "sampling": sampling}
    assert report["facts"] == tiles and [*report["texts"]] == ["Configuration", "Manifest"]
    runs = Runs(folder.parent)
    (listed,) = [one["facts"] for one in list_runs(runs) if one["name"] == "eval"]
    assert [*listed] == ["accuracy on val", "model"] and listed["model"] == taught
    other = evaluate.run(judged(folder.parent, prompt__format="direct"), out=folder.parent / "other")
    assert other["val"]["items"] == 8
    one, two = (show_run(runs, name)["options"] for name in ("eval", "other"))
    assert {key for key in one if one[key] != two[key]} == {"prompt.format", "val.n", "val.temperature"}
    assert "train.lr" not in one and is_evaluation(folder)
    again = evaluate.run(
        judged(tmp_path, reward__terms=["exact"]), out=tmp_path / "again", rescore=folder / "samples.jsonl"
    )
    assert again["val"]["items"] == 8 and page_data(tmp_path / "again" / "report.html")["facts"] == tiles


def test_a_set_of_ones_own_that_is_called_as_a_suite(judged, tmp_path, scenes):
    """What the evaluation was asked for says whether its verifier is that of the suite."""
    rows = [json.loads(line) | {"data_source": "gsm8k"} for line in (scenes / "val.jsonl").read_text().splitlines()]
    for row in rows:
        row["images"] = [str(scenes / image) for image in row["images"]]
    file = tmp_path / "gsm8k.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = judged(tmp_path, data__val=str(file))
    found = evaluate.run(config, out=tmp_path / "eval")
    again = evaluate.run(config, out=tmp_path / "again", rescore=tmp_path / SAMPLES)
    assert again["gsm8k"].items() <= found["gsm8k"].items()
    evaluate.run(config | {"eval.suites": ["gsm8k"]}, out=tmp_path / "suite", rescore=tmp_path / SAMPLES)
    parts = [lines(tmp_path / name / "samples.jsonl")[0]["parts"].keys() for name in ("again", "suite")]
    assert parts == [{"count", "format"}, {"gsm8k"}]


def test_every_number_of_answers(four):
    metrics, folder = four
    answers: dict = {}
    for row in lines(folder / "samples.jsonl"):
        answers.setdefault(row["id"], []).append((row["score"], row["extracted"]))
    right = [sum(score for score, _ in own) for own in answers.values()]
    for k, row in metrics["by_k"].items():
        assert row["pass@k"] == pytest.approx(np.mean([pass_at_k(4, int(n), int(k)) for n in right]))
    assert metrics["by_k"]["1"]["pass@k"] == pytest.approx(metrics["accuracy"])
    assert metrics["by_k"]["4"]["pass@k"] == metrics["pass@4"]
    voted = []
    for own in answers.values():
        said = [text for _, text in own if text is not None]
        most = max((said.count(text) for text in said), default=0)
        voted.append(np.mean([score for score, text in own if said.count(text) == most] if said else [0.0]))
    assert metrics["by_k"]["4"]["maj@k"] == pytest.approx(np.mean(voted))


def test_what_is_right_without_pictures_and_what_was_trained_on(tmp_path, judged, scenes, capsys):
    rows = lines(scenes / "val.jsonl")
    (scenes / "leaky.jsonl").write_text("".join(json.dumps(row | {"id": f"t{row['id']}"}) + "\n" for row in rows[:3]))
    config = judged(tmp_path, data__train=str(scenes / "leaky.jsonl"))
    found = evaluate.run(config, out=tmp_path / "eval", also=["blind", "leaks"])
    assert list(found) == ["val", "val-blind"] and "does not read data.train" not in capsys.readouterr().out
    seeing, blind = ([r for r in lines(tmp_path / SAMPLES) if r["set"] == name] for name in found)
    assert [r["id"] for r in seeing] == [r["id"] for r in blind] and seeing[0]["media"] and not blind[0]["media"]
    assert len({r["response"] for r in blind}) == 1 < len({r["response"] for r in seeing})  # one text, no picture
    gain = found["val"]["accuracy"] - found["val-blind"]["accuracy"]
    assert found["val"]["sight_gain"] == pytest.approx(gain)
    assert found["val"]["sight_gain_ci_low"] <= gain <= found["val"]["sight_gain_ci_high"]
    assert found["val"]["leaked_pictures"] == found["val"]["leaked_questions"] == 3
    unseen = [r["score"] for r in seeing if r["id"] not in {row["id"] for row in rows[:3]}]
    assert found["val"]["accuracy_unseen"] == pytest.approx(np.mean(unseen))
    assert "leaked_pictures" not in found["val-blind"]
    with pytest.raises(ConfigError, match="--also leaks: there are no training rows"):
        evaluate.run(config | {"data.train": []}, out=tmp_path / "none", also=["leaks"])
    with pytest.raises(ConfigError, match="--also blind: has no effect with --rescore"):
        evaluate.run(config, out=tmp_path / "none", also=["blind"], rescore=tmp_path / SAMPLES)


def test_what_was_stopped_goes_on_with_the_sets_that_are_missing(tmp_path, judged, scenes, capsys):
    sets = [str(scenes / "val.jsonl"), {"path": str(scenes / "train.jsonl"), "n": 12}]
    config = judged(tmp_path / "runs", data__val=sets)
    folder = tmp_path / "runs" / "run-eval"

    def look(*_):
        if read_summary(folder):  # SIGTERM in a callback, where Python drops what its handler raises
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            _ = weakref.ref(threading.Event(), lambda _: signal.raise_signal(signal.SIGTERM))

    signal.signal(signal.SIGVTALRM, look)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.01, 0.01)
    with pytest.raises(Interrupted, match=rf"stopped; the results of val are in {folder}\. The same command goes on"):
        evaluate.run(config)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert [*json.loads((folder / "results.json").read_text())] == ["val"]
    assert len(lines(folder / "samples.jsonl")) == 8 and not [*folder.rglob("*.jsonl.*")]
    assert capsys.readouterr().out.count("items 8") == 1
    found = evaluate.run(config)
    said = capsys.readouterr().out
    assert f"val: done before this evaluation was broken off; {THERE} {folder}" in said and "items 8" not in said
    assert found == evaluate.run(config, out=tmp_path / "whole") and [*found] == ["val", "train"]
    for name in ("results.json", "samples.jsonl"):
        assert (folder / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert len(page_data(folder / "report.html")["episodes"]["items"]) == 8 + 16 * 12


def test_one_greedy_answer_is_the_default(tmp_path, judged, scenes, capsys, monkeypatch):
    monkeypatch.setattr(devices, "count", lambda wanted: 8)
    rows = (scenes / "val.jsonl").read_text().splitlines()
    file = scenes / "named_twice.jsonl"
    file.write_text("\n".join([*rows[:6], rows[6], rows[6]]) + "\n")
    config = judged(tmp_path, data__val=str(file))
    first, second = (evaluate.run(config | {"run.seed": n}, out=tmp_path / str(n)) for n in (1, 2))
    assert first == second
    assert "avg@1" not in first["named_twice"] and first["named_twice"]["items"] == 8
    said = capsys.readouterr().out
    for line in ("1 row got a suffix, as another one has the same id", "1 of 8 GPUs is used; rollout.replicas=8 uses"):
        assert said.count(line) == 2


def test_responses_can_be_scored_again(four, judged, tmp_path):
    metrics, folder = four
    samples = folder / "samples.jsonl"
    same = evaluate.run(judged(tmp_path), out=tmp_path / "same", rescore=samples)
    assert same == {"val": {name: value for name, value in metrics.items() if name in same["val"]}}
    assert {"accuracy", "pass@4", "by_k", "response_mean"} <= same["val"].keys()
    assert "val: score by number of answers" in (tmp_path / "same" / "report.html").read_text()
    generous = [{"verifier": "count", "args": {"tolerance": 6}}]
    other = evaluate.run(judged(tmp_path, reward__terms=generous), out=tmp_path / "other", rescore=samples)
    assert metrics["accuracy"] < other["val"]["accuracy"] <= metrics["parse_rate"]
    rescored = lines(tmp_path / "other" / "samples.jsonl")
    assert [r["response"] for r in rescored] == [r["response"] for r in lines(samples)]
    alone = {"reward.terms": generous, "prompt.format": "think_answer"}  # no model, no rows
    assert evaluate.run(alone, out=tmp_path / "alone", rescore=samples.parent) == other


def test_scoring_again_goes_on_with_the_sets_that_are_missing(four, judged, tmp_path, monkeypatch, capsys):
    file, folder, one = tmp_path / "two.jsonl", tmp_path / "run-eval", evaluate.rescored
    text = (four[1] / "samples.jsonl").read_text()
    file.write_text(text + text.replace('{"set": "val"', '{"set": "more"'))
    monkeypatch.setattr(evaluate, "rescored", lambda name, *rest: one(name, *rest) if name == "val" else int("stop"))
    with pytest.raises(ValueError, match="stop"):
        evaluate.run(judged(tmp_path), rescore=file)
    monkeypatch.undo()
    found, said = evaluate.run(judged(tmp_path), rescore=file), capsys.readouterr().out
    assert f"val: done before this evaluation was broken off; {THERE} {folder}" in said
    assert [*found] == ["val", "more"] == [*read_summary(folder)] and len(lines(folder / "samples.jsonl")) == 64
    assert found == evaluate.run(judged(tmp_path), out=tmp_path / "whole", rescore=file)
    with pytest.raises(ConfigError, match=r"run-eval: it holds results\.json already"):
        evaluate.run(judged(tmp_path), out=folder, rescore=file)


def test_scoring_again_says_what_it_found_and_which_line_is_damaged(four, judged, tmp_path, capsys):
    samples, cut = four[1] / "samples.jsonl", tmp_path / "cut.jsonl"
    misspelt = judged(tmp_path, reward__by_source={"cuonting": "exact"})
    evaluate.run(misspelt, out=tmp_path / "again", rescore=samples)
    said = capsys.readouterr().out
    assert "val: accuracy 0." in said and "data.val does not count" in said
    assert "no row has the data_source cuonting; there is counting" in said
    cut.write_bytes(samples.read_bytes()[:-20])
    count = len(lines(samples))
    with pytest.raises(ConfigError, match=rf"cut\.jsonl line {count} is no JSON"):
        evaluate.run(judged(tmp_path), out=tmp_path / "none", rescore=cut)
    cut.write_text('{"id": "a"}')
    with pytest.raises(ConfigError, match=r"line 1 has no choices, data_source, .*give the samples"):
        evaluate.run(judged(tmp_path), out=tmp_path / "none", rescore=cut)
    assert not (tmp_path / "none").exists()


@pytest.fixture
def again(tmp_path, judged):
    """Rows of an evaluation, scored again by other terms: metrics and rows."""

    def score(rows, *terms, out="eval"):
        file, folder = tmp_path / "rows.jsonl", tmp_path / out
        file.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), encoding="utf-8")
        result = evaluate.run(judged(tmp_path, reward__terms=list(terms)), out=folder, rescore=file)
        return result["val"], lines(folder / "samples.jsonl")

    return score


def test_turns_boxes_and_odd_line_breaks_are_scored_again(four, again):
    row = lines(four[1] / "samples.jsonl")[0]
    said = ["<think>a</think><grounding>{}</grounding>", "<think>b\u2028\x85\u2029</think><answer>3</answer>"]
    rows = [row | {"said": said, "response": "".join(said)}, row | {"said": said[:1]}]
    metrics, stored = again(rows, "count", "format:grounding")
    assert [each["parts"]["format"] for each in stored] == [1.0, 0.0]  # turn by turn
    assert metrics["items"] == 1 and stored[0]["extracted"] == "3"
    width, height = row["media"][0]["size"]  # the frame of the picture
    row |= {"gold": f"[0,0,{width},{height / 2}]", "response": "<answer>[0,0,1000,500]</answer>"}
    assert again([row], {"verifier": "iou", "args": {"answer_frame": "milli"}}, out="boxes")[0]["accuracy"] == 1


def test_rewards_that_fail_are_counted_beside_the_accuracy(tmp_path, judged, four, capsys):
    (tmp_path / "mine.py").write_text(
        "def score(sample):\n"
        "    if sample.answer == '1':\n        raise ValueError('not this one')\n"
        "    return float(sample.answer in sample.response)\n"
    )
    config = judged(tmp_path, reward__terms=[f"{tmp_path}/mine.py:score"])
    rows = lines(four[1] / "samples.jsonl")
    with pytest.raises(RewardError, match=r"4 of 32 samples could not be scored \({'raised': 4}\)"):
        evaluate.run(config, out=tmp_path / "eval", rescore=four[1] / "samples.jsonl")
    result = json.loads((tmp_path / "eval/results.json").read_text())["val"]  # nothing is lost
    ones = sum(row["gold"] == "1" for row in rows)
    assert result["error_rate"] == ones / 32 > 0 and result["items"] == 8 - ones / 4
    assert "error 12%" in capsys.readouterr().out
    stored = lines(tmp_path / "eval" / "samples.jsonl")
    assert [r["status"] == "error" for r in stored] == [r["gold"] == "1" for r in rows]
    evaluate.run(config | {"reward.max_error_rate": 0.2}, out=tmp_path / "b", rescore=tmp_path / SAMPLES)
    assert lines(tmp_path / "b/samples.jsonl") == stored  # as if it had never failed before


def test_what_abstains_is_said_and_scored_again_alike(four, again, capsys, rewards_here):
    rows = [row | {"gold": "see figure"} for row in lines(four[1] / "samples.jsonl")]
    rows[0] |= {"response": "<think>a</think><answer>see figure</answer>", "end_reason": "answered"}
    metrics, stored = again(rows, "math")
    assert metrics["abstain_rate"] == np.mean([r["status"] == "abstain" for r in stored]) > 0.3
    assert f"abstain {100 * metrics['abstain_rate']:.0f}%" in capsys.readouterr().out
    assert all(r["score"] is None for r in stored if r["status"] == "abstain")
    found = [r["extracted"] is not None for r in stored if r["status"] != "abstain"]
    assert metrics["parse_rate"] == np.mean(found)  # what abstains says nothing of the answer


def test_without_a_reward_no_accuracy_is_claimed(tmp_path, judged):
    config = judged(tmp_path, reward__terms=[])
    metrics = evaluate.run(config, out=tmp_path / "eval")["val"]
    assert metrics["items"] == 0 and "accuracy" not in metrics and "reward" not in metrics
    with pytest.raises(ConfigError, match=r"reward\.terms: nothing scores a response"):
        evaluate.run(config, out=tmp_path / "b", rescore=tmp_path / "eval" / "samples.jsonl")
    with pytest.raises(ConfigError, match=r"eval: it holds results.json already"):
        evaluate.run(config, out=tmp_path / "eval")


def test_what_does_not_fit_is_refused(tmp_path, judged):
    with pytest.raises(SelfTestError, match="misjudges known answers"):
        evaluate.run(judged(tmp_path, reward__terms=["choice"]), out=tmp_path / "eval")
    with pytest.raises(DataError, match=r"data\.val: .*val\.jsonl has no usable row"):
        evaluate.run(judged(tmp_path, data__max_prompt_tokens=3), out=tmp_path / "eval")
