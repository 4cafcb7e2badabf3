//! What an engine sees that writes without asking: a pager, over a broker in the same process.

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvbroker::broker::{Broker, Policy, TenantPolicy};
use kvbroker::client::{
    Client, ClientOptions, Embedded, Error, Notice, OpenOptions, Pager, PagerOptions, PagerPlane,
};
use kvbroker::heap::Memfd;
use kvbroker::id::Tenant;
use kvbroker::profile::{Kv, Profile};
use kvbroker::wire::Fault;

const ROW: usize = 512;
const LAYERS: usize = 3;
const EXTENT: u64 = 1 << 20;

fn broker(extents: u32) -> Embedded {
    let heap = Arc::new(Memfd::new(false));
    Embedded::new(Broker::new(heap, EXTENT, extents, extents, Policy::default()).unwrap())
}

fn client(broker: &Embedded) -> Client {
    Client::on(broker, 1000, ClientOptions { credit_ahead: 0, ..ClientOptions::default() }).unwrap()
}

/// K and V of three layers, `tokens` tokens of 512 bytes.
fn planes(tokens: usize) -> Vec<PagerPlane> {
    let plane = |kv| PagerPlane { kv, bytes: ROW * tokens, row: ROW, stream_bytes: 0 };
    (0..LAYERS).flat_map(|_| [plane(Kv::K), plane(Kv::V)]).collect()
}

fn options() -> PagerOptions {
    PagerOptions { name: "small".into(), element: "f16".into(), ..PagerOptions::default() }
}

fn pager_with(broker: &Embedded, tokens: usize, options: PagerOptions) -> Result<Pager, Error> {
    let broker = broker.clone();
    Pager::new(&planes(tokens), options, move || Ok(client(&broker)))
}

fn pager(broker: &Embedded, tokens: usize) -> Pager {
    pager_with(broker, tokens, options()).unwrap()
}

fn write(pager: &Pager, plane: usize, offset: usize, value: u8) {
    // SAFETY: inside the plane, which the pager keeps mapped; no reference to it exists.
    unsafe { pager.plane(plane).add(offset).write_volatile(value) }
}

fn read(pager: &Pager, plane: usize, offset: usize) -> u8 {
    // SAFETY: as in write.
    unsafe { pager.plane(plane).add(offset).read_volatile() }
}

fn account(broker: &Embedded, name: &str) -> u64 {
    broker.with(|b| {
        b.verify().unwrap();
        b.ledger()[name]
    })
}

/// The broker hears of the table right after the writer goes on: waits until the books say `blocks`.
fn wait_for_blocks(broker: &Embedded, pager: &Pager, blocks: u64) {
    let bytes = blocks * pager.stats().block_bytes as u64;
    for _ in 0..10_000 {
        if account(broker, "private") == bytes && account(broker, "credit") == 0 {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!((account(broker, "private"), account(broker, "credit")), (bytes, 0));
}

#[test]
fn the_first_write_into_a_unit_grants_it_in_all_planes_and_reading_grants_nothing() {
    let broker = broker(8);
    let p = pager(&broker, 2048);
    for plane in 0..2 * LAYERS {
        for offset in (0..ROW * 2048).step_by(4096) {
            assert_eq!(read(&p, plane, offset), 0);
        }
    }
    assert_eq!((p.stats().units_held, p.stats().faults), (0, 0));
    write(&p, 0, 5, 7);
    wait_for_blocks(&broker, &p, 1);
    for plane in 1..2 * LAYERS {
        write(&p, plane, p.unit_bytes(plane) - 1, 9);
    }
    assert_eq!((p.stats().units_held, p.stats().faults), (1, 1));
    write(&p, 3, ROW * 2048 - 1, 1);
    wait_for_blocks(&broker, &p, 2);
    assert_eq!((read(&p, 0, 5), read(&p, 4, p.unit_bytes(4) - 1), read(&p, 3, ROW * 2048 - 1)), (7, 9, 1));
    assert_eq!(account(&broker, "private"), 2 * p.stats().block_bytes as u64);
    drop(p);
    assert_eq!(account(&broker, "free"), 8 * EXTENT);
}

#[test]
fn clearing_gives_everything_back_and_a_block_that_comes_again_reads_as_zero() {
    let broker = broker(4);
    let p = pager(&broker, 1024);
    let unit = p.unit_bytes(0);
    for round in 0..5 {
        for u in 0..ROW * 1024 / unit {
            for plane in 0..2 * LAYERS {
                assert_eq!(read(&p, plane, u * unit + 17), 0, "round {round}, unit {u}");
                write(&p, plane, u * unit, 0xff);
                assert_eq!(read(&p, plane, u * unit + 17), 0, "round {round}, unit {u}");
                write(&p, plane, u * unit + 17, 0xff);
            }
        }
        p.clear().unwrap();
        assert_eq!(p.stats().units_held, 0);
        assert_eq!(account(&broker, "private") + account(&broker, "credit"), 0);
        assert_eq!(read(&p, 2, 17), 0);
    }
    p.clear().unwrap();
}

#[test]
fn trimming_gives_back_whole_units_only_and_leaves_the_others_as_they_are() {
    let broker = broker(8);
    let p = pager(&broker, 2048);
    let unit = p.unit_bytes(0);
    // Out of order, as slots of a server are.
    let order = [5, 0, 3, 1, 9, 7];
    for (i, u) in order.iter().enumerate() {
        for plane in 0..2 * LAYERS {
            write(&p, plane, u * unit + plane, i as u8 + 1);
        }
    }
    let in_all = |offsets: std::ops::Range<usize>| -> Vec<_> {
        let start = |plane| p.plane(plane) as usize - p.base() as usize;
        (0..2 * LAYERS).map(|plane| start(plane) + offsets.start..start(plane) + offsets.end).collect()
    };
    assert_eq!(p.trim(&in_all(1..unit * 2 - 1)).unwrap(), 0);
    assert_eq!(p.trim(&in_all(0..unit)[1..]).unwrap(), 0, "one plane of it is still needed");
    assert_eq!(p.trim(&in_all(0..unit)).unwrap(), 1);
    assert_eq!(p.trim(&in_all(unit * 3 - 1..unit * 8)).unwrap(), 3);
    wait_for_blocks(&broker, &p, 2);
    for (i, u) in order.iter().enumerate() {
        let kept = [1, 9].contains(u);
        for plane in 0..2 * LAYERS {
            assert_eq!(read(&p, plane, u * unit + plane), if kept { i as u8 + 1 } else { 0 }, "unit {u}");
        }
    }
    write(&p, 0, 3 * unit, 1);
    wait_for_blocks(&broker, &p, 3);
    assert!(matches!(p.trim(std::slice::from_ref(&(0..usize::MAX))), Err(Error::Invalid(_))));
}

#[test]
fn units_that_are_ensured_take_no_fault_and_can_be_written_by_system_calls() {
    use std::io::Read;
    use std::os::fd::AsRawFd;
    let broker = broker(8);
    let p = pager(&broker, 2048);
    let zeros = std::fs::File::open("/dev/zero").unwrap();
    // SAFETY: the kernel writes inside the pager's range, or refuses to.
    let read_into = |at: *mut u8| unsafe { libc::read(zeros.as_raw_fd(), at.cast(), 64) };
    assert_eq!(read_into(p.base()), -1);
    p.ensure(0..1).unwrap();
    assert_eq!((read_into(p.base()), p.stats().faults), (64, 0));
    p.ensure(0..p.unit_bytes(0) * 3).unwrap();
    assert_eq!(p.stats().units_held, 3);
    let mut one = [0];
    (&zeros).read_exact(&mut one).unwrap();
}

#[test]
fn sixteen_threads_that_write_everywhere_at_once_all_come_through() {
    let broker = broker(16);
    let p = pager(&broker, 4096);
    let unit = p.unit_bytes(0);
    let units = ROW * 4096 / unit;
    std::thread::scope(|scope| {
        for thread in 0..16usize {
            let p = &p;
            scope.spawn(move || {
                for i in 0..units {
                    let u = (i * 7 + thread * 3) % units;
                    write(p, thread % (2 * LAYERS), u * unit + thread, thread as u8 + 1);
                }
            });
        }
    });
    assert_eq!(p.stats().units_held, units);
    for u in 0..units {
        for thread in 0..16 {
            assert_eq!(read(&p, thread % (2 * LAYERS), u * unit + thread), thread as u8 + 1);
        }
    }
    wait_for_blocks(&broker, &p, units as u64);
}

#[test]
fn a_fault_is_granted_while_other_sessions_of_the_same_client_are_in_requests() {
    let broker = broker(16);
    let shared = client(&broker);
    let c = shared.clone();
    let p = Pager::new(&planes(4096), options(), move || Ok(c.clone())).unwrap();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let profile =
                shared.profile(&Profile::uniform("other", "f16", 2, 512, 512, 16).unwrap()).unwrap();
            let mut s = shared.open(&profile, OpenOptions::default()).unwrap();
            while !stop.load(Ordering::Relaxed) {
                s.ensure(64).unwrap();
                s.trim(0).unwrap();
            }
        });
        for round in 0..3 {
            for u in 0..20 {
                write(&p, round, u * p.unit_bytes(0), 1);
            }
            p.clear().unwrap();
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(p.stats().faults, 60);
}

#[test]
fn a_write_into_an_empty_pool_waits_until_somebody_gives_blocks_back() {
    let broker = broker(1);
    let notices = Arc::new(Mutex::new(Vec::new()));
    let sink = notices.clone();
    let notify = Arc::new(move |n: &Notice| sink.lock().unwrap().push(n.clone()));
    let patient = PagerOptions { wait: Duration::from_secs(60), notify: Some(notify), ..options() };
    let hoarder = pager(&broker, 4096);
    let p = pager_with(&broker, 4096, patient).unwrap();
    let blocks = EXTENT as usize / p.stats().block_bytes;
    for u in 0..blocks {
        write(&hoarder, 0, u * hoarder.unit_bytes(0), 1);
    }
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while notices.lock().unwrap().is_empty() {
                std::thread::sleep(Duration::from_millis(1));
            }
            hoarder.clear().unwrap();
        });
        write(&p, 1, 0, 3);
    });
    assert_eq!(read(&p, 1, 0), 3);
    let told = notices.lock().unwrap().clone();
    assert!(matches!(&told[..], [Notice::Waiting(why)] if why.contains("pool is in use")), "{told:?}");
}

#[test]
fn what_the_pool_has_no_room_for_spills_into_private_memory_that_is_counted_and_bounded() {
    let broker = broker(1);
    let spills = Arc::new(AtomicUsize::new(0));
    let count = spills.clone();
    let notify = Arc::new(move |n: &Notice| {
        count.fetch_add(usize::from(matches!(n, Notice::Spilled { .. })), Ordering::Relaxed);
    });
    let small = PagerOptions { wait: Duration::ZERO, spill: 1 << 20, notify: Some(notify), ..options() };
    let p = pager_with(&broker, 4096, small).unwrap();
    let block = p.stats().block_bytes;
    let (in_pool, in_spill) = (EXTENT as usize / block, (1 << 20) / block);
    for u in 0..in_pool + in_spill {
        write(&p, 2, u * p.unit_bytes(2), u as u8);
    }
    let stats = p.stats();
    assert_eq!((stats.units_held, stats.units_spilled), (in_pool, in_spill));
    assert_eq!(spills.load(Ordering::Relaxed), in_spill);
    for u in 0..in_pool + in_spill {
        assert_eq!(read(&p, 2, u * p.unit_bytes(2)), u as u8);
    }
    // Without room in either, a refusal that can be refused is.
    let refused = p.ensure(0..p.unit_bytes(0) * (in_pool + in_spill + 1)).unwrap_err();
    assert!(refused.fault().is_some(), "{refused}");
    p.clear().unwrap();
    assert_eq!((p.stats().units_held, p.stats().units_spilled), (0, 0));
}

/// The pool of two extents is full: a pager of a tenant of low priority holds it, and writes of what it was told. Then a
/// session of another tenant grows, on a thread of its own, and `meanwhile` is called until it has what it wants.
fn pressed(spill: u64, mut meanwhile: impl FnMut(&Pager, usize)) -> (Embedded, Pager, Notices) {
    let low = TenantPolicy { priority: 1, ..TenantPolicy::default() };
    let policy = Policy { tenants: [(Tenant(1001), low)].into(), ..Policy::default() };
    let heap = Arc::new(Memfd::new(false));
    let broker = Embedded::new(Broker::new(heap, EXTENT, 2, 2, policy).unwrap());
    let (notices, inside) = (Notices::default(), broker.clone());
    let sink = notices.clone();
    let notify = Arc::new(move |n: &Notice| sink.lock().unwrap().push(n.clone()));
    let options = PagerOptions { spill, notify: Some(notify), ..options() };
    let connect = move || Client::on(&inside, 1001, ClientOptions { credit_ahead: 0, ..Default::default() });
    let p = Pager::new(&planes(4096), options, connect).unwrap();
    let filled = 2 * EXTENT as usize / p.stats().block_bytes;
    (0..filled).for_each(|unit| fill_unit(&p, unit));
    wait_for_blocks(&broker, &p, filled as u64);
    std::thread::scope(|scope| {
        let high = scope.spawn(|| {
            let c = client(&broker);
            let profile = c.profile(&Profile::uniform("high", "f16", 2, 512, 512, 16).unwrap()).unwrap();
            let mut high = c.open(&profile, OpenOptions { model: "h".into(), ..Default::default() }).unwrap();
            high.ensure(16 * 8).unwrap();
            high.write_row(0, 0, Kv::K, &[99; 512]).unwrap();
        });
        while !high.is_finished() {
            meanwhile(&p, filled);
            std::thread::sleep(Duration::from_millis(1));
        }
        high.join().unwrap();
    });
    (broker, p, notices)
}

type Notices = Arc<Mutex<Vec<Notice>>>;

fn wait_until_taken(notices: &Notices) {
    while !notices.lock().unwrap().contains(&Notice::Taken) {
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn fill_unit(p: &Pager, unit: usize) {
    for plane in 0..2 * LAYERS {
        (0..p.unit_bytes(plane))
            .step_by(512)
            .for_each(|at| write(p, plane, unit * p.unit_bytes(plane) + at, 7 + unit as u8));
    }
}

fn unit_holds(p: &Pager, unit: usize) -> bool {
    let whole = |plane| {
        let at = |at: &usize| read(p, plane, unit * p.unit_bytes(plane) + at) == 7 + unit as u8;
        (0..p.unit_bytes(plane)).step_by(512).all(|offset| at(&offset))
    };
    (0..2 * LAYERS).all(whole)
}

#[test]
fn what_a_session_of_higher_priority_needs_moves_into_private_memory_and_nothing_of_it_is_lost() {
    let (broker, p, told) = pressed(8 << 20, |p, filled| {
        (0..filled).for_each(|unit| assert!(unit_holds(p, unit), "unit {unit}"));
        // Written while it moves.
        fill_unit(p, 0);
    });
    let filled = 2 * EXTENT as usize / p.stats().block_bytes;
    assert!((0..filled).all(|unit| unit_holds(&p, unit)));
    assert_eq!((p.stats().units_held, p.stats().units_spilled), (0, filled));
    let moved = |n: &Notice| matches!(n, Notice::Spilled { why, .. } if why.contains("higher priority"));
    let told = told.lock().unwrap().clone();
    assert_eq!(told.iter().filter(|n| moved(n)).count(), 1, "{told:?}");
    p.clear().unwrap();
    assert_eq!((p.stats().units_spilled, read(&p, 0, 0)), (0, 0));
    drop(p);
    assert_eq!(account(&broker, "free"), 2 * EXTENT);
}

#[test]
fn without_private_memory_the_process_ends_with_words_instead_of_reading_zeros_and_clearing_begins_anew() {
    let out = play("taken");
    assert_eq!(out.status.signal(), Some(libc::SIGSEGV), "{}", said(&out));
    let words = said(&out);
    assert!(words.contains("higher priority") && words.contains("KVBROKER_SPILL="), "{words}");
    assert!(
        words.contains("told in time") && words.contains("begun anew") && !words.contains("zeros"),
        "{words}"
    );
}

#[test]
fn with_the_whole_asked_for_at_the_start_the_refusal_comes_there_and_later_writes_cannot_fail() {
    let broker = broker(4);
    let whole = || PagerOptions { whole: true, wait: Duration::ZERO, ..options() };
    let never = pager_with(&broker, 1 << 20, whole()).unwrap_err();
    assert_eq!(never.fault(), Some(Fault::NeverFits), "{never}");
    let p = pager_with(&broker, 1024, whole()).unwrap();
    let busy = pager_with(&broker, 512, whole()).unwrap_err();
    assert_eq!(busy.fault(), Some(Fault::Busy), "{busy}");
    for round in 0..3u8 {
        for u in 0..p.stats().units {
            write(&p, 0, u * p.unit_bytes(0), round + 1);
        }
        assert_eq!(p.stats().units_held, p.stats().units);
        p.clear().unwrap();
        assert!(account(&broker, "credit") > 0, "what was asked for at the start stays reserved");
    }
    drop(p);
    assert_eq!(account(&broker, "free"), 4 * EXTENT);
}

#[test]
fn a_pager_that_could_outgrow_what_the_kernel_lets_be_mapped_is_refused_when_it_is_made() {
    let broker = broker(4);
    let thin = PagerPlane { kv: Kv::K, bytes: 64 << 20, row: 8, stream_bytes: 0 };
    let many = vec![thin; 700];
    let b = broker.clone();
    let e = Pager::new(&many, options(), move || Ok(client(&b))).unwrap_err();
    assert!(e.to_string().contains("vm.max_map_count") || e.to_string().contains("extents"), "{e}");
    assert_eq!(account(&broker, "free"), 4 * EXTENT);
}

fn count(directory: &str) -> usize {
    std::fs::read_dir(directory).unwrap().count()
}

fn mappings() -> usize {
    std::fs::read_to_string("/proc/self/maps").unwrap().lines().count()
}

#[test]
fn columns_are_noticed() {
    let broker = broker(16);
    let told = Arc::new(AtomicUsize::new(0));
    let count = told.clone();
    let notify = Arc::new(move |n: &Notice| {
        count.fetch_add(usize::from(matches!(n, Notice::Transposed { .. })), Ordering::Relaxed);
    });
    let p = pager_with(&broker, 2048, PagerOptions { notify: Some(notify), ..options() }).unwrap();
    let unit = p.unit_bytes(0);
    // As rows: K first, V in the same unit.
    for u in 0..30 {
        write(&p, 0, u * unit, 1);
        write(&p, 1, u * unit, 1);
    }
    assert_eq!((p.stats().transposed, told.load(Ordering::Relaxed)), (0, 0));
    p.clear().unwrap();
    write(&p, 0, 0, 1);
    for u in 0..30 {
        write(&p, 1, u * unit, 1);
    }
    assert_eq!(told.load(Ordering::Relaxed), 1);
}

// What follows ends processes, or counts what a whole process has: each runs this test binary again, as a child that
// plays one role.

const ROLE: &str = "KVBROKER_TEST_ROLE";

fn play(role: &str) -> Output {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "the_child_plays_its_role", "--nocapture", "--test-threads=1"]).env(ROLE, role);
    child.output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout)
}

extern "C" fn full_handler(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel's siginfo; _exit and write are safe in a handler.
    unsafe {
        let right = (*info).si_addr() as usize == 64;
        libc::_exit(if right { 41 } else { 40 });
    }
}

extern "C" fn plain_handler(_: libc::c_int) {
    // SAFETY: _exit is safe in a handler.
    unsafe { libc::_exit(42) }
}

fn handle(action: usize, flags: libc::c_int) {
    // SAFETY: all-zero is a valid sigaction, the handlers have the signatures that the flags promise.
    unsafe {
        let mut sa: libc::sigaction = std::mem::zeroed();
        sa.sa_sigaction = action;
        sa.sa_flags = flags;
        assert_eq!(libc::sigaction(libc::SIGSEGV, &sa, std::ptr::null_mut()), 0);
    }
}

fn crash() {
    // SAFETY: it is not: the point is the fault. Nothing is mapped at this address.
    unsafe { std::ptr::with_exposed_provenance_mut::<u8>(64).write_volatile(1) }
}

fn works(broker: &Embedded) -> Pager {
    let p = pager(broker, 2048);
    write(&p, 0, 0, 1);
    assert_eq!(read(&p, 0, 0), 1);
    p
}

/// Another process's session has the whole pool.
fn take_everything(broker: &Embedded) -> (Client, kvbroker::client::Session) {
    let hog = client(broker);
    let profile = Profile::uniform("hog", "f16", 1, 4096, 4096, 16).unwrap();
    let mut session = hog.open(&hog.profile(&profile).unwrap(), OpenOptions::default()).unwrap();
    let mut tokens = 16;
    while session.ensure(tokens).is_ok() {
        tokens += 16;
    }
    assert_eq!(account(broker, "free"), 0);
    (hog, session)
}

#[test]
fn the_child_plays_its_role() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let broker = broker(2);
    match role.as_str() {
        "taken" => {
            let (_broker, p, told) = pressed(0, |_, _| ());
            wait_until_taken(&told);
            let told = told.lock().unwrap().clone();
            let held = (p.stats().units_held * p.stats().block_bytes) as u64;
            if matches!(&told[..], [Notice::WantedBack { needed, spill: 0 }, Notice::Taken] if *needed == held)
            {
                eprintln!("told in time");
            }
            p.clear().unwrap();
            write(&p, 0, 0, 5);
            if read(&p, 0, 0) == 5 && p.stats().units_held == 1 {
                eprintln!("begun anew");
            }
            let (_broker, p, told) = pressed(0, |_, _| ());
            wait_until_taken(&told);
            eprintln!("{}", if read(&p, 0, 0) == 0 { "zeros" } else { "as it was" });
        }
        "default" => {
            handle(libc::SIG_DFL, 0);
            let _p = works(&broker);
            crash();
        }
        "ignored" => {
            handle(libc::SIG_IGN, 0);
            let _p = works(&broker);
            // SAFETY: raise has no preconditions.
            unsafe { libc::raise(libc::SIGSEGV) };
            eprintln!("a signal that was sent is still ignored");
            crash();
        }
        "full" => {
            handle(full_handler as *const () as usize, libc::SA_SIGINFO);
            let _p = works(&broker);
            crash();
        }
        "plain" => {
            handle(plain_handler as *const () as usize, 0);
            let _p = works(&broker);
            crash();
        }
        "sent" => {
            handle(libc::SIG_DFL, 0);
            let _p = works(&broker);
            // SAFETY: raise has no preconditions.
            unsafe { libc::raise(libc::SIGSEGV) };
        }
        "empty" => {
            handle(libc::SIG_DFL, 0);
            let p = pager_with(&broker, 8192, PagerOptions { wait: Duration::from_millis(20), ..options() })
                .unwrap();
            for u in 0..p.stats().units {
                write(&p, 0, u * p.unit_bytes(0), 1);
            }
        }
        "code" => {
            handle(libc::SIG_DFL, 0);
            let p = works(&broker);
            // SAFETY: it is not: KV memory is not executable, and that is what is tested.
            let f: extern "C" fn() = unsafe { std::mem::transmute(p.base()) };
            f();
        }
        "freed" => {
            handle(libc::SIG_DFL, 0);
            let p = works(&broker);
            let base = p.base();
            drop(p);
            // SAFETY: it is not: the range is gone, and that is what is tested.
            unsafe { base.write_volatile(1) };
        }
        "freed while writing" => {
            handle(libc::SIG_DFL, 0);
            // A wait without an end that anybody would see. When the pager goes, the write that is being served gets the
            // one private block; nobody has begun to serve the other.
            let block = pager(&broker, 2048).stats().block_bytes as u64;
            let long = PagerOptions { wait: Duration::from_secs(3600), spill: block, ..options() };
            let p = pager_with(&broker, 2048, long).unwrap();
            let unit = p.unit_bytes(0);
            let units = p.stats().units;
            let _others = take_everything(&broker);
            let at = |u: usize| p.plane(0).wrapping_add(u * unit) as usize;
            for unit in [at(0), at(units - 1)] {
                let before = p.stats().faults;
                // SAFETY: inside the plane, which stays mapped until this thread has been answered.
                std::thread::spawn(move || unsafe { (unit as *mut u8).write_volatile(1) });
                while p.stats().faults == before {
                    std::thread::sleep(Duration::from_millis(1));
                }
                // The pager's thread is in the first one's wait when the second one comes.
                std::thread::sleep(Duration::from_millis(300));
            }
            drop(p);
            // Whoever was to die of it does so now.
            std::thread::sleep(Duration::from_secs(60));
        }
        "fork" => {
            handle(libc::SIG_DFL, 0);
            let p = works(&broker);
            // SAFETY: the child only writes one byte, or drops the pager and exits.
            let child = |work: &dyn Fn()| unsafe {
                let pid = libc::fork();
                if pid == 0 {
                    work();
                    libc::_exit(0);
                }
                let mut status = 0;
                libc::waitpid(pid, &mut status, 0);
                status
            };
            let status = child(&|| write(&p, 0, 0, 9));
            assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGSEGV, "{status}");
            // SAFETY: the value is read once more and dropped, in the child alone.
            let status = child(&|| drop(unsafe { std::ptr::read(&p) }));
            assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "{status}");
            assert_eq!(read(&p, 0, 0), 1);
            write(&p, 0, p.unit_bytes(0) * 3, 2);
            assert_eq!(p.stats().units_held, 2);
            std::process::exit(7);
        }
        "cycles" => {
            let round = || {
                let p = works(&broker);
                write(&p, 1, p.unit_bytes(1) * 2, 1);
            };
            (0..10).for_each(|_| round());
            let before = (count("/proc/self/fd"), count("/proc/self/task"), mappings());
            (0..3000).for_each(|_| round());
            let after = (count("/proc/self/fd"), count("/proc/self/task"), mappings());
            assert_eq!((before.0, before.1), (after.0, after.1));
            assert!(after.2 <= before.2 + 4, "{before:?} {after:?}");
            assert_eq!(account(&broker, "free"), 2 * EXTENT);
            std::process::exit(7);
        }
        other => panic!("no role {other}"),
    }
    panic!("this should not be reached: {role}");
}

#[test]
fn a_real_crash_still_dies_as_it_would_without_a_pager() {
    for role in ["default", "ignored", "sent", "code", "freed"] {
        let out = play(role);
        assert_eq!(out.status.signal(), Some(libc::SIGSEGV), "{role}: {:?}\n{}", out.status, said(&out));
    }
    assert!(said(&play("ignored")).contains("still ignored"));
}

#[test]
fn a_handler_that_was_there_before_gets_the_faults_that_are_not_the_pagers() {
    assert_eq!(play("full").status.code(), Some(41));
    assert_eq!(play("plain").status.code(), Some(42));
}

#[test]
fn a_write_that_nobody_can_grant_ends_the_process_with_words_that_help() {
    let out = play("empty");
    assert_eq!(out.status.signal(), Some(libc::SIGSEGV), "{}", said(&out));
    let text = said(&out);
    for word in ["pool is in use", "KVBROKER_WAIT_MS", "KVBROKER_SPILL", "KVBROKER_ADMIT=longest"] {
        assert!(text.contains(word), "{text}");
    }
}

#[test]
fn a_write_that_waits_while_its_pager_is_freed_does_not_wait_for_ever() {
    let out = play("freed while writing");
    assert_eq!(out.status.signal(), Some(libc::SIGSEGV), "{:?} {}", out.status, said(&out));
    assert!(said(&out).contains("was written while it was being freed"), "{}", said(&out));
}

#[test]
fn a_forked_child_that_writes_dies_with_a_message_and_the_parent_goes_on() {
    let out = play("fork");
    assert_eq!(out.status.code(), Some(7), "{}", said(&out));
    assert!(said(&out).contains("forked child"), "{}", said(&out));
}

#[test]
fn three_thousand_pagers_made_and_dropped_leave_nothing_behind() {
    let out = play("cycles");
    assert_eq!(out.status.code(), Some(7), "{}", said(&out));
}

/// Takes mappings until the kernel gives no more, and gives some of them back.
struct Crowd(Vec<usize>);

impl Crowd {
    fn new() -> Self {
        // There may be no mapping left for it to grow.
        let mut all = Vec::with_capacity(1 << 20);
        loop {
            // Neighbours of different kinds, so that the kernel does not join them.
            let kind = if all.len() % 2 == 0 { libc::PROT_NONE } else { libc::PROT_READ };
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            // SAFETY: the kernel chooses free addresses.
            let at = unsafe { libc::mmap(std::ptr::null_mut(), 4096, kind, flags, -1, 0) };
            if at == libc::MAP_FAILED {
                return Crowd(all);
            }
            all.push(at as usize);
        }
    }

    fn leave(&mut self, mappings: usize) {
        let at = self.0.len() - mappings;
        for page in self.0.split_off(at) {
            // SAFETY: it was mapped here, and nothing refers to it.
            unsafe { libc::munmap(page as *mut libc::c_void, 4096) };
        }
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        self.leave(self.0.len());
    }
}

const CROWDED: &str = "KVBROKER_TEST_CROWDED";

#[test]
fn at_the_limit_of_mappings_a_unit_is_hidden_in_all_planes_or_in_none() {
    if std::env::var_os(CROWDED).is_none() {
        // The limit is the process's: in one of its own, where no other test runs.
        let name = "at_the_limit_of_mappings_a_unit_is_hidden_in_all_planes_or_in_none";
        let mut command = Command::new(std::env::current_exe().unwrap());
        let output = command.args(["--exact", name, "--nocapture"]).env(CROWDED, "1").output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        return;
    }
    let broker = broker(1);
    let spill = PagerOptions { wait: Duration::ZERO, spill: 1 << 20, ..options() };
    let p = pager_with(&broker, 4096, spill).unwrap();
    let block = p.stats().block_bytes;
    let (in_pool, in_spill) = (EXTENT as usize / block, (1 << 20) / block);
    assert!(in_spill >= 3, "one has a neighbour on each side");
    // Units of private memory that follow each other: in each plane they are one mapping.
    let unit = in_pool + 1;
    let at = |plane: usize, unit: usize| unit * p.unit_bytes(plane);
    let fill = || {
        for u in 0..in_pool + in_spill {
            (0..2 * LAYERS).for_each(|plane| write(&p, plane, at(plane, u), 1 + (u % 200) as u8));
        }
    };
    let parts = |unit: usize| -> Vec<_> {
        let start = |plane: usize| p.plane(plane) as usize - p.base() as usize + at(plane, unit);
        (0..2 * LAYERS).map(|plane| start(plane)..start(plane) + p.unit_bytes(plane)).collect()
    };
    let (mut refused, mut hidden) = (0, 0);
    for left in 0..4 * LAYERS + 8 {
        fill();
        let parts = parts(unit);
        let result = {
            let mut crowd = Crowd::new();
            crowd.leave(left);
            p.trim(&parts).is_ok()
        };
        let seen: Vec<u8> = (0..2 * LAYERS).map(|plane| read(&p, plane, at(plane, unit))).collect();
        let value = if result { 0 } else { 1 + (unit % 200) as u8 };
        assert_eq!(seen, vec![value; 2 * LAYERS], "{left} mappings were left");
        if result {
            hidden += 1;
        } else {
            refused += 1;
            // And it can be written in all of them, as before.
            (0..2 * LAYERS).for_each(|plane| write(&p, plane, at(plane, unit), 9));
        }
        for neighbour in [unit - 1, unit + 1] {
            let seen = read(&p, 0, at(0, neighbour));
            assert_eq!(seen, 1 + (neighbour % 200) as u8, "a neighbour has lost its memory");
        }
    }
    assert!(refused > 0 && hidden > 0, "{refused} refused, {hidden} hidden");
    p.clear().unwrap();
    assert_eq!((p.stats().units_held, p.stats().units_spilled), (0, 0));
}
