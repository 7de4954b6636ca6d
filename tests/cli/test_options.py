"""Options: one spelling and one meaning in all commands, from the command line and from YAML."""

import shutil
import subprocess
from dataclasses import dataclass, field
from typing import Literal

import pytest

pytest.importorskip("yaml", reason="the cli extra is not installed")

import yaml

from holdfast.cli import main
from holdfast.cli._options import (
    Parser,
    UsageError,
    add,
    add_settings,
    config_text,
    settings_from,
)
from holdfast.cli.main import COMMANDS, make_parser

PARSERS = make_parser()[1]
#: Options that take one value in some commands and several in others.
ONE_OR_SEVERAL = {"--target"}
#: Options whose choices depend on the command: weights that are tested may be in any dtype.
OTHER_CHOICES = {"--dtype"}


def options_of(name):
    return [action for action in PARSERS[name]._actions if action.option_strings]


@pytest.mark.parametrize("name", COMMANDS)
def test_options_are_spelled_with_dashes(name):
    for action in options_of(name):
        for option in action.option_strings:
            assert option == "-h" or (option.startswith("--") and "_" not in option)
            assert "." not in option


@pytest.mark.parametrize("name", COMMANDS)
def test_lists_are_separated_by_spaces(name):
    for action in options_of(name):
        if isinstance(action.default, list | tuple):
            assert action.nargs == "+", action.option_strings
        assert action.nargs != "*"


@pytest.mark.parametrize("name", COMMANDS)
def test_an_option_has_one_meaning(name):
    mine = {option: action for action in options_of(name) for option in action.option_strings}
    for other in COMMANDS:
        for action in options_of(other):
            for option in (set(action.option_strings) & mine.keys()) - OTHER_CHOICES:
                assert mine[option].help == action.help, (option, other)
                assert mine[option].type == action.type, (option, other)
                assert mine[option].metavar == action.metavar, (option, other)
                assert mine[option].nargs == action.nargs or option in ONE_OR_SEVERAL


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_help_and_an_example(name):
    parser = PARSERS[name]
    assert all(action.help for action in parser._actions)
    assert f"  holdfast {name}" in parser.epilog or f"(holdfast {name}" in parser.epilog
    assert "``" not in parser.format_help()


@dataclass(frozen=True)
class Settings:
    """Settings of a test.

    Attributes:
        lr: the learning rate,
            which may be ``"auto"``.
        limit, rows: how many.
        names: several names.
        grid: values by name.
        set: one value by name.
        fast: be fast.
    """

    lr: float | Literal["auto"] = "auto"
    limit: int | None = None
    rows: int = 3
    names: tuple[str, ...] = ("a", "b")
    grid: dict[str, tuple[float, ...]] = field(default_factory=dict)
    set: dict[str, bool | int | float | str] = field(default_factory=dict)
    fast: bool = True


@pytest.fixture
def parser():
    made = Parser(prog="holdfast test")
    add(made, "config", "json")
    add_settings(made, Settings)
    return made


def test_settings_from_words(parser):
    words = "--lr 1e-4 --limit none --rows 5 --names x --grid a 1 2 --grid b 3 --grid a 4 --no-fast"
    options = parser.parse([*words.split(), "--set", "update.t0", "0.5", "--set", "x", "true"])
    assert settings_from(Settings, options) == Settings(
        lr=1e-4, rows=5, names=("x",), grid={"a": (4,), "b": (3,)},
        set={"update.t0": 0.5, "x": True}, fast=False,
    )  # fmt: skip


def test_defaults_are_those_of_the_dataclass(parser):
    assert settings_from(Settings, parser.parse([])) == Settings()


def test_a_config_and_options_over_it(parser, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(
        "lr: 1e-4\nlimit: 7\nnames: []\ngrid: {a: [1, 2], b: 3}\nset: {x: -1}\nfast: false\n"
    )
    options = parser.parse([f"--config={file}", "--limit", "9", "--grid", "b", "5"])
    assert settings_from(Settings, options) == Settings(
        lr=1e-4, limit=9, names=(), grid={"a": (1, 2), "b": (5,)}, set={"x": -1}, fast=False
    )


def test_what_is_written_reads_the_same(parser, tmp_path):
    words = "--lr 0.1 --limit 3 --names x y --grid a 1 --set b c --no-fast --json"
    options = parser.parse(words.split())
    text = config_text(options)
    assert "json" not in text
    (tmp_path / "config.yaml").write_text(text)
    again = Parser(prog="holdfast test")
    add(again, "config", "json")
    add_settings(again, Settings)
    read = again.parse(["--config", str(tmp_path / "config.yaml")])
    assert settings_from(Settings, read) == settings_from(Settings, options)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lr", "fast"], "--lr must be 'auto' or a number, got 'fast'"),
        (["--limit", "1.5"], "--limit must be a whole number or none, got '1.5'"),
        (["--names"], "--names expected at least one argument"),
        (["--grid", "a"], "--grid expected a value after 'a'"),
        (["--nams", "a"], "unknown option --nams; did you mean '--names'"),
        (["--learning-rate", "1"], "unknown option --learning-rate; did you mean '--lr'?"),
        (["stray"], "unexpected argument 'stray'"),
        (["--config"], "--config expected one argument"),
    ],
)
def test_errors_are_one_sentence(parser, words, message):
    with pytest.raises(UsageError) as raised:
        parser.parse(words)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lrr: 1", "unknown option 'lrr'; did you mean 'lr'"),
        ("learning_rate: 1", "unknown option 'learning_rate'; did you mean 'lr'?"),
        ("rows: [1, 2]", "rows must be one value, got [1, 2]"),
        ("rows: null", "rows must be a whole number, got 'none'"),
        ("fast: often", "fast must be true or false, got 'often'"),
        ("grid: 3", "grid must be names and values, got 3"),
    ],
)
def test_errors_of_a_config_name_the_file(parser, text, message, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(UsageError) as raised:
        parser.parse([f"--config={file}"])
    assert str(raised.value).startswith(f"{file}: {message}")


def test_help_texts_come_from_the_docstring(parser):
    texts = {action.dest: action.help for action in parser._actions}
    assert texts["lr"] == "the learning rate, which may be auto"
    assert texts["limit"] == texts["rows"] == "how many"
    assert "(default: a b)" in parser.format_help()


def test_print_config(capsys):
    given = ["--model", "m", "--data", "d", "--target", "t", "--recipes", "flow", "--print-config"]
    assert main(["compare", *given]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["recipes"] == ["flow"]
    assert not {"config", "json", "print_config"} & printed.keys()


def completions(script, *words):
    """Return what bash completes to, with the cursor at the end of the last word."""
    ask = (
        'source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); '
        'word="${COMP_WORDS[COMP_CWORD]}"; previous="${COMP_WORDS[COMP_CWORD - 1]}"; '
        'function="$(complete -p holdfast | sed "s/.*-F \\([^ ]*\\).*/\\1/")"; '
        '"$function" holdfast "$word" "$previous"; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", ask, script, *words], capture_output=True, text=True)
    return done.stdout.split()


def test_bash_completes_commands_options_files_and_recipes(tmp_path, monkeypatch, capsys):
    pytest.importorskip("shtab", reason="the cli extra is not installed")
    monkeypatch.chdir(tmp_path)
    assert main(["completion", "bash"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    (tmp_path / "train.jsonl").touch()
    for words, expected in {
        "fine": "finetune", "finetune --max-l": "--max-length", "tune --recipe recad": "recadam",
        "compare --recipes standard recadam+fl": "recadam+flow", "tune --data tr": "train.jsonl",
        "score --level t": "token", "measure tr": "train.jsonl",
    }.items():  # fmt: skip
        assert completions("./script", "holdfast", *words.split()) == [expected]
    assert main(["completion", "zsh"]) == 0
    assert "#compdef holdfast" in capsys.readouterr().out
    assert main(["completion", "fish"]) == 0
    script = capsys.readouterr().out
    assert "complete -c holdfast" in script
    if shutil.which("fish"):
        (tmp_path / "holdfast.fish").write_text(script)
        ask = "source holdfast.fish; complete -C 'holdfast finetune --recipe reca'"
        done = subprocess.run(["fish", "-c", ask], capture_output=True, text=True, cwd=tmp_path)
        assert done.stdout.startswith("recadam")


def test_a_column_map_on_the_command_line_and_in_a_config(tmp_path):
    made = Parser(prog="p")
    add(made, "config", "data", "columns")
    options = made.parse(["--data", "a", "b", "--columns", "text1=a=b", "label=c d"])
    assert (options.data, options.columns) == (["a", "b"], {"text1": "a=b", "label": "c d"})
    (tmp_path / "config.yaml").write_text(config_text(options))
    assert vars(made.parse([f"--config={tmp_path}/config.yaml"])).items() >= {
        "data": ["a", "b"], "columns": {"text1": "a=b", "label": "c d"},
    }.items()  # fmt: skip
    (tmp_path / "one.yaml").write_text("data: a\ncolumns: {text: 1}\n")
    options = made.parse([f"--config={tmp_path}/one.yaml"])
    assert (options.data, options.columns) == ("a", {"text": "1"})
    assert made.parse(["--data", "a"]).data == "a"
    with pytest.raises(UsageError, match="--columns must be NAME=COLUMN, got 'text body'"):
        made.parse(["--columns", "text", "body"])
    (tmp_path / "bad.yaml").write_text("columns: [text=body]\n")
    with pytest.raises(UsageError, match="columns must be names and values"):
        made.parse([f"--config={tmp_path}/bad.yaml"])
