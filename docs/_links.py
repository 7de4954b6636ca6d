"""Links to files of the repository that are no pages: a hook, named in ``mkdocs.yml``.

On a code host they lead to the file. The site does not have it, so they become plain text there;
a link to a file that does not exist stays, and ``strict`` complains.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^\]\n]+)\]\((\.\./[^)#\s]+)(?:#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Take away the links that lead out of the documentation."""
    root = Path(config.docs_dir)
    here = posixpath.dirname(page.file.src_uri)

    def plain(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(here, link[2]))
        outside = target.startswith("../") and (root / target).exists()
        return link[1] if outside else link[0]

    return _LINK.sub(plain, markdown)
