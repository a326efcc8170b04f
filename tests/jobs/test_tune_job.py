"""`mpidp tune` as a user runs it: under mpiexec, in processes of their own."""

from __future__ import annotations

import json

import pytest
from launching import launch

from mpidp import tuning


def tune(*args, **extra):
    return launch(2, "-m", "mpidp", "tune", "--quick", *args, timeout=90, **extra)


def test_the_table_is_valid_extended_used_and_checked(tmp_path):
    path = tmp_path / "mine.json"
    done = tune("-o", str(path), "--collective", "all_to_all", "-e", "4K")
    assert done.returncode == 0, done.stderr
    done = tune("-o", str(path), "--collective", "all_gather", "-e", "4K")
    assert done.returncode == 0, done.stderr
    table = tuning.load_table(str(path))
    assert [entry.collectives for entry in table.entries] == [("all_gather",), ("all_to_all",)]
    (record,) = table.measured.values()
    assert record["alpha"] > 0
    assert record["gamma"] > 0
    seconds = record["collectives"]["all_gather"]["seconds"]
    assert set(seconds) == set(tuning.AVAILABLE["all_gather"])
    assert list(tmp_path.iterdir()) == [path]

    shown = launch(2, "-m", "mpidp", "info", "--json", MPIDP_TUNING_FILE=str(path))
    found = json.loads(shown.stdout)
    assert found["tuning_table"] == "mine"
    for entry in table.entries:
        expected = [list(rule) for rule in entry.rules]
        assert found["algorithms"][entry.collectives[0]] == expected

    checked = tune("--check", str(path), "--collective", "all_to_all", "-e", "8")
    assert checked.returncode in (0, 1), checked.stderr  # by the noise of this machine
    assert "all_to_all 8: auto" in checked.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("-o", "/nowhere/at/all.json"), "does not exist"),
        (("-o", "/dev/full"), "cannot"),
        (("--check", "/nowhere/table.json"), "cannot be read"),
        (("-o", "a", "--check", "b"), "not both"),
    ],
    ids=["no folder", "disk full", "no table", "both"],
)
def test_bad_usage_is_one_line(args, message):
    done = tune(*args, "--collective", "all_to_all", "-e", "8")
    lines = [line for line in done.stderr.splitlines() if "mpidp" in line]
    assert done.returncode == 2, done.stderr
    assert len(lines) == 1, done.stderr
    assert message in lines[0]
    assert "Traceback" not in done.stderr
