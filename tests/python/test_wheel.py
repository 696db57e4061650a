"""The wheel in dist/ installs in an empty environment and works there. Run by `make wheel`."""

import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.wheel, pytest.mark.timeout(600)]


def run(*command):
    result = subprocess.run([str(part) for part in command], check=False, capture_output=True, text=True)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def wheel():
    wheels = sorted((ROOT / "dist").glob("hicache_store-*.whl"))
    assert len(wheels) == 1, f"expected one wheel in {ROOT / 'dist'}, found {len(wheels)}: run make wheel"
    return wheels[0]


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The bin folder of an environment that holds the wheel and its declared dependencies, nothing else."""
    folder = tmp_path_factory.mktemp("wheel") / "venv"
    venv.create(folder, with_pip=True)
    run(folder / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel)
    return folder / "bin"


def test_wheel_is_abi3_manylinux(wheel):
    assert re.search(r"-cp310-abi3-manylinux_2_\d+_(x86_64|aarch64)", wheel.name), wheel.name
    report = run(sys.executable, "-m", "auditwheel", "show", wheel)
    assert re.search(r'following\s+platform\s+tag:\s+"manylinux_2_\d+_', report), report


def test_numpy_is_the_only_dependency(installed):
    names = run(
        installed / "python",
        "-c",
        "import importlib.metadata as m; print(*sorted(d.name for d in m.distributions()))",
    ).split()
    assert set(names) - {"pip", "setuptools", "wheel"} == {"hicache-store", "numpy"}


def test_version_is_the_workspace_version(installed):
    version = re.search(r'^version = "(.*)"', (ROOT / "Cargo.toml").read_text("utf-8"), re.MULTILINE).group(1)
    assert version in run(installed / "hicache-store", "--version").split()
    imported = run(installed / "python", "-c", "import hicache_store; print(hicache_store.__version__)")
    assert imported.strip() == version


def test_the_tool_sees_what_python_stored(installed, tmp_path):
    script = (
        "import sys, numpy as np; from hicache_store import Namespace, Pool, Store, Tile, page_keys;"
        "pool = Pool('kv', 'kv', 'float16', components={'k': 128, 'v': 128});"
        "store = Store.open(sys.argv[1], capacity='16MiB');"
        "namespace = Namespace('org/wheel', revision='r1', page_size=4);"
        "tile = Tile(layers=(0, 2), heads=(0, 2));"
        "view = store.view(namespace, pool, tile=tile, layout='page_first');"
        "memory = np.arange(4096, dtype=np.uint8);"
        "report = view.backup(page_keys([1, 2, 3, 4], 4), memory, [0], depth=0);"
        "assert report.outcomes == ['stored'], report"
    )
    run(installed / "python", "-c", script, tmp_path / "root")
    assert "org/wheel" in run(installed / "hicache-store", "ls", tmp_path / "root")
    assert "1 objects read" in run(installed / "hicache-store", "verify", tmp_path / "root")


def test_typed(installed):
    run(
        installed / "python",
        "-c",
        "import importlib.resources as r; f = r.files('hicache_store');"
        "assert (f / 'py.typed').is_file() and (f / '_hicache_store.pyi').is_file()",
    )
