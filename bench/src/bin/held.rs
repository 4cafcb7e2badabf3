//! Row `held`: the memory that the pool gives away for a mixed load, over the bytes of the tokens that live; and four
//! sessions with a common prompt against four without.
//!
//! Counts, not times: what is held comes from the broker's own ledger, what lives from the sessions' lengths.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvbroker::broker::{Broker, Policy};
use kvbroker::client::{Client, ClientOptions, ClientProfile, Embedded, OpenOptions, Session};
use kvbroker::heap::Memfd;
use kvbroker::profile::Profile;
use kvbroker_bench::{Values, at_most, reported};

const EXTENT: u64 = 3 << 20;
const EXTENTS: u32 = 85;
const SESSIONS: usize = 8;
/// Sessions that end before the row does.
const ENDED: usize = 600;
const TENANT: u32 = 1000;
/// Each session decodes ten tokens in a second, as on the boards that this is for.
const STEP: Duration = Duration::from_millis(100);

fn main() {
    let reference = Profile::reference();
    // SmolLM2 135M: 30 layers, 3 KV heads of dimension 64.
    let smol = Profile::uniform("smollm2-135m", "f16", 30, 384, 384, 16).expect("a profile");
    let one = load(&reference, false);
    at_most("held/mixed", one.over_live(), 1.15, one.note("8 sessions of one process"));
    let tokens = one.live_blocks as f64;
    reported(
        "held/mixed-tail",
        one.tail / tokens,
        "x",
        "in the last blocks of tables, over live tokens' bytes",
    );
    reported("held/mixed-credit", one.credit / tokens, "x", "ahead of need");
    reported("held/mixed-stranded", one.stranded / tokens, "x", "free places beside blocks in use");
    reported(
        "held/mixed-idle",
        one.idle / tokens,
        "x",
        "in extents of the tenant without a block in use, for the moment that they stay with it",
    );
    reported("held/mixed-without-idle", one.over_live() - one.idle / tokens, "x", "beside blocks in use");
    let eight = load(&reference, true);
    reported("held/mixed-8-processes", eight.over_live(), "x", eight.note("8 processes of one session each"));
    let small = load(&smol, false);
    reported(
        "held/mixed-smollm2",
        small.over_live(),
        "x",
        small.note("8 sessions of one process, 22.5 KiB per token"),
    );
    shared_prompt(&reference);
}

fn broker() -> Embedded {
    let heap = Arc::new(Memfd::new(false));
    Embedded::new(Broker::new(heap, EXTENT, EXTENTS, EXTENTS, Policy::default()).expect("a pool of 255 MiB"))
}

/// Sums over all steps, in bytes.
#[derive(Default)]
struct Held {
    live_blocks: u64,
    tail: f64,
    credit: f64,
    stranded: f64,
    /// In extents of the tenant without a block in use: whoever needs one gets it.
    idle: f64,
    steps: usize,
    refused: usize,
}

impl Held {
    fn over_live(&self) -> f64 {
        1.0 + (self.tail + self.credit + self.stranded + self.idle) / self.live_blocks as f64
    }

    fn note(&self, who: &str) -> String {
        format!(
            "held / live tokens: {who}, {ENDED} ended, lengths log-uniform 16 to 2048, half of it prompt, 1 credit block; mean \
             of {} steps, {} refusals",
            self.steps, self.refused
        )
    }
}

/// Steady churn: whoever has reached its length ends, and another one begins.
fn load(profile: &Profile, processes: bool) -> Held {
    let broker = broker();
    let client = || Client::on(&broker, TENANT, ClientOptions::default()).expect("a client");
    let clients: Vec<Client> = (0..if processes { SESSIONS } else { 1 }).map(|_| client()).collect();
    let profiles: Vec<ClientProfile> =
        clients.iter().map(|c| c.profile(profile).expect("the profile fits")).collect();
    let per_token = profile.bytes_per_token() as f64;
    let mut values = Values(7);
    let mut uniform = || f64::from(values.bits()) / f64::from(1u32 << 31);
    let mut live: Vec<Option<(Session, usize)>> = (0..SESSIONS).map(|_| None).collect();
    let (mut held, mut ended) = (Held::default(), 0);
    // The broker goes by the latest time that it was told: this clock is ahead of the real one.
    let mut now = Instant::now() + Duration::from_secs(3600);
    while ended < ENDED {
        now += STEP;
        broker.with(|b| b.tick(now));
        for (i, place) in live.iter_mut().enumerate() {
            let at = i % clients.len();
            match place {
                None => {
                    let length = (16.0 * 128f64.powf(uniform())) as usize;
                    let options = OpenOptions { zero: false, ..OpenOptions::default() };
                    let mut session = clients[at].open(&profiles[at], options).expect("a session");
                    match session.ensure((length / 2).max(1)) {
                        Ok(()) => *place = Some((session, length)),
                        Err(_) => held.refused += 1,
                    }
                }
                Some((session, length)) => {
                    let next = session.tokens() + 1;
                    if next > *length || session.ensure(next).is_err() {
                        held.refused += usize::from(next <= *length);
                        ended += 1;
                        *place = None;
                    }
                }
            }
        }
        // The first sessions begin all at once: that is not the steady load.
        if ended < SESSIONS * 4 {
            continue;
        }
        let tokens: usize = live.iter().flatten().map(|(s, _)| s.tokens()).sum();
        let blocks: usize = live.iter().flatten().map(|(s, _)| s.table().len()).sum();
        let ledger = broker.with(|b| b.ledger());
        // What a client has not reported yet stands in the broker's books as credit, or as a block of a table that has
        // ended already: what is held is what is neither free nor lost at the end of an extent.
        let slot = profiles[0].slot_bytes() as f64;
        let all = f64::from(EXTENTS) * EXTENT as f64 - ledger["free"] as f64 - ledger["waste"] as f64;
        let map = broker.with(|b| b.map());
        let is_idle =
            |e: &&kvbroker::broker::ExtentReport| e.uid.is_some() && e.slots.chars().all(|s| s == '.');
        let idle = map.extents.iter().filter(is_idle).map(|e| e.slots.len() as f64 * slot).sum::<f64>();
        held.idle += idle;
        let stranded = ledger["stranded"] as f64 - idle;
        held.live_blocks += (tokens as f64 * per_token) as u64;
        held.tail += blocks as f64 * slot - tokens as f64 * per_token;
        held.stranded += stranded;
        held.credit += all - idle - stranded - blocks as f64 * slot;
        held.steps += 1;
    }
    held
}

/// Four sessions of 256 tokens of prompt and 128 of their own: the prompt once, or four times. Without credits.
fn shared_prompt(profile: &Profile) {
    const PROMPT: usize = 256;
    const OWN: usize = 128;
    let used = |shared: bool| {
        let broker = broker();
        let options = ClientOptions { credit_ahead: 0, ..ClientOptions::default() };
        let client = Client::on(&broker, TENANT, options).expect("a client");
        let profile = client.profile(profile).expect("the profile fits");
        let prompt: Vec<u32> = (0..PROMPT as u32 + 1).collect();
        let mut sessions = Vec::new();
        for _ in 0..4 {
            let open = OpenOptions { model: "m".into(), zero: false, ..OpenOptions::default() };
            let mut session = client.open(&profile, open).expect("a session");
            let found = if shared { session.attach(&prompt).expect("a look-up") } else { 0 };
            session.ensure(PROMPT).expect("room");
            if shared && found == 0 {
                session.seal(&prompt[..PROMPT]).expect("sealed");
            }
            session.ensure(PROMPT + OWN).expect("room");
            sessions.push(session);
        }
        profile.release_credit().expect("given back");
        let ledger = broker.with(|b| b.ledger());
        (ledger["private"] + ledger["shared"] + ledger["credit"]) as f64
    };
    let (once, each) = (used(true), used(false));
    at_most(
        "held/shared-prompt",
        once / each,
        0.5,
        format!(
            "4 sessions of 256 shared and 128 own tokens, {:.1} MiB, against none shared, {:.1} MiB",
            once / 1048576.0,
            each / 1048576.0
        ),
    );
}
