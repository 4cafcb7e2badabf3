//! How the rows that compute a prompt open their sequences: one set of options, so that their figures are of the same KV.

use infer::kv::KvOptions;
use infer::load::Loaded;
use kvbroker::attention::Element;
use kvbroker::profile::Layout;

/// Of the loaded model, for up to `context` tokens; KV in f16.
pub fn options(loaded: &Loaded, context: usize) -> KvOptions<'_> {
    KvOptions {
        label: "measure",
        model: &loaded.name,
        fingerprint: &loaded.fingerprint,
        geometry: loaded.model.geometry(),
        element: Element::F16,
        layout: Layout::PlaneMajor,
        context,
    }
}
