//! Rest over a heap that must ask: who is told to give an extent back, and how often.

use std::sync::Arc;

use crate::broker::{Broker, Policy};
use crate::client::{Admission, Client, ClientOptions, Embedded, OpenOptions, Session};
use crate::heap::{Backend, Buffer, Heap, HeapError, Memfd};
use crate::profile::Profile;
use crate::wire::{self, Event};

use super::{Duration, Instant};

const EXTENT: u64 = 128 << 10;
/// Tokens of an extent: four blocks of 16.
const FULL: usize = 64;

/// A heap that cannot take memory from who holds it.
#[derive(Debug)]
struct Asking(Memfd);

impl Heap for Asking {
    fn backend(&self) -> Backend {
        self.0.backend()
    }

    fn name(&self) -> String {
        self.0.name()
    }

    fn allocate(&self, bytes: u64) -> Result<Buffer, HeapError> {
        self.0.allocate(bytes)
    }

    fn revokes(&self) -> bool {
        false
    }
}

struct World {
    broker: Embedded,
    client: Client,
    now: Instant,
}

impl World {
    fn new() -> Self {
        let heap = Arc::new(Asking(Memfd::new(false)));
        let broker = Embedded::new(Broker::new(heap, EXTENT, 4, 4, Policy::default()).unwrap());
        let options = ClientOptions { credit_ahead: 0, ..ClientOptions::default() };
        let client = Client::on(&broker, 7, options).unwrap();
        World { broker, client, now: Instant::now() }
    }

    fn open(&self) -> Session {
        let profile = Profile::uniform("p", "f16", 2, 512, 512, 16).unwrap();
        self.client.open(&self.client.profile(&profile).unwrap(), OpenOptions::default()).unwrap()
    }

    /// A session comes, fills an extent, and goes.
    fn use_one(&self) {
        self.open().ensure(FULL).unwrap();
    }

    /// Many looks later, each one longer than a rest after the one before: how often clients were told to give an
    /// extent back. The client of this test never hears of it, so it does not answer.
    fn asked_after(&mut self, looks: u32) -> usize {
        let mut asked = 0;
        for _ in 0..looks {
            self.now += Duration::from_millis(600);
            asked += self.broker.with(|b| {
                b.tick(self.now);
                b.verify().unwrap();
                let event = |message: &[u8]| wire::split(message).unwrap().0.opcode.get();
                let to_give_back = wire::EVENT | Event::GiveBack as u16;
                b.outputs().iter().filter(|o| event(&o.message) == to_give_back).count()
            });
        }
        asked
    }
}

#[test]
fn who_does_not_answer_is_asked_once_and_again_only_after_using_the_extent() {
    let mut w = World::new();
    w.use_one();
    assert_eq!(w.asked_after(1), 0, "it is left with its tenant for a moment");
    assert_eq!(w.asked_after(1), 1);
    assert_eq!(w.asked_after(200), 0, "nobody answered: it stays where it is");
    assert_eq!(w.broker.with(|b| b.next_rest()), None, "and is not looked at any more");
    w.use_one();
    assert_eq!(w.asked_after(200), 1, "it has been used since");
    assert_eq!(w.broker.with(|b| b.next_rest()), None);
}

#[test]
fn an_extent_that_a_promise_counts_on_is_not_asked_for_until_the_promise_ends() {
    let mut w = World::new();
    w.use_one();
    let mut promised = w.open();
    assert_eq!(promised.admit(FULL, false).unwrap(), Admission::Admitted);
    assert_eq!(w.asked_after(20), 0);
    drop(promised);
    assert_eq!(w.asked_after(2), 1);
}
