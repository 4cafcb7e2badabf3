//! How a figure is handed to `scripts/bench`: the lines of the bench package's `Figure`, which this workspace cannot
//! depend on without taking in its candle.

use serde_json::{Value, json};

/// A figure that must be at most `bar`.
pub fn at_most(name: &str, value: f64, unit: &str, bar: f64, note: &str) {
    print(name, value, unit, bar.into(), "<=", note);
}

/// A figure that must be at least `bar`.
pub fn at_least(name: &str, value: f64, unit: &str, bar: f64, note: &str) {
    print(name, value, unit, bar.into(), ">=", note);
}

/// A figure that nothing is promised about.
pub fn reported(name: &str, value: f64, unit: &str, note: &str) {
    print(name, value, unit, Value::Null, "<=", note);
}

fn print(name: &str, value: f64, unit: &str, bar: Value, cmp: &str, note: &str) {
    let figure = json!({ "name": name, "value": value, "unit": unit, "bar": bar, "cmp": cmp, "note": note });
    println!("{figure}");
}
