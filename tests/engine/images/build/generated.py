"""Random Dockerfiles of what buildah 1.28 does as BuildKit does.

Left out, as they differ: the owner of a new WORKDIR under USER, heredocs, --exclude and --parents,
wildcards without a match, and numeric --chown without a group.
"""

from __future__ import annotations

import io
import random
import tarfile

from building import BASE, Entry, Files

OWNERS = ("", "", "--chown=app ", "--chown=app:team ", "--chown=5:6 ", "--chown=0:0 ")
MODES = ("", "", "--chmod=640 ", "--chmod=0755 ")
FOLDERS = ("/w", "/srv", "/srv/deep/er", "/home/app", "/var/link/in", "/usr/lib/x")


def files(rng: random.Random) -> Files:
    """Return a context."""
    found: dict[str, str | bytes | Entry] = {"t.tar": _archive(rng), "link": Entry(target="d")}
    for folder in ("", "d/", "d/e/", "f/"):
        for name in rng.sample(["a.txt", "b.txt", "c.md", "x y.txt", "run.sh"], 3):
            data = rng.randbytes(rng.choice((0, 3, 5000)))
            found[f"{folder}{name}"] = Entry(data, mode=rng.choice((0o600, 0o644, 0o755)))
    found["d/e/up"] = Entry(target="../a.txt")
    found["f/dangling"] = Entry(target="/nowhere")
    found["d/e"] = Entry(directory=True, mode=rng.choice((0o700, 0o755)))
    found["d"] = Entry(directory=True, mode=0o755)
    return found


def _archive(rng: random.Random) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=rng.choice(("w", "w:gz"))) as tar:
        for name, mode in (("p", 0o750), ("p/q", 0o755)):
            info = tarfile.TarInfo(name)
            info.type, info.mode, info.uid, info.gid = tarfile.DIRTYPE, mode, 1000, 1001
            tar.addfile(info)
        for number in range(3):
            info = tarfile.TarInfo(f"p/q/{number}")
            info.size, info.uid, info.mode = 4, rng.choice((0, 7)), rng.choice((0o644, 0o4755))
            tar.addfile(info, io.BytesIO(b"tar!"))
        info = tarfile.TarInfo("p/l")
        info.type, info.linkname = tarfile.SYMTYPE, "q/0"
        tar.addfile(info)
    return buffer.getvalue()


class Generator:
    """Writes one Dockerfile. Without `chown`, no RUN needs more than one id."""

    def __init__(self, seed: int, *, chown: bool = True) -> None:
        self.rng = random.Random(seed)
        self._chown = chown
        self.files = files(self.rng)
        self._plain = sorted(
            path for path, one in self.files.items()
            if isinstance(one, Entry) and not one.directory and not one.target and " " not in path
        )  # fmt: skip

    def text(self) -> str:
        """Return its text, of one to three stages."""
        stages = self.rng.randrange(1, 4)
        lines: list[str] = ["ARG base=" + BASE]
        for number in range(stages):
            base = self.rng.choice(["$base", f"s{number - 1}"]) if number else "$base"
            lines += [f"FROM {base} AS s{number}", "ARG v=1", "RUN mkdir -p /w/made"]
            lines += [self._line(number) for _ in range(self.rng.randrange(4, 9))]
        return "\n".join(lines) + "\n"

    def _line(self, stage: int) -> str:
        kinds = [self._copy, self._copy, self._run, self._run, self._env, self._add, self._workdir]
        if stage:
            kinds += [lambda: self._from(stage), lambda: self._from(stage)]
        return self.rng.choice(kinds)()

    def _copy(self) -> str:
        rng, flags = self.rng, self.rng.choice(OWNERS) + self.rng.choice(MODES)
        folder = rng.choice(FOLDERS)
        match rng.randrange(6):
            case 0:
                return f"COPY {flags}{rng.choice(self._plain)} {folder}/named{rng.randrange(9)}"
            case 1:
                return f"COPY {flags}{' '.join(rng.sample(self._plain, 2))} {folder}/"
            case 2:
                return f"COPY {rng.choice(OWNERS)}d {folder}/tree{rng.randrange(3)}"
            case 3:
                return f"COPY {rng.choice(OWNERS)}d f {folder}/"
            case 4:
                return f"COPY {flags}*/*.txt {folder}/"
            case _:
                return f'COPY {rng.choice(OWNERS)}["{rng.choice(self._plain)}", "relative/"]'

    def _add(self) -> str:
        return f"ADD t.tar {self.rng.choice(FOLDERS)}/tar{self.rng.randrange(2)}"

    def _from(self, stage: int) -> str:
        source = self.rng.randrange(stage)
        path = self.rng.choice(("/w", "/srv", "/home/app/.", "/etc/passwd"))
        return (
            f"COPY --from=s{source} {self.rng.choice(OWNERS)}{path} /from{self.rng.randrange(3)}/"
        )

    def _run(self) -> str:
        rng, name = self.rng, f"/w/made/{self.rng.randrange(4)}"
        commands = (
            f"mkdir -p {name}/deep && echo $v $e > {name}/deep/file",
            f"rm -rf {name}",
            f"rm -rf {name}; mkdir -p {name}; touch {name}/again; chmod 3775 {name}",
            "rm -rf /srv/*; touch /srv/only",
            f"ln -sf ../x {name}l; chown -h 3:4 {name}l",
            "test ! -e /home/app || chown -R app:team /home/app",
            f"touch {name}f; chmod 4755 {name}f; ln -f {name}f {name}hard",
            "rm -f /var/link; mkdir -p /var/link; touch /var/link/now",
            "sed -i s/app/pap/ /etc/group; sed -i s/pap/app/ /etc/group",
            "mv /w /w2 && mkdir /w && mv /w2 /w/old && mkdir -p /w/made",
        )
        chosen = [one for one in commands if self._chown or "chown" not in one]
        return f"RUN {rng.choice(chosen)}"

    def _env(self) -> str:
        return f"ENV e=${{e:-0}}{self.rng.randrange(9)} v$v='x y'"

    def _workdir(self) -> str:
        return f"WORKDIR {self.rng.choice((*FOLDERS, 'relative', '..'))}"
