//! Windows for devices.
//!
//! Owns their handles, and the batches in hand. Invariant: as with sessions, one call at a time uses a window, and whoever
//! comes second is told.

use std::ffi::c_char;
use std::os::fd::{AsRawFd, IntoRawFd};
use std::sync::{Mutex, MutexGuard, TryLockError};

use super::client::layer_number;
use super::error::Code;
use super::process::Birth;
use super::session::{self, kvb_session, plane};
use super::sized::{self, versioned};
use super::{Failure, aligned, at, border, copy_text, count, hand_out, number, status, take_back};
use crate::client::{Batch, Error, GroupedSession, Session, Window, WindowOptions, WindowPlace};
use crate::window::{How, What};

/// A window, with the halves of the staging buffer that it has.
#[derive(Debug)]
pub struct kvb_window {
    birth: Birth,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    window: Window,
    /// Of the session.
    group: usize,
    batches: [Option<Batch>; 2],
}

/// `kvb_window_options.flags`: the device may not write.
const READ_ONLY: u32 = 1;

versioned! {
    /// See the header.
    struct kvb_window_options {
        first: u64,
        end: u64,
        capacity: u64,
        how: u32,
        what: u32,
        layer: u32,
        kv: u32,
        flags: u32,
        reserved: u32,
    }

    /// See the header.
    struct kvb_window_info {
        bytes: u64,
        offset: u64,
        address: u64,
        first: u64,
        end: u64,
        batch_bytes: u64,
        requests: u64,
        how: u32,
        fd: i32,
    }

    /// See the header.
    struct kvb_batch {
        at: u64,
        offset: u64,
        bytes: u64,
        half: u32,
        reserved: u32,
    }
}

impl kvb_window {
    /// # Safety
    /// `handle` is NULL or a window that is not closed.
    unsafe fn lock<'a>(handle: *const kvb_window) -> Result<MutexGuard<'a, Inner>, Failure> {
        // SAFETY: passed on to the caller.
        let window = unsafe { at(handle, "window")? };
        window.birth.here()?;
        window.inner.try_lock().map_err(|e| match e {
            TryLockError::WouldBlock => Failure::new(Code::InUse, "another thread uses this window"),
            TryLockError::Poisoned(_) => Failure::new(
                Code::Internal,
                "an earlier call on this window met a defect of the library: close it",
            ),
        })
    }
}

/// The session of the window's group, for changing.
fn of_group<'a>(session: &'a mut GroupedSession, inner: &Inner) -> Result<&'a mut Session, Failure> {
    session.group_mut(inner.group).ok_or_else(other_model)
}

/// The same, for reading.
fn in_group<'a>(session: &'a GroupedSession, inner: &Inner) -> Result<&'a Session, Failure> {
    session.groups().get(inner.group).ok_or_else(other_model)
}

fn other_model() -> Failure {
    Failure::invalid("the window is of another session, with other layer groups")
}

impl Inner {
    fn held(&self) -> Option<&Batch> {
        self.batches.iter().flatten().next()
    }

    fn batch(&mut self, named: &kvb_batch) -> Result<&mut Option<Batch>, Failure> {
        let gone = || Failure::invalid(format!("this window has no batch in half {} now", named.half));
        let slot = self.batches.get_mut(named.half as usize).ok_or_else(gone)?;
        match slot {
            Some(batch) if batch.at() as u64 == named.at => Ok(slot),
            _ => Err(gone()),
        }
    }

    /// # Safety
    /// `out` has been checked.
    unsafe fn hand_out_batch(&mut self, batch: Option<Batch>, out: *mut kvb_batch) -> Result<(), Failure> {
        let in_hand = || {
            Failure::new(Code::InUse, "this window has a half, and the other is another's: release it first")
        };
        let batch = batch.ok_or_else(in_hand)?;
        let told = kvb_batch {
            size: 0,
            at: batch.at() as u64,
            offset: batch.offset() as u64,
            bytes: batch.bytes() as u64,
            half: batch.half() as u32,
            reserved: 0,
        };
        // SAFETY: passed on to the caller.
        unsafe { sized::write(out, "kvb_batch", told)? };
        let half = batch.half();
        self.batches[half] = Some(batch);
        Ok(())
    }
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_session_window(
    session: *mut kvb_session,
    options: *const kvb_window_options,
    out: *mut *mut kvb_window,
) -> i32 {
    status(|| {
        aligned(out, "out")?;
        aligned(options, "options")?;
        // SAFETY: the header asks for a handle that is not closed, and for options whose `size` bytes are there.
        let (mut session, given) =
            unsafe { (session::write(session)?, sized::read(options, "kvb_window_options")?) };
        let tokens = number(given.first, "first")?..number(given.end, "end")?;
        // A window is over the blocks of one layer group.
        let layer = layer_number(session.profile(), given.layer)?;
        let no_layer = || Failure::invalid(format!("there is no layer {}", given.layer));
        let (group, index) = session.profile().place_of(layer).ok_or_else(no_layer)?;
        let what = match given.what {
            0 => What::Blocks,
            1 => What::Plane { layer: index as u32, kv: plane(given.kv)? },
            other => {
                let text = format!("what {other}: KVB_WHOLE_BLOCKS is 0, KVB_ONE_PLANE is 1");
                return Err(Failure::invalid(text));
            }
        };
        let how = match given.how {
            0 => None,
            code => Some(How::from_code(code).ok_or_else(|| {
                Failure::invalid(format!("how {code}: KVB_WINDOW_AUTO is 0, the ways are 1 to 4"))
            })?),
        };
        if given.flags & !READ_ONLY != 0 {
            let text = format!("kvb_window_options: flags {:#x} are not known", given.flags);
            return Err(Failure::invalid(text));
        }
        if given.reserved != 0 {
            let text = format!("kvb_window_options.reserved is {}: it must be 0", given.reserved);
            return Err(Failure::invalid(text));
        }
        let capacity = Some(number(given.capacity, "capacity")?).filter(|c| *c > 0);
        let options = WindowOptions { how, read_only: given.flags & READ_ONLY != 0, capacity };
        let one = session.group_mut(group).ok_or_else(no_layer)?;
        let window = one.window_with(tokens, what, options)?;
        let inner = Mutex::new(Inner { window, group, batches: [None, None] });
        // SAFETY: checked first of all.
        unsafe { hand_out(out, kvb_window { birth: Birth::now(), inner }) };
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_window_close(window: *mut kvb_window) -> i32 {
    status(|| {
        if window.is_null() {
            return Ok(());
        }
        // SAFETY: the header asks for a handle that is not closed, and takes it.
        unsafe {
            at(window, "window")?.birth.here()?;
            if let Err(TryLockError::WouldBlock) = (*window).inner.try_lock() {
                return Err(Failure::new(Code::InUse, "another thread uses this window"));
            }
            take_back(window);
        }
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_window_extend(
    window: *mut kvb_window,
    session: *mut kvb_session,
    end: u64,
) -> i32 {
    status(|| {
        // SAFETY: the header asks for handles that are not closed.
        let (mut inner, mut session) = unsafe { (kvb_window::lock(window)?, session::write(session)?) };
        if inner.held().is_some() {
            return Err(Failure::invalid(
                "a window with a batch in hand cannot be extended: release it first",
            ));
        }
        let session = of_group(&mut session, &inner)?;
        Ok(session.extend_window(&mut inner.window, number(end, "end")?)?)
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_window_is_current(
    window: *const kvb_window,
    session: *const kvb_session,
) -> i32 {
    border(|| {
        // SAFETY: the header asks for handles that are not closed.
        let (inner, session) = unsafe { (kvb_window::lock(window)?, session::read(session)?) };
        Ok(i64::from(in_group(&session, &inner)?.is_current(&inner.window)))
    }) as i32
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_window_get_info(window: *const kvb_window, out: *mut kvb_window_info) -> i32 {
    status(|| {
        // SAFETY: the header asks for a handle that is not closed.
        let inner = unsafe { kvb_window::lock(window)? };
        aligned(out, "out")?;
        let (window, tokens) = (&inner.window, inner.window.tokens());
        let mut info = kvb_window_info {
            size: 0,
            bytes: window.bytes() as u64,
            offset: 0,
            address: 0,
            first: tokens.start as u64,
            end: tokens.end as u64,
            batch_bytes: 0,
            requests: window.requests(),
            how: window.how().code(),
            fd: -1,
        };
        match window.place() {
            WindowPlace::Buffer { fd, offset, .. } => {
                (info.fd, info.offset) = (fd.as_raw_fd(), offset as u64);
            }
            WindowPlace::Address { iova, .. } => info.address = iova,
            WindowPlace::Staging { fd, batch, .. } => {
                (info.fd, info.batch_bytes) = (fd.as_raw_fd(), batch as u64);
            }
        }
        // SAFETY: the header asks for a structure whose `size` bytes are there.
        unsafe { sized::write(out, "kvb_window_info", info) }
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_window_declined(
    window: *const kvb_window,
    text: *mut c_char,
    size: usize,
) -> i64 {
    border(|| {
        // SAFETY: the header asks for a handle that is not closed.
        let inner = unsafe { kvb_window::lock(window)? };
        let lines: Vec<String> =
            inner.window.declined().iter().map(|(h, why)| format!("{h}: {why}")).collect();
        let lines = lines.join("\n");
        if size > 0 {
            aligned(text, "text")?;
            // SAFETY: the header asks for room for `size` bytes.
            unsafe { copy_text(&lines, text, size) };
        }
        count(lines.len())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_window_take_device(window: *mut kvb_window) -> i32 {
    border(|| {
        // SAFETY: the header asks for a handle that is not closed.
        let device = unsafe { kvb_window::lock(window)? }.window.take_device();
        let none = "no device came with this window: it comes with a process's first iommu window";
        Ok(device.ok_or_else(|| Failure::new(Code::Unsupported, none))?.into_raw_fd().into())
    }) as i32
}

/// A batch of a bounce window, filled or not as `make` has it.
///
/// # Safety
/// The handles are not closed, and `out` has the `size` bytes that it states.
unsafe fn next_batch(
    window: *mut kvb_window,
    session: *const kvb_session,
    at: u64,
    out: *mut kvb_batch,
    make: impl Fn(&Session, &Window, Option<&Batch>, usize) -> Result<Option<Batch>, Error>,
) -> i32 {
    status(|| {
        aligned(out, "out")?;
        // SAFETY: the caller's promise.
        unsafe {
            sized::check(out, "kvb_batch")?;
            let (mut inner, session) = (kvb_window::lock(window)?, session::read(session)?);
            let batch = make(in_group(&session, &inner)?, &inner.window, inner.held(), number(at, "at")?)?;
            inner.hand_out_batch(batch, out)
        }
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_window_load(
    window: *mut kvb_window,
    session: *const kvb_session,
    at: u64,
    out: *mut kvb_batch,
) -> i32 {
    // SAFETY: what the header asks for.
    unsafe { next_batch(window, session, at, out, Session::load) }
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_window_batch(
    window: *mut kvb_window,
    session: *const kvb_session,
    at: u64,
    out: *mut kvb_batch,
) -> i32 {
    // SAFETY: what the header asks for.
    unsafe { next_batch(window, session, at, out, Session::batch) }
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_window_drain(
    window: *mut kvb_window,
    session: *mut kvb_session,
    batch: *const kvb_batch,
) -> i32 {
    status(|| {
        aligned(batch, "batch")?;
        // SAFETY: as in kvb_window_load.
        let (mut inner, mut session, named) = unsafe {
            (kvb_window::lock(window)?, session::write(session)?, sized::read(batch, "kvb_batch")?)
        };
        inner.batch(&named)?;
        let session = of_group(&mut session, &inner)?;
        let Inner { window, batches, .. } = &*inner;
        // Just found there.
        batches[named.half as usize].iter().try_for_each(|batch| Ok(session.drain(window, batch)?))
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvb_window_release(window: *mut kvb_window, batch: *const kvb_batch) -> i32 {
    status(|| {
        aligned(batch, "batch")?;
        // SAFETY: as in kvb_window_load.
        let (mut inner, named) = unsafe { (kvb_window::lock(window)?, sized::read(batch, "kvb_batch")?) };
        *inner.batch(&named)? = None;
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;
    use std::ptr::{null, null_mut};
    use std::sync::Arc;

    use super::super::client::{kvb_client, kvb_geometry, kvb_profile};
    use super::super::{
        kvb_client_close, kvb_last_error, kvb_profile_close, kvb_profile_new, kvb_session_close,
        kvb_session_ensure, kvb_session_open,
    };
    use super::*;
    use crate::broker::{Broker, Policy};
    use crate::client::{Client, ClientOptions, Embedded};
    use crate::heap::Memfd;
    use crate::window::{Access, Means, StagingMeans};

    /// Calls on windows need a broker that can make one anywhere: by a staging buffer in plain memory.
    fn client() -> *mut kvb_client {
        let mut broker =
            Broker::new(Arc::new(Memfd::new(false)), 128 << 10, 16, 16, Policy::default()).unwrap();
        let staging = StagingMeans { heap: Arc::new(Memfd::new(false)), bytes: 64 << 10, total: 128 << 10 };
        broker.set_means(Means { access: Access::Contiguous, staging: Ok(staging), ..Means::default() });
        let client = Client::on(&Embedded::new(broker), 1001, ClientOptions::default()).unwrap();
        Box::into_raw(Box::new(kvb_client::over(client)))
    }

    /// A session of 32 tokens, whose two layers see the last `windows` tokens.
    fn session(client: *mut kvb_client, windows: [u32; 2]) -> *mut kvb_session {
        let geometry = kvb_geometry {
            size: size_of::<kvb_geometry>(),
            name: c"m".as_ptr(),
            element: c"int8".as_ptr(),
            rows: null(),
            layers: 2,
            k_row: 256,
            v_row: 256,
            tokens_per_block: 16,
            layout: 0,
            window: 0,
            windows: windows.as_ptr(),
        };
        let (mut profile, mut session): (*mut kvb_profile, _) = (null_mut(), null_mut());
        // SAFETY: the structures live for the calls; the profile is closed once.
        unsafe {
            assert_eq!(kvb_profile_new(client, &geometry, &mut profile), 0);
            assert_eq!(kvb_session_open(profile, null(), &mut session), 0);
            assert_eq!(kvb_session_ensure(session, 32), 0);
            assert_eq!(kvb_profile_close(profile), 0);
        }
        session
    }

    type Mistake = fn(&mut kvb_window_options);

    fn options() -> kvb_window_options {
        kvb_window_options {
            size: size_of::<kvb_window_options>(),
            first: 0,
            end: 32,
            capacity: 0,
            how: 0,
            what: 0,
            layer: 0,
            kv: 0,
            flags: 0,
            reserved: 0,
        }
    }

    #[track_caller]
    fn refused(code: i32, expected: Code, words: &str) {
        let mut text = [0u8; 512];
        // SAFETY: the buffer has the size that is said.
        unsafe { kvb_last_error(text.as_mut_ptr().cast(), text.len()) };
        let said = CStr::from_bytes_until_nul(&text).unwrap().to_str().unwrap();
        assert_eq!(code, expected as i32, "{said}");
        assert!(said.contains(words), "{said}, where it should say: {words}");
    }

    #[test]
    fn a_window_that_is_asked_for_wrongly_is_refused_by_the_name_of_what_is_wrong() {
        let client = client();
        let one = session(client, [0, 0]);
        let mut window = null_mut();
        let wrong: [(Mistake, &str); 11] = [
            (|o| o.size = 8, "kvb_window_options.size is 8"),
            (|o| o.first = 32, "tokens 32..32, which are none"),
            (|o| o.end = 33, "tokens 0..33"),
            (|o| o.end = u64::MAX, "the session holds 0..32"),
            (|o| o.how = 9, "how 9"),
            (|o| o.what = 2, "what 2"),
            (|o| o.layer = 2, "layer 2 of 2"),
            (|o| (o.what, o.kv) = (1, 2), "kv 2"),
            (|o| o.flags = 2, "flags 0x2"),
            (|o| o.reserved = 1, "kvb_window_options.reserved is 1"),
            (|o| o.layer = u32::MAX, "layer 4294967295 of 2"),
        ];
        for (make, words) in wrong {
            let mut options = options();
            make(&mut options);
            // SAFETY: the options live for the call.
            refused(unsafe { kvb_session_window(one, &options, &mut window) }, Code::Invalid, words);
            assert!(window.is_null(), "{words}");
        }
        let udmabuf = kvb_window_options { how: 2, ..options() };
        // SAFETY: as above; each handle is closed once.
        unsafe {
            refused(kvb_session_window(one, &udmabuf, &mut window), Code::BadRequest, "udmabuf");
            assert_eq!((kvb_session_close(one), kvb_client_close(client)), (0, 0));
        }
    }

    #[test]
    fn a_batch_or_session_that_is_not_the_windows_is_refused_and_the_window_goes_on() {
        let client = client();
        let (one, same, other) = (session(client, [0, 0]), session(client, [0, 0]), session(client, [0, 16]));
        let (mut w, mut of_other) = (null_mut(), null_mut());
        let mut batch = kvb_batch { size: 3, at: 0, offset: 0, bytes: 0, half: 0, reserved: 0 };
        let mut info = kvb_window_info {
            size: 0,
            bytes: 0,
            offset: 0,
            address: 0,
            first: 0,
            end: 0,
            batch_bytes: 0,
            requests: 0,
            how: 0,
            fd: 0,
        };
        let second_group = kvb_window_options { layer: 1, ..options() };
        // SAFETY: the structures live for the calls and are as long as they say; each handle is closed once.
        unsafe {
            assert_eq!(kvb_session_window(one, &options(), &mut w), 0);
            assert_eq!(
                kvb_session_window(other, &kvb_window_options { first: 16, ..second_group }, &mut of_other),
                0
            );
            refused(kvb_window_get_info(w, null_mut()), Code::Invalid, "out is NULL");
            refused(kvb_window_get_info(w, &mut info), Code::Invalid, "kvb_window_info.size is 0");
            refused(kvb_window_declined(w, null_mut(), 9) as i32, Code::Invalid, "text is NULL");
            refused(kvb_window_take_device(w), Code::Unsupported, "no device came");
            refused(kvb_window_extend(w, null_mut(), 32), Code::Invalid, "session is NULL");
            refused(kvb_window_extend(w, one, u64::MAX), Code::Invalid, "the session holds 32");
            refused(kvb_window_extend(w, same, 32), Code::Invalid, "of another session");
            refused(kvb_window_extend(of_other, one, 32), Code::Invalid, "other layer groups");
            refused(kvb_window_is_current(of_other, one), Code::Invalid, "other layer groups");
            assert_eq!((kvb_window_is_current(w, one), kvb_window_is_current(w, same)), (1, 0));
            refused(kvb_window_load(w, one, 0, &mut batch), Code::Invalid, "kvb_batch.size is 3");
            batch.size = size_of::<kvb_batch>();
            refused(kvb_window_load(w, same, 0, &mut batch), Code::Invalid, "of another session");
            refused(
                kvb_window_load(w, one, u64::MAX, &mut batch),
                Code::Invalid,
                "byte 18446744073709551615",
            );
            refused(kvb_window_drain(w, one, &batch), Code::Invalid, "no batch in half 0");
            refused(kvb_window_release(w, &batch), Code::Invalid, "no batch in half 0");
            assert_eq!(kvb_window_load(w, one, 0, &mut batch), 0);
            for (half, at) in [(9, 0), (1 - batch.half, 0), (batch.half, 1)] {
                let unknown = kvb_batch { half, at, ..batch };
                refused(kvb_window_drain(w, one, &unknown), Code::Invalid, "no batch in half");
                refused(kvb_window_release(w, &unknown), Code::Invalid, "no batch in half");
            }
            refused(kvb_window_extend(w, one, 32), Code::Invalid, "release it first");
            refused(kvb_window_drain(w, same, &batch), Code::Invalid, "of another session");
            assert_eq!(kvb_window_drain(w, one, &batch), 0);
            assert_eq!(kvb_window_release(w, &batch), 0);
            refused(kvb_window_release(w, &batch), Code::Invalid, "no batch in half");
            {
                let _used = kvb_window::lock(w).unwrap();
                refused(kvb_window_close(w), Code::InUse, "another thread uses this window");
                refused(kvb_window_extend(w, one, 32), Code::InUse, "another thread uses this window");
            }
            assert_eq!(kvb_window_close(w), 0);
            for session in [one, same, other] {
                assert_eq!(kvb_session_close(session), 0);
            }
            // Its session has gone before it: handles may be closed in any order.
            assert_eq!(kvb_window_close(of_other), 0);
            assert_eq!(kvb_client_close(client), 0);
        }
    }
}
