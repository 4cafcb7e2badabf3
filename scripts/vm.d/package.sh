# shellcheck shell=bash disable=SC2034,SC2154 # the parts share variables
# The packages in the machine with a real systemd: a bare Debian 13, and the .deb files beside it. The same programs are
# packed as two versions, so that there is something to upgrade to.

# pack_packages: $work/initramfs.cpio with the packages, their test, and a client that is built against them.
pack_packages() {
    local tree=$work/initramfs lib=usr/lib/kvbroker-vm version deb
    local payload=$tree/payload
    local place=$payload/$lib
    mkdir -p "$tree"/{bin,dev} "$place" "$payload/usr/lib/systemd/system" "$work/dev"
    for version in 1.0 1.1; do
        "$checkout/scripts/package" --version $version amd64
        mv -t "$place" "$checkout"/target/package/{kvbroker,libkvbroker[0-9]*}_${version}_amd64.deb
        for deb in "$checkout"/target/package/libkvbroker-dev_"$version"_amd64.deb "$place"/libkvbroker[0-9]*_"$version"_amd64.deb; do
            dpkg-deb -x "$deb" "$work/dev"
        done
        rm -f "$checkout"/target/package/*_${version}_amd64.deb
    done
    # As a developer would: the header and the library of the -dev package.
    root_of rust
    cp "$vm_d/live.c" "$work/dev/"
    in_root -b "$work/dev:/src" gcc -std=c11 -Wall -Wextra -Werror -O2 -I/src/usr/include /src/live.c \
        -L/src/usr/lib/x86_64-linux-gnu -lkvbroker -o /src/live
    # The tools for the machine itself are in the other root.
    root_of bench
    install -m 755 "$work/dev/live" "$place/"
    install -m 755 "$busybox" "$tree/bin/busybox"
    install -m 755 "$vm_d/init-package" "$tree/init"
    install -m 644 "$vm_d/kvbroker-vm.service" "$payload/usr/lib/systemd/system/"
    install -m 755 "$vm_d/run-in-package" "$place/run-in-systemd"
    pack_tree_as_initramfs "$tree"
}

package_tests() {
    work_directory
    stage 'root bench' root_of bench
    stage kernel kernel_of x86_64
    stage disk disk_of
    busybox_of x86_64
    stage 'packages and initramfs' pack_packages
    extra_binds=(-r "${disk%/*}:/tmp/disk")
    stage 'machine package' boot x86_64 -drive file=/tmp/disk/disk.ext4,format=raw,if=virtio,snapshot=on
    report package
}
