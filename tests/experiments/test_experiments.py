"""The frame of experiments/, and their tiny variants on a CPU."""

import json
import re
from pathlib import Path

import pytest

from experiments.arms import Job, chosen, command_line, run_all, run_and_write
from experiments.language import run as language
from experiments.pages import ROOT, by_size, chance, corrected, cost, ends, gain, mean_of, picture, read, written
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
    assert run_all(jobs, tmp_path, until=0) == ["first-0", "later-0"]
    assert "first-0: cut off" in capsys.readouterr().out
    assert run_all(jobs, tmp_path, at_once=2) == ["first-0", "later-0"]
    assert "train.lr" in capsys.readouterr().out and not [*tmp_path.glob("results/*")]


def test_what_others_found_is_kept_where_a_run_fails_and_arms_bring_those_they_start_from(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    def write_page(results: Path, page: Path, images: Path) -> None:
        page.write_text(" ".join(read(results)))

    model = tiny.build("llama", tmp_path / "model")
    (tmp_path / "one.jsonl").write_text('{"question": "What is 1 + 1?", "answer": "2"}\n')
    asked = (f"model.path={model}", "run.device=cpu", f"data.val={tmp_path / 'one.jsonl'}", "reward.terms=[math]")
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
