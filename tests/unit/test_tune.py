"""From made-up times to rules, and from rules to a file's table."""

import json

import pytest

from mpidp import tuning
from mpidp.errors import InvalidArgumentError
from mpidp.tune import choice
from mpidp.tuning import AVAILABLE, Entry, Table, Topology

TWO = Topology(2, 1, 2, 2, True)
FOUR = Topology(4, 2, 2, 2, False)
SIZES = (8, 128, 2048, 32768)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({"direct": (1, 2, 3, 4)}, ["direct"]),
        ({"direct": (1, 1, 9, 9), "ring": (9, 9, 1, 1)}, ["direct", "ring"]),
        ({"direct": (1.04, 1, 1.04, 1), "ring": (1, 1.04, 1, 1.04)}, ["direct"]),
        ({"direct": (1, 1, 1, 1.06), "ring": (2, 2, 2, 1)}, ["direct", "ring"]),
        ({"direct": (1, 1, 1, 1.04), "ring": (2, 2, 2, 1)}, ["direct"]),
        ({"ring": (1, 1, 1, 1), "direct": (1, 1, 1, 1)}, ["direct"]),
    ],
)
def test_a_rule_needs_more_than_the_margin(seconds, expected):
    rules = choice.crossovers(SIZES, seconds, prefer=("direct",))
    assert [name for _, name in rules] == expected
    assert Entry(("all_reduce",), rules).rules == rules


def test_limits_are_where_the_lines_cross():
    rules = choice.crossovers((16, 256), {"direct": (1, 4), "ring": (4, 1)})
    assert rules == ((64, "direct"), (None, "ring"))


def test_there_are_at_most_four_rules():
    sizes = tuple(8 << i for i in range(8))
    direct = tuple(1.0 if i % 2 else 3.0 for i in range(8))
    rules = choice.crossovers(sizes, {"direct": direct, "ring": direct[::-1]})
    assert len(rules) == choice.MAX_RULES
    assert rules[-1][0] is None


def measured(collective, seconds):
    times = {"nbytes": [8], "seconds": {"ring": [seconds]}}
    record = {"cores": 2, "mpi": "M", "alpha": 1e-6, "beta": None, "gamma": 0.0}
    return {**record, "collectives": {collective: times}}


def test_other_topologies_stay_and_the_same_one_is_replaced():
    ring, direct = ((None, "ring"),), ((None, "direct"),)
    label = choice.label_of(TWO)
    broad = Entry(("all_reduce",), ring)
    other = choice.entry_for("all_reduce", ring, FOUR)
    both = choice.entry_for("all_reduce", ring, TWO)
    gather = choice.entry_for("all_gather", ring, TWO)
    old = Table("mine", (broad, other, both, gather), {label: measured("all_gather", 1.0)})
    new = choice.entry_for("all_reduce", direct, TWO)
    table = choice.merge(old, "unused", [new], {label: measured("all_reduce", 2.0)})
    assert table.entries == (new, broad, other, gather)
    assert table.name == "mine"
    assert set(table.measured[label]["collectives"]) == {"all_reduce", "all_gather"}
    assert tuning.select("all_reduce", 8, TWO, table) == "direct"
    assert tuning.select("all_reduce", 8, FOUR, table) == "ring"
    assert Table.from_json(table.to_json()) == table


@pytest.mark.parametrize("collective", AVAILABLE)
def test_candidates(collective):
    assert choice.candidates(collective, 4, same_bits=False) == AVAILABLE[collective]
    reduces = "reduce" in collective
    assert ("ring" in choice.candidates(collective, 4, same_bits=True)) == (
        not reduces and "ring" in AVAILABLE[collective]
    )
    assert ("mpi" in choice.candidates(collective, 2, same_bits=True)) == (not reduces)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ((), 3, "measured: expected an object"),
        (("t",), {}, "'t': expected an object with exactly cores"),
        (("t", "cores"), 0, "'t': cores"),
        (("t", "alpha"), -1, "'t': alpha"),
        (("t", "mpi"), None, "'t': mpi"),
        (("t", "collectives"), {"gossip": {}}, "gossip: expected one of"),
        (("t", "collectives", "all_reduce"), {}, "all_reduce: expected an object"),
        (("t", "collectives", "all_reduce", "nbytes"), [8, 8], "sizes must rise"),
        (("t", "collectives", "all_reduce", "seconds"), {"quick": [1]}, "no algorithm 'quick'"),
        (("t", "collectives", "all_reduce", "seconds"), {"ring": []}, "ring: expected a list of 1"),
        (("t", "collectives", "all_reduce", "seconds"), {"ring": ["1"]}, "ring: expected numbers"),
    ],
)
def test_a_wrong_record_is_refused_with_its_place(path, value, message):
    document = {"schema_version": 1, "name": "t", "entries": []}
    document["measured"] = {"t": measured("all_reduce", 1.0)}
    Table.from_json(json.dumps(document))
    *parents, last = ("measured", *path)
    place = document
    for key in parents:
        place = place[key]
    place[last] = value
    with pytest.raises(InvalidArgumentError, match=message):
        Table.from_json(json.dumps(document))


@pytest.mark.parametrize(
    "fields", [{"min_nodes": "1"}, {"max_world_size": 0}, {"shared_memory": 1}], ids=str
)
def test_a_wrong_condition_is_refused(fields):
    entry = {"collectives": ["all_reduce"], "rules": [[None, "ring"]], **fields}
    text = json.dumps({"schema_version": 1, "name": "t", "entries": [entry]})
    with pytest.raises(InvalidArgumentError, match=f"entry 0.*{next(iter(fields))}"):
        Table.from_json(text)
