"""Checks kernels and transfers on a GPU: right bytes, then rates. At most seven minutes, builds nothing.

    python check.py --image kernels.image [--out result.json] [--seconds 410] [--only STAGE]

Needs numpy, the driver and an image made by `make cuda`; the wheel, torch and compute-sanitizer are used
where they are. Exit status, of the stages that were asked for: 0 when every byte was right, 1 for a wrong
byte, a stage that failed, or a stage of bytes that did not come to its end; 2 where there is no GPU.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "kernels")]

# Time of each stage at most, in seconds; a stage that has not begun when the whole time is over does not.
STAGES = {
    "identity": 15,
    "correctness": 80,
    "edges": 25,
    "transfers": 30,
    "sanitizer": 40,
    "rates": 100,
    "end_to_end": 50,
    "interference": 40,
    "registration": 30,
}
# Stages of bytes, and what they may come to where the whole is good. Any other stage may but not fail.
GOOD = {
    "correctness": {"passed"},
    "edges": {"passed", "not shown"},
    "transfers": {"passed", "not shown", "left out"},
}


class DeadlineError(Exception):
    """The time of a stage is over."""


def run_stage(name, body, limit):
    """Runs a stage within its time; what it returns, or why not."""

    def over(_signal, _frame):
        raise DeadlineError(f"not done after {limit:.0f} s")

    signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, limit)
    start, found = time.monotonic(), {}
    try:
        body(found)
        found.setdefault("result", "passed")
    except DeadlineError as error:
        found.update(result="out of time", why=str(error))
    except Exception as error:
        found.update(result="failed", why=f"{type(error).__name__}: {error}", trace=traceback.format_exc())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    found["seconds"] = round(time.monotonic() - start, 2)
    print(f"{name}: {found['result']} ({found['seconds']} s) {found.get('why', '')}", flush=True)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--image", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("device-check.json"))
    parser.add_argument("--seconds", type=float, default=410)
    parser.add_argument("--only", choices=STAGES, action="append")
    parser.add_argument(
        "--small", action="store_true", help="few cases and small sizes: a dry run, or a sanitizer"
    )
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.seconds
    results = {"format": 1, "image": str(arguments.image), "command": sys.argv}
    asked = [name for name in STAGES if not arguments.only or name in arguments.only]
    results |= {name: {"result": "out of time", "why": "did not begin"} for name in asked}
    end_when_stuck(arguments, results)
    # Else streams may share a queue of the device, and one waits for the other without an edge.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    try:
        from cuda_driver import Driver

        driver = Driver()
    except (OSError, RuntimeError) as error:
        print(f"no GPU that can be used: {error}", file=sys.stderr)
        return 2

    import correctness
    import edges
    import rates
    import transfers
    from mover import Mover

    mover = Mover(driver, arguments.image.read_bytes())
    small = arguments.small
    bodies = {
        "identity": lambda found: rates.identity(found, driver, mover),
        "correctness": lambda found: correctness.run(found, mover, small),
        "edges": lambda found: edges.run(found, driver, mover, small),
        "transfers": lambda found: transfers.run(found, driver, small),
        "sanitizer": lambda found: sanitizer(found, arguments.image),
        "rates": lambda found: rates.rates(found, driver, mover, small),
        "end_to_end": lambda found: rates.end_to_end(found, driver, mover, small),
        "interference": lambda found: rates.interference(found, driver, mover, small),
        "registration": lambda found: rates.registration(found, driver, small),
    }
    for name in asked:
        left = end - time.monotonic()
        if left < 1:
            results[name] = {"result": "out of time", "why": "no time left to begin"}
        else:
            results[name] = {"result": "out of time", "why": "the device does not answer"}
            results[name] = run_stage(name, bodies[name], min(STAGES[name], left))
        write(arguments.out, results)
    print(f"written: {arguments.out}")
    return status(results)


def write(out, results):
    out.write_text(json.dumps(results, indent=1, default=str))


def status(results):
    """The exit status of what was found."""
    stages = {name: found["result"] for name, found in results.items() if isinstance(found, dict)}
    is_good = (
        result in GOOD[name] if name in GOOD else result != "failed" for name, result in stages.items()
    )
    return int(not all(is_good))


def end_when_stuck(arguments, results):
    """A call that the device never answers cannot be interrupted: the process ends, with what there is."""

    def give_up():
        write(arguments.out, results)
        print(f"the device does not answer; written: {arguments.out}", flush=True)
        os._exit(1)

    timer = threading.Timer(arguments.seconds + 5, give_up)
    timer.daemon = True
    timer.start()


def sanitizer(found, image):
    """The small cases once more under compute-sanitizer, where it is and works."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        found.update(result="left out", why="no compute-sanitizer on PATH")
        return
    out = f"{os.getpid()}-sanitizer.json"
    command = [program, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, str(HERE / "check.py")]
    command += ["--image", str(image), "--out", out, "--only", "correctness", "--small"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=36)
    except subprocess.TimeoutExpired:
        found.update(result="left out", why="compute-sanitizer was not done after 36 s")
        return
    finally:
        Path(out).unlink(missing_ok=True)
    found.update(status=run.returncode, said=run.stdout[-2000:] + run.stderr[-2000:])
    if run.returncode == 9:
        raise AssertionError("compute-sanitizer found an error")
    if run.returncode != 0:
        found.update(
            result="left out", why=f"compute-sanitizer, or what ran under it, ended with {run.returncode}"
        )


if __name__ == "__main__":
    sys.exit(main())
