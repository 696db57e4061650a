"""Errors: a class for each kind, also the built-in that a caller would catch; facts, not text to parse."""

import copy
import errno
import os
import pickle
import re
from pathlib import Path

import pytest
from hicache_store import (
    ConfigError,
    CorruptError,
    DeviceError,
    FormatVersionError,
    GeometryError,
    HiCacheStoreError,
    HostPool,
    LeaseError,
    Namespace,
    NamespaceError,
    Pool,
    PoolExhaustedError,
    ResourceLimitError,
    Store,
    StoreClosedError,
    StoreIOError,
    Tile,
    UnsupportedError,
    _hicache_store,
    exceptions,
)

BUILT_IN = {
    ConfigError: ValueError,
    NamespaceError: ValueError,
    GeometryError: ValueError,
    CorruptError: Exception,
    FormatVersionError: Exception,
    StoreIOError: OSError,
    StoreClosedError: RuntimeError,
    UnsupportedError: NotImplementedError,
    PoolExhaustedError: Exception,
    LeaseError: BufferError,
    ResourceLimitError: OSError,
    DeviceError: RuntimeError,
}


def test_kinds_and_classes_are_equal_in_number_and_name():
    assert list(exceptions.BY_KIND) == _hicache_store._error_kinds()
    assert set(exceptions.BY_KIND.values()) == set(BUILT_IN)
    assert {*exceptions.__all__} == {"HiCacheStoreError", *(error.__name__ for error in BUILT_IN)}
    for kind, error in exceptions.BY_KIND.items():
        assert error.kind == kind


def test_the_table_in_the_documentation_is_complete():
    table = (Path(__file__).parents[2] / "docs" / "errors.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (?:`(\w+)`)? ?\|", table, re.MULTILINE)
    classes = exceptions.BY_KIND.items()
    built_in = {error: "" if base is Exception else base.__name__ for error, base in BUILT_IN.items()}
    assert rows == [(kind, error.__name__, built_in[error]) for kind, error in classes]


@pytest.mark.parametrize("error", BUILT_IN, ids=lambda error: error.__name__)
def test_class_is_also_a_built_in_and_pickles(error):
    assert issubclass(error, HiCacheStoreError)
    assert issubclass(error, BUILT_IN[error])
    made = error("no room for 5 bytes", {"path": "/x"}, errno.ENOSPC, "/x")
    for one in (made, copy.copy(made), pickle.loads(pickle.dumps(made))):  # noqa: S301
        assert type(one) is error
        assert str(one) == "no room for 5 bytes"
        assert one.args == ("no room for 5 bytes",)
        assert (one.context, one.errno, one.filename) == ({"path": "/x"}, errno.ENOSPC, "/x")


def test_facts_are_optional():
    bare = StoreIOError("cannot read")
    assert (bare.context, bare.errno, bare.filename, bare.strerror) == ({}, None, None, None)


def test_system_errors_keep_number_and_file(tmp_path):
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "store"
    with pytest.raises(StoreIOError, match="Not a directory") as caught:
        Store.open(path, capacity="16MiB")
    error = caught.value
    assert (error.errno, error.strerror) == (errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    assert error.filename == error.context["path"] == str(path)
    with pytest.raises(OSError, match="Not a directory"):
        Store.open(path, capacity="16MiB")


def small(store):
    pool = Pool("kv", "kv", "uint8", {"k": 4})
    return store.view(Namespace("m", revision="r", page_size=2), pool, tile=Tile((0, 1), (0, 1)))


def raise_config(_):
    Pool("kv", "keys", "uint8", {"k": 4})


def raise_namespace(_):
    Namespace("", revision="r", page_size=2)


def raise_geometry(_):
    Tile((1, 1), (0, 1))


def raise_corrupt(_):
    Namespace.from_canonical_bytes(b"nothing of the kind")


def raise_unsupported_version(_):
    text = Namespace("m", revision="r", page_size=2).to_json()
    Namespace.from_json(text.replace('"schema_version":1', '"schema_version":2'))


def raise_io(path):
    (path / "file").touch()
    Store.open(path / "file" / "store")


def raise_closed(path):
    store = Store.open(path / "store", capacity="16MiB")
    view = small(store)
    store.close()
    store.close()
    view.match([bytes(32)])


def raise_pool_exhausted(_):
    HostPool(1, 64, register="off").lease(2)


def raise_lease(_):
    pool = HostPool(1, 64, register="off")
    lease = pool.lease(1)
    pool.release(lease)
    pool.release(lease)


def raise_limit(_):
    HostPool(1 << 20, 1 << 30, register="off")


def raise_unsupported(path):
    Store.open(path / "store", capacity="16MiB").close()
    small(Store.open(path / "store", read_only=True)).clear()


# Errors of a device need a driver: test_host_pool_driver.py has one that stands in.
@pytest.mark.parametrize("kind", [kind for kind in _hicache_store._error_kinds() if kind != "device"])
def test_every_kind_is_raised(kind, tmp_path):
    with pytest.raises(exceptions.BY_KIND[kind]) as caught:
        globals()[f"raise_{kind}"](tmp_path)
    message = str(caught.value)
    assert message
    assert not message.endswith(".")
