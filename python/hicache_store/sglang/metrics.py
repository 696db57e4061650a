"""What the adapter counts, for the engine's own metrics and for Prometheus."""

import contextlib
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from hicache_store import ConfigError
from hicache_store.sglang import versions

__all__ = ["COUNTERS", "Counters", "Exporter", "Operations"]

COUNTERS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "lookup_pages": ("Pages that existence calls asked for.", ()),
    "hit_pages": ("Pages that existence calls found restorable on this rank.", ()),
    "lookups_limited": (
        "Existence calls that found less than they asked for, by the pool that set the end.",
        ("pool",),
    ),
    "agreed_pages": (
        "Pages of the anchor pool that the engine then asked for: what all ranks agreed on.",
        (),
    ),
    "restored_pages": ("Pages that came, verified.", ("pool",)),
    "restored_bytes": ("Their bytes.", ("pool",)),
    "missing_pages": ("Pages asked for that did not come, by reason.", ("pool", "reason")),
    "promised_missing_pages": (
        "Pages that a look-up had promised, gone when they were asked for.",
        ("pool",),
    ),
    "stored_pages": ("Pages written.", ("pool",)),
    "present_pages": ("Pages given that were stored already.", ("pool",)),
    "refused_pages": ("Pages given that were not stored, by reason.", ("pool", "reason")),
    "deferred_pages": ("Pages given that another rank writes.", ("pool",)),
    "late_calls": ("Calls that ended at their deadline.", ("call",)),
    "faults": ("Calls that ended in an error of any kind and were answered as a miss.", ("call", "kind")),
}
"""Every counter: what it counts, and its labels. All only grow."""

# Seconds between two text files.
_TEXTFILE_PERIOD: Final = 15.0
# Operations kept for an engine that does not ask.
_MOST_OPERATIONS: Final = 10_000


class Counters:
    """Named totals with labels. Thread-safe; one call for each batch, never for each page."""

    def __init__(self) -> None:
        """Starts at zero."""
        self._lock = threading.Lock()
        self._totals: Counter[tuple[str, ...]] = Counter()

    def add(self, name: str, amount: int, *labels: str) -> None:
        """Adds `amount` to the counter `name` of `COUNTERS`, with the values of its labels."""
        if amount:
            with self._lock:
                self._totals[(name, *labels)] += amount

    def total(self, name: str, *labels: str) -> int:
        """Returns the sum over all totals of `name` whose labels begin with `labels`."""
        wanted = (name, *labels)
        return sum(value for key, value in self.snapshot().items() if key[: len(wanted)] == wanted)

    def snapshot(self) -> dict[tuple[str, ...], int]:
        """Returns all totals that are not 0, by name and labels."""
        with self._lock:
            return dict(self._totals)


class Operations:
    """Pages and GB/s of each transfer, kept until the engine asks. Thread-safe."""

    def __init__(self, *, enabled: bool) -> None:
        """Keeps nothing unless `enabled`: an engine without metrics never asks."""
        self._enabled = enabled
        self._lock = threading.Lock()
        self._reads: deque[tuple[int, float]] = deque(maxlen=_MOST_OPERATIONS)
        self._writes: deque[tuple[int, float]] = deque(maxlen=_MOST_OPERATIONS)

    def read(self, pages: int, nbytes: int, seconds: float) -> None:
        """Notes a read."""
        self._note(self._reads, pages, nbytes, seconds)

    def wrote(self, pages: int, nbytes: int, seconds: float) -> None:
        """Notes a write."""
        self._note(self._writes, pages, nbytes, seconds)

    def drain(self) -> Any:
        """Returns the engine's record of what happened since the last call, or None where nothing did."""
        with self._lock:
            reads, writes = list(self._reads), list(self._writes)
            self._reads.clear()
            self._writes.clear()
        if not reads and not writes:
            return None
        return versions.storage_metrics(
            [pages for pages, _ in reads],
            [rate for _, rate in reads],
            [pages for pages, _ in writes],
            [rate for _, rate in writes],
        )

    def _note(self, operations: deque[tuple[int, float]], pages: int, nbytes: int, seconds: float) -> None:
        if self._enabled and pages:
            with self._lock:
                operations.append((pages, nbytes / 1e9 / max(seconds, 1e-9)))


class Exporter:
    """Shows the totals to Prometheus: as a text file that is written now and then, or on a local port."""

    def __init__(
        self, options: Mapping[str, Any], rank: str, number: int, collect: "Callable[[], _Facts]"
    ) -> None:
        """Starts to export.

        Args:
            options: `textfile` (a path; the rank enters its name), or `port` (of rank 0; the others follow)
                and `host`.
            rank: The rank in a word.
            number: The rank as a number.
            collect: Gives the totals of now.

        Raises:
            ConfigError: No client library, a port that is taken, a path that cannot be written.
        """
        try:
            import prometheus_client
            from prometheus_client import core
        except ImportError:
            raise ConfigError(
                '"metrics" needs the package prometheus_client, which the engine depends on'
            ) from None
        self._client = prometheus_client
        self._registry = prometheus_client.CollectorRegistry()
        self._registry.register(_Collector(core, rank, collect))
        self._stop = threading.Event()
        self._server: Any = None
        self._thread: threading.Thread | None = None
        self._path: Path | None = None
        try:
            if options.get("textfile"):
                path = Path(options["textfile"])
                self._path = path.with_name(f"{path.stem}.{rank}{path.suffix or '.prom'}")
                self._write()
                self._thread = threading.Thread(target=self._run, name="hicache-metrics", daemon=True)
                self._thread.start()
            if options.get("port") is not None:
                port, host = int(options["port"]) + number, str(options.get("host") or "127.0.0.1")
                self._server, _ = prometheus_client.start_http_server(
                    port, addr=host, registry=self._registry
                )
        except OSError as error:
            self.close()
            raise ConfigError(f"cannot export metrics: {error}") from error

    def close(self) -> None:
        """Writes a last time and stops. Closing twice is fine."""
        self._stop.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        if self._thread is not None:
            self._thread.join(timeout=5)
            self._thread = None
            self._write_quietly()

    def _run(self) -> None:
        while not self._stop.wait(_TEXTFILE_PERIOD):
            self._write_quietly()

    def _write(self) -> None:
        if self._path is not None:
            self._client.write_to_textfile(str(self._path), self._registry)

    def _write_quietly(self) -> None:
        # A full disk: the next round writes the newer totals.
        with contextlib.suppress(OSError):
            self._write()


_Facts = tuple[dict[tuple[str, ...], int], dict[str, int], dict[str, float]]


class _Collector:
    """Adapter totals, the store's own totals and some facts as metric families."""

    def __init__(self, core: Any, rank: str, collect: Callable[[], _Facts]) -> None:
        self._core, self._rank, self._collect = core, rank, collect

    def collect(self) -> Iterator[Any]:
        core = self._core
        totals, store, facts = self._collect()
        families = {
            name: core.CounterMetricFamily(f"hicache_adapter_{name}", text, labels=["rank", *labels])
            for name, (text, labels) in COUNTERS.items()
        }
        for (name, *values), total in totals.items():
            families[name].add_metric([self._rank, *values], total)
        yield from families.values()
        for name, total in store.items():
            family = core.CounterMetricFamily(
                f"hicache_store_{name}", "Total of the store in this process.", labels=["rank"]
            )
            family.add_metric([self._rank], total)
            yield family
        for name, value in facts.items():
            gauge = core.GaugeMetricFamily(f"hicache_{name}", "As of now.", labels=["rank"])
            gauge.add_metric([self._rank], value)
            yield gauge
