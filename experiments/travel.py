"""To a GPU machine without a network, where each transfer is limited: files, and wheels of the packages that are not
there, as pieces; and the results of all experiments back, as one archive.

    python experiments/travel.py pack OUT MODEL.gguf data/gsm8k        # here: OUT/piece-000, piece-001, … and their sum
    python experiments/travel.py unpack OUT there                      # there, once all pieces have arrived
    export PYTHONPATH=there/packages                                   # there; files are in there/files
    python experiments/travel.py results results.tar.gz                # there
    python experiments/travel.py take results.tar.gz                   # here: into the source tree
"""

import argparse
import hashlib
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MIB, READ = 1 << 20, 1 << 24
# Groups of what pip resolves together. `gguf` comes alone: what it needs is there with transformers and torch.
PACKAGES, ALONE = ("pydantic",), ("gguf",)
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux2014_x86_64")
RESULTS = ("experiments/*/results", "experiments/*/RESULTS.md", "docs/images/*.svg", "docs/results.md")


def download(folder: Path, python: str) -> None:
    """Wheels for a Python of this version, in the versions of constraints.txt."""
    command = [sys.executable, "-m", "pip", "download", "-q", "-d", folder, "--only-binary=:all:"]
    command += ["--python-version", python, *(f"--platform={name}" for name in PLATFORMS)]
    command += ["-c", ROOT / "constraints.txt"]
    for names in (PACKAGES, ("--no-deps", *ALONE)):
        subprocess.run([*map(str, command), *names], check=True)


def pack(out: Path, paths: list[Path], *, python: str, mib: int, wheels: bool = True) -> list[Path]:
    """Pieces of one archive: the files and folders in `files/`, the wheels in `wheels/`."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("piece-*"):
        old.unlink()
    with tempfile.TemporaryDirectory(dir=out) as scratch:
        if wheels:
            download(Path(scratch), python)
        archive = Path(scratch) / "all.tar.gz"
        with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
            for wheel in sorted(Path(scratch).glob("*.whl")):
                tar.add(wheel, f"wheels/{wheel.name}")
            for path in paths:
                tar.add(path.resolve(), f"files/{path.resolve().name}")
        with archive.open("rb") as whole:
            for number, content in enumerate(iter(lambda: whole.read(mib * MIB), b"")):
                (out / f"piece-{number:03d}").write_bytes(content)
    pieces = sorted(out.glob("piece-*"))
    (out / "sum").write_text(f"{digest(pieces)} {len(pieces)}\n")
    return pieces


def digest(pieces: list[Path]) -> str:
    found = hashlib.sha256()
    for piece in pieces:
        with piece.open("rb") as content:
            while part := content.read(READ):
                found.update(part)
    return found.hexdigest()


def unpack(out: Path, to: Path) -> Path:
    """Join the pieces; files in TO/files, packages importable from TO/packages."""
    wanted, count = (out / "sum").read_text().split()
    pieces = sorted(out.glob("piece-*"))
    if len(pieces) != int(count) or digest(pieces) != wanted:
        sys.exit(f"{out}: {len(pieces)} of {count} pieces, or one is damaged; send them again")
    with tempfile.TemporaryFile() as whole:
        for piece in pieces:
            whole.write(piece.read_bytes())
        whole.seek(0)
        with tarfile.open(fileobj=whole) as tar:
            tar.extractall(to, filter="data")
    for wheel in sorted(to.glob("wheels/*.whl")):
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(to / "packages")
    return to / "packages"


def results(file: Path, root: Path = ROOT) -> list[str]:
    """What experiments have found, as one archive; returns the names in it."""
    names = sorted(str(path.relative_to(root)) for pattern in RESULTS for path in root.glob(pattern))
    with tarfile.open(file, "w:gz") as tar:
        for name in names:
            tar.add(root / name, name)
    return names


def take(file: Path, root: Path = ROOT) -> None:
    with tarfile.open(file) as tar:
        tar.extractall(root, filter="data")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=("pack", "unpack", "results", "take"))
    parser.add_argument("paths", type=Path, nargs="+")
    parser.add_argument("--python", default="3.12", help="version of Python on that machine")
    parser.add_argument("--mib", type=int, default=50, help="of a piece, at most")
    parser.add_argument("--no-wheels", action="store_true", help="files alone")
    args = parser.parse_args()
    first, *rest = args.paths
    if args.work == "pack":
        for piece in pack(first, rest, python=args.python, mib=args.mib, wheels=not args.no_wheels):
            print(f"{piece}  {piece.stat().st_size / MIB:.1f} MiB")
    elif args.work == "unpack":
        print(f"export PYTHONPATH={unpack(first, *rest).resolve()}")
    elif args.work == "results":
        print(f"{first}: {len(results(first))} files and folders")
    else:
        take(first)


if __name__ == "__main__":
    main()
