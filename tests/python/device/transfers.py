"""Transfers of the wheel on memory of the device, every byte compared with numpy.

The layouts are those of tests/kernels/transfer_cases.py, whose memory stays
on the CPU; here it is the device's.
"""

import tempfile
import types

import numpy as np
from correctness import stand_in_for_pytest
from edges import FILL, HOST, TRIES, Delay, Pinned

WAYS = ("kernel", "copy_engine")
CANARY = 0xA5


class Tensor:
    """Memory of the device that says so as torch's CUDA tensors do."""

    def __init__(self, driver, shape):
        self.driver, self.shape, self.size = driver, shape, int(np.prod(shape))
        self.address = driver.device_memory(self.size)
        self.seen = Pinned(driver, shape)
        driver.fill(self.address, CANARY, self.size)
        driver.wait()

    @property
    def __cuda_array_interface__(self):
        return {
            "shape": self.shape,
            "typestr": "|u1",
            "data": (self.address, False),
            "strides": None,
            "version": 3,
        }

    def read(self, stream=None):
        """Starts a copy to the host; it is in `seen.array` when the stream has done it."""
        self.driver.copy(self.seen.address, self.address, self.size, stream)


class Sides:
    """A host pool, a tensor for each layer and component, `[pages, tokens, heads, row]`, and their plan."""

    def __init__(self, device, name, layout, way, slots=5, pages=6):
        driver, cases, store, random = device.driver, device.cases, device.store, np.random.default_rng(1)
        self.driver, self.cases, self.name, self.layout, self.slots = driver, cases, name, layout, slots
        whole = (0, cases.HEADS), (0, 1, cases.TOKENS)
        self.pool, self.tile = cases.make_pool(name), store.Tile((0, cases.LAYERS), *whole)
        page_bytes = self.pool.page_bytes(self.tile)
        self.host_pool = store.HostPool(slots, page_bytes, huge_pages="off", register="require")
        self.host = np.frombuffer(self.host_pool, np.uint8)
        self.host[:] = random.integers(0, 256, self.host.size, np.uint8)
        shape = (pages, cases.TOKENS, cases.HEADS)
        self.rows = [
            [Tensor(driver, (*shape, row)) for _, row in cases.ROWS[name]] for _ in range(cases.LAYERS)
        ]
        rows = [
            (
                store.Layout.host(
                    "layer_first",
                    self.pool,
                    store.Tile((layer, layer + 1), *whole),
                    pages,
                    split_buffers=True,
                ),
                tensors,
            )
            for layer, tensors in enumerate(self.rows)
        ]
        host = (store.Layout.host(layout, self.pool, self.tile, slots), self.host_pool)
        self.plan = store.TransferPlan([store.TransferPool("kv", host, rows)], way=way)
        self.events = [driver.new_event() for _ in range(cases.LAYERS)]

    def values(self, buffer=None):
        """Each component of host memory as `[slots, layers, tokens, heads, row]`."""
        buffer = self.host if buffer is None else buffer
        views = self.cases.host_views(self.layout, self.name, self.slots, buffer)
        return [view.transpose(0, 1, 3, 2, 4) for view in views]

    def read_layer(self, layer, stream=None):
        for tensor in self.rows[layer]:
            tensor.read(stream)

    def is_exact(self, here, there, layer, values):
        """Whether the layer as it was read has the bytes of host slots `here` in device slots `there`."""
        exact = True
        for tensor, value in zip(self.rows[layer], values, strict=True):
            expected = np.full(tensor.shape, CANARY, np.uint8)
            expected[there] = value[here, layer]
            exact &= bool((tensor.seen.array == expected).all())
        return exact

    def fill(self, value, slots=None, stream=None):
        """Fills pages of all layers, without waiting."""
        for tensor in (tensor for tensors in self.rows for tensor in tensors):
            page = tensor.size // tensor.shape[0]
            for slot in range(tensor.shape[0]) if slots is None else slots:
                self.driver.fill(tensor.address + slot * page, value, page, stream)


def both_ways(device, name, layout, way):
    """Restore and backup, the stream's waits and events between them; returns the plan's report."""
    driver, cases, (copies, reader, step) = device.driver, device.cases, device.streams
    sides = Sides(device, name, layout, way)
    here, there = [4, 0, 1], [1, 5, 2]
    values = [value.copy() for value in sides.values()]
    # Padding on either side is left out.
    moved = sides.plan.restore(
        [4, 0, -1, 2, 1], [1, 5, 3, -1, 2], stream=copies.value, events=handles(sides.events)
    )
    assert moved == 3 * sides.plan.page_bytes, f"{moved} bytes"
    for layer, event in enumerate(sides.events):
        driver.wait_event(event, reader)
        sides.read_layer(layer, reader)
    driver.wait(reader)
    for layer in range(cases.LAYERS):
        assert sides.is_exact(here, there, layer, values), f"restore, layer {layer}"
    sides.plan.wait()
    sides.host[:] = CANARY
    # The rows are written by a stream of their own; the backup waits for that.
    written = driver.new_event()
    for layer, tensors in enumerate(sides.rows):
        for tensor, value in zip(tensors, values, strict=True):
            tensor.seen.array[there] = value[here, layer] ^ 0xFF
            driver.copy(tensor.address, tensor.seen.address, tensor.size, step)
    driver.record(written, step)
    sides.plan.backup(here, there, stream=copies.value, after=handles([written]))
    sides.plan.wait()
    for found, value in zip(sides.values(), values, strict=True):
        assert (found[here] == value[here] ^ 0xFF).all(), "backup"
        assert (found[[2, 3]] == CANARY).all(), "backup, slots beside"
    return sides.plan.report()


def handles(events):
    return [event.value for event in events]


def after_a_step(device, way):
    """Field case D18: pages that a slow step still fills; layers are read at their events.

    Returns whether wrong bytes were seen without `after`.
    """
    driver, cases, (copies, reader, step) = device.driver, device.cases, device.streams
    sides = Sides(device, "long", "page_first", way)
    here, there, values = [3, 0], [2, 4], [value.copy() for value in sides.values()]
    written = driver.new_event()

    def is_exact(has_edge):
        sides.fill(CANARY)
        driver.wait()
        device.delay.start(step, HOST)
        sides.fill(FILL, there, step)
        driver.record(written, step)
        after = handles([written]) if has_edge else None
        sides.plan.restore(here, there, stream=copies.value, after=after, events=handles(sides.events))
        for layer, event in enumerate(sides.events):
            driver.wait_event(event, reader)
            sides.read_layer(layer, reader)
        driver.wait(reader)
        at_event = all(sides.is_exact(here, there, layer, values) for layer in range(cases.LAYERS))
        driver.wait(step)
        sides.plan.wait()
        for layer in range(cases.LAYERS):
            sides.read_layer(layer)
        driver.wait()
        return at_event and all(sides.is_exact(here, there, layer, values) for layer in range(cases.LAYERS))

    for _ in range(TRIES):
        assert is_exact(True), "restore that waits for a step"
    return any(not is_exact(False) for _ in range(TRIES))


def layer_by_layer(device, layout, way):
    """Store to host slots to device rows, with a slot for each page and with fewer; and back."""
    for slots in (5, 2):
        with tempfile.TemporaryDirectory() as root, device.store.Store.open(root, capacity="64MiB") as opened:
            through_the_store(device, opened, layout, way, slots)


def through_the_store(device, opened, layout, way, slots):
    driver, cases, store, (copies, reader, step) = device.driver, device.cases, device.store, device.streams
    sides, pages = Sides(device, "kv", layout, way, slots=slots), 5
    namespace = store.Namespace("org/tiny", revision="r1", page_size=cases.TOKENS)
    view = opened.view(namespace, sides.pool, tile=sides.tile, layout=layout)
    keys = [store.page_keys(range(at, at + pages * cases.TOKENS), cases.TOKENS) for at in (0, 1000)]
    truth = np.random.default_rng(3).integers(0, 256, pages * view.page_bytes["kv"], np.uint8)
    assert view.backup(keys[0], truth, range(pages)).count("stored") == pages
    views = cases.host_views(layout, "kv", pages, truth)
    values, there = [one.transpose(0, 1, 3, 2, 4) for one in views], [4, 2, 0, 1, 5]
    transfers = store.LayerwiseRestore(view, sides.plan)

    written = driver.new_event()

    def restore(keys):
        # The rows are still written when the restore starts.
        device.delay.start(step, HOST)
        sides.fill(CANARY, stream=step)
        driver.record(written, step)
        free = handles([written])
        ticket = transfers.start(keys, list(range(slots)), there, device_free=free, stream=copies.value)
        for layer in range(cases.LAYERS):
            assert ticket.hold_back(layer, reader.value, 20), f"layer {layer} was not announced"
            sides.read_layer(layer, reader)
        driver.wait(reader)
        assert ticket.finish().all_restored
        assert ticket.wait_drained(20)
        for when in ("at its event", "at the end"):
            for layer in range(cases.LAYERS):
                exact = sides.is_exact(list(range(pages)), there, layer, values)
                assert exact, f"layer {layer} {when}, {slots} slots"
            driver.wait(step)
            for layer in range(cases.LAYERS):
                sides.read_layer(layer)
            driver.wait()

    restore(keys[0])
    sides.fill(FILL)
    driver.wait()
    device.delay.start(step, HOST)
    for tensor in (tensor for tensors in sides.rows for tensor in tensors):
        driver.copy(tensor.address, tensor.seen.address, tensor.size, step)
    driver.record(written, step)
    backup = transfers.start_backup(
        keys[1], list(range(slots)), there, depth=0, ready=handles([written]), stream=copies.value
    )
    assert backup.finish().count("stored") == pages
    restore(keys[1])


def run(found, driver, small):
    """Fails for a wrong byte; left out without the wheel, or where a way cannot be had."""
    stand_in_for_pytest()
    try:
        import hicache_store
    except ImportError as error:
        found.update(result="left out", why=f"no wheel: {error}")
        return
    import transfer_cases as cases

    device = types.SimpleNamespace(driver=driver, cases=cases, store=hicache_store)
    device.streams = [driver.new_stream() for _ in range(3)]
    device.delay = Delay(driver, 4096 if small else 64 << 20, 2 if small else 10)
    found.update(
        wheel=hicache_store.__version__, cases=0, failures={}, reports={}, unavailable={}, without_after={}
    )
    for way in WAYS:
        for name, case in each(device, way, small):
            try:
                said = case()
            except hicache_store.UnsupportedError as error:
                found["unavailable"][way] = str(error)
                break
            except AssertionError as error:
                found["failures"][f"{way}: {name}"] = str(error)[:300]
                said = None
            found["cases"] += 1
            if isinstance(said, dict):
                found["reports"][way] = said
            elif said is not None:
                found["without_after"][way] = "wrong bytes" if said else "not shown"
    if found["failures"]:
        raise AssertionError(f"wrong bytes in {len(found['failures'])} of {found['cases']} cases")
    if found["unavailable"]:
        found.update(result="left out", why=f"cannot be had here: {found['unavailable']}")
    elif "not shown" in found["without_after"].values():
        found.update(result="not shown", why="bytes were right without `after`")


def each(device, way, small):
    """Pairs of a name and a case."""
    cases = device.cases
    layouts = cases.LAYOUTS[1:2] if small else cases.LAYOUTS
    for name in ("latent", "odd") if small else cases.ROWS:
        for layout in layouts:
            yield f"{name} {layout}", lambda name=name, layout=layout: both_ways(device, name, layout, way)
    yield "D18", lambda: after_a_step(device, way)
    for layout in layouts:
        yield f"layer by layer {layout}", lambda layout=layout: layer_by_layer(device, layout, way)
