"""``holdfast check``: exit codes, files and messages."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

pytest.importorskip("transformers", reason="the hf extra is not installed")

from holdfast.cli import main
from small import make_llama, make_tokenizer, noisy, save


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("the cat sat on the mat and the dog ran . " * 60)
    base = make_llama(limit=128, scale=0.3)
    save(base, "base", make_tokenizer()), save(noisy(base, 0.001), "near", make_tokenizer())
    save(noisy(base, 0.5), "far", make_tokenizer())


def test_it_passes_and_fails(capsys):
    limits = ["--text=text.txt", "--max-perplexity-rise=2%", "--context-free=8", "--max-kl=0.01"]
    assert main(["check", "base", "near", *limits]) == 0
    assert "Passed: all 2 figures are within limits." in capsys.readouterr().out
    assert main(["check", "base", "far", *limits, "--out=out"]) == 1
    told = capsys.readouterr()
    assert "holdfast: Failed: 2 of 2 figures are beyond the limit." in told.err
    assert ET.parse("out/junit.xml").getroot().attrib["failures"] == "2"
    assert "Failed: 2 of 2" in Path("out/summary.md").read_text()
    assert not json.loads(Path("out/gate.json").read_text())["checks"][0]["passed"]
    assert "<html" in Path("out/report.html").read_text()


def test_a_saved_report(capsys):
    assert main(["measure", "base", "far", "--context-free=0", "--out=report"]) == 0
    given = ["check", "--report=report/report.json"]
    assert main([*given, "--max-drift=10000%"]) == 0
    assert main([*given, "--max-drift=1%"]) == 1
    assert main(["check", "base", "far", "--max-drift=1%"]) == 1  # without drawing texts
    assert "context-free" not in capsys.readouterr().err
    assert main([*given, "--max-kl=1"]) == 2
    assert "max_kl has nothing to limit" in capsys.readouterr().err


def test_skills(capsys):
    given = ["--skills", "--max-skill-rise=5%", "--context-free=0"]
    assert main(["check", "base", "near", *given]) == 0
    assert main(["check", "base", "far", *given]) == 1
    assert "French: rise of the perplexity of a skill" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["base", "near"], "give at least one limit: --max-perplexity-rise"),
        (["--max-kl=1"], "give BASE and TUNED"),
        (["base", "near", "--max-drop=1%"], "--max-drop needs a test: --text, --retained"),
        (["base", "near", "--max-skill-rise=1%"], "--skills and --max-skill-rise need each other"),
        (
            ["base", "near", "--skills", "--max-kl=1"],
            "--skills and --max-skill-rise need each other",
        ),
        (["base", "near", "--skills", "--max-perplexity-rise=1%"], "needs a test: --text"),
        (["base", "near", "--min-target=1"], "--min-target needs a --target"),
        (["base", "near", "--report=x.json", "--max-kl=1"], "give BASE and TUNED"),
        (["base", "near", "--max-drift=3"], "a number below 1, got '3': write 3%"),
        (["base", "near", "--max-kl=much"], "must be a number or a percentage, got 'much'"),
        (["base", "near", "--max-kl=-1"], "max_kl must be"),
        (["base", "near", "--max-klx=1"], "did you mean '--max-kl'"),
    ],
)
def test_wrong_input(given, words, capsys):
    assert main(["check", *given]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("limit", ["10000%", "1%"])
def test_a_closed_pipe_is_no_verdict(limit, tmp_path):
    """Neither 0 nor 1: what could not be printed was not said."""
    assert main(["measure", "base", "far", "--context-free=0", "--out=report"]) == 0
    words = f"-m holdfast check --report report/report.json --max-drift {limit}"
    shell = f"{sys.executable} {words} 2>&1 | true; exit ${{PIPESTATUS[0]}}"
    assert subprocess.run(["bash", "-c", shell]).returncode == 141
