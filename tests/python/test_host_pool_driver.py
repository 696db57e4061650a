"""What is asked of the CUDA driver, and in which order: shown by a library that stands in for it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

STUB = Path(__file__).parents[1] / "stub" / "libcuda.c"
MIB = 1 << 20

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc to build the stub driver with")


@pytest.fixture(scope="module")
def stub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stub")
    flags = ["-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(["gcc", *flags, "-o", folder / "libcuda.so.1", STUB], check=True)
    return folder


@pytest.fixture
def run(stub, tmp_path):
    """Runs a program under the stub: what it printed, and the calls that the stub saw."""

    def run(body, **environment):
        log = tmp_path / "log"
        log.write_text("")
        script = f"import ctypes, gc, os, sys\nfrom hicache_store import *\n{body}"
        result = subprocess.run(
            [sys.executable, "-c", script],
            check=False,
            capture_output=True,
            text=True,
            timeout=110,
            env={"LD_LIBRARY_PATH": str(stub), "STUB_LOG": str(log), "PYTHONPATH": ":".join(sys.path)}
            | {name: str(value) for name, value in environment.items()},
        )
        assert result.returncode == 0, result.stderr
        assert result.stderr == ""
        return result.stdout.split("\n")[:-1], log.read_text("utf-8").split("\n")[:-1]

    return run


POOL = f"pool = HostPool(5, {MIB}, huge_pages='off', register='require', register_piece={2 * MIB})\n"
PIECES = [2 * MIB, 2 * MIB, MIB]
REGISTERED = ["cuInit", "retain", *[f"register {piece} mapped" for piece in PIECES]]
UNDONE = [f"unregister {piece} mapped" for piece in reversed(PIECES)]  # the last first


def test_importing_asks_nothing(run):
    _, calls = run("import hicache_store")
    assert calls == []


def test_each_piece_is_registered_and_unregistered_before_it_is_unmapped(run):
    words, calls = run(POOL + "print(*pool.got)\npool.close()\nprint(pool)")
    assert words == ["prefaulted registered", "<HostPool, closed>"]
    assert calls == [*REGISTERED, *UNDONE, "release"]


@pytest.mark.parametrize("slot_bytes", [MIB, 3 * MIB // 2, 4096 * 7, 5120])
def test_pieces_end_where_a_slot_does(run, slot_bytes):
    words, _ = run(
        f"pool = HostPool(512, {slot_bytes}, huge_pages='off', register='require', register_piece={MIB})\n"
        "print(*pool.stats()['registered_pieces'])"
    )
    pieces = [int(piece) for piece in words[0].split()]
    assert len(pieces) > 1
    assert all(piece % slot_bytes == 0 and piece % 4096 == 0 for piece in pieces[:-1])
    assert 512 * slot_bytes <= sum(pieces) < 512 * slot_bytes + 4096


def test_what_was_registered_is_undone_backwards_when_a_piece_is_refused(run):
    body = f"""
try:
    HostPool(5, {MIB}, huge_pages='off', register='require', register_piece='2MiB')
except DeviceError as error:
    print(error)
pool = HostPool(5, {MIB}, huge_pages='off', lock='try', register='off')
print(*pool.got)
"""
    words, calls = run(body, STUB_REFUSE=3)
    assert "cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY (2)" in words[0]
    assert calls == [*REGISTERED, *UNDONE[1:], "release"]
    assert "registered" not in words[1]


def test_a_wish_that_the_driver_refuses_is_noted(run):
    words, calls = run(
        POOL.replace("require", "try") + "print(*pool.got)\nprint(*pool.stats()['unmet'])", STUB_REFUSE=1
    )
    assert words[0] == "prefaulted"
    assert "CUDA_ERROR_OUT_OF_MEMORY" in words[1]
    assert calls == ["cuInit", "retain", f"register {2 * MIB} mapped", "release"]


def test_a_driver_without_a_device_is_no_driver(run):
    body = """
try:
    HostPool(1, 4096, register='require')
except UnsupportedError as error:
    print(error)
pool = HostPool(1, 4096)
print(*pool.stats()['unmet'])
memoryview(pool)[0] = 1
"""
    words, calls = run(body, STUB_INIT=100)
    assert all("no CUDA: cuInit: CUDA_ERROR_NO_DEVICE (100)" in line for line in words)
    assert calls == ["cuInit"]


def test_a_registered_pool_is_memory_that_devices_reach(run):
    body = (
        POOL
        + """
host_address = ctypes.addressof(ctypes.c_char.from_buffer(pool))
print(pool.__dlpack_device__(), pool.device_address - host_address == 1 << 40)
assert pool.stats()["registered_pieces"] == [2 << 20, 2 << 20, 1 << 20]
"""
    )
    assert run(body)[0] == ["(3, 0) True"]


def test_a_pool_that_nobody_closed_is_unregistered_at_the_end(run):
    _, calls = run(POOL + "view = memoryview(pool)")
    assert calls in ([*REGISTERED, *UNDONE, "release"], REGISTERED)
    _, calls = run(POOL)
    assert calls == [*REGISTERED, *UNDONE, "release"]


def test_a_driver_that_has_ended_is_no_error(run):
    body = POOL + "ctypes.CDLL('libcuda.so.1').stub_end()\n"
    for end in ("pool.close()", "del pool", ""):
        _, calls = run(body + end)
        assert calls == [*REGISTERED, *["unregister after the end"] * 3, "release"]


def test_memory_that_the_driver_holds_on_to_is_not_unmapped(run):
    body = (
        POOL
        + """
(address, _) = __import__("numpy").frombuffer(pool, "u1").__array_interface__["data"]
gc.collect()
try:
    pool.close()
except DeviceError as error:
    print(error)
print(pool, any(line.startswith(f"{address:x}-") for line in open("/proc/self/maps")))
"""
    )
    words, _ = run(body, STUB_REFUSE_UNDO=2)
    assert words == ["cuMemHostUnregister: CUDA_ERROR_ILLEGAL_ADDRESS (700)", "<HostPool, closed> True"]


def test_a_forked_child_asks_the_driver_nothing(run):
    body = (
        POOL
        + """
child = os.fork()
if child == 0:
    try:
        del pool
        gc.collect()
        print(*HostPool(1, 4096).stats()["unmet"][-1:], flush=True)
        os._exit(7)
    finally:
        os._exit(1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
pool.close()
"""
    )
    words, calls = run(body)
    assert words[1] == "7"
    assert "no CUDA in a forked child" in words[0]
    assert calls == [*REGISTERED, *UNDONE, "release"]
