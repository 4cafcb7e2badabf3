//! The daemon as users meet it: a process of its own, real sockets, real client processes of several users.
//!
//! Runs as root, because clients of several uids are what isolation is about; as another user the tests that need them
//! fail and say so.

mod claims;
mod common;
mod deaths;
mod governing;
mod hold;
mod hostile;
mod kernel_limits;
mod lifetime;
mod observe;
mod profiles;
mod quotas;
mod roles;
mod sharing;
mod start;
mod store;
mod support;
mod tenants;
