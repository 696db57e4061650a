"""The few driver calls that the device check needs, through ctypes: no torch, no toolkit."""

import ctypes as c
import struct

CUBIN, PTX, FATBIN = 1, 2, 3
KINDS = {CUBIN: "cubin", PTX: "PTX", FATBIN: "fatbin"}
MULTIPROCESSORS, MAJOR, MINOR, SHARED_OPTIN = 16, 75, 76, 97
MAX_DYNAMIC_SHARED = 8


class CudaError(RuntimeError):
    """A call that did not return 0."""


class Driver:
    """Device 0, its primary context, and one stream."""

    def __init__(self):
        self.library, self.kept = c.CDLL("libcuda.so.1"), []
        self.call("cuInit", 0)
        self.version = self.ask("cuDriverGetVersion", c.c_int)
        self.device = self.ask("cuDeviceGet", c.c_int, 0)
        context = self.ask("cuDevicePrimaryCtxRetain", c.c_void_p, self.device)
        self.call("cuCtxPushCurrent_v2", c.c_void_p(context))
        self.capability = 10 * self.attribute(MAJOR) + self.attribute(MINOR)
        self.stream = self.new_stream()

    def call(self, name, *arguments):
        """Calls an entry; raises with the name of the code."""
        code = getattr(self.library, name)(*arguments)
        if code:
            text = c.c_char_p()
            self.library.cuGetErrorName(code, c.byref(text))
            raise CudaError(f"{name}: {(text.value or b'').decode()} ({code})")

    def ask(self, name, kind, *arguments):
        """Calls an entry that writes one value first."""
        value = kind()
        self.call(name, c.byref(value), *arguments)
        return value.value

    def attribute(self, number):
        return self.ask("cuDeviceGetAttribute", c.c_int, number, self.device)

    def name(self):
        text = c.create_string_buffer(256)
        self.call("cuDeviceGetName", text, 256, self.device)
        return text.value.decode()

    def new_stream(self):
        return c.c_void_p(self.ask("cuStreamCreate", c.c_void_p, 1))

    def new_event(self):
        return c.c_void_p(self.ask("cuEventCreate", c.c_void_p, 0))

    def record(self, event, stream=None):
        self.call("cuEventRecord", event, stream or self.stream)

    def wait_event(self, event, stream):
        """Has a stream wait for what an event recorded last."""
        self.call("cuStreamWaitEvent", stream, event, 0)

    def milliseconds(self, start, end):
        self.call("cuEventSynchronize", end)
        return self.ask("cuEventElapsedTime", c.c_float, start, end)

    def wait(self, stream=None):
        self.call("cuStreamSynchronize", stream or self.stream)

    def device_memory(self, size):
        return self.ask("cuMemAlloc_v2", c.c_uint64, c.c_size_t(size))

    def host_memory(self, size):
        """Pinned; the address on the host and that on the device."""
        address = self.ask("cuMemHostAlloc", c.c_void_p, c.c_size_t(size), 3)
        return address, self.ask("cuMemHostGetDevicePointer_v2", c.c_uint64, c.c_void_p(address), 0)

    def copy(self, to, source, size, stream=None):
        self.call(
            "cuMemcpyAsync", c.c_uint64(to), c.c_uint64(source), c.c_size_t(size), stream or self.stream
        )

    def fill(self, to, value, size, stream=None):
        """Sets bytes of the device."""
        self.call(
            "cuMemsetD8Async", c.c_uint64(to), c.c_ubyte(value), c.c_size_t(size), stream or self.stream
        )

    def load(self, code):
        """A cubin, PTX or fatbin."""
        self.kept.append(c.create_string_buffer(code, len(code)))
        none = None
        return c.c_void_p(
            self.ask("cuLibraryLoadData", c.c_void_p, self.kept[-1], none, none, 0, none, none, 0)
        )

    def kernel(self, library, name):
        return c.c_void_p(self.ask("cuLibraryGetKernel", c.c_void_p, library, name.encode()))

    def launch(self, kernel, grid, block, arguments, *, shared=0, stream=None):
        """Arguments are ctypes values; the driver copies them."""
        if shared:
            self.call("cuKernelSetAttribute", MAX_DYNAMIC_SHARED, shared, kernel, self.device)
        addresses = (c.c_void_p * len(arguments))(*(c.addressof(argument) for argument in arguments))
        sizes = (grid, 1, 1, block, 1, 1, shared)
        self.call("cuLaunchKernel", kernel, *sizes, stream or self.stream, addresses, None)


def read_image(data):
    """Entries (kind, architecture, code) of an image made by cuda/build_image.py."""
    if data[:8] != b"HCKERNEL":
        raise ValueError("not an image of kernels")
    (count,) = struct.unpack_from("<I", data, 12)
    entries = []
    for i in range(count):
        kind, architecture, offset, size = struct.unpack_from("<IIQQ", data, 32 + 24 * i)
        entries.append((kind, architecture, data[offset : offset + size]))
    return entries


def candidates(entries, capability):
    """What may run on a device, the best first: as rust/hicache-sys/src/cuda/image.rs has it."""
    same = [e for e in entries if e[0] == CUBIN and e[1] // 10 == capability // 10 and e[1] <= capability]
    texts = [e for e in entries if e[0] == PTX and e[1] <= capability]
    newest = [sorted(part, key=lambda e: -e[1]) for part in (same, texts)]
    return newest[0] + [e for e in entries if e[0] == FATBIN] + newest[1]
