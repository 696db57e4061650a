"""The rank audit around SGLang's radix tree: what ranks must decide alike is recorded, and compared.

Off unless the environment says otherwise, and then nothing of the engine is touched:

    HICACHE_RANK_AUDIT=/var/log/audit   a log of each rank in this folder, for `hicache-store ranks diff`
    HICACHE_RANK_AUDIT_LIVE=60          compared while the engine runs; a rank that is silent for so many
                                        seconds is named
    HICACHE_RANK_AUDIT_RUN=7            number of the run, equal on all ranks; 0 where it is not given

The engine loads `register` by the entry point `sglang.srt.plugins`; `SGLANG_PLUGINS` can leave it out. What
is recorded are the methods in `versions.AUDITED`, of one tree, each wrapped on the instance: match, insert,
evict, prefetch, load-back and backup as calls, and locks as changes of state, since they differ long before
an answer does.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable
from typing import Any, Final, Literal

from hicache_store.exceptions import ConfigError
from hicache_store.ranks import RankAudit, Topology, Transport, rank_consensus

__all__ = ["attach", "detach", "register"]

FOLDER: Final = "HICACHE_RANK_AUDIT"
LIVE: Final = "HICACHE_RANK_AUDIT_LIVE"
RUN: Final = "HICACHE_RANK_AUDIT_RUN"

_log: Final = logging.getLogger("hicache_store.sglang")


def attach(audit: RankAudit, tree: Any) -> None:
    """Has the methods of one tree recorded, until `detach`."""
    from hicache_store.sglang import versions

    for watched in versions.AUDITED:
        method = _method(tree, watched.method)
        if method is not None:
            decorate = rank_consensus(watched.params, watched.result, name=watched.name, audit=audit)
            try:
                setattr(tree, watched.method, decorate(method))
            except ConfigError as error:  # a parameter has another name in this release
                _log.warning("the rank audit leaves %s out: %s", watched.method, error)
    for name, change in versions.AUDITED_LOCKS.items():
        method = _method(tree, name)
        if method is not None:
            setattr(tree, name, _recorded(audit, method, change))
    step = _method(tree, versions.AUDITED_STEP)
    if step is not None:
        setattr(tree, versions.AUDITED_STEP, _counted(audit, step))


def detach(tree: Any) -> None:
    """Gives a tree its own methods back."""
    from hicache_store.sglang import versions

    watched = [watched.method for watched in versions.AUDITED]
    for name in (*watched, *versions.AUDITED_LOCKS, versions.AUDITED_STEP):
        tree.__dict__.pop(name, None)


def register() -> None:
    """What the engine calls once in each process: asks to be called when a tree is complete, or nothing."""
    if not (os.environ.get(FOLDER) or os.environ.get(LIVE)):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from hicache_store.sglang import versions

    HookRegistry.register(versions.AUDITED_AFTER, _after_init, HookType.AFTER)


def _method(tree: Any, name: str) -> Any:
    found = getattr(tree, name, None)
    if found is None:
        _log.warning("the rank audit leaves %s out: this release of SGLang has no such method", name)
    return found


def _recorded(audit: RankAudit, method: Callable[..., Any], change: str) -> Callable[..., Any]:
    def changed(node_id: Any, *args: Any, **named: Any) -> Any:
        audit.record("state", change, (node_id,))
        return method(node_id, *args, **named)

    return changed


def _counted(audit: RankAudit, method: Callable[[], Any]) -> Callable[[], Any]:
    number = 0

    def step() -> Any:
        nonlocal number
        number += 1
        audit.step(number)
        return method()

    return step


def _after_init(_result: Any, tree: Any, *_args: Any, **_named: Any) -> None:
    """Starts the audit of a rank. It never keeps an engine from starting."""
    try:
        topology, rank = _place()
        transport = _transport(topology, rank)
        audit = RankAudit(
            topology,
            rank,
            log=os.environ.get(FOLDER) or None,
            run=int(os.environ.get(RUN, "0")),
            transport=transport,
            deadline=float(os.environ.get(LIVE) or 60),
        )
    except Exception:
        _log.exception("the rank audit is off")
        return
    attach(audit, tree)
    tree.hicache_rank_audit = audit
    _log.warning("the rank audit of rank %d of %d is on", rank, topology.ranks)

    def end() -> None:
        audit.close()
        if transport is not None:
            transport.close()

    atexit.register(end)


def _place() -> tuple[Topology, int]:
    """The axes of this engine, and this rank's number on them."""
    from hicache_store.sglang import versions

    sizes, place = versions.axes()
    # What context parallel ranks hold does not matter here: all of them decide alike.
    kind: Literal["none", "replicated"] = "replicated" if sizes["cp"] > 1 else "none"
    topology = Topology(**sizes, cp_kind=kind)
    return topology, topology.rank(**place)


def _transport(topology: Topology, rank: int) -> Transport | None:
    deadline = os.environ.get(LIVE)
    if not deadline:
        return None
    import torch.distributed as dist

    from hicache_store.ranks.torch_transport import TorchTransport

    store = dist.PrefixStore("hicache-rank-audit", dist.distributed_c10d._get_default_store())
    return TorchTransport(topology, rank, store, lanes=("audit",), deadline=float(deadline))
