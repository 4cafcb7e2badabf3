# shellcheck shell=bash disable=SC2034,SC2154 # the parts share variables
# What goes where in the packages, and their control files.
#
# Invariant: nothing of the host is in a package beside the programs: every time is SOURCE_DATE_EPOCH, every owner is root,
# every mode is set here.

maintainer='kvbroker developers <kvbroker@localhost>'
homepage_section=misc
soname=$(sed -n 's/.*-soname,libkvbroker\.so\.\([0-9]*\).*/\1/p' "$checkout/build.rs")

# put MODE FILE DESTINATION: a file of the package.
put() { install -D -m "$1" "$2" "$tree/$3"; }

# packed FILE DESTINATION: the same, compressed as Debian wants its documentation.
packed() {
    mkdir -p "$(dirname "$tree/$2")"
    gzip -9n <"$1" >"$tree/$2.gz"
    chmod 644 "$tree/$2.gz"
}

# document FILE DESTINATION: a document as it is read on a board. Links lead to what is installed; of those to the checkout the
# words are left.
document() {
    sed -E -f "$package_d/links.sed" "$1" >"$work/doc/document"
    packed "$work/doc/document" "$2"
}

manual() {
    (cd "$checkout" && nice -n "$nice_level" cargo run --quiet --locked --example manual -- "$work/manual")
}

# The licences of what is linked in, from the crates' own words.
crates_of() {
    (cd "$checkout" && cargo tree --locked --edges normal --prefix none --target "${rust_target[$arch]}" --format '{p} {l}' "$@") |
        sed 's/ ([^)]*)//; s/ (\*)$//' | grep -v '^kvbroker' | sort -u
}

# begin PACKAGE: an empty tree with the documents that each package has.
begin() {
    package=$1
    tree=$work/$arch/$package
    mkdir -p "$tree/DEBIAN" "$work/doc"
    local doc=usr/share/doc/$package
    cat >"$work/doc/copyright" <<END
Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: kvbroker
Comment: The crates that are linked in and their licences stand in crates.gz.

Files: *
Copyright: the kvbroker developers
License: MIT or Apache-2.0

License: MIT
$(sed 's/^$/./; s/^/ /' "$checkout/LICENSE-MIT")

License: Apache-2.0
 On Debian systems the text is in /usr/share/common-licenses/Apache-2.0.
END
    put 644 "$work/doc/copyright" "$doc/copyright"
    printf 'kvbroker (%s) unstable; urgency=medium\n\n  * Built from commit %s.\n\n -- %s  %s\n' "$version" \
        "$(git -C "$checkout" rev-parse --short=12 HEAD)" "$maintainer" \
        "$(date -u -R -d "@$SOURCE_DATE_EPOCH")" >"$work/doc/changelog"
    # A version without revision is a native one.
    case $version in
    *-*) packed "$work/doc/changelog" "$doc/changelog.Debian" ;;
    *) packed "$work/doc/changelog" "$doc/changelog" ;;
    esac
}

# finish SECTION DEPENDS SHORT: control file, sums, and the package itself. The long description is standard input.
finish() {
    local section=$1 depends=$2 short=$3 kib
    find "$tree" -type d -exec chmod 755 {} +
    # As dpkg-gencontrol counts: whole KiB per file, one for everything else; a file system's own idea would vary.
    kib=$(find "$tree" -mindepth 1 -path "$tree/DEBIAN" -prune -o -printf '%y %s\n' |
        awk '{ sum += $1 == "f" ? int(($2 + 1023) / 1024) : 1 } END { print sum }')
    {
        printf 'Package: %s\nSource: kvbroker\nVersion: %s\nArchitecture: %s\nMaintainer: %s\n' \
            "$package" "$version" "$arch" "$maintainer"
        printf 'Installed-Size: %s\nSection: %s\nPriority: optional\n' "$kib" "$section"
        [[ -z $depends ]] || printf '%b\n' "$depends"
        printf 'Description: %s\n' "$short"
        sed 's/^$/./; s/^/ /'
    } >"$tree/DEBIAN/control"
    (cd "$tree" && find . -type f ! -path './DEBIAN/*' -printf '%P\n' | LC_ALL=C sort | xargs md5sum) \
        >"$tree/DEBIAN/md5sums"
    find "$tree" -newermt "@$SOURCE_DATE_EPOCH" -exec touch --no-dereference -d "@$SOURCE_DATE_EPOCH" {} +
    local out=$checkout/target/package/${package}_${version}_$arch.deb
    dpkg-deb --root-owner-group --uniform-compression -Zxz --build "$tree" "$out" >/dev/null
    say "target/package/${out##*/}: $(du -k "$out" | cut -f1) KiB"
}

daemon_package() {
    begin kvbroker
    local file name
    put 755 "$programs_out/kvbrokerd" usr/bin/kvbrokerd
    put 755 "$programs_out/kvbctl" usr/bin/kvbctl
    put 755 "$checkout/scripts/install-overlay" usr/sbin/kvbroker-install-overlay
    put 755 "$checkout/scripts/npu-bind" usr/sbin/kvbroker-npu-bind
    for file in "$checkout"/systemd/*.service "$checkout"/systemd/*.socket; do
        put 644 "$file" "usr/lib/systemd/system/${file##*/}"
    done
    put 644 "$checkout/systemd/kvbroker.sysusers.conf" usr/lib/sysusers.d/kvbroker.conf
    put 644 "$checkout/systemd/kvbroker.tmpfiles.conf" usr/lib/tmpfiles.d/kvbroker.conf
    put 644 "$checkout/udev/60-kvbroker.rules" usr/lib/udev/rules.d/60-kvbroker.rules
    put 644 "$checkout/systemd/kvbroker.toml" etc/kvbroker/kvbroker.toml
    mkdir -p "$tree/etc/kvbroker/kvbroker.toml.d"
    echo /etc/kvbroker/kvbroker.toml >"$tree/DEBIAN/conffiles"
    for file in "$checkout"/dts/*; do put 644 "$file" "usr/share/kvbroker/overlays/${file##*/}"; done
    for file in "$work"/*.dtbo; do put 644 "$file" "usr/share/kvbroker/overlays/${file##*/}"; done
    for file in "$work"/manual/man/*; do packed "$file" "usr/share/man/man${file##*.}/${file##*/}"; done
    for name in kvbctl kvbrokerd; do
        put 644 "$work/manual/completions/bash/$name.bash" "usr/share/bash-completion/completions/$name"
        put 644 "$work/manual/completions/zsh/_$name" "usr/share/zsh/vendor-completions/_$name"
        put 644 "$work/manual/completions/fish/$name.fish" "usr/share/fish/vendor_completions.d/$name.fish"
    done
    for file in README.md docs/operations.md docs/store.md docs/sharing.md docs/engines.md docs/npu.md docs/protocol.md; do
        document "$checkout/$file" "usr/share/doc/kvbroker/${file##*/}"
    done
    crates_of -p kvbroker >"$work/doc/crates"
    packed "$work/doc/crates" usr/share/doc/kvbroker/crates
    for name in postinst prerm postrm; do
        install -m 755 "$package_d/kvbroker/$name" "$tree/DEBIAN/$name"
    done
    finish admin "Depends: libc6 (>= $glibc), libgcc-s1, init-system-helpers (>= 1.54~), systemd (>= 249), udev\nSuggests: kvbroker-ggml" \
        'broker of attention KV-cache memory for edge boards' <<'END'
kvbrokerd takes a pool of memory at boot, cuts it into fixed blocks of KV
cache, and hands them out to inference processes over a Unix socket. What a
process had is free the moment it dies, a common prompt is held once, and no
process sees the memory of another user's.

This package has the daemon, its units and device rules, the operator's tool
kvbctl (status, plan, doctor), and device-tree overlays for RK3588 boards.
END
}

library_packages() {
    local lib=usr/lib/${gnu_triplet[$arch]}
    begin "libkvbroker$soname"
    put 644 "$programs_out/libkvbroker.so" "$lib/libkvbroker.so.$soname"
    echo "libkvbroker $soname libkvbroker$soname (>= $version)" >"$tree/DEBIAN/shlibs"
    echo 'activate-noawait ldconfig' >"$tree/DEBIAN/triggers"
    crates_of -p kvbroker --no-default-features >"$work/doc/crates"
    packed "$work/doc/crates" "usr/share/doc/$package/crates"
    finish libs "Multi-Arch: same\nDepends: libc6 (>= $glibc), libgcc-s1\nSuggests: kvbroker" \
        'client library of the KV-cache broker kvbroker' <<'END'
Sessions of attention KV cache whose blocks come from kvbrokerd, or from a pool
of the process's own: block tables, shared prefixes, contiguous views, paged
attention on the CPU. This is the library for C and C++ programs.
END

    begin libkvbroker-dev
    put 644 "$checkout/include/kvbroker.h" usr/include/kvbroker.h
    put 644 "$programs_out/libkvbroker.a" "$lib/libkvbroker.a"
    ln -s "libkvbroker.so.$soname" "$tree/$lib/libkvbroker.so"
    mkdir -p "$tree/$lib/pkgconfig"
    sed -e 's|@prefix@|/usr|' -e "s|@libdir@|/$lib|" -e 's|@includedir@|/usr/include|' \
        -e "s|@version@|${version%%-*}|" "$checkout/kvbroker.pc.in" >"$tree/$lib/pkgconfig/kvbroker.pc"
    chmod 644 "$tree/$lib/pkgconfig/kvbroker.pc"
    put 644 "$checkout/examples/c/chat.c" "usr/share/doc/$package/examples/chat.c"
    put 644 "$checkout/examples/npu-import.c" "usr/share/doc/$package/examples/npu-import.c"
    finish libdevel "Multi-Arch: same\nDepends: libkvbroker$soname (= $version)" \
        'client library of the KV-cache broker kvbroker, for developers' <<'END'
The header, the static library, what pkg-config needs, and examples in C.
END
}

plugin_package() {
    begin kvbroker-ggml
    # Where docs/engines.md says: a file that is named by GGML_BACKEND_PATH, and no search path of llama.cpp's.
    put 644 "$programs_out/libggml-kvbroker.so" "usr/lib/${gnu_triplet[$arch]}/ggml/libggml-kvbroker.so"
    put 644 "$checkout/ggml-plugin/include/kvbroker-ggml.h" usr/include/kvbroker-ggml.h
    document "$checkout/docs/engines.md" "usr/share/doc/$package/engines.md"
    put 644 "$checkout/ggml-plugin/examples/trim.c" "usr/share/doc/$package/examples/trim.c"
    crates_of -p kvbroker-ggml >"$work/doc/crates"
    packed "$work/doc/crates" "usr/share/doc/$package/crates"
    finish libs "Depends: libc6 (>= $glibc), libgcc-s1\nRecommends: kvbroker\nEnhances: llama.cpp" \
        'KV cache of llama.cpp in memory of kvbroker' <<'END'
A ggml backend that computes nothing and owns the KV cache of an unmodified
llama.cpp, which then holds memory for the tokens that it has and not for those
that it might have. GGML_BACKEND_PATH names it.
END
}

# check_package FILE: what dpkg would only find on the board.
check_package() {
    local file=$1 content
    content=$(dpkg-deb -c "$file")
    if grep -v ' root/root ' <<<"$content" >&2; then die "${file##*/}: files that are not root's"; fi
    if grep -E '^[^l].{4}w|^[^l].{7}w' <<<"$content" >&2; then die "${file##*/}: files that others may write"; fi
}

# check_architecture: the programs are for the machine that the package names.
check_architecture() {
    local machine file
    case $arch in
    amd64) machine='Advanced Micro Devices X86-64' ;;
    arm64) machine=AArch64 ;;
    esac
    for file in "$programs_out"/kvbrokerd "$programs_out"/kvbctl "$programs_out"/*.so; do
        LC_ALL=C readelf -h "$file" | grep -q "Machine: *$machine" || die "${file##*/} is not for $arch"
    done
}

# packages ARCH: all of them, from $programs_out.
packages() {
    local arch=$1 file
    check_architecture
    daemon_package
    library_packages
    plugin_package
    for file in "$checkout"/target/package/*_"${version}_$arch.deb"; do check_package "$file"; done
}
