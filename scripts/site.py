"""Hooks of the documentation site (mkdocs.yml): pages that are not in docs/.

README, CONTRIBUTING and CHANGELOG become pages; so does every file or folder of the source tree that a page
links to, under source/. Links in docs/ stay as they work in a checkout.

    make site
"""

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
MOVED = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
API = "# Python API\n\n::: saccade\n\n::: saccade.types\n\n::: saccade.rewards.reward_sample\n"
LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)([^)#\s]+)")
UNSEARCHED = "---\nsearch: {exclude: true}\n---\n"
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".jinja": "jinja", ".toml": "toml", ".jsonl": "json"}


def on_files(files, config):
    pages = {page: (ROOT / name).read_text(encoding="utf-8") for name, page in MOVED.items()}
    texts = [(file.src_uri, file.content_string) for file in files.documentation_pages()]
    linked = {to for page, text in texts for to in targets(page, text)}
    linked |= {to for name in MOVED for to in targets("../" + name, pages[MOVED[name]])}
    for path in sorted(linked):
        pages |= source_pages(path)
    for page, text in (pages | {"api.md": API}).items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    """Point links out of docs/ to the generated pages."""
    name = page.file.src_uri
    if name.startswith("source/") or name == "api.md":
        return markdown
    was = next((f"../{old}" for old, new in MOVED.items() if new == name), name)

    def moved(link):
        to = resolved(was, link[1])
        return posixpath.relpath(moved_to(to), posixpath.dirname(name) or ".") if to.startswith("../") else to

    return LINK.sub(moved, markdown)


def targets(page, text):
    """Paths of files and folders of the source tree that a page links to."""
    outside = [to for link in LINK.findall(text) if (to := resolved(page, link)).startswith("../")]
    return {to.removeprefix("../") for to in outside} - MOVED.keys()


def resolved(page, link):
    to = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    return to.removeprefix("../docs/")  # a page of docs/


def moved_to(to):
    path = to.removeprefix("../")
    return MOVED.get(path) or f"source/{path}" + ("/index.md" if (ROOT / path).is_dir() else ".md")


def source_pages(path):
    """The pages of a file, by address; for a folder, a page that lists its files, and their pages."""
    file = ROOT / path
    if not file.is_dir():
        text = file.read_text(encoding="utf-8")
        return {
            f"source/{path}.md": f"{UNSEARCHED}# {path}\n\n````{LANGUAGES.get(file.suffix, 'text')}\n{text}\n````\n"
        }
    inside = [one for one in sorted(file.iterdir()) if one.suffix in LANGUAGES]
    rows = "".join(f"- [{one.name}]({one.name}.md)\n" for one in inside)
    pages = {f"source/{path}/index.md": f"{UNSEARCHED}# {path}\n\n{rows}"}
    for one in inside:
        pages |= source_pages(f"{path}/{one.name}")
    return pages
