//! What the operator configures: `/etc/kvbroker/kvbroker.toml`, the drop-ins beside it, and the command line over both.
//!
//! Owns no state. Invariant: a configuration that exists is complete and consistent in itself; an unknown key, a wrong
//! type or a size without unit is an error that names the file and the key, never a default in disguise.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use thiserror::Error;

use crate::broker::Policy;
use crate::client::DEFAULT_SOCKET;
use crate::id::Tenant;
use crate::model::{KvType, ModelError, ModelShape, ShapeError};
use crate::packing::{CMA_ALIGNMENT_ORDER, ExtentSize};
use crate::profile::{Profile, ProfileError};
use crate::size::Size;

/// Why there is no configuration.
#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum ConfigError {
    #[error("{path}: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{path}: {message}")]
    Parse { path: PathBuf, message: String },
    #[error("{0}")]
    Value(String),
    #[error("model of a [[profile]]: {0}")]
    Model(#[from] ModelError),
    #[error("[[profile]] {name}: {source}")]
    Shape { name: String, source: ShapeError },
    #[error("[[profile]] {name}: {source}")]
    Profile { name: String, source: ProfileError },
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
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct DeviceTable {
    /// Its character device, if user space drives it.
    pub node: Option<PathBuf>,
    /// Bits of an address of it.
    pub address_bits: u32,
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
            iommu: "/dev/iommu".into(),
            udmabuf: "/dev/udmabuf".into(),
            staging: Size::from_bytes(2 << 20),
            staging_total: Size::from_bytes(8 << 20),
            staging_heap: None,
        }
    }
}

/// Which kind of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum BackendChoice {
    /// By who will read the memory.
    #[default]
    Auto,
    /// A heap under /dev/dma_heap.
    DmaHeap,
    /// dma-bufs that /dev/udmabuf makes of memfds.
    Udmabuf,
    /// Sealed memfds.
    Memfd,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
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
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
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
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
struct LimitsTable {
    connections: u32,
    connections_per_tenant: u32,
    sessions_per_connection: u32,
    profiles_per_connection: u32,
    windows_per_session: u32,
    windows_per_tenant: u32,
    windows: u32,
    tenant: Option<Size>,
}

impl Default for LimitsTable {
    fn default() -> Self {
        let policy = Policy::default();
        LimitsTable {
            connections: policy.connections,
            connections_per_tenant: policy.connections_per_tenant,
            sessions_per_connection: policy.sessions_per_connection,
            profiles_per_connection: policy.profiles_per_connection,
            windows_per_session: policy.windows_per_session,
            windows_per_tenant: policy.windows_per_tenant,
            windows: policy.windows,
            tenant: None,
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct TenantTable {
    uid: u32,
    limit: Size,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
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
    "f16".into()
}

fn default_tokens_per_block() -> u32 {
    16
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
    #[arg(long)]
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
    /// Limits. Those of tenants are still to be turned into extents: see [`Config::policy`].
    limits: Policy,
    tenant_limit: Option<Size>,
    tenant_limits: BTreeMap<Tenant, Size>,
}

impl Config {
    /// Reads `path`, if it exists or `must_exist`, and the `*.toml` files of the directory `path` + `.d` in the order of
    /// their names; later ones win, key by key. Then the command line.
    pub fn read(path: &Path, must_exist: bool, over: &Overrides) -> Result<Self, ConfigError> {
        let mut merged = toml::Table::new();
        let mut files = Vec::new();
        match std::fs::read_to_string(path) {
            Ok(text) => files.push((path.to_path_buf(), text)),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound && !must_exist => {}
            Err(source) => return Err(ConfigError::Read { path: path.into(), source }),
        }
        files.extend(drop_ins(path)?);
        for (path, text) in files {
            let parse = |message: String| ConfigError::Parse { path: path.clone(), message };
            // Each file by itself first, so that a mistake is shown where it stands.
            toml::from_str::<File>(&text).map_err(|e| parse(explain(&e, &text)))?;
            let table: toml::Table = text.parse().map_err(|e: toml::de::Error| parse(e.to_string()))?;
            merge(&mut merged, table);
        }
        let file: File = merged.try_into().map_err(|e: toml::de::Error| ConfigError::Value(e.to_string()))?;
        Config::from_file(file, over)
    }

    fn from_file(file: File, over: &Overrides) -> Result<Self, ConfigError> {
        let mut profiles = file.profile.iter().map(profile).collect::<Result<Vec<_>, _>>()?;
        if let Some(model) = &over.model {
            profiles = vec![profile(&ProfileTable {
                model: Some(model.clone()),
                name: None,
                layers: None,
                kv_heads: None,
                head_dim: None,
                kv_type: over.kv_type.clone().unwrap_or_else(default_kv_type),
                tokens_per_block: over.tokens_per_block.unwrap_or_else(default_tokens_per_block),
            })?];
        }
        if profiles.is_empty() {
            profiles.push(Profile::reference());
        }
        let bad_mode = || {
            ConfigError::Value(format!(
                "socket.mode = \"{}\": write it in octal, such as \"0660\"",
                file.socket.mode
            ))
        };
        let mode =
            u32::from_str_radix(&file.socket.mode, 8).ok().filter(|m| *m <= 0o777).ok_or_else(bad_mode)?;
        let mut tenant_limits = BTreeMap::new();
        for t in &file.tenant {
            if tenant_limits.insert(Tenant(t.uid), t.limit).is_some() {
                return Err(ConfigError::Value(format!("[[tenant]] uid = {} stands there twice", t.uid)));
            }
        }
        let pool_bytes = over.pool.unwrap_or(file.pool.size).bytes();
        let minimum_bytes = file.pool.minimum.map_or(pool_bytes / 2, Size::bytes);
        if minimum_bytes > pool_bytes {
            let (least, size) = (Size::from_bytes(minimum_bytes), Size::from_bytes(pool_bytes));
            return Err(ConfigError::Value(format!(
                "pool.minimum = {least} is more than the pool of {size}"
            )));
        }
        if file.pool.device == DeviceAccess::Vfio && file.device.node.is_none() {
            return Err(ConfigError::Value(
                "pool.device = \"vfio\" needs device.node, such as \"/dev/vfio/devices/vfio0\" (scripts/npu-bind prints it)".into(),
            ));
        }
        if !(20..=64).contains(&file.device.address_bits) {
            let text = format!("device.address-bits = {}: 20 to 64", file.device.address_bits);
            return Err(ConfigError::Value(text));
        }
        if file.device.staging.bytes() > file.device.staging_total.bytes() {
            let (one, all) = (file.device.staging, file.device.staging_total);
            return Err(ConfigError::Value(format!(
                "device.staging = {one} is more than device.staging-total = {all}"
            )));
        }
        let limits = Policy {
            connections: file.limits.connections,
            connections_per_tenant: file.limits.connections_per_tenant,
            sessions_per_connection: file.limits.sessions_per_connection,
            profiles_per_connection: file.limits.profiles_per_connection,
            windows_per_session: file.limits.windows_per_session,
            windows_per_tenant: file.limits.windows_per_tenant,
            windows: file.limits.windows,
            scrub_always: file.scrub == Scrub::Always,
            ..Policy::default()
        };
        Ok(Config {
            pool_bytes,
            minimum_bytes,
            backend: over.backend.unwrap_or(file.pool.backend),
            device: file.pool.device,
            device_table: file.device,
            heap: over.heap.clone().or(file.pool.heap),
            heap_directory: file.pool.heap_directory,
            extent: over.extent.unwrap_or(file.pool.extent),
            cma_alignment_order: file.pool.cma_alignment_order,
            lock: file.pool.lock,
            profiles,
            socket: over.socket.clone().unwrap_or(file.socket.path),
            socket_mode: mode,
            socket_group: file.socket.group,
            admin_socket: over.admin_socket.clone().unwrap_or(file.socket.admin_path),
            limits,
            tenant_limit: file.limits.tenant,
            tenant_limits,
        })
    }

    /// The limits, those of tenants in whole extents of this pool: what changes hands is extents.
    pub fn policy(&self, extent_bytes: u64, one_block: bool) -> Policy {
        let extents = |size: Size| u32::try_from(size.bytes() / extent_bytes).unwrap_or(u32::MAX);
        Policy {
            extents_per_tenant: self.tenant_limit.map(extents),
            extents_of: self.tenant_limits.iter().map(|(t, size)| (*t, extents(*size))).collect(),
            one_block_per_extent: one_block,
            ..self.limits.clone()
        }
    }
}

fn profile(t: &ProfileTable) -> Result<Profile, ConfigError> {
    let value = |text: String| ConfigError::Value(text);
    let kv: KvType = t.kv_type.parse().map_err(|e| value(format!("[[profile]] kv-type: {e}")))?;
    if let Some(path) = &t.model {
        if t.layers.or(t.kv_heads).or(t.head_dim).is_some() {
            return Err(value(
                "[[profile]]: give a model, or layers, kv-heads and head-dim, not both".into(),
            ));
        }
        let shape = ModelShape::from_path(path)?;
        let name = t.name.clone().unwrap_or_else(|| shape.name.clone());
        return shape.profile(kv, t.tokens_per_block).map_err(|source| ConfigError::Shape { name, source });
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
        .map_err(|source| ConfigError::Profile { name, source })
}

fn drop_ins(path: &Path) -> Result<Vec<(PathBuf, String)>, ConfigError> {
    let mut directory = path.as_os_str().to_owned();
    directory.push(".d");
    let read = |path: PathBuf| move |source| ConfigError::Read { path, source };
    let directory = PathBuf::from(directory);
    let entries = match std::fs::read_dir(&directory) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(source) => return Err(ConfigError::Read { path: directory, source }),
    };
    let mut paths = Vec::new();
    for entry in entries {
        let path = entry.map_err(read(directory.clone()))?.path();
        if path.extension().is_some_and(|e| e == "toml") {
            paths.push(path);
        }
    }
    paths.sort();
    paths.into_iter().map(|p| Ok((p.clone(), std::fs::read_to_string(&p).map_err(read(p))?))).collect()
}

fn merge(into: &mut toml::Table, from: toml::Table) {
    for (key, value) in from {
        match (into.get_mut(&key), value) {
            (Some(toml::Value::Table(old)), toml::Value::Table(new)) => merge(old, new),
            (_, value) => _ = into.insert(key, value),
        }
    }
}

/// The parser's message, and for a key that nobody knows the nearest one that somebody does.
fn explain(error: &toml::de::Error, text: &str) -> String {
    let line = error.span().map_or(1, |s| 1 + text[..s.start.min(text.len())].matches('\n').count());
    let message = error.message();
    let mut words = message.split('`').skip(1).step_by(2);
    let nearest = message.starts_with("unknown field").then(|| {
        let unknown = words.next().unwrap_or_default();
        words.min_by_key(|known| distance(unknown, known)).filter(|known| distance(unknown, known) <= 3)
    });
    match nearest.flatten() {
        Some(known) => format!("line {line}: {message}; did you mean `{known}`?"),
        None => format!("line {line}: {message}"),
    }
}

/// Edits between two words (Levenshtein).
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut before = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.iter().enumerate() {
            let change = before + usize::from(x != *y);
            before = row[j + 1];
            row[j + 1] = change.min(before + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Config, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kvbroker.toml");
        std::fs::write(&path, text).unwrap();
        Config::read(&path, true, &Overrides::default())
            .map_err(|e| e.to_string().replace(&dir.path().display().to_string(), ""))
    }

    #[test]
    fn an_empty_file_gives_the_documented_defaults() {
        let c = read("").unwrap();
        assert_eq!((c.pool_bytes, c.minimum_bytes), (256 << 20, 128 << 20));
        assert_eq!(c.profiles, [Profile::reference()]);
        assert_eq!(c.socket_mode, 0o660);
        assert_eq!(c.policy(3 << 20, false), Policy::default());
    }

    #[test]
    fn the_shipped_file_is_the_defaults_and_names_every_key() {
        let shipped = include_str!("../../systemd/kvbroker.toml");
        // The model of the example is no file that is there: without it, the first [[profile]] goes too.
        let given = shipped.lines().map(|l| l.strip_prefix("#: ").unwrap_or(l).to_owned() + "\n");
        let given = given.filter(|l| !l.contains("config.json")).collect::<String>();
        let given = given.replacen("[[profile]]\nkv-type = \"f16\"\ntokens-per-block = 16\n", "", 1);
        let c = read(&given).unwrap();
        assert_eq!(c.pool_bytes, 256 << 20);
        let keys = [
            "size",
            "minimum",
            "backend",
            "device",
            "heap",
            "heap-directory",
            "extent",
            "cma-alignment-order",
            "lock",
            "path",
            "mode",
            "group",
            "admin-path",
            "connections",
            "connections-per-tenant",
            "sessions-per-connection",
            "profiles-per-connection",
            "windows-per-session",
            "windows-per-tenant",
            "windows",
            "tenant",
            "uid",
            "limit",
            "model",
            "name",
            "layers",
            "kv-heads",
            "head-dim",
            "kv-type",
            "tokens-per-block",
            "scrub",
            "node",
            "address-bits",
            "iommu",
            "udmabuf",
            "staging",
            "staging-total",
            "staging-heap",
        ];
        for key in keys {
            let stands = |l: &str| l.trim_start_matches("#: ").starts_with(&format!("{key} = "));
            assert!(shipped.lines().any(stands), "{key} is not documented");
        }
        assert!(read(shipped).is_ok());
    }

    #[test]
    fn mistakes_are_named_with_file_line_and_the_nearest_key() {
        let e = read("[pool]\nsizes = \"1M\"\n").unwrap_err();
        assert!(e.contains("/kvbroker.toml: line 2: unknown field `sizes`"), "{e}");
        assert!(e.ends_with("did you mean `size`?"), "{e}");
        assert!(read("[pool]\nsize = \"256\"\n").unwrap_err().contains("without unit"));
        assert!(read("[pool]\nsize = 256\n").unwrap_err().contains("line 2"));
        assert!(read("[pool]\nbackend = \"vram\"\n").unwrap_err().contains("vram"));
        assert!(read("[pool]\ndevice = \"vfio\"\n").unwrap_err().contains("needs device.node"));
        assert!(read("[device]\naddress-bits = 8\n").unwrap_err().contains("20 to 64"));
        assert!(read("[device]\nstaging = \"9M\"\n").unwrap_err().contains("more than device.staging-total"));
        assert!(read("[socket]\nmode = \"rw\"\n").unwrap_err().contains("octal"));
        assert!(read("[[profile]]\nlayers = 2\n").unwrap_err().contains("kv-heads is missing"));
        assert!(
            read("[pool]\nsize = \"1M\"\nminimum = \"2M\"\n").unwrap_err().contains("more than the pool")
        );
        let twice = "[[tenant]]\nuid = 1\nlimit = \"1M\"\n[[tenant]]\nuid = 1\nlimit = \"2M\"\n";
        assert!(read(twice).unwrap_err().contains("uid = 1 stands there twice"));
    }

    #[test]
    fn drop_ins_win_key_by_key_in_the_order_of_their_names() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kvbroker.toml");
        let drop_in = dir.path().join("kvbroker.toml.d");
        std::fs::create_dir(&drop_in).unwrap();
        std::fs::write(&path, "[pool]\nsize = \"64M\"\nlock = false\n").unwrap();
        std::fs::write(drop_in.join("20-b.toml"), "[pool]\nsize = \"32M\"\n").unwrap();
        std::fs::write(drop_in.join("10-a.toml"), "[pool]\nsize = \"16M\"\n").unwrap();
        std::fs::write(drop_in.join("30-c.conf"), "nonsense").unwrap();
        let read = |over: &Overrides| Config::read(&path, true, over);
        let c = read(&Overrides::default()).unwrap();
        assert_eq!((c.pool_bytes, c.lock), (32 << 20, false));
        let over = Overrides { pool: Some(Size::from_bytes(8 << 20)), ..Overrides::default() };
        assert_eq!(read(&over).unwrap().pool_bytes, 8 << 20);
        std::fs::write(drop_in.join("40-d.toml"), "[pol]\n").unwrap();
        assert!(read(&Overrides::default()).unwrap_err().to_string().contains("40-d.toml"));
    }

    #[test]
    fn limits_of_tenants_are_whole_extents() {
        let c = read("[limits]\ntenant = \"10M\"\n[[tenant]]\nuid = 7\nlimit = \"96M\"\n").unwrap();
        let policy = c.policy(3 << 20, false);
        assert_eq!(policy.extents_per_tenant, Some(3));
        assert_eq!(policy.extents_of[&Tenant(7)], 32);
    }
}
