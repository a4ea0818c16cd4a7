"""
The node's lease: renewed while it can be, given up in time when it cannot.

A lease is trusted until (monotonic time before the first send of the last
acknowledged renewal) + TTL - margin. Then the node stops its jobs by itself, before
anybody else may start them, and comes back under another id: the dead stay dead.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable

import attrs

from mscheduler_sync._runtime import backoff
from mscheduler_sync._runtime.log import Log, logger
from mscheduler_sync._runtime.service import Service
from mscheduler_sync._storage.calls import CALL_TIMEOUT_S
from mscheduler_sync.errors import StoreError
from mscheduler_sync.pool import statements
from mscheduler_sync.pool.settings import NodeOptions
from mscheduler_sync.pool.store import PoolStore
from mscheduler_sync.settings import new_worker_id

_log = logger("heartbeat")


@attrs.define(eq=False, repr=False, kw_only=True)
class Lease(Service):
    """
    The thread that renews the lease.

    *on_lost* is called in it with the id that is over and the reason, *on_return* with
    nothing until it returns without a store error.
    """

    component: str = "lease"
    thread_prefix: str = "ms-lease"
    log: Log = _log
    #: The first id of the node.
    owner_id: str = attrs.field(init=False, factory=new_worker_id)
    _store: PoolStore
    _settings: NodeOptions
    _on_lost: Callable[[str, str], None]
    _on_return: Callable[[], None]
    _next_renewal_s: float = attrs.field(init=False, default=0.0)
    _lock: threading.Lock = attrs.field(init=False, factory=threading.Lock)
    # All under _lock.
    _node: str = attrs.field(init=False)
    _life: int = attrs.field(init=False, default=0)
    _until_s: float = attrs.field(init=False, default=float("-inf"))

    @_node.default
    def _first_node(self) -> str:
        return self.owner_id

    @property
    def node(self) -> str:
        """
        The id of the node, as of this life.
        """
        with self._lock:
            return self._node

    @property
    def life(self) -> int:
        """
        How often the lease was lost.
        """
        with self._lock:
            return self._life

    @property
    def until_s(self) -> float:
        """
        Until when the lease is trusted, on the monotonic clock.
        """
        with self._lock:
            return self._until_s

    def holds(self, life: int) -> bool:
        """
        Whether the lease of *life* is trusted now.
        """
        with self._lock:
            return life == self._life and time.monotonic() < self._until_s

    def register(self) -> None:
        """
        Begin the lease of the present id.

        Raises:
            StoreError: It may have begun; trying again is safe.
        """
        facts = {"host": socket.gethostname(), "pid": os.getpid()}
        statement = statements.members.register_node(
            self.node, self._store.pool, self._ttl_ms, facts
        )
        sent_s = time.monotonic()
        self._store.update(statement)
        self._extend(sent_s)

    @property
    def _ttl_ms(self) -> int:
        return round(self._settings.worker_ttl_s * 1000)

    def _extend(self, sent_s: float) -> None:
        with self._lock:
            self._until_s = sent_s + self._settings.worker_ttl_s - self._settings.margin_s
        self._next_renewal_s = sent_s + self._settings.worker_ttl_s / 3

    def step(self) -> None:
        until_s = self.until_s
        if until_s == float("-inf"):
            self._come_back()
            return
        # Not later than the end of the lease: then it is to be given up.
        if self.pause(min(self._next_renewal_s, until_s) - time.monotonic()):
            return
        while not self._renew(until_s):
            if time.monotonic() >= until_s:
                self._lose("the lease was not renewed in time")
                return
            if self.pause(min(1.0, self._settings.worker_ttl_s / 10, until_s - time.monotonic())):
                return

    def _renew(self, until_s: float) -> bool:
        """
        Try to renew the lease; return whether there was an answer, whatever it was.
        """
        sent_s = time.monotonic()
        if sent_s >= until_s:
            return False
        timeout_s = min(self._settings.worker_ttl_s / 3, until_s - sent_s, CALL_TIMEOUT_S)
        try:
            matched, _ = self._store.update(
                statements.members.renew_lease(self.node, self._ttl_ms), timeout_s=timeout_s
            )
        except StoreError as error:
            self._note(error)
            return False
        if matched:
            self._extend(sent_s)
        else:
            self._lose("others have declared the node dead")
        return True

    def _lose(self, reason: str) -> None:
        with self._lock:
            old, self._node = self._node, new_worker_id()
            self._life += 1
            self._until_s = float("-inf")
        _log.error(
            "the node has lost its lease and stops its jobs",
            event="node_fenced",
            worker_id=old,
            reason=reason,
        )
        self._on_lost(old, reason)

    def _come_back(self) -> None:
        failures = 0
        while not self.stopping:
            try:
                self.register()
                self._on_return()
            except StoreError as error:
                self._note(error)
                failures += 1
                self.pause(backoff.jittered(backoff.delay_s(failures, first_s=0.2, cap_s=2.0)))
            else:
                return

    def _note(self, error: StoreError) -> None:
        self.health.note_error(error)
        if self._log_throttle.allows(type(error)):
            _log.warning(
                "the lease could not be renewed; will try again",
                event="lease_renewal_failed",
                worker_id=self.node,
                error=str(error),
            )
