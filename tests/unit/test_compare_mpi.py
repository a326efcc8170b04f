"""scripts/compare_mpi.py without MPI: reading reports, medians, ratios and verdicts."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "compare_mpi.py"
spec = importlib.util.spec_from_file_location("compare_mpi", SCRIPT)
compare = importlib.util.module_from_spec(spec)
sys.modules["compare_mpi"] = compare
spec.loader.exec_module(compare)

KIB, MIB = 1 << 10, 1 << 20


def result(backend, memory, size, us, floor=None):
    in_place = {"time": us}
    if floor is not None:
        in_place["memory_floor_efficiency"] = floor
    return {"backend": backend, "memory": memory, "size": size, "in_place": in_place}


def test_a_report_gives_one_series_for_each_contestant():
    document = {
        "results": [
            result("mpidp", "registered", 4, 1.0),
            result("mpidp", "registered", 16, 2.0),
            result("mpidp", "plain", 4, 3.0),
            result("mpi", "plain", 4, 5.0),
            {**result("mpi", "plain", 16, 0), "in_place": None},
        ]
    }
    assert compare.times_of(document, "mpich") == {
        "mpich registered": {4: 1.0, 16: 2.0},
        "mpich plain": {4: 3.0},
        "mpich": {4: 5.0},
    }


def test_floors_are_those_of_registered_memory():
    document = {
        "results": [
            result("mpidp", "registered", MIB, 1.0, floor=0.9),
            result("mpidp", "registered", 4, 1.0),
            result("mpidp", "plain", MIB, 1.0, floor=0.5),
            {**result("mpidp", "registered", 8, 1.0), "in_place": None},
        ]
    }
    assert compare.floors_of(document) == {MIB: 0.9}


def test_merge_takes_medians_over_the_rounds_that_have_a_size():
    rounds = [{"a": {4: 1.0, 8: 7.0}}, {"a": {4: 9.0}, "b": {4: 2.0}}, {"a": {4: 3.0}}]
    assert compare.merge(rounds) == {"a": {4: 3.0, 8: 7.0}, "b": {4: 2.0}}


SERIES = {
    "mpich": {4: 2.0, 16: 8.0},
    "openmpi": {4: 3.0, 16: 4.0},
    "gloo": {4: 1.0, 16: 1.0},
    "mpich registered": {4: 1.0, 16: 8.0, 64: 1.0},
}


def test_the_best_is_an_mpi_size_by_size():
    assert compare.best_of(SERIES, ["mpich", "openmpi"]) == {
        4: (2.0, "mpich"),
        16: (4.0, "openmpi"),
    }
    assert compare.best_of(SERIES, ["openmpi"])[4] == (3.0, "openmpi")


def test_ratios_are_against_the_best_and_above_one_when_faster():
    found = compare.ratios(SERIES, ["mpich", "openmpi"])
    assert found["mpich registered"] == {4: 2.0, 16: 0.5}
    assert found["mpich"] == {4: 1.0, 16: 0.5}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, "not measured"),
        ({4: 2.0, 16: 3.0}, "pass worst 2.00"),
        ({4: 1.99, 16 * KIB: 3.0, MIB: 1.0}, "short worst 1.00 (4: 1.99, 1M: 1.00)"),
    ],
)
def test_verdicts(values, expected):
    assert compare.verdict(values, 2.0) == expected


def test_bus_bandwidth():
    # 2 ranks: 1e6 bytes in 1000 us are 1 GB/s, times 2(P-1)/P = 1; 4 ranks: 1.5.
    assert compare.bus_bandwidth(1_000_000, 1000, 2) == 1.0
    assert compare.bus_bandwidth(1_000_000, 1000, 4) == 1.5


@pytest.mark.parametrize(
    ("nbytes", "text"), [(4, "4"), (1000, "1000"), (KIB, "1K"), (1536, "1536"), (64 * MIB, "64M")]
)
def test_sizes_for_people(nbytes, text):
    assert compare.human(nbytes) == text


def rows_for(speedup, floor):
    sizes = [4 * 4**k for k in range(13)]
    series = {
        "mpich": dict.fromkeys(sizes, 100.0),
        "mpich registered": dict.fromkeys(sizes, 100.0 / speedup),
        "mpich plain": dict.fromkeys(sizes, 100.0 / speedup),
    }
    floors = {"mpich": {MIB: 0.1, 4 * MIB: floor}}
    return compare.must_show({2: series, 4: series}, floors, ["mpich"])


def test_must_show_passes_and_falls_short():
    fast = rows_for(3.0, 0.9)
    assert len(fast) == 2 * len(compare.MUST_SHOW) + 1
    assert all(row["verdict"].startswith("pass") for row in fast)
    slow = {(r["case"], r["memory"]): r["verdict"].split()[0] for r in rows_for(1.3, 0.8)}
    assert slow == {
        ("2 ranks, <= 4 KiB", "registered"): "pass",
        ("2 ranks, <= 4 KiB", "plain"): "pass",
        ("2 ranks, 16 KiB to 1 MiB", "registered"): "short",
        ("2 ranks, 16 KiB to 1 MiB", "plain"): "pass",
        ("2 ranks, >= 1 MiB", "registered"): "short",
        ("2 ranks, >= 1 MiB", "plain"): "short",
        ("4 ranks, every size", "registered"): "pass",
        ("4 ranks, every size", "plain"): "pass",
        ("4 ranks, >= 256 KiB", "registered"): "short",
        ("4 ranks, >= 256 KiB", "plain"): "short",
        ("2 ranks, >= 4 MiB: memory floor", "registered"): "short",
    }


def test_must_show_says_what_was_not_measured():
    rows = compare.must_show({}, {}, ["impi"])
    assert {row["verdict"] for row in rows} == {"not measured"}


def test_the_table_has_a_line_for_each_size_that_an_mpi_has():
    lines = compare.table(SERIES, ["mpich", "openmpi"], 2)
    assert len(lines) == 4
    assert lines[2].split()[0] == "4"
    assert lines[2].endswith("mpich")
    assert lines[3].endswith("openmpi")


def test_the_plot_is_a_file(tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "plot.svg"
    compare.plot({2: SERIES, 4: SERIES}, file)
    assert file.read_text(encoding="utf-8").count("mpidp registered on mpich") >= 1


@pytest.mark.parametrize(
    "arguments", [["--mpi", "lam"], ["--ranks", "two"], ["--rounds", "0"], ["--factor", "1"]]
)
def test_bad_usage(arguments):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_documents_survive_json():
    document = {"times_us": {2: SERIES}, "must_show": rows_for(2.0, 0.9)}
    assert json.loads(json.dumps(document, allow_nan=False))["times_us"]["2"]["mpich"]["4"] == 2.0
