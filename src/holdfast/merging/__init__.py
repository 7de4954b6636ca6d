"""Stage 4, merging: what is kept."""

from holdfast.merging.wise_ft import WiseFT

__all__ = ["WiseFT"]
