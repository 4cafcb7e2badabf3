//! The broker's state as a record.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use kvbroker::broker::{Broker, Policy};
use kvbroker::heap::{Heap as _, Imaginary};
use kvbroker::id::ExtentId;
use sha2::{Digest as _, Sha256};

use super::broker::World;

/// Bytes of a record before its body (`broker::record`).
const HEAD: usize = 52;
/// The version that the broker writes, as it writes it.
static VERSION: LazyLock<[u8; 4]> =
    LazyLock::new(|| World::new().broker.record()[8..12].try_into().expect("four bytes"));

/// The bodies of records: of a broker that is empty, and of some that have done a lot.
pub fn seeds() -> Vec<Vec<u8>> {
    let body = |broker: &Broker| broker.record()[HEAD..].to_vec();
    let busy = super::broker::seeds().into_iter().map(|script| {
        let mut world = World::new();
        world.play(&script);
        body(&world.broker)
    });
    busy.chain([body(&World::new().broker)]).collect()
}

fn forge(body: &[u8]) -> Vec<u8> {
    let mut bytes = b"KVBSTATE".to_vec();
    bytes.extend(*VERSION);
    bytes.extend((body.len() as u64).to_le_bytes());
    bytes.extend(Sha256::digest(body));
    bytes.extend(body);
    bytes
}

fn rebuild(record: &[u8]) -> bool {
    let buffer = |id| (ExtentId(id), Imaginary.allocate(super::broker::EXTENT).expect("it takes no memory"));
    let buffers: BTreeMap<_, _> = (1..=32).map(buffer).collect();
    let policy = Policy { audit: false, ..Policy::default() };
    let most = (4 << 20) + 256 * record.len();
    let rebuilt = super::alloc::at_most(most, "reading a record", || {
        Broker::from_record(record, Arc::new(Imaginary), policy, buffers)
    });
    match rebuilt {
        Ok(broker) => {
            assert_eq!(broker.verify(), Ok(()), "a broker that is rebuilt adds up");
            true
        }
        Err(e) => {
            super::check_words(&e);
            false
        }
    }
}

/// The input as a record, as the body of one with the right checksum, and such a one cut. A record that is read back
/// says the same as when it is written again.
pub fn run(data: &[u8]) -> bool {
    rebuild(data);
    let forged = forge(data);
    rebuild(&forged[..forged.len() - 1]);
    rebuild(&forged)
}
