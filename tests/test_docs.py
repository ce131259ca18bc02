"""Pages of docs/: every one is in the site, and their links lead somewhere."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted(ROOT.glob("docs/*.md")), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]
ADDED = {"index.md", "api.md", "contributing.md", "changelog.md"}  # by scripts/site.py


def test_every_page_is_in_the_site() -> None:
    sections = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    nav = [page for one in sections for page in (next(iter(one.values())) if isinstance(one, dict) else [one])]
    assert sorted(nav) == sorted({path.name for path in ROOT.glob("docs/*.md")} | ADDED)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for link in re.findall(r"\]\((?!\w+:)([^)\s]+)\)", text):
        name, _, anchor = link.partition("#")
        to = page.parent / name if name else page
        assert to.exists(), link
        assert not anchor or anchor in anchors(to), link


def anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.M)
    named = set(re.findall(r'id="([^"]+)"', text))
    return named | {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}
