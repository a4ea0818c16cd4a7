"""
Calls in threads: one after another for one key, in parallel for different keys.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from mscheduler_sync._runtime.log import logger

_log = logger("execute")
_Step = Callable[[], None]
#: `join` looks for threads that have ended this often, in seconds.
_SLICE_S: Final = 0.5


class KeyedExecutor:
    """
    A thread pool in which the steps of one key never overlap and keep their order.

    *on_bug* is told the key of a step that has raised, and what.
    """

    def __init__(
        self, name: str, max_threads: int, on_bug: Callable[[str, BaseException], None]
    ) -> None:
        self._pool = ThreadPoolExecutor(max_threads, thread_name_prefix=f"ms-exec:{name}")
        self._on_bug = on_bug
        self._inside = threading.local()
        self._lock = threading.Lock()
        # All under _lock. A key stands in _queues while a thread works for it or will.
        self._queues: dict[str, collections.deque[_Step]] = {}
        self._threads: set[threading.Thread] = set()
        self._short_of_threads = False

    def submit(self, key: str, step: _Step) -> None:
        """
        Run *step* after all earlier ones of *key*.
        """
        with self._lock:
            queue = self._queues.get(key)
            if queue is not None:
                queue.append(step)
                return
            self._queues[key] = collections.deque([step])
        try:
            self._pool.submit(self._run, key)
        except RuntimeError as error:
            # No thread could be made: the pool keeps the call for its next free thread.
            with self._lock:
                self._short_of_threads = True
            _log.warning(
                "a handler waits for a thread", event="no_thread", task_key=key, error=str(error)
            )

    def make_missing_thread(self) -> None:
        """
        Try again to make a thread if the last one could not be made.
        """
        with self._lock:
            wanted, self._short_of_threads = self._short_of_threads, False
        if wanted:
            self.submit("", lambda: None)

    def is_running_here(self) -> bool:
        """
        Whether the calling thread is one of this pool's.
        """
        return getattr(self._inside, "active", False)

    def busy_keys(self) -> list[str]:
        with self._lock:
            return [key for key in self._queues if key]

    def close(self) -> None:
        self._pool.shutdown(wait=False)

    def join(self, timeout_s: float) -> list[str]:
        """
        Wait up to *timeout_s* seconds for the threads; return the names of those still alive.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            while thread.is_alive() and (left_s := deadline_s - time.monotonic()) > 0:
                thread.join(min(left_s, _SLICE_S))
        return sorted(thread.name for thread in threads if thread.is_alive())

    def _run(self, key: str) -> None:
        self._inside.active = True
        thread = threading.current_thread()
        while True:
            with self._lock:
                self._threads.add(thread)
                queue = self._queues[key]
                if not queue:
                    del self._queues[key]
                    return
                step = queue.popleft()
            try:
                step()
            except BaseException as error:  # noqa: BLE001 - other steps of the key must go on
                self._on_bug(key, error)
