# shellcheck shell=bash disable=SC2034,SC2154 # the parts share variables
# Messages, stage times, privileges and the cache of scripts/vm.
#
# Invariant: a cache entry exists complete or not at all. It is built beside its final name, under a lock,
# and renamed; its name carries a hash of everything it was made from, so an entry is never updated.

cache=${KVBROKER_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvbroker}/vm
jobs=$(nproc)
# The slow builds yield to whatever else the machine does.
nice_level=${KVBROKER_NICE:-10}

say() { printf 'vm: %s\n' "$*"; }
die() {
    printf 'vm: error: %s\n' "$*" >&2
    exit 2
}

# stage NAME COMMAND...: runs the command and prints how long it took, and how much processor time that was: on a
# busy host only the second says what it costs. If it fails, the run ends there.
# Not to be used in a condition: `set -e` would be off inside the command.
stage() {
    local name=$1 start=$EPOCHREALTIME before after
    shift
    current_stage=$name
    before=$(children_ticks)
    "$@"
    after=$(children_ticks)
    # Both are microseconds once the point is gone.
    local us=$((${EPOCHREALTIME/[.,]/} - ${start/[.,]/}))
    printf 'vm: stage %-24s %4d.%01d s, %d.%01d s of a processor\n' "$name" \
        $((us / 1000000)) $((us / 100000 % 10)) $(((after - before) / 100)) $(((after - before) / 10 % 10))
}

# Processor time of this shell's ended children and theirs, in hundredths of a second: cutime and cstime of proc(5).
children_ticks() {
    local stat
    stat=$(<"/proc/$$/stat")
    # The name in parentheses may contain anything.
    read -ra stat <<<"${stat##*) }"
    echo $((stat[13] + stat[14]))
}

hash_of() { sha256sum | cut -c1-12; }

as_root() {
    if ((EUID == 0)); then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo -- "$@"
    else
        die "'$1' needs root: run as root or install sudo"
    fi
}

# cached NAME ANNOUNCEMENT COMMAND...: sets $entry to the cache entry NAME. If it is missing, prints the
# announcement and runs COMMAND with $building set to an empty directory that becomes the entry.
cached() {
    local name=$1 announcement=$2
    shift 2
    entry=$cache/$name
    [[ -d $entry ]] && return
    mkdir -p "$cache"
    exec 9>"$cache/$name.lock"
    flock -n 9 || {
        say "waiting for another scripts/vm that builds $name"
        flock 9
    }
    if [[ ! -d $entry ]]; then
        say "$announcement"
        building=$cache/.building-$name
        as_root rm -rf -- "$building"
        mkdir "$building"
        "$@"
        mv -T -- "$building" "$entry"
    fi
    exec 9>&-
}

# host_packages [--upgrade] PACKAGE...: installs the packages that are missing on the host, or all of them. Everything
# else lives in roots of our own, so that the host's suite, sources and package conflicts do not matter.
host_packages() {
    local missing=() package upgrade=false
    [[ $1 != --upgrade ]] || {
        upgrade=true
        shift
    }
    for package in "$@"; do
        ! $upgrade && dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' ||
            missing+=("$package")
    done
    ((${#missing[@]})) || return 0
    say "installing Debian packages on this host: ${missing[*]}"
    as_root apt-get -qq update
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "${missing[@]}" \
        >/dev/null
}
