"""The backend class that SGLang makes in each scheduler process: engine calls in, engine answers out.

What can fail, fails in the constructor or when the anchor pool is registered. After that nothing raises:
whatever happens is a miss, counted and told in the log. Calls come from the engine's threads for look-ups,
reads and writes, one of each at a time, and from its main thread; all may run at once, and beside `close`.

A page that was reported is exact. Answers have one entry for each key, and a read stops at the first page
that is not there: the engine uses the leading run only.
"""

import json
import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch

from hicache_store import Store
from hicache_store._hicache_store import _sglang_options
from hicache_store.sglang import versions
from hicache_store.sglang.guard import Trouble, all_false, all_none, count, never_raises, no_transfer
from hicache_store.sglang.identity import namespace
from hicache_store.sglang.lookups import find, leading
from hicache_store.sglang.metrics import Counters, Exporter, Operations
from hicache_store.sglang.serving import Serving
from hicache_store.sglang.topology import Topology
from hicache_store.sglang.transfers import NOBODY_TOLD, Transfers
from hicache_store.sglang.versions import KV, HiCacheStorage, PoolTransferResult, pool_name

__all__ = ["HiCacheStoreBackend"]

_log: Final = logging.getLogger("hicache_store.sglang")
_OPTION: Final = "--hicache-storage-backend-extra-config"


class HiCacheStoreBackend(HiCacheStorage):  # type: ignore[misc]
    """A root of pages as SGLang's external cache tier, see `docs/sglang.md`.

    Made by the engine, for `--hicache-storage-backend dynamic`. One for each scheduler process; all ranks of
    all deployments on a host may share one root.
    """

    def __init__(
        self, storage_config: Any, _kwargs: Mapping[str, Any] | None = None, *_args: object, **_more: object
    ) -> None:
        """Opens the root.

        Args:
            storage_config: The engine's `HiCacheStorageConfig`; its `extra_config` holds the options.
            _kwargs: What the engine's factory adds: nothing so far.

        Raises:
            ConfigError: A bad option; no name or revision of the model; `cp_kind` is missing where it
                matters.
            HiCacheStoreError: The root cannot be opened.
        """
        self.registered_pools: dict[Any, Any] = {}
        self._options = _sglang_options(json.dumps(storage_config.extra_config or {}, default=str))
        self._topology = Topology.of(storage_config, self._options["cp_kind"])
        self._counters = Counters()
        self._trouble = Trouble(self._counters)
        self._operations = Operations(enabled=bool(getattr(storage_config, "enable_storage_metrics", False)))
        self._transfers = Transfers(self._options, self._counters, self._operations, self._trouble)
        facts = _facts(self._options)
        # A missing name or revision stops the engine here, before it has made anything.
        namespace(self._options, storage_config.model_name, facts, 1)
        self._closing = threading.Lock()
        self._exporter: Exporter | None = None
        self._store: Store | None = _open_store(self._options)
        try:
            self._serving = Serving(
                self._store, self._options, storage_config.model_name, self._topology, facts
            )
            if self._options["metrics"] is not None:
                self._exporter = Exporter(
                    self._options["metrics"], self._topology.label, self._topology.number, self._collect
                )
        except BaseException:
            self._store.close()
            raise
        self._warn_of_options()

    # -- registration -----------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Takes the anchor pool: its pages are the pages of the prefix.

        Args:
            mem_pool_host: The engine's host pool of keys and values, or a logical one.

        Raises:
            UnsupportedError: The engine or this adapter cannot store such a pool; the message says why.
            HiCacheStoreError: Identity or geometry are not usable.
        """
        super().register_mem_pool_host(mem_pool_host)
        self._serving.serve(KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Takes one more pool. Never raises: one that cannot be served is a miss, and the log says why."""
        self.registered_pools[host_pool_name] = host_pool
        self._serving.serve_if_possible(pool_name(host_pool_name), host_pool)

    def on_host_pools_registered(self) -> None:
        """Says what is served."""
        state = self._serving.state
        pages = {name: served.binding.page_bytes for name, served in state.served.items()}
        fingerprint = None if state.namespace is None else state.namespace.fingerprint
        _log.info("rank %s serves namespace %s, page bytes %s", self._topology.label, fingerprint, pages)

    # -- look-ups ---------------------------------------------------------------------------------------

    def exists(self, key: str) -> bool:
        """Returns whether the page is stored."""
        return self.batch_exists([key]) == 1

    @never_raises("exists", lambda *_args, **_kwargs: 0)
    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Returns how many of `keys`, from the first one on, are stored for this rank."""
        del extra_info
        found = leading(self._serving.state, keys)
        self._note_lookup(keys, found.pages, found.limited_by)
        return found.pages

    @never_raises("exists", lambda *_args, **_kwargs: PoolTransferResult(0, {}, []))
    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Sequence[Any] | None = None, extra_info: Any = None
    ) -> Any:
        """Returns which lengths of the prefix `keys` can be restored in the anchor and in all other pools.

        Args:
            keys: The chain's pages.
            pool_transfers: The other pools with their hit policies; a trailing window has as many pages as
                the
                transfer has keys.
            extra_info: Not needed.

        Returns:
            `PoolTransferResult`: the longest length, each pool's own longest length (none where it is 0), and
            all lengths, shortest first.
        """
        del extra_info
        found = find(self._serving.state, keys, pool_transfers or ())
        self._note_lookup(keys, found.pages, found.limited_by)
        return PoolTransferResult(found.pages, found.hits, found.legal)

    # -- reads and writes in place ----------------------------------------------------------------------

    @never_raises("get", all_false)
    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Restores pages into the anchor pool.

        Args:
            keys: One key for each page.
            host_indices: Token slots, int64 `[len(keys) * page_size]`, in the order of the keys.
            extra_info: The engine's note on the chain before.

        Returns:
            For each key whether its page is there now, exact. Pages after the first absent one are not read.
        """
        self._warn_of_prefix_keys(extra_info)
        self._counters.add("agreed_pages", count(keys))
        return self._get(KV, keys, host_indices)

    @never_raises("set", all_false)
    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Stores pages of the anchor pool; arguments as for `batch_get_v1`.

        Returns:
            For each key whether its page is stored, by this call or before.
        """
        self._warn_of_prefix_keys(extra_info)
        return self._set(KV, keys, host_indices, extra_info)

    @never_raises("get", no_transfer)
    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Restores pages of other pools; returns for each pool what `batch_get_v1` does."""
        self._warn_of_prefix_keys(extra_info)
        return self._each("get", transfers, self._get)

    @never_raises("set", no_transfer)
    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Stores pages of other pools; returns for each pool what `batch_set_v1` does."""
        self._warn_of_prefix_keys(extra_info)
        return self._each(
            "set", transfers, lambda name, keys, indices: self._set(name, keys, indices, extra_info)
        )

    # -- the older interface: flat pages of the anchor pool ---------------------------------------------

    @never_raises("get", lambda *_args, **_kwargs: None)
    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: object = None
    ) -> torch.Tensor | None:
        """Returns the flat page, in `target_location` where that is given; None for a miss."""
        page = self.batch_get([key], None if target_location is None else [target_location], target_sizes)[0]
        if page is None or target_location is None:
            return page
        target_location.view(torch.uint8).reshape(-1).copy_(page.view(torch.uint8))
        return target_location

    @never_raises("get", all_none)
    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: object = None
    ) -> list[torch.Tensor | None]:
        """Returns the flat pages; None for each that is missing or comes after one that is.

        The pages are rows of memory made for this call: `target_locations` is not written to, and tells only
        how large the engine believes pages to be.
        """
        del target_sizes
        self._counters.add("agreed_pages", len(keys))
        served = self._serving.state.served.get(KV)
        if served is None:
            self._transfers.missing(KV, len(keys), "unserved")
            return all_none(keys)
        if served.pages is None:
            return list(target_locations or (torch.empty(0, dtype=torch.uint8) for _ in keys))
        if target_locations and target_locations[0].nbytes != served.binding.page_bytes:
            self._transfers.missing(KV, len(keys), "misuse")
            return all_none(keys)
        return self._transfers.get_flat(served, keys)

    @never_raises("set", lambda *_args, **_kwargs: False)
    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: object = None
    ) -> bool:
        """Stores a flat page; returns whether it is stored."""
        return self.batch_set([key], [target_location if value is None else value], None, target_sizes)

    @never_raises("set", lambda *_args, **_kwargs: False)
    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: object = None
    ) -> bool:
        """Stores flat pages; returns whether all are stored."""
        del target_sizes
        served = self._serving.state.served.get(KV)
        if served is None:
            self._transfers.refused(KV, len(keys), "unserved")
            return False
        if served.pages is None or self._leaves_to_others(KV, keys):
            return True
        return self._transfers.set_flat(served, keys, target_locations if values is None else values)

    # -- what the main thread asks for ------------------------------------------------------------------

    @never_raises("clear", lambda *_args, **_kwargs: None)
    def clear(self) -> None:
        """Forgets all pages of this deployment's namespace, and of no other.

        Several ranks that ask at about the same time are one clear.
        """
        view = self._serving.state.lookups
        if view is not None:
            _log.info("cleared namespace %s: %d objects", view.fingerprint, view.clear())

    @never_raises("stats", lambda *_args, **_kwargs: None)
    def get_stats(self) -> Any:
        """Returns the engine's own record of transfers since the last call, or None where there were none."""
        return self._operations.drain()

    @never_raises("stats", lambda *_args, **_kwargs: {})
    def stats(self) -> dict[str, Any]:
        """Returns what is served, and how often what happened.

        Returns:
            `namespace` (its fields), `rank` (str), `pools` (of each `page_bytes`, `identity`, `tile`,
            `layout`, and `bound`: why its pages are not shared with other shapes), `refused` (reason by
            pool), `counters` (totals by name and labels), and `store`: what `Store.stats` returns, None when
            it is closed.
        """
        state, store = self._serving.state, self._store
        return {
            "namespace": None if state.namespace is None else json.loads(state.namespace.to_json()),
            "rank": self._topology.label,
            "pools": {name: served.binding.described() for name, served in state.served.items()},
            "refused": dict(state.refused),
            "counters": {"/".join(key): total for key, total in sorted(self._counters.snapshot().items())},
            "store": None if store is None else store.stats(),
        }

    @never_raises("close", lambda *_args, **_kwargs: None)
    def close(self) -> None:
        """Ends the use of the root and of the engine's memory.

        Closing twice is fine. Calls that are under way end as misses.
        """
        with self._closing:
            exporter, self._exporter = self._exporter, None
            if exporter is not None:
                exporter.close()  # while there is something to show
            store, self._store = self._store, None
        self._serving.close()
        self.registered_pools, self.mem_pool_host = {}, None
        if store is not None:
            store.close()

    # -- inside -----------------------------------------------------------------------------------------

    def _get(self, name: str, keys: list[str], host_indices: Any) -> list[bool]:
        served = self._serving.state.served.get(name)
        if served is None:
            return self._transfers.missing(name, len(keys), "unserved")
        return self._transfers.get(served, keys, host_indices)

    def _set(self, name: str, keys: list[str], host_indices: Any, extra_info: Any) -> list[bool]:
        served = self._serving.state.served.get(name)
        if served is None:
            return self._transfers.refused(name, len(keys), "unserved")
        if self._leaves_to_others(name, keys):
            return [True] * len(keys)
        before = getattr(extra_info, "prefix_keys", None)
        told = NOBODY_TOLD if before is None else (before[-1] if before else None, len(before))
        return self._transfers.set(served, keys, host_indices, told)

    def _each(
        self, call: str, transfers: Sequence[Any], one: Callable[[str, list[str], Any], list[bool]]
    ) -> dict[str, list[bool]]:
        """Carries out each transfer for itself; of two for one pool, a page counts where both have it."""
        answers: dict[str, list[bool]] = {}
        for transfer in transfers:
            keys = transfer.keys if transfer.keys is not None else []
            try:
                flags = one(pool_name(transfer.name), keys, transfer.host_indices)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:
                self._trouble.failed(call, error)
                flags = all_false(keys)
            if transfer.name in answers:
                short, long = sorted((answers[transfer.name], flags), key=len)
                flags = [*map(all, zip(short, long, strict=False)), *long[len(short) :]]
            answers[transfer.name] = flags
        return answers

    def _leaves_to_others(self, name: str, keys: list[str]) -> bool:
        """Whether another rank writes the very same pages."""
        if self._topology.leaves_writing_to_others:
            self._counters.add("deferred_pages", len(keys), name)
        return self._topology.leaves_writing_to_others

    def _note_lookup(self, keys: list[str], found: int, limited_by: str | None) -> None:
        self._counters.add("lookup_pages", len(keys))
        self._counters.add("hit_pages", found)
        if limited_by is not None and found < len(keys):
            self._counters.add("lookups_limited", 1, limited_by)

    def _warn_of_options(self) -> None:
        running = versions.running()
        if running != versions.TESTED:
            _log.warning("SGLang is %s; this adapter is tested against %s", running, versions.TESTED)
        if not self._options["interface_v1"]:
            _log.warning(
                'each page is copied twice more than needed: add "interface_v1": true to %s', _OPTION
            )

    def _warn_of_prefix_keys(self, extra_info: Any) -> None:
        if extra_info is not None and getattr(extra_info, "prefix_keys", None) is None:
            self._trouble.once(
                "prefix keys",
                logging.WARNING,
                "the engine does not tell which page comes before another, so this is guessed from look-ups: "
                'add "hicache_storage_pass_prefix_keys": true to %s',
                _OPTION,
            )

    def _collect(self) -> tuple[dict[tuple[str, ...], int], dict[str, int], dict[str, float]]:
        """Totals of the adapter and of the store, and facts of now, for Prometheus."""
        state, store = self._serving.state, self._store
        facts: dict[str, float] = {
            "pools_not_served": len(state.refused),
            "pools_not_shared": sum(bool(served.binding.bound) for served in state.served.values()),
        }
        stats = {} if store is None else store.stats()
        facts |= {name: stats[name] for name in ("capacity_bytes", "used_bytes") if name in stats}
        for name in ("slow", "p99_read_seconds", "p99_write_seconds"):
            facts[f"device_{name}"] = float(stats.get("device", {}).get(name, 0))
        return self._counters.snapshot(), stats.get("counters", {}), facts


def _facts(options: Mapping[str, Any]) -> versions.EngineFacts:
    """The engine's facts; the options speak where it is silent."""
    facts = versions.engine_facts()
    known = {"total_layers": facts.total_layers, "total_kv_heads": facts.total_heads.get(KV)}
    for name, told in known.items():
        if told is not None and options[name] not in (None, told):
            _log.warning("the engine's model has %s %d, not the %d of the options", name, told, options[name])
    layers, heads = (options[name] if told is None else told for name, told in known.items())
    heads_by_pool = facts.total_heads if heads is None else {**facts.total_heads, KV: heads}
    return replace(facts, total_layers=layers, total_heads=heads_by_pool)


def _open_store(options: Mapping[str, Any]) -> Store:
    store = Store.open(
        options["path"],
        options["capacity"],
        io_mode=options["io_mode"],
        io_threads=options["io_threads"],
        durable=options["durable"],
        verify=options["verify"],
        time_to_live=options["time_to_live"],
        free_space_floor=options["free_space_floor"],
        detect_conflicts=options["detect_conflicts"],
    )
    kept, asked = store.stats()["capacity_bytes"], options["capacity"]
    if _nbytes(asked) not in (None, kept):
        _log.warning(
            "the root keeps its capacity of %d bytes, not the %s of the options; to change it for all "
            "processes: hicache-store resize %s %s",
            kept,
            asked,
            options["path"],
            asked,
        )
    return store


def _nbytes(size: int | str | None) -> int | None:
    """A size as the store reads it, to be compared; None where it is none, or written in an unusual way."""
    if not isinstance(size, str):
        return size
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgtp]?)(i?)b?\s*", size, re.IGNORECASE)
    if found is None:
        return None
    number, prefix, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** " kmgtp".index(prefix.lower() or " "))
