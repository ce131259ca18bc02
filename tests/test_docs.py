"""Pages of docs/: every one is in the site, links have targets, and the ledger names files and commands that exist."""

import re
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from saccade.cli import app
from scripts.feature_ledger import PAGE, STATES, rows, text

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted(ROOT.glob("docs/*.md")), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]
ADDED = {"index.md", "api.md", "contributing.md", "changelog.md"}  # by scripts/site.py


def test_every_page_is_in_the_site() -> None:
    sections = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    nav = [page for one in sections for page in (next(iter(one.values())) if isinstance(one, dict) else [one])]
    assert sorted(nav) == sorted({path.name for path in ROOT.glob("docs/*.md")} | ADDED)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    words = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for link in re.findall(r"\]\((?!\w+:)([^)\s]+)\)", words):
        name, _, anchor = link.partition("#")
        to = page.parent / name if name else page
        assert to.exists(), link
        assert not anchor or anchor in anchors(to), link


def anchors(page: Path) -> set[str]:
    words = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", words, flags=re.M)
    named = set(re.findall(r'id="([^"]+)"', words))
    return named | {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def test_the_ledger_of_features_names_what_there_is() -> None:
    table, commands = rows(), get_command(app).commands  # type: ignore[attr-defined]
    assert [*table] == [f"F-{number:03}" for number in range(1, 123)]
    for name, (state, _, shown, missing) in table.items():
        assert state in STATES and bool(missing) == (state != "works") and bool(shown) == (state != "missing"), name
        assert missing.startswith(("needs ", "not built: ")) or not missing, name
        for one in shown:
            first, *words = one.split()
            files = [word for word in words if word.startswith("configs/")] if words else [first]
            assert all((ROOT / file).is_file() for file in files), f"{name}: {one}"
            flags = {word for word in words if word.startswith("--")} - {"--help"}
            known = {flag for option in commands[words[0]].params for flag in option.opts} if words else set()
            assert flags <= known and first == ("saccade" if words else one), f"{name}: {one}"
    assert PAGE.read_text(encoding="utf-8") == text(), "run: make docs"
