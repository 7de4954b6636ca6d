"""Where the names of points stand: beside them, and not on each other."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["MARGIN", "beside", "placed", "spread"]

_LETTER, _LINE, _DOT = 7.0, 15.0, 6.0  # pixels: of a letter, a line of text, a point's radius
_PLACES = (
    "top right", "middle right", "bottom right", "top left", "middle left", "bottom left",
    "top center", "bottom center",
)  # fmt: skip

#: Pixels that a text may stand out to the right.
MARGIN = 30

Box = tuple[float, float, float, float]


def placed(
    names: Sequence[str],
    points: Sequence[tuple[float, float]],
    width: float,
    height: float,
    occupied: Sequence[Box] = (),
) -> list[str | None]:
    """A text position for each name, first come first served; None where there is no room.

    Args:
        names: the texts, the most important first.
        points: where each is, in pixels from the top left.
        width, height: of the plot, in pixels.
        occupied: left, top, right and bottom of what stands there already.
    """
    taken = list(occupied)
    found: list[str | None] = []
    for name, point in zip(names, points, strict=True):
        found.append(None)
        for place in _PLACES:
            box = beside(name, point, place)
            inside = box[0] >= 0 and box[1] >= -_LINE and box[3] <= height
            inside = inside and box[2] <= width + MARGIN - _DOT
            others = (_around(dot) for dot in points if dot != point)
            if inside and not any(_meet(box, other) for other in (*taken, *others)):
                taken.append(box)
                found[-1] = place
                break
    return found


def beside(text: str, point: tuple[float, float], place: str) -> Box:
    """What a text takes at a place beside its point."""
    x, y = point
    wide = _LETTER * len(text)
    up, _, side = place.partition(" ")
    left = {"right": x + _DOT, "left": x - _DOT - wide, "center": x - wide / 2}[side]
    top = {"top": y - _DOT - _LINE, "middle": y - _LINE / 2, "bottom": y + _DOT}[up]
    return left, top, left + wide, top + _LINE


def spread(heights: Sequence[float], gap: float, most: float) -> list[float]:
    """Values in their order, a gap apart, as near to their own as may be and not above the most.

    >>> spread([1.0, 1.0, 5.0], 2.0, 10.0), spread([4.0, 5.0], 2.0, 5.0)
    ([0.0, 2.0, 5.0], [3.0, 5.0])
    """
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    groups: list[tuple[float, list[int]]] = []  # the middle of a group, and who is in it
    for i in order:
        middle, members = heights[i], [i]
        while groups and _end(groups[-1], gap) > middle - gap * (len(members) - 1) / 2:
            before, earlier = groups.pop()
            total = before * len(earlier) + middle * len(members)
            members = [*earlier, *members]
            middle = total / len(members)
        groups.append((middle, members))
    found = [0.0] * len(heights)
    for middle, members in groups:
        for rank, i in enumerate(members):
            found[i] = middle + gap * (rank - (len(members) - 1) / 2)
    for i in reversed(order):
        found[i] = most = min(found[i], most)
        most -= gap
    return found


def _end(group: tuple[float, list[int]], gap: float) -> float:
    """Where the next value may stand at the earliest."""
    return group[0] + gap * (len(group[1]) - 1) / 2 + gap


def _around(point: tuple[float, float]) -> Box:
    x, y = point
    return x - _DOT, y - _DOT, x + _DOT, y + _DOT


def _meet(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
