"""Entry of the command line tool `hicache-store`, which is Rust; see `hicache-store --help`."""

import signal
import sys
from typing import NoReturn

from hicache_store._hicache_store import _run_tool


def main() -> NoReturn:
    """Runs the tool on the process's arguments and exits with its code."""
    # As in any Unix tool: a closed pipe or Ctrl-C ends it at once, also in the middle of a Rust call.
    for name in (signal.SIGPIPE, signal.SIGINT):
        signal.signal(name, signal.SIG_DFL)
    sys.exit(_run_tool(["hicache-store", *sys.argv[1:]]))
