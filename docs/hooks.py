"""What the site does for links that leave docs/: every file they lead to gets a place under `repository/`.

Pages link to examples and the like as files of the repository, which is what a reader on a forge or in an editor
follows. The site shows those files too, so that `mkdocs build --strict` checks every link, whichever way it goes.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
OUTSIDE = "repository/"
LINK = re.compile(r"(?<=\]\()(?!https?:|#)[^)#\s]+")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the files outside docs/ that pages link to; those that such files link to in turn are not followed."""
    pages = [DOCS / each.src_uri for each in files.documentation_pages()]
    targets = {(page.parent / link).resolve() for page in pages for link in LINK.findall(page.read_text())}
    for target in sorted(targets):
        if target.is_file() and target.is_relative_to(ROOT) and not target.is_relative_to(DOCS):
            files.append(
                File.generated(config, _uri(target), content=_shown(target), inclusion=InclusionLevel.NOT_IN_NAV)
            )
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links between files of the repository become links between their places in the site."""
    uri = page.file.src_uri
    source = ROOT / uri.removeprefix(OUTSIDE) if uri.startswith(OUTSIDE) else DOCS / uri

    def moved(link: re.Match[str]) -> str:
        target = (source.parent / link[0]).resolve()
        if not target.is_file() or not target.is_relative_to(ROOT):
            return link[0]  # mkdocs says that it leads nowhere
        return posixpath.relpath(_uri(target), posixpath.dirname(uri))

    return LINK.sub(moved, markdown)


def _uri(target: Path) -> str:
    """Where the site has `target`; a script gets a page around it."""
    if target.is_relative_to(DOCS):
        return target.relative_to(DOCS).as_posix()
    return OUTSIDE + target.relative_to(ROOT).as_posix() + (".md" if target.suffix == ".py" else "")


def _shown(target: Path) -> str:
    text = target.read_text()
    return f"# {target.relative_to(ROOT)}\n\n````python\n{text}````\n" if target.suffix == ".py" else text
