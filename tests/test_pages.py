"""The tables of the pages match the committed results, and the README's examples run."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.cli import main
from small import make_llama, make_tokenizer, noisy, save

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_tables_of_the_pages_match_the_committed_results(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import pages

    texts = [page.read_text(encoding="utf-8") for page in pages.PAGES]
    blocks = [block for text in texts for block in pages.BLOCK.findall(text)]
    assert len(blocks) > 30
    assert {name for _, name, *_ in blocks} == set(pages.TABLES)
    assert pages.stale() == [], "run python benchmarks/pages.py"


def test_the_readmes_links_lead_to_files():
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)", (ROOT / "README.md").read_text("utf-8"))
    assert len(links) > 20
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.filterwarnings("ignore")  # the frameworks' own, which differ by release
def test_the_readmes_examples_run_as_they_are_pasted(monkeypatch, tmp_path):
    for package in ("transformers", "peft", "accelerate", "jinja2"):
        pytest.importorskip(package, reason=f"{package} of an extra is not installed")
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        exec(block, names)
    assert (tmp_path / "report.html").exists()
    assert "weight" in names["weighted"][0]


def commands_of(text):
    """The commands of holdfast in the shell blocks, as words."""
    blocks = "".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ")
    lines = (line.partition("#")[0] for line in blocks.splitlines())
    return [shlex.split(line)[1:] for line in lines if line.startswith("holdfast ")]


@pytest.fixture
def files(monkeypatch, tmp_path):
    """The files that the README's commands name."""
    pytest.importorskip("transformers", reason="the hf extra is not installed")
    pytest.importorskip("cattrs", reason="the eval extra is not installed")
    monkeypatch.chdir(tmp_path)
    save(make_llama(), "base", make_tokenizer())
    save(noisy(make_llama()), "tuned", make_tokenizer())
    Path("wiki.txt").write_text("the cat sat on the mat . " * 9)
    for name in ("train", "dev"):
        row = '{"question": "two plus two is", "answer": "four"}\n'
        Path(f"{name}.jsonl").write_text(8 * row)


@pytest.mark.parametrize("words", commands_of(README), ids=" ".join)
def test_the_readmes_commands_run(words, files, monkeypatch):
    if "--out" in words:
        words = [*words[: words.index("--out") + 1], "out", *words[words.index("--out") + 2 :]]
    if words[0] == "compare":  # long work: only its options and files are checked
        monkeypatch.setattr("holdfast.cli.compare.compare_in", lambda *_, **__: sys.exit(0))
        with pytest.raises(SystemExit, match="0"):
            main(words)
    else:
        assert main(words) == 0


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
