"""Suite that every sandbox passes. Subclass `SandboxSuite` and define a fixture.

    class TestMySandbox(SandboxSuite):
        @pytest_asyncio.fixture
        async def sandbox(self):
            sandbox = await connect(...)
            yield sandbox
            await sandbox.aclose()

Needs pytest and pytest-asyncio. A case may close or break its sandbox, so the fixture creates one
for each case; it must be writable. No case is skipped: if `capabilities()` says that the sandbox
lacks a feature, the case asserts the refusal instead.
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
    """All cases. A subclass defines an async fixture `sandbox`."""
