"""Host pages of which each part lies in a buffer of its own: put together and taken apart in batches.

The engine keeps some pools so that no rule of one buffer reaches them: DeepSeek-V4's `layer_first` pools, a
buffer for each layer, and Mamba pools with many side states. They pass through a scratch buffer, some pages
at a time.
"""

from collections.abc import Sequence
from typing import Final

import torch

__all__ = ["StagedMemory"]

# Bytes of scratch memory for one batch of pages.
_SCRATCH_BYTES: Final = 32 << 20


class StagedMemory:
    """Buffers `[pages, ...]`, each with one part of every page."""

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        """Keeps views of the bytes of `buffers`: contiguous, in the order of the parts of a page."""
        self._parts = [buffer.view(torch.uint8).reshape(buffer.shape[0], -1) for buffer in buffers]
        self.page_bytes: int = sum(part.shape[1] for part in self._parts)
        """Bytes of one page."""

    @property
    def batch_pages(self) -> int:
        """Pages of one batch."""
        return max(1, _SCRATCH_BYTES // self.page_bytes)

    def scratch(self, pages: int) -> torch.Tensor:
        """Returns memory for `pages` pages, uint8 `[pages, page_bytes]`, of undefined content."""
        return torch.empty((pages, self.page_bytes), dtype=torch.uint8)

    def gather(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns the pages of `slots`, int64 `[pages]`, put together."""
        pages = self.scratch(len(slots))
        for part, columns in zip(self._parts, self._columns(pages), strict=True):
            columns.copy_(part[slots])
        return pages

    def scatter(self, pages: torch.Tensor, slots: torch.Tensor) -> None:
        """Puts `pages` into `slots`."""
        for part, columns in zip(self._parts, self._columns(pages), strict=True):
            part[slots] = columns

    def _columns(self, pages: torch.Tensor) -> tuple[torch.Tensor, ...]:
        columns: tuple[torch.Tensor, ...] = pages.split([part.shape[1] for part in self._parts], dim=1)
        return columns
