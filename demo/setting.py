"""What the demo's processes agree on: the store's view, facts left for each other, how to check."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from hicache_store import Namespace, Pool, Store, Tile, View

from demo.model import MODEL_ID, MODEL_REVISION, Shape
from demo.pages import HostPool
from demo.text import PAGE_TOKENS
from demo.weights import WeightsError

CAPACITY: Final = "256MiB"
GENERATED_TOKENS: Final = 32
SPARE_SLOTS: Final = 5
SAMPLE_BYTES: Final = 64  # enough to find a place of a page on disk
DAMAGED_PAGE: Final = 13  # of A/B: neither the first nor the last of its chunk


class NotProvedError(Exception):
    """Something that the demo proves did not hold."""


def check(holds: bool, promise: str) -> None:
    """Raises NotProvedError unless the promise holds."""
    if not holds:
        raise NotProvedError(promise)


def host_pool(shape: Shape, slots: int) -> HostPool:
    """Makes an empty host pool of the model's pages."""
    return HostPool(slots, shape.layers, PAGE_TOKENS, shape.kv_heads, shape.head_dim)


def open_view(root: Path, shape: Shape) -> tuple[Store, View]:
    """Opens the store and the view of one process that holds all layers and heads of the model."""
    store = Store.open(root, capacity=CAPACITY)
    row_bytes = shape.head_dim * 2  # one token, one layer, one head
    view = store.view(
        Namespace(MODEL_ID, revision=MODEL_REVISION, page_size=PAGE_TOKENS),
        Pool("kv", "kv", "bfloat16", components={"k": row_bytes, "v": row_bytes}),
        tile=Tile(layers=(0, shape.layers), heads=(0, shape.kv_heads)),
        layout="page_first_direct",
    )
    return store, view


def store_root(work: Path) -> Path:
    """Returns the store's folder inside the work folder."""
    return work / "store"


def leave(work: Path, name: str, facts: dict[str, Any]) -> None:
    """Leaves facts for the processes that come after."""
    (work / f"{name}.json").write_text(json.dumps(facts, indent=1) + "\n")


def take(work: Path, name: str) -> dict[str, Any]:
    """Takes the facts that an earlier process left."""
    facts: dict[str, Any] = json.loads((work / f"{name}.json").read_text())
    return facts


def run(process: Callable[[Path], None]) -> None:
    """Runs one process on the work folder of its command line; exits 1 when something is not proved."""
    try:
        process(Path(sys.argv[1]))
    except NotProvedError as broken:
        sys.exit(f"not proved: {broken}")
    except WeightsError as error:
        sys.exit(str(error))
