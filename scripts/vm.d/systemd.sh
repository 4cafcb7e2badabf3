# shellcheck shell=bash disable=SC2034,SC2154 # the parts share variables
# The second machine: Debian 13 with its systemd and udev, and the product's unit, socket, rule and user files
# installed as the package installs them. x86-64 only; the kernel is the same.

disk_packages=(systemd systemd-sysv udev dbus kmod)

make_disk() {
    # As root, for the owners of the files.
    # shellcheck disable=SC2016
    inside_user=0:0 in_root -r "$1:/src" -b "$building:/out" bash -euo pipefail -c '
        mke2fs -q -t ext4 -L kvbroker -d /src /out/disk.ext4 1G
        chmod 644 /out/disk.ext4'
}

# disk_of: sets $disk to an ext4 image of a Debian root.
disk_of() {
    local root entry content
    root_of disk
    content=$root
    root_of bench
    cached "disk-${content##*-}" 'making the disk image of the machine with systemd' make_disk "$content"
    disk=$entry/disk.ext4
}

# pack_payload PROGRAM...: $work/initramfs.cpio that installs the product onto the disk.
pack_payload() {
    local tree=$work/initramfs program lib=usr/lib/kvbroker-vm
    local payload=$tree/payload
    local units=$payload/usr/lib/systemd/system
    mkdir -p "$tree"/{bin,dev} "$units" "$payload"/{usr/bin,usr/lib/sysusers.d,usr/lib/tmpfiles.d,usr/lib/udev/rules.d,$lib}
    install -m 755 "$busybox" "$tree/bin/busybox"
    install -m 755 "$vm_d/init-systemd" "$tree/init"
    for program in "$@"; do
        case ${program##*/} in
        device) install -m 755 "$program" "$payload/$lib/" ;;
        *) install -m 755 "$program" "$payload/usr/bin/" ;;
        esac
    done
    install -m 644 -t "$payload/usr/lib/udev/rules.d" "$checkout"/udev/*.rules
    install -m 644 "$checkout/systemd/kvbroker.sysusers.conf" "$payload/usr/lib/sysusers.d/kvbroker.conf"
    install -m 644 "$checkout/systemd/kvbroker.tmpfiles.conf" "$payload/usr/lib/tmpfiles.d/kvbroker.conf"
    install -m 644 -t "$units" "$checkout"/systemd/*.service "$checkout"/systemd/*.socket "$vm_d/kvbroker-vm.service"
    install -m 755 "$vm_d/run-in-systemd" "$payload/$lib/"
    printf '%s\n' 'u alice 1001' 'u mallory 1003' 'm alice kvbroker-clients' \
        >"$payload/usr/lib/sysusers.d/zz-kvbroker-vm.conf"
    # The committed configuration, and what this machine has beside it: a CMA heap, half of it for the daemon, because
    # the sandbox's tests take extents themselves.
    mkdir -p "$payload/etc/kvbroker/kvbroker.toml.d"
    install -m 644 "$checkout/systemd/kvbroker.toml" "$payload/etc/kvbroker/"
    printf '%s\n' '[pool]' 'size = "128M"' 'device = "contiguous"' >"$payload/etc/kvbroker/kvbroker.toml.d/vm.toml"
    # The daemon's unit around the tests: the same user, devices, system calls and limits.
    sed -e "s|^ExecStart=.*|ExecStart=/$lib/device --test-threads=1 --color never sandbox::|" -e 's/^Type=.*/Type=oneshot/' \
        -e '/^\(Restart\|Sockets\|Requires\|WatchdogSec\|After=kvbrokerd\)/d' \
        "$checkout/systemd/kvbrokerd.service" >"$units/kvbroker-sandbox.service"
    write_arguments "$payload/$lib/arguments"
    pack_tree_as_initramfs "$tree"
}
