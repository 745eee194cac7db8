"""A disk that is full at a chosen byte."""

from __future__ import annotations

import errno
import io
import os
from typing import Any


class FullDisk(io.BytesIO):
    """Takes `room` bytes, the last of them as a part of a line, and then says that there is no space."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def write(self, data: Any) -> int:
        if self.room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        part = bytes(data)[: self.room]
        self.room -= len(part)
        return super().write(part)
