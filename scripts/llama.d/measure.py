"""The figures of `scripts/bench llama`: what an unmodified llama.cpp gains and pays on the broker.

Prints one object of JSON a line, as every row of the bench does: ratios of two sides that took turns within this run,
in the median over rounds. Nothing here fails because of a time.
"""

import json
import pathlib
import resource
import statistics
import subprocess
import sys

from harness import PROMPTS, Bench, Failed, at_once, mib, must, options

TOKEN_BYTES = 23040
ROUNDS = 7


def figure(name, value, unit, note, bar=None, cmp="<="):
    print(json.dumps({"name": f"llama/{name}", "value": value, "unit": unit, "bar": bar, "cmp": cmp, "note": note}), flush=True)


def say(text):
    print(f"llama: {text}", file=sys.stderr, flush=True)


def spread(ratios):
    return f"{len(ratios)} rounds, {min(ratios):.3f} to {max(ratios):.3f}"


def processor_time():
    """Seconds of all programs that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def speed(b):
    """llama-bench with and without the plugin in turn; every other round the other way round."""
    for name, model in (("q4_1", b.o.model), ("q4_0-repacked", b.o.q4)):
        args = ["-m", model, "-t", b.threads, "-p", 256, "-n", 64, "-r", 1, "-fa", 1, "-o", "json"]
        seen = {"pp256": [], "tg64": []}
        processor = []
        with b.broker():
            for round_ in range(-1, ROUNDS):
                say(f"llama-bench, {name}, round {round_ + 1} of {ROUNDS}")
                pair, seconds = {}, {}
                for plugin in ((False, True) if round_ % 2 else (True, False)):
                    before = processor_time()
                    code, out, err = b.run(plugin, "/usr/bin/llama-bench", *args, timeout=600)
                    seconds[plugin] = processor_time() - before
                    must(code == 0, f"llama-bench ended with {code}: {err[-400:]}")
                    must(not plugin or "freed: " in err, f"no KV buffer came to the plugin: {err[-400:]}")
                    pair[plugin] = {f"pp{x['n_prompt']}" if x["n_prompt"] else f"tg{x['n_gen']}": x["avg_ts"]
                                    for x in json.loads(out)}
                # The first round warms up.
                if round_ >= 0:
                    processor.append(seconds[True] / seconds[False])
                    for what, list_ in seen.items():
                        list_.append((pair[True][what], pair[False][what]))
        for what, pairs in seen.items():
            ratios = [with_ / without for with_, without in pairs]
            note = (f"tokens/s {statistics.median(w for w, _ in pairs):.1f} with the plugin, "
                    f"{statistics.median(s for _, s in pairs):.1f} without; {spread(ratios)}; {b.threads} threads")
            figure(f"{what}-{name}", statistics.median(ratios), "x", note, 0.97, ">=")
        figure(f"processor-time-{name}", statistics.median(processor), "x",
               f"of the whole llama-bench, over stock; a busy machine disturbs it less; {spread(processor)}")


def faults(b):
    """A granted fault beside the mappings that it needs, by the number of planes."""
    say("granted faults")
    program = pathlib.Path(b.o.broker).parent / "examples" / "pager_cost"
    done = subprocess.run([program], stdout=subprocess.PIPE, check=True, timeout=600)
    for line in done.stdout.decode().splitlines():
        x = json.loads(line)
        figure(f"fault-{x['planes']}-planes", x["fault_ns"] / x["bare_mmap_ns"], "x",
               f"{x['fault_ns'] / 1000:.1f} us for a unit of {x['unit_bytes'] // 1024} KiB a plane, over the bare mappings "
               f"{x['bare_mmap_ns'] / 1000:.1f} us; medians")


def served(b):
    """llama-server with four slots of 2048 at the reference requests: what it holds, and what is resident."""
    say("llama-server, four slots")
    args = ["-c", 8192, "-np", 4]

    def talk(server):
        at_once([lambda p=p: server.complete(p, 16, ignore_eos=True) for p in PROMPTS])
        server.complete(PROMPTS[0], 16, ignore_eos=True)
        return server.resident()

    with b.server(False, *args) as s:
        stock = talk(s)
    with b.broker():
        with b.server(True, *args) as s:
            paged = talk(s)
            held = b.held()
    whole = 8192 * TOKEN_BYTES
    figure("kv-held-over-stock", held / whole, "x", f"four short answers: {mib(held)} held, stock {mib(whole)}", 0.05)
    figure("resident-over-stock", paged / stock, "x", f"VmRSS of llama-server {mib(paged)}, stock {mib(stock)}")


def churn(b):
    """The mixed load through llama-server with eight slots, all at once: held over each slot's high-water mark."""
    say("llama-server, eight slots, mixed load")
    state = 5
    high = [0] * 8

    def length():
        nonlocal state
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        return round(16 * 128 ** ((state >> 11) / 2**53))

    work = [[length() for _ in range(3)] for _ in range(8)]

    def client(server, slot):
        for n, total in enumerate(work[slot]):
            prompt = [1000 + (i * 7 + slot * 31 + n * 101) % 5000 for i in range(max(1, total // 2))]
            r = server.complete(prompt, total - len(prompt), id_slot=slot, ignore_eos=True, cache_prompt=False,
                                timeout=3600)
            # What was written: the last token that was made is not.
            high[slot] = max(high[slot], r["tokens_evaluated"] + r["tokens_predicted"] - 1)

    with b.broker():
        with b.server(True, "-c", 8 * 2048, "-np", 8) as s:
            at_once([lambda slot=slot: client(s, slot) for slot in range(8)])
            held = b.held()
    tokens = sum(high)
    figure("held-over-high-water", held / (tokens * TOKEN_BYTES), "x",
           f"24 requests of 16 to 2048 tokens in eight slots: {mib(held)} for {tokens} tokens at the slots' high-water marks",
           1.10)


def live(b):
    """The same load over the tokens that live, in time, with and without the extension `trim`."""
    for how in ("silent", "trim"):
        say(f"mixed load in time, {how}")
        with b.broker():
            code, out, err = b.ours(True, "mixed", b.o.model, 40, b.threads, how, 3, timeout=3000)
            must(code == 0, f"mixed ended with {code}: {err[-400:]}")
        x = json.loads(out)
        figure(f"held-over-live-{'with-trim' if how == 'trim' else 'without-trim'}", x["held"] / x["live"], "x",
               f"{x['sequences']} sequences of 16 to 2048 tokens in eight streams: {mib(x['held'])} held for {mib(x['live'])} "
               f"that live, in the mean over {x['batches']} batches")


def main():
    o = options()
    b = Bench(o)
    parts = [served, churn, live, faults, speed]
    try:
        for part in parts:
            if not o.words or part.__name__ in o.words:
                part(b)
    except (Failed, subprocess.SubprocessError, OSError) as e:
        say(str(e))
        return 1
    finally:
        b.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
