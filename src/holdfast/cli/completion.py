"""Print a script that completes commands, options, files and recipes in a shell.

examples:
  source <(holdfast completion bash)                                 in ~/.bashrc
  holdfast completion zsh > "${fpath[1]}/_holdfast"                  once, for zsh
  holdfast completion fish > ~/.config/fish/completions/holdfast.fish   once, for fish
"""

import argparse
from collections.abc import Mapping

from holdfast import registry
from holdfast._torch.imports import require
from holdfast.cli._options import Parser, one_of
from holdfast.report.printing import tell

#: Options and arguments that take files or directories.
FILES = {
    "base", "config", "data", "model", "model_card", "old_data", "report", "retained",
    "similarity", "sources", "target", "text", "tuned", "validation", "weighted",
}  # fmt: skip
DIRECTORIES = {"include_path", "out"}
RECIPES = {"recipe", "recipes"}


def add_options(parser: Parser) -> None:
    parser.describe(__doc__, "SHELL")
    parser.add_argument("shell", **one_of("bash", "zsh", "fish"), help="the shell")


def run(options: argparse.Namespace, parser: Parser, commands: Mapping[str, Parser]) -> None:
    shtab = require("shtab", extra="cli", what="shell completion")
    names = " ".join([*registry.PRESETS, *(entry.name for entry in registry.methods())])
    recipe = {
        "bash": "_holdfast_recipes", "zsh": f"_alternative 'r::(({names}))' 'f::_files'",
        "fish": f"(string split ' ' '{names}')",
    }  # fmt: skip
    for command in commands.values():
        for action in command._actions:
            if action.dest in FILES | DIRECTORIES | RECIPES:
                kind = shtab.FILE if action.dest in FILES else shtab.DIRECTORY
                setattr(action, "complete", recipe if action.dest in RECIPES else kind)  # noqa: B010
    # Completes the last name of a recipe such as recadam+fl, or a file.
    last = f'compgen -P "${{1%"${{1##*+}}"}}" -W "{names}" -- "${{1##*+}}"'
    preamble = f'_holdfast_recipes() {{ {last}; compgen -f -- "$1"; }}'
    bash = options.shell == "bash"
    tell(shtab.complete(parser, options.shell, preamble=preamble if bash else ""))
