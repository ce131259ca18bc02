"""RESULTS.md, later."""
from pathlib import Path
def write_page(results: Path, path: Path, images: Path) -> None:
    pass
