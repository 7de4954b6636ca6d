"""Count what the house is made of: rooms, hooks, names that two things have, modules on a walk.

    python benchmarks/house.py rooms            # files, lines, statements and docstrings per room
    python benchmarks/house.py hooks            # names of the stage protocols, who implements them
    python benchmarks/house.py names            # public classes and functions of the same name
    python benchmarks/house.py walk measure builtin tuned   # modules that a command imports, enters

``--src FOLDER`` counts another version.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

SRC = Path(__file__).resolve().parents[1] / "src"
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
#: Run in the process of a command: which modules of holdfast it imports, and in which code runs.
WATCH = """
import atexit, sys
entered = set()
def watch(code, *_):
    part = code.co_filename.partition("/holdfast/")[2]
    if part and code.co_name != "<module>":
        entered.add(part)
    return sys.monitoring.DISABLE
if sys.version_info >= (3, 12):
    sys.monitoring.use_tool_id(4, "house")
    sys.monitoring.register_callback(4, sys.monitoring.events.PY_START, watch)
    sys.monitoring.set_events(4, sys.monitoring.events.PY_START)
else:
    sys.setprofile(lambda frame, event, _: event == "call" and watch(frame.f_code))
@atexit.register
def tell():
    found = sorted(name for name in sys.modules if name.partition(".")[0] == "holdfast")
    methods = [name for name in found if name.startswith("holdfast.methods.")]
    print(f"{len(found)} modules of holdfast imported, {len(methods)} of them methods; "
          f"{len(entered)} entered", file=sys.stderr)
from holdfast.__main__ import main
sys.exit(main())
"""


def trees(src: Path) -> Iterator[tuple[Path, ast.Module]]:
    """Every file of the package with its syntax tree."""
    for file in sorted((src / "holdfast").rglob("*.py")):
        yield file.relative_to(src / "holdfast"), ast.parse(file.read_text(encoding="utf-8"))


def docstring_of(node: ast.AST) -> ast.stmt | None:
    """The statement that is the docstring of a module, class or function."""
    if isinstance(node, ast.Module | Definition) and ast.get_docstring(node, clean=False):
        return node.body[0]
    return None


def rooms(src: Path) -> None:
    """Files, lines, statements without docstrings, and lines of docstrings, per room."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for file, tree in trees(src):
        docs = [doc for node in ast.walk(tree) if (doc := docstring_of(node))]
        statements = sum(isinstance(node, ast.stmt) for node in ast.walk(tree)) - len(docs)
        counted = {
            "files": 1,
            "lines": len((src / "holdfast" / file).read_text(encoding="utf-8").splitlines()),
            "statements": statements,
            "docstrings": sum((doc.end_lineno or doc.lineno) - doc.lineno + 1 for doc in docs),
        }
        for room in (f"{file.parts[0]}/" if len(file.parts) > 1 else "(top)", "all"):
            found[room].update(counted)
    columns = ("files", "lines", "statements", "docstrings")
    print(f"{'room':14}" + "".join(f"{column:>12}" for column in columns))
    for room, counts in sorted(found.items(), key=lambda item: (item[0] == "all", item[0])):
        print(f"{room:14}" + "".join(f"{counts[column]:12,}" for column in columns))


def hooks(src: Path) -> None:
    """The names that the protocols of the stages declare, and the files that implement each."""
    files = dict(trees(src))
    protocols = [path for path in files if path.name in ("stages.py", "protocols.py")]
    declared: dict[str, set[str]] = defaultdict(set)
    for path in protocols:
        for cls in (node for node in files[path].body if isinstance(node, ast.ClassDef)):
            for name in (name for name in members(cls) if not name.startswith("_")):
                declared[name].add(cls.name)
    users = {
        name: sorted(
            {
                path.stem
                for path, tree in files.items()
                if path not in protocols
                for cls in ast.walk(tree)
                if isinstance(cls, ast.ClassDef) and name in members(cls)
                and path.parts[0] in ("methods", "_optim", "optim")
            }
        )
        for name in declared
    }  # fmt: skip
    for name, found in sorted(users.items(), key=lambda item: (len(item[1]), item[0])):
        shown = ", ".join(found[:6]) + (" …" if len(found) > 6 else "")
        print(f"{len(found):3} {name:20} {'/'.join(sorted(declared[name])):30} {shown}")
    few = sum(len(found) <= 1 for found in users.values())
    print(f"{len(users)} names, {few} of them with one implementer or none")


def members(cls: ast.ClassDef) -> list[str]:
    """What a class defines: methods, and attributes with an annotation or a value."""
    found = [node.name for node in cls.body if isinstance(node, ast.FunctionDef)]
    for node in cls.body:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        found += [target.id for target in targets if isinstance(target, ast.Name)]
    return found


def names(src: Path) -> None:
    """Public classes and functions that have the name of another one."""
    found: dict[str, list[str]] = defaultdict(list)
    for file, tree in trees(src):
        for node in tree.body:
            if isinstance(node, Definition) and not node.name.startswith("_"):
                found[node.name].append(str(file))
    several = {name: files for name, files in found.items() if len(files) > 1}
    for name, files in sorted(several.items(), key=lambda item: (-len(item[1]), item[0])):
        print(f"{len(files):3} {name:24} {', '.join(files)}")
    print(f"{len(several)} of {len(found)} public names stand for several things")


def walk(src: Path, command: list[str]) -> None:
    """Run a command and say how many modules it imports and enters."""
    environment = {**os.environ, "PYTHONPATH": str(src)}
    subprocess.run([sys.executable, "-c", WATCH, *command], env=environment, check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--src", type=Path, default=SRC, help="the folder src of another version")
    parser.add_argument("what", choices=("rooms", "hooks", "names", "walk"))
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if options.what == "walk":
        walk(options.src, options.command)
    else:
        {"rooms": rooms, "hooks": hooks, "names": names}[options.what](options.src)


if __name__ == "__main__":
    main()
