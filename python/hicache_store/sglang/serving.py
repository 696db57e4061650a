"""The pools that are served: what the engine registered, and the views of the store that answer for it."""

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from hicache_store import (
    HiCacheStoreError,
    Namespace,
    PoolView,
    Store,
    StoreClosedError,
    UnsupportedError,
    View,
)
from hicache_store.sglang import identity
from hicache_store.sglang.binding import Binding, Body, bind
from hicache_store.sglang.host_pool import placed
from hicache_store.sglang.topology import Topology
from hicache_store.sglang.versions import KV, EngineFacts

__all__ = ["Pages", "Served", "Serving", "State"]

_log: Final = logging.getLogger("hicache_store.sglang")

# What a process may leave for `hicache-store stat` is limited; the log has all of it.
MOST_NOTES: Final = 24
MOST_WORDS: Final = 400


@dataclass(frozen=True)
class Pages:
    """A pool's bytes, and the views that store and restore them."""

    name: str
    body: Body
    view: View
    flat: View | None
    """For pages one behind the other, as the engine's older interface hands them over."""


@dataclass(frozen=True)
class Served:
    """A registered pool."""

    host_pool: Any
    binding: Binding
    pages: Pages | None = None
    """Its pages; None for a logical pool, of which every page is there."""


@dataclass(frozen=True)
class State:
    """What was registered so far. Replaced as a whole, so that each call sees one state of it."""

    namespace: Namespace | None = None
    served: Mapping[str, Served] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    """Pools that are not served, and why."""
    lookups: View | None = None
    """All pools with bytes, for look-ups over several."""


class Serving:
    """Opens views as pools are registered. Thread-safe; `state` may be read at any time."""

    def __init__(
        self,
        store: Store,
        options: Mapping[str, Any],
        model_name: str | None,
        topology: Topology,
        facts: EngineFacts,
    ) -> None:
        """Serves nothing yet.

        Raises:
            ConfigError: Nothing names the model or the revision of its weights.
        """
        self._options, self._model_name = options, model_name
        self._topology, self._facts = topology, facts
        self._draft_mark = identity.draft_mark(facts)
        self._lock = threading.Lock()
        self._store: Store | None = store
        self._early: list[tuple[str, Any]] = []
        self.state = State()

    def serve(self, name: str, host_pool: Any) -> None:
        """Serves a pool from now on; the anchor first, whose page size is that of the namespace.

        A pool that comes before the anchor waits for it. One that is served already changes nothing.

        Raises:
            UnsupportedError: A pool that cannot be stored; the message says why.
            HiCacheStoreError: Identity or geometry are not usable, or the store says no.
        """
        with self._lock:
            if self.state.namespace is None and name != KV:
                self._early.append((name, host_pool))
                return
            binding = self._serve(name, host_pool)
            early, self._early = self._early, []
        if binding is not None:
            _tell(binding)
        for name, host_pool in early:
            self.serve_if_possible(name, host_pool)

    def serve_if_possible(self, name: str, host_pool: Any) -> None:
        """Serves a pool, or notes and tells why not; raises nothing."""
        try:
            self.serve(name, host_pool)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            with self._lock:
                self.state = replace(self.state, refused={**self.state.refused, name: str(error)})
                self._note()
            _log.error("pool %r is not stored, and prefixes that need it are never found: %s", name, error)

    def close(self) -> None:
        """Lets go of the engine's memory and of all views."""
        with self._lock:
            self._store, self._early = None, []
            self.state = replace(self.state, served={}, lookups=None)

    def _serve(self, name: str, host_pool: Any) -> Binding | None:
        known = self.state.served.get(name)
        if known is not None and known.host_pool is host_pool:
            return None
        if self._store is None:
            raise StoreClosedError("the backend is closed")
        binding = bind(name, host_pool, self._topology, self._facts, self._draft_mark)
        namespace = self.state.namespace
        if namespace is None or name == KV:
            namespace = self._namespace(binding)
        pages = self._open(self._store, namespace, binding)
        served = {**self.state.served, name: Served(host_pool, binding, pages)}
        views = [one.pages.body.pool for one in served.values() if one.pages is not None]
        lookups = self._store.view(namespace, views, codec=self._options["codec"]) if views else None
        refused = {other: why for other, why in self.state.refused.items() if other != name}
        self.state = State(namespace, served, refused, lookups)
        self._note()
        return binding

    def _note(self) -> None:
        """Leaves for `hicache-store stat` which pools are not stored or not shared, and what was placed."""
        told = [(name, "refused", why) for name, why in self.state.refused.items()]
        for name, served in self.state.served.items():
            told += [(name, "bound", why) for why in served.binding.bound]
            if served.binding.orphaned is not None:
                told.append((name, "never found", served.binding.orphaned))
        try:
            if self._store is not None:
                self._store.note_pools(
                    [(name, place, why[:MOST_WORDS]) for name, place, why in [*told, *placed()][:MOST_NOTES]]
                )
        except HiCacheStoreError as error:
            _log.warning("`hicache-store stat` does not learn how the pools are served: %s", error)

    def _namespace(self, anchor: Binding) -> Namespace:
        if anchor.body is not None and anchor.body.flat_dtype is None and not self._options["interface_v1"]:
            raise UnsupportedError(
                "the engine makes no flat pages of this pool, which its older interface would need: add "
                '"interface_v1": true to --hicache-storage-backend-extra-config'
            )
        known = self.state.namespace
        found = identity.namespace(self._options, self._model_name, self._facts, anchor.page_size)
        if known is not None and known != found:
            raise UnsupportedError(
                f"an anchor pool of {anchor.page_size} tokens a page replaced one of {known.page_size}: "
                "attach the backend anew"
            )
        return found

    def _open(self, store: Store, namespace: Namespace, binding: Binding) -> Pages | None:
        body, codec, flat = binding.body, self._options["codec"], None
        if body is None:
            return None
        view = store.view(namespace, body.pool, codec=codec)
        if binding.name == KV and body.flat_dtype is not None:
            pool, nbytes = body.pool, body.page_bytes
            one = PoolView(
                pool.pool,
                pool.tile,
                pool.layout,
                page_bytes=nbytes,
                packed=(0, nbytes),
                read_by_all=pool.read_by_all,
            )
            flat = store.view(namespace, one, codec=codec)
        return Pages(binding.name, body, view, flat)


def _tell(binding: Binding) -> None:
    for reason in binding.bound:
        _log.warning("pool %r is not shared with deployments of another shape: %s", binding.name, reason)
    if binding.orphaned is not None:
        _log.warning(
            "prefixes that need pool %r are never found on this rank: %s", binding.name, binding.orphaned
        )
