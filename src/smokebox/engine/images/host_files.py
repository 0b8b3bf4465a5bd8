"""The files of the host that a sandbox may see: public configuration, and /usr behind a mask.

Root inside a sandbox can read everything that belongs to root outside, because layers are mapped
to its ids: the host's file modes do not protect anything there. Files that other users could not
read on the host are therefore left out of the copies and hidden by whiteouts. The only addition
is the name `python`.
"""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import os
import stat
from typing import TYPE_CHECKING

from smokebox.engine.images.image import make_directory, make_file

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
# Configuration and sources of the host, readable or not: npm and pip keep tokens in the
# former, and a program that runs in a container often lies in /usr/src/app, with its `.env`.
HIDDEN = ("etc/npmrc", "local/etc", "local/pip.conf", "local/src", "pip.conf", "src")
# How far below to look for what is private. Packages, whose files are public however they
# are installed, fill the depths.
DEPTHS = {"": 4, "local": 5}
# Large, and filled by packages only.
_PACKAGED = {"include", "share/doc", "share/icons", "share/locale", "share/man", "share/zoneinfo"}
# Where programs are installed by hand. An ordinary user, who is root inside, owns nothing in
# the host's /usr; a directory of the same name in this layer is his, and takes files.
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
                make_file(made, data, 0o755 if mode & stat.S_IXOTH else 0o644)
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
            make_directory(directory)


def _leads(host: str, root: str, path: str, hidden: tuple[str, ...]) -> bool:
    for _ in range(DEEPEST):
        if path.startswith(("/usr/", "/bin/", "/sbin/", "/lib")):
            return not path.startswith(hidden) and os.path.exists(host + path)
        inside = root + path
        if not os.path.islink(inside):
            return path.startswith(_COPIED_INTO) and os.path.lexists(inside)
        path = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(inside)))
    return False


def make_mask(usr: str, mask: str, *, local: bool) -> None:
    """Fill the empty directory `mask`, to be laid over the directory `usr`.

    Without `local`, /usr/local is only a place for another layer, and is not looked at.
    """
    if not local:
        make_directory(os.path.join(mask, "local"))
    for path in sorted({*_known(usr), *_private(usr, local=local)}):
        if local or path.partition("/")[0] != "local":
            _whiteout(usr, mask, path)
    if local and os.geteuid() != 0:
        for pattern in _INSTALLED_INTO:
            for path in glob.glob(pattern, root_dir=usr):
                _mirror(usr, mask, path)
    _name_python(usr, mask, local=local)


def _name_python(usr: str, mask: str, *, local: bool) -> None:
    """Have `python` where the host has only `python3`: scripts and models call it by that name."""
    folders = ("bin", "local/bin") if local else ("bin",)
    if any(os.path.lexists(f"{usr}/{folder}/python") for folder in folders):
        return
    if os.path.exists(f"{usr}/bin/python3") and _mirror(usr, mask, "bin"):
        os.symlink("python3", f"{mask}/bin/python")


def _known(usr: str) -> Iterator[str]:
    return (path for path in HIDDEN if os.path.lexists(os.path.join(usr, path)))


def _private(usr: str, *, local: bool) -> Iterator[str]:
    for top, depth in DEPTHS.items():
        if local or top != "local":
            yield from _private_below(usr, top, depth)


def _private_below(usr: str, directory: str, depth: int) -> Iterator[str]:
    for entry in _entries(os.path.join(usr, directory)):
        path = f"{directory}/{entry.name}" if directory else entry.name
        if entry.is_symlink() or path in HIDDEN:
            continue
        mode = _mode(entry)
        if not is_for_everybody(mode):
            yield path
        elif stat.S_ISDIR(mode) and depth > 1 and path not in DEPTHS and path not in _PACKAGED:
            yield from _private_below(usr, path, depth - 1)


def _entries(directory: str) -> list[os.DirEntry[str]]:
    # It may vanish, as packages are upgraded meanwhile.
    gone = contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError)
    with gone, os.scandir(directory) as found:
        return list(found)
    return []


def _mode(entry: os.DirEntry[str]) -> int:
    """Its mode; 0, which hides it, if it went away or nobody may tell."""
    with contextlib.suppress(FileNotFoundError, PermissionError):
        return entry.stat(follow_symlinks=False).st_mode
    return 0


def is_for_everybody(mode: int) -> bool:
    """Whether anybody may read what has that mode: a file, or the names in a directory."""
    if stat.S_ISDIR(mode):
        return mode & 0o005 == 0o005
    return stat.S_ISREG(mode) and bool(mode & 0o004)


def _whiteout(usr: str, mask: str, path: str) -> None:
    if _mirror(usr, mask, os.path.dirname(path)):
        os.mknod(os.path.join(mask, path), stat.S_IFCHR, 0)


def _mirror(usr: str, mask: str, path: str) -> bool:
    """Make a directory and its parents as they are in `usr`: the upper one's modes count.

    False if there is no such directory, or if it is hidden itself.
    """
    made = os.path.join(mask, path)
    if os.path.lexists(made):
        return os.path.isdir(made)
    theirs = os.path.join(usr, path)
    if os.path.islink(theirs) or not os.path.isdir(theirs):
        return False
    if not _mirror(usr, mask, os.path.dirname(path)):
        return False
    found = os.stat(theirs)
    make_directory(made, stat.S_IMODE(found.st_mode))
    # Only root may, and root of a container may not have those ids.
    with contextlib.suppress(OSError):
        os.chown(made, found.st_uid, found.st_gid)
    return True
