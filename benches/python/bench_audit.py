"""What does a record of the consensus checker cost from Python, with a log, live, and with both?

Directly, with three fields, two numbers and a short text; and of a function under `rank_consensus`, which
makes two records a call: a number, a digest of 16 numbers and a text; and the result. Live is a world of
one rank. The time is that of the process on a core, with the checker's thread; other work does not count.
"""

import statistics
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


def cost(**to) -> str:
    """Of `RankAudit.record` and of a decorated function."""
    with RankAudit(Topology(), 0, **to) as audit:
        select = ("depth", "digest(tokens)", "request")
        watched = rank_consensus(params=select, result=("result",), name="match", audit=audit)(match)

        def direct():
            for number in range(CALLS):
                audit.record("called", "match", [number, number, "request-17"])

        def decorated():
            for number in range(CALLS):
                watched("request-17", TOKENS, number)

        figures = f"record {measure(direct, CALLS)}, decorated {measure(decorated, 2 * CALLS)}"
        audit.check()
        return figures


def main() -> None:
    """Prints all."""
    with tempfile.TemporaryDirectory() as folder:
        log = cost(log=folder)
        live = cost(transport=NullTransport())
        both = cost(log=folder, transport=NullTransport())
    print(f"RESULT: audit from Python, us a record (bar 3): log: {log}; live: {live}; both: {both}")


if __name__ == "__main__":
    main()
