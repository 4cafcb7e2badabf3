//! What the operator allows.
//!
//! Owns nothing. Invariant: it is the configuration's word, which the broker never changes; what operators change while it runs
//! (the numbers of tenants) is in [`tenant`](super::tenant), and begins with what stands here.

use std::collections::BTreeMap;

use super::{CommonRule, Eviction, TenantPolicy};
use crate::id::Tenant;

/// What the operator allows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// Connections in all.
    pub connections: u32,
    /// Connections of one tenant.
    pub connections_per_tenant: u32,
    /// Milliseconds that a connection gets to say hello. The driver keeps the time.
    pub hello_ms: u32,
    /// Sessions of one connection.
    pub sessions_per_connection: u32,
    /// Geometries that one connection may register.
    pub profiles_per_connection: u32,
    /// Blocks that all tables, windows and pins of one tenant may name; `None` for what follows from the pool.
    pub table_blocks_per_tenant: Option<u64>,
    /// Windows of one session.
    pub windows_per_session: u32,
    /// Windows of one tenant, with those that are closed and still held: each may cost the broker a descriptor.
    pub windows_per_tenant: u32,
    /// Windows in all.
    pub windows: u32,
    /// Bytes of blocks that one connection may hold, shared ones included; `None` for no bound but the tenant's.
    pub bytes_per_connection: Option<u64>,
    /// What a tenant gets of which nothing is said. Its reserve is 0.
    pub usual_tenant: TenantPolicy,
    /// What single tenants get. These are the numbers at the start: operators may change them.
    pub tenants: BTreeMap<Tenant, TenantPolicy>,
    /// Which cached prefixes go first.
    pub eviction: Eviction,
    /// Bytes of prefixes that are kept although nobody holds them; `None` for as many as there is room for.
    pub cache_bytes: Option<u64>,
    /// Milliseconds that a session gets to make room for one of higher priority.
    pub reclaim_ms: u32,
    /// Milliseconds after which an extent without a block in use goes back to the pool, at the latest after twice as many;
    /// 0 to leave it with its tenant until somebody else needs it.
    pub rest_ms: u32,
    /// Take checksums of sealed blocks, which a check compares ([`Broker::begin_fsck`](super::Broker::begin_fsck)).
    pub checksums: bool,
    /// Whose pinned prompts are common to whom.
    pub common: Vec<CommonRule>,
    /// Bytes that read-only copies of these may have, in whole extents.
    pub common_bytes: u64,
    /// Of these, bytes for copies of single donors' prompts; the others share the rest equally.
    pub common_limits: BTreeMap<Tenant, u64>,
    /// Zero a block at every grant, not only when it comes from another process.
    pub scrub_always: bool,
    /// Strict mode: an extent holds one block, however many would fit.
    pub one_block_per_extent: bool,
    /// Free extents go back to the kernel while memory is short.
    pub elastic: bool,
    /// As long as more extents than these are there.
    pub floor_extents: u32,
    /// Check every invariant after every change. On in debug builds.
    pub audit: bool,
}

impl Default for Policy {
    fn default() -> Self {
        Policy {
            connections: 256,
            connections_per_tenant: 64,
            hello_ms: 5000,
            sessions_per_connection: 256,
            profiles_per_connection: 16,
            table_blocks_per_tenant: None,
            windows_per_session: 256,
            windows_per_tenant: 1024,
            windows: 4096,
            bytes_per_connection: None,
            usual_tenant: TenantPolicy::default(),
            tenants: BTreeMap::new(),
            eviction: Eviction::default(),
            cache_bytes: None,
            reclaim_ms: 2000,
            rest_ms: 500,
            checksums: false,
            common: Vec::new(),
            common_bytes: 0,
            common_limits: BTreeMap::new(),
            scrub_always: false,
            one_block_per_extent: false,
            elastic: false,
            floor_extents: 0,
            audit: cfg!(debug_assertions),
        }
    }
}
