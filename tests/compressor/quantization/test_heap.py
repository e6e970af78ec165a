"""What is freed goes back to the system."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from compressor.quantization import heap


def resident() -> int:
    """Bytes that the process has in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return 4096 * pages


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator is asked")
def test_memory_goes_back_at_once_inside_and_at_the_end() -> None:
    with heap.given_back():
        small = [np.ones(1 << 13, np.uint8) for _ in range(4000)]  # 32 MB in pieces
        before = resident()
        large = np.ones(24 << 20, np.uint8)
        assert resident() - before > 20 << 20
        del large
        assert abs(resident() - before) < 4 << 20
        del small
    assert before - resident() > 24 << 20
