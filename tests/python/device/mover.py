"""Runs the plans of tests/kernels on a device: the same tests, with this in the place of the shim."""

import ctypes as c

import numpy as np
from cuda_driver import KINDS, CudaError, candidates, read_image
from segment_plan import ABI, BULK, MIXED, WIDTHS, IndexReport, Plan, Report, vector_bytes

ARENA = 48 << 20
GUARD = 4096
PATTERN = 0xA5
NAMES = {width: f"hicache_segment_copy_v{width}" for width in WIDTHS}
NAMES |= {MIXED: "hicache_segment_copy_mixed", BULK: "hicache_segment_copy_bulk"}


class BulkShape(c.Structure):
    """How many lanes of a warp work, and bytes of a stage."""

    _fields_ = (("lanes", c.c_uint32), ("stage_bytes", c.c_uint32))


class Arena:
    """Memory of one kind in which a launch finds its data, with guards between the pieces."""

    def __init__(self, driver, is_host):
        self.driver, self.is_host = driver, is_host
        host, device = driver.host_memory(ARENA)
        self.view = np.ctypeslib.as_array((c.c_uint8 * ARENA).from_address(host))
        self.host, self.address = host, device if is_host else driver.device_memory(ARENA)
        self.used = 0

    def begin(self):
        self.view[: self.used + 2 * GUARD] = PATTERN
        self.used = GUARD

    def put(self, base, size):
        """Takes a piece in; its address on the device. It keeps its place within 256 bytes."""
        at = -(-self.used // 256) * 256 + base % 256
        if at + size + GUARD > ARENA:
            raise MemoryError(f"{size} bytes are more than this check holds")
        c.memmove(self.host + at, base, size)
        self.used = at + size + GUARD
        return at

    def send(self):
        if not self.is_host:
            self.driver.copy(self.address, self.host, self.used + GUARD)

    def receive(self):
        if not self.is_host:
            self.driver.copy(self.host, self.address, self.used + GUARD)
        self.driver.wait()


class Mover:
    """The kernels of an image on the device."""

    def __init__(self, driver, image):
        self.driver = driver
        self.arenas = {"host": Arena(driver, True), "device": Arena(driver, False)}
        self.launches = {}
        self.entries, self.tried = candidates(read_image(image), driver.capability), []
        for number in range(len(self.entries)):
            if self.use(number) == "loaded":
                self.first = number
                return
        raise ValueError(f"nothing in the image runs on compute capability {driver.capability}: {self.tried}")

    def use(self, number):
        """Takes the kernels of an entry of the image from now on; "loaded", or why they cannot be."""
        kind, architecture, code = self.entries[number]
        said = "loaded"
        try:
            library = self.driver.load(code)
            self.kernels = {width: self.driver.kernel(library, name) for width, name in NAMES.items()}
            self.check = self.driver.kernel(library, "hicache_index_check")
        except CudaError as error:
            said = str(error)
        self.tried.append((KINDS[kind], architecture, said))
        return said

    def widths(self):
        """The kernels that this device has."""
        return [width for width in NAMES if width != BULK or self.driver.capability >= 90]

    def start(self, plan, width, grid, block, stage_bytes=2048, stream=None):
        """One launch of a plan whose addresses are the device's."""
        arguments, shared = [plan], 0
        if width == BULK:
            lanes = min(block, 32, (192 << 10) // (4 * stage_bytes))
            arguments.append(BulkShape(lanes, stage_bytes))
            block, shared = 32, lanes * 4 * stage_bytes
        self.driver.launch(self.kernels[width], grid, block, arguments, shared=shared, stream=stream)
        self.launches[width] = self.launches.get(width, 0) + 1

    def copy(self, segments, lent, *, width=None, grid=2, block=64, seed=1, stage_bytes=2048):
        """As Shim.copy: one launch over copies of what is lent, host or device memory as the seed has it."""
        if width is None:
            width = min(vector_bytes(one) for one in segments)
        if width not in self.widths():
            width = MIXED
        places = [("host", "device"), ("device", "host"), ("device", "device"), ("host", "host")][seed % 4]
        plan, error = Plan(ABI, len(segments)), np.zeros(1, np.uint32)
        for arena in self.arenas.values():
            arena.begin()
        pieces = []
        for memory, access in lent:
            base, size = memory if isinstance(memory, tuple) else (memory.ctypes.data, memory.nbytes)
            # Indices are read from where the sources are.
            arena = self.arenas[places[1] if access & 2 else places[0]]
            pieces.append((base, size, access, arena, arena.put(base, size)))
        word = self.arenas["host"].put(error.ctypes.data, 4)
        plan.error = self.arenas["host"].address + word

        def translate(address, access):
            for base, size, has, arena, at in pieces:
                if has & access and base <= address <= base + size:
                    return arena.address + at + address - base
            raise ValueError(f"{address:#x} is not lent")

        for number, one in enumerate(segments):
            copy = type(one).from_buffer_copy(one)
            copy.source.base = translate(one.source.base, 1)
            copy.destination.base = translate(one.destination.base, 2)
            for s in (copy.source, copy.destination):
                s.index = translate(s.index, 4) if s.index and one.items else 0
            plan.segment[number] = copy
        before = {name: arena.view[: arena.used + GUARD].copy() for name, arena in self.arenas.items()}
        for arena in self.arenas.values():
            arena.send()
        self.start(plan, width, grid, block, stage_bytes)
        for arena in self.arenas.values():
            arena.receive()
        # Everything outside what may be written is as before, guards too.
        outside = 0
        for name, arena in self.arenas.items():
            may_change = np.zeros(arena.used + GUARD, bool)
            for _, size, access, of, at in pieces:
                if of is arena and access & 2:
                    may_change[at : at + size] = True
            if arena.is_host:
                may_change[word : word + 4] = True
            outside += int(((arena.view[: arena.used + GUARD] != before[name]) & ~may_change).sum())
        for base, size, access, arena, at in pieces:
            if access & 2:
                c.memmove(base, arena.host + at, size)
        code = int(self.arenas["host"].view[word : word + 4].view(np.uint32)[0])
        return code, Report(violations=outside), width

    def check_index(self, index, limit, *, grid=2, block=64, seed=1):  # noqa: ARG002
        """As Shim.check_index."""
        arena = self.arenas["host"]
        arena.begin()
        empty, seen = IndexReport(2**63 - 1, -(2**63)), np.zeros(limit // 32 + 1, np.uint32)
        at = arena.put(index.ctypes.data, index.nbytes)
        bitmap = arena.put(seen.ctypes.data, seen.nbytes)
        # Of a place that is a multiple of 256, so that it is aligned.
        block_of_report = np.zeros(512, np.uint8)
        start = -block_of_report.ctypes.data % 256
        c.memmove(block_of_report.ctypes.data + start, c.addressof(empty), c.sizeof(empty))
        report = arena.put(block_of_report.ctypes.data + start, c.sizeof(empty))
        arguments = [
            c.c_uint64(arena.address + at),
            *(c.c_uint32(number) for number in (index.itemsize, len(index), limit)),
            *(c.c_uint64(arena.address + place) for place in (bitmap, report)),
        ]
        self.driver.launch(self.check, grid, block, arguments)
        self.driver.wait()
        return IndexReport.from_buffer_copy(arena.view[report : report + c.sizeof(empty)].tobytes())
