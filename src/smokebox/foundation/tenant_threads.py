"""Threads for blocking calls, of which each tenant occupies a part only."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from smokebox.foundation.loop_shares import current_tenant

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
R = TypeVar("R")

THREADS = 16
TENANT_THREADS = 4


class TenantExecutor(ThreadPoolExecutor):
    """An executor whose calls wait for earlier ones of their tenant.

    For an event loop, whose `run_in_executor` submits in the context of the caller.
    """

    def __init__(self) -> None:
        super().__init__(THREADS, thread_name_prefix="smokebox-thread")
        self._guard = threading.Lock()
        # Calls of each tenant that run or will do so next, and those that wait.
        self._running: dict[str, int] = {}
        self._waiting: dict[str, deque[Callable[[], None]]] = {}

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call a function in a thread, once its tenant may occupy another one."""
        tenant = current_tenant()
        if not tenant:
            return super().submit(fn, *args, **kwargs)
        result: Future[R] = Future()

        def run() -> None:
            try:
                if result.set_running_or_notify_cancel():
                    _settle(result, fn, *args, **kwargs)
            finally:
                self._start_next(tenant)

        with self._guard:
            if self._running.get(tenant, 0) >= TENANT_THREADS:
                self._waiting.setdefault(tenant, deque()).append(run)
                return result
            self._running[tenant] = self._running.get(tenant, 0) + 1
        super().submit(run)
        return result

    def _start_next(self, tenant: str) -> None:
        with self._guard:
            waiting = self._waiting.get(tenant)
            run = waiting.popleft() if waiting else None
            if not waiting:
                self._waiting.pop(tenant, None)
            if run is None:
                self._running[tenant] -= 1
                if not self._running[tenant]:
                    del self._running[tenant]
                return
        # In this thread it would come before the calls of others that wait for a thread.
        super().submit(run)


def _settle(result: Future[R], fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> None:
    try:
        value = fn(*args, **kwargs)
    except BaseException as error:
        result.set_exception(error)
        # The traceback of the error refers to this frame: together they would form a cycle.
        del result
    else:
        result.set_result(value)
