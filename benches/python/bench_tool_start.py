"""How long does the tool take to start, as a console script of the wheel and as a binary?

The binary is taken from `HICACHE_TOOL_BINARY` where that is set.
"""

import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROUNDS = 21


def measure(command: list[str]) -> str:
    """Median and spread of `command --version`, in ms."""
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        subprocess.run([*command, "--version"], check=True, stdout=subprocess.DEVNULL)
        times.append((time.perf_counter() - started) * 1e3)
    return f"{statistics.median(times):.1f} ({min(times):.1f} to {max(times):.1f}) ms"


def main() -> None:
    """Prints both."""
    script = Path(sys.executable).with_name("hicache-store")
    found = str(script) if script.exists() else shutil.which("hicache-store")
    if found is None:
        sys.exit("expected the console script hicache-store on PATH, found none")
    print(f"RESULT: tool start from the wheel: {measure([found])} (bar 100)")
    binary = os.environ.get("HICACHE_TOOL_BINARY")
    if binary:
        print(f"RESULT: tool start as a binary: {measure([binary])} (bar 10)")


if __name__ == "__main__":
    main()
