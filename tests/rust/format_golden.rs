//! The bytes of format 1 mean this for ever: each structure against bytes written field by field after
//! `docs/format.md`, against bytes on file, and a whole store that must open and give its pages back.
//!
//! `HICACHE_WRITE_FIXTURES=1` writes `tests/fixtures/v1` anew. That is right only before a format is released.

use std::path::{Path, PathBuf};

use hicache_core::format::block::{block_checksum, decode_block, encode_block};
use hicache_core::format::directory::{self, Block, DirectoryHeader, Entry, Parent, Run};
use hicache_core::format::form::{Codec, Form};
use hicache_core::format::frame::{
    self, AddRun, AddUnit, Frame, FrameKind, Gone, Location, Reason, Step, short_key,
};
use hicache_core::format::root::{RootDescription, RootFile, decode_generation, encode_generation};
use hicache_core::format::segment::{Seal, SegmentHeader};
use hicache_core::format::setup::Setup;
use hicache_core::format::{ProcessId, SegmentId, checksum, checksum_with_seed};
use hicache_core::{
    BackupOutcome, Component, DType, LayoutName, Namespace, PageKey, Pool, PoolKind, PoolPlacement,
    RestoreOutcome, Span, Store, StoreOptions, Tile, TokenLattice, View, ViewOptions, ViewPool,
};

use crate::support::{
    Memory, backup, contiguous, copy_tree, files_ending, flip, keys, kv_pool, listing, object, page_bytes,
    restore, tile,
};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/v1")
}

fn writes_fixtures() -> bool {
    std::env::var_os("HICACHE_WRITE_FIXTURES").is_some_and(|value| value == "1")
}

fn fixture(name: &str) -> PathBuf {
    fixtures().join(format!("{name}.hex"))
}

/// The bytes on file under this name: hex digits, 32 bytes a line.
fn golden(name: &str) -> Vec<u8> {
    let text = std::fs::read_to_string(fixture(name)).unwrap().split_whitespace().collect::<String>();
    let (digits, rest) = text.as_bytes().as_chunks::<2>();
    assert!(rest.is_empty());
    digits.iter().map(|pair| u8::from_str_radix(str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

/// The bytes on file under this name, once `now` is there if fixtures are to be written.
fn golden_or(name: &str, now: &[u8]) -> Vec<u8> {
    if writes_fixtures() {
        let line = |line: &[u8]| line.iter().map(|byte| format!("{byte:02x}")).collect::<String>() + "\n";
        std::fs::create_dir_all(fixtures()).unwrap();
        std::fs::write(fixture(name), now.chunks(32).map(line).collect::<String>()).unwrap();
    }
    golden(name)
}

/// Checks that the encoder, the hand-written bytes and the bytes on file are the same ones.
fn assert_golden(name: &str, encoded: &[u8], by_hand: &[u8]) {
    assert!(encoded == by_hand, "{name}: the encoder writes other bytes than the format says");
    assert!(golden_or(name, encoded) == encoded, "{name}: format 1 has changed");
}

/// Fields one after the other.
#[derive(Default)]
struct Hand(Vec<u8>);

impl Hand {
    fn raw(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }
    fn u16(self, value: u16) -> Self {
        self.raw(&value.to_le_bytes())
    }
    fn u32(self, value: u32) -> Self {
        self.raw(&value.to_le_bytes())
    }
    fn u64(self, value: u64) -> Self {
        self.raw(&value.to_le_bytes())
    }
    fn zeros(self, count: usize) -> Self {
        self.raw(&vec![0; count])
    }
    /// Text with its length before it, as in canonical bytes.
    fn text(self, text: &str) -> Self {
        self.u16(text.len() as u16).raw(text.as_bytes())
    }
    fn at(&self) -> usize {
        self.0.len()
    }
    /// Checksum of everything from `start`.
    fn sum(self, start: usize) -> Self {
        let sum = checksum(&self.0[start..]);
        self.u64(sum)
    }
}

fn namespace() -> Namespace {
    Namespace::new("org/golden", "r1", 16, Some("tenant")).unwrap()
}

fn namespace_by_hand() -> Vec<u8> {
    Hand::default()
        .raw(b"hicache-namespace")
        .u32(1)
        .text("org/golden")
        .text("r1")
        .u32(16)
        .raw(&[1])
        .text("tenant")
        .0
}

fn pool() -> Pool {
    let components = vec![
        Component::per_token("k", 128),
        Component { dtype: Some(DType::UInt8), ..Component::per_page("scales", 4) },
    ];
    Pool::new("kv", PoolKind::Kv, DType::Float8E4m3fn, Some("rows"), components).unwrap()
}

fn pool_by_hand() -> Vec<u8> {
    let head = Hand::default().raw(b"hicache-pool").u32(1).text("kv").text("kv").text("float8_e4m3fn");
    let head = head.raw(&[1]).text("rows").raw(&[2]);
    let first = head.text("k").u32(128).raw(&[0, 0]);
    first.text("scales").u32(4).raw(&[1, 1]).text("uint8").0
}

fn segment() -> SegmentId {
    SegmentId { process: ProcessId(*b"0123456789abcdef"), number: 7 }
}

fn page(number: u8) -> PageKey {
    PageKey([0x40 + number; 32])
}

/// Every second of 16 tokens of 3 layers and 2 heads, in groups of one head.
fn form() -> Form {
    Form {
        pool: pool().fingerprint(),
        tile: Tile {
            layers: Span { start: 1, end: 4 },
            heads: Span { start: 2, end: 4 },
            tokens: TokenLattice { first: 1, step: 2, count: 8 },
        },
        layout: LayoutName::PageUnified { heads_per_group: 1 },
        codec: Codec::ZstdPlanes,
        block_bytes: 8192,
        page_bytes: 9000,
    }
}

fn form_by_hand() -> Vec<u8> {
    let tile = Hand::default().raw(&pool().fingerprint().0).u32(1).u32(4).u32(2).u32(4).u32(1).u32(2).u32(8);
    tile.u32(5 | 1 << 8).raw(&[2, 0, 0, 0]).u32(8192).u64(9000).0
}

/// A form of one block.
fn plain_form() -> Form {
    Form { layout: LayoutName::PageFirst, codec: Codec::None, page_bytes: 512, ..form() }
}

fn plain_form_by_hand() -> Vec<u8> {
    let mut bytes = form_by_hand();
    bytes[44..48].copy_from_slice(&2u32.to_le_bytes());
    bytes[48] = 0;
    bytes[56..64].copy_from_slice(&512u64.to_le_bytes());
    bytes
}

fn seed_by_hand(form: &[u8], key: &PageKey) -> u64 {
    checksum(&[&namespace().fingerprint().0, form, &key.0].concat())
}

#[test]
fn the_checksum_is_xxh3() {
    // Vectors of the reference implementation.
    assert_eq!(checksum(b""), 0x2d06_8005_38d3_94c2);
    assert_eq!(checksum(b"a"), 0xe6c6_32b6_1e96_4e1f);
    assert_eq!(checksum(b"abc"), 0x78af_5f94_892f_3950);
    assert_eq!(checksum_with_seed(0, b"abc"), checksum(b"abc"));
    let seed = form().seed(&namespace().fingerprint(), &page(1));
    assert_eq!(seed, seed_by_hand(&form_by_hand(), &page(1)));
    assert_eq!(block_checksum(u64::MAX, 1, b"abc"), checksum(b"abc"), "seeds wrap");
}

#[test]
fn a_segment_header_is_these_bytes() {
    let header = SegmentHeader {
        segment: segment(),
        namespace: namespace(),
        generation: 3,
        created_ns: 1_700_000_000,
    };
    let fields = Hand::default().raw(b"HICSEG01").u32(1).u32(7).raw(b"0123456789abcdef");
    let fields = fields.raw(&namespace().fingerprint().0).u64(3).u64(1_700_000_000);
    let fields = fields.u32(namespace_by_hand().len() as u32).u32(0).raw(&namespace_by_hand());
    let padding = 4088 - fields.at();
    assert_golden("segment-header", &header.encode(), &fields.zeros(padding).sum(0).0);
    assert_eq!(SegmentHeader::decode(&golden("segment-header")).unwrap(), header);
    assert_eq!(segment().file_name(), "30313233343536373839616263646566-7.seg");
}

#[test]
fn a_seal_is_these_bytes() {
    let seal = Seal { segment: segment(), directories: vec![8192, 12288 + 64] };
    let fields = Hand::default().u64(8192).u64(12288 + 64).raw(b"HICSEAL1").raw(b"0123456789abcdef");
    let fields = fields.u32(7).u32(2).u64(20480).zeros(16).sum(0);
    assert_golden("seal", &seal.encode(20480), &fields.0);
    let bytes = golden("seal");
    assert_eq!(Seal::decode(&bytes).unwrap(), seal);
    assert_eq!(Seal::locate(&bytes[bytes.len() - 64..]).unwrap(), (20480, 2));
}

fn entry_by_hand(form: &[u8], key: PageKey, offset: u64, blocks: &[(u32, u64)]) -> Vec<u8> {
    let mut entry = Hand::default().raw(&key.0).u64(offset);
    for &(stored, sum) in blocks {
        entry = entry.u32(stored).u64(sum);
    }
    let sum = checksum_with_seed(seed_by_hand(form, &key), &entry.0);
    entry.u64(sum).0
}

#[test]
fn a_directory_of_two_runs_is_these_bytes() {
    let header = DirectoryHeader {
        namespace: namespace().fingerprint(),
        segment: segment(),
        generation: 3,
        unit_offset: 4096,
        directory_offset: 8192,
        directory_bytes: 0,
        written_ns: 1_700_000_001,
    };
    let block = |stored_bytes, checksum| Block { stored_bytes, checksum };
    let entry = |key, payload_offset, blocks| Entry { key, payload_offset, blocks };
    let runs = [
        Run {
            form: form(),
            pool_bytes: pool().canonical_bytes(),
            payload_offset: 64,
            payload_bytes: 5800,
            parent: Parent::Page(page(9)),
            depth: 4,
            entries: vec![
                entry(page(1), 64, vec![block(3000, 11), block(100, 12)]),
                entry(page(2), 3164, vec![block(2000, 13), block(700, 14)]),
            ],
        },
        Run {
            form: plain_form(),
            pool_bytes: pool().canonical_bytes(),
            payload_offset: 0,
            payload_bytes: 512,
            parent: Parent::Unknown,
            depth: directory::UNKNOWN_DEPTH,
            entries: vec![entry(page(3), 0, vec![block(512, 15)])],
        },
    ];
    let pool_bytes = pool_by_hand();
    let run = |form: &[u8], count, numbers: (u64, u64, u32, u32), parent: [u8; 32], entries: Vec<Vec<u8>>| {
        let (offset, bytes, depth, kind) = numbers;
        let head =
            Hand::default().raw(b"HRUN").u32(count).raw(form).u64(offset).u64(bytes).u32(depth).u32(kind);
        let head = head.u32(pool_bytes.len() as u32).u32(0).raw(&parent).raw(&pool_bytes).sum(0);
        head.raw(&entries.concat()).0
    };
    let (first, second) = (form_by_hand(), plain_form_by_hand());
    let one = run(
        &first,
        2,
        (64, 5800, 4, 2),
        page(9).0,
        vec![
            entry_by_hand(&first, page(1), 64, &[(3000, 11), (100, 12)]),
            entry_by_hand(&first, page(2), 3164, &[(2000, 13), (700, 14)]),
        ],
    );
    let two = run(
        &second,
        1,
        (0, 512, u32::MAX, 0),
        [0; 32],
        vec![entry_by_hand(&second, page(3), 0, &[(512, 15)])],
    );
    let start = 104 + 2 * 8 + 8;
    let total = start + one.len() + two.len();
    let head = Hand::default().raw(b"HICDIR01").u32(1).u32(2).raw(&namespace().fingerprint().0);
    let head = head.raw(b"0123456789abcdef").u32(7).u32(0).u64(3).u64(4096).u64(8192).u64(total as u64);
    let head = head.u64(1_700_000_001).u64(0).u64(start as u64).u64((start + one.len()) as u64).sum(0);
    assert_golden("directory", &directory::encode(&header, &runs), &[head.0, one, two].concat());

    let read = directory::decode(&golden("directory")).unwrap();
    assert_eq!(read.header, DirectoryHeader { directory_bytes: total as u64, ..header });
    assert_eq!(read.damaged_runs, 0);
    for (read, run) in read.runs.iter().zip(&runs) {
        assert_eq!(read.run, Run { entries: vec![], ..run.clone() });
        assert_eq!(read.entries.iter().flatten().collect::<Vec<_>>(), run.entries.iter().collect::<Vec<_>>());
    }
    assert_eq!(
        directory::entries_offsets(&runs),
        read.runs.iter().map(|run| run.entries_offset).collect::<Vec<_>>()
    );
}

/// A frame of these records: number, kind, how many, bytes.
fn frame_by_hand(sequence: u64, kind: u16, records: u32, body: &[u8]) -> Vec<u8> {
    let fields = Hand::default().raw(b"0123456789abcdef").u64(sequence).u16(kind).u16(0).u32(records);
    let fields =
        fields.u32(body.len() as u32).u32(0).raw(&namespace().fingerprint().0).u64(1_700_000_002).raw(body);
    let sum = checksum(&fields.0);
    let frame = Hand::default().raw(b"HICFRM01").u64(sum).raw(&fields.0);
    let padding = frame.at().next_multiple_of(8) - frame.at();
    frame.zeros(padding).0
}

#[test]
fn frames_of_every_kind_are_these_bytes() {
    let unit = AddUnit {
        segment: segment(),
        generation: 3,
        unit_offset: 4096,
        unit_bytes: 4672,
        directory_offset: 8192,
        directory_bytes: 576,
    };
    let short = [short_key(&page(1)), short_key(&page(2))];
    let run = AddRun {
        form: form(),
        entries_offset: 8500,
        payload_offset: 4160,
        payload_bytes: 5800,
        parent: short_key(&page(9)),
        depth: 4,
        keys: short.as_flattened(),
    };
    let location = Location { segment: segment(), entries_offset: 8500, ordinal: 1 };
    let gone = |reason| Gone { location, key: short[1], objects: 1, reason };
    let reasons = [Reason::Evicted, Reason::Damaged, Reason::Foreign, Reason::Unreadable];

    let add =
        Hand::default().raw(b"0123456789abcdef").u32(7).u32(1).u64(3).u64(4096).u64(4672).u64(8192).u64(576);
    let add = add.raw(&form_by_hand()).u64(8500).u64(4160).u64(5800).raw(&[0x49; 16]).u32(4).u32(2);
    let add = add.raw(&[0x41; 16]).raw(&[0x42; 16]).0;
    let gone_by_hand = |code| {
        let place = Hand::default().raw(b"0123456789abcdef").u32(7).u32(1).u64(8500);
        place.raw(&[0x42; 16]).u16(code).zeros(6).0
    };
    let removed = gone_by_hand(1);
    let quarantined = [2, 3, 4].map(gone_by_hand).concat();
    let stretched = Gone { objects: 7, ..gone(Reason::Expired) };
    let stretch = Hand::default().raw(b"0123456789abcdef").u32(7).u32(1).u64(8500);
    let stretch = stretch.raw(&[0x42; 16]).u16(6).u16(0).u32(6).0;
    let sealed = Hand::default().raw(b"0123456789abcdef").u32(7).u32(0).u64(20560).0;
    let counters = Hand::default().u32(1).u64(5).u32(20).u64(u64::MAX).0;
    let words =
        br#"{"free_space_floor_bytes":4096,"pools":[{"name":"kv","place":"target","reason":"alone"}]}"#;
    let pool = PoolPlacement { name: "kv".into(), place: "target".into(), reason: "alone".into() };
    let setup = Setup { free_space_floor_bytes: Some(4096), pools: vec![pool] };
    let by_hand = [
        frame_by_hand(0, 1, 1, &add),
        frame_by_hand(1, 2, 1, &removed),
        frame_by_hand(2, 3, 3, &quarantined),
        frame_by_hand(3, 5, 1, &sealed),
        frame_by_hand(4, 6, 2, &counters),
        frame_by_hand(5, 99, 1, b"later"),
        frame_by_hand(6, 2, 1, &stretch),
        frame_by_hand(7, 4, 2, &[[0x42; 16], [0x41; 16]].concat()),
        frame_by_hand(8, 7, 0, b""),
        frame_by_hand(9, 8, 1, &counters[..12]),
        frame_by_hand(10, 9, 1, words),
    ];

    let bodies = [
        (FrameKind::Add, 1, frame::encode_add(&unit, &[run])),
        (FrameKind::Remove, 1, frame::encode_gone(&[gone(reasons[0])])),
        (FrameKind::Quarantine, 3, frame::encode_gone(&[reasons[1], reasons[2], reasons[3]].map(gone))),
        (FrameKind::Seal, 1, frame::encode_seal(segment(), 20560)),
        (FrameKind::Counters, 2, frame::encode_counters(&[(1, 5), (20, u64::MAX)])),
        (FrameKind::Other(99), 1, b"later".to_vec()),
        (FrameKind::Remove, 1, frame::encode_gone(&[stretched])),
        (FrameKind::Touch, 2, frame::encode_touch(&[short[1], short[0]])),
        (FrameKind::Checkpoint, 0, Vec::new()),
        (FrameKind::Inherited, 1, frame::encode_counters(&[(1, 5)])),
        (FrameKind::Setup, 1, setup.encode()),
    ];
    let frames: Vec<Frame<'_>> = bodies
        .iter()
        .enumerate()
        .map(|(sequence, (kind, records, body))| Frame {
            process: segment().process,
            sequence: sequence as u64,
            kind: *kind,
            records: *records,
            namespace: namespace().fingerprint(),
            written_ns: 1_700_000_002,
            body,
        })
        .collect();
    let encoded: Vec<Vec<u8>> = frames.iter().map(Frame::encode).collect();
    assert_golden("frames", &encoded.concat(), &by_hand.concat());

    let bytes = golden("frames");
    let mut at = 0;
    for expected in &frames {
        let Step::Frame(frame, next) = frame::step(&bytes, at) else { panic!("no frame at {at}") };
        assert_eq!(frame, *expected);
        at = next;
        match frame.kind {
            FrameKind::Add => {
                let mut runs = Vec::new();
                assert_eq!(frame::decode_add(frame.body, |_, run| runs.push(run)).unwrap(), unit);
                assert_eq!(runs, [run]);
            }
            FrameKind::Remove => {
                let expected = if frame.sequence == 1 { gone(reasons[0]) } else { stretched };
                assert_eq!(frame::decode_gone(frame.body).unwrap(), [expected]);
            }
            FrameKind::Quarantine => {
                let read = frame::decode_gone(frame.body).unwrap();
                assert_eq!(read, [reasons[1], reasons[2], reasons[3]].map(gone));
            }
            FrameKind::Seal => assert_eq!(frame::decode_seal(frame.body).unwrap(), (segment(), 20560)),
            FrameKind::Counters => {
                assert_eq!(frame::decode_counters(frame.body).unwrap(), [(1, 5), (20, u64::MAX)]);
            }
            FrameKind::Touch => {
                assert_eq!(frame::decode_touch(frame.body).unwrap(), [short[1], short[0]]);
            }
            FrameKind::Checkpoint => assert!(frame.body.is_empty()),
            FrameKind::Inherited => assert_eq!(frame::decode_counters(frame.body).unwrap(), [(1, 5)]),
            FrameKind::Setup => assert_eq!(Setup::decode(frame.body).as_ref(), Some(&setup)),
            FrameKind::Other(code) => assert_eq!(code, 99),
        }
    }
    assert_eq!(at, bytes.len());
}

#[test]
fn the_files_in_words_are_these_bytes() {
    let root = RootDescription { uuid: "0f".repeat(16), capacity_bytes: 1 << 30, created_ns: 1_700_000_003 };
    let words = r#"{"capacity_bytes":1073741824,"created_ns":1700000003,"format":1,"uuid":"0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f","what":"root of a hicache_store page store, see docs/format.md"}"#;
    let expected = format!(
        "{{\n  \"capacity_bytes\": 1073741824,\n  \"checksum\": \"{:016x}\",\n  \"created_ns\": 1700000003,\n  \"format\": 1,\n  \"uuid\": \"0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f\",\n  \"what\": \"root of a hicache_store page store, see docs/format.md\"\n}}\n",
        checksum(words.as_bytes())
    );
    assert_golden("root.json", &root.encode(), expected.as_bytes());
    assert_eq!(RootDescription::decode(&golden("root.json")).unwrap(), RootFile::Whole(root));

    let expected = format!("41 {:016x}\n", checksum(b"41"));
    assert_golden("generation", &encode_generation(41), expected.as_bytes());
    assert_eq!(decode_generation(&golden("generation")), Some(41));
}

#[test]
fn identities_are_these_bytes() {
    assert_golden("namespace", &namespace().canonical_bytes(), &namespace_by_hand());
    assert_golden("pool", &pool().canonical_bytes(), &pool_by_hand());
    assert_eq!(golden_or("namespace-fingerprint", &namespace().fingerprint().0), namespace().fingerprint().0);
    assert_eq!(golden_or("pool-fingerprint", &pool().fingerprint().0), pool().fingerprint().0);
}

/// Another zstd may compress otherwise; what was compressed must read back.
#[test]
fn compressed_blocks_read_back() {
    let raw: Vec<u8> = (0..5001_u32).map(|at| (at / 50 + at % 2 * 90) as u8).collect();
    for (name, codec) in [("block-zstd", Codec::Zstd), ("block-zstd-planes", Codec::ZstdPlanes)] {
        let mut now = Vec::new();
        encode_block(codec, 3, &raw, &mut now).unwrap();
        let stored = golden_or(name, &now);
        assert!(stored.len() < raw.len() / 2);
        for stored in [&stored, &now] {
            let mut back = vec![0; raw.len()];
            assert!(decode_block(codec, stored, &mut back), "{name}");
            assert!(back == raw, "{name}");
        }
    }
}

fn big_pool() -> ViewPool {
    let pool = Pool::new("big", PoolKind::Indexer, DType::UInt8, None, vec![Component::per_token("x", 2048)]);
    ViewPool::new(pool.unwrap(), tile((0, 3), (0, 1)), LayoutName::PageFirstDirect)
}

fn kv(layout: LayoutName) -> ViewPool {
    ViewPool::new(kv_pool("bfloat16", 16), tile((0, 2), (0, 2)), layout)
}

/// What the fixture store holds: pool, chain, pages of it that are there, bytes.
fn contents() -> Vec<(ViewPool, &'static str, usize, Vec<u8>)> {
    let smooth = |number, len| page_bytes(number, len).iter().map(|byte| byte & 3).collect();
    vec![
        (kv(LayoutName::PageFirst), "plain", 5, page_bytes(1, 5 * 512)),
        (kv(LayoutName::PageHead), "head", 2, page_bytes(2, 2 * 512)),
        (big_pool(), "plain", 1, page_bytes(3, 24_576)),
        (kv(LayoutName::PageFirst), "squeezed", 3, smooth(4, 3 * 512)),
        (big_pool(), "squeezed", 2, smooth(5, 2 * 24_576)),
    ]
}

fn fixture_view(store: &Store, pool: &ViewPool, zstd_level: Option<i32>) -> View {
    let namespace = Namespace::new("org/fixture", "sha256:v1", 4, None).unwrap();
    store.view(namespace, vec![contiguous(pool.clone())], ViewOptions { zstd_level }).unwrap()
}

fn options(read_only: bool) -> StoreOptions {
    StoreOptions { read_only, capacity_bytes: Some(16 << 20), ..StoreOptions::default() }
}

/// A root with a closed writer, a killed one, a cleared generation and a page in quarantine.
fn write_store(target: &Path) {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let (closed, killed) =
        (Store::open(root, options(false)).unwrap(), Store::open(root, options(false)).unwrap());
    let old = fixture_view(&closed, &kv(LayoutName::PageFirst), None);
    backup(&old, &keys("cleared", 1), &Memory::of(&page_bytes(9, 512)));
    old.clear().unwrap();
    for (pool, chain, count, bytes) in contents() {
        let (store, level) = if chain == "squeezed" { (&killed, Some(3)) } else { (&closed, None) };
        let report = backup(&fixture_view(store, &pool, level), &keys(chain, count), &Memory::of(&bytes));
        assert_eq!(report.outcomes, vec![BackupOutcome::Stored; count]);
    }
    let lost = keys("lost", 1);
    let view = fixture_view(&killed, &kv(LayoutName::PageFirst), None);
    backup(&view, &lost, &Memory::of(&page_bytes(8, 512)));
    let object = object(root, &lost[0]);
    flip(&object.segment, object.payload.start, 1);
    assert_eq!(restore(&view, &lost, &Memory::canary(512)).outcomes, [RestoreOutcome::Damaged]);
    closed.close();
    let _ = std::fs::remove_dir_all(target);
    copy_tree(root, target);
}

#[test]
fn a_store_of_format_1_opens_and_gives_its_pages_back() {
    let fixture = fixtures().join("store");
    if writes_fixtures() {
        write_store(&fixture);
    }
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("root");
    copy_tree(&fixture, &root);
    let files = |root: &Path| -> Vec<(PathBuf, Vec<u8>)> {
        let names = listing(root).into_iter().map(|(path, ..)| path).filter(|path| root.join(path).is_file());
        names.map(|path| (path.clone(), std::fs::read(root.join(path)).unwrap())).collect()
    };
    let before = files(&root);
    assert!(before.iter().map(|(_, bytes)| bytes.len()).sum::<usize>() < 100 << 10);
    {
        let store = Store::open(&root, options(true)).unwrap();
        check_contents(&store);
    }
    assert_eq!(files(&root), before, "reading wrote something");
    {
        // For writing: nothing is missing, and what is said in words is said the same way today.
        let store = Store::open(&root, options(false)).unwrap();
        assert_eq!(store.capacity_bytes(), 16 << 20);
        check_contents(&store);
        for (pool, chain, count, bytes) in contents() {
            let view = fixture_view(&store, &pool, None);
            let outcomes = backup(&view, &keys(chain, count), &Memory::of(&bytes)).outcomes;
            assert_eq!(outcomes, vec![BackupOutcome::Present; count]);
        }
    }
    let after = files(&root);
    for (path, bytes) in before.iter().filter(|(path, _)| path.extension().is_some_and(|end| end != "lock")) {
        let now = after.iter().find(|(found, _)| found == path).map(|(_, bytes)| bytes);
        // What a killed writer left is sealed: that comes behind what was there.
        assert!(now.is_some_and(|now| now.starts_with(bytes)), "{} was changed", path.display());
    }

    // The segments alone say it all.
    for end in [".idx", ".json", ".lock"] {
        files_ending(&root, end).into_iter().for_each(|file| std::fs::remove_file(file).unwrap());
    }
    let store = Store::open(&root, options(false)).unwrap();
    for (pool, chain, count, bytes) in contents() {
        check(&fixture_view(&store, &pool, None), chain, count, &bytes);
    }
}

fn check(view: &View, chain: &str, count: usize, bytes: &[u8]) {
    let keys = keys(chain, count + 1);
    assert_eq!(view.match_prefix(&keys).unwrap().pages, count, "{chain}");
    let target = Memory::canary(bytes.len());
    assert_eq!(
        restore(view, &keys[..count], &target).outcomes,
        vec![RestoreOutcome::Restored; count],
        "{chain}"
    );
    assert!(target.bytes() == bytes, "{chain}");
}

fn check_contents(store: &Store) {
    for (pool, chain, count, bytes) in contents() {
        check(&fixture_view(store, &pool, None), chain, count, &bytes);
    }
    let view = fixture_view(store, &kv(LayoutName::PageFirst), None);
    assert_eq!(view.match_prefix(&keys("cleared", 1)).unwrap().pages, 0);
    let lost = view.match_prefix(&keys("lost", 1)).unwrap();
    assert_eq!(lost.limited_by.as_deref(), Some("kv: page 0 in quarantine (damaged)"));
}
