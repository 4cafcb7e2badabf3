# shellcheck shell=bash disable=SC2034,SC2154 # the parts share variables
# The programs and libraries that are packaged: built in the `rust` root, linked against an old C library.

# The newest glibc whose symbols may be used: Ubuntu 22.04's.
glibc_limit=2.35
# The release whose C library is linked against: the oldest Debian that is supported.
libc_suite=bookworm

declare -A rust_target=([amd64]=x86_64-unknown-linux-gnu [arm64]=aarch64-unknown-linux-gnu)
declare -A gnu_triplet=([amd64]=x86_64-linux-gnu [arm64]=aarch64-linux-gnu)

# fetch_libc ARCH: fills $building/lib with what a program is linked with, free of absolute paths.
fetch_libc() {
    local arch=$1 suite=$libc_suite apt=$building/.apt lib=$building/lib unpacked=$building/.unpacked from
    mkdir -p "$apt"/{etc/apt.conf.d,etc/preferences.d,state/lists/partial,cache/archives/partial} "$lib" "$unpacked"
    debian_sources "$suite" | sed '/-security/d' >"$apt/etc/sources.list"
    # The keys are the host's; everything else is private, so the host's architectures and sources do not matter.
    printf '%s\n' "Dir::Etc \"$apt/etc\";" 'Dir::Etc::sourceparts "/dev/null";' \
        'Dir::Etc::trustedparts "/usr/share/keyrings";' 'Dir::Etc::trusted "/dev/null";' \
        "Dir::State \"$apt/state\";" 'Dir::State::status "/dev/null";' "Dir::Cache \"$apt/cache\";" \
        "APT::Architecture \"$arch\";" "APT::Architectures { \"$arch\"; };" 'Acquire::Languages "none";' \
        'Acquire::Check-Valid-Until "false";' 'APT::Sandbox::User "";' >"$apt/apt.conf"
    (
        export APT_CONFIG=$apt/apt.conf
        cd "$apt" || exit
        apt-get -qq update
        apt-get -qq download libc6 libc6-dev
    )
    local deb
    for deb in "$apt"/*.deb; do dpkg-deb --fsys-tarfile "$deb" | tar -x -C "$unpacked"; done
    # usr/lib/TRIPLET has the parts for linking, lib/TRIPLET the libraries themselves.
    for from in "$unpacked/usr/lib/${gnu_triplet[$arch]}" "$unpacked/lib/${gnu_triplet[$arch]}"; do
        find "$from" -maxdepth 1 -type f \( -name '*.o' -o -name '*.a' -o -name '*.so.[0-9]*' \) \
            ! -name libc.a ! -name 'libm-*.a' ! -name libmvec.a ! -name libm.a -exec cp -t "$lib" {} +
    done
    local loader
    loader=$(cd "$lib" && echo ld-linux-*.so.*)
    # The originals name absolute paths, which would lead to the root's own libraries.
    echo "GROUP ( libc.so.6 libc_nonshared.a AS_NEEDED ( $loader ) )" >"$lib/libc.so"
    echo 'INPUT ( libm.so.6 )' >"$lib/libm.so"
    rm -rf -- "$apt" "$unpacked"
}

# package_cargo ARCH COMMAND...: Debian 13's cargo, offline, over the checkout; what it builds is in $programs_out.
package_cargo() {
    local arch=$1 entry libc vendor target=${rust_target[$1]} key
    shift
    cached "libc-$libc_suite-$arch-1" "fetching Debian $libc_suite's C library for $arch" fetch_libc "$arch"
    libc=$entry/lib
    cached "vendor-$(hash_of <"$checkout/Cargo.lock")" 'fetching the crates of Cargo.lock' vendor_crates
    vendor=$entry
    root_of rust
    programs_out=$checkout/target/vm/package/$target/release
    key=target.$target
    in_root -r "$checkout:/src" -b "$checkout/target/vm:/out" -r "$vendor:/vendor" -r "$libc:/tmp/libc" \
        nice -n "$nice_level" cargo "$@" --config /vendor/config.toml --locked --offline \
        --manifest-path /src/Cargo.toml --target-dir /out/package --target "$target" --release --quiet \
        --config "$key.linker = \"${gnu_triplet[$arch]}-gcc\"" \
        --config "$key.rustflags = [\"-C\", \"link-arg=-B/tmp/libc/\", \"-C\", \"link-arg=-L/tmp/libc\"]"
}

# glibc_of ARCH FILE: prints the newest version of glibc that the file needs.
glibc_of() {
    in_root -r "${2%/*}:/out" "${gnu_triplet[$1]}-objdump" -T "/out/${2##*/}" |
        sed -n 's/.*[( ]GLIBC_\([0-9.]*\)[) ].*/\1/p' | sort -Vu | tail -n 1
}

# build_programs ARCH OUT
build_programs() {
    local arch=$1 out=$2
    package_cargo "$arch" build --bins
    cp -t "$out" "$programs_out"/{kvbrokerd,kvbctl}
    # The libraries anew, without what only the daemon needs.
    package_cargo "$arch" build -p kvbroker-ggml
    package_cargo "$arch" build -p kvbroker --lib --no-default-features
    cp "$programs_out/libggml_kvbroker.so" "$out/libggml-kvbroker.so"
    cp -t "$out" "$programs_out"/libkvbroker.{so,a}
    # The root's tools need the root's libraries.
    in_root -b "$out:/out" bash -euc '
        "$1-strip" --strip-unneeded /out/kvbrokerd /out/kvbctl /out/*.so
        "$1-strip" --strip-debug --enable-deterministic-archives /out/*.a' strip "${gnu_triplet[$arch]}"
}

# sources_of_programs: a hash of everything that programs are made from.
sources_of_programs() {
    (cd "$checkout" &&
        git ls-files -z --cached --others --exclude-standard -- Cargo.toml Cargo.lock build.rs src include ggml-plugin \
            scripts/package.d/programs.sh scripts/vm.d/roots.sh | sort -z | xargs -0 sha256sum | hash_of)
}

# package_programs ARCH: sets $programs_out to a directory with stripped programs and libraries. It is kept: the library's
# files have no hash in their names, so cargo would make everything anew whenever the features change.
package_programs() {
    local arch=$1 out=$checkout/target/vm/package/programs-$1 sources file needs
    sources=$(sources_of_programs)
    if [[ $(cat "$out/sources" 2>/dev/null) != "$sources" ]]; then
        rm -rf -- "$out"
        mkdir -p "$out"
        build_programs "$arch" "$out"
        echo "$sources" >"$out/sources"
    fi
    root_of rust
    programs_out=$out
    glibc=0
    for file in "$out"/kvbrokerd "$out"/kvbctl "$out"/*.so; do
        needs=$(glibc_of "$arch" "$file")
        [[ -n $needs ]] || die "the glibc that ${file##*/} needs cannot be read"
        [[ $(printf '%s\n' "$needs" "$glibc_limit" | sort -V | tail -n 1) = "$glibc_limit" ]] ||
            die "${file##*/} needs glibc $needs; at most $glibc_limit is promised"
        glibc=$(printf '%s\n' "$needs" "$glibc" | sort -V | tail -n 1)
    done
    say "$arch: the newest symbols are of glibc $glibc"
}
