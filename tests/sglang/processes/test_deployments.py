"""Whole servers as processes on one root: what one wrote the next has, and nobody gets what is not theirs."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest
from harness.workers import Deployment, Step, deploy

TOKENS = list(range(1, 25))
KEEP = [Step("store", TOKENS, 1), Step("forget"), Step("fetch", TOKENS)]
LOOK = [Step("fetch", TOKENS)]

SHAPES = {
    "one": {},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "pp2-uneven": {"pp": 2, "split": (3, 1)},
    "tp2-pp2": {"tp": 2, "pp": 2},
    "latent-tp4": {"tp": 4, "latent": True},
    "latent-pp2": {"pp": 2, "latent": True},
    "mamba-tp2": {"tp": 2, "mamba": True},
}


@pytest.fixture
def server(tmp_path):
    """Runs the ranks of a server; each gives its answers."""

    def run(deployment, steps):
        return deploy(deployment, steps, tmp_path / "meeting")

    run.root = tmp_path / "root"
    return run


def tool(*args) -> tuple[int, dict]:
    """The store's tool, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", "from hicache_store._tool import main; main()", *map(str, args), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def objects(root) -> dict[str, int]:
    """Live objects in the root by pool."""
    counts: dict[str, int] = {}
    for namespace in tool("ls", root)[1]["namespaces"]:
        _, listed = tool("ls", root, "--namespace", namespace["fingerprint"])
        for form in listed["namespaces"][0]["forms"]:
            counts[form["pool"]] = counts.get(form["pool"], 0) + form["objects"]
    return counts


@pytest.mark.parametrize("v1", [True, False], ids=["v1", "older"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_restarted_server_hits_everything(server, shape, v1):
    deployment = Deployment(server.root, v1=v1, **SHAPES[shape])
    first = server(deployment, KEEP)
    held = [answers[0] for answers in first]
    assert [answers[2] for answers in first] == [(24, own) for own in held]
    again = server(deployment, LOOK)
    assert [answers[0] for answers in again] == [(24, own) for own in held]


@pytest.mark.parametrize(
    ("shape", "pools"),
    [
        ("tp2", {"kv": 12}),
        ("pp2", {"kv": 12}),
        ("latent-tp4", {"kv": 6}),
        ("latent-pp2", {"kv": 12}),
        ("mamba-tp2", {"kv": 12, "mamba": 2}),
    ],
)
def test_case_d26_what_is_equal_on_all_ranks_is_stored_once(server, shape, pools):
    """And storing it again writes nothing."""
    deployment = Deployment(server.root, **SHAPES[shape])
    server(deployment, KEEP)
    assert objects(server.root) == pools
    before = tool("stat", server.root)[1]["counters"].get("backup_stored_pages")
    server(deployment, [Step("store", TOKENS, 1)])
    assert objects(server.root) == pools
    assert tool("stat", server.root)[1]["counters"].get("backup_stored_pages") == before


def test_case_d26_when_the_elected_writer_fails_nobody_hits(server):
    deployment = Deployment(server.root, tp=2, latent=True)
    lost = [Step("lose", seed=0), Step("store", TOKENS, 1), Step("forget"), Step("fetch", TOKENS)]
    assert [answers[3] for answers in server(deployment, lost)] == [(0, [])] * 2
    assert [answers[0] for answers in server(deployment, LOOK)] == [(0, [])] * 2


def test_latent_ranks_read_what_rank_0_wrote(server):
    deployment = Deployment(server.root, tp=4, latent=True)
    first = server(deployment, KEEP)
    assert len({tuple(answers[0]) for answers in first}) == 1
    for number in (1, 2, 4):
        again = server(dataclasses.replace(deployment, tp=number), LOOK)
        assert [answers[0] for answers in again] == [(24, first[0][0])] * number


def limited(stats: dict) -> int:
    """Look-ups of a rank that its draft pool cut short."""
    return stats["counters"].get("lookups_limited/draft", 0)


def test_a_latent_target_with_a_draft_of_heads_is_a_counted_miss(server):
    """The engine lets rank 0 alone write the draft's heads: no other rank hits, and none gets wrong heads."""
    deployment = Deployment(server.root, tp=2, latent=True, draft=True)
    first = server(deployment, [*KEEP, Step("stats")])
    assert [answers[2][0] for answers in first] == [0, 0]
    assert [limited(answers[3]) for answers in first] == [0, 1]
    again = server(deployment, [*LOOK, Step("stats")])
    assert [answers[0][0] for answers in again] == [0, 0]
    assert [limited(answers[1]) for answers in again] == [0, 1]
    single = dataclasses.replace(deployment, tp=1)
    own = server(dataclasses.replace(single, root=server.root.with_name("single")), KEEP)
    assert own[0][2] == (24, own[0][0])


OTHERS = {
    "revision": ({"options": {"revision": "r2"}}, "revision"),
    "model": ({"options": {"model": "org/other"}}, "model"),
    "salt": ({"options": {"salt": "tenant"}}, "salt"),
    "dtype": ({"dtype": "float16"}, 'pool "kv": dtype'),
    "page-size": ({"page_size": 8}, "page_size"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_identity_hits_nothing_and_explain_names_the_field(server, other):
    changes, field = OTHERS[other]
    deployment = Deployment(server.root)
    held = server(deployment, KEEP)[0][0]
    changed = Deployment(server.root, **changes)
    found = server(changed, LOOK)
    assert found[0][0] == (0, [])
    server(changed, [Step("store", TOKENS, 2)])
    assert server(deployment, LOOK)[0][0] == (24, held)

    specs = []
    for namespace in tool("ls", server.root)[1]["namespaces"]:
        pools = [held_pool["pool"] for held_pool in namespace["pools"]]
        for pool in pools:
            specs.append({"namespace": namespace["namespace"], "pools": [pool]})
    assert len(specs) == 2
    files = []
    for number, spec in enumerate(specs):
        files.append(server.root.with_name(f"spec-{number}.json"))
        files[-1].write_text(json.dumps(spec))
    code, answer = tool("explain", "--spec", files[0], "--spec", files[1])
    assert code == 1
    assert not answer["is_equal"]
    assert [difference["field"] for difference in answer["differences"]] == [field]


def test_explain_finds_every_page_of_a_request(server):
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    server(Deployment(server.root, tp=2), KEEP)
    fingerprint = tool("ls", server.root)[1]["namespaces"][0]["fingerprint"]
    keys = get_storage_hash_str([*TOKENS, *range(500, 504)], None, page_size=4)
    asked = [word for key in keys for word in ("--key", key)]
    code, answer = tool("explain", server.root, "--namespace", fingerprint, *asked)
    assert code == 0
    (prefix,) = answer["prefixes"]
    assert prefix["prefix_pages"] == 6
    assert [tile["prefix_pages"] for tile in prefix["tiles"]] == [6, 6]
    assert [page["pools"][0]["status"] for page in answer["pages"]] == ["present"] * 6 + ["never stored here"]


def test_two_servers_at_once(server, tmp_path):
    """Both serve, both store, and each has what the other one stored."""
    import concurrent.futures

    deployment = Deployment(server.root, tp=2)
    chains = [TOKENS, list(range(1001, 1025))]
    with concurrent.futures.ThreadPoolExecutor(2) as together:
        runs = [
            together.submit(deploy, deployment, [Step("store", chain, 1)], tmp_path / f"meeting-{number}")
            for number, chain in enumerate(chains)
        ]
        held = [[answers[0] for answers in run.result()] for run in runs]
    found = server(deployment, [Step("fetch", chain) for chain in chains])
    for number in range(2):
        assert [answers[number] for answers in found] == [(24, own) for own in held[number]]
