# shellcheck shell=bash disable=SC2034,SC2154 # the parts share variables
# Files out of Debian packages of other architectures and releases, fetched through an apt of our own: neither the
# host's sources nor its package database are touched.

# debian_package ARCH SUITE PATTERN MEMBER...: downloads the newest package whose name matches the regular expression
# and unpacks the members (tar wildcards) of it into $building; its name and version are left in the file `package`.
debian_package() {
    local arch=$1 release=$2 pattern=$3 apt=$building/.apt name
    shift 3
    mkdir -p "$apt"/{etc/apt.conf.d,etc/preferences.d,state/lists/partial,cache/archives/partial}
    debian_sources "$release" >"$apt/etc/sources.list"
    # The keys are the host's; everything else is private.
    printf '%s\n' "Dir::Etc \"$apt/etc\";" 'Dir::Etc::sourceparts "/dev/null";' \
        'Dir::Etc::trustedparts "/usr/share/keyrings";' 'Dir::Etc::trusted "/dev/null";' \
        "Dir::State \"$apt/state\";" 'Dir::State::status "/dev/null";' "Dir::Cache \"$apt/cache\";" \
        "APT::Architecture \"$arch\";" "APT::Architectures { \"$arch\"; };" 'Acquire::Languages "none";' \
        'Acquire::Check-Valid-Until "false";' 'APT::Sandbox::User "";' >"$apt/apt.conf"
    (
        export APT_CONFIG=$apt/apt.conf
        cd "$apt" || exit
        apt-get -qq update
        name=$(apt-cache search --names-only "$pattern" | cut -d' ' -f1 | sort -V | tail -n1)
        [[ $name ]] || die "Debian $release has no $arch package that matches $pattern"
        apt-get -qq download "$name"
        printf '%s %s\n' "$name" "$(dpkg-deb --field ./*.deb Version)" >"$building/package"
    )
    dpkg-deb --fsys-tarfile "$apt"/*.deb | tar -x -C "$building" --wildcards "$@"
    rm -rf -- "$apt"
}

# busybox_of ARCH: sets $busybox to a static binary.
busybox_of() {
    local entry
    case $1 in
    x86_64) busybox=$root/bin/busybox ;;
    aarch64)
        cached busybox-arm64-1 "fetching Debian's busybox-static for arm64" \
            debian_package arm64 "$suite" '^busybox-static$' '*/bin/busybox'
        busybox=$(find "$entry" -name busybox -type f)
        ;;
    esac
}

# board_trees: sets $boards to a directory with the device trees of Debian's RK3588 boards.
board_trees() {
    local entry
    cached rk3588-trees-1 "fetching the RK3588 device trees of Debian's arm64 kernel, about 100 MB" \
        debian_package arm64 "$suite" '^linux-image-6\.12\.[0-9+deb]+-arm64$' '*/rockchip/rk3588*.dtb'
    boards=$(find "$entry" -type d -name rockchip)
}
