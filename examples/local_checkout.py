"""Works on a git checkout on this host: clone, run the tests, mend the code, show the change."""

import asyncio
import sys
import tempfile

from smokebox import SandboxApi, local

SOURCE = "def double(n):\n    return n + n + 1\n"
TEST = "from app import double\n\nassert double(4) == 8, double(4)\nprint('all good')\n"


async def make_repository(sandbox: SandboxApi) -> None:
    """A small repository with a bug, where there would otherwise be a remote one."""
    await sandbox.write_file("upstream/app.py", SOURCE)
    await sandbox.write_file("upstream/test_app.py", TEST)
    commands = "git init -q && git add . && git commit -q -m 'Double numbers'"
    made = await sandbox.exec(commands, cwd="upstream")
    assert made.success, made.stderr


async def run_tests(sandbox: SandboxApi) -> int:
    """Run the tests with their output shown as it comes."""
    stream = sandbox.exec_stream('"$PYTHON" test_app.py', cwd="checkout", timeout=60)
    async for chunk in stream:
        print(f"  {chunk.stream}: {chunk.data.splitlines()[-1]}")
    print(f"  exit code {stream.exit_code}")
    return stream.exit_code


async def main() -> None:
    """The whole way, in a temporary directory."""
    # Names that git asks for, and nothing else of this machine's settings.
    author = {
        f"GIT_{who}_{what}": "ada@example.org"
        for who in ("AUTHOR", "COMMITTER")
        for what in ("NAME", "EMAIL")
    }
    env = {**author, "PYTHON": sys.executable, "PYTHONDONTWRITEBYTECODE": "1", "HOME": None}
    with tempfile.TemporaryDirectory() as folder:
        async with local(cwd=folder, env=env) as sandbox:
            able = await sandbox.capabilities()
            print(able.describe().partition("\n")[0])
            if able.commands is not None and "git" not in able.commands:
                print("This example needs git.")
                return
            await make_repository(sandbox)
            await sandbox.exec("git clone -q upstream checkout", timeout=60)
            print("Tests as they were:")
            assert await run_tests(sandbox) == 1
            await sandbox.write_file("checkout/app.py", SOURCE.replace(" + 1", ""))
            print("Tests after the change:")
            assert await run_tests(sandbox) == 0
            print((await sandbox.exec("git diff --stat", cwd="checkout")).stdout.rstrip())


if __name__ == "__main__":
    asyncio.run(main())
