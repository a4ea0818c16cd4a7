"""
SIGINT and SIGTERM while `run_forever` runs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final

from mscheduler_sync._runtime.lifecycle import Lifecycle, Report
from mscheduler_sync._runtime.log import logger

_log = logger("consumer")

#: The main thread waits in slices, so that signals are seen on every system.
_SLICE_S: Final = 0.1
#: How long the last update of a forced end may take, in seconds.
_FORCE_S: Final = 2.0


class _Signals:
    """
    Counts signals; the handlers set flags and do nothing else.
    """

    def __init__(self) -> None:
        self.count = 0
        self.last = 0
        #: What a handler that was there before has raised.
        self.raised: BaseException | None = None
        self._previous: dict[int, Any] = {}
        self._pid = os.getpid()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """
        Take SIGINT and SIGTERM over in the main thread; elsewhere do nothing.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        wanted: list[int] = [signal.SIGINT, signal.SIGTERM]
        if hasattr(signal, "SIGBREAK"):  # Windows: Ctrl-Break
            wanted.append(signal.SIGBREAK)
        for number in wanted:
            # One that is ignored (nohup, a shell's background job) stays ignored.
            if signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._on_signal)
        _installed.append(self)
        try:
            yield
        finally:
            if self in _installed:  # not so in a forked child
                _installed.remove(self)
                self.put_back()

    def put_back(self) -> None:
        for number, handler in self._previous.items():
            # None: the handler was not set from Python and cannot be put back by it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A forked process that came here all the same: it dies as if we had never been.
            self.put_back()
            os.kill(os.getpid(), number)
            return
        self.count += 1
        self.last = number
        previous = self._previous.get(number)
        if callable(previous) and previous is not signal.default_int_handler:
            try:
                previous(number, frame)
            except BaseException as error:  # noqa: BLE001 - SystemExit is common; raised after the stop
                self.raised = error


_installed: list[_Signals] = []


def _put_back_in_child() -> None:
    """
    A process that a function forks must be one that SIGTERM ends.
    """
    for signals in _installed:
        signals.put_back()
    _installed.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_put_back_in_child)


def serve(life: Lifecycle[Report], last_writes: Callable[[float], object] | None = None) -> Report:
    """
    Start if needed, wait for a signal or for the stop to be asked for, and stop.

    A second signal ends the process, after *last_writes* has had that many seconds.
    """
    signals = _Signals()
    with signals.installed():
        life.ensure_started()
        while not signals.count and not life.stop_asked.wait(_SLICE_S):
            pass
        box: list[Report | BaseException] = []

        def run() -> None:
            try:
                box.append(life.owner.stop(None))
            except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
                box.append(error)

        # In a thread of its own, so that a second signal is answered whatever the stop waits for.
        stopping = threading.Thread(target=run, name="ms-stop", daemon=True)
        try:
            stopping.start()
        except RuntimeError:
            # The interpreter makes no more threads: main has ended.
            run()
        while stopping.is_alive():
            stopping.join(_SLICE_S)
            if signals.count > 1:
                _log.warning(
                    "a second signal: the process ends now",
                    event="forced_exit",
                    signal=signals.last,
                )
                if last_writes is not None:
                    writing = threading.Thread(
                        target=last_writes, args=(_FORCE_S,), name="ms-force", daemon=True
                    )
                    writing.start()
                    writing.join(_FORCE_S + 0.5)
                os._exit(128 + signals.last)
    result = box[0]
    if isinstance(result, BaseException):
        raise result
    if signals.raised is not None:
        raise signals.raised
    return result
