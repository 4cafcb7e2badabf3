# shellcheck shell=bash disable=SC2034,SC2154 # the parts share variables
# Debian 13 roots: every tool whose version matters comes from one of them, never from the host.
#
# `bench` holds the kernel source, its build tools and QEMU; `rust` holds Debian's rustc (the package's MSRV)
# and the arm64 cross toolchain. A root is made once and then only read: commands run in a private mount and
# process namespace, see no writable place but what they are given, and leave nothing behind on the host.

suite=trixie
# Raise it when make_root changes what it makes.
root_recipe=1
bench_packages=(linux-source-6.12 gcc gcc-aarch64-linux-gnu make flex bison bc libelf-dev cpio xz-utils gzip
    qemu-system-x86 qemu-system-arm device-tree-compiler busybox-static systemd udev e2fsprogs)
rust_packages=(rustc cargo gcc gcc-aarch64-linux-gnu libc6-dev libc6-dev:arm64 libstd-rust-dev:arm64)

# debian_sources [SUITE]: from the mirrors that the host already uses, so that a local mirror is honoured.
# shellcheck disable=SC2016
debian_sources() {
    local release=${1:-$suite} main security
    main=$(apt-get indextargets --format '$(REPO_URI)' 'Origin: Debian' 'Label: Debian' | sed -n 1p)
    security=$(apt-get indextargets --format '$(REPO_URI)' 'Origin: Debian' 'Label: Debian-Security' | sed -n 1p)
    if [[ -z $main ]]; then
        echo "vm: apt knows no Debian mirror on this host: run apt-get update first" >&2
        return 1
    fi
    printf 'deb %s %s main\n' "$main" "$release" "$main" "$release-updates"
    [[ -z $security ]] || printf 'deb %s %s main\n' "$security" "$release-security"
}

# shellcheck disable=SC2016
make_root() {
    # An early Debian 12 knows no keys of Debian 13 yet.
    [[ -e /usr/share/keyrings/debian-archive-$suite-stable.gpg ]] || host_packages --upgrade debian-archive-keyring
    host_packages mmdebstrap
    local include
    include=$(IFS=,; echo "$*")
    # Frozen mirrors have expired Release files; documentation and translations are half of the files.
    debian_sources "$suite" | as_root nice -n "$nice_level" mmdebstrap --quiet --mode=root --variant=minbase \
        --architectures=amd64,arm64 --include="$include" \
        --aptopt='Acquire::Check-Valid-Until "false"' --aptopt='APT::Install-Recommends "false"' \
        --dpkgopt=force-unsafe-io --dpkgopt='path-exclude=/usr/share/doc/*' \
        --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
        --customize-hook='mkdir "$1/src" "$1/out" "$1/vendor"' \
        --customize-hook='chmod 755 "$1"' \
        "$suite" "$building" -
}

# root_of bench|rust: sets $root.
root_of() {
    local name=$1 entry
    local -n packages=${name}_packages
    cached "root-$name-$(echo "$root_recipe $suite ${packages[*]}" | hash_of)" \
        "building the Debian $suite root '$name', about 1 minute: ${packages[*]}" \
        make_root "${packages[@]}"
    root=$entry
}

# in_root [-b HOST_DIR:INSIDE]... [-r HOST_DIR:INSIDE]... COMMAND...: runs in $root as the calling user.
# With $inside_user (uid:gid) set, as that user.
# -b binds a directory read-write, -r read-only. INSIDE is a directory that the root has, or one in /tmp.
in_root() {
    local binds=() option
    while [[ $1 == -[br] ]]; do
        option=$1
        binds+=("$option" "${2%%:*}" "${2#*:}")
        shift 2
    done
    # The words after the script: root, uid:gid, the number of words about binds, those words, the command.
    # shellcheck disable=SC2016
    as_root unshare --mount --pid --fork --kill-child --propagation private -- bash -euc '
        root=$0 user=$1 words=$2
        shift 2
        mount --bind "$root" "$root"
        mount -o remount,bind,ro "$root"
        mount -t proc proc "$root/proc"
        mount --rbind /dev "$root/dev"
        for place in tmp var/tmp run; do mount -t tmpfs -o mode=1777 tmpfs "$root/$place"; done
        for ((; words > 0; words -= 3)); do
            mkdir -p "$root$3"
            mount --bind "$2" "$root$3"
            [[ $1 == -b ]] || mount -o remount,bind,ro "$root$3"
            shift 3
        done
        exec chroot --userspec="$user" "$root" /usr/bin/env -i \
            PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp LC_ALL=C.UTF-8 "$@"
    ' "$root" "${inside_user:-$(id -u):$(id -g)}" "${#binds[@]}" "${binds[@]}" "$@"
}
