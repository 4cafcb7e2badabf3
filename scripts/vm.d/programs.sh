# shellcheck shell=bash disable=SC2034,SC2154 # the parts share variables
# The project's programs as the guest runs them: static, so that the guest needs no libraries.
#
# x86-64 programs come from the host's toolchain, the one that developers use. arm64 programs come from
# Debian 13's rustc 1.85, which is the package's rust-version: the build is also the proof of that promise.

# Prints the executables of cargo's JSON messages on standard input.
executables() { sed -n 's/^{"reason":"compiler-artifact".*"executable":"\([^"]*\)".*/\1/p'; }

# programs_of ARCH: sets $programs to the device test and the binaries; the test is named `device`.
programs_of() {
    local out=$checkout/target/vm path name
    mkdir -p "$out" "$work/bin"
    case $1 in
    x86_64)
        cargo test --locked --no-run --test device --features vm-tests \
            --target x86_64-unknown-linux-gnu --target-dir "$out/host" \
            --config 'target.x86_64-unknown-linux-gnu.rustflags = ["-C", "target-feature=+crt-static"]' \
            --message-format=json-render-diagnostics --manifest-path "$checkout/Cargo.toml" \
            >"$work/messages"
        ;;
    aarch64)
        debian_cargo test --no-run --test device --features vm-tests --target aarch64-unknown-linux-gnu \
            --config 'target.aarch64-unknown-linux-gnu.linker = "aarch64-linux-gnu-gcc"' \
            --config 'target.aarch64-unknown-linux-gnu.rustflags = ["-C", "target-feature=+crt-static"]' \
            --message-format=json-render-diagnostics >"$work/messages"
        ;;
    esac
    programs=()
    while read -r path; do
        # Inside the root the target directory is /out.
        path=${path/#\/out\//$out/}
        name=${path##*/}
        # Test executables carry cargo's hash.
        [[ $name != device-* ]] || name=device
        cp --reflink=auto -- "$path" "$work/bin/$name"
        programs+=("$work/bin/$name")
    done < <(executables <"$work/messages")
    [[ " ${programs[*]} " == *"/device "* ]] || die 'cargo built no device test'
    example_of "$1" "$out"
    strip_programs "$1"
}

# example_of ARCH OUT: the C example for NPU runtimes, linked against the static library that cargo has just built.
example_of() {
    local root flags=(-static -s -Wl,--no-warnings -std=c11 -D_POSIX_C_SOURCE=200809L -Wall -Wextra -Werror)
    local libraries=(-lpthread -lm -ldl -lgcc_eh)
    case $1 in
    x86_64)
        cc "${flags[@]}" -I"$checkout/include" "$checkout/examples/npu-import.c" -o "$work/bin/npu-import" \
            "$2/host/x86_64-unknown-linux-gnu/debug/deps/libkvbroker.a" "${libraries[@]}"
        ;;
    aarch64)
        root_of rust
        in_root -r "$checkout:/src" -r "$2:/mnt" -b "$work/bin:/out" \
            aarch64-linux-gnu-gcc "${flags[@]}" -I/src/include /src/examples/npu-import.c -o /out/npu-import \
            /mnt/debian/aarch64-unknown-linux-gnu/debug/deps/libkvbroker.a "${libraries[@]}"
        ;;
    esac
    programs+=("$work/bin/npu-import")
}

# Debugging information is nine tenths of a program, and the guest's memory holds the initramfs.
strip_programs() {
    local root strip=strip
    [[ $1 != aarch64 ]] || strip=aarch64-linux-gnu-strip
    root_of bench
    in_root -b "$work/bin:/out" bash -c "$strip --strip-debug /out/*"
}

vendor_crates() {
    cargo vendor --quiet --locked --versioned-dirs --manifest-path "$checkout/Cargo.toml" "$building/crates" \
        >/dev/null
    printf '[source.crates-io]\nreplace-with = "vendored"\n[source.vendored]\ndirectory = "/vendor/crates"\n' \
        >"$building/config.toml"
}

# debian_cargo COMMAND...: Debian 13's cargo, offline, over the checkout.
debian_cargo() {
    local entry root vendor command=$1
    shift
    mkdir -p "$checkout/target/vm"
    cached "vendor-$(hash_of <"$checkout/Cargo.lock")" 'fetching the crates of Cargo.lock' vendor_crates
    vendor=$entry
    root_of rust
    in_root -r "$checkout:/src" -b "$checkout/target/vm:/out" -r "$vendor:/vendor" \
        nice -n "$nice_level" cargo "$command" --config /vendor/config.toml --locked --offline \
        --manifest-path /src/Cargo.toml --target-dir /out/debian "$@"
}

# The promise of Cargo.toml's rust-version: library and binaries, with and without the daemon. A check is enough: what
# rustc 1.85 makes of the same code is built, run and packaged by the machines for arm64 and by scripts/package.
msrv() {
    debian_cargo check --lib --bins
    debian_cargo check --lib --no-default-features
}
