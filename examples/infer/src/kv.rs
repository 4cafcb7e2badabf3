//! Where a model's keys and values live. The only module of the engine that knows of kvbroker.
//!
//! Owns the way from (token, layer, K or V) to memory. Invariant: a row is written only after [`KvStore::ensure`] has
//! made room for its token, and attention reads only rows that were written.

use kvbroker::attention::{
    Contiguous, Element, KvSource, Scratch, Shape, attention, attention_heads, store_row,
};
use kvbroker::client::{Client, GroupedProfile, GroupedSession, OpenOptions};
pub use kvbroker::profile::Kv;
use kvbroker::profile::{Group, Layer, Layout, Profile, ProfileError};
use thiserror::Error;

/// Why there is no room for more tokens.
#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum KvError {
    #[error("{tokens} tokens do not fit the {capacity} that were set aside: start with a longer context")]
    Full { tokens: usize, capacity: usize },
    #[error(transparent)]
    Geometry(#[from] ProfileError),
    #[error(transparent)]
    Broker(#[from] kvbroker::client::Error),
}

impl KvError {
    /// One word for programs: the broker's verdict (`never-fits`, `busy`, `over-limit`, ...), if it is one.
    pub fn kind(&self) -> &'static str {
        match self {
            KvError::Full { .. } => "full",
            KvError::Geometry(_) => "geometry",
            KvError::Broker(e) => e.fault().map_or("broker", |f| f.name()),
        }
    }
}

/// Layers that see the newest tokens only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// The most tokens that a query sees there, itself included.
    pub tokens: usize,
    /// One layer of so many sees all tokens: layers `every - 1`, `2 * every - 1` and so on.
    pub every: usize,
}

/// What the cache must hold per token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// The sliding window, if some layers have one.
    pub window: Option<Window>,
}

impl Geometry {
    /// The heads of one layer, as the attention kernel wants them.
    pub fn shape(&self, layer: usize) -> Shape {
        Shape { window: self.window(layer), ..Shape::new(self.heads, self.kv_heads, self.head_dim) }
    }

    /// The sliding window of one layer in tokens, if it has one.
    pub fn window(&self, layer: usize) -> Option<usize> {
        self.window.filter(|w| (layer + 1) % w.every != 0).map(|w| w.tokens)
    }

    /// Bytes of one token's K row, and of its V row, in one layer.
    pub fn row_bytes(&self, element: Element) -> usize {
        self.kv_heads * self.head_dim * element.bytes()
    }

    /// The geometry as the broker wants it.
    ///
    /// Tokens per block: at least 16, and where 64 are enough, as many as make every plane whole pages, so that the
    /// same blocks can be shown to a device plane by plane (SmolLM2 in f16: 32).
    pub fn profile(&self, name: &str, element: Element, layout: Layout) -> Result<Profile, ProfileError> {
        const PAGE: u64 = 4096;
        let row = u32::try_from(self.row_bytes(element)).unwrap_or(u32::MAX);
        // Layers that keep the same tokens share a block table: at most two groups, none of them empty.
        let group = |window: Option<usize>| Group {
            layers: (0..self.layers)
                .filter(|n| self.window(*n) == window)
                .map(|n| (n as u32, Layer { k_row: row, v_row: row }))
                .collect(),
            window: window.map(|w| u32::try_from(w).unwrap_or(u32::MAX)),
        };
        let mut groups = vec![group(None)];
        groups.extend(self.window.map(|w| group(Some(w.tokens))));
        groups.retain(|g| !g.layers.is_empty());
        let profile = Profile::new(name, element.name(), layout, 16, groups.clone())?;
        match profile.plane_view_tokens(PAGE).filter(|t| (17..=64).contains(t)) {
            Some(tokens) => Profile::new(name, element.name(), layout, tokens, groups),
            None => Ok(profile),
        }
    }
}

/// A sequence's keys and values.
pub trait KvStore {
    /// Makes room for `tokens` tokens in total, or refuses before anything is written.
    fn ensure(&mut self, tokens: usize) -> Result<(), KvError>;

    /// Makes sure that `ensure` will not be refused up to `tokens` tokens in steps of up to `step`, or refuses now: a
    /// refusal comes before a second of computing, not after.
    fn reserve(&mut self, tokens: usize, step: usize) -> Result<(), KvError>;

    /// Writes one row, `kv_heads * head_dim` elements.
    ///
    /// # Panics
    /// If `token` is outside what [`ensure`](Self::ensure) made room for.
    fn store(&mut self, token: usize, layer: usize, kv: Kv, row: &[f32]);

    /// Causal attention of the last queries of `kv_tokens` tokens, as far as the layer's window reaches; `q` and `out` are
    /// `[token][head][dim]`.
    ///
    /// # Panics
    /// If `kv_tokens` is more than [`ensure`](Self::ensure) made room for.
    fn attend(&mut self, layer: usize, kv_tokens: usize, q: &[f32], out: &mut [f32]);
}

/// Attention over one layer, spread over the threads; the bits do not depend on how many there are.
#[derive(Debug)]
pub struct Attention {
    geometry: Geometry,
    element: Element,
    scratch: Vec<Scratch>,
}

/// Below this many rows, waking a thread costs more than it saves.
const WORTH_A_THREAD: usize = 128;

impl Attention {
    /// For the heads of `geometry`, over rows of `element`.
    pub fn new(geometry: Geometry, element: Element) -> Self {
        let threads = rayon::current_num_threads();
        Attention { geometry, element, scratch: (0..threads).map(|_| Scratch::new()).collect() }
    }

    /// [`attention`] over `kv`, the rows of `layer`.
    ///
    /// # Safety
    /// As [`attention`]: of the first `kv_tokens` tokens, the rows of those that a query sees through the layer's window
    /// are readable through `kv` during the call.
    pub unsafe fn run<S: KvSource>(
        &mut self,
        kv: &S,
        layer: usize,
        kv_tokens: usize,
        q: &[f32],
        out: &mut [f32],
    ) {
        let Attention { geometry, element, scratch } = self;
        let shape = &geometry.shape(layer);
        let row = shape.query_heads * shape.head_dim;
        let queries = q.len() / row;
        let kv = Shared(kv);
        if kv_tokens * queries < WORTH_A_THREAD || scratch.len() == 1 {
            // SAFETY: the caller's promise.
            unsafe { attention(shape, *element, kv.0, kv_tokens, q, out, &mut scratch[0]) }
        } else if queries == 1 {
            let heads = shape.kv_heads.div_ceil(scratch.len());
            let part = heads * shape.group() * shape.head_dim;
            rayon::scope(|scope| {
                for ((n, out), scratch) in out.chunks_mut(part).enumerate().zip(scratch) {
                    let (kv, shape, element) = (&kv, &*shape, *element);
                    scope.spawn(move |_| {
                        let range = n * heads..shape.kv_heads.min((n + 1) * heads);
                        // SAFETY: the caller's promise; the scope ends before this call does.
                        unsafe { attention_heads(shape, element, kv.0, kv_tokens, range, q, out, scratch) }
                    });
                }
            });
        } else {
            let part = queries.div_ceil(scratch.len());
            rayon::scope(|scope| {
                for (n, ((q, out), scratch)) in
                    q.chunks(part * row).zip(out.chunks_mut(part * row)).zip(scratch).enumerate()
                {
                    let (kv, shape, element) = (&kv, &*shape, *element);
                    let end = kv_tokens - queries + queries.min((n + 1) * part);
                    scope.spawn(move |_| {
                        // SAFETY: the caller's promise, for fewer tokens; the scope ends before this call does.
                        unsafe { attention(shape, element, kv.0, end, q, out, scratch) }
                    });
                }
            });
        }
    }
}

/// A source that several threads read at once.
struct Shared<'a, S>(&'a S);

// SAFETY: a KvSource only computes addresses, and attention only reads from them; nobody in this process writes to
// them meanwhile, because `Attention::run` is called with the store borrowed exclusively.
unsafe impl<S: KvSource> Sync for Shared<'_, S> {}

/// How to open a [`Broker`] store.
#[derive(Debug, Clone)]
pub struct KvOptions<'a> {
    /// The session's name in `kvbctl`.
    pub label: &'a str,
    /// The model's name in `kvbctl`.
    pub model: &'a str,
    /// What tells this model's keys and values from all others': prefixes are shared only under the same text.
    pub fingerprint: &'a str,
    /// The model's geometry.
    pub geometry: Geometry,
    /// The type of the rows.
    pub element: Element,
    /// The order of rows in a block.
    pub layout: Layout,
    /// The longest length of the sequence, in tokens; one that can never fit is refused at once.
    pub context: usize,
}

impl KvOptions<'_> {
    /// Registers the geometry with the client's broker.
    pub fn register(&self, client: &Client) -> Result<GroupedProfile, KvError> {
        let profile = self.geometry.profile(self.model, self.element, self.layout)?;
        Ok(client.grouped_profile(&profile)?)
    }
}

/// Blocks that a sequence holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// Held by this sequence alone.
    pub private: usize,
    /// Sealed, or held by another sequence too.
    pub shared: usize,
    /// Bytes of both.
    pub bytes: usize,
}

/// Keys and values in blocks of kvbroker: all that an engine does to live in them.
#[derive(Debug)]
pub struct Broker {
    session: GroupedSession,
    /// Elements of a row.
    row: usize,
    element: Element,
    attention: Attention,
}

impl Broker {
    /// Connects (`KVBROKER_SOCKET`, or `KVBROKER_BACKEND=embedded`) and opens a sequence.
    pub fn open(options: &KvOptions) -> Result<Self, KvError> {
        let client = Client::connect()?;
        Broker::open_on(&client, &options.register(&client)?, options)
    }

    /// Opens another sequence of a client.
    pub fn open_on(client: &Client, profile: &GroupedProfile, options: &KvOptions) -> Result<Self, KvError> {
        let session = client.open_grouped(
            profile,
            OpenOptions {
                label: options.label.into(),
                model: options.fingerprint.into(),
                max_tokens: Some(options.context as u64),
                ..OpenOptions::default()
            },
        )?;
        Ok(Broker {
            session,
            row: options.geometry.kv_heads * options.geometry.head_dim,
            element: options.element,
            attention: Attention::new(options.geometry, options.element),
        })
    }

    /// Takes over the longest published prefix of `ids`; returns how many tokens need not be computed.
    pub fn attach(&mut self, ids: &[u32]) -> Result<usize, KvError> {
        Ok(self.session.attach(ids)?)
    }

    /// Publishes the whole blocks of the first `ids.len()` tokens, which have been computed; returns how many tokens
    /// of them others can share. Layers with a window must still have what is read after these tokens.
    pub fn seal(&mut self, ids: &[u32]) -> Result<usize, KvError> {
        Ok(self.session.seal(ids)?)
    }

    /// Keeps what is published of the first `tokens` tokens, also when nobody uses it.
    pub fn pin(&mut self, tokens: usize) -> Result<(), KvError> {
        self.session.pin(tokens)?;
        Ok(())
    }

    /// What the sequence holds.
    pub fn usage(&self) -> Usage {
        let stats = || self.session.groups().iter().map(|s| s.stats());
        Usage {
            private: stats().map(|s| s.blocks_private).sum(),
            shared: stats().map(|s| s.blocks_shared).sum(),
            bytes: self.session.bytes_held(),
        }
    }
}

impl KvStore for Broker {
    fn ensure(&mut self, tokens: usize) -> Result<(), KvError> {
        Ok(self.session.ensure(tokens)?)
    }

    fn reserve(&mut self, tokens: usize, step: usize) -> Result<(), KvError> {
        Ok(self.session.reserve(tokens, step)?)
    }

    fn store(&mut self, token: usize, layer: usize, kv: Kv, row: &[f32]) {
        assert!(token < self.session.tokens() && row.len() == self.row, "token {token} has no row like that");
        // SAFETY: `ensure` made room for the token (checked) and left it private; the place holds a row of this many
        // elements, because the profile was made from the same geometry. Other processes cannot hold a private block.
        unsafe { store_row(self.element, self.session.row_mut(token, layer, kv), row) }
    }

    fn attend(&mut self, layer: usize, kv_tokens: usize, q: &[f32], out: &mut [f32]) {
        assert!(kv_tokens <= self.session.tokens(), "{kv_tokens} tokens of {}", self.session.tokens());
        let kv = self.session.paged(layer);
        // SAFETY: the layer's table has a mapped block for every token of the session (checked) that its window has not
        // passed, and keeps it while the session is borrowed. The window that `ensure` kept is the one of the profile,
        // which was made from the geometry that the kernel masks by.
        unsafe { self.attention.run(&kv, layer, kv_tokens, q, out) }
    }
}

/// Keys and values in one private array, as an engine without a broker keeps them: `[layer][K|V][token][row]`, the
/// longest context reserved at once. The twin that paged results must equal bit for bit.
#[derive(Debug)]
pub struct Twin {
    rows: Vec<u8>,
    row: usize,
    capacity: usize,
    element: Element,
    attention: Attention,
}

impl Twin {
    /// Room for `capacity` tokens.
    pub fn new(geometry: Geometry, element: Element, capacity: usize) -> Self {
        let row = geometry.row_bytes(element);
        Twin {
            rows: vec![0; geometry.layers * 2 * capacity * row],
            row,
            capacity,
            element,
            attention: Attention::new(geometry, element),
        }
    }

    fn plane(&self, layer: usize, kv: Kv) -> usize {
        (2 * layer + usize::from(kv == Kv::V)) * self.capacity * self.row
    }
}

impl KvStore for Twin {
    fn ensure(&mut self, tokens: usize) -> Result<(), KvError> {
        if tokens > self.capacity {
            return Err(KvError::Full { tokens, capacity: self.capacity });
        }
        Ok(())
    }

    fn reserve(&mut self, tokens: usize, _: usize) -> Result<(), KvError> {
        self.ensure(tokens)
    }

    fn store(&mut self, token: usize, layer: usize, kv: Kv, row: &[f32]) {
        let at = self.plane(layer, kv) + token * self.row;
        let place = &mut self.rows[at..][..self.row];
        assert_eq!(row.len() * self.element.bytes(), place.len(), "a row of another geometry");
        // SAFETY: `place` is as long as the row, checked above, and borrowed exclusively.
        unsafe { store_row(self.element, place.as_mut_ptr(), row) }
    }

    fn attend(&mut self, layer: usize, kv_tokens: usize, q: &[f32], out: &mut [f32]) {
        assert!(kv_tokens <= self.capacity, "{kv_tokens} tokens of {}", self.capacity);
        let plane = |kv| self.rows[self.plane(layer, kv)..][..self.capacity * self.row].as_ptr();
        let (k, v) = (plane(Kv::K), plane(Kv::V));
        let source = Contiguous { k, v, k_stride: self.row, v_stride: self.row, run: 256 };
        // SAFETY: both planes hold `capacity` rows, of which `kv_tokens` are read, and nothing writes meanwhile.
        unsafe { self.attention.run(&source, layer, kv_tokens, q, out) }
    }
}
