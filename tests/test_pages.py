"""The tables of the pages match the committed results, and the README's examples run."""

import copy
import re
import subprocess
import sys
from pathlib import Path

import pytest

from small import make_tokenizer

ROOT = Path(__file__).parents[1]


def test_the_tables_of_the_pages_match_the_committed_results(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import pages

    texts = {page: page.read_text(encoding="utf-8") for page in pages.PAGES}
    blocks = [block for text in texts.values() for block in pages.BLOCK.findall(text)]
    assert len(blocks) > 30
    assert {name for _, name, *_ in blocks} == set(pages.TABLES)
    stale = [page.name for page, text in texts.items() if pages.filled(text) != text]
    assert stale == [], "run python benchmarks/pages.py"
    assert pages.pictures.stale() == []


def test_the_readmes_links_lead_to_files():
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)", (ROOT / "README.md").read_text("utf-8"))
    assert len(links) > 20
    assert [link for link in links if not (ROOT / link).exists()] == []


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
    names["tokenizer"] = make_tokenizer()
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    for block in blocks[:2]:
        exec(block, names | {"model": copy.deepcopy(model)})
    for block in blocks[2:4]:
        exec(block, names)
    assert names["optimizer"].recall_state()["updates"] == 3
    assert "weight" in names["dataset"].column_names
    monkeypatch.chdir(tmp_path)
    host = next(block for block in blocks if "HoldfastTrainer" in block)
    args = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    exec(host, names | {"args": args, "dataset": datasets.Dataset.from_list(rows)})


def test_the_readmes_measuring_examples_run(monkeypatch, tmp_path):
    pytest.importorskip("transformers", reason="the hf extra is not installed")
    pytest.importorskip("cattrs", reason="the eval extra is not installed")
    monkeypatch.chdir(tmp_path)
    from small import make_llama, noisy, save

    model, tokenizer = make_llama(), make_tokenizer()
    save(model, tmp_path / "base", tokenizer), save(noisy(model), tmp_path / "tuned", tokenizer)
    (tmp_path / "wiki.txt").write_text("the cat sat on the mat . " * 9)
    (tmp_path / "gsm8k.jsonl").write_text('{"question": "two plus two is", "answer": "four"}\n')
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    exec(next(block for block in blocks if "holdfast.measure" in block), {})
    assert (tmp_path / "report.html").stat().st_size > 5e5


@pytest.mark.soak
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
