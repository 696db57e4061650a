"""Whole lives of reads and promises on one rank: several threads, each with a lane of its own."""

from __future__ import annotations

import queue
import random
import threading

import torch.distributed as dist
from hicache_store.ranks import (
    AckLog,
    HitVote,
    PpSync,
    Prefetch,
    ProgressVote,
    RankError,
    Reading,
    RestoreSession,
    drive,
)
from hicache_store.ranks.torch_transport import MESSAGES, TorchTransport

from harness.programs import HOST, connected, held, named, topology_of

SPAN, BATCH = 16, 4


def found(seed, request, rank):
    """Pages that a rank finds, and what it reads of each batch and of the side pools; 0 for an error."""
    numbers = random.Random(f"{seed}/{request}/{rank}")
    local = numbers.randrange(6, SPAN + 1)
    batches = [BATCH if numbers.random() < 0.8 else numbers.randrange(BATCH) for _ in range(SPAN)]
    return local, batches, numbers.randrange(4, SPAN + 1)


def reads(rank, store, *, shape, seed, requests):
    """Look-ups, reads and publications of many requests; what was published, and in which step."""
    topology = topology_of(shape)
    hits, reports = AckLog("hit", background=True), AckLog("report", background=True)
    sync = PpSync(topology, rank, [hits, reports])
    agreed, open_reads, published = {}, {}, {}
    to_read: queue.Queue = queue.Queue()

    with connected(rank, store, shape, lanes=("scheduler", "query", "progress")) as transport:

        def look_up():
            for request in range(requests):
                vote = HitVote(request, SPAN, [found(seed, request, rank)[0]])
                hits.append_finished(request, value=drive(vote, transport).pages)

        def read():
            while (taken := to_read.get()) is not None:
                request, hit = taken
                _, batches, side = found(seed, request, rank)
                reading = Reading(request, hit, BATCH, side_pools=True)
                while part := reading.next_part:
                    start, end = reading.next_batch
                    pages = side if part == "side_pools" else min(batches[start // BATCH], end - start)
                    report = drive(ProgressVote(reading.report(pages)), transport)
                    agreed[request, report.index] = report
                    reports.append_finished(request, value=report.index)

        def apply(entry):
            request = entry.ack.operation
            if entry.log == 0:
                open_reads[request] = Prefetch(request, SPAN, entry.ack.value)
                to_read.put((request, entry.ack.value))
                return
            done = open_reads[request].consume(agreed[request, entry.ack.value])
            if done is not None:
                published[request] = (sync.steps, done.publish, done.free_to)

        threads = [threading.Thread(target=target) for target in (look_up, read)]
        for thread in threads:
            thread.start()
        while len(published) < requests:
            drive(sync, transport, apply)
        to_read.put(None)
        for thread in threads:
            thread.join()
    return published


def course(seed, request, rank):
    """The tick in which a rank is ready, and the one in which it fails or gives up, if any."""
    numbers = random.Random(f"{seed}/{request}/{rank}")
    return numbers.randrange(1, 5), numbers.randrange(1, 6) if numbers.random() < 0.15 else None


def promises(rank, store, *, shape, seed, requests):
    """Requests on the decode side, polled in every tick; how each ended, when, and what is held."""
    told = []
    with connected(rank, store, shape) as transport:
        for request in range(requests):
            ready, fails = course(seed, request, rank)
            session = RestoreSession(request, prompt_tokens=64, page_tokens=4, device=2, host=3)
            session.promise()
            session.loading()
            tick, fate = 0, "pending"
            while fate == "pending":
                tick += 1
                if tick == ready and session.phase == "loading":
                    session.loaded()
                    session.transferred()
                if tick == fails:
                    session.abort() if request % 2 else session.transferred(False)
                fate = drive(session, transport)
            if "load" in session.obligations:
                session.loaded()
            session.release()
            told.append((fate, tick, session.obligations))
    return told


def engine_groups(rank, store, *, shape, deadline, sleeps):
    """Steps over groups that the engine has made; one rank may sleep. What was consumed, or the error."""
    import datetime
    import time

    topology = topology_of(shape)
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=topology.ranks, timeout=limit)
    groups = {
        ("scheduler", "stage"): dist.new_subgroups(topology.ranks // topology.pp)[0],
        ("scheduler", "replica"): dist.new_group(),
        MESSAGES: dist.new_group(),
    }
    log, consumed = AckLog("write"), []
    sync = PpSync(topology, rank, [log])
    before = held()
    transport = TorchTransport(topology, rank, store, groups=groups, deadline=deadline, host=HOST)
    assert held()[0] == before[0] + 1, "nothing is made but the thread of the heartbeat"
    error = None
    try:
        for step in range(5):
            if rank == sleeps and step == 3:
                time.sleep(2 * deadline)
            log.append_finished(step)
            drive(sync, transport, lambda entry: consumed.append(entry.ack.operation))
    except RankError as raised:
        error = named(raised)[:2]
    transport.close()
    if sleeps is None:  # the engine's groups are still its own
        dist.barrier(group=groups["scheduler", "replica"])
        dist.destroy_process_group()
    return consumed, error
