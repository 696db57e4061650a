"""The protocols of `hicache_store.ranks` against SGLang's own functions, on random inputs."""

from __future__ import annotations

import functools
import operator
import random
from queue import Queue
from types import SimpleNamespace

import pytest
import torch
from hicache_store import page_keys
from hicache_store.ranks import (
    AckLog,
    ClassedPool,
    HitVote,
    Lengths,
    Ownership,
    Placement,
    PpSync,
    ScratchSize,
    Topology,
)
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.allocator.page_interleave import PageInterleavePoolAllocator
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.page_interleave import PageInterleavePlacement, PageShardSpec
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.mem_cache.utils import get_storage_hash_str

SEEDS = range(12)
PAGE = 4


def engine_allocator(owners: int, pages: int) -> PageInterleavePoolAllocator:
    return PageInterleavePoolAllocator(
        size=pages * PAGE,
        physical_page_size=PAGE,
        shard_size=owners,
        dtype=torch.float16,
        device="cpu",
        kvcache=None,
        need_sort=True,
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_placement_equals_the_engines(seed):
    numbers = random.Random(seed)
    owners, tokens = numbers.randrange(1, 9), numbers.choice([1, 4, 16, 64])
    spec = PageShardSpec(0, owners, tokens, tokens * owners, tokens)
    theirs, ours = PageInterleavePlacement(spec), Placement(owners, tokens)
    slots = torch.tensor([numbers.randrange(1 << 40) for _ in range(300)])
    assert theirs.owner_of(slots).tolist() == [ours.owner(ours.page(loc)) for loc in slots.tolist()]
    assert theirs.local_index(slots).tolist() == [ours.row(loc) for loc in slots.tolist()]
    for owner in range(owners):
        mine = ours.owned(slots.tolist(), owner)
        assert theirs.filter_local(slots, owner).tolist() == [ours.row(loc) for loc in mine]


@pytest.mark.parametrize("seed", SEEDS)
def test_allocation_equals_the_engines_page_by_page(seed):
    """Owners, pages, admission floor and base of new chains, over random allocations and frees."""
    numbers = random.Random(seed)
    owners, pages = numbers.randrange(2, 6), 40
    theirs = engine_allocator(owners, pages)
    ours = ClassedPool(Placement(owners, PAGE), pages)
    ownership = Ownership(Placement(owners, PAGE))
    held = []
    for _ in range(150):
        assert theirs.least_full_class() == ownership.new_chain(ours)
        assert theirs.available_size() == ours.floor * PAGE
        assert theirs.aggregate_free_size() == ours.free_pages * PAGE
        if held and numbers.random() < 0.4:
            mine, slots = held.pop(numbers.randrange(len(held)))
            ours.free(mine)
            theirs.free(slots)
            theirs.merge_and_sort_free()  # the engine does it before it runs out
            continue
        start, count = numbers.randrange(owners), numbers.randrange(1, 25)
        mine, slots = ours.alloc_cyclic(start, count), theirs.alloc_cyclic(start, count * PAGE)
        assert (mine is None) == (slots is None)
        if mine is not None:
            # Theirs begin behind the page that each rank keeps for what is padded.
            assert (slots[::PAGE] // PAGE - owners).tolist() == mine
            held.append((mine, slots))


def test_scratch_equals_the_engines_count():
    spec = PageShardSpec(0, 4, 64, 8 * 131072, 8192)
    ours = ScratchSize(Placement(4, 64), contexts=8, context=131072, chunk=8192)
    assert (ours.rows, ours.prefix_tokens, ours.chunk_tokens) == (
        spec.scratch_rows,
        spec.max_prefix_tokens,
        spec.chunk_tokens,
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_page_keys_equal_the_engines_hashes(seed):
    numbers = random.Random(seed)
    page = numbers.choice([1, 4, 16, 64])
    tokens = [numbers.randrange(1 << 31) for _ in range(page * numbers.randrange(1, 12))]
    chain, prior = [], None
    for start in range(0, len(tokens), page):
        (prior,) = get_storage_hash_str(tokens[start : start + page], prior, page_size=page)
        chain.append(prior)
    assert [key.hex() for key in page_keys(tokens, page)] == chain


class Rank:
    """What the methods of the engine's tree look at when they agree, and nothing else."""

    _sync_hicache_ready_counts = UnifiedRadixCache._sync_hicache_ready_counts
    _count_ready_acks = UnifiedRadixCache._count_ready_acks
    writing_check = UnifiedRadixCache.writing_check
    enable_storage, host_memory_mode, pp_rank, pp_size = True, "normal", 0, 1
    metrics_collector = None

    def __init__(self, ready: list[bool]):
        self.tree_core = SimpleNamespace(write_back_duplicate_reclaim_digest=77)
        acks = [
            SimpleNamespace(
                finish_event=SimpleNamespace(query=lambda done=done: done, synchronize=lambda: None),
                node_ids=[number],
            )
            for number, done in enumerate(ready)
        ]
        self.cache_controller = SimpleNamespace(
            ack_write_queue=acks,
            ack_load_queue=[],
            prefetch_hit_queue=Queue(),
            ack_prefetch_queue=Queue(),
            ack_backup_queue=Queue(),
            host_mem_release_queue=Queue(),
        )
        self.consumed: list[int] = []

    def _log_write_ack_metrics(self, ack):
        pass

    def _finish_write_through_ack(self, ack_id):
        self.consumed.append(ack_id)


def together(ranks, method):
    """Runs a method that reduces on all ranks at once, by doing it twice: first to hear, then to answer."""
    heard = []
    for rank in ranks:
        rank._all_reduce = lambda data, *_: heard.append(data.clone())
        method(rank)
    reduced = torch.stack(heard).min(dim=0).values
    answers = []
    for rank in ranks:
        rank._all_reduce = lambda data, *_: data.copy_(reduced)
        answers.append(method(rank))
    return answers


@pytest.mark.parametrize("seed", SEEDS)
def test_counts_and_consumption_equal_the_engines(seed):
    """The engine counts leading finished acks, takes the minimum, and consumes as many from the front."""
    numbers = random.Random(seed)
    count = numbers.randrange(12)
    ready = [[numbers.random() < 0.8 for _ in range(count)] for _ in range(4)]
    engines = [Rank(list(own)) for own in ready]
    counts = {answer[0] for answer in together(engines, Rank._sync_hicache_ready_counts)}
    assert len(counts) == 1
    for engine in engines:
        engine.writing_check(finish_count=next(iter(counts)))
    # Ours, with the minimum over the same four ranks.
    logs = [AckLog("write") for _ in range(4)]
    syncs = [PpSync(Topology(tp=4), rank, [log]) for rank, log in enumerate(logs)]
    for log, own in zip(logs, ready, strict=True):
        for number, done in enumerate(own):
            ticket = log.append(number)
            if done:
                log.finish(ticket)
    vectors = [sync.begin().values for sync in syncs]
    agreed = [min(words) for words in zip(*vectors, strict=True)]
    for sync, engine in zip(syncs, engines, strict=True):
        step, consumed = sync.resume(agreed), []
        while hasattr(step, "ack"):
            consumed.append(step.ack.operation)
            step = sync.resume(None)
        assert consumed == engine.consumed


def query(rank, controller, hits, legal=None):
    """The engine's reduction of one rank's hit, in pages of one token; with `legal`, of a trailing pool."""
    operation = SimpleNamespace(
        token_ids=range(rank.span),
        pool_transfers=[] if legal is None else [SimpleNamespace(hit_policy=PoolHitPolicy.TRAILING_PAGES)],
        pool_storage_result=SimpleNamespace(restorable_prefix_pages=legal),
        query_pool_hit_pages={},
    )
    return controller._sync_prefetch_hit_query(rank, operation, hits)


@pytest.mark.parametrize("seed", SEEDS)
def test_hits_equal_the_engines_reduction(seed):
    """By minimum where every page is needed, by intersection of legal lengths where state is trailing."""
    numbers = random.Random(seed)
    span = numbers.randrange(1, 200)
    ranks = [SimpleNamespace(page_size=1, span=span, prefetch_hits_sync_groups=None) for _ in range(4)]
    for rank in ranks:
        rank.hits = numbers.randrange(span + 1)
        rank.legal = set(numbers.sample(range(1, span + 1), min(span, 60)))
    agreed = together(ranks, lambda rank: query(rank, HiCacheController, rank.hits))
    votes = [HitVote(1, span, [rank.hits]) for rank in ranks]
    values = [min(words) for words in zip(*(vote.begin().values for vote in votes), strict=True)]
    assert [vote.resume(values).pages for vote in votes] == agreed
    agreed = together(ranks, lambda rank: query(rank, HybridCacheController, max(rank.legal), rank.legal))
    votes = [HitVote(2, span, [Lengths(span, sorted(rank.legal))], masks=True) for rank in ranks]
    columns = zip(*(vote.begin().values for vote in votes), strict=True)
    values = [functools.reduce(operator.and_, words) for words in columns]
    assert [vote.resume(values).pages for vote in votes] == agreed
