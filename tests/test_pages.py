"""What the pages say is what was measured, and what they show runs."""

import copy
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("script", ["pages.py", "performance.py", "papers/page.py"])
def test_the_pages_tables_are_the_committed_results(script):
    script = ROOT / "benchmarks" / script
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.returncode == 0


def test_the_readmes_links_lead_to_files():
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)", (ROOT / "README.md").read_text("utf-8"))
    assert len(links) > 20
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize(("times", "said"), [(1.35, "met"), (1.4, "missed"), (None, "not meas")])
def test_what_is_said_of_a_target_follows_its_figure(times, said, tmp_path):
    record = json.loads((ROOT / "benchmarks/results/recadam_step_cpu.json").read_text())
    for row in record["rows"]:
        row["x_fused_adamw"] = times
    (tmp_path / "recadam_step_cpu.json").write_text(json.dumps(record))
    script, page = ROOT / "benchmarks" / "performance.py", tmp_path / "page.md"
    subprocess.run([sys.executable, script, "--results", tmp_path, "--out", page], check=True)
    text = page.read_text(encoding="utf-8")
    (line,) = re.findall(r"\| RecAdam on a CPU.*", text)
    assert said in line
    assert ("Why the step on a CPU misses" in text) == (said == "missed")


def test_the_readmes_first_examples_run(monkeypatch, tmp_path):
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    datasets = pytest.importorskip("datasets", reason="the hf extra is not installed")
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path))
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    rows = [{"input_ids": [1, 2, i], "labels": [1, 2, i]} for i in range(3, 9)]
    dataset = datasets.Dataset.from_list(rows)
    batch = dataset.with_format("torch")[:]
    names = {"model": model, "loader": [batch] * 3, "total_steps": 3, "dataset": dataset}
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    exec(blocks[0], names | {"model": copy.deepcopy(model)})
    for block in blocks[1:3]:
        exec(block, names)
    assert names["optimizer"].recall_state()["updates"] == 3
    assert "weight" in names["dataset"].column_names
    monkeypatch.chdir(tmp_path)
    host = next(block for block in blocks if "HoldfastTrainer" in block)
    args = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    exec(host, names | {"args": args, "dataset": datasets.Dataset.from_list(rows)})


def test_the_readmes_measuring_examples_run(monkeypatch, tmp_path):
    pytest.importorskip("transformers", reason="the hf extra is not installed")
    pytest.importorskip("plotly", reason="the eval extra is not installed")
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "forgetting"))
    monkeypatch.chdir(tmp_path)
    from small import make_llama, make_tokenizer, noisy, save

    model, tokenizer = make_llama(), make_tokenizer()
    save(model, tmp_path / "base", tokenizer), save(noisy(model), tmp_path / "tuned", tokenizer)
    (tmp_path / "wiki.txt").write_text("the cat sat on the mat . " * 9)
    (tmp_path / "gsm8k.jsonl").write_text('{"question": "two plus two is", "answer": "four"}\n')
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    exec(next(block for block in blocks if "holdfast.measure" in block), {})
    assert (tmp_path / "report.html").stat().st_size > 1e6


@pytest.mark.parametrize(
    "arguments",
    [
        ["digits.py", "--seeds", "0"],
        ["flow_linear.py"],
        ["hf_trainer.py", "--updates", "40"],
        ["trl_sft.py", "--updates", "10", "--pretraining", "20"],
        ["lightning_digits.py"],
        ["accelerate_loop.py"],
    ],
    ids=lambda a: a[0],
)
def test_examples_run(arguments, tmp_path):
    pytest.importorskip("sklearn", reason="the demo extra is not installed")
    script, *options = arguments
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / script, *options],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    *_, last = done.stdout.splitlines()
    if script not in ("digits.py", "flow_linear.py"):
        assert re.match(r"retained: before [\d.]+ %, after [\d.]+ % \(standard [\d.]+ %\)", last)
