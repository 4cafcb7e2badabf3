//! Sessions.
//!
//! Owns their handles. Invariant: a session is changed by one call at a time and by none while another reads it: the
//! lock is never waited for, whoever comes second is told.

use std::ffi::{c_char, c_void};
use std::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};

use super::client::{kvb_profile, layer_number};
use super::error::Code;
use super::process::Birth;
use super::sized::{self, versioned};
use super::{Failure, aligned, at, border, count, elements, hand_out, number, status, take_back, text};
use crate::client::{Admission, GroupedSession, OpenOptions, SessionStats};
use crate::profile::Kv;

/// A token sequence.
#[derive(Debug)]
pub struct kvb_session {
    birth: Birth,
    session: RwLock<GroupedSession>,
}

impl kvb_session {
    fn new(session: GroupedSession) -> Self {
        kvb_session { birth: Birth::now(), session: RwLock::new(session) }
    }

    /// # Safety
    /// `handle` is NULL or a session that is not closed.
    unsafe fn get<'a>(handle: *const kvb_session) -> Result<&'a kvb_session, Failure> {
        // SAFETY: passed on to the caller.
        let session = unsafe { at(handle, "session")? };
        session.birth.here()?;
        Ok(session)
    }
}

fn locked<T>(lock: Result<T, TryLockError<T>>) -> Result<T, Failure> {
    lock.map_err(|e| match e {
        TryLockError::WouldBlock => Failure::new(
            Code::InUse,
            "another thread uses this session: one at a time may, unless all only read",
        ),
        TryLockError::Poisoned(_) => Failure::new(
            Code::Internal,
            "an earlier call on this session met a defect of the library: close it",
        ),
    })
}

/// For reading.
///
/// # Safety
/// `handle` is NULL or a session that is not closed.
pub(super) unsafe fn read<'a>(
    handle: *const kvb_session,
) -> Result<RwLockReadGuard<'a, GroupedSession>, Failure> {
    // SAFETY: passed on to the caller.
    locked(unsafe { kvb_session::get(handle)? }.session.try_read())
}

/// For changing.
///
/// # Safety
/// `handle` is NULL or a session that is not closed.
pub(super) unsafe fn write<'a>(
    handle: *mut kvb_session,
) -> Result<RwLockWriteGuard<'a, GroupedSession>, Failure> {
    // SAFETY: passed on to the caller.
    locked(unsafe { kvb_session::get(handle)? }.session.try_write())
}

/// K or V.
pub(super) fn plane(kv: u32) -> Result<Kv, Failure> {
    match kv {
        0 => Ok(Kv::K),
        1 => Ok(Kv::V),
        other => Err(Failure::invalid(format!("kv {other}: KVB_K is 0, KVB_V is 1"))),
    }
}

/// `kvb_open_options.flags`: blocks that this process has used before keep their old bytes.
const KEEP_STALE_BYTES: u32 = 1;
/// `kvb_session_admit`, `flags`: cached prefixes may go.
const MAY_EVICT: u32 = 1;

versioned! {
    /// See the header.
    struct kvb_open_options {
        label: *const c_char,
        model: *const c_char,
        max_tokens: u64,
        flags: u32,
        priority: u32,
    }

    /// See the header.
    struct kvb_admission {
        verdict: u32,
        reserved: u32,
        blocks: u64,
    }

    /// See the header.
    struct kvb_map {
        base: *mut u8,
        table: *const u32,
        blocks: usize,
        first_token: usize,
        tokens: usize,
        shift: u32,
        reserved: u32,
    }

    /// See the header.
    struct kvb_view {
        address: *mut u8,
        bytes: usize,
        row: usize,
        capacity: usize,
    }

    /// See the header.
    struct kvb_stats {
        id: u64,
        tokens: u64,
        first_token: u64,
        blocks_private: u64,
        blocks_shared: u64,
        blocks_credit: u64,
        block_bytes: u64,
        bytes_held: u64,
    }
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_session_open(
    profile: *mut kvb_profile,
    options: *const kvb_open_options,
    out: *mut *mut kvb_session,
) -> i32 {
    status(|| {
        aligned(out, "out")?;
        // SAFETY: the header asks for a handle that is not closed, and for options whose `size` bytes are there.
        let (profile, given) =
            unsafe { (kvb_profile::get(profile)?, sized::read(options, "kvb_open_options")?) };
        if given.flags & !KEEP_STALE_BYTES != 0 {
            return Err(Failure::invalid(format!(
                "kvb_open_options: flags {:#x} are not known",
                given.flags
            )));
        }
        let Ok(priority) = u8::try_from(given.priority) else {
            return Err(Failure::invalid(format!(
                "kvb_open_options.priority is {}: 1 to 255, or 0 for the tenant's own",
                given.priority
            )));
        };
        // SAFETY: the header asks for strings that end.
        let (label, model) = unsafe {
            (text(given.label, "kvb_open_options.label")?, text(given.model, "kvb_open_options.model")?)
        };
        let max_tokens = Some(given.max_tokens).filter(|t| *t > 0);
        let zero = given.flags & KEEP_STALE_BYTES == 0;
        let (client, profile) = profile.parts();
        let options = OpenOptions { label, model, max_tokens, zero, priority };
        let session = client.open_grouped(profile, options)?;
        // SAFETY: checked first of all.
        unsafe { hand_out(out, kvb_session::new(session)) };
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_session_close(session: *mut kvb_session) -> i32 {
    status(|| {
        if session.is_null() {
            return Ok(());
        }
        // SAFETY: the header asks for a handle that is not closed, and takes it.
        unsafe {
            match kvb_session::get(session)?.session.try_write() {
                Err(TryLockError::WouldBlock) => return locked(Err(TryLockError::WouldBlock)),
                // One that met a defect can still be given back.
                Ok(_) | Err(TryLockError::Poisoned(_)) => {}
            }
            take_back(session);
        }
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_session_ensure(session: *mut kvb_session, tokens: u64) -> i32 {
    // SAFETY: the header asks for a handle that is not closed.
    status(|| Ok(unsafe { write(session)? }.ensure(number(tokens, "tokens")?)?))
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_session_reserve(session: *mut kvb_session, tokens: u64, step: u64) -> i32 {
    status(|| {
        let (tokens, step) = (number(tokens, "tokens")?, number(step, "step")?);
        // SAFETY: the header asks for a handle that is not closed.
        Ok(unsafe { write(session)? }.reserve(tokens, step)?)
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_session_admit(
    session: *mut kvb_session,
    tokens: u64,
    step: u64,
    flags: u32,
    out: *mut kvb_admission,
) -> i32 {
    status(|| {
        aligned(out, "out")?;
        // SAFETY: the header asks for a structure whose `size` bytes are there. Looked at before anything is promised.
        unsafe { sized::check(out, "kvb_admission")? };
        if flags & !MAY_EVICT != 0 {
            return Err(Failure::invalid(format!("flags {flags:#x}: only KVB_MAY_EVICT means something")));
        }
        let (tokens, step) = (number(tokens, "tokens")?, number(step, "step")?);
        // SAFETY: the header asks for a handle that is not closed.
        let admission = unsafe { write(session)? }.admit(tokens, step, flags & MAY_EVICT != 0)?;
        let (verdict, blocks) = match admission {
            Admission::Admitted => (1, 0),
            Admission::AfterEviction(blocks) => (2, blocks),
            Admission::WhenYoursFree(blocks) => (3, blocks),
            Admission::Busy(blocks) => (4, blocks),
            Admission::NeverFits(blocks) => (5, blocks),
        };
        // SAFETY: checked first of all.
        unsafe { sized::write(out, "kvb_admission", kvb_admission { size: 0, verdict, reserved: 0, blocks }) }
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_session_set_rewind(session: *mut kvb_session, tokens: u64) -> i32 {
    status(|| {
        let tokens = number(tokens, "tokens")?;
        // SAFETY: the header asks for a handle that is not closed.
        unsafe { write(session)? }.set_rewind(tokens);
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_session_writable(session: *mut kvb_session, first: u64, end: u64) -> i32 {
    status(|| {
        let range = number(first, "first")?..number(end, "end")?;
        // SAFETY: the header asks for a handle that is not closed.
        Ok(unsafe { write(session)? }.writable(range)?)
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_session_tokens(session: *const kvb_session) -> i64 {
    // SAFETY: the header asks for a handle that is not closed.
    border(|| count(unsafe { read(session)? }.tokens()))
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_session_first_token(session: *const kvb_session) -> i64 {
    // SAFETY: the header asks for a handle that is not closed.
    border(|| count(unsafe { read(session)? }.first_token()))
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_session_wanted_back(session: *const kvb_session) -> i64 {
    border(|| {
        // SAFETY: the header asks for a handle that is not closed.
        let session = unsafe { read(session)? };
        session.check_alive()?;
        let Some(until) = session.wanted_back() else { return Ok(0) };
        let left = until.saturating_duration_since(std::time::Instant::now());
        Ok(i64::try_from(left.as_millis()).unwrap_or(i64::MAX).max(1))
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_session_damaged_from(session: *const kvb_session) -> i64 {
    border(|| {
        // SAFETY: the header asks for a handle that is not closed.
        let session = unsafe { read(session)? };
        count(session.damaged_from().map_or(session.tokens(), |token| token.min(session.tokens())))
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_session_trim(session: *mut kvb_session, tokens: u64) -> i32 {
    // SAFETY: the header asks for a handle that is not closed.
    status(|| Ok(unsafe { write(session)? }.trim(number(tokens, "tokens")?)?))
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_session_trim_head(session: *mut kvb_session, first: u64) -> i64 {
    // SAFETY: the header asks for a handle that is not closed.
    border(|| count(unsafe { write(session)? }.trim_head(number(first, "first")?)?))
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_session_fork(session: *mut kvb_session, out: *mut *mut kvb_session) -> i32 {
    status(|| {
        aligned(out, "out")?;
        // SAFETY: the header asks for a handle that is not closed.
        let twin = unsafe { write(session)? }.fork()?;
        // SAFETY: checked first of all.
        unsafe { hand_out(out, kvb_session::new(twin)) };
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_session_seal(session: *mut kvb_session, ids: *const u32, count: usize) -> i64 {
    border(|| {
        // SAFETY: the header asks for a handle that is not closed, and for `count` ids of the caller's own.
        unsafe { super::count(write(session)?.seal(elements(ids, count, "ids")?)?) }
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_session_attach(session: *mut kvb_session, ids: *const u32, count: usize) -> i64 {
    border(|| {
        // SAFETY: as in kvb_session_seal.
        unsafe { super::count(write(session)?.attach(elements(ids, count, "ids")?)?) }
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_session_pin(session: *mut kvb_session, tokens: u64) -> i64 {
    // SAFETY: the header asks for a handle that is not closed.
    border(|| count(unsafe { write(session)? }.pin(number(tokens, "tokens")?)?))
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_session_unpin(session: *mut kvb_session, tokens: u64) -> i64 {
    // SAFETY: the header asks for a handle that is not closed.
    border(|| count(unsafe { write(session)? }.unpin(number(tokens, "tokens")?)?))
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_session_write_row(
    session: *mut kvb_session,
    token: u64,
    layer: u32,
    kv: u32,
    row: *const c_void,
    bytes: usize,
) -> i32 {
    status(|| {
        // SAFETY: the header asks for a handle that is not closed, and for `bytes` bytes of the caller's own memory.
        let (mut session, row) = unsafe { (write(session)?, elements(row.cast::<u8>(), bytes, "row")?) };
        let layer = layer_number(session.profile(), layer)?;
        Ok(session.write_row(number(token, "token")?, layer, plane(kv)?, row)?)
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_session_read_row(
    session: *const kvb_session,
    token: u64,
    layer: u32,
    kv: u32,
    row: *mut c_void,
    bytes: usize,
) -> i32 {
    status(|| {
        // SAFETY: the header asks for a handle that is not closed.
        let session = unsafe { read(session)? };
        aligned(row, "row")?;
        let layer = layer_number(session.profile(), layer)?;
        let from = session.checked_row(number(token, "token")?, layer, plane(kv)?, bytes)?;
        // SAFETY: the row lies in a mapped block and has `bytes` bytes; the header asks for as many of the caller's own
        // memory. No slice: C need not have written there.
        unsafe { row.cast::<u8>().copy_from_nonoverlapping(from, bytes) };
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_session_map(session: *const kvb_session, out: *mut kvb_map) -> i32 {
    status(|| {
        // SAFETY: the header asks for a handle that is not closed.
        let session = unsafe { read(session)? };
        aligned(out, "out")?;
        if session.groups().len() > 1 {
            return Err(Failure::invalid(format!(
                "the session has {} block tables: ask for that of a layer (kvb_session_map_layer)",
                session.groups().len()
            )));
        }
        // SAFETY: the header asks for a structure whose `size` bytes are there.
        unsafe { sized::write(out, "kvb_map", map_of(&session, 0)) }
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_session_map_layer(
    session: *const kvb_session,
    layer: u32,
    out: *mut kvb_map,
) -> i32 {
    status(|| {
        // SAFETY: the header asks for a handle that is not closed.
        let session = unsafe { read(session)? };
        aligned(out, "out")?;
        let number = layer_number(session.profile(), layer)?;
        let group = session.profile().group_of(number).unwrap_or(0);
        // SAFETY: the header asks for a structure whose `size` bytes are there.
        unsafe { sized::write(out, "kvb_map", map_of(&session, group)) }
    })
}

/// The table of one layer group.
fn map_of(session: &GroupedSession, group: usize) -> kvb_map {
    let one = &session.groups()[group];
    let table = one.table();
    kvb_map {
        size: 0,
        base: one.base(),
        table: table.as_ptr(),
        blocks: table.len(),
        first_token: one.first_token(),
        tokens: session.tokens(),
        shift: one.profile().block_shift(),
        reserved: 0,
    }
}

/// The first token that a layer still has.
pub(super) fn first_of(session: &GroupedSession, layer: usize) -> usize {
    session.profile().group_of(layer).map_or(0, |group| session.groups()[group].first_token())
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_session_view(
    session: *mut kvb_session,
    layer: u32,
    kv: u32,
    capacity: u64,
    address: *mut c_void,
    out: *mut kvb_view,
) -> i32 {
    status(|| {
        // SAFETY: the header asks for a handle that is not closed.
        let mut session = unsafe { write(session)? };
        aligned(out, "out")?;
        // Before the view exists, so that an error leaves none behind.
        // SAFETY: the header asks for a structure whose `size` bytes are there.
        unsafe { sized::check(out, "kvb_view")? };
        let address = Some(address.cast::<u8>()).filter(|a| !a.is_null());
        let (layer, capacity) = (layer_number(session.profile(), layer)?, number(capacity, "capacity")?);
        let view = session.plane(layer, plane(kv)?, capacity, address)?;
        let view = kvb_view {
            size: 0,
            address: view.address,
            bytes: view.bytes,
            row: view.row,
            capacity: view.capacity,
        };
        // SAFETY: as above.
        unsafe { sized::write(out, "kvb_view", view) }
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_session_stats(session: *const kvb_session, out: *mut kvb_stats) -> i32 {
    status(|| {
        // SAFETY: the header asks for a handle that is not closed.
        let session = unsafe { read(session)? };
        aligned(out, "out")?;
        let groups = session.groups();
        let sum = |count: fn(SessionStats) -> usize| {
            groups.iter().map(|group| count(group.stats()) as u64).sum::<u64>()
        };
        let stats = kvb_stats {
            size: 0,
            id: groups[0].id(),
            tokens: session.tokens() as u64,
            first_token: session.first_token() as u64,
            blocks_private: sum(|s| s.blocks_private),
            blocks_shared: sum(|s| s.blocks_shared),
            blocks_credit: sum(|s| s.blocks_credit),
            block_bytes: sum(|s| s.block_bytes),
            bytes_held: session.bytes_held() as u64,
        };
        // SAFETY: the header asks for a structure whose `size` bytes are there.
        unsafe { sized::write(out, "kvb_stats", stats) }
    })
}
