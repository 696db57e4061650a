"""What a rank runs in a test; each gets its rank, the store where ranks meet, and what the test says."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from pathlib import Path

from hicache_store.ranks import (
    AckLog,
    Ask,
    CapacityVote,
    HitVote,
    Lengths,
    PpSync,
    RankAudit,
    RankError,
    RankStalledError,
    Topology,
    drive,
)
from hicache_store.ranks.torch_transport import TorchTransport

HOST = "127.0.0.1"


def topology_of(shape) -> Topology:
    """Pages are dealt out where there are several context parallel ranks."""
    pp, cp, tp = shape
    return Topology(pp, cp, tp, cp_kind="page" if cp > 1 else "none")


def held() -> tuple[int, list[str]]:
    """Threads of this process, and what its file descriptors are."""
    descriptors = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            descriptors.append(str(entry.readlink()).split(":")[0])
    return len(list(Path("/proc/self/task").iterdir())), sorted(descriptors)


def assert_held(before) -> None:
    """Holds that nothing is left but what was held before."""
    until = time.monotonic() + 20
    while held() != before and time.monotonic() < until:
        time.sleep(0.01)  # the system takes a moment to forget a thread that has ended
    assert held() == before, (before, held())


@contextlib.contextmanager
def connected(rank, store, shape, *, deadline=20.0, lanes=("scheduler",), epoch=0):
    """A transport, given back at the end; what then is left of it fails the test."""
    before = held()
    transport = TorchTransport(
        topology_of(shape), rank, store, lanes=lanes, deadline=deadline, epoch=epoch, host=HOST
    )
    try:
        yield transport
    finally:
        transport.close()
        assert_held(before)


# -- agreement -------------------------------------------------------------------------------------


def votes(rank, store, *, shape, seed, rounds):
    """Hits of many requests, by minimum and by intersection; what every rank has follows from the seed."""
    answers = []
    with connected(rank, store, shape, lanes=("query",)) as transport:
        for request in range(rounds):
            span, masks, pools = has(seed, request, rank)
            vote = HitVote(request, span, pools, masks=masks)
            hit = drive(vote, transport)
            answers.append((hit.pages, hit.by_pool))
    return answers


def has(seed, request, rank):
    """What a rank has for a request: the span, whether there are masks, and a vote for each pool."""
    common = random.Random(f"{seed}/{request}")
    span, masks = common.choice([0, 1, 5, 62, 63, 200]), common.random() < 0.5
    if request % 5 == 4:
        span, masks = 5000, True  # more words than fit into a frame
    own = random.Random(f"{seed}/{request}/{rank}")
    pools = []
    for _ in range(common.randrange(1, 4)):
        legal = common.sample(range(span + 1), min(span + 1, 60))
        if masks and common.random() < 0.8:
            pools.append(Lengths(span, sorted(length for length in legal if own.random() < 0.8)))
        elif own.random() < 0.1:
            pools.append(None)
        else:
            pools.append(own.randrange(span + 1))
    return span, masks, pools


def steps(rank, store, *, shape, seed, count, logs=2, mode="now"):
    """Steps of pp_sync over copies that finish at any time; what was consumed in each step."""
    topology = topology_of(shape)
    order = random.Random(seed)
    own = random.Random(f"{seed}/{rank}")
    made = [AckLog(f"log {place}") for place in range(logs)]
    sync = PpSync(topology, rank, made, mode)
    consumed, pending, finished = [], [], set()
    with connected(rank, store, shape) as transport:
        for step in range(count):
            if step < count - 1:
                for _ in range(order.randrange(4)):
                    place, operation = order.randrange(logs), order.randrange(1 << 40)
                    pending.append((place, made[place].append(operation), operation))
            own.shuffle(pending)
            # Some copies finish before the step, the others while it waits for them, or long after.
            ready = pending[: own.randrange(len(pending) + 1)] if step < count - 2 else list(pending)
            late = [entry for entry in pending if entry not in ready]
            for place, ticket, operation in ready:
                made[place].finish(ticket)
                finished.add(operation)
            finisher = threading.Thread(target=_finish, args=(made, late, finished))
            finisher.start()
            this = []

            def apply(entry, this=this):
                assert entry.ack.operation in finished, "consumed before its own transfer has finished"
                this.append((entry.log, entry.ack.operation))

            sync.bring(digest=seed + step)
            drive(sync, transport, apply)
            finisher.join()
            pending = []
            consumed.append(this)
        counted = (transport.reductions, transport.messages)
    return consumed, counted, [len(log) for log in made]


def _finish(logs, late, finished):
    for place, ticket, operation in late:
        time.sleep(0.0005)
        finished.add(operation)
        logs[place].finish(ticket)


def capacities(rank, store, *, shape, pages):
    """The capacity that all ranks use."""
    with connected(rank, store, shape) as transport:
        return drive(CapacityVote(pages[rank]), transport)


# -- faults ----------------------------------------------------------------------------------------


def struck(rank, store, *, shape, deadline, what, whom, at):
    """Steps of pp_sync and votes until a fault strikes one rank; whom the others name."""
    topology = topology_of(shape)
    log = AckLog("write")
    sync = PpSync(topology, rank, [log])
    with connected(rank, store, shape, deadline=deadline, lanes=("scheduler", "query")) as transport:
        try:
            for step in range(10_000):
                if rank == whom and step == at:
                    strike(what, deadline)
                log.append_finished(step)
                drive(sync, transport)
                drive(HitVote(step, 8, [rank + step % 3]), transport)
        except RankError as error:
            return named(error)
    return None


def named(error):
    """What an error says: its class, the rank and the operation."""
    return type(error).__name__, error.rank, error.context.get("operation")


def strike(what, deadline):
    """The fault."""
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        time.sleep(4 * deadline)


def resumed(rank, store, *, shape, deadline, whom):
    """One rank sleeps too long; afterwards all of them go on with a new transport."""
    topology = topology_of(shape)
    log = AckLog("write")
    sync = PpSync(topology, rank, [log])
    blamed = None
    with connected(rank, store, shape, deadline=deadline) as transport:
        try:
            if rank == whom:
                time.sleep(2 * deadline)
            drive(sync, transport)
        except RankStalledError as error:
            blamed = error.rank
    consumed = []
    with connected(rank, store, shape, epoch=1) as transport:
        sync.restart(1)
        for operation in (1, 2, 3):
            log.append_finished(operation)
            drive(sync, transport, lambda entry: consumed.append(entry.ack.operation))
    return blamed, consumed


def late_at_the_end(rank, store, *, shape, deadline):
    """One step, to which the last stage comes when the first one is closing; what each consumed."""
    topology = topology_of(shape)
    log, consumed = AckLog("write"), []
    sync = PpSync(topology, rank, [log])
    with connected(rank, store, shape, deadline=deadline) as transport:
        if rank == topology.ranks - 1:
            time.sleep(1)
        log.append_finished(7)
        drive(sync, transport, lambda entry: consumed.append(entry.ack.operation))
    return consumed


def missing_at_the_start(rank, store, *, whom, deadline):
    """One rank does not come at all."""
    if rank == whom:
        return None
    before = held()
    try:
        TorchTransport(Topology(tp=3), rank, store, deadline=9, meeting=deadline, host=HOST)
    except RankStalledError as error:
        assert_held(before)
        return named(error)
    return None


def gone_while_groups_are_made(rank, store, *, what, whom, deadline):
    """One rank comes to the meeting, and is gone before the groups are made."""
    before = held()
    if rank == whom:
        TorchTransport._make = lambda *_: strike(what, deadline)
    try:
        TorchTransport(Topology(tp=3), rank, store, deadline=deadline, meeting=2 * deadline, host=HOST)
    except RankStalledError as error:
        assert_held(before)
        return named(error)
    return None


def different_asks(rank, store, *, how):
    """Rank 1 asks for something else than the others."""
    odd = rank == 1
    length = {"length": 5 if odd else 4, "long": 200 if odd else 100}.get(how, 4)
    ask = Ask.reduce(
        [1] * length,
        name="vote",
        number=2 if odd and how == "number" else 1,
        op="and" if odd and how == "op" else "min",
    )
    with connected(rank, store, (1, 1, 3)) as transport:
        try:
            transport.answer(ask)
        except RankError as error:
            return type(error).__name__
    return None


def own_transfer_hangs(rank, store, *, deadline):
    """Stage 0 chooses an entry whose transfer never ends on stage 1."""
    topology = topology_of((2, 1, 1))
    log = AckLog("write")
    sync = PpSync(topology, rank, [log])
    ticket = log.append(7)
    if rank == 0:
        log.finish(ticket)
    with connected(rank, store, (2, 1, 1), deadline=deadline) as transport:
        try:
            for _ in range(10):
                drive(sync, transport)
        except RankError as error:
            return named(error)
    return None


def dies_while_it_waits(rank, store, *, deadline, what):
    """Rank 1 waits for rank 2, which is late, and is gone before that comes."""
    with connected(rank, store, (1, 1, 3), deadline=deadline) as transport:
        drive(CapacityVote([1]), transport)
        if rank == 1:
            store.set("process", str(os.getpid()))
            threading.Timer(0.1 * deadline, strike, (what, deadline)).start()
        if rank == 2:
            await_gone(int(store.get("process")))
        try:
            drive(CapacityVote([2]), transport)
            drive(CapacityVote([3]), transport)
        except RankError as error:
            return named(error)
    return None


def await_gone(process) -> None:
    """Waits until a process is stopped or has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "TZX":
            time.sleep(0.01)


# -- audit -----------------------------------------------------------------------------------------


def recorded_and_killed(rank, store, *, folder):
    """Rank 1 is killed once its records are in the log; rank 0 records more."""
    audit = RankAudit(Topology(tp=2), rank, log=folder, interval=0.02)
    for number in range(100 if rank else 150):
        audit.record("called", "match", [number])
    if rank:
        path = Path(folder, "rank-1.audit")
        size, since = -1, time.monotonic()
        while size < 200 or time.monotonic() - since < 3:  # no more comes for many times the interval
            if size != path.stat().st_size:
                size, since = path.stat().st_size, time.monotonic()
            time.sleep(0.02)
        store.set("written", "")
        strike("kill", 0)
    store.wait(["written"])
    audit.close()


def watched_live(rank, store, *, what):
    """Records that are equal, differ at record 40 on rank 2, or end on rank 1; what the audit says."""
    ranks = 4 if what == "differ" else 3
    with connected(rank, store, (1, 1, ranks), deadline=6.0, lanes=("audit",)) as transport:
        audit = RankAudit(Topology(tp=ranks), rank, transport=transport, interval=0.05, deadline=5.0)
        began = time.monotonic()
        number = 0
        while audit.verdict is None and time.monotonic() - began < 60:
            if number < 40 or what in ("differ", "kill", "stop") or (what == "silent" and rank != 1):
                field = number + 1 if what == "differ" and rank == 2 and number >= 40 else number
                audit.record("state", "unlock", [field])
            number += 1
            if number == 45 and rank == 1 and what in ("kill", "stop"):
                strike(what, 0)
            if what == "equal" and number == 60:
                break
            time.sleep(0.01)
        audit.close()
        error = audit.verdict
    if error is None:
        return {"kind": None}
    records = {
        place: error.context[f"rank {place}"] for place in range(ranks) if f"rank {place}" in error.context
    }
    return {
        "kind": type(error).__name__,
        "rank": error.rank,
        "index": error.context.get("index"),
        "records": records,
    }
