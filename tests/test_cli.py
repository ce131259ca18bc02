"""The command line: what it prints, what it refuses, which exit code it returns."""

from __future__ import annotations

import gzip
import importlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

import saccade
from saccade.checks import check
from saccade.checks.steps import total_steps
from saccade.cli import app, main
from saccade.cli_run import show_error
from saccade.config import load
from saccade.plugins.dry_run.plan import plan
from saccade.plugins.init.init_config import guess_reward, letters_apart
from saccade.plugins.quickstart.counting import TEACHING_COLOURS, counting_split, write_jsonl
from saccade.plugins.smoke.smoke import smoke, with_examples
from saccade.types import Media, Message, Sample

REPOSITORY = Path(__file__).resolve().parent.parent
COMMANDS = {
    "quickstart",
    "init",
    "rl",
    "sft",
    "estimate",
    "eval",
    "generate",
    "chat",
    "serve-reward",
    "export",
    "check-data",
    "algorithms",
    "doctor",
    "dpo",
    "reward-model",
    "report",
}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "160", "NO_COLOR": "1"})


@pytest.fixture
def counting(tmp_path: Path) -> Path:
    return write_jsonl(counting_split(24, seed=0, colours=TEACHING_COLOURS), tmp_path / "counting")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen2_vl"}')
    return folder


# -- help and errors -------------------------------------------------------------------------------


def test_plain_saccade_prints_help() -> None:
    result = run()
    assert result.exit_code == 0
    assert "quickstart" in result.stdout


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_help_with_an_example(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"Example: saccade {command}" in result.stdout


def test_only_these_commands_exist() -> None:
    assert {command.name for command in app.registered_commands} == COMMANDS


def test_version() -> None:
    assert run("--version").stdout == f"saccade {saccade.__version__}\n"


def test_a_typo_names_the_nearest_command() -> None:
    result = run("quickstat")
    assert result.exit_code == 2
    assert "quickstart" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rl", "missing.yaml"], "config file missing.yaml does not exist"),
        (["rl", "train.lrr=1"], "did you mean 'train.lr'?"),
        (["rl", "a.yaml", "b.yaml"], "one config file, not 2"),
        (["sft"], "data.train: no training data"),
        (["eval", "model.path=tiny:qwen2_5_vl"], "data.val: nothing to evaluate"),
        (["algorithms", "gropo"], "grpo"),
        (["report", "no/such/run"], "not a run folder"),
        (["init", "no/such/model", "no/such/data"], "has no config.json"),
        (["init", "tiny:gpt2", "no/such/data"], "tiny:gpt2 is not known; known are qwen2_vl"),
    ],
)
def test_a_bad_request_exits_with_2_and_a_message(arguments: list[str], words: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SACCADE_DEBUG", "1")
    result = run("rl", "train.lrr=1")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr


# -- dry run and smoke -----------------------------------------------------------------------------


def test_dry_run_prints_what_was_chosen_and_the_arithmetic(counting: Path) -> None:
    given = [
        "rl",
        "model.path=tiny:qwen2_5_vl",
        f"data.train={counting}",
        "reward.terms=count",
        "train.prompts_per_step=6",
        "train.updates_per_step=4",
        "--seed=7",
        "--out=elsewhere",
        "--dry-run",
    ]
    result = run(*given)
    assert result.exit_code == 0, result.stderr
    text, _, rest = result.stdout.partition("\ngrpo: ")
    config = yaml.safe_load(text)
    assert config == {
        "run": {"seed": 7, "out": "elsewhere"},
        "model": {"path": "tiny:qwen2_5_vl"},
        "data": {"train": [{"path": str(counting)}]},
        "reward": {"terms": [{"verifier": "count"}]},
        "train": {"prompts_per_step": 6, "updates_per_step": 4},
    }
    for expected in ("48 = 6 x 8", "1 or 2", "4 (24 rows)", "16384 tokens"):
        assert expected in rest
    assert "GiB in the update" in rest and "that can be planned with" in rest
    assert len(result.stdout.splitlines()) <= 40
    assert not Path("elsewhere").exists()
    full = yaml.safe_load(run(*given, "--full").stdout.partition("\ngrpo: ")[0])
    assert full["train"]["samples_per_prompt"] == 8 and full["algorithm"]["kl"]["coef"] == 0.04
    assert full["rollout"]["temperature"] == 1.0 and not {"sft", "dpo", "generate"} & set(full)
    assert run(*given[:-1], "--full").exit_code == 2


def test_dry_run_refuses_a_group_of_one(counting: Path) -> None:
    result = run(
        "rl",
        "model.path=tiny:qwen2_5_vl",
        f"data.train={counting}",
        "reward.terms=count",
        "train.samples_per_prompt=1",
        "--dry-run",
    )
    assert result.exit_code == 2
    assert "train.samples_per_prompt=8" in result.stderr


@pytest.mark.parametrize("command", ["sft", "eval", "generate"])
def test_dry_run_of_the_other_commands(command: str, counting: Path) -> None:
    data = f"data.{'val' if command == 'eval' else 'train'}={counting}"
    result = run(command, "model.path=tiny:qwen2_5_vl", data, "--dry-run")
    assert result.exit_code == 0, result.stderr
    assert "24" in result.stdout.partition("Batch arithmetic")[2]


@pytest.mark.parametrize("command", ["rl", "sft", "dpo", "eval", "generate"])
def test_dry_run_refuses_rewards_that_nobody_knows(command: str, counting: Path) -> None:
    data = [f"data.{name}={counting}" for name in ("train", "val")]
    for given in ("reward.terms=[cuont]", "reward.by_source={counting: cuont}"):
        result = run(command, "model.path=tiny:qwen2_5_vl", *data, given, "--dry-run")
        assert result.exit_code == 2 and "did you mean 'count'?" in result.stderr


def test_arithmetic_of_an_uneven_step() -> None:
    config = load({"train": {"prompts_per_step": 10, "samples_per_prompt": 4, "updates_per_step": 3}})
    rows = dict(plan(config, "rl"))
    assert rows["samples per step"] == "40 = 10 x 4"
    assert rows["prompts per update"] == "3 or 4"
    assert rows["optimizer steps per step"] == "3"


@pytest.mark.parametrize(
    ("epochs", "rows", "prompts", "steps"),
    [(1, 24, 6, 4), (1, 25, 6, 5), (2, 25, 10, 5), (0.1, 30, 3, 1), (1, 3, 8, 1), (0.5, 25, 6, 3)],
)
def test_the_last_step_of_a_run_is_a_whole_one(epochs: float, rows: int, prompts: int, steps: int) -> None:
    config = load({"train.epochs": epochs, "train.prompts_per_step": prompts})
    assert total_steps(config, rows) == steps
    assert total_steps(load(config, ["run.max_steps=7"]), rows) == 7


def test_the_plan_counts_the_steps_of_the_run(counting: Path) -> None:
    tree = {"data.train": str(counting), "train.prompts_per_step": 7}
    assert dict(plan(load(tree), "rl"))["steps"] == "4" == str(total_steps(load(tree), 24))
    mixed = load(tree | {"data.train": [{"path": str(counting), "weight": 1}]})
    assert dict(plan(mixed, "rl"))["steps"] == "1 epochs"  # a mixture draws its epochs


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("rl", {"lr": 1e-6, "epochs": 1.0, "schedule": "constant", "warmup": 0.0}),
        ("sft", {"lr": 5e-6, "epochs": 2.0, "schedule": "cosine_with_min_lr", "warmup": 0.03}),
    ],
)
def test_dry_run_shows_the_defaults_of_its_command(command: str, expected: dict[str, object], counting: Path) -> None:
    reward = ["reward.terms=count"] if command == "rl" else []
    options = ["model.path=tiny:qwen2_5_vl", f"data.train={counting}", *reward]
    result = run(command, *options, "train.prompts_per_step=5", "--dry-run", "--full")
    assert result.exit_code == 0, result.stderr
    text = result.stdout.split("\ngrpo: ")[0].split("Batch arithmetic")[0]
    train = yaml.safe_load(text)["train"]
    assert {name: train[name] for name in expected} == expected
    steps = {"rl": 5, "sft": 10}[command]
    assert any(line.split() == ["steps", str(steps)] for line in result.stdout.splitlines())


def test_check_data_says_that_threads_decode() -> None:
    assert "Threads that decode images" in run("check-data", "--help").stdout


def test_smoke_shrinks_the_run_and_keeps_its_kind(counting: Path, model: Path) -> None:
    config = load(
        {
            "model.path": str(model),
            "data.train": [{"path": str(counting), "data_source": "shapes"}],
            "data.val": str(counting),
            "reward.terms": ["count"],
            "algorithm.preset": "dapo",
            "algorithm.overlong.buffer": 512,
            "train.updates_per_step": 8,
            "run.device": "cuda",
        }
    )
    small = smoke(config, "rl")
    check(small, "rl")
    assert small.model.path == "tiny:qwen2_vl"
    assert small.run.max_steps == 2 and small.run.device == "auto"
    assert (small.train.prompts_per_step, small.train.samples_per_prompt) == (2, 2)
    assert small.train.updates_per_step == 2 and small.rollout.max_tokens == 16
    assert small.algorithm.overlong.buffer == 8 and small.algorithm.preset == ("dapo",)
    assert small.data.train[0].data_source == "shapes"
    assert small.data.val[0].max_samples == 2


def test_smoke_reads_a_layer_that_the_tiny_model_has() -> None:
    tree = {"reward_model.probe_layer": -8, "reward_model.pooling_heads": 28}
    own = smoke(load(tree | {"reward_model.pooling": "attention"}), "reward-model").reward_model
    assert (own.probe_layer, own.pooling_heads) == (-2, 4)


@pytest.mark.parametrize("command", ["rl", "sft", "eval", "generate"])
def test_smoke_passes_the_checks_of_its_command(command: str, counting: Path) -> None:
    tree = {"data.train": str(counting), "data.val": str(counting), "model.path": "not/here"}
    small = smoke(load(tree | ({"reward.terms": ["count"]} if command == "rl" else {})), command)
    check(small, command)
    assert small.model.path == "tiny:qwen2_5_vl"


@pytest.mark.parametrize("command", ["rl", "generate"])
def test_smoke_takes_the_place_of_nothing_but_an_earlier_one(tmp_path: Path, command: str) -> None:
    recipe = str(Path(__file__).parent.parent / "configs" / "text_rpp.yaml")
    # Runs of other names, and an earlier smoke test: a dry run leaves that alone, too.
    for name in ("text_rpp", "text_rpp-smoke", "smoke/text_rpp", f"smoke/{command}/text_rpp"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "notes.txt").write_text("mine")
    for _ in range(2):
        result = run(command, recipe, f"run.out={tmp_path}", "--smoke", "--dry-run")
        assert result.exit_code == 0, result.stderr
    assert len(list(tmp_path.rglob("notes.txt"))) == 4


def test_a_folder_of_a_run_is_no_config(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run: {name: a}\n")
    result = run("rl", str(tmp_path))
    assert result.exit_code == 2 and f"give {tmp_path / 'config.yaml'}" in result.stderr.replace("\n", "")


def test_example_rows_stand_in_for_data_that_are_not_here(tmp_path: Path, counting: Path) -> None:
    out = f"run.out={tmp_path}"
    for name in ("text_rpp-smoke", "smoke/rl/text_rpp"):  # somebody's run, an earlier smoke test
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "notes.txt").touch()
    recipe = Path(__file__).parent.parent / "configs" / "text_rpp.yaml"
    result = run("rl", str(recipe), out, "--smoke")
    assert result.exit_code == 0, result.stderr
    assert "rows/text_rpp.jsonl stands in for data.train: data/" in result.stdout
    assert (tmp_path / "smoke" / "rl" / "text_rpp" / "checkpoints" / "step-2").is_dir()
    assert not (tmp_path / "smoke" / "rl" / "text_rpp" / "notes.txt").exists()
    assert (tmp_path / "text_rpp-smoke" / "notes.txt").exists()
    both = load({"data.train": [str(counting), "gone.jsonl"]})
    own, replaced = with_examples(both, recipe)
    assert own.data.train[0].path == str(counting) and replaced[0].endswith("train: gone.jsonl")
    result = run("rl", str(recipe), out, "--smoke", "data.train=gone.jsonl")
    assert result.exit_code == 2 and "gone.jsonl does not exist" in result.stderr
    alone = tmp_path / "text_rpp.yaml"  # nothing lies beside it
    alone.write_text(recipe.read_text())
    result = run("rl", str(alone), out, "--smoke")
    assert result.exit_code == 2 and "data.train: data/" in result.stderr


# -- init ------------------------------------------------------------------------------------------


EXAMPLES = {
    command.name: shlex.split(str(command.epilog).split("[bold]")[1].removesuffix("[/bold]"))[1:]
    for command in app.registered_commands
}
PLANNED = {"rl", "sft", "dpo", "reward-model", "eval", "generate"}


@pytest.mark.parametrize("command", sorted(PLANNED | {"estimate", "check-data", "doctor"}))
def test_the_file_of_init_serves_the_example_of_each_command(
    command: str, tmp_path: Path, counting: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_init_writes_a_config_that_loads(tmp_path: Path, model: Path, counting: Path) -> None:
    out = tmp_path / "run.yaml"
    result = run("init", str(model), str(counting), "--out", str(out))
    assert result.exit_code == 0, result.stderr
    steps = [f"check-data {out}", f"rl {out} --dry-run", f"rl {out}"]
    advice = ", then ".join(f"saccade {step}" for step in steps)
    assert out.read_text().splitlines()[0].endswith(f" Next: {advice}")
    assert result.stdout == f"wrote {out}; next: {advice}\n"
    config = load(out)
    check(config, "rl")
    assert config.reward.terms[0].verifier == "count"
    assert "# format: easyr1" in out.read_text() and config.data.format == "auto"
    for line in out.read_text().splitlines():
        assert "#" in line or line.endswith(":")
    again = run("init", str(model), str(counting), "--out", str(out))
    assert again.exit_code == 2 and "exists" in again.stderr
    built = run("init", "tiny:qwen2_5_vl", str(counting), "--out", str(tmp_path / "tiny.yaml"))
    assert built.exit_code == 0, built.stderr
    assert load(tmp_path / "tiny.yaml").model.path == "tiny:qwen2_5_vl"


def test_init_knows_what_a_family_makes_of_pixels(tmp_path: Path, counting: Path) -> None:
    out = tmp_path / "run.yaml"
    result = run("init", "tiny:internvl", str(counting), "--out", str(out))
    assert result.exit_code == 0, result.stderr
    assert load(out).data.max_pixels == 4 * 448**2 and "# four tiles and" in out.read_text()
    result = run("init", "tiny:llava", str(counting), "--out", str(tmp_path / "other.yaml"))
    assert result.exit_code == 0 and "max_pixels" not in (tmp_path / "other.yaml").read_text()


@pytest.mark.parametrize(
    ("golds", "reward"),
    [
        (["3", "12", "-1"], "count"),
        (["A", "(C)", "B"], "choice"),
        (["3", "x^2"], "math"),
        (["x", "2y", r"\frac{1}{2}", r"\sqrt{12}", "3 m"], "math"),
        (["true", "false"], "exact"),
        (["Yes.", "no"], "exact"),
        (["red", "dark blue", "New York", "North-west", "是"], "exact"),
        (["[0, 1.5, 20, 30]", "[3,4,5,6]"], "math"),  # there is no picture
        (["red", "12"], "math {gold_unparseable: string}"),
        (["Gray", "12.5", "2019", "1,200", "40%", "Q3 2019"], "relaxed"),
        (["Gray", "12.5", r"\frac{1}{2}"], "math {gold_unparseable: string}"),
        (["Aldi", "12.50", "25/05/2018"], "math {gold_unparseable: string}"),  # a receipt's
        (["A", "none"], "math {gold_unparseable: string}"),
        (["Route 66", r"\text{red}"], "math {gold_unparseable: string}"),
    ],
)
def test_the_reward_follows_from_the_golds(golds: list[str], reward: str) -> None:
    samples = [Sample(id=str(i), messages=(), answer=gold) for i, gold in enumerate(golds)]
    assert " ".join(guess_reward(samples)[:2]).strip() == reward


def test_golds_that_are_letters_get_a_reward_of_their_own(tmp_path: Path) -> None:
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
    untold = [Sample(id=gold, messages=(), answer=gold) for gold in golds]
    assert guess_reward(untold)[0] == "math" and "3 of 5 are letters" in guess_reward(untold)[2]


def test_levels_of_a_game_are_answers(tmp_path: Path) -> None:
    level = "; 1 a\n#####\n#@$.#\n#####"
    with gzip.open(tmp_path / "boxoban.train.txt.gz", "wt") as file:
        file.write(f"{level}\n\n{level.replace('1', '2')}\n")
    refused = run("init", "tiny:qwen2_5_vl", str(tmp_path / "boxoban.train.txt.gz"))
    assert refused.exit_code == 2 and "examples/boxoban.py does for levels" in refused.stderr
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
    graded = Sample(id="a", messages=(), answer="7", extra={"level": 3})  # of difficulty
    assert guess_reward([graded])[0] == "count"


def test_golds_of_pictures_may_be_boxes() -> None:
    asked = (Message(role="user", parts=(Media(hash="a", width=9, height=9, path="a"), "where?")),)
    assert guess_reward([Sample(id="a", messages=asked, answer="[0, 1.5, 3, 4]")])[0] == "iou"


def test_init_finds_pictures_in_a_column_of_another_name(tmp_path: Path, model: Path) -> None:
    rows = [{"question": "How many?", "answer": "2", "photo": f"{n}.png"} for n in range(3)]
    data, out = tmp_path / "rows.jsonl", tmp_path / "r.yaml"
    data.write_text("\n".join(map(json.dumps, rows)))
    result = run("init", str(model), str(data), "--out", str(out))
    assert result.exit_code == 0, result.stderr
    assert load(out).data.keys == {"images": "photo"}
    assert "qa rows, each with an image" in out.read_text()


def test_init_of_mixed_golds_names_the_argument(tmp_path: Path, model: Path) -> None:
    rows = [{"question": "?", "answer": gold} for gold in ("red", "12")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "run.yaml"
    result = run("init", str(model), str(tmp_path / "rows.jsonl"), "--out", str(out))
    assert result.exit_code == 0, result.stderr
    term = load(out).reward.terms[0]
    assert (term.verifier, term.args) == ("math", {"gold_unparseable": "string"})


def test_init_sends_pairs_and_labels_to_their_commands(tmp_path: Path, model: Path) -> None:
    """With command lines whose options are in order."""
    pair = {"prompt": "?", "chosen": "a", "rejected": "b"}
    label = {"input": "?", "output": "a", "label": 1}
    for row, what, commands in (
        (pair, "preference pairs", ["dpo", "reward-model"]),
        (label, "labelled good or bad", ["dpo"]),
    ):
        data = tmp_path / "some rows.jsonl"
        data.write_text(json.dumps(row) + "\n")
        result = run("init", str(model), str(data), "--out", str(tmp_path / "run.yaml"))
        assert result.exit_code == 2 and what in result.stderr
        named = [shlex.split(line) for line in result.stderr.split("\n") if "  saccade " in line]
        assert [words[1] for words in named] == commands
        for words in named:
            check(load(None, words[2:]), words[1])


def test_init_reads_real_data(tmp_path: Path, model: Path, shared: Path) -> None:
    for name, format in {
        "mathv/mathv.train.jsonl": "messages",
        "nlvr/nlvr.train.json": "minio3",
        "puzzlevqa/puzzlevqa.train.parquet": "easyr1",
        "gsm8k/gsm8k.train.jsonl.gz": "qa",
    }.items():
        out = tmp_path / f"{format}.yaml"
        result = run("init", str(model), str(shared / name), "--out", str(out))
        assert result.exit_code == 0, result.stderr
        assert f"# format: {format}" in out.read_text()
        load(out)


# -- the package -----------------------------------------------------------------------------------


def test_algorithms_lists_and_explains() -> None:
    listed = run("algorithms")
    assert listed.exit_code == 0 and "dapo" in listed.stdout
    explained = run("algorithms", "dapo")
    assert "0.28" in explained.stdout and "2503.14476" in explained.stdout


def in_new_process(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "COLUMNS": "160"}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, cwd=cwd, env=environment
    )


@pytest.mark.parametrize(
    "code",
    [
        "import saccade; saccade.load_config({'train.lr': 1e-6})",
        "from saccade.cli import app; from typer.testing import CliRunner;"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0",
        "import saccade.plugins.smoke.smoke, saccade.plugins.dry_run.plan, saccade.plugins.quickstart.counting",
    ],
)
def test_nothing_slow_is_imported(code: str, tmp_path: Path) -> None:
    slow = "{'torch', 'transformers', 'datasets', 'pandas'} & set(sys.modules)"
    done = in_new_process("-c", f"{code}\nimport sys\nprint({slow})", cwd=tmp_path)
    assert done.stdout.strip() == "set()", done.stderr


def test_the_module_runs_like_the_command(tmp_path: Path) -> None:
    done = in_new_process("-m", "saccade", "rl", "train.lrr=1", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "unknown key 'train.lrr'; did you mean 'train.lr'?\n"


def test_the_public_names_exist() -> None:
    importlib.import_module("saccade.plugins.export.export")  # must not hide the function of the same name
    for name in saccade.__all__:
        assert callable(getattr(saccade, name))


def test_check_data_knows_what_a_command_refuses(counting: Path, tmp_path: Path) -> None:
    picture = str(next(counting.parent.rglob("*.png")))
    shown = [{"role": "assistant", "content": [{"type": "image", "image": picture}]}]
    pair = {"prompt": "which?", "chosen": "this", "rejected": "that"}
    rows = [pair, pair | {"margin": -1}, pair | {"chosen": shown}]
    path, fixed = tmp_path / "rows.jsonl", tmp_path / "fixed.jsonl"
    path.write_text("".join(json.dumps({"id": f"n{n}"} | row) + "\n" for n, row in enumerate(rows)))
    check = ["check-data", str(path), "data.max_bad_fraction=1", "data.allow_outside=true"]
    assert "3, 3 good" in run(*check).stdout
    check += [f"run.out={tmp_path}", "model.path=tiny:qwen2_5_vl"]
    for command, bad in {"dpo": "n2", "reward-model": "n1", "sft": "n2"}.items():
        result = run(*check, "--for", command)
        assert "3, 2 good, 1 bad" in result.stdout and f"  {bad} (row" in result.stdout
    assert run(*check, "--for", "dpo", "--fix", str(fixed)).exit_code == 0
    assert [json.loads(line)["id"] for line in fixed.open()] == ["n0", "n1"]
    for command, reason in {"kto": "known are rl, sft, dpo", "dpo": "model.path=tiny"}.items():
        result = run("check-data", str(path), "--for", command)
        assert result.exit_code == 2 and reason in result.stderr


def test_check_data_counts_what_a_command_leaves_out(tmp_path: Path) -> None:
    def written(name: str, rows: list[dict[str, Any]]) -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps({"id": f"n{n}"} | r) + "\n" for n, r in enumerate(rows)))
        return str(path)

    pair = {"prompt": "which?", "chosen": "this", "rejected": "that"}
    tie, long, bad = {"rejected": "this"}, {"chosen": "this " * 400}, {"chosen": ""}
    rows = written("rows.jsonl", [pair, pair | tie, pair | long, pair | bad])
    check = ["check-data", "model.path=tiny:qwen2", f"run.out={tmp_path}", "--for"]
    result = run(*check, "dpo", rows, "data.max_bad_fraction=0.3", "dpo.max_tokens=300")
    assert result.exit_code == 0 and "answers" not in result.stdout
    assert "4, 1 good, 1 bad, 1 overlong, 1 left out" in result.stdout
    assert "1 left out, first n1 (row 2 of rows): a tie prefers neither side" in result.stdout
    assert "tokens, dpo.max_tokens is 300" in result.stdout
    levels = written("levels.jsonl", [{"question": "solve it", "level": "#####\n#@$.#\n#####"}])
    result = run(*check, "rl", levels)
    assert "1, 1 good" in result.stdout and "answers" not in result.stdout
    # A reward model learns from ties, and has a limit of its own.
    own = "reward_model.max_tokens=3000"
    result = run(*check, "reward-model", rows, "data.max_bad_fraction=0.3", own)
    assert "4, 3 good, 1 bad" in result.stdout
    ties = written("ties.jsonl", [pair | tie] * 3)
    result = run(*check, "dpo", ties)
    assert result.exit_code == 2 and "data.train has no usable row" in result.stderr
    assert "3, 0 good, 0 bad, 3 left out" in result.stdout
    assert result.stdout.count("a tie prefers") == 1 and "3 left out, first n0" in result.stdout
    texts = written("texts.jsonl", [{"text": "Once upon a time."}])
    assert "1, 1 good" in run(*check, "sft", texts, "sft.mode=pretrain").stdout


@pytest.mark.parametrize(
    ("body", "ends"),
    [
        ("1 / 0", "the reward fails on known answers; see the rows above\n"),
        ("return 0.5", "the reward misjudges known answers; see the rows above\n"),
    ],
)
def test_check_data_says_how_a_reward_fails(body: str, ends: str, tmp_path: Path) -> None:
    rows, mine = tmp_path / "rows.jsonl", tmp_path / "mine.py"
    rows.write_text(json.dumps({"question": "1+1?", "answer": "2"}) + "\n")
    mine.write_text(f"def score(sample):\n    {body}\n")
    result = run("check-data", str(rows), f"reward.terms=[{mine}:score]")
    assert result.exit_code == 2 and result.stderr == ends


def test_check_data_counts_rows_that_repeat_or_lack_an_answer(tmp_path: Path) -> None:
    rows = [{"id": "a", "question": "1+1?", "answer": "2"}] * 3 + [{"question": "why?"}] * 2
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = run("check-data", str(path), f"data.val={path}", "reward.terms=[exact]")
    assert "duplicate ids  4, and 6 rows got a suffix" in result.stdout
    assert "2 different rows of data.val are in data.train" in result.stdout
    assert "4 of 10 rows have no answer, and exact abstains" in result.stdout


def test_check_data_takes_an_empty_list_for_no_answer(tmp_path: Path) -> None:
    rows = [{"question": "1+1?", "answer": "2"}, {"question": "why?", "answer": []}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = run("check-data", str(path), "reward.terms=[exact]")
    assert "1 of 2 rows have no answer, and exact abstains" in result.stdout


def test_check_data_says_that_it_counts_a_picture_once(counting: Path) -> None:
    first, *_ = counting.read_text().splitlines()
    counting.write_text(first + "\n" + first + "\n")
    result = run("check-data", str(counting))
    assert "2 good" in result.stdout and "1 different, decoded" in result.stdout


def test_a_data_file_is_no_config(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "2+2?"}\n')
    result = run("rl", str(tmp_path / "rows.jsonl"))
    assert result.exit_code == 2 and "give it as data.train=" in result.stderr


def test_a_run_is_repeated_from_the_options_that_were_chosen(tmp_path: Path) -> None:
    for name in ("config.yaml", "config.resolved.yaml"):
        (tmp_path / name).write_text("run: {name: first}\n")
    result = run("rl", str(tmp_path / "config.resolved.yaml"))
    assert result.exit_code == 2 and f"are in {tmp_path / 'config.yaml'}" in result.stderr
    result = run("rl", str(tmp_path / "config.yaml"))  # read, and what it lacks is said
    assert result.exit_code == 2 and "data.train" in result.stderr


def unread(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Exit code of a command whose reader left before the first line."""
    reads, writes = os.pipe()
    os.close(reads)
    with monkeypatch.context() as now, os.fdopen(writes, "w") as pipe:
        now.setattr("sys.stdout", pipe)
        now.setattr("sys.stderr", pipe)
        now.setattr("sys.argv", ["saccade", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        sys.stdout.flush()
    return int(caught.value.code or 0)


def test_a_reader_that_leaves_changes_neither_work_nor_exit_code(
    counting: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = tmp_path / "good.jsonl"
    assert unread(monkeypatch, "check-data", str(counting), "--fix", str(good)) == 0
    assert len(good.read_text().splitlines()) == 24
    assert unread(monkeypatch, "check-data", str(counting), "--fix", str(good)) == 2  # it exists
    for command in ("algorithms", "--help", "doctor"):
        assert unread(monkeypatch, command) == 0, command
    options = "generate.n=2 generate.select=best generate.threshold=-1 rollout.max_tokens=8"
    options += f" data.max_samples=2 model.path=tiny:qwen2_5_vl run.out={tmp_path}"
    options += f" data.train={counting} reward.terms=[count] run.device=cpu"
    assert unread(monkeypatch, "generate", *options.split()) == 0
    assert (tmp_path / "run" / "generations.best.jsonl").is_file()


def test_check_data_lists_bad_rows_and_writes_the_good_ones(counting: Path, tmp_path: Path) -> None:
    with counting.open("a") as file:
        file.write('{"id": "lost", "problem": "<image>?", "answer": "1", "images": ["gone.png"]}\n')
    out, fixed = tmp_path / "report.json", tmp_path / "good.jsonl"
    result = run("check-data", str(counting), "--out", str(out), "--fix", str(fixed))
    assert result.exit_code == 2  # 1 of 25 is more than 1 %
    assert "lost (row 25" in result.stdout and str(fixed) in result.stderr
    assert result.stdout.endswith(f"\n24 of 25 rows can be used; wrote {fixed}, {out}\n")
    assert json.loads(out.read_text())["good"] == 24
    written = fixed.read_text()
    assert run("check-data", str(fixed)).exit_code == 0
    again = run("check-data", str(counting), "--fix", str(fixed))
    assert again.exit_code == 2 and "exists" in again.stderr and fixed.read_text() == written
    assert run("check-data", str(counting), "--fix", str(counting)).exit_code == 2


def test_an_error_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    show_error("rew.py:x: [red]KeyError[/red] :x:", ValueError("x"))
    assert capsys.readouterr().err == "rew.py:x: [red]KeyError[/red] :x:\n"
