"""Hooks by which mkdocs builds the site from files that stay readable in the repository.

README.md is the site's first page. Pages of docs/ link to files beside docs/, such as
``../benchmarks/results/README.md``; these files, and what they link to in turn, become part of the
site under the same names, so that each link leads to the same place in the repository and on the
site.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
DOCS = "docs"

LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)")
"""The target of a markdown link or image to another file, without its anchor."""


def site_path(path: str) -> str:
    """Path on the site of a file of the repository."""
    return "index.md" if path == "README.md" else path.removeprefix(f"{DOCS}/")


def targets(path: str) -> Iterator[str]:
    """Return the targets of the links of a markdown file, as paths in the repository."""
    for target in LINK.findall((ROOT / path).read_text(encoding="utf-8")):
        yield os.path.normpath(os.path.join(os.path.dirname(path), target))


def linked() -> set[str]:
    """README.md, and all files that it leads to and that are not in docs/."""
    pages, todo = set(), {"README.md", *(f"{DOCS}/{page.name}" for page in
                                         (ROOT / DOCS).glob("*.md"))}
    while todo:
        path = todo.pop()
        pages.add(path)
        if path.endswith(".md"):
            todo |= {target for target in targets(path) if (ROOT / target).is_file()} - pages
    return {path for path in pages if not path.startswith(f"{DOCS}/")}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files from outside of docs/."""
    for path in sorted(linked()):
        files.append(File.generated(config, site_path(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:
    """Turn each link into the one that leads to the same file on the site."""
    page_path = page.file.src_uri
    source = "README.md" if page_path == "index.md" else (
        page_path if (ROOT / page_path).is_file() else f"{DOCS}/{page_path}")

    def moved(match: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join(os.path.dirname(source), match[1]))
        return os.path.relpath(site_path(target), os.path.dirname(page_path) or ".")

    return LINK.sub(moved, markdown)
