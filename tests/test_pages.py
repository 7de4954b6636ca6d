"""The pages show the committed results, the explorer has all of them, README.md can be pasted."""

import gzip
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from base64 import b64decode
from pathlib import Path
from types import SimpleNamespace

import pytest

import browser
from holdfast.cli import main
from small import make_llama, make_tokenizer, noisy, save

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BASH = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
#: What makes a command of the README short.
SHORT = {
    "finetune": "--max-updates 4", "check": "--limit 2", "merge": "--limit 2",
    "measure": "--limit 20 --context-free 1",
}  # fmt: skip


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(sys, "path", [*sys.path])  # the scripts append to it


def test_the_pages_show_the_committed_results(scripts):
    import pages

    assert pages.stale() == [], "run python benchmarks/pages.py"
    blocks = [name for page in pages.PAGES for _, name, *_ in pages.BLOCK.findall(page.read_text())]
    assert {*blocks} == {*pages.TABLES}


def test_the_evidence_is_what_the_page_says(scripts):
    """Plain fine-tuning kept 54 to 86 % in six settings, and as much or more in six others."""
    import pages

    groups = [*pages.groups(pages.verdict.read()["settings"]).values()]
    assert [len(names) for names in groups] == [6, 6, 2]
    row = next(line for line in pages.evidence().splitlines() if line.startswith("| 6 settings"))
    assert re.findall(r"\d+–\d+ %", row) == ["78–101 %", "93–100 %", "83–100 %", "54–86 %"]


@pytest.fixture
def explorer(scripts, tmp_path):
    import explorer

    (tmp_path / "page.html").write_text(explorer.page(), encoding="utf-8")
    return tmp_path / "page.html"


def test_the_explorer_names_every_file_of_results(explorer):
    packed = re.search(r'data: "([^"]+)"', explorer.read_text(encoding="utf-8"))[1]
    views = json.loads(gzip.decompress(b64decode(packed)))
    tables = [table for view in views for table in view["tables"]]
    named = {*re.findall(r"benchmarks/[\w./-]+\.json", " ".join(t["source"] for t in tables))}
    files = {str(file.relative_to(ROOT)) for file in ROOT.glob("benchmarks/**/results/*.json")}
    assert named == files
    for table in tables:
        titles = [title for title, *_ in table["columns"]]
        assert {table["x"], table["y"], table["pick"]} <= {*titles, ""}
        assert len({*titles}) == len(titles) > 1
        assert {len(row) for row in table["rows"]} == {len(titles)}


def test_the_explorer_reads_a_search_of_this_version(scripts, monkeypatch):
    import explorer

    def read(kind, name, read=explorer.read):
        found = {**read(kind, name)}
        if name == "tune_default":
            found.pop("unmerged", None)
            found["default"] = None  # it did not complete
        return found

    monkeypatch.setattr(explorer, "read", read)
    rows = next(rows for name, rows, _ in explorer.others() if name == "tune_default")
    assert [row["half"] for row in rows if row["point"] == "taken"] == ["chosen", "reported"]
    assert "defaults" not in {row["point"] for row in rows}


def test_the_site_builds_the_explorer_again_if_a_script_has_changed(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("explorer_hook", ROOT / "docs" / "_explorer.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    page, script = tmp_path / "explorer" / "index.html", tmp_path / "proof" / "verdict.py"
    for time, file in enumerate((tmp_path / "explorer.py", script, page)):
        file.parent.mkdir(exist_ok=True)
        file.touch()
        os.utime(file, (time, time))
    calls = []
    monkeypatch.setattr(hook, "BENCHMARKS", tmp_path)
    monkeypatch.setattr(hook.subprocess, "run", lambda *given, **_: calls.append(given))
    hook.on_pre_build(config=SimpleNamespace(docs_dir=tmp_path))
    assert calls == []
    os.utime(script, (9, 9))
    hook.on_pre_build(config=SimpleNamespace(docs_dir=tmp_path))
    assert len(calls) == 1


@pytest.mark.skipif(browser.CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.parametrize("width", [390, 1280])
def test_the_explorer_shows_each_view_without_an_error(explorer, width):
    with browser.Browser() as page:
        page.show(explorer, width=width, dark=width < 400)
        page.wait("!!views && !!document.querySelector('#figure .points')")
        for address in page.run("views.map(one => `#${one.name}/${one.tables[0].name}`)"):
            page.run(f"location.hash = {address!r}")
            page.wait(f"!!document.querySelector('tbody td') && location.hash === {address!r}")
            assert page.run("document.documentElement.scrollWidth") == width
        page.run("location.hash = '#results/smollm2_gsm8k?picks=LoRA&tests=PIQA|MBPP'")
        page.wait("$('note').textContent.includes('chosen tests')")
        assert page.run("rowsShown().every(row => row[at('method')] !== 'LoRA')")
        page.run("location.hash = '#speed'")  # tables without a column "kept"
        page.wait("view.name === 'speed'")
        last = "row.at(-1) === set.rows[i].at(-1)"
        assert page.run(f"(off.tests.add('PIQA'), rowsShown().every((row, i) => {last}))")
        wrong = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
        assert [event for event in page.events if event["method"] in wrong] == []


@pytest.mark.filterwarnings("ignore")  # the frameworks' own, which differ by release
def test_the_readmes_examples_run_as_they_are_pasted(monkeypatch, tmp_path):
    for package in ("transformers", "peft", "accelerate", "jinja2"):
        pytest.importorskip(package, reason=f"{package} of an extra is not installed")
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        exec(block, names)
    assert names["trainer"].state.global_step > 0


@pytest.fixture
def files(monkeypatch, tmp_path):
    """The files that the README's commands name."""
    pytest.importorskip("transformers", reason="the hf extra is not installed")
    pytest.importorskip("cattrs", reason="the eval extra is not installed")
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    save(make_llama(), "base", make_tokenizer())
    save(noisy(make_llama()), "tuned", make_tokenizer())
    Path("wiki.txt").write_text("the cat sat on the mat . " * 9)
    Path("dev.jsonl").write_text(8 * '{"question": "two plus two is", "answer": "four"}\n')


@pytest.mark.parametrize("block", [b for b in BASH if "holdfast " in b], ids=["first", "others"])
@pytest.mark.filterwarnings("ignore")  # of frameworks, and of texts with few tokens
def test_the_readmes_commands_run(block, files, capsys):
    lines = (line.partition("#")[0] for line in block.replace("\\\n", " ").splitlines())
    for _, command, *words in (shlex.split(line) for line in lines if line.startswith("holdfast ")):
        if "--out" in words:
            shutil.rmtree(words[words.index("--out") + 1], ignore_errors=True)
        codes = (0, 1) if command == "check" else (0,)  # the gate may say no
        assert main([command, *words, *SHORT[command].split()]) in codes
    assert re.search(r"(?i)forgotten", said := capsys.readouterr().out)
    assert re.search(r"(?i)kept \d+ %.*learned", said, re.DOTALL) or "builtin" not in block


def test_the_readmes_other_commands_exist():
    """`make` has its targets; nothing is installed from an index."""
    targets = re.findall(r"^make (\w+)", "".join(BASH), re.M)
    assert {*targets} <= {*re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)}
    installs = re.findall(r"^pip install (.*?)(?:  |$)", "".join(BASH), re.M)
    assert all(words.strip('"').startswith(".") for words in installs)


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
