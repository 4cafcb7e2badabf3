#!/usr/bin/env bash
# console.sh IDLE_SECONDS LIMIT_SECONDS LOG COMMAND...
#
# Runs COMMAND (an emulator with its serial console on standard output) until it ends, is silent for
# IDLE_SECONDS or has run for LIMIT_SECONDS. Everything goes to LOG; from the guest's start line on it is
# streamed as well. Exit status: the guest's, from its verdict line; 124 after a hang; 125 if the command
# ended without a verdict. In both cases the console's last 40 lines are printed.
set -uo pipefail

idle=$1 limit=$2 log=$3
shift 3

streaming=false verdict='' line=''
: >"$log"

fail() {
    local status=$1 reason=$2
    # A test that hangs has printed its name, but not yet the end of the line.
    [[ -z $line ]] || printf '%s\n' "$line" >>"$log"
    kill -KILL "$pid" 2>/dev/null
    printf '\nvm: error: %s; the last lines of the console:\n' "$reason" >&2
    tail -n 40 -- "$log" | sed 's/^/  | /' >&2
    exit "$status"
}

# What the emulator itself has to say (a DMA fault, a bad option) must not land in the middle of a test's line.
exec 3< <(exec "$@" </dev/null 2>>"$log")
pid=$!
while true; do
    left=$((limit - SECONDS))
    ((left > 0)) || fail 124 "the machine ran for more than $limit s"
    if IFS= read -r -u 3 -t $((idle < left ? idle : left)) line; then
        line=${line%$'\r'}
        printf '%s\n' "$line" >>"$log"
        case $line in
        'kvbroker-vm: start') streaming=true ;;
        *'kvbroker-vm: verdict '*)
            # Whether the machine manages to switch itself off is of no interest.
            verdict=${line##*verdict }
            kill -KILL "$pid" 2>/dev/null
            # For its processor time, which the stage prints.
            wait "$pid" 2>/dev/null
            break
            ;;
        *) ! $streaming || printf '%s\n' "$line" ;;
        esac
    elif (($? > 128)); then
        ((SECONDS < limit)) || fail 124 "the machine ran for more than $limit s"
        fail 124 "the machine said nothing for $idle s"
    else
        break
    fi
done
[[ $verdict =~ ^[0-9]+$ ]] || fail 125 "the machine stopped without a verdict"
exit "$verdict"
