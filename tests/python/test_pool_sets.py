"""Sets of pools: packed or sidecar by geometry, each with its reason, and never the target alone."""

import json
import subprocess
import sys

import numpy as np
import pytest
from hicache_store import (
    ConfigError,
    GeometryError,
    Namespace,
    Pool,
    PoolMember,
    PoolSet,
    PoolView,
    Store,
    StoreClosedError,
    Tile,
    page_keys,
)


def member(name, kind, layers, row=36, **options):
    options.setdefault("slots", 4)
    return PoolMember(
        Pool(name, kind, "bfloat16", {"latent": row}),
        Tile(layers, (0, 1)),
        options.pop("slots"),
        4,
        **options,
    )


def test_a_set_says_what_is_packed_and_why(tmp_path):
    target, draft = member("kv", "latent", (0, 3)), member("draft", "draft", (3, 4))
    pools = PoolSet([target, draft])
    assert [(one.name, one.mapping, one.offset) for one in pools.members] == [
        ("kv", "target", 0),
        ("draft", "packed", 512),
    ]
    assert "owned once" in pools.members[1].reason
    assert pools.explain().splitlines()[1].startswith("draft: packed, bytes 512 to 656 of 4096 in 4 slots: ")
    (pool,) = pools.allocate(register="off")
    assert (pool.slots, pool.slot_bytes) == pools.host_pools[0] == (4, 4096)
    views = [
        PoolView(
            Pool(name, kind, "bfloat16", {"latent": 36}), Tile(layers, (0, 1)), packed=pools.packed(name)
        )
        for name, kind, layers in (("kv", "latent", (0, 3)), ("draft", "draft", (3, 4)))
    ]
    view = Store.open(tmp_path, capacity="16MiB").view(Namespace("m", revision="r", page_size=4), views)
    keys = page_keys(range(16), 4)
    memory = np.random.default_rng(2).integers(0, 256, pool.nbytes, np.uint8)
    np.frombuffer(pool, np.uint8)[:] = memory
    slots = [0, 1, 2, 3]
    view.backup(keys, pool, slots, depth=0)
    np.frombuffer(pool, np.uint8)[:] = 0
    assert view.restore(keys, pool, slots).all_restored
    pages = np.frombuffer(pool, np.uint8).reshape(4, -1)
    assert (pages[:, :432] == memory.reshape(4, -1)[:, :432]).all()
    assert (pages[:, 512:656] == memory.reshape(4, -1)[:, 512:656]).all()


def test_a_set_refuses_rather_than_be_its_target_alone():
    target = member("kv", "latent", (0, 3))
    other_rows = PoolSet([target, member("draft", "draft", (3, 4), row=40)])
    assert [one.mapping for one in other_rows.members] == ["target", "sidecar"]
    assert "rows" in other_rows.members[1].reason
    with pytest.raises(GeometryError, match="cannot be packed: its rows"):
        PoolSet([target, member("draft", "draft", (3, 4), row=40, mapping="packed")])
    with pytest.raises(GeometryError, match="it has 2 slots, kv has 4"):
        PoolSet([target, member("draft", "draft", (3, 4), slots=2)])
    with pytest.raises(ConfigError, match="expected a PoolMember"):
        PoolSet([target, "draft"])
    with pytest.raises(ConfigError, match="mapping"):
        member("draft", "draft", (3, 4), mapping="fused")


def test_where_pools_stand_and_why_is_left_for_the_tools(tmp_path):
    def left():
        command = [sys.executable, "-m", "hicache_store", "stat", tmp_path, "--json"]
        ran = subprocess.run(command, check=True, capture_output=True, text=True, timeout=110)
        (process,) = json.loads(ran.stdout)["processes"]["list"]
        assert process["free_space_floor_bytes"] == 1 << 20
        return [(pool["name"], pool["place"], pool["reason"]) for pool in process["pools"]]

    pools = PoolSet([member("kv", "latent", (0, 3)), member("draft", "draft", (3, 4), row=40)])
    store = Store.open(tmp_path, capacity="16MiB", free_space_floor="1MiB")
    view = store.view(
        Namespace("m", revision="r", page_size=1),
        Pool("kv", "kv", "uint8", {"k": 4}),
        tile=Tile((0, 1), (0, 1)),
    )
    view.backup(page_keys([1], 1), np.zeros(4, np.uint8), [0], depth=0)
    assert left() == []
    store.note_pools(pools)
    target, draft = left()
    assert target[:2] == ("kv", "target")
    assert draft[:2] == ("draft", "sidecar")
    assert draft[2].endswith(pools.members[1].reason)
    store.note_pools([("kv", "somewhere", "for a test")])
    assert left() == [("kv", "somewhere", "for a test")]
    for wrong in (["kv"], [("kv", "somewhere")], [("kv", "somewhere", "x" * (1 << 15))]):
        with pytest.raises(ConfigError):
            store.note_pools(wrong)
    assert left() == [("kv", "somewhere", "for a test")]
    store.close()
    with pytest.raises(StoreClosedError):
        store.note_pools([])
