//! The daemon: the broker behind sockets.
//!
//! Owns the process: configuration, sockets, the loop, the worker thread, signals, the word to systemd. One loop
//! thread takes turns at everything and never waits for a single client; one worker does what takes long. Invariant:
//! no fault of a client and no limit of the kernel ends the loop.

mod admin;
mod check;
mod config;
mod connection;
mod listener;
mod metrics;
mod namespace;
mod observe;
mod pressure;
mod server;
mod start;
mod turns;
mod watch;
mod worker;

pub use check::Outlook;
pub(crate) use check::too_tight;
pub use config::{Config, ConfigError, DeviceAccess, Overrides};
pub use start::{StartError, run};

/// Where the admin socket is unless the configuration says otherwise.
pub const DEFAULT_ADMIN_SOCKET: &str = "/run/kvbroker/admin.sock";
/// Where the configuration is.
pub const DEFAULT_CONFIG: &str = "/etc/kvbroker/kvbroker.toml";
