"""The figures of the benchmarks: medians and their intervals."""

from __future__ import annotations

import pytest

from benchmarks.summary import median_interval


@pytest.mark.parametrize("n", [7, 101, 2000])
def test_a_median_has_an_interval_of_the_closest_samples_that_cover_it(n: int) -> None:
    found = median_interval([float(i) for i in range(n)])
    assert found.value == pytest.approx((n - 1) / 2)
    assert 0.95 <= found.coverage < 1.0
    assert found.value - found.low == pytest.approx(found.high - found.value)
    assert found.high - found.low <= max(6.0, 2.2 * n**0.5)
