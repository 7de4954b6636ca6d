"""A preview of data in a terminal: its first samples, with the trained parts highlighted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.report.printing import printable, tell
from holdfast.report.words import percent, plain

if TYPE_CHECKING:
    from rich.console import Console

    from holdfast.evaluate.preview import Piece, Preview

_KINDS = {
    "conversation": "conversations",
    "completion": "prompts and answers",
    "labeled": "inputs and labels",
    "text": "texts",
}
_MOST = 1200  # characters of a piece that are shown


def show_preview(preview: Preview) -> None:
    """Print a preview: trained parts are green in a terminal, and in brackets elsewhere."""
    console = _terminal()
    tell(_headline(preview))
    for sample in preview.first:
        counted = f": {sample.tokens} tokens, {sample.trained} trained" if sample.tokens else ""
        tell(f"\nrow {sample.row}{counted}")
        if console is None:
            tell("".join(map(_bracketed, sample.pieces)))
        else:
            _print_styled(console, sample.pieces)
    tell(f"\nTrained parts are {'in ⟦ ⟧' if console is None else 'green'}.")
    for sentence in sentences(preview):
        tell(sentence)


def sentences(preview: Preview) -> list[str]:
    """Say how long the samples are, how many are cut, and which columns are not used."""
    found = []
    if (lengths := preview.lengths) is not None:
        low, middle, high = lengths.min, lengths.median, lengths.max
        found += [f"Tokens per sample: {low} (min), {middle:g} (median), {high} (max)."]
        found += [_cut(preview)]
    unused = ", ".join(map(plain, preview.unused))
    return [*found, f"Columns that are not used: {unused}." if unused else "All columns are used."]


def _headline(preview: Preview) -> str:
    rows = f"{preview.rows} row{'s' if preview.rows != 1 else ''} of {_KINDS[preview.kind]}"
    head = f", new head ({preview.head})" if preview.head else ""
    data, model = plain(preview.data), plain(preview.model)
    return f"{data} for {model}: {rows}, {preview.samples} training samples{head}"


def _cut(preview: Preview) -> str:
    lengths = preview.lengths
    if lengths is None or not lengths.cut:
        return f"Cut: none; the limit is {lengths.limit if lengths else 0} tokens."
    what, total = "samples", preview.samples + lengths.lost
    lost = f" (left out, without a trained part: {lengths.lost})" if lengths.lost else ""
    how = f"the end is cut off{lost}"
    if preview.kind == "text":
        what, total, how = "texts", preview.rows, "they become several samples"
    share = percent(lengths.cut / total)
    many = f"{lengths.cut} of {total} {what} ({share})"
    return f"Cut: {many} have more than {lengths.limit} tokens: {how}."


def _terminal() -> Console | None:
    """Return a console of rich if the output is a terminal."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    console = Console(highlight=False)
    return console if console.is_terminal else None


def _print_styled(console: Console, pieces: list[Piece]) -> None:
    from rich.text import Text

    styled = [(printable(_brief(p.text)), "bold green" if p.trained else "") for p in pieces]
    console.print(Text.assemble(*styled), soft_wrap=True)


def _bracketed(piece: Piece) -> str:
    return f"⟦{_brief(piece.text)}⟧" if piece.trained else _brief(piece.text)


def _brief(text: str) -> str:
    left_out = len(text) - _MOST
    if left_out <= 0:
        return text
    half = _MOST // 2
    return f"{text[:half]} [… {left_out} characters …] {text[-half:]}"
