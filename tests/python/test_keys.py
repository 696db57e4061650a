"""Page keys: digests that are the same in every process, in the forms in which engines hold them."""

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest
from hicache_store import ConfigError, Namespace, Pool, Store, Tile, chain_seed, page_keys
from hypothesis import given, settings
from hypothesis import strategies as st

# SHA-256 of tokens 0 to 3 as little-endian uint32; then of that key and tokens 4 to 7.
GOLDEN = [
    "baed642339816affb3fe8719792d0e4ce82f12db72b7373d244eaa65445800fe",
    hashlib.sha256(
        bytes.fromhex("baed642339816affb3fe8719792d0e4ce82f12db72b7373d244eaa65445800fe")
        + np.arange(4, 8, dtype="<u4").tobytes()
    ).hexdigest(),
]


@pytest.mark.parametrize("seed", [None, "0", "random"])
def test_case_d22_keys_are_the_same_in_every_process(seed):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    if seed is not None:
        environment["PYTHONHASHSEED"] = seed
    code = "from hicache_store import page_keys; print(*[key.hex() for key in page_keys(range(9), 4)])"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
    )
    assert done.stdout.split() == GOLDEN


def plain(tokens, page_size, prior):
    """The engine's chain, in Python: narrow pages as uint32, pages with a wide token as 0xff and uint64."""
    keys = []
    for start in range(0, len(tokens) - page_size + 1, page_size):
        page = tokens[start : start + page_size]
        wide = max(page) >= 2**32
        words = b"".join(token.to_bytes(8 if wide else 4, "little") for token in page)
        prior = hashlib.sha256((prior or b"") + (b"\xff" if wide else b"") + words).digest()
        keys.append(prior)
    return keys


@settings(deadline=None, max_examples=60)
@given(
    tokens=st.lists(st.integers(0, 2**40) | st.integers(0, 9) | st.just(2**63 - 1), max_size=20),
    page_size=st.integers(1, 5),
    prior=st.none() | st.binary(min_size=32, max_size=32),
)
def test_keys_equal_the_plain_chain(tokens, page_size, prior):
    expected = plain(tokens, page_size, prior)
    assert page_keys(tokens, page_size, prior=prior) == expected
    assert page_keys(tuple(tokens), page_size, prior=prior and prior.hex()) == expected
    assert page_keys(np.array(tokens, np.int64), page_size, prior=prior) == expected
    assert page_keys(np.array(tokens, np.uint64), page_size, prior=prior) == expected


@pytest.mark.parametrize("dtype", ["i1", "u2", "<i4", ">i4", ">u8"])
def test_tokens_of_every_integer_type(dtype):
    tokens = np.arange(16, dtype=dtype)
    assert page_keys(tokens[::2], 4) == page_keys(list(range(0, 16, 2)), 4)


def test_seed_and_prior():
    seed = chain_seed("adapter", None)
    assert len(seed) == 32
    assert chain_seed() is None
    assert chain_seed("") != chain_seed(None, "")
    assert page_keys(range(4), 4, extra_key="adapter") == page_keys(range(4), 4, prior=seed)
    assert page_keys(range(4), 4, extra_key="adapter") != page_keys(range(4), 4)
    whole = page_keys(range(8), 4)
    assert page_keys(range(4, 8), 4, prior=whole[0]) == whole[1:]
    with pytest.raises(ConfigError, match="prior"):
        page_keys(range(4), 4, prior=seed, cache_salt="salt")


def test_bigram_positions_are_pairs():
    pairs = [0, 1, 1, 2, 2, 3, 3, 4]
    assert page_keys(range(5), 4, bigram=True) == page_keys(pairs, 8)
    assert page_keys(range(4), 4, bigram=True) == []


@pytest.mark.parametrize(
    ("tokens", "page_size", "part"),
    [
        ([1, 2], 0, "page_size is 0"),
        ([1, 2], -1, "page_size is -1"),
        ([1, 2], 2**32, "page_size"),
        ([1, -2], 2, r"tokens\[1\] is -2"),
        ([1, 2**63], 2, r"tokens\[1\].*more than 64 bits"),
        ([1, 2.0], 2, r"tokens\[1\].*float"),
        (["1"], 1, r"tokens\[0\].*str"),
        ("12", 1, "tokens.*str"),
        (b"12", 1, "tokens.*bytes"),
        (7, 1, "tokens.*int"),
        ({1, 2}, 1, "tokens.*set"),
        (np.array([0, -1]), 2, r"tokens\[1\] is -1"),
        (np.array([0, 2**63], np.uint64), 2, r"tokens\[1\] is 9223372036854775808"),
        (np.zeros(2), 2, "float64"),
        (np.zeros((2, 2), int), 2, "2 axes"),
        (np.zeros(2, bool), 2, "bool"),
    ],
)
def test_tokens_that_are_none_are_refused(tokens, page_size, part):
    with pytest.raises(ConfigError, match=part):
        page_keys(tokens, page_size)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A view that holds three pages, and their keys."""
    keys = page_keys(range(12), 4)
    with Store.open(tmp_path_factory.mktemp("keys") / "store", capacity="16MiB") as store:
        pool, tile = Pool("kv", "kv", "uint8", {"k": 8}), Tile((0, 1), (0, 1))
        view = store.view(Namespace("m", revision="r", page_size=4), pool, tile=tile)
        view.backup(keys, bytes(3 * 32), range(3), depth=0)
        yield view, keys


@pytest.mark.parametrize(
    "form",
    [
        list,
        tuple,
        lambda keys: [key.hex() for key in keys],
        lambda keys: [key.hex().upper() for key in keys],
        lambda keys: [keys[0], keys[1].hex(), keys[2]],
        b"".join,
        lambda keys: bytearray(b"".join(keys)),
        lambda keys: np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 32),
        lambda keys: np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 32)[::-1][::-1],
    ],
    ids=["bytes", "tuple", "hex", "upper", "mixed", "flat", "flat-bytearray", "array", "strided-array"],
)
def test_keys_in_every_form(stored, form):
    view, keys = stored
    assert view.match(form(keys)).pages == 3
    assert view.match(form([keys[0], bytes(32), keys[2]])).pages == 1


def test_no_keys_match_nothing(stored):
    for nothing in ([], b"", np.empty((0, 32), np.uint8)):
        match = stored[0].match(nothing)
        assert (match.pages, match.legal, match.limited_by) == (0, [], None)


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        ([bytes(32), hash("page")], r"keys\[1\].*digest.*never a hash\(\)"),
        ([bytes(31)], r"keys\[0\]: expected 32 bytes or 64 hex digits, found 31 bytes"),
        (["00" * 31], r"keys\[0\].*62 characters"),
        (["0g" * 32], r"keys\[0\].*64 characters"),
        ([bytes(32), None], r"keys\[1\].*NoneType"),
        (bytes(33), "multiple of 32 bytes, found 33"),
        ("00" * 32, "keys: expected a list.*str"),
        (5, "keys: expected a list.*int"),
        ({bytes(32)}, "keys: expected a list.*set"),
        (np.zeros((1, 31), np.uint8), r"shape \(1, 31\)"),
        (np.zeros(32, np.uint8), r"shape \(32,\)"),
        (np.zeros((1, 32), np.int8), "int8"),
        (np.zeros((1, 32), np.int64), "int64"),
    ],
)
def test_what_is_no_key_is_refused(stored, keys, part):
    view, _ = stored
    with pytest.raises(ConfigError, match=part):
        view.match(keys)


def test_parent_is_a_key(stored):
    view, keys = stored
    with pytest.raises(ConfigError, match=r"parent.*digest"):
        view.backup(keys, bytes(96), range(3), parent=7)
