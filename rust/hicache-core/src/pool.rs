//! Pools: what a page of one kind of state consists of, with an identity of its own on top of the namespace.
//!
//! Two deployments share exactly the pools that they have in common. The description lists every buffer of
//! a page, scales included, and every byte count is computed from that list.

use crate::canonical::{
    Differences, Fields, Reader, Writer, check_schema_version, check_text, optional_text,
};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::tile::Tile;
use serde_json::{Value, json};
use std::fmt;

pub use crate::canonical::{Difference, Fingerprint};

const TAG: &[u8] = b"hicache-pool";
const FIELDS: [&str; 6] = ["schema_version", "name", "kind", "dtype", "row_format", "components"];
const COMPONENT_FIELDS: [&str; 4] = ["name", "row_bytes", "unit", "dtype"];

/// What sort of state a pool holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PoolKind {
    /// Keys and values by head.
    Kv,
    /// Latent rows (MLA), equal on all tensor-parallel ranks.
    Latent,
    /// Rows or page blobs of a sparse-attention indexer.
    Indexer,
    /// Recurrent or convolution state, one for each page.
    State,
    /// Keys and values of sliding-window layers.
    Swa,
    /// Keys and values of a draft model.
    Draft,
    /// Sliding-window keys and values of a draft model.
    DraftSwa,
    /// Indexer rows of a draft model.
    DraftIndexer,
}

impl PoolKind {
    /// Every kind.
    pub const ALL: [PoolKind; 8] = [
        PoolKind::Kv,
        PoolKind::Latent,
        PoolKind::Indexer,
        PoolKind::State,
        PoolKind::Swa,
        PoolKind::Draft,
        PoolKind::DraftSwa,
        PoolKind::DraftIndexer,
    ];

    /// Reads a name.
    ///
    /// # Errors
    ///
    /// `Config` for an unknown name.
    pub fn parse(text: &str) -> Result<PoolKind> {
        PoolKind::ALL.into_iter().find(|kind| kind.name() == text).ok_or_else(|| {
            let known: Vec<&str> = PoolKind::ALL.iter().map(|kind| kind.name()).collect();
            let known = known.join(", ");
            Error::config(format!("unknown pool kind {text:?}: expected one of {known}"))
        })
    }

    /// The name, as it enters the identity.
    pub fn name(self) -> &'static str {
        match self {
            PoolKind::Kv => "kv",
            PoolKind::Latent => "latent",
            PoolKind::Indexer => "indexer",
            PoolKind::State => "state",
            PoolKind::Swa => "swa",
            PoolKind::Draft => "draft",
            PoolKind::DraftSwa => "draft_swa",
            PoolKind::DraftIndexer => "draft_indexer",
        }
    }
}

/// How often a component has a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RowUnit {
    /// One row for each token.
    Token,
    /// One row for each page: indexer blobs, recurrent state.
    Page,
}

impl RowUnit {
    /// Reads a name.
    ///
    /// # Errors
    ///
    /// `Config` for an unknown name.
    pub fn parse(text: &str) -> Result<RowUnit> {
        match text {
            "token" => Ok(RowUnit::Token),
            "page" => Ok(RowUnit::Page),
            _ => Err(Error::config(format!("unknown row unit {text:?}: expected token or page"))),
        }
    }

    /// The name.
    pub fn name(self) -> &'static str {
        match self {
            RowUnit::Token => "token",
            RowUnit::Page => "page",
        }
    }

    /// The number, as it enters the identity.
    fn code(self) -> u8 {
        match self {
            RowUnit::Token => 0,
            RowUnit::Page => 1,
        }
    }

    fn from_code(code: u8) -> Result<RowUnit> {
        match code {
            0 => Ok(RowUnit::Token),
            1 => Ok(RowUnit::Page),
            _ => Err(Error::corrupt(format!("canonical pool: row unit is {code}, expected 0 or 1"))),
        }
    }

    /// Rows of one layer and one head in a page of `tile`.
    pub(crate) fn rows(self, tile: &Tile) -> u64 {
        match self {
            RowUnit::Token => u64::from(tile.tokens.count),
            RowUnit::Page => 1,
        }
    }
}

/// One of the arrays that a page consists of: keys, values, latent rows, scales, a convolution state.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Component {
    /// Name, unique in the pool.
    pub name: String,
    /// Bytes of one token (or page), one layer, one head.
    pub row_bytes: u32,
    /// One row for each token, or one for the page.
    pub unit: RowUnit,
    /// Element type, where it is not the pool's; [`Pool::new`] drops it where it is.
    pub dtype: Option<DType>,
}

impl Component {
    /// A component with a row for each token, in the pool's element type.
    pub fn per_token(name: &str, row_bytes: u32) -> Component {
        Component { name: name.to_owned(), row_bytes, unit: RowUnit::Token, dtype: None }
    }

    /// A component with one row for the page, in the pool's element type.
    pub fn per_page(name: &str, row_bytes: u32) -> Component {
        Component { unit: RowUnit::Page, ..Component::per_token(name, row_bytes) }
    }
}

/// The parts of a page of one kind of state.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Pool {
    name: String,
    kind: PoolKind,
    dtype: DType,
    row_format: Option<String>,
    components: Vec<Component>,
}

impl Pool {
    /// The schema of [`Pool::canonical_bytes`].
    pub const SCHEMA_VERSION: u32 = 1;
    /// Most components.
    pub const MAX_COMPONENTS: usize = 16;
    /// Longest name of a pool, component or row format, in bytes.
    pub const MAX_NAME_BYTES: usize = 100;

    /// A pool whose pages hold `components`, in this order.
    ///
    /// `dtype` is the run-time element type; `row_format` names a packing that the type does not tell, such
    /// as scales inside the row.
    ///
    /// # Errors
    ///
    /// `Namespace` for names that are empty, too long, repeated or hold a NUL; for no or too many
    /// components; and for an element type that needs scales where no component named `*scale*` holds them.
    /// `Geometry` for rows of no bytes, or of a part of an element.
    pub fn new(
        name: &str,
        kind: PoolKind,
        dtype: DType,
        row_format: Option<&str>,
        components: Vec<Component>,
    ) -> Result<Pool> {
        check_text("the name of a pool", name, Self::MAX_NAME_BYTES)?;
        let what = format!("pool {name:?}");
        if let Some(row_format) = row_format {
            check_text(&format!("the row format of {what}"), row_format, Self::MAX_NAME_BYTES)?;
        }
        if components.is_empty() || components.len() > Self::MAX_COMPONENTS {
            let (count, limit) = (components.len(), Self::MAX_COMPONENTS);
            return Err(Error::namespace(format!("{what} has {count} components, expected 1 to {limit}")));
        }
        for (i, component) in components.iter().enumerate() {
            check_text(
                &format!("the name of component {i} of {what}"),
                &component.name,
                Self::MAX_NAME_BYTES,
            )?;
            if components[..i].iter().any(|earlier| earlier.name == component.name) {
                let name = &component.name;
                return Err(Error::namespace(format!("{what} has two components named {name:?}")));
            }
            check_row(&what, component, component.dtype.unwrap_or(dtype))?;
        }
        if let Some(dtype) = unscaled(dtype, &components) {
            return Err(Error::namespace(format!(
                "{what} holds {dtype}, which means nothing without its scales: add a component whose name contains \"scale\", with its bytes"
            )));
        }
        let mut components = components;
        for component in &mut components {
            // Naming the pool's own type again says nothing: one pool, one form.
            component.dtype = component.dtype.filter(|&own| own != dtype);
        }
        Ok(Pool { name: name.to_owned(), kind, dtype, row_format: row_format.map(str::to_owned), components })
    }

    /// Name of the pool: the word by which the engine and a store know it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What sort of state it holds.
    pub fn kind(&self) -> PoolKind {
        self.kind
    }

    /// Element type of components that name none.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Packing of the rows, where the element type does not tell.
    pub fn row_format(&self) -> Option<&str> {
        self.row_format.as_deref()
    }

    /// The parts of a page, in order.
    pub fn components(&self) -> &[Component] {
        &self.components
    }

    /// Element type of component `index`.
    ///
    /// # Panics
    ///
    /// Where there is no such component.
    pub fn component_dtype(&self, index: usize) -> DType {
        self.components[index].dtype.unwrap_or(self.dtype)
    }

    /// Bytes of one page of `tile`: over all components, row bytes x layers x heads x (tokens or 1).
    ///
    /// # Errors
    ///
    /// `Geometry` for an impossible tile, and where the sum does not fit into 64 bits.
    pub fn page_bytes(&self, tile: &Tile) -> Result<u64> {
        tile.validate(Tile::MAX_PAGE_SIZE)?;
        let cells = u64::from(tile.layers.len()) * u64::from(tile.heads.len());
        let mut sum = 0u64;
        for component in &self.components {
            // A valid tile has at most 2^48 rows, each of less than 2^32 bytes.
            let bytes = u64::from(component.row_bytes).checked_mul(cells * component.unit.rows(tile));
            sum = bytes.and_then(|bytes| sum.checked_add(bytes)).ok_or_else(|| {
                Error::geometry(format!("a page of pool {:?} ({tile}) has more than 2^64 bytes", self.name))
            })?;
        }
        Ok(sum)
    }

    /// The bytes that the fingerprint covers: the tag, then schema version, name, kind, element type, row
    /// format, number of components, and of each its name, row bytes, unit and element type. At most 2,300
    /// bytes.
    pub fn canonical_bytes(&self) -> Vec<u8> {
        let mut out = Writer::new(TAG);
        out.u32(Self::SCHEMA_VERSION);
        out.text(&self.name);
        out.text(self.kind.name());
        out.text(self.dtype.name());
        out.optional_text(self.row_format());
        out.u8(self.components.len() as u8);
        for component in &self.components {
            out.text(&component.name);
            out.u32(component.row_bytes);
            out.u8(component.unit.code());
            out.optional_text(component.dtype.map(DType::name));
        }
        out.finish()
    }

    /// Reads [`Pool::canonical_bytes`] back; safe on arbitrary bytes.
    ///
    /// # Errors
    ///
    /// `Corrupt` where the bytes are no pool, `UnsupportedVersion` for another schema version.
    pub fn from_canonical_bytes(bytes: &[u8]) -> Result<Pool> {
        let mut input = Reader::new("pool", TAG, bytes)?;
        input.schema_version(Self::SCHEMA_VERSION)?;
        let damaged = |error: Error| Error::corrupt(format!("canonical pool: {error}"));
        let name = input.text("name")?;
        let kind = PoolKind::parse(input.text("kind")?).map_err(damaged)?;
        let dtype = DType::parse(input.text("dtype")?).map_err(damaged)?;
        let row_format = input.optional_text("row_format")?;
        let mut components = Vec::new();
        for _ in 0..input.u8("components")? {
            components.push(Component {
                name: input.text("component name")?.to_owned(),
                row_bytes: input.u32("row_bytes")?,
                unit: RowUnit::from_code(input.u8("unit")?)?,
                dtype: input
                    .optional_text("component dtype")?
                    .map(DType::parse)
                    .transpose()
                    .map_err(damaged)?,
            });
        }
        input.finish()?;
        let pool = Pool::new(name, kind, dtype, row_format, components).map_err(damaged)?;
        // An alias of a dtype reads back too, but no two byte strings may describe one pool.
        if pool.canonical_bytes() != bytes {
            return Err(Error::corrupt("canonical pool: the dtypes are not in their canonical form"));
        }
        Ok(pool)
    }

    /// First 16 bytes of the SHA-256 of the canonical bytes.
    pub fn fingerprint(&self) -> Fingerprint {
        Fingerprint::of(&self.canonical_bytes())
    }

    /// An object with `schema_version`, `name`, `kind`, `dtype`, `row_format` and `components`, an array of
    /// objects with `name`, `row_bytes`, `unit` and `dtype`; what is absent is null.
    pub fn to_json(&self) -> Value {
        let components: Vec<Value> = self
            .components
            .iter()
            .map(|component| {
                json!({
                    "name": component.name,
                    "row_bytes": component.row_bytes,
                    "unit": component.unit.name(),
                    "dtype": component.dtype.map(DType::name),
                })
            })
            .collect();
        json!({
            "schema_version": Self::SCHEMA_VERSION,
            "name": self.name,
            "kind": self.kind.name(),
            "dtype": self.dtype.name(),
            "row_format": self.row_format,
            "components": components,
        })
    }

    /// Reads [`Pool::to_json`] back; a component's `unit` may be left out and is then `token`.
    ///
    /// # Errors
    ///
    /// `Namespace` naming the field that is missing, unknown or of another type; `Config` for an unknown
    /// kind, unit or element type; `UnsupportedVersion` for another schema version; else as [`Pool::new`].
    pub fn from_json(value: &Value) -> Result<Pool> {
        let fields = Fields::new("pool", &FIELDS, value)?;
        check_schema_version("pool", fields.u32("schema_version")?, Self::SCHEMA_VERSION)?;
        let mut components = Vec::new();
        for value in fields.array("components")? {
            let fields = Fields::new("pool component", &COMPONENT_FIELDS, value)?;
            components.push(Component {
                name: fields.text("name")?.to_owned(),
                row_bytes: fields.u32("row_bytes")?,
                unit: RowUnit::parse(fields.optional_text("unit")?.unwrap_or("token"))?,
                dtype: fields.optional_text("dtype")?.map(DType::parse).transpose()?,
            });
        }
        Pool::new(
            fields.text("name")?,
            PoolKind::parse(fields.text("kind")?)?,
            DType::parse(fields.text("dtype")?)?,
            fields.optional_text("row_format")?,
            components,
        )
    }

    /// The fields in which `self` (left) and `other` (right) differ; components are compared by position.
    pub fn differences(&self, other: &Pool) -> Vec<Difference> {
        let mut found = Differences::default();
        found.compare("name", &self.name, &other.name);
        found.compare("kind", self.kind.name(), other.kind.name());
        found.compare("dtype", self.dtype, other.dtype);
        found.compare("row_format", optional_text(self.row_format()), optional_text(other.row_format()));
        for i in 0..self.components.len().max(other.components.len()) {
            let field = |name: &str| format!("components[{i}]{name}");
            match (self.components.get(i), other.components.get(i)) {
                (Some(left), Some(right)) => {
                    found.compare(field(".name"), &left.name, &right.name);
                    found.compare(field(".row_bytes"), left.row_bytes, right.row_bytes);
                    found.compare(field(".unit"), left.unit.name(), right.unit.name());
                    let dtype = |component: &Component| optional_text(component.dtype.map(DType::name));
                    found.compare(field(".dtype"), dtype(left), dtype(right));
                }
                (left, right) => {
                    let name = |side: Option<&Component>| optional_text(side.map(|one| one.name.as_str()));
                    found.compare(field(""), name(left), name(right));
                }
            }
        }
        found.0
    }
}

fn check_row(pool: &str, component: &Component, dtype: DType) -> Result<()> {
    let Component { name, row_bytes, .. } = component;
    if *row_bytes == 0 {
        return Err(Error::geometry(format!("component {name:?} of {pool} has rows of 0 bytes")));
    }
    if u64::from(*row_bytes) * 8 % u64::from(dtype.bits()) != 0 {
        let bits = dtype.bits();
        return Err(Error::geometry(format!(
            "component {name:?} of {pool} has rows of {row_bytes} bytes, not a whole number of {dtype} elements of {bits} bits"
        )));
    }
    Ok(())
}

/// An element type in use that needs scales, where no component holds any.
fn unscaled(dtype: DType, components: &[Component]) -> Option<DType> {
    let holds_scales = |component: &Component| component.name.to_ascii_lowercase().contains("scale");
    if components.iter().any(holds_scales) {
        return None;
    }
    let used = components.iter().filter_map(|component| component.dtype);
    [dtype].into_iter().chain(used).find(|dtype| dtype.needs_scales())
}

/// Which lengths of a hit a pool allows. The reader's choice, not a part of the identity.
///
/// Source: sglang 0.5.23, `PoolHitPolicy` of `mem_cache/hicache_storage.py`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum HitPolicy {
    /// Every page of the prefix must be present.
    AllPages,
    /// Only the last pages of the prefix must be (or all, if the prefix is shorter): windows, states.
    TrailingPages(u32),
    /// Every whole block of pages must have its group, the last pages of the block under their own keys. A second form
    /// of other pools' pages: the engine reports it and lets it limit nothing, so an adapter makes it optional.
    BlockGroups {
        /// Pages of one block.
        block_pages: u32,
        /// Pages of one group: the last ones of a block.
        group_pages: u32,
    },
}

impl HitPolicy {
    /// Checks the numbers.
    ///
    /// # Errors
    ///
    /// `Config` where a number of pages is 0, or a group is larger than its block.
    pub fn validate(&self) -> Result<()> {
        match *self {
            HitPolicy::TrailingPages(0)
            | HitPolicy::BlockGroups { block_pages: 0, .. }
            | HitPolicy::BlockGroups { group_pages: 0, .. } => {
                Err(Error::config(format!("hit policy {self} counts 0 pages, expected at least 1")))
            }
            HitPolicy::BlockGroups { block_pages, group_pages } if group_pages > block_pages => {
                Err(Error::config(format!(
                    "hit policy {self}: expected a group of at most the {block_pages} pages of its block, found {group_pages}"
                )))
            }
            _ => Ok(()),
        }
    }
}

impl fmt::Display for HitPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            HitPolicy::AllPages => f.write_str("all_pages"),
            HitPolicy::TrailingPages(pages) => write!(f, "trailing_pages({pages})"),
            HitPolicy::BlockGroups { block_pages, group_pages } => {
                write!(f, "block_groups({block_pages}, {group_pages})")
            }
        }
    }
}
