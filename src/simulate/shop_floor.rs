//! A trace of our own making: what a board on a shop floor is asked in the course of shifts.
//!
//! Owns nothing. Invariant: the seed alone decides what comes out.
//!
//! The mix: four applications, each with a fixed system prompt (some hundred tokens); commands and questions, short, one
//! every 20 seconds or so on a working day; dialogues of a few turns, each of which repeats what was said before; a
//! shift's own context (orders, tools, open faults), which every prompt carries for eight hours and none after that;
//! and, some times in a shift, a report over a long log, which comes once and never again. Nights are quieter.

use std::collections::BTreeMap;

use super::Request;

/// Tokens that one hash id of this trace stands for.
pub const SHOP_FLOOR_BLOCK: u32 = 16;

const SHIFT_MS: u64 = 8 * 3600 * 1000;
/// Of each application: tokens of its system prompt, and of what it says of the shift.
const APPLICATIONS: [(u64, u64); 4] = [(512, 128), (256, 64), (768, 256), (384, 0)];
/// How often each is asked, out of 16.
const WEIGHTS: [u64; 4] = [7, 5, 2, 2];

/// SplitMix64 (Steele, Lea, Flood 2014): small, and the same everywhere.
#[derive(Debug)]
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From `low` to `high`, both included.
    fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.next() % (high - low + 1)
    }
}

/// The ids of texts: the same text gets the same ids, whatever follows it.
#[derive(Debug, Default)]
struct Names {
    next: u64,
    known: BTreeMap<(u64, u64), Vec<u64>>,
}

impl Names {
    fn fresh(&mut self, blocks: u64) -> Vec<u64> {
        self.next += blocks;
        (self.next - blocks..self.next).collect()
    }

    fn of(&mut self, text: (u64, u64), tokens: u64) -> Vec<u64> {
        if let Some(ids) = self.known.get(&text) {
            return ids.clone();
        }
        let ids = self.fresh(tokens / u64::from(SHOP_FLOOR_BLOCK));
        self.known.insert(text, ids.clone());
        ids
    }
}

/// A dialogue that may go on.
#[derive(Debug)]
struct Dialogue {
    shift: u64,
    /// Full blocks so far, and tokens so far.
    ids: Vec<u64>,
    tokens: u64,
    turns: u64,
}

/// `shifts` shifts of eight hours.
pub fn shop_floor(seed: u64, shifts: u64) -> Vec<Request> {
    let (mut random, mut names) = (Random(seed), Names::default());
    let mut open: Vec<Dialogue> = Vec::new();
    let mut requests = Vec::new();
    let mut now = 0;
    loop {
        let shift = now / SHIFT_MS;
        if shift >= shifts {
            return requests;
        }
        // The third shift of a day is the night's.
        let mean = if shift % 3 == 2 { 60_000 } else { 20_000 };
        open.retain(|d| d.shift == shift && d.turns > 0);
        let dice = random.between(1, 1000);
        let dialogue = match dice {
            // Somebody goes on with a dialogue.
            1..=350 if !open.is_empty() => {
                let at = random.between(0, open.len() as u64 - 1) as usize;
                open.swap_remove(at)
            }
            _ => {
                let mut pick = random.between(0, WEIGHTS.iter().sum::<u64>() - 1);
                let application = WEIGHTS.iter().position(|w| {
                    let here = pick < *w;
                    pick = pick.saturating_sub(*w);
                    here
                });
                let application = application.expect("the pick is below the sum");
                let (system, context) = APPLICATIONS[application];
                let mut ids = names.of((application as u64, u64::MAX), system);
                ids.extend(names.of((application as u64, shift), context));
                let turns = if random.between(1, 10) <= 4 { random.between(1, 4) } else { 0 };
                Dialogue { shift, ids, tokens: system + context, turns }
            }
        };
        // Four times in a thousand a report over a log, some thousand tokens, follows the prompt.
        let said = if dice > 996 { random.between(3000, 8000) } else { random.between(8, 72) };
        let answer = if dice > 996 { random.between(200, 600) } else { random.between(8, 80) };
        let block = u64::from(SHOP_FLOOR_BLOCK);
        let Dialogue { shift, mut ids, tokens, turns } = dialogue;
        let input = tokens + said;
        let more = names.fresh((input / block).saturating_sub(ids.len() as u64));
        ids.extend(more);
        let request =
            Request { timestamp: now, input_length: input, output_length: answer, hash_ids: ids.clone() };
        requests.push(request);
        if turns > 0 {
            let tokens = input + answer;
            let more = names.fresh((tokens / block).saturating_sub(ids.len() as u64));
            ids.extend(more);
            open.push(Dialogue { shift, ids, tokens, turns: turns - 1 });
        }
        now += random.between(mean / 10, 2 * mean - mean / 10);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_seed_decides_and_the_mix_is_what_the_text_says() {
        let trace = shop_floor(7, 3);
        assert_eq!(trace, shop_floor(7, 3));
        assert_ne!(trace, shop_floor(8, 3));
        let mut bytes = Vec::new();
        super::super::write(&trace, &mut bytes).unwrap();
        assert_eq!(
            super::super::read(&*bytes, SHOP_FLOOR_BLOCK).unwrap(),
            trace,
            "it is a trace by the reader's rules"
        );
        assert!((2000..5000).contains(&trace.len()), "{}", trace.len());
        let long = trace.iter().filter(|r| r.input_length > 3000).count();
        assert!((3..40).contains(&long), "{long} reports");
        let firsts: std::collections::BTreeSet<u64> = trace.iter().map(|r| r.hash_ids[0]).collect();
        assert_eq!(firsts.len(), 4, "four system prompts");
        let night = trace.iter().filter(|r| r.timestamp >= 2 * SHIFT_MS).count();
        assert!(night * 2 < trace.len() - night);
    }
}
