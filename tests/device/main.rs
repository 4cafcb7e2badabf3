//! Device tests: everything that touches a device node, on a real kernel.
//!
//! `scripts/vm` builds this program (feature `vm-tests`), boots a machine around it and runs it there as root, one
//! test at a time; tests change to other users by forking. It is of no use outside of that machine: it takes the
//! whole CMA area and changes the owners of device nodes.
//!
//! `service` and `sandbox` need the machine with a real systemd (`scripts/vm systemd`): the installed files seen from
//! outside, and from inside the daemon's unit. Everything else runs in the small machine.
//!
//! `pool` and `disaster` run the real daemon (`daemon`) on those heaps. `disaster::out_of_memory` fills the machine and
//! needs one of the article's size (`scripts/vm disaster`).
//!
//! `measure` and `window_measure` print what `scripts/bench` reports; `window_measure` also checks what is promised of it.
//!
//! `isolation` holds what one tenant can still reach of another's memory, and `heaps` what the broker does where heaps are
//! not as they should be; both run the real daemon (`broker`).
//!
//! `kernel` holds what the kernel itself must do for the product's promises to hold. Its assertions are what the
//! design rests on, so a kernel on which one of them fails is a kernel that the product must treat differently.
//!
//! `window`, `vivid` and `npu` run the product's windows over the devices that `kernel` and `iommu` try by themselves.

mod broker;
mod daemon;
mod disaster;
mod heaps;
mod iommu;
mod isolation;
mod kernel;
#[path = "../common/llama.rs"]
mod llama;
mod measure;
mod npu;
mod pool;
mod sandbox;
mod service;
mod support;
#[path = "../common/through.rs"]
mod through;
mod vivid;
mod window;
mod window_measure;
