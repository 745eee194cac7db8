"""Run Core ML packages (.mlpackage): by Core ML on macOS, elsewhere by our evaluator of their programs.

The evaluator runs the shipped file in numpy, so that a package is proven where no Apple device is; how fast a
Neural Engine or a GPU is, and what Core ML's own kernels round, it cannot say.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from outrider.errors import BackendError, UsageError
from outrider.targets.cached_graph import CachedGraph
from outrider.targets.coreml_profiles import RUNNERS, STATE_FUNCTION, CoreMLMeta
from outrider.targets.coreml_programs import COMPUTE_UNITS, EXECUTIONS, Program, open_program
from outrider.targets.npu_host import EmbeddingTable, HalfTable, open_embedding

__all__ = ["CoreMLGraph"]

Table = EmbeddingTable | HalfTable


class CoreMLGraph(CachedGraph):
    """A `contracts.Graph` over a package. Make one with `load`.

    `execution` is who runs it and `via` what that proves: "coreml" ("artifact") or "evaluator" ("evaluator": the
    shipped file in numpy, half precision stored, single precision summed).
    """

    executed_artifact = True

    def __init__(self, meta: CoreMLMeta, program: Program, embedding: Table | None) -> None:
        super().__init__(meta.graph, RUNNERS[meta.graph.profile](meta, program, embedding), "Core ML")
        self.widths = meta.widths or None
        self.execution, self.via = program.execution, EXECUTIONS[program.execution]
        self.providers = (program.provider,)

    @classmethod
    def load(
        cls,
        path: str | Path,
        meta: Mapping[str, Any],
        *,
        embedding: str | Path | None = None,
        unit: str = "cpu",
        execution: Literal["auto", "coreml", "evaluator"] = "auto",
    ) -> CoreMLGraph:
        """Open the package at `path`, a folder. `unit` is what Core ML is to use: "npu", "gpu" or "cpu".

        `embedding` is the table of a `split` graph. Raises MissingExtraError without coremltools; BackendError
        for a package that is missing, damaged or of another graph than `meta` says, or where Core ML was asked for
        and is not; UsageError for an option that is not known.
        """
        if unit not in COMPUTE_UNITS:
            raise UsageError(f"unit is {unit!r}; known: {', '.join(COMPUTE_UNITS)}")
        record = CoreMLMeta.from_json(meta)
        table = _table(record, embedding)
        program = open_program(Path(path), execution, unit)
        try:
            refuse_another_graph(record, program, Path(path))
            return cls(record, program, table)
        except BackendError:
            program.close()
            raise


def _table(meta: CoreMLMeta, path: str | Path | None) -> Table | None:
    """The embedding table of a graph that reads rows of one."""
    if path is None or meta.embedding is None:
        return None
    table = open_embedding(Path(path), meta.embedding)
    if table.columns != meta.graph.hidden_size:
        raise BackendError(
            f"{path} has rows of {table.columns}, the graph reads {meta.graph.hidden_size}; they do not belong "
            "together: export the bundle again"
        )
    return table


def refuse_another_graph(meta: CoreMLMeta, program: Program, path: Path) -> None:
    """Raise BackendError naming the first function or tensor that a package has otherwise than is said here."""
    wanted: dict[str, int | None] = {name: W for W, name in sorted(meta.functions.items())}
    wanted = wanted or {STATE_FUNCTION: None}
    missing = [name for name in wanted if name not in program.functions()]
    if missing:
        raise BackendError(
            f"{path} has no function {missing[0]!r}; it has {', '.join(program.functions())}: export the bundle again"
        )
    function, W = next(iter(wanted.items()))  # the others differ in their width alone, and open when needed
    found, said = program.tensors(function), meta.tensors(W)
    for name in dict.fromkeys((*said, *found)):
        if not _alike(found.get(name), said.get(name)):
            raise BackendError(
                f"{path}: {function!r} has {name} {_shown(found.get(name))}, the manifest says "
                f"{_shown(said.get(name))}; they do not belong together: export the bundle again"
            )


def _alike(found: tuple[int | None, ...] | None, said: tuple[int | None, ...] | None) -> bool:
    """Whether two shapes can be the same; None in either is any size, and so is a shape that is not described."""
    if found == ():
        return said is not None
    if found is None or said is None or len(found) != len(said):
        return found is said
    return all(None in pair or pair[0] == pair[1] for pair in zip(found, said, strict=True))


def _shown(shape: tuple[int | None, ...] | None) -> str:
    return (
        "none" if shape is None else str(["?" if size is None else size for size in shape]).replace("'", "")
    )
