# shellcheck shell=bash disable=SC2034,SC2154 # the parts share variables
# The guest: what goes into its initramfs, which machine runs it, and the overlay that gives it the pool.

# An RK3588 has four A55 and four A76; 1 GiB is a 4 GB board after everything else took its part. `edu` is a PCI
# device that does DMA behind the machine's IOMMU: the stand-in for an NPU.
# shellcheck disable=SC2054 # QEMU's commas
machine_x86_64=(qemu-system-x86_64 -M q35 -cpu max -device intel-iommu
    -device edu,dma_mask=0xffffffffffffffff)
# shellcheck disable=SC2054
machine_aarch64=(qemu-system-aarch64 -M virt,gic-version=3,iommu=smmuv3 -cpu cortex-a76
    -device edu,dma_mask=0xffffffffffffffff)
# More directories for the machine's QEMU, as words for in_root.
extra_binds=()
machine_common=(-accel tcg -smp 2 -m 1G -nodefaults -display none -serial stdio -no-reboot)
# A panic reboots, and a reboot ends QEMU. With `allocators=1` the camera must have contiguous memory: the stand-in for an
# NPU that cannot scatter.
# On a busy host the emulated timer fails the kernel's test of it (seen), which is then a panic.
cmdline_x86_64='console=ttyS0 panic=-1 no_timer_check cma=256M vivid.allocators=1 systemd.log_color=no systemd.show_status=no'
cmdline_aarch64='console=ttyAMA0 panic=-1 vivid.allocators=1'

# compile_overlays: $work/NAME.dtbo from each dts/NAME.dtso.
# shellcheck disable=SC2016
compile_overlays() {
    in_root -r "$checkout/dts:/src" -b "$work:/out" bash -euo pipefail -c '
        for source in /src/*.dtso; do
            name=${source##*/}
            # The root of the fragment repeats the two cell counts so that the nodes below it can be checked.
            dtc -q -@ -I dts -O dtb -W no-avoid_unnecessary_addr_size -o "/out/${name%.dtso}.dtbo" "$source"
        done'
}

# The machine's own tree with the product's overlay merged in, as a board's bootloader would do it.
pack_tree() {
    compile_overlays
    in_root -b "$work:/out" "${machine_aarch64[@]}" "${machine_common[@]}" -machine dumpdtb=/out/machine.dtb
    in_root -b "$work:/out" fdtoverlay -i /out/machine.dtb -o /out/merged.dtb /out/kvbroker-rk3588.dtbo
}

# pack_initramfs PROGRAM...: $work/initramfs.cpio. Not compressed: unpacking under emulation costs more than loading.
pack_initramfs() {
    local tree=$work/initramfs
    mkdir -p "$tree"/{bin,etc,dev}
    install -m 755 "$busybox" "$tree/bin/busybox"
    install -m 755 "$vm_d/init" "$tree/init"
    install -m 644 "$vm_d/passwd" "$vm_d/group" "$tree/etc/"
    install -m 755 -t "$tree/bin" "$@"
    write_arguments "$tree/etc/arguments"
    pack_tree_as_initramfs "$tree"
}

# One word a line.
write_arguments() {
    : >"$1"
    ((${#arguments[@]} == 0)) || printf '%s\n' "${arguments[@]}" >"$1"
}

pack_tree_as_initramfs() {
    in_root -r "$1:/src" -b "$work:/out" \
        bash -euo pipefail -c 'cd /src; find . | cpio --quiet -o -H newc -R 0:0 >/out/initramfs.cpio'
}

# boot ARCH [QEMU_ARGUMENT...]: runs the machine and sets $verdict to console.sh's exit status.
boot() {
    local arch=$1
    local -n machine=machine_$arch cmdline=cmdline_$arch
    shift
    [[ $arch != aarch64 ]] || set -- "$@" -dtb /out/merged.dtb
    verdict=0
    in_root -b "$work:/out" -r "$vm_d:/src" -r "$(dirname "$kernel"):/tmp/kernel" "${extra_binds[@]}" \
        bash /src/console.sh "$idle_limit" "$total_limit" /out/console.log \
        "${machine[@]}" "${machine_common[@]}" "$@" \
        -kernel "/tmp/kernel/${kernel##*/}" -initrd /out/initramfs.cpio -append "$cmdline" || verdict=$?
}

# check_overlays: the product's overlays merge into real boards' trees, and the result has the pool.
check_overlays() {
    compile_overlays
    # shellcheck disable=SC2016
    in_root -r "$boards:/src" -b "$work:/out" bash -euo pipefail -c '
        count=0
        for board in /src/rk3588*.dtb; do
            case $board in *-overlay*) continue ;; esac
            for overlay in /out/*.dtbo; do
                fdtoverlay -i "$board" -o /tmp/merged.dtb "$overlay"
                node=/reserved-memory/kvbroker
                [ "$(fdtget -t s /tmp/merged.dtb $node compatible)" = shared-dma-pool ]
                [ "$(fdtget -t x /tmp/merged.dtb $node size)" = "0 10000000" ]
                fdtget -p /tmp/merged.dtb $node | grep -x reusable >/dev/null
                default=$(fdtget -p /tmp/merged.dtb $node | grep -cx linux,cma-default || true)
                case $overlay in *-own.dtbo) [ "$default" = 0 ] ;; *) [ "$default" = 1 ] ;; esac
            done
            count=$((count + 1))
        done
        [ $count -ge 3 ] || { echo "only $count board trees found" >&2; exit 1; }
        echo "vm: both overlays merge into the trees of $count RK3588 boards"'
}
