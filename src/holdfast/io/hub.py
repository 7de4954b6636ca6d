"""Names of the Hugging Face hub: whether one can be loaded, without waiting for a dead network."""

import re
from functools import lru_cache
from pathlib import Path

_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def is_hub_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def check_hub(name: str, kind: str) -> bool:
    """Return whether the hub may be asked for a model or dataset; else a cached one is read.

    Raise OSError if it is not cached and the hub cannot be reached.
    """
    # Without a connection the hub's own clients retry for minutes before they give up.
    if not is_hub_name(name) or _is_reachable():
        return True
    if not _is_cached(name, kind):
        raise OSError(
            f"{name} is not a local file or directory, and the Hugging Face Hub could not be "
            f"reached to look for a {kind} of that name"
        )
    return False


def is_cached_model(name: str) -> bool:
    """Return whether a name is that of a model of the hub, which was loaded from it before."""
    if not is_hub_name(name) or Path(name).exists():
        return False
    try:
        from huggingface_hub import try_to_load_from_cache

        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except (ImportError, ValueError):  # HFValidationError: the hub allows fewer names
        return False


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
    try:
        from huggingface_hub import constants, get_session
    except ImportError:
        return False
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=5)
    except Exception:  # the session's own types differ between versions (requests, httpx)
        return False
    return True
