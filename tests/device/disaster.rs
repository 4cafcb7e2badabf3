//! The two disasters that the broker is there to prevent, staged: contiguous memory that is there and cannot be had,
//! and sessions that end in the out-of-memory killer.
//!
//! The sessions are small programs that write KV through the client library (or, without the broker, into memory of
//! their own); no model computes. Everything is shown from the kernel's log and `/proc/meminfo`.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;

use kvbroker::client::OpenOptions as SessionOptions;
use kvbroker::profile::Profile;
use nix::errno::Errno;

use crate::daemon::{Broker, HeapRule, check_kv, write_kv};
use crate::support::{ALICE, AREA, CMA_HEAP, Heap, MIB, almost, cma_used};

/// The kernel's log from a moment on.
struct KernelLog(File);

impl KernelLog {
    fn from_now_on() -> Self {
        let mut file = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open("/dev/kmsg")
            .expect("/dev/kmsg");
        file.seek(SeekFrom::End(0)).expect("the end of the log");
        KernelLog(file)
    }

    /// The messages since then that contain `words`.
    fn with(&mut self, words: &str) -> Vec<String> {
        let mut found = Vec::new();
        // One read is one record; a buffer that is too small is EINVAL.
        let mut record = [0; 8192];
        loop {
            match self.0.read(&mut record) {
                Ok(got) => {
                    let text = String::from_utf8_lossy(&record[..got]);
                    // "priority,sequence,time,flags;message", then lines that begin with a space.
                    let message = text.split_once(';').map_or("", |(_, rest)| rest);
                    let message = message.lines().next().unwrap_or("");
                    if message.contains(words) {
                        found.push(message.into());
                    }
                }
                // Records that were overwritten while we read.
                Err(e) if e.kind() == ErrorKind::BrokenPipe => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => return found,
                Err(e) => panic!("/dev/kmsg: {e}"),
            }
        }
    }
}

#[test]
fn in_a_fragmented_area_a_large_buffer_fails_and_the_broker_still_serves_4096_tokens() {
    let before = cma_used();
    let _rule = HeapRule::apply();
    let mut log = KernelLog::from_now_on();
    let heap = Heap::open(CMA_HEAP).expect("heap");
    let buffers = heap.alloc_up_to(4 * MIB, AREA / (4 * MIB));
    assert!(almost(64).contains(&buffers.len()), "{} buffers of 4 MiB", buffers.len());
    let kept: Vec<_> = buffers.into_iter().enumerate().filter(|(i, _)| i % 2 == 1).map(|(_, b)| b).collect();
    assert_eq!(cma_used() - before, kept.len() * 4 * MIB);
    let free = AREA - kept.len() * 4 * MIB;
    assert!(free >= 128 * MIB, "{free} bytes are free");

    assert_eq!(heap.alloc(40 * MIB).unwrap_err(), Errno::ENOMEM, "40 MiB out of {free} free bytes");
    let said = log.with("alloc failed, req-size: 10240 pages");
    assert!(!said.is_empty(), "the kernel said nothing of 40 MiB");
    println!("kernel: {}", said[0]);

    let broker = Broker::on_cma("size = \"96M\"");
    assert_eq!(broker.pool("extents"), 32);
    broker.blocks(ALICE, Profile::reference(), 256);
    broker.client(ALICE, |client| {
        let profile = client.profile(&Profile::reference()).expect("profile");
        let mut session = client.open(&profile, SessionOptions::default()).expect("open");
        session.ensure(4096).expect("4096 tokens");
        write_kv(&mut session, 0..4096, 1);
        check_kv(&session, 0..4096, 1);
    });
    broker.stop();
    drop(kept);
    assert_eq!(cma_used(), before);
}

/// On a board of 4 GiB without swap. Needs a machine of that size.
mod out_of_memory {
    use std::os::fd::OwnedFd;

    use kvbroker::attention::{Element, Scratch, Shape, attention};
    use kvbroker::client::Client;
    use nix::fcntl::{FallocateFlags, SealFlag, fallocate};
    use nix::sys::mman::mlock;
    use nix::sys::wait::WaitStatus;

    use super::{Broker, HeapRule, KernelLog, MIB, Profile, SessionOptions, check_kv, fs, write_kv};
    use crate::support::{ALICE, Map, Peer, memfd};

    /// A model of a billion parameters at about eight bits each, locked as engines do.
    const WEIGHTS: usize = 1126 * MIB;
    /// What the article's board has left for KV.
    const LEFT: usize = 1434 * MIB;
    /// What must stay available whatever sessions do: 1.2 GB.
    const RESERVE: usize = 1144 * MIB;
    /// A session of 4096 tokens, reserved in full: 24 KiB a token.
    const STATIC_SESSION: usize = 96 * MIB;
    const SHARED: usize = 256;
    const OWN: usize = 256;
    const SESSIONS: usize = 15;

    fn meminfo(key: &str) -> usize {
        let text = fs::read_to_string("/proc/meminfo").expect("meminfo");
        let line = text.lines().find_map(|line| line.strip_prefix(key)).expect("a line of meminfo");
        let kib = line.trim_start_matches(':').trim().trim_end_matches(" kB");
        kib.parse::<usize>().expect("a number") << 10
    }

    fn available() -> usize {
        meminfo("MemAvailable")
    }

    /// Takes what is beyond [`LEFT`]. It is in no process, so the killer's choice does not depend on it.
    fn fill() -> OwnedFd {
        let rest = memfd(4096 * MIB, SealFlag::empty());
        let mut filled = 0;
        // In steps: what allocating itself takes, and what the kernel counts late, shows only afterwards.
        loop {
            let more = (available().saturating_sub(LEFT) * 3 / 4) & !(MIB - 1);
            if more == 0 {
                break;
            }
            fallocate(&rest, FallocateFlags::empty(), filled as i64, more as i64).expect("fill");
            filled += more;
        }
        let (left, swap) = (available(), meminfo("SwapTotal"));
        assert!(left.abs_diff(LEFT) < 8 * MIB, "{} MiB are left", left / MIB);
        assert_eq!(swap, 0, "a machine without swap");
        println!("meminfo: MemAvailable {} MiB, weights locked, no swap", left / MIB);
        rest
    }

    /// Memory of the process's own, with every page touched.
    fn touched(bytes: usize) -> Map {
        let map = Map::private(bytes);
        map.fill(0, bytes, 1);
        map
    }

    /// An engine with its weights locked in memory, that runs `work` once the rest of the machine is filled.
    fn engine(work: impl FnOnce(&mut crate::support::Turns)) -> (Peer, OwnedFd) {
        let mut engine = Peer::start(ALICE, |turns| {
            let weights = touched(WEIGHTS);
            // SAFETY: the range is the mapping.
            unsafe { mlock(weights.start().cast(), WEIGHTS) }.expect("lock the weights");
            turns.yield_to_test();
            work(turns);
        });
        engine.wait_for_yield();
        let rest = fill();
        engine.resume();
        (engine, rest)
    }

    #[test]
    fn sessions_reserved_in_full_end_in_the_killer_at_about_the_fifteenth() {
        let mut log = KernelLog::from_now_on();
        // Whoever is killed, it is not this test.
        let lift = RaisedLock::lift();
        let (mut engine, rest) = engine(|turns| {
            let mut sessions = Vec::new();
            loop {
                sessions.push(touched(STATIC_SESSION));
                turns.yield_to_test();
            }
        });
        fs::write("/proc/self/oom_score_adj", "-1000").expect("oom_score_adj");
        let mut fit = 0;
        while engine.yields() {
            fit += 1;
            println!("meminfo: MemAvailable {} MiB with {fit} static sessions", available() / MIB);
            engine.resume();
        }
        fs::write("/proc/self/oom_score_adj", "0").expect("oom_score_adj");
        let pid = engine.pid();
        let end = engine.end();
        drop((rest, lift));
        assert!(matches!(end, WaitStatus::Signaled(_, nix::sys::signal::Signal::SIGKILL, _)), "{end:?}");
        let said = log.with(&format!("Killed process {pid} "));
        assert_eq!(said.len(), 1, "the killer's words in the kernel's log: {said:?}");
        println!("kernel: {}", said[0]);
        assert!((7..SESSIONS + 2).contains(&fit) && fit >= 13, "{fit} sessions fit");
    }

    /// The KV of a prompt's tokens follows from the prompt alone, that of a session's own from its number.
    const PROMPT: u32 = 1000;

    fn attend(session: &kvbroker::client::Session, layer: usize) -> Vec<u32> {
        let shape = Shape::new(16, 2, 128);
        let query: Vec<f32> = (0..16 * 128).map(|i| (i % 97) as f32 / 97.0 - 0.5).collect();
        let mut out = vec![0.0; query.len()];
        let kv = session.paged(layer);
        // SAFETY: the session has room for all its tokens, and its mapping lives as long as it does.
        unsafe {
            attention(&shape, Element::F16, &kv, SHARED + OWN, &query, &mut out, &mut Scratch::new());
        }
        out.into_iter().map(f32::to_bits).collect()
    }

    fn talk(client: &Client, turns: &mut crate::support::Turns) {
        let profile = client.profile(&Profile::reference()).expect("profile");
        // One token more than is shared: the last one is always computed.
        let ids: Vec<u32> = (0..SHARED as u32 + 1).collect();
        let mut sessions = Vec::new();
        for number in 0..SESSIONS {
            let options = SessionOptions { model: "article".into(), ..Default::default() };
            let mut session = client.open(&profile, options).expect("open");
            let held = session.attach(&ids).expect("attach");
            assert_eq!(held, if number == 0 { 0 } else { SHARED }, "session {number} shares the prompt");
            if number == 0 {
                session.ensure(SHARED).expect("the prompt");
                write_kv(&mut session, 0..SHARED, PROMPT);
                session.seal(&ids[..SHARED]).expect("seal");
            }
            session.ensure(SHARED + OWN).expect("own tokens");
            write_kv(&mut session, SHARED..SHARED + OWN, number as u32);
            sessions.push(session);
            turns.yield_to_test();
        }
        for (number, session) in sessions.iter().enumerate() {
            check_kv(session, 0..SHARED, PROMPT);
            check_kv(session, SHARED..SHARED + OWN, number as u32);
        }
        // The same words in each: the fifteenth attends to the same values as the first, to the bit.
        for session in &mut sessions {
            write_kv(session, SHARED..SHARED + OWN, 0);
        }
        let first = [0, 11, 23].map(|layer| attend(&sessions[0], layer));
        assert!(first.iter().flatten().any(|bits| *bits != 0), "attention saw something");
        for session in &sessions[1..] {
            assert!([0, 11, 23].map(|layer| attend(session, layer)) == first);
        }
    }

    #[test]
    fn on_the_broker_the_fifteenth_session_talks_like_the_first_and_nobody_is_killed() {
        let mut log = KernelLog::from_now_on();
        let _rule = HeapRule::apply();
        let lift = RaisedLock::lift();
        // The engine is forked before the broker is there, so it is told the socket by its place.
        let place = crate::daemon::Place::new("backend = \"dma-heap\"\nsize = \"192M\"");
        let socket = place.socket();
        let (mut engine, rest) = engine(|turns| {
            turns.yield_to_test();
            let client = Client::connect_to(&socket, Default::default()).expect("connect");
            talk(&client, turns);
        });
        engine.wait_for_yield();
        let broker: Broker = place.start();
        assert_eq!(broker.pool("bytes"), (192 * MIB) as u64, "{}", broker.place.log());
        println!("meminfo: MemAvailable {} MiB with the broker's pool of 192 MiB", available() / MIB);
        engine.resume();
        let mut least = available();
        for number in 1..=SESSIONS {
            engine.wait_for_yield();
            least = least.min(available());
            println!("meminfo: MemAvailable {} MiB with {number} sessions", available() / MIB);
            engine.resume();
        }
        engine.finish();
        least = least.min(available());
        assert!(least >= RESERVE, "only {} MiB were available", least / MIB);
        let status = broker.status();
        println!("broker: {} blocks granted", status["counters"]["granted"]);
        assert_eq!(log.with("Killed process"), [""; 0], "somebody was killed");
        broker.is_sound();
        broker.stop();
        drop((rest, lift));
    }

    /// Lets processes started meanwhile lock all they like, as a unit with LimitMEMLOCK=infinity does.
    struct RaisedLock(u64, u64);

    impl RaisedLock {
        fn lift() -> Self {
            use nix::sys::resource::{Resource, getrlimit, setrlimit};
            let (soft, hard) = getrlimit(Resource::RLIMIT_MEMLOCK).expect("getrlimit");
            setrlimit(Resource::RLIMIT_MEMLOCK, libc::RLIM_INFINITY, libc::RLIM_INFINITY).expect("setrlimit");
            RaisedLock(soft, hard)
        }
    }

    impl Drop for RaisedLock {
        fn drop(&mut self) {
            use nix::sys::resource::{Resource, setrlimit};
            let _ = setrlimit(Resource::RLIMIT_MEMLOCK, self.0, self.1);
        }
    }
}
