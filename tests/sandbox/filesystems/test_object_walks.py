"""Directories derived from listings of keys, complete or cut."""

from __future__ import annotations

from smokebox.sandbox.filesystems.filesystem import Entry
from smokebox.sandbox.filesystems.object_cache import directories, resume_after
from smokebox.sandbox.filesystems.objects import ObjectEntry, ObjectWalk

FILE = ObjectEntry(Entry("file", 5), "v")
EMPTY = ObjectEntry(Entry("file", 0), "v")


def walked(*keys: str, ended: bool = True, empty: tuple[str, ...] = ()) -> ObjectWalk:
    return ObjectWalk([(key, EMPTY if key in empty else FILE) for key in keys], ended, exists=True)


def kinds(found: ObjectWalk, top: str = "/", after: str = "") -> dict[str, dict[str, str]]:
    listings = directories(found, top, ".marker", after)
    return {
        path: {name: item.entry.kind for name, item in listing.items()}
        for path, listing in listings.items()
    }


def test_complete_walk_lists_every_directory() -> None:
    assert kinds(walked("a", "d/b", "d/e/f")) == {
        "/": {"a": "file", "d": "directory"},
        "/d": {"b": "file", "e": "directory"},
        "/d/e": {"f": "file"},
    }


def test_walk_lists_only_directories_below_the_top() -> None:
    assert kinds(walked("d/b", "d/e/f"), "/d").keys() == {"/d", "/d/e"}


def test_truncated_end_excludes_directories_it_may_have_cut() -> None:
    assert kinds(walked("d/a/x", "d/b/x", "d/b/y", ended=False), "/d").keys() == {"/d/a"}


def test_truncated_start_excludes_directories_it_may_have_cut() -> None:
    assert kinds(walked("d/b/y", "d/c/x"), "/d", after="d/b/x").keys() == {"/d/c"}


def test_directory_with_an_empty_object_is_excluded_as_ambiguous() -> None:
    assert kinds(walked("d/a", "e/none", empty=("e/none",))).keys() == {"/", "/d"}


def test_empty_object_with_others_below_is_a_directory() -> None:
    found = walked("d", "d/a", empty=("d",))
    assert kinds(found) == {"/": {"d": "directory"}, "/d": {"a": "file"}}


def test_file_hides_a_directory_of_its_name() -> None:
    assert kinds(walked("x", "x/y"))["/"] == {"x": "file"}


def test_marker_creates_a_directory_and_is_hidden() -> None:
    assert kinds(walked("d/.marker", empty=("d/.marker",))) == {"/": {"d": "directory"}, "/d": {}}


def test_walk_resumes_before_the_directory_it_cut() -> None:
    assert resume_after(walked("d/a/x", "d/b/x", ended=False), "/d", "") == "d/b"
    assert resume_after(walked("a/x", "b", ended=False), "/", "") == "b"


def test_walk_skips_a_directory_longer_than_its_page() -> None:
    assert resume_after(walked("d/b/x", "d/b/y", ended=False), "/d", "d/b") == "d/b/y"
