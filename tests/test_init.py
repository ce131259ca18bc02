"""`saccade init`: a config from a model and rows, which the examples of the other commands can run."""

import gzip
import json
import re
import shlex
from pathlib import Path

import pytest

from saccade.checks import check
from saccade.cli import app
from saccade.config import load
from saccade.plugins.init.init_config import guess_reward, letters_apart
from saccade.types import Media, Message, Sample
from tests.test_cli import REPOSITORY, run

EXAMPLES = {
    command.name: shlex.split(str(command.epilog).split("[bold]")[1].removesuffix("[/bold]"))[1:]
    for command in app.registered_commands
}
PLANNED = {"rl", "sft", "dpo", "reward-model", "eval", "generate"}


@pytest.mark.parametrize("command", sorted(PLANNED | {"estimate", "check-data", "doctor"}))
def test_the_file_of_init_serves_the_example_of_each_command(command, tmp_path, counting, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("init", "tiny:qwen2_5_vl", str(counting)).exit_code == 0
    for name in ("demonstrations", "pairs", "test"):
        (tmp_path / f"{name}.jsonl").write_bytes(counting.read_bytes())
    Path("runs/run/checkpoints/step-100").mkdir(parents=True)
    Path("runs/run/checkpoints/step-100/config.json").write_text('{"model_type": "qwen2_5_vl"}')
    plain = {"check-data": ["check-data", "run.yaml"], "doctor": ["doctor", "run.yaml"]}
    words = plain.get(command, EXAMPLES[command])
    assert words[1] == "run.yaml"
    result = run(*words, *(["--dry-run"] if command in PLANNED else []))
    assert result.exit_code == 0, result.stderr


def test_init_writes_a_config_that_loads(tmp_path, described, counting):
    out = tmp_path / "run.yaml"
    result = run("init", str(described), str(counting), "--out", str(out))
    assert result.exit_code == 0, result.stderr
    steps = [f"check-data {out}", f"rl {out} --dry-run", f"rl {out}"]
    advice = ", then ".join(f"saccade {step}" for step in steps)
    assert out.read_text().splitlines()[0].endswith(f" Next: {advice}")
    assert result.stdout == f"wrote {out}; next: {advice}\n"
    config = load(out)
    check(config, "rl")
    assert config.reward.terms[0].verifier == "count"
    assert config.train.prompts_per_step == 24  # there are no more rows
    assert "# format: easyr1" in out.read_text() and config.data.format == "auto"
    for line in out.read_text().splitlines():
        assert "#" in line or line.endswith(":")
    again = run("init", str(described), str(counting), "--out", str(out))
    assert again.exit_code == 2 and "exists" in again.stderr
    built = run("init", "tiny:qwen2_5_vl", str(counting), "--out", str(tmp_path / "tiny.yaml"))
    assert built.exit_code == 0, built.stderr
    assert load(tmp_path / "tiny.yaml").model.path == "tiny:qwen2_5_vl"


@pytest.mark.parametrize(
    ("model", "pixels", "tokens"),
    [
        ("tiny:internvl", 4 * 448**2, 4),
        ("tiny:smolvlm", 4 * 448**2, 31),
        ("tiny:qwen2_5_vl", 401_408, 4),
        ("tiny:gemma3", None, 0),
        ("tiny:llava", None, 0),
    ],
)
def test_init_measures_what_a_pixel_budget_costs(tmp_path, counting, model, pixels, tokens):
    """With the image of a row; where no budget changes that, none is written."""
    out = tmp_path / "run.yaml"
    result = run("init", model, str(counting), "--out", str(out))
    assert result.exit_code == 0, result.stderr
    if pixels is None:
        assert "max_pixels" not in out.read_text()
        return
    said = f"# an image of 56x56, as in the rows, is {tokens} tokens; more shows finer detail"
    assert load(out).data.max_pixels == pixels and said in out.read_text()


@pytest.mark.parametrize(("golds", "reward"), [
    (["3", "12", "-1"], "count"),
    (["A", "(C)", "B"], "choice"),
    (["x", "2y", r"\frac{1}{2}", r"\sqrt{12}", "3 m"], "math"),
    (["red", "dark blue", "New York", "North-west", "是"], "exact"),
    (["[0, 1.5, 20, 30]", "[3,4,5,6]"], "math"),  # there is no picture
    (["red", "12"], "math {gold_unparseable: string}"),
    (["Gray", "12.5", "2019", "1,200", "40%", "Q3 2019"], "relaxed"),
    (["Aldi", "12.50", "25/05/2018"], "math {gold_unparseable: string}"),  # a receipt's
    (["Route 66", r"\text{red}"], "math {gold_unparseable: string}"),
])  # fmt: skip
def test_the_reward_follows_from_the_golds(golds, reward):
    samples = [Sample(id=str(i), messages=(), answer=gold) for i, gold in enumerate(golds)]
    assert " ".join(guess_reward(samples)[:2]).strip() == reward


def test_golds_that_are_letters_get_a_reward_of_their_own(tmp_path, rewards_here):
    golds = ["A", "841", "C", r"\frac{1}{2}", "B"]
    rows = [{"question": "?", "answer": g, "kind": "mc" if g.isalpha() else "free"} for g in golds]
    data, out = tmp_path / "rows.jsonl", tmp_path / "run.yaml"
    data.write_text("\n".join(map(json.dumps, rows)))
    assert run("init", "tiny:qwen2_5_vl", str(data), "--out", str(out)).exit_code == 0
    config = load(out)
    assert config.data.keys == {"data_source": "kind"} and not config.reward.terms
    firsts = {source: terms[0]["verifier"] for source, terms in config.reward.by_source.items()}
    assert firsts == {"mc": "choice", "default": "math"}
    with data.open("a") as file:  # a source that init did not see
        file.write("\n" + json.dumps({"question": "?", "answer": "7", "kind": "late"}))
    assert run("check-data", str(out)).exit_code == 0
    samples = [Sample(id=g, messages=(), answer=g, data_source="default") for g in "AB"]
    samples += [Sample(id=g, messages=(), answer=g, data_source="x") for g in "12"]
    assert letters_apart(samples) is None  # `default` would be both
    reward, _, because = guess_reward([Sample(id=gold, messages=(), answer=gold) for gold in golds])
    assert reward == "math" and "3 of 5 are letters: give those rows another data_source" in because


def test_levels_of_a_game_are_answers(tmp_path):
    level = "; 1 a\n#####\n#@$.#\n#####"
    with gzip.open(tmp_path / "boxoban.train.txt.gz", "wt") as file:
        file.write(f"{level}\n\n{level.replace('1', '2')}\n")
    refused = run("init", "tiny:qwen2_5_vl", str(tmp_path / "boxoban.train.txt.gz"))
    assert refused.exit_code == 2 and "as in examples/boxoban.py" in refused.stderr
    rows = tmp_path / "boxoban.py"
    rows.write_text((REPOSITORY / "examples" / "boxoban.py").read_text())
    assert run("init", "tiny:qwen2_5_vl", str(rows), "--out", f"{tmp_path}/run.yaml").exit_code == 0
    config = load(tmp_path / "run.yaml")
    check(config, "rl")
    assert config.env.name == "sokoban_step" and not config.reward.given
    assert "rows           2, 2 good" in run("check-data", f"{tmp_path}/run.yaml").stdout
    shown = (Message(role="user", parts=(Media(hash="a", width=9, height=9, path="a"),)),)
    played = Sample(id="a", messages=shown, answer="right", extra={"level": level[6:]})
    assert guess_reward([played])[0] == "sokoban"
    graded = Sample(id="a", messages=(), answer="7", extra={"level": 3})  # a difficulty
    assert guess_reward([graded])[0] == "count"
    asked = (Message(role="user", parts=(Media(hash="a", width=9, height=9, path="a"), "where?")),)
    assert guess_reward([Sample(id="a", messages=asked, answer="[0, 1.5, 3, 4]")])[0] == "iou"


def test_init_finds_pictures_in_a_column_of_another_name_and_names_arguments(tmp_path, described):
    rows = [{"question": "How?", "answer": gold, "photo": f"{gold}.png"} for gold in ("red", "12")]
    data, out = tmp_path / "rows.jsonl", tmp_path / "r.yaml"
    data.write_text("\n".join(map(json.dumps, rows)))
    result = run("init", str(described), str(data), "--out", str(out))
    assert result.exit_code == 0, result.stderr
    assert load(out).data.keys == {"images": "photo"}
    term = load(out).reward.terms[0]
    assert (term.verifier, term.args) == ("math", {"gold_unparseable": "string"})
    assert "qa rows, each with an image" in out.read_text()


def test_init_takes_the_names_of_columns(tmp_path, described):
    data, out, described = str(tmp_path / "own.jsonl"), str(tmp_path / "run.yaml"), str(described)
    Path(data).write_text('{"query_text": "2+2?", "gt": "4"}\n')
    named = ["data.keys.prompt=query_text", "data.keys.answer=gt"]
    assert "own.jsonl: columns gt, query_text belong to no known format" in run("init", described, data).stderr
    assert run("init", described, data).stderr.endswith(f"name them: {' '.join(named)}\n")
    refused = run("init", described, data, "train.lr=1", "--out", out)
    assert refused.exit_code == 2 and "train.lr=1: init takes data.keys.ROLE=COLUMN" in refused.stderr
    assert run("init", described, data, *named, "--out", out).exit_code == 0
    assert load(out).data.keys == {"prompt": "query_text", "answer": "gt"}


def test_init_names_the_commands_of_rows_without_an_answer(tmp_path, described, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = {
        "pairs": [{"prompt": "?", "chosen": "a", "rejected": "b"}],
        "labels": [{"input": ask, "output": "a", "label": label} for label, ask in enumerate(("how?", "what?"))],
        "steps": [{"input": "one ки two ки", "label": ["+", "-"]}],
    }
    for kind, own in rows.items():
        Path(f"{kind}.jsonl").write_text("\n".join(map(json.dumps, own)))
        result = run("init", str(described), f"{kind}.jsonl")
        said = " ".join(result.stderr.split())
        commands = re.findall("`saccade (.+?)`", re.split(r"`, \w+ for ", said.split(f"{kind} for ")[1])[0] + "`")
        assert result.exit_code == 2 and len(commands) == 1 + (kind == "pairs")
        for command in commands:
            words = command.replace(" …", "").split()
            trained = run(*words, "model.path=tiny:qwen2", f"data.train={kind}.jsonl", "--smoke")
            assert trained.exit_code == 0, trained.stderr
