//! The order of eviction: which blocks can go, how many, and which goes first.
//!
//! Owns what is counted for a tenant's blocks of a format. It is told of every change and looks at no node.
//! Invariants: an account exists while a block of it is published; it lists exactly the blocks that can be evicted at once,
//! lowest rank first, and counts those that can be evicted one after the other.

use std::collections::{BTreeMap, BTreeSet};

use slab::Slab;

use super::Eviction;
use super::tree::{At, Node};
use crate::id::{FormatId, Tenant};

/// The place of a block in the order of eviction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rank {
    priority: u8,
    class: u32,
    last: u64,
}

impl Eviction {
    /// Lower ranks go first. No two blocks that are idle have been let go at the same time.
    pub(super) fn rank(self, node: &Node) -> Rank {
        let class = match self {
            Eviction::Found => node.hits.min(1),
            Eviction::Lru => 0,
        };
        Rank { priority: node.priority, class, last: node.last }
    }
}

/// What is counted for a tenant's blocks of a format.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Account {
    pub key: (Tenant, FormatId),
    pub blocks: usize,
    pub evictable: u64,
    pub ends: BTreeSet<(Rank, At)>,
}

/// All accounts.
#[derive(Debug, Clone, Default)]
pub(super) struct Order {
    accounts: Slab<Account>,
    by_key: BTreeMap<(Tenant, FormatId), usize>,
}

impl Order {
    /// A block more is published. Returns the account that it is counted in.
    pub fn enter(&mut self, key: (Tenant, FormatId)) -> usize {
        let Order { accounts, by_key, .. } = self;
        let fresh = || accounts.insert(Account { key, blocks: 0, evictable: 0, ends: BTreeSet::new() });
        let account = *by_key.entry(key).or_insert_with(fresh);
        self.accounts[account].blocks += 1;
        account
    }

    /// A block that could not be evicted any more is not published any more.
    pub fn leave(&mut self, account: usize) {
        let known = &mut self.accounts[account];
        known.blocks -= 1;
        if known.blocks == 0 {
            self.by_key.remove(&known.key);
            self.accounts.remove(account);
        }
    }

    /// A block can be evicted from now on, or cannot any more.
    pub fn count(&mut self, account: usize, evictable: bool) {
        let total = &mut self.accounts[account].evictable;
        *total = if evictable { *total + 1 } else { *total - 1 };
    }

    /// A block can be evicted at once from now on.
    pub fn list(&mut self, account: usize, rank: Rank, at: At) {
        self.accounts[account].ends.insert((rank, at));
    }

    /// It cannot any more, or its rank changes.
    pub fn unlist(&mut self, account: usize, rank: Rank, at: At) {
        self.accounts[account].ends.remove(&(rank, at));
    }

    fn account(&self, key: (Tenant, FormatId)) -> Option<&Account> {
        Some(&self.accounts[*self.by_key.get(&key)?])
    }

    /// How many blocks of a tenant in a format can be evicted, one after the other.
    pub fn evictable(&self, key: (Tenant, FormatId)) -> u64 {
        self.account(key).map_or(0, |account| account.evictable)
    }

    /// How many blocks of all tenants can be evicted.
    pub fn evictable_of_all(&self) -> u64 {
        self.accounts.iter().map(|(_, account)| account.evictable).sum()
    }

    /// Which block of a tenant in a format goes first.
    pub fn first(&self, key: (Tenant, FormatId)) -> Option<At> {
        self.account(key)?.ends.first().map(|(_, at)| *at)
    }

    /// Which block of a tenant, or of all, goes first.
    pub fn first_of(&self, tenant: Option<Tenant>) -> Option<At> {
        let (from, to) = tenant.map_or((Tenant(0), Tenant(u32::MAX)), |t| (t, t));
        let accounts = self.by_key.range((from, FormatId(0))..=(to, FormatId(u32::MAX)));
        let ends = accounts.filter_map(|(_, account)| self.accounts[*account].ends.first());
        ends.min().map(|(_, at)| *at)
    }

    /// What is counted, in an order that does not depend on what has happened.
    pub fn accounts(&self) -> impl Iterator<Item = &Account> {
        self.by_key.values().map(|account| &self.accounts[*account])
    }
}
