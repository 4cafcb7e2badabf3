//! Gives the C library its soname: the number changes when a C program must be built anew.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libkvbroker.so.0");
}
