"""A reader written from docs/format.md alone, with Python's own xxhash and zstandard, gets the pages back."""

import hashlib
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hicache_store import Namespace, Pool, Store, Tile, page_keys
from xxhash import xxh3_64_intdigest

PAGES = 3
LAYERS, HEADS, TOKENS, ROW = 4, 2, 64, 128


@dataclass
class Frame:
    """A journal frame."""

    kind: int
    namespace: bytes
    body: bytes


@dataclass
class Page:
    """An object as stored: its key, and the stored bytes of each block with the raw length."""

    key: bytes
    blocks: list[tuple[bytes, int]]
    codec: int


def read_frames(journal: bytes) -> list[Frame]:
    """All frames of a journal, each one verified."""
    frames, at = [], 0
    while at < len(journal):
        magic, checksum, _process, sequence = struct.unpack_from("<8sQ16sQ", journal, at)
        kind, _, _records, length, _ = struct.unpack_from("<HHIII", journal, at + 40)
        namespace, _written = struct.unpack_from("<16sQ", journal, at + 56)
        end = at + 80 + length
        assert magic == b"HICFRM01"
        assert sequence == len(frames)
        assert checksum == xxh3_64_intdigest(journal[at + 16 : end])
        frames.append(Frame(kind, namespace, journal[at + 80 : end]))
        at = -(-end // 8) * 8
    return frames


def read_unit(frame: Frame, segment: bytes) -> list[Page]:
    """The pages of an add frame, from directory and payload in the segment; every checksum is verified."""
    process, number, runs = struct.unpack_from("<16sII", frame.body, 0)
    unit_offset, _unit_bytes, directory_offset, directory_bytes = struct.unpack_from("<QQQQ", frame.body, 32)
    directory = segment[directory_offset : directory_offset + directory_bytes]
    assert directory[:8] == b"HICDIR01"
    assert struct.unpack_from("<II", directory, 8) == (1, runs)
    assert directory[16:48] == frame.namespace + process
    assert struct.unpack_from("<I", directory, 48) == (number,)
    table_end = 104 + 8 * runs
    assert struct.unpack_from("<Q", directory, table_end) == (xxh3_64_intdigest(directory[:table_end]),)
    pages = []
    for (start,) in struct.iter_unpack("<Q", directory[104:table_end]):
        pages += read_run(frame.namespace, directory[start:], segment[unit_offset:])
    return pages


def read_run(namespace: bytes, run: bytes, unit: bytes) -> list[Page]:
    """The pages of one run."""
    magic, entries = struct.unpack_from("<4sI", run, 0)
    assert magic == b"HRUN"
    form = run[8:72]
    (codec,) = struct.unpack_from("<B", form, 48)
    block_bytes, page_bytes = struct.unpack_from("<IQ", form, 52)
    (pool_bytes,) = struct.unpack_from("<I", run, 96)
    header_end = 136 + pool_bytes
    assert form[:16] == hashlib.sha256(run[136:header_end]).digest()[:16]
    assert struct.unpack_from("<Q", run, header_end) == (xxh3_64_intdigest(run[:header_end]),)
    blocks = -(-page_bytes // block_bytes)
    at, pages = header_end + 8, []
    for _ in range(entries):
        end = at + 40 + 12 * blocks
        key, offset = struct.unpack_from("<32sQ", run, at)
        seed = xxh3_64_intdigest(namespace + form + key)
        assert struct.unpack_from("<Q", run, end) == (xxh3_64_intdigest(run[at:end], seed),)
        stored = []
        for index, (length, checksum) in enumerate(struct.iter_unpack("<IQ", run[at + 40 : end])):
            block = unit[offset : offset + length]
            assert checksum == xxh3_64_intdigest(block, (seed + index) % 2**64)
            stored.append((block, min(block_bytes, page_bytes - index * block_bytes)))
            offset += length
        pages.append(Page(key, stored, codec))
        at = end + 8
    return pages


def decode(page: Page) -> bytes:
    """Raw bytes of a page."""
    raw = b""
    for stored, length in page.blocks:
        if len(stored) == length:
            raw += stored
            continue
        frames, rest = [], stored
        while rest:
            decompressor = zstandard.ZstdDecompressor().decompressobj()
            frames.append(decompressor.decompress(rest))
            rest = decompressor.unused_data
        if page.codec == 2:
            even, odd = frames
            planes = np.empty(length, np.uint8)
            planes[0::2], planes[1::2] = np.frombuffer(even, np.uint8), np.frombuffer(odd, np.uint8)
            frames = [planes.tobytes()]
        raw += b"".join(frames)
    return raw


@pytest.mark.parametrize(
    ("dtype", "codec", "number"), [("bfloat16", "none", 0), ("uint8", "zstd", 1), ("bfloat16", "zstd:3", 2)]
)
def test_the_documented_bytes_are_the_stored_ones(
    tmp_path: Path, dtype: str, codec: str, number: int
) -> None:
    # Rounded Gaussian numbers compress like real KV: only the byte plane of the exponents does.
    random = np.random.default_rng(1).normal(size=PAGES * LAYERS * HEADS * TOKENS * ROW)
    memory = (random.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    pool = Pool("kv", "kv", dtype, components={"k": ROW * 2, "v": ROW * 2})
    namespace = Namespace("org/model", revision="r1", page_size=TOKENS)
    keys = page_keys(list(range(PAGES * TOKENS)), TOKENS)
    memory = np.concatenate([memory, memory[::-1]])
    with Store.open(tmp_path / "root", capacity=1 << 30) as store:
        tile = Tile(layers=(0, LAYERS), heads=(0, HEADS))
        view = store.view(namespace, pool, tile=tile, layout="page_first", codec=codec)
        assert view.backup(keys, memory, range(PAGES), depth=0).count("stored") == PAGES
    (journal,) = (tmp_path / "root").glob("journal/*.idx")
    (segment,) = (tmp_path / "root").glob("ns/*/*.seg")
    adds = [frame for frame in read_frames(journal.read_bytes()) if frame.kind == 1]
    pages = [page for frame in adds for page in read_unit(frame, segment.read_bytes())]
    assert [page.key for page in pages] == keys
    # The engine's flat page: K of the slot, then V of the slot.
    halves = memory.view(np.uint8).reshape(2, PAGES, -1)
    for slot, page in enumerate(pages):
        assert page.codec == number
        assert decode(page) == halves[0, slot].tobytes() + halves[1, slot].tobytes()
    if number:
        assert any(len(stored) < length for page in pages for stored, length in page.blocks)
