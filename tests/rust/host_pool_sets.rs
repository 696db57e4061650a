//! Packed or sidecar follows from geometry, with a reason; a set never becomes its target alone.

use hicache_core::{
    Component, DType, ErrorKind, LayoutName, Mapping, MappingWish, Pool, PoolKind, PoolMember, PoolSet, Span,
    Tile, ViewOptions, ViewPool,
};
use hicache_sys::memory::{MemoryOptions, Wish};

use crate::support::{namespace, open};

fn pool(name: &str, kind: PoolKind, row_bytes: u32) -> Pool {
    let components = vec![Component::per_token("latent", row_bytes)];
    Pool::new(name, kind, DType::parse("bfloat16").unwrap(), None, components).unwrap()
}

fn member(name: &str, kind: PoolKind, layers: (u32, u32), row_bytes: u32) -> PoolMember {
    let (layers, heads) = (Span { start: layers.0, end: layers.1 }, Span { start: 0, end: 1 });
    let tile = Tile::whole_page(layers, heads, 4).unwrap();
    let pool = pool(name, kind, row_bytes);
    PoolMember { pool, tile, slots: 16, page_size: 4, first_layer: layers.start, wish: MappingWish::Auto }
}

/// A target of 3 layers, its indexer, and a draft of one layer that continues the target's.
fn deployment() -> Vec<PoolMember> {
    vec![
        member("kv", PoolKind::Latent, (0, 3), 36),
        member("indexer", PoolKind::Indexer, (0, 3), 10),
        member("draft", PoolKind::Draft, (3, 4), 36),
    ]
}

fn mappings(set: &PoolSet) -> Vec<Mapping> {
    set.members().iter().map(|member| member.mapping).collect()
}

#[test]
fn members_that_fit_share_the_targets_pages() {
    let set = PoolSet::new(&deployment()).unwrap();
    assert_eq!(mappings(&set), [Mapping::Target, Mapping::Packed, Mapping::Packed]);
    // 432, 120 and 144 bytes, each at a multiple of 256; the page a multiple of 4096.
    let offsets: Vec<u64> = set.members().iter().map(|member| member.offset).collect();
    assert_eq!(offsets, [0, 512, 768]);
    assert_eq!(set.host_pools(), [(16, 4096)]);
    assert_eq!(set.packed("draft").unwrap(), Some((768, 4096)));
    let text = set.explain();
    assert!(text.contains("draft: packed, bytes 768 to 912 of 4096 in 16 slots"), "{text}");
    assert!(text.contains("layers 3 to 4 owned once"), "{text}");
    assert_eq!(set.packed("nobody").unwrap_err().kind(), ErrorKind::Config);
}

#[test]
fn a_target_alone_has_pages_without_gaps() {
    let set = PoolSet::new(&deployment()[..1]).unwrap();
    assert_eq!((set.host_pools(), set.packed("kv").unwrap()), (&[(16, 432)][..], None));
}

#[test]
fn what_speaks_against_packing_is_the_reason_of_the_sidecar() {
    type Change = fn(&mut PoolMember);
    let cases: [(Change, &str); 4] = [
        (
            |draft| draft.pool = pool("draft", PoolKind::Draft, 40),
            "latent 40 bytes of bfloat16 a token against",
        ),
        (|draft| draft.first_layer = 2, "layer 2 is owned by kv too"),
        (|draft| draft.first_layer = 0, "layer 0 is owned by kv too"),
        (|draft| draft.first_layer = 5, "layers 3 to 5 are owned by nobody"),
    ];
    for (change, reason) in cases {
        let mut members = deployment();
        change(&mut members[2]);
        let set = PoolSet::new(&members).unwrap();
        assert_eq!(mappings(&set), [Mapping::Target, Mapping::Packed, Mapping::Sidecar], "{reason}");
        assert!(set.members()[2].reason.contains(reason), "{}", set.explain());
        assert_eq!(set.host_pools().len(), 2);
        assert_eq!(set.packed("draft").unwrap(), None);
        // Asked for, the same is an error.
        members[2].wish = MappingWish::Packed;
        let error = PoolSet::new(&members).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Geometry);
        assert!(error.message().contains(reason), "{error}");
    }
}

#[test]
fn one_that_follows_the_targets_slots_and_has_others_is_refused() {
    for index in [1, 2] {
        for wish in [MappingWish::Auto, MappingWish::Packed, MappingWish::Sidecar] {
            let mut members = deployment();
            (members[index].slots, members[index].wish) = (8, wish);
            let error = PoolSet::new(&members).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Geometry);
            assert!(error.message().contains("it has 8 slots, kv has 16"), "{error}");
        }
    }
    let mut members = deployment();
    members[2].page_size = 8;
    members[2].tile = Tile::whole_page(members[2].tile.layers, members[2].tile.heads, 8).unwrap();
    assert!(PoolSet::new(&members).unwrap_err().message().contains("8 of 8 tokens"));
}

#[test]
fn states_have_slots_of_their_own_and_stand_beside() {
    let mut members = deployment();
    let mut state = member("state", PoolKind::State, (0, 3), 2048);
    state.slots = 3;
    members.push(state);
    let set = PoolSet::new(&members).unwrap();
    assert_eq!(set.members()[3].mapping, Mapping::Sidecar);
    assert_eq!(set.host_pools()[1], (3, 3 * 2048 * 4));
    members[3].wish = MappingWish::Sidecar;
    members[3].slots = 16;
    let set = PoolSet::new(&members).unwrap();
    assert_eq!(set.members()[3].mapping, Mapping::Sidecar);
    assert!(set.members()[3].reason.contains("it could be packed"), "{}", set.explain());
}

#[test]
fn sets_that_cannot_be_are_refused() {
    let twice = vec![deployment()[0].clone(), deployment()[0].clone()];
    let no_target = deployment()[1..].to_vec();
    let indexer_of_nothing =
        vec![deployment()[0].clone(), member("draft_indexer", PoolKind::DraftIndexer, (3, 4), 10)];
    for (members, part) in [
        (vec![], "found no pools"),
        (twice, "named twice"),
        (no_target, "expected a target first"),
        (indexer_of_nothing, "continues the layers of a pool of kind indexer"),
    ] {
        let error = PoolSet::new(&members).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.message().contains(part), "{error}");
    }
    let none = PoolMember { slots: 0, ..deployment()[0].clone() };
    let error = PoolSet::new(&[none]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Geometry);
    assert!(error.message().contains("at least one slot"), "{error}");
}

#[test]
fn the_places_are_those_that_a_view_takes() {
    let root = tempfile::tempdir().unwrap();
    let (store, set) = (open(root.path()), PoolSet::new(&deployment()).unwrap());
    let pools = deployment().into_iter().map(|member| {
        let packed = set.packed(member.pool.name()).unwrap();
        ViewPool { packed, ..ViewPool::new(member.pool, member.tile, LayoutName::PageFirst) }
    });
    let view = store.view(namespace("packed"), pools.collect(), ViewOptions::default()).unwrap();
    for (index, member) in set.members().iter().enumerate() {
        assert_eq!(view.page_bytes(index), member.part_bytes);
    }
    let pools = set.allocate(&MemoryOptions { register: Wish::Off, ..MemoryOptions::default() }).unwrap();
    assert_eq!(pools.iter().map(|pool| pool.slots()).collect::<Vec<_>>(), [16]);
}
