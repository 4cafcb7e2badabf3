//! Models whose layers do not all keep the same tokens (Gemma 3: five layers of six see the last 512 only).
//!
//! Owns the bundle: one [`Session`] for each group of layers, with a block table and a format of its own, so that groups
//! draw on the same extents and each keeps what its layers read. A model of one group works too. Invariants: every
//! group has room for the sequence's tokens, or none has grown; what a group with a window has dropped, no token that is
//! still to come reads; a prefix is shared at a length at which every group has what is read after it.

use std::ops::Range;
use std::sync::Arc;

use super::{Admission, Client, ClientProfile, Error, OpenOptions, PlaneView, Room, Session};
use crate::attention::Paged;
use crate::profile::{Kv, Plane, Profile, ProfileError};
use crate::wire::Fault;

/// How often a prefix is looked for again when it goes between being found and being shared.
const ATTEMPTS: usize = 3;

/// A profile of one or several layer groups that the broker knows.
#[derive(Debug, Clone)]
pub struct GroupedProfile {
    profile: Arc<Profile>,
    groups: Vec<ClientProfile>,
    layers: Arc<[Place]>,
}

/// Where a layer is: the group, and its place in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    number: u32,
    group: usize,
    index: usize,
}

/// A token sequence over all layer groups of a model. Its blocks go back when it is dropped.
///
/// Layers are called by their number in the model. A group with a window drops whole blocks at its head as the sequence
/// grows; [`Session::first_token`] of [`groups`](Self::groups) says where it begins.
#[derive(Debug)]
pub struct GroupedSession {
    profile: GroupedProfile,
    sessions: Vec<Session>,
    tokens: usize,
    rewind: usize,
    /// The length that each group was admitted to last, as it was put to the broker; 0 without a promise.
    admitted: Vec<usize>,
}

impl Client {
    /// Registers a geometry of one or several layer groups: each is a format of its own. Refused when a block of one
    /// does not fit an extent.
    pub fn grouped_profile(&self, profile: &Profile) -> Result<GroupedProfile, Error> {
        let mut layers: Vec<Place> = Vec::new();
        for (group, g) in profile.groups().iter().enumerate() {
            let places = g.layers.iter().enumerate();
            layers.extend(places.map(|(index, (number, _))| Place { number: *number, group, index }));
        }
        layers.sort_by_key(|l| l.number);
        let wrong = |e: ProfileError| Error::Invalid(e.to_string());
        let register = |group| self.profile(&profile.group_alone(group).map_err(wrong)?);
        let groups = (0..profile.groups().len()).map(register).collect::<Result<_, _>>()?;
        Ok(GroupedProfile { profile: Arc::new(profile.clone()), groups, layers: layers.into() })
    }

    /// Opens a sequence: one session for each group, which is what `kvbctl sessions` shows. With a length stated, one
    /// that can never fit is refused at once: all groups count, those with a window as far as it reaches.
    pub fn open_grouped(
        &self,
        profile: &GroupedProfile,
        options: OpenOptions,
    ) -> Result<GroupedSession, Error> {
        if let Some(tokens) = options.max_tokens.filter(|_| profile.groups.len() > 1) {
            profile.refuse_too_long(tokens)?;
        }
        let open = |(n, group): (usize, &ClientProfile)| {
            let per_block = u64::from(profile.profile.tokens_per_block());
            let max_tokens = options
                .max_tokens
                .map(|t| t.min(profile.profile.group_blocks_at(n, t).saturating_mul(per_block)));
            let label = match profile.window(n) {
                Some(window) if profile.groups.len() > 1 => format!("{} (last {window})", options.label),
                _ => options.label.clone(),
            };
            self.open(group, OpenOptions { label, max_tokens, ..options.clone() })
        };
        let sessions = profile.groups.iter().enumerate().map(open).collect::<Result<Vec<_>, _>>()?;
        let admitted = vec![0; sessions.len()];
        Ok(GroupedSession { profile: profile.clone(), sessions, tokens: 0, rewind: 0, admitted })
    }
}

impl GroupedProfile {
    /// The geometry.
    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    /// The groups, each registered as a profile of its own, in the order of the geometry.
    pub fn groups(&self) -> &[ClientProfile] {
        &self.groups
    }

    /// The numbers of all layers, ascending.
    pub fn layers(&self) -> impl ExactSizeIterator<Item = u32> + '_ {
        self.layers.iter().map(|l| l.number)
    }

    /// The group of a layer, if there is such a layer.
    pub fn group_of(&self, layer: usize) -> Option<usize> {
        self.find(layer).map(|l| l.group)
    }

    /// The group of a layer, and the layer's index in it, if there is such a layer.
    pub fn place_of(&self, layer: usize) -> Option<(usize, usize)> {
        self.find(layer).map(|l| (l.group, l.index))
    }

    /// Where the planes of a layer lie in a block of its group, K and V.
    ///
    /// # Panics
    /// If there is no such layer.
    pub fn planes(&self, layer: usize) -> [Plane; 2] {
        let at = self.at(layer);
        self.groups[at.group].planes(at.index)
    }

    /// Takes `blocks` blocks of each group as credit now, all or none, as [`ClientProfile::reserve`].
    pub fn reserve(&self, blocks: u32) -> Result<(), Error> {
        self.reserve_each(&vec![blocks; self.groups.len()])
    }

    fn reserve_each(&self, blocks: &[u32]) -> Result<(), Error> {
        for (group, (profile, wanted)) in self.groups.iter().zip(blocks).enumerate() {
            if let Err(e) = profile.reserve(*wanted) {
                for (profile, blocks) in self.groups.iter().zip(blocks).take(group) {
                    if let Err(why) = profile.unreserve(*blocks) {
                        log::debug!("format {}: blocks stay credit: {why}", profile.format.id);
                    }
                }
                return Err(e);
            }
        }
        Ok(())
    }

    /// Gives all credit of all groups back to the broker.
    pub fn release_credit(&self) -> Result<(), Error> {
        self.groups.iter().try_for_each(ClientProfile::release_credit)
    }

    fn window(&self, group: usize) -> Option<usize> {
        self.profile.groups()[group].window.map(|w| w as usize)
    }

    fn find(&self, layer: usize) -> Option<Place> {
        // Nearly always layers are numbered from 0 without a gap.
        match self.layers.get(layer) {
            Some(place) if place.number as usize == layer => Some(*place),
            _ => {
                let at = self.layers.binary_search_by(|l| (l.number as usize).cmp(&layer)).ok()?;
                Some(self.layers[at])
            }
        }
    }

    #[inline]
    fn at(&self, layer: usize) -> Place {
        self.find(layer).unwrap_or_else(|| panic!("there is no layer {layer}"))
    }

    fn checked(&self, layer: usize) -> Result<Place, Error> {
        self.find(layer).ok_or_else(|| Error::Invalid(format!("there is no layer {layer}")))
    }

    /// Refuses a length whose blocks of all groups can never be there at once.
    fn refuse_too_long(&self, tokens: u64) -> Result<(), Error> {
        let rooms = self.groups.iter().map(ClientProfile::room).collect::<Result<Vec<Room>, _>>()?;
        let each = |g: usize| u64::from(self.groups[g].format.blocks_per_extent).max(1);
        let most = (0..rooms.len()).map(|g| rooms[g].capacity / each(g)).min().unwrap_or(0);
        let extents = |tokens: u64| -> u64 {
            let blocks = |g| self.profile.group_blocks_at(g, tokens);
            (0..rooms.len()).map(|g| blocks(g).div_ceil(each(g))).fold(0, u64::saturating_add)
        };
        if extents(tokens) <= most {
            return Ok(());
        }
        let (mut fits, mut too_long) = (0, tokens);
        while too_long - fits > 1 {
            let middle = fits + (too_long - fits) / 2;
            if extents(middle) <= most { fits = middle } else { too_long = middle }
        }
        let text = format!(
            "{tokens} tokens will never fit: with all its layer groups this tenant can hold at most {fits} at once"
        );
        Err(Error::Refused { fault: Fault::NeverFits, needed: tokens, available: fits, text })
    }
}

impl GroupedSession {
    /// The profile that it was opened with.
    pub fn profile(&self) -> &GroupedProfile {
        &self.profile
    }

    /// The sessions of the groups, in the order of the geometry: their tables and counts.
    pub fn groups(&self) -> &[Session] {
        &self.sessions
    }

    /// The session of one group, for what is about it alone, such as views and windows for a device. Growing or trimming it
    /// by itself leaves the groups with different lengths.
    pub fn group_mut(&mut self, group: usize) -> Option<&mut Session> {
        self.sessions.get_mut(group)
    }

    /// Tokens that the sequence holds, those that groups with a window have dropped counted in.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// The first token that all groups still have: where the newest window begins, or what
    /// [`trim_head`](Self::trim_head) has left.
    pub fn first_token(&self) -> usize {
        self.sessions.iter().map(Session::first_token).max().unwrap_or(0)
    }

    /// When the broker ends the sequence to make room for one of higher priority, if it has asked for a session of any
    /// group, as [`Session::wanted_back`].
    pub fn wanted_back(&self) -> Option<std::time::Instant> {
        self.sessions.iter().filter_map(Session::wanted_back).min()
    }

    /// Whether the broker has ended a group of it, as [`Session::is_lost`].
    pub fn is_lost(&self) -> bool {
        self.sessions.iter().any(Session::is_lost)
    }

    /// Refuses what cannot be done with a session that has ended.
    pub(crate) fn check_alive(&self) -> Result<(), Error> {
        self.sessions.iter().try_for_each(Session::check_alive)
    }

    /// The first token whose rows in any group are not what was sealed, as [`Session::damaged_from`].
    pub fn damaged_from(&self) -> Option<usize> {
        self.sessions.iter().filter_map(Session::damaged_from).min()
    }

    /// The sliding window of a layer in tokens, for [`Shape::window`](crate::attention::Shape::window).
    ///
    /// # Panics
    /// If there is no such layer.
    pub fn window(&self, layer: usize) -> Option<usize> {
        self.profile.window(self.profile.at(layer).group)
    }

    /// Bytes of the blocks that the sequence holds in all groups, shared ones counted in.
    pub fn bytes_held(&self) -> usize {
        let held = |s: &Session| {
            let s = s.stats();
            (s.blocks_private + s.blocks_shared) * s.block_bytes
        };
        self.sessions.iter().map(held).sum()
    }

    /// From now on groups with a window keep what is read after up to `tokens` of the newest tokens are dropped
    /// ([`trim`](Self::trim)): the length of a draft. At first 0.
    pub fn set_rewind(&mut self, tokens: usize) {
        self.rewind = tokens;
    }

    /// The first token that a group must still have when the sequence goes on at `position`.
    fn first_read(&self, group: usize, position: usize) -> usize {
        self.profile.profile.first_visible(group, position as u64) as usize
    }

    fn shift(&self) -> u32 {
        self.profile.profile.block_shift()
    }

    /// Makes room for `tokens` tokens in all groups, or in none: the rows from the old length on may then be written.
    /// Groups with a window first give back the blocks that no token from the old length on reads; so a step of many
    /// tokens holds them all beside the window, and a long prompt is best computed in pieces, each with an `ensure` of
    /// its own ([`reserve`](Self::reserve) asks for all of it at once).
    ///
    /// While credit lasts this makes no system call, but for one request for each block that leaves a window. A refusal
    /// comes before anything has grown.
    #[inline]
    pub fn ensure(&mut self, tokens: usize) -> Result<(), Error> {
        if tokens <= self.tokens {
            return Ok(());
        }
        for group in 0..self.sessions.len() {
            if self.profile.window(group).is_some() {
                self.slide(group, tokens)?;
            }
        }
        for group in 0..self.sessions.len() {
            if let Err(e) = self.sessions[group].ensure(tokens) {
                for grown in &mut self.sessions[..group] {
                    if let Err(why) = grown.trim(self.tokens) {
                        log::debug!("session {}: it keeps what it has grown by: {why}", grown.id());
                    }
                }
                return Err(e);
            }
        }
        self.tokens = tokens;
        Ok(())
    }

    /// Drops what has left a group's window, for growing to `tokens`.
    fn slide(&mut self, group: usize, tokens: usize) -> Result<(), Error> {
        let first = self.first_read(group, self.tokens).saturating_sub(self.rewind);
        let shift = self.shift();
        let session = &mut self.sessions[group];
        if first >> shift > session.first_token() >> shift {
            // What is needed at once need not go to the broker and back; but with a promise it does, because blocks that
            // are given back are promised again, and credit is any session's.
            let more = tokens.div_ceil(1 << shift).saturating_sub(session.table().len());
            let keep = if self.admitted[group] > 0 { 0 } else { more.max(session.credit_ahead()) };
            session.trim_head_keeping(first, keep)?;
        }
        Ok(())
    }

    /// Takes as credit, now, what growing to `tokens` tokens takes in steps of up to `step`: all of it or nothing. As
    /// long as no other session of this process uses the credit, [`ensure`](Self::ensure) is not refused on the way.
    pub fn reserve(&mut self, tokens: usize, step: usize) -> Result<(), Error> {
        let missing: Vec<u32> = (0..self.sessions.len()).map(|g| self.missing(g, tokens, step)).collect();
        self.profile.reserve_each(&missing)
    }

    /// Asks for a promise that the sequence can grow to `tokens` tokens, the prompt and the longest answer, in steps of up
    /// to `step` (what one [`ensure`](Self::ensure) adds): for all groups, or for none. Best after
    /// [`attach`](Self::attach); `may_evict`: cached prefixes of this tenant may go for it.
    ///
    /// Where it is not admitted, the number in the answer counts blocks of the first group that lacks some, and what
    /// was promised before still is. Layers with a window are promised the window and one step. Blocks that are
    /// sealed do not come back when they leave a window: who seals a prompt asks again after that.
    pub fn admit(&mut self, tokens: usize, step: usize, may_evict: bool) -> Result<Admission, Error> {
        if self.sessions.len() > 1 {
            if let Err(e) = self.profile.refuse_too_long(tokens as u64) {
                return match e {
                    Error::Refused { fault: Fault::NeverFits, needed, available, .. } => {
                        let per_block = 1 << self.shift();
                        Ok(Admission::NeverFits(needed.div_ceil(per_block) - available / per_block))
                    }
                    other => Err(other),
                };
            }
        }
        let before = self.admitted.clone();
        for group in 0..self.sessions.len() {
            let length = self.length_to_admit(group, tokens, step);
            let answer = self.sessions[group].admit(length, may_evict);
            if matches!(answer, Ok(Admission::Admitted)) {
                self.admitted[group] = length;
                continue;
            }
            // Those that have got more have what they had before.
            for (earlier, length) in before.into_iter().enumerate().take(group) {
                match self.sessions[earlier].admit(length, may_evict) {
                    Ok(Admission::Admitted) => self.admitted[earlier] = length,
                    other => log::debug!("session {}: {other:?}", self.sessions[earlier].id()),
                }
            }
            return answer;
        }
        Ok(Admission::Admitted)
    }

    /// The length to which a group is to be admitted, so that the broker promises what it will hold at most.
    fn length_to_admit(&self, group: usize, tokens: usize, step: usize) -> usize {
        match self.profile.window(group) {
            // The broker counts blocks from the sequence's start, and adds the copy of a shared one.
            Some(_) => {
                let (more, _) = self.lacking(group, tokens, step);
                let blocks = self.sessions[group].table().len().saturating_add(more);
                blocks.saturating_mul(1 << self.shift())
            }
            None => tokens,
        }
    }

    /// The blocks that a group lacks for growing to `tokens` in steps of up to `step`.
    fn missing(&self, group: usize, tokens: usize, step: usize) -> u32 {
        let (more, copy) = self.lacking(group, tokens, step);
        u32::try_from(more + copy).unwrap_or(u32::MAX)
    }

    /// The same, and apart from that the copies of shared blocks that are made first.
    fn lacking(&self, group: usize, tokens: usize, step: usize) -> (usize, usize) {
        let per_block = 1 << self.shift();
        let (session, stats) = (&self.sessions[group], self.sessions[group].stats());
        let all = tokens.div_ceil(per_block);
        let (most, have) = match self.profile.window(group) {
            // The window, the step and what may be taken back, beginning anywhere in a block. Sealed blocks that leave
            // it do not come back as credit.
            Some(window) => {
                let held = (window - 1).saturating_add(step).saturating_add(self.rewind);
                (all.min(held.saturating_add(per_block - 1).div_ceil(per_block)), stats.blocks_private)
            }
            None => (all, session.table().len()),
        };
        // A shared block that the sequence ends in is copied first.
        let copy = usize::from(stats.tokens % per_block != 0 && stats.blocks_shared > 0);
        (most.saturating_sub(have), copy)
    }

    /// Drops the tokens from `tokens` on; with 0 the sequence starts anew. Refused when a group has dropped what is read
    /// after them: [`set_rewind`](Self::set_rewind) keeps more.
    pub fn trim(&mut self, tokens: usize) -> Result<(), Error> {
        if tokens > self.tokens {
            let text = format!("cannot trim to {tokens}: the sequence holds {} tokens", self.tokens);
            return Err(Error::Invalid(text));
        }
        for (group, session) in self.sessions.iter().enumerate() {
            // Whoever drops the head of layers that see all knows what is still read.
            let (window, first) = (self.profile.window(group), session.first_token());
            let least = window.map_or(tokens, |_| self.first_read(group, tokens));
            if tokens > 0 && first > least {
                let who = window.map_or("layers".into(), |w| format!("layers with a window of {w}"));
                let text = format!("cannot trim to {tokens}: {who} have dropped the tokens before {first}");
                return Err(Error::Invalid(text));
            }
        }
        for (group, session) in self.sessions.iter_mut().enumerate() {
            let trimmed = match session.first_token() {
                first if first > tokens => session.clear(),
                _ => session.trim(tokens),
            };
            if let Err(e) = trimmed {
                // Those that come after hold more than is asked for, which does no harm.
                self.tokens = if group > 0 { tokens } else { self.tokens };
                return Err(e);
            }
        }
        self.tokens = tokens;
        Ok(())
    }

    /// Drops the tokens before `first` in all groups, as far as they fill whole blocks; groups with a window drop what has
    /// left it by themselves. Returns the first token that all groups still have.
    pub fn trim_head(&mut self, first: usize) -> Result<usize, Error> {
        if first > self.tokens {
            let text = format!("cannot drop {first} tokens: the sequence holds {}", self.tokens);
            return Err(Error::Invalid(text));
        }
        for session in &mut self.sessions {
            session.trim_head(first)?;
        }
        Ok(self.first_token())
    }

    /// A second sequence over the same tokens, as [`Session::fork`].
    pub fn fork(&mut self) -> Result<GroupedSession, Error> {
        let sessions = self.sessions.iter_mut().map(Session::fork).collect::<Result<Vec<_>, _>>()?;
        let (profile, tokens, rewind) = (self.profile.clone(), self.tokens, self.rewind);
        // What was promised to the one is not promised to the other.
        let admitted = vec![0; sessions.len()];
        Ok(GroupedSession { profile, sessions, tokens, rewind, admitted })
    }

    /// Publishes the whole blocks among the first `ids.len()` tokens, whose token ids these are, as far as each group
    /// still has them: they are never written again, and other sequences of the tenant with the same model find them
    /// ([`attach`](Self::attach)).
    ///
    /// Returns the length of the prefix that can be found now: all whole blocks, or 0 if a group with a window has
    /// dropped what is read after them. So a prompt is sealed where it ends, before the sequence grows on by more than
    /// a block or so.
    pub fn seal(&mut self, ids: &[u32]) -> Result<usize, Error> {
        if ids.len() > self.tokens {
            let text = format!("{} token ids, but the sequence holds {} tokens", ids.len(), self.tokens);
            return Err(Error::Invalid(text));
        }
        let end = ids.len() >> self.shift() << self.shift();
        let mut there = true;
        // Groups with a window first, so that who finds the others finds these.
        for windowed in [true, false] {
            for group in 0..self.sessions.len() {
                if self.profile.window(group).is_some() == windowed {
                    there &= self.sessions[group].first_token() <= self.first_read(group, end);
                    self.sessions[group].seal(ids)?;
                }
            }
        }
        Ok(if there { end } else { 0 })
    }

    /// Shares the longest published prefix of a prompt, at the start of a sequence: the longest length for which groups
    /// of full attention have all blocks, and groups with a window those of the last one. Returns how many tokens it
    /// has: at most `ids.len() - 1`, because the last token has to be computed for its logits.
    pub fn attach(&mut self, ids: &[u32]) -> Result<usize, Error> {
        if self.tokens > 0 {
            return Err(Error::Invalid(format!("the sequence holds {} tokens already", self.tokens)));
        }
        for _ in 0..ATTEMPTS {
            match self.try_attach(ids) {
                Ok(Some(tokens)) => {
                    self.tokens = tokens;
                    return Ok(tokens);
                }
                Ok(None) => self.start_anew()?,
                Err(e) => {
                    if let Err(why) = self.start_anew() {
                        log::debug!("session {}: it is not empty: {why}", self.sessions[0].id());
                    }
                    return Err(e);
                }
            }
        }
        Ok(0)
    }

    /// One attempt; `None` if blocks went between being found and being shared.
    fn try_attach(&mut self, ids: &[u32]) -> Result<Option<usize>, Error> {
        let shift = self.shift();
        let (windowed, full): (Vec<_>, Vec<_>) =
            (0..self.sessions.len()).partition(|g| self.profile.window(*g).is_some());
        let mut longest = ids.len().saturating_sub(1);
        for &group in &full {
            longest = longest.min(self.sessions[group].attach(ids)?);
        }
        if windowed.is_empty() {
            for &group in &full {
                self.sessions[group].trim(longest)?;
            }
            return Ok(Some(longest));
        }
        // What full attention has is held from here on; of the others only the end counts.
        let whole = longest.div_ceil(1 << shift).min(ids.len() >> shift);
        if whole == 0 {
            return full.iter().try_for_each(|g| self.sessions[*g].trim(0)).map(|()| Some(0));
        }
        let mut runs = Vec::new();
        for &group in &windowed {
            runs.push(runs_of(&self.sessions[group].look_up(&ids[..whole << shift])?));
        }
        let held = |blocks: usize| (blocks << shift).min(longest);
        let first = |group, blocks| self.first_read(group, held(blocks)) >> shift;
        let all_there = |blocks: &usize| {
            let mut groups = windowed.iter().zip(&runs);
            groups.all(|(&group, runs)| runs[*blocks] <= first(group, *blocks))
        };
        let Some(blocks) = (1..=whole).rev().find(all_there) else {
            self.start_anew()?;
            return Ok(Some(0));
        };
        let held = held(blocks);
        for &group in &windowed {
            let first = self.first_read(group, held) >> shift;
            if self.sessions[group].attach_window(ids, first..blocks)? != held {
                return Ok(None);
            }
        }
        for &group in &full {
            self.sessions[group].trim(held)?;
        }
        Ok(Some(held))
    }

    /// Makes all groups of a sequence without tokens empty.
    fn start_anew(&mut self) -> Result<(), Error> {
        let profile = &self.profile;
        self.sessions.iter_mut().enumerate().try_for_each(|(group, session)| match profile.window(group) {
            Some(_) => session.clear(),
            None => session.trim(0),
        })
    }

    /// Keeps the prefix of the first `tokens` tokens, which must be sealed (whole blocks; a rest is left out), for ever:
    /// of groups with a window, what is read after it. Returns how many blocks were not pinned before.
    pub fn pin(&mut self, tokens: usize) -> Result<usize, Error> {
        let mut pinned = Vec::new();
        for group in 0..self.sessions.len() {
            match self.sessions[group].pin(tokens) {
                Ok(blocks) => pinned.push(blocks),
                Err(e) => {
                    // Where nothing was new, the pin may be an earlier one.
                    for (session, blocks) in self.sessions.iter_mut().zip(pinned) {
                        if blocks > 0 {
                            session.unpin(tokens)?;
                        }
                    }
                    return Err(e);
                }
            }
        }
        Ok(pinned.iter().sum())
    }

    /// Lets it go again. Returns how many blocks nobody pins any more.
    pub fn unpin(&mut self, tokens: usize) -> Result<usize, Error> {
        self.sessions.iter_mut().map(|s| s.unpin(tokens)).sum()
    }

    /// Makes the rows of `tokens` writable, in each group as far as it has them, as [`Session::writable`].
    pub fn writable(&mut self, tokens: Range<usize>) -> Result<(), Error> {
        if tokens.start > tokens.end || tokens.end > self.tokens {
            let text = format!("tokens {tokens:?}: the sequence holds {}", self.tokens);
            return Err(Error::Invalid(text));
        }
        for session in &mut self.sessions {
            let first = session.first_token();
            session.writable(tokens.start.max(first)..tokens.end.max(first))?;
        }
        Ok(())
    }

    /// K and V of one layer, for [`attention`](crate::attention::attention) with the layer's
    /// [`window`](Self::window): what the window has passed is not there any more.
    ///
    /// # Panics
    /// If there is no such layer.
    pub fn paged(&self, layer: usize) -> Paged<'_> {
        let at = self.profile.at(layer);
        self.sessions[at.group].paged(at.index)
    }

    /// The address of one row, as [`Session::row`].
    ///
    /// # Panics
    /// If the sequence has no room for the token, or there is no such layer.
    #[inline]
    pub fn row(&self, token: usize, layer: usize, kv: Kv) -> *const u8 {
        let at = self.profile.at(layer);
        self.sessions[at.group].row(token, at.index, kv)
    }

    /// The address of one row, as [`Session::row_mut`].
    ///
    /// # Panics
    /// If the sequence has no room for the token, or there is no such layer.
    #[inline]
    pub fn row_mut(&mut self, token: usize, layer: usize, kv: Kv) -> *mut u8 {
        let at = self.profile.at(layer);
        self.sessions[at.group].row_mut(token, at.index, kv)
    }

    pub(crate) fn checked_row(
        &self,
        token: usize,
        layer: usize,
        kv: Kv,
        bytes: usize,
    ) -> Result<*const u8, Error> {
        let at = self.profile.checked(layer)?;
        self.sessions[at.group].checked_row(token, at.index, kv, bytes)
    }

    /// Copies one row in. Refused for a token that is shared, or that the layer's window has passed.
    pub fn write_row(&mut self, token: usize, layer: usize, kv: Kv, row: &[u8]) -> Result<(), Error> {
        let at = self.profile.checked(layer)?;
        self.sessions[at.group].write_row(token, at.index, kv, row)
    }

    /// Copies one row out. Refused for a token that the layer's window has passed.
    pub fn read_row(&self, token: usize, layer: usize, kv: Kv, row: &mut [u8]) -> Result<(), Error> {
        let at = self.profile.checked(layer)?;
        self.sessions[at.group].read_row(token, at.index, kv, row)
    }

    /// One plane in token order at an address that stays the same for the sequence's life, as [`Session::plane`]. What a
    /// window has passed reads as zero.
    pub fn plane(
        &mut self,
        layer: usize,
        kv: Kv,
        capacity: usize,
        address: Option<*mut u8>,
    ) -> Result<PlaneView, Error> {
        let at = self.profile.checked(layer)?;
        self.sessions[at.group].plane(at.index, kv, capacity, address)
    }
}

/// For each number of blocks, where the run of blocks that are there and ends with the last of them begins.
fn runs_of(present: &[bool]) -> Vec<usize> {
    let mut begins = 0;
    let run = |(n, there): (usize, &bool)| {
        begins = if *there { begins } else { n + 1 };
        begins
    };
    std::iter::once(0).chain(present.iter().enumerate().map(run)).collect()
}

#[cfg(test)]
mod tests {
    use super::runs_of;

    #[test]
    fn a_run_begins_after_the_last_gap() {
        assert_eq!(runs_of(&[]), [0]);
        assert_eq!(runs_of(&[true, true, false, true, true]), [0, 0, 0, 3, 3, 3]);
        assert_eq!(runs_of(&[false, true]), [0, 1, 1]);
    }
}
