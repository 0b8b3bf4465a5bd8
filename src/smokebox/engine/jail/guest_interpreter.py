"""A copy of the running interpreter for guest init inside gVisor, where no file of the host or the
image can be used.

It holds only what guest init needs: the program, its shared libraries with their loader, and the
modules that guest init imports. It is made once, by this file run as a script, and is the same
for every sandbox.
"""

from __future__ import annotations

import compileall
import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import py_compile
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

BUILD_SECONDS = 120.0

# Our modules that are used inside, and their packages.
_MODULES = (
    "runtime/supervisor.py",
    "engine/jail/guest_init.py",
    "engine/jail/gvisor_guest_init.py",
    "engine/jail/linux.py",
    "engine/jail/log_pump.py",
    "engine/jail/shell_supervisor.py",
    "engine/jail/stdin_pump.py",
    "engine/jail/terminal_supervisor.py",
)
_PACKAGES = ("", "runtime", "engine", "engine/jail")
_MAIN = """import sys

sys.path.insert(0, __file__.rpartition("/")[0])
from smokebox.engine.jail.gvisor_guest_init import main

main()
"""
# Modules that are imported only when an error or a signal occurs.
_LATER = ("__future__", "collections.abc", "encodings.ascii", "encodings.latin_1", "traceback")
_ENV = ("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD")
_ARGV, _LOCK = "argv.json", "lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestInterpreter:
    """A copy on this host. In `argv`, which starts guest init, `@` stands for its path."""

    path: str
    argv: tuple[str, ...]

    def command(self, path: str) -> list[str]:
        """Return the command that starts guest init where the copy is mounted at `path`."""
        return [word.replace("@", path, 1) for word in self.argv]

    def lock(self) -> int:
        """Return a descriptor that keeps other engines from removing the copy while it is open.

        It is of a file: a directory of the host would lead to everything above it.
        """
        fd = os.open(f"{self.path}/{_ARGV}", os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(fd, fcntl.LOCK_SH)
        return fd


def provide(folder: str) -> GuestInterpreter:
    """Return the copy in `folder`, made if it is missing. Raises OSError."""
    path = os.path.join(folder, _fingerprint())
    with contextlib.suppress(FileNotFoundError):
        return _load(path)
    os.makedirs(folder, exist_ok=True)
    # Engines may share the folder; one of them makes the copy.
    with open(os.path.join(folder, _LOCK), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            return _load(path)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".") as temporary:
            _build(f"{temporary}/copy")
            os.rename(f"{temporary}/copy", path)
        _remove_unused(path)
    return _load(path)


def _load(path: str) -> GuestInterpreter:
    with open(f"{path}/{_ARGV}") as file:
        return GuestInterpreter(path=path, argv=tuple(json.load(file)))


def _build(target: str) -> None:
    environ = {name: value for name, value in os.environ.items() if name in _ENV}
    # Without frozen modules, so that there are files to copy.
    options = ("-I", "-S", "-X", "frozen_modules=off")
    command = [os.path.realpath(sys.executable), *options, __file__, target]
    try:
        subprocess.run(
            command,
            env=environ,
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=BUILD_SECONDS,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"]
        raise OSError(f"cannot copy the interpreter: {lines[-1]}") from error
    except subprocess.TimeoutExpired as error:
        raise OSError("cannot copy the interpreter: it takes too long") from error


def _remove_unused(path: str) -> None:
    """Remove copies of other versions that no sandbox uses."""
    for other in Path(path).parent.iterdir():
        if other != Path(path) and other.is_dir() and not _is_locked(other):
            shutil.rmtree(other, ignore_errors=True)


def _is_locked(path: Path) -> bool:
    try:
        with open(path / _ARGV) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        # An unfinished copy.
        return False
    return False


def _fingerprint() -> str:
    """Return a hash of everything that a copy depends on."""
    program = os.path.realpath(sys.executable)
    status = os.stat(program)
    parts = [sys.version, program, str(status.st_size), str(status.st_mtime_ns)]
    digest = hashlib.sha256("\0".join(parts).encode())
    for path in (Path(__file__), *(_package() / module for module in _MODULES)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _package() -> Path:
    return Path(__file__).parent.parent.parent


class _DlPhdrInfo(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("name", ctypes.c_char_p)]


def _libraries() -> list[str]:
    """Return the paths of the shared libraries of this process, as they were loaded."""
    found: list[str] = []

    def add(info: ctypes._Pointer[_DlPhdrInfo], _size: int, _data: int) -> int:
        if name := info[0].name:
            found.append(os.fsdecode(name))
        return 0

    callback = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.POINTER(_DlPhdrInfo), ctypes.c_size_t, ctypes.c_void_p
    )
    ctypes.CDLL(None).dl_iterate_phdr(callback(add), None)
    # The kernel's vDSO has no path.
    return [name for name in found if name.startswith("/")]


def _copy_to(target: str) -> None:
    """Import guest init from a copy of our modules, then copy everything that was loaded."""
    os.umask(0o022)
    _copy_modules(f"{target}/src")
    sys.path.insert(0, f"{target}/src")
    for name in (*_LATER, "smokebox.engine.jail.gvisor_guest_init"):
        __import__(name)
    standard = os.path.dirname(os.__file__)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    library = f"{target}/{sys.platlibdir}/{version}"
    os.makedirs(f"{library}/lib-dynload")
    _copy(os.path.realpath(sys.executable), f"{target}/bin/python", 0o755)
    for path in _module_files():
        if path.startswith(f"{standard}/"):
            _copy(path, f"{library}/{os.path.relpath(path, standard)}", 0o644)
    loader: list[str] = []
    for path in _libraries():
        name = os.path.basename(path)
        if not path.startswith(f"{standard}/"):
            _copy(path, f"{target}/so/{name}", 0o755)
            if name.startswith("ld-"):
                loader = [f"@/so/{name}", "--library-path", "@/so"]
    compileall.compile_dir(
        target,
        quiet=2,
        stripdir=target,
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )
    argv = [*loader, "@/bin/python", "-I", "-S", "@/src/main.py"]
    Path(target, _ARGV).write_text(json.dumps(argv))


def _copy_modules(target: str) -> None:
    for package in _PACKAGES:
        os.makedirs(f"{target}/smokebox/{package}", exist_ok=True)
        Path(f"{target}/smokebox/{package}/__init__.py").touch()
    for module in _MODULES:
        _copy(str(_package() / module), f"{target}/smokebox/{module}", 0o644)
    Path(target, "main.py").write_text(_MAIN)


def _module_files() -> list[str]:
    """Return the files of all loaded modules.

    They are looked up by name: from Python 3.13 on, `collections.abc` replaces itself with
    `_collections_abc` when it is imported, so its own file is in no loaded spec.
    """
    found: list[str] = []
    for name in list(sys.modules):
        package = name.rpartition(".")[0]
        path = getattr(sys.modules.get(package), "__path__", None)
        if package and path is None:
            continue
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.has_location and spec.origin:
            found.append(spec.origin)
    return found


def _copy(source: str, target: str, mode: int) -> None:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    shutil.copyfile(source, target)
    os.chmod(target, mode)


if __name__ == "__main__":
    _copy_to(sys.argv[1])
