"""Importing this module puts every operation of the evaluator into the table."""

from outrider.targets.coreml_reference import (
    ops_activation,
    ops_binary,
    ops_conv,
    ops_create,
    ops_gather,
    ops_image,
    ops_linear,
    ops_norm,
    ops_pool,
    ops_quantize,
    ops_reduction,
    ops_shape,
    ops_slice,
    ops_unary,
)

__all__ = [
    "ops_activation",
    "ops_binary",
    "ops_conv",
    "ops_create",
    "ops_gather",
    "ops_image",
    "ops_linear",
    "ops_norm",
    "ops_pool",
    "ops_quantize",
    "ops_reduction",
    "ops_shape",
    "ops_slice",
    "ops_unary",
]
