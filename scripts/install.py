"""Make .venv with saccade in it. Needs only an interpreter with the venv module.

If the interpreter already has torch and transformers, .venv uses ("borrows") its packages through a
.pth file, and only missing ones are installed. (`--system-site-packages` would not do: for a venv
made from a venv it means the base interpreter.) Otherwise .venv gets the versions of
constraints.txt.

    python scripts/install.py --extra test
"""

import argparse
import os
import subprocess
import sys
import sysconfig
import venv
from contextlib import suppress
from importlib import metadata, util
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
SITE = Path(sysconfig.get_path("purelib", "posix_prefix", {"base": str(VENV), "platbase": str(VENV)}))
LENT = SITE / "lent-packages.pth"
SOURCE = SITE / "saccade-source.pth"
FOUNDATION = {"torch", "transformers"}


def main():
    if sys.version_info < (3, 10):  # noqa: UP036
        sys.exit("saccade needs Python 3.10 or newer; try: make install PYTHON=python3.11")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--extra", action="append", default=[], help="extra of pyproject.toml")
    extras = parser.parse_args().extra
    if Path(sys.prefix).resolve() != VENV.resolve():
        create()
        os.execv(str(PYTHON), [str(PYTHON), *sys.argv])
    install(extras)
    for name in ["", *(f"-{extra}" for extra in extras)]:
        (VENV / f".installed{name}").touch()
    print(f"saccade is ready: {VENV.name}/bin/saccade --help")


def create():
    if not PYTHON.exists() or not SITE.is_dir():
        venv.create(VENV, with_pip=True, clear=VENV.exists())
    if all(util.find_spec(name) for name in FOUNDATION):
        bare = subprocess.check_output(
            [sys.executable, "-S", "-c", "import sys; print(*sys.path, sep='\\n')"], text=True
        ).splitlines()
        # The first entry of our own path is the folder of this script.
        folders = [folder for folder in sys.path[1:] if folder not in bare]
        LENT.write_text("".join(f"{folder}\n" for folder in folders))


def install(extras):
    missing = missing_requirements(extras)
    if LENT.exists() and FOUNDATION & {item.name for item in missing}:
        print("the active interpreter's torch or transformers does not fit; installing our own")
        LENT.unlink()
        os.execv(str(PYTHON), [str(PYTHON), *sys.argv])
    if not LENT.exists():
        target = f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT)
        pip("-c", str(ROOT / "constraints.txt"), "-e", target)
        return
    if missing:
        pip("-c", str(lent_constraints()), *map(str, missing))
    SOURCE.write_text(f"{ROOT}\n")
    script = VENV / "bin" / "saccade"
    script.write_text(f"#!{PYTHON}\nfrom saccade.cli import main\n\nif __name__ == '__main__':\n    main()\n")
    script.chmod(0o755)


def pip(*arguments):
    subprocess.run([str(PYTHON), "-m", "pip", "install", *arguments], check=True)


def missing_requirements(extras):
    """Requirements of the package and these extras that no importable package satisfies."""
    from pip._vendor.packaging.requirements import Requirement

    project = read_toml(ROOT / "pyproject.toml")["project"]
    waiting = list(project["dependencies"])
    for extra in extras:
        waiting += project["optional-dependencies"][extra]
    missing = []
    while waiting:
        item = Requirement(waiting.pop(0))
        if item.name == project["name"]:
            for extra in sorted(item.extras):
                waiting += project["optional-dependencies"][extra]
        elif (item.marker is None or item.marker.evaluate()) and not satisfied(item):
            missing.append(item)
    return missing


def satisfied(item):
    try:
        return item.specifier.contains(metadata.version(item.name), prereleases=True)
    except metadata.PackageNotFoundError:
        return False


def lent_constraints():
    """Write constraints.txt with the versions of borrowed packages, so that none is installed again."""
    from pip._vendor.packaging.requirements import Requirement

    lines = []
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name = Requirement(line).name
            with suppress(metadata.PackageNotFoundError):
                line = f"{name}=={metadata.version(name)}"
            lines.append(line)
    path = VENV / "constraints-lent.txt"
    path.write_text("\n".join(lines) + "\n")
    return path


def read_toml(path):
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        from pip._vendor import tomli as tomllib
    return tomllib.loads(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
