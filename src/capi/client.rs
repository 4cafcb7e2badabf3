//! Clients and profiles.
//!
//! Owns their handles. Invariant: a profile or session handle keeps its client's connection alive, so handles may be
//! closed in any order.

use std::ffi::{CStr, OsStr, c_char};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

use super::error::Code;
use super::process::Birth;
use super::sized::{self, versioned};
use super::{Failure, aligned, at, border, elements, hand_out, status, take_back, text};
use crate::client::{Client, ClientOptions, EmbeddedOptions, GroupedProfile};
use crate::model::{KvType, ModelShape};
use crate::profile::{Group, Layer, Layout, MAX_LAYERS, Profile, USUAL_TOKENS_PER_BLOCK};

/// A connection.
#[derive(Debug)]
pub struct kvb_client {
    birth: Birth,
    client: Client,
}

/// A geometry that the broker knows.
#[derive(Debug)]
pub struct kvb_profile {
    birth: Birth,
    client: Client,
    profile: GroupedProfile,
}

impl kvb_client {
    /// # Safety
    /// `handle` is NULL or a client that is not closed.
    unsafe fn get<'a>(handle: *const kvb_client) -> Result<&'a kvb_client, Failure> {
        // SAFETY: passed on to the caller.
        let client = unsafe { at(handle, "client")? };
        client.birth.here()?;
        Ok(client)
    }
}

impl kvb_client {
    /// For tests that need a broker with more than an embedded one of C has.
    #[cfg(test)]
    pub(super) fn over(client: Client) -> Self {
        kvb_client { birth: Birth::now(), client }
    }
}

impl kvb_profile {
    /// # Safety
    /// `handle` is NULL or a profile that is not closed.
    pub(super) unsafe fn get<'a>(handle: *const kvb_profile) -> Result<&'a kvb_profile, Failure> {
        // SAFETY: passed on to the caller.
        let profile = unsafe { at(handle, "profile")? };
        profile.birth.here()?;
        Ok(profile)
    }

    pub(super) fn parts(&self) -> (&Client, &GroupedProfile) {
        (&self.client, &self.profile)
    }
}

/// `credit_ahead`: nothing ahead of need.
pub(super) const NO_CREDIT_AHEAD: u32 = u32::MAX;

versioned! {
    /// See the header.
    struct kvb_client_options {
        label: *const c_char,
        timeout_ms: u32,
        credit_ahead: u32,
    }

    /// See the header.
    struct kvb_embedded_options {
        pool_bytes: u64,
        extent_bytes: u64,
    }

    /// See the header.
    struct kvb_client_info {
        instance: u64,
        extent_bytes: u64,
        extents: u32,
        tenant: u32,
        backend: u32,
        embedded: u32,
    }

    /// See the header.
    struct kvb_geometry {
        name: *const c_char,
        element: *const c_char,
        rows: *const kvb_layer,
        layers: u32,
        k_row: u32,
        v_row: u32,
        tokens_per_block: u32,
        layout: u32,
        window: u32,
        windows: *const u32,
    }

    /// See the header.
    struct kvb_profile_info {
        slot_bytes: u64,
        bytes_per_token: u64,
        layers: u32,
        tokens_per_block: u32,
        shift: u32,
        layout: u32,
        groups: u32,
        reserved: u32,
    }

    /// See the header.
    struct kvb_room {
        capacity: u64,
        free: u64,
        held: u64,
        credit: u64,
    }
}

/// One layer's rows.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
#[allow(missing_docs)]
pub struct kvb_layer {
    pub number: u32,
    pub k_row: u32,
    pub v_row: u32,
}

/// Where a plane lies in a block.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
#[allow(missing_docs)]
pub struct kvb_plane {
    pub offset: usize,
    pub stride: usize,
    pub row: usize,
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn kvb_abi_version() -> u32 {
    super::ABI_VERSION
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn kvb_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

/// # Safety
/// As [`sized::read`]; the label is NULL or a string.
unsafe fn client_options(from: *const kvb_client_options) -> Result<ClientOptions, Failure> {
    // SAFETY: passed on to the caller.
    let given = unsafe { sized::read(from, "kvb_client_options")? };
    let mut options = ClientOptions::default();
    if !given.label.is_null() {
        // SAFETY: passed on to the caller.
        options.label = unsafe { text(given.label, "kvb_client_options.label")? };
    }
    if given.timeout_ms > 0 {
        options.timeout = Duration::from_millis(given.timeout_ms.into());
    }
    options.credit_ahead = match given.credit_ahead {
        0 => options.credit_ahead,
        NO_CREDIT_AHEAD => 0,
        some => some,
    };
    Ok(options)
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_connect(
    socket: *const c_char,
    options: *const kvb_client_options,
    out: *mut *mut kvb_client,
) -> i32 {
    status(|| {
        aligned(out, "out")?;
        let birth = Birth::now();
        // SAFETY: the header asks for strings that end, and for options whose `size` bytes are there.
        let options = unsafe { client_options(options)? };
        let client = match socket.is_null() {
            true => Client::connect_with(options)?,
            false => {
                // SAFETY: as above.
                let path = unsafe { CStr::from_ptr(socket) };
                Client::connect_to(Path::new(OsStr::from_bytes(path.to_bytes())), options)?
            }
        };
        // SAFETY: checked first of all.
        unsafe { hand_out(out, kvb_client { birth, client }) };
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_embedded(
    embedded: *const kvb_embedded_options,
    options: *const kvb_client_options,
    out: *mut *mut kvb_client,
) -> i32 {
    status(|| {
        aligned(out, "out")?;
        let birth = Birth::now();
        // SAFETY: the header asks for options whose `size` bytes are there.
        let (given, options) =
            unsafe { (sized::read(embedded, "kvb_embedded_options")?, client_options(options)?) };
        let mut embedded = EmbeddedOptions::default();
        if given.pool_bytes > 0 {
            embedded.pool_bytes = given.pool_bytes;
        }
        if given.extent_bytes > 0 {
            embedded.extent_bytes = given.extent_bytes;
        }
        let page = crate::map::page_bytes() as u64;
        if embedded.extent_bytes % page != 0 || embedded.pool_bytes < embedded.extent_bytes {
            let text = format!(
                "extents of {} bytes in a pool of {}: an extent is a whole number of pages of {page}, a pool at least one extent",
                embedded.extent_bytes, embedded.pool_bytes
            );
            return Err(Failure::invalid(text));
        }
        let client = Client::embedded_with(embedded, options)?;
        // SAFETY: checked first of all.
        unsafe { hand_out(out, kvb_client { birth, client }) };
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_client_close(client: *mut kvb_client) -> i32 {
    status(|| {
        if client.is_null() {
            return Ok(());
        }
        // SAFETY: the header asks for a handle that is not closed, and takes it.
        unsafe {
            kvb_client::get(client)?;
            take_back(client);
        }
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_client_get_info(client: *const kvb_client, out: *mut kvb_client_info) -> i32 {
    status(|| {
        // SAFETY: the header asks for a handle that is not closed.
        let client = unsafe { kvb_client::get(client)? };
        aligned(out, "out")?;
        let info = client.client.info();
        let info = kvb_client_info {
            size: 0,
            instance: info.instance,
            extent_bytes: info.extent_bytes,
            extents: info.extents,
            tenant: info.tenant,
            backend: info.backend.code(),
            embedded: client.client.event_fd().is_none().into(),
        };
        // SAFETY: the header asks for a structure whose `size` bytes are there.
        unsafe { sized::write(out, "kvb_client_info", info) }
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_client_event_fd(client: *const kvb_client) -> i32 {
    border(|| {
        // SAFETY: the header asks for a handle that is not closed.
        let client = unsafe { kvb_client::get(client)? };
        let fd = client.client.event_fd().map(i64::from);
        fd.ok_or_else(|| Failure::new(Code::Unsupported, "an embedded broker has no descriptor to wait on"))
    }) as i32
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_client_poll(client: *mut kvb_client) -> i32 {
    status(|| {
        // SAFETY: the header asks for a handle that is not closed.
        let client = unsafe { kvb_client::get(client)? };
        client.client.poll()?;
        // Without this, a program that waits on the descriptor would wake up for ever.
        if client.client.is_lost() {
            let why = crate::client::Error::Lost("the connection has ended".into());
            return Err(why.into());
        }
        Ok(())
    })
}

/// # Safety
/// As [`sized::read`]; texts are NULL or strings; unless NULL, `rows` points at `layers` rows and `windows` at as many
/// numbers.
unsafe fn geometry(from: *const kvb_geometry) -> Result<Profile, Failure> {
    aligned(from, "geometry")?;
    // SAFETY: passed on to the caller.
    let g = unsafe { sized::read(from, "kvb_geometry")? };
    if g.layers as usize > MAX_LAYERS {
        return Err(Failure::invalid(format!(
            "{} layers, more than the {MAX_LAYERS} a profile may have",
            g.layers
        )));
    }
    let layout = match g.layout {
        0 => Layout::PlaneMajor,
        1 => Layout::TokenMajor,
        other => {
            return Err(Failure::invalid(format!("layout {other}: 0 is plane-major, 1 is token-major")));
        }
    };
    // SAFETY: passed on to the caller.
    let (name, element) =
        unsafe { (text(g.name, "kvb_geometry.name")?, text(g.element, "kvb_geometry.element")?) };
    let layers: Vec<(u32, Layer)> = if g.rows.is_null() {
        (0..g.layers).map(|n| (n, Layer { k_row: g.k_row, v_row: g.v_row })).collect()
    } else {
        if g.k_row != 0 || g.v_row != 0 {
            return Err(Failure::invalid("kvb_geometry: with rows, k_row and v_row must be 0"));
        }
        // SAFETY: passed on to the caller.
        let rows = unsafe { elements(g.rows, g.layers as usize, "kvb_geometry.rows")? };
        if rows.windows(2).any(|w| w[0].number >= w[1].number) {
            return Err(Failure::invalid("kvb_geometry.rows: layer numbers must ascend"));
        }
        rows.iter().map(|r| (r.number, Layer { k_row: r.k_row, v_row: r.v_row })).collect()
    };
    let windows = if g.windows.is_null() {
        vec![g.window; layers.len()]
    } else {
        if g.window != 0 {
            return Err(Failure::invalid("kvb_geometry: with windows, window must be 0"));
        }
        // SAFETY: passed on to the caller.
        unsafe { elements(g.windows, g.layers as usize, "kvb_geometry.windows")? }.to_vec()
    };
    // Layers of one window are one group; those that keep all tokens come first.
    let mut groups: Vec<Group> = Vec::new();
    let kinds: std::collections::BTreeSet<u32> = windows.iter().copied().collect();
    for kind in kinds {
        let of_kind = layers.iter().zip(&windows).filter(|(_, w)| **w == kind).map(|(l, _)| *l);
        groups.push(Group { layers: of_kind.collect(), window: Some(kind).filter(|w| *w > 0) });
    }
    let profile = Profile::new(name, element, layout, g.tokens_per_block, groups);
    profile.map_err(|e| Failure::invalid(e.to_string()))
}

/// The number of a layer that C calls by its index.
pub(super) fn layer_number(profile: &GroupedProfile, index: u32) -> Result<usize, Failure> {
    let mut layers = profile.layers();
    let count = layers.len();
    let number = layers.nth(index as usize).map(|n| n as usize);
    number.ok_or_else(|| Failure::invalid(format!("layer {index} of {count}")))
}

fn register(client: &Client, profile: &Profile) -> Result<kvb_profile, Failure> {
    let profile = client.grouped_profile(profile)?;
    Ok(kvb_profile { birth: Birth::now(), client: client.clone(), profile })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_profile_new(
    client: *mut kvb_client,
    from: *const kvb_geometry,
    out: *mut *mut kvb_profile,
) -> i32 {
    status(|| {
        aligned(out, "out")?;
        // SAFETY: the header asks for a handle that is not closed, and for what `geometry` needs.
        let (client, profile) = unsafe { (kvb_client::get(client)?, geometry(from)?) };
        let profile = register(&client.client, &profile)?;
        // SAFETY: checked first of all.
        unsafe { hand_out(out, profile) };
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_profile_from_model(
    client: *mut kvb_client,
    path: *const c_char,
    kv_type: *const c_char,
    tokens_per_block: u32,
    out: *mut *mut kvb_profile,
) -> i32 {
    status(|| {
        aligned(out, "out")?;
        aligned(path, "path")?;
        // SAFETY: the header asks for a handle that is not closed.
        let client = unsafe { kvb_client::get(client)? };
        // SAFETY: the header asks for strings that end.
        let (path, kv) = unsafe { (CStr::from_ptr(path), text(kv_type, "kv_type")?) };
        let invalid = |e: &dyn std::fmt::Display| Failure::invalid(e.to_string());
        let kv = if kv.is_empty() { KvType::default() } else { kv.parse().map_err(|e| invalid(&e))? };
        let shape = ModelShape::from_path(Path::new(OsStr::from_bytes(path.to_bytes())));
        let shape = shape.map_err(|e| invalid(&e))?;
        let tokens = if tokens_per_block == 0 { USUAL_TOKENS_PER_BLOCK } else { tokens_per_block };
        let profile = register(&client.client, &shape.profile(kv, tokens).map_err(|e| invalid(&e))?)?;
        // SAFETY: checked first of all.
        unsafe { hand_out(out, profile) };
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_profile_close(profile: *mut kvb_profile) -> i32 {
    status(|| {
        if profile.is_null() {
            return Ok(());
        }
        // SAFETY: the header asks for a handle that is not closed, and takes it.
        unsafe {
            kvb_profile::get(profile)?;
            take_back(profile);
        }
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_profile_get_info(
    profile: *const kvb_profile,
    out: *mut kvb_profile_info,
) -> i32 {
    status(|| {
        // SAFETY: the header asks for a handle that is not closed.
        let profile = unsafe { kvb_profile::get(profile)? };
        aligned(out, "out")?;
        let p = profile.profile.profile();
        let info = kvb_profile_info {
            size: 0,
            slot_bytes: profile.profile.groups().iter().map(|g| g.slot_bytes() as u64).sum(),
            bytes_per_token: p.bytes_per_token(),
            layers: profile.profile.layers().len() as u32,
            tokens_per_block: p.tokens_per_block(),
            shift: p.block_shift(),
            layout: match p.layout() {
                Layout::PlaneMajor => 0,
                Layout::TokenMajor => 1,
            },
            groups: p.groups().len() as u32,
            reserved: 0,
        };
        // SAFETY: the header asks for a structure whose `size` bytes are there.
        unsafe { sized::write(out, "kvb_profile_info", info) }
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_profile_plane(
    profile: *const kvb_profile,
    layer: u32,
    kv: u32,
    out: *mut kvb_plane,
) -> i32 {
    status(|| {
        // SAFETY: the header asks for a handle that is not closed.
        let profile = unsafe { kvb_profile::get(profile)? };
        aligned(out, "out")?;
        let kv = super::session::plane(kv)?;
        let plane = profile.profile.planes(layer_number(&profile.profile, layer)?)[kv as usize];
        // SAFETY: `out` was checked; a kvb_plane has no size in front and is never longer.
        unsafe { out.write(kvb_plane { offset: plane.offset, stride: plane.stride, row: plane.row }) };
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_profile_room(profile: *mut kvb_profile, out: *mut kvb_room) -> i32 {
    status(|| {
        // SAFETY: the header asks for a handle that is not closed.
        let profile = unsafe { kvb_profile::get(profile)? };
        aligned(out, "out")?;
        let mut all = kvb_room { size: 0, capacity: u64::MAX, free: u64::MAX, held: 0, credit: 0 };
        for group in profile.profile.groups() {
            let room = group.room()?;
            (all.capacity, all.free) = (all.capacity.min(room.capacity), all.free.min(room.free));
            (all.held, all.credit) = (all.held + room.held, all.credit + u64::from(group.credit()));
        }
        // SAFETY: the header asks for a structure whose `size` bytes are there.
        unsafe { sized::write(out, "kvb_room", all) }
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_profile_reserve(profile: *mut kvb_profile, blocks: u32) -> i32 {
    // SAFETY: the header asks for a handle that is not closed.
    status(|| Ok(unsafe { kvb_profile::get(profile)? }.profile.reserve(blocks)?))
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_profile_release_credit(profile: *mut kvb_profile) -> i32 {
    // SAFETY: the header asks for a handle that is not closed.
    status(|| Ok(unsafe { kvb_profile::get(profile)? }.profile.release_credit()?))
}
