"""Several processes of one command, started by torchrun or ``accelerate launch``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from holdfast._torch.imports import require

if TYPE_CHECKING:
    import torch


def is_launched() -> bool:
    """Whether a launcher started this process together with others."""
    return int(os.environ.get("WORLD_SIZE") or 1) > 1


def is_first() -> bool:
    """Whether this process is the one that writes and prints; one alone always is."""
    return not is_launched() or os.environ.get("RANK", "0") == "0"


@contextlib.contextmanager
def joined() -> Iterator[torch.device | None]:
    """Join the other processes, if there are any; yields the device of this one.

    Only the first process prints. If some fail, only the first of them says why: the others fail
    as a consequence, or for the same reason.
    """
    if not is_launched():
        yield None
        return
    import torch

    accelerate = require("accelerate", extra="hf", what="Training in several processes")
    # Every process needs the pretrained weights before they are sharded.
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    asked = os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true"
    on_cpu = asked or not torch.cuda.is_available()
    state = accelerate.PartialState(cpu=on_cpu)
    try:
        with _quiet_unless(is_first()):
            yield state.device
    except (Exception, KeyboardInterrupt) as error:
        if not _fails_first():
            raise SystemExit(1) from error
        raise
    state.destroy_process_group()


@contextlib.contextmanager
def _quiet_unless(speaks: bool) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if not speaks:
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        yield


def _fails_first() -> bool:
    """Whether no other process has failed yet. The launcher counts, so it outlives this process."""
    import torch

    with contextlib.suppress(Exception):  # the launcher has ended
        store = torch.distributed.distributed_c10d._get_default_store()
        return bool(store.add("holdfast/failed", 1) == 1)
    return True
