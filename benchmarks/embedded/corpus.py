"""The text that the embedded model is pretrained on: prose, verse and code.

    python benchmarks/embedded/corpus.py SOURCES --out corpus.jsonl.xz

SOURCES is a folder with these packages, unpacked. All works are in the public domain; Project
Gutenberg's notes are cut off.

| folder or file | package | works | kind |
| --- | --- | --- | --- |
| janeaustenr/ | janeaustenr 1.0.0 (R, installed) | Jane Austen's six novels | prose |
| brotli/ | brotli 1.2.1 (source) | Alice in Wonderland | prose |
| | | Paradise Lost | verse |
| compress/ | klauspost/compress 1.15 (source) | Tom Sawyer | prose |
| kjv.txt | bible-kjv 4.38: `bible gen1:1-rev22:21 > kjv.txt` | King James Bible | prose |
| shakespeare/ | shakespeare 0.6 (source) | Shakespeare's plays and poems | verse |
| | | Paradise Regained, Milton's shorter poems | verse |

Code is this repository's Python (Apache-2.0) and Python's standard library (PSF licence).

The works are cut into chunks; some chunks are held out, whole. They are what `holdfast compare`
shows to have been forgotten, so they are taken from what may be shipped without a notice: not from
the Bible, which the United Kingdom protects, nor from the standard library.

The result has a line a chunk: its kind, its document, whether it is held out, its text.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import re
import struct
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
#: Parts of the standard library that are tables, tests or old.
LEFT_OUT = {
    "__pycache__", "distutils", "encodings", "ensurepip", "idlelib", "lib2to3", "pydoc_data",
    "site-packages", "test", "tests", "turtledemo",
}  # fmt: skip


@dataclass(frozen=True)
class Chunk:
    """A piece of a document, held out or trained on as a whole."""

    kind: str
    document: str
    text: str
    held_out: bool = False


def prose(sources: Path) -> Iterator[tuple[str, str]]:
    """Documents of prose that may be held out, with their names."""
    for novel in r_strings(sources / "janeaustenr/data/Rdata.rdb"):
        yield novel.split("\n", 1)[0].title(), unwrapped(novel)
    testdata = sources / "brotli/tests/testdata"
    yield "Alice's Adventures in Wonderland", unwrapped(read(testdata / "alice29.txt"))
    sawyer = read(sources / "compress/testdata/Mark.Twain-Tom.Sawyer.txt")
    sawyer = between(sawyer, "MOST of the adventures", "End of the Project Gutenberg")
    yield "The Adventures of Tom Sawyer", unwrapped(sawyer)


def bible(sources: Path) -> Iterator[tuple[str, str]]:
    """The King James Bible, a paragraph a chapter, without the numbers of its verses."""
    text = re.sub(r"(?m)^ +\d+ ", "", read(sources / "kjv.txt"))
    yield "King James Bible", unwrapped(text)


def verse(sources: Path) -> Iterator[tuple[str, str]]:
    """Documents of verse, with their names."""
    lost = read(sources / "brotli/tests/testdata/plrabn12.txt")
    yield "Paradise Lost", between(lost, "Of Man's first disobedience", "[The End]")
    shakespeare = sources / "shakespeare/shksprdata/texts"
    milton = sources / "shakespeare/miltondata/texts"
    works = sorted(shakespeare.glob("*_gut.txt"))
    works += [milton / "paradise_regained_gut.txt"]
    works += [milton / "lallegro_il_penseroso_comus_and_lycidas_gut.txt"]
    for path in works:
        yield path.stem.removesuffix("_gut").replace("_", " ").title(), read(path)


def python(root: Path) -> Iterator[tuple[str, str]]:
    """Python files under a folder, with their paths."""
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not LEFT_OUT & set(parts) and not any(part.startswith(".") for part in parts):
            yield "/".join(parts), read(path)


def own_code() -> Iterator[tuple[str, str]]:
    """This repository's Python files."""
    for folder in ("src", "benchmarks", "examples", "tests"):
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            yield path.relative_to(REPOSITORY).as_posix(), read(path)


def read(path: Path) -> str:
    """A text file with plain line ends, without spaces before them and without runs of blanks."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        text = path.read_text(encoding="latin-1")
    text = re.sub(r"[ \t\f]+\n", "\n", text)
    return re.sub(r"\n{4,}", "\n\n\n", text).strip() + "\n"


def r_strings(path: Path) -> Iterator[str]:
    """The character vectors in an R package's data file, each as lines of text.

    The file holds zlib streams after their lengths. A stream is an R object in big-endian form:
    after its header, each string is a tag that ends in 9, a length and the bytes.
    """
    data = path.read_bytes()
    while data:
        stream = zlib.decompressobj()
        raw = stream.decompress(data[4:])
        data = stream.unused_data
        lines, at = [], 31  # magic, versions, encoding; then the vector's tag and its length
        (count,) = struct.unpack_from(">i", raw, at - 4)
        for _ in range(count):
            tag, length = struct.unpack_from(">ii", raw, at)
            assert tag & 0xFF == 9, tag
            lines.append(raw[at + 8 : at + 8 + length].decode("utf-8"))
            at += 8 + length
        yield "\n".join(lines) + "\n"


def between(text: str, start: str, end: str) -> str:
    """The text from ``start`` to just before ``end``, each found once or more."""
    return text[text.index(start) : text.rindex(end)].strip() + "\n"


def unwrapped(text: str) -> str:
    """Each paragraph on a line of its own."""
    return re.sub(r"(?<=\S)[ \t]*\n[ \t]*(?=\S)", " ", text)


def chunks(kind: str, document: str, text: str, size: int = 4000) -> list[Chunk]:
    """A document cut before blank lines into pieces of about ``size`` characters."""
    pieces = [""]
    for paragraph in re.split(r"(?<=\n)(?=\n)", text):
        if len(pieces[-1]) + len(paragraph) > size and pieces[-1]:
            pieces.append("")
        pieces[-1] += paragraph
    texts = [piece.strip("\n") + "\n" for piece in pieces]
    return [Chunk(kind, document, text) for text in texts if text.strip()]


def hold_out(some: Iterable[Chunk], characters: int) -> list[Chunk]:
    """The chunks without repetitions, of which enough for this many characters are held out.

    Which ones follows from a hash of their text: it does not depend on order.
    """
    unique = list({chunk.text: chunk for chunk in some}.values())
    held: set[str] = set()
    total = 0
    for text in sorted((c.text for c in unique), key=lambda t: hashlib.sha256(t.encode()).digest()):
        if total >= characters:
            break
        held.add(text)
        total += len(text)
    return [replace(chunk, held_out=chunk.text in held) for chunk in unique]


def gather(sources: Path, characters: int) -> list[Chunk]:
    """All chunks; of each kind about this many characters are held out."""
    found = []
    for kind, documents in (("prose", prose(sources)), ("verse", verse(sources))):
        cut = [chunk for name, text in documents for chunk in chunks(kind, name, text)]
        found += hold_out(cut, characters)
    found += [chunk for name, text in bible(sources) for chunk in chunks("prose", name, text)]
    found += hold_out((Chunk("code", *file) for file in own_code()), characters)
    library = Path(sysconfig.get_path("stdlib"))
    found += [Chunk("code", f"python/{name}", text) for name, text in python(library)]
    return found


def write(path: Path, corpus: Iterable[Chunk]) -> None:
    """A line of JSON a chunk."""
    with lzma.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(chunk), ensure_ascii=False) + "\n" for chunk in corpus)


def load(path: Path) -> list[Chunk]:
    """What :func:`write` wrote."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return [Chunk(**json.loads(line)) for line in file]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sources", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--held-out", type=int, default=24_000, help="characters of each kind")
    args = parser.parse_args()

    corpus = gather(args.sources, args.held_out)
    write(args.out, corpus)
    for kind in ("prose", "verse", "code"):
        for held in (False, True):
            some = [chunk for chunk in corpus if chunk.kind == kind and chunk.held_out == held]
            print(
                f"{kind} {'held out' if held else 'train':9} {len(some):6} chunks of "
                f"{len({c.document for c in some}):4} documents, "
                f"{sum(len(c.text) for c in some) / 1e3:9.1f} kB"
            )
    print(f"{args.out}: {args.out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
