"""Layouts and the store against numpy, whose strides and transpositions know nothing of ours."""

import tempfile

import numpy as np
import pytest
from hicache_store import (
    Component,
    ConfigError,
    GeometryError,
    Layout,
    Namespace,
    Pool,
    Store,
    Tile,
    page_keys,
)
from hypothesis import given, settings
from hypothesis import strategies as st

# Axes of a host buffer of one component, by letter: pages, layers, heads, tokens. The row is innermost.
AXES = {
    "layer_first": "lpth",
    "page_first": "ptlh",
    "page_first_direct": "plth",
    "page_head": "phtl",
}


def host_views(layout, components, pages, layers, heads, tokens, buffers):
    """Each component as a numpy view `[pages, layers, heads, tokens, row]` of its buffer.

    `buffers` is one uint8 array with all components one behind the other, or one for each component.
    """
    sizes = {"p": pages, "l": layers, "h": heads, "t": tokens}
    if layout.startswith("page_unified"):
        group = int(layout[len("page_unified(") : -1])
        # [P, G, L, components, S, H/G, D], where rows of components may differ in size.
        widths = [(1 if unit == "page" else tokens) * group * row for _, row, unit in components]
        cells = buffers[0].reshape(pages, heads // group, layers, sum(widths))
        views, start = [], 0
        for (_, row, unit), width in zip(components, widths, strict=True):
            rows = 1 if unit == "page" else tokens
            part = cells[..., start : start + width]
            strides = (*part.strides[:3], group * row, row, 1)
            shape = (pages, heads // group, layers, rows, group, row)
            part = np.lib.stride_tricks.as_strided(part, shape, strides)
            views.append((part.transpose(0, 2, 1, 4, 3, 5), (pages, layers, heads, rows, row)))
            start += width
        return views
    views, start = [], 0
    for index, (_, row, unit) in enumerate(components):
        sizes["t"] = 1 if unit == "page" else tokens
        shape = [sizes[axis] for axis in AXES[layout]] + [row]
        count = int(np.prod(shape))
        buffer = buffers[index] if len(buffers) > 1 else buffers[0][start : start + count]
        start += count
        view = buffer.reshape(shape).transpose([AXES[layout].index(axis) for axis in "plht"] + [4])
        views.append((view, view.shape))
    return views


def read(views):
    """Copies each component out, `[pages, layers, heads, tokens, row]`."""
    return [np.ascontiguousarray(view).reshape(shape) for view, shape in views]


def write(views, values):
    for (view, shape), value in zip(views, values, strict=True):
        assert value.shape == shape
        view[...] = value.reshape(view.shape)


@st.composite
def layouts(draw, heads):
    groups = [group for group in range(1, heads + 1) if heads % group == 0]
    return draw(st.sampled_from([*AXES, *(f"page_unified({group})" for group in groups)]))


components = st.lists(
    st.tuples(st.integers(1, 6), st.sampled_from(["token", "token", "page"])), min_size=1, max_size=3
).map(lambda parts: [(f"c{index}", row, unit) for index, (row, unit) in enumerate(parts)])


def make_pool(parts):
    return Pool("kv", "kv", "uint8", [Component(*part) for part in parts])


@settings(deadline=None, max_examples=80)
@given(data=st.data(), parts=components, pages=st.integers(1, 3), layers=st.integers(1, 3))
def test_offsets_are_those_of_numpy(data, parts, pages, layers):
    heads, first_layer, first_head = (
        data.draw(st.integers(1, 4)),
        *data.draw(st.tuples(*2 * [st.integers(0, 3)])),
    )
    first, step, tokens = data.draw(st.tuples(st.integers(0, 2), st.integers(1, 3), st.integers(1, 4)))
    name = data.draw(layouts(heads))
    split = data.draw(st.booleans()) and not name.startswith("page_unified")
    tile = Tile((first_layer, first_layer + layers), (first_head, first_head + heads), (first, step, tokens))
    pool = make_pool(parts)
    layout = Layout.host(name, pool, tile, pages, split_buffers=split)
    assert sum(layout.buffer_bytes) == pages * pool.page_bytes(tile)
    assert (layout.name, layout.tile, layout.slots) == (name, tile, pages)

    buffers = [np.zeros(size, np.uint8) for size in layout.buffer_bytes]
    start = [buffer.ctypes.data for buffer in buffers]
    views = host_views(name, parts, pages, layers, heads, tokens, buffers)
    for component, (view, shape) in enumerate(views):
        where = np.zeros(shape[:4], np.int64)
        for page, layer, head, token in np.ndindex(shape[:4]):
            buffer, offset = layout.offset(
                component, page, first_layer + layer, first_head + head, first + token * step
            )
            where[page, layer, head, token] = start[buffer] + offset
        assert (where == addresses(view).reshape(shape)[..., 0]).all()

    if name == "page_first" and not split:
        one = Layout.object(name, pool, tile)
        packed = Layout.packed(name, pool, tile, pages, part_offset=5, page_bytes=5 + one.buffer_bytes[0])
        for component, (_, shape) in enumerate(views):
            for page, layer, head, token in np.ndindex(shape[:4]):
                row = (first_layer + layer, first_head + head, first + token * step)
                inner = one.offset(component, 0, *row)[1]
                expected = (0, page * (5 + one.buffer_bytes[0]) + 5 + inner)
                assert packed.offset(component, page, *row) == expected


def addresses(view):
    """The address of every byte of a numpy view."""
    total = np.full(view.shape, view.ctypes.data, np.int64)
    for axis, (size, stride) in enumerate(zip(view.shape, view.strides, strict=True)):
        total += (np.arange(size) * stride).reshape([-1 if a == axis else 1 for a in range(view.ndim)])
    return total


def test_rows_outside_are_refused():
    tile = Tile((2, 4), (1, 3), (1, 2, 3))
    layout = Layout.host("page_first", make_pool([("k", 4, "token")]), tile, 5)
    assert layout.offset(0, 4, 3, 2, 5) == (0, layout.buffer_bytes[0] - 4)
    for row in [
        (1, 0, 2, 1, 1),
        (0, 5, 2, 1, 1),
        (0, 0, 1, 1, 1),
        (0, 0, 4, 1, 1),
        (0, 0, 2, 3, 1),
        (0, 0, 2, 1, 2),
    ]:
        with pytest.raises(GeometryError, match="expected a row"):
            layout.offset(*row)
    with pytest.raises(ConfigError, match="slot is -1"):
        layout.offset(0, -1, 2, 1, 1)
    with pytest.raises(ConfigError, match="of_page"):
        Layout.object("page_first", make_pool([("k", 4, "token")]), Tile((0, 1), (0, 1)))


@st.composite
def spans(draw, size):
    start = draw(st.integers(0, size - 1))
    return start, draw(st.integers(start + 1, size))


@settings(deadline=None, max_examples=60)
@given(data=st.data(), parts=components, pages=st.integers(1, 4))
def test_store_moves_pages_between_layouts_and_tiles(data, parts, pages):
    """Whole pages backed up in one layout come back as a tile in another layout, as numpy slices them."""
    layers, heads, page_size = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5)))
    pool, keys = make_pool(parts), page_keys(range(page_size * pages), page_size)
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    codec = data.draw(st.sampled_from(["none", "none", "zstd:1"]))
    source_layout = data.draw(layouts(heads))
    values = []
    for _, row, unit in parts:
        shape = (pages, layers, heads, 1 if unit == "page" else page_size, row)
        values.append(random.integers(0, 256, shape, np.uint8))

    (layer, layer_end), (head, head_end) = data.draw(spans(layers)), data.draw(spans(heads))
    first, step = data.draw(st.integers(0, page_size - 1)), data.draw(st.integers(1, 3))
    count = data.draw(st.integers(1, (page_size - 1 - first) // step + 1))
    target_layout = data.draw(layouts(head_end - head))
    tile = Tile((layer, layer_end), (head, head_end), (first, step, count))

    with tempfile.TemporaryDirectory() as root, Store.open(f"{root}/store", capacity="16MiB") as store:
        namespace = Namespace("m", revision="r", page_size=page_size)
        writer = store.view(
            namespace, pool, tile=Tile((0, layers), (0, heads)), layout=source_layout, codec=codec
        )
        source = np.zeros(pages * writer.page_bytes["kv"], np.uint8)
        write(host_views(source_layout, parts, pages, layers, heads, page_size, [source]), values)
        slots = random.permutation(pages)
        assert writer.backup([keys[slot] for slot in slots], source, slots).count("stored") == pages

        reader = store.view(namespace, pool, tile=tile, layout=target_layout)
        slots_there = pages + 1
        target = np.full(slots_there * reader.page_bytes["kv"], 0xA5, np.uint8)
        assert reader.match(keys).pages == pages
        slots = random.permutation(slots_there)[:pages]
        report = reader.restore(keys, target, slots)
        assert report.all_restored, report

    shape = (slots_there, layer_end - layer, head_end - head, count)
    found = read(host_views(target_layout, parts, *shape, [target]))
    for value, restored, (_, _, unit) in zip(values, found, parts, strict=True):
        tokens = slice(None) if unit == "page" else slice(first, first + count * step, step)
        expected = np.full_like(restored, 0xA5)
        expected[slots] = value[:, layer:layer_end, head:head_end, tokens][:, :, :, : restored.shape[3]]
        assert (restored == expected).all()
