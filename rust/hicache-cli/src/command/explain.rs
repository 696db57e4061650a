//! `explain`: why pages are found or not, and in which fields two identities differ.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::Read;
use std::path::{Path, PathBuf};

use clap::Args;
use hicache_core::inspect::{NamespaceScan, ObjectRef, ObjectState};
use hicache_core::namespace::Fingerprint;
use hicache_core::tile::{Tile, cover};
use hicache_core::{Namespace, PageKey};
use serde_json::{Value, json};

use crate::command::differ;
use crate::failure::{Done, Failure};
use crate::output::{Output, size, time};
use crate::values::{find, scan_namespace};
use crate::{FINE, PROBLEMS, facts};

/// Longest file of keys that is read, in bytes.
const MAX_KEYS_FILE_BYTES: u64 = 64 << 20;

/// Most tiles of one pool that pages are checked against.
const MAX_TILES: usize = 64;

/// Says where pages are, or why they are not found; or in which fields two identities differ. Reads only.
///
/// With --namespace and keys: for each page and pool, the objects that hold it or the reason that none does, and
/// how long a leading prefix can be restored. With --spec twice: the fields that differ, and exit code 1 if any.
#[derive(Args)]
pub struct Explain {
    /// Folder of the store
    #[arg(required_unless_present = "spec")]
    root: Option<PathBuf>,
    /// Fingerprint of the namespace
    #[arg(long, value_name = "FINGERPRINT", conflicts_with = "spec")]
    namespace: Option<Fingerprint>,
    /// Page key in hex, in chain order; may be repeated
    #[arg(long = "key", value_name = "HEX", conflicts_with = "spec")]
    keys: Vec<PageKey>,
    /// File with one page key in hex a line
    #[arg(long, value_name = "FILE", conflicts_with = "spec")]
    keys_file: Option<PathBuf>,
    /// Identity to compare: a JSON file, ROOT:FINGERPRINT, or a fingerprint in ROOT; given twice
    #[arg(long, value_name = "SPEC")]
    spec: Vec<String>,
}

impl Explain {
    pub fn run(&self, output: &mut Output<'_>) -> Done {
        match (&self.spec[..], &self.root) {
            ([left, right], root) => compare(left, right, root.as_deref(), output),
            ([], Some(root)) => self.pages(root, output),
            _ => Err(Failure::new(format!("expected --spec twice, found it {} times", self.spec.len()))),
        }
    }

    fn pages(&self, root: &Path, output: &mut Output<'_>) -> Done {
        let Some(fingerprint) = &self.namespace else {
            return Err(Failure::new("expected --namespace with the fingerprint of one, see `ls`"));
        };
        let keys = self.keys()?;
        let scan = scan_namespace(root, fingerprint)?;
        let namespace = find(&scan, fingerprint)?;
        let pools = pools(namespace);
        let stored = stored(namespace, &keys);
        let pages: Vec<Page> = keys
            .iter()
            .map(|key| Page::new(*key, &pools, stored.get(key).map(Vec::as_slice).unwrap_or_default()))
            .collect();
        match output.is_json() {
            true => output.document("explain", document(root, namespace, &pools, &pages)),
            false => {
                say(namespace, &pools, &pages, output);
                facts::say_problems(&scan, output);
            }
        }
        Ok(FINE)
    }

    fn keys(&self) -> Result<Vec<PageKey>, Failure> {
        let mut keys = self.keys.clone();
        if let Some(path) = &self.keys_file {
            let text = read_text(path, MAX_KEYS_FILE_BYTES)?;
            for (number, line) in text.lines().map(str::trim).enumerate().filter(|(_, line)| !line.is_empty())
            {
                let key = line.parse().map_err(|error: hicache_core::Error| {
                    Failure::new(format!("line {} of {}: {error}", number + 1, path.display()))
                })?;
                keys.push(key);
            }
        }
        if keys.is_empty() {
            return Err(Failure::new("expected page keys with --key or --keys-file, found none"));
        }
        Ok(keys)
    }
}

/// Reads a file of text, at most `most` bytes.
pub fn read_text(path: &Path, most: u64) -> Result<String, Failure> {
    let mut text = String::new();
    std::fs::File::open(path)
        .and_then(|file| file.take(most + 1).read_to_string(&mut text))
        .map_err(|error| Failure::io("cannot read", path, &error))?;
    if text.len() as u64 > most {
        return Err(Failure::new(format!("expected at most {most} bytes in {}, found more", path.display())));
    }
    Ok(text)
}

fn compare(left: &str, right: &str, root: Option<&Path>, output: &mut Output<'_>) -> Done {
    let differences = differ::differences(&differ::read(left, root)?, &differ::read(right, root)?);
    if output.is_json() {
        let list: Vec<Value> = differences
            .iter()
            .map(|found| json!({"field": found.field, "left": found.left, "right": found.right}))
            .collect();
        output.document("explain", json!({"is_equal": differences.is_empty(), "differences": list}));
    } else if differences.is_empty() {
        output.line("equal: the two share their pages");
    } else {
        differences.iter().for_each(|found| output.line(&found.to_string()));
    }
    Ok(if differences.is_empty() { FINE } else { PROBLEMS })
}

/// The pools of a namespace, each with the tiles under which it is stored.
fn pools(namespace: &NamespaceScan) -> BTreeMap<Fingerprint, Vec<Tile>> {
    let mut tiles: BTreeMap<Fingerprint, BTreeSet<Tile>> =
        namespace.pools.keys().map(|pool| (*pool, BTreeSet::new())).collect();
    for object in namespace.objects() {
        let known = tiles.entry(object.form.pool).or_default();
        if object.state == ObjectState::Live && known.len() < MAX_TILES {
            known.insert(object.form.tile);
        }
    }
    tiles.into_iter().map(|(pool, tiles)| (pool, tiles.into_iter().collect())).collect()
}

/// An object of an asked page.
struct Stored<'a> {
    object: ObjectRef<'a>,
    /// Whether the directory entry could be read, and is of the page.
    is_confirmed: bool,
    stored_bytes: u64,
}

/// The objects of the asked pages, whole keys compared where the directory entry can be read.
fn stored<'a>(namespace: &'a NamespaceScan, keys: &[PageKey]) -> HashMap<PageKey, Vec<Stored<'a>>> {
    let mut asked: HashMap<&[u8], BTreeSet<PageKey>> = HashMap::new();
    for key in keys {
        asked.entry(&key.0[..16]).or_default().insert(*key);
    }
    let mut found: HashMap<PageKey, Vec<Stored<'a>>> = HashMap::new();
    let mut file = None;
    for object in namespace.objects() {
        let Some(keys) = asked.get(&object.key[..]) else { continue };
        let segment = object.segment();
        if file.as_ref().is_none_or(|(open, _)| *open != segment) {
            file = Some((segment, namespace.open_segment(segment).ok()));
        }
        let open = file.as_ref().and_then(|(_, file)| file.as_ref());
        let entry = open.and_then(|file| object.read_entry(namespace, file).ok());
        for key in keys.iter().filter(|key| entry.as_ref().is_none_or(|entry| entry.key == **key)) {
            found.entry(*key).or_default().push(Stored {
                object,
                is_confirmed: entry.is_some(),
                stored_bytes: entry
                    .as_ref()
                    .map_or_else(|| object.stored_bytes(), |entry| entry.stored_bytes()),
            });
        }
    }
    found
}

/// One asked page.
struct Page<'a> {
    key: PageKey,
    pools: Vec<PagePool<'a>>,
}

/// One pool of a page.
struct PagePool<'a> {
    pool: Fingerprint,
    objects: Vec<&'a Stored<'a>>,
    /// Tiles of the pool that can, and cannot, be put together from what is there of this page.
    served: Vec<Tile>,
    missing: Vec<Tile>,
}

impl<'a> Page<'a> {
    fn new(key: PageKey, pools: &BTreeMap<Fingerprint, Vec<Tile>>, stored: &'a [Stored<'a>]) -> Self {
        let of_pool = |(&pool, tiles): (&Fingerprint, &Vec<Tile>)| {
            let objects: Vec<_> = stored.iter().filter(|stored| stored.object.form.pool == pool).collect();
            let live: Vec<Tile> = objects
                .iter()
                .filter(|stored| stored.object.state == ObjectState::Live)
                .map(|stored| stored.object.form.tile)
                .collect();
            let (served, missing) = tiles.iter().partition(|tile| cover(tile, &live).is_some());
            PagePool { pool, objects, served, missing }
        };
        Page { key, pools: pools.iter().map(of_pool).collect() }
    }
}

impl PagePool<'_> {
    /// What a reader meets, in few words.
    fn status(&self) -> &'static str {
        let last = |wanted: fn(&ObjectState) -> bool| {
            self.objects.iter().rev().map(|stored| stored.object.state).find(wanted)
        };
        if last(|state| *state == ObjectState::Live).is_some() {
            return if self.missing.is_empty() { "present" } else { "partial" };
        }
        // What happened last; a generation that was cleared says less than what happened since.
        last(|state| *state != ObjectState::Cleared)
            .or_else(|| last(|_| true))
            .map_or("never stored here", ObjectState::name)
    }
}

/// Leading pages of which `tile` of `pool` can be restored.
fn prefix(pages: &[Page<'_>], pool: &Fingerprint, tile: &Tile) -> usize {
    let serves =
        |page: &&Page<'_>| page.pools.iter().any(|found| found.pool == *pool && found.served.contains(tile));
    pages.iter().take_while(serves).count()
}

fn document(
    root: &Path,
    namespace: &NamespaceScan,
    pools: &BTreeMap<Fingerprint, Vec<Tile>>,
    pages: &[Page<'_>],
) -> Value {
    let prefixes: Vec<Value> = pools
        .iter()
        .map(|(pool, tiles)| {
            let tiles: Vec<(usize, &Tile)> =
                tiles.iter().map(|tile| (prefix(pages, pool, tile), tile)).collect();
            json!({
                "pool": namespace.pool_name(pool),
                "pool_fingerprint": pool.to_string(),
                "prefix_pages": tiles.iter().map(|(pages, _)| *pages).min().unwrap_or_default(),
                "tiles": tiles
                    .iter()
                    .map(|(pages, tile)| json!({"tile": facts::tile_json(tile), "prefix_pages": pages}))
                    .collect::<Vec<_>>(),
            })
        })
        .collect();
    json!({
        "root": root.to_string_lossy(),
        "namespace": namespace.fingerprint.to_string(),
        "identity": namespace.namespace.as_ref().map(Namespace::to_json),
        "prefixes": prefixes,
        "pages": pages.iter().map(|page| page_json(namespace, page)).collect::<Vec<_>>(),
    })
}

fn page_json(namespace: &NamespaceScan, page: &Page<'_>) -> Value {
    let pools: Vec<Value> = page
        .pools
        .iter()
        .map(|found| {
            json!({
                "pool": namespace.pool_name(&found.pool),
                "pool_fingerprint": found.pool.to_string(),
                "status": found.status(),
                "objects": found.objects.iter().map(|stored| stored_json(stored)).collect::<Vec<_>>(),
                "missing_tiles": found.missing.iter().map(facts::tile_json).collect::<Vec<_>>(),
            })
        })
        .collect();
    json!({"key": page.key.to_string(), "pools": pools})
}

fn stored_json(stored: &Stored<'_>) -> Value {
    let object = &stored.object;
    json!({
        "state": object.state.name(),
        "tile": facts::tile_json(&object.form.tile),
        "layout": object.form.layout.name(),
        "codec": object.form.codec.name(),
        "segment": object.segment().to_string(),
        "entry_offset": object.entry_offset(),
        "entry_is_readable": stored.is_confirmed,
        "depth": object.depth(),
        "written_ns": object.written_ns(),
        "stored_bytes": stored.stored_bytes,
    })
}

fn say(
    namespace: &NamespaceScan,
    pools: &BTreeMap<Fingerprint, Vec<Tile>>,
    pages: &[Page<'_>],
    output: &mut Output<'_>,
) {
    let page_size = namespace.namespace.as_ref().map(Namespace::page_size);
    if let Some(identity) = &namespace.namespace {
        let (model, revision) = (identity.model(), identity.revision());
        output.line(&format!("namespace {}: {model} at revision {revision}", namespace.fingerprint));
    }
    for (pool, tiles) in pools {
        let name = namespace.pool_name(pool);
        if tiles.is_empty() {
            output.line(&format!("pool {name}: nothing stored"));
        }
        for tile in tiles {
            let leading = prefix(pages, pool, tile);
            let tile = facts::tile_text(tile, page_size);
            output.line(&format!("pool {name}, {tile}: {leading} of {} leading pages", pages.len()));
        }
    }
    let mut rows = Vec::new();
    for (number, page) in pages.iter().enumerate() {
        for found in &page.pools {
            let name = namespace.pool_name(&found.pool);
            let row = |what: String, details: String| {
                vec![number.to_string(), page.key.to_string(), name.clone(), what, details]
            };
            if found.status() == "partial" {
                let missing: Vec<String> =
                    found.missing.iter().map(|tile| facts::tile_text(tile, page_size)).collect();
                rows.push(row("partial".to_owned(), format!("not enough for {}", missing.join("; "))));
            }
            rows.extend(
                found
                    .objects
                    .iter()
                    .map(|stored| row(stored.object.state.name().to_owned(), details(stored, page_size))),
            );
            if found.objects.is_empty() {
                rows.push(row(found.status().to_owned(), String::new()));
            }
        }
    }
    output.table(&["#page", "key", "pool", "state", "where"], rows);
}

fn details(stored: &Stored<'_>, page_size: Option<u32>) -> String {
    let object = &stored.object;
    let depth = object.depth().map_or_else(|| "unknown".to_owned(), |depth| depth.to_string());
    let entry = if stored.is_confirmed { "" } else { ", entry unreadable" };
    format!(
        "{}, {}, codec {}, {}, depth {depth}, written {}, {}{entry}",
        facts::tile_text(&object.form.tile, page_size),
        object.form.layout.name(),
        object.form.codec.name(),
        size(stored.stored_bytes),
        time(object.written_ns()),
        object.segment(),
    )
}
