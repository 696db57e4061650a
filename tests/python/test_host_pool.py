"""Host pools: slots have one holder, memory lives as long as its views, limits are named."""

import gc
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hicache_store import (
    ConfigError,
    GeometryError,
    HostPool,
    LeaseError,
    Namespace,
    Pool,
    PoolExhaustedError,
    Region,
    ResourceLimitError,
    SlotLease,
    Store,
    StoreClosedError,
    Tile,
    UnsupportedError,
    page_keys,
)

MIB = 1 << 20
SLOT = 64


def make(slots=4, slot_bytes=SLOT, **options):
    return HostPool(slots, slot_bytes, register="off", **options)


def run(script, *arguments, **options):
    """Runs a Python program; what it prints, and how it ended."""
    command = [sys.executable, "-c", script, *(str(argument) for argument in arguments)]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=180, **options)


def maps():
    return Path("/proc/self/maps").read_text("utf-8")


def test_slots_are_leased_all_or_none():
    pool = make()
    lease = pool.lease(3)
    assert (lease.slots, len(lease), lease.released) == ([0, 1, 2], 3, False)
    with pytest.raises(PoolExhaustedError, match=r"expected 2 free slots, found 1 of 4") as caught:
        pool.lease(2)
    assert caught.value.context == {"wanted": "2", "free": "1", "slots": "4"}
    lease.release([1])
    assert lease.slots == [0, 2]
    assert pool.lease(2).slots == [1, 3]
    with pytest.raises(ConfigError, match="count"):
        pool.lease(-1)


def test_what_was_released_is_refused_by_name():
    pool, other = make(), make()
    lease = pool.lease(2)
    with pytest.raises(LeaseError, match="another pool"):
        other.release(lease)
    with pytest.raises(LeaseError, match="slots of this lease, found 9"):
        lease.release([0, 9])
    assert lease.slots == [0, 1]
    pool.release(lease)
    for use in (lease.release, lambda: lease.slots, lambda: pool.release(lease), lambda: len(lease)):
        with pytest.raises(LeaseError, match="released already"):
            use()
    assert pool.stats()["free_slots"] == 4


def test_a_lease_ends_with_its_block_or_its_last_reference():
    pool = make()
    with pool.lease(4) as lease:
        assert pool.stats()["leased_slots"] == 4
        lease.release()
    with pool.lease(4):
        pass
    lease = pool.lease(4)
    del lease
    gc.collect()
    assert pool.stats()["leases"] == 0
    assert isinstance(pool.lease(4), SlotLease)


def test_it_is_a_buffer_of_writable_bytes():
    pool = make()
    view = memoryview(pool)
    assert (view.format, view.itemsize, view.shape, view.strides) == ("B", 1, (4 * SLOT,), (1,))
    assert not view.readonly
    assert view.c_contiguous
    view[SLOT] = 7
    array = np.frombuffer(pool, np.uint32).reshape(4, -1)
    assert array[1, 0] == 7
    array[3] = 0x01010101
    assert bytes(view[-4:]) == b"\1\1\1\1"
    assert np.asarray(pool).nbytes == pool.nbytes == 4 * SLOT


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_it_is_a_dlpack_tensor_of_bytes(version):
    pool = make()
    assert pool.__dlpack_device__() == (1, 0)
    name = "dltensor" if version is None else "dltensor_versioned"
    assert f'"{name}"' in repr(pool.__dlpack__(max_version=version))
    gc.collect()
    assert pool.stats()["views"] == 0, "a capsule that nobody consumed kept the memory"
    array = np.from_dlpack(pool)
    assert (array.dtype, array.shape) == (np.uint8, (4 * SLOT,))
    memoryview(pool)[5] = 9
    assert array[5] == 9
    for refused in ({"dl_device": (2, 0)}, {"copy": True}):
        with pytest.raises(BufferError):
            pool.__dlpack__(**refused)


VIEWS = [memoryview, np.frombuffer, np.asarray, np.from_dlpack, Region, lambda pool: pool.lease(1)]


@pytest.mark.parametrize("view", VIEWS)
def test_a_pool_in_use_is_not_closed(view):
    pool = make()
    held = view(pool)
    with pytest.raises(BufferError, match=r"expected no (views|leases)"):
        pool.close()
    assert not pool.closed
    del held
    gc.collect()
    pool.close()
    pool.close()
    assert pool.closed
    assert repr(pool) == "<HostPool, closed>"
    for use in (lambda: memoryview(pool), lambda: pool.lease(1), pool.stats, lambda: Region(pool)):
        with pytest.raises(StoreClosedError, match="closed"):
            use()


def test_a_view_keeps_memory_whose_pool_is_gone():
    array = np.frombuffer(make(), np.uint8)
    array[:] = 5
    gc.collect()
    assert (array == 5).all()


def test_pages_of_a_store_are_restored_into_leased_slots(tmp_path):
    store = Store.open(tmp_path, capacity="16MiB")
    layout = Pool("kv", "kv", "uint8", {"k": 8, "v": 8})
    view = store.view(Namespace("m", revision="r", page_size=2), layout, tile=Tile((0, 1), (0, 2)))
    keys = page_keys(range(6), 2)
    source = np.random.default_rng(1).integers(0, 256, 3 * SLOT, np.uint8)
    view.backup(keys, source, [0, 1, 2], depth=0)
    pool = make(4)
    lease = pool.lease(4)
    lease.release([1])
    assert view.restore(keys, pool, lease.slots).all_restored
    restored = np.frombuffer(pool, np.uint8).reshape(2, 4, -1)
    assert (restored[:, lease.slots] == source.reshape(2, 3, -1)).all()


def test_what_was_got_is_told():
    pool = make(4, 4 * MIB, lock="try", numa="local", touch_threads=2)
    stats = pool.stats()
    assert stats["mapped_bytes"] == 16 * MIB
    assert "prefaulted" in pool.got
    assert ("thp" in pool.got or "hugetlb" in pool.got) == (stats["huge_bytes"] > 0)
    assert ("locked" in pool.got) == stats["locked"]
    assert pool.got == tuple(re.search(r": (.*)>$", repr(pool)).group(1).split(", "))
    if "hugetlb" not in pool.got:
        assert any("hugetlb" in line for line in stats["unmet"])


@pytest.mark.parametrize(
    ("options", "error", "part"),
    [
        ({"lock": "maybe"}, ConfigError, "lock: expected off, try or require"),
        ({"numa": "far"}, ConfigError, "numa: expected the number of a node"),
        ({"numa": 1000}, ConfigError, "NUMA node"),
        ({"huge_page_bytes": 3 * MIB}, ConfigError, "power of two"),
        ({"touch_threads": -1}, ConfigError, "touch_threads"),
        ({"attach": 999}, ConfigError, "file descriptor 999"),
    ],
)
def test_options_that_cannot_be_are_refused(options, error, part):
    with pytest.raises(error, match=part):
        make(**options)


def test_more_memory_than_there_is_is_a_limit_and_says_which():
    with pytest.raises(
        ResourceLimitError, match=r"(cgroup memory|memory of the machine): expected \d+ bytes"
    ):
        make(1 << 20, 1 << 30)


LOCK = """
import os, resource, sys
from hicache_store import HostPool
from hicache_store.exceptions import ResourceLimitError
resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
if os.geteuid() == 0:
    os.setuid(65534)
pool = HostPool(4, 1 << 20, register="off", lock="try")
assert "locked" not in pool.got
assert any("RLIMIT_MEMLOCK" in line for line in pool.stats()["unmet"]), pool.stats()
small = HostPool(4, 1 << 16, register="off", lock="require")
assert "locked" in small.got
try:
    HostPool(4, 1 << 20, register="off", lock="require")
except ResourceLimitError as error:
    print(error)
"""


def test_a_lock_limit_that_is_too_small_is_named():
    result = run(LOCK)
    assert result.returncode == 0, result.stderr
    for part in ("RLIMIT_MEMLOCK", str(4 * MIB), str(MIB), "ulimit -l", "LimitMEMLOCK="):
        assert part in result.stdout, result.stdout


FLAT = """
import gc
from pathlib import Path
import numpy
from hicache_store import HostPool

def held():
    gc.collect()
    status = Path("/proc/self/status").read_text()
    kib = int(status.split("VmRSS:")[1].split()[0])
    mappings = len(Path("/proc/self/maps").read_text().splitlines())
    return kib, mappings, len(list(Path("/proc/self/fd").iterdir()))

def cycle(number):
    pool = HostPool(4, 1 << 20, register="off", shared=number % 2 == 1)
    view = numpy.frombuffer(pool, numpy.uint8)
    view[:] = number
    with pool.lease(4):
        pass
    del view
    pool.close()

for number in range(8):
    cycle(number)
before = held()
for number in range(100):
    cycle(number)
print(*before, *held())
"""


def test_a_hundred_pools_leave_nothing_behind():
    result = run(FLAT)
    assert result.returncode == 0, result.stderr
    kib, mappings, files, *after = (int(word) for word in result.stdout.split())
    # A hundred pools would be 400 MiB and 300 mappings; threads that touch leave a few kilobytes and stacks.
    assert after[0] < kib + 2048, result.stdout
    assert after[1] < mappings + 30, result.stdout
    assert after[2] == files, result.stdout


def test_a_forked_child_has_no_part_in_the_pool(tmp_path):
    pool = make(4, MIB)
    lease, region = pool.lease(1), Region(pool)
    memory = np.frombuffer(pool, np.uint8)
    memory[:] = 3
    (address, _) = memory.__array_interface__["data"]
    child = os.fork()
    if child == 0:
        status = 0
        uses = [pool.stats, lambda: pool.lease(1), lease.release, lambda: lease.slots, pool.close]
        uses += [lambda: memoryview(pool), lambda: pool.__dlpack__(), lambda: Region(pool)]
        try:
            for use in uses:
                try:
                    use()
                except StoreClosedError as error:
                    status += "another process" in str(error)
            status += 100 * (f"{address:x}-" in maps())
            status += 50 * (region.nbytes != 0)
            store = Store.open(tmp_path, capacity="16MiB")
            view = store.view(
                Namespace("m", revision="r", page_size=1),
                Pool("kv", "kv", "uint8", {"k": 4}),
                tile=Tile((0, 1), (0, 1)),
            )
            try:
                view.restore(page_keys([1], 1), region, [0])
            except GeometryError:
                status += 1
            del lease, region, memory, pool
            gc.collect()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert f"{address:x}-" in maps()
    assert (memory == 3).all()
    assert pool.stats()["leased_slots"] == 1
    lease.release()


PEER = """
import sys, time, numpy
from hicache_store import HostPool
pool = HostPool(4, 1 << 20, register="off", attach=int(sys.argv[1]))
memory = numpy.frombuffer(pool, numpy.uint8).reshape(4, -1)
print(memory[0, 0], flush=True)
memory[1] = 8
print("wrote", flush=True)
while True:
    memory[2] += 1
"""


def test_a_peer_that_is_killed_takes_nothing_along():
    pool = make(4, MIB, shared=True)
    assert "shared" in pool.got
    memory = np.frombuffer(pool, np.uint8).reshape(4, -1)
    memory[0] = 6
    descriptor = pool.share()
    command = [sys.executable, "-c", PEER, str(descriptor)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, pass_fds=[descriptor]) as peer:
        assert [peer.stdout.readline().strip() for _ in range(2)] == ["6", "wrote"]
        peer.send_signal(signal.SIGKILL)
        peer.wait()
    os.close(descriptor)
    assert (memory[1] == 8).all()
    assert (memory[0] == 6).all()
    assert pool.lease(4).slots == [0, 1, 2, 3]
    del memory
    gc.collect()
    pool.close()


MAKER = """
import sys, time
from hicache_store import HostPool
pool = HostPool(4, 1 << 20, register="off", shared=True)
memoryview(pool)[0] = 9
print(pool.share(), flush=True)
time.sleep(600)
"""


def test_memory_outlives_a_maker_that_is_killed():
    command = [sys.executable, "-c", MAKER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as maker:
        number = int(maker.stdout.readline())
        descriptor = os.open(f"/proc/{maker.pid}/fd/{number}", os.O_RDWR)
        pool = make(4, MIB, attach=descriptor)
        os.close(descriptor)
        maker.send_signal(signal.SIGKILL)
        maker.wait()
    memory = memoryview(pool)
    assert memory[0] == 9
    memory[-1] = 1
    with pytest.raises(UnsupportedError, match="process that made it"):
        pool.lease(1)


def test_only_pools_made_to_be_shared_are(tmp_path):
    with pytest.raises(UnsupportedError, match="shared=True"):
        make().share()
    with (tmp_path / "file").open("wb+") as file:
        file.truncate(MIB)
        with pytest.raises(ConfigError, match="could become shorter"):
            make(attach=file.fileno())


def test_locked_memory_is_within_the_limit_of_this_process():
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit != resource.RLIM_INFINITY and limit < MIB:
        pytest.skip("RLIMIT_MEMLOCK below 1 MiB")
    assert "locked" in make(4, 4096, lock="require").got
