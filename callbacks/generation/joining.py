"""What the processes of ``SSCGeneration`` do once their own share is sampled: wait for the others, then join."""

from __future__ import annotations

import time

from selfcal_lightning.generation.process_share import part_name
from selfcal_lightning.runtime import rendezvous
from selfcal_lightning.runtime.progress import Progress
from selfcal_lightning.runtime.rendezvous import Rendezvous
from selfcal_lightning.store.sample_store import SampleStore
from selfcal_lightning.store.shards import StoreCorruptError

# A shard that is named and not there yet, or a stale handle: for a moment, on a disk over the network.
LATE = (OSError, StoreCorruptError)


def wait_for_shares(meeting: Rendezvous, store: SampleStore, wanted: set[str], *, round: int) -> None:
    """Wait until every process has sampled its share; the first one shows how far all of them are.

    Args:
        meeting: Where this process has shown that it is done.
        store: The store.
        wanted: Ids of all questions.
        round: Generation round.

    Raises:
        RuntimeError: A process failed or gives no sign of life.
        PreemptedError: A process was asked to stop.
    """
    if meeting.rank != 0 or meeting.world_size == 1:
        meeting.meet()
        return
    parts = {part_name((rank, meeting.world_size)) for rank in range(meeting.world_size)}
    try:
        before = store.committed_questions(parts=parts, round=round)
        missing = len(wanted - store.question_ids(round=round, include_parts=True))
    except LATE:  # others are writing; a bar is not worth a run
        meeting.meet()
        return
    with Progress(missing, label=f"Round {round}, other processes", unit="questions") as bar:

        def look() -> None:
            try:
                done = store.committed_questions(parts=parts, round=round) - before
            except LATE:  # the next look will tell
                return
            bar.update(min(done, missing) - bar.done)

        meeting.meet(look)
        look()


def join_shares(joining: Rendezvous, looking: Rendezvous, store: SampleStore, wanted: set[str], *, round: int) -> None:
    """Show readers what all processes have written: the first one joins the parts, then the others see for themselves.

    A file system that is shared over a network may show files of another machine late. So whoever misses something
    looks again, for as long as a process may be silent.

    Args:
        joining: A meeting of all processes, not used before.
        looking: Another one.
        store: The store.
        wanted: Ids of all questions.
        round: Generation round.

    Raises:
        RuntimeError: Questions are missing, or another process failed.
        PreemptedError: A process was asked to stop.
    """
    with joining.together():
        if joining.rank == 0:
            _look_until_there(joining, store, wanted, round=round, join=True)
    with looking.together():  # nobody goes on into a collective that another one does not reach
        if looking.rank != 0:
            _look_until_there(looking, store, wanted, round=round, join=False)


def _look_until_there(meeting: Rendezvous, store: SampleStore, wanted: set[str], *, round: int, join: bool) -> None:
    started = time.monotonic()
    patience = meeting.stall_timeout if meeting.world_size > 1 else 0.0
    while True:
        problem: Exception
        try:
            if join:
                store.join()
            missing = wanted - store.question_ids(round=round)
            if not missing:
                return
            problem = RuntimeError(
                f"Expected {store.path} to hold round {round} of all {len(wanted)} questions, but {len(missing)} are "
                f"missing, for example {min(missing)!r}. All processes must see one file system, and sample the same "
                "questions."
            )
        except LATE as error:
            problem = error
        if time.monotonic() - started >= patience:
            raise problem
        meeting.check()
        time.sleep(rendezvous.POLL_SECONDS)
