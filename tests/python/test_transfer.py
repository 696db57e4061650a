"""Transfers against numpy: every layout, geometry, rectangle and token lattice; layer by layer, in order."""

import threading

import numpy as np
import pytest
from hicache_store import (
    Component,
    ConfigError,
    GeometryError,
    HostEvent,
    LayerwiseRestore,
    Layout,
    Namespace,
    Pool,
    Store,
    StoreClosedError,
    Tile,
    TransferPlan,
    TransferPool,
    UnsupportedError,
    page_keys,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from test_layout_numpy import host_views, layouts, make_pool, read

CANARY = 0xA5
LAYERS, HEADS, PAGE_SIZE = 3, 2, 5

# Sizes of heads from 7 to 576 elements of 1 to 8 bytes, and small ones that shrink well.
rows = st.one_of(
    st.integers(1, 6),
    st.builds(lambda dim, item: dim * item, st.integers(7, 576), st.sampled_from([1, 2, 4, 8])),
)
wide_components = st.lists(
    st.tuples(rows, st.sampled_from(["token", "token", "page"])), min_size=1, max_size=2
).map(lambda parts: [(f"c{index}", row, unit) for index, (row, unit) in enumerate(parts)])


def flat(total, random):
    return random.integers(0, 256, total, np.uint8)


@st.composite
def around(draw, start, end, limit):
    """A span that holds `start` to `end`."""
    return draw(st.integers(max(0, start - 2), start)), draw(st.integers(end, min(limit, end + 2)))


@settings(deadline=None, max_examples=120)
@given(data=st.data(), parts=wide_components)
def test_a_plan_moves_what_numpy_slices(data, parts):
    """Any rectangle between any two layouts: layer by layer, forth and back, slots in any order."""
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    page_size = data.draw(st.integers(1, 9))
    layer, layers = data.draw(st.tuples(st.integers(0, 3), st.integers(1, 3)))
    head, heads = data.draw(st.tuples(st.integers(0, 3), st.integers(1, 4)))
    first = data.draw(st.integers(0, page_size - 1))
    step = data.draw(st.integers(1, 3))
    count = data.draw(st.integers(1, (page_size - 1 - first) // step + 1))
    pool = make_pool(parts)

    # The host holds exactly the rectangle, the device a tile around it, with all tokens of a page.
    host_tile = Tile((layer, layer + layers), (head, head + heads), (first, step, count))
    outer_layers = data.draw(around(layer, layer + layers, 8))
    outer_heads = data.draw(around(head, head + heads, 8))
    device_tile = Tile(outer_layers, outer_heads, (0, 1, page_size))
    outer = (outer_layers[1] - outer_layers[0], outer_heads[1] - outer_heads[0])
    host_slots, device_slots = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    host_name, device_name = data.draw(layouts(heads)), data.draw(layouts(outer[1]))
    split = data.draw(st.booleans()) and not device_name.startswith("page_unified")
    host_layout = Layout.host(host_name, pool, host_tile, host_slots)
    device_layout = Layout.host(device_name, pool, device_tile, device_slots, split_buffers=split)
    host = [flat(total, random) for total in host_layout.buffer_bytes]
    device = [flat(total, random) for total in device_layout.buffer_bytes]
    plan = TransferPlan([TransferPool("kv", (host_layout, host), [(device_layout, device)])])
    assert plan.layers == layers
    assert plan.page_bytes == pool.page_bytes(host_tile)

    pages = data.draw(st.integers(1, min(host_slots, device_slots)))
    here, there = random.permutation(host_slots)[:pages], random.permutation(device_slots)[:pages]
    here[data.draw(st.integers(0, pages - 1))] = data.draw(st.sampled_from([-1, here[0]]))
    if data.draw(st.booleans()):
        there[data.draw(st.integers(0, pages - 1))] = -1
    kept = [(h, d) for h, d in zip(here, there, strict=True) if h >= 0 and d >= 0]
    heads_of = slice(head - outer_heads[0], head - outer_heads[0] + heads)
    layers_of = slice(layer - outer_layers[0], layer - outer_layers[0] + layers)

    def sides():
        host_side = host_views(host_name, parts, host_slots, layers, heads, count, host)
        device_side = host_views(device_name, parts, device_slots, *outer, page_size, device)
        return read(host_side), read(device_side), device_side

    values, expected, device_side = sides()
    for value, target, (_, _, unit) in zip(values, expected, parts, strict=True):
        tokens = slice(None) if unit == "page" else slice(first, first + count * step, step)
        for h, d in kept:
            target[d, layers_of, heads_of, tokens] = value[h]
    copied = sum(plan.restore(here, there, (one, one + 1)) for one in range(layers))
    assert copied == len(kept) * plan.page_bytes
    for found, target in zip(read(device_side), expected, strict=True):
        assert (found == target).all()

    for buffer in host:
        buffer[:] = CANARY
    host_view = host_views(host_name, parts, host_slots, layers, heads, count, host)
    once = {int(h): d for h, d in kept}
    assert plan.backup(list(once), list(once.values())) == len(once) * plan.page_bytes
    for found, source, (_, _, unit) in zip(read(host_view), expected, parts, strict=True):
        tokens = slice(None) if unit == "page" else slice(first, first + count * step, step)
        target = np.full_like(found, CANARY)
        for h, d in once.items():
            target[h] = source[d, layers_of, heads_of, tokens]
        assert (found == target).all()


def tile():
    return Tile((0, LAYERS), (0, HEADS), (0, 1, PAGE_SIZE))


def kv():
    return Pool("kv", "kv", "uint8", [Component("k", 24, "token"), Component("v", 40, "token")])


class Device:
    """One tensor for each layer and component, `[slots, page_size, heads, row]`, as an engine has them."""

    def __init__(self, slots):
        self.slots = slots
        self.rows = [
            [np.full((slots, PAGE_SIZE, HEADS, row), CANARY, np.uint8) for row in (24, 40)]
            for _ in range(LAYERS)
        ]

    def placed(self):
        for layer, tensors in enumerate(self.rows):
            one = Tile((layer, layer + 1), (0, HEADS), (0, 1, PAGE_SIZE))
            yield Layout.host("layer_first", kv(), one, self.slots, split_buffers=True), tensors

    def fill(self, value):
        for tensor in (tensor for tensors in self.rows for tensor in tensors):
            tensor[:] = value


class World:
    """Pages in a store, a host pool and device rows."""

    def __init__(self, root, pages, host_slots=None, layout="page_first"):
        self.store = Store.open(root, capacity="64MiB")
        namespace = Namespace("org/tiny", revision="r1", page_size=PAGE_SIZE)
        self.view = self.store.view(namespace, kv(), tile=tile(), layout=layout)
        self.keys = page_keys(range(pages * PAGE_SIZE), PAGE_SIZE)
        random = np.random.default_rng(7)
        source = flat(pages * self.view.page_bytes["kv"], random)
        parts = [("k", 24, "token"), ("v", 40, "token")]
        self.truth = read(host_views(layout, parts, pages, LAYERS, HEADS, PAGE_SIZE, [source]))
        assert self.view.backup(self.keys, source, range(pages)).count("stored") == pages
        slots = pages if host_slots is None else host_slots
        self.host = np.full(slots * self.view.page_bytes["kv"], CANARY, np.uint8)
        self.device = Device(pages + 1)
        host = (Layout.host(layout, kv(), tile(), slots), self.host)
        self.plan = TransferPlan([TransferPool("kv", host, list(self.device.placed()))])
        self.transfers = LayerwiseRestore(self.view, self.plan)
        self.host_slots = list(range(slots))
        self.device_slots = [pages - page for page in range(pages)]

    def start(self, **options):
        return self.transfers.start(self.keys, self.host_slots, self.device_slots, **options)

    def is_exact(self, layer):
        tensors = self.device.rows[layer]
        for tensor, value in zip(tensors, self.truth, strict=True):
            found = tensor[self.device_slots].transpose(0, 2, 1, 3)
            if not (found == value[:, layer]).all():
                return False
        return True


@pytest.fixture
def world(tmp_path):
    return World(tmp_path / "store", 4)


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_unified(1)"])
@pytest.mark.parametrize("reading", ["auto", "layers:2", "pages:3"])
@pytest.mark.parametrize("announce", ["pages", "layers"])
def test_a_restore_is_exact_layer_by_layer(tmp_path, layout, reading, announce):
    world = World(tmp_path / "store", 4, layout=layout)
    ticket = world.start(reading=reading, announce=announce)
    for layer in range(LAYERS):
        assert ticket.wait(layer, 60)
        ticket.read(layer)
        assert world.is_exact(layer)
    assert ticket.finish().all_restored
    assert ticket.wait_drained(60)
    assert ticket.finish().all_restored, "asked again"


def test_fewer_host_slots_than_pages(tmp_path):
    world = World(tmp_path / "store", 9, host_slots=2)
    assert world.start().finish().all_restored
    assert all(world.is_exact(layer) for layer in range(LAYERS))


def test_a_restore_waits_for_whoever_still_writes_the_device_rows(world):
    """Field case D18: a slow step still fills the pages when the restore is asked for."""
    for number in range(50):
        ended = HostEvent()
        world.device.fill(CANARY)
        given = ended if number % 2 else ended.handle
        ticket = world.start(device_free=[given])
        assert not ticket.is_ready(0)
        with pytest.raises(ConfigError, match="layer 0 before its load is done"):
            ticket.read(0)

        def produce(ended=ended):
            world.device.fill(0xEE)
            ended.set()

        producer = threading.Thread(target=produce)
        producer.start()
        assert ticket.finish().all_restored
        producer.join()
        assert ticket.wait(LAYERS - 1, 60)
        assert all(world.is_exact(layer) for layer in range(LAYERS)), number


def test_nothing_is_read_into_host_slots_that_are_in_use(world):
    in_use = HostEvent()
    ticket = world.start(host_free=[in_use])
    assert not ticket.wait(0, 0.05)
    assert (world.host == CANARY).all()
    in_use.set()
    assert ticket.finish().all_restored
    late = world.start(host_free=[HostEvent()], timeout=0)
    assert late.finish().count("late") == 4
    with pytest.raises(StoreClosedError, match="given up"):
        late.read(0)


def test_missing_pages_are_misses_in_every_layer(world):
    keys = [world.keys[0], bytes(31) + b"\1", *world.keys[2:]]
    world.device.fill(0x5B)
    ticket = world.transfers.start(keys, world.host_slots, world.device_slots)
    report = ticket.finish()
    assert report.flags() == [True, False, True, True]
    assert ticket.wait(LAYERS - 1, 60)
    for layer, tensors in enumerate(world.device.rows):
        for tensor, value in zip(tensors, world.truth, strict=True):
            found = tensor[world.device_slots].transpose(0, 2, 1, 3)
            assert (found[1] == 0x5B).all()
            for page in (0, 2, 3):
                assert (found[page] == value[page, layer]).all()
    nothing = world.transfers.start(keys[1:2], [0], [0])
    assert nothing.finish().count("absent") == 1
    with pytest.raises(StoreClosedError):
        nothing.wait(0, 60)


def test_a_backup_is_the_restore_in_reverse(world):
    assert world.start().finish().all_restored
    keys = page_keys(range(1000, 1000 + 4 * PAGE_SIZE), PAGE_SIZE)
    layer_ready = [HostEvent() for _ in range(LAYERS)]
    rows = [[tensor.copy() for tensor in tensors] for tensors in world.device.rows]
    world.device.fill(0xEE)
    ticket = world.transfers.start_backup(
        keys, world.host_slots, world.device_slots, depth=0, layer_ready=layer_ready
    )
    assert not ticket.wait_drained(0.02)
    for tensors, right, event in zip(world.device.rows, rows, layer_ready, strict=True):
        for tensor, value in zip(tensors, right, strict=True):
            tensor[:] = value
        event.set()
    assert ticket.finish().count("stored") == 4
    assert ticket.wait_drained(60)
    with pytest.raises(ConfigError, match="before"):
        ticket.finish()
    world.device.fill(CANARY)
    assert world.transfers.start(keys, world.host_slots, world.device_slots).finish().all_restored
    assert all(world.is_exact(layer) for layer in range(LAYERS))


def test_pools_of_one_host_page_and_pools_with_slots_of_their_own():
    """Target and indexer in one host page, a draft with slots of its own that begins with the last layer."""
    random = np.random.default_rng(3)
    page = Tile((0, 2), (0, 1), (0, 1, 4))
    target = Pool("target", "latent", "uint8", [Component("c", 20, "token")])
    indexer = Pool("indexer", "indexer", "uint8", [Component("i", 9, "page")])
    draft = Pool("draft", "draft", "uint8", [Component("k", 7, "token")])
    one = Tile((0, 1), (0, 1), (0, 1, 4))
    page_bytes = 256
    host = flat(3 * page_bytes, random)
    packed = [
        Layout.packed("page_first", target, page, 3, part_offset=16, page_bytes=page_bytes),
        Layout.packed("page_first", indexer, page, 3, part_offset=200, page_bytes=page_bytes),
    ]
    draft_host = flat(5 * draft.page_bytes(one), random)
    device = [np.zeros(5 * pool.page_bytes(t), np.uint8) for pool, t in zip_tiles(target, indexer, page)]
    draft_device = np.zeros(5 * draft.page_bytes(one), np.uint8)
    rows = [Layout.host("layer_first", pool, page, 5) for pool in (target, indexer)]
    draft_layout = Layout.host("page_first", draft, one, 5)
    plan = TransferPlan(
        [
            TransferPool("target", (packed[0], host), (rows[0], device[0])),
            TransferPool("indexer", (packed[1], host), (rows[1], device[1])),
            TransferPool("draft", (draft_layout, draft_host), (draft_layout, draft_device), first_step=1),
        ]
    )
    host_slots = {"target": [2, 0], "indexer": [2, 0], "draft": [4, 1]}
    assert plan.restore(host_slots, [3, 1], (0, 1)) == 2 * (4 * 20 + 9)
    assert not draft_device.any(), "the draft goes with the second layer"
    plan.restore(host_slots, [3, 1])
    for pool, here, there, source, found, slots in [
        (target, packed[0], rows[0], host, device[0], [2, 0]),
        (indexer, packed[1], rows[1], host, device[1], [2, 0]),
        (draft, draft_layout, draft_layout, draft_host, draft_device, [4, 1]),
    ]:
        row = pool.components[0].row_bytes
        for from_slot, to_slot in zip(slots, [3, 1], strict=True):
            for layer in range(here.tile.layers[1]):
                for token in range(4):
                    at, to = (
                        layout.offset(0, slot, layer, 0, token)[1]
                        for layout, slot in ((here, from_slot), (there, to_slot))
                    )
                    assert (source[at : at + row] == found[to : to + row]).all()
    with pytest.raises(ConfigError, match="draft"):
        plan.restore({"target": [0], "indexer": [0]}, [0])


def zip_tiles(*pools_and_tile):
    *pools, one = pools_and_tile
    return [(pool, one) for pool in pools]


def test_events_and_addresses_are_integers(world):
    layout = Layout.host("page_first", kv(), tile(), 2)
    memory = [np.arange(layout.buffer_bytes[0], dtype=np.uint8), np.zeros(layout.buffer_bytes[0], np.uint8)]
    sides = [(layout, (one.ctypes.data, one.nbytes)) for one in memory]
    plan = TransferPlan([TransferPool("kv", *sides)], threads=2)
    events, before = [HostEvent() for _ in range(LAYERS)], HostEvent()
    waiting = threading.Thread(
        target=plan.restore,
        args=([0, 1], [1, 0]),
        kwargs={"after": [before.handle], "events": [event.handle for event in events]},
    )
    waiting.start()
    assert not events[0].wait(0.02)
    before.set()
    waiting.join()
    assert all(event.is_set for event in events)
    parts = [("k", 24, "token"), ("v", 40, "token")]
    here, there = (
        read(host_views("page_first", parts, 2, LAYERS, HEADS, PAGE_SIZE, [one])) for one in memory
    )
    assert all((a == b[::-1]).all() for a, b in zip(here, there, strict=True))

    gone = HostEvent().handle
    with pytest.raises(ConfigError, match=f"live host event, found {gone}"):
        plan.restore([0], [1], after=[gone])
    with pytest.raises(ConfigError, match="one for each of 3 layers, found 1"):
        plan.restore([0], [1], events=[before])
    with pytest.raises(UnsupportedError, match="stream 0"):
        plan.restore([0], [1], stream=1)
    device = TransferPlan([TransferPool("kv", sides[0], (layout, (1 << 40, layout.buffer_bytes[0], "cuda")))])
    with pytest.raises(UnsupportedError, match="memory of a device"):
        device.restore([0], [1])


def test_what_does_not_fit_is_refused(world):
    layout = Layout.host("page_first", kv(), tile(), 2)
    memory = np.zeros(layout.buffer_bytes[0], np.uint8)
    good = (layout, memory)
    with pytest.raises(GeometryError, match="bytes in buffer 0 of the host pool"):
        TransferPlan([TransferPool("kv", (layout, memory[:-1]), good)])
    half = Layout.host("page_first", kv(), Tile((0, 1), (0, HEADS), (0, 1, PAGE_SIZE)), 2)
    with pytest.raises(GeometryError, match="none that hold them"):
        TransferPlan([TransferPool("kv", good, (half, memory))])
    with pytest.raises(ConfigError, match="a Layout and its memory"):
        TransferPool("kv", memory, good)
    with pytest.raises(ConfigError, match="address"):
        TransferPool("kv", (layout, (0, 10)), good)
    with pytest.raises(ConfigError, match="at least one pool"):
        TransferPlan([])
    with pytest.raises(ConfigError, match="threads"):
        TransferPlan([TransferPool("kv", good, good)], threads=0)
    plan = TransferPlan([TransferPool("kv", good, (layout, np.zeros_like(memory)))])
    for here, there in [([2], [0]), ([0], [2]), ([-2], [0]), ([0, 1], [0]), ([0, 1], [1, 1])]:
        with pytest.raises(GeometryError, match='pool "kv"'):
            plan.restore(here, there)
    with pytest.raises(ConfigError, match="range within 0 to 3"):
        plan.restore([0], [1], (0, 4))
    read_only = memory.copy()
    read_only.flags.writeable = False
    frozen = TransferPlan([TransferPool("kv", good, (layout, read_only))])
    with pytest.raises(GeometryError, match="read-only"):
        frozen.restore([0], [1])
    other = Layout.host("page_head", kv(), tile(), 2)
    with pytest.raises(GeometryError, match="laid out otherwise"):
        LayerwiseRestore(world.view, TransferPlan([TransferPool("kv", (other, memory), good)]))
    with pytest.raises(ConfigError, match="pools of the view"):
        LayerwiseRestore(world.view, TransferPlan([TransferPool("other", good, good)]))
    for options, words in [
        ({"reading": "layers"}, "reading"),
        ({"reading": "layers:0"}, "at least one"),
        ({"announce": "soon"}, "announce"),
        ({"timeout": float("nan")}, "timeout"),
    ]:
        with pytest.raises(ConfigError, match=words):
            world.start(**options)


def test_the_memory_of_a_plan_is_held():
    layout = Layout.host("page_first", kv(), tile(), 1)

    def make():
        memory = [np.full(layout.buffer_bytes[0], value, np.uint8) for value in (3, 4)]
        return TransferPlan([TransferPool("kv", (layout, memory[0]), (layout, memory[1]))]), memory[1][:1]

    plan, view = make()
    assert plan.restore([0], [0]) == layout.buffer_bytes[0]
    assert view[0] == 3
