"""A quick check that a name can be loaded from the Hugging Face hub.

Without a connection the hub's own clients retry for minutes before they give up.
"""

from __future__ import annotations

import re
from functools import lru_cache

__all__ = ["check_hub"]

_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def check_hub(name: str, kind: str) -> None:
    """Raise OSError if a name is neither in the local hub cache nor can the hub be reached.

    Args:
        name: the name of a model or dataset that is not a local path.
        kind: ``"model"`` or ``"dataset"``.
    """
    if not _NAME.fullmatch(name) or _is_cached(name, kind) or _is_reachable():
        return
    raise OSError(
        f"there is no local file or folder {name}, and the Hugging Face hub, which may have a "
        f"{kind} of that name, cannot be reached"
    )


def _is_cached(name: str, kind: str) -> bool:
    try:
        from huggingface_hub import constants, snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError:
        return True  # the loader names the missing package
    if constants.HF_HUB_OFFLINE:
        return True  # the clients do not retry
    if kind == "dataset":  # datasets keeps its own cache
        return False
    try:
        snapshot_download(name, local_files_only=True)
    except (HFValidationError, LocalEntryNotFoundError):
        return False
    return True


@lru_cache(maxsize=1)
def _is_reachable() -> bool:
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=5)
    except Exception:  # the session's own types differ between versions (requests, httpx)
        return False
    return True
