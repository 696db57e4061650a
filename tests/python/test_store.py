"""The store from Python: what is backed up is matched and restored, in words and numbers that Python has."""

import logging
import pickle
import threading

import numpy as np
import pytest
from hicache_store import (
    Component,
    ConfigError,
    GeometryError,
    HitPolicy,
    Namespace,
    NamespaceError,
    Pool,
    PoolView,
    Store,
    StoreClosedError,
    Tile,
    UnsupportedError,
    page_keys,
)

PAGE_SIZE = 4
NAMESPACE = Namespace("org/tiny", revision="r1", page_size=PAGE_SIZE)
POOL = Pool("kv", "kv", "bfloat16", components={"k": 16, "v": 16})
TILE = Tile(layers=(0, 2), heads=(0, 2))
PAGE_BYTES = 512


@pytest.fixture
def store(tmp_path):
    with Store.open(tmp_path / "store", capacity="64MiB") as store:
        yield store


@pytest.fixture
def view(store):
    return store.view(NAMESPACE, POOL, tile=TILE)


def keys(pages, chain="chain"):
    return page_keys(range(pages * PAGE_SIZE), PAGE_SIZE, extra_key=chain)


def content(pages, seed=0):
    """A host pool, uint16 `[2, pages, tokens, layers, heads, 8]`: layout page_first."""
    shape = (2, pages, PAGE_SIZE, 2, 2, 8)
    return np.random.default_rng(seed).integers(0, 2**16, shape, np.uint16)


def test_pages_come_back_here_and_after_reopening(tmp_path):
    source, target = content(5), np.zeros_like(content(5))
    with Store.open(tmp_path / "store", capacity="64MiB") as store:
        view = store.view(NAMESPACE, POOL, tile=TILE)
        assert view.match(keys(5)).pages == 0
        report = view.backup(keys(5), source, range(5), depth=0)
        assert report.outcomes == ["stored"] * 5
        assert (len(report), report.raw_bytes, report.reason) == (5, 5 * PAGE_BYTES, None)
        assert report.stored_bytes >= report.raw_bytes
        assert view.backup(keys(5), source, range(5)).outcomes == ["present"] * 5
    with Store.open(str(tmp_path / "store")) as store:
        view = store.view(NAMESPACE, POOL, tile=TILE)
        match = view.match([*keys(5), bytes(32)])
        assert (match.pages, match.legal, match.hits) == (5, [1, 2, 3, 4, 5], {"kv": 5})
        assert match.limited_by == "kv: page 5 absent"
        report = view.restore([bytes(32), *keys(5)], target, [-1, 4, 3, 2, 1, 0])
        assert report.outcomes[1:] == ["restored"] * 5
        assert (target[:, ::-1] == source).all()


def test_the_shorter_pool_limits_the_prefix(store):
    """Of 40 pages the draft pool lacks page 37: 37 pages are usable, and the answer says why."""
    draft = Pool("draft", "draft", "bfloat16", {"k": 16, "v": 16})
    view = store.view(NAMESPACE, [PoolView(POOL, TILE), PoolView(draft, Tile((0, 1), (0, 2)))])
    slots = {"kv": range(40), "draft": [page if page != 37 else -1 for page in range(40)]}
    host = {"kv": content(40), "draft": content(40)[:, :, :, :1].copy()}
    view.backup(keys(40), host, slots, depth=0)
    match = view.match(keys(40))
    assert (match.pages, match.limited_by) == (37, "draft: page 37 absent")
    assert match.hits == {"kv": 40, "draft": 37}
    assert match.legal == list(range(1, 38))

    optional = PoolView(draft, Tile((0, 1), (0, 2)), required=False)
    match = store.view(NAMESPACE, [PoolView(POOL, TILE), optional]).match(keys(40))
    assert (match.pages, match.limited_by, match.hits["draft"]) == (40, None, 37)


def test_a_state_pool_makes_some_lengths_legal(store):
    """State is kept for pages 3 and 7 alone: only prefixes that end there can go on."""
    state = Pool("state", "state", "uint8", [Component("conv", 24, "page")])
    policy = HitPolicy.trailing_pages(1)
    view = store.view(NAMESPACE, [PoolView(POOL, TILE), PoolView(state, Tile((0, 1), (0, 1)), policy=policy)])
    host = {"kv": content(10), "state": np.arange(48, dtype=np.uint8)}
    slots = {"kv": range(10), "state": [{3: 0, 7: 1}.get(page, -1) for page in range(10)]}
    view.backup(keys(10), host, slots, depth=0)
    match = view.match(keys(10))
    assert (match.pages, match.legal) == (8, [4, 8])
    assert match.limited_by.startswith("state: ")
    assert view.match(keys(5)).legal == [4]
    target = {"kv": np.zeros_like(host["kv"]), "state": np.zeros(24, np.uint8)}
    report = view.restore(keys(8), target, {"kv": range(2, 10), "state": [-1] * 7 + [0]})
    assert report.all_restored
    assert (target["state"] == host["state"][24:]).all()


def test_reports_count_and_speak(view):
    view.backup(keys(2), content(2), range(2))
    report = view.restore([*keys(2), bytes(32)], content(3), range(3))
    assert report.outcomes is report.outcomes
    assert report.outcomes == ["restored", "restored", "absent"]
    assert (report.count("restored"), report.count("absent"), report.count("damaged")) == (2, 1, 0)
    assert (len(report), report.bytes, report.all_restored) == (3, 2 * PAGE_BYTES, False)
    assert repr(report) == "<RestoreReport: 2 restored, 1 absent; 1024 bytes>"
    with pytest.raises(ConfigError, match=r"unknown outcome \"stored\".*foreign"):
        report.count("stored")
    backup = view.backup([], content(1), [])
    assert (len(backup), backup.outcomes) == (0, [])
    assert "no pages" in repr(backup)
    with pytest.raises(ConfigError, match="refused"):
        backup.count("restored")
    assert repr(view.match(keys(3))) == "Match(pages=2, limited_by='kv: page 2 absent', hits={'kv': 2})"


def test_a_timeout_leaves_pages_late(view):
    view.backup(keys(4), content(4), range(4))
    target = np.full_like(content(4), 0xA5A5)
    for timeout in (0, 0.0, -1.5):
        assert view.restore(keys(4), target, range(4), timeout=timeout).outcomes == ["late"] * 4
    assert (target == 0xA5A5).all()
    for timeout in (60, 1e30, float("inf"), None):
        assert view.restore(keys(4), target, range(4), timeout=timeout).all_restored
    with pytest.raises(ConfigError, match="timeout is not a number"):
        view.restore(keys(4), target, range(4), timeout=float("nan"))


@pytest.mark.parametrize("codec", ["none", "zstd", "zstd:1", "zstd:19"])
def test_codecs_are_read_by_every_view(store, view, codec):
    source = np.repeat(content(4)[..., :1], 8, axis=-1)
    writer = store.view(NAMESPACE, POOL, tile=TILE, codec=codec)
    report = writer.backup(keys(4, codec), source, range(4))
    assert report.count("stored") == 4
    assert (report.stored_bytes < report.raw_bytes) == (codec != "none")
    target = np.zeros_like(source)
    assert view.restore(keys(4, codec), target, range(4)).all_restored
    assert (target == source).all()


@pytest.mark.parametrize("codec", ["", "lz4", "zstd:", "zstd:x", "zstd:0", "zstd:23", "zstd:-1", "ZSTD"])
def test_unknown_codecs_are_refused(store, codec):
    with pytest.raises(ConfigError):
        store.view(NAMESPACE, POOL, tile=TILE, codec=codec)


@pytest.mark.parametrize(
    ("capacity", "size"),
    [
        (16 << 20, 16 << 20),
        ("16MiB", 16 << 20),
        ("1.5GiB", 3 << 29),
        ("20 MB", 20_000_000),
        ("2TiB", 2 << 40),
    ],
)
def test_capacity_in_bytes_or_words(tmp_path, capacity, size):
    with Store.open(tmp_path / "store", capacity) as store:
        assert store.stats()["capacity_bytes"] == size


@pytest.mark.parametrize("capacity", ["", "much", "-5GiB", "5XiB", "1MiB", 0, -1, 1.5, b"1GiB", []])
def test_impossible_capacities_are_refused(tmp_path, capacity):
    with pytest.raises(ConfigError, match="capacity"):
        Store.open(tmp_path / "store", capacity=capacity)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    "option", [{"io_mode": "fast"}, {"io_threads": 0}, {"io_threads": -1}, {"io_threads": 257}]
)
def test_bad_options_are_refused(tmp_path, option):
    with pytest.raises(ConfigError):
        Store.open(tmp_path / "store", capacity="16MiB", **option)


@pytest.mark.parametrize(
    "option", [{"io_mode": "direct"}, {"io_threads": 1}, {"durable": True}, {"verify": False}]
)
def test_options_change_no_bytes(tmp_path, option):
    with Store.open(tmp_path / "store", capacity="16MiB", **option) as store:
        view = store.view(NAMESPACE, POOL, tile=TILE)
        view.backup(keys(4), content(4), range(4))
        target = np.zeros_like(content(4))
        assert view.restore(keys(4), target, range(4)).all_restored
        assert (target == content(4)).all()


def test_stats_say_what_the_store_is_and_did(store, view, tmp_path):
    view.backup(keys(3), content(3), range(3))
    view.match(keys(4))
    view.restore(keys(4), content(4), range(4))
    stats = store.stats()
    assert set(stats) == {"path", "capacity_bytes", "used_bytes", "io", "process", "device", "counters"}
    assert stats["path"] == str(store.path) == str(tmp_path / "store")
    assert stats["capacity_bytes"] == 64 << 20
    assert 3 * PAGE_BYTES <= stats["used_bytes"] <= 64 << 20
    assert len(bytes.fromhex(stats["process"])) == 16
    counters = stats["counters"]
    assert (
        counters["backup_stored_pages"]
        == counters["match_hit_pages"]
        == counters["restore_restored_pages"]
        == 3
    )
    assert (counters["match_asked_pages"], counters["restore_absent_pages"]) == (4, 1)


def test_view_says_what_it_is(view):
    assert (view.namespace, view.fingerprint) == (NAMESPACE, NAMESPACE.fingerprint)
    assert (view.pool_names, view.page_bytes) == (["kv"], {"kv": PAGE_BYTES})
    assert view.indexed_objects == 0
    view.backup(keys(3), content(3), range(3))
    assert view.indexed_objects == 3
    assert NAMESPACE.fingerprint in repr(view)


def test_clear_forgets_the_namespace_only(store, view):
    other = store.view(Namespace("org/tiny", revision="r2", page_size=PAGE_SIZE), POOL, tile=TILE)
    for one in (view, other):
        one.backup(keys(3), content(3), range(3))
    assert view.clear() == 3
    assert (view.match(keys(3)).pages, other.match(keys(3)).pages) == (0, 3)


def test_after_close_every_call_says_so(store, view):
    store.close()
    memory, slots = content(1), [0]
    for call in (
        lambda: view.match(keys(1)),
        lambda: view.backup(keys(1), memory, slots),
        lambda: view.restore(keys(1), memory, slots),
        view.clear,
        lambda: store.view(NAMESPACE, POOL, tile=TILE),
    ):
        with pytest.raises(StoreClosedError):
            call()


def test_with_closes_after_an_exception(tmp_path):
    with pytest.raises(KeyError), Store.open(tmp_path / "store", capacity="16MiB") as store:
        raise KeyError
    with pytest.raises(StoreClosedError):
        store.view(NAMESPACE, POOL, tile=TILE)


def test_read_only_serves_and_refuses_to_write(store, view, tmp_path):
    view.backup(keys(2), content(2), range(2))
    with Store.open(tmp_path / "store", read_only=True) as reader:
        there = reader.view(NAMESPACE, POOL, tile=TILE)
        assert there.restore(keys(2), np.zeros_like(content(2)), range(2)).all_restored
        with pytest.raises(UnsupportedError):
            there.backup(keys(2), content(2), range(2))


@pytest.mark.parametrize(
    ("pools", "options", "part"),
    [
        (POOL, {}, "expected tile"),
        (PoolView(POOL, TILE), {"tile": TILE}, "inside each PoolView"),
        ([PoolView(POOL, TILE)], {"layout": "page_first"}, "inside each PoolView"),
        ([], {}, "at least one pool"),
        ([PoolView(POOL, TILE)] * 2, {}, "named twice"),
        ([POOL], {}, r"pools\[0\]: expected PoolView"),
        (None, {}, "NoneType"),
        (POOL, {"tile": TILE, "layout": "page_last"}, "unknown layout"),
        (POOL, {"tile": TILE, "layout": "page_unified"}, "heads of a group"),
    ],
)
def test_views_that_make_no_sense_are_refused(store, pools, options, part):
    with pytest.raises(ConfigError, match=part):
        store.view(NAMESPACE, pools, **options)


def test_repeated_keys_are_refused(view):
    with pytest.raises(ConfigError):
        view.backup([bytes(32)] * 2, content(2), range(2))


def test_a_tile_outside_the_page_is_refused(store):
    with pytest.raises(GeometryError, match="4 tokens"):
        store.view(NAMESPACE, POOL, tile=Tile((0, 1), (0, 1), (2, 1, 3)))


def test_notices_go_to_the_log(store, caplog):
    with caplog.at_level(logging.INFO, "hicache_store"):
        unversioned = Namespace("100%s", revision=Namespace.UNVERSIONED, page_size=PAGE_SIZE)
        store.view(unversioned, POOL, tile=TILE)
    assert [(record.name, record.levelname) for record in caplog.records] == [
        ("hicache_store", "INFO"),
        ("hicache_store", "WARNING"),
    ]
    assert "100%s at revision unversioned" in caplog.messages[0]
    assert "no weights revision" in caplog.messages[1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_broken_log_breaks_no_call(store):
    def refuse(record):
        raise RuntimeError(record.getMessage())

    logger = logging.getLogger("hicache_store")
    logger.addFilter(refuse)
    try:
        unversioned = Namespace("m", revision=Namespace.UNVERSIONED, page_size=PAGE_SIZE)
        assert store.view(unversioned, POOL, tile=TILE).match(keys(1)).pages == 0
    finally:
        logger.removeFilter(refuse)


def test_threads_share_a_view(view):
    failures = []

    def work(number):
        try:
            source = content(8, number)
            for turn in range(5):
                chain = keys(8, f"{number} {turn}")
                assert view.backup(chain, source, range(8), depth=0).count("stored") == 8
                target = np.zeros_like(source)
                assert view.match(chain).pages == 8
                assert view.restore(chain, target, range(8)).all_restored
                assert (target == source).all()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


VALUES = [
    NAMESPACE,
    Namespace("org/tiny", revision="r1", page_size=PAGE_SIZE, salt="it's"),
    POOL,
    Pool(
        "mla", "latent", "uint8", [Component("c", 8), Component("s", 3, "page", "int8")], row_format="packed"
    ),
    TILE,
    Tile((1, 2), (3, 4), (0, 2, 2)),
    Component("scale", 4, "page", "float32"),
    HitPolicy.all_pages(),
    HitPolicy.trailing_pages(3),
    HitPolicy.block_groups(8, 2),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_are_values(value):
    names = {kind.__name__: kind for kind in (Namespace, Pool, Tile, Component, HitPolicy)}
    again = eval(repr(value), names)  # noqa: S307
    assert again == value
    assert hash(again) == hash(value)
    assert [other == value for other in VALUES].count(True) == 1
    assert value != repr(value)
    with pytest.raises(AttributeError):
        value.name = "other"


@pytest.mark.parametrize("value", VALUES[:4], ids=repr)
def test_identities_are_written_and_read(value):
    kind = type(value)
    assert kind.from_json(value.to_json()) == value
    assert kind.from_canonical_bytes(value.canonical_bytes()) == value
    assert pickle.loads(pickle.dumps(value)) == value  # noqa: S301
    assert len(bytes.fromhex(value.fingerprint)) == 16
    assert value.differences(value) == []
    with pytest.raises(NamespaceError, match="JSON"):
        kind.from_json("{")


def test_differences_name_the_field():
    other = Namespace("org/tiny", revision="r2", page_size=8)
    assert NAMESPACE.differences(other) == [("revision", "r1", "r2"), ("page_size", "4", "8")]
    wide = Pool("kv", "kv", "bfloat16", {"k": 16, "v": 32})
    assert POOL.differences(wide) == [("components[1].row_bytes", "16", "32")]
    assert POOL.fingerprint != wide.fingerprint


def test_tiles_are_cut_and_compared():
    whole = TILE.of_page(4)
    assert (whole.layers, whole.heads, whole.tokens) == ((0, 2), (0, 2), (0, 1, 4))
    odd = Tile((1, 3), (0, 1), (1, 2, 2))
    assert whole.intersect(odd) == Tile((1, 2), (0, 1), (1, 2, 2))
    assert whole.intersect(Tile((2, 3), (0, 1), (0, 1, 4))) is None
    assert whole.contains(Tile((1, 2), (0, 1), (1, 2, 2)))
    assert not whole.contains(odd)
    assert POOL.page_bytes(whole) == PAGE_BYTES
    with pytest.raises(ConfigError, match="of_page"):
        POOL.page_bytes(TILE)


@pytest.mark.parametrize(
    "arguments", [((0, 0), (0, 1)), ((2, 1), (0, 1)), ((0, 1), (0, 65_537)), ((0, 1), (0, 1), (0, 0, 2))]
)
def test_impossible_tiles_are_refused(arguments):
    with pytest.raises(GeometryError):
        Tile(*arguments)


@pytest.mark.parametrize(
    ("components", "part"),
    [
        ({"k": -1}, r'components\["k"\] is -1'),
        ([("k", 16)], r"components\[0\].*tuple"),
        (16, "int"),
        (None, "NoneType"),
    ],
)
def test_impossible_components_are_refused(components, part):
    with pytest.raises(ConfigError, match=part):
        Pool("kv", "kv", "bfloat16", components)
