"""Work on a git checkout on this host: clone, run the tests, fix the code, show the change."""

import asyncio
import sys
import tempfile

from smokebox import SandboxApi, local

SOURCE = "def double(n):\n    return n + n + 1\n"
TEST = "from app import double\n\nassert double(4) == 8, double(4)\nprint('all good')\n"


async def make_repository(sandbox: SandboxApi) -> None:
    """Create a small repository with a bug, in place of a remote one."""
    await sandbox.write_file("upstream/app.py", SOURCE)
    await sandbox.write_file("upstream/test_app.py", TEST)
    commands = "git init -q && git add . && git commit -q -m 'Double numbers'"
    result = await sandbox.exec(commands, cwd="upstream")
    assert result.success, result.stderr


async def run_tests(sandbox: SandboxApi) -> int:
    """Run the tests and print their output as it arrives."""
    stream = sandbox.exec_stream('"$PYTHON" test_app.py', cwd="checkout", timeout=60)
    async for chunk in stream:
        print(f"  {chunk.stream}: {chunk.data.splitlines()[-1]}")
    print(f"  exit code {stream.exit_code}")
    return stream.exit_code


async def main() -> None:
    """Run the example in a temporary directory."""
    # Names that git requires; HOME is unset, so that no settings of the user apply.
    author = {
        f"GIT_{role}_{field}": "ada@example.org"
        for role in ("AUTHOR", "COMMITTER")
        for field in ("NAME", "EMAIL")
    }
    env = {**author, "PYTHON": sys.executable, "PYTHONDONTWRITEBYTECODE": "1", "HOME": None}
    with tempfile.TemporaryDirectory() as folder:
        async with local(cwd=folder, env=env) as sandbox:
            capabilities = await sandbox.capabilities()
            print(capabilities.describe().partition("\n")[0])
            if capabilities.commands is not None and "git" not in capabilities.commands:
                print("This example needs git.")
                return
            await make_repository(sandbox)
            await sandbox.exec("git clone -q upstream checkout", timeout=60)
            print("Tests before the change:")
            assert await run_tests(sandbox) == 1
            await sandbox.write_file("checkout/app.py", SOURCE.replace(" + 1", ""))
            print("Tests after the change:")
            assert await run_tests(sandbox) == 0
            print((await sandbox.exec("git diff --stat", cwd="checkout")).stdout.rstrip())


if __name__ == "__main__":
    asyncio.run(main())
