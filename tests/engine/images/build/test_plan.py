"""Plans of builds: stages, targets and variables, against expectations written by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from smokebox.engine.images.build.instructions import Arg, Env
from smokebox.engine.images.build.parser import parse_dockerfile
from smokebox.engine.images.build.plan import build_platform, check_platform, make_plan
from smokebox.engine.images.build.variables import Scope
from smokebox.errors import InvalidDockerfile, InvalidOption, Unsupported

if TYPE_CHECKING:
    from smokebox.engine.images.build.plan import Plan

STAGES = """
FROM a AS one
FROM b AS two
COPY --from=one /x /x
FROM c
RUN --mount=from=0,target=/m true
FROM two AS last
"""


def plan(text: str, target: str | None = None, **build_args: str) -> Plan:
    """Plan the text of a Dockerfile."""
    return make_plan(parse_dockerfile(text), target=target, build_args=build_args)


def values(text: str, env: dict[str, str] | None = None, **build_args: str) -> dict[str, str]:
    """Return the variables at the end of the last stage."""
    made = plan(text, **build_args)
    scope = Scope(outer=made.arguments, env=dict(env or {}))
    for instruction in made.target.instructions:
        if isinstance(instruction, Arg):
            scope.declare(instruction)
        elif isinstance(instruction, Env):
            scope.env |= {k: scope.expand(v, 1) for k, v in instruction.pairs}
    return scope.values


@pytest.mark.parametrize(
    ("target", "stages"),
    [(None, [0, 1, 3]), ("one", [0]), ("TWO", [0, 1]), ("2", [0, 2])],
)
def test_keeps_the_stages_that_a_target_needs(target: str | None, stages: list[int]) -> None:
    assert [one.index for one in plan(STAGES, target).stages] == stages


def test_finds_stages_by_name_number_and_case() -> None:
    made = plan("FROM a AS Base\nFROM base\nCOPY --from=0 / /\nCOPY --from=BASE / /")
    assert made.target.base == 0
    assert made.target.needs == (0,)
    assert made.find("BASE", 1) == made.find("0", 1) == 0
    assert made.find("base", 0) is None


def test_takes_an_unknown_name_of_from_for_an_image() -> None:
    made = plan("FROM a\nCOPY --from=nginx:1 /etc /etc")
    assert made.target.needs == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("RUN x\nFROM a", "no build stage"),
        ("ARG x", "no FROM"),
        ("FROM $x", "is empty"),
        ("FROM a AS b\nFROM c AS b", "two stages"),
        ("FROM a\nCOPY --from=3 / /", "no stage 3"),
        ("FROM a AS b\nCOPY --from=b / /", "from itself"),
    ],
)
def test_reports_stages_that_are_not_valid(text: str, message: str) -> None:
    with pytest.raises(InvalidDockerfile, match=message):
        plan(text)


def test_names_the_nearest_target() -> None:
    with pytest.raises(InvalidOption, match="Did you mean last"):
        plan(STAGES, "lats")


@pytest.mark.parametrize(
    ("text", "args", "base"),
    [
        ("ARG V=12\nFROM debian:$V", {}, "debian:12"),
        ("ARG V=12\nFROM debian:$V", {"V": "13"}, "debian:13"),
        ("ARG V\nFROM debian:${V:-11}", {}, "debian:11"),
        ("ARG A=x B=${A}y\nFROM $B", {}, "xy"),
        ("ARG T=1.2-slim\nFROM a:${T%-slim}", {}, "a:1.2"),
        ("FROM base-$TARGETARCH", {}, f"base-{build_platform().architecture}"),
    ],
)
def test_expands_global_arguments_in_from(text: str, args: dict[str, str], base: str) -> None:
    assert plan(text, **args).target.base == base


@pytest.mark.parametrize(
    ("text", "env", "args", "expected"),
    [
        # A global argument is unknown in a stage that does not declare it.
        ("ARG G=1\nFROM a", {}, {}, {}),
        ("ARG G=1\nFROM a\nARG G", {}, {}, {"G": "1"}),
        ("ARG G=1\nFROM a\nARG G=2", {}, {}, {"G": "2"}),
        ("ARG G=1\nFROM a\nARG G=2", {}, {"G": "3"}, {"G": "3"}),
        # A value of the caller needs a declaration.
        ("FROM a", {}, {"X": "1"}, {}),
        ("FROM a\nARG X", {}, {}, {}),
        # The environment overrides arguments, whichever comes first.
        ("FROM a\nARG X=1\nENV X=2", {}, {"X": "3"}, {"X": "2"}),
        ("FROM a\nENV X=2\nARG X=1", {}, {}, {"X": "2"}),
        ("FROM a\nARG PATH=/x", {"PATH": "/bin"}, {}, {"PATH": "/bin"}),
        # All values of one ENV see the environment before it.
        ("FROM a\nENV a=1\nENV a=2 b=$a", {}, {}, {"a": "2", "b": "1"}),
        ("FROM a\nARG a=1\nARG b=${a}2", {}, {}, {"a": "1", "b": "12"}),
        ("FROM a\nENV a='$b c' d=\"x $e y\" f=\\$g", {"e": "E"}, {}, {
            "a": "$b c", "d": "x E y", "e": "E", "f": "$g"}),
        ("FROM a\nENV a=${x:-y} b=${x-z} c=${e:+set} d=${n:+set}", {"e": "1"}, {}, {
            "a": "y", "b": "z", "c": "set", "d": "", "e": "1"}),
        ("FROM a\nENV p=$PATH:/x", {"PATH": "/bin"}, {}, {"PATH": "/bin", "p": "/bin:/x"}),
        # Predefined arguments need a declaration in a stage, and proxies do not expand.
        ("FROM a\nARG TARGETOS", {}, {}, {"TARGETOS": "linux"}),
        ("FROM a", {}, {"HTTP_PROXY": "http://p"}, {}),
    ],
)  # fmt: skip
def test_scopes_and_expands_variables(
    text: str, env: dict[str, str], args: dict[str, str], expected: dict[str, str]
) -> None:
    assert values(text, env, **args) == expected


def test_reports_a_required_variable_with_its_line() -> None:
    with pytest.raises(InvalidDockerfile, match="is needed"):
        values("FROM a\nENV a=${x:?is\\ needed}")


def test_names_arguments_that_nothing_declares() -> None:
    made = plan("ARG A\nFROM x", A="1", B="2", http_proxy="p")
    assert made.arguments.unused() == ["B"]
    assert made.arguments.proxies() == {"http_proxy": "p"}


@pytest.mark.parametrize("name", ["", "linux", f"linux/{build_platform().architecture}"])
def test_accepts_the_platform_of_the_host(name: str) -> None:
    assert check_platform(name) == build_platform()


def test_refuses_another_platform() -> None:
    with pytest.raises(Unsupported, match="linux/s390x"):
        plan("FROM --platform=linux/s390x a")
