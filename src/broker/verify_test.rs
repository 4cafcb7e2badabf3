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

const DAMAGES: [Damage; 13] = [
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
        "a session has a number that its tenant will come to give again",
        |b| {
            let id = session(b);
            *b.state.session_numbers.get_mut(&id.tenant).unwrap() = id.number - 1;
        },
        "was never given",
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
fn a_check_in_pieces_finds_what_the_whole_one_finds_in_tables_windows_and_places() {
    for (what, damage, said) in DAMAGES {
        if what == "a buffer is gone" {
            // That is no table, no window and no place: the whole check's.
            continue;
        }
        let world = World::new();
        world.broker.with(|b| {
            while !b.check_at_most(5).through {}
            assert!(!b.frozen && b.false_alarms() == 0);
            damage(b);
            b.check_at_most(5);
            assert!(b.is_checking() || b.frozen, "{what}");
            while b.is_checking() {
                b.check_at_most(5);
            }
            assert!(b.frozen, "{what} ({said}) was not found");
        });
        std::mem::forget(world);
    }
}

/// A session of `blocks` blocks of a page each and `twins` twins of it, in a broker without checks of its own.
fn crowd(blocks: usize, twins: usize) -> (Embedded, Vec<Session>, Client) {
    let page = crate::map::page_bytes() as u64;
    let policy = Policy { audit: false, table_blocks_per_tenant: Some(1 << 20), ..Policy::default() };
    let heap = Arc::new(Memfd::new(false));
    let broker = Embedded::new(Broker::new(heap, 32 * page, 8, 8, policy).unwrap());
    let client =
        Client::on(&broker, 7, ClientOptions { credit_ahead: 0, ..ClientOptions::default() }).unwrap();
    let row = (page / 8) as u32;
    let profile = client.profile(&Profile::uniform("page", "f16", 1, row, row, 4).unwrap()).unwrap();
    let mut session = client.open(&profile, OpenOptions::default()).unwrap();
    session.ensure(blocks * 4).unwrap();
    let mut sessions: Vec<Session> = (0..twins).map(|_| session.fork().unwrap()).collect();
    sessions.push(session);
    (broker, sessions, client)
}

#[test]
fn one_call_visits_no_more_than_its_bound_however_many_blocks_tables_name() {
    let (broker, sessions, client) = crowd(200, 99);
    broker.with(|b| {
        let named = b.tables.total();
        assert_eq!(named, 200 * 100);
        let (mut calls, mut visited) = (0, 0);
        loop {
            let checked = b.check_some();
            assert!(checked.visited <= super::audit::PER_CALL, "{checked:?}");
            (calls, visited) = (calls + 1, visited + checked.visited);
            if checked.through {
                break;
            }
        }
        assert!(calls >= 3 && visited as u64 > named, "{calls} calls have visited {visited}");
        assert!(!b.frozen && b.false_alarms() == 0);
        // A table too many, counted somewhere in the middle of all that.
        let place = table(b)[100].place;
        b.state.pool.share([place], |_| {});
        while !b.check_some().through {}
        assert!(b.frozen);
    });
    std::mem::forget((broker, sessions, client));
}

#[test]
fn what_changes_between_two_pieces_of_a_check_raises_no_false_alarm() {
    let (broker, mut sessions, client) = crowd(40, 20);
    for round in 0..400 {
        broker.with(|b| b.check_at_most(7));
        let at = round % sessions.len();
        match round % 5 {
            0 => {
                let keep = sessions[at].tokens().min(4 * (round % 20));
                sessions[at].trim(keep).unwrap();
            }
            1 => sessions[at].ensure(4 * (round % 80)).unwrap_or_default(),
            2 => drop(sessions.swap_remove(at)),
            3 => {
                let twin = sessions[at].fork().unwrap();
                sessions.push(twin);
            }
            _ => {}
        }
        broker.with(|b| assert!(!b.frozen && b.false_alarms() == 0, "round {round}"));
    }
    broker.with(|b| b.verify().unwrap());
    drop((sessions, client));
}

#[test]
fn a_tenant_names_no_more_blocks_than_its_bound_and_is_told_what_helps() {
    let limit = |b: &mut Broker, most| b.policy.table_blocks_per_tenant = most;
    let (broker, mut sessions, client) = crowd(100, 1);
    // By default: twice the places of the pool, or the reference model's blocks for each session of a connection.
    broker.with(|b| {
        limit(b, None);
        assert_eq!(b.most_named(), (2 * 8 * 32).max(u64::from(b.policy.sessions_per_connection) * 3));
        limit(b, Some(320));
    });
    let twin = sessions[1].fork().unwrap();
    sessions.push(twin);
    let refused = sessions[1].fork().err().unwrap();
    assert_eq!(refused.fault(), Some(Fault::OverLimit), "{refused}");
    let text = refused.to_string();
    for part in ["uid 7 name 300", "100 more", "limit of 320", "limits.table-blocks", "close sessions"] {
        assert!(text.contains(part), "{text}");
    }
    // Nothing has changed, and what it has goes on: what it writes is its own, and comes from the pool.
    broker.with(|b| {
        assert_eq!((b.state.sessions.len(), b.blocks_named(crate::id::Tenant(7))), (3, 300));
        b.verify().unwrap();
    });
    sessions[0].ensure(404).unwrap();
    // The same for what is attached, by what it could come to.
    sessions[1].seal(&(0..160).collect::<Vec<u32>>()).unwrap();
    let profile = client.profile(&Profile::uniform("page", "f16", 1, 512, 512, 4).unwrap()).unwrap();
    let mut other = client.open(&profile, OpenOptions::default()).unwrap();
    let refused = other.attach(&(0..160).collect::<Vec<u32>>()).err().unwrap();
    assert_eq!(refused.fault(), Some(Fault::OverLimit), "{refused}");
    assert_eq!(other.attach(&(0..40).collect::<Vec<u32>>()).unwrap(), 39);
    // With room there is room.
    drop(sessions.pop());
    assert!(other.fork().is_ok());
    sessions[1].fork().unwrap();
}

#[test]
fn prompts_that_begin_alike_are_pinned_as_often_as_the_bound_on_names_allows_and_then_refused() {
    let (broker, mut sessions, _client) = crowd(100, 0);
    let named = |broker: &Embedded| broker.with(|b| b.blocks_named(crate::id::Tenant(7)));
    broker.with(|b| b.policy.table_blocks_per_tenant = Some(390));
    let session = &mut sessions[0];
    session.seal(&(0..400).collect::<Vec<u32>>()).unwrap();
    assert_eq!(session.pin(400).unwrap(), 100);
    assert_eq!(named(&broker), 100 + 100, "a table and a pin");
    // The same chain again names nothing more, a shorter one names each of its blocks once more.
    session.pin(400).unwrap();
    assert_eq!((session.pin(396).unwrap(), named(&broker)), (0, 299));
    let pins = |b: &mut Broker| b.state.prefixes.clone();
    let before = broker.with(pins);
    let refused = session.pin(392).unwrap_err();
    assert_eq!(refused.fault(), Some(Fault::OverLimit), "{refused}");
    let text = refused.to_string();
    for part in ["pins of uid 7 name 299", "98 more", "limit of 390", "limits.table-blocks", "unpin prefixes"]
    {
        assert!(text.contains(part), "{text}");
    }
    assert!(broker.with(pins) == before, "what is refused pins nothing");
    // With one less there is room; a bound that is lower than what there is takes nothing away.
    session.unpin(396).unwrap();
    session.pin(392).unwrap();
    broker.with(|b| b.policy.table_blocks_per_tenant = Some(10));
    session.pin(392).unwrap();
    session.unpin(400).unwrap();
    session.unpin(392).unwrap();
    assert_eq!(named(&broker), 100);
    broker.with(|b| b.verify().unwrap());
    drop(sessions);
}

#[test]
fn a_pin_is_counted_again_when_the_state_is_read_back() {
    let (broker, mut sessions, _client) = crowd(20, 0);
    sessions[0].seal(&(0..80).collect::<Vec<u32>>()).unwrap();
    sessions[0].pin(80).unwrap();
    broker.with(|b| {
        let recorded = b.record();
        let again: super::State = postcard::from_bytes(&recorded[52..]).unwrap();
        assert_eq!(super::tables::Tables::count(&again), b.tables);
        assert_eq!(b.tables.of(crate::id::Tenant(7)), 40);
        // A count that is wrong is found.
        let pin = b.state.prefixes.pins().next().unwrap().1.clone();
        b.tables.change_pin(Some(&pin), None);
        assert!(b.verify().unwrap_err().contains("names of pins"));
        b.tables.change_pin(None, Some(&pin));
        b.verify().unwrap();
    });
    drop(sessions);
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
