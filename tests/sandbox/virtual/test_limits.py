"""Values of limits, and the message with which each one ends a script."""

from __future__ import annotations

import pickle

import pytest

from smokebox import virtual
from smokebox.errors import FileTooLarge, InvalidOption, StorageFull
from smokebox.sandbox.virtual import VirtualLimits


def test_unknown_limit_suggests_the_nearest() -> None:
    with pytest.raises(InvalidOption) as caught:
        VirtualLimits(comands=5)  # type: ignore[call-arg]
    assert caught.value.nearest == "commands"
    with pytest.raises(InvalidOption):
        virtual(limits={"wall": 3})


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "5", None, float("nan")])
def test_limit_must_be_a_positive_integer(value: object) -> None:
    with pytest.raises(InvalidOption):
        VirtualLimits(commands=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), True])
def test_wall_time_must_be_positive(value: float) -> None:
    with pytest.raises(InvalidOption):
        VirtualLimits(wall_time=value)


def test_more_output_than_the_shell_keeps_is_refused() -> None:
    with pytest.raises(InvalidOption, match="10485760"):
        VirtualLimits(output=11 << 20)


def test_limits_can_be_pickled_and_compared() -> None:
    limits = VirtualLimits(commands=5, wall_time=0.5)
    assert pickle.loads(pickle.dumps(limits)) == limits


@pytest.mark.parametrize(
    ("limits", "script", "message"),
    [
        (VirtualLimits(commands=100), "while :; do :; done", "VirtualLimits.commands"),
        (VirtualLimits(loop_iterations=50), "while :; do :; done", "VirtualLimits.loop_iterations"),
        (VirtualLimits(memory=1 << 20), "x=a; while :; do x=$x$x; done", "VirtualLimits.memory"),
        (VirtualLimits(), "f() { f; }; f", "fixed limit"),
        (VirtualLimits(), "echo '. ./s' > s; . ./s", "fixed limit"),
    ],
)
async def test_limit_exits_with_126_and_names_the_option(
    limits: VirtualLimits, script: str, message: str
) -> None:
    sandbox = virtual(limits=limits)
    result = await sandbox.exec(f"echo before; {script}")
    assert (result.exit_code, result.stdout) == (126, "before\n")
    assert message in result.stderr
    assert (await sandbox.exec("echo alive")).stdout == "alive\n"


async def test_wall_time_exits_with_124_and_keeps_the_output() -> None:
    sandbox = virtual(limits=VirtualLimits(wall_time=0.3))
    for script in ("echo hi; sleep 30", "echo hi; while :; do :; done"):
        result = await sandbox.exec(script)
        assert (result.exit_code, result.stdout) == (124, "hi\n")
        assert "timed out after 0.3 s (raise VirtualLimits.wall_time" in result.stderr


async def test_timeout_longer_than_wall_time_does_not_lengthen_it() -> None:
    result = await virtual(limits={"wall_time": 0.2}).exec("sleep 30", timeout=25)
    assert (result.exit_code, "0.2 s" in result.stderr) == (124, True)


async def test_counts_start_again_with_each_script() -> None:
    sandbox = virtual(limits=VirtualLimits(commands=100, loop_iterations=50))
    for _ in range(10):
        assert (await sandbox.exec("for i in {1..40}; do :; done; echo $i")).stdout == "40\n"


async def test_shell_runs_thousands_of_scripts() -> None:
    sandbox = virtual()
    for _ in range(2_000):
        result = await sandbox.exec(": $((n += 1)); : ; : ; : ; :")
        assert result.exit_code == 0
    assert (await sandbox.exec("echo $n")).stdout == "2000\n"


async def test_file_limits_apply_inside_and_outside_of_the_shell() -> None:
    sandbox = virtual(limits=VirtualLimits(file_size=1_000, storage=5_000, files=100))
    with pytest.raises(FileTooLarge):
        await sandbox.write_file("f", b"x" * 1_001)
    for n in range(4):
        await sandbox.write_file(f"f{n}", b"x" * 1_000)
    with pytest.raises(StorageFull):
        await sandbox.write_file("g", b"x" * 1_000)
    assert (await sandbox.exec("cat f0 f0 > h")).exit_code != 0


async def test_files_may_be_larger_than_the_shells_own() -> None:
    limits = VirtualLimits(file_size=20_000_000, storage=50_000_000)
    sandbox = virtual(limits=limits)
    await sandbox.write_file("big", b"x" * 15_000_000)
    assert (await sandbox.exec("cat big | wc -c")).stdout.strip() == "15000000"
    assert (await sandbox.capabilities()).max_file_size == 20_000_000


async def test_number_of_files_is_limited() -> None:
    sandbox = virtual(limits=VirtualLimits(files=60))
    result = await sandbox.exec("for i in {1..100}; do echo x > f$i; done")
    assert "f100" in result.stderr
    assert len(await sandbox.readdir(".")) < 60
