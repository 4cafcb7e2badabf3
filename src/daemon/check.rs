//! What can be known to be wrong with a configuration before any memory is taken.
//!
//! Owns no state. Invariant: nothing here takes memory, binds a path or changes anything, so a check may run beside a
//! living broker; and what it refuses a start would refuse too, since a start goes through [`consistent`] itself and
//! meets what [`possible_here`] finds. Each refusal names the file, the key and its value.

use std::fmt;
use std::path::{Path, PathBuf};

use super::config::{BackendChoice, Config, ConfigError, DeviceAccess, Origins};
use crate::heap::{Backend, DmaHeap, Sealed, UDMABUF_DEVICE, beyond_file_size, cgroup_bytes, memory_bytes};
use crate::id::Tenant;
use crate::map::page_bytes;
use crate::packing::{CMA_ALIGNMENT_ORDERS, Extents, PackingError, Placement, block_sizes};
use crate::size::Size;

/// The longest path of a Unix socket: `sun_path` has 108 bytes, the last of which is a zero (unix(7)).
const LONGEST_SOCKET_PATH: usize = 107;
/// No machine serves more connections than it may have files open: the kernel's `fs.nr_open` is 2^20 where nobody has
/// changed it, and a connection takes two.
const MOST_CONNECTIONS: u32 = 1 << 19;
/// Names of blocks in a tenant's tables, windows and pins: each costs the daemon some bytes of its own memory, so that more
/// would be more than a machine that this broker is for has.
const MOST_TABLE_BLOCKS: u64 = 1 << 28;

/// What the daemon takes for itself, and the kernel for it: page tables, sockets, messages that nobody has read.
const BESIDE_THE_POOL: u64 = 8 << 20;

/// What a start would take, as far as that is known without taking it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outlook {
    /// Extents and their size in bytes.
    pub extents: (u64, u64),
    /// Where they would come from: a heap's path, or `memfd`.
    pub source: String,
}

impl fmt::Display for Outlook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (count, bytes) = self.extents;
        let (each, all) = (Size::from_bytes(bytes), Size::from_bytes(count * bytes));
        write!(f, "{count} extents of {each}, {all} in all, from {}", self.source)
    }
}

/// How `config` cuts its pool of this kind of memory: the extents where they will lie.
pub(super) fn cut(config: &Config, backend: Backend) -> Result<Extents, PackingError> {
    cut_for(config, page_bytes() as u64, !backend.is_scattered())
}

/// The same for a machine with pages of `page` bytes.
pub(super) fn cut_for(config: &Config, page: u64, contiguous: bool) -> Result<Extents, PackingError> {
    // Extents are cut as for CMA also where memory is scattered: the sizes are good ones, and the same everywhere.
    let cma = Placement::cma(page, config.cma_alignment_order)?;
    let chosen = Extents::choose(config.pool_bytes, config.extent, &block_sizes(&config.profiles), cma)?;
    let placement = if contiguous { cma } else { Placement::pages(page)? };
    let one_block = chosen.one_block;
    Ok(Extents { one_block, ..Extents::of(config.pool_bytes, chosen.bytes, placement)? })
}

/// What the pool is made of, and why: what is configured, else by who reads the memory.
pub(super) fn backend(config: &Config) -> (Backend, &'static str) {
    match (config.backend, config.device) {
        (BackendChoice::Of(backend), _) => (backend, "configured"),
        (BackendChoice::Auto, DeviceAccess::Contiguous) => {
            (Backend::DmaHeap, "a device reads the pool and cannot scatter")
        }
        (BackendChoice::Auto, DeviceAccess::Iommu) => {
            (Backend::Udmabuf, "a device behind an IOMMU reads the pool")
        }
        (BackendChoice::Auto, DeviceAccess::Vfio) => {
            (Backend::Memfd, "a device that user space drives reads the pool through iommufd")
        }
        (BackendChoice::Auto, DeviceAccess::None) if config.heap.is_some() => {
            (Backend::DmaHeap, "a heap is named")
        }
        (BackendChoice::Auto, DeviceAccess::None) => (Backend::Memfd, "no device reads the pool"),
    }
}

/// Refuses what contradicts itself, on whatever machine.
pub(super) fn consistent(config: &Config) -> Result<Extents, ConfigError> {
    let origins = &config.origins;
    values(config, origins)?;
    paths(config, origins)?;
    let extents = cut(config, backend(config).0).map_err(|e| packing(config, origins, &e))?;
    let least = config.minimum_bytes.div_ceil(extents.bytes).max(1);
    if least > extents.count {
        let most = Size::from_bytes(extents.count * extents.bytes);
        let value = Size::from_bytes(config.minimum_bytes).exact();
        let why = format!(
            "after packing, the pool is {} extents, {most} in all: ask for at most that",
            extents.count
        );
        return Err(origins.wrong("pool.minimum", value, why));
    }
    if config.shares_prompts() {
        if backend(config).0 == Backend::DmaHeap {
            let why = "memory of a dma-heap cannot be handed out for reading only, and no other tenant may get it \
                       writable: use a pool of memfd or udmabuf, or let each tenant compute its own prompt";
            return Err(origins.wrong("prefix.common", "a pool of dma-heap", why.into()));
        }
        if config.common_bytes() < extents.bytes {
            let (value, each) =
                (Size::from_bytes(config.common_bytes()).exact(), Size::from_bytes(extents.bytes).exact());
            let why = format!("copies are counted in whole extents, and one is {each}");
            return Err(origins.wrong("prefix.common-limit", value, why));
        }
        common_parts(config, origins, &extents)?;
    }
    for (tenant, limit) in config.tenant_limits() {
        if limit.bytes() < extents.bytes {
            let (key, value) = match tenant {
                Some(uid) => ("tenant", format!("uid {uid}, limit {}", limit.exact())),
                None => ("limits.tenant", limit.exact()),
            };
            let each = Size::from_bytes(extents.bytes).exact();
            let why =
                format!("a tenant owns whole extents, and one is {each}: at this limit it could own nothing");
            return Err(origins.wrong(key, value, why));
        }
    }
    reserves(config, origins, &extents)?;
    Ok(extents)
}

/// Refuses reserves that could not be kept: together more than the pool, or one beyond its own limit. In extents, since
/// that is how they are kept.
fn reserves(config: &Config, origins: &Origins, extents: &Extents) -> Result<(), ConfigError> {
    let policy = config.policy(extents.bytes, extents.one_block);
    let mut all = 0;
    for (uid, reserve) in config.tenant_reserves() {
        let kept = policy.tenants[&Tenant(uid)];
        all += u64::from(kept.reserve);
        if let Some(limit) = kept.limit.filter(|limit| *limit < kept.reserve) {
            let most = Size::from_bytes(config.limit_of(uid).map_or(u64::MAX, Size::bytes)).exact();
            let value = format!("uid {uid}, reserve {}, limit {most}", reserve.exact());
            let each = Size::from_bytes(extents.bytes);
            let why = format!(
                "that is {} extents of {each} reserved, and {limit} allowed: a reserve counts as whole extents from \
                 below, a limit from above",
                kept.reserve
            );
            return Err(origins.wrong("tenant", value, why));
        }
    }
    if all > extents.count {
        let value = Size::from_bytes(all.saturating_mul(extents.bytes)).exact();
        let why = format!("the reserves are {all} extents together, and the pool has {}", extents.count);
        return Err(origins.wrong("tenant", value, why));
    }
    Ok(())
}

/// Refuses parts of `prefix.common-limit` in which a donor could have no copy, or that are more than all of it.
fn common_parts(config: &Config, origins: &Origins, extents: &Extents) -> Result<(), ConfigError> {
    let policy = config.policy(extents.bytes, extents.one_block);
    let (all, each) =
        (Size::from_bytes(policy.common_bytes).exact(), Size::from_bytes(extents.bytes).exact());
    let named: u64 = policy.common_limits.values().fold(0, |sum, bytes| sum.saturating_add(*bytes));
    if named > policy.common_bytes {
        let value = format!("limits of {} together", Size::from_bytes(named).exact());
        let why = format!("that is more than the {all} of prefix.common-limit");
        return Err(origins.wrong("prefix.common", value, why));
    }
    let places = u32::try_from(policy.common_bytes / extents.bytes).unwrap_or(u32::MAX);
    let parts = crate::broker::common_parts(&policy.common, &policy.common_limits, places, extents.bytes);
    match parts.into_iter().find(|(_, part)| *part == 0) {
        Some((donor, _)) => {
            let why = format!(
                "its part of prefix.common-limit, {all}, is less than one extent of {each}: with a limit in one of its \
                 rules it gets that, without one an equal part of what the limits of the others leave"
            );
            Err(origins.wrong("prefix.common", format!("uid {}", donor.0), why))
        }
        None => Ok(()),
    }
}

/// Why prompts cannot be common here, if the kernel does not tell who has a copy open.
pub(super) fn cannot_prove_copies(config: &Config) -> Option<String> {
    if !config.shares_prompts() {
        return None;
    }
    let why = Sealed::probe().err()?;
    Some(format!("nothing would tell when the memory of a copy is free again: {why}"))
}

/// Why the pool does not fit into the memory cgroups of this process, if it is made of what they count: ordinary memory. The
/// kernel would end the process without a word.
pub(super) fn beyond_cgroup(config: &Config) -> Option<String> {
    let counted = backend(config).0.is_scattered();
    let cgroups = std::fs::read_to_string("/proc/self/cgroup").ok().filter(|_| counted)?;
    let (limit, file) = cgroup_bytes(&cgroups, |file| std::fs::read_to_string(file).ok())?;
    too_tight(config, limit, &file)
}

/// The same for a limit that `file` says.
pub(crate) fn too_tight(config: &Config, limit: u64, file: &str) -> Option<String> {
    let needed = config.pool_bytes.saturating_add(BESIDE_THE_POOL);
    (limit < needed).then(|| {
        let [limit, needed] = [limit, needed].map(Size::from_bytes);
        format!(
            "the memory cgroup lets processes have {limit} ({file}), and the pool and the daemon take {needed}; make pool.size \
             smaller, or raise MemoryMax= of the unit or the container's limit"
        )
    })
}

/// What keeps nobody from being served, and is most likely a mistake.
pub(super) fn doubt(config: &Config) -> Option<String> {
    let directory = &config.store.as_ref()?.location.path;
    let parent = directory_of(directory);
    let why = || {
        format!(
            "there is no directory {}, so pinned prefixes are neither saved nor brought back: make it, or name another",
            parent.display()
        )
    };
    (!parent.is_dir())
        .then(|| config.origins.wrong("prefix.store.directory", directory.display(), why()).to_string())
}

/// Refuses what this machine cannot give: memory, groups, directories, heaps.
pub(super) fn possible_here(config: &Config) -> Result<Outlook, ConfigError> {
    let origins = &config.origins;
    let extents = consistent(config)?;
    for (key, path) in sockets(config) {
        let directory = directory_of(path);
        if !directory.is_dir() {
            let directory = directory.display();
            let why = format!(
                "there is no directory {directory}: make it (install -d {directory}), or systemd-tmpfiles --create"
            );
            return Err(origins.wrong(key, path.display(), why));
        }
    }
    if let Some(group) = &config.socket_group {
        let found = nix::unistd::Group::from_name(group);
        if !matches!(found, Ok(Some(_))) {
            let why = format!("there is no such group: make it (groupadd --system {group}), or name another");
            return Err(origins.wrong("socket.group", group, why));
        }
    }
    // Only whether they are there: that they may be opened is the daemon's to find out, as with heaps.
    let table = &config.device_table;
    if let Some(node) = &table.node {
        let bind = "there is no such device: bind it first (kvbroker-npu-bind prints its node), on a kernel with \
                    CONFIG_VFIO_DEVICE_CDEV";
        let need = "there is no such device, and device.node needs one: load the module (modprobe iommufd), on a kernel \
                    with CONFIG_IOMMUFD";
        for (key, path, why) in [("device.node", node, bind), ("device.iommu", &table.iommu, need)] {
            if !path.exists() {
                return Err(origins.wrong(key, path.display(), why.into()));
            }
        }
    }
    if let Some(why) = cannot_prove_copies(config) {
        return Err(origins.wrong("prefix.common", "rules", why));
    }
    let size = || Size::from_bytes(config.pool_bytes).exact();
    if let Some(memory) = memory_bytes().filter(|m| *m < config.pool_bytes) {
        let why = format!("this machine has {} of memory; make pool.size smaller", Size::from_bytes(memory));
        return Err(origins.wrong("pool.size", size(), why));
    }
    if let Some(why) = beyond_cgroup(config) {
        return Err(origins.wrong("pool.size", size(), why));
    }
    // Extents of ordinary memory are files.
    let file = backend(config).0.is_scattered().then_some(extents.bytes);
    if let Some(limit) = file.and_then(beyond_file_size) {
        let why = format!(
            "an extent of {} is a file, and a process that is started like this one may have none of more than {limit} \
             bytes (RLIMIT_FSIZE): ulimit -f unlimited, or LimitFSIZE=infinity in the unit",
            Size::from_bytes(extents.bytes)
        );
        return Err(origins.wrong("pool.extent", config.extent, why));
    }
    Ok(Outlook { extents: (extents.count, extents.bytes), source: source(config, origins)? })
}

fn sockets(config: &Config) -> [(&'static str, &Path); 2] {
    [("socket.path", &config.socket), ("socket.admin-path", &config.admin_socket)]
}

fn values(config: &Config, origins: &Origins) -> Result<(), ConfigError> {
    let scattered = match config.backend {
        BackendChoice::Of(backend) if backend.is_scattered() => Some(backend),
        _ => None,
    };
    if let Some(backend) = scattered.filter(|_| config.device == DeviceAccess::Contiguous) {
        let why = "the pages of a memfd are scattered, and pool.device = \"contiguous\" says that the device cannot \
                   scatter: use backend = \"dma-heap\", or another device";
        return Err(origins.wrong("pool.backend", backend, why.into()));
    }
    if !CMA_ALIGNMENT_ORDERS.contains(&config.cma_alignment_order) {
        let (least, most) = (CMA_ALIGNMENT_ORDERS.start(), CMA_ALIGNMENT_ORDERS.end());
        let why = format!("the kernel's CONFIG_CMA_ALIGNMENT goes from {least} to {most}; nearly all have 8");
        return Err(origins.wrong("pool.cma-alignment-order", config.cma_alignment_order, why));
    }
    let policy = config.policy(1, false);
    let limits = [
        ("limits.connections", policy.connections),
        ("limits.connections-per-tenant", policy.connections_per_tenant),
        ("limits.sessions-per-connection", policy.sessions_per_connection),
        ("limits.profiles-per-connection", policy.profiles_per_connection),
    ];
    if let Some((key, _)) = limits.iter().find(|(_, n)| *n == 0) {
        return Err(origins.wrong(key, 0, "nobody could use the broker: 1 is the least".into()));
    }
    let bounds = [
        ("limits.connections", policy.connections.into(), MOST_CONNECTIONS.into()),
        ("limits.table-blocks", policy.table_blocks_per_tenant.unwrap_or(0), MOST_TABLE_BLOCKS),
    ];
    if let Some((key, n, most)) = bounds.into_iter().find(|(_, n, most)| n > most) {
        return Err(origins.wrong(key, n, format!("no machine has room for that: {most} is the most")));
    }
    for tenant in policy.tenants.keys() {
        if let Some(why) = tenant.why_nobody() {
            return Err(origins.wrong("tenant", format!("uid {}", tenant.0), why.into()));
        }
    }
    Ok(())
}

fn paths(config: &Config, origins: &Origins) -> Result<(), ConfigError> {
    let heaps = [("pool.heap-directory", Some(&config.heap_directory)), ("pool.heap", config.heap.as_ref())];
    let heaps = heaps.iter().filter_map(|(k, p)| Some((*k, p.as_ref()?.as_path())));
    for (key, path) in heaps.chain(sockets(config)) {
        if path.as_os_str().is_empty() {
            return Err(origins.wrong(key, "\"\"", "an empty path leads nowhere".into()));
        }
    }
    for (key, path) in sockets(config) {
        let bytes = path.as_os_str().len();
        if bytes > LONGEST_SOCKET_PATH {
            let why =
                format!("{bytes} bytes are too long: the path of a socket has at most {LONGEST_SOCKET_PATH}");
            return Err(origins.wrong(key, path.display(), why));
        }
    }
    if config.socket == config.admin_socket {
        let why = "clients and operators need a socket each".into();
        return Err(origins.wrong("socket.admin-path", config.admin_socket.display(), why));
    }
    Ok(())
}

/// The directory that `path` is in.
pub(super) fn directory_of(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn packing(config: &Config, origins: &Origins, error: &PackingError) -> ConfigError {
    let key = match error {
        PackingError::PoolTooSmall { .. } => "pool.size",
        PackingError::NotPages { .. } | PackingError::ExtentTooLarge(_) | PackingError::NeverFits { .. } => {
            "pool.extent"
        }
        PackingError::CmaOrder(_) => "pool.cma-alignment-order",
        _ => "profile",
    };
    let value = match key {
        "pool.size" => Size::from_bytes(config.pool_bytes).exact(),
        "pool.extent" => config.extent.to_string(),
        _ => String::new(),
    };
    origins.wrong(key, value, error.to_string())
}

/// Where the memory would come from. That the heap is there is checked; that it may be opened is the daemon's to find
/// out, who runs as another user than whoever checks.
fn source(config: &Config, origins: &Origins) -> Result<String, ConfigError> {
    match backend(config).0 {
        Backend::DmaHeap => {}
        Backend::Udmabuf if Path::new(UDMABUF_DEVICE).exists() => return Ok(UDMABUF_DEVICE.into()),
        Backend::Udmabuf => {
            let why = format!(
                "there is no {UDMABUF_DEVICE}: load the module (modprobe udmabuf), or use another backend"
            );
            return Err(origins.wrong("pool.backend", "udmabuf", why));
        }
        Backend::Memfd | Backend::Imaginary => return Ok("memfd".into()),
    }
    let directory = &config.heap_directory;
    let path: PathBuf = match &config.heap {
        Some(heap) => directory.join(heap),
        None => DmaHeap::find(directory).ok_or_else(|| {
            let why = "no CMA heap was found there, and this pool needs one; name it with pool.heap, or let \
                       `kvbctl doctor` say which heaps this kernel has";
            origins.wrong("pool.heap-directory", directory.display(), why.into())
        })?,
    };
    if path.exists() {
        return Ok(path.display().to_string());
    }
    let mut others: Vec<_> = std::fs::read_dir(directory)
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect();
    others.sort();
    let why = match others.is_empty() {
        true => format!("there is no such heap, and none at all in {}", directory.display()),
        false => format!("there is no such heap; {} has {}", directory.display(), others.join(", ")),
    };
    Err(origins.wrong("pool.heap", path.display(), why))
}
