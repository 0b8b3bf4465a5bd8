"""A copy of the running interpreter, for where nothing of the host's or the image's can be used.

It holds no more than the agent needs there: the program, its shared libraries with their
loader, and the modules that the agent imports. It is made once, by this file run as a
script, and is the same for every sandbox.
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
from pathlib import Path

BUILD_SECONDS = 120.0

# The modules of ours that are used inside, and packages that hold them there.
_MODULES = (
    "runtime/supervisor.py",
    "engine/jail/guest_init.py",
    "engine/jail/gvisor_guest_init.py",
    "engine/jail/linux.py",
    "engine/jail/log_pump.py",
    "engine/jail/shell_supervisor.py",
    "engine/jail/terminal_supervisor.py",
)
_PACKAGES = ("", "runtime", "engine", "engine/jail")
_MAIN = """import sys

sys.path.insert(0, __file__.rpartition("/")[0])
from smokebox.engine.jail.gvisor_guest_init import main

main()
"""
# What errors and signals import when they come, and not before.
_LATER = ("__future__", "collections.abc", "encodings.ascii", "encodings.latin_1", "traceback")
_ENV = ("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD")
_ARGV, _LOCK = "argv.json", "lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestInterpreter:
    """A copy on this host, and the words that start the agent by it, relative to the copy."""

    path: str
    argv: tuple[str, ...]

    def command(self, place: str) -> list[str]:
        """What to execute where the copy is seen at `place`."""
        return [word.replace("@", place, 1) for word in self.argv]

    def hold(self) -> int:
        """A descriptor that keeps others from removing the copy, for as long as it is open.

        Of a file: who has a directory of the host's has all that is above it.
        """
        fd = os.open(f"{self.path}/{_ARGV}", os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(fd, fcntl.LOCK_SH)
        return fd


def provide(folder: str) -> GuestInterpreter:
    """The copy in `folder`, made if it is not there; raises OSError when that fails."""
    path = os.path.join(folder, _fingerprint())
    with contextlib.suppress(FileNotFoundError):
        return _read(path)
    os.makedirs(folder, exist_ok=True)
    # Engines may share the folder; one of them makes the copy.
    with open(os.path.join(folder, _LOCK), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            return _read(path)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".") as place:
            made = f"{place}/copy"
            _make(made)
            os.rename(made, path)
        _remove_others(path)
    return _read(path)


def _read(path: str) -> GuestInterpreter:
    with open(f"{path}/{_ARGV}") as file:
        return GuestInterpreter(path=path, argv=tuple(json.load(file)))


def _make(place: str) -> None:
    environ = {name: value for name, value in os.environ.items() if name in _ENV}
    # Modules from files, so that there are files to copy.
    options = ("-I", "-S", "-X", "frozen_modules=off")
    command = [os.path.realpath(sys.executable), *options, __file__, place]
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
        said = error.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"]
        raise OSError(f"cannot copy the interpreter: {said[-1]}") from error
    except subprocess.TimeoutExpired as error:
        raise OSError("cannot copy the interpreter: it takes too long") from error


def _remove_others(path: str) -> None:
    """Remove copies of former versions that no sandbox uses any more."""
    for other in Path(path).parent.iterdir():
        if other != Path(path) and other.is_dir() and not _is_held(other):
            shutil.rmtree(other, ignore_errors=True)


def _is_held(path: Path) -> bool:
    try:
        with open(path / _ARGV) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        # One that was never finished.
        return False
    return False


def _fingerprint() -> str:
    """What a copy depends on, as a name for it."""
    program = os.path.realpath(sys.executable)
    status = os.stat(program)
    parts = [sys.version, program, str(status.st_size), str(status.st_mtime_ns)]
    digest = hashlib.sha256("\0".join(parts).encode())
    for path in (Path(__file__), *(_source() / module for module in _MODULES)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _source() -> Path:
    return Path(__file__).parent.parent.parent


class _Loaded(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("name", ctypes.c_char_p)]


def _libraries() -> list[str]:
    """The shared libraries of this process, by the names that they are asked for with."""
    found: list[str] = []

    def each(info: ctypes._Pointer[_Loaded], _size: int, _data: int) -> int:
        if name := info[0].name:
            found.append(os.fsdecode(name))
        return 0

    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Loaded), ctypes.c_size_t, ctypes.c_void_p)
    ctypes.CDLL(None).dl_iterate_phdr(kind(each), None)
    # What has no path is the kernel's.
    return [name for name in found if name.startswith("/")]


def _copy_to(place: str) -> None:
    """Be the script: import the agent from the copy of our modules, and copy what that took."""
    os.umask(0o022)
    _copy_modules(f"{place}/src")
    sys.path.insert(0, f"{place}/src")
    for name in (*_LATER, "smokebox.engine.jail.gvisor_guest_init"):
        __import__(name)
    standard = os.path.dirname(os.__file__)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    library = f"{place}/{sys.platlibdir}/{version}"
    os.makedirs(f"{library}/lib-dynload")
    _put(os.path.realpath(sys.executable), f"{place}/bin/python", 0o755)
    for origin in _origins():
        if origin.startswith(f"{standard}/"):
            _put(origin, f"{library}/{os.path.relpath(origin, standard)}", 0o644)
    loader: list[str] = []
    for path in _libraries():
        name = os.path.basename(path)
        if not path.startswith(f"{standard}/"):
            _put(path, f"{place}/so/{name}", 0o755)
            if name.startswith("ld-"):
                loader = [f"@/so/{name}", "--library-path", "@/so"]
    compileall.compile_dir(
        place,
        quiet=2,
        stripdir=place,
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )
    argv = [*loader, "@/bin/python", "-I", "-S", "@/src/main.py"]
    Path(place, _ARGV).write_text(json.dumps(argv))


def _copy_modules(place: str) -> None:
    for package in _PACKAGES:
        os.makedirs(f"{place}/smokebox/{package}", exist_ok=True)
        Path(f"{place}/smokebox/{package}/__init__.py").touch()
    for module in _MODULES:
        _put(str(_source() / module), f"{place}/smokebox/{module}", 0o644)
    Path(place, "main.py").write_text(_MAIN)


def _origins() -> list[str]:
    """The files of all modules that this process has."""
    specs = [getattr(module, "__spec__", None) for module in list(sys.modules.values())]
    return [spec.origin for spec in specs if spec and spec.has_location and spec.origin]


def _put(source: str, target: str, mode: int) -> None:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    shutil.copyfile(source, target)
    os.chmod(target, mode)


if __name__ == "__main__":
    _copy_to(sys.argv[1])
