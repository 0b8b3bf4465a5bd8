"""Limits from numbers, names and text, and the rlimits that the kernel gets."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from typing import Any

import pytest

from smokebox.errors import InvalidOption
from smokebox.limits import (
    GIB,
    INSTANCE_TYPES,
    MIB,
    Limits,
    ProcessLimits,
    parse_limits,
    parse_process_limits,
    parse_size,
)

INVALID_NUMBERS = [True, False, -1, 0, 0.0, float("nan"), float("inf"), "many", b"1", [1], 1 << 70]
INVALID_SIZES = "GB -1GB 1e9 1.GB 1,5GB 1ib 1GBs nan 0x10 \u0661GB"


@pytest.mark.parametrize("value", INVALID_NUMBERS, ids=repr)
@pytest.mark.parametrize("option", ["memory", "cpu", "pids", "disk", "open_files", "output_rate"])
def test_invalid_limit_is_refused_with_its_option_and_value(option: str, value: object) -> None:
    options: dict[str, Any] = {option: value}
    with pytest.raises(InvalidOption, match=option) as caught:
        Limits(**options)
    assert caught.value.fields == {"option": option, "value": value}
    assert caught.value.hint


@pytest.mark.parametrize("value", [*INVALID_NUMBERS, 1.5], ids=repr)
@pytest.mark.parametrize(
    "option", ["memory", "cpu_seconds", "file_size", "open_files", "processes"]
)
def test_invalid_process_limit_is_refused(option: str, value: object) -> None:
    options: dict[str, Any] = {option: value}
    with pytest.raises(InvalidOption, match=option):
        ProcessLimits(**options)


def test_size_may_be_text() -> None:
    assert Limits(memory="2GiB", disk="1GB", output_rate="1MB") == Limits(
        memory=2 * GIB, disk=10**9, output_rate=10**6
    )
    assert ProcessLimits(file_size="1MiB").file_size == MIB


def test_size_that_looks_like_megabytes_is_refused_with_the_bytes() -> None:
    with pytest.raises(InvalidOption, match=r"in bytes.*512 \* 1024 \* 1024"):
        Limits(memory=512)


@pytest.mark.parametrize(("option", "maximum"), [("pids", 1 << 22), ("open_files", 1 << 20)])
def test_counts_above_the_maximum_of_the_kernel_are_refused(option: str, maximum: int) -> None:
    assert getattr(parse_limits({option: maximum}), option) == maximum
    with pytest.raises(InvalidOption):
        parse_limits({option: maximum + 1})


def test_cpu_below_the_minimum_of_a_cgroup_is_refused() -> None:
    assert Limits(cpu=0.01).cpu == 0.01
    with pytest.raises(InvalidOption, match="cores"):
        Limits(cpu=0.001)


def test_none_is_no_limit() -> None:
    unlimited = Limits(
        memory=None, cpu=None, pids=None, disk=None, open_files=None, output_rate=None
    )
    assert unlimited.describe() == "no limits"


def test_unknown_limit_suggests_the_nearest() -> None:
    with pytest.raises(InvalidOption, match="Did you mean 'memory'"):
        Limits(memroy=1)  # type: ignore[call-arg]
    with pytest.raises(InvalidOption, match="Did you mean 'memory'"):
        parse_limits({"memroy": "1GiB"})


def test_instance_types_have_the_documented_limits() -> None:
    types = {name: (one.cpu, one.memory, one.disk) for name, one in INSTANCE_TYPES.items()}
    assert types == {
        "lite": (1 / 16, 256 * MIB, 2 * 10**9),
        "basic": (1 / 4, GIB, 4 * 10**9),
        "standard-1": (1 / 2, 4 * GIB, 8 * 10**9),
        "standard-2": (1, 6 * GIB, 12 * 10**9),
        "standard-3": (2, 8 * GIB, 16 * 10**9),
        "standard-4": (4, 12 * GIB, 20 * 10**9),
    }


def test_limits_are_parsed_from_a_name_a_mapping_or_none() -> None:
    assert parse_limits("basic") is INSTANCE_TYPES["basic"]
    assert parse_limits(None) == Limits()
    assert parse_limits(Limits(pids=7)) == Limits(pids=7)
    assert parse_limits({"memory": "512MiB", "disk": 10**9, "cpu": 2, "pids": None}) == Limits(
        memory=512 * MIB, disk=10**9, cpu=2, pids=None
    )


@pytest.mark.parametrize(
    ("name", "hint"), [("Basic", "'basic'"), ("standard1", "'standard-1'"), ("xyz", "lite, basic")]
)
def test_unknown_instance_type_suggests_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(InvalidOption, match=hint) as caught:
        parse_limits(name)
    assert caught.value.fields["value"] == name


@pytest.mark.parametrize("value", [7, True, b"lite", ["lite"], {1: 2}, {b"memory": 1}], ids=repr)
def test_limits_of_another_type_are_refused(value: Any) -> None:
    with pytest.raises(InvalidOption) as caught:
        parse_limits(value)
    assert caught.value.fields == {"option": "limits", "value": value}


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MiB", 512 * MIB),
        ("2GB", 2 * 10**9),
        ("1.5g", GIB * 3 // 2),
        ("1 GiB", GIB),
        ("64k", 65536),
        ("64kb", 64000),
        ("1Ti", 1 << 40),
        ("0.1GB", 10**8),
        (" 100 ", 100),
        ("100B", 100),
        (4096, 4096),
    ],
)
def test_size_is_parsed_exactly(text: object, size: int) -> None:
    assert parse_size(text, "disk") == size


@pytest.mark.parametrize(
    "text",
    [*INVALID_SIZES.split(), "", "1 G B", "1GB\0", "9" * 99, None, True, 1.5, b"1GB"],
    ids=ascii,
)
def test_invalid_size_is_refused(text: object) -> None:
    with pytest.raises(InvalidOption, match="512MiB") as caught:
        parse_size(text, "disk")
    assert caught.value.fields == {"option": "disk", "value": text}


@pytest.mark.parametrize("text", ["0", "0GB", "9999999PB", "0.5b"])
def test_size_as_text_has_the_same_bounds(text: str) -> None:
    with pytest.raises(InvalidOption, match="disk"):
        parse_limits({"disk": text})


@pytest.mark.parametrize("limits", [Limits(), *INSTANCE_TYPES.values(), Limits(pids=None, cpu=0.1)])
def test_limits_round_trip_through_json(limits: Limits) -> None:
    assert Limits.from_json(json.loads(json.dumps(limits.to_json()))) == limits


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        (INSTANCE_TYPES["basic"], "1/4 CPU, 1 GiB memory, 4 GB disk, 1024 processes"),
        (INSTANCE_TYPES["lite"], "1/16 CPU, 256 MiB memory, 2 GB disk, 1024 processes"),
        (INSTANCE_TYPES["standard-3"], "2 CPUs, 8 GiB memory, 16 GB disk, 1024 processes"),
        (Limits(cpu=1.5, memory=GIB * 3 // 2, disk=None, pids=1, output_rate=10**6),
         "1.5 CPUs, 1.5 GiB memory, 1 process, 1 MB/s output"),
        (Limits(cpu=0.33, memory=None, pids=None), "0.33 CPU, 8 GB disk"),
    ],
)  # fmt: skip
def test_limits_are_described_in_one_line(limits: Limits, text: str) -> None:
    assert limits.describe() == text


def test_rlimits_are_those_that_the_kernel_shows() -> None:
    limits = parse_process_limits(
        {"memory": "4GiB", "cpu_seconds": 60, "file_size": "1MB", "open_files": 64, "processes": 99}
    )
    numbers = limits.rlimits()
    program = (
        "import resource, sys\n"
        f"for number, value in {numbers}.items():\n"
        "    resource.setrlimit(number, (value, value))\n"
        "sys.stdout.write(open('/proc/self/limits').read())\n"
    )
    output = subprocess.check_output([sys.executable, "-c", program], text=True)
    soft = {line[:26].strip(): line[26:46].strip() for line in output.splitlines()}
    assert soft["Max address space"] == str(4 * GIB)
    assert soft["Max cpu time"] == "60"
    assert soft["Max file size"] == "1000000"
    assert soft["Max open files"] == "64"
    assert soft["Max processes"] == "99"
    assert soft["Max core file size"] == "0"


def test_default_process_limits_only_disable_core_dumps() -> None:
    assert ProcessLimits().rlimits() == {resource.RLIMIT_CORE: 0}
    assert parse_process_limits(None) == ProcessLimits()
    assert ProcessLimits(core=None).rlimits() == {}


def test_unknown_process_limit_suggests_the_nearest() -> None:
    with pytest.raises(InvalidOption, match="Did you mean 'open_files'"):
        parse_process_limits({"open_file": 1})
