"""Print a script that completes commands, options, files and recipes in a shell.

examples:
  source <(holdfast completion bash)                                 in ~/.bashrc
  holdfast completion zsh > "${fpath[1]}/_holdfast"                  once, for zsh
  holdfast completion fish > ~/.config/fish/completions/holdfast.fish   once, for fish
"""

import argparse
import re
from collections.abc import Mapping, Sequence

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

#: A function per shell that completes the last name of a recipe such as recadam+fl, or a file.
RECIPE = {
    "bash": """_holdfast_recipes() {
  compgen -P "${1%"${1##*+}"}" -W "NAMES" -- "${1##*+}"
  compgen -f -- "$1"
}""",
    "zsh": """_holdfast_recipes() {
  local ret=1
  _files && ret=0
  compset -P '*+'
  compadd -- NAMES && ret=0
  return ret
}""",
    "fish": """function _holdfast_recipes
  set -l begun (commandline -ct)
  set -l before (string replace -r '[^+]*$' '' -- $begun)
  for name in NAMES
    echo $before$name
  end
  __fish_complete_path $begun
end""",
}
#: In zsh and fish, shtab completes only the first value of an option that takes several: of the
#: others, these functions find the last option before the cursor.
MORE_ZSH = """_holdfast_more() {
  case ${${(M)words[1,CURRENT-1]:#--*}[-1]} in
    --recipes) _holdfast_recipes ;;
    OPTIONS) _files ;;
  esac
}
"""
MORE_FISH = """
function _holdfast_within
  set -l options (string match -- '--*' (commandline -opc))
  set -q options[1]; and contains -- $options[-1] $argv
end
complete -c holdfast -n '_holdfast_within --recipes' -a '(_holdfast_recipes)'
complete -c holdfast -n '_holdfast_within OPTIONS' -a '(__fish_complete_path (commandline -ct))'
"""


def add_options(parser: Parser) -> None:
    parser.describe(__doc__, "SHELL")
    parser.add_argument("shell", **one_of("bash", "zsh", "fish"), help="the shell")


def run(options: argparse.Namespace, parser: Parser, commands: Mapping[str, Parser]) -> None:
    shtab = require("shtab", extra="cli", what="shell completion")
    names = " ".join([*registry.PRESETS, *(entry.name for entry in registry.methods())])
    ours = {"bash": "_holdfast_recipes", "zsh": "_holdfast_recipes", "fish": "(_holdfast_recipes)"}
    several = set()  # options that take several files
    for command in commands.values():
        for action in command._actions:
            if action.dest in FILES | DIRECTORIES | RECIPES:
                kind = shtab.FILE if action.dest in FILES else shtab.DIRECTORY
                setattr(action, "complete", ours if action.dest in RECIPES else kind)  # noqa: B010
            if action.nargs == "+" and action.dest in FILES:
                several |= {*action.option_strings}
    preamble = RECIPE[options.shell].replace("NAMES", names)
    script = shtab.complete(parser, options.shell, preamble=preamble)
    tell(_with_values(script, options.shell, sorted(several)))


def _with_values(script: str, shell: str, options: Sequence[str]) -> str:
    """Complete all values of options that take several, and further options after them."""
    if shell == "bash":  # after a value, a word may be an option
        known = '-z "$current_action_compgen" ||'
        return script.replace(known, f'{known} "$previous_word" != -* ||')
    if shell == "fish":
        return script + MORE_FISH.replace("OPTIONS", " ".join(options))
    script = script.replace('"(*):', '"*:')  # arguments of which there may be several
    begin, end = r"^_shtab_holdfast_\w+_options=\(\n", r"^\)\n"
    for found in re.findall(rf"{begin}.*?{end}", script, re.DOTALL | re.MULTILINE):
        if '"*:' not in found:
            added = found.removesuffix(")\n") + '  "*:value:_holdfast_more"\n)\n'
            script = script.replace(found, added)
    more = MORE_ZSH.replace("OPTIONS", "|".join(options))
    return script.replace("# End Custom Preamble", f"{more}# End Custom Preamble")
