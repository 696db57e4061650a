"""What does a record of the consensus checker cost from Python, with a log, live, and with both?

Directly, with three fields, two numbers and a short text; and of a function under `rank_consensus`, which
makes two records a call: a number, a digest of 16 numbers and a text; and the result. Live is a world of
one rank. The time is that of the process on a core, with the checker's thread; other work does not count.

    python bench_audit.py
    valgrind --tool=callgrind python bench_audit.py decorated CALLS    and with other CALLS: instructions

The second makes one round of so many calls, of `record` or `decorated` and with a log alone; the difference
of two such runs is what their records take, on whatever machine.
"""

import statistics
import sys
import tempfile
import time

from hicache_store.ranks import NullTransport, RankAudit, Topology, rank_consensus

CALLS = 50_000
ROUNDS = 7
TOKENS = list(range(16))


def match(request: str, tokens: list[int], depth: int) -> int:
    """Stands for a function of the engine."""
    return depth if request and tokens else 0


def measure(run, records: int) -> str:
    """Microseconds a record: median and spread."""
    times = []
    for _ in range(ROUNDS):
        started = time.process_time_ns()
        run()
        times.append((time.process_time_ns() - started) / records / 1e3)
    return f"{statistics.median(times):.2f} ({min(times):.2f} to {max(times):.2f})"


def programs(audit) -> dict:
    """What is measured, by name, each for a number of calls."""
    select = ("depth", "digest(tokens)", "request")
    watched = rank_consensus(params=select, result=("result",), name="match", audit=audit)(match)

    def record(calls=CALLS):
        for number in range(calls):
            audit.record("called", "match", [number, number, "request-17"])

    def decorated(calls=CALLS):
        for number in range(calls):
            watched("request-17", TOKENS, number)

    return {"record": record, "decorated": decorated}


def cost(**to) -> str:
    """Of `RankAudit.record` and of a decorated function."""
    with RankAudit(Topology(), 0, **to) as audit:
        run = programs(audit)
        figures = f"record {measure(run['record'], CALLS)}, "
        figures += f"decorated {measure(run['decorated'], 2 * CALLS)}"
        audit.check()
        return figures


def main() -> None:
    """Prints all, or makes one round."""
    with tempfile.TemporaryDirectory() as folder:
        if len(sys.argv) > 1:
            with RankAudit(Topology(), 0, log=folder, interval=1e6) as audit:
                programs(audit)[sys.argv[1]](int(sys.argv[2]))
            return
        log = cost(log=folder)
        live = cost(transport=NullTransport())
        both = cost(log=folder, transport=NullTransport())
    print(f"RESULT: audit from Python, us a record (bar 3): log: {log}; live: {live}; both: {both}")


if __name__ == "__main__":
    main()
