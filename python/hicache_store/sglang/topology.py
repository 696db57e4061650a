"""Where a rank stands: its coordinates among the ranks, what they let it hold, and which rank writes.

Coordinates are no part of the identity: a rank that knows which layers, heads and tokens of the model it
holds shares them with every other shape. What it cannot know keeps it apart: its rows are then bound to its
rank.
"""

from dataclasses import dataclass
from typing import Any

from hicache_store import ConfigError

__all__ = ["Topology"]


@dataclass(frozen=True)
class Topology:
    """Ranks and sizes as the engine tells them; the tensor-parallel ones are those of attention."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    cp_rank: int
    cp_size: int
    dcp_rank: int
    dcp_size: int
    dp_rank: int
    replicated: bool
    """Whether all tensor-parallel ranks hold the same rows of the model's own pools (MLA, DeepSeek-V4)."""
    cp_kind: str | None
    """What context-parallel ranks hold of a page: "sharded", "replicated"; None where there is one rank."""

    @staticmethod
    def of(config: Any, cp_kind: str | None) -> "Topology":
        """Reads the engine's config.

        Args:
            config: `HiCacheStorageConfig` of this rank.
            cp_kind: The option of the same name.

        Raises:
            ConfigError: There are several context-parallel ranks and nobody says what they hold.
        """
        cp_size = int(getattr(config, "attn_cp_size", 1) or 1)
        if cp_size > 1 and cp_kind is None:
            raise ConfigError(
                f"attn_cp_size is {cp_size}, and the engine does not tell what its context-parallel ranks "
                'hold: add "cp_kind" to the options, "sharded" (each a part of every page) or "replicated"'
            )
        return Topology(
            tp_rank=int(config.tp_rank),
            tp_size=int(config.tp_size),
            pp_rank=int(config.pp_rank),
            pp_size=int(config.pp_size),
            cp_rank=int(getattr(config, "attn_cp_rank", 0) or 0),
            cp_size=cp_size,
            dcp_rank=int(getattr(config, "dcp_rank", 0) or 0),
            dcp_size=int(getattr(config, "dcp_size", 1) or 1),
            dp_rank=int(getattr(config, "dp_rank", 0) or 0),
            replicated=bool(config.is_mla_model),
            cp_kind=cp_kind if cp_size > 1 else None,
        )

    @property
    def is_kv_writer(self) -> bool:
        """Whether the engine lets this rank write pools that all tensor-parallel ranks hold alike."""
        return not self.replicated or self.tp_rank == self.dcp_rank

    @property
    def leaves_writing_to_others(self) -> bool:
        """Whether another context-parallel rank writes the very same bytes."""
        return self.cp_kind == "replicated" and self.cp_rank != 0

    @property
    def cp_scope(self) -> str | None:
        """What keeps context-parallel ranks apart that hold different parts of a page."""
        return f"cp {self.cp_rank}/{self.cp_size}" if self.cp_kind == "sharded" else None

    @property
    def tp_scope(self) -> str | None:
        """What keeps tensor-parallel ranks apart, where there are several."""
        return f"tp {self.tp_rank}/{self.tp_size}" if self.tp_size > 1 else None

    @property
    def pp_scope(self) -> str | None:
        """What keeps pipeline stages apart, where there are several."""
        return f"pp {self.pp_rank}/{self.pp_size}" if self.pp_size > 1 else None

    def heads(self, held: int, total: int) -> tuple[int, int] | None:
        """Returns the model's heads that this rank holds: first, and one past the last.

        Args:
            held: Heads in this rank's pool.
            total: Heads of the model. With fewer than there are ranks, neighbours hold the same one.

        Returns:
            None where the numbers contradict each other.
        """
        if (
            total < 1
            or held != max(1, total // self.tp_size)
            or (total >= self.tp_size and total % self.tp_size)
        ):
            return None
        first = self.tp_rank * held if total >= self.tp_size else self.tp_rank * total // self.tp_size
        return first, first + held

    @property
    def label(self) -> str:
        """The rank in a word, for file names and metrics; unique among the ranks of a deployment."""
        parts = {"tp": self.tp_rank, "pp": self.pp_rank, "cp": self.cp_rank, "dp": self.dp_rank}
        return "-".join(f"{name}{rank}" for name, rank in parts.items())

    @property
    def number(self) -> int:
        """The rank as one number, 0 for the first."""
        number = self.dp_rank * self.pp_size + self.pp_rank
        return (number * self.cp_size + self.cp_rank) * self.tp_size + self.tp_rank
