"""A third-party package adds rows to the tables, and a broken one harms nothing else."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from saccade import registry
from tests.ranks.processes import forked, run_command

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "plugin"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The example, installed by pip into a folder of its own."""
    source, target = tmp_path_factory.mktemp("plugin"), tmp_path_factory.mktemp("site")
    for file in filter(Path.is_file, EXAMPLE.iterdir()):
        shutil.copy(file, source)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--no-index", "--target", str(target), str(source)], check=True)
    return target


def environment(installed):
    paths = [installed, os.environ.get("PYTHONPATH"), EXAMPLE.parents[1]]
    return {"PYTHONPATH": os.pathsep.join(str(path) for path in paths if path), "COLUMNS": "100"}


def saccade(*arguments, installed, folder):
    command, env = [sys.executable, "-m", "saccade", *arguments], os.environ | environment(installed)
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env)


def in_a_fork(site, asked):
    """A command of a process that has imported torch, and now sees the package."""
    sys.path.insert(0, site)
    registry._plugin_rows.cache_clear()
    registry._named.cache_clear()
    run_command(asked)


def test_an_installed_package_adds_a_command_a_verifier_a_preset_and_an_environment(installed, tmp_path):
    said = saccade("riddles", "riddles.jsonl", "--rows", "4", installed=installed, folder=tmp_path)
    assert said.stdout == "wrote 4 rows to riddles.jsonl\n", said.stderr
    options = ["model.path=tiny:qwen2", "data.train=riddles.jsonl", "run.device=cpu", "track.tensorboard=false"]
    options += ["train.prompts_per_step=2", "train.samples_per_prompt=2", "rollout.max_tokens=8", "run.max_steps=1"]
    options += ["reward.terms=[{verifier: palindrome, args: {least: 2}}]", "reward.self_test=off"]
    options += ["algorithm.preset=grpo_wide", "env.name=guess", "env.args={most: 4}", "env.max_turns=2"]
    asked = {"arguments": ["rl", *options, "run.name=mine"], "environment": environment(installed), "folder": tmp_path}
    ran = forked(in_a_fork, str(installed), asked)
    assert ran.join() is None and ran.exitcode == 0
    row = json.loads((tmp_path / "runs" / "mine" / "metrics.jsonl").read_text().splitlines()[-1])
    assert 0 <= row["reward/mean"] <= 1 and "reward/palindrome" in row, sorted(row)


def test_a_broken_package_is_named_and_everything_else_works(installed, tmp_path):
    site = tmp_path / "site"
    shutil.copytree(installed, site)
    (site / "saccade_riddles.py").write_text("raise RuntimeError('half of it is missing')\n")
    said = saccade("--help", installed=site, folder=tmp_path)
    assert said.returncode == 0 and "quickstart" in said.stdout
    assert "saccade-riddles" in said.stderr and "half of it is missing" in said.stderr
