"""Flips one bit of a page on disk, as a failing disk would: behind the store's back."""

import mmap
from pathlib import Path


def find_once(root: Path, needle: bytes) -> tuple[Path, int]:
    """Finds the only place in the store's segments that holds these bytes.

    Raises:
        LookupError: There is no such place, or more than one.
    """
    places: list[tuple[Path, int]] = []
    for path in sorted(root.rglob("*.seg")):
        if path.stat().st_size == 0:
            continue
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            at = content.find(needle)
            while at >= 0:
                places.append((path, at))
                at = content.find(needle, at + 1)
    if len(places) != 1:
        raise LookupError(f"expected the bytes once in segments under {root}, found them {len(places)} times")
    return places[0]


def flip_bit(path: Path, offset: int, bit: int) -> None:
    """Inverts bit `bit` (0 is the lowest) of the byte at `offset`."""
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ (1 << bit)]))
