"""A hook, named in ``mkdocs.yml``: links to files of the repository, and figures in tables.

On a code host links to files that are no pages lead to the file. The site does not have it, so they
become plain text there; a link to a file that does not exist stays, and ``strict`` complains.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^\]\n]+)\]\((\.\./[^)#\s]+)(?:#[^)\s]*)?\)")
_PER_CENT = re.compile(r"(<td[^>]*>[-+±\d., to()]*\d) %")


def on_page_content(html: str, **_: Any) -> str:
    """Keep a figure and its per cent sign on one line of a table."""
    return _PER_CENT.sub(r"\1&nbsp;%", html)


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Take away the links that lead out of the documentation."""
    root = Path(config.docs_dir)
    here = posixpath.dirname(page.file.src_uri)

    def plain(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(here, link[2]))
        outside = target.startswith("../") and (root / target).exists()
        return link[1] if outside else link[0]

    return _LINK.sub(plain, markdown)
