//! What the operator configures: `/etc/kvbroker/kvbroker.toml`, the drop-ins beside it, and the command line over both.
//!
//! Owns no state. Invariant: a configuration that exists is complete, with each value within its bounds; an unknown key, a
//! wrong type or a size without unit is an error that names the file and the key, never a default in disguise. What
//! contradicts something else only once the pool is cut, [`Config::consistent`] refuses.

mod files;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use serde::Deserialize;
use thiserror::Error;

pub(super) use files::Origins;
use files::{drop_ins, explain, merge, name, read_text};

use super::check::{self, Outlook};
use super::pressure;
use crate::broker::{CommonRule, Eviction, Policy, StorePolicy, TenantPolicy};
use crate::client::DEFAULT_SOCKET;
use crate::heap::{Backend, DmaHeap, UDMABUF_DEVICE};
use crate::id::Tenant;
use crate::model::{KvType, ModelShape};
use crate::packing::{CMA_ALIGNMENT_ORDER, ExtentSize, Extents, PackingError};
use crate::profile::{Profile, USUAL_TOKENS_PER_BLOCK};
use crate::quote::shown;
use crate::size::Size;
use crate::store::Location;

/// Why there is no configuration.
#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum ConfigError {
    #[error("{}: {source}", name(.path))]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{}: {message}", name(.path))]
    Parse { path: PathBuf, message: String },
    #[error("{origin}: {text}")]
    Value { origin: String, text: String },
    #[error("{origin}: {key} = {value}: {why}")]
    Setting { origin: String, key: String, value: String, why: String },
}

/// How the device that reads the pool reaches memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceAccess {
    /// No device does: engines run on the CPU.
    #[default]
    None,
    /// It must have physically contiguous memory.
    Contiguous,
    /// It is behind an IOMMU and imports dma-bufs, whose pages may be scattered.
    Iommu,
    /// It is driven from user space, through VFIO and iommufd.
    Vfio,
}

/// The device that reads windows, beside how it reaches memory.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default, expecting = "the table [device]")]
pub struct DeviceTable {
    /// Its character device, if user space drives it.
    pub node: Option<PathBuf>,
    /// Bits of an address of it.
    pub address_bits: u32,
    /// Whether it sees what CPUs have in their caches; if nothing is said, see [`Config::device_coherent`].
    pub coherent: Option<bool>,
    /// The IOMMU's.
    pub iommu: PathBuf,
    /// What makes dma-bufs of memfds.
    pub udmabuf: PathBuf,
    /// Bytes of one process's staging buffer; 0 for none.
    pub staging: Size,
    /// Bytes of all of them together.
    pub staging_total: Size,
    /// Where they come from, if not from the CMA heap by its usual names.
    pub staging_heap: Option<PathBuf>,
}

impl Default for DeviceTable {
    fn default() -> Self {
        DeviceTable {
            node: None,
            address_bits: 32,
            coherent: None,
            iommu: "/dev/iommu".into(),
            udmabuf: UDMABUF_DEVICE.into(),
            staging: Size::from_bytes(2 << 20),
            staging_total: Size::from_bytes(8 << 20),
            staging_heap: None,
        }
    }
}

/// Which kind of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum BackendChoice {
    /// By who will read the memory.
    Auto,
    /// This one.
    Of(Backend),
}

impl BackendChoice {
    const AUTO: &str = "auto";

    /// On the command line.
    fn parser() -> impl TypedValueParser<Value = BackendChoice> {
        let auto = PossibleValue::new(Self::AUTO).help("By who will read the memory");
        let of = |b: Backend| PossibleValue::new(b.name()).help(b.about());
        let all = std::iter::once(auto).chain(Backend::CONFIGURABLE.map(of));
        PossibleValuesParser::new(all).try_map(BackendChoice::try_from)
    }
}

impl TryFrom<String> for BackendChoice {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        if text == Self::AUTO {
            return Ok(BackendChoice::Auto);
        }
        Backend::configurable(&text).map(BackendChoice::Of).ok_or_else(|| {
            let known = Backend::CONFIGURABLE.map(Backend::name).join(", ");
            let text: String = text.chars().take(40).collect();
            format!("{text:?} is no kind of memory: use {}, {known}", Self::AUTO)
        })
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default, expecting = "the table [pool]")]
struct PoolTable {
    size: Size,
    minimum: Option<Size>,
    backend: BackendChoice,
    device: DeviceAccess,
    heap: Option<PathBuf>,
    heap_directory: PathBuf,
    extent: ExtentSize,
    cma_alignment_order: u32,
    lock: bool,
    elastic: bool,
    floor: Option<Size>,
}

impl Default for PoolTable {
    fn default() -> Self {
        PoolTable {
            size: Size::from_bytes(256 << 20),
            minimum: None,
            backend: BackendChoice::Auto,
            device: DeviceAccess::None,
            heap: None,
            heap_directory: "/dev/dma_heap".into(),
            extent: ExtentSize::Auto,
            cma_alignment_order: CMA_ALIGNMENT_ORDER,
            lock: true,
            elastic: false,
            floor: None,
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default, expecting = "the table [socket]")]
struct SocketTable {
    path: PathBuf,
    mode: String,
    group: Option<String>,
    admin_path: PathBuf,
}

impl Default for SocketTable {
    fn default() -> Self {
        SocketTable {
            path: DEFAULT_SOCKET.into(),
            mode: "0660".into(),
            group: None,
            admin_path: super::DEFAULT_ADMIN_SOCKET.into(),
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default, expecting = "the table [limits]")]
struct LimitsTable {
    connections: u32,
    connections_per_tenant: u32,
    hello_ms: u32,
    sessions_per_connection: u32,
    profiles_per_connection: u32,
    table_blocks: Option<u64>,
    windows_per_session: u32,
    windows_per_tenant: u32,
    windows: u32,
    tenant: Option<Size>,
    connection: Option<Size>,
    pinned: Option<Size>,
    reclaim_ms: u32,
    rest_ms: u32,
}

impl Default for LimitsTable {
    fn default() -> Self {
        let policy = Policy::default();
        LimitsTable {
            connections: policy.connections,
            connections_per_tenant: policy.connections_per_tenant,
            hello_ms: policy.hello_ms,
            sessions_per_connection: policy.sessions_per_connection,
            profiles_per_connection: policy.profiles_per_connection,
            table_blocks: policy.table_blocks_per_tenant,
            windows_per_session: policy.windows_per_session,
            windows_per_tenant: policy.windows_per_tenant,
            windows: policy.windows,
            tenant: None,
            connection: None,
            pinned: None,
            reclaim_ms: policy.reclaim_ms,
            rest_ms: policy.rest_ms,
        }
    }
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", expecting = "a table [[tenant]]")]
struct TenantTable {
    uid: u32,
    reserve: Option<Size>,
    limit: Option<Size>,
    priority: Option<u8>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default, expecting = "the table [cache]")]
struct CacheTable {
    limit: Option<Size>,
    eviction: Eviction,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default, expecting = "the table [prefix]")]
struct PrefixTable {
    store: StoreTable,
    common: Vec<CommonTable>,
    common_limit: Option<Size>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", expecting = "a table [[prefix.common]]")]
struct CommonTable {
    uid: u32,
    label: String,
    tenants: Vec<u32>,
    /// Of all copies of this uid's prompts, in whichever of its rules it stands.
    limit: Option<Size>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default, expecting = "the table [prefix.store]")]
struct StoreTable {
    directory: Option<PathBuf>,
    tenants: Option<Vec<u32>>,
    labels: Vec<String>,
    limit: Option<Size>,
    tenant_limit: Option<Size>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", expecting = "a table [[profile]]")]
struct ProfileTable {
    model: Option<PathBuf>,
    name: Option<String>,
    layers: Option<u32>,
    kv_heads: Option<u32>,
    head_dim: Option<u32>,
    #[serde(default = "default_kv_type")]
    kv_type: String,
    #[serde(default = "default_tokens_per_block")]
    tokens_per_block: u32,
}

fn default_kv_type() -> String {
    KvType::default().name().into()
}

fn default_tokens_per_block() -> u32 {
    USUAL_TOKENS_PER_BLOCK
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Scrub {
    /// When the owning process changes.
    #[default]
    Process,
    /// At every grant.
    Always,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
struct File {
    pool: PoolTable,
    socket: SocketTable,
    limits: LimitsTable,
    device: DeviceTable,
    cache: CacheTable,
    prefix: PrefixTable,
    tenant: Vec<TenantTable>,
    profile: Vec<ProfileTable>,
    scrub: Scrub,
}

/// What the command line sets over the files.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Overrides {
    /// Size of the pool, such as 192M
    #[arg(long, value_name = "SIZE")]
    pub pool: Option<Size>,
    /// Kind of memory
    #[arg(long, value_parser = BackendChoice::parser())]
    pub backend: Option<BackendChoice>,
    /// The heap, as a path or as a name under /dev/dma_heap
    #[arg(long, value_name = "PATH")]
    pub heap: Option<PathBuf>,
    /// Size of an extent: auto, block (one block each), or a size
    #[arg(long, value_name = "SIZE")]
    pub extent: Option<ExtentSize>,
    /// Cut extents for the model in this config.json or GGUF file
    #[arg(long, value_name = "PATH")]
    pub model: Option<PathBuf>,
    /// Element type of the KV cache of that model
    #[arg(long, value_name = "TYPE", requires = "model")]
    pub kv_type: Option<String>,
    /// Tokens per block of that model
    #[arg(long, value_name = "N", requires = "model")]
    pub tokens_per_block: Option<u32>,
    /// The socket for clients
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// The socket for operators
    #[arg(long, value_name = "PATH")]
    pub admin_socket: Option<PathBuf>,
    /// A file to read in place of /proc/pressure/memory, for tests
    #[arg(long, value_name = "PATH", hide = true)]
    pub pressure_file: Option<PathBuf>,
    /// How often to read that, in milliseconds
    #[arg(long, value_name = "N", hide = true, requires = "pressure_file")]
    pub pressure_every: Option<u64>,
}

/// Everything that the daemon needs to know.
#[derive(Debug, Clone)]
pub struct Config {
    /// Bytes of the pool.
    pub pool_bytes: u64,
    /// With less memory than this the daemon does not start.
    pub minimum_bytes: u64,
    /// Which memory.
    pub backend: BackendChoice,
    /// Who reads it.
    pub device: DeviceAccess,
    /// What else is known of that device.
    pub device_table: DeviceTable,
    /// Whether the device is coherent: as configured, else what is true of every device driven through VFIO, which binds no
    /// other, and of DMA on x86-64.
    pub device_coherent: bool,
    /// The heap, if one is named.
    pub heap: Option<PathBuf>,
    /// Where heaps are.
    pub heap_directory: PathBuf,
    /// How extents are cut.
    pub extent: ExtentSize,
    /// `CONFIG_CMA_ALIGNMENT` of the kernel.
    pub cma_alignment_order: u32,
    /// Keep memfd extents out of swap.
    pub lock: bool,
    /// Give free extents back to the kernel while memory is short.
    pub elastic: bool,
    /// As long as more bytes than these are left.
    pub floor_bytes: u64,
    /// Where pressure on memory is read.
    pub(super) pressure: pressure::Source,
    /// The geometries that extents are cut for.
    pub profiles: Vec<Profile>,
    /// The socket for clients.
    pub socket: PathBuf,
    /// Its mode.
    pub socket_mode: u32,
    /// Its group.
    pub socket_group: Option<String>,
    /// The socket for operators.
    pub admin_socket: PathBuf,
    /// Where pinned prefixes are stored, if anywhere.
    pub store: Option<StorePolicy>,
    /// Limits. Those of tenants are still to be turned into extents: see [`Config::policy`].
    limits: Policy,
    tenant_limit: Option<Size>,
    pinned: u64,
    tenants: BTreeMap<Tenant, TenantTable>,
    /// Where each key was set, for what is said about it.
    pub(super) origins: Origins,
}

impl Default for Config {
    /// What an empty file gives.
    fn default() -> Self {
        Config::from_file(File::default(), &Overrides::default(), Origins::default())
            .expect("the defaults are consistent: a test reads them")
    }
}

impl Config {
    /// Reads `path`, if it exists or `must_exist`, and the `*.toml` files of the directory `path` + `.d` in the order of
    /// their names; later ones win, key by key, `[[tenant]]` by uid, `[[profile]]` as a whole. Then the command line.
    pub fn read(path: &Path, must_exist: bool, over: &Overrides) -> Result<Self, ConfigError> {
        Config::read_at(path, must_exist, over, Path::to_path_buf)
    }

    /// The same, without a command line, of a board whose `path` is `real(path)` on this machine.
    pub(crate) fn read_of_board(path: &Path, real: impl Fn(&Path) -> PathBuf) -> Result<Self, ConfigError> {
        Config::read_at(path, false, &Overrides::default(), real)
    }

    fn read_at(
        path: &Path,
        must_exist: bool,
        over: &Overrides,
        real: impl Fn(&Path) -> PathBuf,
    ) -> Result<Self, ConfigError> {
        let mut files = Vec::new();
        let first = real(path);
        match read_text(&first) {
            Ok(text) => files.push((first.clone(), text)),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound && !must_exist => {}
            Err(source) => return Err(ConfigError::Read { path: first, source }),
        }
        files.extend(drop_ins(path, real)?);
        Config::from_files(&first, files, over)
    }

    /// Reads one text as the only configuration file, called `path`, without a command line: what a fuzzer does.
    pub fn from_text(path: &Path, text: &str) -> Result<Self, ConfigError> {
        Config::from_files(path, vec![(path.into(), text.into())], &Overrides::default())
    }

    fn from_files(path: &Path, files: Vec<(PathBuf, String)>, over: &Overrides) -> Result<Self, ConfigError> {
        let mut merged = toml::Table::new();
        let mut origins = Origins::default();
        for (path, text) in files {
            let parse =
                |message: String| ConfigError::Parse { path: path.clone(), message: shown(&message, 1000) };
            // Each file by itself first, so that a mistake is shown where it stands.
            toml::from_str::<File>(&text).map_err(|e| parse(explain(&e, &text)))?;
            let table: toml::Table = text.parse().map_err(|e: toml::de::Error| parse(e.to_string()))?;
            origins.note(&path, &table);
            merge(&mut merged, table);
        }
        let whole = |e: toml::de::Error| {
            let message = shown(&e.to_string(), 1000);
            ConfigError::Parse { path: path.into(), message }
        };
        let file: File = merged.try_into().map_err(whole)?;
        origins.forget(&[
            ("pool.size", over.pool.is_some()),
            ("pool.backend", over.backend.is_some()),
            ("pool.heap", over.heap.is_some()),
            ("pool.extent", over.extent.is_some()),
            ("profile", over.model.is_some()),
            ("socket.path", over.socket.is_some()),
            ("socket.admin-path", over.admin_socket.is_some()),
        ]);
        Config::from_file(file, over, origins)
    }

    /// Refuses what contradicts itself: the same on every machine.
    pub fn consistent(&self) -> Result<(), ConfigError> {
        check::consistent(self).map(|_| ())
    }

    /// What a start on this machine would take; refuses what can be known to fail. Takes no memory.
    pub fn outlook(&self) -> Result<Outlook, ConfigError> {
        check::possible_here(self)
    }

    /// What keeps nobody from being served on this machine, and is most likely a mistake.
    pub fn doubt(&self) -> Option<String> {
        check::doubt(self)
    }

    /// Whether prompts are common to several tenants.
    pub(super) fn shares_prompts(&self) -> bool {
        !self.limits.common.is_empty()
    }

    /// Bytes that read-only copies of these may have.
    pub(super) fn common_bytes(&self) -> u64 {
        self.limits.common_bytes
    }

    /// The configured size of the pool.
    pub fn pool(&self) -> Size {
        Size::from_bytes(self.pool_bytes)
    }

    /// Whether the pool comes from a heap under /dev/dma_heap.
    pub fn wants_heap(&self) -> bool {
        check::backend(self).0 == Backend::DmaHeap
    }

    /// Whether the pool comes from /dev/udmabuf.
    pub fn wants_udmabuf(&self) -> bool {
        check::backend(self).0 == Backend::Udmabuf
    }

    /// Whether a device that cannot scatter is configured to read the pool.
    pub fn reads_contiguous(&self) -> bool {
        self.device == DeviceAccess::Contiguous
    }

    /// The most connections that are served.
    pub fn connections(&self) -> u32 {
        self.limits.connections
    }

    /// How the pool is cut on a machine with pages of `page` bytes.
    pub fn extents(&self, page: u64) -> Result<Extents, PackingError> {
        check::cut_for(self, page, !check::backend(self).0.is_scattered())
    }

    /// The heap that would be taken, as a path of the board whose heap directory is `directory` on this machine; `None` if
    /// none is named and none is a CMA heap by its name.
    pub fn heap_in(&self, directory: &Path) -> Option<String> {
        let path = match &self.heap {
            Some(heap) => self.heap_directory.join(heap),
            None => self.heap_directory.join(DmaHeap::find(directory)?.file_name()?),
        };
        Some(path.display().to_string())
    }

    /// Whether a tenant is named: then it is one whatever user namespace it comes from.
    pub fn names(&self, uid: u32) -> bool {
        self.tenants.contains_key(&Tenant(uid))
    }

    /// The limits of tenants as they are written; without uid the one for all.
    pub(super) fn tenant_limits(&self) -> impl Iterator<Item = (Option<u32>, Size)> + '_ {
        let each = self.tenants.iter().filter_map(|(tenant, t)| Some((Some(tenant.0), t.limit?)));
        self.tenant_limit.map(|limit| (None, limit)).into_iter().chain(each)
    }

    /// The limit that holds for `uid`, as it is written.
    pub(super) fn limit_of(&self, uid: u32) -> Option<Size> {
        self.tenants.get(&Tenant(uid)).and_then(|t| t.limit).or(self.tenant_limit)
    }

    /// The reserves of tenants as they are written.
    pub(super) fn tenant_reserves(&self) -> impl Iterator<Item = (u32, Size)> + '_ {
        self.tenants.iter().filter_map(|(tenant, t)| Some((tenant.0, t.reserve?)))
    }

    fn from_file(file: File, over: &Overrides, origins: Origins) -> Result<Self, ConfigError> {
        let pool_bytes = over.pool.unwrap_or(file.pool.size).bytes();
        let profiles = profiles(&file.profile, over, &origins)?;
        let socket_mode = socket_mode(&file.socket.mode, &origins)?;
        let tenants = tenants(&file.tenant, &origins)?;
        let (minimum_bytes, floor_bytes) = least(&file.pool, pool_bytes, &origins)?;
        let device_coherent = is_coherent(file.pool.device, &file.device, &origins)?;
        check_device(&file.device, &origins)?;
        let limits = limits(&file, pool_bytes, &origins)?;
        let usual = pressure::Source::default();
        let pressure = pressure::Source {
            path: over.pressure_file.clone().unwrap_or(usual.path),
            every: over.pressure_every.map_or(usual.every, std::time::Duration::from_millis),
        };
        let store = store(file.prefix.store, pool_bytes, &origins)?;
        Ok(Config {
            pool_bytes,
            minimum_bytes,
            backend: over.backend.unwrap_or(file.pool.backend),
            device: file.pool.device,
            device_table: file.device,
            device_coherent,
            heap: over.heap.clone().or(file.pool.heap),
            heap_directory: file.pool.heap_directory,
            extent: over.extent.unwrap_or(file.pool.extent),
            cma_alignment_order: file.pool.cma_alignment_order,
            lock: file.pool.lock,
            elastic: file.pool.elastic,
            floor_bytes,
            pressure,
            profiles,
            socket: over.socket.clone().unwrap_or(file.socket.path),
            socket_mode,
            socket_group: file.socket.group,
            admin_socket: over.admin_socket.clone().unwrap_or(file.socket.admin_path),
            store,
            limits,
            tenant_limit: file.limits.tenant,
            pinned: file.limits.pinned.map_or(pool_bytes / 4, Size::bytes),
            tenants,
            origins,
        })
    }

    /// The limits, those of tenants in whole extents of this pool: what changes hands is extents.
    pub fn policy(&self, extent_bytes: u64, one_block: bool) -> Policy {
        let extents = |size: Size| u32::try_from(size.bytes() / extent_bytes).unwrap_or(u32::MAX);
        let usual = TenantPolicy {
            limit: self.tenant_limit.map(extents),
            pinned: self.pinned,
            ..TenantPolicy::default()
        };
        let reserve = |size: Size| u32::try_from(size.bytes().div_ceil(extent_bytes)).unwrap_or(u32::MAX);
        let of = |t: &TenantTable| TenantPolicy {
            reserve: t.reserve.map_or(0, reserve),
            limit: t.limit.map(extents).or(usual.limit),
            priority: t.priority.unwrap_or(usual.priority),
            ..usual
        };
        Policy {
            usual_tenant: usual,
            tenants: self.tenants.iter().map(|(tenant, t)| (*tenant, of(t))).collect(),
            one_block_per_extent: one_block,
            checksums: true,
            elastic: self.elastic,
            floor_extents: match self.elastic {
                true => u32::try_from(self.floor_bytes.div_ceil(extent_bytes)).unwrap_or(u32::MAX),
                false => 0,
            },
            ..self.limits.clone()
        }
    }
}

/// Whose prompts are common to whom, and the bytes that copies may have.
type Common = (Vec<CommonRule>, BTreeMap<Tenant, u64>, u64);

/// Those of the command line, else those of the files, else the reference model.
fn profiles(
    tables: &[ProfileTable],
    over: &Overrides,
    origins: &Origins,
) -> Result<Vec<Profile>, ConfigError> {
    // Looked at whether or not they count: a file that is wrong is wrong beside any command line.
    let of_files = tables.iter().map(|t| profile(t, origins)).collect::<Result<Vec<_>, _>>()?;
    if let Some(model) = &over.model {
        let given = ProfileTable {
            model: Some(model.clone()),
            name: None,
            layers: None,
            kv_heads: None,
            head_dim: None,
            kv_type: over.kv_type.clone().unwrap_or_else(default_kv_type),
            tokens_per_block: over.tokens_per_block.unwrap_or_else(default_tokens_per_block),
        };
        return Ok(vec![profile(&given, origins)?]);
    }
    Ok(if of_files.is_empty() { vec![Profile::reference()] } else { of_files })
}

fn socket_mode(text: &str, origins: &Origins) -> Result<u32, ConfigError> {
    let mode = u32::from_str_radix(text, 8).ok().filter(|mode| *mode <= 0o777);
    mode.ok_or_else(|| origins.wrong("socket.mode", text, "write it in octal, such as \"0660\"".into()))
}

fn tenants(tables: &[TenantTable], origins: &Origins) -> Result<BTreeMap<Tenant, TenantTable>, ConfigError> {
    let mut tenants = BTreeMap::new();
    for t in tables {
        if tenants.insert(Tenant(t.uid), *t).is_some() {
            let text = format!("[[tenant]] uid = {} stands there twice", t.uid);
            return Err(origins.refuse("tenant", text));
        }
    }
    Ok(tenants)
}

/// The bytes that must be there at the start, and those that an elastic pool keeps.
fn least(t: &PoolTable, pool_bytes: u64, origins: &Origins) -> Result<(u64, u64), ConfigError> {
    let minimum = t.minimum.map_or(pool_bytes / 2, Size::bytes);
    let floor = t.floor.map_or(minimum, Size::bytes);
    for (key, bytes) in [("pool.minimum", minimum), ("pool.floor", floor)] {
        if bytes > pool_bytes {
            let why = format!("that is more than the pool of {}", Size::from_bytes(pool_bytes));
            return Err(origins.wrong(key, Size::from_bytes(bytes).exact(), why));
        }
    }
    Ok((minimum, floor))
}

/// Whether the device sees what the CPU's caches hold, where the way to it leaves a choice.
fn is_coherent(access: DeviceAccess, t: &DeviceTable, origins: &Origins) -> Result<bool, ConfigError> {
    let vfio = access == DeviceAccess::Vfio;
    if vfio && t.node.is_none() {
        let why = "it needs device.node, such as \"/dev/vfio/devices/vfio0\" (kvbroker-npu-bind prints it)";
        return Err(origins.wrong("pool.device", "vfio", why.into()));
    }
    if vfio && t.coherent == Some(false) {
        let why = "VFIO binds coherent devices only: leave it out, or name another pool.device";
        return Err(origins.wrong("device.coherent", "false", why.into()));
    }
    Ok(t.coherent.unwrap_or(vfio || cfg!(target_arch = "x86_64")))
}

fn check_device(t: &DeviceTable, origins: &Origins) -> Result<(), ConfigError> {
    if !(20..=64).contains(&t.address_bits) {
        return Err(origins.wrong("device.address-bits", t.address_bits, "a device has 20 to 64".into()));
    }
    if t.staging.bytes() > t.staging_total.bytes() {
        let why = format!("that is more than device.staging-total, {}", t.staging_total);
        return Err(origins.wrong("device.staging", t.staging.exact(), why));
    }
    Ok(())
}

/// All limits but those of tenants: see [`Config::policy`].
fn limits(file: &File, pool_bytes: u64, origins: &Origins) -> Result<Policy, ConfigError> {
    let t = &file.limits;
    if t.hello_ms == 0 {
        let why = "nobody is quick enough for that: give a connection some milliseconds to say hello";
        return Err(origins.wrong("limits.hello-ms", 0, why.into()));
    }
    let (common, common_limits, common_bytes) = common(&file.prefix, pool_bytes, origins)?;
    Ok(Policy {
        common,
        common_limits,
        common_bytes,
        connections: t.connections,
        connections_per_tenant: t.connections_per_tenant,
        hello_ms: t.hello_ms,
        sessions_per_connection: t.sessions_per_connection,
        profiles_per_connection: t.profiles_per_connection,
        table_blocks_per_tenant: t.table_blocks,
        windows_per_session: t.windows_per_session,
        windows_per_tenant: t.windows_per_tenant,
        windows: t.windows,
        bytes_per_connection: t.connection.map(Size::bytes),
        reclaim_ms: t.reclaim_ms,
        rest_ms: t.rest_ms,
        cache_bytes: file.cache.limit.map(Size::bytes),
        eviction: file.cache.eviction,
        scrub_always: file.scrub == Scrub::Always,
        ..Policy::default()
    })
}

fn common(t: &PrefixTable, pool: u64, origins: &Origins) -> Result<Common, ConfigError> {
    let wrong = |value: String, why: &str| Err(origins.wrong("prefix.common", value, why.into()));
    let (mut rules, mut limits) = (Vec::new(), BTreeMap::new());
    for c in &t.common {
        let value = format!("uid {}, label {:?}", c.uid, c.label);
        if c.label.is_empty() {
            return wrong(
                value,
                "name the prompts: the beginning of the label of their pins (kvbctl status)",
            );
        }
        if c.tenants.is_empty() || c.tenants.contains(&c.uid) {
            return wrong(value, "tenants names those who may read it beside the one who pins it");
        }
        let readers = c.tenants.iter().copied().map(Tenant).collect();
        rules.push(CommonRule { donor: Tenant(c.uid), label: c.label.clone(), readers });
        let Some(limit) = c.limit else { continue };
        if limits.insert(Tenant(c.uid), limit.bytes()).is_some_and(|other| other != limit.bytes()) {
            let value = format!("uid {}, limit {}", c.uid, limit.exact());
            return wrong(
                value,
                "another rule of this uid has another limit, and it is of all its copies together",
            );
        }
    }
    match (t.common_limit, rules.is_empty()) {
        (Some(limit), true) => {
            let why = "there is no [[prefix.common]] that it could limit".into();
            Err(origins.wrong("prefix.common-limit", limit.exact(), why))
        }
        (_, true) => Ok((rules, limits, 0)),
        (limit, false) => Ok((rules, limits, limit.map_or(pool / 4, Size::bytes))),
    }
}

fn store(t: StoreTable, pool: u64, origins: &Origins) -> Result<Option<StorePolicy>, ConfigError> {
    let Some(path) = t.directory else {
        let limits = t.limit.or(t.tenant_limit).is_some();
        let given = t.tenants.is_some() || !t.labels.is_empty() || limits;
        let why = "say which with directory = \"/var/lib/kvbroker/prefixes\"".into();
        return if given { Err(origins.wrong("prefix.store", "no directory", why)) } else { Ok(None) };
    };
    if !path.is_absolute() {
        let why = "write the directory from the root on".into();
        return Err(origins.wrong("prefix.store", path.display(), why));
    }
    if t.labels.iter().any(String::is_empty) {
        let why = "an empty label names no prefix: leave labels out to store all".into();
        return Err(origins.wrong("prefix.store", "labels", why));
    }
    let limit = t.limit.map_or(pool / 2, Size::bytes);
    let tenants: Option<BTreeSet<Tenant>> = t.tenants.map(|all| all.into_iter().map(Tenant).collect());
    // Without names nobody knows how many there will be: then no single one can fill it.
    let among = tenants.as_ref().map_or(2, |all| all.len().max(1) as u64);
    let part = t.tenant_limit.map_or(limit / among, Size::bytes);
    let all = if tenants.is_some() { part.saturating_mul(among) } else { part };
    if all > limit {
        let (value, limit) = (Size::from_bytes(part).exact(), Size::from_bytes(limit).exact());
        let why = match tenants {
            Some(_) => {
                format!("{among} tenants with that much have more than the {limit} of prefix.store.limit")
            }
            None => format!("that is more than the {limit} of prefix.store.limit, of all tenants together"),
        };
        return Err(origins.wrong("prefix.store.tenant-limit", value, why));
    }
    Ok(Some(StorePolicy { location: Location { path, limit, part }, tenants, labels: t.labels }))
}

fn profile(t: &ProfileTable, origins: &Origins) -> Result<Profile, ConfigError> {
    let value = |text: String| origins.refuse("profile", text);
    let kv: KvType = t.kv_type.parse().map_err(|e| value(format!("[[profile]] kv-type: {e}")))?;
    if let Some(path) = &t.model {
        if t.layers.or(t.kv_heads).or(t.head_dim).is_some() {
            return Err(value(
                "[[profile]]: give a model, or layers, kv-heads and head-dim, not both".into(),
            ));
        }
        let shape = ModelShape::from_path(path).map_err(|e| value(format!("[[profile]] model: {e}")))?;
        let name = t.name.clone().unwrap_or_else(|| shape.name.clone());
        let made = shape.profile(kv, t.tokens_per_block);
        return made.map_err(|e| value(format!("[[profile]] {name}: {e}")));
    }
    let name = t.name.clone().unwrap_or_else(|| "unnamed".into());
    let need =
        |key: &str, v: Option<u32>| v.ok_or_else(|| value(format!("[[profile]] {name}: {key} is missing")));
    let (layers, heads) = (need("layers", t.layers)?, need("kv-heads", t.kv_heads)?);
    let dim = need("head-dim", t.head_dim)?;
    let row = kv
        .row_bytes(u64::from(heads) * u64::from(dim))
        .map_err(|e| value(format!("[[profile]] {name}: {e}")))?;
    Profile::uniform(name.clone(), kv.name(), layers, row, row, t.tokens_per_block)
        .map_err(|e| value(format!("[[profile]] {name}: {e}")))
}

#[cfg(test)]
mod tests;
