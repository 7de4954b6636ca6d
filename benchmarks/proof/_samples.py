"""The two parts of a test set, and the outcomes of its samples as short text.

The paired bootstrap needs the outcome of every sample, and a record should stay small.
"""

from __future__ import annotations

from typing import Any

import numpy as np

#: The rows that settings are chosen on, and those that are reported.
PARTS = {"choose": slice(0, None, 2), "report": slice(1, None, 2)}


def pack(bits: Any) -> str:
    """One bit per sample, in hexadecimal digits.

    >>> pack([True, False, True, True])
    'b0'
    """
    return np.packbits(np.asarray(bits, dtype=bool)).tobytes().hex()


def unpack(text: str, n: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """The outcomes of ``n`` samples.

    >>> unpack("b0", 4).tolist()
    [True, False, True, True]
    """
    found = np.frombuffer(bytes.fromhex(text), np.uint8)
    if len(found) != -(-n // 8):
        raise ValueError(f"{n} samples take {-(-n // 8)} bytes, but the text has {len(found)}")
    return np.unpackbits(found, count=n).astype(bool)


def pack_numbers(values: Any, decimals: int = 4) -> str:
    """Four hexadecimal digits per number, which is rounded.

    >>> pack_numbers([0.5, -1.0])
    '1388d8f0'
    """
    whole = np.rint(np.asarray(values, dtype=np.float64) * 10**decimals)
    limits = np.iinfo(np.int16)
    if not ((whole >= limits.min) & (whole <= limits.max)).all():
        most = limits.max / 10**decimals
        raise ValueError(
            f"with {decimals} decimals, numbers are packed from {-most:g} to {most:g}, but they "
            f"are from {np.min(values):g} to {np.max(values):g}: use fewer decimals"
        )
    return bytes(whole.astype(">i2")).hex()


def unpack_numbers(text: str, decimals: int = 4) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The rounded numbers.

    >>> unpack_numbers("1388d8f0").tolist()
    [0.5, -1.0]
    """
    whole = np.frombuffer(bytes.fromhex(text), ">i2")
    found: np.ndarray[Any, np.dtype[np.float64]] = whole.astype(np.float64) / 10**decimals
    return found
