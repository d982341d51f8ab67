"""The table of accelerators, and tables of a user's own."""

from __future__ import annotations

import re

import pytest

from equimoe.errors import EquimoeError
from equimoe.hardware import hardware, known_hardware, of_device_kind


def test_packaged_figures_are_those_of_the_data_sheets():
    """NVIDIA's data sheets: H100 SXM 80 GB, 989 TFLOP/s, 3.35 TB/s; GB200 NVL72 per GPU half a superchip's 372 GB. Of
    the memory, which boards have in GiB, CUDA gives nearly all."""
    h100, gb200 = hardware("h100"), hardware("gb200")
    assert (h100.bf16_flops, h100.memory_bandwidth) == (989e12, 3.35e12)
    assert 79 * 2**30 - 10**6 < h100.memory_bytes < 80 * 2**30 and 183 * 2**30 < gb200.memory_bytes < 186 * 2**30
    assert gb200.bf16_flops == 2.5e15
    assert hardware("h200").bf16_flops == h100.bf16_flops  # taken over by `like`
    assert {"a100", "h100", "h200", "b200", "gb200"} <= {one.key for one in known_hardware()}
    assert [one.memory_bytes for one in known_hardware()] == sorted(one.memory_bytes for one in known_hardware())


@pytest.mark.parametrize(
    ("kind", "key"),
    [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA GB200", "gb200"), ("NVIDIA B200", "b200"), ("cpu", None)],
)
def test_jax_names_are_recognised(kind, key):
    found = of_device_kind(kind)
    assert (found and found.key) == key


def test_a_table_of_ones_own_takes_over_what_it_leaves_out(tmp_path):
    file = tmp_path / "lab.toml"
    file.write_text('[lab]\nlike = "h100"\nmemory_bytes = 94e9\nname = "H100 NVL"\n')
    mine = hardware(str(file))
    assert mine == hardware(f"{file}:lab")
    assert (mine.key, mine.name, mine.memory_bytes, mine.memory_bandwidth) == ("lab", "H100 NVL", 94 * 10**9, 3.35e12)


@pytest.mark.parametrize(
    ("content", "name", "said"),
    [
        ("[a]\nlike = 'h100'\n[b]\nlike = 'h100'\n", "", "holds a, b.*Write .*NAME"),
        ("[a]\nlike = 'h1000'\n", "", "`like` must name a table that says everything itself"),
        ("[a]\nlike = 'h100'\nmemory_bytes = -1\nmemroy = 2\n", "", "2 problems"),
        ("[a]\nlike = 'h100'\n", ":b", "must be one of those of lab.toml: a"),
        ("[a\n", "", "cannot be read"),
        ("memory_bytes = 1\n", "", "bf16_flops .None.: must be a number from 1 to 1e24"),  # one table, without its name
        ("", "", "holds no table"),
        ("[a]\nmemory_bytes = 1\n", "", "bf16_flops .None.: must be a number from 1 to 1e24"),
    ],
)
def test_a_wrong_table_is_said(tmp_path, content, name, said):
    file = tmp_path / "lab.toml"
    file.write_text(content)
    with pytest.raises(EquimoeError) as error:
        hardware(f"{file}{name}")
    assert re.search(said, str(error.value))


def test_an_unknown_name_lists_what_there_is():
    with pytest.raises(EquimoeError, match="must be one of those of hardware.toml: .*gb200.*TOML file of your own"):
        hardware("h1000")
    with pytest.raises(EquimoeError, match="cannot be read"):
        hardware("nowhere.toml")
