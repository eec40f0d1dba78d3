"""MkDocs hooks: the repository's own pages are pages of the site, and links follow.

Texts are written for the repository, where links go from file to file. Files of PAGES
are outside of docs/ and get a page. A file that has no page, as a record, is linked to
in the repository, if its address is known (`repo_url`), and else its path is shown. In
the search the reference comes first, and logs last.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks-log.md",
}
BOOSTS = {"reference/": 4.0, "changelog.md": 0.2, "benchmarks-log.md": 0.2}
SOURCES = {page: source for source, page in PAGES.items()}
LINK = re.compile(r"(?P<text>!?\[[^\]]*\])\((?P<path>[^)#:\s]+)(?P<anchor>#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in docs/."""
    for source, page in PAGES.items():
        path = str(ROOT / source)
        files.append(File.generated(config, page, abs_src_path=path))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Have links go from page to page, as they went from file to file."""
    here = page.file.src_uri
    source = SOURCES.get(here, f"docs/{here}")
    boosts = [boost for start, boost in BOOSTS.items() if here.startswith(start)]
    page.meta["search"] = {"boost": boosts[0] if boosts else 1.0}

    def follow(link: re.Match[str]) -> str:
        path = os.path.normpath(Path(source).parent / link["path"])
        if not (ROOT / path).exists():
            return link[0]  # for the strict build to complain about, or no link
        target = PAGES.get(path, path.removeprefix("docs/"))
        if path in PAGES or path.startswith("docs/"):
            start = os.path.dirname(here) or "."
            target = os.path.relpath(target, start)
            return f"{link['text']}({target}{link['anchor'] or ''})"
        if config["repo_url"]:
            return f"{link['text']}({config['repo_url'].rstrip('/')}/blob/main/{path})"
        text = link["text"][1:-1]
        return f"`{path}`" if text == path else f"{text} (`{path}`)"

    return LINK.sub(follow, markdown)
