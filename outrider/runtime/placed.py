"""Where the roles of a loaded bundle run."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Placement"]


@dataclass(frozen=True)
class Placement:
    """Where a role runs, and why the graphs that its bundle prefers were passed over."""

    role: str
    backend: str
    unit: str
    profile: str
    path: str
    prefill_width: int | None = None
    providers: tuple[str, ...] = ()
    passed_over: tuple[str, ...] = ()
    emulated: bool = False  # its unit is not here: what it computes holds, how long it takes does not

    def __str__(self) -> str:
        """One line, and one more for each graph passed over."""
        where = f"{self.backend} on {', '.join(self.providers) or self.unit}"
        where += f" on {self.unit}" if ":" in self.unit else ""
        where += ", EMULATED" if self.emulated else ""
        lines = [f"{self.role}: {self.path} ({self.profile}) by {where}"]
        return "\n  passed over ".join([*lines, *self.passed_over])
