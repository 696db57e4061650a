//! The options of the SGLang storage backend, as the engine hands them over: one JSON object.
//!
//! The backend and `hicache-store sglang-config` read them here, so that what the tool accepts is what the engine
//! starts with. `docs/sglang.md` says what each one does.

use std::net::IpAddr;

use hicache_core::store::options::MIN_CAPACITY_BYTES;
use serde_json::{Map, Value, json};

use crate::values::parse_size;

/// What a value may be.
enum Kind {
    Text,
    Flag,
    /// Bytes, or text such as "500GiB", at least so many.
    Size(u64),
    Integer(u64, u64),
    Number(f64, f64),
    OneOf(&'static [&'static str]),
    Codec,
    Metrics,
}

/// One of the backend's own options.
struct Known {
    name: &'static str,
    kind: Kind,
    default: fn() -> Value,
}

const fn option(name: &'static str, kind: Kind) -> Known {
    Known { name, kind, default: || Value::Null }
}

const fn option_or(name: &'static str, kind: Kind, default: fn() -> Value) -> Known {
    Known { name, kind, default }
}

/// The option without which there is no store.
pub const PATH: &str = "path";

const OPTIONS: [Known; 20] = [
    option(PATH, Kind::Text),
    option("capacity", Kind::Size(MIN_CAPACITY_BYTES)),
    option("free_space_floor", Kind::Size(0)),
    option("time_to_live", Kind::Number(1.0, 1e10)),
    option("model", Kind::Text),
    option("revision", Kind::Text),
    option("salt", Kind::Text),
    option("model_path", Kind::Text),
    option("total_layers", Kind::Integer(1, 65_536)),
    option("total_kv_heads", Kind::Integer(1, 65_536)),
    option("cp_kind", Kind::OneOf(&["sharded", "replicated"])),
    option_or("codec", Kind::Codec, || json!("none")),
    option_or("durable", Kind::Flag, || json!(false)),
    option_or("verify", Kind::Flag, || json!(true)),
    option_or("io_mode", Kind::OneOf(&["auto", "buffered", "direct"]), || json!("auto")),
    option("io_threads", Kind::Integer(1, 256)),
    // The engine gives its threads 10 s to end.
    option_or("deadline", Kind::Number(0.1, 9.0), || json!(5.0)),
    option_or("bounce", Kind::OneOf(&["auto", "always", "never"]), || json!("auto")),
    option_or("detect_conflicts", Kind::Flag, || json!(false)),
    option("metrics", Kind::Metrics),
];

/// What tells the engine which class to load.
pub const LOADER: [(&str, &str); 3] = [
    ("backend_name", "hicache_store"),
    ("module_path", "hicache_store.sglang"),
    ("class_name", "HiCacheStoreBackend"),
];

/// Asks the engine to hand over its host pool's own memory.
pub const INTERFACE: &str = "interface_v1";
/// Asks the engine to say which pages come before those of a call.
pub const PREFIX_KEYS: &str = "hicache_storage_pass_prefix_keys";

/// What the engine itself reads from the same object (SGLang 0.5.23).
const OF_THE_ENGINE: [&str; 8] = [
    INTERFACE,
    PREFIX_KEYS,
    "allocator",
    "tp_lcm_size",
    "file_storage_path",
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
];

/// The options in `text`, each with its default where it is not given, and `interface_v1` as true or false.
///
/// # Errors
/// One sentence that names the option, what was expected and what was found; an unknown one with the nearest known.
pub fn parse(text: &str) -> Result<Map<String, Value>, String> {
    let given = object(text)?;
    for name in given.keys() {
        if !is_known(name) {
            return Err(unknown(name));
        }
    }
    let mut options = Map::new();
    for known in &OPTIONS {
        let value = match given.get(known.name) {
            None | Some(Value::Null) => (known.default)(),
            Some(value) => {
                known.kind.check(value).map_err(|expected| {
                    format!("expected {expected} in the option {:?}, found {value}", known.name)
                })?;
                value.clone()
            }
        };
        options.insert(known.name.into(), value);
    }
    if options[PATH].is_null() {
        return Err("expected the option \"path\", the folder of the root, found none".into());
    }
    options.insert(INTERFACE.into(), json!(given.get(INTERFACE).is_some_and(is_truthy)));
    Ok(options)
}

/// What an engine that starts with these options would do worse than it could, or not do at all. Sentences.
///
/// # Errors
/// As for [`parse`].
pub fn advice(text: &str) -> Result<Vec<String>, String> {
    parse(text)?;
    let given = object(text)?;
    let mut advice = Vec::new();
    for (name, value) in LOADER {
        if given.get(name).and_then(Value::as_str).is_none_or(|text| name != "backend_name" && text != value)
        {
            advice.push(format!("the engine does not load the backend without {name:?}: {value:?}"));
        }
    }
    if !given.get(INTERFACE).is_some_and(is_truthy) {
        advice.push(format!("each page is copied twice more without {INTERFACE:?}: true"));
    }
    if !given.get(PREFIX_KEYS).is_some_and(is_truthy) {
        advice
            .push(format!("which page follows which is guessed from look-ups without {PREFIX_KEYS:?}: true"));
    }
    Ok(advice)
}

fn object(text: &str) -> Result<Map<String, Value>, String> {
    match serde_json::from_str(text) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(other) => Err(format!("expected a JSON object of options, found {other}")),
        Err(error) => Err(format!("expected a JSON object of options: {error}")),
    }
}

fn names() -> impl Iterator<Item = &'static str> {
    let own = OPTIONS.iter().map(|known| known.name);
    own.chain(LOADER.map(|(name, _)| name)).chain(OF_THE_ENGINE)
}

fn is_known(name: &str) -> bool {
    names().any(|known| known == name)
}

fn unknown(name: &str) -> String {
    let likeness = |known: &&str| strsim::jaro_winkler(known, name);
    let nearest = names().max_by(|a, b| likeness(a).total_cmp(&likeness(b))).unwrap_or(PATH);
    format!("expected a known option, found {name:?}; did you mean {nearest:?}?")
}

/// As Python sees it, which reads the engine's own flags.
fn is_truthy(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Bool(flag) => *flag,
        Value::Number(number) => number.as_f64() != Some(0.0),
        Value::String(text) => !text.is_empty(),
        Value::Array(values) => !values.is_empty(),
        Value::Object(fields) => !fields.is_empty(),
    }
}

impl Kind {
    /// What was expected, if `value` is not that.
    fn check(&self, value: &Value) -> Result<(), String> {
        let (is_fine, expected) = match self {
            Kind::Text => (value.as_str().is_some_and(|text| !text.is_empty()), "text".into()),
            Kind::Flag => (value.is_boolean(), "true or false".into()),
            Kind::Size(least) => {
                let size = value.as_u64().or_else(|| parse_size(value.as_str()?).ok());
                let expected = format!("bytes, or text such as \"500GiB\", of at least {least} bytes");
                (size.is_some_and(|size| size >= *least), expected)
            }
            Kind::Integer(least, most) => {
                let is_fine = value.as_u64().is_some_and(|number| (*least..=*most).contains(&number));
                (is_fine, format!("an integer from {least} to {most}"))
            }
            Kind::Number(least, most) => {
                let is_fine = value.as_f64().is_some_and(|number| (*least..=*most).contains(&number));
                (is_fine, format!("a number from {least} to {most}"))
            }
            Kind::OneOf(words) => {
                let is_fine = value.as_str().is_some_and(|word| words.contains(&word));
                (is_fine, any_of(words))
            }
            Kind::Codec => (
                value.as_str().is_some_and(is_codec),
                "\"none\", \"zstd\" or \"zstd:1\" to \"zstd:22\"".into(),
            ),
            Kind::Metrics => return check_metrics(value),
        };
        if is_fine { Ok(()) } else { Err(expected) }
    }
}

/// "a", "b" or "c".
fn any_of(words: &[&str]) -> String {
    let quoted: Vec<String> = words.iter().map(|word| format!("{word:?}")).collect();
    match quoted.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
        _ => quoted.concat(),
    }
}

fn is_codec(text: &str) -> bool {
    let level = text.strip_prefix("zstd:").and_then(|level| level.parse::<u8>().ok());
    matches!(text, "none" | "zstd") || level.is_some_and(|level| (1..=22).contains(&level))
}

fn check_metrics(value: &Value) -> Result<(), String> {
    let expected = "{\"textfile\": PATH}, or {\"port\": N} with a \"host\" of this machine alone";
    let Some(fields) = value.as_object() else { return Err(expected.into()) };
    let is_fine = |(name, value): (&String, &Value)| match name.as_str() {
        "textfile" => value.as_str().is_some_and(|text| !text.is_empty()),
        "port" => value.as_u64().is_some_and(|port| (1..=65_535).contains(&port)),
        "host" => value.as_str().is_some_and(is_loopback) && fields.contains_key("port"),
        _ => false,
    };
    let one = fields.contains_key("textfile") != fields.contains_key("port");
    if one && fields.iter().all(is_fine) { Ok(()) } else { Err(expected.into()) }
}

fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}
