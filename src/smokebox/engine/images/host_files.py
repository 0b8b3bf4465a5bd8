"""The files of the host that a sandbox may see: public configuration, and /usr under a mask.

Root of a sandbox can read everything that belongs to root of the host, because layers are mapped
to its ids: file modes of the host do not protect anything. Files that other users cannot read on
the host are therefore not copied, and hidden by whiteouts. The only addition is the name
`python`.
"""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import itertools
import os
import stat
from typing import TYPE_CHECKING

from smokebox.engine.images.layer_store import make_directory, make_file

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_FILE = 8 << 20
MAX_DEPTH = 8
PRIVATE_KEY = b"PRIVATE KEY-----"

# Files below /etc that the loader, interpreters and libraries in /usr need. Files that often hold
# credentials are not copied, although programs read them: gitconfig, npmrc, pip.conf, wgetrc,
# maven/settings.xml, perl/CPAN, php.ini, R/Renviron.site, apt.
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
# Files in these trees with proxies and passwords.
EXCLUDED = {"net.properties", "jmxremote.password", "snmp.acl"}
# Only the symlinks of these: files beside them may be private to the host.
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
# Half of the alternatives are manual pages.
_MANUAL_PAGE = ".gz"
_COPIED_INTO = ("/etc/", "/var/lib/ca-certificates/")
# OpenSUSE keeps the extracted certificates here.
OUTSIDE_ETC = ("var/lib/ca-certificates/ca-bundle.pem", "var/lib/ca-certificates/pem")
# Configuration and sources of the host: npm and pip store tokens there, and the application of
# a container is often in /usr/src/app with its `.env`.
HIDDEN = ("etc/npmrc", "local/etc", "local/pip.conf", "local/src", "pip.conf", "src")
# The mark by which pip refuses to install. In a sandbox it protects nothing, and agents run pip.
_MANAGED = ("lib/python3*/EXTERNALLY-MANAGED", "local/lib/python3*/EXTERNALLY-MANAGED")
# Depth of the search for private files. Directories further down are filled by packages, whose
# files are public.
DEPTHS = {"": 4, "local": 5}
# Large, and filled by packages only.
_PACKAGED = {"include", "share/doc", "share/icons", "share/locale", "share/man", "share/zoneinfo"}
# Directories for programs installed by hand. If the engine runs as an ordinary user, root inside
# cannot write to the host's directories, but can to directories of the same name in this layer.
_INSTALLED_INTO = (
    "local",
    "local/bin",
    "local/include",
    "local/lib",
    "local/lib/node_modules",
    "local/lib/python3*",
    "local/lib/python3*/dist-packages",
    "local/lib/python3*/site-packages",
    "local/sbin",
    "local/share",
    "local/share/man",
)


def configuration_paths(host: str) -> Iterator[str]:
    """Yield the files and directories whose status changes when a copy becomes stale."""
    names = os.listdir(os.path.join(host, "etc"))
    for pattern in (*COPIED, *LINKED):
        top, _, rest = pattern.removesuffix("/*").removesuffix("/*.conf").partition("/")
        for name in fnmatch.filter(names, top) if "*" in top else (top,):
            yield f"etc/{name}/{rest}".rstrip("/")
    yield from OUTSIDE_ETC


def copy_configuration(host: str, root: str) -> None:
    """Copy the public configuration of the host into the directory `root`."""
    for pattern in COPIED:
        for path in _matches(host, pattern):
            _copy(host, path, root, MAX_DEPTH)
    for path in OUTSIDE_ETC:
        if is_public(host, path):
            _copy(host, path, root, MAX_DEPTH)
    for pattern in LINKED:
        for path in _matches(host, pattern):
            if os.path.islink(os.path.join(host, path)) and not path.endswith(_MANUAL_PAGE):
                _copy(host, path, root, 0)


def drop_dead_links(host: str, root: str, hidden: tuple[str, ...]) -> None:
    """Remove symlinks in `root`/etc to targets that exist neither there nor in the host's /usr.

    The target of a symlink is itself information about the host.
    """
    for directory, names, files in os.walk(os.path.join(root, "etc")):
        for name in names + files:
            path = os.path.join(directory, name)
            if os.path.islink(path) and not _target_exists(host, root, path[len(root) :], hidden):
                os.unlink(path)


def is_public(host: str, path: str) -> bool:
    """Return whether every user may reach `path`, without symlinks on the way."""
    directory = host
    for name in os.path.dirname(path).split("/"):
        directory = os.path.join(directory, name)
        if not _is_searchable(directory):
            return False
    return True


def _is_searchable(directory: str) -> bool:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        mode = os.lstat(directory).st_mode
        return stat.S_ISDIR(mode) and bool(mode & stat.S_IXOTH)
    return False


def _matches(host: str, pattern: str) -> list[str]:
    """Return the paths below /etc that match, in directories that every user may search."""
    found = [f"etc/{name}" for name in glob.glob(pattern, root_dir=os.path.join(host, "etc"))]
    directories = {os.path.dirname(path): path for path in found}
    public = {name for name, path in directories.items() if is_public(host, path)}
    return sorted(path for path in found if os.path.dirname(path) in public)


def _copy(host: str, path: str, root: str, depth_left: int) -> None:
    """Copy a file, symlink or tree; missing, private and special files are skipped."""
    source, target = os.path.join(host, path), os.path.join(root, path)
    if os.path.lexists(target) or os.path.basename(path) in EXCLUDED:
        return
    with contextlib.suppress(FileNotFoundError, PermissionError):
        mode = os.lstat(source).st_mode
        if stat.S_ISLNK(mode):
            _make_parents(root, path)
            os.symlink(os.readlink(source), target)
        elif stat.S_ISREG(mode):
            data = _read(source)
            if data is not None:
                _make_parents(root, path)
                make_file(target, data, 0o755 if mode & stat.S_IXOTH else 0o644)
        elif depth_left and mode & stat.S_IROTH and _is_searchable(source):
            for name in sorted(os.listdir(source)):
                _copy(host, f"{path}/{name}", root, depth_left - 1)


def _read(source: str) -> bytes | None:
    """Return the bytes of a file that every user may read and that holds no key, else None."""
    with open(os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        found = os.fstat(file.fileno())
        if not (stat.S_ISREG(found.st_mode) and found.st_mode & stat.S_IROTH):
            return None
        if found.st_size > MAX_FILE:
            return None
        data = file.read(MAX_FILE)
    return None if PRIVATE_KEY in data else data


def _make_parents(root: str, path: str) -> None:
    if os.path.isdir(os.path.join(root, os.path.dirname(path))):
        return
    directory = root
    for name in os.path.dirname(path).split("/"):
        directory = os.path.join(directory, name)
        with contextlib.suppress(FileExistsError):
            make_directory(directory)


def _target_exists(host: str, root: str, path: str, hidden: tuple[str, ...]) -> bool:
    for _ in range(MAX_DEPTH):
        if path.startswith(("/usr/", "/bin/", "/sbin/", "/lib")):
            return not path.startswith(hidden) and os.path.exists(host + path)
        inside = root + path
        if not os.path.islink(inside):
            return path.startswith(_COPIED_INTO) and os.path.lexists(inside)
        path = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(inside)))
    return False


def make_mask(usr: str, mask: str, *, local: bool) -> None:
    """Fill the empty directory `mask`, a layer on top of the directory `usr`.

    Without `local`, /usr/local is only a mount point for another layer, and is not searched.
    """
    if not local:
        make_directory(os.path.join(mask, "local"))
    for path in sorted({*_hidden(usr), *_private(usr, local=local)}):
        if local or path.partition("/")[0] != "local":
            _whiteout(usr, mask, path)
    if local and os.geteuid() != 0:
        for pattern in _INSTALLED_INTO:
            for path in glob.glob(pattern, root_dir=usr):
                _mirror(usr, mask, path)
    _add_python(usr, mask, local=local)


def _add_python(usr: str, mask: str, *, local: bool) -> None:
    """Add the name `python` if the host has only `python3`: scripts and models use it."""
    folders = ("bin", "local/bin") if local else ("bin",)
    if any(os.path.lexists(f"{usr}/{folder}/python") for folder in folders):
        return
    if os.path.exists(f"{usr}/bin/python3") and _mirror(usr, mask, "bin"):
        os.symlink("python3", f"{mask}/bin/python")


def _hidden(usr: str) -> Iterator[str]:
    found = (path for path in HIDDEN if os.path.lexists(os.path.join(usr, path)))
    return itertools.chain(found, *(glob.iglob(one, root_dir=usr) for one in _MANAGED))


def _private(usr: str, *, local: bool) -> Iterator[str]:
    for top, depth in DEPTHS.items():
        if local or top != "local":
            yield from _private_in(usr, top, depth)


def _private_in(usr: str, directory: str, depth: int) -> Iterator[str]:
    for entry in _entries(os.path.join(usr, directory)):
        path = f"{directory}/{entry.name}" if directory else entry.name
        if entry.is_symlink() or path in HIDDEN:
            continue
        mode = _mode(entry)
        if not is_readable_by_all(mode):
            yield path
        elif stat.S_ISDIR(mode) and depth > 1 and path not in DEPTHS and path not in _PACKAGED:
            yield from _private_in(usr, path, depth - 1)


def _entries(directory: str) -> list[os.DirEntry[str]]:
    # A package upgrade may remove it meanwhile.
    gone = contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError)
    with gone, os.scandir(directory) as found:
        return list(found)
    return []


def _mode(entry: os.DirEntry[str]) -> int:
    """Return its mode, or 0, which hides it, if that cannot be read."""
    with contextlib.suppress(FileNotFoundError, PermissionError):
        return entry.stat(follow_symlinks=False).st_mode
    return 0


def is_readable_by_all(mode: int) -> bool:
    """Return whether every user may read a file, or enter and list a directory, of that mode."""
    if stat.S_ISDIR(mode):
        return mode & 0o005 == 0o005
    return stat.S_ISREG(mode) and bool(mode & 0o004)


def _whiteout(usr: str, mask: str, path: str) -> None:
    if _mirror(usr, mask, os.path.dirname(path)):
        os.mknod(os.path.join(mask, path), stat.S_IFCHR, 0)


def _mirror(usr: str, mask: str, path: str) -> bool:
    """Create a directory and its parents with the modes in `usr`, as the upper layer's apply.

    Returns False if there is no such directory, or if it is hidden itself.
    """
    target = os.path.join(mask, path)
    if os.path.lexists(target):
        return os.path.isdir(target)
    source = os.path.join(usr, path)
    if os.path.islink(source) or not os.path.isdir(source):
        return False
    if not _mirror(usr, mask, os.path.dirname(path)):
        return False
    found = os.stat(source)
    make_directory(target, stat.S_IMODE(found.st_mode))
    # Fails for ordinary users, and in a container without those ids.
    with contextlib.suppress(OSError):
        os.chown(target, found.st_uid, found.st_gid)
    return True
