//! Which pools of a deployment share host pages and which have pages of their own, and why.
//!
//! A target is restored together with what belongs to it, or not at all: draft layers, an indexer, states. Packed
//! members stand in one host page and move together; sidecars have slots of their own. The decision is one of
//! geometry, made once, with a reason for each member. What can be neither is refused: a set never becomes its target
//! alone.

use hicache_sys::memory::MemoryOptions;

use super::HostPool;
use crate::{Component, Error, Pool, PoolKind, Result, Span, Tile};

/// Parts of a packed host page start at multiples of this, in bytes: wide copies stay wide.
const PART_ALIGNMENT: u64 = 256;
/// Packed host pages are multiples of this, in bytes: each can be read past the page cache.
const PAGE_ALIGNMENT: u64 = 4096;

/// Where a member should stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MappingWish {
    /// Packed where the geometry allows it, else a sidecar.
    #[default]
    Auto,
    /// Packed, or an error that says why not.
    Packed,
    /// A sidecar, whatever the geometry.
    Sidecar,
}

/// Where a member stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mapping {
    /// The target: its slots are those that the others follow.
    Target,
    /// In the target's host pages.
    Packed,
    /// In host pages of its own.
    Sidecar,
}

impl Mapping {
    /// The name.
    pub fn name(self) -> &'static str {
        match self {
            Mapping::Target => "target",
            Mapping::Packed => "packed",
            Mapping::Sidecar => "sidecar",
        }
    }
}

/// One pool of a deployment, as one rank holds it.
#[derive(Debug, Clone)]
pub struct PoolMember {
    /// Identity of the pool.
    pub pool: Pool,
    /// The rectangle of each page that this rank holds.
    pub tile: Tile,
    /// Slots that it has on the host, each one page.
    pub slots: u64,
    /// Tokens of one page.
    pub page_size: u32,
    /// Number of its first layer where target and draft layers are counted through, the target's first.
    pub first_layer: u32,
    /// Where it should stand.
    pub wish: MappingWish,
}

/// Where a member of a set stands, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemberPlan {
    /// Name of its pool.
    pub name: String,
    /// Packed or not.
    pub mapping: Mapping,
    /// One sentence.
    pub reason: String,
    /// Index of its host pool in the set.
    pub host_pool: usize,
    /// First byte of its part in a host page.
    pub offset: u64,
    /// Bytes of its part, one page of it.
    pub part_bytes: u64,
    /// Bytes of the whole host page.
    pub host_page_bytes: u64,
    /// Slots of its host pool.
    pub slots: u64,
}

/// Where a pool stands, and why, in words for people.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PoolPlacement {
    /// Name of the pool.
    pub name: String,
    /// A word: `target`, `packed` or `sidecar` of a set of pools, or what else its owner calls it.
    pub place: String,
    /// One sentence.
    pub reason: String,
}

/// The pools of a deployment on one rank, each with its place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolSet {
    members: Vec<MemberPlan>,
    /// Slots, and bytes of one slot.
    host_pools: Vec<(u64, u64)>,
}

impl PoolSet {
    /// Decides for each of `members`, the target first.
    ///
    /// # Errors
    /// `Config` for no target or a name twice; `Geometry` for impossible sizes, for a member that is to be packed
    /// and cannot be, and for one that follows the target's slots and has others.
    pub fn new(members: &[PoolMember]) -> Result<PoolSet> {
        let Some((target, rest)) = members.split_first() else {
            return Err(Error::config("expected a target, found no pools"));
        };
        check_members(target, members)?;
        let mut plans = Vec::with_capacity(members.len());
        let mut reasons = Vec::with_capacity(members.len());
        for (index, member) in rest.iter().enumerate() {
            reasons.push(decide(member, target, &members[..=index])?);
        }
        let is_packed = |index: usize| index == 0 || reasons[index - 1].0 == Mapping::Packed;
        let mut page = Page::default();
        let mut places = Vec::with_capacity(members.len());
        for (index, member) in members.iter().enumerate() {
            let bytes = member.pool.page_bytes(&member.tile)?;
            places.push((if is_packed(index) { page.add(bytes)? } else { 0 }, bytes));
        }
        let companions: Vec<&str> = (1..members.len())
            .filter(|&index| is_packed(index))
            .map(|index| members[index].pool.name())
            .collect();
        // A target alone has its pages one after the other, as the engine's own pools have them.
        let shares = !companions.is_empty();
        let host_page = if shares { page.bytes()? } else { places[0].1 };
        let mut host_pools = vec![(target.slots, host_page)];
        for (index, (member, &(offset, part_bytes))) in members.iter().zip(&places).enumerate() {
            let (mapping, reason) = match index {
                0 if shares => {
                    (Mapping::Target, format!("its host pages also hold {}", companions.join(", ")))
                }
                0 => (Mapping::Target, "it has its host pages alone".to_owned()),
                _ => reasons[index - 1].clone(),
            };
            let host_pool = if is_packed(index) {
                0
            } else {
                host_pools.push((member.slots, part_bytes));
                host_pools.len() - 1
            };
            plans.push(MemberPlan {
                name: member.pool.name().to_owned(),
                mapping,
                reason,
                host_pool,
                offset,
                part_bytes,
                host_page_bytes: host_pools[host_pool].1,
                slots: host_pools[host_pool].0,
            });
        }
        Ok(PoolSet { members: plans, host_pools })
    }

    /// Every member with its place, the target first.
    pub fn members(&self) -> &[MemberPlan] {
        &self.members
    }

    /// Slots and bytes of one slot of each host pool; the target's is the first.
    pub fn host_pools(&self) -> &[(u64, u64)] {
        &self.host_pools
    }

    /// What [`crate::ViewPool`] takes as `packed` for the member: its offset and the bytes of a host page; `None`
    /// where it has its host pages alone.
    ///
    /// # Errors
    /// `Config` for a name that is not in the set.
    pub fn packed(&self, name: &str) -> Result<Option<(u64, u64)>> {
        let Some(member) = self.members.iter().find(|member| member.name == name) else {
            let known: Vec<&str> = self.members.iter().map(|member| member.name.as_str()).collect();
            return Err(Error::config(format!("expected one of {}, found {name:?}", known.join(", "))));
        };
        let shares = self.members.iter().any(|other| other.mapping == Mapping::Packed);
        Ok((member.host_pool == 0 && shares).then_some((member.offset, member.host_page_bytes)))
    }

    /// Makes the host pools, all or none.
    ///
    /// # Errors
    /// As [`HostPool::new`].
    pub fn allocate(&self, options: &MemoryOptions) -> Result<Vec<HostPool>> {
        self.host_pools.iter().map(|&(slots, slot_bytes)| HostPool::new(slots, slot_bytes, options)).collect()
    }

    /// Where each member stands and why, as [`crate::Store::note_pools`] takes it.
    pub fn placements(&self) -> Vec<PoolPlacement> {
        let placement = |member: &MemberPlan| {
            let MemberPlan { name, mapping, reason, offset, part_bytes, host_page_bytes, slots, .. } = member;
            let end = offset + part_bytes;
            let reason = format!("bytes {offset} to {end} of {host_page_bytes} in {slots} slots: {reason}");
            PoolPlacement { name: name.clone(), place: mapping.name().to_owned(), reason }
        };
        self.members.iter().map(placement).collect()
    }

    /// A line for each member: name, mapping, place and reason.
    pub fn explain(&self) -> String {
        let line =
            |PoolPlacement { name, place, reason }: PoolPlacement| format!("{name}: {place}, {reason}");
        self.placements().into_iter().map(line).collect::<Vec<_>>().join("\n")
    }
}

/// Parts one after the other.
#[derive(Default)]
struct Page {
    end: u64,
}

impl Page {
    fn add(&mut self, bytes: u64) -> Result<u64> {
        let start = self.end.checked_next_multiple_of(PART_ALIGNMENT).ok_or_else(too_large)?;
        self.end = start.checked_add(bytes).ok_or_else(too_large)?;
        Ok(start)
    }

    fn bytes(&self) -> Result<u64> {
        self.end.checked_next_multiple_of(PAGE_ALIGNMENT).ok_or_else(too_large)
    }
}

fn too_large() -> Error {
    Error::geometry("a packed host page has more than 2^64 bytes")
}

fn check_members(target: &PoolMember, members: &[PoolMember]) -> Result<()> {
    if follows(target.pool.kind()) || continued(target.pool.kind()).is_some() {
        let (name, kind) = (target.pool.name(), target.pool.kind().name());
        return Err(Error::config(format!("expected a target first, found pool {name:?} of kind {kind}")));
    }
    if target.wish != MappingWish::Auto {
        return Err(Error::config("the target is what others are packed into: its mapping is auto"));
    }
    for (index, member) in members.iter().enumerate() {
        let name = member.pool.name();
        if members[..index].iter().any(|earlier| earlier.pool.name() == name) {
            return Err(Error::config(format!("pool {name:?} is named twice")));
        }
        if member.slots == 0 {
            return Err(Error::geometry(format!("expected at least one slot for pool {name:?}, found 0")));
        }
        member.tile.validate(member.page_size)?;
        if member.first_layer.checked_add(member.tile.layers.len()).is_none() {
            let first = member.first_layer;
            return Err(Error::geometry(format!("pool {name:?}: layer {first} is not the first of so many")));
        }
    }
    Ok(())
}

/// Whether pages of this kind stand in the slots of another pool's pages, under its indices.
fn follows(kind: PoolKind) -> bool {
    matches!(kind, PoolKind::Draft | PoolKind::Indexer | PoolKind::DraftIndexer)
}

/// Kinds whose layers a pool of this kind continues.
fn continued(kind: PoolKind) -> Option<&'static [PoolKind]> {
    match kind {
        PoolKind::Draft => Some(&[PoolKind::Kv, PoolKind::Latent]),
        PoolKind::DraftSwa => Some(&[PoolKind::Swa]),
        PoolKind::DraftIndexer => Some(&[PoolKind::Indexer]),
        PoolKind::Kv | PoolKind::Latent | PoolKind::Indexer | PoolKind::State | PoolKind::Swa => None,
    }
}

/// Packed or sidecar, and why. `earlier` are the members before this one, the target first.
fn decide(member: &PoolMember, target: &PoolMember, earlier: &[PoolMember]) -> Result<(Mapping, String)> {
    let (name, target_name) = (member.pool.name(), target.pool.name());
    let mut against = Vec::new();
    if member.slots != target.slots {
        against.push(format!("it has {} slots, {target_name} has {}", member.slots, target.slots));
    }
    if (member.page_size, member.tile.tokens) != (target.page_size, target.tile.tokens) {
        against.push(format!(
            "its pages have {} of {} tokens, those of {target_name} {} of {}",
            member.tile.tokens.count, member.page_size, target.tile.tokens.count, target.page_size
        ));
    }
    if follows(member.pool.kind()) && !against.is_empty() {
        return Err(Error::geometry(format!(
            "pool {name:?} follows the slots of {target_name}, packed or not, and cannot: {}",
            against.join("; ")
        )));
    }
    let layers = check_layers(member, earlier, &mut against)?;
    match (member.wish, against.is_empty()) {
        (MappingWish::Sidecar, true) => Ok((Mapping::Sidecar, "asked for; it could be packed".to_owned())),
        (MappingWish::Sidecar, false) => Ok((Mapping::Sidecar, format!("asked for; {}", against.join("; ")))),
        (MappingWish::Auto | MappingWish::Packed, true) => Ok((
            Mapping::Packed,
            format!(
                "{} slots and pages of {} tokens as {target_name} has{layers}",
                member.slots, member.page_size
            ),
        )),
        (MappingWish::Auto, false) => Ok((Mapping::Sidecar, against.join("; "))),
        (MappingWish::Packed, false) => {
            Err(Error::geometry(format!("pool {name:?} cannot be packed: {}", against.join("; "))))
        }
    }
}

/// For a pool that continues another one's layers: its rows are the same, and each layer is owned once. What speaks
/// for it, as the end of a sentence.
fn check_layers(member: &PoolMember, earlier: &[PoolMember], against: &mut Vec<String>) -> Result<String> {
    let Some(kinds) = continued(member.pool.kind()) else { return Ok(String::new()) };
    let name = member.pool.name();
    let chain: Vec<&PoolMember> = earlier
        .iter()
        .filter(|other| kinds.contains(&other.pool.kind()) || other.pool.kind() == member.pool.kind())
        .collect();
    let Some(first) = chain.first().filter(|other| kinds.contains(&other.pool.kind())) else {
        let kinds: Vec<&str> = kinds.iter().map(|kind| kind.name()).collect();
        return Err(Error::config(format!(
            "pool {name:?} continues the layers of a pool of kind {}, found none before it",
            kinds.join(" or ")
        )));
    };
    let differences = row_differences(&member.pool, &first.pool);
    if !differences.is_empty() {
        against.push(format!("its rows are not those of {}: {differences}", first.pool.name()));
    }
    let own = owned_layers(member);
    let mut end = 0;
    for other in &chain {
        let theirs = owned_layers(other);
        if let Some(common) = theirs.intersect(&own) {
            against.push(format!("layer {} is owned by {} too", common.start, other.pool.name()));
        }
        end = end.max(theirs.end);
    }
    if own.start > end {
        against.push(format!("layers {end} to {} are owned by nobody", own.start));
    }
    Ok(format!(", rows of {}, layers {} to {} owned once", first.pool.name(), own.start, own.end))
}

fn owned_layers(member: &PoolMember) -> Span {
    Span { start: member.first_layer, end: member.first_layer + member.tile.layers.len() }
}

/// How the rows of two pools differ, apart from what the pools are called.
fn row_differences(left: &Pool, right: &Pool) -> String {
    let describe = |pool: &Pool| {
        let component = |(index, one): (usize, &Component)| {
            let Component { name, row_bytes, unit, .. } = one;
            format!("{name} {row_bytes} bytes of {} a {}", pool.component_dtype(index), unit.name())
        };
        let components: Vec<String> = pool.components().iter().enumerate().map(component).collect();
        let format = pool.row_format().map(|format| format!(" ({format})")).unwrap_or_default();
        components.join(", ") + &format
    };
    let (left, right) = (describe(left), describe(right));
    if left == right { String::new() } else { format!("{left} against {right}") }
}
