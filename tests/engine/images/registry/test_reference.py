"""References are parsed as Docker does, and errors name the part that is wrong."""

from __future__ import annotations

import pytest

from smokebox.engine.images.registry.reference import (
    Reference,
    check_registry,
    is_reference,
    parse_reference,
)
from smokebox.errors import InvalidOption

DIGEST = "sha256:" + "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("text", "registry", "repository", "tag", "digest"),
    [
        ("python", "docker.io", "library/python", "latest", None),
        ("python:3.12-slim", "docker.io", "library/python", "3.12-slim", None),
        ("team/app:v1", "docker.io", "team/app", "v1", None),
        ("docker.io/python", "docker.io", "library/python", "latest", None),
        ("index.docker.io/library/python:3", "docker.io", "library/python", "3", None),
        ("localhost/app", "localhost", "app", "latest", None),
        ("localhost:5000/app:1", "localhost:5000", "app", "1", None),
        ("images.example.com/x/y", "images.example.com", "x/y", "latest", None),
        (
            f"images.example.com:5000/x/y@{DIGEST}",
            "images.example.com:5000",
            "x/y",
            None,
            DIGEST,
        ),
        (f"python:3@{DIGEST}", "docker.io", "library/python", "3", DIGEST),
        ("Images.Example.COM/x", "images.example.com", "x", "latest", None),
        ("[::1]:5000/app", "[::1]:5000", "app", "latest", None),
        ("123/app", "docker.io", "123/app", "latest", None),
        ("a__b/c-d--e.f_g", "docker.io", "a__b/c-d--e.f_g", "latest", None),
    ],
)
def test_references_are_parsed_as_docker_does(
    text: str, registry: str, repository: str, tag: str | None, digest: str | None
) -> None:
    expected = Reference(registry=registry, repository=repository, tag=tag, digest=digest)
    assert parse_reference(text) == expected
    assert parse_reference(str(expected)) == expected


def test_short_names_are_looked_for_in_the_default_registry() -> None:
    found = parse_reference("python:3", "images.example.com")
    assert str(found) == "images.example.com/python:3"
    assert str(parse_reference("docker.io/python:3", "images.example.com")) == (
        "docker.io/library/python:3"
    )


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("Python", "upper-case"),
        ("team/App:1", "upper-case"),
        ("python:", "its tag"),
        ("python:a b", "its tag"),
        ("python:" + "x" * 129, "its tag"),
        ("python@sha256:12", "its digest"),
        (f"python@sha512:{'0' * 128}", "its digest"),
        ("python@", "its digest"),
        ("team//app", "is empty"),
        ("team/app/", "is empty"),
        ("a..b/c", "its registry"),
        ("-x.example.com/app", "its registry"),
        ("example.com:99999/app", "its registry"),
        ("example.com:0/app", "its registry"),
        ("https://example.com/app", "its registry"),
        ("user@example.com/app", "its digest"),
        ("python;rm", "lower-case letters"),
        ("pythön", "lower-case letters"),
        ("x" * 300, "longer than 255"),
        ("host", "not the name"),
        ("./Dockerfile", "not the name"),
    ],
)
def test_errors_name_the_part_that_is_wrong(text: str, part: str) -> None:
    with pytest.raises(InvalidOption, match=part) as caught:
        parse_reference(text)
    assert caught.value.option == "image"
    assert "docker pull" in caught.value.hint


@pytest.mark.parametrize(
    "image",
    [
        "",
        "host",
        ".",
        "..",
        "./x",
        "../x",
        "/x",
        "oci:x",
        "archive:x",
        "snapshot:x",
        "recipe:x",
        "dir:x",
        DIGEST,
    ],
)
def test_images_of_other_sources_are_no_references(image: str) -> None:
    assert not is_reference(image)


def test_every_spelling_means_the_same_image() -> None:
    found = parse_reference("python")
    assert set(found.spellings()) == {
        f"{name}{tag}"
        for name in ("python", "docker.io/python", "docker.io/library/python", "library/python")
        for tag in ("", ":latest")
    }
    assert all(parse_reference(one) == found for one in found.spellings())
    assert "python" not in set(parse_reference("python:3").spellings())
    assert "python" not in set(found.spellings("images.example.com"))


def test_a_pinned_reference_keeps_its_tag() -> None:
    pinned = parse_reference("python:3").pinned(DIGEST)
    assert (str(pinned), pinned.target) == (f"docker.io/library/python:3@{DIGEST}", DIGEST)


@pytest.mark.parametrize("text", ["", "a/b", "https://x", "x:0", "x:y", "a b"])
def test_the_name_of_a_registry_is_checked(text: str) -> None:
    with pytest.raises(InvalidOption, match="default"):
        check_registry("default", text)
