"""Runs the demo: one process writes, another reads, a bit is flipped, a third heals, a fourth reads again."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Final

from demo.damage import find_once, flip_bit
from demo.setting import DAMAGED_PAGE, NotProvedError, check, store_root, take
from demo.text import PAGE_TOKENS

_DAMAGED_BIT: Final = 3

# One thread each: every product is split the same way everywhere, and no thread spins for another. On two
# cores shared with a build, two threads took 42 s for the history and one 17 s.
_BLAS = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def main() -> int:
    """Returns 0 when everything was proved, 1 when something was not."""
    parser = argparse.ArgumentParser(prog="demo", description=__doc__)
    parser.add_argument("--work", type=Path, help="an empty or new folder; default: a temporary one")
    work: Path = parser.parse_args().work or Path(tempfile.mkdtemp(prefix="hicache-demo-"))
    work.mkdir(parents=True, exist_ok=True)
    if any(work.iterdir()):
        parser.error(f"{work} is not empty")
    try:
        _demo(work.resolve())
    except (NotProvedError, LookupError) as failure:
        print(f"demo: FAILED: {failure}\nthe work folder is kept: {work}", file=sys.stderr)
        return 1
    return 0


def _demo(work: Path) -> None:
    start = perf_counter()
    root = store_root(work)
    print("hicache_store demo: SmolLM2-135M-Instruct, a tau-bench conversation, KV in bfloat16", flush=True)

    _process("writer", work)
    written = take(work, "writer")
    tokens, pages = written["tokens"], written["pages"]
    _section("Process 1 computed the history A/B and its branches, and backed up A/B and A/B/C")
    _line("tokens", f"A/B {tokens['A/B']}, C {tokens['C']}, E {tokens['E']}; pages of {PAGE_TOKENS} tokens")
    _line("pages backed up", f"A/B {pages['A/B']}, C {pages['C']}, in {_ms(written['seconds']['backup'])}")

    _process("reader", work)
    read = take(work, "reader")
    cold, restored = written["seconds"]["cold"], read["seconds"]["first_token"]
    _section("Process 2, fresh, restored A/B and computed only E")
    _line("pages matched", f"{read['matched']} of {read['asked']} ({read['limited_by']})")
    _line("pages restored", f"{read['restored']} in {_ms(read['seconds']['restore'])}")
    _line("bytes verified", f"{read['bytes_verified']:,}, equal to the original bytes by SHA-256")
    _line("tokens not recomputed", f"{read['tokens_kept']} of {read['tokens']}")
    _line(
        "time to first token", f"cold {_ms(cold)}, restored {_ms(restored)} ({cold / restored:.1f} x sooner)"
    )
    _line("logits of E", f"equal bit for bit, SHA-256 {read['logits_sha256'][:16]}...")
    _line("generated text", json.dumps(read["generated"], ensure_ascii=False))

    key, segment, offset = _damage(work)
    _section("One bit was flipped on disk")
    _line("where", f"page {DAMAGED_PAGE} of A/B, {segment.relative_to(root)} byte {offset}")
    code, found = _verify(root)
    check(code == 1, f"verify exits with 1 for damage: it exits with {code}")
    check(key in found, f"verify names the page {key}: {found}")
    _line("verify", f"exit {code}, names page key {key[:16]}...")
    _process("healer", work)
    healed = take(work, "healer")
    _line("restore", f"page {DAMAGED_PAGE} {healed['outcome']}, the other {healed['restored']} exact")
    _line("match", f"{healed['matched']} pages ({healed['limited_by']})")
    _line("recomputed", f"{healed['recomputed_tokens']} tokens, to the original bytes")
    _line("backed up again", f"{healed['stored']} stored, {healed['present']} were present")
    code, found = _verify(root)
    check(code == 0, f"verify finds nothing after healing: exit {code}: {found}")
    _line("verify", f"exit {code}")
    _process("reader", work)
    _line("restored once more", f"{take(work, 'reader')['restored']} pages and the logits of E, bit for bit")

    tool = " ".join(_tool())
    print(f"\nAll proved in {perf_counter() - start:.0f} s. The store is kept in {root}; try")
    print(f"  {tool} stat {root}\n  {tool} verify {root}")


def _process(name: str, work: Path) -> None:
    """Runs one of the demo's processes to its end."""
    command = [sys.executable, "-m", f"demo.{name}", str(work)]
    done = subprocess.run(command, env=os.environ | _BLAS, check=False, stderr=subprocess.PIPE, text=True)
    check(done.returncode == 0, f"process `demo.{name}` failed with {done.returncode}\n{done.stderr.strip()}")


def _damage(work: Path) -> tuple[str, Path, int]:
    """Flips one bit in the middle of a page of A/B; returns the page's key in hex and the place."""
    page = take(work, "reader")["sample"]
    path, offset = find_once(store_root(work), bytes.fromhex(page["bytes"]))
    offset += len(bytes.fromhex(page["bytes"])) // 2
    flip_bit(path, offset, _DAMAGED_BIT)
    return str(page["key"]), path, offset


def _verify(root: Path) -> tuple[int, str]:
    """Runs the store's tool in a process of its own; returns its exit code and its JSON output."""
    command = [*_tool(), "verify", "--json", str(root)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    return done.returncode, done.stdout


def _tool() -> list[str]:
    """Returns the command of the store's tool: the installed script, or the same tool as a module."""
    script = Path(sys.executable).with_name("hicache-store")
    found = str(script) if script.exists() else shutil.which("hicache-store")
    return [found] if found else [sys.executable, "-m", "hicache_store"]


def _section(title: str) -> None:
    print(f"\n{title}", flush=True)


def _line(label: str, text: str) -> None:
    print(f"  {label:<22} {text}", flush=True)


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


if __name__ == "__main__":
    sys.exit(main())
