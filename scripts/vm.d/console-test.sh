# shellcheck shell=bash disable=SC2034,SC2154 # the parts share variables
# Tests of console.sh with commands that stand for the emulator: every way in which a machine can end.

# ends_with STATUS WORDS SCRIPT: a machine whose console is what SCRIPT prints.
ends_with() {
    local expected=$1 words=$2 script=$3 said status=0
    said=$(bash "$vm_d/console.sh" 2 4 "$work/console.log" bash -c "$script" 2>&1) || status=$?
    if [[ $status == "$expected" && $said == *"$words"* ]]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        say "FAILED: expected status $expected and '$words', got status $status of: $script"
        printf '%s\n' "$said" | sed 's/^/  | /'
    fi
}

check_console() {
    local passed=0 failed=0
    local begin='echo kvbroker-vm: start;'
    ends_with 0 'test result: ok' "$begin echo test result: ok; echo kvbroker-vm: verdict 0"
    ends_with 101 'test result: FAILED' "$begin echo test result: FAILED; echo kvbroker-vm: verdict 101"
    # The serial console ends lines as a terminal does, and a machine need not manage to switch itself off.
    ends_with 0 '' "$begin printf 'kvbroker-vm: verdict 0\r\n'; sleep 60"
    ends_with 124 'said nothing for 2 s' "$begin printf 'test that_hangs ... '; sleep 60"
    ends_with 124 'that_hangs' "$begin printf 'test that_hangs ... '; sleep 60"
    ends_with 124 'ran for more than 4 s' "$begin while sleep 1; do echo still here; done"
    ends_with 125 'Kernel panic' "$begin echo 'Kernel panic - not syncing'"
    ends_with 125 'without a verdict' 'exit 1'
    # A verdict that is no number is none.
    ends_with 125 'without a verdict' "$begin echo 'kvbroker-vm: verdict '"
    # What the emulator says on standard error is kept for the last lines.
    ends_with 125 'no such machine' 'echo "qemu: no such machine" >&2; exit 1'
    echo "$passed passed, $failed failed"
    ((failed == 0))
}
