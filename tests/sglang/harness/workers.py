"""Ranks of an engine as real processes, one root for all.

Importing the engine takes ten seconds, so one server process imports it once and every worker is a fork
of that: a fresh process as far as stores, pools and trees are concerned. `run` executes one function in
one such process; `deploy` starts all ranks of a deployment, which agree over gloo as they do in a
server.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import multiprocessing
import multiprocessing.forkserver
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = str(Path(__file__).parents[1])


def context():
    """Processes that are forked from one that has the engine imported."""
    paths = [HERE, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, paths)))
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["harness.preload"])
    return made


def warm() -> None:
    """Starts that process, which imports in the background."""
    context()
    multiprocessing.forkserver.ensure_running()


def run(function: Callable, *args, timeout: float = 240.0, **named):
    """Calls a function of a module in a fresh process; its answer, or its error."""
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context()) as pool:
        return pool.submit(function, *args, **named).result(timeout)


@dataclass(frozen=True)
class Deployment:
    """A server: how many ranks of which kinds, and what it is told."""

    root: Path
    kind: str = "hicache_store"
    tp: int = 1
    pp: int = 1
    latent: bool = False
    heads: int = 4
    layers: int = 4
    split: tuple[int, ...] = ()
    page_size: int = 4
    dtype: str = "bfloat16"
    layout: str = "page_first"
    v1: bool = True
    draft: bool = False
    mamba: bool = False
    options: Mapping = field(default_factory=dict)

    def layers_of(self, stage: int) -> tuple[int, int]:
        """First layer of a pipeline stage, and how many it has."""
        counts = self.split or (self.layers // self.pp,) * self.pp
        return sum(counts[:stage]), counts[stage]


@dataclass(frozen=True)
class Step:
    """One thing that all ranks of a deployment do."""

    what: str  # "store", "fetch", "forget", "lose" (the store, on rank `seed` alone), "stats"
    tokens: Sequence[int] = ()
    seed: int = 0


def digest(parts: Sequence[bytes]) -> list[str]:
    """What a rank tells of its bytes, one entry for each layer of each pool."""
    return [hashlib.sha256(part).hexdigest()[:16] for part in parts]


@contextlib.contextmanager
def _rank(deployment: Deployment, number: int, meeting: str) -> Iterator:
    import dataclasses

    import torch
    import torch.distributed

    from harness import devices, tree

    tp_rank, pp_rank = number % deployment.tp, number // deployment.tp
    params, world = {}, deployment.tp * deployment.pp
    if world > 1:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=number, world_size=world
        )
        for stage in range(deployment.pp):
            group = torch.distributed.new_group([stage * deployment.tp + i for i in range(deployment.tp)])
            if stage == pp_rank:
                params["tp_cache_group"] = group
        for column in range(deployment.tp):
            group = torch.distributed.new_group([i * deployment.tp + column for i in range(deployment.pp)])
            if column == tp_rank and deployment.pp > 1:
                params |= {"pp_cache_group": group, "pp_rank": pp_rank, "pp_size": deployment.pp}
    first, count = deployment.layers_of(pp_rank)
    heads = 1 if deployment.latent else max(1, deployment.heads // deployment.tp)
    base = tree.MAMBA if deployment.mamba else tree.FULL
    cfg = dataclasses.replace(
        base,
        page_size=deployment.page_size,
        head_num=heads,
        num_layers=base.num_layers if deployment.mamba else count,
        dtype=getattr(torch, deployment.dtype),
    )
    build = devices.mla if deployment.latent else devices.mha
    given = {
        "total_layers": base.num_layers if deployment.mamba else deployment.layers,
        "total_kv_heads": 1 if deployment.latent else deployment.heads,
        **deployment.options,
    }
    with tree.Rank(
        deployment.root,
        cfg,
        kind=deployment.kind,
        layout=deployment.layout,
        v1=deployment.v1,
        options=given,
        device_pool=None if deployment.mamba else lambda cfg: build(cfg, start=first),
        draft=devices.mha(cfg, 1) if deployment.draft else None,
        params=params,
        parallel={
            "tp_rank": tp_rank,
            "tp_size": deployment.tp,
            "attn_tp_rank": tp_rank,
            "attn_tp_size": deployment.tp,
            "moe_tp_size": deployment.tp,
            "pp_rank": pp_rank,
            "pp_size": deployment.pp,
        },
    ) as rank:
        yield rank
    if world > 1:
        torch.distributed.destroy_process_group()


def play(deployment: Deployment, number: int, meeting: str, steps: Sequence[Step]) -> list:
    """What one rank's process does: its steps, and what came of each."""
    answers = []
    with _rank(deployment, number, meeting) as rank:
        for step in steps:
            tokens = list(step.tokens)
            if step.what == "store":
                # Latent rows are equal on all tensor-parallel ranks; heads are not.
                stage, tp_rank = number // deployment.tp, number % deployment.tp
                own = stage if deployment.latent and not deployment.draft else 100 * stage + tp_rank
                answers.append(digest(rank.store(tokens, seed=1000 * step.seed + own)))
            elif step.what == "fetch":
                length = rank.fetch(tokens)
                answers.append((length, digest(rank.bytes_of(tokens[:length])) if length else []))
            elif step.what == "forget":
                rank.forget()
                answers.append(None)
            elif step.what == "lose":
                if number == step.seed:
                    rank.backend.close()
                answers.append(None)
            elif step.what == "stats":
                answers.append(rank.backend.stats())
            else:
                raise AssertionError(step.what)
    return answers


def deploy(
    deployment: Deployment, steps: Sequence[Step], meeting: Path, timeout: float = 240.0
) -> list[list]:
    """Runs all ranks of a deployment; the answers of each."""
    world = deployment.tp * deployment.pp
    meeting.unlink(missing_ok=True)
    with concurrent.futures.ProcessPoolExecutor(world, mp_context=context()) as pool:
        ranks = [pool.submit(play, deployment, number, str(meeting), steps) for number in range(world)]
        return [rank.result(timeout) for rank in ranks]
