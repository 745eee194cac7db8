"""Where Outrider keeps what outlives a run: fetched models, and profiles that were measured here."""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["cache_folder"]


def cache_folder() -> Path:
    """`OUTRIDER_HOME`, else `outrider` in the platform's cache folder; it need not exist yet."""
    if home := os.environ.get("OUTRIDER_HOME"):
        return Path(home).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "outrider"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "outrider"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider"
