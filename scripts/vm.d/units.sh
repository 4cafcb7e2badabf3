# shellcheck shell=bash disable=SC2034,SC2154 # the parts share variables
# The files in systemd/ and udev/, judged by Debian 13's systemd.

# systemd-analyze's exposure in tenths: 10 is 1.0.
exposure_limit=10

# shellcheck disable=SC2016
check_units() {
    # As root: sysusers and tmpfiles set owners.
    inside_user=0:0 in_root -r "$checkout:/src" bash -euo pipefail -c '
        system=/tmp/root/usr/lib/systemd/system
        mkdir -p $system /tmp/root/usr/bin /tmp/root/etc
        cp /src/systemd/*.service /src/systemd/*.socket $system/

        systemd-sysusers --root=/tmp/root /src/systemd/kvbroker.sysusers.conf
        grep -q "^kvbroker:" /tmp/root/etc/passwd
        grep -q "^kvbroker-clients:" /tmp/root/etc/group
        mkdir -p /tmp/root/usr/lib/udev/rules.d
        cp /src/udev/*.rules /tmp/root/usr/lib/udev/rules.d/
        udevadm verify --no-style --no-summary --resolve-names=never --root=/tmp/root
        systemd-tmpfiles --root=/tmp/root --create /src/systemd/kvbroker.tmpfiles.conf
        test -d /tmp/root/run/kvbroker

        # An unknown key is only a warning to systemd. That the daemon is not installed here is none to us.
        said=$(systemd-analyze verify --man=no $system/kvbroker* 2>&1 |
            grep -v "kvbrokerd is not executable" || true)
        [ -z "$said" ] || { echo "$said" >&2; exit 1; }
        systemd-analyze --no-pager security --offline=true --threshold="$1" $system/kvbrokerd.service |
            tail -n 1' units "$exposure_limit"
}
