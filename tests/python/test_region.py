"""Memory enters checked, is not copied, and lives as long as something may use it."""

import gc
import mmap
import sys
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from hicache_store import (
    ConfigError,
    GeometryError,
    HitPolicy,
    Namespace,
    Pool,
    PoolView,
    Region,
    Store,
    Tile,
    UnsupportedError,
    page_keys,
)

PAGE_BYTES = 2 * 2 * 8  # components x tokens x row bytes
PAGES = 3
BYTES = PAGES * PAGE_BYTES
KEYS = page_keys(range(2 * PAGES), 2)
SLOTS = list(range(PAGES))
NAMESPACE = Namespace("m", revision="r", page_size=2)


@pytest.fixture
def store(tmp_path):
    with Store.open(tmp_path / "store", capacity="16MiB") as store:
        yield store


def pool(name="kv"):
    return Pool(name, "kv", "uint8", {"k": 8, "v": 8})


@pytest.fixture
def view(store):
    return store.view(NAMESPACE, pool(), tile=Tile((0, 1), (0, 1)))


def content():
    return np.arange(BYTES, dtype=np.uint8)


class FakeTensor:
    """What the store needs of a torch tensor, over an array."""

    def __init__(self, array, device="cpu"):
        self.array, self.device, self.nbytes, self.shape = (
            array,
            SimpleNamespace(type=device),
            array.nbytes,
            array.shape,
        )

    def data_ptr(self):
        return self.array.ctypes.data

    def is_contiguous(self):
        return self.array.flags.c_contiguous


def anonymous_map(data):
    memory = mmap.mmap(-1, len(data))
    memory[:] = data
    return memory


@pytest.mark.parametrize(
    ("wrap", "writable"),
    [
        (lambda data: np.frombuffer(bytearray(data), np.uint8), True),
        (lambda data: np.frombuffer(bytearray(data), np.uint16).reshape(3, -1), True),
        (lambda data: np.frombuffer(data, np.float32), False),
        (bytes, False),
        (bytearray, True),
        (lambda data: memoryview(bytearray(data)), True),
        (lambda data: memoryview(bytearray(data)).cast("B", (3, 32)), True),
        (anonymous_map, True),
        (lambda data: FakeTensor(np.frombuffer(bytearray(data), np.uint8)), True),
    ],
    ids=[
        "array",
        "shaped",
        "read-only",
        "bytes",
        "bytearray",
        "memoryview",
        "shaped-memoryview",
        "mmap",
        "tensor",
    ],
)
def test_buffers_of_every_kind(view, wrap, writable):
    source = wrap(content().tobytes())
    region = Region(source)
    assert (region.nbytes, region.writable) == (BYTES, writable)
    assert str(BYTES) in repr(region)
    assert view.backup(KEYS, source, SLOTS).count("stored") == PAGES
    target = wrap(bytes(BYTES))
    if not writable:
        with pytest.raises(GeometryError, match="read-only"):
            view.restore(KEYS, target, SLOTS)
        return
    assert view.restore(KEYS, target, SLOTS).all_restored
    restored = target.array if isinstance(target, FakeTensor) else target
    assert bytes(memoryview(restored).cast("B")) == content().tobytes()


def test_region_is_no_copy(view):
    target = np.zeros(BYTES, np.uint8)
    region = Region(target)
    view.backup(KEYS, Region(content()), SLOTS)
    assert view.restore(KEYS, region, SLOTS).all_restored
    assert (target == content()).all()


def test_region_holds_its_buffer():
    array = np.zeros(64, np.uint8)
    alive = weakref.ref(array)
    region = Region(array)
    del array
    gc.collect()
    assert alive() is not None
    del region
    gc.collect()
    assert alive() is None


def test_wrapped_bytearray_cannot_move():
    memory = bytearray(64)
    region = Region(memory)
    with pytest.raises(BufferError):
        memory.extend(b"more")
    del region
    memory.extend(b"more")


def test_calls_let_go_of_their_buffers(view):
    array = content()
    before = sys.getrefcount(array)
    view.backup(KEYS, array, SLOTS)
    view.restore(KEYS, array, SLOTS)
    assert sys.getrefcount(array) == before


def test_a_buffer_for_each_component(view):
    data = content()
    half = BYTES // 2
    view.backup(KEYS, [data[:half].copy(), data[half:].copy()], SLOTS)
    parts = (np.zeros(half, np.uint8), Region(np.zeros(half, np.uint8)))
    assert view.restore(KEYS, parts, SLOTS).all_restored
    whole = np.zeros(BYTES, np.uint8)
    assert view.restore(KEYS, whole, SLOTS).all_restored
    assert (parts[0] == whole[:half]).all()
    assert (whole == data).all()


@pytest.mark.parametrize(
    ("memory", "error", "part"),
    [
        (np.zeros((BYTES, 2), np.uint8)[:, 0], GeometryError, "C-contiguous"),
        (np.zeros((4, 8), np.uint8, order="F"), GeometryError, "C-contiguous"),
        (np.array([None] * 12), GeometryError, "Python objects"),
        (np.zeros(4, [("a", "u1"), ("b", "O")]), GeometryError, "Python objects"),
        (memoryview(bytes(BYTES))[::2], GeometryError, "contiguous"),
        (FakeTensor(np.zeros((4, 8), np.uint8)[:, :4]), GeometryError, "C-contiguous"),
        (FakeTensor(np.zeros(8, np.uint8), "cuda"), UnsupportedError, "cuda"),
        (None, GeometryError, "NoneType"),
        (4096, GeometryError, "type int"),
        ("text", GeometryError, "type str"),
    ],
    ids=[
        "strided",
        "fortran",
        "objects",
        "objects-inside",
        "strided-memoryview",
        "strided-tensor",
        "device-tensor",
        "none",
        "address",
        "text",
    ],
)
def test_what_is_no_host_memory_is_refused(memory, error, part):
    with pytest.raises(error, match=part):
        Region(memory)


@pytest.mark.parametrize("size", [0, PAGE_BYTES - 1, PAGE_BYTES + 1, PAGE_BYTES])
def test_memory_of_another_size_is_refused(view, size):
    with pytest.raises(GeometryError):
        view.restore(KEYS, bytearray(size), SLOTS)


@pytest.mark.parametrize("slots", [[0, 1], [0, 1, 3], [0, 1, -2], [0, 1, 1], [0, 1, 2**63 - 1]])
def test_slots_that_do_not_fit_are_refused(view, slots):
    with pytest.raises(GeometryError):
        view.backup(KEYS, content(), slots)


@pytest.mark.parametrize(
    "slots", [[0, 1, 2**63], [0, 1, "2"], [0, 1, 2.0], np.arange(3.0), "012", {0, 1, 2}, 3]
)
def test_slots_that_are_no_integers_are_refused(view, slots):
    with pytest.raises(ConfigError, match="slots"):
        view.backup(KEYS, content(), slots)


@pytest.mark.parametrize(
    "make", [tuple, np.array, lambda slots: np.array(slots, np.int32), lambda slots: np.array(slots, ">i8")]
)
def test_slots_of_every_kind(view, make):
    assert view.backup(KEYS, content(), make([2, 0, 1])).count("stored") == PAGES
    target = np.zeros((2, PAGES, 16), np.uint8)
    assert view.restore(KEYS[:1], target, make([2])).all_restored
    assert (target[:, 2] == content().reshape(target.shape)[:, 2]).all()
    assert not target[:, :2].any()


def test_no_slot_means_nothing_is_wanted(view):
    view.backup(KEYS, content(), SLOTS)
    target = np.full(BYTES, 0xA5, np.uint8)
    view.restore(KEYS, target, np.array([-1, -1, -1]))
    assert (target == 0xA5).all()


@pytest.fixture
def two_pools(store):
    tile = Tile((0, 1), (0, 1))
    return store.view(NAMESPACE, [PoolView(pool("a"), tile), PoolView(pool("b"), tile)])


def test_pools_have_memory_and_slots_by_name(two_pools):
    regions = {"b": content()[::-1].copy(), "a": content()}
    two_pools.backup(KEYS, regions, {"a": SLOTS, "b": [2, 1, 0]})
    targets = {name: np.zeros(BYTES, np.uint8) for name in "ab"}
    assert two_pools.restore(KEYS, targets, {"a": SLOTS, "b": SLOTS}).all_restored
    assert (targets["a"] == regions["a"]).all()
    shape = (2, PAGES, 16)
    assert (targets["b"].reshape(shape) == regions["b"].reshape(shape)[:, ::-1]).all()


@pytest.mark.parametrize(
    ("region", "slots", "part"),
    [
        (content(), {"a": SLOTS, "b": SLOTS}, "region: expected a dict with the pools a, b"),
        ({"a": content(), "b": content()}, SLOTS, "slots: expected a dict"),
        ({"a": content()}, {"a": SLOTS, "b": SLOTS}, 'none for "b"'),
        ({"a": content(), "b": content(), "c": content()}, {"a": SLOTS, "b": SLOTS}, "key 'c'"),
        ({"a": content(), "b": content()}, {"a": SLOTS, "b": [0, 1, None]}, r'slots\["b"\]\[2\]'),
    ],
)
def test_memory_by_name_names_every_pool(two_pools, region, slots, part):
    with pytest.raises(ConfigError, match=part):
        two_pools.backup(KEYS, region, slots)


def test_packed_pools_share_host_pages(store):
    tile, host_page = Tile((0, 1), (0, 1)), 3 * PAGE_BYTES
    parts = [
        PoolView(pool("a"), tile, packed=(0, host_page)),
        PoolView(pool("b"), tile, packed=(40, host_page)),
    ]
    view = store.view(NAMESPACE, parts)
    host = np.random.default_rng(1).integers(0, 256, (PAGES, host_page), np.uint8)
    view.backup(KEYS, host, SLOTS)
    target = np.full_like(host, 0xA5)
    assert view.restore(KEYS, target, SLOTS).all_restored
    for start in (0, 40):
        assert (target[:, start : start + PAGE_BYTES] == host[:, start : start + PAGE_BYTES]).all()
    assert (target[:, PAGE_BYTES:40] == 0xA5).all()
    assert (target[:, 40 + PAGE_BYTES :] == 0xA5).all()


def test_page_bytes_of_the_engine_are_compared(store):
    spelled_out = Tile((0, 1), (0, 1)).of_page(2)
    PoolView(pool(), spelled_out, page_bytes=PAGE_BYTES)
    with pytest.raises(GeometryError, match=f"{PAGE_BYTES + 1} bytes.*computed {PAGE_BYTES}"):
        PoolView(pool(), spelled_out, page_bytes=PAGE_BYTES + 1)
    late = PoolView(pool(), Tile((0, 1), (0, 1)), page_bytes=PAGE_BYTES + 1, policy=HitPolicy.all_pages())
    with pytest.raises(GeometryError, match=f"{PAGE_BYTES + 1} bytes.*computed {PAGE_BYTES}"):
        store.view(NAMESPACE, late)
