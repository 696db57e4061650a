"""What must be equal for pages to be found: a difference in any of it is a miss, and says which it is."""

from __future__ import annotations

import dataclasses
import os
from types import SimpleNamespace

import pytest
import torch
from harness import backends, pools
from hicache_store import ConfigError
from hicache_store.sglang import identity, versions
from hicache_store.sglang.versions import EngineFacts
from sglang.srt.mem_cache.hicache_storage import PoolName

KV = PoolName.KV
COMMIT = "0123456789abcdef0123456789abcdef01234567"
NOBODY = EngineFacts()


def mha(**changes):
    return pools.build("mha", "page_first", dataclasses.replace(pools.TINY, **changes))


@pytest.fixture
def stored(rank, put, keys, slots):
    pool = pools.fill(mha(), 1)
    assert put(rank(pool), KV, pool, keys, slots)
    return pool


DIFFERENT = {
    "revision": ({"extra": {"revision": "r2"}}, {}),
    "salt": ({"extra": {"salt": "tenant"}}, {}),
    "model": ({"extra": {"model": "org/other"}}, {}),
    "served name": ({"model_name": "org/other"}, {}),
    "element type": ({}, {"dtype": torch.float16}),
    "page size": ({}, {"page": 8}),
    "fewer layers": ({}, {"layers": 2}),
    "more layers": ({}, {"layers": 4}),
    "heads": ({}, {"heads": 4}),
    "width": ({}, {"dim": 16}),
    "a packed draft": ({}, {"drafts": 1}),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_a_difference_is_a_miss(rank, take, stored, keys, slots, what):
    facts, shape = DIFFERENT[what]
    pool = pools.paint(mha(**shape))
    reader = rank(pool, **facts)
    assert reader.batch_exists(keys) == 0
    assert take(reader, KV, pool, keys, slots) == 0
    assert set(pools.page(pool, slots[0])) == {0xA5}


def test_nothing_different_is_a_hit(rank, stored, keys):
    assert rank(mha()).batch_exists(keys) == 6


def test_equal_sizes_of_another_layout_are_read_as_what_they_are(rank, take, stored, keys, slots, others):
    pool = pools.paint(pools.build("mha", "page_head"))
    assert take(rank(pool), KV, pool, keys, others) == 6
    pages = zip(slots, others, strict=True)
    for before, after in pages:
        written = stored.kv_buffer[:, before * pools.PAGE : (before + 1) * pools.PAGE]
        read = pool.kv_buffer[:, after].permute(0, 2, 3, 1, 4)
        assert torch.equal(read.contiguous().view(torch.int16), written.contiguous().view(torch.int16))


def bytes_pool(**changes):
    return mha(dtype=torch.uint8, **changes)


@pytest.mark.parametrize("other", ["float8_e5m2", None])
def test_which_8_bit_float_it_is_matters(monkeypatch, rank, put, keys, slots, other):
    """The engine keeps them in bytes, which look alike."""
    facts = EngineFacts(kv_dtype="float8_e4m3fn")
    monkeypatch.setattr(versions, "engine_facts", lambda: facts)
    pool = pools.fill(bytes_pool(), 2)
    assert put(rank(pool), KV, pool, keys, slots)
    assert rank(bytes_pool()).batch_exists(keys) == 6
    facts = EngineFacts(kv_dtype=other)
    assert rank(bytes_pool()).batch_exists(keys) == 0


def test_the_drafts_own_weights_matter_to_the_draft_alone(monkeypatch, rank, put, keys, slots):
    facts = EngineFacts(draft_model="org/draft@one")
    monkeypatch.setattr(versions, "engine_facts", lambda: facts)
    anchor, draft = pools.fill(mha(), 3), pools.fill(mha(layers=1), 4)
    writer = rank(anchor, {PoolName.DRAFT: draft})
    assert put(writer, KV, anchor, keys, slots)
    assert put(writer, PoolName.DRAFT, draft, keys, slots)
    every = [backends.every(PoolName.DRAFT)]
    assert rank(anchor, {PoolName.DRAFT: draft}).batch_exists_v2(keys, every).kv_hit_pages == 6
    facts = EngineFacts(draft_model="org/draft@two")
    found = rank(anchor, {PoolName.DRAFT: draft}).batch_exists_v2(keys, every)
    assert (found.kv_hit_pages, found.extra_pool_hit_pages) == (0, {KV: 6})


def test_a_target_without_its_draft_is_no_hit(rank, put, keys, slots):
    anchor, draft = pools.fill(mha(), 5), pools.fill(mha(layers=1), 6)
    writer = rank(anchor, {PoolName.DRAFT: draft})
    assert put(writer, KV, anchor, keys, slots)
    assert put(writer, PoolName.DRAFT, draft, keys[:2], slots[:2])
    found = writer.batch_exists_v2(keys, [backends.every(PoolName.DRAFT)])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (2, [1, 2])
    # The keys and values alone serve a deployment without a draft.
    assert rank(anchor).batch_exists(keys) == 6


# -- names and revisions --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("option", "served", "path", "name"),
    [
        ("a/b", "c", "/d", "a/b"),
        (None, "c", "/d", "c"),
        (None, None, "/models/org/name", "org/name"),
        (None, None, "org/name", "org/name"),
        (None, None, f"/hub/models--org--name/snapshots/{COMMIT}", "org/name"),
        (None, None, "name", "name"),
    ],
)
def test_where_the_name_comes_from(option, served, path, name):
    assert identity.model_name(option, served, path) == name


def test_a_model_without_a_name_is_refused():
    with pytest.raises(ConfigError, match='"model"'):
        identity.model_name(None, None, None)


def test_where_the_revision_comes_from(tmp_path):
    snapshot = tmp_path / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    assert identity.revision("mine", str(snapshot), NOBODY) == "mine"
    assert identity.revision(None, str(snapshot), NOBODY) == COMMIT
    link = tmp_path / "link"
    link.symlink_to(snapshot)
    assert identity.revision(None, str(link), NOBODY) == COMMIT
    assert identity.revision(None, "org/name", EngineFacts(revision=COMMIT)) == COMMIT


def folder_of(tmp_path, name="weights"):
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.json").write_text('{"layers": 3}')
    for file in ("a.safetensors", "b.safetensors", "notes.txt"):
        (folder / file).write_bytes(file.encode())
        os.utime(folder / file, ns=(10**18, 10**18))
    return folder


def test_a_local_folders_revision_follows_its_weights(tmp_path):
    folder = folder_of(tmp_path)
    first = identity.revision(None, str(folder), NOBODY)
    assert first.startswith("local-")
    assert identity.revision(None, str(folder_of(tmp_path, "copy")), NOBODY) == first
    (folder / "notes.txt").write_text("more")
    assert identity.revision(None, str(folder), NOBODY) == first
    seen = {first}
    for change in (
        lambda: (folder / "config.json").write_text('{"layers": 4}'),
        lambda: (folder / "a.safetensors").write_bytes(b"other weights"),
        lambda: os.utime(folder / "b.safetensors", ns=(10**18, 10**18 + 1)),
        lambda: (folder / "b.safetensors").rename(folder / "c.safetensors"),
    ):
        change()
        seen.add(identity.revision(None, str(folder), NOBODY))
    assert len(seen) == 5


def test_a_changed_config_is_another_revision(tmp_path):
    folder = str(folder_of(tmp_path))
    plain = identity.revision(None, folder, NOBODY)
    scaled = identity.revision(None, folder, EngineFacts(overrides='{"rope_scaling": 2}'))
    assert scaled.startswith(plain)
    assert (
        len({plain, scaled, identity.revision(None, folder, EngineFacts(overrides='{"rope_scaling": 4}'))})
        == 3
    )


@pytest.mark.parametrize("path", [None, "org/name", "/nowhere"])
def test_weights_without_a_revision_are_refused(path):
    with pytest.raises(ConfigError, match="unversioned"):
        identity.revision(None, path, EngineFacts(revision="main"))


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="weight files"):
        identity.revision(None, str(tmp_path), NOBODY)


def test_a_backend_without_a_revision_is_refused(rank):
    with pytest.raises(ConfigError, match="revision"):
        rank(None, extra={"revision": None})


# -- the engine's facts ---------------------------------------------------------------------------------
def test_an_engine_that_is_not_started_tells_nothing():
    assert versions.engine_facts() == NOBODY


def arguments(**changes):
    config = SimpleNamespace(
        num_hidden_layers=32,
        num_attention_layers=32,
        get_total_num_kv_heads=lambda: 8,
        get_swa_num_kv_heads=lambda tp_size: 4 // tp_size,
    )
    given = {
        "model_path": "org/name",
        "revision": "main",
        "kv_cache_dtype": "fp8_e5m2",
        "_model_config": config,
    }
    return SimpleNamespace(**given | changes)


def test_a_started_engine_tells_its_models_facts(monkeypatch):
    monkeypatch.setattr(versions, "_server_args", arguments)
    facts = versions.engine_facts()
    assert (facts.model_path, facts.revision, facts.total_layers) == ("org/name", "main", 32)
    assert dict(facts.total_heads) == {"kv": 8, "swa": 4}
    assert facts.kv_dtype == "float8_e5m2"
    assert facts.draft_model is None


def test_a_model_from_the_hub_has_the_commit_in_its_cache(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(versions, "_server_args", arguments)
    assert versions.engine_facts().revision == "main"
    cached = tmp_path / "models--org--name"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(COMMIT)
    (cached / "snapshots" / COMMIT).mkdir(parents=True)
    (cached / "snapshots" / COMMIT / "config.json").write_text("{}")
    assert versions.engine_facts().revision == COMMIT
    monkeypatch.setattr(versions, "_server_args", lambda: arguments(model_path="s3://bucket/model"))
    assert versions.engine_facts().revision == "main"


def test_a_model_whose_stages_count_other_layers_tells_no_total(monkeypatch):
    given = arguments()
    given._model_config.num_attention_layers = 64
    monkeypatch.setattr(versions, "_server_args", lambda: given)
    assert versions.engine_facts().total_layers is None


def test_an_engine_that_answers_strangely_tells_nothing(monkeypatch):
    def strange():
        raise KeyError("another release")

    monkeypatch.setattr(versions, "_server_args", strange)
    assert versions.engine_facts() == NOBODY


def test_the_engine_knows_better_than_the_options(monkeypatch, rank, caplog):
    monkeypatch.setattr(versions, "engine_facts", lambda: EngineFacts(total_heads={"kv": 2, "swa": 2}))
    pool = mha(layers=2, heads=1)
    reader = rank(pool, extra={"total_layers": 4, "total_kv_heads": 3}, tp_size=2, pp_size=2)
    assert reader.stats()["pools"]["kv"]["bound"] == []
    assert reader.stats()["pools"]["kv"]["identity"]["row_format"] == "4 layers; 2 heads"
    told = [record.message for record in caplog.records if "of the options" in record.message]
    assert told == ["the engine's model has total_kv_heads 2, not the 3 of the options"]
