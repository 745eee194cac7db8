"""How many threads ExecuTorch uses: one pool per process, which every program of it shares.

The pool has a thread for each processor. A program that wants fewer limits it while it runs, so programs with
different numbers take turns: the lock also keeps one from changing the pool under another.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from outrider.errors import BackendError
from outrider.targets.executorch_shim.build import Wheel

__all__ = ["ThreadPool"]

POOL = "_ZN10executorch9extension10threadpool15get_pthreadpoolEv"  # get_pthreadpool() in C++
_turn = threading.Lock()


class ThreadPool:
    """The share of the pool that one program uses."""

    def __init__(self, wheel: Wheel, threads: int | None) -> None:
        self._limit, most = _pool(wheel, os.getpid())
        if threads is not None and threads > most:
            raise BackendError(
                f"threads is {threads}, but ExecuTorch's pool has one for each of the {most} processors here"
            )
        self.threads = threads or min(most, _usable_processors())

    @contextmanager
    def mine(self) -> Iterator[None]:
        """Run a block with this number of threads."""
        with _turn:
            self._limit(self.threads)
            yield


@functools.lru_cache(maxsize=4)
def _pool(wheel: Wheel, process: int) -> tuple[Any, int]:
    """A function that limits the pool of this process, and its size."""
    try:
        library = ctypes.CDLL(str(next(wheel.libraries.glob("libexecutorch_threadpool.*"))))
        get_pool, limit = getattr(library, POOL), library.pthreadpool_set_threads_count
        count = library.pthreadpool_get_threads_count
    except (OSError, AttributeError, StopIteration) as error:
        raise BackendError(
            f"the thread pool of executorch {wheel.version} cannot be reached: {error}; "
            "install a version that outrider knows: pip install 'executorch>=1.5,<2'"
        ) from error
    get_pool.restype = ctypes.c_void_p
    limit.argtypes, limit.restype = [ctypes.c_void_p, ctypes.c_size_t], ctypes.c_size_t
    count.argtypes, count.restype = [ctypes.c_void_p], ctypes.c_size_t
    pool = get_pool()
    return functools.partial(limit, pool), int(count(pool))


def _usable_processors() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1
