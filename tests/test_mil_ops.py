"""The operations of the Core ML evaluator as a whole: all are tested, and all take what coremltools writes."""

from __future__ import annotations

import inspect
import logging
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.targets.coreml_reference.registry import known_operations, lookup
from tests import (
    test_mil_ops_conv,
    test_mil_ops_elementwise,
    test_mil_ops_gather,
    test_mil_ops_image,
    test_mil_ops_linear,
    test_mil_ops_reduction,
    test_mil_ops_shape,
)
from tests.mil_cases import Case, outputs, run

DOCUMENT = Path(__file__).parents[1] / "docs" / "mil-evaluator.md"
PARTS = (
    test_mil_ops_conv,
    test_mil_ops_elementwise,
    test_mil_ops_gather,
    test_mil_ops_image,
    test_mil_ops_linear,
    test_mil_ops_reduction,
    test_mil_ops_shape,
)
CASES: list[Case] = [case for part in PARTS for case in part.CASES]
# Constants, constexpr operations and states are the executor's; tests/test_mil_program.py has them.
OPERATIONS = [
    name
    for name in known_operations()
    if ".ops_" in lookup(name, function="test", output="y").compute.__module__
]


def parameters_of(name: str) -> dict[str, inspect.Parameter]:
    compute = lookup(name, function="test", output="y").compute
    return dict(inspect.signature(compute).parameters)


def test_every_operation_that_is_known_has_a_case() -> None:
    assert len(OPERATIONS) > 130
    assert set(OPERATIONS) == {case.operation for case in CASES}


def test_every_optional_parameter_is_given_in_some_case() -> None:
    given = {(case.operation, name) for case in CASES for name in case.parameters}
    missing = [
        (operation, name)
        for operation in OPERATIONS
        for name, parameter in parameters_of(operation).items()
        if parameter.default is not parameter.empty and (operation, name) not in given
    ]
    assert not missing


def test_what_an_operation_calls_exact_needs_no_rounding_to_half_precision() -> None:
    """The executor leaves the results of operations that say `rounds=False` as they are."""
    exact = [case for case in CASES if not lookup(case.operation, function="test", output="y").rounds]
    assert len(exact) > 150
    for case in exact:
        for result in outputs(run(case.operation, **case.parameters)):
            if result.dtype == np.float32:
                np.testing.assert_array_equal(result, result.astype(np.float16), err_msg=str(case))


def test_the_document_counts_them() -> None:
    (count,) = re.findall(r"(\d+) operations\.", DOCUMENT.read_text())
    assert int(count) == len(known_operations())


@pytest.fixture(scope="module")
def coremltools() -> Any:
    """coremltools, without what it says on import and about this version of PyTorch."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield pytest.importorskip("coremltools", reason="the extra coreml is not installed")
    logging.disable(level)


def test_parameters_have_the_names_of_mil_and_are_optional_where_mil_says_so(coremltools: Any) -> None:
    from coremltools.converters.mil.mil.ops.registry import SSAOpRegistry

    wrong = []
    for name in OPERATIONS:
        ours = {key: one.default is not one.empty for key, one in parameters_of(name).items()}
        versions = [kind.input_spec.input_types for kind in SSAOpRegistry.core_ops[name].values()]
        theirs = {key: one.optional for spec in versions for key, one in spec.items()}
        wrong += [(name, ours, theirs)] * (ours != theirs)
    assert not wrong


# Where coremltools' own folding departs from what its notes define, the notes (and PyTorch) are followed.
FOLDED_WRONG = {
    ("clamped_relu", "a negative beta"): "adds the two sides",
    ("concat", "in turns"): "ignores interleave",
    ("concat", "in turns along a later axis"): "ignores interleave",
    ("reduce_log_sum_exp", "all minus infinity"): "nan for minus infinity",
    ("topk", "all of them"): "k = -1 drops the last",
    **dict.fromkeys(
        {(case.operation, case.label) for case in CASES if case.operation == "scatter_along_axis"},
        "ignores the mode",
    ),
}


def test_constants_that_coremltools_folds_come_out_the_same(coremltools: Any) -> None:
    folded = []
    for case in CASES:
        if (case.operation, case.label) not in FOLDED_WRONG:
            folded += [case] if agrees_with_folding(coremltools, case) else []
    assert len(folded) > 250
    assert len({case.operation for case in folded}) > 90


def agrees_with_folding(coremltools: Any, case: Case) -> bool:
    """Whether coremltools folds this case (the builder refuses some, and folds no convolutions); then it must agree."""
    from coremltools.converters.mil.mil import Builder, Function

    parameters = {key: tuple(one) if isinstance(one, list) else one for key, one in case.parameters.items()}
    target = coremltools.target.iOS16 if "iOS 16" in case.label else coremltools.target.iOS18
    with Function({}, opset_version=target):
        try:
            built = getattr(Builder, case.operation)(**parameters)
        except (ValueError, TypeError, IndexError, AssertionError):
            return False
    theirs = built if isinstance(built, tuple | list) else (built,)
    if any(one.val is None for one in theirs):
        return False
    ours = outputs(run(case.operation, **case.parameters))
    for found, wanted in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(found, np.asarray(wanted.val), rtol=1e-4, atol=1e-4, err_msg=str(case))
    return True
