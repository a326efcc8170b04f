"""Settings: what the variables mean, and that a wrong one is named with its value."""

import dataclasses

import pytest

from mpidp.config import ALGORITHMS, OPS, SETTINGS, Config, parse_bool, parse_bytes
from mpidp.errors import InvalidArgumentError


def test_every_field_has_one_setting():
    fields = [field.name for field in dataclasses.fields(Config)]
    assert sorted(setting.field for setting in SETTINGS) == sorted(fields)
    variables = [setting.variable for setting in SETTINGS]
    assert len(set(variables)) == len(variables)
    assert all(variable.startswith("MPIDP_") for variable in variables)
    assert all(setting.help.endswith(".") for setting in SETTINGS)


def test_an_empty_environment_gives_the_defaults():
    assert Config.from_environment({}) == Config()
    assert Config.from_environment({"MPIDP_TIMEOUT": " "}) == Config()


def test_environment_is_read():
    config = Config.from_environment(
        {
            "MPIDP_TIMEOUT": "12.5",
            "MPIDP_NODE_ID": "3",
            "MPIDP_SHARED_MEMORY": "0",
            "MPIDP_SLOT_BYTES": "128K",
            "MPIDP_INLINE_BYTES": "0",
            "MPIDP_SEGMENT_BYTES": "1M",
            "MPIDP_PIECE_BYTES": "1g",
            "MPIDP_SPIN_US": "0",
            "MPIDP_TUNING_FILE": "/some/table.json",
            "MPIDP_ALGORITHM": "ring",
            "UNRELATED": "x",
        }
    )
    assert config == Config(
        timeout=12.5,
        node_id=3,
        shared_memory=False,
        slot_bytes=128 << 10,
        inline_bytes=0,
        segment_bytes=1 << 20,
        piece_bytes=1 << 30,
        spin_us=0,
        tuning_file="/some/table.json",
        algorithm="ring",
    )


def test_core_options_leave_defaults_to_the_extension():
    assert Config().core_options() == {"timeout": 600.0, "shared_memory": True}
    options = Config(spin_us=0, slot_bytes=1 << 16, timeout=5).core_options()
    assert options == {"timeout": 5, "shared_memory": True, "spin_us": 0, "slot_bytes": 1 << 16}


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("MPIDP_TIMEOUT", "soon"),
        ("MPIDP_TIMEOUT", "-1"),
        ("MPIDP_TIMEOUT", "0"),
        ("MPIDP_TIMEOUT", "nan"),
        ("MPIDP_TIMEOUT", "inf"),
        ("MPIDP_NODE_ID", "-2"),
        ("MPIDP_NODE_ID", "one"),
        ("MPIDP_SHARED_MEMORY", "maybe"),
        ("MPIDP_SLOT_BYTES", "12"),
        ("MPIDP_SLOT_BYTES", "64Q"),
        ("MPIDP_SLOT_BYTES", "-4K"),
        ("MPIDP_PIECE_BYTES", "2G"),
        ("MPIDP_SEGMENT_BYTES", "K"),
        ("MPIDP_SPIN_US", "1.5"),
        ("MPIDP_ALGORITHM", "fastest"),
        ("MPIDP_STORES", "fast"),
    ],
)
def test_a_wrong_variable_is_named_with_its_value(variable, text):
    with pytest.raises(InvalidArgumentError) as caught:
        Config.from_environment({variable: text})
    assert f"{variable}={text!r}" in str(caught.value)
    assert "expected" in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"timeout": -1},
        {"timeout": True},
        {"timeout": "5"},
        {"shared_memory": 1},
        {"slot_bytes": 1.5},
        {"node_id": True},
        {"algorithm": "Ring"},
        {"tuning_file": 3},
    ],
    ids=str,
)
def test_a_wrong_field_is_named_with_its_value(fields):
    (name, value) = next(iter(fields.items()))
    with pytest.raises(InvalidArgumentError) as caught:
        Config(**fields)
    assert f"{name} = {value!r}" in str(caught.value)


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().timeout = 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", 0), ("17", 17), ("4k", 4096), ("4 KiB", 4096), ("3MB", 3 << 20), (" 2G ", 2 << 30)],
)
def test_parse_bytes(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "K", "1.5K", "0x10", "1KK", "-1", "1e6", "²"])
def test_parse_bytes_refuses(text):
    with pytest.raises(ValueError, match="number of bytes"):
        parse_bytes(text)


@pytest.mark.parametrize(("text", "expected"), [("1", True), ("On", True), ("no", False)])
def test_parse_bool(text, expected):
    assert parse_bool(text) is expected


def test_names_are_the_designs():
    assert OPS == ("sum", "mean", "prod", "min", "max")
    assert set(ALGORITHMS) >= {"auto", "direct", "ring", "recursive_halving", "mpi"}
