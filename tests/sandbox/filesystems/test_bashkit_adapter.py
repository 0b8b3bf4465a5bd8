"""Our filesystems inside a real shell, and the failures that the adapter must contain."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from typing import TYPE_CHECKING

import bashkit
import pytest

from smokebox.errors import ServiceUnavailable
from smokebox.sandbox.filesystems import (
    Entry,
    HostFilesystem,
    MemoryFilesystem,
    OverlayFilesystem,
    ReadOnlyFilesystem,
)
from smokebox.sandbox.filesystems.bashkit_adapter import as_bashkit, registered_count
from smokebox.sandbox.filesystems.memory import DeviceFilesystem
from smokebox.sandbox.filesystems.native import NativeFilesystem
from smokebox.sandbox.virtual import threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from smokebox.sandbox.filesystems import Filesystem


class Shell:
    """A shell on a thread with enough stack for its recursion, as `virtual()` runs it."""

    def __init__(self, **mounts: Filesystem) -> None:
        self.bash = bashkit.Bash(profile=bashkit.ExecutionProfile.Interactive)
        for point, filesystem in mounts.items():
            self.bash.mount(f"/{point}", as_bashkit(filesystem))

    def run(self, script: str) -> bashkit.ExecResult:
        job = threads.ThreadJob(lambda: self.bash.execute_sync(script))
        threads.start(job)
        assert job.join(15)
        return job.result()

    def output(self, script: str) -> str:
        result = self.run(script)
        assert (result.exit_code, result.stderr) == (0, "")
        return result.stdout

    def error(self, script: str) -> str:
        result = self.run(script)
        assert result.exit_code != 0
        return result.stderr


@pytest.fixture(params=["memory", "host", "overlay", "native"])
def shell(request: pytest.FixtureRequest, tmp_path: Path) -> Shell:
    """Return a shell in /mnt, an empty filesystem of each kind."""
    factories: dict[str, Callable[[], Filesystem]] = {
        "memory": MemoryFilesystem,
        "host": lambda: HostFilesystem(tmp_path, read_only=False),
        "overlay": lambda: OverlayFilesystem(HostFilesystem(tmp_path)),
        "native": NativeFilesystem,
    }
    shell = Shell(mnt=factories[request.param]())
    shell.run("cd /mnt; rm -rf dev tmp home")
    return shell


class TestCommands:
    @pytest.mark.parametrize(
        ("script", "output"),
        [
            ("echo hi > a; cat a; cat < a", "hi\nhi\n"),
            ("echo 1 > a; echo 2 >> a; echo 3 >> b; cat a b", "1\n2\n3\n"),
            ("mkdir -p d/e/f; touch d/x 2>/dev/null; ls d; ls d/e", "e\nx\nf\n"),
            ("echo x > a; cp a b; mv b c; ls", "a\nc\n"),
            ("mkdir d; echo x > d/f; cp -r d e; rm -r d; find . | sort", ".\n./e\n./e/f\n"),
            ("mkdir d; echo x > a; mv a d; mv d e; cat e/a", "x\n"),
            ("mkdir d e; rmdir d; rm -r e; ls", ""),
            ("echo a1 > a; sed -i s/1/2/ a; cat a; ls -A", "a2\na\n"),
            ("mkdir d; echo needle > d/a; echo hay > b; grep -r needle .", "./d/a:needle\n"),
            ("for i in 3 1 2; do echo $i; done > a; sort -o a a; tail -1 a", "3\n"),
            ("echo x | tee a b > /dev/null; cat a b", "x\nx\n"),
            ("echo x > a; [ -e a ] && [ -f a ] && [ ! -d a ] && [ ! -e b ] && echo yes", "yes\n"),
            ("echo 'echo ran $1' > s; chmod +x s; ./s once", "ran once\n"),
            ("echo x > a; chmod 640 a; stat -c %a a", "640\n"),
            ("printf '\\xff\\xfe' > a; wc -c < a", "2\n"),
            ("echo x > 'a b'; echo y > é; ls", "a b\né\n"),
            ("echo x > a; echo y > /tmp/b; cp a /tmp/c; mv /tmp/b .; cat b /tmp/c", "y\nx\n"),
            ("echo x > .h; ls; ls -A", ".h\n"),
            ("mkdir d; cd d; echo x > ../a; cd ..; cat ./d/../a", "x\n"),
        ],
    )
    def test_commands_match_other_filesystems(self, shell: Shell, script: str, output: str) -> None:
        assert shell.output(script) == output

    @pytest.mark.parametrize(
        ("script", "message"),
        [
            ("cat no", "cat: no: No such file or directory\n"),
            ("mkdir d; cat d", "cat: d: Is a directory\n"),
            ("echo x > a; cat a/b", "cat: a/b: Not a directory\n"),
            ("mkdir d; mkdir d", "mkdir: cannot create directory 'd': File exists\n"),
            ("mkdir -p d/e; rmdir d", "rmdir: failed to remove 'd': Directory not empty\n"),
            ("rm no", "rm: cannot remove 'no': No such file or directory\n"),
            ("ln -s l l; cat l", "cat: l: Too many levels of symbolic links\n"),
        ],
    )
    def test_failures_match_other_filesystems(
        self, shell: Shell, script: str, message: str
    ) -> None:
        assert shell.error(script) == message


class TestSymlinks:
    @pytest.mark.parametrize("target", ["d/a", "/mnt/d/a", "../mnt/d/a", "dl/a", "chain"])
    def test_resolve_to_files(self, shell: Shell, target: str) -> None:
        shell.output("mkdir d; echo x > d/a; ln -s d dl; ln -s dl/a chain")
        assert shell.output(f"ln -s {target} l; cat l; readlink l") == f"x\n{target}\n"
        assert shell.output("echo y > l; echo z >> l; cat d/a; rm l; cat d/a") == "y\nz\ny\nz\n"

    def test_resolve_to_directories(self, shell: Shell) -> None:
        shell.output("mkdir -p d/e; echo x > d/e/a; ln -s d l")
        assert shell.output("cat l/e/a; ls l; cd l/e; cat a; echo y > ../b; cat /mnt/d/b") == (
            "x\ne\nx\ny\n"
        )
        assert shell.output("cd /mnt; rm l; ls d") == "b\ne\n"

    def test_are_distinguished_from_files(self, shell: Shell) -> None:
        shell.output("echo x > a; ln -s a l; ln -s nowhere dead; mkdir d; ln -s d dl")
        assert shell.output("find . -type l | sort") == "./dead\n./dl\n./l\n"
        tests = "[ -L l ] && [ -f l ] && [ -d dl ] && [ -L dead ] && [ ! -e dead ] && echo yes"
        assert shell.output(tests) == "yes\n"

    def test_of_a_host_folder_resolve_inside_the_shell_only(self, tmp_path: Path) -> None:
        (tmp_path / "secret").write_text("secret")
        folder = tmp_path / "folder"
        folder.mkdir()
        (folder / "up").symlink_to("../secret")
        (folder / "out").symlink_to(tmp_path)
        (folder / "etc").symlink_to("/etc")
        shell = Shell(mnt=HostFilesystem(folder))
        assert "No such file" in shell.error("cat /mnt/up")
        assert "No such file" in shell.error("cat /mnt/out/secret")
        assert "root:" not in shell.run("cat /mnt/etc/passwd /mnt/etc/shadow").stdout


class TestMounts:
    def test_filesystem_can_be_the_root(self) -> None:
        files = MemoryFilesystem()
        files.mkdir("/tmp")
        shell = Shell(**{"": files, "dev": DeviceFilesystem()})
        assert shell.output("cd /; echo x > a; cat /a; ls; pwd") == "x\na\ndev\ntmp\n/\n"
        assert shell.output("echo x > /dev/null; cat /dev/null; head -c 2 /dev/zero | wc -c") == (
            "2\n"
        )
        assert shell.output("echo e 2>/dev/null | cat; echo x | tee /dev/null") == "e\nx\n"
        assert files.read("/a") == b"x\n"

    def test_read_only_filesystem_reports_it(self) -> None:
        inner = MemoryFilesystem()
        inner.write("/a", b"x\n")
        shell = Shell(mnt=ReadOnlyFilesystem(inner))
        assert shell.output("cat /mnt/a") == "x\n"
        assert "Read-only file system" in shell.error("echo y > /mnt/a")
        assert shell.error("rm /mnt/a") and shell.error("mkdir /mnt/d")
        assert inner.read("/a") == b"x\n"

    def test_full_filesystem_reports_it(self) -> None:
        shell = Shell(mnt=MemoryFilesystem(quota=10, max_file_size=5))
        assert "File too large" in shell.error("echo 123456 > /mnt/a")
        assert "No space left" in shell.error("for i in 1 2 3; do echo 123 > /mnt/$i; done; false")

    def test_directory_of_twenty_thousand_is_listed(self) -> None:
        files = MemoryFilesystem()
        for number in range(20_000):
            files.write(f"/{number:05}.txt", b"")
        shell = Shell(mnt=files)
        assert shell.output("ls /mnt | wc -l; ls /mnt | tail -1") == "20000\n19999.txt\n"


class FailingFilesystem(MemoryFilesystem):
    """Filesystem whose every call raises `failure`."""

    failure: BaseException = RuntimeError("a bug")

    def read(self, path: str) -> bytes:
        raise self.failure

    def listdir(self, path: str) -> Mapping[str, Entry]:
        raise self.failure


class TestFailures:
    @pytest.fixture(autouse=True)
    def quiet(self, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
        """Check that bugs of a filesystem are logged and the adapter prints nothing."""
        caplog.set_level("CRITICAL", "smokebox.filesystems")
        yield

    @pytest.mark.parametrize(
        ("failure", "message"),
        [
            (RuntimeError("a bug"), "Input/output error"),
            (MemoryError(), "Input/output error"),
            (SystemExit(3), "Input/output error"),
            (PermissionError(13, "no", "/host/path"), "Permission denied"),
            (ServiceUnavailable("the store is away.", hint="Try again."), "the store is away."),
            (UnicodeDecodeError("utf-8", b"", 0, 1, "bad"), "Invalid argument"),
        ],
    )
    def test_errors_become_shell_errors(
        self, failure: BaseException, message: str, capfd: pytest.CaptureFixture[str]
    ) -> None:
        files = FailingFilesystem()
        files.failure = failure
        files.write("/a", b"")
        error = Shell(mnt=files).error("cat /mnt/a")
        assert message in error
        assert "Traceback" not in error and "/host/path" not in error
        assert capfd.readouterr() == ("", "")

    def test_unexpected_errors_are_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        files = FailingFilesystem()
        files.write("/a", b"")
        caplog.set_level("ERROR", "smokebox.filesystems")
        Shell(mnt=files).error("cat /mnt/a")
        assert "a filesystem failed" in caplog.text and "a bug" in caplog.text

    def test_interrupt_is_raised(self) -> None:
        files = FailingFilesystem()
        files.failure = KeyboardInterrupt()
        files.write("/a", b"")
        with pytest.raises(KeyboardInterrupt):
            Shell(mnt=files).run("cat /mnt/a")

    def test_byte_like_results_are_converted(self) -> None:
        class ByteArrayFilesystem(MemoryFilesystem):
            def read(self, path: str) -> bytes:
                return bytearray(super().read(path))  # type: ignore[return-value]

        files = ByteArrayFilesystem()
        files.write("/a", b"x\n")
        assert Shell(mnt=files).output("cat /mnt/a") == "x\n"


def count_of_other_tests() -> int:
    """Return the adapters that earlier tests left, after garbage collection."""
    gc.collect()
    return registered_count()


class TestLifetime:
    def test_shell_holds_the_filesystem_until_closed(self) -> None:
        before = count_of_other_tests()
        files = MemoryFilesystem()
        files.write("/a", b"x\n")
        reference = weakref.ref(files)
        shell = Shell(mnt=files, other=files)
        del files
        gc.collect()
        assert (shell.output("cat /mnt/a /other/a"), registered_count()) == ("x\nx\n", before + 2)
        del shell
        gc.collect()
        assert (reference(), registered_count()) == (None, before)

    def test_thousand_shells_leak_no_memory(self) -> None:
        before = count_of_other_tests()

        def create_and_drop() -> None:
            for _ in range(1000):
                files = MemoryFilesystem()
                files.write("/a", bytes(10_000))
                native = as_bashkit(files)
                native.read_file("/a")
                native.read_dir("/")
                with pytest.raises(RuntimeError):
                    native.read_file("/no")

        create_and_drop()
        resident = resident_bytes()
        create_and_drop()
        assert registered_count() == before
        # A leak would be ten megabytes for the files alone.
        assert resident_bytes() - resident < 5_000_000

    def test_read_buffers_are_released(self) -> None:
        files = MemoryFilesystem()
        data = bytes(1000)
        files.write("/a", data)
        data = files.read("/a")
        references = sys.getrefcount(data)
        native = as_bashkit(files)
        for _ in range(100):
            assert native.read_file("/a") == data
        assert sys.getrefcount(data) == references

    def test_replacing_a_mount_releases_the_old_filesystem(self) -> None:
        before = count_of_other_tests()
        shell = Shell(mnt=MemoryFilesystem())
        shell.bash.mount("/mnt", as_bashkit(MemoryFilesystem()))
        assert registered_count() == before + 1
        shell.bash.unmount("/mnt")
        assert registered_count() == before

    def test_many_shells_at_once_on_one_filesystem(self) -> None:
        files = MemoryFilesystem()
        script = "for i in $(seq 50); do echo $i > /mnt/$me.$i; cat /mnt/*.$i > /dev/null; done"
        shells = [Shell(mnt=files) for _ in range(4)]
        threads = [
            threading.Thread(target=shell.run, args=(f"me={number}; {script}",))
            for number, shell in enumerate(shells)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(files.listdir("/")) == 200

    def test_shell_alive_at_interpreter_exit_is_silent(self) -> None:
        program = """
import sys, builtins, bashkit
from smokebox.sandbox.filesystems import MemoryFilesystem
from smokebox.sandbox.filesystems.bashkit_adapter import as_bashkit
bash = bashkit.Bash()
bash.mount("/mnt", as_bashkit(MemoryFilesystem()))
print(bash.execute_sync("echo x > /mnt/a; cat /mnt/a").stdout, end="")
sys.forever = builtins.forever = bash
"""
        done = subprocess.run(
            [sys.executable, "-X", "dev", "-c", program], capture_output=True, text=True, timeout=15
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "x\n", "")


def test_paths_need_not_be_normalized() -> None:
    files = MemoryFilesystem()
    native = as_bashkit(files)
    native.write_file("//d/../a", b"x")
    assert native.read_file("a") == native.read_file("/./a/") == b"x"


def resident_bytes() -> int:
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[1]) * 4096
