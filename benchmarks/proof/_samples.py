"""Which samples were answered rightly, as text."""

from typing import Any

import numpy as np


def pack(right: Any) -> str:
    """Write yes and no of each sample as bits, in hexadecimal.

    >>> pack([True, False, False, True])
    '90'
    """
    return np.packbits(np.asarray(right, dtype=bool)).tobytes().hex()


def unpack(text: str, count: int) -> Any:
    """Read what :func:`pack` wrote, given the number of samples.

    >>> unpack("90", 4).tolist()
    [True, False, False, True]
    """
    bits = np.frombuffer(bytes.fromhex(text), dtype=np.uint8)
    return np.unpackbits(bits, count=count).astype(bool)
