"""Tests of skills: discovery, loading, and SKILL.md files."""

from __future__ import annotations

import logging
import sys
import zipfile
from typing import TYPE_CHECKING

import pytest

from smokebox import local, virtual
from smokebox.agents.skills import (
    Skill,
    discover,
    find_skill,
    merge,
    skill_folder,
    skill_package,
    skill_tool,
)
from smokebox.agents.skills.sources import parse_document
from smokebox.errors import Conflict, InvalidOption, NotFound

if TYPE_CHECKING:
    from pathlib import Path


REVIEW = """---
name: review
description: Reviews a change. Use it before a merge.
---
# Review

Read the diff twice.
"""


def manifest(name: str, description: str = "Does it.", body: str = "Do it.") -> str:
    return f"---\nname: {name}\ndescription: {description}\n---\n{body}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two skills; one has files that must not be readable."""
    home = tmp_path / "skills"
    (home / "review" / "notes").mkdir(parents=True)
    (home / "review" / "SKILL.md").write_text(REVIEW)
    (home / "review" / "notes" / "style.md").write_text("Short lines.")
    (home / "review" / ".env").write_text("KEY=secret")
    (tmp_path / "outside.txt").write_text("secret")
    (home / "review" / "link.txt").symlink_to(tmp_path / "outside.txt")
    (home / "nested" / "deep").mkdir(parents=True)
    (home / "nested" / "deep" / "SKILL.md").write_text(manifest("deep"))
    return home


async def test_discover_finds_skills_at_any_depth() -> None:
    async with virtual() as sandbox:
        await sandbox.write_file(".agents/skills/review/SKILL.md", REVIEW)
        await sandbox.write_file(".agents/skills/review/notes/style.md", "Short lines.")
        await sandbox.write_file(".agents/skills/triage/reproduce/SKILL.md", manifest("reproduce"))
        await sandbox.write_file("elsewhere/SKILL.md", manifest("elsewhere"))
        review, reproduce = await discover(sandbox, sandbox.cwd)
        assert (review.name, reproduce.name) == ("review", "reproduce")
        assert review.description == "Reviews a change. Use it before a merge."
        home = f"{sandbox.cwd}/.agents/skills/review"
        assert review.directory == home
        assert await review.load() == (
            f"# Review\n\nRead the diff twice.\n\nFiles of this skill, in {home}:\nnotes/style.md"
        )
        assert await review.read("notes/style.md") == b"Short lines."


async def test_discover_works_in_local_sandbox(tmp_path: Path) -> None:
    home = tmp_path / ".agents" / "skills" / "review"
    home.mkdir(parents=True)
    (home / "SKILL.md").write_text(REVIEW)
    async with local(cwd=tmp_path) as sandbox:
        assert [skill.name for skill in await discover(sandbox, ".")] == ["review"]


async def test_instructions_are_read_on_load() -> None:
    async with virtual() as sandbox:
        await sandbox.write_file(".agents/skills/a/SKILL.md", manifest("a", body="Old."))
        [skill] = await discover(sandbox, ".")
        await sandbox.write_file(".agents/skills/a/SKILL.md", manifest("a", body="New."))
        assert await skill.load() == "New."


async def test_discover_searches_directories_up_to_the_root() -> None:
    async with virtual() as sandbox:
        await sandbox.write_file(".agents/skills/a/SKILL.md", manifest("a"))
        await sandbox.write_file("app/.agents/skills/b/SKILL.md", manifest("b"))
        await sandbox.write_file("other/.agents/skills/c/SKILL.md", manifest("c"))
        found = await discover(sandbox, "app/src")
        assert [skill.name for skill in found] == ["a", "b"]
        only = await discover(sandbox, "app/src", root="app")
        assert [skill.name for skill in only] == ["b"]
        assert await discover(sandbox, "/tmp") == []


async def test_invalid_skill_is_skipped_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with virtual() as sandbox:
        await sandbox.write_file(".agents/skills/good/SKILL.md", manifest("good"))
        await sandbox.write_file(".agents/skills/bad/SKILL.md", "no front matter")
        await sandbox.write_file(".agents/skills/odd/SKILL.md", manifest("Bad Name"))
        await sandbox.write_file(".agents/skills/bytes/SKILL.md", b"\xff\xfe")
        await sandbox.write_file(".agents/skills/large/SKILL.md", "x" * 1_100_000)
        with caplog.at_level(logging.WARNING, "smokebox.skills"):
            assert [skill.name for skill in await discover(sandbox, ".")] == ["good"]
        logged = "\n".join(record.getMessage() for record in caplog.records)
        assert all(name in logged for name in ("bad", "odd", "bytes", "large"))


async def test_skill_that_became_invalid_reports_it_on_load() -> None:
    async with virtual() as sandbox:
        path = ".agents/skills/a/SKILL.md"
        await sandbox.write_file(path, manifest("a"))
        tool = skill_tool(await discover(sandbox, "."))
        await sandbox.write_file(path, "invalid")
        assert "cannot be read: line 1" in (await tool.run({"name": "a"})).text
        await sandbox.rm(path)
        result = await tool.run({"name": "a"})
        assert result.is_error
        assert "was removed" in result.text


async def test_skill_folder_hides_dotfiles_and_outside_links(folder: Path) -> None:
    deep, review = skill_folder(folder)
    assert (deep.name, review.name) == ("deep", "review")
    assert await review.files() == ["notes/style.md"]
    assert await review.read("notes/style.md") == b"Short lines."
    assert [skill.name for skill in skill_folder(folder / "review")] == ["review"]
    with pytest.raises(NotFound, match="no file"):
        await review.read("../../outside.txt")


@pytest.mark.parametrize("zipped", [False, True])
async def test_skill_package_returns_its_skills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zipped: bool
) -> None:
    name = f"acme_skills_{'zip' if zipped else 'dir'}"
    files = {
        f"{name}/__init__.py": "",
        f"{name}/review/SKILL.md": REVIEW,
        f"{name}/review/a.txt": "A",
    }
    place = tmp_path / ("lib.zip" if zipped else "lib")
    if zipped:
        with zipfile.ZipFile(place, "w") as archive:
            for path, text in files.items():
                archive.writestr(path, text)
    else:
        for path, text in files.items():
            (place / path).parent.mkdir(parents=True, exist_ok=True)
            (place / path).write_text(text)
    monkeypatch.setattr(sys, "path", [str(place), *sys.path])
    [review] = skill_package(name)
    assert await review.load() == (
        "# Review\n\nRead the diff twice.\n\n"
        "Files of this skill, read by the skill tool's `file`:\na.txt"
    )
    assert await review.read("a.txt") == b"A"


@pytest.mark.parametrize("name", ["no_such_package_at_all", "json.decoder", "email"])
def test_package_without_skills_is_not_found(name: str) -> None:
    with pytest.raises(NotFound, match=name):
        skill_package(name)


def test_folder_without_skills_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no skill in"):
        skill_folder(tmp_path)
    with pytest.raises(NotFound, match="there is no folder"):
        skill_folder(tmp_path / "nowhere")
    (tmp_path / "SKILL.md").write_text("---\nname: a\n---\n")
    with pytest.raises(InvalidOption, match="its front matter has no description"):
        skill_folder(tmp_path)


def code_skill(name: str = "greet") -> Skill:
    return Skill(
        name=name,
        description="Greets.",
        instructions="Say hello as in hello.txt.",
        resources={"hello.txt": "Hello!", "logo.png": b"\x89PNG\r\n\x1a\n"},
    )


async def test_skill_tool_loads_skill_and_files() -> None:
    tool = skill_tool([code_skill()])
    assert (await tool.run({"name": "greet"})).text == (
        "Say hello as in hello.txt.\n\n"
        "Files of this skill, read by the skill tool's `file`:\nhello.txt\nlogo.png"
    )
    assert (await tool.run({"name": "greet", "file": "hello.txt"})).text == "Hello!"
    image = await tool.run({"name": "greet", "file": "logo.png"})
    assert image.images[0].media_type == "image/png"


async def test_long_file_is_read_in_parts() -> None:
    text = "\n".join(map(str, range(5000)))
    long = Skill(name="long", description="x", instructions="y", resources={"a.txt": text})
    tool = skill_tool([long])
    first = (await tool.run({"name": "long", "file": "a.txt"})).text
    assert first.endswith("Use offset=2001 to continue.]")
    assert (await tool.run({"name": "long", "file": "a.txt", "offset": 5000})).text == "4999"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"name": "great"}, "Did you mean 'greet'?"),
        ({"name": "zzz"}, "There are: greet."),
        ({"name": "greet", "file": "helo.txt"}, "Did you mean 'hello.txt'?"),
    ],
)
async def test_unknown_name_suggests_the_nearest(
    arguments: dict[str, object], expected: str
) -> None:
    result = await skill_tool([code_skill()]).run(arguments)
    assert result.is_error
    assert expected in result.text


def test_find_skill_without_skills_is_not_found() -> None:
    with pytest.raises(NotFound, match="There are: none"):
        find_skill([], "x")


async def test_prompt_includes_arguments() -> None:
    skill = Skill(name="greet", description="x", instructions="Greet.")
    assert await skill.prompt() == "Use the skill 'greet':\n\n<skill>\nGreet.\n</skill>"
    assert (await skill.prompt({"who": "Åse"})).endswith('\n\nIts arguments: {"who": "Åse"}')
    assert (await skill.prompt("Åse")).endswith("Its arguments: Åse")


async def test_skills_with_the_same_name_conflict() -> None:
    async with virtual() as sandbox:
        await sandbox.write_file(".agents/skills/greet/SKILL.md", manifest("greet"))
        found = await discover(sandbox, ".")
        with pytest.raises(Conflict, match=r"one from /\S+/greet, one from code"):
            merge(found, [code_skill()])
        await sandbox.write_file(".agents/skills/other/SKILL.md", manifest("greet"))
        with pytest.raises(Conflict, match="'greet'"):
            await discover(sandbox, ".")
    assert [s.name for s in merge([code_skill("a")], [code_skill("b")])] == ["a", "b"]
    with pytest.raises(InvalidOption, match="is not a skill"):
        merge(["greet"])  # type: ignore[list-item]


@pytest.mark.parametrize("name", ["", "Review", "a--b", "-a", "a_b", "a/b", "a" * 65, "é"])
def test_invalid_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidOption, match="name of a skill"):
        code_skill(name)


@pytest.mark.parametrize("description", ["", "  ", "x" * 1025])
def test_invalid_description_is_refused(description: str) -> None:
    with pytest.raises(InvalidOption, match="description"):
        Skill(name="a", description=description, instructions="x")


def test_skill_without_instructions_is_refused() -> None:
    with pytest.raises(InvalidOption, match="has no instructions"):
        Skill(name="a", description="x")


def test_front_matter_is_parsed_as_yaml() -> None:
    document = parse_document(
        "\ufeff---\r\n"
        "# a comment\n"
        "name: review # why not\n"
        "description: Use it: when there is more to say.\n"
        "long: one\n"
        "  two\n"
        'quoted: "a \\"b\\" \\u00e9 # no comment"\n'
        "single: 'it''s'\n"
        "kept: |\n"
        "  one\n"
        "    two\n"
        "\n"
        "  three\n"
        "folded: >-\n"
        "  one\n"
        "  two\n"
        "\n"
        "  three\n"
        "allowed-tools: [read, grep]\n"
        "list:\n"
        "- a\n"
        "- b\n"
        "metadata:\n"
        "  version: 1.0\n"
        "  tags:\n"
        "    - x\n"
        "empty:\n"
        "---\n"
        "\n"
        "Body\n---\nmore\n"
    )
    assert document.front_matter == {
        "name": "review",
        "description": "Use it: when there is more to say.",
        "long": "one two",
        "quoted": 'a "b" é # no comment',
        "single": "it's",
        "kept": "one\n  two\n\nthree\n",
        "folded": "one two\nthree",
        "allowed-tools": ["read", "grep"],
        "list": ["a", "b"],
        "metadata": {"version": "1.0", "tags": ["x"]},
        "empty": "",
    }
    assert document.body == "Body\n---\nmore"


@pytest.mark.parametrize(
    ("front_matter", "expected"),
    [
        ("name", "line 2: the front matter is not `key: value`"),
        ("a: 1\na: 2", "line 3: the key 'a' is there twice"),
        ("a: &x 1", "line 2: an anchor"),
        ("a: 1\nb: *x", "line 3: an anchor or alias"),
        ("a: !!str 1", "line 2: a tag"),
        ("a: !!python/name:os.system", "line 2: a tag"),
        ("a: @x", "line 2: found character '@'"),
        ("a:\n  b: c: d", "line 3: mapping values are not allowed here; quote"),
        ('a: "x', "line "),
        ('a: "\\q"', "line 2: found unknown escape character"),
        ("[b]: 1", "line 2: a key is not a string"),
        ("\ta: 1", "line 2: found character"),
        ("a:\n    b: 1\n  c: 2", "line 4: expected <block end>"),
    ],
)
def test_invalid_front_matter_error_names_the_line(front_matter: str, expected: str) -> None:
    with pytest.raises(ValueError, match="line ") as caught:
        parse_document(f"---\n{front_matter}\n---\n")
    assert expected in str(caught.value)


@pytest.mark.parametrize("text", ["", "# Title\n", "---\nname: a\n", "--- \nx"])
def test_file_without_front_matter_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="line 1"):
        parse_document(text)
