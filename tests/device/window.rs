//! Windows of the product on a real kernel: scattered blocks as one dma-buf, as one range of a device's addresses, and through
//! a contiguous staging buffer.
//!
//! The broker runs inside the test, with the kernel's own objects. `edu` stands for an NPU behind an IOMMU.

use std::fs;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kvbroker::broker::{Broker, Policy};
use kvbroker::client::{
    Client, ClientOptions, Embedded, Error, OpenOptions, Session, Window, WindowOptions, WindowPlace,
};
use kvbroker::heap::{DmaHeap, Heap, Memfd};
use kvbroker::profile::{Kv, Profile};
use kvbroker::window::iommu::Device;
use kvbroker::window::udmabuf::Udmabuf;
use kvbroker::window::{Access, How, Means, StagingMeans, What};
use kvbroker::wire::Fault;

use crate::iommu::{Edu, edu_address, edu_node};
use crate::llama::{self, ROW_BYTES};
use crate::support::{BLOCK, CMA_HEAP, EXTENT, MIB, Map, cma_used, dma_buf_sync, holders};
use crate::through::{Through, expected};

const STAGING: usize = MIB;
const LAYER: u32 = 3;
const ROW: usize = 512;

fn heap(name: &str) -> Arc<dyn Heap> {
    Arc::new(DmaHeap::open(&Path::new("/dev/dma_heap").join(name)).expect("the heap"))
}

/// What the machine has, for a device of this kind.
fn means(access: Access) -> Means {
    let udmabuf = Udmabuf::open(Path::new("/dev/udmabuf")).map(Arc::new).map_err(|e| e.to_string());
    let staging = StagingMeans { heap: heap(CMA_HEAP), bytes: STAGING as u64, total: 2 * STAGING as u64 };
    let iommu = match access {
        Access::Iommu => {
            let device = Device::open(Path::new(&edu_node()), Path::new("/dev/iommu"), 32);
            Ok(Arc::new(device.expect("the device")))
        }
        _ => Err("no device is configured".into()),
    };
    Means { access, udmabuf, iommu, staging: Ok(staging), ..Means::default() }
}

fn broker(heap: Arc<dyn Heap>, access: Access) -> Embedded {
    let mut broker = Broker::new(heap, EXTENT as u64, 8, 8, Policy::default()).expect("a pool");
    broker.set_means(means(access));
    Embedded::new(broker)
}

fn memfd_pool(access: Access) -> Embedded {
    broker(Arc::new(Memfd::new(false)), access)
}

/// 44 extents: 132 MiB.
pub fn large_memfd_pool(access: Access) -> Embedded {
    let heap = Arc::new(Memfd::new(false));
    let mut broker = Broker::new(heap, EXTENT as u64, 44, 44, Policy::default()).expect("a pool");
    broker.set_means(means(access));
    Embedded::new(broker)
}

pub fn client(broker: &Embedded, uid: u32) -> Client {
    let options = ClientOptions { credit_ahead: 0, ..ClientOptions::default() };
    Client::on(broker, uid, options).expect("a client")
}

pub fn open(client: &Client) -> Session {
    let profile = client.profile(&Profile::reference()).expect("a profile");
    client.open(&profile, OpenOptions::default()).expect("a session")
}

fn byte(token: usize, i: usize) -> u8 {
    (token * 37 + i * 5 + 1) as u8
}

fn write(session: &mut Session, tokens: Range<usize>) {
    session.ensure(tokens.end).expect("room");
    for token in tokens {
        let row: Vec<u8> = (0..ROW).map(|i| byte(token, i)).collect();
        session.write_row(token, LAYER as usize, Kv::V, &row).expect("a row");
    }
}

/// A session whose blocks lie between those of another one, over several extents.
fn scattered(client: &Client, tokens: usize) -> (Session, Session) {
    let (mut session, mut other) = (open(client), open(client));
    for end in (16..=tokens.next_multiple_of(16)).step_by(16) {
        let from = session.tokens();
        write(&mut session, from..end.min(tokens));
        other.ensure(end).expect("room");
    }
    (session, other)
}

fn plane() -> What {
    What::Plane { layer: LAYER, kv: Kv::V }
}

fn buffer(window: &Window) -> (OwnedFd, usize, usize) {
    match window.place() {
        WindowPlace::Buffer { fd, offset, bytes } => (fd.try_clone_to_owned().expect("dup"), offset, bytes),
        other => panic!("{other:?}"),
    }
}

/// Pages that devices and iommufd have pinned just now.
pub fn pinned() -> i64 {
    let (acquired, released) = pins();
    acquired - released
}

/// Pages that were pinned since the machine began, and those of them that were let go.
pub fn pins() -> (i64, i64) {
    // The kernel counts on each CPU and adds up late.
    fs::write("/proc/sys/vm/stat_refresh", "1").expect("stat_refresh");
    let text = fs::read_to_string("/proc/vmstat").expect("vmstat");
    let value = |name: &str| -> i64 {
        let line =
            text.lines().find_map(|l| l.strip_prefix(name)).unwrap_or_else(|| panic!("{name} in vmstat"));
        line.trim().parse().expect("a number")
    };
    (value("nr_foll_pin_acquired "), value("nr_foll_pin_released "))
}

/// Linux up to 6.10 holds a udmabuf's pages by references, which no counter shows; newer ones pin them.
fn udmabuf_pins() -> bool {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").expect("osrelease");
    let mut numbers = release.split(['.', '-']).map(|n| n.parse::<u32>().expect("a kernel's number"));
    (numbers.next(), numbers.next()) >= (Some(6), Some(11))
}

fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").expect("fds").count()
}

fn refusal(result: Result<Window, Error>) -> (Option<Fault>, String) {
    let e = result.expect_err("a refusal");
    (e.fault(), e.to_string())
}

#[test]
fn a_udmabuf_window_shows_scattered_blocks_in_token_order_and_grows_seldom() {
    let (fds, pins) = (descriptors(), pinned());
    {
        let broker = memfd_pool(Access::Scatter);
        let client = client(&broker, 1001);
        let (mut s, _other) = scattered(&client, 8 * 16);
        let mut window = s.window(0..128, plane(), None).expect("a window");
        assert_eq!(window.how(), How::Udmabuf);
        assert_eq!(window.declined().len(), 1, "{:?}", window.declined());
        let whole = s.window(0..128, What::Blocks, None).expect("whole blocks");
        if udmabuf_pins() {
            let shown = ((8 * 8192 + 8 * BLOCK) / 4096) as i64;
            assert_eq!(pinned() - pins, shown, "exactly what is shown is pinned");
        }
        for token in 129..=256 {
            write(&mut s, token - 1..token);
            s.extend_window(&mut window, token).expect("growth");
            let (fd, _, bytes) = buffer(&window);
            assert!(bytes >= token * ROW);
            if token % 32 == 1 {
                let map = Map::read_only(fd.as_fd(), bytes);
                for t in [0, 15, 16, 77, token - 1] {
                    assert_eq!(
                        (map.byte(t * ROW), map.byte(t * ROW + 511)),
                        (byte(t, 0), byte(t, 511)),
                        "token {t}"
                    );
                }
            }
        }
        // 8 blocks more: log2 of that, and two.
        assert!(window.requests() <= 5, "{} requests", window.requests());
        let (fd, _, bytes) = buffer(&whole);
        let map = Map::writable(fd.as_fd(), bytes);
        let at = |t: usize| t / 16 * BLOCK + (2 * LAYER as usize + 1) * 8192 + t % 16 * ROW;
        assert!((0..128).all(|t| map.byte(at(t)) == byte(t, 0)));
        // One memory under several names: what a device writes is in the session.
        map.fill(at(100), 1, 0xee);
        let mut row = [0; ROW];
        s.read_row(100, LAYER as usize, Kv::V, &mut row).expect("a row");
        assert_eq!(row[..2], [0xee, byte(100, 1)]);
    }
    assert_eq!((descriptors(), pinned()), (fds, pins), "descriptors and pinned pages");
}

#[test]
fn blocks_under_a_dead_clients_udmabuf_come_back_when_the_importer_lets_go() {
    let broker = memfd_pool(Access::Scatter);
    let all = {
        let client = client(&broker, 1001);
        client.profile(&Profile::reference()).expect("a profile").room().expect("room").capacity
    };
    let dead = client(&broker, 1001);
    let (mut s, other) = scattered(&dead, 5 * 16);
    let window = s.window(0..80, What::Blocks, Some(How::Udmabuf)).expect("a window");
    // What a driver has: a reference of its own.
    let (import, _, bytes) = buffer(&window);
    drop((window, other, s, dead));
    broker.with(|b| assert_eq!(b.window_counts(), (0, 1), "closed, and still held"));

    // The same tenant gets everything but those five blocks.
    let heir = client(&broker, 1001);
    let profile = heir.profile(&Profile::reference()).expect("a profile");
    let mut next = heir.open(&profile, OpenOptions::default()).expect("a session");
    let blocks = all as usize - 5;
    next.ensure(blocks * 16).expect("all the rest");
    assert_eq!(next.ensure(blocks * 16 + 1).unwrap_err().fault(), Some(Fault::Busy));
    let map = Map::writable(import.as_fd(), bytes);
    map.fill(0, bytes, 0x99);
    for token in (0..blocks * 16).step_by(16) {
        let mut row = [0xff; ROW];
        next.read_row(token, 0, Kv::K, &mut row).expect("a row");
        assert_eq!(row, [0; ROW], "the dead client's device wrote into token {token}");
    }
    assert_eq!(holders(import.as_fd()), 3, "the broker, the importer, its mapping");
    drop(map);
    drop(import);
    broker.with(|b| {
        b.recheck_windows();
        assert_eq!(b.window_counts(), (0, 0));
    });
    next.ensure(all as usize * 16).expect("they are back");
}

#[test]
fn udmabufs_limits_are_told_and_a_window_of_single_planes_fits_below_them() {
    // A small profile, so that 1025 scattered planes fit a small pool.
    let broker = memfd_pool(Access::Scatter);
    let client = client(&broker, 1001);
    let profile = Profile::uniform("narrow", "int8", 1, 4096, 4096, 1).expect("a profile");
    let profile = client.profile(&profile).expect("a profile");
    let mut s = client.open(&profile, OpenOptions::default()).expect("a session");
    s.ensure(1025).expect("room");
    let what = What::Plane { layer: 0, kv: Kv::K };
    let (fault, text) = refusal(s.window(0..1025, what, Some(How::Udmabuf)));
    assert_eq!(fault, Some(Fault::OverLimit));
    assert!(text.contains("1025 scattered ranges") && text.contains("list_limit"), "{text}");
    s.window(0..1024, what, Some(How::Udmabuf)).expect("1024 ranges");
    // Whole blocks side by side are one range, however many.
    s.window(0..1025, What::Blocks, Some(How::Udmabuf)).expect("joined");
    broker.with(|b| b.verify().expect("the books add up"));
}

#[test]
fn a_window_over_a_prefix_is_refused_as_udmabuf_and_made_over_a_copy() {
    let broker = memfd_pool(Access::Scatter);
    let client = client(&broker, 1001);
    let (mut s, _other) = scattered(&client, 48);
    let ids: Vec<u32> = (0..32).collect();
    s.seal(&ids).expect("sealed");
    let mut heir = open(&client);
    assert_eq!(heir.attach(&(0..40).collect::<Vec<u32>>()).expect("attached"), 32);
    let (_, text) = refusal(s.window(0..48, plane(), Some(How::Udmabuf)));
    assert!(text.contains("a udmabuf is always writable, and block 0"), "{text}");
    s.writable(0..32).expect("copies");
    let window = s.window(0..48, plane(), Some(How::Udmabuf)).expect("over the copies");
    let (fd, _, bytes) = buffer(&window);
    let map = Map::writable(fd.as_fd(), bytes);
    map.fill(0, bytes, 0);
    let mut row = [0; ROW];
    heir.read_row(31, LAYER as usize, Kv::V, &mut row).expect("a row");
    assert_eq!(row[0], byte(31, 0), "the prefix is as it was");
}

#[test]
fn blocks_side_by_side_in_a_contiguous_extent_are_a_run_and_others_are_staged() {
    let before = cma_used();
    {
        let broker = broker(heap(CMA_HEAP), Access::Contiguous);
        let client = client(&broker, 1001);
        let mut s = open(&client);
        write(&mut s, 0..128);
        let run = s.window(16..128, What::Blocks, None).expect("a run");
        assert_eq!((run.how(), run.declined().len()), (How::Run, 0));
        let (fd, offset, bytes) = buffer(&run);
        assert_eq!(bytes, 7 * BLOCK);
        let map = Map::read_only(fd.as_fd(), EXTENT);
        let plane_at = (2 * LAYER as usize + 1) * 8192;
        assert_eq!(map.byte(offset + plane_at + 2 * BLOCK + 3 * ROW), byte(16 + 35, 0));

        write(&mut s, 128..144);
        let staged = s.window(0..144, What::Blocks, None).expect("staged");
        assert_eq!(staged.how(), How::Bounce);
        assert!(staged.declined()[0].1.contains("lie in 2 separate pieces"), "{:?}", staged.declined());
        let one = s.window(128..144, plane(), None).expect("one plane of one block");
        assert_eq!(one.how(), How::Run);
    }
    assert_eq!(cma_used(), before, "pool and staging buffer are back");
}

#[test]
fn a_staging_buffer_is_contiguous_memory_taken_when_needed_and_given_back() {
    let broker = memfd_pool(Access::Contiguous);
    let before = cma_used();
    let client = client(&broker, 1001);
    let (mut s, _other) = scattered(&client, 160);
    assert_eq!(cma_used(), before);
    let window = s.window(0..160, plane(), None).expect("a window");
    assert_eq!((window.how(), cma_used() - before), (How::Bounce, STAGING));
    let WindowPlace::Staging { fd, batch, bytes } = window.place() else { panic!("{:?}", window.place()) };
    assert_eq!((batch, bytes), (STAGING / 2, 10 * 8192));
    let device = Map::writable(fd, STAGING);
    let loaded = s.load(&window, None, 0).expect("loaded").expect("a half");
    let second = s.load(&window, Some(&loaded), 8192).expect("loaded").expect("the other half");
    for token in 0..160 {
        assert_eq!(device.byte(loaded.offset() + token * ROW), byte(token, 0), "token {token}");
    }
    assert_eq!(device.byte(second.offset()), byte(16, 0));
    // The device's turn: it writes, and the CPU takes it back.
    dma_buf_sync(fd, 2).expect("the device's own section");
    device.fill(loaded.offset(), loaded.bytes(), 0x3c);
    dma_buf_sync(fd, 4 | 2).expect("the device's own section");
    s.drain(&window, &loaded).expect("drained");
    let mut row = [0; ROW];
    for token in [0, 15, 16, 159] {
        s.read_row(token, LAYER as usize, Kv::V, &mut row).expect("a row");
        assert_eq!(row, [0x3c; ROW], "token {token}");
    }
    let stats = window.staging_stats();
    assert_eq!((stats.syncs_to_device, stats.syncs_to_cpu), (2, 1));
    drop((loaded, second, device, window));
    broker.with(|b| b.recheck_windows());
    assert_eq!(cma_used(), before, "given back with the last window");

    let mut too_much = means(Access::Contiguous);
    let large = StagingMeans { heap: heap(CMA_HEAP), bytes: 512 * MIB as u64, total: 512 * MIB as u64 };
    too_much.staging = Ok(large);
    broker.with(|b| b.set_means(too_much));
    let (fault, text) = refusal(s.window(0..160, plane(), None));
    assert_eq!(fault, Some(Fault::Busy));
    assert!(text.contains("bounce: /dev/dma_heap/") && text.contains("enlarge the CMA region"), "{text}");
    assert_eq!(cma_used(), before);
}

#[test]
fn an_npu_behind_an_iommu_works_on_scattered_blocks_that_grow_and_faults_on_those_that_went() {
    let pins = pinned();
    let broker = memfd_pool(Access::Iommu);
    let client = client(&broker, 1001);
    let (mut s, mut other) = scattered(&client, 48);
    let mut window = s.window(0..48, What::Blocks, None).expect("a window");
    assert_eq!(window.how(), How::Iommu);
    let place = |w: &Window| match w.place() {
        WindowPlace::Address { iova, bytes } => (iova, bytes),
        other => panic!("{other:?}"),
    };
    let (iova, bytes) = place(&window);
    assert_eq!(bytes, 3 * BLOCK);
    let edu = Edu::over(window.take_device().expect("the device comes with the first window").into());

    // Out of the border between the first two blocks, into that between the second and the third.
    let pattern = |s: &mut Session, token: usize, layer: usize, mark: u8| {
        s.write_row(token, layer, Kv::V, &[mark; ROW]).expect("a row");
    };
    pattern(&mut s, 15, 23, 0x11);
    s.write_row(16, 0, Kv::K, &[0x22; ROW]).expect("a row");
    edu.load(iova + (BLOCK - ROW) as u64, 2 * ROW as u64);
    edu.store(iova + (2 * BLOCK - ROW) as u64, 2 * ROW as u64);
    let mut row = [0; ROW];
    s.read_row(31, 23, Kv::V, &mut row).expect("a row");
    assert_eq!(row, [0x11; ROW]);
    s.read_row(32, 0, Kv::K, &mut row).expect("a row");
    assert_eq!(row, [0x22; ROW]);
    // It grows while the device has it, in place.
    write(&mut s, 48..96);
    s.extend_window(&mut window, 96).expect("growth");
    let (again, bytes) = place(&window);
    assert_eq!((again, bytes / BLOCK, window.requests()), (iova, 6, 2));
    edu.store(iova + (5 * BLOCK) as u64, ROW as u64);
    s.read_row(80, 0, Kv::K, &mut row).expect("a row");
    assert_eq!(row, [0x11; ROW]);

    // Another session's window is elsewhere, with a gap; the device has one tenant's sessions only.
    let second = other.window(0..48, What::Blocks, None).expect("a second window");
    let (elsewhere, _) = place(&second);
    assert!(elsewhere >= iova + (6 * BLOCK) as u64 || elsewhere + (3 * BLOCK) as u64 <= iova);
    let stranger = crate::window::client(&broker, 1002);
    let mut theirs = open(&stranger);
    write(&mut theirs, 0..16);
    let (fault, text) = refusal(theirs.window(0..16, What::Blocks, None));
    assert_eq!(fault, Some(Fault::Busy), "{text}");
    assert!(text.contains("is another tenant's, which has windows for it"), "{text}");

    // Unmapped, an access reaches nothing and leaves nothing behind.
    edu.load(iova, ROW as u64);
    drop(window);
    let before: Vec<u8> = (0..96)
        .map(|t| {
            s.read_row(t, 0, Kv::K, &mut row).expect("a row");
            row[0]
        })
        .collect();
    edu.load(iova + (BLOCK - ROW) as u64, 2 * ROW as u64);
    edu.store(iova, ROW as u64);
    edu.store(iova + (5 * BLOCK) as u64, ROW as u64);
    let after: Vec<u8> = (0..96)
        .map(|t| {
            s.read_row(t, 0, Kv::K, &mut row).expect("a row");
            row[0]
        })
        .collect();
    assert_eq!(after, before, "the device wrote into blocks that it no longer has");

    // The device is the tenant's until its last descriptor is closed, whatever became of the windows.
    drop((second, s, other, client));
    broker.with(|b| assert_eq!(b.window_counts(), (0, 0)));
    let (fault, text) = refusal(theirs.window(0..16, What::Blocks, None));
    assert_eq!(fault, Some(Fault::Busy), "{text}");
    drop(edu);
    let mut mine = theirs.window(0..16, What::Blocks, None).expect("bound anew, so nobody has it");
    let edu = Edu::over(mine.take_device().expect("the device").into());
    let (iova, _) = place(&mine);
    edu.load(iova + ((2 * LAYER + 1) * 8192) as u64, ROW as u64);
    edu.store(iova, ROW as u64);
    theirs.read_row(0, 0, Kv::K, &mut row).expect("a row");
    assert_eq!(row[..2], [byte(0, 0), byte(0, 1)]);
    drop((edu, mine, theirs, stranger, broker));
    assert_eq!(pinned(), pins, "every pinned page is let go");
}

#[test]
fn a_device_changes_tenants_once_every_descriptor_is_closed_though_its_owner_stays_connected() {
    let broker = memfd_pool(Access::Iommu);
    let (first, second) = (client(&broker, 1001), client(&broker, 1002));
    let (mut mine, mut theirs) = (open(&first), open(&second));
    write(&mut mine, 0..16);
    write(&mut theirs, 0..16);
    let mut window = mine.window(0..16, What::Blocks, None).expect("a window");
    let device = window.take_device().expect("the device");
    drop(window);
    let (fault, text) = refusal(theirs.window(0..16, What::Blocks, None));
    assert_eq!(fault, Some(Fault::Busy), "{text}");
    assert!(text.contains("in somebody's hands still"), "{text}");
    // Whoever has it goes on with it, whatever others have asked for.
    drop(mine.window(0..16, What::Blocks, None).expect("the owner's next window"));
    let copy = device.try_clone().expect("dup");
    drop(device);
    let (fault, text) = refusal(theirs.window(0..16, What::Blocks, None));
    assert_eq!(fault, Some(Fault::Busy), "a copy of the descriptor is open: {text}");
    drop(copy);
    let mut window = theirs.window(0..16, What::Blocks, None).expect("bound anew, so nobody has it");
    let edu = Edu::over(window.take_device().expect("the device").into());
    let (fault, text) = refusal(mine.window(0..16, What::Blocks, None));
    assert_eq!(fault, Some(Fault::Busy), "{text}");
    drop((edu, window));
    let mut window = mine.window(0..16, What::Blocks, None).expect("and back");
    let edu = Edu::over(window.take_device().expect("the device once more").into());
    let WindowPlace::Address { iova, .. } = window.place() else { panic!("{:?}", window.place()) };
    edu.load(iova + ((2 * LAYER + 1) * 8192) as u64, ROW as u64);
    edu.store(iova, ROW as u64);
    let mut row = [0; ROW];
    mine.read_row(0, 0, Kv::K, &mut row).expect("a row");
    assert_eq!(row[..2], [byte(0, 0), byte(0, 1)]);
}

#[test]
fn device_addresses_that_run_out_are_told_and_come_back_with_each_window() {
    let (pins, fds) = (pinned(), descriptors());
    {
        let broker = memfd_pool(Access::Iommu);
        let mut narrow = means(Access::Iommu);
        // 8 MiB of addresses: a few windows of three blocks.
        let device = Device::open(Path::new(&edu_node()), Path::new("/dev/iommu"), 23);
        narrow.iommu = Ok(Arc::new(device.expect("the device")));
        broker.with(|b| b.set_means(narrow));
        let client = client(&broker, 1001);
        let (mut s, _other) = scattered(&client, 48);
        let mut fitted = Vec::new();
        for _ in 0..20 {
            let mut held = Vec::new();
            let (fault, text) = loop {
                match s.window(0..48, What::Blocks, Some(How::Iommu)) {
                    Ok(window) => held.push(window),
                    Err(e) => break (e.fault(), e.to_string()),
                }
            };
            assert_eq!(fault, Some(Fault::Busy), "{text}");
            assert!(text.contains("bytes of device addresses are not left beside"), "{text}");
            fitted.push(held.len());
        }
        assert!(fitted[0] >= 1 && fitted.iter().all(|n| *n == fitted[0]), "addresses are lost: {fitted:?}");
    }
    assert_eq!((pinned(), descriptors()), (pins, fds), "pinned pages and descriptors");
}

#[test]
fn a_device_that_is_unbound_serves_its_windows_to_the_end_and_is_missed_by_name_after() {
    let broker = memfd_pool(Access::Iommu);
    let node = edu_node();
    let owner = client(&broker, 1001);
    let (mut s, other) = scattered(&owner, 32);
    let mut window = s.window(0..32, What::Blocks, None).expect("a window");
    let edu = Edu::over(window.take_device().expect("the device").into());
    let address = edu_address();
    // The kernel takes the node away, asks for the device, and waits until it is let go of.
    let unbinding = std::thread::spawn(move || fs::write("/sys/bus/pci/drivers/vfio-pci/unbind", address));
    while Path::new(&node).exists() {
        std::thread::sleep(Duration::from_millis(10));
    }
    std::thread::sleep(Duration::from_millis(200));
    assert!(!unbinding.is_finished(), "a device in use was taken away");
    write(&mut s, 32..48);
    s.extend_window(&mut window, 48).expect("it grows still");
    let WindowPlace::Address { iova, .. } = window.place() else { panic!("{:?}", window.place()) };
    edu.load(iova + ((2 * LAYER + 1) * 8192) as u64, ROW as u64);
    edu.store(iova + (2 * BLOCK) as u64, ROW as u64);
    let mut row = [0; ROW];
    s.read_row(32, 0, Kv::K, &mut row).expect("a row");
    assert_eq!(row[..2], [byte(0, 0), byte(0, 1)], "and the device reaches what it has grown by");
    drop((edu, window, s, other, owner));
    unbinding.join().expect("the thread").expect("unbound");

    let next = client(&broker, 1001);
    let mut s = open(&next);
    write(&mut s, 0..16);
    let (fault, text) = refusal(s.window(0..16, What::Blocks, Some(How::Iommu)));
    assert_eq!(fault, Some(Fault::BrokerFault), "{text}");
    assert!(text.contains(&node) && text.contains("bind the device to vfio-pci first"), "{text}");
    assert_eq!(edu_node(), node, "bound again");
    s.window(0..16, What::Blocks, None).expect("and it serves");
    broker.with(|b| b.verify().expect("the books add up"));
}

#[test]
fn a_device_that_was_reset_finds_its_windows_where_they_were() {
    let broker = memfd_pool(Access::Iommu);
    let client = client(&broker, 1001);
    let (mut s, _other) = scattered(&client, 32);
    let mut window = s.window(0..32, What::Blocks, None).expect("a window");
    let edu = Edu::over(window.take_device().expect("the device").into());
    let WindowPlace::Address { iova, .. } = window.place() else { panic!("{:?}", window.place()) };
    edu.load(iova + ((2 * LAYER + 1) * 8192) as u64, ROW as u64);
    // This model knows no reset: what one leaves behind is a device that may not reach memory.
    edu.set_bus_master(false);
    edu.store(iova + BLOCK as u64, ROW as u64);
    let mut row = [0; ROW];
    s.read_row(16, 0, Kv::K, &mut row).expect("a row");
    assert_eq!(row, [0; ROW], "a device that is no bus master wrote");
    s.extend_window(&mut window, 32).expect("nothing to ask for");
    edu.set_bus_master(true);
    edu.store(iova + BLOCK as u64, ROW as u64);
    s.read_row(16, 0, Kv::K, &mut row).expect("a row");
    assert_eq!(row[..2], [byte(0, 0), byte(0, 1)]);
}

#[test]
fn a_run_for_a_device_that_is_not_coherent_has_its_extent_to_itself() {
    let before = cma_used();
    {
        let broker = broker(heap(CMA_HEAP), Access::Contiguous);
        broker.with(|b| b.set_means(Means { coherent: false, ..means(Access::Contiguous) }));
        // With credit, as a process usually has some: the library gives back what lies in the extent.
        let owner = Client::on(&broker, 1001, ClientOptions::default()).expect("a client");
        let mut s = open(&owner);
        write(&mut s, 0..48);
        let mut run = s.window(0..48, What::Blocks, None).expect("a window");
        assert_eq!(run.how(), How::Run, "{:?}", run.declined());
        let text = s.fork().map(drop).expect_err("a twin would write, too").to_string();
        assert!(text.contains("only one session may write it"), "{text}");
        // Another process of the tenant gets all of the pool but that extent.
        let neighbour = client(&broker, 1001);
        let mut other = open(&neighbour);
        other.ensure(7 * 8 * 16).expect("seven extents");
        assert_eq!(other.ensure(7 * 8 * 16 + 1).unwrap_err().fault(), Some(Fault::Busy));
        write(&mut s, 48..96);
        s.extend_window(&mut run, 96).expect("growth");
        assert_eq!((run.how(), buffer(&run).1), (How::Run, 0), "{:?}", run.declined());
        // A run is refused where somebody else writes: the caller gets the staging buffer.
        drop(run);
        s.trim(16).expect("trimmed");
        other.ensure(7 * 8 * 16 + 1).expect("the extent is as any other again");
        let staged = s.window(0..16, What::Blocks, None).expect("a window");
        assert_eq!(staged.how(), How::Bounce);
        assert!(staged.declined()[0].1.contains("the device is not coherent"), "{:?}", staged.declined());
        broker.with(|b| b.verify().expect("the books add up"));
    }
    assert_eq!(cma_used(), before, "pool and staging buffer are back");
}

#[test]
fn a_shared_prefix_can_be_read_by_the_device_and_not_written() {
    let broker = memfd_pool(Access::Iommu);
    let client = client(&broker, 1001);
    let (mut s, _other) = scattered(&client, 48);
    s.seal(&(0..32).collect::<Vec<u32>>()).expect("sealed");
    let mut window = s.window(0..48, plane(), None).expect("a window");
    let edu = Edu::over(window.take_device().expect("the device").into());
    let WindowPlace::Address { iova, .. } = window.place() else { panic!("{:?}", window.place()) };
    edu.load(iova + 16 * ROW as u64, ROW as u64);
    // Into the sealed block: it faults. Into the session's own: it lands.
    edu.store(iova, ROW as u64);
    edu.store(iova + 33 * ROW as u64, ROW as u64);
    let mut row = [0; ROW];
    s.read_row(0, LAYER as usize, Kv::V, &mut row).expect("a row");
    assert_eq!(row[0], byte(0, 0), "a sealed block was written");
    s.read_row(33, LAYER as usize, Kv::V, &mut row).expect("a row");
    assert_eq!(row[0], byte(16, 0));
    let options = WindowOptions { read_only: true, ..WindowOptions::default() };
    let guarded = s.window_with(32..48, plane(), options).expect("read only");
    let WindowPlace::Address { iova, .. } = guarded.place() else { panic!("{:?}", guarded.place()) };
    edu.store(iova + ROW as u64, ROW as u64);
    edu.store(iova, ROW as u64);
    s.read_row(32, LAYER as usize, Kv::V, &mut row).expect("a row");
    assert_eq!(row[0], byte(32, 0), "a read-only window was written");
}

fn mapped(_: &Session, window: &mut Window, bytes: usize) -> Vec<u8> {
    let (fd, offset, length) = buffer(window);
    assert!(bytes <= length);
    dma_buf_sync(fd.as_fd(), 1).expect("START of a read");
    let map = Map::read_only(fd.as_fd(), (offset + length).next_multiple_of(4096));
    let out = (offset..offset + bytes).map(|i| map.byte(i)).collect();
    drop(map);
    dma_buf_sync(fd.as_fd(), 4 | 1).expect("END of a read");
    out
}

#[test]
fn a_llama_decodes_the_same_tokens_through_udmabuf_windows() {
    let broker = memfd_pool(Access::Scatter);
    let client = client(&broker, 1001);
    let mut read = mapped;
    let mut kv = Through::new(&client, 16, true, None, &mut read);
    assert_eq!(llama::decode(&mut kv), expected());
    assert!(kv.windows().iter().flatten().all(|w| w.how() == How::Udmabuf && w.requests() == 2));
}

#[test]
fn a_llama_decodes_the_same_tokens_through_runs() {
    let broker = broker(heap(CMA_HEAP), Access::Contiguous);
    let client = client(&broker, 1001);
    let mut read = mapped;
    // All tokens in one block: its planes are runs.
    let mut kv = Through::new(&client, 32, true, None, &mut read);
    assert_eq!(llama::decode(&mut kv), expected());
    assert!(kv.windows().iter().flatten().all(|w| w.how() == How::Run));
}

#[test]
fn a_llama_decodes_the_same_tokens_through_a_cma_staging_buffer() {
    let broker = memfd_pool(Access::Contiguous);
    let client = client(&broker, 1001);
    let mut read = |session: &Session, window: &mut Window, bytes: usize| {
        let batch = session.load(window, None, 0).expect("loaded").expect("a half");
        let WindowPlace::Staging { fd, .. } = window.place() else { panic!("{:?}", window.place()) };
        let device = Map::read_only(fd, STAGING);
        (0..bytes).map(|i| device.byte(batch.offset() + i)).collect()
    };
    let mut kv = Through::new(&client, 16, true, None, &mut read);
    assert_eq!(llama::decode(&mut kv), expected());
    assert!(kv.windows().iter().flatten().all(|w| w.how() == How::Bounce));
}

#[test]
fn a_llama_decodes_the_same_tokens_through_an_npus_addresses() {
    // Below the buffer of the device, and whole rows.
    const STEP: usize = 14 * ROW_BYTES;
    let broker = memfd_pool(Access::Iommu);
    let client = client(&broker, 1001);
    // Where the device puts what it has read: memory of another session.
    let profile = crate::through::profile(&client, 16);
    let mut scratch = client.open(&profile, OpenOptions::default()).expect("a session");
    scratch.ensure(16).expect("room");
    let what = What::Plane { layer: 0, kv: Kv::K };
    let mut target = scratch.window(0..16, what, None).expect("a window");
    let edu = Edu::over(target.take_device().expect("the device").into());
    let WindowPlace::Address { iova: target_at, .. } = target.place() else { panic!("{:?}", target.place()) };
    let mut read = |_: &Session, window: &mut Window, bytes: usize| {
        let WindowPlace::Address { iova, .. } = window.place() else { panic!("{:?}", window.place()) };
        let mut out = Vec::new();
        while out.len() < bytes {
            let some = STEP.min(bytes - out.len());
            edu.load(iova + out.len() as u64, some as u64);
            edu.store(target_at, some as u64);
            for token in 0..some / ROW_BYTES {
                let mut row = [0; ROW_BYTES];
                scratch.read_row(token, 0, Kv::K, &mut row).expect("a row");
                out.extend(row);
            }
        }
        out
    };
    let mut kv = Through::new(&client, 16, true, None, &mut read);
    assert_eq!(llama::decode(&mut kv), expected());
    assert!(kv.windows().iter().flatten().all(|w| w.how() == How::Iommu && w.requests() <= 2));
}
