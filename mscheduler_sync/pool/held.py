"""
The jobs that this node holds, in memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Final, Literal

import attrs

from mscheduler_sync.pool.statements.jobs import Ownership
from mscheduler_sync.pool.workers import Job, Worker

#: Steps tell of their success alone; whether one has failed is asked this often, in seconds.
_ASK_AGAIN_S: Final = 0.1


@attrs.define(eq=False)
class HeldJob:
    """
    One job, granted to a worker of this node. Changed by the steps of its key alone.
    """

    job: Job
    ownership: Ownership
    worker: Worker
    #: Which life of the node holds it; see `lease`.
    life: int
    key_hash: int
    dispatch_id: str
    #: Whether a dispatcher was told that the job runs. Before that, a failed start is final.
    answered: bool
    attempts: int
    #: The ring by which it was claimed, or found to be in its place.
    epoch: int
    state: Literal["claimed", "starting", "running", "stopping", "gone"] = "claimed"
    #: What has become of it here, once it is gone.
    ended: Literal["", "released", "stopped"] = ""
    #: A move is asked for, and waits for its turn.
    moving: bool = False
    #: After a failed stop: not before this monotonic time another move.
    move_again_at_s: float = 0.0

    @property
    def key(self) -> str:
        return self.job.key

    @property
    def id(self) -> str:
        return self.ownership.job_id


@attrs.define(eq=False, repr=False, kw_only=True)
class HeldJobs:
    """
    All of them, by id. Safe from any thread.
    """

    _changed: threading.Condition = attrs.field(init=False, factory=threading.Condition)
    # Both under _changed.
    _jobs: dict[str, HeldJob] = attrs.field(init=False, factory=dict)
    _life: int = attrs.field(init=False, default=0)

    @property
    def life(self) -> int:
        with self._changed:
            return self._life

    def add(self, held: HeldJob) -> bool:
        """
        Hold a job; return False if the life that has claimed it is over.
        """
        with self._changed:
            if held.life != self._life:
                return False
            self._jobs[held.id] = held
            return True

    def find(self, job_id: str) -> HeldJob | None:
        with self._changed:
            return self._jobs.get(job_id)

    def all(self) -> list[HeldJob]:
        with self._changed:
            return list(self._jobs.values())

    def of(self, workers: Iterable[Worker]) -> list[HeldJob]:
        wanted = list(workers)
        return [held for held in self.all() if held.worker in wanted]

    def __len__(self) -> int:
        with self._changed:
            return len(self._jobs)

    def forget(self, held: HeldJob) -> None:
        held.state = "gone"
        with self._changed:
            if self._jobs.get(held.id) is held:
                del self._jobs[held.id]
                self._changed.notify_all()

    def begin_life(self) -> list[HeldJob]:
        """
        Forget all jobs at once, and return them; later additions of this life are refused.
        """
        with self._changed:
            self._life += 1
            lost = list(self._jobs.values())
            self._jobs = {}
            self._changed.notify_all()
            return lost

    def wait_gone(self, jobs: Iterable[HeldJob], timeout_s: float) -> bool:
        """
        Wait up to *timeout_s* seconds until none of *jobs* is held.
        """
        wanted = list(jobs)

        def all_gone() -> bool:
            return not any(self._jobs.get(held.id) is held for held in wanted)

        with self._changed:
            return self._changed.wait_for(all_gone, max(0.0, timeout_s))

    def wait_released(self, jobs: Iterable[HeldJob], deadline_s: float) -> None:
        """
        Wait until each of *jobs* is gone, or its turn to move is over without success.
        """
        wanted = list(jobs)
        while (left_s := deadline_s - time.monotonic()) > 0:
            asked = [held for held in wanted if held.moving or held.state == "stopping"]
            if self.wait_gone(wanted, min(_ASK_AGAIN_S, left_s)) or not asked:
                return

    def jobs_of(self, worker: Worker) -> list[Job]:
        return sorted(
            (held.job for held in self.of([worker]) if held.state == "running"),
            key=lambda job: job.key,
        )


#: Whether the lease of a life is still trusted.
Holds = Callable[[int], bool]
