"""The checks of scripts/llama: Debian's own llama.cpp with and without the plugin, over a real kvbrokerd.

Every check compares what a user sees (answers, the broker's books, resident memory) and prints one line. Ends with
"N passed, N failed, N skipped".
"""

import concurrent.futures
import json
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error

import tiny
from harness import LONG, PROMPTS, Bench, Failed, Skipped, at_once, mib, must, options, wait

# The checks, in the order in which they are run. The docstring is what a user sees.


def completion(b):
    """llama-completion gives the same text, holds what it has written, and gives it back"""
    _, stock, _ = b.complete(False, "-c", 2048)
    with b.broker():
        _, paged, err = b.complete(True, "-c", 2048)
        must(stock == paged and stock, f"stock said {stock!r}, with the plugin {paged!r}")
        freed = re.search(r"freed: (\d+) of (\d+) units held", err)
        must(freed and 0 < int(freed[1]) <= 4, f"units held: {err[-400:]}")
        must(b.held() == 0, "the broker still counts blocks")
        return f"{freed[1]} of {freed[2]} units"


def nobody_there(b):
    """without a broker the program runs as before and says so in one line; KVBROKER_REQUIRE=1 ends it"""
    code, out, err = b.complete(True, "-c", 256, tokens=4)
    lines = [l for l in err.splitlines() if l.startswith("kvbroker:")]
    must(len(lines) == 1 and "no broker" in lines[0] and out, f"said {lines}")
    code, _, err = b.complete(True, "-c", 256, tokens=4, env={"KVBROKER_REQUIRE": "1"}, ok=False)
    must(code == 1 and "KVBROKER_REQUIRE" in err, f"ended with {code}: {err[-300:]}")


def embedded(b):
    """KVBROKER_BACKEND=embedded needs no broker and gives the same text"""
    _, stock, _ = b.complete(False, "-c", 256, tokens=8)
    _, paged, err = b.complete(True, "-c", 256, tokens=8, env={"KVBROKER_BACKEND": "embedded"})
    must(stock == paged and "freed: " in err, f"{stock!r} and {paged!r}: {err[-300:]}")


def one_slot(b):
    """llama-server with one slot: same answers, prompt reuse, books that grow with the conversation, kill -9 frees all"""

    def talk(server, watch=lambda: None):
        seen = []
        text = PROMPTS[0]
        for turn in ["", " And then?", " Why?"]:
            text += turn
            r = server.complete(text, 20, ignore_eos=True)
            text += r["content"]
            seen.append((r["content"], r["timings"]["prompt_n"], r["tokens_cached"]))
            watch()
        return seen

    with b.server(False, "-c", 2048, "-np", 1) as s:
        stock = talk(s)
        stock_rss = s.resident()
    with b.broker():
        with b.server(True, "-c", 2048, "-np", 1) as s:
            after_load = b.held()
            books = [after_load]
            paged = talk(s, lambda: books.append(b.held()))
            must(stock == paged, f"stock {stock}, with the plugin {paged}")
            must(books == sorted(books) and len(set(books)) >= 3, f"the books say {books}")
            sessions = b.ask("sessions")
            must(any("llama-server" in x["program"] and "30 layers" in x["model"] for x in sessions), f"{sessions}")
            block = sessions[0]["block_bytes"]
            must(after_load <= block, f"{mib(after_load)} are held after the start")
            rss = s.resident()
            s.process.send_signal(signal.SIGKILL)
            wait(lambda: b.held() == 0, 5, lambda: f"after kill -9 {mib(b.held())} are still held")
    reused = paged[1][1] < paged[0][1] + 20
    must(reused, f"the prompt was not reused: {paged}")
    return f"held {[x // block for x in books]} blocks of {mib(block)}, resident {mib(rss)}, stock {mib(stock_rss)}"


def four_slots(b):
    """llama-server with four slots of 2048: three requests at once, then one more; KV at most 5 % of stock"""

    def talk(server):
        def one(prompt):
            return server.complete(prompt, 16, ignore_eos=True)["content"]

        return at_once([lambda p=p: one(p) for p in PROMPTS]), one(PROMPTS[0])

    answers, rss = [], []
    for _ in range(2):
        with b.server(False, "-c", 8192, "-np", 4) as s:
            answers.append(talk(s))
            rss.append(s.proportional())
    with b.broker():
        with b.server(True, "-c", 8192, "-np", 4) as s:
            together, after = talk(s)
            held = b.held()
            paged = s.proportional()
    for i, prompt in enumerate(PROMPTS):
        if answers[0][0][i] == answers[1][0][i]:
            must(together[i] == answers[0][0][i], f"{prompt!r}: {together[i]!r} for {answers[0][0][i]!r}")
        else:
            must(together[i], f"{prompt!r}: an empty answer")
    must(after, "an empty answer")
    stock_kv = 8192 * 23040
    must(held <= stock_kv * 0.05, f"{mib(held)} held, stock holds {mib(stock_kv)}")
    return f"KV {mib(held)} for {mib(stock_kv)} ({held / stock_kv:.1%}); proportional set {mib(paged)} for {mib(rss[0])}"


def parallel(b):
    """eight clients with three requests each at once: the answers of stock, where stock twice gives the same"""

    def talk(server):
        def client(number):
            prompts = [f"Part {number}: {PROMPTS[(number + i) % len(PROMPTS)]}" for i in range(3)]
            return [server.complete(p, 12, ignore_eos=True)["content"] for p in prompts]

        return sum(at_once([lambda n=n: client(n) for n in range(8)]), [])

    args = ["-c", 8 * 512, "-np", 8]
    answers = []
    for _ in range(2):
        with b.server(False, *args) as s:
            answers.append(talk(s))
    with b.broker():
        with b.server(True, *args) as s:
            paged = talk(s)
        must(b.held() == 0, "blocks are still held")
    certain = [i for i, (one, two) in enumerate(zip(*answers)) if one == two]
    differing = [(answers[0][i], paged[i]) for i in certain if paged[i] != answers[0][i]]
    # Which requests share a batch is chance, and a batch's shape changes the last bits: two runs that agree by chance do
    # not bind a third one in every answer.
    must(len(differing) <= len(certain) // 4, f"{differing[:3]}")
    must(all(paged), "an empty answer")
    return f"{len(paged)} answers; {len(certain)} the same in two runs of stock, {len(certain) - len(differing)} of them here"


def mixed(b):
    """eight slots with 16 to 2000 tokens each: at most 1.10 bytes held per byte of tokens written"""
    lengths = [round(16 * 125 ** (i / 7)) for i in range(8)]
    with b.broker():
        with b.server(True, "-c", 8 * 2048, "-np", 8) as s:
            for slot, length in enumerate(lengths):
                s.complete([1000 + (i * 7 + slot) % 5000 for i in range(length)], 1, id_slot=slot)
            held = b.held()
            # A hundred more requests, none longer than what its slot has seen, take nothing more.
            for n in range(104):
                length = min(lengths[n % 8], 12 + n % 5)
                s.complete([2000 + (i * 3 + n) % 5000 for i in range(length)], 1, id_slot=n % 8)
            must(b.held() == held, f"{mib(b.held())} after a hundred more requests, {mib(held)} before")
    ratio = held / (sum(lengths) * 23040)
    must(ratio <= 1.10, f"{mib(held)} for {sum(lengths)} tokens: {ratio:.3f}")
    return f"{mib(held)} for {sum(lengths)} tokens: {ratio:.3f}; stock holds {mib(8 * 2048 * 23040)}"


def shift(b):
    """a conversation that outgrows its slot and shifts goes on as without the plugin"""

    def talk(server):
        r = server.complete("Count: 1 2 3 4", 320, ignore_eos=True)
        return r["content"], r["tokens_predicted"]

    args = ["-c", 256, "-np", 1, "--context-shift"]
    with b.server(False, *args) as s:
        stock = talk(s)
    with b.broker():
        with b.server(True, *args) as s:
            paged = talk(s)
            held = b.held()
    must(stock[1] == 320, f"stock made {stock[1]} tokens")
    must(stock == paged, f"{stock[0][-200:]!r} and {paged[0][-200:]!r}")
    return f"{paged[1]} tokens in a slot of 256, {mib(held)} held"


def save_restore(b):
    """a slot is saved to a file and restored, with parts that were never written"""
    directory = b.work / "slots"
    directory.mkdir(exist_ok=True)
    args = ["-c", 1024, "-np", 2, "--slot-save-path", f"{b.inside}/slots/"]

    def talk(server):
        first = server.complete(PROMPTS[0], 8, id_slot=0)["content"]
        saved = server.call("/slots/0?action=save", {"filename": "one.bin"})["n_saved"]
        server.call("/slots/0?action=erase", {})
        restored = server.call("/slots/1?action=restore", {"filename": "one.bin"})["n_restored"]
        again = server.complete(PROMPTS[0] + first, 8, id_slot=1)
        return first, saved, restored, again["content"], again["timings"]["prompt_n"]

    with b.server(False, *args) as s:
        stock = talk(s)
    with b.broker():
        with b.server(True, *args) as s:
            paged = talk(s)
    must(stock == paged and paged[2] > 8, f"{stock} and {paged}")
    return f"{paged[2]} tokens restored, {paged[4]} computed"


def broker_killed(b):
    """kill -9 of the broker: the server answers on what it holds, and grows from the next broker"""
    (b.work / "slots").mkdir(exist_ok=True)
    args = ["-c", 2048, "-np", 1, "--slot-save-path", f"{b.inside}/slots/"]
    with b.broker() as first:
        with b.server(True, *args, env={"KVBROKER_WAIT_MS": "20000"}) as s:
            before = s.complete(PROMPTS[0], 8)["content"]
            first.send_signal(signal.SIGKILL)
            first.wait()
            must(s.complete(PROMPTS[0], 8)["content"] == before, "another answer after the broker's end")
            wait(lambda: "the broker has gone" in s.said(), 5, "the plugin does not say that the broker has gone")
            saved = s.call("/slots/0?action=save", {"filename": "orphan.bin"})["n_saved"]
            restored = s.call("/slots/0?action=restore", {"filename": "orphan.bin"})["n_restored"]
            must(saved == restored > 8, f"without a broker {saved} tokens are saved and {restored} restored")
            with b.broker():
                grown = s.complete(PROMPTS[0] + LONG, 8)["content"]
                must(grown and b.held() > 0, "nothing was granted by the next broker")
                wait(lambda: "another broker" in s.said(), 5, "the plugin does not say that it goes on")
                must(s.complete(PROMPTS[0], 8)["content"] == before, "another answer after the new broker")


def shared_pool(b):
    """two servers share a pool; one that asks for its longest context is refused cleanly when that does not fit"""
    with b.broker("96M"):
        with b.server(True, "-c", 2048, "-np", 1, env={"KVBROKER_ADMIT": "longest"}) as first:
            must(b.held() >= 2048 * 23040, f"{mib(b.held())} reserved")
            with b.server(True, "-c", 8192, "-np", 1) as second:
                must(first.complete(PROMPTS[1], 8)["content"] == second.complete(PROMPTS[1], 8)["content"], "answers")
                must(len(b.ask("sessions")) == 2, f"{b.ask('sessions')}")
            code, _, err = b.complete(True, "-c", 8192, tokens=4, env={"KVBROKER_ADMIT": "longest"}, ok=False)
            must(code == 1, f"the refused program ended with {code}")
            must("failed to allocate buffer for kv cache" in err and "never-fits" in err, err[-600:])
            must(first.complete(PROMPTS[2], 8, ignore_eos=True)["content"], "the first server suffers")


def empty_pool(b):
    """a pool that is too small: bounded spill is counted and said; without it the end comes with words"""
    _, stock, _ = b.complete(False, "-c", 2048, prompt=LONG, tokens=4)
    with b.broker("3M"):
        spill = {"KVBROKER_SPILL": "64M", "KVBROKER_WAIT_MS": "0"}
        _, paged, err = b.complete(True, "-c", 2048, prompt=LONG, tokens=4, env=spill)
        must(stock == paged and "in private memory" in err, f"{stock!r} {paged!r} {err[-300:]}")
        code, _, err = b.complete(True, "-c", 2048, prompt=LONG, tokens=4, env={"KVBROKER_WAIT_MS": "100"}, ok=False)
        must(code == -signal.SIGSEGV or code == 128 + signal.SIGSEGV, f"ended with {code}")
        must("KVBROKER_ADMIT=longest" in err and "KVBROKER_SPILL" in err, err[-600:])
        wait(lambda: b.held() == 0, 5, "blocks are still held")


def tenant_limit(b):
    """a tenant at its limit is treated like one in an empty pool, and told that it is its limit"""
    with b.broker(limit="3M"):
        spill = {"KVBROKER_SPILL": "64M", "KVBROKER_WAIT_MS": "0"}
        _, _, err = b.complete(True, "-c", 2048, prompt=LONG, tokens=4, env=spill)
        must("in private memory" in err and "over-limit" in err, err[-600:])


def huge(b):
    """a context of 131072 tokens costs what is written; where the address space is limited, the refusal is in words"""
    with b.broker():
        _, out, err = b.complete(True, "-c", 131072, tokens=4)
        freed = re.search(r"freed: (\d+) of (\d+) units held", err)
        must(out and freed and int(freed[1]) <= 2, err[-400:])
        code, _, err = b.run(
            True, "/usr/bin/prlimit", "--as=2500000000", "/usr/bin/llama-completion", "-m", b.o.model, "-t", b.threads,
            "-fa", "on", "-n", 4, "-no-cnv", "-p", "x", "-c", 131072)
        must(code == 1 and "kvbroker: no KV buffer" in err, f"ended with {code}: {err[-600:]}")
        return f"{freed[1]} of {freed[2]} units"


def killed_anytime(b):
    """a server that is killed while it starts, loads, computes its first prompt, or decodes leaves nothing behind"""
    with b.broker():
        for delay in (0.1, 0.3, 0.6, 1.0, 1.5, 2.5):
            with b.server(True, "-c", 2048, "-np", 2, ready=False) as s:
                time.sleep(delay)
                s.process.kill()
            wait(lambda: b.held() == 0, 5, lambda: f"{mib(b.held())} held after a kill at {delay} s")
        for delay in (0.05, 1.0):
            with b.server(True, "-c", 2048, "-np", 2) as s, concurrent.futures.ThreadPoolExecutor(1) as pool:
                answer = pool.submit(s.complete, LONG, 200, ignore_eos=True)
                time.sleep(delay)
                s.process.kill()
                answer.exception()
            wait(lambda: b.held() == 0, 5, lambda: f"{mib(b.held())} held after a kill in a request")
        must(b.ask("check")["ok"], "the books do not add up")


def killed_within(b):
    """a program that is killed within the loading, the making of a buffer, a clear, the first prompt or a later decode"""
    said = []
    with b.broker():
        for call in ("load:1", "create:1", "clear:1", "compute:1", "clear:2", "compute:9"):
            program = [f"{b.inside}/logits", b.o.model, "f16", 1, 24, b.threads]
            env = ["/usr/bin/env", f"LD_PRELOAD={b.inside}/shim.so", f"SHIM_KILL={call}"]
            code, _, err = b.run(True, *env, *program)
            must(code in (-signal.SIGKILL, 128 + signal.SIGKILL), f"{call}: ended with {code}: {err[-300:]}")
            must("shim: killed in " + call.split(":")[0] in err, f"{call}: {err[-300:]}")
            wait(lambda: b.held() == 0, 5, lambda: f"{mib(b.held())} held after a kill in {call}")
            said.append(call)
        must(b.ask("check")["ok"], "the books do not add up")
    return ", ".join(said)


def unknown_version(b):
    """a ggml that this plugin was not run with is declined in a line, and the program runs as before"""
    shim = ["/usr/bin/env", f"LD_PRELOAD={b.inside}/shim.so"]
    args = ["/usr/bin/llama-completion", "-m", b.o.model, "-t", b.threads, "-fa", "on", "--temp", 0, "-n", 6, "-no-cnv", "-p",
            PROMPTS[1], "-c", 256]
    with b.broker():
        _, stock, _ = b.run(False, *args)
        code, out, err = b.run(True, *shim, "SHIM_VERSION=0.99.1", *args)
        lines = [line for line in err.splitlines() if line.startswith("kvbroker:")]
        must(code == 0 and out == stock, f"ended with {code}: {out!r} {err[-400:]}")
        must(len(lines) == 1 and "ggml 0.99.1" in lines[0] and "KVBROKER_GGML=0.99.1" in lines[0], f"said {lines}")
        code, _, err = b.run(True, *shim, "SHIM_VERSION=0.99.1", *args, env={"KVBROKER_REQUIRE": "1"})
        must(code == 1 and "ggml 0.99.1" in err, f"ended with {code}: {err[-400:]}")
        code, out, err = b.run(True, *shim, "SHIM_VERSION=0.99.1", *args, env={"KVBROKER_GGML": "0.99.1"})
        must(code == 0 and out == stock and "freed: " in err, f"tried all the same: {code} {err[-400:]}")


def recurrent(b):
    """a recurrent model (Mamba): its state is private memory, the plugin says so, same text"""
    tiny.mamba(b.work / "mamba.gguf")
    args = {"model": f"{b.inside}/mamba.gguf", "tokens": 24, "prompt": "abc"}
    _, stock, _ = b.complete(False, "-c", 256, "--ignore-eos", **args)
    with b.broker():
        _, paged, err = b.complete(True, "-c", 256, "--ignore-eos", "--fit", "off", **args)
        must(b.held() == 0, "blocks are held")
    must(stock == paged and len(stock) > 3, f"{stock!r} and {paged!r}")
    must("is no attention KV cache" in err and "freed: " not in err, err[-600:])


def small_planes(b):
    """planes smaller than a page (512 cells of four bytes): bit-identical logits, FA on and off"""
    tiny.llama(b.work / "tiny.gguf", 2)
    settings = [("f16", 1), ("f16", 0)]
    for kind, flash in settings:
        args = ["logits", f"{b.inside}/tiny.gguf", kind, flash, 40, b.threads]
        code, stock, err = b.ours(False, *args)
        must(code == 0 and stock.count("\n") >= 5, f"{kind}: {code} {stock} {err[-400:]}")
        with b.broker():
            code, paged, err = b.ours(True, *args)
            must(code == 0 and stock == paged, f"{kind}, FA {flash}: {code} {err[-400:]}\n{stock}\n{paged}")
            must(re.search(r"freed: [1-9]", err), err[-400:])
            must(b.held() == 0, "blocks are still held")
    return f"{len(settings)} settings"


def locked(b):
    """a process that locks all of its memory (mlockall) holds no more than one that does not"""
    _, stock, _ = b.complete(False, "-c", 2048, tokens=6)
    args = ["/usr/bin/llama-completion", "-m", b.o.model, "-t", b.threads, "-fa", "on", "--temp", 0, "-n", 6, "-no-cnv", "-p",
            PROMPTS[0], "-c", 2048]
    with b.broker():
        code, out, err = b.run(True, "/usr/bin/env", f"LD_PRELOAD={b.inside}/shim.so", "SHIM_LOCK=1", *args)
        must(code == 0 and out == stock, f"ended with {code}: {out!r} {err[-400:]}")
    freed = re.search(r"freed: (\d+) of (\d+) units held", err)
    must(freed and 0 < int(freed[1]) <= 2, err[-400:])
    return f"{freed[1]} of {freed[2]} units"


def mappings(b):
    """a process that has nearly as many mappings as the kernel allows: coarser units, or a refusal that names the limit"""
    most = int(pathlib.Path("/proc/sys/vm/max_map_count").read_text())
    shim = ["/usr/bin/env", f"LD_PRELOAD={b.inside}/shim.so"]
    args = ["/usr/bin/llama-completion", "-m", b.o.model, "-t", b.threads, "-fa", "on", "--temp", 0, "-n", 6, "-no-cnv", "-p",
            LONG, "-c", 8192]
    said = []
    with b.broker():
        _, stock, _ = b.run(False, *args)
        for left in (20000, 6000, 700):
            code, out, err = b.run(True, *shim, f"SHIM_MAPPINGS={most - left}", *args)
            if code == 0:
                freed = re.search(r"freed: (\d+) of (\d+) units held", err)
                must(freed and out == stock, f"{left} left: {out[-100:]!r} {err[-500:]}")
                # Each unit takes a mapping in each of 60 planes.
                must(int(freed[2]) * 60 < left, f"{left} left, and {freed[2]} units")
                said.append(f"{left} left: {freed[1]} of {freed[2]} units")
            else:
                must(code == 1 and "vm.max_map_count" in err, f"{left} left: ended with {code}: {err[-600:]}")
                said.append(f"{left} left: refused")
        must(b.held() == 0, "blocks are still held")
    must(said[-1].endswith("refused"), "; ".join(said))
    return "; ".join(said)


def contexts(b):
    """three thousand contexts opened and closed in one process leave no descriptor, thread, mapping or handler behind"""
    tiny.llama(b.work / "tiny.gguf", 32)
    with b.broker():
        code, out, err = b.ours(True, "contexts", f"{b.inside}/tiny.gguf", 3000, timeout=400)
        must(code == 0, f"ended with {code}: {err[-500:]}")
        n = re.search(r"descriptors (\d+) (\d+) threads (\d+) (\d+) mappings (\d+) (\d+) handler (\w+)", out)
        must(n[1] == n[2] and n[3] == n[4] and n[7] == "same" and int(n[6]) <= int(n[5]) + 8, out)
        must(err.count("freed: ") == 3000, f"{err.count('freed: ')} of 3000 had a KV buffer")
        must(b.held() == 0, "blocks are still held")
    return out.strip()


def extension(b):
    """the example program tells the plugin that a sequence has ended, and its blocks come back"""
    code, out, err = b.ours(False, "trim", b.o.model)
    must(code == 0 and "the plugin is not there" in out, f"{code} {out} {err[-300:]}")
    with b.broker():
        code, out, err = b.ours(True, "trim", b.o.model)
        must(code == 0, f"{code} {out} {err[-300:]}")
    held = [int(n) for n in re.findall(r"(\d+) of +\d+ units", out)]
    freed = re.search(r"freed (\d+) units, and there is room", out)
    must(len(held) == 4 and freed and int(freed[1]) > 0, out)
    must(held[0] == held[1] == held[2] + int(freed[1]) and held[3] > held[2], out)
    return f"{held} units held"


def older(b):
    """llama.cpp 0.6.0 with ggml 0.26: bit-identical logits with and without the plugin, FA on and off, f16, q8_0, q4_0"""
    libraries = b.older()
    env = {"LD_LIBRARY_PATH": libraries}
    settings = [("f16", 1), ("f16", 0), ("q8_0", 1), ("q4_0", 1), ("mixed", 1)]
    with b.broker():
        for kind, flash in settings:
            # It looks for the module of the CPU where it is run.
            args = ["/usr/bin/env", "-C", libraries, "./logits", b.o.model, kind, flash, 32 if flash else 8, b.threads]
            code, stock, err = b.run(False, *args, timeout=400, env=env)
            must(code == 0 and stock.count("\n") >= 4, f"{kind}, FA {flash}: {code} {err[-400:]}")
            code, paged, err = b.run(True, *args, timeout=400, env=env)
            must(code == 0 and "freed: " in err, f"{kind}, FA {flash}: ended with {code}: {err[-400:]}")
            must(stock == paged, f"{kind}, FA {flash}:\n{stock}\n{paged}")
        must(b.held() == 0, "blocks are still held")
    return f"{len(settings)} settings"


def python(b):
    """llama-cpp-python with the llama.cpp of its source package (ggml 0.25): the lines of docs/engines.md, same tokens"""
    if not b.o.python:
        raise Skipped("llama-cpp-python is not in the cache: scripts/llama --all makes it")
    shutil.copytree(b.o.python, b.work / "python", symlinks=True)
    lines = re.search(r"```python\n(.*?)```", pathlib.Path(b.o.docs).read_text(), re.S)[1]
    must("llama_cpp" in lines, "docs/engines.md has no lines for Python")
    answers = []
    with b.broker():
        for plugin in (False, True):
            # As they are written, but for where things lie; and stock has no line that names the plugin.
            code = [x for x in lines.replace("model.gguf", b.o.model).splitlines() if plugin or "libggml-kvbroker" not in x]
            code = re.sub(r'"/[^"]*/libggml-kvbroker.so"', repr(f"{b.inside}/libggml-kvbroker.so"), "\n".join(code))
            (b.work / "lines.py").write_text(code + "\n")
            status, out, err = b.run(plugin, "/usr/bin/python3", f"{b.inside}/lines.py", env={"PYTHONPATH": f"{b.inside}/python"})
            must(status == 0, f"ended with {status}: {err[-800:]}")
            answers.append(out)
        freed = re.search(r"freed: (\d+) of (\d+) units held", err)
        must(freed and 0 < int(freed[1]) < int(freed[2]), f"no KV buffer came here: {err[-600:]}")
        must(b.held() == 0, "blocks are still held")
    must(answers[0] == answers[1] and len(answers[0]) > 20, f"{answers}")
    return f"{freed[1]} of {freed[2]} units held, {answers[1].strip()[:50]!r}"


def arm64(b):
    """Debian's llama.cpp for arm64 with the plugin built for arm64, emulated (qemu-user): same text, units granted by faults"""
    if not b.o.arm64:
        raise Skipped("the plugin has not been built for arm64: scripts/llama --all builds it")
    program = [shutil.which("qemu-aarch64"), "-L", b.o.arm64, f"{b.o.arm64}/usr/bin/llama-completion"]
    model = str(b.root / b.o.model.lstrip("/"))
    # One thread: two would mostly wait for each other in the emulation.
    args = ["-m", model, "-c", "512", "-t", "1", "-fa", "on", "--temp", "0", "-n", "6", "-no-cnv", "--no-warmup", "-p", PROMPTS[2]]

    def complete(plugin, *more):
        env = b.env(False)
        if plugin:
            env.update(GGML_BACKEND_PATH=b.o.arm64_plugin, KVBROKER_SOCKET=str(b.work / "s.sock"), KVBROKER_LOG="info")
        done = subprocess.run([*program, *args, *more], env=env, timeout=900, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE)
        err = done.stderr.decode(errors="replace")
        must(done.returncode == 0, f"ended with {done.returncode}: {err[-600:]}")
        return done.stdout.decode(errors="replace"), err

    said = []
    with b.broker():
        for kind in ("f16", "q8_0"):
            kinds_ = ["-ctk", kind, "-ctv", kind]
            stock, _ = complete(False, *kinds_)
            paged, err = complete(True, *kinds_)
            must(stock == paged and stock, f"{kind}: {stock!r} and {paged!r}")
            freed = re.search(r"freed: (\d+) of (\d+) units held, (\d+) faults", err)
            must(freed and 0 < int(freed[1]) < int(freed[2]) and int(freed[3]) > 0, err[-400:])
            said.append(f"{kind}: {freed[1]} of {freed[2]} units")
        must(b.held() == 0, "blocks are still held")
    return ", ".join(said)


def twice(b):
    """the plugin loaded twice, by one path or as a copy, does no harm"""
    shutil.copy(b.o.plugin, b.work / "plugin-again.so")
    args = ["logits", b.o.model, "f16", 1, 4, b.threads]
    with b.broker():
        _, stock, _ = b.ours(False, *args)
        for path in ("libggml-kvbroker.so", "plugin-again.so"):
            code, out, err = b.ours(True, *args, env={"LOGITS_LOAD": f"{b.inside}/{path}"})
            must(code == 0 and out == stock and out, f"{path}: {code} {err[-400:]}")
        must(b.held() == 0, "blocks are still held")


def window(b):
    """Gemma 3, whose layers have two kinds of cache: two buffers, same text beyond the sliding window"""
    if not (b.root / b.o.gemma.lstrip("/")).exists():
        raise Skipped("the model is not in the cache")
    args = {"prompt": LONG * 4, "tokens": 12, "model": b.o.gemma}
    _, stock, _ = b.complete(False, "-c", 2048, **args)
    with b.broker():
        _, paged, err = b.complete(True, "-c", 2048, **args)
    must(stock == paged, f"{stock[-200:]!r} and {paged[-200:]!r}")
    freed = re.findall(r"freed: (\d+) of (\d+) units held", err)
    must(len(freed) == 2 and all(int(held) > 0 for held, _ in freed), f"{freed} {err[-400:]}")
    return ", ".join(f"{held} of {units} units" for held, units in freed)


def flash_off(b):
    """flash attention off: same text, a loud warning with the price"""
    _, stock, _ = b.complete(False, "-c", 512, fa="off", tokens=12)
    with b.broker():
        _, paged, err = b.complete(True, "-c", 512, fa="off", tokens=12)
    must(stock == paged, f"{stock!r} and {paged!r}")
    must("flash attention is off" in err and "-fa on" in err, err[-600:])


def flash_auto(b):
    """flash attention left to llama.cpp: same text, and if that turns it off, a warning"""
    _, stock, _ = b.complete(False, "-c", 512, fa="auto", tokens=12)
    with b.broker():
        _, paged, err = b.complete(True, "-c", 512, fa="auto", tokens=12)
    freed = re.search(r"freed: (\d+) of (\d+) units held", err)
    off = freed and freed[1] == freed[2]
    must(stock == paged or off, f"{stock!r} and {paged!r}")
    must(not off or "flash attention is off" in err, err[-600:])
    return f"{freed[1]} of {freed[2]} units held"


def kinds(b):
    """K and V as q8_0, q4_0, and of two kinds: same text"""
    said = []
    with b.broker():
        for k, v in [("q8_0", "q8_0"), ("q4_0", "q4_0"), ("f16", "q8_0"), ("f32", "f32")]:
            args = ["-c", 512, "-ctk", k, "-ctv", v]
            _, stock, _ = b.complete(False, *args, tokens=10)
            _, paged, err = b.complete(True, *args, tokens=10)
            must(stock == paged, f"{k}/{v}: {stock!r} and {paged!r}")
            freed = re.search(r"freed: (\d+) of (\d+) units held", err)
            must(freed and int(freed[1]) < int(freed[2]), f"{k}/{v}: {err[-300:]}")
            said.append(f"{k}/{v} {freed[1]}/{freed[2]}")
        # Without flash attention V cannot be quantised: llama.cpp's own refusal. K can.
        args = ["-c", 512, "-ctk", "q8_0"]
        _, stock, _ = b.complete(False, *args, fa="off", tokens=10)
        _, paged, err = b.complete(True, *args, fa="off", tokens=10)
        must(stock == paged and "flash attention is off" in err, f"q8_0 K, FA off: {stock!r} and {paged!r} {err[-300:]}")
        refusals = []
        for plugin in (False, True):
            code, _, err = b.complete(plugin, *args, "-ctv", "q8_0", fa="off", tokens=10, ok=False)
            words = {line.split(" ", 1)[1] for line in err.splitlines() if "quantized V cache" in line}
            refusals.append((code, words))
        must(refusals[0] == refusals[1] and refusals[0][0] != 0 and refusals[0][1], f"q8_0 V, FA off: {refusals}")
    return ", ".join(said)


def bypasses(b):
    """partial offload and --no-kv-offload: same text; what does not come here is visible in the books"""
    _, stock, _ = b.complete(False, "-c", 512, tokens=10)
    with b.broker():
        _, some, err = b.complete(True, "-c", 512, "-ngl", 10, tokens=10)
        must(some == stock and re.search(r"freed: [1-9]", err), f"-ngl 10: {some!r} {err[-300:]}")
        _, none, err = b.complete(True, "-c", 512, "--no-kv-offload", tokens=10)
        must(none == stock and "no KV cache in the pool" in err, f"-nkvo: {none!r} {err[-300:]}")
        # A shift of a cache that is not offloaded once asserted.
        outgrown = ["-c", 256, "--no-kv-offload", "--context-shift", "--ignore-eos"]
        _, stock, _ = b.complete(False, *outgrown, tokens=300)
        _, none, _ = b.complete(True, *outgrown, tokens=300)
        must(none == stock and len(stock) > 600, f"-nkvo and a shift: {none[-100:]!r} for {stock[-100:]!r}")


def logits(b):
    """bit-identical logits: 64 tokens, several sequences, copies, shifts, restored state; FA on and off; five kinds"""
    matrix = [("f16", 1), ("f16", 0), ("q8_0", 1), ("q4_0", 1), ("bf16", 1), ("f32", 1), ("mixed", 1)]
    with b.broker():
        for kind, flash in matrix:
            args = ["logits", b.o.model, kind, flash, 64 if flash and kind in ("f16", "q8_0", "q4_0") else 16,
                    b.threads]
            code, stock, err = b.ours(False, *args, timeout=400)
            must(code == 0 and stock.count("\n") >= 4, f"{kind}, FA {flash}: {code} {err[-400:]}")
            code, paged, err = b.ours(True, *args, timeout=400)
            must(code == 0, f"{kind}, FA {flash}: ended with {code}: {err[-400:]}")
            must(stock == paged, f"{kind}, FA {flash}:\n{stock}\n{paged}")
            if kind == "f16" and flash:
                must("extension: trimmed" in err and "extension: wrong -1 -1 -1" in err, err[-600:])
                trimmed = re.search(r"trimmed (-?\d+), ensured (-?\d+), held then (\d+)", err)
                must(int(trimmed[1]) > 0 and trimmed[2] == "0", err[-400:])
                must("every function works" in err and "is no attention KV cache" in err, err[-600:])
        must(b.held() == 0, "blocks are still held")
    return f"{len(matrix)} settings"


def bench(b):
    """llama-bench, which makes one context after the other, runs to its end"""
    args = ["-m", b.o.model, "-t", b.threads, "-p", 64, "-n", 8, "-r", 2, "-fa", 1, "-o", "json"]
    speed = []
    with b.broker():
        for plugin in (False, True):
            code, out, err = b.run(plugin, "/usr/bin/llama-bench", *args)
            must(code == 0, f"ended with {code}: {err[-400:]}")
            speed.append([round(x["avg_ts"], 1) for x in json.loads(out)])
        must("freed: " in err, f"no KV buffer came here: {err[-400:]}")
        must(b.held() == 0, "blocks are still held")
    return f"pp64, tg8 tokens/s: stock {speed[0]}, plugin {speed[1]} (reported, not judged)"


CHECKS = [completion, nobody_there, unknown_version, embedded, one_slot, four_slots, parallel, mixed, shift,
          save_restore, broker_killed, shared_pool, empty_pool, tenant_limit, huge, locked, mappings, killed_anytime,
          killed_within, contexts, twice, window, recurrent, small_planes, flash_off, flash_auto, kinds, bypasses,
          logits, extension, bench, older, python, arm64]


def versions(o):
    """The ggml of the root, and those that the plugin was run with."""
    files = pathlib.Path(o.library).glob("libggml-base.so.*.*.*")
    found = sorted(f.name.split(".so.")[1] for f in files)
    known = re.search(r"KNOWN: &\[\(u32, u32\)\] = &\[(.*?)\];", pathlib.Path(o.known).read_text())
    pairs = re.findall(r"\((\d+), (\d+)\)", known[1])
    return found[-1] if found else None, [tuple(map(int, p)) for p in pairs]


def main():
    o = options()
    if o.list:
        for check in CHECKS:
            print(f"{check.__name__}: {check.__doc__}")
        return 0
    version, known = versions(o)
    print(f"ggml {version} of Debian testing; the plugin was run with {', '.join('%d.%d' % k for k in known)}")
    chosen = [c for c in CHECKS if not o.words or any(w in c.__name__ for w in o.words)]
    passed = failed = skipped = 0
    if version is None or tuple(map(int, version.split(".")[:2])) not in known:
        print(f"SKIPPED, ALL OF IT: ggml {version} is newer than any that the plugin was run with. To take it up: compare "
              f"ggml-backend-impl.h of that version with ggml-plugin/src/abi.rs, add it to KNOWN there, run this again.")
        skipped, chosen = len(chosen), []
    bench_ = Bench(o)
    try:
        for check in chosen:
            begun = time.monotonic()
            try:
                note = check(bench_)
                passed += 1
                print(f"ok   {check.__name__}: {check.__doc__}{'; ' + note if note else ''} "
                      f"({time.monotonic() - begun:.0f} s)", flush=True)
            except Skipped as e:
                skipped += 1
                print(f"SKIP {check.__name__}: {e}", flush=True)
            except (Failed, subprocess.TimeoutExpired, urllib.error.URLError, OSError, KeyError) as e:
                failed += 1
                print(f"FAIL {check.__name__}: {check.__doc__}: {e}", flush=True)
    finally:
        bench_.close()
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
