"""Two ranks of an engine with the rank audit around their trees, and a divergence that is planted in one."""

from __future__ import annotations

import concurrent.futures
import os
import time
from collections.abc import Mapping
from pathlib import Path

from harness import workers

A, B, C = list(range(1, 9)), list(range(101, 109)), list(range(201, 209))


class SlowEvent:
    """An event that is not there yet for some polls; whoever waits for it gets it."""

    def __init__(self, event, polls: int):
        self.event, self.polls = event, polls

    def query(self) -> bool:
        self.polls -= 1
        return self.polls < 0 and self.event.query()

    def synchronize(self) -> None:
        self.polls = 0
        self.event.synchronize()


def play(deployment, number: int, meeting: str, environment: Mapping, plant: str) -> str | None:
    """What one rank does; what its audit says in the end."""
    from hicache_store.sglang import rank_audit
    from sglang.srt.plugins.hook_registry import HookRegistry

    os.environ.update(environment)
    rank_audit.register()
    HookRegistry.apply_hooks()
    with workers._rank(deployment, number, meeting) as rank:
        audit = getattr(rank.tree, "hicache_rank_audit", None)
        try:
            _run(rank, number, plant)
            if audit is not None and os.environ.get(rank_audit.LIVE):
                until = time.monotonic() + 60
                while plant != "nothing" and audit.verdict is None and time.monotonic() < until:
                    time.sleep(0.02)
        finally:
            if audit is not None:
                audit.close()
        return None if audit is None or audit.verdict is None else str(audit.verdict)


def _run(rank, number: int, plant: str) -> None:
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams
    from sglang.srt.mem_cache.unified_cache.cache_action import BackupKV
    from sglang.test.kits.unified_radix_cache import fixtures

    tree = rank.tree
    if plant == "pp_sync off":
        tree.pp_rank, tree.pp_size = 0, 1
    for tokens in (A, B, C):
        rank.compute(tokens)
    for tokens in (A, B):
        node = fixtures.match_prefix(tree, tokens).last_device_node
        tree._execute_and_commit_kv_backup(BackupKV(node_ids=[node]))
    tree.flush_pending_backups()
    queue = tree.cache_controller.ack_write_queue
    if number == 1:
        # This rank's copies take longer.
        queue[:] = [ack._replace(finish_event=SlowEvent(ack.finish_event, 3)) for ack in queue]
    for step in range(6):
        tree.check_hicache_events()
        more = 4 if plant == "evicts more" and number == 1 and step == 3 else 0
        tree.evict(EvictParams(num_tokens=4 + more))
        for tokens in (A, B, C):
            fixtures.match_prefix(tree, tokens)


def run(
    deployment, meeting: Path, environment: Mapping, plant: str, timeout: float = 240.0
) -> list[str | None]:
    """Runs all ranks; what the audit of each says."""
    world = deployment.tp * deployment.pp
    with concurrent.futures.ProcessPoolExecutor(world, mp_context=workers.context()) as pool:
        ranks = [
            pool.submit(play, deployment, number, str(meeting), dict(environment), plant)
            for number in range(world)
        ]
        return [rank.result(timeout) for rank in ranks]
