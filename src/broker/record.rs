//! The broker's state as one record: versioned, checksummed, rebuilt without a second source.
//!
//! Owns nothing. Invariants: a record that is read back gives exactly the state that was written (`model_test` compares them
//! after every step); one that is cut, changed, of another version, or in contradiction with itself gives an error and
//! nothing else (`tests`, one for each refusal); whatever changes in what is written is another `VERSION`
//! (`what_a_record_holds_is_what_its_version_says`, against `record/layout.txt`).
//!
//! Layout: `KVBSTATE`, version (u32 LE), length of the body (u64 LE), SHA-256 of the body, body (postcard).

#[cfg(test)]
mod tests;

use sha2::{Digest as _, Sha256};
use thiserror::Error;

use std::collections::BTreeMap;
use std::sync::Arc;

use super::tables::Tables;
use super::{Broker, Policy, State};
use crate::heap::{Buffer, Heap};
use crate::id::ExtentId;
use crate::pool::{Extent, Use};

const MAGIC: &[u8; 8] = b"KVBSTATE";
const VERSION: u32 = 2;
const HEAD: usize = 8 + 4 + 8 + 32;

/// Why bytes are no record.
#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum RecordError {
    #[error("these bytes are no state record")]
    Magic,
    #[error("the state record is of version {0}, this broker reads version {VERSION}")]
    Version(u32),
    #[error("the state record is cut: {got} of {said} bytes")]
    Length { said: u64, got: u64 },
    #[error("the state record is damaged: its checksum does not match")]
    Checksum,
    #[error("the state record does not decode: {0}")]
    Decode(#[from] postcard::Error),
    #[error("the state record has {0} bytes more than its state")]
    Longer(usize),
    #[error("the state record names {0}, whose buffer is not there")]
    NoBuffer(ExtentId),
    #[error("the state record contradicts itself: {0}")]
    Contradiction(String),
}

impl Broker {
    /// Everything that decides, as bytes.
    pub fn record(&self) -> Vec<u8> {
        let body = postcard::to_stdvec(&self.state).expect("the state is plain data");
        let mut out = Vec::with_capacity(HEAD + body.len());
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&VERSION.to_le_bytes());
        out.extend_from_slice(&(body.len() as u64).to_le_bytes());
        out.extend_from_slice(&Sha256::digest(&body));
        out.extend_from_slice(&body);
        out
    }

    /// The broker that wrote `record`, over the buffers that it had then. Extents that were being renewed need none, nor
    /// those in quarantine whose buffer the worker had, which is begun anew, nor those that were lent, which are asked of the
    /// kernel again. What was on its way to clients is not in a record, nor are requests that waited.
    pub fn from_record(
        record: &[u8],
        heap: Arc<dyn Heap>,
        policy: Policy,
        buffers: BTreeMap<ExtentId, Buffer>,
    ) -> Result<Self, RecordError> {
        let mut state = read(record)?;
        state.pool.renew_again();
        let mut broker = Broker::empty(heap, state.pool.extent_bytes(), policy);
        broker.buffers = buffers.into_iter().map(|(id, buffer)| (id, Arc::new(buffer))).collect();
        let extents = state.pool.extents();
        broker.buffers.retain(|id, _| extents.get(id).is_some());
        let missing = |(id, e): (&ExtentId, &Extent)| {
            let needs_none = matches!(e.usage, Use::Dirty | Use::Quarantined | Use::Lent);
            (!needs_none && !broker.buffers.contains_key(id)).then_some(*id)
        };
        if let Some(id) = extents.iter().find_map(missing) {
            return Err(RecordError::NoBuffer(id));
        }
        broker.windows = super::window::Windows::recalled(&state.windows);
        broker.state = state;
        broker.tables = Tables::count(&broker.state);
        // Before anything is done by it. What follows counts on it.
        broker.verify_state().map_err(RecordError::Contradiction)?;
        broker.forget_requests();
        broker.forget_loans();
        broker.forget_store_work();
        broker.retire_copies();
        broker.take_up_quarantine();
        broker.sum_all_later();
        broker.settle();
        broker.verify().map_err(RecordError::Contradiction)?;
        Ok(broker)
    }

    /// Whether `record`, read back, is the state that this broker has now.
    pub fn is_recorded_by(&self, record: &[u8]) -> Result<bool, RecordError> {
        Ok(read(record)? == self.state)
    }
}

fn read(record: &[u8]) -> Result<State, RecordError> {
    if record.len() < HEAD || &record[..8] != MAGIC {
        return Err(RecordError::Magic);
    }
    let version = u32::from_le_bytes(record[8..12].try_into().expect("four bytes"));
    if version != VERSION {
        return Err(RecordError::Version(version));
    }
    let said = u64::from_le_bytes(record[12..20].try_into().expect("eight bytes"));
    let body = &record[HEAD..];
    if said != body.len() as u64 {
        return Err(RecordError::Length { said, got: body.len() as u64 });
    }
    if Sha256::digest(body).as_slice() != &record[20..HEAD] {
        return Err(RecordError::Checksum);
    }
    match postcard::take_from_bytes(body)? {
        (state, []) => Ok(state),
        (_, more) => Err(RecordError::Longer(more.len())),
    }
}
