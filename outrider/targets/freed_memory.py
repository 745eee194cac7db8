"""Give memory that was freed back to the system, where the C library would keep it for itself."""

from __future__ import annotations

import ctypes
import sys

__all__ = ["return_freed_memory"]


def return_freed_memory() -> bool:
    """Trim the heap; whether anything went back. Only glibc can: elsewhere nothing happens.

    glibc keeps freed blocks below its mmap threshold, which grows up to 32 MB with what a process frees: most of a
    model's matrices. See malloc_trim(3) and mallopt(3).
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    return bool(trim(0)) if trim is not None else False
