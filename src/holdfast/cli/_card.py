"""The option ``--model-card``: a result as a section of a model card."""

import argparse
import sys
from collections.abc import Iterable

from holdfast.io.outputs import claim_file, local_path
from holdfast.report.card import read_card
from holdfast.report.printing import tell_line
from holdfast.report.shown import Shown

SECTION = "forgetting"


def check_card(options: argparse.Namespace, inputs: Iterable[str]) -> None:
    """Check before the work that the card can be updated, and is no input itself.

    It may lie in the directory of a model that is an input.
    """
    if options.model_card is None:
        return
    card = claim_file(options.model_card, ours=lambda _: True, option="--model-card")
    files = [path for name in inputs if (path := local_path(name)) and path.is_file()]
    if card.exists() and any(card.samefile(path) for path in files):
        raise ValueError(f"--model-card {card} is an input itself: give another file")
    read_card(card, SECTION)


def update_card(options: argparse.Namespace, shown: Shown) -> None:
    if options.model_card is not None:
        shown.save(options.model_card, section=SECTION)
        tell_line(f"Model card: {options.model_card}", file=sys.stderr)
