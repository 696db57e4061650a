"""Bfloat16 and the host pool: the shape in which an engine keeps KV pages in its own memory."""

import hashlib
from typing import Final

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
Bf16Array = npt.NDArray[np.uint16]

CANARY: Final = 0xA5A5


def to_bf16(values: FloatArray) -> Bf16Array:
    """Rounds float32 to bfloat16 bits, to the nearest, ties to even; a NaN becomes quiet, its sign stays."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = bits + (np.uint32(0x7FFF) + odd)  # wraps for some NaNs, which are replaced below
    halves = (rounded >> np.uint32(16)).astype(np.uint16)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    if nan.any():
        quiet = ((bits >> np.uint32(16)) | np.uint32(0x0040)).astype(np.uint16)
        halves = np.where(nan, quiet, halves)
    return halves


def from_bf16(bits: Bf16Array) -> FloatArray:
    """Widens bfloat16 bits to float32, which is exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


class HostPool:
    """An engine's host pool of KV pages, layout page_first_direct.

    Attributes:
        array: uint16 (bfloat16 bits) `[2, pages, layers, page_tokens, heads, head_dim]`, K before V,
            C-contiguous. Lent to the store as its region; a slot is an index of the second axis. Slots that
            nobody wrote hold 0xA5 bytes.
    """

    def __init__(self, slots: int, layers: int, page_tokens: int, heads: int, head_dim: int) -> None:
        """Fills all slots with the canary."""
        self.array: Bf16Array = np.full((2, slots, layers, page_tokens, heads, head_dim), CANARY, np.uint16)

    @property
    def slots(self) -> int:
        """Number of slots."""
        return len(self.array[0])

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, K and V together."""
        return self.array[:, 0].nbytes

    def write(self, slot: int, kv: FloatArray) -> None:
        """Stores a page, float32 `[layers, 2, heads, page_tokens, head_dim]`, rounded to bfloat16."""
        self.array[:, slot] = to_bf16(kv).transpose(1, 0, 3, 2, 4)

    def read(self, slot: int) -> FloatArray:
        """Returns a page as float32 `[layers, 2, heads, page_tokens, head_dim]`."""
        return from_bf16(self.array[:, slot]).transpose(1, 0, 3, 2, 4)

    def content(self, slot: int) -> bytes:
        """Returns a page's bytes: `[2, layers, page_tokens, heads, head_dim]`, K before V."""
        return self.array[:, slot].tobytes()

    def sha256(self, slot: int) -> str:
        """SHA-256 of a page's bytes, in hex."""
        return hashlib.sha256(self.content(slot)).hexdigest()

    def untouched(self, used: list[int]) -> bool:
        """True when every slot outside `used` still holds the canary, byte for byte."""
        others = np.setdiff1d(np.arange(self.slots), np.array(used))
        return bool((self.array[:, others] == CANARY).all())
