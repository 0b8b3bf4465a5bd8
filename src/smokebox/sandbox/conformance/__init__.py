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

from smokebox.sandbox.conformance.commands import CommandCases, DeadlineCases
from smokebox.sandbox.conformance.files import DirectoryCases, FileCases
from smokebox.sandbox.conformance.paths import GlobCases, PathCases, SymlinkCases
from smokebox.sandbox.conformance.streams import StreamCases

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
