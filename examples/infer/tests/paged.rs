//! Where the keys and values lie does not change a bit of the answer.

mod common;

use common::{bits, engine};
use infer::kv::{Attention, Geometry, Kv, KvError, KvStore, Twin};
use infer::weights::Precision;
use kvbroker::attention::{Element, PAGE_SHIFT, Paged, store_row};
use kvbroker::profile::{Group, Layer, Layout, Plane, Profile};

/// Blocks of a private pool, handed out in an order that is as scattered as can be.
struct Scattered {
    pool: Vec<u8>,
    table: Vec<u32>,
    free: Vec<u32>,
    planes: Vec<[Plane; 2]>,
    shift: u32,
    element: Element,
    attention: Attention,
}

impl Scattered {
    fn new(geometry: Geometry, element: Element, layout: Layout, per_block: u32, tokens: usize) -> Self {
        let row = geometry.row_bytes(element) as u32;
        let layers = (0..geometry.layers as u32).map(|n| (n, Layer { k_row: row, v_row: row })).collect();
        let group = Group { layers, window: None };
        let profile = Profile::new("test", "any", layout, per_block, vec![group]).unwrap();
        let pages = (profile.slot_bytes(0, 1 << PAGE_SHIFT) >> PAGE_SHIFT) as u32;
        let blocks = profile.blocks_for(tokens as u64) as u32;
        // Every other block from the end, then the rest from the start: never two neighbours in order.
        let free = (0..blocks).step_by(2).chain((0..blocks).skip(1).step_by(2).rev()).map(|b| b * pages);
        Scattered {
            // Bytes that are no number, so that reading a row nobody wrote shows.
            pool: vec![0xff; (blocks * pages) as usize * (1 << PAGE_SHIFT)],
            table: Vec::new(),
            free: free.collect(),
            planes: profile.planes(0),
            shift: profile.block_shift(),
            element,
            attention: Attention::new(geometry, element),
        }
    }
}

impl KvStore for Scattered {
    fn ensure(&mut self, tokens: usize) -> Result<(), KvError> {
        while self.table.len() << self.shift < tokens {
            self.table.push(self.free.pop().expect("the test's pool is large enough"));
        }
        Ok(())
    }

    fn reserve(&mut self, _: usize, _: usize) -> Result<(), KvError> {
        Ok(())
    }

    fn store(&mut self, token: usize, layer: usize, kv: Kv, row: &[f32]) {
        let plane = self.planes[layer][usize::from(kv == Kv::V)];
        let in_block = token & ((1 << self.shift) - 1);
        let block = (self.table[token >> self.shift] as usize) << PAGE_SHIFT;
        let place = &mut self.pool[block + plane.offset + in_block * plane.stride..][..plane.row];
        assert_eq!(row.len() * self.element.bytes(), place.len());
        // SAFETY: `place` is as long as the row and borrowed exclusively.
        unsafe { store_row(self.element, place.as_mut_ptr(), row) }
    }

    fn attend(&mut self, layer: usize, kv_tokens: usize, q: &[f32], out: &mut [f32]) {
        let [k, v] = self.planes[layer];
        let kv = Paged { base: self.pool.as_ptr(), table: &self.table, shift: self.shift, k, v };
        // SAFETY: the table has blocks of the pool for all tokens that `ensure` made room for.
        unsafe { self.attention.run(&kv, layer, kv_tokens, q, out) }
    }
}

const DECODED: usize = 30;

#[test]
fn paged_logits_equal_the_contiguous_twins_bit_for_bit() {
    let (engine, prompt) = engine(Precision::File);
    let geometry = engine.model.geometry();
    let tokens = prompt.len() + DECODED;
    for element in [Element::F16, Element::F32] {
        let twin = bits(&engine, &mut Twin::new(geometry, element, tokens), &prompt, DECODED);
        for (layout, per_block) in
            [(Layout::PlaneMajor, 32), (Layout::TokenMajor, 16), (Layout::PlaneMajor, 1)]
        {
            let mut paged = Scattered::new(geometry, element, layout, per_block, tokens);
            let same = bits(&engine, &mut paged, &prompt, DECODED) == twin;
            assert!(same, "{element:?}, {layout:?}, {per_block} tokens per block");
        }
    }
}

#[test]
fn with_weights_in_f32_both_layouts_give_the_same_bits() {
    let (engine, prompt) = engine(Precision::F32);
    let geometry = engine.model.geometry();
    let run = |layout| {
        let mut paged = Scattered::new(geometry, Element::F32, layout, 16, prompt.len() + DECODED);
        bits(&engine, &mut paged, &prompt, DECODED)
    };
    assert!(run(Layout::PlaneMajor) == run(Layout::TokenMajor));
}
