"""Weighted sums: correctly rounded, whatever the order and the split."""

import math
import random

from mpidp.training.adapter import BatchResult
from mpidp.training.metrics import sum_results


def test_sum_does_not_depend_on_the_order():
    generator = random.Random(3)
    results = [
        BatchResult(
            generator.randint(0, 9), generator.uniform(-1, 1) * 10 ** generator.randint(-8, 8)
        )
        for _ in range(200)
    ]
    expected = sum_results(results)
    for _ in range(5):
        generator.shuffle(results)
        assert sum_results(results) == expected


def test_names_of_some_ranks_only():
    total = sum_results([BatchResult(), BatchResult(2, 1.5, {"a": 1}), BatchResult(1, 1, {"b": 2})])
    assert total == BatchResult(3, 2.5, {"a": 1, "b": 2})


def test_infinities_and_nan_stay_visible():
    both = [BatchResult(1, math.inf), BatchResult(1, -math.inf)]
    assert math.isnan(sum_results(both).loss)
    assert sum_results([BatchResult(1, math.inf), BatchResult(1, 1.0)]).loss == math.inf


def test_results_add():
    left, right = BatchResult(1, 2, {"a": 3}), BatchResult(4, 5, {"b": 6})
    assert left + right == BatchResult(5, 7, {"a": 3, "b": 6})
