//! The library stays loaded once it is: its signal handler may be called by whoever came later.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libggml-kvbroker.so");
    println!("cargo::rerun-if-changed=build.rs");
}
