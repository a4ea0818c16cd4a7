"""
What each statement must do to a document, in plain Python, written from the rules alone.

A document is a dict as the driver reads it. Times that a statement takes from the
server are `Now`; `difference` compares them with what the server wrote.
"""

from __future__ import annotations

import copy
import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import attrs

Document = dict[str, Any]

UTC: Final = dt.timezone.utc
EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=UTC)
NEVER: Final = dt.datetime(9999, 12, 31, tzinfo=UTC)
#: Documents of the tests have all their times before the first or after the last of these.
PAST: Final = dt.datetime(2015, 1, 1, tzinfo=UTC)
_PRESENT: Final = dt.datetime(2080, 1, 1, tzinfo=UTC)
FUTURE: Final = dt.datetime(2150, 1, 1, tzinfo=UTC)

ENDED: Final = ("succeeded", "failed", "cancelled")
EXPIRED: Final = "LeaseExpired: the worker stopped renewing its lease"
NOBODY: Final = "__cancelled__"
MOST_FAILURES_OF_ALL_WORKERS: Final = 100


@attrs.frozen
class Now:
    """
    The server's time while the statement ran, and so many milliseconds.
    """

    plus_ms: float = 0


Moment = dt.datetime | Now


def _order(moment: Moment) -> dt.datetime:
    """
    A time that compares as *moment* does with the times of the tests.
    """
    if isinstance(moment, Now):
        return _PRESENT + dt.timedelta(milliseconds=moment.plus_ms)
    return moment


def _is_past(moment: Moment) -> bool:
    return _order(moment) <= _order(Now())


def _later_by(moment: Moment, milliseconds: float) -> Moment:
    if isinstance(moment, Now):
        return Now(moment.plus_ms + milliseconds)
    return moment + dt.timedelta(milliseconds=milliseconds)


# -- reading a document ----------------------------------------------------------------------


def attempts_of(document: Document) -> list[Document]:
    found: list[Document] = document["task_state"]["worker_states"]
    return found


def succeeded(attempt: Document) -> bool:
    return attempt.get("success_time") is not None


def failed(attempt: Document) -> bool:
    return attempt.get("fail_time") is not None and not succeeded(attempt)


def is_open(attempt: Document) -> bool:
    return not succeeded(attempt) and attempt.get("fail_time") is None


def is_expired(attempt: Document) -> bool:
    """
    An open attempt whose lease has ended; one without a lease never had one.
    """
    lease_end = attempt.get("ping_expire_time")
    return is_open(attempt) and (lease_end is None or _is_past(lease_end))


def open_attempt(document: Document, running_id: str) -> Document | None:
    """
    The fence of all writes after the claim: the attempt, if no outcome stands.
    """
    for attempt in attempts_of(document):
        if attempt.get("running_id") == running_id and is_open(attempt):
            return attempt
    return None


def _scope_is_worker(document: Document) -> bool:
    return bool(document.get("retry", {}).get("scope") == "worker")


def is_cancelled(document: Document) -> bool:
    return (document.get("cancel") or {}).get("time") is not None


def is_spent(document: Document) -> bool:
    """
    Whether no further attempt is allowed, whoever asks.
    """
    failures = [attempt for attempt in attempts_of(document) if failed(attempt)]
    most = (
        MOST_FAILURES_OF_ALL_WORKERS
        if _scope_is_worker(document)
        else document["task_option"]["max_unexpected_retries"]
    )
    return len(failures) >= most or any(failure.get("final") is True for failure in failures)


def places_taken(document: Document) -> int:
    return sum(1 for a in attempts_of(document) if succeeded(a) or is_open(a))


def ready_of(document: Document) -> Moment:
    """
    From when the next attempt may start: the start time and the pauses after failures.
    """
    times: list[Moment] = [document["task_state"]["start_time"]]
    for attempt in attempts_of(document):
        if failed(attempt):
            pause_ms = document["task_option"]["unexpected_retry_delay_ms"]
            # The crate writes no time of the retry.
            retry = attempt.get("retry_time") or _later_by(attempt["fail_time"], pause_ms)
            times.append(retry)
    return max(times, key=_order)


def status_of(document: Document) -> str:
    attempts = attempts_of(document)
    places = document["task_option"]["concurrent_worker_cnt"]
    if sum(map(succeeded, attempts)) >= places:
        return "succeeded"
    if any(map(is_open, attempts)):
        return "running"
    if is_cancelled(document):
        return "cancelled"
    return "failed" if is_spent(document) else "waiting"


def lease_end_of(document: Document) -> Moment | None:
    """
    When the first of the open leases ends.
    """
    leases = [a.get("ping_expire_time") for a in attempts_of(document) if is_open(a)]
    ends: list[Moment] = [end for end in leases if end is not None]
    return min(ends, key=_order, default=None)


def is_free(document: Document) -> bool:
    """
    Whether a place and a try are left, and nobody has cancelled.
    """
    places = document["task_option"]["concurrent_worker_cnt"]
    is_full = places_taken(document) >= places
    return not (is_full or is_spent(document) or is_cancelled(document))


def due_of(document: Document) -> Moment:
    if status_of(document) in ENDED:
        return NEVER
    end = lease_end_of(document)
    if not is_free(document):
        return EPOCH if end is None else end
    return min([ready_of(document), *([] if end is None else [end])], key=_order)


def ended_at_of(document: Document) -> Moment | None:
    """
    When the task ended: its last outcome, or its cancellation.
    """
    if status_of(document) not in ENDED:
        return None
    ends = [a.get(name) for a in attempts_of(document) for name in ("success_time", "fail_time")]
    ends.append((document.get("cancel") or {}).get("time"))
    return max([end for end in ends if end is not None], key=_order, default=None)


def routes_of(document: Document) -> str | list[str]:
    option = document["task_option"]
    worker_ids = option.get("specific_worker_ids")
    name = document.get("name")
    if option["concurrent_worker_cnt"] > 1 or _scope_is_worker(document):
        return "+"
    # Whoever comes by is to settle what is left of a cancelled task.
    barred = worker_ids == [NOBODY] and is_cancelled(document)
    if worker_ids and not barred:
        routes = [f"@{worker_id}" for worker_id in worker_ids]
        return routes[0] if len(routes) == 1 else routes
    return "*" if name is None else ["*n", f"={name}"]


def _derive(document: Document, by: str | None = None) -> Document:
    """
    Set what follows from the rest of the document; *by* is the attempt of an ending statement.
    """
    had_ended = document.get("status") in ENDED
    for field in ("finished_at", "expire_at"):
        document.pop(field, None)
    document["status"] = status_of(document)
    document["due"] = due_of(document)
    if document["status"] not in ENDED:
        document.pop("finished_by", None)
    elif by is not None and not had_ended:
        document["finished_by"] = by
    ended_at = ended_at_of(document)
    if ended_at is not None:
        document["finished_at"] = ended_at
        if document.get("keep_ms") is not None:
            document["expire_at"] = _later_by(ended_at, document["keep_ms"])
    return document


def _count(document: Document, name: str, number: int = 1) -> None:
    if number:
        counters = document.setdefault("counters", {})
        counters[name] = counters.get(name, 0) + number


# -- claiming --------------------------------------------------------------------------------


@attrs.frozen
class Claim:
    """
    What becomes of a document, and why it was not claimed (None: it was).
    """

    document: Document
    refusal: str | None


def claim(
    document: Document,
    running_id: str,
    worker_id: str,
    *,
    names: Sequence[str | None] | None = None,
    since_outage_ms: float | None = None,
) -> Claim:
    after = copy.deepcopy(document)
    allowed = after["task_option"].get("specific_worker_ids")
    barred = allowed == [NOBODY]
    if allowed and worker_id not in allowed and not barred:
        return Claim(after, "not for this worker")
    if names is not None and after.get("name") not in names:
        return Claim(after, "unknown name")
    if any(attempt.get("running_id") == running_id for attempt in attempts_of(after)):
        return Claim(after, "stands already")
    _settle(after, since_outage_ms)
    refusal = "barred to all" if barred else _refusal(after, worker_id)
    if refusal is None:
        attempts_of(after).append(
            {
                "running_id": running_id,
                "worker_id": worker_id,
                "ping_expire_time": Now(after["task_option"]["worker_timeout_ms"]),
                "success_time": None,
                "fail_time": None,
                "claim_time": Now(),
            }
        )
    return Claim(_derive(after, running_id), refusal)


def _settle(document: Document, since_outage_ms: float | None) -> None:
    """
    Expired attempts have failed; those that a stop had left behind never were.
    """
    interval_ms = document["task_option"]["ping_interval_ms"]
    if since_outage_ms is not None and max(interval_ms, 4_000) > since_outage_ms:
        return
    kept = []
    for attempt in attempts_of(document):
        if is_expired(attempt):
            if attempt.get("interrupted") is True:
                _count(document, "released")
                continue
            attempt.update(fail_time=Now(), fail_reason=EXPIRED, retry_time=Now())
        kept.append(attempt)
    document["task_state"]["worker_states"] = kept


def _refusal(document: Document, worker_id: str) -> str | None:
    option = document["task_option"]
    mine = [attempt for attempt in attempts_of(document) if attempt["worker_id"] == worker_id]
    if is_cancelled(document):
        return "cancelled"
    if not _is_past(ready_of(document)):
        return "not due"
    if places_taken(document) >= option["concurrent_worker_cnt"]:
        return "no place"
    if is_spent(document):
        return "spent"
    if any(succeeded(attempt) or is_open(attempt) for attempt in mine):
        return "mine already"
    if _scope_is_worker(document) and sum(map(failed, mine)) >= option["max_unexpected_retries"]:
        return "spent by this worker"
    return None


# -- attempts --------------------------------------------------------------------------------


def _to_open_attempt(
    document: Document,
    running_id: str,
    change: Callable[[Document, Document], None],
    *,
    ends: bool = True,
) -> Document:
    after = copy.deepcopy(document)
    attempt = open_attempt(after, running_id)
    if attempt is None:
        return after
    change(after, attempt)
    return _derive(after, running_id if ends else None)


def heartbeat(document: Document, running_id: str, *, progress: object = None) -> Document:
    def change(after: Document, attempt: Document) -> None:
        new: Moment = Now(after["task_option"]["worker_timeout_ms"])
        old = attempt.get("ping_expire_time")
        attempt["ping_expire_time"] = new if old is None else max(old, new, key=_order)
        after["heartbeat_at"] = Now()
        if progress is not None:
            after["progress"] = progress

    return _to_open_attempt(document, running_id, change, ends=False)


def succeed(
    document: Document, running_id: str, returns: object, *, progress: object = None
) -> Document:
    def change(after: Document, attempt: Document) -> None:
        attempt.update(success_time=Now(), returns=returns)
        if progress is not None:
            after["progress"] = progress

    return _to_open_attempt(document, running_id, change)


def fail(
    document: Document, running_id: str, reason: str, retry_delay_ms: int, *, for_good: bool
) -> Document:
    def change(after: Document, attempt: Document) -> None:
        attempt.update(fail_time=Now(), fail_reason=reason, retry_time=Now(retry_delay_ms))
        attempt["final"] = for_good

    return _to_open_attempt(document, running_id, change)


def release(document: Document, running_id: str) -> Document:
    def change(after: Document, attempt: Document) -> None:
        attempts_of(after).remove(attempt)
        _count(after, "released")

    return _to_open_attempt(document, running_id, change)


def snooze(document: Document, running_id: str, delay_ms: int) -> Document:
    def change(after: Document, attempt: Document) -> None:
        attempts_of(after).remove(attempt)
        _count(after, "snoozed")
        after["task_state"]["start_time"] = Now(delay_ms)

    return _to_open_attempt(document, running_id, change)


def mark_interrupted(document: Document, running_id: str) -> Document:
    return _to_open_attempt(
        document, running_id, lambda _, attempt: attempt.update(interrupted=True), ends=False
    )


# -- producers and repair --------------------------------------------------------------------


def repair(document: Document) -> Document:
    after = copy.deepcopy(document)
    after["routes"] = routes_of(after)
    return _derive(after)


def cancel(document: Document) -> Document:
    after = repair(document)
    option = after["task_option"]
    if not is_cancelled(after) and status_of(after) not in ENDED:
        after["cancel"] = {"time": Now(), "worker_ids": option.get("specific_worker_ids")}
    if is_cancelled(after):
        option["specific_worker_ids"] = [NOBODY]
    return repair(after)


def resend(
    document: Document,
    send_id: str,
    *,
    start_time: dt.datetime | None,
    replace: Mapping[str, Any] | None,
    rerun: bool,
    only_if_idle: bool,
    clean_success: bool,
    clean_failed: bool,
) -> Document:
    after = repair(document)
    runs = any(is_open(attempt) and not is_expired(attempt) for attempt in attempts_of(after))
    if after.get("send_id") == send_id or (only_if_idle and runs):
        return repair(after)
    arm = rerun and status_of(after) in ENDED

    def goes(attempt: Document) -> bool:
        return (
            (clean_success and succeeded(attempt))
            or (clean_failed and failed(attempt))
            or (arm and not is_open(attempt))
        )

    gone = [attempt for attempt in attempts_of(after) if goes(attempt)]
    _count(after, "failed", sum(map(failed, gone)))
    _count(after, "succeeded", sum(map(succeeded, gone)))
    after["task_state"]["worker_states"] = [a for a in attempts_of(after) if not goes(a)]
    if start_time is not None:
        after["task_state"]["start_time"] = start_time
    elif arm:
        after["task_state"]["start_time"] = Now()
    if arm and "cancel" in after:
        after["task_option"]["specific_worker_ids"] = after.pop("cancel")["worker_ids"]
    for path, value in (replace or {}).items():
        _put(after, path, value)
    if is_cancelled(after) and "task_option.specific_worker_ids" in (replace or {}):
        # As long as the mark stands, nobody may run it; the new ids count once it is armed.
        after["cancel"]["worker_ids"] = after["task_option"]["specific_worker_ids"]
        after["task_option"]["specific_worker_ids"] = [NOBODY]
    if rerun or only_if_idle or clean_success or clean_failed:
        # What would not be the same if it was done twice leaves its mark.
        after["send_id"] = send_id
    return repair(after)


def _put(document: Document, path: str, value: object) -> None:
    *holders, name = path.split(".")
    for holder in holders:
        document = document.setdefault(holder, {})
    if value is None and name != "params":
        document.pop(name, None)
    else:
        document[name] = value


# -- comparing -------------------------------------------------------------------------------


def difference(
    expected: object, got: object, earliest: dt.datetime, latest: dt.datetime, path: str = ""
) -> str | None:
    """
    Say where *got* differs from *expected*, or return None.

    A `Now` agrees with any time from *earliest* to *latest*. As good as missing are a counter
    that is 0, an empty policy of retries, params that are null, and a ``final`` that is false.
    """
    if isinstance(expected, Now):
        moved = dt.timedelta(milliseconds=expected.plus_ms)
        fits = isinstance(got, dt.datetime) and earliest + moved <= got <= latest + moved
        return None if fits else f"{path}: expected {expected}, got {got!r}"
    if isinstance(expected, dict) and isinstance(got, dict):
        return _difference_of_dicts(expected, got, earliest, latest, path)
    if isinstance(expected, list) and isinstance(got, list) and len(expected) == len(got):
        for number, (one, other) in enumerate(zip(expected, got, strict=True)):
            found = difference(one, other, earliest, latest, f"{path}[{number}]")
            if found is not None:
                return found
        return None
    return None if expected == got else f"{path}: expected {expected!r}, got {got!r}"


def _difference_of_dicts(
    expected: Document, got: Document, earliest: dt.datetime, latest: dt.datetime, path: str
) -> str | None:
    expected, got = _without_nothing(expected, path), _without_nothing(got, path)
    for name in {**expected, **got}:
        if name not in expected or name not in got:
            where = "missing" if name in expected else "not expected"
            return f"{path}.{name} is {where}: {expected.get(name, got.get(name))!r}"
        found = difference(expected[name], got[name], earliest, latest, f"{path}.{name}")
        if found is not None:
            return found
    return None


def _without_nothing(document: Document, path: str) -> Document:
    if path == ".counters":
        return {name: number for name, number in document.items() if number != 0}
    return {
        name: value
        for name, value in document.items()
        if not (name == "final" and value is False)
        and not (name in {"counters", "retry"} and not any(value.values()))
        and not (path == "" and name == "params" and value is None)
    }
