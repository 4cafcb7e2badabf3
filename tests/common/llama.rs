//! A Llama of two layers with seeded weights: small enough for a test, whole enough that one wrong byte of K or V shows.
//!
//! RMS norm, rotary positions, grouped-query attention, SwiGLU, greedy choice. Its KV rows are f32 and 256 bytes long, so that
//! 16 tokens of a plane are one page of 4 KiB.

pub const LAYERS: usize = 2;
pub const ROW: usize = KV_HEADS * DIM;
pub const ROW_BYTES: usize = 4 * ROW;
/// Tokens whose K and V are kept: all but the last one that is chosen.
pub const TOKENS: usize = PROMPT.len() + STEPS - 1;

const PROMPT: [usize; 4] = [11, 42, 7, 23];
const STEPS: usize = 24;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 32;
const HIDDEN: usize = HEADS * DIM;
const FFN: usize = 192;
const VOCABULARY: usize = 96;

/// Where K and V are kept.
pub trait Kv {
    /// The rows of one token in one layer.
    fn write(&mut self, layer: usize, token: usize, k: &[f32], v: &[f32]);
    /// The rows of the first `tokens` tokens of one layer, K and V.
    fn gather(&mut self, layer: usize, tokens: usize) -> [Vec<f32>; 2];
}

/// Ordinary vectors: what the others are compared with.
#[derive(Default)]
pub struct Plain([[Vec<f32>; 2]; LAYERS]);

impl Kv for Plain {
    fn write(&mut self, layer: usize, _: usize, k: &[f32], v: &[f32]) {
        self.0[layer][0].extend(k);
        self.0[layer][1].extend(v);
    }

    fn gather(&mut self, layer: usize, tokens: usize) -> [Vec<f32>; 2] {
        let upto = |rows: &Vec<f32>| rows[..tokens * ROW].to_vec();
        [upto(&self.0[layer][0]), upto(&self.0[layer][1])]
    }
}

struct Matrix(Vec<f32>, usize);

impl Matrix {
    fn times(&self, x: &[f32]) -> Vec<f32> {
        let dot = |row: &[f32]| row.iter().zip(x).map(|(a, b)| a * b).sum();
        self.0.chunks_exact(self.1).map(dot).collect()
    }
}

struct Seeded(u64);

impl Seeded {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    fn matrix(&mut self, rows: usize, columns: usize) -> Matrix {
        let scale = (3.0 / columns as f32).sqrt();
        Matrix((0..rows * columns).map(|_| self.next() * scale).collect(), columns)
    }
}

struct Layer {
    q: Matrix,
    k: Matrix,
    v: Matrix,
    o: Matrix,
    gate: Matrix,
    up: Matrix,
    down: Matrix,
}

fn norm(x: &[f32]) -> Vec<f32> {
    let mean = x.iter().map(|v| v * v).sum::<f32>() / x.len() as f32;
    x.iter().map(|v| v / (mean + 1e-5).sqrt()).collect()
}

fn rotate(rows: &mut [f32], position: usize) {
    for head in rows.chunks_exact_mut(DIM) {
        for i in 0..DIM / 2 {
            let angle = position as f32 / 10000f32.powf(2.0 * i as f32 / DIM as f32);
            let (sin, cos) = angle.sin_cos();
            let (a, b) = (head[i], head[i + DIM / 2]);
            (head[i], head[i + DIM / 2]) = (a * cos - b * sin, a * sin + b * cos);
        }
    }
}

fn attend(q: &[f32], k: &[f32], v: &[f32]) -> Vec<f32> {
    let mut out = Vec::with_capacity(HIDDEN);
    for head in 0..HEADS {
        let (q, at) = (&q[head * DIM..][..DIM], head * KV_HEADS / HEADS * DIM);
        let score = |row: &[f32]| row[at..at + DIM].iter().zip(q).map(|(a, b)| a * b).sum::<f32>();
        let scores: Vec<f32> = k.chunks_exact(ROW).map(|r| score(r) / (DIM as f32).sqrt()).collect();
        let most = scores.iter().fold(f32::MIN, |a, b| a.max(*b));
        let weights: Vec<f32> = scores.iter().map(|s| (s - most).exp()).collect();
        let sum: f32 = weights.iter().sum();
        let column = |i: usize| v.chunks_exact(ROW).zip(&weights).map(|(r, w)| r[at + i] * w).sum::<f32>();
        out.extend((0..DIM).map(|i| column(i) / sum));
    }
    out
}

/// Decodes 24 tokens with the KV in `kv`. Returns those that were chosen.
pub fn decode(kv: &mut dyn Kv) -> Vec<usize> {
    let mut seeded = Seeded(2024);
    let embedding = seeded.matrix(VOCABULARY, HIDDEN);
    let layers: Vec<Layer> = (0..LAYERS)
        .map(|_| Layer {
            q: seeded.matrix(HIDDEN, HIDDEN),
            k: seeded.matrix(ROW, HIDDEN),
            v: seeded.matrix(ROW, HIDDEN),
            o: seeded.matrix(HIDDEN, HIDDEN),
            gate: seeded.matrix(FFN, HIDDEN),
            up: seeded.matrix(FFN, HIDDEN),
            down: seeded.matrix(HIDDEN, FFN),
        })
        .collect();
    let head = seeded.matrix(VOCABULARY, HIDDEN);
    let mut tokens = PROMPT.to_vec();
    for position in 0..TOKENS {
        let mut x = embedding.0[tokens[position] * HIDDEN..][..HIDDEN].to_vec();
        for (n, layer) in layers.iter().enumerate() {
            let h = norm(&x);
            let (mut q, mut k, v) = (layer.q.times(&h), layer.k.times(&h), layer.v.times(&h));
            rotate(&mut q, position);
            rotate(&mut k, position);
            kv.write(n, position, &k, &v);
            let [k, v] = kv.gather(n, position + 1);
            let attended = layer.o.times(&attend(&q, &k, &v));
            x.iter_mut().zip(attended).for_each(|(x, a)| *x += a);
            let h = norm(&x);
            let silu = |g: f32| g / (1.0 + (-g).exp());
            let inner: Vec<f32> =
                layer.gate.times(&h).into_iter().zip(layer.up.times(&h)).map(|(g, u)| silu(g) * u).collect();
            x.iter_mut().zip(layer.down.times(&inner)).for_each(|(x, d)| *x += d);
        }
        if position + 1 == tokens.len() {
            let logits = head.times(&norm(&x));
            let best = (0..VOCABULARY).max_by(|a, b| logits[*a].total_cmp(&logits[*b]));
            tokens.push(best.expect("the vocabulary is not empty"));
        }
    }
    tokens[PROMPT.len()..].to_vec()
}

pub fn to_bytes(row: &[f32]) -> Vec<u8> {
    row.iter().flat_map(|v| v.to_le_bytes()).collect()
}

pub fn from_bytes(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().expect("four bytes"))).collect()
}
