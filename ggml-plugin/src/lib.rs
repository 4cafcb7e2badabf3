//! `libggml-kvbroker.so`: any llama.cpp program's KV cache in memory of kvbroker, unchanged.
//!
//! ggml loads it as a backend (`GGML_BACKEND_PATH`, or from its backend directory). It registers one device that
//! computes nothing and owns the buffers of KV caches (modules `device` and `buffer`); every buffer is a pager of the client
//! library, so a unit of the cache takes memory when it is first written. Without a broker it registers no device, says
//! so in one line, and the program runs as if it were not there; `KVBROKER_REQUIRE=1` makes it end instead.
//!
//! Read from the environment: `KVBROKER_SOCKET`, `KVBROKER_BACKEND`, `KVBROKER_WAIT_MS`, `KVBROKER_SPILL`,
//! `KVBROKER_ADMIT`, `KVBROKER_REQUIRE`, `KVBROKER_GGML`, `KVBROKER_LOG` (`info` for a line per buffer).

#![allow(unsafe_code)]

mod abi;
mod buffer;
mod device;
mod extension;
mod host;

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};

use abi::{API_VERSION, Reg};
use device::Plugin;
use kvbroker::client::Client;

/// What ggml calls this backend.
const NAME: &str = "KVBROKER";
/// What ggml calls its device.
const DEVICE: &str = "KVBROKER0";

/// Something that the user should know.
fn warn(text: &str) {
    eprintln!("kvbroker: {text}");
}

/// Something for whoever asked for it with `KVBROKER_LOG=info` or `debug`.
fn info(text: &str) {
    if std::env::var_os("KVBROKER_LOG").is_some_and(|v| v == "info" || v == "debug") {
        eprintln!("kvbroker: {text}");
    }
}

/// No device here; or, with `KVBROKER_REQUIRE=1`, no program either.
fn decline(api_version: c_int, why: &str) -> *mut Reg {
    if std::env::var_os("KVBROKER_REQUIRE").is_some_and(|v| v == "1") {
        warn(&format!("{why}; KVBROKER_REQUIRE=1 asks not to run without it"));
        std::process::exit(1);
    }
    warn(&format!("{why}; the KV cache stays in the program's own memory"));
    Box::into_raw(Box::new(device::reg(api_version, 0)))
}

/// The entry that ggml looks up.
///
/// # Safety
/// Called by ggml, in a process that has loaded it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ggml_backend_init() -> *mut Reg {
    static LOADED: AtomicBool = AtomicBool::new(false);
    if LOADED.swap(true, Ordering::SeqCst) {
        warn("this plugin is loaded already, once is enough");
        return Box::into_raw(Box::new(device::reg(device::api_version(), 0)));
    }
    let host = match host::Host::load() {
        Ok(host) => host,
        Err(why) => return decline(API_VERSION, &why),
    };
    let api_version = host.api_version;
    let client = match Client::connect() {
        Ok(client) => client,
        Err(e) => return decline(api_version, &e.to_string()),
    };
    match Plugin::start(host, client) {
        Ok(reg) => reg,
        Err(why) => decline(api_version, &why),
    }
}
