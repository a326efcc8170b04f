"""Which gradients share a bucket. Pure: the same leaves give the same plan on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpidp.buffers import numpy_dtype
from mpidp.training.adapter import Leaf

DEFAULT_BUCKET_BYTES = 25 << 20
# Small, so that the first exchange starts early in the backward pass.
DEFAULT_FIRST_BUCKET_BYTES = 1 << 20
# A leaf starts on a cache line, so that views are aligned for any instruction set.
ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class Slot:
    """Where a leaf's gradient lies in its bucket: `count` elements from `offset` on."""

    leaf: int
    offset: int
    count: int


@dataclass(frozen=True)
class Bucket:
    """Gradients of one dtype and device that are exchanged together; `count` elements in all."""

    dtype: str
    device: str
    slots: tuple[Slot, ...]
    count: int


@dataclass(frozen=True)
class Plan:
    """The buckets, in launch order."""

    buckets: tuple[Bucket, ...]

    def place_of(self, leaf: int) -> tuple[int, Slot]:
        """(bucket number, slot) of a leaf."""
        for number, bucket in enumerate(self.buckets):
            for slot in bucket.slots:
                if slot.leaf == leaf:
                    return number, slot
        raise KeyError(leaf)


def plan_buckets(
    leaves: Sequence[Leaf],
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    first_bucket_bytes: int = DEFAULT_FIRST_BUCKET_BYTES,
    order: Sequence[int] | None = None,
) -> Plan:
    """Fills buckets with the leaves in `order` (default: reverse registration order).

    A backward pass produces gradients roughly in the reverse order of registration. Each bucket
    holds one dtype on one device and at most `bucket_bytes` (the first `first_bucket_bytes`), but
    always at least one leaf.
    """
    order = list(reversed(range(len(leaves)))) if order is None else list(order)
    if sorted(order) != list(range(len(leaves))):
        raise ValueError(f"order {order} is no permutation of {len(leaves)} leaves")
    done: list[Bucket] = []
    open_slots: dict[tuple[str, str], list[Slot]] = {}
    open_counts: dict[tuple[str, str], int] = {}

    def close(key: tuple[str, str]) -> None:
        slots = tuple(open_slots.pop(key))
        done.append(Bucket(key[0], key[1], slots, open_counts.pop(key)))

    for leaf in order:
        key = (leaves[leaf].dtype, leaves[leaf].device)
        item_bytes = numpy_dtype(key[0]).itemsize
        granule = max(1, ALIGNMENT_BYTES // item_bytes)
        padded = -(-leaves[leaf].count // granule) * granule
        limit = bucket_bytes if done else first_bucket_bytes
        if key in open_slots and (open_counts[key] + padded) * item_bytes > limit:
            close(key)
        slots = open_slots.setdefault(key, [])
        offset = open_counts.setdefault(key, 0)
        slots.append(Slot(leaf, offset, leaves[leaf].count))
        open_counts[key] = offset + padded
    # By the leaf that completes each, so that no bucket waits behind one that completes later.
    for key in sorted(open_slots, key=lambda key: order.index(open_slots[key][-1].leaf)):
        close(key)
    return Plan(tuple(done))


def schema_hash(leaves: Sequence[Leaf]) -> str:
    """Of names, shapes, dtypes and devices, in order: equal on ranks that can train together."""
    text = "\n".join(f"{leaf.name} {leaf.shape} {leaf.dtype} {leaf.device}" for leaf in leaves)
    return hashlib.sha256(text.encode()).hexdigest()


def schema_difference(schemas: Sequence[Sequence[Leaf]]) -> tuple[str, list[int]]:
    """A table of where the ranks' leaves differ from rank 0's, and which ranks do."""
    odd = [rank for rank, leaves in enumerate(schemas) if list(leaves) != list(schemas[0])]
    lines = ["the ranks' trainable parameters differ:"]
    for rank in [0, *odd[:8]]:
        leaves = schemas[rank]
        elements = sum(leaf.count for leaf in leaves)
        first = next(
            (
                index
                for index in range(max(len(leaves), len(schemas[0])))
                if leaves[index : index + 1] != schemas[0][index : index + 1]
            ),
            None,
        )
        note = ""
        if first is not None:
            here = leaves[first] if first < len(leaves) else None
            shown = f"{here.name} {here.dtype}{list(here.shape)}" if here else "missing"
            note = f"; the first that differs is number {first}: {shown}"
        lines.append(f"  rank {rank}: {len(leaves)} parameters, {elements} elements{note}")
    lines.append("Build the same model, with the same parameters frozen, on every rank.")
    return "\n".join(lines), odd


def views_of(bucket: Bucket, array: np.ndarray, leaves: Sequence[Leaf]) -> dict[int, np.ndarray]:
    """The leaves' gradients as views of the bucket's memory, by leaf."""
    return {
        slot.leaf: array[slot.offset : slot.offset + slot.count].reshape(leaves[slot.leaf].shape)
        for slot in bucket.slots
    }
