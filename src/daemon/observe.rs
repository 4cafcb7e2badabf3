//! What operators see and say beyond `status`: tenants, prefixes, metrics, eviction, drain.
//!
//! Owns the grammar of these requests. Invariant: a request that is not understood changes nothing and is answered with
//! what would be.

use serde_json::{Value, json};

use super::metrics::{self, Dialect};
use crate::broker::{Broker, Evict};
use crate::id::Tenant;

/// The requests, for whoever asked for another one.
pub(super) const REQUESTS: &str = "tenants, prefixes, top, metrics, evict, drain, events";

/// What is sent to the operator.
pub(super) enum Answer {
    Json(serde_json::Result<Value>),
    /// As it is.
    Text(String),
}

/// The answer, if the request is one of these.
pub(super) fn answer(broker: &mut Broker, request: &str) -> Option<Answer> {
    let (verb, rest) = request.split_once(' ').unwrap_or((request, ""));
    let rest = rest.trim();
    let json = match (verb, rest) {
        ("tenants", "") => serde_json::to_value(broker.tenants()),
        ("prefixes", "") => serde_json::to_value(broker.prefixes()),
        ("top", "") => Ok(json!({
            "status": broker.status(),
            "tenants": broker.tenants(),
            "sessions": broker.sessions(),
        })),
        ("metrics", "") => return Some(Answer::Text(metrics::text(broker, Dialect::Text))),
        ("metrics", "openmetrics") => return Some(Answer::Text(metrics::text(broker, Dialect::Open))),
        ("evict", what) => match eviction(what) {
            Ok(what) => serde_json::to_value(broker.evict(&what)),
            Err(why) => Ok(json!({ "error": why })),
        },
        ("drain", "" | "on" | "off") => {
            broker.set_draining(rest != "off");
            let status = broker.status();
            Ok(json!({ "draining": status.draining, "sessions": status.sessions, "clients": status.clients }))
        }
        _ => return None,
    };
    Some(Answer::Json(json))
}

/// `blocks=N|all [uid=N]`, or `pinned=DIGITS`
fn eviction(text: &str) -> Result<Evict, String> {
    let (mut most, mut tenant, mut pinned) = (None, None, None);
    for word in text.split_whitespace() {
        let (key, value) = word.split_once('=').ok_or_else(|| format!("{word}: write key=value"))?;
        match key {
            "blocks" if value == "all" => most = Some(u64::MAX),
            "blocks" => most = Some(value.parse().map_err(|e| format!("blocks = {value}: {e}"))?),
            "uid" => tenant = Some(Tenant(value.parse().map_err(|e| format!("uid = {value}: {e}"))?)),
            "pinned" if !value.is_empty() && value.bytes().all(|b| b.is_ascii_hexdigit()) => {
                pinned = Some(value.to_ascii_lowercase());
            }
            "pinned" => return Err(format!("pinned = {value}: the beginning of a chain's name, in hex")),
            _ => return Err(format!("{key}: there are blocks, uid and pinned")),
        }
    }
    match (most, tenant, pinned) {
        (None, None, Some(pinned)) => Ok(Evict::Pinned(pinned)),
        (Some(most), tenant, None) => Ok(Evict::Blocks { most, tenant }),
        _ => Err("evict what? blocks=N or blocks=all, with uid=N of one tenant; or pinned=CHAIN".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_eviction_says_exactly_one_thing() {
        let uid = |n| Some(Tenant(n));
        assert_eq!(eviction("blocks=3"), Ok(Evict::Blocks { most: 3, tenant: None }));
        assert_eq!(eviction("uid=7 blocks=all"), Ok(Evict::Blocks { most: u64::MAX, tenant: uid(7) }));
        assert_eq!(eviction("pinned=AB12"), Ok(Evict::Pinned("ab12".into())));
        for wrong in
            ["", "uid=7", "blocks=-1", "blocks", "pinned=", "pinned=xyz", "pinned=ab blocks=1", "all=1"]
        {
            assert!(eviction(wrong).is_err(), "{wrong}");
        }
    }
}
