"""A hook, named in ``mkdocs.yml``: links to repository files outside docs/ become plain text.

Code hosts can follow such a link, the site cannot. A link to a missing file stays, so that
``mkdocs build --strict`` reports it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^\]\n]+)\]\((\.\./[^)#\s]+)(?:#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Remove the links that lead out of the documentation."""
    here = posixpath.dirname(page.file.src_uri)

    def plain(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(here, link[2]))
        outside = target.startswith("../") and (Path(config.docs_dir) / target).exists()
        return link[1] if outside else link[0]

    return _LINK.sub(plain, markdown)
