"""
When the fetcher reads the database, and what: one row per rule, without threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import pytest

from mscheduler_sync._stages.pass_schedule import MOST_LOOKUPS, PassSchedule, Round

NEVER: Final = float("inf")
HORIZON_S, POLL_S = 30.0, 2.0
PASS: Final = Round({}, is_pass=True)


class Fetcher:
    """
    Tells a schedule what happens, at times that the test sets. The stream is open at first.
    """

    def __init__(self) -> None:
        self.schedule = PassSchedule(poll_interval_s=POLL_S)
        self.schedule.is_polling = False
        self.now_s = 0.0
        self.horizon_s = HORIZON_S
        self.dropped_from_s = NEVER

    def next_round(self) -> Round | float:
        return self.schedule.next_round(
            self.now_s, horizon_s=self.horizon_s, dropped_from_s=self.dropped_from_s
        )


Step = Callable[[Fetcher], object]


def at(now_s: float) -> Step:
    """
    The time is so many seconds after the start, and the fetcher has not looked in between.
    """
    return lambda fetcher: setattr(fetcher, "now_s", now_s)


def asked_at(now_s: float) -> Step:
    """
    The fetcher was woken then, and nothing was to be read.
    """

    def step(fetcher: Fetcher) -> None:
        fetcher.now_s = now_s
        assert not isinstance(fetcher.next_round(), Round)

    return step


def begin(*, lookups_only: bool = False) -> Step:
    def step(fetcher: Fetcher) -> None:
        began = fetcher.next_round()
        assert isinstance(began, Round)
        assert began.is_pass is not lookups_only

    return step


def end(*, left_from_s: float = NEVER, is_low: bool = False) -> Step:
    return lambda fetcher: fetcher.schedule.pass_ended(
        fetcher.now_s,
        horizon_s=fetcher.horizon_s,
        left_from_s=left_from_s,
        dropped_from_s=fetcher.dropped_from_s,
        is_low=is_low,
    )


def a_pass(*, left_from_s: float = NEVER) -> list[Step]:
    """
    A pass that takes no time and leaves in the database what is due from then on.
    """

    def forget_dropped(fetcher: Fetcher) -> None:
        fetcher.dropped_from_s = NEVER

    return [begin(), forget_dropped, end(left_from_s=left_from_s)]


def low() -> Step:
    return lambda fetcher: fetcher.schedule.queue_low(
        fetcher.now_s, dropped_from_s=fetcher.dropped_from_s
    )


def dropped(from_s: float) -> Step:
    return lambda fetcher: setattr(fetcher, "dropped_from_s", from_s)


def horizon(length_s: float) -> Step:
    return lambda fetcher: setattr(fetcher, "horizon_s", length_s)


def polling(on: bool) -> Step:
    return lambda fetcher: setattr(fetcher.schedule, "is_polling", on)


def request() -> Step:
    return lambda fetcher: fetcher.schedule.request_pass()


def lookup(document_id: object, *, is_foreign: bool = False) -> Step:
    return lambda fetcher: fetcher.schedule.request_lookup(document_id, is_foreign=is_foreign)


def many_lookups(count: int) -> list[Step]:
    return [lookup(number) for number in range(count)]


def failed() -> Step:
    return lambda fetcher: fetcher.schedule.round_failed()


ROWS: Final[dict[str, tuple[Sequence[Step], Round | float]]] = {
    # What calls for a pass at all.
    "the first pass is made at once": ([], PASS),
    "then nothing is read within the horizon": ([*a_pass()], HORIZON_S),
    "the wait shrinks as time goes by": ([*a_pass(), at(12)], 18.0),
    "after the horizon comes the next": ([*a_pass(), at(30)], PASS),
    "and each pass begins the wait anew": ([*a_pass(), at(30), *a_pass(), at(31)], 29.0),
    "a pass on request": ([*a_pass(), request()], PASS),
    "two requests are one pass": ([*a_pass(), request(), request(), *a_pass()], HORIZON_S),
    "a request during a pass is not met by it": ([begin(), request(), end()], PASS),
    # Polling or stream.
    "polling, the pause is that of the setting": ([polling(True), *a_pass()], POLL_S),
    "polling, a shorter horizon bounds it": ([polling(True), horizon(0.5), *a_pass()], 0.5),
    "with the stream open again it is the horizon": (
        [polling(True), *a_pass(), polling(False), at(2), *a_pass()],
        HORIZON_S,
    ),
    # The horizon counts from where a pass begins to read, and may change while one waits.
    "a slow pass is followed sooner": ([begin(), at(10), end()], 20.0),
    "a pass as long as the horizon is followed at once": ([begin(), at(30), end()], PASS),
    "a horizon that shrinks brings the pass forward": ([*a_pass(), at(3), horizon(5)], 2.0),
    "perhaps to at once": ([*a_pass(), at(6), horizon(5)], PASS),
    "one that grows does not put it off": ([horizon(5), *a_pass(), horizon(30)], 5.0),
    # Lookups.
    "a lookup is made at once, without a pass": (
        [*a_pass(), lookup("a")],
        Round({"a": False}, is_pass=False),
    ),
    "lookups go together, each once, foreign if ever said so": (
        [*a_pass(), lookup("a", is_foreign=True), lookup("b"), lookup("a")],
        Round({"a": True, "b": False}, is_pass=False),
    ),
    "lookups go along with a pass": (
        [*a_pass(), lookup("a"), request()],
        Round({"a": False}, is_pass=True),
    ),
    "lookups do not put the pass off": (
        [*a_pass(), at(10), lookup("a"), begin(lookups_only=True)],
        20.0,
    ),
    "many lookups are no pass yet": (
        [*a_pass(), *many_lookups(MOST_LOOKUPS)],
        Round(dict.fromkeys(range(MOST_LOOKUPS), False), is_pass=False),
    ),
    "what comes on top of very many is left to a pass": (
        [*a_pass(), *many_lookups(MOST_LOOKUPS + 5)],
        Round(dict.fromkeys(range(MOST_LOOKUPS), False), is_pass=True),
    ),
    # Failures.
    "a failed pass is repeated": ([begin(), failed()], PASS),
    "failed lookups are found by a pass": (
        [*a_pass(), lookup("a"), begin(lookups_only=True), failed()],
        PASS,
    ),
    "a low mark of a failed pass is over": (
        [begin(), low(), failed(), begin(), end(left_from_s=0, is_low=True)],
        HORIZON_S,
    ),
    # A queue that runs low.
    "a low queue is no reason if nothing was left": ([*a_pass(), low()], HORIZON_S),
    "what was left due waits until the queue runs low": ([*a_pass(left_from_s=-5)], HORIZON_S),
    "and is read then": ([*a_pass(left_from_s=-5), low()], PASS),
    "also if its time is unknown": ([*a_pass(left_from_s=-NEVER), low()], PASS),
    "once: a pass that leaves nothing ends it": (
        [*a_pass(left_from_s=-5), low(), *a_pass(), low()],
        HORIZON_S,
    ),
    # A storm of passes: tasks for soon behind a full page made each claim ask for one.
    "what is left for later is no reason when the queue runs low": (
        [*a_pass(left_from_s=8), low(), low()],
        8.0,
    ),
    "it is read once it is due, without a low queue": ([*a_pass(left_from_s=8), at(8)], PASS),
    "and late if need be": ([*a_pass(left_from_s=8), at(9)], PASS),
    "but by one pass only": (
        [*a_pass(left_from_s=8), at(8), *a_pass(left_from_s=8), at(9)],
        29.0,
    ),
    "what is left beyond the horizon comes with the next pass": (
        [*a_pass(left_from_s=50)],
        HORIZON_S,
    ),
    # A page read twice: a low mark during a pass was met by what the pass brought.
    "a low queue during a pass is no further pass": (
        [begin(), low(), end(left_from_s=-5, is_low=False)],
        HORIZON_S,
    ),
    # A lost low mark: it was said while the pass ended, and nobody said it again.
    "unless it is low still, and more is due": (
        [begin(), low(), end(left_from_s=-5, is_low=True)],
        PASS,
    ),
    "not for what is due later": ([begin(), low(), end(left_from_s=8, is_low=True)], 8.0),
    "nor if it was not said": ([begin(), end(left_from_s=-5, is_low=True)], HORIZON_S),
    "nor again at the end of the next pass": (
        [begin(), low(), end(left_from_s=-5, is_low=True), begin(), end(is_low=True)],
        HORIZON_S,
    ),
    # What the stream told and the full queue dropped.
    "what was dropped is read when it is due": ([*a_pass(), dropped(8)], 8.0),
    "and late if need be, once it was seen": ([*a_pass(), dropped(8), asked_at(7), at(9)], PASS),
    "earlier than what was left": ([*a_pass(left_from_s=20), dropped(8)], 8.0),
    "later than what was left": ([*a_pass(left_from_s=6), dropped(8)], 6.0),
    "dropped and due, it waits until the queue runs low": ([*a_pass(), dropped(-5)], HORIZON_S),
    "and is read then, too": ([*a_pass(), dropped(-5), low()], PASS),
    "as if left by the pass during which it was dropped": (
        [begin(), low(), dropped(-5), end(is_low=True)],
        PASS,
    ),
    "a pass that finds room ends it": (
        [*a_pass(), dropped(8), asked_at(7), at(8), *a_pass()],
        HORIZON_S,
    ),
}


@pytest.mark.parametrize("rule", ROWS)
def test_next_round(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    After the steps of its row the schedule answers with a round, or with how long nothing is due.
    """
    monkeypatch.setattr("random.random", lambda: 0.0)
    steps, expected = ROWS[rule]
    fetcher = Fetcher()
    for step in steps:
        step(fetcher)
    assert fetcher.next_round() == expected


def test_starts_with_polling() -> None:
    """
    Until the stream is open, passes find everything.
    """
    assert PassSchedule(poll_interval_s=POLL_S).is_polling


def test_consumers_that_start_together_drift_apart() -> None:
    """
    The pause is up to a tenth shorter, at random.
    """
    pauses = set()
    for _ in range(100):
        fetcher = Fetcher()
        for step in a_pass():
            step(fetcher)
        pauses.add(fetcher.next_round())
    assert len(pauses) > 90
    assert all(isinstance(pause, float) and 27.0 <= pause <= 30.0 for pause in pauses)


def test_counts_passes_that_were_done() -> None:
    """
    Not those that failed, and not lookups; while one is under way, it says so.
    """
    fetcher = Fetcher()
    schedule = fetcher.schedule
    seen = []
    steps = [begin(), failed(), begin(), end(), lookup("a"), begin(lookups_only=True)]
    for step in steps:
        step(fetcher)
        seen.append((schedule.in_pass, schedule.passes))
    assert seen == [(True, 0), (False, 0), (True, 0), (False, 1), (False, 1), (False, 1)]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (a_pass(), False),
        (a_pass(left_from_s=-5), True),
        (a_pass(left_from_s=8), False),
        ([begin()], False),
    ],
)
def test_says_whether_a_low_queue_calls_for_a_pass(steps: Sequence[Step], expected: bool) -> None:
    """
    The fetcher's thread is woken for that alone.
    """
    fetcher = Fetcher()
    for step in steps:
        step(fetcher)
    assert low()(fetcher) is expected
