"""Every write and rename fails in turn: a full disk, an I/O error, a kill.

Afterwards the inputs are as they were, and the same command finishes with the undisturbed result.
The normal run takes a sample, the soak takes all of them.
"""

import hashlib
import json
import shutil

import pytest

pytest.importorskip("transformers", reason="the hf extra is not installed")
pytest.importorskip("cattrs", reason="the eval extra is not installed")
pytest.importorskip("optuna", reason="the cli extra is not installed")

from comparison.tiny import save_llama
from faults import Faults

if Faults.compiler is None:
    pytest.skip("needs Linux and a C compiler", allow_module_level=True)

ROWS = [{"prompt": "two plus two is", "completion": "four"}] * 4
TRAINING = ["--lr=1e-3", "--max-updates=2", "--batch-size=2"]
PLAN = [
    "--model=base", "--data=train.jsonl", "--target=train.jsonl", "--context-free=0", "--jobs=1",
    "--out=out", *TRAINING,
]  # fmt: skip
COMMANDS = {
    "finetune": [
        "--model=base", "--data=train.jsonl", "--recipe=standard", "--save-seconds=0", "--out=out",
        *TRAINING,
    ],
    "compare": [*PLAN, "--recipes", "standard", "--seeds", "0", "--save-seconds=0"],
    "tune": [*PLAN, "--recipe=recadam", "--trials=1"],
    "merge": ["base", "tuned", "--out=out"],
    "score": ["--model=base", "--data=train.jsonl", "--out=out", "--weighted=rows.jsonl"],
}  # fmt: skip
MODES = ("full", "error", "kill")
#: What differs from run to run, and pages that show it.
VOLATILE = {"seconds", "peak_memory", "at_a_time", "digest", "versions"}
UNLIKE = {"study.log", "report.html", "report.md", ".place"}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    for name in ("base", "tuned"):
        save_llama(folder / name)
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    return folder


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    server = Faults(tmp_path_factory.mktemp("faults"))
    yield server
    server.close()


def digests(place, names=None):
    files = (p for p in place.rglob("*") if p.is_file())
    found = {str(p.relative_to(place)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}
    return {name: digest for name, digest in found.items() if names is None or name in names}


def without_times(value):
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if k not in VOLATILE}
    return [without_times(v) for v in value] if isinstance(value, list) else value


def outcome(place):
    """The results of a command: all files that are no inputs, without what differs each time."""
    found = {}
    for path in sorted(p for p in place.rglob("*") if p.is_file() and not p.is_symlink()):
        name = str(path.relative_to(place))
        if path.name in UNLIKE:
            found[name] = None
        elif path.name in ("result.json", "results.json", "tune.json"):
            found[name] = without_times(json.loads(path.read_text()))
        else:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def undisturbed(name, inputs, faults, folder):
    """The number of writes and renames of a command, and its outcome."""
    place = folder / "undisturbed"
    shutil.copytree(inputs, place)
    status, count = faults.run(place, [name, *COMMANDS[name]])
    assert status == 0, faults.said()
    return count, outcome(place)


def check(name, mode, at, inputs, faults, folder, expected):
    place = folder / "place"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(inputs, place)
    before, given = digests(place), [name, *COMMANDS[name]]
    status, count = faults.run(place, given, mode, at)
    where = f"{name}, {mode} at {at}: status {status}\n{faults.said()}"
    assert count >= at, where
    assert "Traceback" not in faults.said(), where
    assert status == -9 if mode == "kill" else status in (0, 1, 2), where
    assert digests(place, before) == before, where
    again, _ = faults.run(place, given)
    done = "already contains a model" in faults.said() or "is not empty" in faults.said()
    assert again == 0 or done, f"{where}\nagain: {again}\n{faults.said()}"
    assert outcome(place) == expected, where


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["score", "merge", "finetune"])
def test_a_few(name, mode, inputs, faults, tmp_path):
    count, expected = undisturbed(name, inputs, faults, tmp_path)
    for at in sorted({1, count // 2, count}):
        check(name, mode, at, inputs, faults, tmp_path, expected)


@pytest.mark.soak
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", COMMANDS)
def test_all(name, mode, inputs, faults, tmp_path):
    count, expected = undisturbed(name, inputs, faults, tmp_path)
    for at in range(1, count + 1):
        check(name, mode, at, inputs, faults, tmp_path, expected)
