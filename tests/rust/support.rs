//! What the store's tests share: a tiny deployment, pages whose bytes are told by their number, and a canary.

use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hicache_core::format::directory;
use hicache_core::format::form::Form;
use hicache_core::format::frame::{FrameKind, Step, decode_add, step};
use hicache_core::store::counters::Counter;
use hicache_core::store::io::{IoCall, IoHook};
use hicache_core::{
    BackupReport, ChainStart, DType, LayoutName, Namespace, PageKey, Pool, PoolKind, PoolMemory,
    RestoreOptions, RestoreReport, Span, Store, StoreOptions, Tile, View, ViewOptions, ViewPool,
};
use hicache_sys::Region;

/// Fills memory that a restore must not touch.
pub const CANARY: u8 = 0xa5;

/// Pages of 4 tokens, as in the field cases: 2 layers, 2 heads, 8 elements, K and V, 16 bit: 512 bytes.
pub fn namespace(revision: &str) -> Namespace {
    Namespace::new("org/tiny", revision, 4, None).unwrap()
}

/// The `kv` pool of the tiny deployment, with rows of `row_bytes` per token, layer and head.
pub fn kv_pool(dtype: &str, row_bytes: u32) -> Pool {
    let components = ["k", "v"].map(|name| hicache_core::Component {
        dtype: None,
        ..hicache_core::Component::per_token(name, row_bytes)
    });
    Pool::new("kv", PoolKind::Kv, DType::parse(dtype).unwrap(), None, components.to_vec()).unwrap()
}

/// A rectangle of whole pages of 4 tokens.
pub fn tile(layers: (u32, u32), heads: (u32, u32)) -> Tile {
    let span = |(start, end)| Span { start, end };
    Tile::whole_page(span(layers), span(heads), 4).unwrap()
}

/// The tiny deployment's one pool.
pub fn tiny() -> ViewPool {
    ViewPool::new(kv_pool("bfloat16", 16), tile((0, 2), (0, 2)), LayoutName::PageFirst)
}

/// The same pool in host memory whose pages are each in one piece, component after component.
pub fn contiguous(mut pool: ViewPool) -> ViewPool {
    pool.packed = Some((0, pool.pool.page_bytes(&pool.tile).unwrap()));
    pool
}

/// A store in a folder that goes with the test.
pub fn open(root: &std::path::Path) -> Store {
    Store::open(root, StoreOptions { capacity_bytes: Some(64 << 20), ..StoreOptions::default() }).unwrap()
}

/// A view of the tiny deployment at revision `r1`.
pub fn tiny_view(store: &Store) -> View {
    store.view(namespace("r1"), vec![tiny()], ViewOptions::default()).unwrap()
}

/// The first `count` keys of a chain; chains of different names share none.
pub fn keys(chain: &str, count: usize) -> Vec<PageKey> {
    let seed = hicache_core::chain_seed(Some(chain), None);
    let tokens: Vec<u64> = (0..count as u64).collect();
    hicache_core::page_keys(&tokens, 1, seed.as_ref())
}

/// Bytes of page `number`: random looking, the same on every run.
pub fn page_bytes(number: u64, len: usize) -> Vec<u8> {
    let mut state = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let words = (0..len.div_ceil(8)).flat_map(|_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.wrapping_mul(0x2545_f491_4f6c_dd1d).to_le_bytes()
    });
    words.take(len).collect()
}

/// Host memory of `slots` pages for a page-contiguous layout with one component after the other in each page.
pub struct Memory {
    /// The memory.
    pub region: Arc<Region>,
}

impl Memory {
    /// `bytes` of canary.
    pub fn canary(bytes: usize) -> Memory {
        let region = Region::owned(bytes);
        region.copy_in(0, &vec![CANARY; bytes]).unwrap();
        Memory { region: Arc::new(region) }
    }

    /// These bytes.
    pub fn of(bytes: &[u8]) -> Memory {
        let memory = Memory::canary(bytes.len());
        memory.region.copy_in(0, bytes).unwrap();
        memory
    }

    /// All bytes.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = vec![0; self.region.len()];
        self.region.copy_out(0, &mut out).unwrap();
        out
    }
}

/// One pool's memory for a call, page `i` in slot `i`.
pub fn lend<'a>(memory: &'a Memory, slots: &'a [i64]) -> Vec<PoolMemory<'a>> {
    vec![PoolMemory { regions: vec![&memory.region], slots }]
}

/// Backs up `keys` from slots 0, 1, ...
pub fn backup(view: &View, keys: &[PageKey], memory: &Memory) -> BackupReport {
    let slots: Vec<i64> = (0..keys.len() as i64).collect();
    view.backup(keys, lend(memory, &slots), ChainStart { parent: None, depth: Some(0) }).unwrap()
}

/// Restores `keys` to slots 0, 1, ...
pub fn restore(view: &View, keys: &[PageKey], memory: &Memory) -> RestoreReport {
    let slots: Vec<i64> = (0..keys.len() as i64).collect();
    view.restore(keys, lend(memory, &slots), RestoreOptions::default()).unwrap()
}

/// A folder in memory where the machine has one, so that a test of many stores does not wait for a disk.
pub fn fast_folder() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap()
}

/// Every file and folder below `root`, links not followed: path from `root`, length, time of change. Sorted.
pub fn listing(root: &Path) -> Vec<(PathBuf, u64, std::time::SystemTime)> {
    let mut found = Vec::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let metadata = std::fs::symlink_metadata(&path).unwrap();
            if metadata.is_dir() {
                folders.push(path.clone());
            }
            let name = path.strip_prefix(root).unwrap().to_owned();
            found.push((name, metadata.len(), metadata.modified().unwrap()));
        }
    }
    found.sort();
    found
}

/// Files below `root` whose name ends so.
pub fn files_ending(root: &Path, end: &str) -> Vec<PathBuf> {
    let names = listing(root).into_iter().map(|(path, ..)| root.join(path));
    names.filter(|path| path.to_string_lossy().ends_with(end) && path.is_file()).collect()
}

/// Copies a folder with all that is in it; locks held on the files are not copied, as after a kill.
pub fn copy_tree(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for (path, ..) in listing(from) {
        let (from, to) = (from.join(&path), to.join(&path));
        if from.is_dir() {
            std::fs::create_dir_all(to).unwrap();
        } else {
            std::fs::create_dir_all(to.parent().unwrap()).unwrap();
            std::fs::copy(from, to).unwrap();
        }
    }
}

/// Changes one byte of a file in place.
pub fn flip(path: &Path, at: u64, bit: u8) {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ (1 << bit)], at).unwrap();
}

/// A stored object and where it lies.
#[derive(Debug, Clone)]
pub struct Object {
    /// Its segment.
    pub segment: PathBuf,
    /// Its key.
    pub key: PageKey,
    /// Its form.
    pub form: Form,
    /// Bytes of its directory entry in the segment.
    pub entry: Range<u64>,
    /// Bytes of its payload in the segment.
    pub payload: Range<u64>,
}

/// Every object in the segments of a root, by the directories that the journals name.
pub fn objects(root: &Path) -> Vec<Object> {
    let mut found = Vec::new();
    for journal in files_ending(root, ".idx") {
        let bytes = std::fs::read(journal).unwrap();
        let mut at = 0;
        while let Step::Frame(frame, next) = step(&bytes, at) {
            at = next;
            if frame.kind != FrameKind::Add {
                continue;
            }
            let unit = decode_add(frame.body, |_, _| ()).unwrap();
            let folder = root.join("ns").join(frame.namespace.to_string());
            let segment = folder.join(unit.segment.file_name());
            let Ok(bytes) = std::fs::read(&segment) else { continue };
            let (start, len) = (unit.directory_offset as usize, unit.directory_bytes as usize);
            let directory = directory::decode(&bytes[start..start + len]).unwrap();
            for run in directory.runs {
                let entry_bytes = directory::Entry::encoded_bytes(&run.run.form);
                for (ordinal, entry) in run.entries.into_iter().enumerate() {
                    let entry = entry.expect("a whole entry");
                    let entry_at = unit.directory_offset + run.entries_offset + ordinal as u64 * entry_bytes;
                    let payload_at = unit.unit_offset + entry.payload_offset;
                    found.push(Object {
                        segment: segment.clone(),
                        key: entry.key,
                        form: run.run.form,
                        entry: entry_at..entry_at + entry_bytes,
                        payload: payload_at..payload_at + entry.stored_bytes(),
                    });
                }
            }
        }
    }
    found
}

/// The one object of this key.
pub fn object(root: &Path, key: &PageKey) -> Object {
    let mut found: Vec<Object> = objects(root).into_iter().filter(|object| object.key == *key).collect();
    assert_eq!(found.len(), 1, "objects of {key}");
    found.remove(0)
}

/// A fault hook made of a function.
pub struct Hook<F>(pub F);

impl<F: Fn(IoCall<'_>) -> io::Result<()> + Send + Sync> IoHook for Hook<F> {
    fn before(&self, call: IoCall<'_>) -> io::Result<()> {
        (self.0)(call)
    }
}

/// Options of a small store with a fault hook.
pub fn hooked(hook: impl Fn(IoCall<'_>) -> io::Result<()> + Send + Sync + 'static) -> StoreOptions {
    StoreOptions {
        capacity_bytes: Some(64 << 20),
        io_threads: Some(2),
        io_hook: Some(Arc::new(Hook(hook))),
        ..StoreOptions::default()
    }
}

/// An error of the system with this number.
pub fn errno(number: i32) -> io::Error {
    io::Error::from_raw_os_error(number)
}

/// Total of a counter.
pub fn counter(store: &Store, wanted: Counter) -> u64 {
    store.counters().into_iter().find(|(counter, _)| *counter == wanted).unwrap().1
}

/// Messages of the warnings that wait.
pub fn warnings(store: &Store) -> Vec<String> {
    let notices = store.drain_notices().into_iter();
    let is_warning = |level| level == hicache_core::store::notices::Level::Warning;
    notices.filter(|notice| is_warning(notice.level)).map(|notice| notice.message).collect()
}
