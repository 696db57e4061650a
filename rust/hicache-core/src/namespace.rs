//! The namespace: what must be equal for the bytes of two deployments to be interchangeable.
//!
//! It holds only facts that every rank of every deployment knows. Topology, host names and who wrote a
//! page are not in it, and neither are the pools: each has an identity of its own on top.

use crate::canonical::{
    Differences, Fields, Reader, Writer, check_schema_version, check_text, optional_text,
};
use crate::error::{Error, Result};
use crate::tile::Tile;
use serde_json::{Value, json};

pub use crate::canonical::{Difference, Fingerprint};

const TAG: &[u8] = b"hicache-namespace";
const FIELDS: [&str; 5] = ["schema_version", "model", "revision", "page_size", "salt"];

/// Model, weights revision, page size and salt.
///
/// Text is compared byte for byte: it is not normalised, so two spellings are two namespaces.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Namespace {
    model: String,
    revision: String,
    page_size: u32,
    salt: Option<String>,
}

impl Namespace {
    /// The schema of [`Namespace::canonical_bytes`].
    pub const SCHEMA_VERSION: u32 = 1;
    /// The revision of one who knowingly gives none; every tool shows it.
    pub const UNVERSIONED: &str = "unversioned";
    /// Longest model id, in bytes.
    pub const MAX_MODEL_BYTES: usize = 1024;
    /// Longest revision, in bytes.
    pub const MAX_REVISION_BYTES: usize = 256;
    /// Longest salt, in bytes.
    pub const MAX_SALT_BYTES: usize = 256;
    /// Largest page, in tokens.
    pub const MAX_PAGE_SIZE: u32 = Tile::MAX_PAGE_SIZE;

    /// A namespace of pages of `page_size` tokens (1 to 65,536).
    ///
    /// `revision` names the weights: a checkpoint digest, commit or tag, or [`Namespace::UNVERSIONED`].
    /// `salt` keeps tenants or adapters apart; without one it is `None`, never empty.
    ///
    /// # Errors
    ///
    /// `Namespace` for text that is empty, too long or holds a NUL, and for an impossible page size.
    pub fn new(model: &str, revision: &str, page_size: u32, salt: Option<&str>) -> Result<Namespace> {
        check_text("the model id", model, Self::MAX_MODEL_BYTES)?;
        if revision.is_empty() {
            return Err(Error::namespace(
                "the weights revision is empty: give a checkpoint digest, commit or tag, or the explicit value `unversioned`",
            ));
        }
        check_text("the weights revision", revision, Self::MAX_REVISION_BYTES)?;
        if page_size == 0 || page_size > Self::MAX_PAGE_SIZE {
            let limit = Self::MAX_PAGE_SIZE;
            return Err(Error::namespace(format!("page_size is {page_size} tokens, expected 1 to {limit}")));
        }
        if let Some(salt) = salt {
            check_text("the salt", salt, Self::MAX_SALT_BYTES)?;
        }
        Ok(Namespace {
            model: model.to_owned(),
            revision: revision.to_owned(),
            page_size,
            salt: salt.map(str::to_owned),
        })
    }

    /// Schema of the canonical bytes.
    pub fn schema_version(&self) -> u32 {
        Self::SCHEMA_VERSION
    }

    /// Model id.
    pub fn model(&self) -> &str {
        &self.model
    }

    /// Weights revision.
    pub fn revision(&self) -> &str {
        &self.revision
    }

    /// Tokens in a page.
    pub fn page_size(&self) -> u32 {
        self.page_size
    }

    /// Tenant or adapter, if any.
    pub fn salt(&self) -> Option<&str> {
        self.salt.as_deref()
    }

    /// True where the caller chose to give no revision, so that other weights of this model id are not
    /// told apart.
    pub fn is_unversioned(&self) -> bool {
        self.revision == Self::UNVERSIONED
    }

    /// The bytes that the fingerprint covers: the tag, then schema version, model, revision, page size,
    /// salt. At most 1,600 bytes.
    pub fn canonical_bytes(&self) -> Vec<u8> {
        let mut out = Writer::new(TAG);
        out.u32(Self::SCHEMA_VERSION);
        out.text(&self.model);
        out.text(&self.revision);
        out.u32(self.page_size);
        out.optional_text(self.salt());
        out.finish()
    }

    /// Reads [`Namespace::canonical_bytes`] back; safe on arbitrary bytes.
    ///
    /// # Errors
    ///
    /// `Corrupt` where the bytes are no namespace, `UnsupportedVersion` for another schema version.
    pub fn from_canonical_bytes(bytes: &[u8]) -> Result<Namespace> {
        let mut input = Reader::new("namespace", TAG, bytes)?;
        input.schema_version(Self::SCHEMA_VERSION)?;
        let model = input.text("model")?;
        let revision = input.text("revision")?;
        let page_size = input.u32("page_size")?;
        let salt = input.optional_text("salt")?;
        input.finish()?;
        Namespace::new(model, revision, page_size, salt)
            .map_err(|error| Error::corrupt(format!("canonical namespace: {error}")))
    }

    /// First 16 bytes of the SHA-256 of the canonical bytes.
    pub fn fingerprint(&self) -> Fingerprint {
        Fingerprint::of(&self.canonical_bytes())
    }

    /// An object with `schema_version`, `model`, `revision`, `page_size` and `salt` (null if absent).
    pub fn to_json(&self) -> Value {
        json!({
            "schema_version": Self::SCHEMA_VERSION,
            "model": self.model,
            "revision": self.revision,
            "page_size": self.page_size,
            "salt": self.salt,
        })
    }

    /// Reads [`Namespace::to_json`] back.
    ///
    /// # Errors
    ///
    /// `Namespace` naming the field that is missing, unknown or unusable; `UnsupportedVersion` for another
    /// schema version.
    pub fn from_json(value: &Value) -> Result<Namespace> {
        let fields = Fields::new("namespace", &FIELDS, value)?;
        check_schema_version("namespace", fields.u32("schema_version")?, Self::SCHEMA_VERSION)?;
        Namespace::new(
            fields.text("model")?,
            fields.text("revision")?,
            fields.u32("page_size")?,
            fields.optional_text("salt")?,
        )
    }

    /// The fields in which `self` (left) and `other` (right) differ; empty where they are the same.
    pub fn differences(&self, other: &Namespace) -> Vec<Difference> {
        let mut found = Differences::default();
        found.compare("model", &self.model, &other.model);
        found.compare("revision", &self.revision, &other.revision);
        found.compare("page_size", self.page_size, other.page_size);
        found.compare("salt", optional_text(self.salt()), optional_text(other.salt()));
        found.0
    }
}
