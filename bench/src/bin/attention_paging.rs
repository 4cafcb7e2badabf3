//! Row `attention-paging`: the time of a decode step's attention over scattered blocks, against the same kernel over
//! contiguous arrays. An argument, such as `smollm2-2048-f16`, picks the cases whose names contain it.

use std::hint::black_box;
use std::time::Duration;

use kvbroker::attention::Element;
use kvbroker_bench::kv::{Model, Sequence};
use kvbroker_bench::{Clock, Samples, at_most, reported};

fn main() {
    for model in Model::all() {
        for tokens in [512, 2048] {
            for element in [Element::F16, Element::F32] {
                let case = format!("{}-{tokens}-{element:?}", model.name).to_lowercase();
                if std::env::args().nth(1).is_none_or(|wanted| case.contains(&wanted)) {
                    compare(&model, tokens, element, &case);
                }
            }
        }
    }
}

fn compare(model: &Model, tokens: usize, element: Element, case: &str) {
    // Each side has memory, page tables and scratch of its own, so that none warms the other's; a sample is one layer,
    // and the sides take turns layer by layer, so that by the time a layer comes again, all others have passed.
    let mut sides: [Sequence; 3] = std::array::from_fn(|_| Sequence::new(model.clone(), element, tokens));
    let layers = sides[0].layers();
    for layer in 0..layers {
        let paged = sides[0].paged_layer(layer).to_bits();
        assert_eq!(
            paged,
            sides[1].contiguous_layer(layer, 16).to_bits(),
            "the sides do not do the same work"
        );
        assert_eq!(paged, sides[2].contiguous_layer(layer, 1 << 30).to_bits(), "nor does the third");
    }
    let [a, b, c] = &mut sides;
    let [mut next_a, mut next_b, mut next_c] = [(); 3].map(|()| (0..layers).cycle());
    let samples = Samples::interleaved(
        Clock::Cpu,
        20 * layers,
        Duration::from_secs(4),
        &mut [
            &mut || _ = black_box(a.paged_layer(next_a.next().unwrap_or(0))),
            &mut || _ = black_box(b.contiguous_layer(next_b.next().unwrap_or(0), 16)),
            &mut || _ = black_box(c.contiguous_layer(next_c.next().unwrap_or(0), 1 << 30)),
        ],
    );
    let name = |what: &str| format!("attention-paging/{what}-{case}");
    let note = format!("{}; median of {}", model.describe(), samples.count());
    let ratio = |base| samples.median(0) / samples.median(base);
    at_most(name("time"), ratio(1), 1.05, format!("paged / contiguous walked in blocks of 16; {note}"));
    reported(name("time-one-run"), ratio(2), "x", format!("paged / contiguous walked in one run; {note}"));
    reported(
        name("layer"),
        samples.median(0) * 1e3,
        "ms",
        format!("paged, one layer of a decode step; {note}"),
    );
}
