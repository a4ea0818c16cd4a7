"""
Arguments of nodes, checked where they are given.
"""

from __future__ import annotations

from typing import Final, Literal

import attrs

from mscheduler_sync.pool.statements import SEPARATOR
from mscheduler_sync.settings import choice, seconds, text, whole

Order = Literal["slots", "created"]

#: A third of it, at most, passes between two renewals of the lease.
SHORTEST_TTL_S: Final = 0.1
_MAX_NAME_BYTES: Final = 200
_LEAST_MARGIN_S: Final = 2.0


@attrs.frozen(kw_only=True)
class NodeSettings:
    """
    The checked settings of one node. Durations are in seconds.
    """

    pool: str
    client_only: bool
    watch: bool
    worker_ttl_s: float
    margin_s: float
    shutdown_timeout_s: float
    dispatch_timeout_s: float
    poll_interval_s: float
    claim_grace_s: float
    max_queued_jobs: int
    order: Order
    prefix: str

    @classmethod
    def checked(
        cls,
        *,
        pool: object,
        client_only: object,
        watch: object,
        worker_ttl: object,
        lease_margin: object,
        shutdown_timeout: object,
        dispatch_timeout: object,
        poll_interval: object,
        claim_grace: object,
        max_queued_jobs: object,
        ring_order: object,
        prefix: object,
    ) -> NodeSettings:
        """
        Raises:
            TypeError, ValueError: Naming the argument, its value and the rule.
        """
        for name, flag in (("client_only", client_only), ("watch", watch)):
            if not isinstance(flag, bool):
                msg = f"{name} must be True or False, got {flag!r}"
                raise TypeError(msg)
        if not isinstance(prefix, str):
            msg = f"prefix must be a string, got {prefix!r}"
            raise TypeError(msg)
        pool_name = name_of(pool, "pool")
        ttl_s = seconds(worker_ttl, "worker_ttl", at_least=SHORTEST_TTL_S, at_most=86_400.0)
        margin_s = min(max(ttl_s / 10, _LEAST_MARGIN_S), ttl_s / 4)
        if lease_margin is not None:
            margin_s = seconds(lease_margin, "lease_margin", at_most=ttl_s / 2)
        order: Order = "slots"
        if choice(ring_order, "ring_order", ("slots", "created")) == "created":
            order = "created"
        return cls(
            pool=pool_name,
            client_only=bool(client_only),
            watch=bool(watch),
            worker_ttl_s=ttl_s,
            margin_s=margin_s,
            shutdown_timeout_s=seconds(shutdown_timeout, "shutdown_timeout", at_most=86_400.0),
            dispatch_timeout_s=seconds(
                dispatch_timeout, "dispatch_timeout", above=0.0, at_most=86_400.0
            ),
            poll_interval_s=seconds(poll_interval, "poll_interval", at_least=0.01, at_most=3600.0),
            claim_grace_s=seconds(claim_grace, "claim_grace", at_most=3600.0),
            max_queued_jobs=whole(max_queued_jobs, "max_queued_jobs", 1, 10_000_000),
            order=order,
            prefix=prefix,
        )


def name_of(value: object, what: str) -> str:
    """
    Return the name of a pool, ticker or schedule.

    Raises:
        TypeError, ValueError: If it is no such name.
    """
    name = text(value, what, max_bytes=_MAX_NAME_BYTES)
    if SEPARATOR in name:
        msg = f"{what} must not contain the character {SEPARATOR!r}, got {name!r}"
        raise ValueError(msg)
    return name
