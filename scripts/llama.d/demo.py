"""scripts/demo --llama: Debian's own llama-server, with its KV cache in its own memory and then in the broker's pool.

The same four requests, one in each of four slots of 2048 tokens. What is shown was measured: resident memory by the
kernel, KV by llama-server's own log and by the broker's ledger, speed by llama-server.
"""

import re
import signal
import statistics
import sys
import textwrap

from harness import Bench, Failed, mib, must, options, wait

SLOTS, CONTEXT, TOKENS = 4, 2048, 48
QUESTIONS = [
    "The spindle of my milling machine is getting hot. What should I check first?",
    "Write two sentences about the sea.",
    "Name three colours and something that has each of them.",
    "Why should a machine be stopped before it is cleaned?",
]


def talk(server):
    answers, speeds = [], []
    for slot, question in enumerate(QUESTIONS):
        r = server.call("/v1/chat/completions", {
            "messages": [{"role": "user", "content": question}], "max_tokens": TOKENS, "temperature": 0, "id_slot": slot})
        answers.append(r["choices"][0]["message"]["content"].strip())
        speeds.append(r["timings"]["predicted_per_second"])
    return answers, statistics.median(speeds)


def run(b):
    args = ["-c", SLOTS * CONTEXT, "-np", SLOTS, "--verbosity", "4"]
    print(f"llama-server {b.version()}, unmodified, {SLOTS} slots of {CONTEXT} tokens, four questions\n\n--- stock", flush=True)
    with b.server(False, *args) as s:
        stock, stock_speed = talk(s)
        stock_resident = s.resident()
        said = re.findall(r"KV buffer size = +([\d.]+) MiB", s.said())
        must(said, "llama-server does not say how large its KV buffer is")
        stock_kv = sum(map(float, said)) * 2**20
    print("--- with GGML_BACKEND_PATH=.../libggml-kvbroker.so", flush=True)
    with b.broker():
        with b.server(True, *args) as s:
            start = b.held()
            paged, speed = talk(s)
            resident, held = s.resident(), b.held()
            (session,) = b.ask("sessions")
            print(f"\n$ kvbctl sessions\n{b.ctl('sessions').rstrip()}\n")
            s.process.send_signal(signal.SIGKILL)
            s.process.wait()
            wait(lambda: b.held() == 0, 5, "the killed server's blocks did not come back")
    for question, one, other in zip(QUESTIONS, stock, paged):
        print(f"{question}\n{textwrap.indent(textwrap.fill(other, 96), '    ')}")
        print("    (word for word what stock says)\n" if one == other else f"    (DIFFERENT; stock says: {one})\n")
    rows = [
        ("resident memory of the server", mib(stock_resident), mib(resident)),
        ("KV held at the start", mib(stock_kv), mib(start)),
        ("KV held after the answers", mib(stock_kv), f"{mib(held)} ({held / stock_kv:.1%})"),
        ("tokens per second", f"{stock_speed:.1f}", f"{speed:.1f}"),
        ("answers", str(len(stock)), f"{sum(x == y for x, y in zip(stock, paged))} of {len(stock)} the same"),
        ("after kill -9", "", f"all {mib(held)} back in the pool"),
    ]
    print(f"{'':32} {'stock':>14} {'on the broker':>22}")
    for name, left, right in rows:
        print(f"{name:32} {left:>14} {right:>22}")
    print(f"\na unit of the cache is {mib(session['block_bytes'])}, granted by the first write into it; the speeds of two short runs "
          f"say little: scripts/bench llama compares them")
    must(stock == paged, "an answer differs from stock's")


def main():
    b = Bench(options())
    try:
        run(b)
    except Failed as e:
        print(f"scripts/demo --llama: {e}", file=sys.stderr)
        return 1
    finally:
        b.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
