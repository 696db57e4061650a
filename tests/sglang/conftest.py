"""Fixtures of the engine's side. The engine is imported here, once, with what a CPU lacks replaced."""

from __future__ import annotations

import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from harness import backends, workers


def pytest_collection_finish(session):
    """Other processes are forked from one that imports the engine while the first tests run."""
    if any("processes" in item.path.parts or "workers" in dir(item.module) for item in session.items):
        workers.warm()


@pytest.fixture(params=backends.KINDS)
def kind(request) -> str:
    """Each test of the conformance suite runs with both backends."""
    return request.param


@pytest.fixture
def open_backend(tmp_path):
    """Opens backends on one root, and closes them at the end."""
    opened = []

    def make(kind, anchor, sidecars=None, **changes):
        backend = backends.open_backend(
            kind, changes.pop("root", tmp_path / "root"), anchor, sidecars, **changes
        )
        opened.append(backend)
        return backend

    yield make
    for backend in opened:
        backends.close(backend)


@pytest.fixture
def rank(tmp_path):
    """Makes ranks of an engine on one root; all are closed at the end."""
    from harness.tree import Rank
    from sglang.srt.runtime_context import reset_context

    made = []

    def make(*args, root=None, **options):
        made.append(Rank(root or tmp_path / "root", *args, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
    reset_context()  # what a server tells of itself is of the process, and outlives it
