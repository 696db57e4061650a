"""The demo's model and its pages. Tests of the model need the demo's extras, the others only numpy."""

import importlib.util
import math
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from demo.damage import find_once, flip_bit
from demo.pages import HostPool, from_bf16, to_bf16
from demo.weights import WEIGHTS_PACKAGE, WEIGHTS_REQUIREMENT, GgufFile, WeightsError, find_weights

if TYPE_CHECKING:
    from demo.model import SmolLM2

pytestmark = pytest.mark.demo

FIXTURES = Path(__file__).parents[1] / "fixtures" / "kv"
POLICY = "# Airline Agent Policy\n\nThe current time is 2024-05-15 15:00:00 EST.\n\n"


@pytest.fixture(scope="module")
def model() -> "SmolLM2":
    pytest.importorskip("tokenizers", reason="tokenizers is not installed (requirements/demo.txt)")
    if importlib.util.find_spec(WEIGHTS_PACKAGE) is None:
        pytest.skip(f"{WEIGHTS_REQUIREMENT} is not installed (demo/requirements-weights.txt)")
    from demo.model import SmolLM2

    return SmolLM2.load()


def reference_bf16(bits: int) -> int:
    """Rounds one float32 by comparing it with its two bfloat16 neighbours, in exact arithmetic."""
    (value,) = struct.unpack("<f", bits.to_bytes(4, "little"))
    if math.isnan(value):
        return bits >> 16 | 0x0040
    lower = bits >> 16

    def magnitude(half: int) -> float:
        # Infinity counts as 2^128, the next value of an unbounded exponent, as IEEE 754 rounds.
        exponent, fraction = (half >> 7) & 0xFF, half & 0x7F
        return math.ldexp(fraction, -133) if exponent == 0 else math.ldexp(128 + fraction, exponent - 134)

    if math.isinf(value):
        return lower
    down, up = abs(value) - magnitude(lower), magnitude(lower + 1) - abs(value)
    return lower if down < up or (down == up and lower % 2 == 0) else lower + 1


EDGES = {
    "zero": 0x00000000,
    "minus zero": 0x80000000,
    "smallest denormal": 0x00000001,
    "largest denormal": 0x007FFFFF,
    "denormal tie to even, down": 0x00008000,
    "denormal tie to even, up": 0x00018000,
    "denormal just above the tie": 0x00008001,
    "one": 0x3F800000,
    "tie to even, down": 0x3F808000,
    "tie to even, up": 0x3F818000,
    "just below the tie": 0x3F807FFF,
    "just above the tie": 0xBF808001,
    "carry into the exponent": 0x3FFFFFFF,
    "largest that stays finite": 0x7F7F7FFF,
    "tie that becomes infinity": 0x7F7F8000,
    "largest finite": 0xFF7FFFFF,
    "infinity": 0x7F800000,
    "minus infinity": 0xFF800000,
    "quiet NaN": 0x7FC00000,
    "NaN whose payload is only low bits": 0x7F800001,
    "NaN that rounding would wrap": 0xFFFFFFFF,
}


@pytest.mark.parametrize("bits", EDGES.values(), ids=EDGES.keys())
def test_bf16_rounding_at_the_edges(bits: int) -> None:
    assert to_bf16(np.array([bits], np.uint32).view(np.float32)).tolist() == [reference_bf16(bits)]


def test_bf16_rounding_of_random_bits() -> None:
    bits = np.random.default_rng(20240515).integers(0, 2**32, 20_000, dtype=np.uint32)
    assert to_bf16(bits.view(np.float32)).tolist() == [reference_bf16(int(one)) for one in bits]


def test_bf16_is_exact_for_its_own_values() -> None:
    every = np.arange(2**16, dtype=np.uint32).astype(np.uint16)
    numbers = every[~np.isnan(from_bf16(every))]
    assert np.array_equal(to_bf16(from_bf16(numbers)), numbers)


def test_pool_keeps_pages_apart() -> None:
    pool = HostPool(slots=4, layers=2, page_tokens=8, heads=3, head_dim=4)
    kv = from_bf16(to_bf16(np.random.default_rng(1).normal(size=(2, 2, 3, 8, 4)).astype(np.float32)))
    pool.write(2, kv)
    assert np.array_equal(pool.read(2), kv)
    assert len(pool.content(2)) == pool.page_bytes == 2 * 2 * 8 * 3 * 4 * 2
    assert (
        from_bf16(pool.array[1, 2, 1, 5, 2])[3] == kv[1, 1, 2, 5, 3]
    )  # V, slot, layer, token, head, dimension
    assert pool.untouched([2])
    pool.array[0, 3, 0, 0, 0, 0] ^= 1
    assert not pool.untouched([2])


def test_damage_flips_exactly_one_bit_of_the_bytes_it_is_given(tmp_path: Path) -> None:
    segment = tmp_path / "ns" / "w-0.seg"
    segment.parent.mkdir()
    segment.write_bytes(bytes(5000) + b"a page of a store" + bytes(5000))
    (tmp_path / "ns" / "w-1.seg").touch()
    path, offset = find_once(tmp_path, b"page")
    assert (path, offset) == (segment, 5002)
    flip_bit(path, offset, 3)
    assert segment.read_bytes() == bytes(5000) + b"a xage of a store" + bytes(5000)
    with pytest.raises(LookupError, match="found them 0 times"):
        find_once(tmp_path, b"page")
    (tmp_path / "ns" / "w-1.seg").write_bytes(b"xage")
    with pytest.raises(LookupError, match="found them 2 times"):
        find_once(tmp_path, b"xage")


def test_other_weights_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(WeightsError, match=r"expected sha256 0{64}, found"):
        GgufFile.open(path, "0" * 64)
    with pytest.raises(WeightsError, match="expected GGUF version 3"):
        GgufFile(b"GGML" + bytes(20))


@pytest.mark.usefixtures("model")
def test_weights_are_found_without_importing_their_package() -> None:
    assert find_weights().name.endswith(".gguf")
    assert WEIGHTS_PACKAGE not in sys.modules


def test_tokenizer_splits_digits_and_comes_back(model: "SmolLM2") -> None:
    encoded = model.tokenizer.encode("\n\n1. user 3668<|im_end|>")
    assert encoded.tokens[-6:] == ["Ġ", "3", "6", "6", "8", "<|im_end|>"]
    assert "1" in encoded.tokens
    assert encoded.ids[-1] == model.end_of_turn
    assert model.tokenizer.decode(encoded.ids) == "\n\n1. user 3668"


def test_resuming_a_prefix_equals_going_on(model: "SmolLM2") -> None:
    """Through pages: the bits that the live state gives, and the choices of one pass over everything."""
    ids = model.tokenizer.encode("<|im_start|>system\n" + POLICY * 3).ids
    page, pages = 16, 3
    split = page * pages
    assert len(ids) > split + page
    live = model.cache(len(ids))
    model.forward(ids[:split], live)
    pool = HostPool(pages, model.shape.layers, page, model.shape.kv_heads, model.shape.head_dim)
    for slot in range(pages):
        pool.write(slot, live.page(slot, page))
    going_on = model.logits(model.forward(ids[split:], live))

    restored = model.cache(len(ids))
    for slot in range(pages):
        restored.append(pool.read(slot))
    resumed = model.logits(model.forward(ids[split:], restored))
    assert resumed.tobytes() == going_on.tobytes()

    whole = model.logits(model.forward(ids, model.cache(len(ids))))[split:]
    assert np.array_equal(resumed.argmax(-1), whole.argmax(-1))
    assert np.abs(resumed - whole).max() < 0.5

    restored.tokens = split
    restored.data[:, :, :, :page] = 0
    assert np.abs(model.logits(model.forward(ids[split:], restored)) - whole).max() > 1  # the prefix matters


def test_kv_equals_that_of_another_implementation(model: "SmolLM2") -> None:
    """The fixture was made elsewhere, with KV in float32: layer 0 is equal, later ones differ by rounding."""
    zstandard = pytest.importorskip("zstandard", reason="zstandard is not installed")
    from demo.text import read_text

    raw = zstandard.decompress((FIXTURES / "smollm2_tau0_bf16_page0.bin.zst").read_bytes())
    expected = from_bf16(np.frombuffer(raw, np.uint16)).reshape(30, 2, 3, 64, 64)
    cache = model.cache(64)
    model.forward(read_text(model.tokenizer).history[:64], cache)
    found = cache.page(0, 64)
    assert (found[0] == expected[0]).mean() > 0.999
    assert np.linalg.norm(found - expected) < 0.01 * np.linalg.norm(expected)
