//! What changes, for whoever watches: the state as objects, and the difference between two states.
//!
//! Owns nothing of the broker: a change is found by comparing, not told by whoever makes it, so that no verb can forget
//! to. Invariants: the first state and all changes since, applied in order, are the state; what comes and goes between two
//! looks is not seen. Each line is one JSON object.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::{Map, Value, json};

use super::Broker;

/// What an object is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// The pool: ledger, what is missing or in quarantine, whether the broker drains or is frozen. Its id is 0.
    Pool,
    /// A tenant, by uid.
    Tenant,
    /// A session, by uid and number: `1000/3`.
    Session,
    /// A chain of published blocks, by name and tenant.
    Prefix,
}

/// All objects at one moment.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Snapshot(BTreeMap<(Kind, String), Value>);

impl Snapshot {
    /// How many objects there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none: never so of a broker's.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The whole state: a line for each object, then one that says that these were all.
    pub fn lines(&self) -> String {
        let mut text = String::new();
        for ((kind, id), is) in &self.0 {
            line(&mut text, &json!({ "event": "state", "kind": kind, "id": id, "is": is }));
        }
        line(&mut text, &json!({ "event": "complete", "objects": self.len() }));
        text
    }

    /// What has changed since `before`: a line for each object that is new, another one, or gone.
    pub fn changes(&self, before: &Snapshot) -> String {
        let mut text = String::new();
        for ((kind, id), _) in before.0.iter().filter(|(key, _)| !self.0.contains_key(key)) {
            line(&mut text, &json!({ "event": "gone", "kind": kind, "id": id }));
        }
        for (key, is) in &self.0 {
            let event = match before.0.get(key) {
                None => "new",
                Some(was) if was != is => "changed",
                Some(_) => continue,
            };
            line(&mut text, &json!({ "event": event, "kind": key.0, "id": key.1, "is": is }));
        }
        text
    }
}

fn line(text: &mut String, object: &Value) {
    text.push_str(&object.to_string());
    text.push('\n');
}

impl Broker {
    /// The state as it is now.
    pub fn snapshot(&self) -> Snapshot {
        let mut all = BTreeMap::new();
        let mut put = |kind, id: String, is: Value| _ = all.insert((kind, id), is);
        put(Kind::Pool, "0".into(), self.pool_object());
        for t in self.tenants().tenants {
            put(Kind::Tenant, t.uid.to_string(), object(&t, &["uid"]));
        }
        for s in self.sessions() {
            put(Kind::Session, format!("{}/{}", s.uid, s.session), object(&s, &["session"]));
        }
        for c in self.chain_reports() {
            // Chains are told apart by 16 digits of their names: of two with the same, one would hide the other.
            put(Kind::Prefix, format!("{}@{}", c.chain, c.uid), object(&c, &["chain"]));
        }
        Snapshot(all)
    }

    fn pool_object(&self) -> Value {
        let status = self.status();
        json!({
            "bytes": status.pool.bytes,
            "ledger": status.ledger,
            "extents_missing": status.pool.extents_missing,
            "extents_quarantined": status.pool.quarantined.len(),
            "limits_revision": status.limits_revision,
            "draining": status.draining,
            "frozen": status.frozen,
            "evictions": status.prefix_evictions,
            "reclaims": status.counters.reclaims,
            "sessions_lost": status.counters.sessions_lost,
        })
    }
}

/// A report without what the id says already.
fn object(report: &impl Serialize, without: &[&str]) -> Value {
    let mut fields = match serde_json::to_value(report) {
        Ok(Value::Object(fields)) => fields,
        // Reports are plain data with names.
        other => Map::from_iter([("value".into(), other.unwrap_or_default())]),
    };
    without.iter().for_each(|key| _ = fields.remove(*key));
    Value::Object(fields)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot(objects: &[(&str, u32)]) -> Snapshot {
        Snapshot(objects.iter().map(|(id, n)| ((Kind::Session, (*id).into()), json!({ "n": n }))).collect())
    }

    #[test]
    fn a_state_and_its_changes_give_the_next_state() {
        let before = snapshot(&[("1", 1), ("2", 2), ("3", 3)]);
        let after = snapshot(&[("2", 2), ("3", 4), ("5", 5)]);
        let mut built: BTreeMap<String, Value> = BTreeMap::new();
        for text in (before.lines() + &after.changes(&before)).lines() {
            let change: Value = serde_json::from_str(text).unwrap();
            let id = change["id"].as_str().unwrap_or_default().to_owned();
            match change["event"].as_str().unwrap() {
                "state" | "new" | "changed" => _ = built.insert(id, change["is"].clone()),
                "gone" => assert!(built.remove(&id).is_some()),
                other => assert_eq!((other, change["objects"].as_u64()), ("complete", Some(3))),
            }
        }
        let wanted: BTreeMap<_, _> = after.0.iter().map(|((_, id), is)| (id.clone(), is.clone())).collect();
        assert_eq!(built, wanted);
        assert_eq!(after.changes(&after), "");
    }
}
