"""
Arguments of nodes, checked where they are given.
"""

from __future__ import annotations

from functools import partial
from typing import Final, Literal, get_args

import attrs

from mscheduler_sync.pool.statements import SEPARATOR
from mscheduler_sync.settings import (
    as_options,
    choice,
    flag,
    option,
    seconds,
    text,
    whole,
)

Order = Literal["slots", "created"]

#: A third of it, at most, passes between two renewals of the lease.
SHORTEST_TTL_S: Final = 0.1
_MAX_NAME_BYTES: Final = 200
_LEAST_MARGIN_S: Final = 2.0


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


def _prefix(value: object, name: str) -> str:
    if not isinstance(value, str):
        msg = f"{name} must be a string, got {value!r}"
        raise TypeError(msg)
    return value


_UP_TO_A_DAY: Final = partial(seconds, at_most=86_400.0)
_UP_TO_AN_HOUR: Final = partial(seconds, at_most=3600.0)


@attrs.frozen(kw_only=True, field_transformer=as_options)
class NodeOptions:
    """
    The checked options of one node, one field each. Durations are in seconds.
    """

    pool: str = option(attrs.NOTHING, name_of)
    client_only: bool = option(False, flag)
    worker_ttl_s: float = option(30.0, partial(_UP_TO_A_DAY, at_least=SHORTEST_TTL_S))
    shutdown_timeout_s: float = option(120.0, _UP_TO_A_DAY)
    dispatch_timeout_s: float = option(40.0, partial(_UP_TO_A_DAY, above=0.0))
    max_queued_jobs: int = option(1000, partial(whole, low=1, high=10_000_000))
    watch: bool = option(True, flag)
    poll_interval_s: float = option(1.0, partial(_UP_TO_AN_HOUR, at_least=0.01))
    claim_grace_s: float = option(2.0, _UP_TO_AN_HOUR)
    lease_margin_s: float | None = option(None, seconds)
    ring_order: Order = option("slots", partial(choice, allowed=get_args(Order)))
    prefix: str = option("pool_", _prefix)

    def __attrs_post_init__(self) -> None:
        if self.lease_margin_s is not None:
            seconds(self.lease_margin_s, "lease_margin", at_most=self.worker_ttl_s / 2)

    @property
    def margin_s(self) -> float:
        """
        How long before its end the lease of the node is given up.
        """
        if self.lease_margin_s is not None:
            return self.lease_margin_s
        return min(max(self.worker_ttl_s / 10, _LEAST_MARGIN_S), self.worker_ttl_s / 4)
