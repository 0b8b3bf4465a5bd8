"""Dockerfiles as typed instructions, against expectations written by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from smokebox.engine.images.build.flags import parse_duration, parse_mount
from smokebox.engine.images.build.instructions import (
    Cmd,
    CommandForm,
    Copy,
    Env,
    HealthcheckInstruction,
    MountOption,
    Onbuild,
    RunInstruction,
    Shell,
)
from smokebox.engine.images.build.parser import parse_dockerfile
from smokebox.errors import InvalidDockerfile, Unsupported

if TYPE_CHECKING:
    from smokebox.engine.images.build.instructions import Instruction


def parse(text: str) -> list[Instruction]:
    """Return the instructions after a FROM."""
    return list(parse_dockerfile(f"FROM base\n{text}").instructions[1:])


def test_reads_shell_and_exec_forms() -> None:
    shell, listed = parse('RUN echo "a b"\nRUN ["echo", "a b"]')
    assert isinstance(shell, RunInstruction)
    assert shell.command == CommandForm(words=('echo "a b"',), shell=True)
    assert isinstance(listed, RunInstruction)
    assert listed.command == CommandForm(words=("echo", "a b"), shell=False)


def test_takes_a_list_in_single_quotes_for_a_shell_command() -> None:
    [run] = parse("RUN ['echo']")
    assert isinstance(run, RunInstruction)
    assert run.command.shell


def test_joins_continued_lines_and_skips_comments_in_them() -> None:
    [run] = parse("RUN a && \\\n# comment\n  b")
    assert isinstance(run, RunInstruction)
    assert run.command.words == ("a &&   b",)
    assert run.line == 2


def test_reads_a_heredoc_as_a_script() -> None:
    [run] = parse("RUN <<EOF\necho $HOME\n# kept\nEOF")
    assert isinstance(run, RunInstruction)
    assert run.command.words == ("<<EOF",)
    assert run.heredocs[0].content == "echo $HOME\n# kept\n"


def test_strips_tabs_of_an_indented_heredoc() -> None:
    [run] = parse("RUN <<-EOF\n\t\techo\n\tEOF")
    assert isinstance(run, RunInstruction)
    assert run.heredocs[0].script == "echo\n"


def test_pairs_heredocs_with_the_sources_of_copy() -> None:
    [copy] = parse("COPY <<one <<'two' /etc/\n$A\none\n$B\ntwo")
    assert isinstance(copy, Copy)
    assert {word: (one.content, one.expand) for word, one in copy.heredocs.items()} == {
        "<<one": ("$A\n", True),
        "<<'two'": ("$B\n", False),
    }


def test_reads_the_flags_of_copy() -> None:
    [copy] = parse(
        "COPY --from=x --chown=1:2 --chmod=0644 --link --parents --exclude=a --exclude=b s d/"
    )
    assert isinstance(copy, Copy)
    assert (copy.stage, copy.owner, copy.mode) == ("x", "1:2", "0644")
    assert copy.link
    assert copy.parents
    assert copy.excludes == ("a", "b")


def test_reads_both_forms_of_env() -> None:
    old, pairs = parse("ENV name the whole rest\nENV a=1 b='2 3'")
    assert isinstance(old, Env)
    assert isinstance(pairs, Env)
    assert old.pairs == (("name", "the whole rest"),)
    assert pairs.pairs == (("a", "1"), ("b", "'2 3'"))


def test_uses_the_escape_character_of_the_directive() -> None:
    dockerfile = parse_dockerfile("# escape=`\nFROM x\nRUN a `\n b\\c\n")
    assert dockerfile.escape == "`"
    [_, run] = dockerfile.instructions
    assert isinstance(run, RunInstruction)
    assert run.command.words == ("a  b\\c",)


def test_reads_shell_cmd_onbuild_and_healthcheck() -> None:
    shell, cmd, onbuild, check, none = parse(
        'SHELL ["/bin/bash", "-c"]\nCMD a b\nONBUILD COPY . /app\n'
        "HEALTHCHECK --interval=1m30s --retries=2 CMD curl x\nHEALTHCHECK NONE"
    )
    assert isinstance(shell, Shell)
    assert shell.words == ("/bin/bash", "-c")
    assert isinstance(cmd, Cmd)
    assert cmd.command == CommandForm(words=("a b",), shell=True)
    assert isinstance(onbuild, Onbuild)
    assert onbuild.trigger == "COPY . /app"
    assert isinstance(check, HealthcheckInstruction)
    assert check.times == {"interval": 90_000_000_000, "retries": 2}
    assert isinstance(none, HealthcheckInstruction)
    assert none.command is None


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("FROM a\nFRUM b", 2, "Did you mean FROM?"),
        ("FROM a\nCOPPY a b", 2, "Did you mean COPY?"),
        ("FROM a\n\nCOPY --form=x a b", 3, "Did you mean from?"),
        ("FROM a\nWORKDIR --x=y /b", 2, "takes no flags"),
        ("FROM a\nCOPY a", 2, "source and a destination"),
        ("FROM a\nRUN <<EOF\nx", 2, "unterminated heredoc"),
        ("FROM a\nENV a=1 b", 2, "can't find ="),
        ("FROM a\nONBUILD FROM b", 2, "ONBUILD cannot have FROM"),
        ("FROM a\nONBUILD COPPY a b", 2, "Did you mean COPY?"),
        ("FROM a b c", 1, "FROM takes an image"),
        ("FROM a AS 1x", 1, "not a valid name"),
        ("FROM a\nSHELL bash", 2, "list of words"),
        ("FROM a\nCOPY --link=maybe a b", 2, "true or false"),
        ("FROM a\nHEALTHCHECK --interval=5 CMD x", 2, "not a duration"),
        ("FROM a\nRUN [1]", 2, "Only strings"),
        ("", None, "no instructions"),
    ],
)
def test_reports_the_line_of_what_is_not_valid(text: str, line: int | None, message: str) -> None:
    with pytest.raises(InvalidDockerfile, match=r"^Dockerfile") as caught:
        parse_dockerfile(text)
    assert message in str(caught.value)
    assert caught.value.line == line


@pytest.mark.parametrize(
    ("text", "line", "feature"),
    [
        ("# syntax=example.com/frontend\nFROM a", 1, "# syntax=example.com/frontend"),
        ("FROM a\nRUN --security=insecure x", 2, "RUN --security=insecure"),
        ("FROM a\nRUN --device=gpu x", 2, "RUN --device"),
        ("FROM a\nRUN --network=host x", 2, "RUN --network=host"),
        ("FROM a\nADD https://x.org/a.git /a", 2, "ADD of a git repository"),
        ("FROM a\nADD --keep-git-dir x /a", 2, "ADD --keep-git-dir"),
    ],
)
def test_refuses_features_by_name_with_their_line(text: str, line: int, feature: str) -> None:
    with pytest.raises(Unsupported, match="is not supported") as caught:
        parse_dockerfile(text)
    assert (caught.value.operation, caught.value.line) == (feature, line)
    assert caught.value.hint


@pytest.mark.parametrize(
    "directive",
    [
        "# syntax=docker/dockerfile:1",
        "#syntax = docker/dockerfile:1.7-labs",
        "# syntax=docker.io/docker/dockerfile-upstream:master",
        "# check=error=true",
    ],
)
def test_accepts_the_directives_of_dockerfiles(directive: str) -> None:
    assert len(parse_dockerfile(f"{directive}\nFROM a").instructions) == 1


@pytest.mark.parametrize(
    ("text", "mount"),
    [
        ("type=cache,target=/c", MountOption(kind="cache", target="/c", id="/c")),
        ("type=cache,dst=/c,id=x,sharing=locked", MountOption(kind="cache", target="/c", id="x")),
        (
            "from=a,src=/s,target=/t,rw",
            MountOption(kind="bind", target="/t", source="/s", stage="a", id="/t"),
        ),
        ("type=secret,id=k", MountOption(kind="secret", target="/run/secrets/k", id="k")),
        ("type=secret,id=k,env=K", MountOption(kind="secret", id="k", env="K")),
        (
            "type=secret,target=/r/k,mode=0440,uid=1,required",
            MountOption(kind="secret", target="/r/k", id="k", mode=0o440, uid=1, required=True),
        ),
        (
            "type=tmpfs,target=/t,size=2m",
            MountOption(kind="tmpfs", target="/t", id="/t", size=2 << 20),
        ),
    ],
)
def test_reads_mounts(text: str, mount: MountOption) -> None:
    assert parse_mount("Dockerfile", 1, text) == mount


def test_refuses_mounts_of_ssh_and_names_unknown_types() -> None:
    with pytest.raises(Unsupported, match="type=ssh"):
        parse_mount("Dockerfile", 3, "type=ssh")
    # Before anything runs, also of a stage that is built late.
    with pytest.raises(Unsupported, match=r"Dockerfile:\d: RUN --mount=type=ssh"):
        parse("FROM a\nRUN --mount=type=ssh git clone x")
    with pytest.raises(InvalidDockerfile, match="Did you mean cache"):
        parse_mount("Dockerfile", 3, "type=cash,target=/x")
    with pytest.raises(InvalidDockerfile, match="Did you mean target"):
        parse_mount("Dockerfile", 3, "type=cache,tarjet=/x")


@pytest.mark.parametrize(
    ("text", "nanoseconds"),
    [("30s", 30 * 10**9), ("1h2m", 3720 * 10**9), ("1.5s", 15 * 10**8), ("100ms", 10**8)],
)
def test_reads_durations(text: str, nanoseconds: int) -> None:
    assert parse_duration("Dockerfile", 1, "interval", text) == nanoseconds
