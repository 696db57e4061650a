"""The process that ranks are forked from starts while the first tests are collected."""

from harness import worlds


def pytest_collection_finish(session):
    """torch is imported once more, in the background."""
    worlds.warm()
