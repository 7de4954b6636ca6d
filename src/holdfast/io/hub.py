"""Whether the Hugging Face hub can be asked at all: its own clients try for minutes."""

from __future__ import annotations

import os
import re
import socket
from functools import lru_cache
from urllib.parse import urlsplit

__all__ = ["check_hub"]

_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def check_hub(name: str, kind: str) -> None:
    """Raise OSError if a name is neither in the hub's cache here nor can the hub be reached.

    Args:
        name: of a model or dataset, which is no path on this machine.
        kind: ``"model"`` or ``"dataset"``.
    """
    if not _NAME.fullmatch(name) or _is_cached(name, kind) or _reached():
        return
    raise OSError(
        f"there is no file or folder {name} here, and the hub, where a {kind} of that name might "
        "be, cannot be reached"
    )


def _is_cached(name: str, kind: str) -> bool:
    try:
        from huggingface_hub import constants
    except ImportError:
        return True  # whoever loads it says what is missing
    if constants.HF_HUB_OFFLINE:
        return True  # then its clients do not try
    if kind == "dataset":  # datasets keeps a cache of its own
        return False
    return os.path.isdir(
        os.path.join(constants.HF_HUB_CACHE, f"{kind}s--{name.replace('/', '--')}")
    )


@lru_cache(maxsize=1)
def _reached() -> bool:
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY")):
        return True  # a proxy may reach it
    address = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), timeout=5).close()
    except OSError:
        return False
    return True
