"""Page-aligned scratch buffers."""

from __future__ import annotations

import subprocess
import sys
from mmap import PAGESIZE
from pathlib import Path

from ucp.read.casting import page_aligned, scratch_buffer

IN_A_FORK = """
import os
from ucp.read.casting import scratch_buffer
scratch_buffer("test", 8)[:] = 1
pid = os.fork()
if pid == 0:
    scratch_buffer("test", 8)[:] = 2
    os._exit(0)
os.waitpid(pid, 0)
print(*scratch_buffer("test", 8))
"""


def test_a_fork_has_its_own_buffers(project: Path) -> None:
    """Workers that are forked after their parent has used a buffer must not read into each other's."""
    done = subprocess.run([sys.executable, "-c", IN_A_FORK], cwd=project, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1"] * 8


def test_a_buffer_is_page_aligned_and_reused() -> None:
    block = scratch_buffer("test", 5000)
    assert block.ctypes.data % PAGESIZE == 0
    assert block.size == 5000
    assert scratch_buffer("test", 100).ctypes.data == block.ctypes.data
    assert page_aligned(0).size == PAGESIZE
