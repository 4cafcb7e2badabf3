# shellcheck shell=bash disable=SC2034,SC2154 # the parts share variables
# The test kernels: Debian's linux-source-6.12 with a configuration that has what Debian's own kernels lack
# (a CMA heap, iommufd) and not much else, so that it builds in minutes and boots in seconds.

kernel_package=linux-source-6.12

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

build_kernel() {
    local arch=$1 tree=$building/.tree
    mkdir "$tree"
    in_root -b "$tree:/out" -r "$vm_d:/src" -b "$building:/tmp/keep" \
        nice -n "$nice_level" bash -euo pipefail -c "$kernel_recipe" kernel "$arch" "$jobs"
    rm -rf -- "$tree"
    mv "$building/.config" "$building/config"
}

# kernel_of ARCH: sets $kernel to the image file.
kernel_of() {
    local arch=$1 minutes version entry
    case $arch in x86_64) minutes=7 ;; aarch64) minutes=10 ;; esac
    version=$(dpkg-query --admindir="$root/var/lib/dpkg" -W -f '${Version}' "$kernel_package")
    cached "kernel-$arch-$version-$({ cat "$vm_d/$arch.config"; echo "$kernel_recipe"; } | hash_of)" \
        "building the $arch test kernel from $kernel_package $version: up to $minutes minutes on two idle cores" \
        build_kernel "$arch"
    kernel=$entry/$(kernel_image "$arch")
}
