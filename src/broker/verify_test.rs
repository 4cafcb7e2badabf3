//! The check of the books, checked: each thing that it claims to find is broken by hand and must be found.

use std::sync::Arc;

use super::{Broker, Policy};
use crate::client::{Client, ClientOptions, Embedded, OpenOptions, Session};
use crate::heap::Memfd;
use crate::id::{BlockId, ClientId, SessionId};
use crate::profile::Profile;
use crate::wire::Fault;

/// Two clients of one tenant: the first has a session of five blocks, three of them sealed and two of these pinned, the
/// second nothing but credit.
struct World {
    broker: Embedded,
    session: Session,
    client: Client,
    _other: Client,
}

impl World {
    fn new() -> Self {
        let heap = Arc::new(Memfd::new(false));
        let broker = Embedded::new(Broker::new(heap, 128 << 10, 6, 6, Policy::default()).unwrap());
        let options = || ClientOptions { credit_ahead: 0, ..ClientOptions::default() };
        let (client, other) =
            (Client::on(&broker, 7, options()).unwrap(), Client::on(&broker, 7, options()).unwrap());
        let profile = Profile::uniform("p", "f16", 2, 512, 512, 16).unwrap();
        let mine = client.profile(&profile).unwrap();
        let mut session = client.open(&mine, OpenOptions::default()).unwrap();
        session.ensure(80).unwrap();
        session.seal(&(0..48).collect::<Vec<u32>>()).unwrap();
        session.pin(32).unwrap();
        // The broker learns of the rest of the table with the next request about it.
        session.ensure(81).unwrap();
        session.trim(80).unwrap();
        other.profile(&profile).unwrap().reserve(2).unwrap();
        World { broker, session, client, _other: other }
    }
}

fn session(b: &Broker) -> SessionId {
    *b.state.sessions.keys().next().unwrap()
}

fn table(b: &Broker) -> Vec<BlockId> {
    b.state.sessions[&session(b)].table.clone()
}

fn credit(b: &Broker) -> (ClientId, BlockId) {
    let owner = *b.state.clients.keys().last().unwrap();
    (owner, b.state.pool.credit_of(owner)[0])
}

/// One thing that is to be found: what, how it comes to be, and what is said of it.
type Damage = (&'static str, fn(&mut Broker), &'static str);

const DAMAGES: [Damage; 12] = [
    (
        "a table names a block twice",
        |b| {
            let (id, block) = (session(b), table(b)[0]);
            b.state.sessions.get_mut(&id).unwrap().table.push(block);
        },
        "it stands in",
    ),
    (
        "a block has left a table without a word",
        |b| {
            let id = session(b);
            b.state.sessions.get_mut(&id).unwrap().table.pop();
        },
        "it stands in",
    ),
    (
        "a table names somebody's credit",
        |b| {
            let (id, (_, block)) = (session(b), credit(b));
            b.state.sessions.get_mut(&id).unwrap().table.push(block);
        },
        "in its table",
    ),
    (
        "a table names a block of an earlier life",
        |b| {
            let id = session(b);
            b.state.sessions.get_mut(&id).unwrap().table[4].generation -= 1;
        },
        "in its table",
    ),
    (
        "a session is on no connection",
        |b| {
            b.state.clients.values_mut().for_each(|c| c.sessions.clear());
        },
        "is on no connection",
    ),
    (
        "a block counts a table too many",
        |b| {
            let block = table(b)[0];
            b.state.pool.share([block.place], |_| ());
        },
        "counts 2 tables",
    ),
    (
        "a session takes a block for sealed that is not",
        |b| {
            let id = session(b);
            b.state.sessions.get_mut(&id).unwrap().names.push([0; 32]);
        },
        "as sealed",
    ),
    (
        "a block is pinned of which the index knows nothing",
        |b| {
            let block = table(b)[2];
            b.state.pool.pin(block.place, true);
        },
        "the prefix index names",
    ),
    (
        "the index names a block that nobody has sealed",
        |b| {
            let block = table(b)[3];
            let format = *b.state.formats.keys().next().unwrap();
            let (name, tenant) = ([9; 32], crate::id::Tenant(7));
            b.state.prefixes.publish(super::prefix::Publication {
                name,
                parent: None,
                block,
                tenant,
                format,
                priority: 0,
                windowed: false,
            });
        },
        "the prefix index names",
    ),
    (
        "a client has not the extent of its table",
        |b| {
            let (block, owner) = (table(b)[0], b.state.sessions[&session(b)].client);
            b.state.pool.remove_holder(block.place.extent, owner);
        },
        "in its table",
    ),
    (
        "a client has not the extent of its credit",
        |b| {
            let (owner, block) = credit(b);
            b.state.pool.remove_holder(block.place.extent, owner);
        },
        "which has not its extent",
    ),
    (
        "a buffer is gone",
        |b| {
            b.buffers.pop_first();
        },
        "buffers for",
    ),
];

#[test]
fn every_kind_of_damage_that_the_check_claims_to_find_is_found() {
    for (what, damage, said) in DAMAGES {
        let world = World::new();
        world.broker.with(|b| {
            b.verify().unwrap();
            damage(b);
            let found = b.verify().expect_err(what);
            assert!(found.contains(said), "{what}: {found}");
        });
        // What is broken by hand cannot be ended in order.
        std::mem::forget(world);
    }
}

#[test]
fn books_that_do_not_add_up_stop_grants_and_nothing_else() {
    let mut world = World::new();
    world.broker.with(|b| {
        let block = table(b)[3];
        b.state.pool.share([block.place], |_| ());
        b.check();
        assert!(b.frozen && b.status().frozen);
    });
    let refused = world.session.ensure(200).unwrap_err();
    assert_eq!(refused.fault(), Some(Fault::BrokerFault), "{refused}");
    // What is there is read and written, and given back.
    world.session.write_row(70, 0, crate::profile::Kv::K, &[5; 512]).unwrap();
    world.session.trim(64).unwrap();
    let before = world.broker.with(|b| b.ledger()["credit"]);
    drop(world.session);
    drop(world.client);
    assert!(world.broker.with(|b| b.ledger()["credit"]) <= before);
    assert_eq!(world.broker.with(|b| b.state.sessions.len()), 0);
}
