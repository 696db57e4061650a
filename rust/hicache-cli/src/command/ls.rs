//! `ls`: the namespaces of a root, the forms of one, its objects.

use std::collections::HashMap;
use std::path::PathBuf;

use clap::Args;
use hicache_core::inspect::{self, NamespaceScan, RootScan};
use hicache_core::namespace::Fingerprint;
use serde_json::{Value, json};

use crate::facts::{self, Objects};
use crate::failure::Done;
use crate::output::{Output, size, time};
use crate::values::find;

/// Lists the namespaces of a root, or the pools, forms and objects of one. Reads only.
#[derive(Args)]
pub struct Ls {
    /// Folder of the store
    root: PathBuf,
    /// Fingerprint of one namespace: list its pools and forms
    #[arg(long, value_name = "FINGERPRINT")]
    namespace: Option<Fingerprint>,
    /// List single objects
    #[arg(long)]
    objects: bool,
    /// Most objects listed, 0 for all
    #[arg(long, default_value_t = 1000, value_name = "N")]
    limit: usize,
}

impl Ls {
    pub fn run(&self, output: &mut Output<'_>) -> Done {
        let scan = inspect::scan(&self.root)?;
        let namespaces: Vec<&NamespaceScan> = match &self.namespace {
            Some(fingerprint) => vec![find(&scan, fingerprint)?],
            None => scan.namespaces.iter().collect(),
        };
        if output.is_json() {
            self.document(&scan, &namespaces, output);
        } else if self.objects {
            self.say_objects(&namespaces, output);
        } else if self.namespace.is_some() {
            namespaces.iter().for_each(|namespace| say_forms(namespace, output));
        } else {
            say_namespaces(&namespaces, output);
        }
        if !output.is_json() {
            facts::say_problems(&scan, output);
        }
        Ok(facts::verdict(&scan))
    }

    fn document(&self, scan: &RootScan, namespaces: &[&NamespaceScan], output: &mut Output<'_>) {
        let mut left = self.most();
        let list: Vec<Value> = namespaces
            .iter()
            .map(|namespace| {
                let mut value = namespace_json(namespace);
                if self.objects {
                    let objects = objects(namespace, &mut left);
                    value["objects_listed"] = objects.iter().map(Listed::to_json).collect();
                }
                value
            })
            .collect();
        let body = json!({
            "root": self.root.to_string_lossy(),
            "namespaces": list,
            "problems": facts::problems_json(scan),
        });
        output.document("ls", body);
    }

    fn most(&self) -> usize {
        if self.limit == 0 { usize::MAX } else { self.limit }
    }

    fn say_objects(&self, namespaces: &[&NamespaceScan], output: &mut Output<'_>) {
        let mut left = self.most();
        let mut rows = Vec::new();
        let mut all = 0;
        for namespace in namespaces {
            all += namespace.objects().count();
            let page_size = page_size(namespace);
            rows.extend(objects(namespace, &mut left).into_iter().map(|object| {
                vec![
                    object.key,
                    object.pool,
                    facts::tile_text(&object.form.tile, page_size),
                    object.state.to_owned(),
                    object.depth.map_or_else(|| "-".to_owned(), |depth| depth.to_string()),
                    size(object.stored_bytes),
                    time(object.written_ns),
                    object.segment,
                ]
            }));
        }
        let shown = rows.len();
        let headers = ["page key", "pool", "tile", "state", "#depth", "#stored", "written", "segment"];
        output.table(&headers, rows);
        if shown < all {
            output.words(&format!("{shown} of {all} objects shown; --limit 0 shows all"));
        }
    }
}

fn say_namespaces(namespaces: &[&NamespaceScan], output: &mut Output<'_>) {
    let rows = namespaces.iter().map(|namespace| {
        let objects = Objects::of(namespace);
        let (model, revision, page_size, salt) = match &namespace.namespace {
            Some(known) => (
                known.model().to_owned(),
                known.revision().to_owned(),
                known.page_size().to_string(),
                if known.salt().is_some() { "yes" } else { "no" },
            ),
            None => ("unknown".to_owned(), "unknown".to_owned(), "?".to_owned(), "?"),
        };
        vec![
            namespace.fingerprint.to_string(),
            model,
            revision,
            page_size,
            salt.to_owned(),
            facts::pool_names(namespace).join(" "),
            objects.live.to_string(),
            size(objects.live_bytes),
            namespace.generation.to_string(),
        ]
    });
    let headers = [
        "namespace",
        "model",
        "revision",
        "#page size",
        "salt",
        "pools",
        "#objects",
        "#stored",
        "#generation",
    ];
    output.table(&headers, rows.collect());
}

fn say_forms(namespace: &NamespaceScan, output: &mut Output<'_>) {
    let page_size = page_size(namespace);
    let row = |(form, objects, bytes): (hicache_core::format::form::Form, u64, u64)| {
        vec![
            namespace.pool_name(&form.pool),
            form.pool.to_string(),
            facts::tile_text(&form.tile, page_size),
            form.layout.name().to_owned(),
            form.codec.name().to_owned(),
            form.page_bytes.to_string(),
            objects.to_string(),
            size(bytes),
        ]
    };
    let rows = facts::forms(namespace).into_iter().map(row).collect();
    let headers = ["pool", "fingerprint", "tile", "layout", "codec", "#page bytes", "#objects", "#stored"];
    output.table(&headers, rows);
}

fn page_size(namespace: &NamespaceScan) -> Option<u32> {
    namespace.namespace.as_ref().map(hicache_core::Namespace::page_size)
}

fn namespace_json(namespace: &NamespaceScan) -> Value {
    let forms: Vec<Value> = facts::forms(namespace)
        .iter()
        .map(|(form, objects, bytes)| {
            json!({
                "pool": namespace.pool_name(&form.pool),
                "pool_fingerprint": form.pool.to_string(),
                "tile": facts::tile_json(&form.tile),
                "layout": form.layout.name(),
                "codec": form.codec.name(),
                "page_bytes": form.page_bytes,
                "block_bytes": form.block_bytes,
                "objects": objects,
                "stored_bytes": bytes,
            })
        })
        .collect();
    let pools: Vec<Value> = namespace
        .pools
        .iter()
        .map(|(fingerprint, pool)| json!({"fingerprint": fingerprint.to_string(), "pool": pool.to_json()}))
        .collect();
    json!({
        "fingerprint": namespace.fingerprint.to_string(),
        "namespace": namespace.namespace.as_ref().map(hicache_core::Namespace::to_json),
        "is_unversioned": namespace.namespace.as_ref().map(hicache_core::Namespace::is_unversioned),
        "generation": namespace.generation,
        "segments": namespace.segments.len(),
        "objects": Objects::of(namespace).to_json(),
        "pools": pools,
        "forms": forms,
    })
}

/// One object of the list.
struct Listed {
    key: String,
    pool: String,
    form: hicache_core::format::form::Form,
    state: &'static str,
    depth: Option<u64>,
    stored_bytes: u64,
    written_ns: u64,
    segment: String,
    entry_offset: u64,
}

impl Listed {
    fn to_json(&self) -> Value {
        json!({
            "key": self.key,
            "pool": self.pool,
            "tile": facts::tile_json(&self.form.tile),
            "layout": self.form.layout.name(),
            "codec": self.form.codec.name(),
            "state": self.state,
            "depth": self.depth,
            "stored_bytes": self.stored_bytes,
            "written_ns": self.written_ns,
            "segment": self.segment,
            "entry_offset": self.entry_offset,
        })
    }
}

/// Up to `left` objects, whole keys read from their directory entries where those can be read.
fn objects(namespace: &NamespaceScan, left: &mut usize) -> Vec<Listed> {
    let mut files = HashMap::new();
    let mut listed = Vec::new();
    for object in namespace.objects().take(*left) {
        let segment = object.segment();
        if files.len() > 64 {
            files.clear(); // descriptors are few
        }
        let file = files.entry(segment).or_insert_with(|| namespace.open_segment(segment).ok());
        let entry = file.as_ref().and_then(|file| object.read_entry(namespace, file).ok());
        listed.push(Listed {
            key: entry.as_ref().map_or_else(|| short(&object.key), |entry| entry.key.to_string()),
            pool: namespace.pool_name(&object.form.pool),
            form: *object.form,
            state: object.state.name(),
            depth: object.depth(),
            stored_bytes: entry.map_or_else(|| object.stored_bytes(), |entry| entry.stored_bytes()),
            written_ns: object.written_ns(),
            segment: segment.to_string(),
            entry_offset: object.entry_offset(),
        });
    }
    *left -= listed.len();
    listed
}

/// The leading half of a key, as the journals keep it.
fn short(key: &[u8; 16]) -> String {
    let digits: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{digits}..")
}
