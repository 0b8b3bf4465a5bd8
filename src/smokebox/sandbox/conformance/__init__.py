"""The suite that every sandbox passes. Subclass `SandboxSuite` and give it a fixture.

    class TestMySandbox(SandboxSuite):
        @pytest_asyncio.fixture
        async def sandbox(self):
            sandbox = await connect(...)
            yield sandbox
            await sandbox.aclose()

Needs pytest and pytest-asyncio. Each case closes or wears out its sandbox as it likes, so the
fixture makes one for each; it must be writable. No case is skipped: where a sandbox says by
`capabilities()` that it cannot do something, the case asserts the refusal instead.
"""

from smokebox.sandbox.conformance.commands import CommandCases
from smokebox.sandbox.conformance.deadlines import DeadlineCases
from smokebox.sandbox.conformance.directories import DirectoryCases
from smokebox.sandbox.conformance.files import FileCases
from smokebox.sandbox.conformance.globs import GlobCases
from smokebox.sandbox.conformance.paths import PathCases
from smokebox.sandbox.conformance.streams import StreamCases
from smokebox.sandbox.conformance.symlinks import SymlinkCases

__all__ = ["SandboxSuite"]


class SandboxSuite(
    PathCases,
    FileCases,
    DirectoryCases,
    SymlinkCases,
    GlobCases,
    CommandCases,
    StreamCases,
    DeadlineCases,
):
    """Every case. The subclass gives an async fixture `sandbox`."""
