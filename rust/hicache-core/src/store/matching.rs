//! `match`: the longest prefix that every required pool can restore.

use std::sync::Arc;

use crate::key::PageKey;
use crate::pool::HitPolicy;
use crate::store::counters::Counter;
use crate::store::coverage::Coverage;
use crate::store::index::Index;
use crate::store::view::{PoolState, View};
use crate::{Error, Result};

/// Answer of `match`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Match {
    /// The longest legal length in pages; 0 when there is none.
    pub pages: usize,
    /// What limited it; `None` when every page asked for is there.
    pub limited_by: Option<String>,
    /// Each pool's own verdict.
    pub pools: Vec<PoolHit>,
    /// Legal lengths below `pages`, where not every one is.
    legal: Option<Vec<u32>>,
}

/// One pool's own verdict.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolHit {
    /// Name of the pool.
    pub name: String,
    /// The longest length that is legal for this pool alone, in pages.
    pub pages: usize,
    /// Whether a prefix without this pool is no hit.
    pub required: bool,
}

impl Match {
    /// Every legal length in pages, shortest first. At each of them all required pools can be restored.
    pub fn legal(&self) -> Vec<u32> {
        match &self.legal {
            Some(legal) => legal.clone(),
            None => (1..=self.pages as u32).collect(),
        }
    }
}

impl View {
    /// Finds the longest prefix of `keys`, one chain from its start, that can be restored in all required pools.
    ///
    /// # Errors
    /// `Closed`. Damage and I/O errors make pages missing, not errors.
    pub fn match_prefix(&self, keys: &[PageKey]) -> Result<Match> {
        let own: Vec<_> = self.pools.iter().map(|pool| Some(pool.spec.policy)).collect();
        self.match_pools(keys, &own)
    }

    /// [`View::match_prefix`] with a policy for each pool of the view, in their order. `None`: the pool is not
    /// consulted, and the answer does not speak of it.
    ///
    /// # Errors
    /// `Config` unless there is one policy for each pool, each of them usable, and at least one pool is consulted.
    /// `Closed`.
    pub fn match_pools(&self, keys: &[PageKey], policies: &[Option<HitPolicy>]) -> Result<Match> {
        self.inner.check_open()?;
        if policies.len() != self.pools.len() {
            let (pools, found) = (self.pools.len(), policies.len());
            return Err(Error::config(format!("expected a policy for each of {pools} pools, found {found}")));
        }
        policies.iter().flatten().try_for_each(HitPolicy::validate)?;
        if policies.iter().all(Option::is_none) {
            return Err(Error::config("expected at least one pool to be consulted, found none"));
        }
        let counters = &self.inner.counters;
        counters.add(Counter::MatchCalls, 1);
        counters.add(Counter::MatchAsked, keys.len() as u64);
        if self.inner.device.refuses() {
            return Ok(self.nothing_in_time(policies));
        }
        self.state.refresh_if_told(&self.inner.counters);
        let answer = {
            let index = self.state.index();
            self.match_in(&index, keys, policies)
        };
        self.state.touch(keys, answer.pages);
        self.state.note_lookup(keys, &answer);
        counters.add(Counter::MatchHit, answer.pages as u64);
        Ok(answer)
    }

    /// The answer while calls with a deadline are refused: what a restore would not bring is no hit.
    fn nothing_in_time(&self, policies: &[Option<HitPolicy>]) -> Match {
        let consulted = self.pools.iter().zip(policies).filter(|(_, policy)| policy.is_some());
        let pools = consulted.map(|(pool, _)| PoolHit {
            name: pool.spec.pool.name().to_owned(),
            pages: 0,
            required: pool.spec.required,
        });
        Match { pages: 0, limited_by: Some("device: too slow".into()), pools: pools.collect(), legal: None }
    }

    fn match_in(&self, index: &Index, keys: &[PageKey], policies: &[Option<HitPolicy>]) -> Match {
        let consulted = self.pools.iter().zip(policies);
        let covered: Vec<(&PoolState, HitPolicy, Arc<Coverage>)> =
            consulted.filter_map(|(pool, policy)| Some((pool, (*policy)?, pool.coverage(index)))).collect();
        let mut bound = keys.len();
        let mut limit = None;
        // Pools of which every page must be there set the bound; the others choose legal lengths below it.
        let mut verdicts = vec![0; covered.len()];
        for (number, (pool, policy, coverage)) in covered.iter().enumerate() {
            if *policy != HitPolicy::AllPages {
                continue;
            }
            let leading = leading(index, coverage, keys);
            verdicts[number] = leading;
            if pool.spec.required && leading < bound {
                bound = leading;
                limit = Some((number, leading));
            }
        }
        let mut legal: Option<Vec<bool>> = None;
        for (number, (pool, policy, coverage)) in covered.iter().enumerate() {
            let reach = if pool.spec.required { bound } else { keys.len() };
            let own = match *policy {
                HitPolicy::AllPages => continue,
                HitPolicy::TrailingPages(window) => {
                    trailing(index, coverage, &keys[..reach], window as usize)
                }
                HitPolicy::BlockGroups { block_pages, group_pages } => {
                    groups(index, coverage, &keys[..reach], block_pages as usize, group_pages as usize)
                }
            };
            verdicts[number] = whole_groups(*policy, longest(&own));
            if !pool.spec.required {
                continue;
            }
            let before = legal.as_ref().map_or(bound, |legal| longest(legal));
            let both = match legal.take() {
                Some(legal) => legal.iter().zip(&own).map(|(&a, &b)| a && b).collect(),
                None => own,
            };
            if longest(&both) < before {
                limit = Some((number, longest(&both)));
            }
            legal = Some(both);
        }
        let pages = legal.as_ref().map_or(bound, |legal| longest(legal));
        let limited_by = limit.filter(|_| pages < keys.len()).map(|(number, at)| {
            let (pool, policy, _) = &covered[number];
            let name = pool.spec.pool.name();
            match *policy {
                HitPolicy::AllPages => format!("{name}: page {at} {}", pool.why_missing(index, &keys[at])),
                HitPolicy::TrailingPages(window) => {
                    format!("{name}: no longer prefix has its last {window} pages")
                }
                policy @ HitPolicy::BlockGroups { .. } => {
                    format!("{name}: the block after page {} lacks its group", whole_groups(policy, at))
                }
            }
        });
        let legal = legal.map(|legal| {
            legal.iter().enumerate().filter(|(_, legal)| **legal).map(|(index, _)| index as u32 + 1).collect()
        });
        let pools = covered
            .iter()
            .zip(verdicts)
            .map(|((pool, ..), pages)| PoolHit {
                name: pool.spec.pool.name().to_owned(),
                pages,
                required: pool.spec.required,
            })
            .collect();
        Match { pages, limited_by, pools, legal }
    }
}

fn leading(index: &Index, coverage: &Coverage, keys: &[PageKey]) -> usize {
    let mut walk = coverage.walk(index);
    keys.iter().position(|key| !walk.has(key)).unwrap_or(keys.len())
}

/// `[p - 1]`: whether pages `max(0, p - window)..p` are all there.
fn trailing(index: &Index, coverage: &Coverage, keys: &[PageKey], window: usize) -> Vec<bool> {
    let (mut run, mut walk) = (0, coverage.walk(index));
    let mut legal = Vec::with_capacity(keys.len());
    for (page, key) in keys.iter().enumerate() {
        run = if walk.has(key) { run + 1 } else { 0 };
        legal.push(run >= window.min(page + 1));
    }
    legal
}

/// `[p - 1]`: whether each whole block of `block` pages before `p` has its group, the last `group` pages of it.
fn groups(index: &Index, coverage: &Coverage, keys: &[PageKey], block: usize, group: usize) -> Vec<bool> {
    let mut walk = coverage.walk(index);
    let mut is_complete = |number: usize| {
        let end = (number + 1) * block;
        keys[end - group..end].iter().all(|key| walk.has(key))
    };
    let complete = (0..keys.len() / block).take_while(|&number| is_complete(number)).count();
    (1..=keys.len()).map(|pages| pages / block <= complete).collect()
}

/// Of `pages`, those that a pool of groups can speak for: whole blocks only.
fn whole_groups(policy: HitPolicy, pages: usize) -> usize {
    match policy {
        HitPolicy::BlockGroups { block_pages, .. } => pages - pages % block_pages as usize,
        HitPolicy::AllPages | HitPolicy::TrailingPages(_) => pages,
    }
}

fn longest(legal: &[bool]) -> usize {
    legal.iter().rposition(|&legal| legal).map_or(0, |last| last + 1)
}
