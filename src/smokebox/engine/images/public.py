"""Copies what everybody on the host may read, from a positive list; nothing else leaves it."""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import os
import stat
from typing import TYPE_CHECKING

from smokebox.engine.images import shelf

if TYPE_CHECKING:
    from collections.abc import Iterator

LARGEST = 8 << 20
DEEPEST = 8
PRIVATE_KEY = b"PRIVATE KEY-----"

# Below /etc: what the loader, interpreters and libraries in /usr do not work without. Files
# where people write credentials are left out, though programs read them: gitconfig, npmrc,
# pip.conf, wgetrc, maven/settings.xml, perl/CPAN, php.ini, R/Renviron.site, apt.
COPIED = (
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d/*.conf",
    "ld-musl-*.path",
    "os-release",
    "debian_version",
    "*-release",
    "mime.types",
    "magic",
    "magic.mime",
    "services",
    "protocols",
    "rpc",
    "ethertypes",
    "netconfig",
    "locale.alias",
    "inputrc",
    "terminfo",
    "fonts",
    "groff",
    "python3/debian_config",
    "python3.*/sitecustomize.py",
    "java/java.conf",
    "java/security",
    "java-*-openjdk",
    "maven/m2.conf",
    "maven/logging",
    "R/Makeconf",
    "R/Renviron",
    "R/ldpaths",
    "ssl/certs/ca-certificates.crt",
    "ssl/certs/java/cacerts",
    "ca-certificates/extracted",
    "pki/ca-trust/extracted",
    "crypto-policies/config",
    "crypto-policies/back-ends",
)
# In the trees above: where proxies and passwords are written.
LEFT_OUT = {"net.properties", "jmxremote.password", "snmp.acl"}
# Of these only the symbolic links: files beside them may be the host's own.
LINKED = (
    "alternatives/*",
    "crypto-policies/back-ends/*",
    "pki/java/cacerts",
    "pki/tls/cert.pem",
    "pki/tls/certs",
    "pki/tls/certs/*",
    "ssl/ca-bundle.pem",
    "ssl/cert.pem",
    "ssl/certs",
    "ssl/certs/*",
)
# Half of the alternatives are pages of manuals.
_MANUAL = ".gz"
_COPIED_INTO = ("/etc/", "/var/lib/ca-certificates/")
# OpenSUSE keeps the extracted certificates here.
OUTSIDE_ETC = ("var/lib/ca-certificates/ca-bundle.pem", "var/lib/ca-certificates/pem")


def listed(host: str) -> Iterator[str]:
    """The files and directories whose change makes a copy stale, as far as stat can tell."""
    names = os.listdir(os.path.join(host, "etc"))
    for pattern in (*COPIED, *LINKED):
        top, _, rest = pattern.removesuffix("/*").removesuffix("/*.conf").partition("/")
        for name in fnmatch.filter(names, top) if "*" in top else (top,):
            yield f"etc/{name}/{rest}".rstrip("/")
    yield from OUTSIDE_ETC


def copy_configuration(host: str, root: str) -> None:
    """Copy what is on the list and on the host into the directory `root`."""
    for pattern in COPIED:
        for path in _matches(host, pattern):
            _copy(host, path, root, DEEPEST)
    for path in OUTSIDE_ETC:
        if is_public(host, path):
            _copy(host, path, root, DEEPEST)
    for pattern in LINKED:
        for path in _matches(host, pattern):
            if os.path.islink(os.path.join(host, path)) and not path.endswith(_MANUAL):
                _copy(host, path, root, 0)


def drop_dead_links(host: str, root: str, hidden: tuple[str, ...]) -> None:
    """Remove links in `root`/etc that lead to nothing there nor in the host's /usr.

    Where a link leads to is itself a word about the host.
    """
    for directory, names, files in os.walk(os.path.join(root, "etc")):
        for name in names + files:
            path = os.path.join(directory, name)
            if os.path.islink(path) and not _leads(host, root, path[len(root) :], hidden):
                os.unlink(path)


def is_public(host: str, path: str) -> bool:
    """Whether everybody may come to `path` by directories alone, without a link."""
    directory = host
    for name in os.path.dirname(path).split("/"):
        directory = os.path.join(directory, name)
        if not _is_open(directory):
            return False
    return True


def _is_open(directory: str) -> bool:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        mode = os.lstat(directory).st_mode
        return stat.S_ISDIR(mode) and bool(mode & stat.S_IXOTH)
    return False


def _matches(host: str, pattern: str) -> list[str]:
    """What has that name below /etc, in directories that are open to everybody."""
    found = [f"etc/{name}" for name in glob.glob(pattern, root_dir=os.path.join(host, "etc"))]
    directories = {os.path.dirname(path): path for path in found}
    public = {name for name, path in directories.items() if is_public(host, path)}
    return sorted(path for path in found if os.path.dirname(path) in public)


def _copy(host: str, path: str, root: str, deepest: int) -> None:
    """Copy a file, link or tree; what is missing, private or odd is passed over."""
    source, made = os.path.join(host, path), os.path.join(root, path)
    if os.path.lexists(made) or os.path.basename(path) in LEFT_OUT:
        return
    with contextlib.suppress(FileNotFoundError, PermissionError):
        mode = os.lstat(source).st_mode
        if stat.S_ISLNK(mode):
            _parents(root, path)
            os.symlink(os.readlink(source), made)
        elif stat.S_ISREG(mode):
            data = _read(source)
            if data is not None:
                _parents(root, path)
                shelf.file(made, data, 0o755 if mode & stat.S_IXOTH else 0o644)
        elif deepest and mode & stat.S_IROTH and _is_open(source):
            for name in sorted(os.listdir(source)):
                _copy(host, f"{path}/{name}", root, deepest - 1)


def _read(source: str) -> bytes | None:
    """The bytes of a file that everybody may read and that holds no key, else None."""
    with open(os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        found = os.fstat(file.fileno())
        if not (stat.S_ISREG(found.st_mode) and found.st_mode & stat.S_IROTH):
            return None
        if found.st_size > LARGEST:
            return None
        data = file.read(LARGEST)
    return None if PRIVATE_KEY in data else data


def _parents(root: str, path: str) -> None:
    if os.path.isdir(os.path.join(root, os.path.dirname(path))):
        return
    directory = root
    for name in os.path.dirname(path).split("/"):
        directory = os.path.join(directory, name)
        with contextlib.suppress(FileExistsError):
            shelf.directory(directory)


def _leads(host: str, root: str, path: str, hidden: tuple[str, ...]) -> bool:
    for _ in range(DEEPEST):
        if path.startswith(("/usr/", "/bin/", "/sbin/", "/lib")):
            return not path.startswith(hidden) and os.path.exists(host + path)
        inside = root + path
        if not os.path.islink(inside):
            return path.startswith(_COPIED_INTO) and os.path.lexists(inside)
        path = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(inside)))
    return False
