"""The choice of algorithms: total, pure, and possible on the topology."""

import itertools
import json

import pytest

from mpidp import _core, tuning
from mpidp.config import ALGORITHMS
from mpidp.errors import InvalidArgumentError
from mpidp.tuning import AVAILABLE, BUILT_IN, COLLECTIVES, UNLIMITED, Entry, Table, Topology

ONE_NODE = Topology(4, 1, 4, 4, True)
NO_SHARED = Topology(4, 1, 4, 4, False)
ONE_EACH = Topology(8, 8, 1, 1, True)
FOUR_BY_TWO = Topology(8, 4, 2, 2, True)
UNEVEN = Topology(7, 2, 3, 4, True)
MESSAGES = Topology(8, 4, 2, 2, False)
ALONE = Topology(1, 1, 1, 1, True)
TOPOLOGIES = (ONE_NODE, NO_SHARED, ONE_EACH, FOUR_BY_TWO, UNEVEN, MESSAGES, ALONE)

RING = Table("ring", (Entry(("all_reduce",), ((None, "ring"),)),))


@pytest.mark.parametrize(
    ("collective", "topology"), list(itertools.product(COLLECTIVES, TOPOLOGIES)), ids=str
)
def test_every_size_has_an_available_algorithm(collective, topology):
    rules = tuning.rules_for(collective, topology)
    limits = [limit for limit, _ in rules]
    assert limits == sorted(set(limits))
    assert limits[-1] == UNLIMITED
    for limit, algorithm in rules:
        assert algorithm in AVAILABLE[collective]
        assert tuning.select(collective, limit, topology) == algorithm
    assert tuning.select(collective, 0, topology) == rules[0][1]


@pytest.mark.parametrize(
    ("collective", "algorithm"), list(itertools.product(COLLECTIVES, ALGORITHMS)), ids=str
)
def test_availability_is_that_of_the_extension(collective, algorithm):
    # These two have no schedule: MPI's own, and the one made of others.
    if algorithm in ("mpi", "hierarchical", "auto"):
        assert not _core.has_schedule(collective, algorithm)
    else:
        assert _core.has_schedule(collective, algorithm) == (algorithm in AVAILABLE[collective])


@pytest.mark.parametrize(
    ("nbytes", "topology", "expected"),
    [
        (4, ONE_NODE, "direct"),
        (1 << 30, ONE_NODE, "direct"),
        (4, ALONE, "direct"),
        (4, FOUR_BY_TWO, "hierarchical"),
        (1 << 26, FOUR_BY_TWO, "hierarchical"),
        (4096, ONE_EACH, "recursive_doubling"),
        (4097, ONE_EACH, "recursive_halving"),
        (256 << 10, ONE_EACH, "recursive_halving"),
        ((256 << 10) + 1, ONE_EACH, "ring"),
        (1 << 26, UNEVEN, "hierarchical"),
        (1 << 26, MESSAGES, "ring"),
        (8, NO_SHARED, "recursive_doubling"),
    ],
)
def test_built_in_choices_for_all_reduce(nbytes, topology, expected):
    assert tuning.select("all_reduce", nbytes, topology) == expected


def test_a_table_decides_what_it_covers_and_the_built_in_one_the_rest():
    assert tuning.rules_for("all_reduce", ONE_NODE, RING) == [(UNLIMITED, "ring")]
    assert tuning.select("broadcast", 8, ONE_NODE, RING) == "direct"
    condition = Table("c", (Entry(("all_reduce",), ((None, "ring"),), min_world_size=5),))
    assert tuning.select("all_reduce", 8, ONE_NODE, condition) == "direct"
    assert tuning.select("all_reduce", 8, FOUR_BY_TWO, condition) == "ring"


def test_a_forced_algorithm_decides_where_it_exists():
    forced = tuning.rules_for("all_reduce", ONE_NODE, RING, "recursive_halving")
    assert forced == [(UNLIMITED, "recursive_halving")]
    assert tuning.rules_for("broadcast", ONE_NODE, None, "recursive_halving") == [
        (UNLIMITED, "direct")
    ]


def test_tables_survive_json():
    assert Table.from_json(BUILT_IN.to_json()) == BUILT_IN


def test_load_table_names_the_file(tmp_path):
    path = tmp_path / "table.json"
    with pytest.raises(InvalidArgumentError, match="cannot be read"):
        tuning.load_table(str(path))
    path.write_text(RING.to_json())
    assert tuning.load_table(str(path)) == RING
    path.write_text("{")
    with pytest.raises(InvalidArgumentError, match=r"table\.json.*not a JSON document"):
        tuning.load_table(str(path))


def table_text(collectives=("all_reduce",), rules=((None, "ring"),), **fields):
    entry = {"collectives": collectives, "rules": rules, **fields}
    return json.dumps({"schema_version": 1, "name": "t", "entries": [entry]})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "not a tuning table"),
        ('{"schema_version": 99}', "schema_version"),
        ('{"schema_version": 1, "name": 3, "entries": []}', "name"),
        ('{"schema_version": 1, "name": "t", "entries": [3]}', "entry 0"),
        ('{"schema_version": 1, "name": "t", "entries": [{"rules": []}]}', "entry 0"),
        (table_text(colour=1), "unknown keys colour"),
        (table_text(collectives=["gossip"]), "unknown collectives"),
        (table_text(rules=[[None, "quickest"]]), "no algorithm 'quickest'"),
        (table_text(rules=[[5, "ring"]]), "limit null"),
        (table_text(rules=[[9, "ring"], [3, "ring"], [None, "ring"]]), "limits must rise"),
        (table_text(rules=["ring"]), "entry 0"),
    ],
)
def test_a_wrong_table_is_refused_with_its_reason(text, message):
    with pytest.raises(InvalidArgumentError, match=message):
        Table.from_json(text)


@pytest.mark.parametrize("collective", ["allreduce", "", "barrier"])
def test_an_unknown_collective_is_refused(collective):
    with pytest.raises(InvalidArgumentError, match="expected one of all_reduce"):
        tuning.rules_for(collective, ONE_NODE)
