"""State of a stateful program: named fp16 buffers that outlive a prediction, as Core ML's `MLState` holds them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from outrider.errors import BackendError
from outrider.targets.coreml_reference.features import FeatureSpec
from outrider.targets.coreml_reference.types import DTYPES

__all__ = ["MilState"]

Array = np.ndarray[Any, np.dtype[Any]]


class MilState:
    """The buffers of one conversation, zero at first. Give the same object to each prediction that goes on from it.

    A buffer of fp16 is kept as float32 numbers on the fp16 grid, so that no prediction has to widen it.
    """

    def __init__(self, specs: Mapping[str, FeatureSpec]) -> None:
        self.specs = dict(specs)
        self.buffers: dict[str, Array] = {}
        self.reset()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the buffers."""
        return tuple(self.specs)

    def reset(self) -> None:
        """Set every buffer to zero."""
        for name, spec in self.specs.items():
            self.buffers[name] = np.zeros(
                spec.shape, np.float32 if spec.dtype == "fp16" else DTYPES[spec.dtype]
            )

    def read(self, name: str) -> Array:
        """A copy of a buffer in its own element type (float16 for nearly all)."""
        return self.buffers[self._known(name)].astype(DTYPES[self.specs[name].dtype])

    def write(self, name: str, array: Array) -> None:
        """Replace a buffer as a whole; BackendError for an unknown name, another shape or another element type."""
        spec = self.specs[self._known(name)]
        if array.shape != spec.shape or array.dtype != DTYPES[spec.dtype]:
            raise BackendError(
                f"the state {name!r} is {DTYPES[spec.dtype].name} {list(spec.shape)}, and {array.dtype} "
                f"{list(array.shape)} was to be written"
            )
        self.buffers[name] = array.astype(self.buffers[name].dtype)

    def _known(self, name: str) -> str:
        if name not in self.specs:
            raise BackendError(f"there is no state {name!r}; there are: {', '.join(self.specs) or 'none'}")
        return name
