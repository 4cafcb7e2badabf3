# shellcheck shell=bash disable=SC2034,SC2154 # the parts share variables
# The test kernels: Debian's linux-source-6.12 with a configuration that has what Debian's own kernels lack
# (a CMA heap, iommufd) and not much else, so that it builds in minutes and boots in seconds; and Debian 12's
# linux-source-6.1 with the same, for what only the vendors' line of kernels does.

kernel_image() { case $1 in x86_64) echo bzImage ;; aarch64) echo Image ;; esac; }

# Runs inside the root, in /out: $1 architecture, $2 jobs.
# shellcheck disable=SC2016
kernel_recipe='
    case $1 in
    x86_64) export ARCH=x86_64 image=arch/x86/boot/bzImage ;;
    aarch64) export ARCH=arm64 CROSS_COMPILE=aarch64-linux-gnu- image=arch/arm64/boot/Image ;;
    esac
    export KBUILD_BUILD_USER=kvbroker KBUILD_BUILD_HOST=vm KBUILD_BUILD_TIMESTAMP="1970-01-01"
    cd /out
    tar xf /usr/src/linux-source-6.12.tar.xz --strip-components=1
    make -s tinyconfig
    scripts/kconfig/merge_config.sh -m .config "/src/$1.config" >/dev/null
    make -s olddefconfig
    # An option that a newer source renamed or hid behind another one is dropped without a word.
    lost=$(grep -vxFf .config "/src/$1.config" | grep -v "=n$" || true)
    forced=$(sed -n "s/=n$/=y/p" "/src/$1.config" | grep -xFf - .config || true)
    [ -z "$lost$forced" ] || { echo "options lost: $lost, options forced: $forced" >&2; exit 1; }
    make -s -j"$2" "${image##*/}"
    cp "$image" .config /tmp/keep/
'

# Options of the configurations that Linux 6.1 does not know yet.
unknown_to_6_1=(CONFIG_IOMMUFD CONFIG_VFIO_CONTAINER CONFIG_VFIO_DEVICE_CDEV CONFIG_VFIO_GROUP)

# source_6_1: sets $source to a directory with Debian 12's kernel source, the line that vendors' RK3588 kernels are of.
source_6_1() {
    local entry
    cached source-6.1-1 "fetching Debian 12's linux-source-6.1, about 140 MB" \
        debian_package amd64 bookworm '^linux-source-6\.1$' '*/linux-source-6.1.tar.xz'
    source=$entry
}

# kernel_options ARCH LINE: the configuration, on standard output.
kernel_options() {
    case $2 in
    6.1)
        grep -vE "^($(IFS='|'; echo "${unknown_to_6_1[*]}"))=" "$vm_d/$1.config"
        # tinyconfig takes SLOB there, which no board runs.
        echo CONFIG_SLUB=y
        ;;
    *) cat "$vm_d/$1.config" ;;
    esac
}

# build_kernel ARCH LINE SOURCE: from SOURCE/linux-source-LINE.tar.xz.
build_kernel() {
    local arch=$1 line=$2 tarballs=$3 tree=$building/.tree options=$building/.options
    mkdir "$tree" "$options"
    kernel_options "$arch" "$line" >"$options/$arch.config"
    in_root -b "$tree:/out" -r "$options:/src" -b "$building:/tmp/keep" -r "$tarballs:/usr/src" \
        nice -n "$nice_level" bash -euo pipefail -c "${kernel_recipe//6.12/$line}" kernel "$arch" "$jobs"
    rm -rf -- "$tree" "$options"
    mv "$building/.config" "$building/config"
}

# kernel_of ARCH [LINE]: sets $kernel to the image file of Linux 6.12, or of the line that is named.
kernel_of() {
    local arch=$1 line=${2:-6.12} minutes version tarballs source entry
    case $arch in x86_64) minutes=7 ;; aarch64) minutes=10 ;; esac
    case $line in
    6.1)
        source_6_1
        tarballs=$(dirname "$(find "$source" -name '*.tar.xz')")
        version=$(cut -d' ' -f2 "$source/package")
        ;;
    *)
        tarballs=$root/usr/src
        version=$(dpkg-query --admindir="$root/var/lib/dpkg" -W -f '${Version}' "linux-source-$line")
        ;;
    esac
    cached "kernel-$arch-$version-$({ kernel_options "$arch" "$line"; echo "$kernel_recipe"; } | hash_of)" \
        "building the $arch test kernel from linux-source-$line $version: up to $minutes minutes on two idle cores" \
        build_kernel "$arch" "$line" "$tarballs"
    kernel=$entry/$(kernel_image "$arch")
}
