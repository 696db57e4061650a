"""Ranks of any shape share what they hold: pages are cut by what a rank holds, not by its number.

Class level: every rank is an instance with its own pool in this process. The bytes of the model are one
array, and each rank's pool holds its rectangle of it.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from harness import backends, pools
from harness.cpu_sglang import _mha_layer, _mla_layer
from hicache_store import ConfigError
from sglang.srt.mem_cache.hicache_storage import PoolName

LAYERS, HEADS, DIM = 4, 4, 8
CHAIN = 5
KEYS = backends.keys(CHAIN)


@dataclasses.dataclass(frozen=True)
class Cut:
    """How a deployment cuts the model."""

    tp: int = 1
    stages: tuple[int, ...] = (LAYERS,)
    layout: str = "page_first"

    def __str__(self) -> str:
        return f"tp{self.tp}-pp{'+'.join(map(str, self.stages))}-{self.layout}"

    def ranks(self):
        """Rank, its layers and its heads."""
        held = max(1, HEADS // self.tp)
        for stage, tp_rank in itertools.product(range(len(self.stages)), range(self.tp)):
            first = sum(self.stages[:stage])
            head = tp_rank * HEADS // self.tp
            facts = {
                "tp_rank": tp_rank,
                "tp_size": self.tp,
                "pp_rank": stage,
                "pp_size": len(self.stages),
            }
            yield facts, range(first, first + self.stages[stage]), range(head, head + held)


CUTS = [
    Cut(),
    Cut(tp=2),
    Cut(tp=4, layout="page_first_direct"),
    Cut(tp=8, layout="layer_first"),
    Cut(stages=(2, 2), layout="layer_first"),
    Cut(stages=(3, 1)),
    Cut(tp=2, stages=(1, 3), layout="page_first_direct"),
]


def model(heads: int, width: int, seed: int) -> torch.Tensor:
    """The model's rows of the chain, [K and V, layer, page, token, head, row]."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, LAYERS, CHAIN, pools.PAGE, heads, width)
    return torch.randint(-(1 << 15), 1 << 15, shape, generator=generator, dtype=torch.int16)


def pool_of(cut: Cut, layers: range, heads: range, latent: bool):
    shape = dataclasses.replace(
        pools.TINY, layers=len(layers), heads=len(heads), dim=DIM, start_layer=layers.start
    )
    return pools.paint(pools.build("mla" if latent else "mha", cut.layout, shape))


def rows(pool, latent: bool, layer: int) -> list[torch.Tensor]:
    """One layer of the pool's arrays, [page, token, head, row] as 16-bit words."""
    if latent:
        return [_mla_layer(pool, layer).view(torch.int16)]
    return [_mha_layer(pool, buffer, layer).view(torch.int16) for buffer in (pool.k_buffer, pool.v_buffer)]


def put(pool, whole, layers, heads, latent, slots):
    for own, layer in enumerate(layers):
        for array, into in enumerate(rows(pool, latent, own)):
            into[slots] = whole[array, layer][:, :, heads.start : heads.stop]


def check(pool, whole, layers, heads, latent, slots):
    for own, layer in enumerate(layers):
        for array, held in enumerate(rows(pool, latent, own)):
            assert torch.equal(held[slots], whole[array, layer][:, :, heads.start : heads.stop])


@pytest.mark.parametrize("latent", [False, True], ids=["heads", "latent"])
@pytest.mark.parametrize("writer", CUTS, ids=str)
def test_every_shape_reads_what_any_shape_wrote(open_backend, writer, latent):
    whole = model(1 if latent else HEADS, DIM + 4 if latent else DIM, seed=3)
    known = {"total_layers": LAYERS, "total_kv_heads": HEADS}
    for facts, layers, heads in writer.ranks():
        if latent and facts["tp_rank"] > 0:
            continue  # the engine lets rank 0 write
        heads = range(1) if latent else heads
        pool = pool_of(writer, layers, heads, latent)
        put(pool, whole, layers, heads, latent, [7, 1, 4, 0, 12])
        backend = open_backend(backends.OURS, pool, extra=known, is_mla_model=latent, **facts)
        assert backend.batch_set_v1(KEYS, pools.indices(pool, [7, 1, 4, 0, 12])) == [True] * CHAIN
    for reader in CUTS:
        for facts, layers, heads in reader.ranks():
            heads = range(1) if latent else heads
            pool = pool_of(reader, layers, heads, latent)
            backend = open_backend(backends.OURS, pool, extra=known, is_mla_model=latent, **facts)
            assert backend.batch_exists(KEYS) == CHAIN, (writer, reader, facts)
            got = backend.batch_get_v1(KEYS, pools.indices(pool, [3, 2, 9, 8, 15]))
            assert got == [True] * CHAIN
            check(pool, whole, layers, heads, latent, [3, 2, 9, 8, 15])
            backends.close(backend)


def test_a_shard_that_is_missing_is_a_miss_for_those_who_need_it(open_backend):
    """Rank 1 of 2 never wrote: rank 0's heads are there, all heads together are not."""
    whole = model(HEADS, DIM, seed=4)
    known = {"total_layers": LAYERS, "total_kv_heads": HEADS}
    facts, layers, heads = next(Cut(tp=2).ranks())
    pool = pool_of(Cut(), layers, heads, False)
    put(pool, whole, layers, heads, False, list(range(CHAIN)))
    writer = open_backend(backends.OURS, pool, extra=known, **facts)
    assert writer.batch_set_v1(KEYS, pools.indices(pool, range(CHAIN))) == [True] * CHAIN
    for cut, expected in ((Cut(tp=2), [CHAIN, 0]), (Cut(tp=4), [CHAIN, CHAIN, 0, 0]), (Cut(), [0])):
        found = []
        for facts, layers, heads in cut.ranks():
            reader = open_backend(backends.OURS, pool_of(cut, layers, heads, False), extra=known, **facts)
            found.append(reader.batch_exists(KEYS))
        assert found == expected, cut


@pytest.mark.parametrize("unknown", ["total_kv_heads", "total_layers"])
def test_what_a_rank_cannot_know_binds_its_pages_to_its_place(open_backend, unknown):
    """Safe, not shared: the same shape hits, no other shape does, and each rank has its own bytes."""
    whole = model(HEADS, DIM, seed=5)
    cut = Cut(tp=2) if unknown == "total_kv_heads" else Cut(stages=(2, 2))
    given = {"total_layers": LAYERS, "total_kv_heads": HEADS, unknown: None}

    def backend(facts, layers, heads, of):
        pool = pool_of(of, layers, heads, False)
        return pool, open_backend(backends.OURS, pool, extra=given, **facts)

    for facts, layers, heads in cut.ranks():
        pool, writer = backend(facts, layers, heads, cut)
        put(pool, whole, layers, heads, False, list(range(CHAIN)))
        assert writer.batch_set_v1(KEYS, pools.indices(pool, range(CHAIN))) == [True] * CHAIN
        assert writer.stats()["pools"]["kv"]["bound"]
    for facts, layers, heads in cut.ranks():
        pool, reader = backend(facts, layers, heads, cut)
        assert reader.batch_get_v1(KEYS, pools.indices(pool, range(CHAIN))) == [True] * CHAIN
        check(pool, whole, layers, heads, False, list(range(CHAIN)))
    for facts, layers, heads in Cut().ranks():
        _, reader = backend(facts, layers, heads, Cut())
        assert reader.batch_exists(KEYS) == 0


# -- context parallelism -------------------------------------------------------------------------


def cp(rank: int) -> dict:
    return {"attn_cp_rank": rank, "attn_cp_size": 4, "is_mla_model": True}


def test_case_d05_sharded_context_parallel_ranks_keep_their_own_pages(open_backend):
    """Class level: the engine shards pages this way for sparse attention only."""
    held = [pools.fill(pools.build("mla", "page_first"), seed) for seed in range(4)]
    for rank, pool in enumerate(held):
        writer = open_backend(backends.OURS, pool, extra={"cp_kind": "sharded"}, **cp(rank))
        assert writer.batch_exists(KEYS) == 0
        assert writer.batch_set_v1(KEYS, pools.indices(pool, range(CHAIN))) == [True] * CHAIN
        assert writer.stats()["store"]["counters"]["backup_stored_pages"] == CHAIN
    for rank, pool in enumerate(held):
        blank = pools.paint(pools.build("mla", "page_first"))
        reader = open_backend(backends.OURS, blank, extra={"cp_kind": "sharded"}, **cp(rank))
        assert reader.batch_get_v1(KEYS, pools.indices(blank, range(CHAIN))) == [True] * CHAIN
        assert pools.pages_of(blank, range(CHAIN)) == pools.pages_of(pool, range(CHAIN))


def test_case_d05_replicated_context_parallel_ranks_share_one_copy(open_backend):
    held = pools.fill(pools.build("mla", "page_first"), 1)
    ranks = [
        open_backend(backends.OURS, held, extra={"cp_kind": "replicated"}, **cp(rank)) for rank in range(4)
    ]
    for rank in (3, 1, 2):  # answer that all is well, and leave the writing to rank 0
        assert ranks[rank].batch_set_v1(KEYS, pools.indices(held, range(CHAIN))) == [True] * CHAIN
    assert ranks[0].batch_exists(KEYS) == 0
    assert ranks[0].batch_set_v1(KEYS, pools.indices(held, range(CHAIN))) == [True] * CHAIN
    assert [rank.batch_exists(KEYS) for rank in ranks] == [CHAIN] * 4
    stored = sum(rank.stats()["store"]["counters"].get("backup_stored_pages", 0) for rank in ranks)
    assert stored == CHAIN


def test_case_d05_an_unstated_kind_is_refused(open_backend):
    with pytest.raises(ConfigError, match="cp_kind"):
        open_backend(backends.OURS, pools.build("mla", "page_first"), **cp(0))


# -- decode context parallelism: the engine refuses it with `dynamic`, so here alone -------------


def dcp_pool(rank: int, size: int):
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    shape = dataclasses.replace(pools.TINY, tokens=pools.TOKENS // size)
    return pools.paint(
        MLATokenToKVPoolHost(
            pools._mla_info(shape, shape.layers),
            host_to_device_ratio=1.0,
            host_size=0,
            page_size=pools.PAGE * size,
            layout="page_first",
            device_capacity_tokens=shape.tokens,
            start_layer=0,
            end_layer=shape.layers,
            target_layer_num=shape.layers,
            dcp_size=size,
            dcp_rank=rank,
        )
    )


def test_decode_context_parallel_ranks_hold_every_nth_token(open_backend):
    """Needs an engine change to be reached: `attach_storage_backend` refuses `dynamic` with it."""
    size, page = 2, 2 * pools.PAGE
    facts = {"tp_size": size, "dcp_size": size, "logical_page_size": page, "is_mla_model": True}
    held = []
    slots = [3, 0, 5]
    keys = KEYS[: len(slots)]
    where = torch.tensor([slot * page + token for slot in slots for token in range(page)])
    for rank in range(size):
        pool = pools.fill(dcp_pool(rank, size), seed=rank)
        held.append(pool)
        writer = open_backend(backends.OURS, pool, tp_rank=rank, dcp_rank=rank, **facts)
        assert writer.batch_set_v1(keys, where) == [True] * len(keys)
    for rank in range(size):
        blank = dcp_pool(rank, size)
        reader = open_backend(backends.OURS, blank, tp_rank=rank, dcp_rank=rank, **facts)
        assert reader.batch_exists(keys) == len(keys)
        assert reader.batch_get_v1(keys, where) == [True] * len(keys)
        assert pools.pages_of(blank, slots) == pools.pages_of(held[rank], slots)
    # One rank with whole pages has the tokens of both, in turn.
    shape = dataclasses.replace(pools.TINY, page=page, tokens=pools.TOKENS)
    blank = pools.paint(pools.build("mla", "page_first", shape))
    reader = open_backend(backends.OURS, blank, is_mla_model=True)
    assert reader.batch_get_v1(keys, where) == [True] * len(keys)
    for layer in range(shape.layers):
        got = _mla_layer(blank, layer).view(torch.int16)[slots]
        for rank in range(size):
            assert torch.equal(got[:, rank::size], _mla_layer(held[rank], layer).view(torch.int16)[slots])


# -- data parallelism ----------------------------------------------------------------------------


def test_data_parallel_ranks_share(open_backend):
    """They hold the same model: their number is no part of the identity."""
    held = pools.fill(pools.build("mha", "page_first"), 1)
    writer = open_backend(backends.OURS, held, dp_rank=0)
    assert writer.batch_set_v1(KEYS, pools.indices(held, range(CHAIN))) == [True] * CHAIN
    blank = pools.paint(pools.build("mha", "page_first"))
    reader = open_backend(backends.OURS, blank, dp_rank=3)
    assert reader.batch_get_v1(KEYS, pools.indices(blank, range(CHAIN))) == [True] * CHAIN
    assert pools.pages_of(blank, range(CHAIN)) == pools.pages_of(held, range(CHAIN))


# -- drafts --------------------------------------------------------------------------------------


def test_a_draft_of_heads_beside_a_replicated_target_is_counted(open_backend):
    """The engine writes the draft's pool on rank 0 alone: rank 1 says so, and hits nothing."""
    facts = {"tp_size": 2, "is_mla_model": True}
    target = pools.fill(pools.build("mla", "page_first"), 1)
    draft = pools.fill(pools.build("mha", "page_first", dataclasses.replace(pools.TINY, heads=1)), 2)
    ranks = [
        open_backend(backends.OURS, target, {PoolName.DRAFT: draft}, tp_rank=rank, **facts)
        for rank in range(2)
    ]
    slots = range(CHAIN)
    ranks[0].batch_set_v1(KEYS, pools.indices(target, slots))
    ranks[0].batch_set_v2([backends.transfer(PoolName.DRAFT, draft, KEYS, slots)])
    asked = [backends.every(PoolName.DRAFT)]
    assert ranks[0].batch_exists_v2(KEYS, asked).kv_hit_pages == CHAIN
    assert ranks[1].batch_exists(KEYS) == CHAIN
    found = ranks[1].batch_exists_v2(KEYS, asked)
    assert found.kv_hit_pages == 0
    assert not found.restorable_prefix_pages
    assert ranks[1].batch_get_v2([backends.transfer(PoolName.DRAFT, draft, KEYS, slots)]) == {
        PoolName.DRAFT: [False] * CHAIN
    }
    assert ranks[1].stats()["counters"]["lookups_limited/draft"] == 1
    assert "lookups_limited/draft" not in ranks[0].stats()["counters"]
