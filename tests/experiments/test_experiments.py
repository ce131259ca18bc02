"""The frame of experiments/, and their tiny variants on a CPU."""

import json
import re
import shutil
from pathlib import Path

import pytest

from experiments import arms
from experiments.arms import Job, carry_out, chosen, command_line, run_all, run_and_write
from experiments.language import run as language
from experiments.language.rows import write_sets
from experiments.pages import ROOT, by_size, chance, corrected, cost, ends, gain, mean_of, picture, read, written
from experiments.row_files import read_rows
from saccade.plugins.families import tiny


def run(value: float, began: float = 0.0) -> dict:
    points = [[step, float(step), value * step / 4] for step in range(5)]
    about = {"began": began, "seconds": 60, "device": "CPU", "commit": "abc", "at_once": 2}
    return {**about, "curves": {"val/test/accuracy": points}}


def test_means_and_paired_gains_have_intervals_over_seeds() -> None:
    before, after = {0: 0.1, 1: 0.3, 2: 0.2}, {0: 0.2, 1: 0.4, 2: 0.3, 7: 1.0}
    assert mean_of(before) == "20.0 ± 24.8"  # 4.30 · 10 / √3
    assert gain(after, before) == "+10.0 ± 0.0"
    assert mean_of({0: 0.5}) == "50.0" and mean_of({}) == "-"


def test_a_difference_beyond_chance_stays_one_among_ten_comparisons() -> None:
    found = {"far": {0: 0.2, 1: 0.21, 2: 0.19, 3: 0.2, 4: 0.2}, "near": {0: 0.1, 1: -0.1, 2: 0.2, 3: 0.0, 4: 0.1}}
    chances = {name: chance(values) for name, values in found.items()}
    assert abs(chances["near"] - 0.3046) < 1e-3 and chances["far"] < 1e-5  # t = 1.177 and 63 with 4 degrees of freedom
    assert abs(chance(dict(enumerate((0.1, 0.2, 0.3, 0.2)))) - 0.0163) < 1e-3  # t = 4.899 with 3
    assert chance({0: 0.3}) == chance({0: 0.0, 1: 0.0}) == 1.0 and chance({0: 0.3, 1: 0.3}) < 1e-9
    among = corrected(chances | {f"other{n}": 0.5 for n in range(8)})
    assert among["far"] == 10 * chances["far"] and among["near"] == among["other7"] == 1.0


def test_time_that_runs_share_counts_once() -> None:
    found = {"a": {0: run(0.5), 1: run(0.7, began=30.0)}, "b": {0: run(0.2, began=300.0)}}
    assert cost(found).startswith("3 runs, up to 2 at once, in 2.5 minutes of one CPU")
    assert ends(found["a"], "val/test/accuracy") == {0: 0.5, 1: 0.7}
    drawn = picture(found, "val/test/accuracy", "seconds", smooth=1)
    assert drawn.count("<path") == 3 * len(found) + drawn.count(" %</text>")
    below = {"a": {0: run(-2.0), 1: run(-1.0)}}
    assert ">-10</text>" in picture(below, "val/test/accuracy", "steps", smooth=1, share=False)


def test_sizes_stand_as_far_apart_as_their_logarithms() -> None:
    drawn = by_size({"rl": {50: {0: 0.2, 1: 0.4}, 500: {0: 0.5}, 5000: {0: 0.8}}, "sft": {50: {0: 0.1}}}, "questions")
    places = [float(x) for x in re.findall(r'x="([\d.]+)" y="272"', drawn)]
    assert [place - places[0] for place in places] == [0, 284, 568] and ">5,000<" in drawn


def test_a_failed_run_is_named_and_takes_those_after_it_along(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    first = Job(arm="first", seed=0, command="sft", options=("train.lrr=1",))
    jobs = [Job(arm="later", seed=0, command="rl", options=(), after="first"), first]
    assert run_all(jobs, tmp_path, tmp_path / "stored", until=0) == ["first-0", "later-0"]
    assert "first-0: cut off" in capsys.readouterr().out
    assert run_all(jobs, tmp_path, tmp_path / "stored", at_once=2) == ["first-0", "later-0"]
    assert "train.lr" in capsys.readouterr().out and not [*tmp_path.glob("results/*")]


def test_what_others_found_is_kept_where_a_run_fails_and_arms_bring_those_they_start_from(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    def write_page(results: Path, page: Path, images: Path) -> None:
        page.write_text(" ".join(read(results)))

    model = tiny.build("llama", tmp_path / "model")
    (tmp_path / "one.jsonl").write_text('{"question": "What is 1 + 1?", "answer": "2"}\n')
    asked = (f"model.path={model}", "run.device=cpu", f"data.val={tmp_path / 'one.jsonl'}", "reward.terms=[count]")
    jobs = [
        Job(arm="broken", seed=0, command="sft", options=("train.lrr=1",)),
        Job(arm="later", seed=0, command="rl", options=(), after="broken"),
        Job(arm="whole", seed=0, command="eval", options=(*asked, "rollout.max_tokens=2")),
    ]
    args = command_line("", "any").parse_args(["--tiny", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="not finished: broken-0, later-0"):
        run_and_write(jobs, args, tmp_path, write_page)
    assert "did you mean 'train.lr'" in capsys.readouterr().out
    assert (tmp_path / "out" / "RESULTS.md").read_text() == "whole"
    assert [job.arm for job in chosen(jobs, ["later"])] == ["broken", "later"]
    with pytest.raises(SystemExit, match="--arms hole: expected some of broken, later, whole"):
        chosen(jobs, ["hole"])


def test_language_runs_from_nothing_and_again_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    arguments = ["--tiny", "--out", str(tmp_path), "--seeds", "0", "--arms", "cold", "grpo"]
    language.main(arguments)
    found = read(tmp_path / "results")
    assert found["grpo"][0]["rollouts"] == 8 and "val/eight/pass@8" in found["grpo"][0]["curves"]
    assert not [*tmp_path.glob("test/grpo-0/checkpoints/*")] and [*tmp_path.glob("test/cold-0/checkpoints/*")]
    assert "| cold start, then GRPO | 1 |" in (tmp_path / "RESULTS.md").read_text()
    assert "grpo-0: done" in capsys.readouterr().out
    language.main(arguments)
    assert "done" not in capsys.readouterr().out
    shutil.rmtree(tmp_path / "test")  # as on another machine, to which only results have come
    language.main([*arguments, "--go-on"])
    assert "done" not in capsys.readouterr().out
    shutil.rmtree(tmp_path / "test")
    (tmp_path / "results" / "grpo-0.json").unlink()
    language.main([*arguments, "--go-on"])
    assert re.findall(r"(\w+)-0: done", capsys.readouterr().out) == ["cold", "grpo"]  # it needs the model, too


def test_sums_of_train_are_held_out_nowhere_else_and_few_where_there_are_81(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for split, count in (("train", 510), ("test", 3)):
        rows = [{"question": f"{split} {n}?", "answer": f"<<1+{n}>> #### {n}"} for n in range(count)]
        (tmp_path / "data" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_sets(tmp_path / "rows", tmp_path / "data")
    found = {path.stem: [row["question"] for row in read_rows(path)] for path in tmp_path.glob("rows/*-*.jsonl")}
    sizes = {name: len(rows) for name, rows in found.items()}
    assert [sizes[f"level{n}-test"] for n in range(1, 7)] == [20, 20, 200, 200, 200, 200] and sizes["gsm8k-dev"] == 500
    assert sizes["sums-test"] == sizes["sums-dev"] == 840 and sizes["sums-train"] == 12_000
    held = [*found["sums-test"], *found["sums-dev"]]
    assert len({*held}) == 1680 and not {*held} & {*found["sums-train"]}
    assert len({*found["level1-train"]}) == 41 and all(re.fullmatch(r"What is \d \+ \d\?", q) for q in held[::6][:20])


def no_page(results: Path, page: Path, images: Path) -> None:
    page.write_text(" ".join(read(results)))


def test_a_rehearsal_is_two_steps_of_every_arm_apart_from_results(tmp_path: Path) -> None:
    model = tiny.build("llama", tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(12 * '{"question": "What is 1 + 1?", "answer": "2"}\n')
    asked = (f"model.path={model}", "run.device=cpu", "reward.terms=[count]", "rollout.max_tokens=2")
    asked = (*asked, f"data.val={json.dumps([str(tmp_path / 'rows.jsonl')])}")
    train = f"data.train={tmp_path / 'rows.jsonl'}"
    learned = (*asked, train, "train.prompts_per_step=2", "run.max_steps=9", "train.warmup=3")
    jobs = [Job(arm="as_is", seed=3, command="eval", options=asked)]
    jobs += [Job(arm="grpo", seed=seed, command="rl", options=learned) for seed in (3, 4)]
    arguments = ["--rehearse", "--at-once", "0", "--out", str(tmp_path / "out")]
    assert not carry_out(jobs, command_line("", "any").parse_args(arguments), tmp_path / "here", no_page)
    found = read(tmp_path / "out" / "rehearsal" / "results")
    assert {arm: [*runs] for arm, runs in found.items()} == {"as_is": [3], "grpo": [3]}
    assert found["grpo"][3]["steps"] == 2
    assert {ends(runs, "val/rows/items")[3] for runs in found.values()} == {8}
    assert not (tmp_path / "here").exists() and not (tmp_path / "out" / "test").exists()
    with pytest.raises(SystemExit, match="holds no results yet; leave --page out"):
        carry_out([], command_line("", "any").parse_args(["--page", "--out", str(tmp_path)]), tmp_path, no_page)


def test_mps_runs_beside_runs_that_share_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    log = tmp_path / "log"
    for name, line in {
        "nvidia-smi": "echo H200",
        "nvidia-cuda-mps-control": f"echo $1 $([ $1 ] || cat) >> {log}",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def said(at_once: int) -> list[str]:
        log.write_text("")
        with arms.shared_gpu(at_once):
            log.write_text(log.read_text() + "runs\n")
        return log.read_text().splitlines()

    monkeypatch.setattr(arms, "COMPUTES", "pass")
    assert said(4) == ["-d", "runs", "quit -t 10"] and said(1) == ["runs"]
    monkeypatch.setattr(arms, "COMPUTES", "raise OSError('no server')")
    assert said(4) == ["-d", "quit -t 10", "runs"] and "without MPS: OSError: no server" in capsys.readouterr().out
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert said(4) == ["runs"] and arms.of_gpu("name") == ""


def test_links_of_a_page_lead_to_the_same_place_from_the_results_of_all(tmp_path: Path) -> None:
    (tmp_path / "experiments" / "small").mkdir(parents=True)
    (tmp_path / "README.md").write_text("<!-- table: experiments -->\n<!-- end -->\n")
    text = "# Small\n\nFound [a](../smolvlm), ![b](../../docs/images/b.svg), [c](../../docs/data.md#c).\n"
    (tmp_path / "experiments" / "small" / "RESULTS.md").write_text(text)
    together = written(tmp_path)[tmp_path / "docs" / "results.md"]
    assert "Found [a](../experiments/smolvlm), ![b](images/b.svg), [c](data.md#c)." in together


def test_pages_of_all_experiments_are_current() -> None:
    for path, text in written().items():
        assert path.read_text(encoding="utf-8") == text, "run: make docs"
    for path in ROOT.glob("experiments/*/results/**/*.json"):
        assert path.stat().st_size < 50_000, path
        assert {"commit", "device", "seconds", "curves"} <= json.loads(path.read_text()).keys(), path
