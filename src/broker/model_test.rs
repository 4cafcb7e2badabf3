//! The broker against a naive model of what it promises, step by step.
//!
//! The model knows nothing of pools, ledgers or indices: it remembers which blocks each client was told it has, what
//! each session's table must be, and which token sequences were sealed. From that it says for every request what must
//! come of it; which cached block is evicted is the broker's choice, how many and whether it may is not. Requests are real messages, wrong ones among them; the worker's jobs are run late and in no fixed
//! rhythm; now and then the broker is replaced by one that was read back from its own record. Half of the cases run over
//! a heap that can take memory from its holders, half over one that must ask for it, whose buffers somebody may hold on
//! to; both may be without memory.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use super::prefix::Digest;
use super::tenant::USUAL_PRIORITY;
use super::{
    Borrower, Broker, Done, Evict, HoldId, Job, LimitChange, Outcome, Output, Peer, Policy, StoreOutcome,
    StorePolicy, StoreReport, StoredReport, TenantPolicy, Waiting,
};
use crate::heap::{Backend, Buffer, Heap, HeapError, Held, Imaginary, Renewal};
use crate::id::{BlockId, ClientId, ExtentId, Place, Tenant};
use crate::map::page_bytes;
use crate::profile::{Group, Layer, Layout, Profile};
use crate::store::{Hex, Location};
use crate::wire::{self, Event, Fault, Reader, Verb, Verdict, Writer};

/// Extents, each with its owner.
type Owners = Vec<(u32, ExtentId)>;

const EXTENTS: u32 = 6;
const PAGES: u64 = 4;
/// The tenant with a limit, and its limit in extents; the one with a reserve.
const LIMITED: (u32, u32) = (1002, 2);
const RESERVED: (u32, u32) = (1001, 1);
/// Bytes that a tenant may pin, in pages.
const PINNED: u64 = 6;
/// Blocks that the tables and pins of a tenant may name.
const NAMED: u64 = 20;

/// Geometries: tokens per block, slots per extent.
const FORMATS: [(u32, u32); 3] = [(2, 4), (4, 1), (1, 4)];
/// Their sliding windows in tokens.
const WINDOWS: [Option<u32>; 3] = [None, None, Some(3)];

fn profile(format: usize) -> Profile {
    let page = page_bytes() as u32;
    let (tokens, _) = FORMATS[format];
    let slot = if format == 1 { 3 * page } else { page };
    let layer = Layer { k_row: slot / tokens / 2, v_row: slot / tokens / 2 };
    let group = Group { layers: vec![(0, layer)], window: WINDOWS[format] };
    Profile::new(format!("m{format}"), "f16", Layout::PlaneMajor, tokens, vec![group]).unwrap()
}

/// A heap without memory, whose buffers have as many other holders, and which has as little memory, as the test says.
#[derive(Debug)]
struct TestHeap {
    revokes: bool,
    fate: Mutex<Fate>,
}

/// What the heap does next.
#[derive(Debug, Clone, Copy, Default)]
struct Fate {
    others: u64,
    no_memory: bool,
}

impl Heap for TestHeap {
    fn backend(&self) -> Backend {
        Backend::Imaginary
    }

    fn name(&self) -> String {
        "test".into()
    }

    fn allocate(&self, bytes: u64) -> Result<Buffer, HeapError> {
        if self.fate.lock().unwrap().no_memory {
            let source = std::io::Error::from_raw_os_error(libc::ENOMEM);
            return Err(HeapError::NoMemory { heap: self.name(), bytes, source, advice: "wait" });
        }
        Imaginary.allocate(bytes)
    }

    fn revokes(&self) -> bool {
        self.revokes
    }

    fn renew(&self, old: Arc<Buffer>) -> Renewal {
        let others = self.fate.lock().unwrap().others;
        if others > 0 {
            return Renewal::Held(Held { buffer: old, count: 1 + others });
        }
        Renewal::of(self.allocate(old.bytes()))
    }
}

/// Numbers that a case is made of: each is used once.
struct Dice<'a>(std::slice::Iter<'a, u32>);

impl Dice<'_> {
    fn roll(&mut self, below: usize) -> usize {
        self.0.next().map_or(0, |n| *n as usize % below.max(1))
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.roll(n) == n - 1
    }

    fn pick<T: Clone>(&mut self, from: &[T]) -> Option<T> {
        let at = self.roll(from.len());
        from.get(at).cloned()
    }
}

#[derive(Debug, Clone, Default)]
struct Report {
    tokens: u64,
    first: u32,
    blocks: Vec<BlockId>,
}

#[derive(Debug, Clone)]
enum Ask {
    Open { format: usize, max_tokens: u64, priority: u32 },
    Admit { tokens: u64, evict: bool },
    Reserve { format: usize, want: u32 },
    Grow { report: Report, want: u32, least: u32 },
    Trim { report: Report, tokens: u64, head: u32, release: bool },
    Free { blocks: Vec<BlockId> },
    Fork { report: Report },
    Seal { report: Report, from: u32, tokens: Vec<u32> },
    Pin { report: Report, blocks: u32, on: bool },
    Attach { tokens: Vec<u32>, more: bool },
    Skip { from: u32, tokens: Vec<u32> },
    Return { extent: ExtentId },
    Query { format: usize },
    Close { report: Report },
    Hello,
}

/// What must come of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Must {
    Refuse(Fault),
    Wait,
    /// Blocks of a format as new credit: from as many to as many blocks; for a session if one asks.
    Grant {
        format: usize,
        session: Option<u64>,
        from: u64,
        to: u64,
    },
    /// These blocks with these flags, and this many tokens.
    Blocks {
        tokens: u64,
        blocks: Vec<(BlockId, u32)>,
    },
    Session,
    Verdict {
        verdict: Verdict,
        promised: u32,
        blocks: u64,
    },
    Count {
        blocks: u32,
        duplicates: u32,
    },
    Room {
        capacity: u64,
        free: u64,
        held: u64,
    },
    /// Which blocks are published.
    Present(Vec<u8>),
    Nothing,
}

/// A sequence of tokens of one tenant under one geometry: all that tells a block's contents.
type Name = (u32, usize, Vec<u32>);

#[derive(Debug, Clone, Default)]
struct Sequence {
    client: u64,
    format: usize,
    tokens: u64,
    head: u32,
    table: Vec<BlockId>,
    priority: u8,
    promised: u64,
    admitted: u64,
    /// Names of the sealed blocks from the start.
    names: Vec<Name>,
}

impl Sequence {
    fn end(&self) -> u32 {
        self.head + self.table.len() as u32
    }
    fn per_block(&self) -> u64 {
        FORMATS[self.format].0.into()
    }
}

#[derive(Debug, Clone, Default)]
struct Life {
    credit: Option<u64>,
    sealed: bool,
    /// Chains that were pinned and go through it.
    pins: BTreeSet<Name>,
    published: Option<Name>,
    /// Its session was ended, and this client may still write there.
    suspect: Option<u64>,
}

/// What a tenant gets.
#[derive(Debug, Clone, Copy)]
struct Terms {
    reserve: u64,
    limit: u64,
    priority: u8,
}

#[derive(Debug, Clone)]
struct Waiter {
    number: u64,
    ask: Ask,
    session: u64,
    /// What has been promised and waits for zeros only.
    promised: Option<Must>,
}

#[derive(Debug, Default)]
struct Model {
    /// Client to uid and the formats' numbers.
    clients: BTreeMap<u64, (u32, Vec<u32>)>,
    /// By birth, over all tenants.
    sessions: BTreeMap<u64, Sequence>,
    /// Of every session that ever was, by birth: its tenant, and what that one calls it.
    numbers: BTreeMap<u64, (u32, u64)>,
    /// Blocks in use.
    lives: BTreeMap<BlockId, Life>,
    /// The newest life of each place that was ever granted, and to whom that was.
    newest: BTreeMap<Place, (u64, u64)>,
    /// Extents in a tenant's hands: uid, format, and the clients that know them.
    owned: BTreeMap<ExtentId, (u32, usize, BTreeSet<u64>)>,
    /// Requests that would have named too many blocks.
    overnamed: u64,
    /// Of each pinned chain, how many blocks it names.
    pins: BTreeMap<Name, usize>,
    clean: u64,
    renewing: u64,
    waiters: BTreeMap<u64, Waiter>,
    terms: BTreeMap<u32, Terms>,
    revision: u64,
    /// Sessions that were asked to make room, and until when.
    wanted: BTreeMap<u64, Instant>,
    /// By client: sessions that were ended, and the blocks that may still be written.
    lost: BTreeMap<(u64, u64), Vec<BlockId>>,
    /// Evictions that the last request may have made: of the tenant's own, and whether whole extents too.
    evictions: (u64, bool),
    /// The heap can take memory from its holders.
    revokes: bool,
    /// Extents that are asked back, and until when.
    asked: BTreeMap<ExtentId, Instant>,
    /// When a block of an extent came to be held by nobody last, by a clock of its own; and those that nobody held before this step.
    warmth: BTreeMap<ExtentId, u64>,
    clock: u64,
    cached: BTreeSet<BlockId>,
    /// The chain that was pinned last.
    pinned: Option<Name>,
    /// Clients that were told to close an extent and have neither said so nor got it again.
    told: BTreeSet<(ExtentId, u64)>,
    /// How often the worker found an extent in others' hands.
    found_held: BTreeMap<ExtentId, u32>,
    quarantined: BTreeSet<ExtentId>,
    /// Whose each extent was.
    was: BTreeMap<ExtentId, u32>,
    missing: u64,
    /// With the kernel, for holds.
    lent: u64,
    /// Of the missing ones, those that were lent and that the kernel has not refused.
    expected: u64,
    now: Option<Instant>,
    /// Extents whose descriptors went to a client.
    met: BTreeSet<ExtentId>,
    /// Nothing begins.
    draining: bool,
}

impl Model {
    /// A session is born to a client: how many there were before it in all, and what its tenant calls it.
    fn born(&mut self, client: u64) -> (u64, u64) {
        let uid = self.clients[&client].0;
        let number = 1 + self.numbers.values().filter(|(of, _)| *of == uid).count() as u64;
        let id = 1 + self.numbers.len() as u64;
        self.numbers.insert(id, (uid, number));
        (id, number)
    }

    /// What the client says when it means a session. Another tenant's it has no word for.
    fn called(&self, client: u64, session: u64) -> u64 {
        match self.numbers.get(&session) {
            Some((uid, number)) if *uid == self.clients[&client].0 => *number,
            Some(_) => 1 << 40 | session,
            None => session,
        }
    }

    /// Which session a client's tenant calls so.
    fn meant(&self, client: u64, number: u64) -> u64 {
        let named = (self.clients[&client].0, number);
        *self.numbers.iter().find(|(_, n)| **n == named).expect("a session of this tenant").0
    }

    fn refs(&self, block: BlockId) -> usize {
        self.sessions.values().flat_map(|s| &s.table).filter(|b| **b == block).count()
    }

    fn in_use(&self, extent: ExtentId) -> u64 {
        self.lives.keys().filter(|b| b.place.extent == extent).count() as u64
    }

    fn terms(&self, uid: u32) -> Terms {
        self.terms.get(&uid).copied().unwrap_or(Terms {
            reserve: 0,
            limit: u64::MAX,
            priority: USUAL_PRIORITY,
        })
    }

    fn extents(&self) -> u64 {
        self.clean + self.renewing + self.lent + (self.owned.len() + self.quarantined.len()) as u64
    }

    /// Extents that are clean, or will be.
    fn soon(&self) -> u64 {
        self.clean + self.renewing + self.expected
    }

    fn capacity(&self, uid: u32, format: usize) -> u64 {
        let reserved: u64 = self.terms.iter().filter(|(u, _)| **u != uid).map(|(_, t)| t.reserve).sum();
        (self.extents() + self.expected).saturating_sub(reserved).min(self.terms(uid).limit)
            * u64::from(FORMATS[format].1)
    }

    fn owned_by(&self, uid: u32) -> u64 {
        self.owned.values().filter(|o| o.0 == uid).count() as u64
    }

    /// Extents that count against the tenant's limit.
    fn charged_by(&self, uid: u32) -> u64 {
        // One that was filled from a file and has gone to nobody is nobody's.
        let kept = self.quarantined.iter().filter(|e| self.met.contains(e) && self.was.get(e) == Some(&uid));
        let kept = kept.count();
        self.owned_by(uid) + kept as u64
    }

    fn free_places(&self, uid: u32, format: usize) -> u64 {
        let mine = self.owned.iter().filter(|(_, o)| (o.0, o.1) == (uid, format));
        let mine = mine.filter(|(e, _)| !self.asked.contains_key(e));
        mine.map(|(e, _)| u64::from(FORMATS[format].1) - self.in_use(*e)).sum()
    }

    fn is_cached(&self, block: BlockId) -> bool {
        let life = &self.lives[&block];
        life.published.is_some() && life.pins.is_empty() && self.refs(block) == 0
    }

    /// Whether a block and all that continues it is held by nobody.
    fn is_evictable(&self, block: BlockId) -> bool {
        let name = self.lives[&block].published.as_ref().unwrap();
        // Of a window, what continues a block does not need it.
        if WINDOWS[name.1].is_some() {
            return self.is_cached(block);
        }
        let continues = |n: &Name| (n.0, n.1) == (name.0, name.1) && n.2.starts_with(&name.2);
        // A chain may have a hole: what is behind it continues nothing that can be found.
        let all: Vec<_> = self.lives.iter().filter_map(|(b, l)| Some((*b, l.published.as_ref()?))).collect();
        let mut reached = BTreeSet::from([name.2.len()]);
        let mut below: Vec<_> = all.into_iter().filter(|(_, n)| continues(n)).collect();
        below.sort_by_key(|(_, n)| n.2.len());
        let per_block = FORMATS[name.1].0 as usize;
        let mut chain: BTreeSet<Vec<u32>> = BTreeSet::from([name.2.clone()]);
        for (b, n) in below {
            if n.2 != name.2 && !chain.contains(&n.2[..n.2.len() - per_block]) {
                continue;
            }
            chain.insert(n.2.clone());
            reached.insert(n.2.len());
            if !self.is_cached(b) {
                return false;
            }
        }
        true
    }

    fn evictable_of_all(&self, uid: Option<u32>) -> u64 {
        let uids = [1000, RESERVED.0, LIMITED.0].into_iter().filter(|u| uid.is_none_or(|uid| uid == *u));
        uids.map(|u| (0..FORMATS.len()).map(|f| self.evictable(u, f)).sum::<u64>()).sum()
    }

    /// Nobody pins this chain any more.
    fn unpin(&mut self, chain: &Name) {
        self.pins.remove(chain);
        let all: Vec<BlockId> =
            self.lives.iter().filter(|(_, l)| l.pins.contains(chain)).map(|(b, _)| *b).collect();
        for block in all {
            self.lives.get_mut(&block).unwrap().pins.remove(chain);
            self.bury(block);
        }
    }

    fn evictable(&self, uid: u32, format: usize) -> u64 {
        let mine = |l: &Life| l.published.as_ref().is_some_and(|n| (n.0, n.1) == (uid, format));
        let mine = self.lives.iter().filter(|(_, l)| mine(l));
        mine.filter(|(b, _)| self.is_evictable(**b)).count() as u64
    }

    fn promised(&self, uid: u32, format: usize) -> u64 {
        let mine = self.sessions.values().filter(|s| (self.clients[&s.client].0, s.format) == (uid, format));
        mine.map(|s| s.promised).sum()
    }

    fn promised_extents(&self, uid: u32, except: Option<usize>) -> u64 {
        let needed = |f: usize| {
            let places = self.free_places(uid, f) + self.evictable(uid, f);
            self.promised(uid, f).saturating_sub(places).div_ceil(FORMATS[f].1.into())
        };
        (0..FORMATS.len()).filter(|f| Some(*f) != except && self.promised(uid, *f) > 0).map(needed).sum()
    }

    fn kept_for_others(&self, uid: u32) -> u64 {
        let unmet = |u: &u32| {
            self.terms(*u).reserve.saturating_sub(self.owned_by(*u)).max(self.promised_extents(*u, None))
        };
        [1000, 1001, 1002].iter().filter(|u| **u != uid).map(unmet).sum()
    }

    /// Blocks that can be had now, and once the worker is done: with `mine` and `theirs` extents more, `evicted` blocks
    /// evicted and `without` places fewer.
    fn room(
        &self,
        uid: u32,
        format: usize,
        own: u64,
        (mine, theirs): (u64, u64),
        evicted: u64,
    ) -> (u64, u64) {
        let may = (self.terms(uid).limit).saturating_add(mine).saturating_sub(self.charged_by(uid));
        let (kept, elsewhere) = (self.kept_for_others(uid), self.promised_extents(uid, Some(format)));
        let promised =
            (self.promised(uid, format) - own).saturating_sub(self.evictable(uid, format) - evicted);
        let blocks = |clean: u64| {
            let extents = clean.saturating_sub(kept).min(may).saturating_sub(elsewhere);
            let places = self.free_places(uid, format) + evicted + extents * u64::from(FORMATS[format].1);
            places.saturating_sub(promised)
        };
        (blocks(self.clean), blocks(self.soon() + mine + theirs))
    }

    /// Extents that may be taken for somebody, and whose they are: those without a block in use, and those with nothing
    /// but blocks that may be evicted.
    fn takeable(&self, uid: u32, format: usize) -> (Owners, Owners) {
        let (mut idle, mut cold) = (Vec::new(), Vec::new());
        let mut left: BTreeMap<u32, u64> = BTreeMap::new();
        let mut all = Vec::new();
        for whole in [true, false] {
            for (extent, (owner, f, holders)) in &self.owned {
                let used: Vec<_> = self.lives.iter().filter(|(b, _)| b.place.extent == *extent).collect();
                let suspect = used.iter().filter(|(_, l)| l.suspect.is_some()).count();
                let cached =
                    used.iter().filter(|(b, l)| l.suspect.is_none() && self.published_of(**b)).count();
                let may_go = |(b, l): &&(&BlockId, &Life)| {
                    l.suspect.is_some() || (self.published_of(**b) && self.is_evictable(**b))
                };
                if self.asked.contains_key(extent) || (!self.revokes && suspect > 0) {
                    continue;
                }
                if used.is_empty() != whole || !used.iter().all(|u| may_go(&u)) {
                    continue;
                }
                let counts = used.len() < FORMATS[*f].1 as usize || cached > 0;
                if counts && self.promised(*owner, *f) > 0 {
                    continue;
                }
                if *owner == uid && *f == format && suspect == 0 {
                    continue;
                }
                all.push((!self.revokes && !holders.is_empty(), *owner, *extent, whole));
            }
        }
        // What nobody has to be asked for comes first, and of what is cached the coldest; others keep their reserves.
        let warmth = |e: &ExtentId| self.warmth.get(e).copied().unwrap_or(0);
        all.sort_by_key(|(held, _, extent, whole)| {
            (*held, !whole, if *whole { 0 } else { warmth(extent) }, *extent)
        });
        for (_, owner, extent, whole) in all {
            let surplus = self.owned_by(owner).saturating_sub(self.terms(owner).reserve);
            let left = left.entry(owner).or_insert(if owner == uid { u64::MAX } else { surplus });
            if *left > 0 {
                *left -= 1;
                if whole { idle.push((owner, extent)) } else { cold.push((owner, extent)) }
            }
        }
        idle.sort_by_key(|(owner, _)| *owner != uid);
        cold.sort_by_key(|(owner, _)| *owner != uid);
        (idle, cold)
    }

    fn published_of(&self, block: BlockId) -> bool {
        self.lives[&block].published.is_some()
    }

    /// Places of extents that are the asker's own in its format: they are counted as places already.
    fn counted(&self, uid: u32, format: usize, extents: &[(u32, ExtentId)]) -> u64 {
        let own = extents.iter().filter(|(_, e)| (self.owned[e].0, self.owned[e].1) == (uid, format));
        let stays = |e: ExtentId| {
            self.lives.iter().filter(|(b, l)| b.place.extent == e && !self.may_count(**b, l)).count() as u64
        };
        own.map(|(_, e)| u64::from(FORMATS[format].1) - stays(*e)).sum()
    }

    fn may_count(&self, block: BlockId, life: &Life) -> bool {
        life.published.is_some() && life.suspect.is_none() && self.is_cached(block)
    }

    fn reach(&self, uid: u32, format: usize, own: u64, extents: &[(u32, ExtentId)]) -> u64 {
        let mine = extents.iter().filter(|(o, _)| *o == uid).count() as u64;
        let may = (self.terms(uid).limit).saturating_add(mine).saturating_sub(self.charged_by(uid));
        let clean = (self.soon() + extents.len() as u64).saturating_sub(self.kept_for_others(uid));
        let extents_got = clean.min(may).saturating_sub(self.promised_extents(uid, Some(format)));
        let places = (self.free_places(uid, format) + self.evictable(uid, format))
            .saturating_sub(self.counted(uid, format, extents));
        let promised = self.promised(uid, format) - own;
        (places + extents_got * u64::from(FORMATS[format].1)).saturating_sub(promised)
    }

    /// What can be had by taking back and evicting as much as it needs: now, and soon.
    fn make_room(&mut self, uid: u32, format: usize, own: u64, least: u64) -> (u64, u64) {
        let (idle, cold) = self.takeable(uid, format);
        let all: Vec<_> = idle.iter().chain(&cold).copied().collect();
        let asked = self.asked.len() as u64 * u64::from(FORMATS[format].1);
        if self.reach(uid, format, own, &all) + asked < least {
            return self.room(uid, format, own, (0, 0), 0);
        }
        let (mut mine, mut theirs, mut evicted) = (0, 0, 0);
        if !self.revokes {
            // What others hold comes when they agree.
            let may_evict = self.evictable(uid, format).saturating_sub(self.promised(uid, format) - own);
            let missing = least.saturating_sub(self.room(uid, format, own, (0, 0), 0).1);
            self.evictions = (missing.min(may_evict), true);
            // But for what no client has any more: there is nobody to ask.
            for (owner, _) in cold.iter().filter(|(_, e)| self.owned[e].2.is_empty()) {
                if self.room(uid, format, own, (mine, theirs), self.evictions.0).1 + asked >= least {
                    break;
                }
                if *owner == uid { mine += 1 } else { theirs += 1 }
            }
            return self.room(uid, format, own, (mine, theirs), self.evictions.0);
        }
        for (owner, _) in idle {
            if self.room(uid, format, own, (mine, theirs), 0).1 >= least {
                break;
            }
            if owner == uid { mine += 1 } else { theirs += 1 }
        }
        let may_evict = self.evictable(uid, format).saturating_sub(self.promised(uid, format) - own);
        let lacks = least.saturating_sub(self.room(uid, format, own, (mine, theirs), 0).1);
        evicted += lacks.min(may_evict);
        let mut lost_places = 0;
        let mut whole = false;
        for (owner, extent) in cold {
            let (now, soon) = self.room(uid, format, own, (mine, theirs), evicted);
            if now.max(soon) >= least + lost_places {
                break;
            }
            whole = true;
            lost_places += self.counted(uid, format, &[(owner, extent)]);
            if owner == uid { mine += 1 } else { theirs += 1 }
        }
        self.evictions = (evicted, whole);
        let (now, soon) = self.room(uid, format, own, (mine, theirs), evicted);
        (now.saturating_sub(lost_places), soon.saturating_sub(lost_places))
    }

    /// Sessions of lower priority are asked to make room, if that would do.
    fn reclaim(&mut self, priority: u8, uid: u32, format: usize, own: u64, least: u64) -> bool {
        let lower = self.sessions.iter().filter(|(_, s)| s.priority < priority && !s.table.is_empty());
        let mut victims: Vec<_> = lower
            .map(|(id, s)| (!self.wanted.contains_key(id), s.priority, std::cmp::Reverse(*id)))
            .collect();
        victims.sort_unstable();
        if self.reach(uid, format, own, &self.emptied_without(uid, format, &[])) >= least {
            return false;
        }
        let mut going: Vec<u64> = Vec::new();
        for (_, _, std::cmp::Reverse(id)) in victims {
            going.push(id);
            if self.reach(uid, format, own, &self.emptied_without(uid, format, &going)) >= least {
                let until = self.now.unwrap() + Duration::from_millis(policy().reclaim_ms.into());
                going.iter().for_each(|id| _ = self.wanted.entry(*id).or_insert(until));
                return true;
            }
        }
        false
    }

    fn emptied_without(&self, uid: u32, format: usize, going: &[u64]) -> Vec<(u32, ExtentId)> {
        let mut left: BTreeMap<u32, u64> = BTreeMap::new();
        let mut out = Vec::new();
        for (extent, (owner, f, _)) in &self.owned {
            let used: Vec<_> = self.lives.iter().filter(|(b, _)| b.place.extent == *extent).collect();
            let stands = |b: BlockId| {
                let held =
                    self.sessions.iter().filter(|(id, _)| going.contains(id)).flat_map(|(_, s)| &s.table);
                held.filter(|x| **x == b).count() == self.refs(b)
            };
            let goes = |(b, l): &(&BlockId, &Life)| {
                l.suspect.is_some() || (l.credit.is_none() && l.pins.is_empty() && stands(**b))
            };
            let usable = (*owner, *f) == (uid, format)
                && used.iter().all(|(b, l)| l.suspect.is_none() && self.may_count(**b, l));
            if usable || !used.iter().all(goes) {
                continue;
            }
            let surplus = self.owned_by(*owner).saturating_sub(self.terms(*owner).reserve);
            let left = left.entry(*owner).or_insert(surplus);
            if *owner == uid || *left > 0 {
                *left = left.saturating_sub(1);
                out.push((*owner, *extent));
            }
        }
        out
    }

    /// Requests that nobody answered in time rest; those to `uid` itself are withdrawn if that serves it and nothing else
    /// does, as many as it takes.
    fn withdraw(&mut self, uid: u32, format: usize, own_promise: u64, least: u64) {
        let now = self.now;
        self.asked.retain(|_, until| Some(*until) > now);
        let slots = u64::from(FORMATS[format].1);
        let have = |m: &Model| m.room(uid, format, own_promise, (0, 0), 0);
        if have(self).1 >= least {
            return;
        }
        let own = |e: &&ExtentId| self.owned.get(e).is_some_and(|o| (o.0, o.1) == (uid, format));
        let own: Vec<_> = self.asked.keys().filter(own).copied().collect();
        if have(self).0 + own.len() as u64 * slots < least {
            return;
        }
        for extent in own {
            if have(self).0 < least {
                self.asked.remove(&extent);
            }
        }
    }

    fn grant(&mut self, client: u64, format: usize, session: Option<u64>, want: u32, least: u32) -> Must {
        let uid = self.clients[&client].0;
        let s = session.map(|id| &self.sessions[&id]);
        let (has, own) = s.map_or((0, 0), |s| (s.table.len() as u64, s.promised));
        let priority = s.map_or(self.terms(uid).priority, |s| s.priority);
        let (want, least, slots) = (u64::from(want), u64::from(least), u64::from(FORMATS[format].1));
        if least > 253 || want > 1024 || least > want {
            return Must::Refuse(Fault::BadRequest);
        }
        if has + least > self.capacity(uid, format) {
            return Must::Refuse(Fault::NeverFits);
        }
        self.withdraw(uid, format, own, least);
        let (mut now, mut soon) = self.room(uid, format, own, (0, 0), 0);
        if now < least {
            (now, soon) = self.make_room(uid, format, own, least);
        }
        if now >= least {
            // Beyond what presses comes what costs no extent and is promised to nobody.
            let free = self.free_places(uid, format) + self.evictions.0;
            let extents = least.saturating_sub(free).div_ceil(slots);
            let blocks = want.min(free + extents * slots).min(now.max(least));
            // What has an extent's blocks may get whole ones, and then finds more or fewer free places beside them.
            let large = least > 0 && (has >= slots || least >= slots);
            let (from, to) = if large { (least, want.min(now.max(least))) } else { (blocks, blocks) };
            return Must::Grant { format, session, from, to };
        }
        if soon >= least || self.reclaim(priority, uid, format, own, least) {
            return Must::Wait;
        }
        let full = self.charged_by(uid) >= self.terms(uid).limit && self.clean + self.renewing > 0;
        Must::Refuse(if full { Fault::OverLimit } else { Fault::Busy })
    }

    fn admit(&mut self, session: u64, tokens: u64, evict: bool) -> Must {
        let s = self.sessions[&session].clone();
        let (uid, format, own) = (self.clients[&s.client].0, s.format, s.promised);
        let copied = u64::from(s.tokens < s.names.len() as u64 * s.per_block());
        let least = (tokens.div_ceil(s.per_block()) + copied).saturating_sub(s.end().into());
        let capacity = self.capacity(uid, format);
        let refused = |verdict, blocks| Must::Verdict { verdict, promised: own as u32, blocks };
        if least > u64::from(u32::MAX) {
            return Must::Refuse(Fault::NeverFits);
        }
        if least == 0 {
            let s = self.sessions.get_mut(&session).unwrap();
            (s.promised, s.admitted) = (0, 0);
            return Must::Verdict { verdict: Verdict::Admitted, promised: 0, blocks: 0 };
        }
        if s.table.len() as u64 + least > capacity {
            return refused(Verdict::NeverFits, s.table.len() as u64 + least - capacity);
        }
        let (now, soon) = self.room(uid, format, own, (0, 0), 0);
        let evictable = self.evictable(uid, format).saturating_sub(self.promised(uid, format) - own);
        let mut fits = now >= least;
        if !fits && soon >= least {
            return Must::Wait;
        }
        if !fits && evictable >= least - soon && now + evictable >= least {
            if !evict {
                return refused(Verdict::AfterEviction, least - soon);
            }
            fits = true;
        }
        if !fits {
            let (now, soon) = self.make_room(uid, format, own, least);
            fits = now >= least;
            if !fits && (soon >= least || self.reclaim(s.priority, uid, format, own, least)) {
                return Must::Wait;
            }
            if !fits {
                let others = self.sessions.iter().filter(|(id, o)| {
                    **id != session && (self.clients[&o.client].0, o.format) == (uid, format)
                });
                let held: BTreeSet<_> = others.clone().flat_map(|(_, o)| &o.table).collect();
                let mine = held.len() as u64 + others.map(|(_, o)| o.promised).sum::<u64>();
                let verdict = if mine >= least - soon { Verdict::WhenYoursFree } else { Verdict::Busy };
                return refused(verdict, least - soon);
            }
        }
        let s = self.sessions.get_mut(&session).unwrap();
        (s.promised, s.admitted) = (least, least);
        Must::Verdict { verdict: Verdict::Admitted, promised: least as u32, blocks: 0 }
    }

    /// What is wrong with a claim that must be credit of `client`.
    fn claim(&self, claim: BlockId, client: u64) -> Result<usize, Fault> {
        // Of another tenant's extent nobody learns more than of one that is not there.
        let uid = self.clients.get(&client).map(|c| c.0);
        let owned = self.owned.get(&claim.place.extent).filter(|o| Some(o.0) == uid);
        let Some((_, format, _)) = owned else { return Err(Fault::Stale) };
        if claim.place.slot >= FORMATS[*format].1 {
            return Err(Fault::BadRequest);
        }
        let newest = self.newest.get(&claim.place).map_or(0, |n| n.0);
        if claim.generation != newest {
            return Err(Fault::Stale);
        }
        match self.lives.get(&claim) {
            Some(life) if life.credit == Some(client) => Ok(*format),
            _ => Err(Fault::BadRequest),
        }
    }

    fn own_session(&self, client: u64, id: u64) -> Result<&Sequence, Fault> {
        if self.lost.contains_key(&(client, id)) {
            return Err(Fault::SessionLost);
        }
        self.sessions.get(&id).filter(|s| s.client == client).ok_or(Fault::Stale)
    }

    fn report(&mut self, client: u64, id: u64, report: &Report) -> Result<(), Fault> {
        let s = self.own_session(client, id)?;
        if report.first < s.head || report.first > s.end() {
            return Err(Fault::BadRequest);
        }
        let end = u64::from(s.end()).max(u64::from(report.first) + report.blocks.len() as u64);
        if report.tokens > end * s.per_block() {
            return Err(Fault::BadRequest);
        }
        let at = (report.first - s.head) as usize;
        let mut new = BTreeSet::new();
        for (i, block) in report.blocks.iter().enumerate() {
            if s.table.get(at + i) == Some(block) {
                continue;
            }
            let format = self.claim(*block, client)?;
            if !new.insert(*block) || format != s.format {
                return Err(Fault::BadRequest);
            }
        }
        for block in &new {
            self.lives.get_mut(block).unwrap().credit = None;
        }
        let s = self.sessions.get_mut(&id).unwrap();
        let mut gone = Vec::new();
        for (i, block) in report.blocks.iter().enumerate() {
            match s.table.get_mut(at + i) {
                Some(old) if old != block => {
                    gone.push(std::mem::replace(old, *block));
                    s.names.truncate(report.first as usize + i);
                }
                Some(_) => {}
                None => s.table.push(*block),
            }
        }
        s.tokens = report.tokens;
        gone.into_iter().rev().for_each(|b| self.bury(b));
        Ok(())
    }

    /// A block that left a table is gone if no table and no pin holds it, and nobody can find it.
    fn bury(&mut self, block: BlockId) {
        let life = &self.lives[&block];
        if self.refs(block) == 0 && life.pins.is_empty() && life.published.is_none() {
            self.lives.remove(&block);
        } else if self.is_cached(block) && self.cached.insert(block) {
            self.clock += 1;
            self.warmth.insert(block.place.extent, self.clock);
        }
    }

    /// Before each step: which blocks nobody holds.
    fn note_cached(&mut self) {
        self.cached = self.lives.keys().filter(|b| self.is_cached(**b)).copied().collect();
    }

    fn published(&self, name: &Name) -> Option<BlockId> {
        self.lives.iter().find(|(_, l)| l.published.as_ref() == Some(name)).map(|(b, _)| *b)
    }

    fn publish(&mut self, name: &Name, block: BlockId) -> bool {
        if self.published(name).is_some() || self.lives[&block].published.is_some() {
            return false;
        }
        self.lives.get_mut(&block).unwrap().published = Some(name.clone());
        true
    }

    /// Names of the table that are free are taken, from the end of what is sealed to the first that is not.
    fn publish_again(&mut self, session: u64) {
        let s = self.sessions[&session].clone();
        let mut missing = Vec::new();
        for (number, name) in s.names.iter().enumerate().rev() {
            // Of what slid out at the head, the broker knows the last one's name only.
            let Some(block) = (number as u32).checked_sub(s.head).and_then(|i| s.table.get(i as usize))
            else {
                break;
            };
            if self.published(name).is_some() || (number > 0 && number < s.head as usize) {
                break;
            }
            missing.push((name.clone(), *block));
        }
        missing.into_iter().rev().for_each(|(name, block)| _ = self.publish(&name, block));
    }

    fn answer(&mut self, client: u64, session: u64, ask: &Ask) -> Must {
        self.try_answer(client, session, ask).unwrap_or_else(Must::Refuse)
    }

    fn try_answer(&mut self, client: u64, session: u64, ask: &Ask) -> Result<Must, Fault> {
        let uid = self.clients[&client].0;
        if self.draining {
            match ask {
                Ask::Open { .. } | Ask::Reserve { .. } | Ask::Admit { .. } => return Err(Fault::Busy),
                Ask::Fork { report } => {
                    self.report(client, session, report)?;
                    return Err(Fault::Busy);
                }
                Ask::Grow { report, want, least } => {
                    self.report(client, session, report)?;
                    let promised = self.sessions[&session].promised;
                    if u64::from(*least) > promised {
                        return Err(Fault::Busy);
                    }
                    let (format, want) = (self.sessions[&session].format, u64::from(*want).min(promised));
                    return Ok(self.grant(client, format, Some(session), want as u32, *least));
                }
                _ => {}
            }
        }
        match ask {
            Ask::Hello => Err(Fault::BadRequest),
            Ask::Open { priority: 256.., .. } => Err(Fault::BadRequest),
            Ask::Admit { tokens, evict } => {
                self.own_session(client, session)?;
                Ok(self.admit(session, *tokens, *evict))
            }
            Ask::Open { format, max_tokens, .. } => {
                let blocks = max_tokens.div_ceil(FORMATS[*format].0.into());
                let never = blocks > self.capacity(uid, *format);
                if never { Err(Fault::NeverFits) } else { Ok(Must::Session) }
            }
            Ask::Reserve { format, want } => Ok(self.grant(client, *format, None, *want, *want)),
            Ask::Grow { report, want, least } => {
                self.report(client, session, report)?;
                let format = self.sessions[&session].format;
                Ok(self.grant(client, format, Some(session), *want, *least))
            }
            Ask::Trim { report, tokens, head, release } => {
                self.report(client, session, report)?;
                let s = self.sessions.get_mut(&session).unwrap();
                if *tokens > s.tokens {
                    return Err(Fault::BadRequest);
                }
                let keep = tokens.div_ceil(s.per_block()) as u32;
                if *head < s.head || *head > keep {
                    return Err(Fault::BadRequest);
                }
                let old_head = s.head;
                let mut gone = s.table.split_off((keep.max(old_head) - old_head) as usize);
                gone.reverse();
                gone.extend(s.table.drain(..(head - old_head) as usize));
                (s.head, s.tokens) = (*head, *tokens);
                s.names.truncate(keep as usize);
                let (mut blocks, mut freed) = (Vec::new(), 0);
                for block in gone {
                    let life = &self.lives[&block];
                    if !release && !life.sealed && life.pins.is_empty() && self.refs(block) == 0 {
                        self.lives.get_mut(&block).unwrap().credit = Some(client);
                        blocks.push((block, wire::RETURNED));
                    } else {
                        self.bury(block);
                        freed += u64::from(!self.lives.contains_key(&block));
                    }
                }
                let s = self.sessions.get_mut(&session).unwrap();
                s.promised = (s.promised + freed).min(s.admitted).max(s.promised);
                Ok(Must::Blocks { tokens: *tokens, blocks })
            }
            Ask::Free { blocks } => {
                let mut seen = BTreeSet::new();
                for block in blocks {
                    self.claim(*block, client)?;
                    if !seen.insert(*block) {
                        return Err(Fault::BadRequest);
                    }
                }
                seen.iter().for_each(|b| _ = self.lives.remove(b));
                Ok(Must::Nothing)
            }
            Ask::Fork { report } => {
                self.report(client, session, report)?;
                self.may_name(uid, self.sessions[&session].table.len())?;
                Ok(Must::Session)
            }
            Ask::Seal { report, from, tokens } => {
                self.report(client, session, report)?;
                let s = &self.sessions[&session];
                let per_block = s.per_block() as usize;
                let sealed = s.names.len() as u32;
                let blocks = (tokens.len() / per_block) as u32;
                if *from != sealed || tokens.len() % per_block != 0 || *from < s.head {
                    return Err(Fault::BadRequest);
                }
                if u64::from(from + blocks) * s.per_block() > s.tokens {
                    return Err(Fault::BadRequest);
                }
                let mut name = s.names.last().cloned().unwrap_or((uid, s.format, Vec::new()));
                self.publish_again(session);
                let mut duplicates = 0;
                for (i, some) in tokens.chunks(per_block).enumerate() {
                    name.2.extend(some);
                    let s = self.sessions.get_mut(&session).unwrap();
                    let block = s.table[(*from - s.head) as usize + i];
                    s.names.push(name.clone());
                    self.lives.get_mut(&block).unwrap().sealed = true;
                    duplicates += u32::from(!self.publish(&name, block));
                }
                Ok(Must::Count { blocks, duplicates })
            }
            Ask::Pin { report, blocks, on } => {
                self.report(client, session, report)?;
                let s = &self.sessions[&session];
                let end = u64::from(*blocks) * s.per_block();
                let seen = WINDOWS[s.format].map_or(0, |w| (end + 1).saturating_sub(w.into()));
                let first = (seen / s.per_block()) as u32;
                if *blocks == 0 || *blocks as usize > s.names.len() || s.head > first {
                    return Err(Fault::BadRequest);
                }
                let pages = |f: usize| if f == 1 { 3 } else { 1 };
                let pinned = |n: &Name| self.published(n).is_some_and(|b| !self.lives[&b].pins.is_empty());
                let new = s.names[..*blocks as usize].iter().filter(|n| !pinned(n)).count() as u64;
                let held = self
                    .lives
                    .iter()
                    .filter(|(b, l)| !l.pins.is_empty() && self.owned[&b.place.extent].0 == uid);
                let held: u64 = held.map(|(b, _)| pages(self.owned[&b.place.extent].1)).sum();
                if *on && held + new * pages(s.format) > PINNED {
                    return Err(Fault::OverLimit);
                }
                let chain = s.names[*blocks as usize - 1].clone();
                let all = (*blocks - first) as usize;
                if *on {
                    self.may_name(uid, all - self.pins.get(&chain).unwrap_or(&0))?;
                    self.pins.insert(chain.clone(), all);
                } else {
                    self.pins.remove(&chain);
                }
                let s = &self.sessions[&session];
                self.pinned = Some(chain.clone());
                let mut changed = 0;
                let names = s.names[first as usize..*blocks as usize].iter().cloned();
                let own: Vec<_> = names.zip(s.table[(first - s.head) as usize..].to_vec()).collect();
                for (name, own) in own {
                    self.publish(&name, own);
                    let Some(block) = self.published(&name) else { continue };
                    let pins = &mut self.lives.get_mut(&block).unwrap().pins;
                    let before = pins.is_empty();
                    if *on {
                        pins.insert(chain.clone())
                    } else {
                        pins.remove(&chain)
                    };
                    changed += u32::from(before != pins.is_empty());
                    self.bury(block);
                }
                Ok(Must::Count { blocks: changed, duplicates: 0 })
            }
            Ask::Attach { tokens, more } => {
                let s = self.own_session(client, session)?;
                let per_block = s.per_block() as usize;
                let (head, whole) = (s.head as usize * per_block, s.end() as usize * per_block);
                if s.names.len() as u32 != s.end() || s.tokens != whole as u64 {
                    return Err(Fault::BadRequest);
                }
                let begin = s.names.last().cloned().unwrap_or((uid, s.format, Vec::new()));
                self.may_name(uid, tokens.len() / per_block)?;
                let mut name = begin;
                let mut found = Vec::new();
                for some in tokens.chunks_exact(per_block) {
                    name.2.extend(some);
                    let Some(block) = self.published(&name) else { break };
                    found.push((block, name.clone()));
                }
                let mut held = whole + found.len() * per_block;
                if !more && held > head && held == whole + tokens.len() {
                    held -= 1;
                    if per_block == 1 {
                        found.pop();
                    }
                }
                let s = self.sessions.get_mut(&session).unwrap();
                s.tokens = held as u64;
                for (block, name) in &found {
                    s.table.push(*block);
                    s.names.push(name.clone());
                }
                let blocks = found.into_iter().map(|(b, _)| (b, wire::SEALED)).collect();
                Ok(Must::Blocks { tokens: held as u64, blocks })
            }
            Ask::Skip { from, tokens } => {
                let s = self.own_session(client, session)?;
                let per_block = s.per_block() as usize;
                let empty = s.table.is_empty() && s.tokens == u64::from(s.head) * s.per_block();
                let begins = empty && (*from == 0 || s.names.len() as u32 == s.head);
                let end = from + (tokens.len() / per_block) as u32;
                let next = *from == s.names.len() as u32 || (begins && *from == 0);
                if tokens.len() % per_block != 0 || !next || (!begins && end > s.head) {
                    return Err(Fault::BadRequest);
                }
                let mut names = s.names[..*from as usize].to_vec();
                let mut present = Vec::new();
                for some in tokens.chunks_exact(per_block) {
                    let mut name = names.last().cloned().unwrap_or((uid, s.format, Vec::new()));
                    name.2.extend(some);
                    present.push(u8::from(self.published(&name).is_some()));
                    names.push(name);
                }
                let s = self.sessions.get_mut(&session).unwrap();
                s.names = names;
                if begins {
                    (s.head, s.tokens) = (end, u64::from(end) * s.per_block());
                }
                Ok(Must::Present(present))
            }
            Ask::Return { extent } => {
                let knows = self.owned.get(extent).is_some_and(|o| o.2.contains(&client));
                if !knows {
                    return Err(Fault::Stale);
                }
                let credit =
                    |(b, l): (&BlockId, &Life)| b.place.extent == *extent && l.credit == Some(client);
                let mut tables = self.sessions.values().filter(|s| s.client == client).flat_map(|s| &s.table);
                if self.lives.iter().any(credit) || tables.any(|b| b.place.extent == *extent) {
                    return Err(Fault::BadRequest);
                }
                self.owned.get_mut(extent).unwrap().2.remove(&client);
                self.lives.retain(|b, l| b.place.extent != *extent || l.suspect != Some(client));
                self.told.remove(&(*extent, client));
                Ok(Must::Nothing)
            }
            Ask::Query { format } => {
                let soon = self.room(uid, *format, 0, (0, 0), 0).1;
                let free = soon + self.evictable(uid, *format).saturating_sub(self.promised(uid, *format));
                let mine = self.owned.iter().filter(|(_, o)| (o.0, o.1) == (uid, *format));
                let held = mine.map(|(e, _)| self.in_use(*e)).sum();
                Ok(Must::Room { capacity: self.capacity(uid, *format), free, held })
            }
            Ask::Close { report } if self.lost.contains_key(&(client, session)) => {
                for block in self.lost.remove(&(client, session)).unwrap() {
                    if self.lives.get(&block).is_some_and(|l| l.suspect == Some(client)) {
                        self.lives.remove(&block);
                    }
                }
                for block in &report.blocks {
                    if self.lives.get(block).is_some_and(|l| l.credit == Some(client)) {
                        self.lives.remove(block);
                    }
                }
                Ok(Must::Nothing)
            }
            Ask::Close { report } => {
                self.report(client, session, report)?;
                self.close(session);
                Ok(Must::Nothing)
            }
        }
    }

    /// Whether the tables and pins of a tenant may name so many blocks more.
    fn may_name(&mut self, uid: u32, more: usize) -> Result<(), Fault> {
        let mine = self.sessions.values().filter(|s| self.clients[&s.client].0 == uid);
        let pins = self.pins.iter().filter(|(chain, _)| chain.0 == uid);
        let named = mine.map(|s| s.table.len()).sum::<usize>() + pins.map(|(_, n)| *n).sum::<usize>();
        if more > 0 && (named + more) as u64 > NAMED {
            self.overnamed += 1;
            return Err(Fault::OverLimit);
        }
        Ok(())
    }

    fn close(&mut self, session: u64) {
        self.wanted.remove(&session);
        let mut gone = self.sessions.remove(&session).unwrap();
        if WINDOWS[gone.format].is_none() {
            gone.table.reverse();
        }
        gone.table.into_iter().for_each(|b| self.bury(b));
    }

    /// Sessions whose time is up end; blocks that only they held may still be written.
    fn lose_late(&mut self, now: Instant) -> Vec<u64> {
        let mut late: Vec<u64> =
            self.wanted.iter().filter(|(_, at)| **at <= now).map(|(id, _)| *id).collect();
        late.iter().for_each(|id| _ = self.wanted.remove(id));
        // Only for those who still wait and go before them.
        let waiters = self.waiters.iter().filter(|(_, w)| w.promised.is_none());
        let priority = |(client, w): (&u64, &Waiter)| match self.sessions.get(&w.session) {
            Some(s) if !matches!(w.ask, Ask::Reserve { .. }) => s.priority,
            _ => self.terms(self.clients[client].0).priority,
        };
        let highest = waiters.map(priority).max();
        late.retain(|id| highest > Some(self.sessions[id].priority));
        for id in &late {
            let gone = self.sessions.remove(id).unwrap();
            let mut kept = Vec::new();
            for block in gone.table.iter().rev() {
                let life = &self.lives[block];
                if self.refs(*block) == 0 && !life.sealed && life.pins.is_empty() {
                    self.lives.get_mut(block).unwrap().suspect = Some(gone.client);
                    kept.push(*block);
                } else {
                    self.bury(*block);
                }
            }
            self.lost.insert((gone.client, *id), kept);
        }
        late
    }

    fn disconnect(&mut self, client: u64) {
        let mine: Vec<_> =
            self.sessions.iter().filter(|(_, s)| s.client == client).map(|(id, _)| *id).collect();
        mine.into_iter().for_each(|id| self.close(id));
        self.waiters.remove(&client);
        self.clients.remove(&client);
        self.lives.retain(|_, l| l.credit != Some(client) && l.suspect != Some(client));
        self.lost.retain(|(c, _), _| *c != client);
        self.owned.values_mut().for_each(|o| _ = o.2.remove(&client));
        self.told.retain(|(_, c)| *c != client);
    }

    /// Extents that nobody uses and nobody knows leave their tenant.
    fn settle(&mut self) {
        let idle: Vec<_> = self
            .owned
            .iter()
            .filter(|(e, o)| o.2.is_empty() && self.in_use(**e) == 0)
            .map(|(e, _)| *e)
            .collect();
        for extent in idle {
            let (uid, _, _) = self.owned.remove(&extent).unwrap();
            self.was.insert(extent, uid);
            self.asked.remove(&extent);
            self.renewing += 1;
        }
    }
}

struct Run {
    heap: Arc<TestHeap>,
    broker: Broker,
    model: Model,
    jobs: VecDeque<Job>,
    number: u64,
    /// Ids that once were somebody's: what wrong requests are made of.
    seen: Vec<BlockId>,
    /// What was done, for the reader of a failure.
    log: Vec<String>,
    granted: u64,
    found: u64,
    evicted: u64,
    lost: u64,
    admitted: u64,
    /// How often what the heap can do has happened: extents asked back, quarantined and come back, missing and come back.
    asked: u64,
    withdrawn: u64,
    quarantined: u64,
    released: u64,
    missed: u64,
    recovered: u64,
    lent: u64,
    /// Blocks that went under pressure or by an operator's word, requests that a drain refused, prefixes saved and loaded.
    pressed: u64,
    drained: u64,
    saved: u64,
    loaded: u64,
    /// Extents that went back because nobody used them.
    rested: u64,
    /// Where prefixes are stored, once some are.
    stored: Option<tempfile::TempDir>,
    /// What the names of stored blocks stand for.
    names: BTreeMap<Digest, Name>,
}

fn policy() -> Policy {
    let pinned = PINNED * page_bytes() as u64;
    let usual = TenantPolicy { pinned, ..TenantPolicy::default() };
    let limited = TenantPolicy { limit: Some(LIMITED.1), ..usual };
    let reserved = TenantPolicy { reserve: RESERVED.1, priority: 50, ..usual };
    let tenants = [(Tenant(LIMITED.0), limited), (Tenant(RESERVED.0), reserved)].into();
    Policy { usual_tenant: usual, tenants, table_blocks_per_tenant: Some(NAMED), ..Policy::default() }
}

impl Run {
    fn new(revokes: bool) -> Self {
        let bytes = PAGES * page_bytes() as u64;
        let heap = Arc::new(TestHeap { revokes, fate: Mutex::default() });
        let mut broker = Broker::new(heap.clone(), bytes, EXTENTS, EXTENTS, policy()).unwrap();
        // Later than any clock that the broker reads by itself.
        let now = Instant::now() + Duration::from_secs(3600);
        broker.tick(now);
        let limited = Terms { reserve: 0, limit: LIMITED.1.into(), priority: USUAL_PRIORITY };
        let reserved = Terms { reserve: RESERVED.1.into(), limit: u64::MAX, priority: 50 };
        let terms = [(LIMITED.0, limited), (RESERVED.0, reserved)].into();
        let (clean, now) = (EXTENTS.into(), Some(now));
        let model = Model { clean, revokes, now, terms, revision: 1, ..Model::default() };
        let (jobs, seen, log) = (VecDeque::new(), Vec::new(), Vec::new());
        Run {
            heap,
            broker,
            model,
            jobs,
            number: 0,
            seen,
            log,
            granted: 0,
            found: 0,
            evicted: 0,
            lost: 0,
            admitted: 0,
            asked: 0,
            withdrawn: 0,
            quarantined: 0,
            released: 0,
            missed: 0,
            recovered: 0,
            lent: 0,
            pressed: 0,
            drained: 0,
            saved: 0,
            loaded: 0,
            rested: 0,
            stored: None,
            names: BTreeMap::new(),
        }
    }

    fn pass_time(&mut self, dice: &mut Dice<'_>) {
        let time = Duration::from_millis([1, 10, 150, 2500, 40_000][dice.roll(5)]);
        let now = self.model.now.unwrap() + time;
        self.model.now = Some(now);
        let late = self.model.lose_late(now);
        self.log.push(format!("{time:?} pass: {late:?} are lost"));
        let waiting = if late.is_empty() { None } else { self.retry() };
        let idle = self.broker.state.pool.all_idle().count();
        self.broker.tick(now);
        self.rested += (idle - self.broker.state.pool.all_idle().count().min(idle)) as u64;
        if let Some(wake) = self.broker.next_wake() {
            assert!(wake > now, "what is due has been ordered");
        }
        self.judge_retry(waiting);
    }

    /// What the broker sends; events are judged here.
    fn outputs(&mut self) -> VecDeque<Output> {
        self.jobs.extend(self.broker.jobs());
        let all = self.broker.outputs();
        let (events, replies): (VecDeque<_>, VecDeque<_>) =
            all.into_iter().partition(|o| wire::split(&o.message).unwrap().0.sequence.get() == 0);
        self.see_evictions();
        let mut taken: BTreeMap<ExtentId, BTreeSet<u64>> = BTreeMap::new();
        let mut told_lost = BTreeSet::new();
        for event in events {
            let (header, body) = wire::split(&event.message).unwrap();
            let mut r = Reader::new("event", body);
            match Event::from_code(header.opcode.get() & !wire::EVENT).unwrap() {
                Event::GiveBack => {
                    let give: &wire::GiveBack = r.one().unwrap();
                    assert_eq!(give.deadline_ms.get() == 0, self.model.revokes, "who can take does not ask");
                    taken.entry(ExtentId(give.extent.get())).or_default().insert(event.to.0);
                }
                Event::ReclaimSession => {
                    let number = r.one::<wire::ReclaimSession>().unwrap().session.get();
                    let id = self.model.meant(event.to.0, number);
                    assert!(self.model.wanted.contains_key(&id), "session {id} is asked for nothing");
                    assert_eq!(self.model.sessions[&id].client, event.to.0);
                }
                Event::SessionLost => {
                    let number = r.one::<wire::Opened>().unwrap().session.get();
                    let id = self.model.meant(event.to.0, number);
                    assert!(self.model.lost.contains_key(&(event.to.0, id)));
                    assert!(told_lost.insert(id));
                }
                other => panic!("{other:?}"),
            }
        }
        self.lost += told_lost.len() as u64;
        for (extent, told) in taken {
            self.model.lives.retain(|b, l| b.place.extent != extent || l.suspect.is_none());
            assert_eq!(self.model.in_use(extent), 0, "{extent} was taken from under somebody");
            if !self.model.revokes {
                assert_eq!(told, self.model.owned[&extent].2, "everybody who has {extent} is asked");
                let until = self.model.now.unwrap() + Duration::from_millis(2000);
                assert_eq!(self.model.asked.insert(extent, until), None, "{extent} is asked for twice");
                self.model.told.extend(told.iter().map(|client| (extent, *client)));
                self.asked += 1;
                continue;
            }
            let (_, _, knew) = self.model.owned.remove(&extent).expect("taken from its tenant");
            assert_eq!(told, knew, "everybody who has {extent} is told");
            self.model.renewing += 1;
        }
        replies
    }

    /// Which blocks the broker has evicted: as many as it may, and none that it may not.
    fn see_evictions(&mut self) {
        let there: BTreeSet<BlockId> = self.broker.state.prefixes.iter().map(|(_, b, ..)| b).collect();
        let gone: Vec<BlockId> = self
            .model
            .lives
            .iter()
            .filter(|(b, l)| l.published.is_some() && !there.contains(b))
            .map(|(b, _)| *b)
            .collect();
        for block in &gone {
            assert!(self.model.is_evictable(*block), "{block} was evicted, which somebody needs");
        }
        let (own, whole) = std::mem::take(&mut self.model.evictions);
        let count = gone.len() as u64;
        let as_many = if whole { count >= own } else { count == own } || (whole && !self.model.revokes);
        assert!(
            as_many,
            "{gone:?} evicted, {own} needed, whole: {whole}; waiting: {:?}",
            self.broker.waiting.keys()
        );
        // Whatever continues an evicted block must be gone too: the ends go first.
        for block in &gone {
            let name = self.model.lives[block].published.clone().unwrap();
            if WINDOWS[name.1].is_some() {
                continue;
            }
            let per_block = FORMATS[name.1].0 as usize;
            let child = |n: &Name| {
                (n.0, n.1) == (name.0, name.1)
                    && n.2.len() == name.2.len() + per_block
                    && n.2.starts_with(&name.2)
            };
            let left = self
                .model
                .lives
                .iter()
                .find(|(b, l)| l.published.as_ref().is_some_and(child) && !gone.contains(b));
            assert!(left.is_none(), "{block} was evicted before {left:?}");
        }
        // An extent without a block in use that nobody has leaves its tenant in the end: see `settle`.
        gone.iter().for_each(|b| _ = self.model.lives.remove(b));
        self.evicted += count;
    }

    fn connect(&mut self, uid: u32) {
        let Ok(ClientId(id)) = self.broker.connect(Peer { uid, pid: 1 }) else { return };
        let mut numbers = Vec::new();
        let hello = wire::Hello {
            magic: wire::MAGIC.into(),
            version: wire::VERSION.into(),
            label: wire::label("model"),
        };
        let mut w = Writer::request(Verb::Hello, 1, 0);
        w.put(&hello);
        self.broker.request(ClientId(id), &w.finish());
        for format in 0..FORMATS.len() {
            let mut w = Writer::request(Verb::Profile, 2, 0);
            wire::put_profile(&mut w, &profile(format), 0);
            self.broker.request(ClientId(id), &w.finish());
        }
        for output in self.outputs().into_iter().skip(1) {
            let (header, body) = wire::split(&output.message).unwrap();
            assert_eq!(header.fault.get(), 0);
            let format: &wire::Format = Reader::new("format", body).one().unwrap();
            assert_eq!(format.blocks_per_extent.get(), FORMATS[numbers.len()].1);
            numbers.push(format.format.get());
        }
        self.model.clients.insert(id, (uid, numbers));
    }

    fn encode(&self, client: u64, session: u64, ask: &Ask) -> Vec<u8> {
        let number = |format: &usize| self.model.clients[&client].1[*format].into();
        let wired = |r: &Report| wire::Report {
            tokens: r.tokens.into(),
            first: r.first.into(),
            used: (r.blocks.len() as u32).into(),
        };
        let called = self.model.called(client, session);
        let start = |verb| Writer::request(verb, self.number, called);
        let mut w;
        match ask {
            Ask::Hello => {
                w = start(Verb::Hello);
                w.put(&wire::Hello::default());
            }
            Ask::Open { format, max_tokens, priority } => {
                w = start(Verb::Open);
                let (max_tokens, priority) = ((*max_tokens).into(), (*priority).into());
                w.put(&wire::Open { format: number(format), max_tokens, priority, ..wire::Open::default() });
            }
            Ask::Admit { tokens, evict } => {
                w = start(Verb::Admit);
                let (tokens, flags) = ((*tokens).into(), u32::from(*evict).into());
                w.put(&wire::Admit { tokens, flags, reserved: 0.into() });
            }
            Ask::Reserve { format, want } => {
                w = start(Verb::Reserve);
                w.put(&wire::Reserve { format: number(format), want: (*want).into() });
            }
            Ask::Grow { report, want, least } => {
                w = start(Verb::Grow);
                let report_head = wired(report);
                w.put(&wire::Grow { report: report_head, want: (*want).into(), least: (*least).into() });
                w.put_blocks(report.blocks.iter().copied());
            }
            Ask::Trim { report, tokens, head, release } => {
                w = start(Verb::Trim);
                w.put(&wire::Trim {
                    report: wired(report),
                    tokens: (*tokens).into(),
                    head: (*head).into(),
                    release: u32::from(*release).into(),
                });
                w.put_blocks(report.blocks.iter().copied());
            }
            Ask::Free { blocks } => {
                w = start(Verb::Free);
                w.put(&wire::Free { count: (blocks.len() as u32).into(), reserved: 0.into() });
                w.put_blocks(blocks.iter().copied());
            }
            Ask::Fork { report } => {
                w = start(Verb::Fork);
                w.put(&wired(report)).put_blocks(report.blocks.iter().copied());
            }
            Ask::Close { report } => {
                w = start(Verb::Close);
                w.put(&wired(report)).put_blocks(report.blocks.iter().copied());
            }
            Ask::Seal { report, from, tokens } => {
                w = start(Verb::Seal);
                let count = (tokens.len() as u32).into();
                w.put(&wire::Seal { report: wired(report), from: (*from).into(), count });
                w.put_tokens(tokens).put_blocks(report.blocks.iter().copied());
            }
            Ask::Pin { report, blocks, on } => {
                w = start(Verb::Pin);
                let on = u32::from(*on).into();
                w.put(&wire::Pin { report: wired(report), blocks: (*blocks).into(), on });
                w.put_blocks(report.blocks.iter().copied());
            }
            Ask::Attach { tokens, more } => {
                w = start(Verb::Attach);
                let count = (tokens.len() as u32).into();
                w.put(&wire::Attach { count, more: u32::from(*more).into() }).put_tokens(tokens);
            }
            Ask::Skip { from, tokens } => {
                w = start(Verb::Skip);
                let count = (tokens.len() as u32).into();
                w.put(&wire::Skip { from: (*from).into(), count }).put_tokens(tokens);
            }
            Ask::Return { extent } => {
                w = start(Verb::ReturnExtent);
                w.put(&wire::ReturnExtent { extent: extent.0.into(), reserved: 0.into() });
            }
            Ask::Query { format } => {
                w = start(Verb::Query);
                w.put(&wire::Query { format: number(format), reserved: 0.into() });
            }
        }
        w.finish()
    }

    fn ask(&mut self, client: u64, session: u64, ask: Ask) {
        self.number += 1;
        self.log.push(format!("client {client} session {session}: {ask:?}"));
        let message = self.encode(client, session, &ask);
        let (asked, wanted) = (self.model.asked.len(), self.model.wanted.len());
        let must = self.model.answer(client, session, &ask);
        if matches!(must, Must::Grant { .. }) {
            self.withdrawn += (asked - self.model.asked.len()) as u64;
        }
        // A session that was asked to make room has ended: who waits is tried again.
        let stirred = self.model.wanted.len() < wanted;
        self.model.settle();
        let evictions = self.model.evictions;
        let waiting = if stirred { self.retry() } else { None };
        self.model.evictions =
            (self.model.evictions.0.max(evictions.0), self.model.evictions.1 | evictions.1);
        self.broker.request(ClientId(client), &message);
        let mut replies = self.outputs();
        let number = self.number;
        self.judge(Waiter { number, ask, session, promised: None }, client, must, &mut replies);
        if let Some((client, waiter, must)) = waiting {
            self.judge(waiter, client, must, &mut replies);
        }
        assert!(replies.is_empty(), "one reply for one request");
        self.model.settle();
        self.compare();
    }

    /// Who waits for extents is tried again: what must come of it now.
    fn retry(&mut self) -> Option<(u64, Waiter, Must)> {
        let client = self.extents_waiter()?;
        let waiter = self.model.waiters.remove(&client).unwrap();
        let must = self.model.answer(client, waiter.session, &waiter.ask);
        Some((client, waiter, must))
    }

    /// What comes of a change that lets those who wait be tried again.
    fn judge_retry(&mut self, waiting: Option<(u64, Waiter, Must)>) {
        let mut replies = self.outputs();
        if let Some((client, waiter, must)) = waiting {
            self.judge(waiter, client, must, &mut replies);
        }
        assert!(replies.is_empty());
        self.model.settle();
        self.compare();
    }

    /// An operator changes a tenant's numbers.
    fn change_limits(&mut self, dice: &mut Dice<'_>) {
        let uid = [1000, RESERVED.0, LIMITED.0][dice.roll(3)];
        let bytes = PAGES * page_bytes() as u64;
        let change = LimitChange {
            tenant: Tenant(uid),
            reserve: dice.one_in(2).then(|| dice.roll(4) as u64 * bytes),
            limit: dice.one_in(2).then(|| dice.one_in(2).then(|| dice.roll(7) as u64 * bytes)),
            priority: dice.one_in(2).then(|| dice.roll(200) as u8),
            revision: dice.one_in(3).then(|| self.model.revision - u64::from(dice.one_in(3))),
        };
        self.log.push(format!("{change:?}"));
        let mut new = self.model.terms(uid);
        new.reserve = change.reserve.map_or(new.reserve, |r| r / bytes);
        new.limit = change.limit.map_or(new.limit, |l| l.map_or(u64::MAX, |l| l / bytes));
        new.priority = change.priority.unwrap_or(new.priority);
        let others: u64 = self.model.terms.iter().filter(|(u, _)| **u != uid).map(|(_, t)| t.reserve).sum();
        let refused = change.revision.is_some_and(|r| r != self.model.revision)
            || new.limit < new.reserve
            || others + new.reserve > self.model.extents();
        let mut waiting = None;
        if !refused {
            self.model.terms.insert(uid, new);
            self.model.revision += 1;
            waiting = self.retry();
        }
        let report = self.broker.change_limits(&change);
        assert_eq!(report.outcome == Some(Outcome::Refused), refused, "{report:?}");
        assert_eq!(report.reasons.is_empty(), report.outcome == Some(Outcome::Applied));
        assert_eq!(report.revision, self.model.revision);
        if new.limit < self.model.owned_by(uid) && !refused {
            assert_eq!(report.outcome, Some(Outcome::Deferred));
        }
        self.judge_retry(waiting);
    }

    /// Compares what came of a request with what must.
    fn judge(&mut self, w: Waiter, client: u64, must: Must, replies: &mut VecDeque<Output>) {
        self.log.push(format!("  must be {must:?}"));
        if must == Must::Wait {
            let waits = matches!(self.broker.waiting.get(&ClientId(client)), Some(Waiting::Extents(_)));
            let found = self.broker.waiting.get(&ClientId(client));
            assert!(waits && replies.is_empty(), "it must wait for extents: {found:?}");
            self.model.waiters.insert(client, w);
            return;
        }
        // A reply that waits for zeros is looked at in the broker: the client must not have it yet.
        if let Some(Waiting::Zeros { output, ticket, .. }) = self.broker.waiting.get(&ClientId(client)) {
            assert!(replies.is_empty(), "nothing leaves before the zeros are written");
            let Must::Grant { format, session, from, to } = must else { panic!("zeros for {must:?}") };
            let output = Output {
                to: output.to,
                message: output.message.clone(),
                buffers: vec![],
                descriptors: vec![],
                last: false,
            };
            let ticket = *ticket;
            let zeros = self.take_grant(client, format, session, from..=to, &output);
            let ordered = self.jobs.iter().find_map(|j| match j {
                Job::Scrub { ticket: t, pieces, .. } if *t == ticket => Some(pieces.len()),
                _ => None,
            });
            assert_eq!(ordered, Some(zeros), "exactly what another process may have written is zeroed");
            self.model
                .waiters
                .insert(client, Waiter { promised: Some(Must::Grant { format, session, from, to }), ..w });
            return;
        }
        let output = replies.pop_front().expect("a reply");
        assert_eq!(output.to.0, client);
        let (header, body) = wire::split(&output.message).unwrap();
        assert_eq!(header.sequence.get(), w.number);
        let fault = Fault::from_code(header.fault.get());
        let mut r = Reader::new("reply", body);
        match must {
            Must::Wait => unreachable!(),
            Must::Refuse(expected) => {
                assert_eq!(fault, Some(expected));
                self.drained += u64::from(self.model.draining && expected == Fault::Busy);
                assert_eq!(output.last, matches!(w.ask, Ask::Hello));
                return;
            }
            _ => assert_eq!(fault, None, "{:?}", String::from_utf8_lossy(body)),
        }
        match must {
            Must::Wait | Must::Refuse(_) => unreachable!(),
            Must::Grant { format, session, from, to } => {
                let zeros = self.take_grant(client, format, session, from..=to, &output);
                assert_eq!(zeros, 0, "a block that another process has used left without zeros");
            }
            Must::Blocks { tokens, blocks } => {
                let (said, extents, got) = parse_grant(body);
                assert_eq!((said, &got), (tokens, &blocks));
                self.meet(client, &extents, got.iter().map(|(b, _)| *b));
                self.found += got.iter().filter(|(_, flags)| *flags == wire::SEALED).count() as u64;
            }
            Must::Session => {
                let (id, number) = self.model.born(client);
                let said = (r.one::<wire::Opened>().unwrap().session.get(), header.session.get());
                assert_eq!(said, (number, number), "sessions are numbered by tenant");
                let session = match &w.ask {
                    Ask::Open { format, priority, .. } => {
                        let most = self.model.terms(self.model.clients[&client].0).priority;
                        let priority = if *priority == 0 { most } else { most.min(*priority as u8) };
                        Sequence { client, format: *format, priority, ..Sequence::default() }
                    }
                    _ => Sequence { promised: 0, admitted: 0, ..self.model.sessions[&w.session].clone() },
                };
                self.model.sessions.insert(id, session);
            }
            Must::Verdict { verdict, promised, blocks } => {
                let got: &wire::Admission = r.one().unwrap();
                let said = (got.verdict.get(), got.promised.get(), got.blocks.get());
                assert_eq!(said, (verdict as u32, promised, blocks), "{verdict:?}");
                self.admitted += u64::from(verdict == Verdict::Admitted && promised > 0);
            }
            Must::Count { blocks, duplicates } => {
                let got: &wire::Counted = r.one().unwrap();
                assert_eq!((got.blocks.get(), got.duplicates.get()), (blocks, duplicates));
            }
            Must::Room { capacity, free, held } => {
                let got: &wire::Room = r.one().unwrap();
                assert_eq!((got.capacity.get(), got.held.get()), (capacity, held));
                // At least: what other formats have cached, and what was promised to the asker, comes to that.
                let said = got.free.get();
                assert!((free.min(capacity)..=capacity).contains(&said), "{free} to {capacity}: {said}");
            }
            Must::Present(blocks) => {
                let count = r.one::<wire::Present>().unwrap().blocks.get();
                assert_eq!(r.many::<u8>(count, wire::MAX_TOKENS).unwrap(), blocks);
                r.end().unwrap();
                self.found += u64::from(blocks.contains(&1));
            }
            Must::Nothing => assert!(body.is_empty()),
        }
    }

    /// Takes new credit into the model; returns how many of its blocks must be zeroed by the broker.
    fn take_grant(
        &mut self,
        client: u64,
        format: usize,
        session: Option<u64>,
        blocks: std::ops::RangeInclusive<u64>,
        output: &Output,
    ) -> usize {
        let (_, body) = wire::split(&output.message).unwrap();
        let (_, extents, got) = parse_grant(body);
        let count = got.len() as u64;
        assert!(blocks.contains(&count), "{count} blocks granted, it must be {blocks:?}");
        if let Some(s) = session.and_then(|id| self.model.sessions.get_mut(&id)) {
            s.promised = s.promised.saturating_sub(count);
        }
        let uid = self.model.clients[&client].0;
        let mut zeros = 0;
        for (block, flags) in &got {
            let extent = block.place.extent;
            assert!(block.place.slot < FORMATS[format].1);
            let here = self.model.lives.keys().any(|b| b.place == block.place);
            assert!(!here, "{block} lies where another block is in use");
            if !self.model.owned.contains_key(&extent) {
                assert!(self.model.clean > 0, "{extent} is new and there was no clean one");
                self.model.clean -= 1;
                self.model.owned.insert(extent, (uid, format, BTreeSet::new()));
            }
            let owner = &self.model.owned[&extent];
            assert_eq!((owner.0, owner.1), (uid, format), "{extent} is another's");
            let before = self.model.newest.insert(block.place, (block.generation, client));
            assert!(block.generation > before.map_or(0, |b| b.0), "a life is granted twice");
            let foreign = before.is_some_and(|(_, who)| who != client);
            zeros += usize::from(foreign);
            assert_eq!(*flags, if foreign || before.is_none() { wire::ZERO } else { 0 });
            self.model.lives.insert(*block, Life { credit: Some(client), ..Life::default() });
            self.seen.push(*block);
        }
        self.granted += count;
        self.meet(client, &extents, got.iter().map(|(b, _)| *b));
        zeros
    }

    /// Descriptors come for exactly the extents that the client does not know yet.
    fn meet(&mut self, client: u64, extents: &BTreeSet<ExtentId>, blocks: impl Iterator<Item = BlockId>) {
        let has = |e: &ExtentId| {
            self.model.owned[e].2.contains(&client) && !self.model.told.contains(&(*e, client))
        };
        let new: BTreeSet<_> = blocks.map(|b| b.place.extent).filter(|e| !has(e)).collect();
        assert_eq!(extents, &new, "descriptors");
        self.model.met.extend(&new);
        self.model.told.retain(|(e, c)| *c != client || !new.contains(e));
        new.iter().for_each(|e| _ = self.model.owned.get_mut(e).unwrap().2.insert(client));
    }

    fn extents_waiter(&self) -> Option<u64> {
        self.model.waiters.iter().find(|(_, w)| w.promised.is_none()).map(|(c, _)| *c)
    }

    /// The worker finishes its oldest job.
    fn work(&mut self, fails: bool, fate: Fate) {
        let Some(job) = self.jobs.pop_front() else { return };
        *self.heap.fate.lock().unwrap() = fate;
        let done = match job {
            Job::Scrub { ticket, .. } if fails => Done::Scrubbed { ticket, result: Err("no".into()) },
            job => job.run(&*self.heap),
        };
        self.log.push(format!("worker: {done:?}"));
        let scrubbed = match &done {
            Done::Scrubbed { ticket, .. } => {
                let is_it = |(_, w): &(&ClientId, &Waiting)| matches!(w, Waiting::Zeros { ticket: t, .. } if t == ticket);
                self.broker.waiting.iter().find(is_it).map(|(c, _)| c.0)
            }
            Done::Renewed { .. }
            | Done::Allocated(_)
            | Done::GivenBack(_)
            | Done::Summed { .. }
            | Done::Copied { .. }
            | Done::Stored(_) => None,
            Done::Window { .. } => unreachable!("the model asks for no windows"),
        };
        // Whoever waits for extents is tried again now; `step` sees to it that it is one client at most.
        let changed = self.expect(&done);
        let waiting = if changed { self.retry() } else { None };
        self.broker.done(done);
        let mut replies = self.outputs();
        if let Some(client) = scrubbed {
            let waiter = self.model.waiters.remove(&client).expect("somebody waits for these zeros");
            let output = replies.pop_front().expect("the reply that waited");
            let (header, body) = wire::split(&output.message).unwrap();
            assert_eq!((output.to.0, header.sequence.get()), (client, waiter.number));
            if fails {
                assert_eq!(Fault::from_code(header.fault.get()), Some(Fault::BrokerFault));
                let granted = self.last_grant(client);
                granted.iter().for_each(|b| _ = self.model.lives.remove(b));
            } else {
                assert_eq!(header.fault.get(), 0);
                assert!(waiter.promised.is_some() && !parse_grant(body).2.is_empty());
            }
        }
        if let Some((client, waiter, must)) = waiting {
            self.judge(waiter, client, must, &mut replies);
        }
        assert!(replies.is_empty());
        self.model.settle();
        self.compare();
    }

    /// Takes what the worker did into the model. Returns whether waiting requests are worth another try.
    fn expect(&mut self, done: &Done) -> bool {
        let m = &mut self.model;
        match done {
            Done::Scrubbed { .. }
            | Done::Window { .. }
            | Done::GivenBack(_)
            | Done::Summed { .. }
            | Done::Copied { .. }
            | Done::Stored(_) => false,
            // Whoever waits for what was lent is told that it does not come.
            Done::Allocated(Err(_)) => std::mem::take(&mut m.expected) > 0,
            Done::Allocated(Ok(_)) => {
                m.missing -= 1;
                m.expected = m.expected.saturating_sub(1);
                m.clean += 1;
                self.recovered += 1;
                true
            }
            Done::Renewed { extent, result: Renewal::Held(_) } => {
                let times = m.found_held.entry(*extent).or_default();
                *times += 1;
                // The first time it may be a process that is just about to end.
                if *times == 2 && m.quarantined.insert(*extent) {
                    m.renewing -= 1;
                    self.quarantined += 1;
                    return true;
                }
                false
            }
            Done::Renewed { extent, result } => {
                m.found_held.remove(extent);
                if m.quarantined.remove(extent) {
                    self.released += 1;
                } else {
                    m.renewing -= 1;
                }
                match result {
                    Renewal::Ready { .. } => m.clean += 1,
                    _ => {
                        m.missing += 1;
                        self.missed += 1;
                    }
                }
                true
            }
        }
    }

    /// After a grant that failed for want of zeros, the model forgets what the broker took back: credit of the client
    /// that the broker does not have any more. The comparison of ledgers then says whether that was all of it.
    fn last_grant(&mut self, client: u64) -> Vec<BlockId> {
        let still: BTreeSet<_> = self.broker.state.pool.credit_of(ClientId(client)).into_iter().collect();
        let mine = self.model.lives.iter().filter(|(_, l)| l.credit == Some(client)).map(|(b, _)| *b);
        let gone: Vec<_> = mine.filter(|b| !still.contains(b)).collect();
        let known = self.broker.state.pool.held_by(ClientId(client));
        for (extent, owned) in &mut self.model.owned {
            if !known.contains(extent) {
                owned.2.remove(&client);
                self.model.told.remove(&(*extent, client));
            }
        }
        assert!(!gone.is_empty());
        gone
    }

    /// Everything that can be seen of the broker against the model.
    fn compare(&mut self) {
        self.broker.verify().unwrap();
        // And the check in pieces goes on over whatever has changed since the last one.
        self.broker.check_at_most(5);
        assert!(!self.broker.frozen && self.broker.false_alarms() == 0);
        let state = &self.broker.state;
        // Of a pinned chain the end may not be in the index, if its block has another name.
        for (chain, _) in state.prefixes.pins() {
            let last = || self.model.pinned.clone().expect("somebody has pinned it");
            self.names.entry(*chain).or_insert_with(last);
        }
        assert_eq!(state.sessions.len(), self.model.sessions.len());
        for (id, s) in &state.sessions {
            let m = &self.model.sessions[&s.born];
            assert_eq!(self.model.numbers[&s.born], (id.tenant.0, id.number));
            assert_eq!((s.client.0, s.priority), (m.client, m.priority));
            assert_eq!((u64::from(s.promised), u64::from(s.admitted)), (m.promised, m.admitted), "{id}");
            assert_eq!((s.tokens, s.head, &s.table), (m.tokens, m.head, &m.table), "{id}");
            assert_eq!(s.sealed() as usize, m.names.len());
            assert!(s.names.len() <= s.table.len() + 1, "names of what is gone are not kept");
        }
        let page = page_bytes() as u64;
        let mut expected: BTreeMap<&str, u64> = BTreeMap::new();
        *expected.entry("free").or_default() += (self.model.clean + self.model.renewing) * PAGES * page;
        *expected.entry("lent").or_default() += self.model.lent * PAGES * page;
        *expected.entry("quarantined").or_default() += self.model.quarantined.len() as u64 * PAGES * page;
        assert_eq!(u64::from(self.broker.missing_extents()), self.model.missing, "missing");
        assert_eq!(self.model.extents() + self.model.missing, u64::from(EXTENTS), "no extent is forgotten");
        let wakes = self.broker.next_wake().is_some();
        let looked_at = |job: &Job| matches!(job, Job::Renew { .. } | Job::Allocate { .. });
        let at_work = self.jobs.iter().any(looked_at);
        let to_look_at = !self.model.quarantined.is_empty() || self.model.missing > 0;
        assert!(wakes || at_work || !to_look_at, "nobody would ever look again");
        let shown: BTreeSet<_> = self.broker.quarantined().iter().map(|q| ExtentId(q.extent)).collect();
        // One that was filled from a file may have gone to nobody.
        let known = |q: &super::QuarantineReport| {
            q.last_granted.is_some() || !self.model.met.contains(&ExtentId(q.extent))
        };
        assert!(self.broker.quarantined().iter().all(known), "whose it was is known");
        assert_eq!(shown, self.model.quarantined);
        for (extent, (_, format, _)) in &self.model.owned {
            let (slot, slots) = (if *format == 1 { 3 * page } else { page }, u64::from(FORMATS[*format].1));
            *expected.entry("stranded").or_default() += (slots - self.model.in_use(*extent)) * slot;
            *expected.entry("waste").or_default() += PAGES * page - slots * slot;
        }
        for (block, life) in &self.model.lives {
            let account = match (life, self.model.refs(*block)) {
                (Life { suspect: Some(_), .. }, 0) => "quarantined",
                (Life { credit: Some(_), .. }, 0) => "credit",
                (Life { pins, .. }, _) if !pins.is_empty() => "pinned",
                (Life { sealed: false, .. }, 1) => "private",
                (_, refs) if refs > 0 => "shared",
                (Life { published: Some(_), .. }, 0) => "cached",
                other => panic!("{block}: {other:?}"),
            };
            let format = self.model.owned[&block.place.extent].1;
            *expected.entry(account).or_default() += if format == 1 { 3 * page } else { page };
        }
        for (name, bytes) in self.broker.ledger() {
            assert_eq!(bytes, expected.get(name).copied().unwrap_or(0), "{name}");
        }
        let published = self.model.lives.values().filter(|l| l.published.is_some()).count();
        assert_eq!(self.broker.state.prefixes.stats().blocks, published, "prefix index");
        assert_eq!(self.broker.waiting.len(), self.model.waiters.len());
        assert!(
            self.broker.is_recorded_by(&self.broker.record()).unwrap(),
            "what is read back is what was written"
        );
    }

    /// The broker is read back from its own record, over new buffers.
    fn restart(&mut self) {
        let record = self.broker.record();
        if !self.broker.waiting.is_empty() {
            return;
        }
        let bytes = PAGES * page_bytes() as u64;
        let there: BTreeSet<_> =
            self.broker.buffers.keys().copied().chain(self.broker.kept_buffers()).collect();
        // Those in quarantine that the worker was looking at died with it: they are begun anew.
        let lost = self.model.quarantined.len();
        self.model.quarantined.retain(|e| there.contains(e));
        self.model.renewing += (lost - self.model.quarantined.len()) as u64;
        let kept = &self.model.quarantined;
        self.model.found_held.retain(|e, _| kept.contains(e));
        self.model.asked.clear();
        let buffers = there.into_iter().map(|id| (id, Imaginary.allocate(bytes).unwrap())).collect();
        self.broker = Broker::from_record(&record, self.heap.clone(), policy(), buffers).unwrap();
        self.log.push("restart".into());
        // An operator's word is forgotten.
        self.model.draining = false;
        self.set_store();
        // Who was asked to make room is asked again when it is needed.
        self.model.wanted.clear();
        // Nobody has a lease any more.
        self.model.expected = std::mem::take(&mut self.model.lent);
        self.model.missing += self.model.expected;
        // What the old one had ordered died with it; the new one orders it again.
        self.jobs.clear();
        self.broker.tick(self.model.now.unwrap());
        assert!(self.outputs().is_empty());
        self.compare();
    }

    /// An operator takes extents for a hold, as many as are clean and not kept for anybody, or ends one.
    fn lend(&mut self, dice: &mut Dice<'_>) {
        let bytes = PAGES * page_bytes() as u64;
        let m = &mut self.model;
        let holds = self.broker.holds();
        if let Some(hold) = dice.pick(&holds).filter(|_| dice.one_in(2)) {
            self.log.push(format!("{hold:?} ends"));
            self.broker.end_hold(HoldId(hold.hold));
            let extents = u64::from(hold.extents);
            m.lent -= extents;
            m.missing += extents;
            m.expected += extents;
        } else {
            let spare = m.clean.saturating_sub(m.kept_for_others(super::OVERFLOW_UID));
            let extents = 1 + dice.roll(2) as u64;
            if extents > spare {
                return;
            }
            let borrower = Borrower { uid: 0, pid: 1, command: "engine".into() };
            let hold = self.broker.hold(extents * bytes, borrower).unwrap();
            self.log.push(format!("{hold:?} of {extents}"));
            // Requests to give back that nobody answered in time come to rest.
            let now = m.now;
            m.asked.retain(|_, until| Some(*until) > now);
            m.clean -= extents;
            m.lent += extents;
            self.lent += extents;
        }
        assert!(self.outputs().is_empty());
        self.model.settle();
        self.compare();
    }

    fn set_store(&mut self) {
        let Some(stored) = &self.stored else { return };
        let location = Location { path: stored.path().join("prefixes"), limit: 64 << 20, part: 64 << 20 };
        self.broker.set_store(StorePolicy { location, tenants: None, labels: Vec::new() });
    }

    /// What operators do, and the machine: pressure, evictions, drains, unpinning, saving and loading. Only while nobody
    /// waits for extents: who waits would be tried again in the middle of it.
    fn operate(&mut self, dice: &mut Dice<'_>) {
        if self.extents_waiter().is_some() {
            return;
        }
        let pins: Vec<Digest> = self.broker.state.prefixes.pins().map(|(chain, _)| *chain).collect();
        match dice.roll(if pins.is_empty() { 4 } else { 9 }) {
            0 => {
                let all = self.model.evictable_of_all(None);
                self.log.push(format!("memory is short: half of {all} cached blocks go"));
                self.model.evictions = (all.div_ceil(2), false);
                self.pressed += all.div_ceil(2);
                assert_eq!(self.broker.pressed(), 0, "the pool is not elastic");
            }
            1 => {
                let uid = dice.one_in(2).then(|| [1000, RESERVED.0, LIMITED.0][dice.roll(3)]);
                let most = 1 + dice.roll(4) as u64;
                self.evict(most, uid);
            }
            2 => {
                self.model.draining = !self.model.draining;
                self.log.push(format!("draining: {}", self.model.draining));
                self.broker.set_draining(self.model.draining);
            }
            3 => return self.load(dice),
            4 => {
                let Some(chain) = dice.pick(&pins) else { return };
                self.unpin(chain);
            }
            _ => return self.save(),
        }
        self.judge_retry(None);
    }

    fn unpin(&mut self, chain: Digest) {
        let name = self.names[&chain].clone();
        self.log.push(format!("{name:?} is unpinned"));
        self.model.unpin(&name);
        assert!(self.broker.unpin(&chain).is_some());
    }

    fn evict(&mut self, most: u64, uid: Option<u32>) {
        let go = self.model.evictable_of_all(uid).min(most);
        self.log.push(format!("{most} blocks of {uid:?} are evicted: {go}"));
        self.model.evictions = (go, false);
        self.pressed += go;
        let report = self.broker.evict(&Evict::Blocks { most, tenant: uid.map(Tenant) });
        assert_eq!(report.blocks, go);
    }

    /// Runs what has to do with files to its end. What else is ordered meanwhile is the worker's.
    fn run_store(&mut self, number: u64) -> StoreReport {
        loop {
            for job in self.broker.jobs() {
                match job {
                    Job::Store(_) | Job::Scrub { .. } => {
                        let done = job.run(&*self.heap);
                        self.broker.done(done);
                    }
                    other => self.jobs.push_back(other),
                }
            }
            match self.broker.stored(number) {
                Some(report) => return report,
                None => assert!(self.broker.is_storing(number), "it has an end"),
            }
        }
    }

    fn save(&mut self) {
        if self.stored.is_none() {
            let memory = std::path::Path::new("/dev/shm");
            let made = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
            self.stored = Some(made.unwrap());
            self.set_store();
        }
        let prefixes = &self.broker.state.prefixes;
        for chain in prefixes.pins().map(|(chain, _)| *chain) {
            for digest in prefixes.chain(&chain) {
                let life = prefixes.get(&digest).map(|b| &self.model.lives[&b]);
                let name = life.and_then(|l| l.published.clone()).expect("the index names published blocks");
                self.names.insert(digest, name);
            }
        }
        // A chain that is not whole is said to be so, and no other one.
        let short =
            |(chain, pin): &(&Digest, &super::prefix::Pin)| prefixes.chain(chain).len() < pin.blocks as usize;
        let gaps: BTreeSet<String> = prefixes
            .pins()
            .filter(short)
            .map(|(chain, _)| format!("{}{}", Hex(*chain), crate::store::file::SUFFIX))
            .collect();
        let number = self.broker.save_prefixes().unwrap();
        let report = self.run_store(number);
        self.log.push(format!("saved: {:?}", report.prefixes));
        let refused = report.prefixes.iter().filter(|line| line.outcome == StoreOutcome::Refused);
        let name = |line: &StoredReport| line.file.file_name().unwrap().to_str().unwrap().to_owned();
        assert_eq!(refused.map(name).collect::<BTreeSet<_>>(), gaps);
        for line in &report.prefixes {
            self.saved += u64::from(line.outcome == StoreOutcome::Saved);
        }
        assert!(self.outputs().is_empty());
        self.compare();
    }

    /// Loading takes blocks as its tenants' own requests would: which it was is the broker's word, that nothing else has
    /// changed is not.
    fn load(&mut self, dice: &mut Dice<'_>) {
        if self.stored.is_none() {
            return;
        }
        if dice.one_in(2) {
            // As if they had been lost: then there is something to load.
            let pins: Vec<Digest> = self.broker.state.prefixes.pins().map(|(chain, _)| *chain).collect();
            for chain in pins {
                self.unpin(chain);
                self.judge_retry(None);
            }
            self.evict(u64::MAX, None);
            self.judge_retry(None);
        }
        let number = self.broker.load_prefixes().unwrap();
        let report = self.run_store(number);
        self.log.push(format!("loaded: {:?}", report.prefixes));
        for line in report.prefixes.iter().filter(|l| l.outcome == StoreOutcome::Loaded) {
            self.loaded += 1;
            let stem = line.file.file_stem().unwrap().to_str().unwrap();
            let chain: Digest = Hex::try_from(stem).unwrap().0;
            let prefixes = &self.broker.state.prefixes;
            let (_, pin) = prefixes.pins().find(|(c, _)| **c == chain).expect("it is pinned");
            let mut digests = prefixes.chain(&chain);
            digests.truncate(pin.blocks as usize);
            assert_eq!(digests.len(), line.blocks as usize, "all of it is there");
            self.model.pins.insert(self.names[&chain].clone(), digests.len());
            for digest in digests {
                let block = prefixes.get(&digest).unwrap();
                let (name, whole) = (self.names[&digest].clone(), self.names[&chain].clone());
                let extent = block.place.extent;
                if let Some(life) = self.model.lives.get_mut(&block) {
                    assert_eq!(life.published.as_ref(), Some(&name));
                    life.pins.insert(whole);
                    continue;
                }
                if !self.model.owned.contains_key(&extent) {
                    assert!(self.model.clean > 0, "{extent} is new and there was no clean one");
                    self.model.clean -= 1;
                    self.model.owned.insert(extent, (name.0, name.1, BTreeSet::new()));
                }
                let owner = &self.model.owned[&extent];
                assert_eq!((owner.0, owner.1), (name.0, name.1), "{extent} is another's");
                let before = self.model.newest.insert(block.place, (block.generation, 0));
                assert!(block.generation > before.map_or(0, |b| b.0), "a life is granted twice");
                let (pins, published) = (BTreeSet::from([whole]), Some(name));
                self.model.lives.insert(block, Life { sealed: true, pins, published, ..Life::default() });
                self.seen.push(block);
            }
        }
        assert!(self.outputs().is_empty());
        self.model.settle();
        self.compare();
    }

    /// A report that is right, or nearly.
    fn some_report(&mut self, dice: &mut Dice<'_>, client: u64, session: u64) -> Report {
        let s = self.model.sessions.get(&session).cloned().unwrap_or_default();
        let mine = |(b, l): (&BlockId, &Life)| {
            let format = self.model.owned[&b.place.extent].1 == s.format;
            (l.credit == Some(client) && format).then_some(*b)
        };
        let mut credit: Vec<BlockId> = self.model.lives.iter().filter_map(mine).collect();
        let mut first = s.end();
        let mut blocks = Vec::new();
        if dice.one_in(4) {
            // Entries that are there already, some of them replaced: copy-on-write.
            first = s.head + dice.roll(s.table.len() + 1) as u32;
            blocks.extend(&s.table[(first - s.head) as usize..]);
            if dice.one_in(2) {
                blocks.truncate(dice.roll(blocks.len() + 1));
            }
            for block in &mut blocks {
                if dice.one_in(3) && !credit.is_empty() {
                    *block = credit.swap_remove(dice.roll(credit.len()));
                }
            }
        }
        if first + blocks.len() as u32 >= s.end() {
            for _ in 0..dice.roll(3) {
                if !credit.is_empty() {
                    blocks.push(credit.swap_remove(dice.roll(credit.len())));
                }
            }
        }
        let end = u64::from(s.end()).max(u64::from(first) + blocks.len() as u64) * s.per_block();
        let tokens = end.saturating_sub(dice.roll(s.per_block() as usize) as u64);
        let mut report = Report { tokens, first, blocks };
        match dice.roll(24) {
            0 => report.blocks.extend(dice.pick(&self.seen)),
            1 => report.blocks.extend(report.blocks.first().copied()),
            2 => report
                .blocks
                .extend(dice.pick(&self.seen).map(|b| BlockId { generation: b.generation + 1, ..b })),
            3 => report.first += 1,
            4 => report.first = report.first.wrapping_sub(1 + dice.roll(3) as u32),
            5 => report.tokens = u64::MAX,
            _ => {}
        }
        report
    }

    fn step(&mut self, dice: &mut Dice<'_>) {
        self.model.note_cached();
        let ready: Vec<u64> =
            self.model.clients.keys().filter(|c| !self.model.waiters.contains_key(c)).copied().collect();
        let fate = |dice: &mut Dice<'_>, revokes: bool| Fate {
            others: if revokes { 0 } else { (dice.roll(5) as u64).saturating_sub(2) },
            no_memory: dice.one_in(6),
        };
        if dice.one_in(3) {
            let fails = dice.one_in(8);
            let fate = fate(dice, self.model.revokes);
            self.work(fails, fate);
        }
        if dice.one_in(5) {
            self.pass_time(dice);
        }
        if dice.one_in(40) {
            self.restart();
        }
        if dice.one_in(60) {
            return self.change_limits(dice);
        }
        if dice.one_in(30) {
            return self.lend(dice);
        }
        // A drain is a short one.
        if dice.one_in(if self.model.draining { 6 } else { 15 }) {
            return self.operate(dice);
        }
        let kind = dice.roll(68);
        if self.model.clients.len() < 5 && kind == 0 || ready.is_empty() {
            if self.model.clients.len() < 7 {
                return self.connect([1000, 1000, 1001, LIMITED.0][dice.roll(4)]);
            }
            // Jobs that find nothing else to do may be all that is left, and not due yet.
            if self.jobs.is_empty() {
                return self.pass_time(dice);
            }
            let fate = fate(dice, self.model.revokes);
            return self.work(false, fate);
        }
        if kind == 1 {
            let all: Vec<u64> = self.model.clients.keys().copied().collect();
            let client = dice.pick(&all).unwrap();
            self.log.push(format!("client {client} goes"));
            self.goes(client);
            return;
        }
        // The clients that were made ready above may wait by now.
        let Some(client) = dice.pick(&ready).filter(|c| !self.model.waiters.contains_key(c)) else { return };
        let all: Vec<u64> = self.model.sessions.keys().copied().collect();
        let mut own: Vec<u64> =
            all.iter().filter(|id| self.model.sessions[*id].client == client).copied().collect();
        if dice.one_in(3) {
            own.extend(self.model.lost.keys().filter(|(c, _)| *c == client).map(|(_, id)| *id));
        }
        let mut session = dice.pick(&own).unwrap_or(0);
        if dice.one_in(50) {
            // Somebody else's, or nobody's.
            session = dice.pick(&all).unwrap_or(u64::MAX);
        }
        let format = [0, 0, 1, 2][dice.roll(4)];
        if own.is_empty() || kind < 5 {
            let max_tokens = if dice.one_in(5) { dice.roll(60) as u64 } else { 0 };
            let max_tokens = if dice.one_in(30) { u64::MAX } else { max_tokens };
            let priority = [0, 0, 20, 80, 255, 256][dice.roll(6)];
            return self.ask(client, 0, Ask::Open { format, max_tokens, priority });
        }
        let s = self.model.sessions.get(&session).cloned().unwrap_or_default();
        let report = self.some_report(dice, client, session);
        // Few different tokens, so that prefixes are found.
        let tokens = |dice: &mut Dice<'_>, n: usize| {
            (0..n).map(|i| (i as u32 + u32::from(dice.one_in(24))) % 3).collect()
        };
        let per_block = s.per_block() as usize;
        let ask = match kind {
            5..8 => Ask::Reserve { format, want: dice.roll(7) as u32 },
            8..24 => {
                let want = dice.roll(5) as u32;
                let least = (want + u32::from(dice.one_in(20))).saturating_sub(dice.roll(2) as u32);
                let want = if dice.one_in(40) { u32::MAX } else { want };
                Ask::Grow { report, want, least }
            }
            24..30 => {
                let tokens =
                    (report.tokens.min(1 << 20) as usize).saturating_sub(dice.roll(4 * per_block)) as u64;
                let head = s.head + if dice.one_in(4) { dice.roll(3) as u32 } else { 0 };
                Ask::Trim { report, tokens, head, release: dice.one_in(2) }
            }
            30..34 => {
                let mine = self.model.lives.iter().filter(|(_, l)| l.credit == Some(client)).map(|(b, _)| *b);
                let mine: Vec<_> = mine.collect();
                let mut blocks: Vec<_> = (0..dice.roll(3)).filter_map(|_| dice.pick(&mine)).collect();
                if dice.one_in(5) {
                    blocks.extend(dice.pick(&self.seen));
                }
                Ask::Free { blocks }
            }
            34..38 => Ask::Fork { report },
            38..46 => {
                let from = s.names.len() as u32 + u32::from(dice.one_in(20));
                let there = (report.tokens.min(1 << 10) as usize / per_block).saturating_sub(from as usize);
                let count = dice.roll(there + 1) * per_block + usize::from(dice.one_in(20));
                let start = from as usize * per_block;
                let all: Vec<u32> = tokens(dice, start + count);
                Ask::Seal { report, from, tokens: all[start..].to_vec() }
            }
            46..49 => Ask::Pin { report, blocks: dice.roll(4) as u32, on: dice.one_in(3) },
            49 | 50 => {
                let from = if dice.one_in(2) { 0 } else { s.names.len() as u32 };
                let start = from as usize * per_block;
                let n = start + dice.roll(4) * per_block + usize::from(dice.one_in(20));
                let all: Vec<u32> = tokens(dice, n);
                Ask::Skip { from, tokens: all[start..].to_vec() }
            }
            51..56 => {
                let start = s.end() as usize * per_block;
                let n = start + dice.roll(4 * per_block + 2);
                let all: Vec<u32> = tokens(dice, n);
                Ask::Attach { tokens: all[start..].to_vec(), more: dice.one_in(3) }
            }
            56..59 => {
                let known: Vec<_> = self.model.owned.keys().copied().collect();
                Ask::Return { extent: dice.pick(&known).unwrap_or(ExtentId(9999)) }
            }
            59 | 60 => Ask::Query { format },
            61 => Ask::Hello,
            62..66 => Ask::Admit { tokens: dice.roll(14 * per_block) as u64, evict: dice.one_in(2) },
            _ => Ask::Close { report },
        };
        let asks_for_blocks = matches!(ask, Ask::Reserve { .. } | Ask::Grow { .. } | Ask::Admit { .. });
        let ask =
            if asks_for_blocks && self.extents_waiter().is_some() { Ask::Query { format } } else { ask };
        let hangs_up = matches!(ask, Ask::Hello);
        self.ask(client, session, ask);
        if hangs_up {
            self.goes(client);
        }
    }

    fn goes(&mut self, client: u64) {
        let wanted = self.model.wanted.len();
        self.model.disconnect(client);
        self.model.settle();
        let waiting = if self.model.wanted.len() < wanted { self.retry() } else { None };
        self.broker.disconnect(ClientId(client));
        self.judge_retry(waiting);
    }
}

fn parse_grant(body: &[u8]) -> (u64, BTreeSet<ExtentId>, Vec<(BlockId, u32)>) {
    let mut r = Reader::new("grant", body);
    let head: wire::Grant = *r.one().unwrap();
    let extents: &[wire::ExtentInfo] = r.many(head.extents.get(), wire::MAX_FDS).unwrap();
    let blocks: &[wire::GrantedBlock] = r.many(head.blocks.get(), wire::MAX_BLOCKS).unwrap();
    r.end().unwrap();
    let extents = extents.iter().map(|e| ExtentId(e.extent.get())).collect();
    (head.tokens.get(), extents, blocks.iter().map(|b| (b.block.id(), b.flags.get())).collect())
}

/// Steps of all cases together: `KVBROKER_MODEL_STEPS` for long runs.
fn steps() -> usize {
    std::env::var("KVBROKER_MODEL_STEPS").ok().and_then(|s| s.parse().ok()).unwrap_or(150_000)
}

const STEPS_PER_CASE: usize = 300;

fn runner(cases: usize) -> TestRunner {
    let config = Config {
        cases: cases.max(1) as u32,
        failure_persistence: None,
        max_shrink_iters: 400,
        ..Config::default()
    };
    // The same cases every time; a long run takes other ones from its number of steps.
    let seed = [(steps() % 251) as u8; 32];
    TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &seed))
}

fn numbers() -> impl Strategy<Value = Vec<u32>> {
    proptest::collection::vec(any::<u32>(), STEPS_PER_CASE * 16)
}

#[test]
fn the_broker_does_what_a_naive_model_says_at_every_step() {
    let totals = Mutex::new([0; 18]);
    runner(steps() / STEPS_PER_CASE)
        .run(&numbers(), |numbers| {
            let mut dice = Dice(numbers.iter());
            let mut run = Run::new(dice.one_in(2));
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                while dice.0.len() > 0 {
                    run.step(&mut dice);
                }
            }));
            if let Err(panic) = result {
                let tail = run.log.len().saturating_sub(40);
                eprintln!("the last steps:\n{}", run.log[tail..].join("\n"));
                std::panic::resume_unwind(panic);
            }
            let of_run = [
                run.granted / 10,
                run.found,
                run.evicted,
                run.lost,
                run.admitted,
                run.asked,
                run.withdrawn,
                run.quarantined,
                run.released,
                run.missed,
                run.recovered,
                run.lent,
                run.pressed,
                run.drained,
                run.saved,
                run.loaded,
                run.model.overnamed,
                run.rested,
            ];
            totals.lock().unwrap().iter_mut().zip(of_run).for_each(|(all, n)| *all += n);
            Ok(())
        })
        .unwrap();
    // A run in which something never happens proves nothing about it: tens of blocks granted, blocks found as prefixes,
    // blocks evicted, sessions lost, sessions admitted, extents asked back, requests withdrawn, extents quarantined, released, missed,
    // recovered, lent, evicted under pressure or by an operator, requests refused by a drain, prefixes saved and loaded,
    // forks and look-ups that would have named too many blocks, extents that went back because nobody used them.
    let totals = totals.into_inner().unwrap();
    assert!(totals.iter().all(|n| *n > 20), "{totals:?}");
}

#[test]
fn bytes_that_a_hostile_client_may_send_end_in_a_reply_and_never_in_a_panic() {
    runner(steps() / STEPS_PER_CASE)
        .run(&numbers(), |numbers| {
            let mut run = Run::new(true);
            let mut dice = Dice(numbers.iter());
            let mut refused = 0;
            while dice.0.len() > 0 {
                if run.broker.state.clients.len() < 4 {
                    run.connect(1000 + dice.roll(3) as u32);
                }
                let clients: Vec<ClientId> = run.broker.state.clients.keys().copied().collect();
                let client = dice.pick(&clients).unwrap();
                for job in run.broker.jobs() {
                    run.broker.done(job.run(&*run.heap));
                }
                if run.broker.is_waiting(client) {
                    run.broker.disconnect(client);
                    continue;
                }
                let message = hostile(&run, client, &mut dice);
                run.broker.request(client, &message);
                for output in run.broker.outputs() {
                    let (header, body) = wire::split(&output.message).unwrap();
                    assert!(output.message.len() <= wire::MAX_MESSAGE);
                    refused += u64::from(header.fault.get() != 0);
                    let grants =
                        [Verb::Grow, Verb::Reserve, Verb::Attach, Verb::Trim].map(|v| v as u16 | wire::REPLY);
                    if header.fault.get() == 0 && grants.contains(&header.opcode.get()) {
                        run.seen.extend(parse_grant(body).2.iter().map(|(b, _)| *b));
                    }
                    if output.last {
                        run.broker.disconnect(output.to);
                    }
                }
                run.broker.verify().unwrap();
                assert!(!run.broker.frozen);
            }
            assert!(refused > 10);
            Ok(())
        })
        .unwrap();
}

/// A request with a right header and a body of numbers that are small, huge or somebody's; at times cut, stretched, or
/// with bits turned over.
fn hostile(run: &Run, client: ClientId, dice: &mut Dice<'_>) -> Vec<u8> {
    let verb = Verb::ALL[dice.roll(Verb::ALL.len())];
    let sessions: Vec<u64> = run.broker.state.clients[&client].sessions.iter().map(|s| s.number).collect();
    let session = dice.pick(&sessions).unwrap_or(0);
    let mut w = Writer::request(verb, 1 + dice.roll(9) as u64, session);
    let word = |dice: &mut Dice<'_>| match dice.roll(12) {
        0 => u32::MAX,
        1 => u32::MAX - dice.roll(9) as u32,
        2 => 1 << dice.roll(32),
        3..6 => 0,
        _ => dice.roll(6) as u32,
    };
    if verb == Verb::Profile {
        wire::put_profile(&mut w, &profile(dice.roll(3)), 0);
    } else if verb == Verb::Open {
        let formats: Vec<u32> = run.broker.state.clients[&client].formats.iter().map(|f| f.0).collect();
        let format = dice.pick(&formats).unwrap_or(7).into();
        let max_tokens = u64::from(word(dice)).into();
        w.put(&wire::Open { format, max_tokens, ..wire::Open::default() });
    } else {
        let words = match verb {
            Verb::Grow | Verb::Seal | Verb::Pin => 6,
            Verb::Trim => 8,
            Verb::Fork | Verb::Close | Verb::Admit => 4,
            Verb::Hello => 10,
            _ => 2,
        };
        let blocks = if dice.one_in(2) { dice.roll(4) } else { 0 };
        let counted = match verb {
            Verb::Grow | Verb::Trim | Verb::Fork | Verb::Close | Verb::Pin | Verb::Seal => Some(3),
            Verb::Free => Some(0),
            _ => None,
        };
        for i in 0..words {
            let n = if Some(i) == counted && !dice.one_in(9) { blocks as u32 } else { word(dice) };
            w.put(&zerocopy::little_endian::U32::new(n));
        }
        if counted.is_some() {
            for _ in 0..blocks {
                if let Some(block) = dice.pick(&run.seen) {
                    w.put_blocks([block]);
                }
            }
        } else if matches!(verb, Verb::Attach | Verb::Skip) {
            for _ in 0..dice.roll(9) {
                w.put_tokens(&[word(dice)]);
            }
        }
    }
    let mut message = w.finish();
    match dice.roll(12) {
        0 => {
            let at = dice.roll(message.len());
            message[at] ^= 1 << dice.roll(8);
        }
        1 => message.truncate(dice.roll(message.len())),
        2 => message.push(dice.roll(256) as u8),
        3 => message = (0..dice.roll(90)).map(|_| dice.roll(256) as u8).collect(),
        _ => {}
    }
    if message.len() > 8 && dice.one_in(2) {
        let length = (message.len() as u32).to_le_bytes();
        message[4..8].copy_from_slice(&length);
    }
    message
}

#[test]
fn a_sequence_that_slides_past_the_last_number_of_a_block_is_refused_and_nobody_else_notices() {
    let mut run = Run::new(true);
    run.connect(1000);
    run.ask(1, 0, Ask::Open { format: 0, max_tokens: 0, priority: 0 });
    run.ask(1, 0, Ask::Reserve { format: 0, want: 3 });
    let session = *run.model.sessions.keys().next().unwrap();
    // Years of sliding in one step.
    let near_the_end = u32::MAX - 1;
    run.broker.state.sessions.values_mut().next().unwrap().head = near_the_end;
    run.model.sessions.get_mut(&session).unwrap().head = near_the_end;
    let blocks: Vec<_> = run.model.lives.keys().copied().collect();
    let mut w = Writer::request(Verb::Grow, 99, session);
    let report = wire::Report { tokens: 0.into(), first: near_the_end.into(), used: 3.into() };
    w.put(&wire::Grow { report, want: 0.into(), least: 0.into() });
    w.put_blocks(blocks);
    run.broker.request(ClientId(1), &w.finish());
    let reply = run.broker.outputs().pop_front().unwrap();
    let (header, _) = wire::split(&reply.message).unwrap();
    assert_eq!(Fault::from_code(header.fault.get()), Some(Fault::NeverFits));
    run.compare();
}
