"""The part of the compiled module that `hicache_store.ranks` exports; no module has this name.

Ranks are ints. A machine's `begin` and `resume` give an `Ask`, and in the end the result; `resume` takes a
list of ints, None for what has merely been done, or `Expired`. What cannot be represented raises
OverflowError.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias, final

_Answer: TypeAlias = Sequence[int] | Expired | None
_CpKind: TypeAlias = Literal["none", "page", "layer", "token", "replicated"]
_Scope: TypeAlias = Literal["stage", "replica"]
_Phase: TypeAlias = Literal[
    "matched", "promised", "prefetching", "loading", "ready", "committed", "failed", "aborted"
]
_Event: TypeAlias = tuple[str, int, int]
_Tier: TypeAlias = Literal["device", "host", "storage", "recomputed"]
_Stage: TypeAlias = Literal["promised", "agreed", "completed", "materialized", "consumed"]
_Steps: TypeAlias = Sequence[tuple[Literal["attribute", "item"], str | int]]
_Call: TypeAlias = Literal["len", "digest", "sorted"]

# -- where a rank stands ---------------------------------------------------------------------------

@final
class Coordinates:
    """Position on each axis."""

    @property
    def dp(self) -> int:
        """Data parallel replica."""

    @property
    def pp(self) -> int:
        """Pipeline stage."""

    @property
    def cp(self) -> int:
        """Context parallel rank."""

    @property
    def tp(self) -> int:
        """Tensor parallel rank of attention."""

    @property
    def dcp(self) -> int:
        """Decode context parallel rank."""

    def __hash__(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class Topology:
    """Sizes of the axes. Ranks are numbered as in the engine: stages, replicas, context, tensor ranks."""

    def __new__(
        cls, pp: int = 1, cp: int = 1, tp: int = 1, *, cp_kind: _CpKind = "none", dp: int = 1, dcp: int = 1
    ) -> Topology:
        """Describes a topology.

        Args:
            pp: Pipeline stages.
            cp: Context parallel ranks.
            tp: Tensor parallel ranks of attention.
            cp_kind: What context parallel ranks hold of a sequence; needed where there are several.
            dp: Data parallel replicas.
            dcp: Ranks of a decode context parallel group.

        Raises:
            ConfigError: A size of 0, too many ranks, an unclear kind, or `dcp` that does not divide `tp`.
        """

    @property
    def pp(self) -> int:
        """Pipeline stages."""

    @property
    def cp(self) -> int:
        """Context parallel ranks."""

    @property
    def tp(self) -> int:
        """Tensor parallel ranks."""

    @property
    def dp(self) -> int:
        """Data parallel replicas."""

    @property
    def dcp(self) -> int:
        """Ranks of a decode context parallel group."""

    @property
    def cp_kind(self) -> str:
        """What context parallel ranks hold."""

    @property
    def owners(self) -> int:
        """Ranks that pages are dealt out over."""

    @property
    def ranks(self) -> int:
        """Number of ranks."""

    def coordinates(self, rank: int) -> Coordinates:
        """Returns where a rank stands.

        Raises:
            ConfigError: There is no such rank.
        """

    def rank(self, *, pp: int = 0, cp: int = 0, tp: int = 0, dp: int = 0) -> int:
        """Returns the rank at a position, taken modulo the sizes."""

    def members(self, rank: int, scope: _Scope = "replica") -> list[int]:
        """Returns the ranks that `rank` reduces with, itself included, in ascending order.

        Raises:
            ConfigError: There is no such rank or scope.
        """

    def previous_stage(self, rank: int) -> int | None:
        """Returns the same position one stage earlier, from which counts come."""

    def next_stage(self, rank: int) -> int | None:
        """Returns the same position one stage later, to which counts go."""

    def __hash__(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

# -- ownership -------------------------------------------------------------------------------------

@final
class Placement:
    """How logical token slots map to owners, pages and rows: `owner(page) = page mod owners`."""

    def __new__(cls, owners: int, page_tokens: int) -> Placement:
        """Describes a placement.

        Raises:
            ConfigError: One of them is 0.
        """

    @property
    def owners(self) -> int:
        """Number of owners."""

    @property
    def page_tokens(self) -> int:
        """Tokens in a page."""

    def page(self, loc: int) -> int:
        """Returns the page of a token slot."""

    def owner(self, page: int) -> int:
        """Returns the owner of a page."""

    def local(self, page: int) -> int:
        """Returns the page's number among its owner's pages."""

    def row(self, loc: int) -> int:
        """Returns the row of a token slot in its owner's memory."""

    def loc(self, owner: int, row: int) -> int:
        """Returns the token slot of a row of `owner`."""

    def owned(self, locs: Sequence[int], owner: int) -> list[int]:
        """Returns the token slots among `locs` that `owner` holds, in their order."""

    __hash__: None  # type: ignore[assignment]
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class ClassedPool:
    """The allocator of pages by owner class, mirrored on all ranks: equal calls give equal pages."""

    def __new__(cls, placement: Placement, pages_per_class: int) -> ClassedPool:
        """Makes a pool, all pages free.

        Raises:
            ConfigError: More pages than 32 bits can number.
        """

    @property
    def total(self) -> int:
        """Pages of the pool, free or taken."""

    @property
    def counts(self) -> list[int]:
        """Free pages of each class."""

    @property
    def free_pages(self) -> int:
        """Free pages of all classes together: what is there, not what can be admitted."""

    @property
    def floor(self) -> int:
        """Pages that any cyclic run can count on: the number for admission."""

    @property
    def least_full_class(self) -> int:
        """The class with most free pages, the lowest of equals."""

    @property
    def digest(self) -> int:
        """Digest of the free lists: equal on all ranks after equal calls."""

    def is_free(self, page: int) -> bool:
        """Returns whether a page is free; False for one that the pool does not have."""

    def alloc_cyclic(self, start: int, pages: int) -> list[int] | None:
        """Takes pages of owners `start`, `start + 1`, ... in turn: all of them, or None."""

    def alloc_batch(self, runs: Sequence[tuple[int, int]]) -> list[list[int]] | None:
        """Takes the pages of several runs, each a start and a number of pages: all runs, or None."""

    def free(self, pages: Sequence[int]) -> None:
        """Gives pages back.

        Raises:
            OwnershipError: One of them is not taken, or named twice; then none is given back.
        """

@final
class Ownership:
    """The rules along a chain: a base taken once, inherited by branches, kept by backup and restore."""

    def __new__(cls, placement: Placement) -> Ownership:
        """Makes the rules over a placement."""

    def new_chain(self, pool: ClassedPool) -> int:
        """Returns the base of a chain that begins with nothing cached; others inherit theirs."""

    def owner_at(self, base: int, position: int) -> int:
        """Returns the owner of position page `position`, counted from the root."""

    def may_splice(self, path: int, chain: int) -> bool:
        """Returns whether a chain of base `chain` may be inserted below a path of base `path`."""

    def allocate_backup(self, host: ClassedPool, source: Sequence[int]) -> list[int] | None:
        """Takes host pages for a backup, each of its page's owner; None where the pool is full."""

    def allocate_restore(self, device: ClassedPool, source: Sequence[int]) -> list[int] | None:
        """Takes device pages for a restore, each of its page's owner; None where the pool is full."""

    def own_share(self, owner: int, source: Sequence[int], target: Sequence[int]) -> list[tuple[int, int]]:
        """Returns the pairs of a copy that `owner` carries out. An empty share is acknowledged all the same.

        Raises:
            OwnershipError: A page would move to another owner.
            ConfigError: The lists differ in length.
        """

    def gather(self, prefixes: Sequence[Sequence[int]]) -> GatherPlan:
        """Returns the plan of a gather of cached prefixes, each a list of pages in order of position.

        Raises:
            OwnershipError: A path is not one cyclic run.
        """

@final
class GatherPlan:
    """What every owner sends and where it lands: equal blocks, one behind the other."""

    @property
    def block(self) -> int:
        """Pages in each owner's block."""

    @property
    def scratch_pages(self) -> int:
        """Pages of the assembled region, padding included."""

    def send(self, owner: int) -> list[int | None]:
        """Returns the block of an owner; None for padding.

        Raises:
            ConfigError: There is no such owner.
        """

    def scratch_page(self, page: int) -> int | None:
        """Returns where a page lies in the region; None for one that is not in the plan."""

@final
class Holding:
    """What a rank holds of a pool."""

    @property
    def owner(self) -> int | None:
        """The owner whose pages it holds; None for every page."""

    @property
    def layers(self) -> tuple[int, int]:
        """Model-global layers, half open."""

    @property
    def heads(self) -> tuple[int, int]:
        """Model-global KV heads, half open."""

    @property
    def tokens(self) -> tuple[int, int]:
        """First token within a page, and the distance of tokens."""

    def __hash__(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class Spread:
    """How a pool is spread over the ranks, and who writes what."""

    def __new__(cls, stages: Sequence[tuple[int, int]], kv_heads: int) -> Spread:
        """Describes a pool by the layers of each stage; 1 head for latent rows.

        Raises:
            ConfigError: An empty stage, stages that overlap, no head.
        """

    @staticmethod
    def even(layers: int, stages: int, kv_heads: int) -> Spread:
        """Deals layers out to stages as evenly as possible.

        Raises:
            ConfigError: More stages than layers, no stage, no head.
        """

    def holding(self, topology: Topology, rank: int) -> Holding:
        """Returns what a rank holds.

        Raises:
            ConfigError: Another number of stages, or heads that do not divide.
        """

    def writer(self, topology: Topology, rank: int) -> int:
        """Returns the rank that writes what `rank` holds: the first with an equal holding.

        Raises:
            ConfigError: As `holding`.
        """

    def is_writer(self, topology: Topology, rank: int) -> bool:
        """Returns whether a rank writes what it holds.

        Raises:
            ConfigError: As `holding`.
        """

# -- asks ------------------------------------------------------------------------------------------

@final
class Ask:
    """What a machine needs before it can go on; a `Transport` carries it out."""

    @staticmethod
    def reduce(
        values: Sequence[int],
        *,
        name: str,
        number: int = 0,
        lane: str = "scheduler",
        scope: str = "replica",
        op: str = "min",
    ) -> Ask:
        """Makes a reduction that no machine asks for; count and length must be equal on all ranks.

        Raises:
            ConfigError: An unknown lane, scope or op.
        """

    @property
    def kind(self) -> Literal["reduce", "start", "collect", "send", "receive", "wait"]:
        """What is asked for."""

    @property
    def lane(self) -> str:
        """Which thread asks; each needs groups of its own."""

    @property
    def scope(self) -> str | None:
        """Which ranks reduce: "stage" or "replica"."""

    @property
    def op(self) -> str | None:
        """How elements are combined: "min" or "and"."""

    @property
    def name(self) -> str:
        """What it is for, in words."""

    @property
    def number(self) -> int:
        """Step, request or round."""

    @property
    def operation(self) -> str:
        """Name and number."""

    @property
    def values(self) -> list[int] | None:
        """This rank's vector, or the message that is sent."""

    @property
    def peer(self) -> int | None:
        """To whom a message goes, or from whom it comes."""

    @property
    def length(self) -> int | None:
        """Words of a message that is received."""

    def wait(self, seconds: float) -> bool:
        """Waits for the front entry of the log that is meant; returns whether it is finished."""

@final
class Expired:
    """The answer that a deadline passed."""

    def __new__(cls, rank: int) -> Expired:
        """Names the rank that everyone waits for in the end."""

    @property
    def rank(self) -> int:
        """The rank that everyone waits for in the end."""

    def __hash__(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class Watch:
    """Who is to blame for a wait that passed its deadline, from what all ranks last said."""

    def __new__(cls) -> Watch:
        """Makes one in which nobody has said anything."""

    def beat(self, rank: int, progress: int, missing: Sequence[int]) -> None:
        """Notes how far a rank is and whom it misses."""

    def silence(self, rank: int) -> None:
        """Notes that a rank's heartbeat stayed away."""

    def culprit(self, missing: Sequence[int]) -> int | None:
        """Returns the rank that a wait for `missing` comes down to; None where nothing is missing."""

# -- acknowledgements and pp_sync ------------------------------------------------------------------

@final
class AckLog:
    """The acknowledgements of one kind of operation on one rank: ordered, gap-free, consumed from the front.

    Any thread may append and finish; the scheduler's thread consumes through `PpSync`.
    """

    def __new__(cls, name: str, *, background: bool = False, voted: bool = False) -> AckLog:
        """Makes an empty log.

        Args:
            name: For messages.
            background: Entries are appended by another thread after an agreement, so that one that is chosen
                may still be on its way. Otherwise the scheduler appends them before the step.
            voted: Ranks can differ in an outcome: an entry is ready when `decide` was called for it.
        """

    @property
    def name(self) -> str:
        """Name for messages."""

    @property
    def ready(self) -> int:
        """Length of the leading run of ready entries."""

    @property
    def front(self) -> int:
        """Ticket of the oldest entry that has not been consumed."""

    @property
    def digest(self) -> int:
        """Digest of the operations appended so far, in order."""

    def append(self, operation: int) -> int:
        """Appends a submitted operation that will finish later, also one whose share here is empty.

        Returns:
            Its ticket.
        """

    def append_finished(self, operation: int, complete: bool = True, value: int = 0) -> int:
        """Appends an operation that needs no time: an empty share, a failure at submission, an agreed result.

        Returns:
            Its ticket.
        """

    def finish(self, ticket: int, complete: bool = True) -> bool:
        """Notes that an operation has finished on this rank.

        Returns:
            False where it had before; nothing changes then.

        Raises:
            AckOrderError: The ticket was never given out.
        """

    def decide(self, ticket: int, complete: bool = True) -> bool:
        """Notes the agreed outcome of an entry.

        Returns:
            False where it was known.

        Raises:
            AckOrderError: The ticket was never given out.
            StateError: The entry has not finished here.
        """

    def next_vote(self) -> tuple[int, bool] | None:
        """Returns the next entry whose outcome can be voted on, and how it ended here; each once."""

    def __len__(self) -> int: ...

@final
class Ack:
    """A consumed entry."""

    @property
    def ticket(self) -> int:
        """Its place in the log."""

    @property
    def operation(self) -> int:
        """The operation."""

    @property
    def complete(self) -> bool:
        """Whether it succeeded; otherwise its effect must not be seen."""

    @property
    def value(self) -> int:
        """A number that came with it."""

    def __hash__(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class Apply:
    """An entry is consumed: apply its effect, then go on with `resume(None)`."""

    @property
    def log(self) -> int:
        """Which log, by its place."""

    @property
    def ack(self) -> Ack:
        """The entry."""

@final
class StepEnd:
    """A step is over."""

    @property
    def expired(self) -> int:
        """Operations numbered below have run out of time, on all ranks alike."""

    __hash__: None  # type: ignore[assignment]
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class PpSync:
    """The machine of one rank's scheduler thread: every rank consumes the same entries in the same step."""

    def __new__(
        cls, topology: Topology, rank: int, logs: Sequence[AckLog], mode: Literal["now", "lagged"] = "now"
    ) -> PpSync:
        """Makes the machine over logs that all ranks have in the same order.

        Args:
            topology: Sizes of the axes.
            rank: This rank.
            logs: What is consumed.
            mode: "lagged" uses counts whose reduction began one step before.

        Raises:
            ConfigError: There is no such rank, or a log is named twice.
        """

    @property
    def steps(self) -> int:
        """Steps begun so far."""

    def bring(self, *, digest: int = 0, expired: int = 0) -> None:
        """Says what this rank brings to its next steps.

        Args:
            digest: Of state that must be equal on all ranks.
            expired: Operations numbered below have run out of time by this rank's clock.
        """

    def begin(self) -> Ask | Apply | StepEnd:
        """Begins a step. Every rank does for every step, also where its logs are empty.

        Raises:
            StateError: A step is under way, or the machine has failed.
        """

    def resume(self, answer: _Answer, /) -> Ask | Apply | StepEnd:
        """Goes on with an answer, or None after an entry was applied. After an error only `restart` helps.

        Raises:
            RankStalledError: The deadline passed.
            RankDisagreementError: Ranks differ in their state.
            ShapeError: Ranks are in different steps.
            AckOrderError: A chosen entry was never submitted here.
        """

    def restart(self, epoch: int) -> None:
        """Begins again after a failure, on all ranks with the same new epoch."""

# -- votes -----------------------------------------------------------------------------------------

@final
class Lengths:
    """A set of legal prefix lengths, in pages. Length 0 is always legal."""

    def __new__(cls, span: int, legal: Sequence[int] = ()) -> Lengths:
        """Makes a set of the legal lengths up to `span`."""

    @staticmethod
    def up_to(span: int, pages: int) -> Lengths:
        """Makes the set of every length up to `pages`."""

    @property
    def span(self) -> int:
        """Pages that were asked for."""

    @property
    def longest(self) -> int:
        """The longest legal length."""

    def intersect(self, other: Lengths) -> Lengths:
        """Returns the lengths that are legal in both.

        Raises:
            ShapeError: The spans differ.
        """

    def __contains__(self, length: int, /) -> bool: ...
    __hash__: None  # type: ignore[assignment]
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class Hit:
    """The agreed hit."""

    @property
    def pages(self) -> int:
        """Pages that every rank can use, over all pools."""

    @property
    def by_pool(self) -> list[int]:
        """The longest legal length of each pool alone."""

    __hash__: None  # type: ignore[assignment]
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class HitVote:
    """The vote of one rank on the hit of one request; lane "query"."""

    def __new__(
        cls, request: int, span: int, pools: Sequence[int | Lengths | None], *, masks: bool = False
    ) -> HitVote:
        """Makes the vote.

        Args:
            request: Its number.
            span: Pages that were asked for.
            pools: What this rank has of each: leading pages, legal lengths of trailing state, or None where
                it does not hold the pool. Number and order are equal on all ranks.
            masks: Whether any pool of the deployment has trailing state.
        """

    @staticmethod
    def nothing(request: int, span: int, pools: int, *, masks: bool = False) -> HitVote:
        """Makes the vote of a rank that cancelled, failed, or does not know the request. It takes part."""

    @property
    def request(self) -> int:
        """The request's number."""

    def begin(self) -> Ask:
        """Returns the reduction to carry out."""

    def resume(self, answer: _Answer, /) -> Hit:
        """Returns the agreed hit.

        Raises:
            RankStalledError: The deadline passed.
            RankDisagreementError: Ranks voted on different requests.
            ShapeError: An answer of another length.
        """

@final
class OutcomeVote:
    """The vote on the outcome of a copy that can fail on one rank alone; lane "outcome"."""

    def __new__(cls, ticket: int, complete: bool) -> OutcomeVote:
        """Makes the vote on an entry of a log, see `AckLog.next_vote`."""

    def begin(self) -> Ask:
        """Returns the reduction to carry out."""

    def resume(self, answer: _Answer, /) -> bool:
        """Returns whether it succeeded on all ranks.

        Raises:
            RankStalledError: The deadline passed.
            RankDisagreementError: Ranks voted on different entries.
        """

@final
class CapacityVote:
    """The smallest capacity of all ranks, which every rank then uses; lane "scheduler"."""

    def __new__(cls, pages: Sequence[int]) -> CapacityVote:
        """Makes the vote of a rank with room for so many pages in each of its pools."""

    def begin(self) -> Ask:
        """Returns the reduction to carry out."""

    def resume(self, answer: _Answer, /) -> list[int]:
        """Returns the agreed capacities.

        Raises:
            RankStalledError: The deadline passed.
        """

# -- reads from the store --------------------------------------------------------------------------

@final
class Report:
    """What one rank, or after a vote all of them, report of a read."""

    @property
    def operation(self) -> int:
        """The operation, by its number in the order of submission."""

    @property
    def index(self) -> int:
        """Which report of the operation this is, from 0."""

    @property
    def part(self) -> Literal["progress", "side_pools", "done"]:
        """Which part it closes."""

    @property
    def completed(self) -> int:
        """Leading pages that are complete."""

    __hash__: None  # type: ignore[assignment]
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class Reading:
    """The reading side of an operation: as many reports on every rank, whatever happens to the read."""

    def __new__(cls, operation: int, hit: int, batch: int, *, side_pools: bool = False) -> Reading:
        """Begins a read of `hit` pages in batches of `batch`; all facts are agreed.

        Raises:
            ConfigError: Batches of no pages.
        """

    @property
    def next_part(self) -> Literal["progress", "side_pools", "done"] | None:
        """The part that is to be tried next; None after the last."""

    @property
    def next_batch(self) -> tuple[int, int]:
        """Pages of the next batch, half open."""

    def report(self, pages: int) -> Report:
        """Notes how the next part went: leading pages that are there, 0 for a failure or a cancel.

        Raises:
            StateError: After the last part.
        """

@final
class ProgressVote:
    """The vote on one report; lane "progress"."""

    def __new__(cls, report: Report) -> ProgressVote:
        """Makes the vote of a rank with this report."""

    def begin(self) -> Ask:
        """Returns the reduction to carry out."""

    def resume(self, answer: _Answer, /) -> Report:
        """Returns the agreed report.

        Raises:
            RankStalledError: The deadline passed.
            RankDisagreementError: Ranks report different operations or parts.
        """

@final
class Publication:
    """What is to be done with the pages of an operation that is done."""

    @property
    def publish(self) -> int:
        """Pages `[0, publish)` become visible."""

    @property
    def free_to(self) -> int:
        """Pages `[publish, free_to)` go back to the free list."""

    __hash__: None  # type: ignore[assignment]
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class Prefetch:
    """The scheduler's side of an operation: agreed reports in, one publication out."""

    def __new__(cls, operation: int, span: int, hit: int) -> Prefetch:
        """Makes it for `span` requested pages of which `hit` were agreed on."""

    @property
    def operation(self) -> int:
        """The operation, by its number in the order of submission."""

    @property
    def span(self) -> int:
        """Pages that were asked for."""

    @property
    def hit(self) -> int:
        """Agreed pages, at most the span."""

    @property
    def completed(self) -> int:
        """Pages that are complete on all ranks so far."""

    def consume(self, report: Report) -> Publication | None:
        """Takes an agreed report, as consumed through pp_sync; with the last comes what to do with the pages.

        Raises:
            AckOrderError: A report of another operation, or after done.
        """

# -- scratch and order on the device ---------------------------------------------------------------

@final
class ScratchSize:
    """What the size of the two alternating scratch buffers follows from."""

    def __new__(cls, placement: Placement, *, contexts: int, context: int, chunk: int) -> ScratchSize:
        """Sizes buffers for `contexts` full prefixes of `context` tokens and `chunk` new tokens in one batch.

        Raises:
            ConfigError: One of them is 0, or the product does not fit.
        """

    @property
    def rows(self) -> int:
        """Rows of one slot: prefixes, chunk, and a page to which everything else resolves."""

    @property
    def prefix_tokens(self) -> int:
        """Tokens of the prefix region."""

    @property
    def chunk_tokens(self) -> int:
        """Tokens of the chunk region."""

    def bytes(self, row_bytes: int, *, draft: bool = False) -> int:
        """Returns the bytes charged before the KV pools are sized; twice as many with a draft's slots."""

    def padded(self, pages: int) -> int:
        """Returns the tokens that a prefix of so many pages takes, padding included."""

    __hash__: None  # type: ignore[assignment]
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class ScratchBudget:
    """What one batch has reserved."""

    def __new__(cls, size: ScratchSize) -> ScratchBudget:
        """Makes an empty batch."""

    @property
    def used(self) -> tuple[int, int]:
        """Tokens reserved so far: of the prefix region and of the chunk region."""

    def reserve(self, prefix_pages: int, extend_tokens: int) -> bool:
        """Reserves room for a request, before its load is queued; returns whether there was some.

        Raises:
            ConfigError: It would not fit in an empty batch: waiting would not help it.
        """

    def mark(self) -> int:
        """Returns where the batch stands."""

    def rollback(self, mark: int) -> None:
        """Takes back what was reserved since a mark.

        Raises:
            StateError: There is no such mark.
        """

    def clear(self) -> None:
        """Begins the next batch; marks are forgotten."""

@final
class Gather:
    """A gather that is to be issued."""

    @property
    def epoch(self) -> int:
        """Forward pass of the layer that is assembled."""

    @property
    def layer(self) -> int:
        """The layer."""

    @property
    def slot(self) -> int:
        """In which slot."""

    @property
    def waits(self) -> list[_Event]:
        """What it waits for: "loaded" or "read_ended", forward pass and layer."""

@final
class LayerGate:
    """The two slots of one rank: which events a gather and a read wait for on the engine's streams."""

    def __new__(cls, layers: int) -> LayerGate:
        """Makes the gate of a model part.

        Raises:
            ConfigError: No layers.
        """

    def gather(self) -> Gather:
        """Takes a slot for the next layer. Layers come in order, pass after pass, on all ranks alike."""

    def read(self, epoch: int, layer: int) -> list[_Event]:
        """Returns what the read of a layer waits for: "gathered", forward pass and layer.

        Raises:
            OwnershipError: The layer is not one of the two that are live.
        """

# -- promises --------------------------------------------------------------------------------------

@final
class RestoreSession:
    """A request on the decode side: what is promised to the peer is restored, or it fails on all ranks."""

    def __new__(
        cls,
        request: int,
        *,
        prompt_tokens: int,
        page_tokens: int,
        device: int = 0,
        host: int = 0,
        storage: int = 0,
    ) -> RestoreSession:
        """Makes a session for what a look-up found, in pages; the device part is locked.

        Raises:
            ConfigError: More was found than the prompt has whole pages.
        """

    @property
    def phase(self) -> _Phase:
        """Where the session stands."""

    @property
    def promised(self) -> tuple[int, int] | None:
        """Tokens that the peer sends, half open: everything before them is restored here."""

    @property
    def restored(self) -> tuple[int, int] | None:
        """Tokens that are written to the token map on commit, half open."""

    @property
    def obligations(self) -> list[str]:
        """What the session holds: "lock", "suffix_slots", "load", "prefetch"."""

    @property
    def is_ready(self) -> bool:
        """Whether this rank could run the request."""

    def prefetch(self, accepted: bool) -> None:
        """The prefetch of the storage part was accepted or declined, on all ranks alike.

        Raises:
            StateError: After the promise.
        """

    def promise(self) -> tuple[int, int]:
        """Makes the promise: the peer is to send these tokens, half open.

        Raises:
            StateError: It was made before, or the prefetch is not decided.
        """

    def transfer(self, peer_match_tokens: int) -> tuple[int, int] | None:
        """Returns what the peer is to send, whatever it has cached itself; None before the promise."""

    def prefetched(self, pages: int) -> _Phase:
        """The prefetch has ended with so many pages in host memory.

        Raises:
            StateError: Before the promise.
        """

    def rematched(self, pages: int) -> _Phase:
        """The second look-up, for exactly the promised tokens.

        Raises:
            StateError: Before the promise.
        """

    def loading(self, awaited: int = 0) -> None:
        """The load has been queued; `awaited` loads of other requests bring pages of this one.

        Raises:
            StateError: Before the promise.
        """

    def followed(self) -> None:
        """A load of another request has ended that brought pages of this one."""

    def loaded(self, complete: bool = True) -> _Phase:
        """The own load has ended. Nothing is given back before.

        Raises:
            StateError: None was queued.
        """

    def transferred(self, complete: bool = True) -> None:
        """The suffix has arrived from the peer, or will not."""

    def abort(self) -> None:
        """This rank gives the request up; the others learn of it by the poll."""

    def begin(self) -> Ask:
        """Returns the poll of a tick; every rank takes part for every promised request, in order."""

    def resume(self, answer: _Answer, /) -> Literal["pending", "commit", "fail"]:
        """Takes the answer to the poll.

        Raises:
            RankStalledError: The deadline passed.
            RankDisagreementError: Ranks polled for different requests.
        """

    def release(self) -> list[str]:
        """Gives back what can be given back now, each thing once; call it again when a load has ended."""

@final
class TierLedger:
    """The account of one request on one rank: where its tokens came from. All numbers are tokens unless said.

    It adds up when the tiers hold the prompt, no stage has more tokens than the one before it, consumed
    tokens are those from storage, every promised token that was not consumed has a reason, and bytes match
    rows. Sums stop at the largest number of 64 bits.
    """

    def __new__(cls, prompt: int) -> TierLedger:
        """Begins the account of a request with so many tokens."""

    def take(self, tier: _Tier, tokens: int) -> None:
        """Counts tokens that were taken from a tier; "recomputed" are those that were in none.

        Raises:
            ConfigError: There is no such tier.
        """

    def reach(self, stage: _Stage, tokens: int) -> None:
        """Counts tokens of the store that came so far.

        Args:
            stage: "promised" by this rank's look-up, "agreed" on all ranks, "completed" reads on all ranks,
                "materialized" in the tree, "consumed" by the request.
            tokens: How many more.

        Raises:
            ConfigError: There is no such stage.
        """

    def shortfall(self, reason: str, tokens: int) -> None:
        """Counts promised tokens that were not consumed, with the reason in words."""

    def copied(self, rows: int, moved_bytes: int) -> None:
        """Counts rows that this rank copied to the device, and the bytes that were moved for them."""

    def tier(self, tier: _Tier) -> int:
        """Returns the tokens taken from a tier.

        Raises:
            ConfigError: There is no such tier.
        """

    def stage(self, stage: _Stage) -> int:
        """Returns the tokens that came so far.

        Raises:
            ConfigError: There is no such stage.
        """

    def check(self, row_bytes: int) -> None:
        """Checks that the account adds up, with rows of `row_bytes` bytes.

        Raises:
            RankDisagreementError: It does not; the message has the numbers that differ.
        """

# -- the consensus checker -------------------------------------------------------------------------

@final
class StateDigest:
    """Digest of the state that decisions come from, kept up to date change by change."""

    def __new__(cls) -> StateDigest:
        """Makes the digest of nothing."""

    @property
    def combined(self) -> int:
        """All of it in one number, for `PpSync.bring`."""

    def lock(self, node: int) -> None:
        """A lock of `node` was taken. Locks are counted."""

    def unlock(self, node: int) -> None:
        """A lock of `node` was released."""

    def touch(self, node: int) -> None:
        """`node` became the most recently used one."""

    def free_lists(self, digest: int) -> None:
        """The free lists now have this digest, see `ClassedPool.digest`."""

    def base(self, node: int, base: int) -> None:
        """The chain below `node` got a rotation base, or lost it again."""

@final
class Verdict:
    """What a round of the checker found."""

    @property
    def kind(self) -> Literal["equal", "differs", "silent"]:
        """What it is."""

    @property
    def stream(self) -> int | None:
        """The stream, by its place."""

    @property
    def index(self) -> int | None:
        """Number of the first differing record; how many records the silent rank has."""

    @property
    def rank(self) -> int | None:
        """The silent rank."""

    @property
    def records(self) -> list[tuple[int, str]]:
        """What each rank recorded there, as text."""

@final
class AuditRecords:
    """The records of one rank: what `RankAudit` is made of."""

    def __new__(
        cls,
        topology: Topology,
        rank: int,
        streams: Sequence[str],
        *,
        live: bool = False,
        run: int | None = None,
    ) -> AuditRecords:
        """Begins to keep records.

        Args:
            topology: Sizes of the axes.
            rank: This rank.
            streams: Their names, the same on all ranks.
            live: Whether rounds compare them.
            run: Number of the run, where a log is written.

        Raises:
            ConfigError: There is no such rank, or no stream.
        """

    @property
    def progress(self) -> list[tuple[int, int]]:
        """For each stream, how many records are known to be equal on all ranks, and how many wait."""

    def record(self, stream: int, step: int, kind: str, name: str, fields: Iterable[Any]) -> None:
        """Records a call, a return or a change of state.

        Raises:
            ConfigError: There is no such stream or kind.
        """

    def record_state(self, stream: int, step: int, state: StateDigest) -> None:
        """Records digests of the state.

        Raises:
            ConfigError: There is no such stream.
        """

    def take_log(self, *, flush: bool = False) -> bytes:
        """Returns bytes of the log that are complete; with `flush`, of everything recorded so far."""

    def bring(self, overdue: bool) -> None:
        """Says whether by this rank's clock no round brought news for longer than the deadline."""

    def begin(self) -> Ask | Verdict:
        """Begins a round; every rank does equally often.

        Raises:
            StateError: A round is under way, or the audit is not live.
        """

    def resume(self, answer: _Answer, /) -> Ask | Verdict:
        """Goes on with an answer.

        Raises:
            RankStalledError: A rank did not come to the round.
        """

@final
class AuditedFunction:
    """What is recorded of the calls of one function: what `rank_consensus` is made of."""

    def __new__(
        cls,
        records: AuditRecords,
        name: str,
        params: Sequence[tuple[int | None, str, object, _Steps, _Call | None]],
        result: Sequence[tuple[_Steps, _Call | None]],
    ) -> AuditedFunction:
        """Makes it of selectors that were read.

        Args:
            records: Where records go.
            name: The function's name in records.
            params: For each selector of an argument, its place among positional ones (None where it is given
                by name alone), its name and default, the steps from there, and what is asked of the end.
            result: For each selector of the result, the steps from there, and what is asked of the end.
        """

    def called(self, stream: int, step: int, args: tuple[Any, ...], named: dict[str, Any], /) -> None:
        """Records a call. Of an exception that a selector meets the type is recorded.

        Raises:
            ConfigError: There is no such stream.
        """

    def returned(self, stream: int, step: int, result: object, /) -> None:
        """Records a return.

        Raises:
            ConfigError: There is no such stream.
        """

def _rank_error_kinds() -> list[str]:
    """Returns the names of all kinds of errors of ranks."""
