"""Bucket planning: every leaf in one place, no bucket too large or mixed, the order kept."""

import numpy as np
import pytest

from mpidp.reducer.plan import ALIGNMENT_BYTES, plan_buckets, schema_difference, schema_hash
from mpidp.training.adapter import Leaf

LEAVES = [
    Leaf("embedding", (1000, 16), "float32"),
    Leaf("scale", (), "float64"),
    Leaf("weight", (100, 70), "float32"),
    Leaf("empty", (0, 3), "float32"),
    Leaf("half", (33,), "float16"),
    Leaf("bias", (7,), "float32"),
]
ITEM_BYTES = {"float32": 4, "float64": 8, "float16": 2}


@pytest.mark.parametrize("bucket_bytes", [1, 512, 30_000, 1 << 20])
@pytest.mark.parametrize("first_bucket_bytes", [1, 4096, 1 << 20])
@pytest.mark.parametrize("order", [None, [2, 0, 5, 4, 3, 1]])
def test_every_leaf_once_within_the_limits(bucket_bytes, first_bucket_bytes, order):
    plan = plan_buckets(
        LEAVES, bucket_bytes=bucket_bytes, first_bucket_bytes=first_bucket_bytes, order=order
    )
    found = [slot.leaf for bucket in plan.buckets for slot in bucket.slots]
    assert sorted(found) == list(range(len(LEAVES)))
    for bucket in plan.buckets:
        used = np.zeros(bucket.count, dtype=int)
        for slot in bucket.slots:
            assert LEAVES[slot.leaf].dtype == bucket.dtype
            assert slot.count == LEAVES[slot.leaf].count
            assert slot.offset * ITEM_BYTES[bucket.dtype] % ALIGNMENT_BYTES == 0
            used[slot.offset : slot.offset + slot.count] += 1
        assert used.max(initial=0) <= 1
        limit = max(bucket_bytes, first_bucket_bytes)
        assert len(bucket.slots) == 1 or bucket.count * ITEM_BYTES[bucket.dtype] <= limit
        order_here = [slot.leaf for slot in bucket.slots]
        wanted = list(reversed(range(len(LEAVES)))) if order is None else order
        assert order_here == sorted(order_here, key=wanted.index)
    for leaf in range(len(LEAVES)):
        number, slot = plan.place_of(leaf)
        assert slot in plan.buckets[number].slots


def test_first_bucket_is_small_and_holds_the_last_leaves():
    plan = plan_buckets(LEAVES, bucket_bytes=1 << 20, first_bucket_bytes=64)
    assert [slot.leaf for slot in plan.buckets[0].slots] == [5, 3]  # 3 is empty


def test_order_must_be_a_permutation():
    with pytest.raises(ValueError, match="no permutation"):
        plan_buckets(LEAVES, order=[0, 0, 1, 2, 3, 4])


@pytest.mark.parametrize(
    "changed",
    [
        Leaf("other", (7,), "float32"),
        Leaf("bias", (8,), "float32"),
        Leaf("bias", (7,), "float64"),
        Leaf("bias", (7,), "float32", "cuda"),
    ],
)
def test_schema_hash_tells_every_difference(changed):
    assert schema_hash(LEAVES) == schema_hash(list(LEAVES))
    assert schema_hash(LEAVES) != schema_hash([*LEAVES[:-1], changed])
    assert schema_hash(LEAVES) != schema_hash(LEAVES[:-1])


def test_schema_difference_names_rank_and_parameter():
    text, odd = schema_difference([LEAVES, LEAVES, [*LEAVES[:-1], Leaf("bias", (8,), "float32")]])
    assert odd == [2]
    assert "rank 2: 6 parameters" in text
    assert "number 5: bias float32[8]" in text
