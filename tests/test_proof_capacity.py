"""Bases of known saturation: the script that makes and tunes them."""

import doctest
import gzip
import json

import pytest

from proof_runs import load

pytestmark = pytest.mark.usefixtures("proof_scripts")


@pytest.fixture
def data(tmp_path):
    """Texts that are long enough for a row."""
    folder = tmp_path / "data" / "lm"
    folder.mkdir(parents=True)
    row = json.dumps({"question": "What is 1 + 1? " * 20, "answer": "2"})
    for name in ("wikitext2-valid", "wikitext2-test", "tinyshakespeare"):
        (folder / f"{name}.txt.gz").write_bytes(gzip.compress(f"{name} says so. ".encode() * 500))
    for name in ("gsm8k-train", "gsm8k-test"):
        (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress(f"{row}\n{row}".encode()))
    return folder.parent


def test_every_method_tunes_the_base_of_its_saturation(data, tmp_path, monkeypatch):
    capacity = load("capacity")
    assert doctest.testmod(capacity).failed == 0
    monkeypatch.setattr(capacity, "RATES", (0.5,))
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
    options = ["--data", data, "--runs", tmp_path / "runs", "--bases", 1, 2, "--seeds", 0,
               "--hidden", 32, "--updates", 2, "--tested", 600]  # fmt: skip
    monkeypatch.setattr("sys.argv", ["capacity.py", *map(str, options)])
    with pytest.raises(SystemExit, match="0"):
        capacity.main()
    out = tmp_path / "capacity.json"
    monkeypatch.setattr("sys.argv", ["", *map(str, options), "--collect", str(out)])
    capacity.main()
    found = json.loads(out.read_text())
    assert found["missing"] == []
    first, second = (
        {run["plan"]: run for run in found["runs"] if run["base"] == base} for base in (1, 2)
    )
    assert [*first] == ["pretrained", "seen", "plain-x0.5", "self-replay-x0.5", "rehearsal-x0.5"]
    # Twice the tokens are twice the updates, and each base is tuned from its own weights.
    assert second["pretrained"]["updates"] == 2 * first["pretrained"]["updates"]
    for runs in (first, second):
        base = runs["pretrained"]["points"]["base"]
        losses = [runs[plan]["points"]["tuned"]["report_nll"] for plan in [*runs][2:]]
        assert len(set(losses)) == 3
        assert max(losses) < base["report_nll"]
    assert len({str(run["points"]) for run in found["runs"]}) == len(found["runs"])
