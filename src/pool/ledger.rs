//! Where every byte of the pool is.
//!
//! Owns the ten totals. Invariant: they add up to the pool, at every moment; [`Pool::check`](super::Pool::check)
//! counts them anew from the extents and compares. Nothing here ever clamps: a total that would fall below zero
//! is a fault in the broker and stops the process in every build (`overflow-checks`).

use serde::{Deserialize, Serialize};
use std::ops::{Index, IndexMut};

/// One kind of place in the ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Account {
    /// In extents that belong to no tenant.
    Free,
    /// In extents of a tenant, in no block in use.
    Stranded,
    /// In blocks granted to a process ahead of need.
    Credit,
    /// In blocks of exactly one session, or of a window whose session has gone.
    Private,
    /// In sealed blocks, and in blocks of several sessions or under a session's windows, that some session holds.
    Shared,
    /// In sealed blocks that no session holds, kept for the next one.
    Cached,
    /// In sealed blocks that stay whoever comes or goes.
    Pinned,
    /// In extents and blocks that must not be used because somebody may still reach them.
    Quarantined,
    /// In extents given back to the kernel for a while.
    Lent,
    /// At the end of extents, too small for a block.
    Waste,
}

impl Account {
    /// All accounts, in the order in which people are shown them.
    pub const ALL: [Account; 10] = [
        Account::Free,
        Account::Stranded,
        Account::Credit,
        Account::Private,
        Account::Shared,
        Account::Cached,
        Account::Pinned,
        Account::Quarantined,
        Account::Lent,
        Account::Waste,
    ];

    /// The account's name.
    pub fn name(self) -> &'static str {
        match self {
            Account::Free => "free",
            Account::Stranded => "stranded",
            Account::Credit => "credit",
            Account::Private => "private",
            Account::Shared => "shared",
            Account::Cached => "cached",
            Account::Pinned => "pinned",
            Account::Quarantined => "quarantined",
            Account::Lent => "lent",
            Account::Waste => "waste",
        }
    }
}

/// Bytes by account.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Ledger([u64; 10]);

impl Ledger {
    /// The sum of all accounts, in bytes.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Moves `bytes` from one account to another.
    pub(super) fn transfer(&mut self, from: Account, to: Account, bytes: u64) {
        self[from] -= bytes;
        self[to] += bytes;
    }
}

impl Index<Account> for Ledger {
    type Output = u64;
    fn index(&self, account: Account) -> &u64 {
        &self.0[account as usize]
    }
}

impl IndexMut<Account> for Ledger {
    fn index_mut(&mut self, account: Account) -> &mut u64 {
        &mut self.0[account as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::super::Pool;
    use super::*;

    #[test]
    #[should_panic(expected = "subtract with overflow")]
    fn a_total_that_would_fall_below_zero_stops_the_process() {
        let mut ledger = Ledger::default();
        ledger.transfer(Account::Credit, Account::Free, 1);
    }

    #[test]
    fn a_byte_in_the_wrong_account_is_found_by_counting_anew() {
        let mut pool = Pool::new(4096);
        pool.add();
        pool.check().unwrap();
        pool.books.ledger.transfer(Account::Free, Account::Lent, 1);
        let found = pool.check().unwrap_err();
        assert!(found.starts_with("ledger Ledger([4095, "), "{found}");
    }
}
