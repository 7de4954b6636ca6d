"""A small language model and its data, to try holdfast without downloads.

The model is a Llama of two million parameters, pretrained on prose, verse and code. The data are
math problems to fine-tune it on, and unseen text of the three kinds. README.md names the sources.

Wherever a model, data or texts are given by name, ``builtin`` stands for them: the model, the
training problems, or the three texts; ``builtin:dev`` stands for the test problems.
"""

import functools
import logging
import os
from pathlib import Path
from typing import Literal

logger = logging.getLogger(__name__)

_HERE = Path(__file__).parent

#: The folder of the model and its tokenizer.
MODEL = _HERE / "model"

#: Problems to learn and problems for the test, with ``question`` and ``answer``.
TRAIN, DEV = _HERE / "gsm8k-train.jsonl.gz", _HERE / "gsm8k-dev.jsonl.gz"

#: Text of each kind that the model was pretrained on, by name.
RETAINED = {kind: _HERE / f"{kind}.txt.gz" for kind in ("prose", "verse", "code")}

NAME = "builtin"
_PATHS = {
    "model": {NAME: [MODEL]},
    "data": {NAME: [TRAIN], f"{NAME}:dev": [DEV]},
    "text": {NAME: [*RETAINED.values()]},
}


def located(source: str | os.PathLike[str], kind: Literal["data", "text"] = "data") -> list[str]:
    """Return the paths that the name of data or texts stands for; any other name as it is.

    A local file or directory named ``builtin`` takes precedence, as over names of the hub.

    >>> [Path(path).name for path in located("builtin", "text")], located("prose.txt", "text")
    (['prose.txt.gz', 'verse.txt.gz', 'code.txt.gz'], ['prose.txt'])
    """
    return _located(os.fspath(source), kind)


def located_model(source: str | os.PathLike[str]) -> str:
    """Return the path that the name of a model stands for; any other name as it is.

    >>> Path(located_model("builtin")).name, located_model("gpt2")
    ('model', 'gpt2')
    """
    (path,) = _located(os.fspath(source), "model")
    return path


def _located(name: str, kind: str) -> list[str]:
    ours = _PATHS[kind]
    if name.partition(":")[0] != NAME:
        return [name]
    if os.path.exists(NAME):
        if name in ours:
            _note_local(os.path.abspath(NAME))
        return [name]
    if name not in ours:
        raise FileNotFoundError(f"no {kind} named {name}: choose {' or '.join(ours)}")
    return [str(path) for path in ours[name]]


@functools.cache
def _note_local(path: str) -> None:
    logger.warning(
        f"the local {path} is used, not the {NAME} that comes with holdfast: to use that one, "
        "rename yours, or work in another directory"
    )
