//! Messages of the protocol, one by one: what no state of the broker has to do with.

use kvbroker::wire::{self, Reader, WireError, Writer};
use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use kvbroker::profile::Profile;

/// A structure, then as many elements as it says.
fn counted<H, E>(body: &[u8], most: usize, count: impl Fn(&H) -> u32) -> Result<(), WireError>
where
    H: FromBytes + IntoBytes + Immutable + KnownLayout + Unaligned,
    E: FromBytes + IntoBytes + Immutable + Unaligned,
{
    let mut reader = Reader::new("the message", body);
    let head: &H = reader.one()?;
    let elements: &[E] = reader.many(count(head), most)?;
    reader.end()?;
    let mut writer = Writer::default();
    writer.put(head).put(elements);
    assert_eq!(writer.body(), body, "a message that was read is written as it was");
    Ok(())
}

/// A structure alone.
fn alone<H: FromBytes + IntoBytes + Immutable + KnownLayout + Unaligned>(
    body: &[u8],
) -> Result<(), WireError> {
    counted::<H, u8>(body, 0, |_| 0)
}

/// The one request with two lists: tokens, then blocks.
fn seal(body: &[u8]) -> Result<(), WireError> {
    let mut reader = Reader::new("the message", body);
    let head: &wire::Seal = reader.one()?;
    let tokens: &[U32] = reader.many(head.count.get(), wire::MAX_TOKENS)?;
    let used: &[wire::WireBlock] = reader.many(head.report.used.get(), wire::MAX_BLOCKS)?;
    reader.end()?;
    let mut writer = Writer::default();
    writer.put(head).put(tokens).put(used);
    assert_eq!(writer.body(), body, "a message that was read is written as it was");
    Ok(())
}

/// How each kind of message is laid out (`docs/protocol.md`). New ones at the end: seeds name them by their place.
type Shape = fn(&[u8]) -> Result<(), WireError>;
const SHAPES: &[Shape] = &[
    alone::<wire::Hello>,
    alone::<wire::Welcome>,
    alone::<wire::Format>,
    alone::<wire::Open>,
    alone::<wire::Reserve>,
    alone::<wire::Counted>,
    alone::<wire::ReturnExtent>,
    alone::<wire::Query>,
    alone::<wire::Room>,
    alone::<wire::Admit>,
    alone::<wire::Admission>,
    alone::<wire::ReclaimSession>,
    alone::<wire::Damaged>,
    alone::<wire::Opened>,
    alone::<wire::CloseWindow>,
    alone::<wire::GiveBack>,
    |b| counted::<wire::Report, wire::WireBlock>(b, wire::MAX_BLOCKS, |r| r.used.get()),
    |b| counted::<wire::Grow, wire::WireBlock>(b, wire::MAX_BLOCKS, |g| g.report.used.get()),
    |b| counted::<wire::Trim, wire::WireBlock>(b, wire::MAX_BLOCKS, |t| t.report.used.get()),
    |b| counted::<wire::Pin, wire::WireBlock>(b, wire::MAX_BLOCKS, |p| p.report.used.get()),
    |b| counted::<wire::Window, wire::WireBlock>(b, wire::MAX_BLOCKS, |w| w.report.used.get()),
    |b| counted::<wire::Free, wire::WireBlock>(b, wire::MAX_BLOCKS, |f| f.count.get()),
    |b| counted::<wire::Attach, U32>(b, wire::MAX_TOKENS, |a| a.count.get()),
    |b| counted::<wire::Skip, U32>(b, wire::MAX_TOKENS, |s| s.count.get()),
    |b| counted::<wire::Present, u8>(b, wire::MAX_TOKENS, |p| p.blocks.get()),
    |b| counted::<wire::ProfileHead, wire::LayerRow>(b, 1024, |p| p.layers.get()),
    |b| counted::<wire::Grant, wire::GrantedBlock>(b, wire::MAX_BLOCKS, |g| g.blocks.get()),
    alone::<wire::WindowMade>,
    alone::<wire::Refusal>,
    seal,
];

/// A message whose first byte says how it is to be read, and whose rest follows.
pub fn seeds() -> Vec<Vec<u8>> {
    let mut seeds: Vec<Vec<u8>> = (0..=SHAPES.len() as u8).map(|n| [&[n][..], &[0; 80]].concat()).collect();
    let mut writer = Writer::default();
    wire::put_profile(&mut writer, &Profile::reference(), 0);
    seeds.push([&[SHAPES.len() as u8], writer.body()].concat());
    let mut grow = Writer::default();
    let report = wire::Report { tokens: 20.into(), first: 0.into(), used: 2.into() };
    grow.put(&wire::Grow { report, want: 1.into(), least: 1.into() }).put(&[wire::WireBlock::default(); 2]);
    seeds.push([&[17], grow.body()].concat());
    seeds
}

fn profile(body: &[u8]) -> Result<(), WireError> {
    let profile = wire::read_profile(body)?;
    let mut writer = Writer::default();
    wire::put_profile(&mut writer, &profile, 0);
    assert_eq!(writer.body().len(), body.len());
    assert_eq!(wire::read_profile(writer.body()).as_ref(), Ok(&profile), "a profile survives the wire");
    let _ = (profile.slot_bytes(0, 4096), profile.bytes_at(u64::MAX >> 32));
    Ok(())
}

/// Whatever is accepted has exactly the length that its counts say.
pub fn run(data: &[u8]) -> bool {
    let Some((&kind, body)) = data.split_first() else { return false };
    if let Err(e) = wire::split(data) {
        super::check_words(&e);
    }
    // The same bytes as the body of a message whose header is right, and of one that is longer than it says.
    let mut message = Writer::start(kind.into(), 0, 1, 2);
    message.put(body);
    let mut message = message.finish();
    let (header, split) = wire::split(&message).expect("the length is right");
    assert_eq!((header.opcode.get(), split), (u16::from(kind), body));
    message.push(0);
    assert!(wire::split(&message).is_err());
    let shape = SHAPES.get(kind as usize % (SHAPES.len() + 1)).copied().unwrap_or(profile);
    let read = super::alloc::at_most((64 << 10) + 16 * data.len(), "reading a message", || shape(body));
    if let Err(e) = &read {
        super::check_words(e);
    }
    for label in body.chunks(32) {
        match wire::label_text(label) {
            Ok(text) => assert!(text.chars().count() <= 32 && !text.chars().any(char::is_control)),
            Err(e) => super::check_words(&e),
        }
    }
    read.is_ok()
}
