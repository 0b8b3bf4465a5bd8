"""The Python kernel: runs requested code, and sends its output and results as frames."""

from __future__ import annotations

import builtins
import faulthandler
import linecache
import os
import sys
import traceback
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from .bundles import bundle_of, limit
from .outputs import Outputs
from .wire import Frames, InterruptGuard, Requests

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import CodeType, TracebackType
    from typing import Any

_ONLY_AST = 0x400
_TOP_LEVEL_AWAIT = 0x2000
_COROUTINE = 0x80
MAX_MESSAGE = 1 << 14
MAX_TRACEBACK = 1 << 17
MAX_CELLS = 500
_HERE = os.path.dirname(__file__) + os.sep


class ImportHook:
    """Calls functions when code imports certain modules.

    `loaded` maps modules to functions that are called after the import, and `created` maps modules
    without a file to the functions that fill them.
    """

    def __init__(
        self, loaded: dict[str, Callable[[Any], None]], created: dict[str, Callable[[Any], None]]
    ) -> None:
        self._loaded = loaded
        self._created = created
        sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        """Called by importlib for every import."""
        if name in self._created:
            return ModuleSpec(name, _Loader(self._created[name]))  # type: ignore[arg-type]
        call = self._loaded.get(name)
        spec = PathFinder.find_spec(name, path) if call is not None else None
        if spec is None or spec.loader is None or call is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            call(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class _Loader:
    def __init__(self, fill: Callable[[Any], None]) -> None:
        self.exec_module = fill

    def create_module(self, spec: ModuleSpec) -> None:
        return None


class Kernel:
    """The state between executions: the namespace of the code, and the number of executions."""

    def __init__(self, requests: Requests, frames: Frames, guard: InterruptGuard) -> None:
        self._requests = requests
        self._frames = frames
        self._guard = guard
        self._count = 0
        self._pid = os.getpid()
        self._loop: Any = None
        self._magics: Any = None
        self._module = _create_main()
        self._outputs = Outputs(frames, guard)
        builtins.display = self.display  # type: ignore[attr-defined]
        ImportHook(
            loaded={"matplotlib": _prepare_figures, "IPython": lambda _: self.magics.shell()},
            created={"smokebox_figures": self._fill_backend},
        )

    @property
    def magics(self) -> Any:
        """The translator of IPython syntax, loaded when needed."""
        if self._magics is None:
            from .magics import Magics

            self._magics = Magics(self._module, self._show)
        return self._magics

    def serve(self) -> None:
        """Run code until the engine closes the pipe."""
        self._frames.send("ready")
        while True:
            request = self._requests.next()
            if request is None:
                return
            self.run(request)

    def run(self, request: dict[str, Any]) -> None:
        """Run code, and send its output, results and end."""
        self._count += 1
        self._frames.id = request["id"]
        before = {name: os.environ.get(name) for name in request["env"]}
        os.environ.update(request["env"])
        self._outputs.bind()
        self._outputs.begin()
        failed: BaseException | None = None
        try:
            try:
                self._guard.begin()
                self._evaluate(request["code"])
                _show_figures(self.display)
            finally:
                self._guard.end()
        except BaseException as error:
            failed = error
        if os.getpid() != self._pid:
            _exit_child(failed)
        self._outputs.end()
        if failed is not None:
            self._frames.hold("error", **_describe(failed, self._name))
        del failed
        _restore(before)
        self._frames.send("end", count=self._count)

    def display(self, *values: Any, **_: Any) -> None:
        """Display values in all their representations."""
        for value in values:
            self._show(bundle_of(value))

    def _show(self, bundle: dict[str, Any]) -> None:
        with self._guard:
            self._outputs.show()
            self._frames.send("result", data=limit(bundle))

    @property
    def _name(self) -> str:
        return f"<cell {self._count}>"

    def _evaluate(self, code: str) -> None:
        try:
            tree = self._parse(code)
        except SyntaxError:
            translated = self.magics.translate(code)
            if translated is None:
                raise
            code = translated
            tree = self._parse(code)
        self._cache_lines(code)
        last = None
        if tree.body and type(tree.body[-1]).__name__ == "Expr":
            last = tree.body.pop()
        parts = [compile(tree, self._name, "exec", _TOP_LEVEL_AWAIT, True)]
        if last is not None:
            expression = _expression(last.value)
            parts.append(compile(expression, self._name, "eval", _TOP_LEVEL_AWAIT, True))
        value = self._execute(parts)
        if last is not None and value is not None and not _ends_with_semicolon(code, last):
            vars(self._module)["_"] = value
            bundle = bundle_of(value)
            with self._guard:
                self._outputs.show()
                self._frames.hold("result", data=bundle, main=True)

    def _parse(self, code: str) -> Any:
        return compile(code, self._name, "exec", _ONLY_AST | _TOP_LEVEL_AWAIT, True)

    def _execute(self, parts: list[CodeType]) -> Any:
        """Run all parts, in an event loop if one of them awaits, and return the last value."""
        if any(part.co_flags & _COROUTINE for part in parts):
            return self._run_in_loop(self._execute_async(parts))
        value = None
        for part in parts:
            value = eval(part, vars(self._module))
        return value

    async def _execute_async(self, parts: list[CodeType]) -> Any:
        value = None
        for part in parts:
            value = eval(part, vars(self._module))
            if part.co_flags & _COROUTINE:
                value = await value
        return value

    def _run_in_loop(self, coroutine: Any) -> Any:
        import asyncio

        if self._loop is None or self._loop.is_closed():
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
        task = self._loop.create_task(coroutine)
        try:
            return self._loop.run_until_complete(task)
        except KeyboardInterrupt:
            task.cancel()
            # The interrupt is reported, not what the task raises when it is cancelled.
            with suppress(BaseException):
                self._loop.run_until_complete(task)
            raise

    def _cache_lines(self, code: str) -> None:
        """Make tracebacks show the lines of this code, also when its functions run later."""
        lines = [f"{line}\n" for line in code.split("\n")]
        linecache.cache[self._name] = (len(code), None, lines, self._name)
        linecache.cache.pop(f"<cell {self._count - MAX_CELLS}>", None)

    def _fill_backend(self, module: Any) -> None:
        from .figures import fill_backend

        module.display = self.display
        fill_backend(module)


def _create_main() -> ModuleType:
    """Create the module of the code, which replaces that of the kernel."""
    module = ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    return module


def _prepare_figures(module: Any) -> None:
    from .figures import prepare

    prepare(module)


def _show_figures(display: Any) -> None:
    if "matplotlib.pyplot" in sys.modules:
        from .figures import show_all

        show_all(display)


def _expression(value: Any) -> Any:
    import _ast

    return _ast.Expression(body=value)


def _ends_with_semicolon(code: str, last: Any) -> bool:
    """Return whether a semicolon suppresses the value of the last expression."""
    line = code.split("\n")[last.end_lineno - 1].encode()
    return bool(line[last.end_col_offset :].lstrip().startswith(b";"))


def _exit_child(failed: BaseException | None) -> None:
    """Exit a process that the code forked, at the end of the code."""
    code = failed.code if isinstance(failed, SystemExit) else None
    if failed is not None and not isinstance(failed, SystemExit):
        traceback.print_exception(type(failed), failed, failed.__traceback__)
        code = 1
    with suppress(BaseException):
        sys.stdout.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _restore(environ: dict[str, str | None]) -> None:
    for name, value in environ.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _describe(error: BaseException, name: str) -> dict[str, Any]:
    """Return the fields of an error, without the frames of the kernel."""
    tb = error.__traceback__
    while tb is not None and tb.tb_frame.f_globals.get("__package__") == __package__:
        tb = tb.tb_next
    try:
        message = str(error)
    except BaseException as worse:
        message = f"<str() failed: {type(worse).__name__}>"
    try:
        summary = traceback.TracebackException(type(error), error, tb)
        _remove_kernel_frames(summary)
        lines = "".join(summary.format())
    except BaseException:
        lines = f"{type(error).__name__}: {message}\n"
    return {
        "name": type(error).__name__,
        "message": message[:MAX_MESSAGE],
        "traceback": lines[-MAX_TRACEBACK:],
        "line": _line_of(error, tb, name),
    }


def _remove_kernel_frames(summary: traceback.TracebackException | None) -> None:
    """Remove frames of the kernel, such as that of the signal handler."""
    while summary is not None:
        kept = [one for one in summary.stack if not one.filename.startswith(_HERE)]
        summary.stack = traceback.StackSummary.from_list(kept)
        summary = summary.__cause__ or summary.__context__


def _line_of(error: BaseException, tb: TracebackType | None, name: str) -> int | None:
    if isinstance(error, SyntaxError) and error.filename == name:
        return error.lineno
    line = None
    while tb is not None:
        if tb.tb_frame.f_code.co_filename == name:
            line = tb.tb_lineno
        tb = tb.tb_next
    return line


def main() -> None:
    """Serve the engine through duplicated descriptors, and leave 0, 1 and 2 to the code."""
    requests, frames, errors = (os.dup(fd) for fd in (0, 1, 2))
    faulthandler.enable(errors)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    sys.argv = [""]
    # Instead of the directory of the kernel: imports search the working directory first.
    sys.path[0] = ""
    guard = InterruptGuard()
    Kernel(Requests(requests), Frames(frames, guard), guard).serve()
