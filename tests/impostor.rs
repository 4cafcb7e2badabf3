//! What a program sees whose broker is broken, or is none: an error that names what is wrong, and no more than that.
//!
//! A thread here answers as a broker does, and twists one thing.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvbroker::client::{Client, ClientOptions, Error, OpenOptions, Session};
use kvbroker::profile::{Kv, Profile};
use kvbroker::seqpacket::SeqPacket;
use kvbroker::window::{How, What};
use kvbroker::wire::{self, ExtentInfo, Fault, GrantedBlock, Verb, WireBlock, Writer};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, UnixAddr, accept, bind, listen, socket};

const EXTENT: u64 = 128 << 10;
const SLOT: u64 = 16 << 10;
const SLOTS: u32 = (EXTENT / SLOT) as u32;
const ROW: usize = 256;
const TOKENS: usize = 40;

/// An answer before it is put into bytes.
#[derive(Default)]
struct Answer {
    opcode: u16,
    fault: u16,
    sequence: u64,
    welcome: wire::Welcome,
    format: wire::Format,
    session: u64,
    tokens: u64,
    extents: Vec<ExtentInfo>,
    blocks: Vec<GrantedBlock>,
    made: wire::WindowMade,
    /// The length of the memory behind each descriptor.
    memory: Vec<u64>,
    /// Instead of what belongs here.
    bytes: Option<Vec<u8>>,
    /// How often an event comes before it.
    events: Option<(usize, Vec<u8>)>,
}

type Twist = fn(Verb, &mut Answer);

fn memory(bytes: u64) -> OwnedFd {
    let fd = memfd_create(c"impostor", MFdFlags::MFD_CLOEXEC).unwrap();
    nix::unistd::ftruncate(&fd, bytes as i64).unwrap();
    fd
}

fn event(code: u16, body: &[u8]) -> Vec<u8> {
    let mut w = Writer::start(wire::EVENT | code, 0, 0, 0);
    w.put(body);
    w.finish()
}

/// A broker for one connection, which twists what it says.
struct Impostor {
    path: PathBuf,
    _place: tempfile::TempDir,
}

impl Impostor {
    fn new(twist: Twist) -> Self {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("socket");
        let listener =
            socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).unwrap();
        bind(listener.as_raw_fd(), &UnixAddr::new(&path).unwrap()).unwrap();
        listen(&listener, Backlog::new(1).unwrap()).unwrap();
        std::thread::spawn(move || serve(&listener, twist));
        Impostor { path, _place: place }
    }

    fn connect(&self) -> Result<Client, Error> {
        let options =
            ClientOptions { timeout: Duration::from_secs(10), credit_ahead: 0, ..Default::default() };
        Client::connect_to(&self.path, options)
    }
}

fn serve(listener: &OwnedFd, twist: Twist) {
    let socket = SeqPacket::from(accept(listener).unwrap());
    let (mut buffer, mut next, mut told) = (vec![0; wire::MAX_MESSAGE], 0, BTreeSet::new());
    while let Ok(got) = socket.recv(&mut buffer) {
        let Ok((header, body)) = wire::split(&buffer[..got.bytes]) else { return };
        let verb = Verb::from_code(header.opcode.get()).unwrap();
        let mut answer = Answer {
            opcode: verb as u16 | wire::REPLY,
            sequence: header.sequence.get(),
            session: 7,
            ..Answer::default()
        };
        let number = |at: usize| u32::from_le_bytes(body[at..at + 4].try_into().unwrap());
        let flags = match verb {
            Verb::Attach => wire::SEALED,
            Verb::Trim => wire::RETURNED,
            _ => wire::ZERO,
        };
        let blocks = match verb {
            Verb::Grow => number(20),
            // The prompt's third block is not whole.
            Verb::Attach if number(0) >= 32 => 2,
            _ => 0,
        };
        for at in next..next + blocks {
            let (extent, slot) = (at / SLOTS + 1, at % SLOTS);
            if told.insert(extent) {
                answer.extents.push(ExtentInfo { extent: extent.into(), flags: 0.into() });
                answer.memory.push(EXTENT);
            }
            let block = WireBlock { extent: extent.into(), slot: slot.into(), generation: 1.into() };
            answer.blocks.push(GrantedBlock { block, flags: flags.into(), reserved: 0.into() });
        }
        next += blocks;
        let welcome = &mut answer.welcome;
        (welcome.version, welcome.backend) = (wire::VERSION.into(), 2.into());
        (welcome.extent_bytes, welcome.extents) = (EXTENT.into(), 16.into());
        welcome.page_bytes = (kvbroker::map::page_bytes() as u32).into();
        let format = &mut answer.format;
        (format.format, format.blocks_per_extent) = (1.into(), SLOTS.into());
        (format.slot_bytes, format.capacity) = (SLOT.into(), 100.into());
        if verb == Verb::Attach {
            answer.tokens = 32;
        }
        if verb == Verb::Window {
            let made = &mut answer.made;
            (made.window, made.how) = (5.into(), number(44).into());
            (made.bytes, made.capacity, made.extent) = ((3 * SLOT).into(), (3 * SLOT).into(), 1.into());
            if matches!(number(44), 2 | 4) {
                made.flags = wire::WINDOW_BUFFER.into();
                answer.memory.push(3 * SLOT);
            }
        }
        twist(verb, &mut answer);
        if let Some((times, message)) = &answer.events {
            for _ in 0..*times {
                if socket.send(message, &[]).is_err() {
                    return;
                }
            }
        }
        let mut w = Writer::start(answer.opcode, answer.fault, answer.sequence, header.session.get());
        match verb {
            _ if answer.bytes.is_some() => _ = w.put(answer.bytes.as_deref().unwrap()),
            Verb::Hello => _ = w.put(&answer.welcome),
            Verb::Profile => _ = w.put(&answer.format),
            Verb::Open | Verb::Fork => _ = w.put(&wire::Opened { session: answer.session.into() }),
            Verb::Grow | Verb::Attach | Verb::Trim => {
                let (extents, blocks) = (answer.extents.len() as u32, answer.blocks.len() as u32);
                let tokens = answer.tokens.into();
                w.put(&wire::Grant { tokens, extents: extents.into(), blocks: blocks.into() });
                w.put(&answer.extents[..]).put(&answer.blocks[..]);
            }
            Verb::Window => _ = w.put(&answer.made),
            Verb::Seal | Verb::Pin => _ = w.put(&wire::Counted::default()),
            _ => {}
        }
        let fds: Vec<OwnedFd> = answer.memory.iter().map(|bytes| memory(*bytes)).collect();
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        if socket.send(&w.finish(), &fds).is_err() {
            return;
        }
    }
}

fn profile() -> Profile {
    Profile::uniform("m", "f16", 2, ROW as u32, ROW as u32, 16).unwrap()
}

fn rows(session: &mut Session, first: usize) -> Result<(), Error> {
    for token in first..session.tokens() {
        for layer in 0..2 {
            session.write_row(token, layer, Kv::V, &[token as u8; ROW])?;
        }
    }
    let mut row = [0; ROW];
    for token in first..session.tokens() {
        session.read_row(token, 1, Kv::V, &mut row)?;
        assert_eq!(row, [token as u8; ROW]);
    }
    Ok(())
}

/// A session that has grown.
fn grow(client: &Client) -> Result<Session, Error> {
    let profile = client.profile(&profile())?;
    let mut session = client.open(&profile, OpenOptions::default())?;
    session.ensure(TOKENS)?;
    rows(&mut session, 0)?;
    Ok(session)
}

fn attach(client: &Client) -> Result<Session, Error> {
    let profile = client.profile(&profile())?;
    let mut session = client.open(&profile, OpenOptions::default())?;
    let ids: Vec<u32> = (0..TOKENS as u32).collect();
    let held = session.attach(&ids)?;
    assert_eq!(held, 32);
    session.ensure(TOKENS)?;
    rows(&mut session, held)?;
    Ok(session)
}

fn window(client: &Client, how: How) -> Result<Session, Error> {
    let mut session = grow(client)?;
    let window = session.window(0..TOKENS, What::Blocks, Some(how))?;
    if how == How::Bounce {
        session.load(&window, None, 0)?.unwrap();
    }
    drop(window);
    Ok(session)
}

/// What the program is told, and that it is told so from then on.
fn told(what: &str, twist: Twist, run: impl Fn(&Client) -> Result<Session, Error>, words: &str) {
    let impostor = Impostor::new(twist);
    let client = impostor.connect().unwrap();
    let error = run(&client).map(|_| ()).expect_err(what);
    let text = error.to_string();
    assert!(matches!(error, Error::Protocol(_)) && text.contains(words), "{what}: {text}");
    let next = client.profile(&profile()).expect_err(what);
    let text = next.to_string();
    assert!(matches!(next, Error::Lost(_)) && text.contains(words), "{what}, afterwards: {text}");
}

#[test]
fn a_broker_that_says_what_one_says_is_believed() {
    let believed = |run: &dyn Fn(&Client) -> Result<Session, Error>| {
        let impostor = Impostor::new(|_, _| ());
        run(&impostor.connect().unwrap()).unwrap();
    };
    believed(&grow);
    believed(&attach);
    [How::Run, How::Udmabuf, How::Bounce].iter().for_each(|how| believed(&|c| window(c, *how)));
}

#[test]
fn an_answer_to_hello_that_describes_no_pool_ends_the_attempt_and_says_who_answered() {
    let twists: [(&str, Twist); 10] = [
        ("version is 2", |_, a| a.welcome.version = 2.into()),
        ("extent_bytes is 0", |_, a| a.welcome.extent_bytes = 0.into()),
        ("extent_bytes is 5000", |_, a| a.welcome.extent_bytes = 5000.into()),
        ("extents is 16", |_, a| a.welcome.extent_bytes = (1 << 63).into()),
        ("extents is 4294967295", |_, a| a.welcome.extents = u32::MAX.into()),
        ("copies is 4294967280", |_, a| a.welcome.copies = 0xffff_fff0.into()),
        ("page_bytes is 65536", |_, a| a.welcome.page_bytes = 65536.into()),
        ("opcode 0x800d", |_, a| a.opcode = Verb::Query as u16 | wire::REPLY),
        ("too many", |_, a| a.bytes = Some(vec![0; 90])),
        ("backend 77", |_, a| a.welcome.backend = 77.into()),
    ];
    for (words, twist) in twists {
        let impostor = Impostor::new(twist);
        let error = impostor.connect().unwrap_err();
        let (text, path) = (error.to_string(), impostor.path.display().to_string());
        assert!(matches!(error, Error::Stranger { .. }), "{text}");
        assert!(text.contains(words) && text.contains(&path) && text.contains("no kvbroker"), "{text}");
    }
}

#[test]
fn a_profile_whose_blocks_do_not_lie_in_extents_is_not_used() {
    let twists: [(&str, Twist); 10] = [
        ("slot_bytes is 0", |_, a| a.format.slot_bytes = 0.into()),
        ("slot_bytes is 4096", |_, a| a.format.slot_bytes = 4096.into()),
        ("slot_bytes is 16385", |_, a| a.format.slot_bytes = 16385.into()),
        ("blocks_per_extent is 8", |_, a| a.format.slot_bytes = (1 << 30).into()),
        ("blocks_per_extent is 8", |_, a| a.format.slot_bytes = (1 << 62).into()),
        ("blocks_per_extent is 0", |_, a| a.format.blocks_per_extent = 0.into()),
        ("blocks_per_extent is 9", |_, a| a.format.blocks_per_extent = 9.into()),
        ("blocks_per_extent is 50000000", |_, a| a.format.blocks_per_extent = 50_000_000.into()),
        ("blocks_per_extent is 4294967295", |_, a| a.format.blocks_per_extent = u32::MAX.into()),
        ("1 descriptors came", |v, a| a.memory.extend((v == Verb::Profile).then_some(EXTENT))),
    ];
    for (words, twist) in twists {
        told(words, twist, grow, words);
    }
}

#[test]
fn blocks_that_do_not_lie_in_memory_of_this_process_are_not_used() {
    fn on_grow(verb: Verb, a: &mut Answer, twist: impl FnOnce(&mut Answer)) {
        if verb == Verb::Grow && !a.blocks.is_empty() {
            twist(a);
        }
    }
    let twists: [(&str, Twist); 17] = [
        ("has 4096 bytes", |v, a| on_grow(v, a, |a| a.memory[0] = 4096)),
        ("has 0 bytes", |v, a| on_grow(v, a, |a| a.memory[0] = 0)),
        ("slot is 8", |v, a| on_grow(v, a, |a| a.blocks[1].block.slot = 8.into())),
        ("slot is 4294967295", |v, a| on_grow(v, a, |a| a.blocks[1].block.slot = u32::MAX.into())),
        ("extent is 9", |v, a| on_grow(v, a, |a| a.blocks[1].block.extent = 9.into())),
        ("an extent is 0", |v, a| on_grow(v, a, |a| a.extents[0].extent = 0.into())),
        ("can only be read", |v, a| on_grow(v, a, |a| a.extents[0].flags = wire::READ_ONLY.into())),
        ("slot 0 of extent 1 is there twice", |v, a| on_grow(v, a, |a| a.blocks[1] = a.blocks[0])),
        ("flags are 0x2", |v, a| on_grow(v, a, |a| a.blocks[1].flags = wire::SEALED.into())),
        ("flags are 0x4", |v, a| on_grow(v, a, |a| a.blocks[1].flags = wire::RETURNED.into())),
        ("blocks is 0, and 3 to 3", |v, a| on_grow(v, a, |a| a.blocks.clear())),
        ("blocks is 2, and 3 to 3", |v, a| on_grow(v, a, |a| a.blocks.truncate(2))),
        ("blocks is 4, and 3 to 3", |v, a| on_grow(v, a, |a| a.blocks.push(a.blocks[0]))),
        ("2 descriptors came", |v, a| on_grow(v, a, |a| a.memory.push(EXTENT))),
        ("0 descriptors came", |v, a| on_grow(v, a, |a| a.memory.clear())),
        ("opcode 0x800d", |v, a| on_grow(v, a, |a| a.opcode = Verb::Query as u16 | wire::REPLY)),
        ("request 99, which is not open", |v, a| on_grow(v, a, |a| a.sequence = 99)),
    ];
    for (words, twist) in twists {
        told(words, twist, grow, words);
    }
}

#[test]
fn a_prefix_of_more_tokens_than_there_are_blocks_is_not_used() {
    fn on_attach(verb: Verb, a: &mut Answer, twist: impl FnOnce(&mut Answer)) {
        if verb == Verb::Attach && !a.blocks.is_empty() {
            twist(a);
        }
    }
    let twists: [(&str, Twist); 8] = [
        ("tokens is 40", |v, a| on_attach(v, a, |a| a.tokens = 40)),
        ("tokens is 16", |v, a| on_attach(v, a, |a| a.tokens = 16)),
        ("tokens is 18446744073709551615", |v, a| on_attach(v, a, |a| a.tokens = u64::MAX)),
        ("tokens is 5000", |v, a| {
            on_attach(v, a, |a| {
                (a.tokens, a.blocks, a.extents, a.memory) = (5000, Vec::new(), Vec::new(), Vec::new());
            })
        }),
        ("blocks is 2002", |v, a| on_attach(v, a, |a| a.blocks.extend([a.blocks[0]; 2000]))),
        ("flags are 0x1", |v, a| on_attach(v, a, |a| a.blocks[0].flags = wire::ZERO.into())),
        // A copy for reading that ends before its second block does.
        ("ends at byte 32768 of extent 1", |v, a| {
            on_attach(v, a, |a| (a.extents[0].flags, a.memory[0]) = (wire::READ_ONLY.into(), SLOT))
        }),
        // One that is used for writing later.
        ("can only be read", |v, a| {
            on_attach(v, a, |a| a.extents[0].flags = wire::READ_ONLY.into());
        }),
    ];
    for (words, twist) in twists {
        let words = if words.starts_with("blocks is 2002") { "2002 are more than" } else { words };
        told(words, twist, attach, words);
    }
}

#[test]
fn a_window_that_its_buffer_is_too_short_for_is_not_used() {
    fn on_window(verb: Verb, a: &mut Answer, twist: impl FnOnce(&mut Answer)) {
        if verb == Verb::Window {
            twist(a);
        }
    }
    let twists: [(How, &str, Twist); 9] = [
        (How::Bounce, "its buffer has 4096", |v, a| on_window(v, a, |a| a.memory[0] = 4096)),
        (How::Bounce, "its buffer has 49152", |v, a| on_window(v, a, |a| a.made.bytes = (1 << 62).into())),
        (How::Udmabuf, "its buffer has 4096", |v, a| on_window(v, a, |a| a.memory[0] = 4096)),
        (How::Udmabuf, "bytes is 16384", |v, a| on_window(v, a, |a| a.made.bytes = SLOT.into())),
        (How::Udmabuf, "comes with its buffer", |v, a| on_window(v, a, |a| a.made.flags = 0.into())),
        (How::Udmabuf, "how is 1", |v, a| on_window(v, a, |a| a.made.how = 1.into())),
        (How::Run, "extent is 99", |v, a| on_window(v, a, |a| a.made.extent = 99.into())),
        (How::Run, "offset is 114688", |v, a| on_window(v, a, |a| a.made.offset = (7 * SLOT).into())),
        (How::Iommu, "address is 0xffffffffffffffff", |v, a| {
            on_window(v, a, |a| a.made.address = u64::MAX.into())
        }),
    ];
    for (how, words, twist) in twists {
        told(words, twist, |c| window(c, how), words);
    }
}

#[test]
fn what_a_broker_says_in_words_is_one_short_line_without_tricks() {
    let twist: Twist = |verb, a| {
        if verb == Verb::Grow {
            let words = format!("\u{1b}[31mred\nand long {}", "x".repeat(60_000));
            let mut body = vec![0; 16];
            body.extend(words.as_bytes());
            (a.fault, a.bytes, a.memory) = (Fault::Busy as u16, Some(body), Vec::new());
        }
    };
    let impostor = Impostor::new(twist);
    let text = grow(&impostor.connect().unwrap()).unwrap_err().to_string();
    assert!(text.starts_with("busy: ?[31mred?and long xxx"), "{text}");
    assert!(text.len() < 1000, "{}", text.len());
}

#[test]
fn a_broker_that_never_stops_talking_keeps_no_call_from_its_end() {
    const FOR_EVER: usize = usize::MAX;
    let twists: [Twist; 3] = [
        // Of an extent that is not here, of what no version knows yet, and of an extent that is here.
        |v, a| a.events = (v == Verb::Open).then(|| (FOR_EVER, event(1, &[77, 0, 0, 0, 0, 0, 0, 0]))),
        |v, a| a.events = (v == Verb::Open).then(|| (FOR_EVER, event(99, &[0; 60_000]))),
        |v, a| a.events = (v == Verb::Query).then(|| (FOR_EVER, event(1, &[1, 0, 0, 0, 9, 0, 0, 0]))),
    ];
    for twist in twists {
        let impostor = Impostor::new(twist);
        let options =
            ClientOptions { timeout: Duration::from_millis(300), credit_ahead: 0, ..Default::default() };
        let client = Client::connect_to(&impostor.path, options).unwrap();
        let ended = grow(&client).and_then(|_session| client.profile(&profile())?.room());
        let error = ended.unwrap_err();
        // Whichever is first on this machine: its end, or more events than there can be.
        assert!(matches!(error, Error::Protocol(_) | Error::Timeout(_) | Error::Lost(_)), "{error}");
        let _ = client.poll();
    }
}

#[test]
fn what_hangs_up_at_once_is_not_called_a_broker_that_was_lost() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("socket");
    let listener = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).unwrap();
    bind(listener.as_raw_fd(), &UnixAddr::new(&path).unwrap()).unwrap();
    listen(&listener, Backlog::new(1).unwrap()).unwrap();
    let hangs_up = std::thread::spawn(move || drop(accept(&listener).unwrap()));
    let error = connect_to(&path).unwrap_err();
    hangs_up.join().unwrap();
    assert!(matches!(error, Error::NotReachable { .. }), "{error}");
    let error = connect_to(Path::new("")).unwrap_err();
    assert!(error.to_string().contains("path of the broker's socket is empty"), "{error}");
}

fn connect_to(path: &Path) -> Result<Client, Error> {
    Client::connect_to(path, ClientOptions::default())
}
