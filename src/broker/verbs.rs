//! The verbs, one function each: decode, check every claim, change state, answer.
//!
//! Owns no state. Invariant: a function that returns an error has changed nothing, except that a report of the table
//! that came with the request and was right has been taken in.

use super::prefix;
use super::{Answer, Broker, Format, Refused, Reply, Session};
use crate::broker::grant::{Granted, Want};
use crate::id::{BlockId, ClientId, ExtentId, FormatId, SessionId};
use crate::pool::{Block, Dropped, Extent};
use crate::wire::{self, Fault, MAX_BLOCKS, MAX_FDS, MAX_TOKENS, Reader, Verb, WireError};
use zerocopy::little_endian::U32;

type Answered = Result<Answer, Refused>;

/// Prefixes that a tenant may have pinned at one time: what each costs the broker beside the names of its blocks, which
/// `limits.table-blocks` bounds, is small, and so is what looks at every pin.
const PINS_OF_A_TENANT: usize = 64;

fn done(reply: Reply) -> Answered {
    Ok(Answer::Now(reply))
}

/// A field that has no meaning beyond 0 to `most`: what is refused today can get a meaning tomorrow.
fn one_of(what: &'static str, field: U32, most: u32) -> Result<u32, WireError> {
    match field.get() {
        value if value <= most => Ok(value),
        value => Err(WireError::Field { what, value, most }),
    }
}

fn empty() -> Answered {
    done(Reply::default())
}

impl Broker {
    pub(super) fn dispatch(
        &mut self,
        client: ClientId,
        verb: Verb,
        session: SessionId,
        body: &[u8],
    ) -> Answered {
        let greeted = self.client(client).greeted;
        if greeted == (verb == Verb::Hello) {
            return Err(Refused::bad(match greeted {
                true => "hello has been said on this connection",
                false => "the first message of a connection is hello",
            }));
        }
        let r = Reader::new(verb.name(), body);
        match verb {
            Verb::Hello => self.hello(client, r),
            Verb::Profile => self.profile(client, body),
            Verb::Open => self.open(client, r),
            Verb::Reserve => self.reserve(client, r),
            Verb::Grow => self.grow(client, session, r),
            Verb::Trim => self.trim(client, session, r),
            Verb::Free => self.free(client, r),
            Verb::Fork => self.fork(client, session, r),
            Verb::Seal => self.seal(client, session, r),
            Verb::Pin => self.pin(client, session, r),
            Verb::Attach => self.attach(client, session, r),
            Verb::ReturnExtent => self.return_extent(client, r),
            Verb::Query => self.query(client, session, r),
            Verb::Close => self.close(client, session, r),
            Verb::Window => self.window(client, session, r, Default::default()),
            Verb::CloseWindow => self.end_window(client, r),
            Verb::Admit => self.admit_session(client, session, r),
            Verb::Skip => self.skip(client, session, r),
        }
    }

    fn hello(&mut self, client: ClientId, mut r: Reader<'_>) -> Answered {
        let hello: &wire::Hello = r.one()?;
        r.end()?;
        if hello.magic.get() != wire::MAGIC {
            return Err(Refused::bad("this is not the protocol of kvbroker"));
        }
        if hello.version.get() != wire::VERSION {
            let (theirs, ours) = (hello.version.get(), wire::VERSION);
            let text = format!(
                "protocol version {theirs} is not spoken here, version {ours} is: use the library of the broker's version"
            );
            return Err(Refused::bad(text).numbers(theirs.into(), ours.into()));
        }
        let label = wire::label_text(&hello.label)?;
        let copies = self.common_places_for(self.client(client).tenant);
        let c = self.state.clients.get_mut(&client).expect("checked by the caller");
        c.label = label;
        c.greeted = true;
        let mut reply = Reply::default();
        reply.body.put(&wire::Welcome {
            version: wire::VERSION.into(),
            tenant: c.tenant.0.into(),
            instance: self.instance.into(),
            extent_bytes: self.state.pool.extent_bytes().into(),
            // Those that are missing may come yet: the client makes room for them.
            extents: self.state.wanted_extents.max(self.state.pool.extents().len() as u32).into(),
            page_bytes: (crate::map::page_bytes() as u32).into(),
            backend: self.heap.backend().code().into(),
            copies: copies.into(),
        });
        done(reply)
    }

    fn profile(&mut self, client: ClientId, body: &[u8]) -> Answered {
        let profile = wire::read_profile(body)?;
        let known = self.state.formats.iter().find(|(_, f)| f.profile == profile).map(|(id, _)| *id);
        let id = known.unwrap_or(FormatId(self.state.next_format));
        let cut = self.cut(id, &profile);
        if cut.slots == 0 {
            let (need, have) = (cut.slot_bytes, self.state.pool.extent_bytes());
            let text = format!(
                "a block of {need} bytes never fits an extent of {have}: use fewer tokens per block, or configure extents of at least {need} bytes"
            );
            return Err(Refused::new(Fault::NeverFits, text).numbers(need, have));
        }
        let most = self.policy.profiles_per_connection;
        let c = self.state.clients.get_mut(&client).expect("checked by the caller");
        if c.formats.len() as u32 >= most && !c.formats.contains(&id) {
            return Err(Refused::new(
                Fault::OverLimit,
                format!(
                    "a connection registers at most {most} profiles, as limits.profiles-per-connection allows"
                ),
            ));
        }
        if !c.formats.contains(&id) {
            c.formats.push(id);
        }
        // Numbered by connection: what geometries others have, and in which order they came, is not the client's business.
        let number = 1 + c.formats.iter().position(|f| *f == id).expect("just looked at") as u32;
        let tenant = c.tenant;
        if known.is_none() {
            self.state.next_format += 1;
            self.state.formats.insert(id, Format { profile, cut });
        }
        let mut reply = Reply::default();
        reply.body.put(&wire::Format {
            format: number.into(),
            blocks_per_extent: cut.slots.into(),
            slot_bytes: cut.slot_bytes.into(),
            capacity: self.capacity(tenant, &cut).into(),
        });
        done(reply)
    }

    /// What a connection calls its format `number`.
    fn format(&self, client: ClientId, number: u32) -> Result<(FormatId, &Format), Refused> {
        let at = (number as usize).checked_sub(1);
        let id = at.and_then(|at| self.client(client).formats.get(at)).copied();
        let format = id.and_then(|id| Some((id, self.state.formats.get(&id)?)));
        format.ok_or_else(|| Refused::bad(format!("format {number} was not registered on this connection")))
    }

    fn open(&mut self, client: ClientId, mut r: Reader<'_>) -> Answered {
        let open: wire::Open = *r.one()?;
        r.end()?;
        self.begins("no new session")?;
        let Ok(asked) = u8::try_from(open.priority.get()) else {
            return Err(Refused::bad(format!(
                "priority {}: at most 255, or 0 for the tenant's own",
                open.priority
            )));
        };
        let (format, f) = self.format(client, open.format.get())?;
        let (tenant, needed) = (self.client(client).tenant, f.profile.blocks_for(open.max_tokens.get()));
        let capacity = self.capacity(tenant, &f.cut);
        if needed > capacity {
            let most = capacity * u64::from(f.profile.tokens_per_block());
            let text = format!(
                "{} tokens will never fit: this tenant can hold at most {most} at once",
                open.max_tokens
            );
            return Err(Refused::new(Fault::NeverFits, text).numbers(open.max_tokens.get(), most));
        }
        let label = wire::label_text(&open.label)?;
        let most = self.state.tenancy.of(tenant).priority;
        let session = Session {
            priority: if asked == 0 { most } else { asked.min(most) },
            promised: 0,
            admitted: 0,
            born: 0,
            client,
            tenant,
            format,
            label,
            model: open.model,
            tokens: 0,
            head: 0,
            table: Vec::new(),
            names: Vec::new(),
            names_from: 0,
            walk: Default::default(),
        };
        let id = self.add_session(session)?;
        let mut reply = Reply { session: id.number, ..Reply::default() };
        reply.body.put(&wire::Opened { session: id.number.into() });
        done(reply)
    }

    fn add_session(&mut self, session: Session) -> Result<SessionId, Refused> {
        let most = self.policy.sessions_per_connection;
        let tenant = session.tenant;
        let number = 1 + self.state.session_numbers.get(&tenant).copied().unwrap_or(0);
        let id = SessionId { tenant, number };
        let c = self.state.clients.get_mut(&session.client).expect("checked by the caller");
        // A session that was lost counts until the client has let go of it.
        if (c.sessions.len() + c.lost.len()) as u32 >= most {
            let text = format!(
                "this connection has {most} sessions open, as many as limits.sessions-per-connection allows"
            );
            return Err(Refused::new(Fault::OverLimit, text).numbers(u64::from(most) + 1, most.into()));
        }
        c.sessions.insert(id);
        self.tables.change(session.tenant, 0, session.table.len());
        self.state.session_numbers.insert(tenant, number);
        self.state.sessions_born += 1;
        let born = self.state.sessions_born;
        self.state.sessions.insert(id, Session { born, ..session });
        Ok(id)
    }

    pub(super) fn session(&self, client: ClientId, id: SessionId) -> Result<&Session, Refused> {
        if self.client(client).lost.contains_key(&id) {
            let text = format!("{id} was ended: a session of higher priority needed its blocks; close it");
            return Err(Refused::new(Fault::SessionLost, text));
        }
        let session = self.state.sessions.get(&id).filter(|s| s.client == client);
        // The same words whether it is another's or nobody's: ids of others are none of the asker's business.
        session.ok_or_else(|| Refused::new(Fault::Stale, format!("there is no {id} on this connection")))
    }

    fn session_mut(&mut self, id: SessionId) -> &mut Session {
        self.state.sessions.get_mut(&id).expect("checked before")
    }

    /// Takes in what the client says of a table: all of it, or nothing.
    pub(super) fn apply_report(
        &mut self,
        client: ClientId,
        id: SessionId,
        report: &wire::Report,
        blocks: &[wire::WireBlock],
    ) -> Result<(), Refused> {
        let s = self.session(client, id)?;
        let (first, head) = (report.first.get(), s.head);
        if first < head || first > s.end() {
            let text =
                format!("{id}: the report starts at block {first}, the table holds {head} to {}", s.end());
            return Err(Refused::bad(text));
        }
        let tokens_per_block = u64::from(self.state.formats[&s.format].profile.tokens_per_block());
        let end = u64::from(s.end()).max(u64::from(first) + blocks.len() as u64);
        if end > u64::from(u32::MAX) {
            let text = format!("{id}: block {end} of one sequence is more than can be numbered");
            return Err(Refused::new(Fault::NeverFits, text).numbers(end, u32::MAX.into()));
        }
        if report.tokens.get() > end * tokens_per_block {
            let text = format!("{id}: {} tokens do not fit a table of {end} blocks", report.tokens);
            return Err(Refused::bad(text));
        }
        let (at, tenant, format) = ((first - head) as usize, s.tenant, s.format);
        let mut seen = std::collections::BTreeSet::new();
        for (i, block) in blocks.iter().enumerate() {
            let claim = block.id();
            if s.table.get(at + i) == Some(&claim) {
                continue;
            }
            let block = self.state.pool.check_claim_of(tenant, claim)?;
            if block != Block::Credit(client) || !seen.insert(claim) {
                return Err(crate::pool::ClaimError::NotCredit(claim).into());
            }
            if self.state.pool.format_of(claim.place) != Some(format) {
                return Err(Refused::bad(format!("{claim} is of another format than {id}")));
            }
        }
        let new: Vec<BlockId> = blocks.iter().map(wire::WireBlock::id).collect();
        let s = self.session_mut(id);
        // Entries behind the report stay: a long table is reported in several messages.
        let until = s.table.len().min(at + new.len());
        let before = s.table.len();
        let old: Vec<BlockId> = s.table.splice(at..until, new.iter().copied()).collect();
        let after = s.table.len();
        s.tokens = report.tokens.get();
        let changed = (0..old.len()).find(|&i| new[i] != old[i]);
        if let Some(changed) = changed {
            s.unseal_from(first + changed as u32);
        }
        self.tables.change(tenant, before, after);
        for (i, claim) in new.iter().enumerate() {
            if old.get(i) != Some(claim) {
                self.state.pool.hold(*claim, client)?;
            }
        }
        for (i, block) in old.iter().enumerate().rev() {
            if new[i] != *block {
                self.let_go(*block, None);
            }
        }
        if changed.is_some() {
            self.check_windows(id);
        }
        Ok(())
    }

    fn reserve(&mut self, client: ClientId, mut r: Reader<'_>) -> Answered {
        let reserve: wire::Reserve = *r.one()?;
        r.end()?;
        self.begins("no more blocks")?;
        let want = reserve.want.get();
        let (format, _) = self.format(client, reserve.format.get())?;
        let priority = self.state.tenancy.of(self.client(client).tenant).priority;
        let want = Want { format, want, least: want, has: 0, near: None, promised: 0, priority };
        match self.grant(client, want)? {
            Granted::Later => Ok(Answer::Later),
            Granted::Blocks(taken) => Ok(self.hand_over(client, 0, &taken)),
        }
    }

    fn grow(&mut self, client: ClientId, id: SessionId, mut r: Reader<'_>) -> Answered {
        let grow: wire::Grow = *r.one()?;
        let used = r.many(grow.report.used.get(), MAX_BLOCKS)?;
        r.end()?;
        self.apply_report(client, id, &grow.report, used)?;
        let s = self.session(client, id)?;
        let want = Want {
            format: s.format,
            want: self.undrained(grow.want.get(), grow.least.get(), s.promised)?,
            least: grow.least.get(),
            has: self.in_pool(s) as u32,
            near: s.table.last().map(|b| b.place),
            promised: s.promised,
            priority: s.priority,
        };
        let lifted = self.lift(client, id, want.least);
        let granted = match lifted.any() {
            true => self.grant(client, Want { want: want.least, ..want }),
            false => self.grant(client, want),
        };
        self.set_down(lifted);
        match granted? {
            Granted::Later => Ok(Answer::Later),
            Granted::Blocks(taken) => {
                self.use_promise(id, taken.len());
                let tokens = grow.report.tokens.get();
                Ok(self.hand_over(client, tokens, &taken))
            }
        }
    }

    fn trim(&mut self, client: ClientId, id: SessionId, mut r: Reader<'_>) -> Answered {
        let trim: wire::Trim = *r.one()?;
        let used = r.many(trim.report.used.get(), MAX_BLOCKS)?;
        r.end()?;
        let release = one_of("trim: release", trim.release, 1)? == 1;
        self.apply_report(client, id, &trim.report, used)?;
        let s = self.session(client, id)?;
        let (tokens, head) = (trim.tokens.get(), trim.head.get());
        if tokens > s.tokens {
            let text = format!("{id} holds {} tokens: it cannot be trimmed to {tokens}", s.tokens);
            return Err(Refused::bad(text));
        }
        let keep = self.state.formats[&s.format].profile.blocks_for(tokens) as u32;
        if head < s.head || head > keep {
            let text =
                format!("{id}: the head can be dropped from block {} to {keep}, not to {head}", s.head);
            return Err(Refused::bad(text));
        }
        let to_credit = (!release).then_some(client);
        let old_head = s.head;
        let s = self.session_mut(id);
        let (tenant, before) = (s.tenant, s.table.len());
        let tail = s.table.split_off((keep.max(old_head) - old_head) as usize);
        s.unseal_from(keep);
        let front = s.drop_head(head);
        s.tokens = tokens;
        let after = s.table.len();
        self.tables.change(tenant, before, after);
        let (mut returned, mut freed) = (Vec::new(), 0);
        for block in tail.into_iter().rev().chain(front) {
            // What one reply cannot name is freed: credit that its owner does not know of would be lost. And credit is any
            // session's, which an extent that is set aside must not become.
            let aside = self.state.pool.is_aside(block.place.extent);
            let to_credit = to_credit.filter(|_| returned.len() < MAX_BLOCKS && !aside);
            match self.let_go(block, to_credit) {
                Dropped::Credit => returned.push((block, wire::RETURNED)),
                // Of an extent that is set aside, a free place backs no promise.
                Dropped::Freed => freed += u32::from(!aside),
                Dropped::Kept | Dropped::Cached => {}
            }
        }
        self.check_windows(id);
        self.restore_promise(id, freed);
        done(self.grant_reply(tokens, returned))
    }

    fn free(&mut self, client: ClientId, mut r: Reader<'_>) -> Answered {
        let free: &wire::Free = r.one()?;
        let blocks: &[wire::WireBlock] = r.many(free.count.get(), MAX_BLOCKS)?;
        r.end()?;
        one_of("free: reserved", free.reserved, 0)?;
        let mut seen = std::collections::BTreeSet::new();
        let tenant = self.client(client).tenant;
        for block in blocks {
            let claim = block.id();
            if self.state.pool.check_claim_of(tenant, claim)? != Block::Credit(client) {
                return Err(crate::pool::ClaimError::NotCredit(claim).into());
            }
            if !seen.insert(claim) {
                return Err(Refused::bad(format!("{claim} is named twice")));
            }
        }
        for claim in seen {
            self.state.pool.free_credit(claim, client)?;
            self.state.pool.release_if_idle(claim.place.extent);
        }
        empty()
    }

    fn fork(&mut self, client: ClientId, id: SessionId, mut r: Reader<'_>) -> Answered {
        let report: wire::Report = *r.one()?;
        let used = r.many(report.used.get(), MAX_BLOCKS)?;
        r.end()?;
        self.apply_report(client, id, &report, used)?;
        self.begins("no new session")?;
        let s = self.session(client, id)?;
        self.may_name(s.tenant, s.table.len(), "fork shorter ones")?;
        // What was promised to the one is not promised to the other.
        let twin = Session { promised: 0, admitted: 0, ..s.clone() };
        let blocks = twin.table.clone();
        self.may_fork(id, &blocks)?;
        let new = self.add_session(twin)?;
        self.share(&blocks);
        let mut reply = Reply { session: new.number, ..Reply::default() };
        reply.body.put(&wire::Opened { session: new.number.into() });
        done(reply)
    }

    fn seal(&mut self, client: ClientId, id: SessionId, mut r: Reader<'_>) -> Answered {
        let seal: wire::Seal = *r.one()?;
        let tokens: &[U32] = r.many(seal.count.get(), MAX_TOKENS)?;
        let used = r.many(seal.report.used.get(), MAX_BLOCKS)?;
        r.end()?;
        self.apply_report(client, id, &seal.report, used)?;
        let s = self.session(client, id)?;
        let profile = &self.state.formats[&s.format].profile;
        let per_block = profile.tokens_per_block();
        let (from, blocks) = (seal.from.get(), seal.count.get() / per_block);
        if from != s.sealed() || seal.count.get() % per_block != 0 {
            let text = format!(
                "{id}: blocks are sealed one after the other from block {}, and whole ({per_block} tokens)",
                s.sealed()
            );
            return Err(Refused::bad(text));
        }
        let end = u64::from(from) + u64::from(blocks);
        if from < s.head || end * u64::from(per_block) > s.tokens {
            let text = format!(
                "{id}: blocks {from} to {end} are not all there and written ({} tokens are)",
                s.tokens
            );
            return Err(Refused::bad(text));
        }
        let mut name = match s.names.last() {
            Some(name) => *name,
            None => prefix::root(s.tenant, &s.model, profile),
        };
        let to_seal: Vec<BlockId> = (from..from + blocks).filter_map(|n| s.block(n)).collect();
        let tokens: Vec<u32> = tokens.iter().map(|t| t.get()).collect();
        self.publish_again(id);
        let mut duplicates = 0;
        for (i, (block, tokens)) in to_seal.into_iter().zip(tokens.chunks(per_block as usize)).enumerate() {
            let parent = (from as usize + i > 0).then_some(name);
            name = prefix::child(&name, tokens);
            // A common block behind one that was replaced: sealed it is, and its name is its donor's.
            if !block.place.extent.is_copy() {
                self.state.pool.seal(block.place);
            }
            duplicates += u32::from(!self.publish(id, name, parent, block));
            self.session_mut(id).names.push(name);
        }
        self.session_mut(id).walk.end_at(0);
        let mut reply = Reply::default();
        reply.body.put(&wire::Counted { blocks: blocks.into(), duplicates: duplicates.into() });
        done(reply)
    }

    /// Whether a format is of layers with a sliding window.
    pub(super) fn is_windowed(&self, format: FormatId) -> bool {
        self.state.formats.get(&format).is_some_and(|f| f.profile.groups().iter().any(|g| g.window.is_some()))
    }

    fn pin(&mut self, client: ClientId, id: SessionId, mut r: Reader<'_>) -> Answered {
        let pin: wire::Pin = *r.one()?;
        let used = r.many(pin.report.used.get(), MAX_BLOCKS)?;
        r.end()?;
        self.apply_report(client, id, &pin.report, used)?;
        let s = self.session(client, id)?;
        let (blocks, on) = (pin.blocks.get(), one_of("pin: on", pin.on, 1)? == 1);
        // Of layers with a window, whoever goes on after these blocks reads the last window only.
        let profile = &self.state.formats[&s.format].profile;
        let per_block = u64::from(profile.tokens_per_block());
        let first = (profile.first_visible(0, u64::from(blocks) * per_block) / per_block) as u32;
        if blocks == 0 {
            let text = format!("no whole block: whole blocks of {per_block} tokens are pinned");
            return Err(Refused::bad(text));
        }
        if blocks > s.sealed() || first < s.head {
            let text = format!(
                "{id} has {} sealed blocks from block {} on: it cannot pin blocks {first} to {blocks}",
                s.sealed().saturating_sub(s.head),
                s.head
            );
            return Err(Refused::bad(text));
        }
        let names = s.names[(first - s.names_from) as usize..(blocks - s.names_from) as usize].to_vec();
        let own: Vec<BlockId> = s.table[(first - s.head) as usize..(blocks - s.head) as usize].to_vec();
        let before = first.checked_sub(s.names_from + 1).map(|i| s.names[i as usize]);
        let tokens = u64::from(blocks) * per_block;
        let (tenant, format, model, chain) = (s.tenant, s.format, s.model, names[names.len() - 1]);
        let (label, pid) = (self.pin_label(client, id), self.client(client).pid);
        let named = self.state.prefixes.pins().find(|(c, _)| **c == chain).map_or(0, |(_, pin)| pin.blocks);
        if on {
            let new = names.iter().zip(&own).filter(|(_, b)| !b.place.extent.is_copy());
            let new = new.filter(|(n, _)| !self.state.prefixes.is_pinned(n)).count() as u64;
            let bytes = new * self.state.formats[&format].cut.slot_bytes;
            let of_tenant =
                self.state.prefixes.pins().filter(|(c, p)| p.tenant == tenant && **c != chain).count();
            if of_tenant >= PINS_OF_A_TENANT {
                let text = format!(
                    "this tenant has {of_tenant} prefixes pinned, as many as there can be; unpin others"
                );
                return Err(Refused::new(Fault::OverLimit, text));
            }
            let (pinned, most) = (self.state.pool.pinned_bytes(tenant), self.state.tenancy.of(tenant).pinned);
            if pinned.saturating_add(bytes) > most {
                let text = format!(
                    "{new} blocks of {bytes} bytes more would be pinned: this tenant has {pinned} pinned and its limit is {most} (limits.pinned); unpin others"
                );
                return Err(Refused::new(Fault::OverLimit, text).numbers(pinned + bytes, most));
            }
            let mine = own.iter().filter(|b| !b.place.extent.is_copy()).count();
            self.may_name(tenant, mine.saturating_sub(named as usize), "pin fewer blocks")?;
        }
        let mut changed = 0;
        let mut parent = before;
        let mut mine = 0;
        for (name, own) in names.iter().zip(own) {
            if own.place.extent.is_copy() {
                // It stays as long as its donor pins it.
                parent = Some(*name);
                continue;
            }
            mine += 1;
            // Whoever published it first may have gone; then this session's block takes the name.
            self.publish(id, *name, parent, own);
            parent = Some(*name);
            changed += u32::from(self.set_pinned(name, chain, on));
        }
        if on {
            // If it was pinned by a session with fewer copies of others', more of it is pinned than this session has.
            let pin = prefix::Pin { tenant, pid, label, blocks: mine.max(named), tokens, model };
            self.set_pin(chain, Some(pin).filter(|pin| pin.blocks > 0));
        } else if mine < named {
            self.lift_pin(&chain);
        } else {
            self.set_pin(chain, None);
        }
        let mut reply = Reply::default();
        reply.body.put(&wire::Counted { blocks: changed.into(), duplicates: 0.into() });
        done(reply)
    }

    fn attach(&mut self, client: ClientId, id: SessionId, mut r: Reader<'_>) -> Answered {
        let attach: wire::Attach = *r.one()?;
        let tokens: &[U32] = r.many(attach.count.get(), MAX_TOKENS)?;
        r.end()?;
        let more = one_of("attach: more", attach.more, 1)? == 1;
        if self.lookups_wait() {
            return Ok(Answer::Later);
        }
        let s = self.session(client, id)?;
        let profile = &self.state.formats[&s.format].profile;
        let per_block = profile.tokens_per_block() as usize;
        let (head, whole) = (s.head as usize * per_block, s.end() as usize * per_block);
        if s.sealed() != s.end() || s.tokens != whole as u64 {
            let text = format!(
                "{id} has tokens of its own: a prefix is attached at the start, before anything is written"
            );
            return Err(Refused::bad(text));
        }
        // By what could be found: what is there is looked at, and counted as a look-up, only by a request that is served.
        self.may_name(s.tenant, (tokens.len() / per_block).min(MAX_BLOCKS), "attach fewer tokens at a time")?;
        let mut name = match s.names.last() {
            Some(name) => *name,
            None => prefix::root(s.tenant, &s.model, profile),
        };
        let (tenant, mut walk) = (s.tenant, self.begin_walk(s, profile));
        let tokens: Vec<u32> = tokens.iter().map(|t| t.get()).collect();
        let prompt = whole + tokens.len();
        let (mut found, mut names, mut descriptors) = (Vec::new(), Vec::new(), 0);
        for block_tokens in tokens.chunks_exact(per_block) {
            name = prefix::child(&name, block_tokens);
            let mut further = walk.clone();
            further.step(block_tokens);
            let own = self.state.prefixes.look_up(&name);
            let Some(block) = own.or_else(|| self.find_common(tenant, &further)) else { break };
            let new = !self.holds_descriptor(block.place.extent, client)
                && !self.fresh_descriptors.contains(&block.place.extent);
            descriptors += usize::from(new);
            if found.len() == MAX_BLOCKS || descriptors > MAX_FDS {
                break;
            }
            if new {
                self.fresh_descriptors.insert(block.place.extent);
            }
            found.push(block);
            names.push(name);
            walk = further;
        }
        // The last token of a prompt is always computed: its logits are what decoding starts from.
        let mut held = whole + found.len() * per_block;
        if !more && held == prompt && held > head {
            held -= 1;
            if per_block == 1 && found.pop().is_some() {
                names.pop();
                walk = Default::default();
            }
        }
        self.share(&found);
        for block in &found {
            match block.place.extent {
                copy if copy.is_copy() => self.state.common.add_holder(copy, client),
                extent => _ = self.state.pool.add_holder(extent, client),
            }
        }
        self.fresh_descriptors.retain(|e| found.iter().any(|b| b.place.extent == *e));
        let s = self.session_mut(id);
        s.tokens = held as u64;
        s.table.extend(&found);
        s.names.extend(names);
        s.walk = walk;
        self.tables.change(tenant, 0, found.len());
        let blocks = found.into_iter().map(|b| (b, wire::SEALED)).collect();
        done(self.grant_reply(held as u64, blocks))
    }

    /// Whether the client has an extent's descriptor, and has not been told to close it.
    fn holds_descriptor(&self, extent: ExtentId, client: ClientId) -> bool {
        match extent.is_copy() {
            true => self.state.common.is_holder(extent, client),
            false => self.state.pool.is_holder(extent, client),
        }
    }

    fn skip(&mut self, client: ClientId, id: SessionId, mut r: Reader<'_>) -> Answered {
        let skip: wire::Skip = *r.one()?;
        let tokens: &[U32] = r.many(skip.count.get(), MAX_TOKENS)?;
        r.end()?;
        if self.lookups_wait() {
            return Ok(Answer::Later);
        }
        let s = self.session(client, id)?;
        let profile = &self.state.formats[&s.format].profile;
        let per_block = profile.tokens_per_block();
        let (from, count) = (skip.from.get(), skip.count.get() / per_block);
        let empty = s.table.is_empty() && s.tokens == u64::from(s.head) * u64::from(per_block);
        // Whose head is not named yet gets names for it; nothing else changes.
        let begins = empty && (from == 0 || s.sealed() == s.head);
        if skip.count.get() % per_block != 0 || (from != s.sealed() && !(begins && from == 0)) {
            let text = format!(
                "{id}: blocks are named one after the other from block {}, and whole ({per_block} tokens)",
                s.sealed()
            );
            return Err(Refused::bad(text));
        }
        let end = from.checked_add(count).filter(|end| begins || *end <= s.head);
        let Some(end) = end else {
            let text = format!("{id}: its table begins at block {}, which is not skipped but sealed", s.head);
            return Err(Refused::bad(text));
        };
        let known = if from == 0 { None } else { s.names.last().copied() };
        let mut name = known.unwrap_or_else(|| prefix::root(s.tenant, &s.model, profile));
        let (tenant, mut walk) = (
            s.tenant,
            if from == 0 { self.walk_from_start(s, profile) } else { self.begin_walk(s, profile) },
        );
        let tokens: Vec<u32> = tokens.iter().map(|t| t.get()).collect();
        let mut present = Vec::with_capacity(count as usize);
        for tokens in tokens.chunks_exact(per_block as usize) {
            name = prefix::child(&name, tokens);
            walk.step(tokens);
            let there =
                self.state.prefixes.get(&name).is_some() || self.common_block(tenant, &walk).is_some();
            present.push(u8::from(there));
        }
        let s = self.session_mut(id);
        s.walk = walk;
        (s.names, s.names_from) = if end == 0 { (Vec::new(), 0) } else { (vec![name], end - 1) };
        if begins {
            s.head = end;
            s.tokens = u64::from(end) * u64::from(per_block);
        }
        let mut reply = Reply::default();
        reply.body.put(&wire::Present { blocks: (present.len() as u32).into(), reserved: 0.into() });
        reply.body.put(&present[..]);
        done(reply)
    }

    fn return_extent(&mut self, client: ClientId, mut r: Reader<'_>) -> Answered {
        let back: wire::ReturnExtent = *r.one()?;
        r.end()?;
        one_of("return extent: reserved", back.reserved, 0)?;
        let extent = ExtentId(back.extent.get());
        let may_hold = match extent.is_copy() {
            true => self.state.common.may_hold(extent, client),
            false => self.state.pool.may_hold(extent, client),
        };
        if !may_hold {
            return Err(Refused::new(Fault::Stale, format!("{extent} is not on this connection")));
        }
        let in_table =
            |id: &SessionId| self.state.sessions[id].table.iter().any(|b| b.place.extent == extent);
        let in_credit = || {
            let owned = self.state.pool.extents().get(&extent).and_then(Extent::owned);
            owned.is_some_and(|o| o.blocks(extent, |b| b == Block::Credit(client)).next().is_some())
        };
        if self.client(client).sessions.iter().any(in_table) || in_credit() {
            return Err(Refused::bad(format!("{extent} has blocks of this connection in use")));
        }
        if extent.is_copy() {
            self.state.common.remove_holder(extent, client);
            return empty();
        }
        let suspects = self.state.pool.suspects_in(extent, Some(client));
        self.free_suspects(client, suspects);
        self.state.pool.remove_holder(extent, client);
        empty()
    }

    fn query(&mut self, client: ClientId, id: SessionId, mut r: Reader<'_>) -> Answered {
        let query: wire::Query = *r.one()?;
        r.end()?;
        one_of("query: reserved", query.reserved, 0)?;
        let (format, Format { cut, .. }) = self.format(client, query.format.get())?;
        let cut = *cut;
        let tenant = self.client(client).tenant;
        let pool = &self.state.pool;
        let asker = self.state.sessions.get(&id).filter(|s| s.client == client && s.format == format);
        let own = asker.map_or(0, |s| s.promised);
        let mine = pool.extents().values().filter_map(|e| e.owned());
        let mine = mine.filter(|o| o.tenant == tenant && o.format == format);
        let held: u64 = mine.map(|o| o.slots.len() as u64 - u64::from(o.free)).sum();
        let mut reply = Reply::default();
        reply.body.put(&wire::Room {
            capacity: self.capacity(tenant, &cut).into(),
            free: self.could_grant(tenant, &cut, own).into(),
            held: held.into(),
        });
        done(reply)
    }

    fn admit_session(&mut self, client: ClientId, id: SessionId, mut r: Reader<'_>) -> Answered {
        let admit: wire::Admit = *r.one()?;
        r.end()?;
        one_of("admit: flags", admit.flags, wire::MAY_EVICT)?;
        one_of("admit: reserved", admit.reserved, 0)?;
        self.begins("no new promise")?;
        match self.admit_verb(client, id, &admit)? {
            Some(reply) => done(reply),
            None => Ok(Answer::Later),
        }
    }

    fn close(&mut self, client: ClientId, id: SessionId, mut r: Reader<'_>) -> Answered {
        let report: wire::Report = *r.one()?;
        let used: &[wire::WireBlock] = r.many(report.used.get(), MAX_BLOCKS)?;
        r.end()?;
        // To close a session that was lost is to agree: its blocks are not written any more.
        if self.forget_lost(client, id) {
            // What it had put into its table without a word is credit still.
            for claim in used.iter().map(wire::WireBlock::id) {
                if self.state.pool.free_credit(claim, client).is_ok() {
                    self.state.pool.release_if_idle(claim.place.extent);
                }
            }
            return empty();
        }
        self.apply_report(client, id, &report, used)?;
        self.end_session(id);
        empty()
    }
}
