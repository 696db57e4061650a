"""What is counted, and how it is shown."""

from __future__ import annotations

import re
import socket
import urllib.request
from pathlib import Path

import pytest
from harness import pools
from hicache_store import ConfigError
from hicache_store.sglang.metrics import COUNTERS
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.observability.metrics_collector import StorageMetrics

KV = PoolName.KV


@pytest.fixture
def pool():
    return pools.fill(pools.build("mha", "page_first"), 1)


def use(backend, pool, keys, slots):
    """A write, a look-up, and a read of which the last page is missing."""
    indices = pools.indices(pool, slots)
    assert backend.batch_set_v1(keys[:5], indices[: 5 * pool.page_size]) == [True] * 5
    assert backend.batch_exists(keys) == 5
    assert backend.batch_get_v1(keys, indices) == [True] * 5 + [False]


def test_the_engine_gets_its_own_record_once(rank, pool, keys, slots):
    backend = rank(pool, enable_storage_metrics=True)
    assert backend.get_stats() is None
    use(backend, pool, keys, slots)
    record = backend.get_stats()
    assert type(record) is StorageMetrics
    assert (record.backup_pgs, record.prefetch_pgs) == ([5], [5])
    assert all(rate > 0 for rate in (*record.backup_bandwidth, *record.prefetch_bandwidth))
    assert len(record.backup_bandwidth) == len(record.prefetch_bandwidth) == 1
    assert backend.get_stats() is None


def test_an_engine_that_does_not_ask_costs_nothing(rank, pool, keys, slots):
    backend = rank(pool)
    use(backend, pool, keys, slots)
    assert backend.get_stats() is None


def test_what_is_counted(rank, pool, keys, slots):
    backend = rank(pool)
    use(backend, pool, keys, slots)
    assert backend.batch_set_v1(keys[:2], pools.indices(pool, slots[:2])) == [True] * 2
    assert backend.stats()["counters"] == {
        "agreed_pages": 6,
        "hit_pages": 5,
        "lookup_pages": 6,
        "lookups_limited/kv": 1,
        "missing_pages/kv/absent": 1,
        "present_pages/kv": 2,
        "promised_missing_pages/kv": 1,
        "restored_bytes/kv": 5 * 768,
        "restored_pages/kv": 5,
        "stored_pages/kv": 5,
    }


def lines(text):
    """Samples by name and labels."""
    return dict(re.findall(r"^(hicache_\S+\{[^}]*\}) (\S+)$", text, re.MULTILINE))


def check(text, rank):
    samples = lines(text)
    assert samples[f'hicache_adapter_stored_pages_total{{pool="kv",rank="{rank}"}}'] == "5.0"
    missing = f'hicache_adapter_missing_pages_total{{pool="kv",rank="{rank}",reason="absent"}}'
    assert samples[missing] == "1.0"
    assert samples[f'hicache_store_restore_restored_pages_total{{rank="{rank}"}}'] == "5.0"
    assert samples[f'hicache_capacity_bytes{{rank="{rank}"}}'] == "6.7108864e+07"
    for gauge in ("pools_not_served", "device_slow"):
        assert samples[f'hicache_{gauge}{{rank="{rank}"}}'] == "0.0"
    assert float(samples[f'hicache_device_p99_write_seconds{{rank="{rank}"}}']) < 5


def test_a_text_file_for_each_rank(rank, pool, keys, slots, tmp_path):
    path = tmp_path / "hicache.prom"
    backend = rank(pool, extra={"metrics": {"textfile": str(path)}}, pp_rank=1, pp_size=2)
    use(backend, pool, keys, slots)
    written = tmp_path / "hicache.tp0-pp1-cp0-dp0.prom"
    assert "hicache_adapter_stored_pages" in written.read_text()
    backend.close()
    check(written.read_text(), "tp0-pp1-cp0-dp0")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_port_for_each_rank(rank, pool, keys, slots):
    for tries_left in reversed(range(5)):
        port = free_port()
        try:
            backend = rank(pool, extra={"metrics": {"port": port - 1}}, dp_rank=1)
        except ConfigError:  # another process was given the port meanwhile
            if not tries_left:
                raise
        else:
            break
    use(backend, pool, keys, slots)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        check(answer.read().decode(), "tp0-pp0-cp0-dp1")
    backend.close()


def test_a_port_that_is_taken_stops_the_engine(rank):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="metrics"):
            rank(None, extra={"metrics": {"port": taken.getsockname()[1]}})


def test_every_counter_is_described():
    assert all(text.endswith(".") and labels == tuple(labels) for text, labels in COUNTERS.values())


def test_the_document_names_every_counter():
    text = (Path(__file__).parents[3] / "docs" / "sglang.md").read_text()
    assert [name for name in COUNTERS if f"`{name}`" not in text] == []
