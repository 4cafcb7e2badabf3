//! Row `grant`: blocks granted by a running broker, over the bare ping-pong: two processes that send each other messages
//! of the same sizes, with as many descriptors, over the same kind of socket.
//!
//! Both pairs lie on the processors in the same way: see [`kvbroker_bench::placement`].

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use kvbroker::profile::Profile;
use kvbroker::seqpacket::SeqPacket;
use kvbroker::wire::{self, GrantedBlock, Reader, Verb, Writer};
use kvbroker_bench::placement::Placement;
use kvbroker_bench::{at_most, reported};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket, socketpair};

fn main() -> io::Result<()> {
    let mut arguments = std::env::args().skip(1);
    if arguments.next().as_deref() == Some("--echo") {
        let number = |a: Option<String>| a.and_then(|a| a.parse().ok()).expect("sizes of the reply");
        return echo(number(arguments.next()), number(arguments.next()));
    }
    let directory = std::env::temp_dir().join(format!("kvbroker-bench.{}", std::process::id()));
    std::fs::create_dir(&directory)?;
    let result = measure(&directory);
    std::fs::remove_dir_all(&directory)?;
    result
}

/// The bare other side: reads a message, sends one of `bytes` bytes with `fds` descriptors.
fn echo(bytes: usize, fds: usize) -> io::Result<()> {
    // SAFETY: the parent hands over descriptor 0, a socket, for good.
    let socket = SeqPacket::from(unsafe { <OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(0) });
    let files: Vec<_> = (0..fds).map(|_| std::fs::File::open("/dev/null")).collect::<Result<_, _>>()?;
    let fds: Vec<_> = files.iter().map(AsFd::as_fd).collect();
    let (mut buffer, reply) = (vec![0; wire::MAX_MESSAGE], vec![0; bytes]);
    while socket.recv(&mut buffer)?.bytes > 0 {
        socket.send(&reply, &fds)?;
    }
    Ok(())
}

struct Peer {
    socket: SeqPacket,
    process: Child,
    buffer: Vec<u8>,
}

impl Peer {
    fn echo(bytes: usize, fds: usize) -> io::Result<Self> {
        let (ours, theirs) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?;
        let process = Command::new(std::env::current_exe()?)
            .args(["--echo", &bytes.to_string(), &fds.to_string()])
            .stdin(theirs)
            .spawn()?;
        Ok(Peer { socket: ours.into(), process, buffer: vec![0; wire::MAX_MESSAGE] })
    }

    fn broker(directory: &Path, extent: &str) -> io::Result<Self> {
        let (path, admin) =
            (directory.join(format!("{extent}.sock")), directory.join(format!("{extent}.admin")));
        let process = Command::new("target/release/kvbrokerd")
            .args(["--pool", "192M", "--extent", extent, "--backend", "memfd", "--socket"])
            .arg(&path)
            .arg("--admin-socket")
            .arg(&admin)
            .spawn()?;
        let fd = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None)?;
        let address = UnixAddr::new(&path)?;
        let began = Instant::now();
        while let Err(e) = connect(fd.as_raw_fd(), &address) {
            if began.elapsed() > Duration::from_secs(10) {
                return Err(e.into());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(Peer { socket: fd.into(), process, buffer: vec![0; wire::MAX_MESSAGE] })
    }

    /// One message there and one back: how long it took, and what came.
    fn round(&mut self, message: &[u8]) -> io::Result<(Duration, usize, Vec<OwnedFd>)> {
        let began = Instant::now();
        self.socket.send(message, &[])?;
        let got = self.socket.recv(&mut self.buffer)?;
        let took = began.elapsed();
        Ok((took, got.bytes, got.fds))
    }

    fn call(
        &mut self,
        verb: Verb,
        session: u64,
        fill: impl FnOnce(&mut Writer),
    ) -> io::Result<(Duration, Vec<OwnedFd>)> {
        let mut w = Writer::request(verb, 1, session);
        fill(&mut w);
        let (took, bytes, fds) = self.round(&w.finish())?;
        let (header, body) = wire::split(&self.buffer[..bytes]).map_err(io::Error::other)?;
        match header.fault.get() {
            0 => Ok((took, fds)),
            _ => Err(io::Error::other(String::from_utf8_lossy(&body[16..]).into_owned())),
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn measure(directory: &Path) -> io::Result<()> {
    for placement in Placement::all()? {
        for (extent, blocks) in [("3M", 1), ("3M", 16), ("3M", 64), ("block", 64), ("block", 253)] {
            grants(directory, extent, blocks, placement)?;
        }
    }
    Ok(())
}

fn grants(directory: &Path, extent: &str, blocks: u32, placement: Placement) -> io::Result<()> {
    let mut broker = placement.start(|| Peer::broker(directory, extent))?;
    let hello =
        wire::Hello { magic: wire::MAGIC.into(), version: wire::VERSION.into(), label: wire::label("bench") };
    broker.call(Verb::Hello, 0, |w| _ = w.put(&hello))?;
    broker.call(Verb::Profile, 0, |w| wire::put_profile(w, &Profile::reference(), 0))?;
    let open = wire::Open { format: 1.into(), ..wire::Open::default() };
    broker.call(Verb::Open, 0, |w| _ = w.put(&open))?;
    let grow = wire::Grow { want: blocks.into(), least: blocks.into(), ..wire::Grow::default() };
    let strict = extent == "block";
    let descriptors = if strict { blocks } else { 0 };
    let reply = size_of::<wire::Header>()
        + size_of::<wire::Grant>()
        + descriptors as usize * size_of::<wire::ExtentInfo>()
        + blocks as usize * size_of::<GrantedBlock>();
    let mut bare = placement.start(|| Peer::echo(reply, descriptors as usize))?;
    let mut request = Writer::request(Verb::Grow, 1, 1);
    request.put(&grow);
    let request = request.finish();

    let (mut granted, mut bounced) = (Vec::new(), Vec::new());
    let (rounds, warm_up) = if strict { (100, 5) } else { (4000, 50) };
    for round in 0..rounds + warm_up {
        if strict {
            // Both sides have slept: awake again before anything is timed.
            let query = wire::Query { format: 1.into(), reserved: 0.into() };
            for _ in 0..5 {
                bare.round(&request)?;
                broker.call(Verb::Query, 0, |w| _ = w.put(&query))?;
            }
        }
        let (took, fds) = broker.call(Verb::Grow, 1, |w| _ = w.put(&grow))?;
        // What came is given back, untimed. In strict mode the extents too, so that each grant brings descriptors.
        let (header, body) = wire::split(&broker.buffer).map_err(|_| ()).unwrap_or_else(|()| {
            let length = u32::from_le_bytes(broker.buffer[4..8].try_into().expect("four bytes")) as usize;
            wire::split(&broker.buffer[..length]).expect("checked by call")
        });
        let _ = header;
        let mut r = Reader::new("grant", body);
        let grant: wire::Grant = *r.one().map_err(io::Error::other)?;
        let extents: Vec<wire::ExtentInfo> =
            r.many(grant.extents.get(), wire::MAX_FDS).map_err(io::Error::other)?.to_vec();
        let names: Vec<GrantedBlock> =
            r.many(grant.blocks.get(), wire::MAX_BLOCKS).map_err(io::Error::other)?.to_vec();
        let came = fds.len();
        drop(fds);
        broker.call(Verb::Free, 0, |w| {
            w.put(&wire::Free { count: (names.len() as u32).into(), reserved: 0.into() });
            names.iter().for_each(|b| _ = w.put(&b.block));
        })?;
        if strict {
            for e in extents {
                let back = wire::ReturnExtent { extent: e.extent, reserved: 0.into() };
                broker.call(Verb::ReturnExtent, 0, |w| _ = w.put(&back))?;
            }
            // The worker renews what has come back; a grant must not wait for that here.
            std::thread::sleep(Duration::from_millis(200));
        }
        // The sides take turns in who comes first; the first rounds warm up.
        let (bare_took, _, _) = bare.round(&request)?;
        if round >= warm_up && (strict || came == 0) {
            granted.push(took);
            bounced.push(bare_took);
        }
    }
    let median = |times: &mut Vec<Duration>| {
        times.sort_unstable();
        times[times.len() / 2].as_secs_f64() * 1e6
    };
    let (grant, bounce) = (median(&mut granted), median(&mut bounced));
    let mut name = match strict {
        true => format!("grant/strict-{blocks}"),
        false => format!("grant/{blocks}"),
    };
    name += placement.suffix();
    let note = format!(
        "{grant:.1} us against {bounce:.1} us, {reply} bytes and {descriptors} descriptors back, {}; median of {}",
        placement.words(),
        granted.len()
    );
    at_most(&name, grant / bounce, 1.25, format!("over the bare seqpacket ping-pong: {note}"));
    if blocks == 64 && !strict && !placement.is_apart() {
        reported("grant/per-block", grant / f64::from(blocks), "us", "whole grant path in a batch of 64");
    }
    Ok(())
}
