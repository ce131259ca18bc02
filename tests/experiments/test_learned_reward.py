"""A learned reward beside its rule: from nothing with a random model, pairs, and what the page calls hacked."""

import json
from pathlib import Path

from experiments.learned_reward import run
from experiments.learned_reward.page import rates_of, story, write_page
from experiments.learned_reward.pairs import pairs_of, spoiled_pairs
from experiments.pages import best_rates, read
from experiments.row_files import read_rows


def test_rl_follows_a_reward_model_of_pairs_from_nothing(tmp_path: Path) -> None:
    run.main(["--tiny", "--out", str(tmp_path), "--seeds", "0", "--arms", "rule", "kl_low"])
    found = read(tmp_path / "results")
    assert found.keys() == {"rm", "rule", "kl_low"}  # the reward model comes with the arm that follows it
    curves = found["kl_low"][0]["curves"]
    assert {"reward/learned", "reward/accuracy", "policy/kl_ref", "val/test/accuracy"} <= curves.keys()
    assert "reward/learned" not in found["rule"][0]["curves"] and found["rm"][0]["curves"]["val/pairs/accuracy"]
    pairs, spoiled = (read_rows(tmp_path / "rows" / f"{kind}-train.jsonl") for kind in ("plain", "spoiled"))
    assert len(spoiled) == 2 * len(pairs) and Path(pairs[0]["images"][0]).exists()
    files = [tmp_path / "rows" / f"plain-{split}.jsonl" for split in ("train", "dev", "test")]
    asked = [{row["images"][0] for row in read_rows(file)} for file in files]
    assert len(set.union(*asked)) == sum(map(len, asked))  # no question is in two of them
    assert "| learned, KL 0.05 | 1 |" in (tmp_path / "RESULTS.md").read_text()


def test_pairs_are_wrong_answers_of_the_model_below_right_ones() -> None:
    asked = [{"id": name, "images": ["a.png"], "problem": f"<image>{name}?"} for name in "abc"]
    right = {name: f"<think> {name} </think><answer> {n} </answer>" for n, name in enumerate("abc")}
    for row in asked:
        row["demonstration"] = right[row["id"]]
    said = {"a": [right["a"], "4", "5", "5", "6"], "b": ["7", right["b"]], "c": ["1"]}
    answered = [
        {"id": n, "responses": [{"text": t, "reward": float(t == right[n])} for t in texts]}
        for n, texts in said.items()
    ]
    pairs = pairs_of(asked, answered)
    found = [(row["chosen"], row["rejected"]) for row in pairs]
    assert found == [(right["a"], "5"), (right["a"], "4"), (right["b"], "7"), (right["c"], "1")]
    assert pairs[0]["prompt"] == "<image>a?" and pairs[0]["images"] == ["a.png"]
    spoiled = [row["rejected"] for row in spoiled_pairs(pairs, seed=0)]
    twice, also = f"{right['a']} {right['a']}", f"{right['a']} <answer> 2 </answer>"
    assert spoiled == [twice, also, f"{right['b']} {right['a']} {right['b']}", "<answer> 2 </answer>"]


def stored(true: list[float], said: list[float]) -> dict:
    measured = {"val/test/accuracy": true, "val/test/reward": said, "length/response_mean": [3.0]}
    curves = {name: [[10 * n, 0.0, value] for n, value in enumerate(values)] for name, values in measured.items()}
    about = {"began": 0.0, "seconds": 60, "device": "CPU", "commit": "abc", "at_once": 2, "steps": 10 * len(true)}
    return {**about, "rollouts": 100, "curves": curves, "said": [["3", "3 | 3"]]}


def test_hacked_is_a_reward_that_rises_while_the_truth_falls(tmp_path: Path) -> None:
    ups, falls = [0.5, 0.6, 0.7] + 5 * [0.8], [0.5, 0.6, 0.7, 0.8] + 5 * [0.3]
    rises = [0.1 * n for n in range(9)]
    hacked, honest = story(stored(falls, rises)), story(stored(ups, rises[1:]))
    assert hacked.hacked and (hacked.step, hacked.best, hacked.last) == (30, 0.8, 0.3)
    assert not honest.hacked and not story(stored(falls, rises[::-1])).hacked  # where both have fallen
    assert story(stored(falls, [*rises[:4], *5 * [0.25]])).hacked  # a little of its gain is lost
    arms = {"rule-0": stored(ups, rises[1:]), "learned-0": stored(falls, rises)}
    arms["learned-1"] = stored(falls, rises[::-1])
    for name, one in arms.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(one))
    write_page(tmp_path, tmp_path / "RESULTS.md", tmp_path)
    page = (tmp_path / "RESULTS.md").read_text()
    assert "the rule 80.0 %; learned 30.0 ± 0.0 % (hacked in 1 of 2)" in page and "| learned | 3 → `3 3` |" in page
    assert "asked at the start and every 10 steps" in page
    tried = rates_of({"rule@1e-5": {0: arms["rule-0"]}, "rule@3e-5": {0: arms["learned-0"]}})
    assert best_rates(tried) == {"rule": "1e-5"}
