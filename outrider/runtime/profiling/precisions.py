"""The other precisions in which a bundle holds a role, as far as this machine can run them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.runtime.backends import RoleOptions, why_passed_over

if TYPE_CHECKING:
    from outrider.runtime.pipeline import Pipeline

__all__ = ["Precision", "other_precisions"]


@dataclass(frozen=True)
class Precision:
    """Another precision of one role: its name in a profile, and what `outrider.load` needs to choose it."""

    name: str
    options: Mapping[str, str]


def other_precisions(pipeline: Pipeline, loading: Mapping[str, Any]) -> list[Precision]:
    """One for each recipe that a role has beside the one that was loaded, target first, in order of preference.

    Left out are recipes that nothing here can run but an emulator, and roles whose backend or unit the user
    chose (`loading`, as given to `load`).
    """
    found: list[Precision] = []
    for placed in pipeline.placement:
        role = placed.role
        if pipeline.manifest is None or loading.get(f"{role}_backend") or loading.get(f"{role}_unit"):
            continue
        graphs = pipeline.manifest.roles[role].by_preference()
        seen = {graph.recipe for graph in graphs if graph.path == placed.path}
        for graph in graphs:
            if graph.recipe not in seen and why_passed_over(role, graph, RoleOptions()) is None:
                seen.add(graph.recipe)
                chosen = {f"{role}_backend": graph.backend, f"{role}_unit": graph.unit}
                found.append(Precision(f"{graph.recipe} {role}", chosen))
    return found
