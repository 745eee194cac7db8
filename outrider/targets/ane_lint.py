"""Look over a Core ML package that is meant for Apple's Neural Engine, for what is known to leave it.

`lint` applies the table of `ane_rules.py` to a program, without running it, on any system. On macOS 14.4 and later
`compute_plan` asks Core ML itself where each operation would run.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.errors import BackendError, MissingExtraError
from outrider.targets.ane_rules import RULES, Rule, Severity
from outrider.targets.mil_outline import FunctionOutline, read_outlines

__all__ = [
    "Finding",
    "LintReport",
    "PlannedOperation",
    "RuleCount",
    "compute_plan",
    "lint",
    "lint_package",
    "plan_findings",
    "report_of",
]

PLAN_SOURCE = "https://developer.apple.com/documentation/coreml/mlcomputeplan-1w21n"
UNITS = {
    "MLCPUComputeDevice": "cpu",
    "MLGPUComputeDevice": "gpu",
    "MLNeuralEngineComputeDevice": "npu",
}
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
EXAMPLES = 3


@dataclass(frozen=True)
class Finding:
    """One place to which one rule applies. `operation`: the first output of an operation, or an input's name."""

    rule: str
    severity: Severity
    function: str
    operation: str
    detail: str
    source: str


@dataclass(frozen=True)
class PlannedOperation:
    """Where Core ML would run an operation: `preferred` and `supported` are of `cpu`, `gpu`, `npu`."""

    function: str
    operation: str
    type: str
    preferred: str | None
    supported: tuple[str, ...]


@dataclass(frozen=True)
class RuleCount:
    """The findings of one rule and severity together; `examples` are the first few, `functions` all of them."""

    rule: str
    severity: Severity
    says: str
    source: str
    count: int
    functions: tuple[str, ...]
    examples: tuple[str, ...]


@dataclass(frozen=True)
class LintReport:
    """What was found in a package.

    `rules` counts everything, the most severe first; `findings` are the errors and warnings one by one. `planned`:
    Core ML's own plan is among them; `plan_note` says why it is not, or of which functions it says nothing.
    """

    operations: int  # that compute something, in all functions
    rules: tuple[RuleCount, ...]
    findings: tuple[Finding, ...]
    planned: bool = False
    plan_note: str = ""

    def count(self, severity: Severity) -> int:
        """How many findings have this severity."""
        return sum(rule.count for rule in self.rules if rule.severity == severity)

    def headline(self) -> str:
        """The counts in a line."""
        counts = f"{self.count('error')} errors, {self.count('warning')} warnings, {self.count('info')} notes"
        return f"{self.operations} operations looked over by known rules: {counts}"

    def errors(self) -> list[str]:
        """Every error in a line of its own, with its source."""
        found = (finding for finding in self.findings if finding.severity == "error")
        return [
            f"error {one.rule}: {one.function}, {one.operation}: {one.detail} ({one.source})" for one in found
        ]


def report_of(
    findings: Sequence[Finding], operations: int, planned: bool = False, plan_note: str = ""
) -> LintReport:
    """Findings in groups of one rule and severity, in the order of the rules within a severity."""
    groups: dict[tuple[str, Severity], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.rule, finding.severity), []).append(finding)
    ordered = sorted(groups, key=lambda key: SEVERITIES.index(key[1]))
    told = tuple(finding for finding in findings if finding.severity != "info")
    return LintReport(operations, tuple(_counted(groups[key]) for key in ordered), told, planned, plan_note)


def _counted(findings: Sequence[Finding]) -> RuleCount:
    first = findings[0]
    return RuleCount(
        first.rule,
        first.severity,
        SAYS[first.rule],
        first.source,
        len(findings),
        tuple(dict.fromkeys(finding.function for finding in findings)),
        tuple(f"{finding.operation}: {finding.detail}" for finding in findings[:EXAMPLES]),
    )


SAYS: Mapping[str, str] = {
    **{rule.id: rule.says for rule in RULES},
    "compute-plan": "Core ML itself would not run it on the Neural Engine",
}


def lint(functions: Iterable[FunctionOutline], rules: Sequence[Rule] = RULES) -> list[Finding]:
    """Every place in a program to which a rule applies, in the order of the rules."""
    outlines = list(functions)
    return [
        Finding(rule.id, spot.severity or rule.severity, outline.name, spot.place, spot.detail, rule.source)
        for rule in rules
        for outline in outlines
        for spot in rule.find(outline)
    ]


def plan_findings(plan: Iterable[PlannedOperation]) -> list[Finding]:
    """What Core ML's plan puts elsewhere: an error where the Neural Engine cannot, a warning where it would not."""
    found = []
    for step in plan:
        if step.preferred in (None, "npu"):
            continue
        severity: Severity = "warning" if "npu" in step.supported else "error"
        can = "could run" if severity == "warning" else "cannot run"
        detail = f"{step.type} would run on the {step.preferred}; the Neural Engine {can} it"
        found.append(Finding("compute-plan", severity, step.function, step.operation, detail, PLAN_SOURCE))
    return found


Planner = Callable[[Path], Sequence[PlannedOperation]]


def lint_package(package: Path, planner: Planner | None = None, *, ask: bool = True) -> LintReport:
    """Look over the `.mlpackage` in this folder, and `ask` where its operations would run.

    `planner` None asks Core ML on macOS 14.4 and later, which compiles the package first. Raises BackendError for
    a package that cannot be read, MissingExtraError without coremltools.
    """
    outlines = read_outlines(package)
    findings, note = lint(outlines), no_plan_here() if planner is None and ask else ""
    note = note if ask else "it was not asked"
    planned = not note
    if planned:
        try:
            plan = (planner or compute_plan)(package)
            findings += plan_findings(plan)
            note = _unplanned(outlines, plan)
        except (BackendError, MissingExtraError) as error:
            planned, note = False, str(error)
    return report_of(findings, sum(len(outline.steps) for outline in outlines), planned, note)


def _unplanned(outlines: Sequence[FunctionOutline], plan: Sequence[PlannedOperation]) -> str:
    """Which functions a plan is silent about: coremltools cannot ask for one by name."""
    told = {step.function for step in plan if step.preferred is not None}
    silent = [outline.name for outline in outlines if outline.name not in told]
    return f"Core ML's plan says nothing of {', '.join(silent)}" if silent else ""


def no_plan_here() -> str:
    """Why this system cannot tell where operations would run; empty where it can."""
    if sys.platform != "darwin":
        return "only macOS 14.4 and later can tell where Core ML runs an operation"
    version = tuple(int(part) for part in platform.mac_ver()[0].split(".")[:2])
    return "" if version >= (14, 4) else f"macOS {platform.mac_ver()[0]} has no MLComputePlan; 14.4 has"


def compute_plan(package: Path) -> list[PlannedOperation]:
    """Where Core ML would run each operation with CPU and Neural Engine to choose from; macOS 14.4 and later.

    Compiles the package for this Mac first, which can take minutes. Raises BackendError when Core ML refuses.
    """
    try:
        import coremltools
        from coremltools.models.compute_plan import MLComputePlan
    except ImportError as error:
        raise MissingExtraError("coremltools", "coreml") from error
    units = coremltools.ComputeUnit.CPU_AND_NE
    try:
        compiled = coremltools.models.utils.compile_model(str(package))
        plan = MLComputePlan.load_from_path(compiled, compute_units=units)
    except Exception as error:  # Core ML raises RuntimeError and ValueError of its own, of many texts
        raise BackendError(f"Core ML has no plan for {package}: {error}") from error
    return planned_operations(plan)


def planned_operations(plan: Any) -> list[PlannedOperation]:
    """The operations of coremltools' `MLComputePlan` that run somewhere; constants have no place."""
    return [
        step
        for name, function in plan.model_structure.program.functions.items()
        for step in _planned(plan, name, function.block.operations)
    ]


def _planned(plan: Any, function: str, operations: Iterable[Any]) -> Iterable[PlannedOperation]:
    for operation in operations:
        usage = plan.get_compute_device_usage_for_mlprogram_operation(operation)
        if usage is not None:
            kind = operation.operator_name.rpartition(".")[2]
            yield PlannedOperation(
                function,
                operation.outputs[0].name if operation.outputs else kind,
                kind,
                _unit(usage.preferred_compute_device),
                tuple(unit for unit in map(_unit, usage.supported_compute_devices) if unit),
            )
        for block in operation.blocks:
            yield from _planned(plan, function, block.operations)


def _unit(device: Any) -> str | None:
    return UNITS.get(type(device).__name__)
