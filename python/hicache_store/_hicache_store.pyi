"""The compiled part of the package: import its names from `hicache_store`.

Two words are used throughout. **Buffer**: C-contiguous host memory, given as a numpy array of any plain
dtype, a CPU tensor, or any object with the buffer protocol (bytes, bytearray, memoryview, mmap). **Shapes**
are `[pages, layers, page_size, heads, row]` with the axes in the order of the layout; `row` is one token, one
layer, one head of one component, and its bytes are the component's `row_bytes`.

A call that is given a buffer holds the object until it returns. Until then nobody else may change the slots
that the call names, nor read those that it writes: the calls release the interpreter lock.
"""

import builtins
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Final, Literal, TypeAlias, final

from typing_extensions import Self

from hicache_store._ranks import (
    Ack as Ack,
)
from hicache_store._ranks import (
    AckLog as AckLog,
)
from hicache_store._ranks import (
    Apply as Apply,
)
from hicache_store._ranks import (
    Ask as Ask,
)
from hicache_store._ranks import (
    AuditedFunction as AuditedFunction,
)
from hicache_store._ranks import (
    AuditRecords as AuditRecords,
)
from hicache_store._ranks import (
    CapacityVote as CapacityVote,
)
from hicache_store._ranks import (
    ClassedPool as ClassedPool,
)
from hicache_store._ranks import (
    Coordinates as Coordinates,
)
from hicache_store._ranks import (
    Expired as Expired,
)
from hicache_store._ranks import (
    Gather as Gather,
)
from hicache_store._ranks import (
    GatherPlan as GatherPlan,
)
from hicache_store._ranks import (
    Hit as Hit,
)
from hicache_store._ranks import (
    HitVote as HitVote,
)
from hicache_store._ranks import (
    Holding as Holding,
)
from hicache_store._ranks import (
    LayerGate as LayerGate,
)
from hicache_store._ranks import (
    Lengths as Lengths,
)
from hicache_store._ranks import (
    OutcomeVote as OutcomeVote,
)
from hicache_store._ranks import (
    Ownership as Ownership,
)
from hicache_store._ranks import (
    Placement as Placement,
)
from hicache_store._ranks import (
    PpSync as PpSync,
)
from hicache_store._ranks import (
    Prefetch as Prefetch,
)
from hicache_store._ranks import (
    ProgressVote as ProgressVote,
)
from hicache_store._ranks import (
    Publication as Publication,
)
from hicache_store._ranks import (
    Reading as Reading,
)
from hicache_store._ranks import (
    Report as Report,
)
from hicache_store._ranks import (
    RestoreSession as RestoreSession,
)
from hicache_store._ranks import (
    ScratchBudget as ScratchBudget,
)
from hicache_store._ranks import (
    ScratchSize as ScratchSize,
)
from hicache_store._ranks import (
    Spread as Spread,
)
from hicache_store._ranks import (
    StateDigest as StateDigest,
)
from hicache_store._ranks import (
    StepEnd as StepEnd,
)
from hicache_store._ranks import (
    TierLedger as TierLedger,
)
from hicache_store._ranks import (
    Topology as Topology,
)
from hicache_store._ranks import (
    Verdict as Verdict,
)
from hicache_store._ranks import (
    Watch as Watch,
)
from hicache_store._ranks import (
    _rank_error_kinds as _rank_error_kinds,
)

# A list of keys (32 bytes or 64 hex digits each), a uint8 array `[pages, 32]`, or 32 bytes for each page.
_Keys: TypeAlias = Sequence[bytes] | Sequence[str] | bytes | bytearray | Any
_Key: TypeAlias = bytes | str
# A sequence of ints, or an integer array of one axis.
_Integers: TypeAlias = Sequence[int] | Any
# See above.
_Buffer: TypeAlias = Any
# A Region, a HostPool, a buffer, or a list or tuple with one of these for each component.
_Memory: TypeAlias = Region | HostPool | _Buffer
# One of these for a layout of one buffer, a list of them for several; see `TransferPool`.
_TransferMemory: TypeAlias = Any

__version__: Final[str]
"""Version of the package and of the tool in it."""

def page_keys(
    tokens: _Integers,
    page_size: int,
    *,
    prior: _Key | None = None,
    extra_key: str | None = None,
    cache_salt: str | None = None,
    bigram: bool = False,
) -> list[bytes]:
    """Computes the keys of the whole pages of `tokens`, as the engine does.

    Each key is the SHA-256 of the key before it and of the page's tokens: the same in every process, whatever
    `PYTHONHASHSEED` says. The tokens of a last part page are left out.

    Args:
        tokens: Token ids, 0 to 2^63 - 1 each.
        page_size: Tokens in a page, at least 1.
        prior: Key of the page before the first one, to go on with a chain.
        extra_key: The request's adapter, hashed before the first page.
        cache_salt: The request's cache salt, hashed before the first page.
        bigram: Whether positions are pairs of tokens, as for a speculative engine's draft.

    Returns:
        One key of 32 bytes for each whole page, in order.

    Raises:
        ConfigError: A token is negative, too large or no integer; `page_size` is 0; `prior` is given together
            with `extra_key` or `cache_salt`.
    """

def chain_seed(extra_key: str | None = None, cache_salt: str | None = None) -> bytes | None:
    """Computes what the first page of a request with an adapter or a cache salt hashes before its tokens.

    Args:
        extra_key: The request's adapter. None and "" differ.
        cache_salt: The request's cache salt. None and "" differ.

    Returns:
        32 bytes, or None where the request has neither.
    """

@final
class Namespace:
    """What must be equal for the bytes of two deployments to be interchangeable.

    Immutable, comparable, hashable, picklable. Any difference in any field is a miss, never a wrong read.
    """

    SCHEMA_VERSION: ClassVar[int]
    """Schema of the canonical bytes."""
    UNVERSIONED: ClassVar[str]
    """The revision of one who knowingly gives none; every tool shows it."""

    def __new__(cls, model: str, *, revision: str, page_size: int, salt: str | None = None) -> Self:
        """Describes a namespace.

        Args:
            model: Model id, compared byte for byte.
            revision: Of the weights: a checkpoint digest, commit or tag, or `UNVERSIONED`.
            page_size: Tokens in a page, 1 to 65,536.
            salt: Keeps tenants or adapters apart; None for no salt, never "".

        Raises:
            NamespaceError: Text that is empty, too long or holds a NUL; an impossible page size.
            ConfigError: A page size that does not fit into 32 bits.
        """

    @property
    def model(self) -> str:
        """Model id."""

    @property
    def revision(self) -> str:
        """Weights revision."""

    @property
    def page_size(self) -> int:
        """Tokens in a page."""

    @property
    def salt(self) -> str | None:
        """Tenant or adapter, if any."""

    @property
    def is_unversioned(self) -> bool:
        """Whether the revision is `UNVERSIONED`."""

    @property
    def fingerprint(self) -> str:
        """First 16 bytes of the SHA-256 of the canonical bytes, as 32 hex digits."""

    def canonical_bytes(self) -> bytes:
        """Returns the bytes that the fingerprint covers."""

    @staticmethod
    def from_canonical_bytes(data: bytes) -> Namespace:
        """Reads `canonical_bytes` back.

        Raises:
            CorruptError: These are not the canonical bytes of a namespace.
            FormatVersionError: They have another schema version.
        """

    def to_json(self) -> str:
        """Returns a JSON object as text, with the fields of this class and `schema_version`."""

    @staticmethod
    def from_json(text: str) -> Namespace:
        """Reads `to_json` back.

        Raises:
            NamespaceError: A field is missing, unknown or unusable.
            FormatVersionError: The text has another schema version.
        """

    def differences(self, other: Namespace) -> list[tuple[str, str, str]]:
        """Returns the fields that differ, each as name, value here, value in `other`."""

    def __reduce__(self) -> tuple[Any, tuple[str]]: ...
    def __hash__(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class Component:
    """One of the arrays that a page consists of: keys, values, latent rows, scales, a convolution state."""

    def __new__(
        cls, name: str, row_bytes: int, unit: Literal["token", "page"] = "token", dtype: str | None = None
    ) -> Self:
        """Describes a component.

        Args:
            name: Unique in the pool. One whose name contains "scale" holds the scales of the others.
            row_bytes: Bytes of one token (or page), one layer, one head.
            unit: "token" for a row for each token, "page" for one row for the page.
            dtype: Element type, where it is not the pool's.

        Raises:
            ConfigError: An unknown unit or dtype, or a size that does not fit into 32 bits.
        """

    @property
    def name(self) -> str:
        """Name, unique in the pool."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one token (or page), one layer, one head."""

    @property
    def unit(self) -> str:
        """How often there is a row: "token" or "page"."""

    @property
    def dtype(self) -> str | None:
        """Element type, where it is not the pool's."""

    def __hash__(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class Pool:
    """The parts of a page of one kind of state, an identity of its own on top of the namespace.

    Immutable, comparable, hashable, picklable. Two deployments share exactly the pools that they have in
    common.
    """

    SCHEMA_VERSION: ClassVar[int]
    """Schema of the canonical bytes."""

    def __new__(
        cls,
        name: str,
        kind: str,
        dtype: str,
        components: Mapping[str, int] | Sequence[Component],
        row_format: str | None = None,
    ) -> Self:
        """Describes a pool.

        Args:
            name: The word by which the engine and a store know it.
            kind: One of kv, latent, indexer, state, swa, draft, draft_swa, draft_indexer.
            dtype: Run-time element type: bfloat16, float8_e4m3fn, torch.float16, ...
            components: Row bytes by name in the order of the page's arrays, a row for each token; or
                components.
            row_format: Names a packing that the dtype does not tell, such as scales inside the row.

        Raises:
            NamespaceError: Unusable or repeated names; a dtype that needs scales and no component that holds
                them.
            GeometryError: Rows of no bytes, or of a part of an element.
            ConfigError: An unknown kind or dtype.
        """

    @property
    def name(self) -> str:
        """The word by which the engine and a store know the pool."""

    @property
    def kind(self) -> str:
        """What sort of state it holds."""

    @property
    def dtype(self) -> str:
        """Canonical name of the element type."""

    @property
    def row_format(self) -> str | None:
        """Packing of the rows, where the element type does not tell."""

    @property
    def components(self) -> list[Component]:
        """The parts of a page, in order."""

    @property
    def fingerprint(self) -> str:
        """First 16 bytes of the SHA-256 of the canonical bytes, as 32 hex digits."""

    def page_bytes(self, tile: Tile) -> int:
        """Returns the bytes of one page of `tile`.

        Raises:
            ConfigError: The tile leaves its tokens out.
            GeometryError: More than 2^64 bytes.
        """

    def canonical_bytes(self) -> bytes:
        """Returns the bytes that the fingerprint covers."""

    @staticmethod
    def from_canonical_bytes(data: bytes) -> Pool:
        """Reads `canonical_bytes` back.

        Raises:
            CorruptError: These are not the canonical bytes of a pool.
            FormatVersionError: They have another schema version.
        """

    def to_json(self) -> str:
        """Returns a JSON object as text, with the fields of this class and `schema_version`."""

    @staticmethod
    def from_json(text: str) -> Pool:
        """Reads `to_json` back.

        Raises:
            NamespaceError: A field is missing, unknown or unusable.
            GeometryError: Rows of no bytes, or of a part of an element.
            ConfigError: An unknown kind, unit or dtype.
            FormatVersionError: The text has another schema version.
        """

    def differences(self, other: Pool) -> list[tuple[str, str, str]]:
        """Returns the fields that differ, each as name, value here, value in `other`."""

    def __reduce__(self) -> tuple[Any, tuple[str]]: ...
    def __hash__(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class Tile:
    """The rectangle of a page that a rank holds: layers x heads x tokens.

    Layers and heads are model-global, so that a deployment of another shape finds the same rows. A tile
    without tokens means every token of whatever page it is used with.
    """

    def __new__(
        cls, layers: tuple[int, int], heads: tuple[int, int], tokens: tuple[int, int, int] | None = None
    ) -> Self:
        """Describes a tile.

        Args:
            layers: First layer, and one past the last.
            heads: First KV head, and one past the last; (0, 1) for latent rows and for pools without heads.
            tokens: First token of the page, step and count; None for every token.

        Raises:
            GeometryError: Nothing is in it, or a layer, head or token is past the limit of 65,536.
            ConfigError: A number is negative or does not fit into 32 bits.
        """

    @property
    def layers(self) -> tuple[int, int]:
        """First layer, and one past the last."""

    @property
    def heads(self) -> tuple[int, int]:
        """First KV head, and one past the last."""

    @property
    def tokens(self) -> tuple[int, int, int] | None:
        """First token of the page, step and count; None for every token."""

    def of_page(self, page_size: int) -> Tile:
        """Returns the tile with its tokens spelled out for pages of `page_size` tokens.

        Raises:
            GeometryError: A token is outside the page.
        """

    def intersect(self, other: Tile) -> Tile | None:
        """Returns the common part, or None.

        Raises:
            ConfigError: A tile leaves its tokens out.
        """

    def contains(self, other: Tile) -> bool:
        """Returns whether every row of `other` is one of this tile.

        Raises:
            ConfigError: A tile leaves its tokens out.
        """

    def __hash__(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class HitPolicy:
    """Which pages of a pool must be there for a prefix to be usable. The reader's choice, not identity."""

    @staticmethod
    def all_pages() -> HitPolicy:
        """Returns the policy of keys and values: every page of the prefix."""

    @staticmethod
    def trailing_pages(pages: int) -> HitPolicy:
        """Returns the policy of windows and states: the last `pages` of the prefix, or all of a shorter one.

        Raises:
            ConfigError: `pages` is 0.
        """

    @staticmethod
    def block_groups(block_pages: int, group_pages: int) -> HitPolicy:
        """Returns the policy of states kept once for each block: the last pages of each whole block.

        Args:
            block_pages: Pages of one block.
            group_pages: Pages at the end of each block that must be there.

        Raises:
            ConfigError: A number is 0.
        """

    def __hash__(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class Layout:
    """Where every row of every page of a tile sits, in one buffer or several. Arithmetic only, no memory.

    For `P` slots of `S` tokens, `L` layers, `H` heads in `G` groups, rows of `D` bytes. `2` stands for the
    pool's components, whose rows may differ in size:

    | layout | host buffer | one page alone |
    | --- | --- | --- |
    | `layer_first` | `[2, L, P, S, H, D]` | `[2, L, S, H, D]` |
    | `page_first` | `[2, P, S, L, H, D]` | `[2, S, L, H, D]` |
    | `page_first_direct` | `[2, P, L, S, H, D]` | `[2, L, S, H, D]` |
    | `page_head` | `[2, P, H, S, L, D]` | `[2, H, S, L, D]` |
    | `page_unified(H/G)` | `[P, G, L, 2, S, H/G, D]` | `[G, L, 2, S, H/G, D]` |

    A component with one row for the page has `S = 1`.
    """

    @staticmethod
    def object(name: str, pool: Pool, tile: Tile) -> Layout:
        """Returns the layout of one page alone: a stored object, or the engine's flat page.

        Args:
            name: A layout of the table above, `page_unified` with the heads of a group: `page_unified(2)`.
            pool: What the page consists of.
            tile: What of it is held; with tokens.

        Raises:
            ConfigError: An unknown layout, or a tile that leaves its tokens out.
            GeometryError: Groups that do not divide the tile's heads, or more than 2^64 bytes.
        """

    @staticmethod
    def host(name: str, pool: Pool, tile: Tile, slots: int, *, split_buffers: bool = False) -> Layout:
        """Returns the layout of an engine's host pool.

        Args:
            name: As for `object`.
            pool: As for `object`.
            tile: As for `object`.
            slots: Pages that the host pool has room for.
            split_buffers: Whether each component has a buffer of its own; impossible for `page_unified`.

        Raises:
            ConfigError: As for `object`.
            GeometryError: As for `object`; no slots; split buffers of `page_unified`.
        """

    @staticmethod
    def packed(name: str, pool: Pool, tile: Tile, slots: int, *, part_offset: int, page_bytes: int) -> Layout:
        """Returns the layout of parts of larger host pages.

        Args:
            name: As for `object`.
            pool: As for `object`.
            tile: As for `object`.
            slots: Host pages.
            part_offset: First byte of the part in each host page.
            page_bytes: Bytes of a whole host page.

        Raises:
            ConfigError: As for `object`.
            GeometryError: As for `object`; no slots; a part that does not fit into the page.
        """

    @property
    def name(self) -> str:
        """Order of the axes."""

    @property
    def tile(self) -> Tile:
        """What each page holds."""

    @property
    def slots(self) -> int:
        """Pages."""

    @property
    def buffer_bytes(self) -> list[int]:
        """Exact bytes of each buffer."""

    def offset(self, component: int, slot: int, layer: int, head: int, token: int) -> tuple[int, int]:
        """Returns where one row begins.

        Args:
            component: Index of the component in the pool.
            slot: Page in the host pool.
            layer: Model-global layer.
            head: Model-global KV head.
            token: Token of the page; any of the tile's for a component with one row for the page.

        Returns:
            Index of the buffer, and the offset there in bytes.

        Raises:
            GeometryError: The layout has no such row.
        """

    __hash__: ClassVar[None]  # type: ignore[assignment]
    def __eq__(self, other: builtins.object, /) -> bool: ...
    def __ne__(self, other: builtins.object, /) -> bool: ...

@final
class PoolView:
    """One pool of a view: what this rank holds of each page, and how."""

    def __new__(
        cls,
        pool: Pool,
        tile: Tile,
        layout: str = "page_first",
        policy: HitPolicy | None = None,
        required: bool = True,
        page_bytes: int | None = None,
        *,
        packed: tuple[int, int] | None = None,
        read_by_all: bool = False,
    ) -> Self:
        """Describes one pool of a view.

        Args:
            pool: Identity of the pool.
            tile: What this rank holds of each page.
            layout: Order of the rows in this rank's host memory, see `Layout`.
            policy: Which pages must be there for a prefix to be usable; None for every page.
            required: Whether a prefix without this pool is no hit.
            page_bytes: Bytes of a page as the engine computed them, to be compared with what follows from
                pool and tile. A tile without tokens is compared when the view is opened.
            packed: The pool's pages as parts of larger host pages: first byte, and bytes of a whole host
                page.
            read_by_all: Whether other processes of this host read the same pages at about the same time.
                They then come through the page cache, once from the disk for all, unless the store is
                opened with `io_mode="direct"`.

        Raises:
            ConfigError: An unknown layout, or a negative number.
            GeometryError: `page_bytes` differs from the computed size; the message names both.
        """

    @property
    def pool(self) -> Pool:
        """Identity of the pool."""

    @property
    def tile(self) -> Tile:
        """What this rank holds of each page."""

    @property
    def layout(self) -> str:
        """Order of the rows in this rank's host memory."""

    @property
    def policy(self) -> HitPolicy:
        """Which pages must be there."""

    @property
    def required(self) -> bool:
        """Whether a prefix without this pool is no hit."""

    @property
    def page_bytes(self) -> int | None:
        """Bytes of a page as the engine computed them, if given."""

    @property
    def packed(self) -> tuple[int, int] | None:
        """Byte offset of the part, and bytes of a whole host page, if given."""

    @property
    def read_by_all(self) -> bool:
        """Whether other processes of this host read the same pages at about the same time."""

@final
class Region:
    """Host memory wrapped once, to be lent to many calls. Holds the buffer until it is dropped."""

    def __new__(cls, buffer: _Buffer) -> Self:
        """Wraps a buffer without copying it.

        A numpy array must not be resized in place (`resize(refcheck=False)`), and a tensor's storage not be
        changed, while a region holds it.

        Args:
            buffer: Any shape and plain dtype, host memory, C-contiguous. Not changed here; a later `restore`
                writes to it. Read-only memory serves `backup` alone.

        Raises:
            GeometryError: Not contiguous, not a buffer, or an array of Python objects.
            UnsupportedError: A tensor of a device.
        """

    @property
    def nbytes(self) -> int:
        """Length in bytes."""

    @property
    def writable(self) -> bool:
        """Whether a restore may write into it."""

class HostPool:
    """Host memory in slots of one size, near a device, touched, locked or registered as far as it can be had.

    A buffer of `slots * slot_bytes` writable bytes: `memoryview(pool)`, `numpy.frombuffer(pool, dtype)` and
    `torch.frombuffer(pool, dtype=...)` share its memory, as do `numpy.from_dlpack(pool)` and
    `torch.from_dlpack(pool)`, tensors of dtype uint8 and shape `[slots * slot_bytes]`. Each view keeps the
    memory. `View.backup` and `View.restore` take a pool wherever they take a buffer.

    torch (2.13 was tried) takes no DLPack tensor of kDLCUDAHost, which a registered pool is: give it
    `pool.__dlpack__(dl_device=(1, 0))`, or use `torch.frombuffer`.

    A forked child has no part in its parent's pool: every call raises `StoreClosedError`, and reading
    through a view made before the fork ends the child with SIGSEGV. Start children by spawn.
    """

    def __new__(
        cls,
        slots: int,
        slot_bytes: int,
        *,
        huge_pages: Literal["off", "try", "require"] = "try",
        huge_page_bytes: int | str | None = None,
        numa: int | Literal["local"] | None = None,
        numa_required: bool = False,
        prefault: bool = True,
        touch_threads: int | None = None,
        lock: Literal["off", "try", "require"] = "off",
        register: Literal["off", "try", "require"] = "try",
        register_piece: int | str | None = None,
        shared: bool = False,
        attach: int | None = None,
    ) -> Self:
        """Makes a pool of zeroed bytes, or maps one that another process shares.

        What is tried and not got is told by `stats()["unmet"]`; what is required and not got is an error,
        and nothing is left behind.

        Args:
            slots: Number of slots, 1 to 2^31.
            slot_bytes: Bytes of one slot, such as one page of all layers.
            huge_pages: Pages of the hugetlb pool, else transparent ones.
            huge_page_bytes: Size of hugetlb pages, such as "1GiB"; None for the system's usual one.
            numa: Node that the memory should stand on; "local" for that of the CPU of this thread.
            numa_required: Whether memory of another node is an error.
            prefault: Whether every page gets its memory now, and not at its first use.
            touch_threads: Threads that do it; None for as many as suit.
            lock: Locking into memory, against RLIMIT_MEMLOCK. Not done where registering has pinned it.
            register: Making it known to the CUDA driver, so that copies are asynchronous and kernels reach
                it.
            register_piece: Most bytes registered at once; None for 64 GiB. Pieces end where a slot does.
            shared: Whether other processes may map it, see `share`.
            attach: File descriptor of another process's pool, received from it. It is duplicated: close
                yours.

        Raises:
            GeometryError: Impossible sizes.
            ConfigError: An impossible option, or a descriptor of anything else than a shared pool.
            ResourceLimitError: A memory or lock limit is too small; the message says which and where to
                raise it.
            UnsupportedError: Something required is not to be had on this machine.
            DeviceError: The driver refused to register.
            StoreIOError: The system said no.
        """

    @property
    def slots(self) -> int:
        """Number of slots."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""

    @property
    def closed(self) -> bool:
        """Whether it was closed."""

    @property
    def got(self) -> tuple[str, ...]:
        """What was got: of "hugetlb", "thp", "bound", "prefaulted", "locked", "registered", "shared"."""

    @property
    def device_address(self) -> int | None:
        """Address of the first byte as devices see it, often the host's; None where it is not registered."""

    def stats(self) -> dict[str, Any]:
        """Returns what was got of what was wished for, and how full the pool is.

        `slots`, `slot_bytes`; `mapped_bytes`, `pages` ("ordinary", "thp" or "hugetlb"), `page_bytes`,
        `huge_bytes`, `numa` (node or None), `prefaulted`, `locked`, `registered_pieces` (bytes of each),
        `shared`; `unmet`, a sentence for each wish that was not met; `free_slots`, `leased_slots`, `leases`,
        `views`.
        """

    def lease(self, count: int) -> SlotLease:
        """Leases `count` slots to the caller, all or none.

        Raises:
            PoolExhaustedError: Fewer are free.
            UnsupportedError: A pool that was attached: its slots are leased in the process that made it.
        """

    def release(self, lease: SlotLease) -> None:
        """Ends a lease of this pool.

        Raises:
            LeaseError: It is of another pool, or has ended.
        """

    def share(self) -> int:
        """Returns a new file descriptor for another process to give as `attach`; send it, then close it.

        Raises:
            UnsupportedError: The pool was not made with `shared=True`.
        """

    def close(self) -> None:
        """Unregisters and unmaps the memory; again does nothing. End all copies into and out of it first.

        Raises:
            LeaseError: Leases or views are alive; a `BufferError`. The pool stays open.
            DeviceError: The driver holds on to the memory, which is then never unmapped.
        """

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None: ...
    def __dlpack_device__(self) -> tuple[int, int]:
        """Returns (3, 0), kDLCUDAHost, where it is registered, else (1, 0), kDLCPU."""

    def __dlpack__(
        self,
        *,
        stream: object = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """Returns a capsule: a uint8 tensor of shape `[nbytes]`.

        Raises:
            BufferError: A copy or a device other than these two is asked for.
        """

@final
class SlotLease:
    """Slots of a pool that the holder has until it releases them, or drops the last reference to this object.

    Hold it until the last copy into or out of the slots is done.
    """

    @property
    def slots(self) -> list[int]:
        """Numbers of the slots, in the order in which they were leased; as `View.restore` takes them."""

    @property
    def released(self) -> bool:
        """Whether all were released."""

    def release(self, slots: _Integers | None = None) -> None:
        """Gives slots back.

        Args:
            slots: Those to give back; None for all.

        Raises:
            LeaseError: One is not of this lease, or no more; nothing is released.
        """

    def __len__(self) -> int: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None: ...

@final
class PoolMember:
    """One pool of a deployment, as one rank holds it on the host."""

    def __new__(
        cls,
        pool: Pool,
        tile: Tile,
        slots: int,
        page_size: int,
        *,
        first_layer: int | None = None,
        mapping: Literal["auto", "packed", "sidecar"] = "auto",
    ) -> Self:
        """Describes one member of a `PoolSet`.

        Args:
            pool: Identity of the pool.
            tile: What this rank holds of each page.
            slots: Slots that it has on the host, one page each.
            page_size: Tokens of one page.
            first_layer: Number of its first layer where target and draft layers are counted through; None
                for the first layer of the tile.
            mapping: "packed" or "sidecar" where only one will do.

        Raises:
            ConfigError: An unknown mapping, or a negative number.
            GeometryError: A tile that does not fit into the page.
        """

    @property
    def name(self) -> str:
        """Name of the pool."""

@final
class MemberPlan:
    """Where a member of a `PoolSet` stands, and why."""

    @property
    def name(self) -> str:
        """Name of its pool."""

    @property
    def mapping(self) -> Literal["target", "packed", "sidecar"]:
        """In host pages of the target, or of its own."""

    @property
    def reason(self) -> str:
        """One sentence."""

    @property
    def host_pool(self) -> int:
        """Index of its host pool in `PoolSet.host_pools`."""

    @property
    def offset(self) -> int:
        """First byte of its part in a host page, a multiple of 256."""

    @property
    def part_bytes(self) -> int:
        """Bytes of its part: one page of it."""

    @property
    def host_page_bytes(self) -> int:
        """Bytes of a whole host page; a multiple of 4096 where members share it."""

@final
class PoolSet:
    """The pools of a deployment on one rank: which share host pages, which have their own, and why.

    A member is packed where it has the target's slots and page size and, if it continues another pool's
    layers as a draft does, the rows of that pool and layers that nobody else owns. Otherwise it is a
    sidecar, and says why. A draft or an indexer follows the target's slots in either case: with others it is
    refused. No member is ever left out.
    """

    def __new__(cls, members: Sequence[PoolMember]) -> Self:
        """Decides for each member.

        Args:
            members: The target first; a draft after the pool whose layers it continues.

        Raises:
            ConfigError: No target, or a name twice.
            GeometryError: A member that must be packed and cannot be, or that can be neither; the message
                says why.
        """

    @property
    def members(self) -> list[MemberPlan]:
        """Every member with its place, the target first."""

    @property
    def host_pools(self) -> list[tuple[int, int]]:
        """Slots, and bytes of one slot, of each host pool; the target's is the first."""

    def packed(self, name: str) -> tuple[int, int] | None:
        """Returns what `PoolView` takes as `packed` for a member: its offset, and the bytes of a host page.

        None where the member has its host pages alone.

        Raises:
            ConfigError: No member of this name.
        """

    def explain(self) -> str:
        """Returns a line for each member: name, mapping, place and reason."""

    def allocate(
        self,
        *,
        huge_pages: Literal["off", "try", "require"] = "try",
        huge_page_bytes: int | str | None = None,
        numa: int | Literal["local"] | None = None,
        numa_required: bool = False,
        prefault: bool = True,
        touch_threads: int | None = None,
        lock: Literal["off", "try", "require"] = "off",
        register: Literal["off", "try", "require"] = "try",
        register_piece: int | str | None = None,
        shared: bool = False,
    ) -> list[HostPool]:
        """Makes the host pools, all or none, with the options of `HostPool`."""

@final
class Match:
    """Answer of `View.match`."""

    @property
    def pages(self) -> int:
        """The longest legal length in pages; 0 when there is none."""

    @property
    def legal(self) -> list[int]:
        """Every legal length in pages, shortest first, 0 left out; built when first looked at."""

    @property
    def limited_by(self) -> str | None:
        """What limited it, such as "kv: page 37 absent"; None when every page asked for is there."""

    @property
    def hits(self) -> dict[str, int]:
        """Each pool's own longest length in pages, by pool name."""

@final
class BackupReport:
    """Answer of `View.backup`; its length is the number of pages asked for."""

    @property
    def outcomes(self) -> list[str]:
        """What became of each page.

        "stored": published. "present": there already. "skipped": no slot given. "refused": no room. "late":
        not published before the deadline, or the device was too slow for the calls before. "error": the
        system could not write it.
        """

    @property
    def leading(self) -> int:
        """Pages from the first one on that are in the store, before the first that is not."""

    @property
    def raw_bytes(self) -> int:
        """Raw bytes of the objects written."""

    @property
    def stored_bytes(self) -> int:
        """Bytes that they take on disk, directories included."""

    @property
    def reason(self) -> str | None:
        """Why pages were refused or not written, if any were."""

    def flags(self) -> list[bool]:
        """Returns for each page whether it is in the store now: "stored" or "present"."""

    def count(self, outcome: str) -> int:
        """Returns the number of pages with this outcome.

        Raises:
            ConfigError: There is no such outcome.
        """

    def __len__(self) -> int: ...

@final
class RestoreReport:
    """Answer of `View.restore`; its length is the number of pages asked for."""

    @property
    def outcomes(self) -> list[str]:
        """What became of each page.

        "restored": exact. "skipped": no slot given. "absent": not stored in a pool asked for. "evicted":
        removed while it was read. "late": not read before the deadline, or the device was too slow for the
        calls before. "error": the system could not read it. "foreign": its place held another page.
        "damaged": its bytes did not verify. The memory is defined for "restored" pages only.
        """

    @property
    def bytes(self) -> int:
        """Raw bytes of restored pages."""

    @property
    def leading(self) -> int:
        """Pages restored from the first one on, before the first that was not."""

    @property
    def all_restored(self) -> bool:
        """Whether every page asked for was restored."""

    def flags(self) -> list[bool]:
        """Returns for each page whether it was restored."""

    def count(self, outcome: str) -> int:
        """Returns the number of pages with this outcome.

        Raises:
            ConfigError: There is no such outcome.
        """

    def __len__(self) -> int: ...

@final
class View:
    """What one rank of one deployment stores and asks for. Made by `Store.view`; may be shared by threads."""

    def backup(
        self,
        keys: _Keys,
        region: _Memory | Mapping[str, _Memory],
        slots: _Integers | Mapping[str, _Integers],
        parent: _Key | None = None,
        depth: int | None = None,
        *,
        timeout: float | None = None,
        bounce: str = "never",
    ) -> BackupReport:
        """Stores pages of one chain. All pools of a page become visible together.

        A full, slow or failing disk is an outcome of the pages, not an error. The memory is read only, and is
        no longer needed when the call returns.

        Args:
            keys: One key for each page, in the order of the chain, none twice: a list of 32 bytes or of 64
                hex digits each, a uint8 array `[pages, 32]`, or all in one bytes object.
            region: The host pool's buffer, or a list with one for each component; a dict by pool name where
                the view has several. Its size gives the number of slots. Pools packed into the same host
                pages share one.
            slots: The slot of each page, `[pages]`; -1 for a page of which the pool has nothing. A dict by
                pool name where the view has several.
            parent: Key of the page before the first one, where it is known.
            depth: Pages before the first one, where it is known; 0 starts a sequence.
            timeout: Seconds; what was not published by then is "late". None waits as long as it takes.
            bounce: As for `restore`; bounced pages are copied before they are written. A bounced page that
                was on the point of being published at the end of its time may appear later all the same.

        Raises:
            GeometryError: Sizes or slots do not fit, or the memory is not contiguous.
            ConfigError: A key is no digest or stands twice, a pool is missing or unknown, the timeout is not
                a number, or `bounce` is unknown.
            UnsupportedError: The store is open for reading only.
            StoreClosedError: The store is closed.
        """

    def match(self, keys: _Keys, policies: Mapping[str, HitPolicy | None] | None = None) -> Match:
        """Finds the longest prefix of `keys` that can be restored in all required pools.

        Damage and I/O errors make pages missing, not errors.

        Args:
            keys: One chain from its start, as for `backup`.
            policies: The pools to be consulted, each with the policy for this call, by pool name. A pool that
                is left out, or has None, is not consulted, and `hits` does not speak of it. None consults all
                pools, each with the view's own policy.

        Raises:
            ConfigError: A key is no digest, a pool is unknown, or no pool is to be consulted.
            StoreClosedError: The store is closed.
        """

    def restore(
        self,
        keys: _Keys,
        region: _Memory | Mapping[str, _Memory],
        slots: _Integers | Mapping[str, _Integers],
        *,
        timeout: float | None = None,
        bounce: str = "never",
    ) -> RestoreReport:
        """Restores pages, each one exact or reported missing.

        The memory is not touched any more when the call returns. Without bouncing, a call ends when the
        device has completed what was begun in time; one that the device does not complete keeps it for as
        long as that takes.

        Args:
            keys: One key for each page, as for `backup`; in any order.
            region: As for `backup`, writable. Written in the slots named, and nowhere else.
            slots: The slot of each page, `[pages]`, none twice; -1 for a page of which nothing is wanted from
                the pool. A dict by pool name where the view has several.
            timeout: Seconds; reads not started by then are not started, and their pages are "late". 0 or less
                starts none. None waits as long as it takes.
            bounce: Whether pages come by way of the store's own memory, 64 MiB at most, so that reads that do
                not end in time can be left behind: "never", "always", or "auto" when a hundredth of the
                device's recent transfers took longer than a quarter of the timeout.

        Raises:
            GeometryError: Sizes or slots do not fit, or the memory is not contiguous or not writable.
            ConfigError: A key is no digest, a pool is missing or unknown, the timeout is not a number, or
                `bounce` is unknown.
            StoreClosedError: The store is closed.
        """

    def clear(self) -> int:
        """Forgets everything stored in the namespace up to now, for all processes.

        Returns:
            The number of objects that this view knew.

        Raises:
            UnsupportedError: The store is open for reading only.
            StoreIOError: The system said no.
            StoreClosedError: The store is closed.
        """

    @property
    def namespace(self) -> Namespace:
        """The namespace."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the namespace, as 32 hex digits."""

    @property
    def pool_names(self) -> list[str]:
        """Names of the pools, in the order in which they were given."""

    @property
    def page_bytes(self) -> dict[str, int]:
        """Bytes of one page of each pool, by pool name."""

    @property
    def indexed_objects(self) -> int:
        """Objects that the index of this namespace holds."""

@final
class Store:
    """An open root of pages. May be shared by threads; a forked child opens its own.

    As a context manager it closes itself at the end.
    """

    @staticmethod
    def open(
        path: str | PathLike[str],
        capacity: int | str | None = None,
        *,
        read_only: bool = False,
        io_mode: str = "auto",
        io_threads: int | None = None,
        durable: bool = False,
        verify: bool = True,
        time_to_live: float | None = None,
        free_space_floor: int | str | None = None,
        detect_conflicts: bool = False,
    ) -> Store:
        """Opens the root at `path`, made now if there is none.

        Args:
            path: Folder of the root, on a local file system.
            capacity: Budget of a new root: bytes, or text such as "500GiB" (2^30) or "500GB" (10^9), at least
                16 MiB. An existing root keeps its own. None for half of the free space.
            read_only: Whether to open what exists and write nothing at all.
            io_mode: "buffered" (through the page cache), "direct" (past it, where that works) or "auto":
                written through the cache, read through it what is there or is asked for again, and past it
                what is not.
            io_threads: Threads for payload I/O and checksums, 1 to 256; None for two for each core, 4 to 16.
            durable: Whether each batch is synced to the disk before it is published.
            verify: Whether every restored byte is checked.
            time_to_live: Seconds after which a stored page is removed, at least 1; None for never. Counted
                from when it was stored; one process with this option removes the pages of all.
            free_space_floor: Space on the file system that is left to others, bytes or text as in `capacity`;
                None for 1/64 of the file system, at most 1 GiB.
            detect_conflicts: Whether pages that are stored already are compared with the bytes given. A
                difference is counted and logged; the stored page stays.

        Raises:
            ConfigError: A bad option, or a folder with other things in it.
            UnsupportedError: A file system or link that is not safe.
            FormatVersionError: A root in a newer format.
            StoreIOError: The system said no.
        """

    def view(
        self,
        namespace: Namespace,
        pools: Pool | PoolView | Sequence[PoolView],
        *,
        tile: Tile | None = None,
        layout: str | None = None,
        codec: str = "none",
    ) -> View:
        """Opens a view: what one rank of one deployment stores and asks for.

        Args:
            namespace: What must be equal for bytes to be interchangeable.
            pools: The pools, or one `Pool` alone with `tile` and `layout` beside it.
            tile: What this rank holds of each page of the one pool.
            layout: Order of the rows in host memory of the one pool; None for "page_first".
            codec: For new pages: "none", "zstd" or "zstd:LEVEL" with a level of 1 to 22. Pages of every codec
                are read.

        Raises:
            GeometryError: A tile outside the page, a size that differs from the engine's, or a page that is
                too large.
            NamespaceError: The namespace or a pool differs from what the store has under its fingerprint.
            ConfigError: No pool, a pool twice, or an unknown layout or codec.
            StoreIOError: The system said no.
            StoreClosedError: The store is closed.
        """

    @property
    def path(self) -> Path:
        """Folder of the root."""

    def stats(self) -> dict[str, Any]:
        """Returns what the store is and did.

        Returns:
            `path` (str), `capacity_bytes` and `used_bytes` of the root (int), `io` in words (str), `process`,
            the identity of this process in the root (str), `device` (see below), and `counters`, a dict of
            this process's totals by name.

            `device` is a dict: `slow` (bool, for the timeout of the latest call that had one),
            `p99_read_seconds` and `p99_write_seconds` of recent transfers (float), `breaker` ("closed",
            "open" or "half-open"), `abandoned_requests` that the device has not completed, and `bounce_bytes`
            of the store's own memory in use (int).
        """

    def note_pools(self, pools: PoolSet | Iterable[tuple[str, str, str]]) -> None:
        """Leaves for `hicache-store stat` where the host pools of this process stand, and why.

        All of them at once, in place of what was left before. A process that never wrote anything leaves
        nothing, and what it left goes with it.

        Args:
            pools: A set of pools; or name, place and reason of each pool, in words.

        Raises:
            ConfigError: Something else, more than 64 pools, or more than 16 KiB of words.
            StoreClosedError: The store is closed.
        """

    def prune(self, size: int | str) -> int:
        """Removes pages of all namespaces, the least useful first, until the root takes at most `size`.

        Pages leave for all processes, the ends of chains first.

        Args:
            size: Bytes on disk, or text such as "100GiB".

        Returns:
            How many objects were removed.

        Raises:
            ConfigError: A bad size.
            UnsupportedError: The store is open for reading only.
            StoreClosedError: The store is closed.
            StoreIOError: Nobody can be told, or another process evicts for too long.
        """

    def prune_unused_for(self, seconds: float) -> int:
        """Removes pages of all namespaces that were not used for so long, the ends of chains first.

        Args:
            seconds: 0 or more. A use counts from when its process told of it, up to a second later.

        Returns:
            How many objects were removed.

        Raises:
            ConfigError: A negative or infinite time.
            UnsupportedError: The store is open for reading only.
            StoreClosedError: The store is closed.
            StoreIOError: Nobody can be told, or another process evicts for too long.
        """

    def resize(self, capacity: int | str) -> int:
        """Changes the root's capacity for all processes that use it; pages leave until it holds.

        Other open stores see it when they next ask for room.

        Args:
            capacity: Bytes, or text such as "500GiB", at least 16 MiB.

        Returns:
            How many objects were removed.

        Raises:
            ConfigError: Too small a capacity.
            UnsupportedError: The store is open for reading only.
            StoreClosedError: The store is closed.
            StoreIOError: The system said no, or another process evicts for too long.
        """

    def close(self) -> None:
        """Seals what was written and ends this process for the others.

        Later calls raise StoreClosedError. Closing twice is fine.
        """

    def __enter__(self) -> Store: ...
    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
        /,
    ) -> None: ...

@final
class HostEvent:
    """A point in the work of the host that transfers wait for or come to. Set once; threads may share it."""

    def __new__(cls) -> Self:
        """Returns an event that has not come yet."""

    def set(self) -> None:
        """Says that the work is done. What waits goes on."""

    @property
    def is_set(self) -> bool:
        """Whether the work is done."""

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the work is done, or for `timeout` seconds; returns whether it is.

        Raises:
            ConfigError: The timeout is not a number.
        """

    @property
    def handle(self) -> int:
        """The integer that stands for the event in lists of events, as long as this object lives."""

@final
class TransferPool:
    """One pool of a transfer: its pages on the host, and its rows on the device."""

    def __new__(
        cls,
        name: str,
        host: tuple[Layout, _TransferMemory],
        device: tuple[Layout, _TransferMemory] | Sequence[tuple[Layout, _TransferMemory]],
        *,
        first_step: int = 0,
    ) -> Self:
        """Returns a pool, whose memory is held as long as a plan of it lives.

        Memory is what `View.restore` takes (a buffer, CPU tensor or `Region`), or `(address, bytes)` of host
        memory that the caller keeps alive, or a list with one of these for each buffer of the layout. A CUDA
        tensor, as of torch, and any object with `__cuda_array_interface__` are memory of a device, never
        touched by the processor; so is `(address, bytes, "cuda")`, which the caller keeps alive. Where a plan
        has memory of a device, its host memory is registered with the driver: a `HostPool` with
        `register="require"`.

        Args:
            name: The pool's name, as the store's view has it.
            host: Layout of the host pool (`Layout.host` or `Layout.packed`), and its memory.
            device: Layouts that share the pool's layers out, each with its memory. One tensor a layer, as
                the engine has them, is a `layer_first` layout of a tile of that one layer with
                `split_buffers=True`, `[slots, page_size, heads, row]` for each component. All have the same
                number of slots.
            first_step: The layer of the whole transfer with which the pool's first layer goes, from 0.

        Raises:
            ConfigError: Not a layout with its memory, an address of 0, or a negative number.
            GeometryError: Memory that is not contiguous.
        """

    @property
    def name(self) -> str:
        """Name, as the store's view has it."""

    @property
    def layers(self) -> int:
        """Layers of the pool."""

@final
class TransferPlan:
    """How the pages of all pools come from host pools to device rows and back, layer by layer.

    Made once: every address is checked here, for every slot. Layers are counted from 0 in this rank's part of
    the model. On host memory the processor copies; the calls then return when the copies are done. Where some
    memory is a device's, copies are given to a stream of it, one launch and one event a layer, and the calls
    return at once: what they touch is held until the device is done, and dropping the plan waits for that.
    """

    def __new__(cls, pools: Sequence[TransferPool], *, threads: int = 1, way: str = "auto") -> Self:
        """Returns the plan of `pools`.

        Where memory is a device's, the device's kernels are loaded now, which may take a second. What is
        missing there is said by the first transfer.

        Args:
            pools: Pools of one transfer, in the order of the store's view.
            threads: Threads of the processor, for host memory and layers of at least 4 MiB.
            way: How copies go to a device: "kernel", "copy_engine", or "auto", which takes the copy engine
                where there are no kernels, or every run has 128 KiB and more. See `report`.

        Raises:
            ConfigError: No pools, an unknown way, or a number of threads that is not 1 to 1024.
            GeometryError: Memory smaller than its layout says, a layer that the device does not hold, or host
                and device layouts of different pools.
        """

    @property
    def layers(self) -> int:
        """Layers, over all pools."""

    @property
    def pool_names(self) -> list[str]:
        """Names of the pools, in order."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of all pools."""

    def restore(
        self,
        host_slots: _Integers | Mapping[str, _Integers],
        device_slots: _Integers | Mapping[str, _Integers],
        layers: tuple[int, int] | None = None,
        *,
        stream: int = 0,
        after: Sequence[HostEvent | int] | None = None,
        events: Sequence[HostEvent | int] | None = None,
    ) -> int:
        """Copies pages from host slots to device slots; returns the bytes that are copied.

        Args:
            host_slots: The host slot of each page, `[pages]`; -1 leaves the page out. One list for all pools,
                or a dict by pool name.
            device_slots: The device slot of each page, `[pages]`, none twice; -1 leaves the page out.
            layers: First layer and one past the last; None copies all.
            stream: Handle of the stream that carries the copies out, as
                `torch.cuda.current_stream().cuda_stream`; 0 is the device's default stream. It lives until
                the call has returned. For host memory only 0, the host's own.
            after: Events that come before the first copy begins: host events or their handles, and for memory
                of a device handles of its driver's events, as torch's `event.cuda_event` after its first
                record. The stream waits for the driver's; for host events the call waits.
            events: An event for each layer: for host memory host events, set when that layer has been copied;
                for memory of a device handles of the driver's events, recorded behind that layer.

        Raises:
            GeometryError: Slots that do not fit, or destination memory that is read-only.
            ConfigError: A pool that is missing or unknown, layers or events that do not fit; host memory that
                is not registered with the driver of the device.
            UnsupportedError: Memory of a device that cannot be reached here, the way asked for cannot be had,
                or a stream of a device for host memory.
            DeviceError: The driver refused. An index that passed its limit in the device's memory is told
                when the work has been done, by `wait` or the next call, and from then on.
        """

    def backup(
        self,
        host_slots: _Integers | Mapping[str, _Integers],
        device_slots: _Integers | Mapping[str, _Integers],
        layers: tuple[int, int] | None = None,
        *,
        stream: int = 0,
        after: Sequence[HostEvent | int] | None = None,
        events: Sequence[HostEvent | int] | None = None,
    ) -> int:
        """Copies pages from device slots to host slots; `restore` with its sides swapped.

        Args:
            host_slots: As for `restore`, none twice.
            device_slots: As for `restore`.
            layers: As for `restore`.
            stream: As for `restore`.
            after: As for `restore`: the ends of the work that writes the device rows.
            events: As for `restore`.

        Raises:
            GeometryError: As for `restore`.
            ConfigError: As for `restore`.
            UnsupportedError: As for `restore`.
            DeviceError: As for `restore`.
        """

    def report(self) -> dict[str, Any]:
        """Returns how layers went, by name.

        "by": what moves the bytes, such as "the CPU", "kernels compiled by NVRTC", "the copy engine". For
        memory of a device also "device" (its number, from 0), "capability" (10 x major + minor), "tried" (how
        kernels were looked for, a list of source and outcome), "kernel_layers" and "copy_engine_layers"
        (layers given to each so far), and "last" (the way of the last layer and why, or None).

        Raises:
            ConfigError: As for `restore`.
            GeometryError: Memory of several devices.
            UnsupportedError: As for `restore`.
            DeviceError: As for `restore`.
        """

    def wait(self) -> None:
        """Waits until the device has done all that was submitted, on any stream; at once for host memory.

        Raises:
            DeviceError: The work failed, or an index was past its limit.
            ConfigError: As for `restore`.
            GeometryError: Memory of several devices.
            UnsupportedError: As for `restore`.
        """

@final
class LayerwiseRestore:
    """Restores from the store to host slots to device slots, first layer first; and backups in reverse."""

    def __new__(cls, view: View, plan: TransferPlan) -> Self:
        """Returns the restores of a view through a plan.

        On host memory they have a stream of their own for the copies; where device rows are a device's, each
        call names one.

        Raises:
            ConfigError: The plan has other pools than the view, or host memory that is not registered with
                the driver of the device.
            GeometryError: A host pool is laid out otherwise than the view says, or is memory of a device.
            UnsupportedError: Memory of a device that cannot be reached here.
            DeviceError: The driver refused.
        """

    @property
    def layers(self) -> int:
        """Layers, over all pools."""

    @property
    def executor(self) -> str:
        """What carries the copies out: "cpu", "kernel" or "copy engine"."""

    def start(
        self,
        keys: _Keys,
        host_slots: _Integers | Mapping[str, _Integers],
        device_slots: _Integers | Mapping[str, _Integers],
        *,
        host_free: Sequence[HostEvent | int] | None = None,
        device_free: Sequence[HostEvent | int] | None = None,
        stream: int = 0,
        timeout: float | None = None,
        bounce: str = "never",
        announce: str = "pages",
        reading: str = "auto",
    ) -> LayerTicket:
        """Starts a restore on a thread of its own.

        Until `LayerTicket.wait_drained` nobody else may touch the host slots, nor the device slots but for
        reads of layers that are ready.

        Args:
            keys: One key for each page, as for `View.restore`.
            host_slots: The host slot of each page, `[pages]`, none twice. Fewer slots than pages are filled
                in turn, each again when it has been copied. One list for all pools, or a dict by pool name.
            device_slots: The device slot of each page, `[pages]`, none twice; -1 brings it to the host only.
            host_free: Events, or their handles, of earlier uses of the host slots.
            device_free: Events of earlier uses of the device rows, as of a step that still writes them. The
                stream waits for those of the driver, and no thread.
            stream: As for `TransferPlan.restore`, and it lives until `LayerTicket.wait_drained`, as do the
                driver's events given here.
            timeout: Seconds; pages that were not read by then are "late" in all layers.
            bounce: As for `View.restore`.
            announce: "pages": no layer is ready before every page is known to be whole. "layers": each is
                ready when its own bytes are there; if a page fails later, the restore is withdrawn, every
                further read is refused, and what was computed must be dropped.
            reading: "auto", "layers:N" (groups of N layers of all pages) or "pages:N" (N whole pages at a
                time). "auto" reads groups of layers where that reads at most an eighth more than it must.

        Raises:
            GeometryError: Slots that do not fit.
            ConfigError: A key is no digest, a pool is missing or unknown, an option is unknown.
            UnsupportedError: A stream of a device for host memory.
        """

    def start_backup(
        self,
        keys: _Keys,
        host_slots: _Integers | Mapping[str, _Integers],
        device_slots: _Integers | Mapping[str, _Integers],
        *,
        parent: _Key | None = None,
        depth: int | None = None,
        host_free: Sequence[HostEvent | int] | None = None,
        ready: Sequence[HostEvent | int] | None = None,
        layer_ready: Sequence[HostEvent | int] | None = None,
        stream: int = 0,
        timeout: float | None = None,
        bounce: str = "never",
    ) -> BackupTicket:
        """Starts a backup on a thread of its own: device slots to host slots to the store.

        Args:
            keys: Pages of one chain, as for `View.backup`.
            host_slots: As for `start`.
            device_slots: The device slot of each page, `[pages]`; -1 for a page of which there is nothing.
            parent: As for `View.backup`.
            depth: As for `View.backup`.
            host_free: As for `start`.
            ready: Events, or their handles, of the work that writes the device rows.
            layer_ready: An event for each layer, where layers are written one after the other.
            stream: As for `start`.
            timeout: Seconds; what was not published by then is "late".
            bounce: As for `View.backup`.

        Raises:
            GeometryError: Slots that do not fit.
            ConfigError: As for `View.backup`, or a number of events that is not that of the layers.
            UnsupportedError: A stream of a device for host memory.
        """

@final
class LayerTicket:
    """A restore under way, and the gate before its layers. Dropping it lets the restore go on."""

    def is_ready(self, layer: int) -> bool:
        """Returns whether a layer can be read now.

        Raises:
            ConfigError: There is no such layer.
            StoreClosedError: The restore was given up, or withdrawn.
            StoreIOError: The copies failed.
            DeviceError: The copies of a device failed.
        """

    def read(self, layer: int) -> None:
        """Takes leave to read a layer.

        Raises:
            ConfigError: The layer is not ready, or there is no such layer.
            StoreClosedError: As for `is_ready`.
            StoreIOError: As for `is_ready`.
        """

    def wait(self, layer: int, timeout: float | None = None) -> bool:
        """Waits until a layer can be read, or for `timeout` seconds; returns whether it can.

        Raises:
            ConfigError: There is no such layer, or the timeout is not a number.
            StoreClosedError: As for `is_ready`.
            StoreIOError: As for `is_ready`.
        """

    def hold_back(self, layer: int, stream: int, timeout: float | None = None) -> bool:
        """Lets a stream of the device wait for a layer, whose reader then need not.

        Waits, for `timeout` seconds, until the layer's copies have been given to the device and its pages
        announced; returns whether they were. What `stream` is given after that begins after the copies.

        Args:
            layer: The layer, from 0.
            stream: Handle of the reader's stream; 0 is the device's default stream.
            timeout: Seconds; None waits as long as it takes.

        Raises:
            ConfigError: There is no such layer or stream, or the timeout is not a number.
            StoreClosedError: As for `is_ready`.
            UnsupportedError: The rows are memory of the host.
            DeviceError: The driver refused.
        """

    def wait_drained(self, timeout: float | None = None) -> bool:
        """Waits until nothing touches the host or device slots any more; returns whether that is so.

        Raises:
            ConfigError: The timeout is not a number.
        """

    def finish(self) -> RestoreReport:
        """Waits for the end. A page is restored in all layers of all pools, or it is a miss.

        Raises:
            StoreClosedError: The store was closed meanwhile.
            StoreIOError: The copies failed.
            DeviceError: The copies of a device failed.
        """

@final
class BackupTicket:
    """A backup under way. Dropping it lets the backup go on."""

    def wait_drained(self, timeout: float | None = None) -> bool:
        """Waits until nothing touches the host or device slots any more; returns whether that is so.

        Raises:
            ConfigError: The timeout is not a number.
        """

    def finish(self) -> BackupReport:
        """Waits for the end, and says what became of each page. It answers once.

        Raises:
            ConfigError: It has answered before.
            StoreClosedError: The store was closed meanwhile.
            StoreIOError: The copies failed.
            DeviceError: The copies of a device failed.
        """

def _error_kinds() -> list[str]:
    """Returns the names of all kinds of errors."""

def _sglang_options(text: str) -> dict[str, Any]:
    """Reads the options of the SGLang storage backend, see docs/sglang.md.

    Args:
        text: A JSON object.

    Returns:
        Every option by name, with its default where it is not given; `interface_v1` as a bool.

    Raises:
        ConfigError: An unknown option, which the message holds against the nearest known one, or a bad value.
    """

def _run_tool(args: Sequence[str]) -> int:
    """Runs the store tool.

    Args:
        args: A command line, program name first.

    Returns:
        The exit code.
    """
