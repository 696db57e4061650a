"""Runs every bar at full size, one after the other, and writes tests/RESULTS.md.

A bar passes when its command ends with status 0 and its output holds what proves that it ran something. Its
lines that begin with "RESULT:" are reported as the measured figures. Finished bars are remembered by commit
in the cache folder: run again, and the rest continues. A changed working tree is never resumed.

    HICACHE_TEST_MINUTES   stop after so many minutes (default 120); what was cut off runs again next time
"""

import datetime
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "tests" / "RESULTS.md"
CARGO = ("scripts/with-target.sh", "cargo")
PYTHON = sys.executable


@dataclass(frozen=True)
class Bar:
    """One thing that must hold, and the command that shows it."""

    name: str
    command: tuple[str, ...]
    minutes: float
    # A pattern that the output must contain: a runner that found nothing to run must not count as passed.
    proof: str
    env: dict[str, str] = field(default_factory=dict)


RUST_PASSED = r"test result: ok\. [1-9]\d* passed"
PYTEST_PASSED = r"(?m)^=.* [1-9]\d* passed"

BARS = (
    Bar(
        "many processes, long: 60 s of kills, 8,000 open and kill cycles, ranks, clears, full disks",
        (
            *CARGO,
            *("test", "--locked", "--release", "-p", "hicache-tests", "many_processes"),
            *("--", "--nocapture", "--test-threads", "1"),
        ),
        30,
        RUST_PASSED,
        {"HICACHE_FULL_SIZE": "1"},
    ),
    Bar(
        "hostile bytes, 100,000 cases",
        (*CARGO, "test", "--locked", "--release", "-p", "hicache-tests", "hostile", "--", "--nocapture"),
        60,
        RUST_PASSED,
        {"HICACHE_HOSTILE_CASES": "100000"},
    ),
    Bar(
        "agreement of ranks, 1,000,000 schedules with mixed faults",
        (
            *CARGO,
            *("run", "--locked", "--release", "-p", "hicache-ranks", "--features", "simulator"),
            *("--example", "walk", "--", "1000000", "0"),
        ),
        30,
        r"(?m)^RESULT:",
    ),
    Bar("Rust tests, release build", (*CARGO, "test", "--locked", "--release"), 30, RUST_PASSED),
    Bar(
        "50 kills of a writer, every page exact or missing",
        (PYTHON, "-m", "pytest", "-s", "tests/python/test_processes.py"),
        15,
        PYTEST_PASSED,
        {"HICACHE_KILLS": "50"},
    ),
    Bar("the demo", ("make", "demo"), 10, r"All proved in"),
    Bar("benchmarks", ("make", "bench"), 30, r"(?m)^RESULT:"),
)


class Outcome(TypedDict):
    """What is remembered of a bar that came to an end."""

    passed: bool
    seconds: int
    figure: str
    when: str


def git(*arguments: str) -> str:
    """The output of a git command in the repository."""
    command = ["git", *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def machine() -> str:
    """Processor, cores, memory and kernel in one line."""
    cpu = re.search(r"(?m)^(?:model name|CPU part)\s*:\s*(.*)", Path("/proc/cpuinfo").read_text("utf-8"))
    total = re.search(r"(?m)^MemTotal:\s*(\d+)", Path("/proc/meminfo").read_text("utf-8"))
    memory = f"{int(total.group(1)) / 2**20:.0f} GiB" if total else "unknown memory"
    model = cpu.group(1) if cpu else platform.machine()
    cores = len(os.sched_getaffinity(0))
    system = f"{platform.system()} {platform.release()}"
    return f"{model}, {cores} cores, {memory}, {system}, Python {platform.python_version()}"


def run(bar: Bar, seconds: float, log: Path) -> tuple[int | None, str]:
    """Runs a bar with its output on the screen and in `log`; status None when the time was up."""
    tee = subprocess.Popen(["tee", "--", str(log)], stdin=subprocess.PIPE)
    child = subprocess.Popen(
        bar.command,
        cwd=ROOT,
        env=os.environ | bar.env,
        stdin=subprocess.DEVNULL,
        stdout=tee.stdin,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    if tee.stdin:
        tee.stdin.close()
    status: int | None = None
    try:
        status = child.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        pass
    finally:
        if status is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        tee.wait()
    return status, log.read_text("utf-8", errors="replace")


def report(commit: str, outcomes: dict[str, Outcome]) -> str:
    """The text of RESULTS.md."""
    lines = [
        "# Results at full size",
        "",
        "Written by `make test-full`; not edited by hand.",
        "",
        f"- Date: {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC",
        f"- Commit: {commit}",
        f"- Machine: {machine()}",
        "",
        "| bar | result | seconds | measured | finished |",
        "| --- | --- | ---: | --- | --- |",
    ]
    for bar in BARS:
        if bar.name in outcomes:
            outcome = outcomes[bar.name]
            word = "passed" if outcome["passed"] else "FAILED"
            cells = (bar.name, word, str(outcome["seconds"]), outcome["figure"], outcome["when"])
            lines.append("| " + " | ".join(cells) + " |")
        else:
            lines.append(f"| {bar.name} | not run | | | |")
    lines += ["", "Commands:", ""]
    for bar in BARS:
        words = [f"{key}={value}" for key, value in bar.env.items()] + list(bar.command)
        shown = shlex.join("python" if word == PYTHON else word for word in words)
        lines.append(f"- {bar.name}: `{shown}`")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Runs what is still to run; 0 when every bar passed, 1 when one failed, 2 when some are left."""
    deadline = time.monotonic() + 60 * float(os.environ.get("HICACHE_TEST_MINUTES", "120"))
    commit = git("rev-parse", "HEAD")
    dirty = bool(git("status", "--porcelain", "--", ".", ":!tests/RESULTS.md"))
    state = Path(os.environ["HICACHE_CACHE"]) / "full" / commit
    state.mkdir(parents=True, exist_ok=True)
    finished = state / "finished.json"
    outcomes: dict[str, Outcome] = {}
    if dirty:
        commit += " with uncommitted changes"
    elif finished.exists():
        outcomes = json.loads(finished.read_text("utf-8"))
        # What failed runs again: the machine may have been the reason.
        outcomes = {name: outcome for name, outcome in outcomes.items() if outcome["passed"]}

    for number, bar in enumerate(BARS, 1):
        if bar.name in outcomes:
            print(f"== {bar.name}: passed before, {outcomes[bar.name]['when']}", flush=True)
            continue
        left = deadline - time.monotonic()
        if left <= 0:
            break
        print(f"== {bar.name}", flush=True)
        start = time.monotonic()
        status, text = run(bar, min(left, 60 * bar.minutes), state / f"{number}.log")
        if status is None and left < 60 * bar.minutes:
            print(f"== {bar.name}: cut off, runs again next time", flush=True)
            break
        figures = re.findall(r"(?m)^RESULT:\s*(.*)$", text)
        passed = status == 0 and re.search(bar.proof, text) is not None
        outcomes[bar.name] = Outcome(
            passed=passed,
            seconds=round(time.monotonic() - start),
            figure="; ".join(figures).replace("|", "/"),
            when=f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M}",
        )
        why = "" if passed else " (time limit)" if status is None else f" (status {status})"
        print(f"== {bar.name}: {'passed' if passed else 'FAILED'}{why}", flush=True)
        if not dirty:
            whole = finished.with_suffix(".new")
            whole.write_text(json.dumps(outcomes, indent=1), encoding="utf-8")
            whole.replace(finished)
        RESULTS.write_text(report(commit, outcomes), encoding="utf-8")

    RESULTS.write_text(report(commit, outcomes), encoding="utf-8")
    failed = sum(not outcome["passed"] for outcome in outcomes.values())
    left_over = len(BARS) - len(outcomes)
    print(f"{len(outcomes) - failed} passed, {failed} failed, {left_over} skipped")
    return 1 if failed else 2 if left_over else 0


if __name__ == "__main__":
    sys.exit(main())
