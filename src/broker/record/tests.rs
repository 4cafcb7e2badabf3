//! Each refusal of a record by name, and the layout that belongs to its version.

use std::fmt::Write as _;

use serde_reflection::{ContainerFormat, Format, Named, Samples, Tracer, TracerConfig, VariantFormat};

use super::*;
use crate::client::{Client, ClientOptions, Embedded, OpenOptions};
use crate::heap::{Imaginary, Memfd};
use crate::pool::Block;
use crate::profile::{Group, Kv, Layer, Layout, Profile};
use crate::window::{How, What};

const EXTENT: u64 = 128 << 10;

fn profile() -> Profile {
    Profile::uniform("p", "f16", 2, 512, 512, 16).unwrap()
}

/// What a test does to a broker that serves a session, before its record is taken.
fn recorded(change: impl FnOnce(&mut Broker)) -> Vec<u8> {
    let broker = Broker::new(Arc::new(Memfd::new(false)), EXTENT, 2, 2, Policy::default()).unwrap();
    let broker = Embedded::new(broker);
    let client = Client::on(&broker, 7, ClientOptions::default()).unwrap();
    let mut session = client.open(&client.profile(&profile()).unwrap(), OpenOptions::default()).unwrap();
    session.ensure(40).unwrap();
    broker.with(|b| {
        // Broken books are to be found when the record is read, not here.
        b.policy.audit = false;
        change(b);
        b.record()
    })
}

/// The record as its broker wrote it.
fn sound() -> Vec<u8> {
    recorded(|_| ())
}

/// A record whose head is right, with this body.
fn around(body: &[u8]) -> Vec<u8> {
    let mut record = [&MAGIC[..], &VERSION.to_le_bytes(), &(body.len() as u64).to_le_bytes()].concat();
    record.extend_from_slice(&Sha256::digest(body));
    record.extend_from_slice(body);
    record
}

/// Reads a record back over the buffers of these extents.
fn read_over(record: &[u8], extents: &[u32]) -> Result<Broker, RecordError> {
    let buffer = |&id: &u32| (ExtentId(id), Imaginary.allocate(EXTENT).unwrap());
    Broker::from_record(record, Arc::new(Imaginary), Policy::default(), extents.iter().map(buffer).collect())
}

fn refusal(record: &[u8]) -> RecordError {
    read_over(record, &[1, 2]).expect_err("it was taken for a record")
}

#[test]
fn a_record_that_nobody_has_touched_is_read_back() {
    let record = sound();
    assert_eq!(record, around(&record[HEAD..]), "the tests below build records as the broker does");
    let broker = read_over(&record, &[1, 2]).unwrap();
    assert_eq!((broker.state.sessions.len(), broker.state.clients.len()), (1, 1));
}

#[test]
fn a_file_of_another_kind_is_no_record() {
    let mut foreign = sound();
    foreign[0] = b'G';
    for bytes in [&b""[..], b"KVBSTATE", &sound()[..HEAD - 1], &foreign, &[0; 4096]] {
        assert!(matches!(refusal(bytes), RecordError::Magic), "{} bytes", bytes.len());
    }
}

#[test]
fn a_record_of_an_older_or_a_newer_broker_is_refused_by_its_version() {
    for version in [0, VERSION - 1, VERSION + 1, u32::MAX] {
        let mut other = sound();
        other[8..12].copy_from_slice(&version.to_le_bytes());
        assert!(matches!(refusal(&other), RecordError::Version(v) if v == version));
        let said = refusal(&other).to_string();
        assert!(said.contains(&version.to_string()) && said.contains(&VERSION.to_string()), "{said}");
    }
}

#[test]
fn a_record_that_was_not_written_to_its_end_says_how_much_of_it_is_there() {
    let record = sound();
    let body = (record.len() - HEAD) as u64;
    for end in HEAD..record.len() {
        let there = (end - HEAD) as u64;
        let refused = refusal(&record[..end]);
        assert!(matches!(refused, RecordError::Length { said, got } if (said, got) == (body, there)));
    }
    let longer = [&record[..], b"!"].concat();
    assert!(matches!(refusal(&longer), RecordError::Length { said, got } if got == said + 1));
}

#[test]
fn a_record_with_one_byte_changed_is_refused_wherever_the_byte_is() {
    let record = sound();
    for at in 0..record.len() {
        let mut damaged = record.clone();
        damaged[at] ^= 0x10;
        let refused = refusal(&damaged);
        let right = match at {
            0..8 => matches!(refused, RecordError::Magic),
            8..12 => matches!(refused, RecordError::Version(_)),
            12..20 => matches!(refused, RecordError::Length { .. }),
            _ => matches!(refused, RecordError::Checksum),
        };
        assert!(right, "byte {at}: {refused}");
    }
}

#[test]
fn a_record_whose_body_is_no_state_does_not_decode() {
    let record = sound();
    let body = &record[HEAD..];
    for no_state in [&b""[..], &[0xff; 64], &body[..body.len() - 1]] {
        assert!(matches!(refusal(&around(no_state)), RecordError::Decode(_)));
    }
}

#[test]
fn a_record_with_more_than_a_state_in_it_is_refused() {
    let longer = [&sound()[HEAD..], b"more"].concat();
    assert!(matches!(refusal(&around(&longer)), RecordError::Longer(4)));
}

#[test]
fn a_record_of_an_extent_whose_buffer_is_not_there_names_it() {
    let refused = read_over(&sound(), &[2]).unwrap_err();
    assert!(matches!(refused, RecordError::NoBuffer(ExtentId(1))), "{refused}");
}

#[test]
fn a_record_whose_books_do_not_add_up_is_refused_with_what_is_wrong() {
    let record = recorded(|b| b.state.clients.values_mut().for_each(|c| c.sessions.clear()));
    match refusal(&record) {
        RecordError::Contradiction(why) => assert!(why.contains("is on no connection"), "{why}"),
        other => panic!("{other}"),
    }
}

/// One line for each type that a record holds: its fields in their order, each with what is written for it.
fn layout() -> String {
    let config = TracerConfig::default().record_samples_for_structs(true);
    let (mut tracer, mut samples) = (Tracer::new(config), Samples::new());
    // Not everything that has the shape of a profile is one, so this one stands for all.
    let layers = vec![(0, Layer { k_row: 512, v_row: 512 })];
    let windowed = Group { layers, window: Some(16) };
    let profile = Profile::new("p", "f16", Layout::PlaneMajor, 16, vec![windowed]).unwrap();
    tracer.trace_value(&mut samples, &profile).unwrap();
    tracer.trace_type::<State>(&samples).unwrap();
    // All variants of what the state has in more than one form.
    tracer.trace_type::<super::super::Eviction>(&samples).unwrap();
    tracer.trace_type::<Use>(&samples).unwrap();
    tracer.trace_type::<Block>(&samples).unwrap();
    tracer.trace_type::<Kv>(&samples).unwrap();
    tracer.trace_type::<Layout>(&samples).unwrap();
    tracer.trace_type::<How>(&samples).unwrap();
    tracer.trace_type::<What>(&samples).unwrap();
    let types = tracer.registry().expect("every variant of every enum of the state is visited");
    let mut text = format!("version {VERSION}\n");
    for (name, format) in types {
        writeln!(text, "{name}: {}", of_container(&format)).unwrap();
    }
    text
}

fn of_container(container: &ContainerFormat) -> String {
    match container {
        ContainerFormat::UnitStruct => "()".into(),
        ContainerFormat::NewTypeStruct(inner) => of(inner),
        ContainerFormat::TupleStruct(inner) => list(inner),
        ContainerFormat::Struct(fields) => named(fields),
        ContainerFormat::Enum(variants) => {
            let one = |(number, v): (&u32, &Named<VariantFormat>)| match &v.value {
                VariantFormat::Unit => format!("{number} {}", v.name),
                VariantFormat::NewType(inner) => format!("{number} {}({})", v.name, of(inner)),
                VariantFormat::Tuple(inner) => format!("{number} {}{}", v.name, list(inner)),
                VariantFormat::Struct(fields) => format!("{number} {} {}", v.name, named(fields)),
                VariantFormat::Variable(_) => unreachable!("the registry is whole"),
            };
            variants.iter().map(one).collect::<Vec<_>>().join(" | ")
        }
    }
}

fn named(fields: &[Named<Format>]) -> String {
    let one = |f: &Named<Format>| format!("{} {}", f.name, of(&f.value));
    format!("{{ {} }}", fields.iter().map(one).collect::<Vec<_>>().join(", "))
}

fn list(parts: &[Format]) -> String {
    format!("({})", parts.iter().map(of).collect::<Vec<_>>().join(", "))
}

fn of(format: &Format) -> String {
    match format {
        Format::TypeName(name) => name.clone(),
        Format::Option(inner) => format!("maybe {}", of(inner)),
        Format::Seq(inner) => format!("many {}", of(inner)),
        Format::Map { key, value } => format!("map {} to {}", of(key), of(value)),
        Format::Tuple(parts) => list(parts),
        Format::TupleArray { content, size } => format!("{size} {}", of(content)),
        plain => format!("{plain:?}").to_lowercase(),
    }
}

#[test]
fn what_a_record_holds_is_what_its_version_says() {
    let (now, known) = (layout(), include_str!("layout.txt"));
    let version = |text: &str| text.lines().next().map(str::to_owned);
    let raised = version(&now) != version(known);
    if raised && std::env::var_os("KVBROKER_WRITE_LAYOUT").is_some() {
        std::fs::write(concat!(env!("CARGO_MANIFEST_DIR"), "/src/broker/record/layout.txt"), &now).unwrap();
    }
    let differ: Vec<&str> = now.lines().filter(|line| !known.lines().any(|k| k == *line)).collect();
    assert!(
        now == known || raised,
        "the layout changed: raise VERSION of broker/record.rs. What differs: {differ:#?}"
    );
    assert_eq!(
        now, known,
        "VERSION was raised: write record/layout.txt anew, with KVBROKER_WRITE_LAYOUT=1 and this test"
    );
}
