//! From a configuration to a daemon that serves.
//!
//! Owns nothing for long. Invariant: the daemon says that it is ready only when the pool is taken and both sockets are
//! open; whatever prevents that ends it with words that say what to do.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::socket::SockType;
use thiserror::Error;

use super::check;
use super::config::{Config, DeviceAccess};
use super::listener::{ListenError, Listener};
use super::pressure::Pressure;
use super::server::{Limits, Server};
use super::worker::Worker;
use crate::broker::Broker;
use crate::heap::{
    Backend, DmaHeap, Heap, HeapError, Memfd, UDMABUF_DEVICE, Udmabuf, UdmabufLimits, memory_bytes,
};
use crate::map::page_bytes;
use crate::packing::PackingError;
use crate::size::Size;
use crate::window::iommu::{Device, IommuError};
use crate::window::{Access, Means, StagingMeans, udmabuf};

/// Why the daemon does not serve.
#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum StartError {
    #[error(transparent)]
    Heap(#[from] HeapError),
    #[error(transparent)]
    Packing(#[from] PackingError),
    #[error(transparent)]
    Iommu(#[from] IommuError),
    #[error(transparent)]
    Listen(#[from] ListenError),
    #[error(
        "{directory}: no CMA heap was found there, and pool.device = \"contiguous\" needs one; name it with pool.heap, or see which heaps this kernel has"
    )]
    NoHeap { directory: PathBuf },
    #[error(
        "the daemon may open {open} files, which leaves none for connections beside the pool's {descriptors}; raise LimitNOFILE, make prefix.common-limit smaller, or the extents larger"
    )]
    NoConnections { open: u64, descriptors: u64 },
    #[error("a pool of {pool} is more than the {memory} of this machine; make pool.size smaller")]
    LargerThanMemory { pool: Size, memory: Size },
    #[error("a pool of {pool} is too large: {why}")]
    LargerThanCgroup { pool: Size, why: String },
    #[error("prompts cannot be common to several tenants (prefix.common): {0}")]
    NoProof(String),
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// The heap, and why it is this one.
fn choose_heap(config: &Config) -> Result<(Arc<dyn Heap>, String), StartError> {
    let (backend, why) = check::backend(config);
    match backend {
        Backend::DmaHeap => {
            let directory = &config.heap_directory;
            let path = match &config.heap {
                Some(heap) => directory.join(heap),
                None => DmaHeap::find(directory)
                    .ok_or_else(|| StartError::NoHeap { directory: directory.clone() })?,
            };
            return Ok((Arc::new(DmaHeap::open(&path)?), why.into()));
        }
        Backend::Udmabuf => return Ok((Arc::new(Udmabuf::open(UDMABUF_DEVICE.as_ref())?), why.into())),
        Backend::Memfd | Backend::Imaginary => {}
    }
    if config.lock {
        // One page shows whether the limit lets anything be locked at all.
        let locked = Memfd::new(true);
        match locked.allocate(config.pool_bytes.min(16 << 20).next_multiple_of(page_bytes() as u64)) {
            Ok(_) => return Ok((Arc::new(locked), why.into())),
            Err(e) => log::info!("the pool is not locked in memory and may be swapped: {e} (LimitMEMLOCK)"),
        }
    }
    Ok((Arc::new(Memfd::new(false)), why.into()))
}

/// What there is for windows, each with its reason if it is not there. Only a device that is named must be there.
fn means(config: &Config) -> Result<Means, StartError> {
    let device = &config.device_table;
    let iommu = match &device.node {
        Some(node) => Ok(Arc::new(Device::open(node, &device.iommu, device.address_bits)?)),
        None => Err("no device is configured (device.node)".into()),
    };
    Ok(Means {
        access: match config.device {
            DeviceAccess::None => Access::Unknown,
            DeviceAccess::Contiguous => Access::Contiguous,
            DeviceAccess::Iommu => Access::Scatter,
            DeviceAccess::Vfio => Access::Iommu,
        },
        coherent: config.device_coherent,
        udmabuf: udmabuf::Udmabuf::open(&device.udmabuf).map(Arc::new).map_err(|e| e.to_string()),
        iommu,
        staging: staging(config),
    })
}

fn staging(config: &Config) -> Result<StagingMeans, String> {
    let (device, directory) = (&config.device_table, &config.heap_directory);
    let page = page_bytes() as u64;
    let bytes = device.staging.bytes() / (2 * page) * (2 * page);
    if bytes == 0 {
        return Err("device.staging = 0 says that there is to be no staging buffer".into());
    }
    let named = device.staging_heap.as_ref().map(|heap| directory.join(heap));
    let path = named.or_else(|| DmaHeap::find(directory));
    let path = path.ok_or_else(|| format!("{}: no CMA heap for a staging buffer", directory.display()))?;
    let heap = DmaHeap::open(&path).map_err(|e| e.to_string())?;
    Ok(StagingMeans { heap: Arc::new(heap), bytes, total: device.staging_total.bytes() })
}

fn listeners(config: &Config) -> Result<(Listener, Listener), StartError> {
    let (mut clients, mut admin) = (None, None);
    for (fd, name) in sd_notify::listen_fds_with_names()? {
        // SAFETY: systemd hands each descriptor over once, and listen_fds_with_names clears the variables that name them.
        #[allow(unsafe_code)]
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        match name.as_str() {
            "client" => clients = Some(Listener::inherited(fd)?),
            "admin" => admin = Some(Listener::inherited(fd)?),
            other => log::warn!("a socket called {other} was handed over; only client and admin are known"),
        }
    }
    let clients = match clients {
        Some(l) => l,
        None => {
            let group = config.socket_group.as_deref();
            Listener::bind(&config.socket, SockType::SeqPacket, config.socket_mode, group)?
        }
    };
    let admin = match admin {
        Some(l) => l,
        None => Listener::bind(&config.admin_socket, SockType::Stream, 0o600, None)?,
    };
    Ok((clients, admin))
}

/// Whether whoever started this process has it ignore SIGHUP, as nohup does.
fn ignores_hang_ups() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    ignored.is_some_and(|mask| mask & 1 << (Signal::SIGHUP as i32 - 1) != 0)
}

/// Takes the pool, opens the sockets, and serves until SIGTERM, SIGINT or SIGHUP.
pub fn run(config: &Config) -> Result<(), StartError> {
    // Before there is a second thread, so that all have the same mask.
    let mut stop = SigSet::empty();
    stop.add(Signal::SIGTERM);
    stop.add(Signal::SIGINT);
    // Its terminal has gone, or somebody means a reload, which is a restart: either way clients get their goodbye.
    if !ignores_hang_ups() {
        stop.add(Signal::SIGHUP);
    }
    stop.thread_block().map_err(io::Error::from)?;
    // A stored prefix beyond RLIMIT_FSIZE is an error of one file, not the end of the daemon.
    let mut too_large = SigSet::empty();
    too_large.add(Signal::SIGXFSZ);
    too_large.thread_block().map_err(io::Error::from)?;
    let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
    let signals = SignalFd::with_flags(&stop, flags).map_err(io::Error::from)?;
    raise_open_files();

    if let Some(why) = check::cannot_prove_copies(config) {
        return Err(StartError::NoProof(why));
    }
    // Sockets first: a second daemon is told so before it takes memory.
    let (clients, admin) = listeners(config)?;
    if let Some(memory) = memory_bytes().filter(|m| *m < config.pool_bytes) {
        let (pool, memory) = (Size::from_bytes(config.pool_bytes), Size::from_bytes(memory));
        return Err(StartError::LargerThanMemory { pool, memory });
    }
    if let Some(why) = check::beyond_cgroup(config) {
        return Err(StartError::LargerThanCgroup { pool: Size::from_bytes(config.pool_bytes), why });
    }
    let (heap, why) = choose_heap(config)?;
    let extents = check::cut(config, heap.backend())?;
    // Said before any memory is taken; without the figure the kernel itself refuses.
    if let Some(limit) = UdmabufLimits::read().filter(|_| heap.backend() == Backend::Udmabuf) {
        if extents.bytes > limit.bytes {
            let (heap, bytes, limit) = (heap.name(), extents.bytes, limit.bytes);
            return Err(HeapError::TooLarge { heap, bytes, limit }.into());
        }
    }
    let least = config.minimum_bytes.div_ceil(extents.bytes).max(1);
    let as_count = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
    let mut policy = config.policy(extents.bytes, extents.one_block);
    let descriptors = u64::from(heap.backend().descriptors()) * extents.count
        // One of the broker's for each copy, and one for the reader that it is being sent to.
        + 2 * (policy.common_bytes / extents.bytes);
    let most = connections_within_open_files(descriptors);
    if most == 0 {
        return Err(StartError::NoConnections { open: open_files(), descriptors });
    }
    if policy.connections > most {
        log::warn!(
            "limits.connections = {} is more than LimitNOFILE lets: {most} connections are served",
            policy.connections
        );
        policy.connections = most;
    }
    let left = windows_within_open_files(descriptors, policy.connections);
    if policy.windows > left {
        log::info!(
            "limits.windows = {} is more than LimitNOFILE lets: {left} windows are served",
            policy.windows
        );
        policy.windows = left;
    }
    let limits = Limits {
        connections_per_tenant: policy.connections_per_tenant,
        hello: Duration::from_millis(policy.hello_ms.into()),
    };
    let mut broker = Broker::new(heap, extents.bytes, as_count(extents.count), as_count(least), policy)?;
    broker.set_reason(why);
    broker.set_means(means(config)?);
    broker.set_cut(extents);

    let pressure = Pressure::open(config.pressure.clone());
    if pressure.is_blind() && config.elastic {
        log::warn!("pool.elastic = true has no effect: {}", pressure.how());
    }
    broker.set_pressure_watch(pressure.how());

    if let Some(store) = &config.store {
        broker.set_store(store.clone());
        broker.load_at_start(std::time::Instant::now());
    }
    let worker = Worker::start(broker.heap())?;
    let status = broker.status();
    let said = format!(
        "{} extents of {}, {} in all, on {}",
        status.pool.extents,
        Size::from_bytes(status.pool.extent_bytes),
        Size::from_bytes(status.pool.bytes),
        status.pool.heap,
    );
    let watchdog = sd_notify::watchdog_enabled().filter(|d| *d > Duration::ZERO);
    let server = Server::new(broker, worker, (clients, admin), signals, pressure, limits, watchdog)?;
    log::info!("ready: {said}");
    if status.pool.backend == Backend::DmaHeap {
        log::info!("count of an extent's holders: {}", status.pool.holder_count.text);
    }
    let states = [sd_notify::NotifyState::Ready, sd_notify::NotifyState::Status(&said)];
    if let Err(e) = sd_notify::notify(&states) {
        log::warn!("systemd could not be told: {e}");
    }
    Ok(server.serve()?)
}

/// How many connections leave enough descriptors for everything else: an extent that could not be renewed for want of
/// one would be lost to the pool. A connection takes its socket and its process.
fn connections_within_open_files(extent_descriptors: u64) -> u32 {
    u32::try_from(open_files_beside(extent_descriptors) / 2).unwrap_or(u32::MAX)
}

/// How many windows are left then: each may take one.
fn windows_within_open_files(extent_descriptors: u64, connections: u32) -> u32 {
    let left = open_files_beside(extent_descriptors).saturating_sub(2 * u64::from(connections));
    u32::try_from(left).unwrap_or(u32::MAX)
}

/// Descriptors beside extents and what the daemon itself needs.
fn open_files_beside(extent_descriptors: u64) -> u64 {
    const OWN: u64 = 48;
    open_files().saturating_sub(extent_descriptors.saturating_add(OWN))
}

/// Files that this process may have open.
fn open_files() -> u64 {
    use nix::sys::resource::{Resource, getrlimit};
    getrlimit(Resource::RLIMIT_NOFILE).map_or(u64::MAX, |(soft, _)| soft)
}

/// Descriptors in unread messages count against this process: as many as the hard limit lets.
fn raise_open_files() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let raised = getrlimit(Resource::RLIMIT_NOFILE).and_then(|(soft, hard)| {
        if soft < hard { setrlimit(Resource::RLIMIT_NOFILE, hard, hard) } else { Ok(()) }
    });
    if let Err(e) = raised {
        log::debug!("the limit of open files stays as it is: {e}");
    }
}
