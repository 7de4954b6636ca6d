"""The data beside the embedded model: math problems to learn, and text that it may forget.

    python benchmarks/embedded/excerpts.py --corpus corpus.jsonl.xz --gsm8k gsm8k-train.jsonl.gz

The problems are short ones of GSM8K's training part (MIT), without the calculator's notes in their
answers; those to learn and those to be tested on are drawn at random. The texts are the chunks of
prose, verse and code that corpus.py held out.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
from pathlib import Path

from corpus import REPOSITORY, load

TRAIN, DEV = 1000, 200
LONGEST = 300  # characters of a question and its answer


def short_problems(path: Path) -> list[dict[str, str]]:
    """Question and answer, where both are short."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    plain = [
        {"question": row["question"].strip(), "answer": re.sub("<<.*?>>", "", row["answer"])}
        for row in rows
    ]
    return [row for row in plain if len(row["question"]) + len(row["answer"]) <= LONGEST]


def write(path: Path, text: str) -> None:
    """Compressed, with the same bytes each time."""
    path.write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"{path.name}: {len(text.encode()) / 1e3:.1f} kB, {path.stat().st_size / 1e3:.1f} packed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--gsm8k", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "src/holdfast/builtin")
    args = parser.parse_args()

    problems = random.Random(0).sample(short_problems(args.gsm8k), TRAIN + DEV)
    for name, rows in (("train", problems[:TRAIN]), ("dev", problems[TRAIN:])):
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write(args.out / f"gsm8k-{name}.jsonl.gz", lines)
    corpus = load(args.corpus)
    for kind in ("prose", "verse", "code"):
        texts = [chunk.text for chunk in corpus if chunk.kind == kind and chunk.held_out]
        write(args.out / f"{kind}.txt.gz", "\n\n".join(texts))


if __name__ == "__main__":
    main()
