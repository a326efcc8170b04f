"""Statistics, the text table, the JSON document and how it is written."""

from __future__ import annotations

import gc
import json
import os
import stat

import numpy as np
import pytest

from mpidp.bench import document, plot, text, timing
from mpidp.bench.cases import COLLECTIVES, Case
from mpidp.bench.driver import (
    Measurement,
    Plan,
    Report,
    Row,
    Variant,
    average_bus_bandwidth,
    out_of_bounds,
)
from mpidp.bench.floor import FloorMeter, by_numpy


class Named:
    """A backend that is only looked at."""

    def __init__(self, name):
        self.name = name


FACTS = {
    "version": "1.2.3",
    "mpi_library": "An MPI 4.0",
    "instruction_set": "avx2",
    "world_size": 4,
    "local_sizes": [2, 2],
    "cores": 2,
    "oversubscribed": False,
    "devices": [{"rank": 0, "hostname": "node0"}],
    "args": ["mpidp", "bench"],
    "start_time": "2026-01-02 03:04:05",
    "end_time": "2026-01-02 03:04:06",
}


def measurement(seconds, wrong=0):
    return Measurement(timing.summarize(np.array([seconds])), wrong)


@pytest.fixture
def variants():
    return [Variant(Named("mpidp"), "registered"), Variant(Named("mpi"), "plain")]


@pytest.fixture
def report(variants):
    case = Case(COLLECTIVES["all_reduce"], "float32", "sum", -1, 250_000, 4, 4)
    ours, theirs = variants
    return Report(
        rows=[
            Row(case, ours, measurement(1e-3), measurement(5e-4)),
            Row(case, theirs, measurement(2e-3, wrong=3), None, note="no reason"),
        ],
        floors={case: timing.summarize(np.array([4e-4]))},
    )


def test_summary():
    statistics = timing.summarize(np.arange(1.0, 101.0))
    assert statistics.iterations == 100
    assert (statistics.min, statistics.max) == (1, 100)
    assert statistics.p50 == 50.5
    assert (statistics.p90, statistics.p95, statistics.p99) == (90, 95, 99)
    assert statistics.mean == 50.5


def test_summary_of_one_time():
    statistics = timing.summarize(np.array([2.0]))
    assert {statistics.min, statistics.p50, statistics.p99, statistics.max} == {2.0}
    assert statistics.stdev == 0


@pytest.mark.parametrize("iterations", [1, 3, 4, 20, 21, 999])
def test_rounds_share_all_iterations(iterations):
    parts = timing.split_rounds(iterations)
    assert sum(parts) == iterations
    assert max(parts) - min(parts) <= 1


def test_iterations_fit_the_time():
    warmup, few = timing.choose_iterations(1.0)
    assert (warmup, few) == (1, 5)
    assert timing.choose_iterations(1e-6)[1] == 1000
    assert timing.choose_iterations(0)[1] == 1000
    assert timing.choose_iterations(0.01, budget=1.0) == (10, 100)


@pytest.mark.parametrize(("isolated", "barriers"), [(True, 6), (False, 1)])
def test_cadence(isolated, barriers):
    calls = []
    times = timing.time_calls(
        lambda: calls.append("call"), lambda: calls.append("barrier"), 5, isolated
    )
    assert len(times) == 5
    assert min(times) >= 0
    assert calls.count("call") == 5
    assert calls.count("barrier") == barriers
    if isolated:
        assert calls[1:] == ["barrier", "call"] * 5


def test_the_collector_is_as_it_was_after_an_error():
    def fail():
        with timing.no_garbage_collection():
            assert not gc.isenabled()
            raise RuntimeError("x")

    assert gc.isenabled()
    with pytest.raises(RuntimeError, match="x"):
        fail()
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("value", "width", "shown"),
    [
        (1.234, 7, "   1.23"),
        (12345.678, 7, "12345.7"),
        (1234567.0, 7, "1234567"),
        (123456789.0, 7, "1.2e+08"),
        (0.0, 6, "  0.00"),
    ],
)
def test_number(value, width, shown):
    assert text.number(value, width) == shown


@pytest.mark.parametrize(
    ("nbytes", "label"),
    [(8, "8"), (1024, "1K"), (1536, "1.5K"), (64 << 20, "64M"), (1 << 30, "1G")],
)
def test_size_label(nbytes, label):
    assert text.size_label(nbytes) == label


def test_rows_have_the_columns_of_nccl_tests(report):
    fields = text.row_line(report.rows[0]).split()
    assert fields[:5] == ["1000000", "250000", "float32", "sum", "-1"]
    assert fields[5:9] == ["1000.00", "1.00", "1.50", "0"]
    assert fields[9:] == ["500.00", "2.00", "3.00", "0"]


def test_what_was_not_measured_is_a_dash_with_a_note(report):
    assert text.row_line(report.rows[1]).split()[9:] == ["-"] * 4
    assert "# Not measured (-): no reason" in list(text.section_footer(report.rows[1:]))


def test_columns_line_up(report, variants):
    head = list(text.section_header(variants[0], "auto"))
    for name in ("size", "count", "type", "redop", "root"):
        end = head[-2].index(name) + len(name)
        assert text.row_line(report.rows[0])[end : end + 1] == " "
    assert len(head[-2]) == len(text.row_line(report.rows[0]))


def test_unchecked_rows_say_so(report):
    report.rows[0].in_place = measurement(1e-3, wrong=None)
    assert text.row_line(report.rows[0]).split()[-1] == "N/A"


def test_footer(report, variants):
    assert list(text.section_footer(report.section(variants[0]))) == [
        "# Out of bounds values : 0 OK",
        "# Avg bus bandwidth    : 2.25",
    ]
    assert list(text.section_footer(report.section(variants[1])))[1] == (
        "# Out of bounds values : 3 FAILED"
    )


def test_everything_of_ours_is_a_comment(report, variants):
    lines = [
        *text.header(Plan(), FACTS),
        *text.section_header(variants[0], "auto"),
        *text.section_footer(report.rows),
        *text.floor_table(report, variants),
        *text.ratio_tables(report, variants),
    ]
    assert all(line.startswith("#") for line in lines)
    assert all(line == line.rstrip() for line in lines)


def test_ratio_and_floor(report, variants):
    assert "2.00x       -" in list(text.ratio_tables(report, variants))[-1]
    assert "40.0%   80.0%" in list(text.floor_table(report, variants))[-1]


def test_no_ratio_without_another_backend(report, variants):
    assert list(text.ratio_tables(report, variants[:1])) == []


def test_totals(report):
    assert out_of_bounds(report.rows) == 3
    assert average_bus_bandwidth(report.rows) == pytest.approx((1.5 + 3.0 + 0.75) / 3)
    assert average_bus_bandwidth([]) == 0


def test_document_has_the_names_of_nccl_tests_and_real_types(report, variants):
    built = document.build(Plan(), variants, ["auto", "its own"], report, FACTS)
    built = json.loads(json.dumps(built, allow_nan=False))
    assert built["out_of_bounds"] == {"count": 3, "okay": False}
    assert built["average_bus_bandwidth"] == {"bandwidth": pytest.approx(2.25), "okay": None}
    assert built["config"]["minimum_bytes"] == 8
    assert built["config"]["step_factor"] == 4
    assert built["config"]["validation"] is True
    assert "env" not in built
    ours, theirs = built["results"]
    assert {"size", "count", "type", "redop", "root", "actual_iterations"} <= set(ours)
    assert ours["root"] == -1
    assert ours["out_of_place"] == {
        "time": pytest.approx(1000),
        "alg_bw": pytest.approx(1),
        "bus_bw": pytest.approx(1.5),
        "nwrong": 0,
        "memory_floor_efficiency": pytest.approx(0.4),
    }
    assert theirs["in_place"] is None
    assert theirs["out_of_place"]["nwrong"] == 3
    assert set(ours["in_place_per_iter"]) >= {"min_us", "avg_us", "p50_us", "p90_us", "p99_us"}
    (ratio,) = built["ratios"]
    assert (ratio["out_of_place"], ratio["in_place"]) == (pytest.approx(2), None)
    assert [s["out_of_bounds"]["okay"] for s in built["sections"]] == [True, False]


def test_step_in_bytes():
    built = document.build(
        Plan(factor=None, step=64), [Variant(Named("mpidp"), "plain")], ["auto"], Report(), FACTS
    )
    assert built["config"]["step_bytes"] == 64
    assert "step_factor" not in built["config"]


def test_json_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "report.json"
    path.write_text("old")
    with pytest.raises(ValueError, match="JSON compliant"):
        document.write_json(path, {"bandwidth": float("nan")})
    assert path.read_text() == "old"

    def half(temporary):
        temporary.write_text("half")
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        document.write_whole(path, half)
    assert path.read_text() == "old"
    document.write_json(path, {"a": 1})
    assert json.loads(path.read_text()) == {"a": 1}
    assert os.listdir(tmp_path) == ["report.json"]


def test_a_link_stays_a_link(tmp_path):
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    link.symlink_to(target)
    assert document.unwritable(link) is None
    document.write_json(link, {})
    assert link.is_symlink()
    assert target.read_text() == "{}\n"


def test_a_device_is_written_and_not_replaced():
    from pathlib import Path

    null = Path(os.devnull)
    assert document.unwritable(null) is None
    document.write_json(null, {})
    assert stat.S_ISCHR(os.stat(null).st_mode)


def test_unwritable(tmp_path):
    assert "is a directory" in document.unwritable(tmp_path)
    assert "does not exist" in document.unwritable(tmp_path / "no" / "x.json")
    assert document.unwritable(tmp_path / "x.json") is None
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_unwritable_folder(tmp_path):
    tmp_path.chmod(0o500)
    assert "Permission denied" in document.unwritable(tmp_path / "x.json")


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_plot(tmp_path, report, suffix):
    pytest.importorskip("matplotlib", reason="the plot extra is not installed")
    path = tmp_path / f"bus{suffix}"
    assert plot.unavailable(path) is None
    plot.draw(path, Plan(), report, "a title")
    assert path.stat().st_size > 1000
    assert os.listdir(tmp_path) == [path.name]


def test_plot_of_an_unknown_kind(tmp_path):
    pytest.importorskip("matplotlib", reason="the plot extra is not installed")
    assert "must end in one of" in plot.unavailable(tmp_path / "bus.txt")


def test_plot_without_matplotlib(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    assert "pip install 'mpidp[plot]'" in plot.unavailable(tmp_path / "bus.png")


def test_the_floor_is_that_of_the_fastest_way():
    def slow(x, iterations):
        return [4e-6] * iterations

    def fast(x, iterations):
        assert x.nbytes == 4096
        return [1e-6] * iterations

    barriers = []
    meter = FloorMeter(np.empty(2048, np.float32), [slow, fast], lambda: barriers.append(1))
    for _ in range(2):  # what was measured before a start is forgotten
        meter.start(4096)
        meter.run(2)
        meter.run(1)
    assert meter.nanoseconds == [4000] * 3 + [1000] * 3
    assert len(barriers) == 2 * 2 * 3
    statistics = meter.fastest(np.array(meter.nanoseconds) * 1e-9)
    assert statistics.p50 == pytest.approx(1e-6)
    assert statistics.iterations == 3


def test_the_floor_by_numpy_updates_in_place():
    x = np.ones(1024, np.float32)
    seconds = by_numpy(x, 3)
    assert len(seconds) == 3
    assert min(seconds) > 0
    assert np.array_equal(x, -np.ones(1024, np.float32))
