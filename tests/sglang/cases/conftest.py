"""What several cases do to stored bytes."""

from __future__ import annotations

import pytest
from harness import backends


@pytest.fixture
def damage(tmp_path):
    """Flips one bit of a stored page, wherever in the root its bytes are."""

    def flip(snippet: bytes, root=None) -> None:
        assert len(snippet) >= 12
        places = []
        for path in (root or tmp_path / "root").rglob("*"):
            if path.is_file():
                data = path.read_bytes()
                at = data.find(snippet)
                if at >= 0:
                    places.append((path, at))
        ((path, at),) = places
        with path.open("r+b") as file:
            file.seek(at)
            file.write(bytes([snippet[0] ^ 1]))

    return flip


@pytest.fixture
def put():
    """Stores pages of a pool by the calls of version 2, which both backends have."""

    def store(backend, name, pool, keys, slots):
        answer = backend.batch_set_v2([backends.transfer(name, pool, keys, list(slots))])
        assert answer == {name: [True] * len(keys)}

    return store
