"""Stage 4, merging: what is kept."""

from holdfast.merging.batch_norm import reestimate_statistics
from holdfast.merging.keep import Keep
from holdfast.merging.wise_ft import WiseFT

__all__ = ["Keep", "WiseFT", "reestimate_statistics"]
