//! Windows as an engine sees them, on a machine without any of the devices: what is refused and in which words, and the way
//! through the staging buffer, which needs memory only. `tests/device` has the other ways, on a kernel that has them.

#[path = "common/llama.rs"]
mod llama;
#[path = "common/through.rs"]
mod through;

use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;

use kvbroker::broker::{Broker, Policy};
use kvbroker::client::{
    Client, ClientOptions, Embedded, Error, OpenOptions, Session, Window, WindowOptions, WindowPlace,
};
use kvbroker::heap::Memfd;
use kvbroker::map::{SharedMap, page_bytes};
use kvbroker::profile::{Kv, Profile};
use kvbroker::window::udmabuf::Udmabuf;
use kvbroker::window::{Access, How, Means, StagingMeans, What};
use kvbroker::wire::Fault;

const STAGING: u64 = 64 << 10;

fn embedded(access: Access, staging: bool, policy: Policy) -> Embedded {
    let mut broker = Broker::new(Arc::new(Memfd::new(false)), 128 << 10, 16, 16, policy).unwrap();
    let heap = Arc::new(Memfd::new(false));
    let means = StagingMeans { heap, bytes: STAGING, total: 2 * STAGING };
    let staging = if staging { Ok(means) } else { Err("no staging buffer is configured".into()) };
    broker.set_means(Means { access, staging, ..Means::default() });
    Embedded::new(broker)
}

fn client(broker: &Embedded) -> Client {
    let options = ClientOptions { credit_ahead: 0, ..ClientOptions::default() };
    Client::on(broker, 1001, options).unwrap()
}

/// Rows that make a plane of 16 tokens one page.
fn row() -> u32 {
    page_bytes() as u32 / 16
}

fn session(client: &Client) -> Session {
    let profile = Profile::uniform("m", "int8", 2, row(), row(), 16).unwrap();
    client.open(&client.profile(&profile).unwrap(), OpenOptions::default()).unwrap()
}

fn plane(layer: u32, kv: Kv) -> What {
    What::Plane { layer, kv }
}

fn refused(result: Result<Window, Error>) -> (Option<Fault>, String) {
    let e = result.expect_err("a refusal");
    (e.fault(), e.to_string())
}

fn write(session: &mut Session, tokens: std::ops::Range<usize>, mark: u8) {
    session.ensure(tokens.end).unwrap();
    for token in tokens {
        for kv in [Kv::K, Kv::V] {
            let row = vec![mark ^ token as u8 ^ ((kv as u8) << 7); row() as usize];
            session.write_row(token, 1, kv, &row).unwrap();
        }
    }
}

/// Reads through the staging buffer as a device would: by a mapping of its own, where the batch says.
fn device_reads(session: &Session, window: &mut Window, bytes: usize) -> Vec<u8> {
    let WindowPlace::Staging { fd, batch, .. } = window.place() else { panic!("{:?}", window.place()) };
    let device = SharedMap::new(fd, 2 * batch).unwrap();
    let mut out = Vec::new();
    while out.len() < bytes {
        let batch = session.load(window, None, out.len()).unwrap().unwrap();
        assert_eq!(batch.at(), out.len());
        let more = batch.bytes().min(bytes - out.len());
        out.extend(device.read(batch.offset(), more));
    }
    out
}

#[test]
fn twenty_four_tokens_decoded_through_the_staging_buffer_are_those_decoded_without() {
    let broker = embedded(Access::Contiguous, true, Policy::default());
    let client = client(&broker);
    let mut read = device_reads;
    let mut kv = through::Through::new(&client, 16, true, None, &mut read);
    assert_eq!(llama::decode(&mut kv), through::expected());
    let window = &kv.windows()[1][1];
    assert_eq!(window.how(), How::Bounce);
    let reasons: Vec<_> = window.declined().iter().map(|(how, _)| *how).collect();
    assert_eq!(reasons, [How::Run, How::Udmabuf, How::Iommu]);
    assert!(window.declined()[1].1.contains("contiguous memory"), "{:?}", window.declined());
    let stats = window.staging_stats();
    // K and V of two layers once per token, each a hand-over to the device, and none the other way.
    assert_eq!((stats.syncs_to_device, stats.syncs_to_cpu), (4 * llama::TOKENS as u64, 0));
}

#[test]
fn what_a_device_leaves_in_the_staging_buffer_lands_in_scattered_blocks() {
    let broker = embedded(Access::Contiguous, true, Policy::default());
    let client = client(&broker);
    let (mut s, mut other) = (session(&client), session(&client));
    for tokens in (16..=64).step_by(16) {
        write(&mut s, tokens - 16..tokens, 3);
        write(&mut other, tokens - 16..tokens, 9);
    }
    let mut window = s.window(0..64, plane(1, Kv::K), Some(How::Bounce)).unwrap();
    let all = window.bytes();
    let before = device_reads(&s, &mut window, all);
    let WindowPlace::Staging { fd, batch, bytes } = window.place() else { panic!() };
    assert_eq!((batch as u64, bytes), (STAGING / 2, 4 * page_bytes()));
    let device = SharedMap::new(fd.as_fd(), 2 * batch).unwrap();
    let taken = s.batch(&window, None, page_bytes()).unwrap().unwrap();
    let turned: Vec<u8> = before[page_bytes()..].iter().map(|b| !b).collect();
    device.write(taken.offset(), &turned);
    s.drain(&window, &taken).unwrap();
    let second = s.load(&window, Some(&taken), 0).unwrap();
    assert!(second.is_some_and(|b| b.offset() != taken.offset()), "the other half");
    drop(taken);
    let mut row = vec![0; row() as usize];
    for token in 0..64 {
        s.read_row(token, 1, Kv::K, &mut row).unwrap();
        let expected = 3 ^ token as u8;
        assert_eq!(row[0], if token < 16 { expected } else { !expected }, "token {token}");
        s.read_row(token, 1, Kv::V, &mut row).unwrap();
        assert_eq!(row[0], expected ^ 0x80, "V of token {token}");
        other.read_row(token, 1, Kv::K, &mut row).unwrap();
        assert_eq!(row[0], 9 ^ token as u8, "another session's token {token}");
    }
    let stats = window.staging_stats();
    assert_eq!((stats.syncs_to_device, stats.syncs_to_cpu), (2, 1));
}

#[test]
fn a_drain_into_a_shared_block_is_refused_and_touches_nothing() {
    let broker = embedded(Access::Contiguous, true, Policy::default());
    let client = client(&broker);
    let mut s = session(&client);
    write(&mut s, 0..40, 5);
    s.seal(&[1; 16]).unwrap();
    let window = s.window(0..40, plane(1, Kv::V), None).unwrap();
    let batch = s.batch(&window, None, 0).unwrap().unwrap();
    let e = s.drain(&window, &batch).unwrap_err().to_string();
    assert!(e.contains("block 0 is shared"), "{e}");
    assert_eq!(window.staging_stats().syncs_to_cpu, 0);
    let mut row = vec![0; row() as usize];
    s.read_row(39, 1, Kv::V, &mut row).unwrap();
    assert_eq!(row[0], 5 ^ 39 ^ 0x80);
}

#[test]
fn a_window_that_cannot_be_says_which_ways_were_tried_and_why_none_is_possible() {
    let broker = embedded(Access::Unknown, false, Policy::default());
    let client = client(&broker);
    let mut s = session(&client);
    write(&mut s, 0..40, 1);
    let (fault, text) = refused(s.window(0..40, plane(0, Kv::K), None));
    assert_eq!(fault, Some(Fault::BadRequest));
    for reason in [
        "run: extents of a memfd pool are no dma-bufs",
        "udmabuf: pool.device does not say that the device takes scattered memory",
        "iommu: no device is configured (device.node)",
        "bounce: no staging buffer is configured",
    ] {
        assert!(text.contains(reason), "{text}");
    }
    let (_, text) = refused(s.window(0..40, plane(0, Kv::K), Some(How::Udmabuf)));
    assert!(text.contains("udmabuf is not opened here") && !text.contains("iommu"), "{text}");
    let (_, text) = refused(s.window(5..5, What::Blocks, None));
    assert!(text.contains("which are none"), "{text}");
    let (_, text) = refused(s.window(0..41, What::Blocks, None));
    assert!(text.contains("the session holds 0..40"), "{text}");
    let (_, text) = refused(s.window(0..40, plane(2, Kv::K), None));
    assert!(text.contains("there is no layer 2: the profile has 2"), "{text}");
    let small = Profile::uniform("small", "int8", 2, row() / 2, row() / 2, 16).unwrap();
    let mut s = client.open(&client.profile(&small).unwrap(), OpenOptions::default()).unwrap();
    s.ensure(20).unwrap();
    let (_, text) = refused(s.window(0..20, plane(0, Kv::K), None));
    assert!(text.ends_with("32 tokens per block would do"), "{text}");
    broker.with(|b| assert_eq!(b.window_counts(), (0, 0)));
}

#[test]
fn a_kernel_without_udmabuf_is_named_and_the_staging_buffer_serves_instead() {
    let broker = embedded(Access::Scatter, true, Policy::default());
    let missing = Udmabuf::open(Path::new("/nonexistent/udmabuf")).map(Arc::new).map_err(|e| e.to_string());
    let staging = StagingMeans { heap: Arc::new(Memfd::new(false)), bytes: STAGING, total: STAGING };
    broker.with(|b| {
        let means =
            Means { access: Access::Scatter, udmabuf: missing, staging: Ok(staging), ..Means::default() };
        b.set_means(means);
    });
    let client = client(&broker);
    let mut s = session(&client);
    write(&mut s, 0..40, 1);
    let window = s.window(0..40, plane(0, Kv::K), None).unwrap();
    assert_eq!(window.how(), How::Bounce);
    let why = window.declined().iter().find(|(how, _)| *how == How::Udmabuf).unwrap();
    assert!(why.1.contains("/nonexistent/udmabuf: this kernel has no udmabuf (CONFIG_UDMABUF)"), "{why:?}");
    let (fault, text) = refused(s.window(0..40, plane(0, Kv::K), Some(How::Udmabuf)));
    assert_eq!(fault, Some(Fault::BadRequest));
    assert!(text.contains("CONFIG_UDMABUF"), "{text}");
}

#[test]
fn the_operators_limits_hold_for_windows_and_for_staging_buffers() {
    let broker = embedded(Access::Contiguous, true, Policy { windows_per_session: 2, ..Policy::default() });
    let client_of = |_| client(&broker);
    let clients: Vec<Client> = (0..3).map(client_of).collect();
    let mut sessions: Vec<Session> = clients.iter().map(session).collect();
    sessions.iter_mut().for_each(|s| s.ensure(16).unwrap());
    let mut open = |s: usize| sessions[s].window(0..16, What::Blocks, None);
    let held = [open(0).unwrap(), open(0).unwrap(), open(1).unwrap()];
    let (fault, text) = refused(open(0));
    assert_eq!(fault, Some(Fault::OverLimit));
    assert!(text.contains("limits.windows-per-session"), "{text}");
    let (fault, text) = refused(open(2));
    assert_eq!(fault, Some(Fault::Busy));
    assert!(text.contains("2 processes have staging buffers of 65536 bytes"), "{text}");
    drop(held);
    // A memfd's holders cannot be counted, so such a buffer is never proven free: on a CMA heap it comes back (tests/device).
    broker.with(|b| {
        b.recheck_windows();
        assert_eq!(b.window_counts(), (0, 0));
    });
}

#[test]
fn limits_of_a_tenant_and_of_the_broker_count_the_windows_of_all_sessions() {
    let of_tenant = Policy { windows_per_tenant: 2, ..Policy::default() };
    let of_all = Policy { windows: 2, ..Policy::default() };
    for (policy, key) in [(of_tenant, "limits.windows-per-tenant is 2"), (of_all, "limits.windows is 2")] {
        let broker = embedded(Access::Contiguous, true, policy);
        let client = client(&broker);
        let mut sessions = [session(&client), session(&client)];
        let mut open = |s: usize| {
            sessions[s].ensure(16).unwrap();
            sessions[s].window(0..16, What::Blocks, None)
        };
        let held = [open(0).unwrap(), open(1).unwrap()];
        let (fault, text) = refused(open(0));
        assert_eq!(fault, Some(Fault::OverLimit));
        assert!(text.contains(key), "{text}");
        drop(held);
        open(1).unwrap();
    }
}

#[test]
fn a_window_over_blocks_that_were_trimmed_is_no_longer_current_and_is_made_anew() {
    let broker = embedded(Access::Contiguous, true, Policy::default());
    let client = client(&broker);
    let mut s = session(&client);
    write(&mut s, 0..40, 1);
    let mut window = s.window(0..40, plane(1, Kv::K), None).unwrap();
    assert!(s.is_current(&window));
    assert_eq!((window.tokens(), window.block_offset(39)), (0..48, Some(2 * page_bytes())));
    s.trim(20).unwrap();
    assert!(!s.is_current(&window));
    let e = s.load(&window, None, 0).unwrap_err().to_string();
    assert!(e.contains("extend it"), "{e}");
    s.extend_window(&mut window, 20).unwrap();
    assert!(s.is_current(&window));
    assert_eq!((window.tokens(), window.requests()), (0..32, 2));
    s.extend_window(&mut window, 18).unwrap();
    assert_eq!(window.requests(), 2, "what is shown already is not asked for");
    let e = s.extend_window(&mut window, 21).unwrap_err().to_string();
    assert!(e.contains("the session holds 20"), "{e}");
    let stranger = session(&client).extend_window(&mut window, 1).unwrap_err().to_string();
    assert!(stranger.contains("of another session"), "{stranger}");
    let options = WindowOptions { read_only: true, ..WindowOptions::default() };
    s.window_with(0..20, plane(0, Kv::V), options).unwrap();
}
