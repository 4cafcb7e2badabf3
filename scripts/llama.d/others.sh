# shellcheck shell=bash disable=SC2034,SC2154 # sourced by scripts/llama, whose variables and functions are used
# What Debian's packages do not have, made once and kept in the cache.
#
# An older llama.cpp than Debian's: 0.6.0 with ggml 0.26, from the sources in the crate llama-cpp-sys-2 (which has no tools).

older_crate='llama-cpp-sys-2 = "=0.1.161"'
# Libraries alone. Not for the CPU at hand: a cache may move to another.
library_options=(-DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DGGML_NATIVE=OFF -DLLAMA_BUILD_COMMON=OFF
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF
    -DLLAMA_BUILD_APP=OFF -DCMAKE_INSTALL_LIBDIR=lib "-DCMAKE_INSTALL_RPATH=\$ORIGIN")

# made NAME MAKE COST COMMAND: sets $entry to the directory NAME of the cache. If it is not there, COMMAND makes it, with
# an empty directory to work in and the final one as arguments; or, when MAKE is no, $entry becomes empty.
made() {
    entry=$cache/llama/$1
    if [ "$2" = no ]; then
        [ -e "$entry/.complete" ] || entry=
        return 0
    fi
    exec 8>"$entry.lock"
    flock 8
    if [ ! -e "$entry/.complete" ]; then
        say "making $1 ($3)"
        local work
        work=$(mktemp -d "$cache/llama/.making.XXXXXX")
        rm -rf -- "$entry"
        if ! "$4" "$work" "$entry" >"$work/log" 2>&1; then
            tail -n 40 "$work/log" >&2
            rm -rf -- "$work" "$entry"
            die "$1 could not be made"
        fi
        rm -rf -- "$work"
        touch "$entry/.complete"
    fi
    flock -u 8
}

# build_libraries SOURCES WORK PREFIX OPTION...
build_libraries() {
    local sources=$1 work=$2 prefix=$3
    shift 3
    cmake -S "$sources" -B "$work/build" "${library_options[@]}" "-DCMAKE_INSTALL_PREFIX=$prefix" "$@" &&
        nice -n "${KVBROKER_NICE:-10}" cmake --build "$work/build" --parallel "$(nproc)" &&
        cmake --install "$work/build"
}

# older_llama MAKE: sets $older to a directory with lib/ and include/, or leaves it empty. Its CPU backend is a module, as
# distributions build it.
older_llama() {
    [ "$1" = no ] || "$checkout/scripts/need" cmake:cmake c++:g++ make:make || die "Debian packages are missing"
    made "llama-0.6.0-$(printf '%s\n' "$older_crate" "${library_options[@]}" | sha256sum | cut -c1-12)" "$1" \
        "llama.cpp with ggml 0.26, 3 minutes on two cores" build_older
    older=$entry
}

build_older() {
    local work=$1 prefix=$2
    mkdir -p "$work/package/src"
    printf '[package]\nname = "sources"\nversion = "0.0.0"\nedition = "2021"\n[dependencies]\n%s\n[workspace]\n' \
        "$older_crate" >"$work/package/Cargo.toml"
    : >"$work/package/src/lib.rs"
    (cd "$work/package" && cargo vendor --quiet --versioned-dirs "$work/crates" >/dev/null) &&
        build_libraries "$(echo "$work"/crates/llama-cpp-sys-2-*/llama.cpp)" "$work" "$prefix" -DGGML_BACKEND_DL=ON &&
        # The module, where the other libraries are.
        cp -p "$work"/build/bin/libggml-cpu*.so "$prefix/lib/" &&
        [ -e "$prefix/lib/libggml-base.so.0.26.0" ]
}

# llama-cpp-python and the libraries that its source package has and builds: shared, the CPU backend linked in.
python_version=0.3.36
python_sum=832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e

# python_llama MAKE: sets $python to a directory with the package, or leaves it empty.
python_llama() {
    [ "$1" = no ] || "$checkout/scripts/need" cmake:cmake c++:g++ make:make || die "Debian packages are missing"
    made "llama-cpp-python-$python_version-$(printf '%s\n' "${library_options[@]}" | sha256sum | cut -c1-12)" "$1" \
        "its ggml is 0.25; 77 MB of source, 3 minutes on two cores" build_python
    python=$entry
}

build_python() {
    local work=$1 prefix=$2
    python3 -m pip --disable-pip-version-check download --quiet --no-deps --no-binary llama-cpp-python --dest "$work" \
        "llama-cpp-python==$python_version" &&
        echo "$python_sum  $work/llama_cpp_python-$python_version.tar.gz" | sha256sum --check --status &&
        tar -xzf "$work/llama_cpp_python-$python_version.tar.gz" -C "$work" &&
        build_libraries "$work/llama_cpp_python-$python_version/vendor/llama.cpp" "$work" "$prefix/llama_cpp" &&
        cp -r "$work/llama_cpp_python-$python_version/llama_cpp/." "$prefix/llama_cpp/" &&
        [ -e "$prefix/llama_cpp/lib/libllama.so" ]
}

# arm64_llama MAKE: sets $arm64 to the files of Debian's llama.cpp for arm64, which qemu-user runs, and $arm64_plugin to
# the plugin, built by Debian 13's cross toolchain (in the root that scripts/vm builds its programs in).
arm64_llama() {
    arm64=
    arm64_plugin=$checkout/target/vm/debian/aarch64-unknown-linux-gnu/release/libggml_kvbroker.so
    # On arm64 everything else runs there anyway.
    [ "$1" = yes ] && [ "$(uname -m)" != aarch64 ] || return 0
    "$checkout/scripts/need" qemu-aarch64:qemu-user || die "Debian packages are missing"
    made arm64-1 yes "Debian's llama.cpp for arm64, half a minute" unpack_arm64
    arm64=$entry
    say "building the plugin for arm64"
    cross_plugin || die "the plugin does not build for arm64"
}

# Unpacked only: nothing of it is configured, so nothing has to run.
unpack_arm64() {
    local name
    mmdebstrap --quiet --mode=root --variant=extract --architectures=arm64 --include=llama.cpp-tools \
        --aptopt='Acquire::Check-Valid-Until "false"' --aptopt='APT::Install-Recommends "false"' forky "$2" \
        ${mirror:+"$mirror"} || return
    for name in bin sbin lib; do
        [ -e "$2/$name" ] || ln -s "usr/$name" "$2/$name"
    done
}

# In a shell of its own: the parts of scripts/vm have names of their own for the same things.
cross_plugin() (
    vm_d=$checkout/scripts/vm.d
    for part in lib roots programs; do
        # shellcheck source=/dev/null
        . "$vm_d/$part.sh"
    done
    debian_cargo build --quiet --release --package kvbroker-ggml --target aarch64-unknown-linux-gnu \
        --config 'target.aarch64-unknown-linux-gnu.linker = "aarch64-linux-gnu-gcc"' >&2
)
