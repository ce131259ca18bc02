"""The command line: what it prints, what it refuses, which exit code it returns."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import saccade
from saccade.checks import check
from saccade.checks.steps import total_steps
from saccade.cli import app, main
from saccade.cli_run import show_error
from saccade.config import load
from saccade.plugins.smoke.smoke import smoke, with_examples
from saccade.system.revision import revision

REPOSITORY = Path(__file__).resolve().parent.parent
COMMANDS = {
    *("quickstart", "init", "rl", "sft", "dpo", "reward-model", "eval", "generate", "chat", "serve-reward"),
    *("export", "estimate", "check-data", "algorithms", "doctor", "report", "rank", "view", "compare", "stages"),
    *("subgroups", "annotate"),
}


def run(*arguments):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "160", "NO_COLOR": "1"})


def test_help_version_and_names(monkeypatch, capsys):
    assert {command.name for command in app.registered_commands} == COMMANDS
    assert run("--version").stdout == f"saccade {saccade.__version__}, commit {revision() or 'unknown'}\n"
    plain, typo = run(), run("quickstat")
    assert plain.exit_code == 0 and "quickstart" in plain.stdout
    assert typo.exit_code == 2 and "quickstart" in typo.stderr
    assert "reward.terms=[exact]" in run("data", "distill", "--help").stdout  # brackets are no markup
    importlib.import_module("saccade.plugins.export.export")  # must not hide the function of the same name
    assert all(callable(getattr(saccade, name)) for name in saccade.__all__)
    show_error("rew.py:x: [red]KeyError[/red] :x:", ValueError("x"))
    assert capsys.readouterr().err == "rew.py:x: [red]KeyError[/red] :x:\n"
    monkeypatch.setenv("SACCADE_DEBUG", "1")
    assert "Traceback" in run("rl", "train.lrr=1").stderr


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_help_with_an_example(command):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"Example: saccade {command}" in result.stdout


@pytest.mark.parametrize(("arguments", "words"), [
    (["rl", "missing.yaml"], "config file missing.yaml does not exist"),
    (["eval", "/"], "/ is a folder, not a config file; give a model as model.path=/"),
    (["rl", "a.yaml", "b.yaml"], "a.yaml does not exist"),
    (["dpo", "--dry-run", "model.path=tiny:qwen2", "dpo.loss=simpo", "dpo.args.gamma=x"], "gamma: expects a number"),
    (["eval", "--dry-run", "model.path=tiny:qwen2", "algorithm.preset=dapo"], "no effect in `saccade eval`"),
    (["rl", "--dry-run", "model.path=tiny:qwen2", "data.train=README.md", "reward.terms=math",
      "algorithm.args.clip_low=1.5"], "clip_low: expects at most 1"),
    (["rl", "algorithm.kl_clamp=zero"], "did you mean 'algorithm.args.kl_clamp'"),
    (["rl", "reward_model.args=x"], "expected one of reward_model.kind, "),
    (["rl", "run.save_every=3"], "did you mean 'save.every'"),
    (["rl", "track.wandb=true"], "did you mean 'track.loggers'"),
    (["rl", "--dry-run", "model.path=tiny:qwen2", "track.loggers=wandbb"], "try track.loggers=[tensorboard, wandb,"),
    (["serve-reward", "reward.terms=math", "train.lr=1"], "no effect in `saccade serve-reward`"),
    (["eval", "--rescore", "a.jsonl", "train.lr=1"], "no effect in `saccade eval --rescore`"),
    (["rl", "model.path=no/such/model", "reward.terms=[count]"], "model.path: "),
    (["eval", "model.path=tiny:qwen2_5_vl"], "data.val: nothing to evaluate"),
    (["eval", "model.path=tiny:qwen2_5_vl", "data.val=README.md", "reward.terms=[count]", "data.train=a.jsonl",
      "--also", "leaks"], "README.md: unknown kind of file"),
    (["eval", "configs/easyr1_geo3k_grpo.yaml", "data.train=a.jsonl", "--also", "leaks", "--smoke"], "a.jsonl does"),
    (["algorithms", "gropo"], "grpo"),
    (["report", "no/such/run"], "not the folder of a run or an eval; give one such as runs/NAME"),
    (["init", "tiny:gpt2", "no/such/data"], "tiny model=gpt2: no such name; "),
])  # fmt: skip
def test_a_bad_request_exits_with_2_and_a_message(arguments, words):
    result = run(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_dry_run_prints_what_was_chosen_and_the_arithmetic(counting):
    given = f"rl model.path=tiny:qwen2_5_vl data.train={counting} reward.terms=count train.prompts_per_step=6".split()
    given += ["train.updates_per_step=4", "--seed=7", "--out=elsewhere", "--dry-run"]
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
    assert "in flight" not in rest
    surplus = ["algorithm.preset=dapo", "algorithm.filter.keep_surplus=true"]
    for ahead, more, flight, old in (
        (2, [], "144 = 3 x 48", "2 steps"),
        (1, ["algorithm.preset=remax"], "24 = 2 x 12", "1 steps"),  # one greedy answer for each prompt
        (1, surplus, "192 = 2 x 96", "1 steps, 2 in a carried surplus"),
        (50, [], "192 = 4 x 48", "3 steps"),  # of four steps
    ):
        said = run(*given, f"rollout.ahead={ahead}", *more).stdout
        assert re.search(rf"in flight at most +{flight}\n", said) and re.search(rf"token when trained +{old}\n", said)
    full = yaml.safe_load(run(*given, "--full").stdout.partition("\ngrpo: ")[0])
    assert full["train"]["samples_per_prompt"] == 8 and full["algorithm"]["kl"]["coef"] == 0.04
    assert full["rollout"]["temperature"] == 1.0 and not {"sft", "dpo", "generate"} & set(full)
    assert run(*given[:-1], "--full").exit_code == 2


def test_dry_run_refuses_rewards_that_nobody_knows(counting):
    data = [f"data.{name}={counting}" for name in ("train", "val")]
    for given in ("reward.terms=[cuont]", "reward.by_source={counting: cuont}"):
        result = run("generate", "model.path=tiny:qwen2_5_vl", *data, given, "--dry-run")
        assert result.exit_code == 2 and "did you mean 'count'?" in result.stderr


@pytest.mark.parametrize(
    ("epochs", "rows", "prompts", "steps"), [(1, 24, 6, 4), (1, 25, 6, 5), (0.1, 30, 3, 1), (1, 3, 8, 1)]
)
def test_the_last_step_of_a_run_is_a_whole_one(epochs, rows, prompts, steps):
    config = load({"train.epochs": epochs, "train.prompts_per_step": prompts})
    assert total_steps(config, rows) == steps
    assert total_steps(load(config, ["run.max_steps=7"]), rows) == 7


def test_smoke_shrinks_the_run_and_keeps_its_kind(counting, described):
    data = {"data.train": [{"path": str(counting), "data_source": "shapes"}], "data.val": str(counting)}
    chosen = {"algorithm.preset": "dapo", "algorithm.overlong.buffer": 512, "train.updates_per_step": 8}
    more = {"model.path": str(described), "reward.terms": ["count"], "run.device": "cuda"}
    small = smoke(load(data | chosen | more), "rl")
    check(small, "rl")
    assert small.model.path == "tiny:qwen2_vl"
    assert small.run.max_steps == 2 and small.run.device == "auto"
    assert (small.train.prompts_per_step, small.train.samples_per_prompt) == (2, 2)
    assert small.algorithm.overlong.buffer == 8 and small.algorithm.preset == ("dapo",)
    assert small.data.train[0].data_source == "shapes" and small.data.val[0].max_samples == 2


def test_example_rows_stand_in_for_data_that_are_not_here(tmp_path, counting):
    out = f"run.out={tmp_path}"
    for name in ("text_rpp-smoke", "smoke/rl/text_rpp"):  # a user's run, an earlier smoke test
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
    alone = tmp_path / "text_rpp.yaml"  # no example rows beside it
    alone.write_text(recipe.read_text())
    result = run("rl", str(alone), out, "--smoke")
    assert result.exit_code == 2 and "data.train: data/" in result.stderr


def test_the_module_runs_like_the_command(tmp_path):
    command = [sys.executable, "-m", "saccade", "rl", "train.lrr=1"]
    env = os.environ | {"PYTHONPATH": str(REPOSITORY), "COLUMNS": "160"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert (done.returncode, done.stderr) == (2, "unknown key 'train.lrr'; did you mean 'train.lr'?\n")


def test_a_run_is_repeated_from_the_options_that_were_chosen(tmp_path):
    for name in ("config.yaml", "config.resolved.yaml"):
        (tmp_path / name).write_text("run: {name: first}\n")
    result = run("rl", str(tmp_path / "config.resolved.yaml"))
    assert result.exit_code == 2 and f"give {tmp_path / 'config.yaml'}" in result.stderr
    result = run("rl", str(tmp_path))
    assert result.exit_code == 2 and f"give {tmp_path / 'config.yaml'}" in result.stderr.replace("\n", "")
    (tmp_path / "rows.jsonl").write_text('{"question": "2+2?"}\n')
    result = run("rl", str(tmp_path / "rows.jsonl"))
    assert result.exit_code == 2 and "give it as data.train=" in result.stderr
    result = run("rl", str(tmp_path / "config.yaml"))  # read; refused for what it lacks
    assert result.exit_code == 2 and "data.train" in result.stderr


def unread(monkeypatch, *arguments):
    """Exit code of a command whose output pipe is closed before the first line."""
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


def test_a_reader_that_leaves_changes_neither_work_nor_exit_code(counting, tmp_path, monkeypatch):
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
