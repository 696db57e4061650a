"""`import hicache_store` is light, its names are its own, and the command line tool starts from it."""

import subprocess
import sys

import hicache_store


def run(code, *arguments):
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_nothing_heavy_is_imported():
    code = "import sys, hicache_store, hicache_store._tool; print(*sorted(sys.modules))"
    imported = {name.partition(".")[0] for name in run(code).split()}
    assert "hicache_store" in imported
    assert not imported & {"numpy", "torch", "sglang"}


def test_values_and_keys_need_no_numpy_either(tmp_path):
    code = """
import sys
from hicache_store import Namespace, Pool, Store, Tile, page_keys
with Store.open(sys.argv[1], capacity="16MiB") as store:
    view = store.view(Namespace("m", revision="r", page_size=2), Pool("kv", "kv", "uint8", {"k": 1}),
                      tile=Tile((0, 1), (0, 1)))
    assert view.match(page_keys([1, 2, 3], 2)).pages == 0
assert "numpy" not in sys.modules
"""
    run(code, str(tmp_path / "store"))


def test_public_names_are_there_and_sorted():
    names = hicache_store.__all__
    assert sorted(names) == names
    for name in names:
        if name != "__version__":
            assert getattr(hicache_store, name).__name__ == name


def test_classes_say_where_they_are_found():
    for name in hicache_store.__all__:
        value = getattr(hicache_store, name)
        if isinstance(value, type):
            expected = "hicache_store.exceptions" if issubclass(value, Exception) else "hicache_store"
            assert value.__module__ == expected, name


def test_tool_starts_as_a_module():
    command = [sys.executable, "-m", "hicache_store", "--version"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "hicache-store" in done.stdout
