//! The Llama's KV in a session of a broker, gathered for attention through windows as a device would.

use kvbroker::client::{Client, ClientProfile, OpenOptions, Session, Window};
use kvbroker::profile::{Kv as Plane, Profile};
use kvbroker::window::{How, What};

use super::llama::{self, Kv, LAYERS, ROW_BYTES, TOKENS};

/// How a device reads the first so many bytes of a window.
pub type Read<'a> = dyn FnMut(&Session, &mut Window, usize) -> Vec<u8> + 'a;

/// See the module.
pub struct Through<'a> {
    session: Session,
    /// Takes a block now and then, so that the session's do not lie side by side.
    other: Option<Session>,
    windows: Vec<[Window; 2]>,
    how: Option<How>,
    read: &'a mut Read<'a>,
}

pub fn profile(client: &Client, tokens_per_block: u32) -> ClientProfile {
    let row = ROW_BYTES as u32;
    let profile = Profile::uniform("tiny-llama", "f32", LAYERS as u32, row, row, tokens_per_block).unwrap();
    client.profile(&profile).unwrap()
}

impl<'a> Through<'a> {
    pub fn new(
        client: &Client,
        tokens_per_block: u32,
        scattered: bool,
        how: Option<How>,
        read: &'a mut Read<'a>,
    ) -> Self {
        let profile = profile(client, tokens_per_block);
        let open = || client.open(&profile, OpenOptions::default()).unwrap();
        Through { session: open(), other: scattered.then(open), windows: Vec::new(), how, read }
    }

    /// The windows, K and V of each layer.
    pub fn windows(&self) -> &[[Window; 2]] {
        &self.windows
    }
}

impl Kv for Through<'_> {
    fn write(&mut self, layer: usize, token: usize, k: &[f32], v: &[f32]) {
        if layer == 0 {
            self.session.ensure(token + 1).unwrap();
            if let Some(other) = &mut self.other {
                other.ensure(token + 1).unwrap();
            }
        }
        self.session.write_row(token, layer, Plane::K, &llama::to_bytes(k)).unwrap();
        self.session.write_row(token, layer, Plane::V, &llama::to_bytes(v)).unwrap();
    }

    fn gather(&mut self, layer: usize, tokens: usize) -> [Vec<f32>; 2] {
        if self.windows.len() == layer {
            let mut make = |kv| {
                let what = What::Plane { layer: layer as u32, kv };
                self.session.window(0..tokens, what, self.how).unwrap()
            };
            let both = [make(Plane::K), make(Plane::V)];
            self.windows.push(both);
        }
        let mut out = [Vec::new(), Vec::new()];
        for (kv, rows) in out.iter_mut().enumerate() {
            let window = &mut self.windows[layer][kv];
            self.session.extend_window(window, tokens).unwrap();
            let bytes = (self.read)(&self.session, window, tokens * ROW_BYTES);
            assert_eq!(bytes.len(), tokens * ROW_BYTES);
            *rows = llama::from_bytes(&bytes);
        }
        out
    }
}

/// The tokens that the model chooses without any broker; they vary, or they would prove nothing.
pub fn expected() -> Vec<usize> {
    let tokens = llama::decode(&mut llama::Plain::default());
    let kinds: std::collections::BTreeSet<_> = tokens.iter().collect();
    assert!(tokens.len() == 24 && TOKENS == 27 && kinds.len() > 6, "{tokens:?}");
    tokens
}
