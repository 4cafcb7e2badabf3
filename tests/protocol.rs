//! `docs/protocol.md` against the code: every table, every hex dump; and a client in plain C that knows the document only.
#![cfg(feature = "daemon")]

#[path = "common/daemon.rs"]
mod daemon;

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use daemon::Daemon;
use kvbroker::broker::{Broker, Peer, Policy};
use kvbroker::heap::Memfd;
use kvbroker::id::{BlockId, ClientId, ExtentId, Place};
use kvbroker::map::page_bytes;
use kvbroker::profile::Profile;
use kvbroker::wire::{self, Event, Fault, Verb, Verdict, Writer};

fn document() -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/protocol.md")).unwrap()
}

/// The name of a field's type in the document.
fn type_name<T>(_: &T) -> &'static str {
    let name = std::any::type_name::<T>();
    match () {
        () if name.contains("U16") => "u16",
        () if name.contains("U32") => "u32",
        () if name.contains("U64") => "u64",
        () if name.starts_with("[u8;") => "bytes",
        () if name.ends_with("Report") => "`Report`",
        () if name.ends_with("WireBlock") => "`WireBlock`",
        () => panic!("{name} has no name in the document"),
    }
}

/// What the document must say of a structure: its heading, and the start of each row of its table.
struct Structure {
    heading: String,
    rows: Vec<String>,
}

macro_rules! structures {
    ($($name:ident { $($field:ident),* })*) => { vec![$({
        let one = wire::$name::default();
        Structure {
            heading: format!("#### `{}`: {} bytes", stringify!($name), size_of::<wire::$name>()),
            rows: vec![$({
                let at = std::mem::offset_of!(wire::$name, $field);
                let size = size_of_val(&one.$field);
                format!("| {at} | {size} | {} | `{}` | ", type_name(&one.$field), stringify!($field))
            }),*],
        }
    }),*] };
}

#[test]
fn every_structure_is_in_the_document_byte_by_byte() {
    let structures = structures! {
        Header { opcode, fault, length, sequence, session }
        Refusal { needed, available }
        Hello { magic, version, label }
        Welcome { version, tenant, instance, extent_bytes, extents, page_bytes, backend, copies }
        ProfileHead { layout, tokens_per_block, window, layers, name, element }
        LayerRow { number, k_row, v_row }
        Format { format, blocks_per_extent, slot_bytes, capacity }
        Query { format, reserved }
        Room { capacity, free, held }
        Open { format, priority, max_tokens, model, label }
        Opened { session }
        Report { tokens, first, used }
        WireBlock { extent, slot, generation }
        Grow { report, want, least }
        Reserve { format, want }
        Grant { tokens, extents, blocks }
        ExtentInfo { extent, flags }
        GrantedBlock { block, flags, reserved }
        Trim { report, tokens, head, release }
        Free { count, reserved }
        Admit { tokens, flags, reserved }
        Admission { verdict, promised, blocks }
        Seal { report, from, count }
        Attach { count, more }
        Skip { from, count }
        Present { blocks, reserved }
        Pin { report, blocks, on }
        Counted { blocks, duplicates }
        Damaged { session, block, reserved }
        GiveBack { extent, deadline_ms }
        ReturnExtent { extent, reserved }
        ReclaimSession { session, deadline_ms, reserved }
        Window { report, window, first, blocks, what, layer, kv, how, capacity, flags }
        WindowMade { window, bytes, offset, address, capacity, how, extent, flags, reserved }
        CloseWindow { window }
    };
    let text = document();
    let headings: Vec<_> = text.lines().filter(|l| l.starts_with("#### ")).collect();
    let expected: Vec<_> = structures.iter().map(|s| s.heading.as_str()).collect();
    assert_eq!(headings, expected);
    // Whoever adds a structure to the protocol has to come here.
    let source = include_str!("../src/wire.rs");
    let in_code = source.lines().filter(|l| l.starts_with("    struct ")).count();
    assert_eq!(in_code, structures.len(), "structures in the code and in the document");
    for s in structures {
        let section = text.split(&s.heading).nth(1).unwrap().split("\n#").next().unwrap();
        let table = section.lines().skip_while(|l| !l.starts_with("| "));
        let rows: Vec<_> = table.take_while(|l| l.starts_with("| ")).skip(2).collect();
        assert_eq!(rows.len(), s.rows.len(), "{}", s.heading);
        let mut end = 0;
        for (row, expected) in rows.iter().zip(&s.rows) {
            assert!(row.starts_with(expected.as_str()), "{}: {row}\nshould start with {expected}", s.heading);
            let numbers: Vec<usize> =
                row.split('|').skip(1).take(2).map(|n| n.trim().parse().unwrap()).collect();
            assert_eq!(numbers[0], end, "{}: a gap before {row}", s.heading);
            end = numbers[0] + numbers[1];
        }
        assert!(s.heading.ends_with(&format!(": {end} bytes")), "{}", s.heading);
    }
}

#[test]
fn every_number_is_in_the_document() {
    let text = document();
    for verb in Verb::ALL {
        assert!(text.contains(&format!("\n| {} | {} | ", verb.name(), *verb as u16)), "{}", verb.name());
    }
    for event in Event::ALL {
        assert!(text.contains(&format!("\n| {} | {} | ", event.name(), *event as u16)), "{}", event.name());
    }
    for fault in Fault::ALL {
        assert!(text.contains(&format!("\n| {} | {} | ", fault.name(), *fault as u16)), "{}", fault.name());
    }
    for verdict in Verdict::ALL {
        assert!(
            text.contains(&format!("\n| {} | {} | ", verdict.name(), *verdict as u16)),
            "{}",
            verdict.name()
        );
    }
    let limits = [
        ("bytes of a message", wire::MAX_MESSAGE),
        ("blocks that one message names", wire::MAX_BLOCKS),
        ("token ids of one message", wire::MAX_TOKENS),
        ("descriptors of one message", wire::MAX_FDS),
        ("layers of a profile", kvbroker::profile::MAX_LAYERS),
    ];
    for (what, value) in limits {
        assert!(text.contains(&format!("\n| {what} | {value} |\n")), "{what}");
    }
    assert!(text.contains(&format!("0x{:08X}: the bytes `KVBR`", wire::MAGIC)));
    assert!(text.contains(&format!("Protocol version {}.", wire::VERSION)));
    assert!(
        text.contains(
            &format!("verb + {:#x}; in an event its number + {:#X}", wire::REPLY, wire::EVENT)
                .replace("0XC", "0xC")
        )
    );
    let policy = Policy::default();
    let defaults = format!(
        "({}, and {} of one tenant), how many sessions ({}) and profiles ({})",
        policy.connections,
        policy.connections_per_tenant,
        policy.sessions_per_connection,
        policy.profiles_per_connection
    );
    assert!(text.contains(&defaults), "{defaults}");
    for (flag, bit) in
        [("reads as zero", wire::ZERO), ("is sealed", wire::SEALED), ("no new block", wire::RETURNED)]
    {
        assert!(text.contains(&format!("{bit}: ")) && text.contains(flag), "{flag}");
    }
}

/// The dumps of the document, by title.
fn dumps(text: &str) -> Vec<(String, String)> {
    let mut out = Vec::new();
    for block in text.split("\n```hex ").skip(1) {
        let (title, rest) = block.split_once('\n').unwrap();
        out.push((title.to_owned(), rest.split("\n```").next().unwrap().to_owned()));
    }
    out
}

fn dump(bytes: &[u8]) -> String {
    let line = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<Vec<_>>().join(" ");
    bytes.chunks(16).map(line).collect::<Vec<_>>().join("\n")
}

/// The conversation of the document's last section, with a real broker.
struct Exchange {
    broker: Broker,
    client: ClientId,
    sequence: u64,
    said: Vec<(String, Vec<u8>)>,
}

impl Exchange {
    fn ask(&mut self, verb: Verb, session: u64, fill: impl FnOnce(&mut Writer)) -> usize {
        self.sequence += 1;
        let mut w = Writer::request(verb, self.sequence, session);
        fill(&mut w);
        let request = w.finish();
        self.broker.request(self.client, &request);
        let mut outputs = self.broker.outputs();
        assert!(self.broker.jobs().is_empty() && outputs.len() == 1);
        let output = outputs.pop_front().unwrap();
        self.said.push((format!("{}: {}, request", self.sequence, verb.name()), request));
        self.said.push((format!("{}: {}, reply", self.sequence, verb.name()), output.message));
        output.buffers.len()
    }
}

#[test]
fn the_hex_of_the_document_is_what_client_and_broker_really_say() {
    let heap = Arc::new(Memfd::new(false));
    let mut broker = Broker::new(heap, 128 << 10, 4, 4, Policy::default()).unwrap();
    let client = broker.connect(Peer { uid: 1000, pid: 1 }).unwrap();
    let mut e = Exchange { broker, client, sequence: 0, said: Vec::new() };
    e.ask(Verb::Hello, 0, |w| {
        let (magic, version) = (wire::MAGIC.into(), wire::VERSION.into());
        w.put(&wire::Hello { magic, version, label: wire::label("example") });
    });
    let profile = Profile::uniform("small", "f16", 2, 512, 512, 16).unwrap();
    e.ask(Verb::Profile, 0, |w| wire::put_profile(w, &profile, 0));
    e.ask(Verb::Open, 0, |w| {
        let open = wire::Open { format: 1.into(), max_tokens: 200.into(), ..wire::Open::default() };
        w.put(&wire::Open { label: wire::label("first"), ..open });
    });
    let descriptors = e.ask(Verb::Grow, 1, |w| {
        w.put(&wire::Grow { want: 2.into(), least: 1.into(), ..wire::Grow::default() });
    });
    assert_eq!(descriptors, 1);
    let used = BlockId { place: Place { extent: ExtentId(1), slot: 0 }, generation: 1 };
    e.ask(Verb::Grow, 1, |w| {
        let report = wire::Report { tokens: 5.into(), first: 0.into(), used: 1.into() };
        w.put(&wire::Grow { report, want: 100.into(), least: 100.into() }).put_blocks([used]);
    });
    e.ask(Verb::Close, 1, |w| {
        w.put(&wire::Report { tokens: 5.into(), first: 1.into(), used: 0.into() });
    });
    let mut event = Writer::start(wire::EVENT | Event::GiveBack as u16, 0, 0, 0);
    event.put(&wire::GiveBack { extent: 1.into(), deadline_ms: 2000.into() });
    e.said.push(("event: give back extent".into(), event.finish()));

    // What differs from run to run and from machine to machine: the broker's instance and the page size.
    let welcome = &mut e.said[1].1;
    welcome[32..40].copy_from_slice(&[0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88]);
    assert_eq!(welcome[52..56], (page_bytes() as u32).to_le_bytes());
    welcome[52..56].copy_from_slice(&4096u32.to_le_bytes());

    let expected: Vec<_> = e.said.into_iter().map(|(title, bytes)| (title, dump(&bytes))).collect();
    let found = dumps(&document());
    let whole: String = expected.iter().map(|(t, d)| format!("```hex {t}\n{d}\n```\n\n")).collect();
    assert!(found == expected, "the document should have:\n\n{whole}");
}

#[test]
fn a_client_written_from_the_document_alone_works_with_the_daemon() {
    let daemon = Daemon::start();
    let program = daemon.socket().with_file_name("wire");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/wire.c");
    let flags = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-std=c11", "-D_GNU_SOURCE"];
    let compiled = Command::new("cc").args(flags).arg(source).arg("-o").arg(&program).output().unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let ran = Command::new(&program).arg(daemon.socket()).output().unwrap();
    assert!(ran.status.success(), "{}: {}", ran.status, String::from_utf8_lossy(&ran.stderr));
}
