"""Random operations on a mounted bucket and on a directory, with the same results."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from smokebox.engine.sandbox import Sandbox

ROUNDS = 12 if os.environ.get("SMOKEBOX_SOAK") else 1
# Runs each operation in both places, and stops at the first difference of the results.
PROGRAM = """
import os, random, sys

rng = random.Random(int(sys.argv[1]))
PLACES = ("/data", "/tmp/directory")
NAMES = ["a", "b", "c", "d", "e"]
os.mkdir(PLACES[1])

def random_path():
    return "/".join(rng.choice(NAMES) for _ in range(rng.choice([1, 1, 2, 3])))

def write(path, offset, data, sync):
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        os.pwrite(fd, data, offset)
        if sync:
            os.fsync(fd)
        return os.pread(fd, 64, max(0, offset - 3))
    finally:
        os.close(fd)

def append(path, data):
    with open(path, "ab") as file:
        file.write(data)

def read(path):
    with open(path, "rb") as file:
        return file.read()

def size_of(path):
    status = os.stat(path)
    return status.st_size if os.path.isfile(path) else "directory"

def random_write():
    offset = rng.choice([0, 0, 5, 1000, 70_000, 1_200_000])
    size = rng.choice([1, 10, 5000, 100_000])
    return write, offset, rng.randbytes(size), rng.random() < 0.3

OPERATIONS = [
    random_write, random_write, random_write,
    lambda: (os.truncate, rng.choice([0, 3, 1000, 50_000])),
    lambda: (append, rng.randbytes(rng.choice([1, 300, 9000]))),
    lambda: (read,),
    lambda: (os.unlink,),
    lambda: (os.mkdir,),
    lambda: (os.rmdir,),
    lambda: (lambda path: sorted(os.listdir(path)),),
    lambda: (size_of,),
]

def outcome(operation, *args):
    try:
        return operation(*args)
    except OSError as error:
        return error.errno

for turn in range(int(sys.argv[2])):
    path = random_path()
    if rng.random() < 0.1:
        other = random_path()
        results = [outcome(os.rename, f"{at}/{path}", f"{at}/{other}") for at in PLACES]
    else:
        operation, *args = rng.choice(OPERATIONS)()
        results = [outcome(operation, f"{at}/{path}", *args) for at in PLACES]
    assert results[0] == results[1], (turn, path, str(results)[:500])

def tree(top):
    found = {}
    for above, folders, files in os.walk(top):
        found |= {os.path.relpath(f"{above}/{one}", top): None for one in folders}
        found |= {os.path.relpath(f"{above}/{one}", top): read(f"{above}/{one}") for one in files}
    return found

assert tree(PLACES[0]) == tree(PLACES[1])
print("equal", len(tree(PLACES[0])))
"""


@pytest.mark.timeout(20 + ROUNDS * 20)
async def test_bucket_and_directory_behave_alike(sandbox: Sandbox) -> None:
    for _ in range(ROUNDS):
        seed = random.randrange(1 << 30)
        result = await sandbox.exec(
            ["python3", "-c", PROGRAM, str(seed), "1000" if ROUNDS > 1 else "300"], timeout=60
        )
        assert result.exit_code == 0, (seed, result.stderr[-2000:])
        assert "equal" in result.stdout
        await sandbox.exec("rm -rf /data/* /tmp/directory")
