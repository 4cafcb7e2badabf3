//! The KV of one sequence twice: in blocks scattered over a pool, and in contiguous arrays, one K and one V per layer.
//!
//! Invariant: both hold the same values in the same kind of memory (anonymous, small pages), so that a difference in
//! time is one of addressing and of locality, not of the kind of page.

use kvbroker::attention::{Contiguous, Element, PAGE_SHIFT, Paged, Scratch, Shape, attention, store_row};
use kvbroker::profile::{Plane, Profile};
use memmap2::{MmapMut, MmapOptions};

use crate::Values;

/// A model's attention geometry.
#[derive(Debug, Clone)]
pub struct Model {
    /// For people.
    pub name: &'static str,
    /// Layers that hold KV.
    pub layers: u32,
    /// The heads of each.
    pub shape: Shape,
}

impl Model {
    /// What the project's figures are stated for, with the query heads of Qwen2.5-1.5B.
    pub fn reference() -> Self {
        Model { name: "reference", layers: 24, shape: Shape::new(12, 2, 128) }
    }

    /// SmolLM2-135M, the example engine's model.
    pub fn smollm2() -> Self {
        Model { name: "smollm2", layers: 30, shape: Shape::new(9, 3, 64) }
    }

    /// Both.
    pub fn all() -> [Self; 2] {
        [Self::reference(), Self::smollm2()]
    }

    /// "reference: 12 query heads, 2 KV heads, dim 128".
    pub fn describe(&self) -> String {
        let Shape { query_heads, kv_heads, head_dim, .. } = self.shape;
        format!("{query_heads} query heads, {kv_heads} KV heads, dim {head_dim}, {} layers", self.layers)
    }

    /// Tokens per block 16, plane-major.
    pub fn profile(&self, element: Element) -> Profile {
        let row = (self.shape.kv_row() * element.bytes()) as u32;
        Profile::uniform(self.name, "", self.layers, row, row, 16).expect("the model's geometry is valid")
    }
}

/// The bytes of a pool that blocks are scattered over, as on a board.
const POOL_BYTES: usize = 256 << 20;

/// Memory whose pages are there, in the order of their addresses, as a pool's are from the start.
fn memory(bytes: usize) -> MmapMut {
    MmapOptions::new().len(bytes).populate().map_anon().expect("memory for the KV")
}

/// KV of a sequence, paged and contiguous, with the queries of one decode step.
#[derive(Debug)]
pub struct Sequence {
    model: Model,
    element: Element,
    tokens: usize,
    pool: MmapMut,
    table: Vec<u32>,
    shift: u32,
    planes: Vec<[Plane; 2]>,
    arrays: MmapMut,
    q: Vec<f32>,
    out: Vec<f32>,
    scratch: Scratch,
}

impl Sequence {
    /// `tokens` tokens, their blocks in random slots of a pool of 256 MiB (more if they need it).
    pub fn new(model: Model, element: Element, tokens: usize) -> Self {
        let profile = model.profile(element);
        let slot = profile.slot_bytes(0, 1 << PAGE_SHIFT) as usize;
        let blocks = profile.blocks_for(tokens as u64) as usize;
        let slots = (POOL_BYTES / slot).max(2 * blocks);
        let mut values = Values(tokens as u64);
        let mut order: Vec<usize> = (0..slots).collect();
        for n in 0..blocks {
            order.swap(n, n + values.bits() as usize % (slots - n));
        }
        let mut sequence = Sequence {
            element,
            tokens,
            pool: memory(slots * slot),
            table: order[..blocks].iter().map(|n| ((n * slot) >> PAGE_SHIFT) as u32).collect(),
            shift: profile.block_shift(),
            planes: profile.planes(0),
            arrays: memory(tokens * profile.bytes_per_token() as usize),
            q: values.many(model.layers as usize * model.shape.query_heads * model.shape.head_dim),
            out: vec![0.0; model.shape.query_heads * model.shape.head_dim],
            scratch: Scratch::new(),
            model,
        };
        sequence.fill(&mut values);
        sequence
    }

    fn fill(&mut self, values: &mut Values) {
        let row = self.model.shape.kv_row();
        // Distinct rows cost time to make and change nothing: a few hundred, repeated, do.
        let source = values.many(row * 251);
        let mut n = 0;
        for layer in 0..self.planes.len() {
            for token in 0..self.tokens {
                for kv in 0..2 {
                    let value = &source[n % 251 * row..][..row];
                    n += 1;
                    let plane = self.planes[layer][kv];
                    let block = (self.table[token >> self.shift] as usize) << PAGE_SHIFT;
                    let at = block + plane.offset + (token & ((1 << self.shift) - 1)) * plane.stride;
                    let bytes = row * self.element.bytes();
                    let in_pool = self.pool[at..at + bytes].as_mut_ptr();
                    let at = ((layer * 2 + kv) * self.tokens + token) * bytes;
                    let in_arrays = self.arrays[at..at + bytes].as_mut_ptr();
                    // SAFETY: both point to as many bytes as a row takes; the slices were just checked.
                    unsafe {
                        store_row(self.element, in_pool, value);
                        store_row(self.element, in_arrays, value);
                    }
                }
            }
        }
    }

    /// The block table's view of a layer.
    pub fn paged(&self, layer: usize) -> Paged<'_> {
        let [k, v] = self.planes[layer];
        Paged { base: self.pool.as_ptr(), table: &self.table, shift: self.shift, k, v }
    }

    /// The contiguous view of a layer, walked in runs of `run` tokens.
    pub fn contiguous(&self, layer: usize, run: usize) -> Contiguous {
        let stride = self.model.shape.kv_row() * self.element.bytes();
        let of = |kv: usize| self.arrays[(layer * 2 + kv) * self.tokens * stride..].as_ptr();
        Contiguous { k: of(0), v: of(1), k_stride: stride, v_stride: stride, run }
    }

    /// Layers of the model.
    pub fn layers(&self) -> usize {
        self.planes.len()
    }

    /// One layer's attention of a decode step, over the block table. Returns a sum of what came out.
    pub fn paged_layer(&mut self, layer: usize) -> f32 {
        self.layer(layer, |s, q, out, scratch| {
            // SAFETY: the pool holds the rows of every token of the table.
            unsafe { attention(&s.model.shape, s.element, &s.paged(layer), s.tokens, q, out, scratch) }
        })
    }

    /// The same over the arrays, walked in runs of `run` tokens.
    pub fn contiguous_layer(&mut self, layer: usize, run: usize) -> f32 {
        self.layer(layer, |s, q, out, scratch| {
            // SAFETY: the arrays hold the rows of every token.
            unsafe {
                attention(&s.model.shape, s.element, &s.contiguous(layer, run), s.tokens, q, out, scratch)
            }
        })
    }

    fn layer(
        &mut self,
        layer: usize,
        attention: impl FnOnce(&Self, &[f32], &mut [f32], &mut Scratch),
    ) -> f32 {
        let (mut out, mut scratch) = (std::mem::take(&mut self.out), std::mem::take(&mut self.scratch));
        attention(self, &self.q[layer * out.len()..(layer + 1) * out.len()], &mut out, &mut scratch);
        (self.out, self.scratch) = (out, scratch);
        self.out.iter().sum()
    }
}
