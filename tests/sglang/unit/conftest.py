"""Deployments on one root, each rank a backend with the pools that it would register."""

from __future__ import annotations

import pytest
from harness import backends
from hicache_store.sglang import HiCacheStoreBackend


@pytest.fixture
def rank(tmp_path):
    """Opens one rank: `rank(anchor, {name: pool}, extra={option: value}, tp_rank=1, tp_size=2)`."""
    opened = []

    def make(anchor, sidecars=None, *, extra=None, root="root", **facts):
        given = backends.options(tmp_path / root) | (extra or {})
        given = {name: value for name, value in given.items() if value is not None}
        backend = HiCacheStoreBackend(backends.config(given, **facts), {})
        opened.append(backend)
        if anchor is not None:
            backends.register(backend, anchor, sidecars)
        return backend

    yield make
    for backend in opened:
        backend.close()


@pytest.fixture
def keys():
    """A chain of six pages."""
    return backends.keys(6)


@pytest.fixture
def put():
    """Stores pages of a pool by the calls of the engine, and says whether all were taken."""

    def store(backend, name, pool, asked, slots):
        answer = backend.batch_set_v2([backends.transfer(name, pool, asked, slots)])
        return answer == {name: [True] * len(asked)}

    return store


@pytest.fixture
def take():
    """Restores pages into a pool, and says how many came."""

    def fetch(backend, name, pool, asked, slots):
        (flags,) = backend.batch_get_v2([backends.transfer(name, pool, asked, slots)]).values()
        assert len(flags) == len(asked)
        return sum(flags)

    return fetch


SLOTS = (5, 2, 9, 0, 7, 3)
OTHER = (1, 4, 6, 8, 10, 12)


@pytest.fixture
def slots():
    """Where six pages come from: in no order."""
    return SLOTS


@pytest.fixture
def others():
    """Where they go."""
    return OTHER
