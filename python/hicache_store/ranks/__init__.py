"""Agreement of ranks: every rank of an engine acts on the same state.

    from hicache_store.ranks import AckLog, PpSync, Topology, drive
    from hicache_store.ranks.torch_transport import TorchTransport

    topology = Topology(pp=2, tp=4)
    transport = TorchTransport(topology, rank, store, deadline=30)
    writes = AckLog("write")
    sync = PpSync(topology, rank, [writes])

    ticket = writes.append(operation)             # on submission, on every rank
    writes.finish(ticket)                         # when this rank's copy has finished, from any thread
    drive(sync, transport, apply=release)         # in every step, on every rank, also with nothing to do

`docs/ranks.md` has the protocols. Machines decide and wait for nobody; `drive` asks a transport for what they
need. Importing this package imports neither torch nor sglang: the transport over `torch.distributed` is a
module of its own.
"""

from hicache_store._hicache_store import (
    Ack,
    AckLog,
    Apply,
    Ask,
    CapacityVote,
    ClassedPool,
    Coordinates,
    Expired,
    Gather,
    GatherPlan,
    Hit,
    HitVote,
    Holding,
    LayerGate,
    Lengths,
    OutcomeVote,
    Ownership,
    Placement,
    PpSync,
    Prefetch,
    ProgressVote,
    Publication,
    Reading,
    Report,
    RestoreSession,
    ScratchBudget,
    ScratchSize,
    Spread,
    StateDigest,
    StepEnd,
    TierLedger,
    Topology,
    Verdict,
    Watch,
)
from hicache_store.ranks.audit import RankAudit
from hicache_store.ranks.consensus import rank_consensus
from hicache_store.ranks.exceptions import (
    AckOrderError,
    OwnershipError,
    RankDisagreementError,
    RankError,
    RankStalledError,
    ShapeError,
    StateError,
)
from hicache_store.ranks.transport import Answer, Machine, NullTransport, Transport, drive

__all__ = [
    "Ack",
    "AckLog",
    "AckOrderError",
    "Answer",
    "Apply",
    "Ask",
    "CapacityVote",
    "ClassedPool",
    "Coordinates",
    "Expired",
    "Gather",
    "GatherPlan",
    "Hit",
    "HitVote",
    "Holding",
    "LayerGate",
    "Lengths",
    "Machine",
    "NullTransport",
    "OutcomeVote",
    "Ownership",
    "OwnershipError",
    "Placement",
    "PpSync",
    "Prefetch",
    "ProgressVote",
    "Publication",
    "RankAudit",
    "RankDisagreementError",
    "RankError",
    "RankStalledError",
    "Reading",
    "Report",
    "RestoreSession",
    "ScratchBudget",
    "ScratchSize",
    "ShapeError",
    "Spread",
    "StateDigest",
    "StateError",
    "StepEnd",
    "TierLedger",
    "Topology",
    "Transport",
    "Verdict",
    "Watch",
    "drive",
    "rank_consensus",
]
