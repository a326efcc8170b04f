"""From measured times to rules, and from rules to a file's table. Pure.

sizes, seconds = (8, 64), {"direct": (1e-6, 9e-6), "ring": (2e-6, 3e-6)}
crossovers(sizes, seconds, prefer=("direct",))   # -> ((17, "direct"), (None, "ring"))
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from mpidp.tuning import AVAILABLE, Entry, Rules, Table, Topology

MARGIN = 0.05  # what an algorithm may lose against the quickest before a rule of its own is made
MAX_RULES = 4

Times = Mapping[str, Sequence[float]]

_ONLY_MOVE = ("all_gather", "broadcast", "all_to_all")


def candidates(collective: str, world_size: int, *, same_bits: bool) -> tuple[str, ...]:
    """The algorithms to choose from, in the order of `mpidp.tuning.AVAILABLE`.

    With `same_bits` those whose float results are the sum in rank order to the last bit: "direct";
    every one of the library's own for up to 2 ranks, where there is one sum and it commutes; and
    all of them where nothing is reduced.
    """
    available = AVAILABLE[collective]
    if not same_bits or collective in _ONLY_MOVE:
        return available
    if world_size <= 2:
        return tuple(name for name in available if name != "mpi")
    return ("direct",)


def crossovers(sizes: Sequence[int], seconds: Times, prefer: Sequence[str] = ()) -> Rules:
    """The rules (limit_bytes, algorithm) for times by algorithm, one for each of the rising sizes.

    Of all rules with at most `MAX_RULES` lines, those that lose least beyond `MARGIN` against the
    quickest algorithm of each size; then those with the fewest lines, so that noise within the
    margin makes none; then the quickest. Equal ones go to the algorithm that is earlier in
    `prefer`. A limit is where the times would cross on straight lines between the measured sizes,
    both axes being logarithmic.
    """
    names = sorted(seconds, key=lambda name: prefer.index(name) if name in prefer else len(prefer))
    best = [min(seconds[name][i] for name in names) for i in range(len(sizes))]
    losses = {
        name: [
            math.log(max(seconds[name][i], 1e-12) / max(best[i], 1e-12)) for i in range(len(best))
        ]
        for name in names
    }
    # ways[(lines, name)]: the cheapest way to cover the sizes so far that ends with name.
    ways: dict[tuple[int, str], tuple[float, float, tuple[str, ...]]] = {}
    for i in range(len(sizes)):
        grown: dict[tuple[int, str], tuple[float, float, tuple[str, ...]]] = {}
        for name in names:
            loss = losses[name][i]
            beyond = max(0.0, loss - math.log1p(MARGIN))
            for lines in range(1, MAX_RULES + 1):
                options = [ways[lines, name]] if (lines, name) in ways else []
                options += [
                    way for (n, other), way in ways.items() if n == lines - 1 and other != name
                ]
                if i == 0:
                    options = [(0.0, 0.0, ())] if lines == 1 else []
                if options:
                    before = min(options, key=lambda way: (round(way[0], 9), round(way[1], 9)))
                    grown[lines, name] = (before[0] + beyond, before[1] + loss, (*before[2], name))
        ways = grown
    order = sorted(ways, key=lambda key: (round(ways[key][0], 9), key[0], round(ways[key][1], 9)))
    chosen = ways[order[0]][2]
    rules: list[tuple[int | None, str]] = []
    for i in range(1, len(chosen)):
        if chosen[i] != chosen[i - 1]:
            before_name, after_name = seconds[chosen[i - 1]], seconds[chosen[i]]
            limit = _crossing(sizes, before_name, after_name, i)
            rules.append((limit, chosen[i - 1]))
    return (*rules, (None, chosen[-1]))


def _crossing(sizes: Sequence[int], before: Sequence[float], after: Sequence[float], i: int) -> int:
    """The limit between sizes[i - 1], which keeps `before`, and sizes[i], which gets `after`."""
    low = math.log(max(after[i - 1], 1e-12) / max(before[i - 1], 1e-12))
    high = math.log(max(after[i], 1e-12) / max(before[i], 1e-12))
    # Noise may have put the crossing elsewhere; then the middle is as good as any point.
    share = low / (low - high) if low > 0 > high else 0.5
    limit = sizes[i - 1] * (sizes[i] / max(sizes[i - 1], 1)) ** share
    return min(max(int(limit), sizes[i - 1]), sizes[i] - 1)


def entry_for(collective: str, rules: Rules, topology: Topology) -> Entry:
    """The entry that fits this topology alone."""
    return Entry(
        (collective,),
        rules,
        min_world_size=topology.world_size,
        max_world_size=topology.world_size,
        min_nodes=topology.num_nodes,
        max_nodes=topology.num_nodes,
        min_local_size=topology.min_local_size,
        max_local_size=topology.max_local_size,
        shared_memory=topology.shared_memory,
    )


def label_of(topology: Topology) -> str:
    """The key of a topology among what was measured."""
    local = f"{topology.min_local_size}-{topology.max_local_size}"
    memory = "shared memory" if topology.shared_memory else "messages"
    return f"{topology.world_size} ranks, {topology.num_nodes} nodes of {local}, {memory}"


def merge(
    old: Table | None, name: str, entries: Sequence[Entry], measured: Mapping[str, Any]
) -> Table:
    """`old` (or an empty table called `name`) with these entries and `measured` put in.

    The new ones come first, so that a broader entry does not hide them. An old entry with the same
    conditions loses the collectives that the new ones have; all others stay.
    """
    old = old or Table(name, ())
    kept = []
    for entry in old.entries:
        replaced = {
            collective
            for new in entries
            if _conditions(new) == _conditions(entry)
            for collective in new.collectives
        }
        left = tuple(c for c in entry.collectives if c not in replaced)
        if left:
            kept.append(dataclasses.replace(entry, collectives=left))
    together: dict[str, Any] = dict(old.measured)
    for label, found in measured.items():
        before = together.get(label, {}).get("collectives", {})
        together[label] = {**found, "collectives": {**before, **found["collectives"]}}
    return Table(old.name, (*entries, *kept), together)


def _conditions(entry: Entry) -> dict[str, Any]:
    fields = dataclasses.asdict(entry)
    return {key: fields[key] for key in fields if key not in ("collectives", "rules")}
