"""Packaging: the wheel has every file of the package, and launch files call commands that exist."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from saccade import config as configs
from saccade.cli import app

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree without git, as an sdist unpacks to, with a wheel in dist/."""
    folder = tmp_path_factory.mktemp("built")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    for name in ("saccade", "configs", "scripts"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "saccade" / "commit.txt").write_text("c0ffee\n")
    build = "import setuptools.build_meta as b; b.build_wheel('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=folder, check=True, capture_output=True)
    return folder


def test_the_script_of_the_images_makes_an_environment(built: Path, tmp_path: Path) -> None:
    """Runs all commands of the script; the wheel's dependencies and pip are those of this environment."""
    here = [path for path in sys.path if path.endswith("site-packages")]
    given = {f"PIP_{name}": "1" for name in ("NO_DEPS", "IGNORE_INSTALLED", "NO_COMPILE")} | {"TORCH_INDEX": ""}
    given |= {"PYTHONPATH": os.pathsep.join(here), "PATH": os.pathsep.join([str(tmp_path), os.environ["PATH"]])}
    pip = """printf '#!/bin/sh\nexec "${0%%pip}python3" -m pip "$@"' > "$3/bin/pip"; chmod +x "$3/bin/pip\""""
    (python := tmp_path / "python3").write_text(f'#!/bin/sh\n{sys.executable} "$@" --without-pip && {pip}\n')
    python.chmod(0o755)
    command = ["bash", built / "scripts" / "image.sh", tmp_path / "made", "cpu"]
    done = subprocess.run(command, env={**os.environ, **given}, capture_output=True, text=True)
    assert done.returncode == 0 and ", commit c0ffee\n" in done.stdout and "grpo" in done.stdout, done.stderr
    assert list(tmp_path.glob("made/lib/python*/site-packages/saccade/configs/kto.yaml"))


def test_a_wheel_has_every_file_the_recipes_and_the_commit(built: Path, tmp_path: Path) -> None:
    wheel = zipfile.ZipFile(next((built / "dist").glob("*.whl")))
    inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
    there = {str(path.relative_to(built)) for path in (built / "saccade").rglob("*") if path.is_file()}
    assert inside == there | {f"saccade/configs/{p.relative_to(ROOT / 'configs')}" for p in recipes()}
    wheel.extractall(tmp_path / "site")
    ask = partial(subprocess.check_output, cwd=tmp_path / "site", env={"PYTHONPATH": "."}, text=True)
    assert ask([sys.executable, "-m", "saccade", "--version"]).endswith(", commit c0ffee\n")
    names = ["kto", "kto.yaml", "configs/kto.yaml", "other/kto.yaml", "train.jsonl", "run.name=kto"]
    found = ask([sys.executable, "-c", f"from saccade.cli_run import split; print(*split({names})[0])"]).split()
    assert found == [str(tmp_path / "site/saccade/configs/kto.yaml")] * 3 + names[3:5]


def recipes() -> Iterator[Path]:
    return (path for path in (ROOT / "configs").rglob("*") if path.is_file())


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Dead links, pages missing in the menu and names missing in the API are warnings, which `--strict` refuses."""
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    assert (tmp_path / "search" / "search_index.json").stat().st_size > 300_000


def test_launch_files_call_commands_that_there_are() -> None:
    """bash parses the scripts; the command line parses the arguments in the files of compose and Kubernetes."""
    job = next(one for one in documents("examples/kubernetes.yaml") if one["kind"] == "Job")
    shell, script, *_, config = (of_pod := job["spec"]["template"]["spec"]["containers"][0])["command"][1:]
    assert shell == "-c" and {one["name"]: one["value"] for one in of_pod["env"] if "value" in one} == {
        "GPUS": str(of_pod["resources"]["limits"]["nvidia.com/gpu"]), "PODS": str(job["spec"]["completions"])
    }  # fmt: skip
    for text in (script, *(path.read_text() for path in [*ROOT.glob("examples/*.sh"), ROOT / "scripts/image.sh"])):
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    services = documents("compose.yaml")[0]["services"]
    arguments = [one["command"] for one in services.values()] + [["rl", config, "run.launcher=join"]]
    for name, *words in arguments:
        get_command(app).commands[name].make_context(name, words)  # type: ignore[attr-defined]
        configs.load(None, [word for word in words if "=" in word])
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert {one["build"]["target"] for one in services.values()} <= set(
        re.findall(r"^FROM .* AS (\w+)$", dockerfile, re.M)
    )
    copied = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.M)
    assert set(re.findall(r"bash /src/(\S+)", dockerfile)) <= set(copied)


@pytest.mark.parametrize(("tool", "patterns"), [
    ("hadolint", ["Dockerfile"]), ("shellcheck", ["scripts/*.sh", "examples/*.sh", ".ci/run"]),
])  # fmt: skip
def test_linters_have_nothing_to_say(tool: str, patterns: list[str]) -> None:
    found = shutil.which(tool, path=Path(sys.executable).parent) or pytest.skip(f"{tool} is not installed")
    files = [path for pattern in patterns for path in ROOT.glob(pattern)]
    done = subprocess.run([found, *files], capture_output=True, text=True)
    assert files and done.returncode == 0, done.stdout


def test_ray_reads_the_cluster_file() -> None:
    ray, jsonschema = find_spec("ray"), pytest.importorskip("jsonschema")
    assert ray is not None and ray.origin is not None
    schema = json.loads((Path(ray.origin).parent / "autoscaler" / "ray-schema.json").read_text())
    jsonschema.validate(documents("examples/ray_cluster.yaml")[0], schema)


def documents(name: str) -> list[Any]:
    return [*yaml.safe_load_all((ROOT / name).read_text(encoding="utf-8"))]
