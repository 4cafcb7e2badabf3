//! What a client process does: orders come on standard input, one answer each goes to standard output.

use std::io::{BufRead, Write};
use std::time::Duration;

use kvbroker::client::{Client, ClientOptions, ClientProfile, Error, OpenOptions, PlaneView, Session};
use kvbroker::profile::{Kv, Profile};
use kvbroker::wire::{self, Verb, Writer};

use crate::kernel_limits::Crowd;
use crate::support::{PER_BLOCK, ROLE, ROW, Raw, Reply, profile};

/// A byte that only this token of this writer has.
fn byte(token: usize, layer: usize, kv: Kv, who: u8) -> u8 {
    (token * 7 + layer * 3 + kv as usize) as u8 ^ who | 1
}

fn planes() -> impl Iterator<Item = (usize, Kv)> {
    [(0, Kv::K), (0, Kv::V), (1, Kv::K), (1, Kv::V)].into_iter()
}

struct Role {
    client: Client,
    profile: ClientProfile,
    sessions: Vec<Option<Session>>,
    old: Option<*const u8>,
    files: Vec<std::fs::File>,
    /// Mappings of copies that the library knows nothing of.
    kept: Vec<memmap2::MmapRaw>,
    view: Option<PlaneView>,
    crowd: Crowd,
    raws: Vec<Raw>,
}

fn answer(text: &str) {
    println!("> {text}");
    std::io::stdout().flush().unwrap();
}

fn verdict(result: Result<(), Error>) -> String {
    match result {
        Ok(()) => "ok".into(),
        Err(Error::Refused { fault, .. }) => fault.name().into(),
        Err(Error::Lost(_)) => "session-lost".into(),
        Err(Error::Map { .. }) => "map".into(),
        Err(e) => format!("error {e}"),
    }
}

/// Not a test of its own: without a role, nothing is to be done; with one, a failure ends the process and the test that
/// started it sees that.
#[test]
fn a_client_process_does_what_it_is_told() {
    let Some(socket) = std::env::var_os(ROLE) else { return };
    let options =
        ClientOptions { credit_ahead: 0, timeout: Duration::from_secs(20), ..ClientOptions::default() };
    let client = Client::connect_to(socket.as_ref(), options).unwrap();
    let profile = client.profile(&profile()).unwrap();
    let mut role = Role {
        client,
        profile,
        sessions: Vec::new(),
        old: None,
        files: Vec::new(),
        kept: Vec::new(),
        view: None,
        crowd: Crowd::default(),
        raws: Vec::new(),
    };
    answer("ready");
    for line in std::io::stdin().lock().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        let numbers: Vec<usize> = words[1..].iter().map(|w| w.parse().unwrap()).collect();
        let said = role.do_it(words[0], &numbers);
        answer(&said);
    }
    // The end of the orders is the end of the process, without a word to the broker.
    std::process::exit(0);
}

impl Role {
    fn session(&mut self, at: usize) -> &mut Session {
        self.sessions[at].as_mut().unwrap()
    }

    fn do_it(&mut self, order: &str, n: &[usize]) -> String {
        match order {
            "open" => {
                let options = OpenOptions { model: "m".into(), ..OpenOptions::default() };
                match self.client.open(&self.profile, options) {
                    Ok(session) => {
                        self.sessions.push(Some(session));
                        "ok".into()
                    }
                    Err(e) => verdict(Err(e)),
                }
            }
            "close" => {
                self.sessions[n[0]] = None;
                "ok".into()
            }
            "ensure" => verdict(self.session(n[0]).ensure(n[1])),
            "fork" => match self.session(n[0]).fork() {
                Ok(twin) => {
                    self.sessions.push(Some(twin));
                    "ok".into()
                }
                Err(e) => verdict(Err(e)),
            },
            "writable" => verdict(self.session(n[0]).writable(n[1]..n[2])),
            "trim" => verdict(self.session(n[0]).trim(n[1])),
            "reserve" => verdict(self.profile.reserve(n[0] as u32)),
            "release" => verdict(self.profile.release_credit()),
            "fill" => {
                let s = self.session(n[0]);
                for token in n[1]..n[2] {
                    for (layer, kv) in planes() {
                        let row = [byte(token, layer, kv, n[3] as u8); ROW];
                        if let Err(e) = s.write_row(token, layer, kv, &row) {
                            return verdict(Err(e));
                        }
                    }
                }
                "ok".into()
            }
            "holds" => {
                let s = self.session(n[0]);
                let mut row = [0; ROW];
                for token in n[1]..n[2] {
                    for (layer, kv) in planes() {
                        s.read_row(token, layer, kv, &mut row).unwrap();
                        if row != [byte(token, layer, kv, n[3] as u8); ROW] {
                            return format!("token {token} reads {:?}", &row[..4]);
                        }
                    }
                }
                "ok".into()
            }
            "zeros" => {
                let s = self.session(n[0]);
                let mut row = [0; ROW];
                for token in n[1]..n[2] {
                    for (layer, kv) in planes() {
                        s.read_row(token, layer, kv, &mut row).unwrap();
                        if row != [0; ROW] {
                            return format!("token {token} reads {:?}", &row[..4]);
                        }
                    }
                }
                "ok".into()
            }
            "seal" => {
                let ids: Vec<u32> = (0..n[1] as u32).collect();
                verdict(self.session(n[0]).seal(&ids).map(|_| ()))
            }
            "pin" => verdict(self.session(n[0]).pin(n[1]).map(|_| ())),
            "unpin" => verdict(self.session(n[0]).unpin(n[1]).map(|_| ())),
            "attack" => write_to_copies(),
            // Of every read-only copy, something that the library knows nothing of: a duplicate of the descriptor, a mapping,
            // or a descriptor of the inode.
            "keep" => {
                let copies = copies();
                self.files = copies.iter().map(|(_, fd)| fd.try_clone().unwrap()).collect();
                self.files.len().to_string()
            }
            "keep-mapping" => {
                let map = |(_, file): &(_, std::fs::File)| {
                    let len = file.metadata().unwrap().len() as usize;
                    memmap2::MmapOptions::new().len(len).map_raw_read_only(file).unwrap()
                };
                self.kept = copies().iter().map(map).collect();
                self.kept.len().to_string()
            }
            "keep-inode" => {
                use std::os::unix::fs::OpenOptionsExt;
                let mut path = std::fs::File::options();
                path.read(true).custom_flags(libc::O_PATH);
                self.files = copies().iter().map(|(name, _)| path.open(name).unwrap()).collect();
                self.files.len().to_string()
            }
            "kept-bytes" => self.files.iter().map(|f| f.metadata().unwrap().len()).sum::<u64>().to_string(),
            "let-go" => {
                self.files.clear();
                self.kept.clear();
                "ok".into()
            }
            "attach" => {
                let ids: Vec<u32> = (0..n[1] as u32).collect();
                match self.session(n[0]).attach(&ids) {
                    Ok(tokens) => tokens.to_string(),
                    Err(e) => verdict(Err(e)),
                }
            }
            // Remembers where token 0 lies, past the session's end.
            "remember" => {
                let at = self.session(n[0]).row(0, 0, Kv::K);
                self.old = Some(at);
                "ok".into()
            }
            "old" => {
                let at = self.old.unwrap();
                // SAFETY: the extent stays mapped until this process takes in an event, and it makes no call before.
                let bytes: Vec<u8> = (0..ROW).map(|i| unsafe { at.add(i).read_volatile() }).collect();
                if bytes.iter().all(|b| *b == 0) { "zeros".into() } else { format!("{:?}", &bytes[..4]) }
            }
            // Writes where only readers are: what a broken process may do to its own tenant.
            "spoil" => {
                let at = self.session(n[0]).row(n[1], 0, Kv::K).cast_mut();
                // SAFETY: the row is mapped writable for as long as the session lives.
                unsafe { at.write_volatile(!at.read_volatile()) };
                "ok".into()
            }
            "damaged" => {
                let _ = self.client.poll();
                self.session(n[0]).damaged_from().map_or("no".into(), |token| token.to_string())
            }
            "wanted" => {
                let _ = self.client.poll();
                self.session(n[0]).wanted_back().is_some().to_string()
            }
            "raw" => answers_to(n[0] as u32),
            "poll" => verdict(self.client.poll()),
            "lost" => self.client.is_lost().to_string(),
            "child" => {
                // SAFETY: the child calls only what may be called after fork.
                match unsafe { libc::fork() } {
                    // SAFETY: these calls are allowed after fork, and the child ends without running anything else.
                    0 => unsafe {
                        libc::close(0);
                        libc::close(1);
                        libc::close(2);
                        libc::sleep(60);
                        libc::_exit(0)
                    },
                    child => child.to_string(),
                }
            }
            "walk" => {
                let socket = std::env::var_os(ROLE).unwrap();
                crate::deaths::walk(socket.as_ref(), n[0], n[1] == 1)
            }
            "view" => match self.session(n[0]).plane(0, Kv::K, n[1], None) {
                Ok(view) => {
                    self.view = Some(view);
                    "ok".into()
                }
                Err(e) => verdict(Err(e)),
            },
            "view-holds" => self.view_holds(n[0], n[1], n[2] as u8),
            "crowd" => self.crowd.fill(),
            "make-room" => {
                self.crowd = Crowd::default();
                "ok".into()
            }
            "connect" => {
                // Connections on which nothing is said; the daemon may refuse them, and then says so on them.
                let socket = std::env::var_os(ROLE).unwrap();
                self.raws.extend((0..n[0]).filter_map(|_| Raw::connect(socket.as_ref()).ok()));
                "ok".into()
            }
            "numbers" => {
                // What a fresh connection is told: its formats, and its sessions.
                let socket = std::env::var_os(ROLE).unwrap();
                let mut raw = Raw::connect(socket.as_ref()).unwrap();
                let mut said = vec![u64::from(raw.greet())];
                let first = |r: Reply, bytes: usize| {
                    let mut number = [0; 8];
                    number[..bytes].copy_from_slice(&r.body[..bytes]);
                    u64::from_le_bytes(number)
                };
                for layers in [3, 2, 5] {
                    let other = Profile::uniform("other", "f16", layers, 256, 256, PER_BLOCK as u32).unwrap();
                    let reply = raw.ask(Verb::Profile, 0, |w| wire::put_profile(w, &other, 0)).unwrap();
                    said.push(first(reply, 4));
                }
                for _ in 0..n[0] {
                    let open = wire::Open { format: (said[1] as u32).into(), ..wire::Open::default() };
                    said.push(first(raw.ask(Verb::Open, 0, |w| _ = w.put(&open)).unwrap(), 8));
                }
                let empty = wire::Report::default();
                said.push(first(raw.ask(Verb::Fork, said[4], |w| _ = w.put(&empty)).unwrap(), 8));
                format!("{said:?}")
            }
            "hang-up" => {
                self.raws.clear();
                "ok".into()
            }
            "greet-all" => {
                self.raws.iter_mut().for_each(|raw| _ = raw.greet());
                "ok".into()
            }
            "reserve-all" => {
                // Asked for on all connections, and no answer waited for.
                for raw in &mut self.raws {
                    let want = wire::Reserve { format: (n[0] as u32).into(), want: (n[1] as u32).into() };
                    raw.send(Verb::Reserve, 0, |w| _ = w.put(&want)).unwrap();
                }
                "ok".into()
            }
            "granted" => {
                let granted = |raw: &mut Raw| raw.receive().is_some_and(|r| r.fault.is_none());
                self.raws.iter_mut().map(granted).filter(|g| *g).count().to_string()
            }
            "exit" => std::process::exit(0),
            "churn" => self.churn(n[0] as u64),
            "files" => {
                self.files.clear();
                while let Ok(file) = std::fs::File::open("/dev/null") {
                    self.files.push(file);
                }
                self.files.truncate(self.files.len() - n[0]);
                "ok".into()
            }
            "close-files" => {
                self.files.clear();
                "ok".into()
            }
            "fds" => std::fs::read_dir("/proc/self/fd").unwrap().count().to_string(),
            "quiet" => self.quiet(n[0]),
            other => panic!("no order {other}"),
        }
    }

    /// Whether the view of layer 0's keys shows what [`do_it`](Self::do_it) has filled in.
    fn view_holds(&self, from: usize, to: usize, who: u8) -> String {
        let view = self.view.unwrap();
        for token in from..to {
            // SAFETY: tokens below the capacity lie inside the view, which lives as long as its session.
            let seen = unsafe { view.address.add(token * view.row).read_volatile() };
            if seen != byte(token, 0, Kv::K, who) {
                return format!("token {token} shows {seen}");
            }
        }
        "ok".into()
    }

    /// Everything at once, for ever: to be killed in the middle of it.
    fn churn(&mut self, mut seed: u64) -> String {
        let mut roll = move |below: usize| {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (seed >> 33) as usize % below
        };
        answer("ok");
        loop {
            if self.sessions.len() < 3 {
                self.do_it("open", &[]);
            }
            let at = roll(self.sessions.len());
            let tokens = self.session(at).tokens();
            let more = tokens + roll(3 * PER_BLOCK);
            match roll(6) {
                0 => _ = self.session(at).trim(tokens / 2),
                1 => _ = self.do_it("seal", &[at, tokens]),
                2 => {
                    if let Ok(twin) = self.session(at).fork() {
                        self.sessions.push(Some(twin));
                    }
                    if self.sessions.len() > 4 {
                        self.sessions.remove(0);
                    }
                }
                3 => _ = self.profile.reserve(roll(4) as u32),
                _ => _ = self.session(at).ensure(more),
            }
        }
    }

    /// Grows by `blocks` blocks while every system call of this thread but two is deadly.
    fn quiet(&mut self, blocks: usize) -> String {
        let s = self.sessions[0].as_mut().unwrap();
        deadly_system_calls();
        for tokens in 1..=blocks * PER_BLOCK {
            if s.ensure(tokens).is_err() {
                // SAFETY: ends the process; one of the two calls that are allowed.
                unsafe { libc::_exit(9) }
            }
        }
        // SAFETY: as above.
        unsafe { libc::_exit(7) }
    }
}

/// The read-only copies that this process has a descriptor of: where that is, and a duplicate.
fn copies() -> Vec<(std::path::PathBuf, std::fs::File)> {
    let entries = std::fs::read_dir("/proc/self/fd").unwrap().map(|entry| entry.unwrap().path());
    let is_copy = |path: &std::path::PathBuf| {
        std::fs::read_link(path).is_ok_and(|what| what.to_string_lossy().contains("kvbroker-common"))
    };
    let paths: Vec<_> = entries.filter(is_copy).collect();
    paths
        .into_iter()
        .map(|path| {
            let number: i32 = path.file_name().unwrap().to_str().unwrap().parse().unwrap();
            // SAFETY: the descriptor is open: the client library closes none while this thread runs.
            let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(number) };
            (path, fd.try_clone_to_owned().unwrap().into())
        })
        .collect()
}

/// Tries to write in every read-only copy that this process has a descriptor of, or to get a way to. Says how many there
/// are, or which way was open.
fn write_to_copies() -> String {
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::FileExt;
    let mut tried = 0;
    for entry in std::fs::read_dir("/proc/self/fd").unwrap() {
        let path = entry.unwrap().path();
        let what = std::fs::read_link(&path).unwrap_or_default();
        if !what.to_string_lossy().contains("kvbroker-common") {
            continue;
        }
        tried += 1;
        let number: i32 = path.file_name().unwrap().to_str().unwrap().parse().unwrap();
        let len = std::fs::metadata(&path).unwrap().len() as usize;
        let map = |prot| {
            // SAFETY: a new mapping at an address of the kernel's choice.
            unsafe { libc::mmap(std::ptr::null_mut(), len, prot, libc::MAP_SHARED, number, 0) }
        };
        if map(libc::PROT_READ | libc::PROT_WRITE) != libc::MAP_FAILED {
            return "mmap".into();
        }
        let readable = map(libc::PROT_READ);
        assert_ne!(readable, libc::MAP_FAILED);
        // SAFETY: the mapping was made just now, and nothing refers to it.
        let (protect, _) = unsafe {
            (libc::mprotect(readable, len, libc::PROT_READ | libc::PROT_WRITE), libc::munmap(readable, len))
        };
        if protect == 0 {
            return "mprotect".into();
        }
        // Whoever may pass by the mode of the file, as root may, meets the seals.
        if let Ok(file) = std::fs::File::options().read(true).write(true).open(&path) {
            // SAFETY: as above.
            let mapped = unsafe {
                let prot = libc::PROT_READ | libc::PROT_WRITE;
                libc::mmap(std::ptr::null_mut(), len, prot, libc::MAP_SHARED, file.as_raw_fd(), 0)
            };
            if mapped != libc::MAP_FAILED || file.write_at(b"x", 0).is_ok() || file.set_len(0).is_ok() {
                return "opened again".into();
            }
            // SAFETY: geteuid has no preconditions.
            assert_eq!(unsafe { libc::geteuid() }, 0, "the mode is for its maker alone");
        }
        // SAFETY: fchmod takes no memory of ours.
        if unsafe { libc::geteuid() != 0 && libc::fchmod(number, 0o600) == 0 } {
            return "fchmod".into();
        }
    }
    tried.to_string()
}

/// Asks, on a connection of its own, for a prompt of two blocks that begins with token `first`, then computes and
/// publishes it. All answers in hexadecimal, each with its fault and the number of its descriptors.
fn answers_to(first: u32) -> String {
    let mut raw = Raw::connect(std::env::var_os(ROLE).unwrap().as_ref()).unwrap();
    let format = raw.greet();
    let mut said = Vec::new();
    let mut ask = |verb, session, fill: &dyn Fn(&mut Writer)| {
        let Reply { fault, body, fds, .. } = raw.ask(verb, session, |w| fill(w)).unwrap();
        let hex: String = body.iter().map(|b| format!("{b:02x}")).collect();
        said.push(format!("{} {fault:?} {fds} {hex}", verb.name()));
        body
    };
    let ids: Vec<u8> = (first..first + 32).flat_map(u32::to_le_bytes).collect();
    let open = wire::Open { format: format.into(), ..wire::Open::default() };
    let opened = ask(Verb::Open, 0, &|w| _ = w.put(&open));
    let session = u64::from_le_bytes(opened[..8].try_into().unwrap());
    ask(Verb::Attach, session, &|w| {
        w.put(&wire::Attach { count: 32.into(), more: 0.into() }).put(&ids[..]);
    });
    let grow = wire::Grow { want: 2.into(), least: 2.into(), ..wire::Grow::default() };
    let grant = ask(Verb::Grow, session, &|w| _ = w.put(&grow));
    // Behind the grant: one extent of 8 bytes, and two blocks of 24, of which 16 are the name.
    let blocks: Vec<u8> = grant[24..].chunks_exact(24).flat_map(|block| block[..16].to_vec()).collect();
    ask(Verb::Seal, session, &|w| {
        let report = wire::Report { tokens: 32.into(), first: 0.into(), used: 2.into() };
        w.put(&wire::Seal { report, from: 0.into(), count: 32.into() }).put(&ids[..]).put(&blocks[..]);
    });
    ask(Verb::Query, 0, &|w| _ = w.put(&wire::Query { format: format.into(), reserved: 0.into() }));
    said.join("|")
}

/// From here on any system call of this thread but `exit_group` ends the process with SIGSYS.
fn deadly_system_calls() {
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let step = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let mut program = [
        step(LOAD, 0, 0, 0), // seccomp_data.nr
        step(EQUAL, 0, 1, libc::SYS_exit_group as u32),
        step(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW),
        step(RETURN, 0, 0, libc::SECCOMP_RET_KILL_PROCESS),
    ];
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: the program outlives the call, which copies it.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let set = libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter);
        if set != 0 {
            libc::_exit(8);
        }
    }
}
