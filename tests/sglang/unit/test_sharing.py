"""Deployments of another shape read the same bytes, or nothing: never another rank's."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest
import torch
from harness import backends, pools
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

KV = PoolName.KV
TINY = pools.TINY
# The model of these tests: 4 layers, 4 KV heads.
MODEL = dataclasses.replace(TINY, layers=4, heads=4)
FACTS = {"total_layers": 4, "total_kv_heads": 4}


def part(layers=(0, 4), heads=4, layout="page_first"):
    """The pool of one rank."""
    shape = dataclasses.replace(MODEL, layers=layers[1] - layers[0], heads=heads, start_layer=layers[0])
    return pools.paint(pools.build("mha", layout, shape))


def rows(pool, slot):
    """One page as [K and V, layer, token, head, element], by the shape of the layout alone."""
    first, page = slot * pool.page_size, pool.page_size
    held = pool.kv_buffer
    if pool.layout == "layer_first":
        return held[:, :, first : first + page]
    if pool.layout == "page_first":
        return held[:, first : first + page].transpose(1, 2)
    if pool.layout == "page_first_direct":
        return held[:, slot]
    return held[:, slot].permute(0, 3, 2, 1, 4)


def equal(ours, theirs, layers=slice(None), heads=slice(None), at=(0, 0)):
    """Whether a page of `ours` is that part of a page of `theirs`, the whole model."""
    mine = rows(ours, at[0]).contiguous().view(torch.int16)
    whole = rows(theirs, at[1])[:, layers, :, heads].contiguous().view(torch.int16)
    return torch.equal(mine, whole)


@pytest.fixture
def whole(rank, put, keys, slots):
    """One rank with the whole model wrote six pages."""
    pool = pools.fill(part(), 1)
    assert put(rank(pool, extra=FACTS), KV, pool, keys, slots)
    return pool


LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_host_layout_reads(rank, take, whole, keys, slots, layout):
    pool = part(layout=layout)
    assert take(rank(pool, extra=FACTS), KV, pool, keys, range(6)) == 6
    assert all(equal(pool, whole, at=(page, slots[page])) for page in range(6))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tp_size", [2, 4])
def test_more_ranks_read_their_heads(rank, take, whole, keys, slots, layout, tp_size):
    held = 4 // tp_size
    for tp_rank in range(tp_size):
        pool = part(heads=held, layout=layout)
        reader = rank(pool, extra=FACTS, tp_rank=tp_rank, tp_size=tp_size)
        assert reader.batch_exists(keys) == 6
        assert take(reader, KV, pool, keys, range(6)) == 6
        heads = slice(tp_rank * held, (tp_rank + 1) * held)
        assert all(equal(pool, whole, heads=heads, at=(page, slots[page])) for page in range(6))


def test_ranks_with_the_same_head_share_it(rank, put, take, whole, keys, slots):
    """Eight ranks, four heads: neighbours hold the same one, and what one wrote the other finds."""
    for tp_rank in range(8):
        pool = part(heads=1)
        reader = rank(pool, extra=FACTS, tp_rank=tp_rank, tp_size=8)
        assert take(reader, KV, pool, keys, range(6)) == 6
        heads = slice(tp_rank // 2, tp_rank // 2 + 1)
        assert all(equal(pool, whole, heads=heads, at=(page, slots[page])) for page in range(6))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stages_read_their_layers(rank, take, whole, keys, slots, layout):
    for pp_rank, layers in enumerate([(0, 3), (3, 4)]):
        pool = part(layers=layers, layout=layout)
        reader = rank(pool, extra=FACTS, pp_rank=pp_rank, pp_size=2)
        assert take(reader, KV, pool, keys, range(6)) == 6
        assert all(equal(pool, whole, layers=slice(*layers), at=(page, slots[page])) for page in range(6))


def test_packed_drafts_are_the_stages_own(rank, put, take, keys, slots, others):
    """Each of two stages has the draft's layer behind its own: both come back, to that stage alone."""

    def stage(number):
        shape = dataclasses.replace(MODEL, layers=2, start_layer=2 * number, drafts=1)
        pool = pools.build("mha", "page_first", shape)
        return pool, rank(pool, extra=FACTS, pp_rank=number, pp_size=2)

    written = []
    for number in range(2):
        pool, writer = stage(number)
        assert writer.batch_exists(keys) == 0
        assert writer.stats()["pools"]["kv"]["bound"]
        assert put(writer, KV, pools.fill(pool, 1 + number), keys, slots)
        written.append(pools.pages_of(pool, slots))
    for number in range(2):
        pool, reader = stage(number)
        assert reader.batch_exists(keys) == 6
        assert take(reader, KV, pools.paint(pool), keys, others) == 6
        assert pools.pages_of(pool, others) == written[number]
    whole = pools.build("mha", "page_first", dataclasses.replace(MODEL, drafts=1))
    assert rank(whole, extra=FACTS).batch_exists(keys) == 0


def test_one_rank_reads_what_four_wrote(rank, put, take, keys, slots):
    """Two stages of two ranks wrote; a page is there once all four parts of it are."""
    model = pools.fill(part(), 2)
    reader_pool = part(layout="page_first_direct")
    reader = rank(reader_pool, extra=FACTS)
    corners = [(layers, heads) for layers in ((0, 2), (2, 4)) for heads in ((0, 2), (2, 4))]
    for number, (layers, heads) in enumerate(corners):
        assert reader.batch_exists(keys) == 0
        pool = part(layers=layers, heads=2, layout="page_head" if number % 2 else "layer_first")
        for slot in slots:
            rows(pool, slot).copy_(rows(model, slot)[:, slice(*layers), :, slice(*heads)])
        facts = {"tp_rank": heads[0] // 2, "tp_size": 2, "pp_rank": layers[0] // 2, "pp_size": 2}
        assert put(rank(pool, extra=FACTS, **facts), KV, pool, keys, slots)
    assert reader.batch_exists(keys) == 6
    assert take(reader, KV, reader_pool, keys, range(6)) == 6
    assert all(equal(reader_pool, model, at=(page, slots[page])) for page in range(6))


@pytest.mark.parametrize(
    ("facts", "missing", "shape", "named"),
    [
        ({"tp_rank": 0, "tp_size": 2}, "total_kv_heads", {"heads": 2}, "total_kv_heads"),
        ({"pp_rank": 0, "pp_size": 2}, "total_layers", {"layers": (0, 2)}, "total_layers"),
    ],
)
def test_what_nobody_tells_keeps_pages_apart(
    rank, put, take, whole, keys, slots, facts, missing, shape, named
):
    extra = FACTS | {missing: None}
    pool = pools.fill(part(**shape), 3)
    reader = rank(pool, extra=extra, **facts)
    assert reader.batch_exists(keys) == 0
    assert put(reader, KV, pool, keys, slots)
    assert take(rank(part(**shape), extra=extra, **facts), KV, pool, keys, slots) == 6
    (reason,) = reader.stats()["pools"]["kv"]["bound"]
    assert named in reason


def test_stat_says_which_pools_are_not_shared_or_not_stored(rank, put, keys, slots, tmp_path):
    strange = pools.build("mha", "layer_first")
    strange.layout = "page_unified"
    pool = pools.fill(part(layers=(0, 2)), 3)
    sidecars = {PoolName.DRAFT: strange}
    serving = rank(pool, sidecars, extra=FACTS | {"total_layers": None}, pp_rank=0, pp_size=2)
    assert put(serving, KV, pool, keys, slots)
    command = [sys.executable, "-m", "hicache_store", "stat", tmp_path / "root", "--json"]
    ran = subprocess.run(command, check=True, capture_output=True, text=True, timeout=240)
    (process,) = json.loads(ran.stdout)["processes"]["list"]
    told = serving.stats()
    # Behind them stands what other tests of this process had placed.
    assert process["pools"][:2] == [
        {"name": "draft", "place": "refused", "reason": told["refused"]["draft"]},
        {"name": "kv", "place": "bound", "reason": told["pools"]["kv"]["bound"][0]},
    ]


def test_another_rank_never_reads_bound_pages(rank, put, keys, slots):
    extra = FACTS | {"total_kv_heads": None}
    pool = part(heads=2)
    assert put(rank(pool, extra=extra, tp_rank=0, tp_size=2), KV, pool, keys, slots)
    for facts in ({"tp_rank": 1, "tp_size": 2}, {"tp_rank": 0, "tp_size": 1}, {"tp_rank": 0, "tp_size": 4}):
        assert rank(part(heads=2), extra=extra, **facts).batch_exists(keys) == 0


def test_another_stage_never_reads_bound_pages(rank, put, keys, slots):
    extra = FACTS | {"total_layers": None}
    pool = part(layers=(0, 2))
    assert put(rank(pool, extra=extra, pp_rank=0, pp_size=2), KV, pool, keys, slots)
    for facts in ({"pp_rank": 1, "pp_size": 2}, {"pp_rank": 0, "pp_size": 1}, {"pp_rank": 0, "pp_size": 4}):
        assert rank(part(layers=(0, 2)), extra=extra, **facts).batch_exists(keys) == 0


def test_heads_that_contradict_the_model_keep_pages_apart(rank, whole, keys):
    pool = part(heads=3)  # 4 heads over 2 ranks are 2
    reader = rank(pool, extra=FACTS, tp_rank=0, tp_size=2)
    assert reader.batch_exists(keys) == 0
    assert reader.stats()["pools"]["kv"]["bound"]


def test_a_pool_of_some_layers_of_a_stage_is_the_stages_own(rank, whole, keys):
    """Full attention beside windows: the engine counts such layers from 0 on every stage."""
    pool = part(layers=(0, 2))
    pool.end_layer = pool.layer_num - 1  # the engine's default, where nobody gave the end
    for pp_rank in (0, 1):
        reader = rank(pool, extra=FACTS, pp_rank=pp_rank, pp_size=2)
        assert reader.batch_exists(keys) == 0
        assert "does not tell which" in reader.stats()["pools"]["kv"]["bound"][0]


def test_latent_rows_are_written_once_and_read_by_all(rank, put, take, keys, slots, others):
    pool = pools.fill(pools.build("mla", "page_first"), 4)
    assert put(rank(pool, is_mla_model=True, tp_rank=0, tp_size=4), KV, pool, keys, slots)
    for tp_rank in range(4):
        mine = pools.paint(pools.build("mla", "layer_first"))
        reader = rank(mine, is_mla_model=True, tp_rank=tp_rank, tp_size=4)
        assert reader.batch_exists(keys) == 6
        assert take(reader, KV, mine, keys, others) == 6
        again = pools.paint(pools.build("mla", "page_first"))
        assert take(rank(again, is_mla_model=True), KV, again, keys, others) == 6
        assert pools.pages_of(again, others) == pools.pages_of(pool, slots)


def test_latent_stages_read_their_layers(rank, put, take, keys, slots):
    pool = pools.fill(pools.build("mla", "page_first_direct"), 5)
    assert put(rank(pool, extra={"total_layers": 3}, is_mla_model=True), KV, pool, keys, slots)
    shape = dataclasses.replace(TINY, layers=2, start_layer=1)
    mine = pools.paint(pools.build("mla", "page_first_direct", shape))
    reader = rank(mine, extra={"total_layers": 3}, is_mla_model=True, pp_rank=1, pp_size=2)
    assert take(reader, KV, mine, keys, slots) == 6
    for slot in slots:
        assert torch.equal(mine.kv_buffer[slot].view(torch.int16), pool.kv_buffer[slot, 1:].view(torch.int16))


def dcp_pool(dcp_rank, dcp_size):
    """The latent rows of one rank of decode context parallelism: every `dcp_size`-th token of a page."""
    shape = dataclasses.replace(TINY, page=2 * pools.PAGE)
    with host_memory_budget_scope(1 << 30):
        return MLATokenToKVPoolHost(
            pools._mla_info(shape, 3),
            host_to_device_ratio=1.0,
            host_size=0,
            page_size=shape.page,
            layout="page_first",
            device_capacity_tokens=shape.tokens // dcp_size,
            start_layer=0,
            end_layer=3,
            target_layer_num=3,
            dcp_size=dcp_size,
            dcp_rank=dcp_rank,
        )


def test_decode_context_parallel_ranks_hold_every_other_token(rank, put, take, keys, slots):
    """At class level: the engine gives no `dynamic` backend to such a deployment."""
    shape = dataclasses.replace(TINY, page=2 * pools.PAGE)
    whole = pools.fill(pools.build("mla", "page_first", shape), 6)
    indices = lambda: pools.indices(whole, range(6))  # noqa: E731
    assert rank(whole, is_mla_model=True).batch_set_v1(keys, indices()) == [True] * 6
    for dcp_rank in range(2):
        pool = pools.paint(dcp_pool(dcp_rank, 2))
        facts = {"tp_rank": dcp_rank, "tp_size": 2, "dcp_rank": dcp_rank, "dcp_size": 2}
        reader = rank(pool, is_mla_model=True, logical_page_size=shape.page, **facts)
        assert reader.batch_exists(keys) == 6
        assert reader.batch_get_v1(keys, indices()) == [True] * 6  # slots are logical here
        for slot in range(6):
            mine = pool.kv_buffer[slot * pools.PAGE : (slot + 1) * pools.PAGE]
            theirs = whole.kv_buffer[slot * shape.page : (slot + 1) * shape.page][dcp_rank::2]
            assert torch.equal(mine.view(torch.int16), theirs.view(torch.int16))


def test_context_parallel_ranks_with_parts_of_a_page_keep_apart(rank, put, take, keys, slots):
    for cp_rank in range(2):
        pool = pools.fill(part(), 10 + cp_rank)
        facts = {"attn_cp_rank": cp_rank, "attn_cp_size": 2}
        writer = rank(pool, extra=FACTS | {"cp_kind": "sharded"}, **facts)
        assert writer.batch_exists(keys) == 0
        assert put(writer, KV, pool, keys, slots)
        mine = part()
        assert take(rank(mine, extra=FACTS | {"cp_kind": "sharded"}, **facts), KV, mine, keys, slots) == 6
        assert pools.pages_of(mine, slots) == pools.pages_of(pool, slots)
    assert rank(part(), extra=FACTS).batch_exists(keys) == 0


def test_of_context_parallel_ranks_that_hold_the_same_one_writes(rank, put, take, keys, slots):
    pools_of = [pools.fill(part(), 20) for _ in range(2)]
    ranks = [
        rank(pool, extra=FACTS | {"cp_kind": "replicated"}, attn_cp_rank=cp_rank, attn_cp_size=2)
        for cp_rank, pool in enumerate(pools_of)
    ]
    assert put(ranks[1], KV, pools_of[1], keys, slots)
    assert ranks[1].batch_set(keys, backends.flat_pages(pools_of[1], slots)) is True
    assert [one.batch_exists(keys) for one in ranks] == [0, 0]
    assert ranks[1].stats()["counters"]["deferred_pages/kv"] == 12
    assert put(ranks[0], KV, pools_of[0], keys, slots)
    mine = part()
    reader = rank(mine, extra=FACTS | {"cp_kind": "replicated"}, attn_cp_rank=1, attn_cp_size=2)
    assert take(reader, KV, mine, keys, slots) == 6
    assert pools.pages_of(mine, slots) == pools.pages_of(pools_of[0], slots)
    assert rank(part(), extra=FACTS).batch_exists(keys) == 6


def test_pages_that_all_ranks_read_come_through_the_page_cache(rank):
    """What the store does with it: `tests/rust/page_cache.rs`."""
    alike = {"tp_rank": 1, "tp_size": 8}
    for heads, facts, extra, expected in (
        (4, {}, {}, False),
        (2, {"tp_rank": 1, "tp_size": 2}, {}, False),
        (1, alike, {}, True),
        (4, {"attn_cp_rank": 1, "attn_cp_size": 2}, {"cp_kind": "replicated"}, True),
        (4, {"attn_cp_rank": 1, "attn_cp_size": 2}, {"cp_kind": "sharded"}, False),
    ):
        backend = rank(part(heads=heads), extra=FACTS | extra, **facts)
        assert backend.stats()["pools"]["kv"]["read_by_all"] is expected
    for is_mla_model in (True, False):
        state = pools.build("mamba", "page_first")
        facts = {"is_mla_model": is_mla_model, "tp_rank": 1, "tp_size": 2}
        backend = rank(pools.build("mla", "page_first"), {PoolName.MAMBA: state}, **facts)
        assert backend.stats()["pools"]["kv"]["read_by_all"] is True, "latent rows"
        assert backend.stats()["pools"]["mamba"]["read_by_all"] is False


def test_data_parallel_ranks_share(rank, whole, keys):
    assert rank(part(), extra=FACTS, dp_rank=3).batch_exists(keys) == 6


def test_states_belong_to_their_rank(rank, put, take, keys, slots):
    anchor, state = pools.build("mla", "page_first"), pools.fill(pools.build("mamba", "page_first"), 7)
    facts = {"is_mla_model": True, "tp_size": 2}
    # The engine lets every rank write them, whatever the model.
    assert put(rank(anchor, {PoolName.MAMBA: state}, tp_rank=1, **facts), PoolName.MAMBA, state, keys, slots)
    blank = pools.paint(pools.build("mamba", "page_first"))
    other = rank(anchor, {PoolName.MAMBA: blank}, tp_rank=0, **facts)
    assert take(other, PoolName.MAMBA, blank, keys, slots) == 0
    same = rank(anchor, {PoolName.MAMBA: blank}, tp_rank=1, **facts)
    assert take(same, PoolName.MAMBA, blank, keys, slots) == 6
    assert pools.pages_of(blank, slots) == pools.pages_of(state, slots)


@pytest.mark.parametrize(
    ("family", "name"), [("indexer", PoolName.INDEXER), ("v4_paged", PoolName.DEEPSEEK_V4_C4)]
)
def test_page_rows_are_shared_where_ranks_hold_the_same(rank, put, take, keys, slots, family, name):
    side = pools.fill(pools.build(family, "page_first"), 11)
    for replicated, came in ((False, 0), (True, 6)):
        anchor = pools.build("mla", "page_first")
        facts = {"is_mla_model": replicated, "tp_size": 2}
        assert put(rank(anchor, {name: side}, tp_rank=0, **facts), name, side, keys, slots)
        blank = pools.paint(pools.build(family, "page_first"))
        other = rank(anchor, {name: blank}, tp_rank=1, **facts)
        assert take(other, name, blank, keys, slots) == came
        assert bool(other.stats()["pools"][str(name)]["bound"]) is not replicated
    assert pools.pages_of(blank, slots) == pools.pages_of(side, slots)


def test_a_draft_with_heads_beside_latent_rows_is_a_counted_miss(rank, put, keys, slots):
    """The engine writes such a draft on rank 0 only, and each rank needs its own heads."""
    anchor, draft = pools.fill(pools.build("mla", "page_first"), 8), pools.build("mha", "page_first")
    facts = {"is_mla_model": True, "tp_size": 2}
    writer = rank(anchor, {PoolName.DRAFT: draft}, tp_rank=0, **facts)
    assert put(writer, KV, anchor, keys, slots)
    assert put(writer, PoolName.DRAFT, draft, keys, slots)
    every = [backends.every(PoolName.DRAFT)]
    assert writer.batch_exists_v2(keys, every).kv_hit_pages == 6
    other = rank(anchor, {PoolName.DRAFT: draft}, tp_rank=1, **facts)
    found = other.batch_exists_v2(keys, every)
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (0, [])
    assert found.extra_pool_hit_pages == {KV: 6}
    assert other.stats()["counters"]["lookups_limited/draft"] == 1


def test_a_draft_of_latent_rows_beside_latent_rows_is_shared(rank, put, take, keys, slots):
    anchor, draft = pools.build("mla", "page_first"), pools.fill(pools.build("mla", "page_first"), 9)
    facts = {"is_mla_model": True, "tp_size": 2}
    assert put(rank(anchor, {PoolName.DRAFT: draft}, tp_rank=0, **facts), PoolName.DRAFT, draft, keys, slots)
    blank = pools.paint(pools.build("mla", "page_first"))
    reader = rank(anchor, {PoolName.DRAFT: blank}, tp_rank=1, **facts)
    assert take(reader, PoolName.DRAFT, blank, keys, slots) == 6
    assert pools.pages_of(blank, slots) == pools.pages_of(draft, slots)
