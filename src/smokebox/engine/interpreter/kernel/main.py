"""A Python that runs what it is told, one piece of code after the other, and tells what came."""

from __future__ import annotations

import builtins
import faulthandler
import linecache
import os
import sys
import traceback
from contextlib import suppress
from types import ModuleType

from .bundles import bundle_of, fit
from .calm import InterruptGuard
from .imports import Imports
from .outputs import Outputs
from .wire import Frames, Requests

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType, TracebackType
    from typing import Any

_ONLY_AST = 0x400
_TOP_LEVEL_AWAIT = 0x2000
_COROUTINE = 0x80
LONGEST_MESSAGE = 1 << 14
LONGEST_TRACEBACK = 1 << 17
MOST_CELLS = 500
_HERE = os.path.dirname(__file__) + os.sep


class Kernel:
    """The state between pieces of code: their names, and how many there were."""

    def __init__(self, requests: Requests, frames: Frames, calm: InterruptGuard) -> None:
        self._requests = requests
        self._frames = frames
        self._calm = calm
        self._count = 0
        self._pid = os.getpid()
        self._loop: Any = None
        self._magics: Any = None
        self._module = _fresh_main()
        self._outputs = Outputs(frames, calm)
        builtins.display = self.display  # type: ignore[attr-defined]
        Imports(
            after={"matplotlib": _prepare_figures, "IPython": lambda _: self.magics.shell()},
            made={"smokebox_figures": self._fill_backend},
        )

    @property
    def magics(self) -> Any:
        """What is not quite Python, loaded when there is some."""
        if self._magics is None:
            from .magics import Magics

            self._magics = Magics(self._module, self._show)
        return self._magics

    def serve(self) -> None:
        """Run code until there is no more to come."""
        self._frames.send("ready")
        while True:
            request = self._requests.next()
            if request is None:
                return
            self.run(request)

    def run(self, request: dict[str, Any]) -> None:
        """Run one piece of code, and send all that comes of it."""
        self._count += 1
        self._frames.id = request["id"]
        before = {name: os.environ.get(name) for name in request["env"]}
        os.environ.update(request["env"])
        self._outputs.bind()
        self._outputs.begin()
        failed: BaseException | None = None
        try:
            try:
                self._calm.begin()
                self._evaluate(request["code"])
                _show_figures(self.display)
            finally:
                self._calm.end()
        except BaseException as error:
            failed = error
        if os.getpid() != self._pid:
            _leave(failed)
        self._outputs.end()
        if failed is not None:
            self._frames.hold("error", **_described(failed, self._name))
        del failed
        _restore(before)
        self._frames.send("end", count=self._count)

    def display(self, *values: Any, **_: Any) -> None:
        """Show values, each in the formats that it has."""
        for value in values:
            self._show(bundle_of(value))

    def _show(self, bundle: dict[str, Any]) -> None:
        with self._calm:
            self._outputs.show()
            self._frames.send("result", data=fit(bundle))

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
        self._remember(code)
        last = None
        if tree.body and type(tree.body[-1]).__name__ == "Expr":
            last = tree.body.pop()
        parts = [compile(tree, self._name, "exec", _TOP_LEVEL_AWAIT, True)]
        if last is not None:
            expression = _expression(last.value)
            parts.append(compile(expression, self._name, "eval", _TOP_LEVEL_AWAIT, True))
        value = self._execute(parts)
        if last is not None and value is not None and not _is_hushed(code, last):
            vars(self._module)["_"] = value
            bundle = bundle_of(value)
            with self._calm:
                self._outputs.show()
                self._frames.hold("result", data=bundle, main=True)

    def _parse(self, code: str) -> Any:
        return compile(code, self._name, "exec", _ONLY_AST | _TOP_LEVEL_AWAIT, True)

    def _execute(self, parts: list[CodeType]) -> Any:
        """Run all parts, in an event loop when one of them awaits; the value of the last."""
        if any(part.co_flags & _COROUTINE for part in parts):
            return self._await(self._awaited(parts))
        value = None
        for part in parts:
            value = eval(part, vars(self._module))
        return value

    async def _awaited(self, parts: list[CodeType]) -> Any:
        value = None
        for part in parts:
            value = eval(part, vars(self._module))
            if part.co_flags & _COROUTINE:
                value = await value
        return value

    def _await(self, coroutine: Any) -> Any:
        import asyncio

        if self._loop is None or self._loop.is_closed():
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
        task = self._loop.create_task(coroutine)
        try:
            return self._loop.run_until_complete(task)
        except KeyboardInterrupt:
            task.cancel()
            # What it says to being interrupted is not what the user asked for.
            with suppress(BaseException):
                self._loop.run_until_complete(task)
            raise

    def _remember(self, code: str) -> None:
        """Have tracebacks show the lines of this code, also when its functions run later."""
        lines = [f"{line}\n" for line in code.split("\n")]
        linecache.cache[self._name] = (len(code), None, lines, self._name)
        linecache.cache.pop(f"<cell {self._count - MOST_CELLS}>", None)

    def _fill_backend(self, module: Any) -> None:
        from .figures import fill_backend

        module.display = self.display
        fill_backend(module)


def _fresh_main() -> ModuleType:
    """The module that code runs in, without what has started the kernel."""
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


def _is_hushed(code: str, last: Any) -> bool:
    """Whether the last expression ends with a semicolon, by which its value is not shown."""
    line = code.split("\n")[last.end_lineno - 1].encode()
    return bool(line[last.end_col_offset :].lstrip().startswith(b";"))


def _leave(failed: BaseException | None) -> None:
    """End a process that code has forked, and that has come to the end of the code."""
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


def _described(error: BaseException, name: str) -> dict[str, Any]:
    """An error as it is told: without the frames of the kernel."""
    tb = error.__traceback__
    while tb is not None and tb.tb_frame.f_globals.get("__package__") == __package__:
        tb = tb.tb_next
    try:
        message = str(error)
    except BaseException as worse:
        message = f"<its message cannot be had: {type(worse).__name__}>"
    try:
        told = traceback.TracebackException(type(error), error, tb)
        _leave_out(told)
        lines = "".join(told.format())
    except BaseException:
        lines = f"{type(error).__name__}: {message}\n"
    return {
        "name": type(error).__name__,
        "message": message[:LONGEST_MESSAGE],
        "traceback": lines[-LONGEST_TRACEBACK:],
        "line": _line_of(error, tb, name),
    }


def _leave_out(told: traceback.TracebackException | None) -> None:
    """Take out frames of the kernel, such as the one that interrupts."""
    while told is not None:
        kept = [one for one in told.stack if not one.filename.startswith(_HERE)]
        told.stack = traceback.StackSummary.from_list(kept)
        told = told.__cause__ or told.__context__


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
    """Talk through descriptors of our own, and leave 0, 1 and 2 to the code."""
    requests, frames, complaints = (os.dup(fd) for fd in (0, 1, 2))
    faulthandler.enable(complaints)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    sys.argv = [""]
    # Where the kernel was: the code looks in its own directory first, as in any Python.
    sys.path[0] = ""
    calm = InterruptGuard()
    Kernel(Requests(requests), Frames(frames, calm), calm).serve()
