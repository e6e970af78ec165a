"""Whether memory that is let go goes back to the system at once (glibc; elsewhere nothing is changed).

glibc learns from the first large block that is freed to keep blocks of that size. A graph that was read and
cut, in thousands of pieces, then leaves holes behind which the process keeps for good.
Source: mallopt(3), M_MMAP_THRESHOLD and M_TRIM_THRESHOLD.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["given_back"]

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h
_SMALL, _LARGE = 1 << 16, 1 << 25


@contextmanager
def given_back() -> Iterator[None]:
    """What is freed inside, and at the end, goes back; afterwards blocks up to 32 MiB are kept for reuse."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if library is None or not hasattr(library, "mallopt"):
        yield
        return
    library.mallopt(_MMAP_THRESHOLD, _SMALL)
    try:
        yield
    finally:
        gc.collect()
        library.malloc_trim(0)
        library.mallopt(_MMAP_THRESHOLD, _LARGE)
        library.mallopt(_TRIM_THRESHOLD, 2 * _LARGE)
