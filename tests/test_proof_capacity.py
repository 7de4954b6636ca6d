"""Bases of known saturation: the script that makes and tunes them, and its block of the page."""

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


def run_of(base, plan, choose, report, wikitext):
    point = {"choose_nll": choose, "report_nll": report, "wikitext_nll": wikitext, "gsm8k_nll": 1.0}
    point_name = "base" if plan == "pretrained" else "tuned"
    return {
        "base": base,
        "plan": plan,
        "seed": 0,
        "parameters": 1000,
        "points": {point_name: point},
    }


def test_the_block_shows_each_base(tmp_path, monkeypatch):
    block = load("_proof_capacity")
    monkeypatch.setattr(block, "RESULTS", tmp_path)
    assert block.proof_capacity() == ""
    runs = [
        run_of(20, "pretrained", 3.0, 3.0, 2.0),
        # The half to choose on prefers × 1, the reported one × 3.
        run_of(20, "plain-x1", 2.0, 2.0, 4.0), run_of(20, "plain-x3", 2.1, 1.9, 8.0),
        run_of(20, "self-replay-x1", 2.2, 2.2, 2.0), run_of(20, "self-replay-x3", 2.1, 2.1, 2.5),
        run_of(20, "rehearsal-x1", 2.2, 2.2, 2.0),
        run_of(500, "pretrained", 3.0, 3.0, 1.0), run_of(500, "plain-x1", 2.5, 2.5, 4.0),
        run_of(500, "self-replay-x1", 2.5, 2.5, 2.0), run_of(500, "rehearsal-x1", 2.4, 2.4, 1.0),
    ]  # fmt: skip
    made = {"device": "CPU", "versions": {"torch": "2", "commit": "abc"}, "date": "2026-01-01"}
    runs.insert(1, run_of(20, "seen", 3.0, 3.0, 1.5) | {"points": {"base": {"wikitext_nll": 1.5}}})
    runs.append(run_of(900, "pretrained", 3.0, 3.0, 1.0))  # which nothing has tuned yet
    missing = ["900-plain-x1-s0"]
    record = {"protocol": {"updates": 300}, "made": [made], "missing": missing, "runs": runs}
    (tmp_path / "capacity.json").write_text(json.dumps(record))
    found = block.proof_capacity()
    assert "Models of one shape (1,000 parameters, whose tokens are bytes)" in found
    assert "learn Shakespeare in 300 updates" in found
    assert (
        "| 20 | 2.000 (1.500) | 1.000 (—) | 100.0 / 75.0 (× 1) | 90.0 / 90.0 (× 3) | "
        "80.0 / 100.0 (× 1) |" in found
    )
    assert (
        "| 500 | 1.000 (—) | 1.000 (—) | 100.0 / 62.5 (× 1) | 100.0 / 75.0 (× 1) | "
        "120.0 / 100.0 (× 1) |" in found
    )
    # Self-replay learns 90 % at its best on one base, and 100 % on the other.
    assert "Where 90 % is learned, as much as self-replay learns on all of them" in found
    assert (
        "- 20 tokens per parameter: plain fine-tuning 75.0 %, self-replay 90.0 %, rehearsal of the "
        "pretraining text 100.0 % (where it learns 80.0 %, its most)\n"
        "- 500 tokens per parameter: plain fine-tuning 62.5 %, self-replay 75.0 %, rehearsal of "
        "the pretraining text 100.0 %\n" in found
    )
    assert "In 5 of 6 cases it is the highest that was run." in found
    assert "| 20 | plain fine-tuning | × 3 | 110.0 | 62.5 | 1.900 | 8.000 | 1.000 |" in found
    assert "| 900 |" not in found
    record["missing"] = []
    (tmp_path / "capacity.json").write_text(json.dumps(record))
    assert "Missing runs" not in block.proof_capacity()
    assert "CPU; torch 2; 2026-01-01; commit abc. Missing runs: 900-plain-x1-s0." in found
