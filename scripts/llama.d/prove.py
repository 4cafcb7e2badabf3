"""The checks of scripts/llama: Debian's own llama.cpp with and without the plugin, over a real kvbrokerd.

Every check compares what a user sees (answers, the broker's books, resident memory) and prints one line. Ends with
"N passed, N failed, N skipped".
"""

import argparse
import concurrent.futures
import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

MIB = 1 << 20
PROMPTS = [
    "You are an assistant for a CNC machine. The spindle is getting hot. What should I check first?",
    "Write one sentence about the sea.",
    "List three colours.",
]
LONG = "The machine has a spindle, a coolant pump, three axes and a tool changer. " * 12


class Failed(Exception):
    pass


class Skipped(Exception):
    pass


def must(condition, what):
    if not condition:
        raise Failed(what)


class Bench:
    def __init__(self, options):
        self.o = options
        self.threads = os.environ.get("KVBROKER_THREADS", "2")
        self.root = pathlib.Path(options.root)
        self.work = pathlib.Path(tempfile.mkdtemp(prefix="kv.", dir=self.root))
        os.chmod(self.work, 0o755)
        # As the programs in the root see it.
        self.inside = "/" + self.work.name
        shutil.copy(options.plugin, self.work / "libggml-kvbroker.so")
        shutil.copy(options.logits, self.work / "logits")
        self.procs = []
        self.figures = []

    def close(self):
        for p in self.procs:
            if p.poll() is None:
                p.kill()
                p.wait()
        shutil.rmtree(self.work, ignore_errors=True)

    def env(self, plugin, **more):
        env = {"PATH": "/usr/bin:/bin", "HOME": "/root", "LC_ALL": "C.UTF-8"}
        if plugin:
            env["GGML_BACKEND_PATH"] = f"{self.inside}/libggml-kvbroker.so"
            env["KVBROKER_SOCKET"] = f"{self.inside}/s.sock"
            env["KVBROKER_LOG"] = "info"
        env.update(more)
        return env

    def command(self, program, *args):
        return [shutil.which("chroot") or "/usr/sbin/chroot", str(self.root), program, *map(str, args)]

    def run(self, plugin, program, *args, timeout=240, env=None):
        done = subprocess.run(
            self.command(program, *args), env=self.env(plugin, **(env or {})), timeout=timeout,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")

    def complete(self, plugin, *args, prompt=PROMPTS[0], tokens=24, fa="on", env=None, ok=True, model=None):
        code, out, err = self.run(
            plugin, "/usr/bin/llama-completion", "-m", model or self.o.model, "-t", self.threads, "-fa", fa, "--temp", 0,
            "-n", tokens, "-no-cnv", "-p", prompt, *args, env=env)
        if ok:
            must(code == 0, f"llama-completion ended with {code}: {err[-600:]}")
        return code, out, err

    @contextlib.contextmanager
    def broker(self, pool="256M", limit=None):
        config = self.work / "kvbroker.toml"
        config.write_text(
            f'[pool]\nsize = "{pool}"\nlock = false\n[socket]\npath = "{self.work}/s.sock"\n'
            f'mode = "0666"\nadmin-path = "{self.work}/a.sock"\n'
            + (f'[limits]\ntenant = "{limit}"\n' if limit else ""))
        p = subprocess.Popen([self.o.broker, "--config", config], env={"KVBROKER_LOG": "warn"})
        self.procs.append(p)
        wait(lambda: self.status() is not None, 20, "the broker does not answer")
        try:
            yield p
        finally:
            if p.poll() is None:
                p.terminate()
                p.wait()

    def ask(self, what):
        with socket.socket(socket.AF_UNIX) as s:
            s.settimeout(10)
            s.connect(str(self.work / "a.sock"))
            s.sendall(what.encode() + b"\n")
            answer = b""
            while part := s.recv(65536):
                answer += part
        return json.loads(answer)

    def status(self):
        try:
            return self.ask("status")
        except (OSError, ValueError):
            return None

    def held(self):
        ledger = self.status()["ledger"]
        return ledger["private"] + ledger["credit"]

    @contextlib.contextmanager
    def server(self, plugin, *args, env=None, ready=True):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        log = open(self.work / f"server.{port}.log", "w+")
        p = subprocess.Popen(
            self.command("/usr/bin/llama-server", "-m", self.o.model, "-t", self.threads, "-fa", "on", "--host",
                         "127.0.0.1", "--port", port, "--no-webui", "--cache-ram", "0", *args),
            env=self.env(plugin, **(env or {})), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.procs.append(p)
        server = Server(p, port, log)
        try:
            if ready:
                wait(server.ready, 120, lambda: f"llama-server does not answer: {server.said()[-800:]}")
            yield server
        finally:
            if p.poll() is None:
                p.terminate()
                try:
                    p.wait(20)
                except subprocess.TimeoutExpired:
                    p.kill()
                    p.wait()
            log.close()


class Server:
    def __init__(self, process, port, log):
        self.process, self.port, self.log = process, port, log

    def said(self):
        return pathlib.Path(self.log.name).read_text(errors="replace")

    def call(self, path, body=None, timeout=300):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data=data, headers={"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return json.loads(answer.read())

    def ready(self):
        if self.process.poll() is not None:
            raise Failed(f"llama-server ended with {self.process.returncode}: {self.said()[-800:]}")
        try:
            return self.call("/health", timeout=5).get("status") == "ok"
        except (OSError, ValueError):
            return False

    def complete(self, prompt, tokens=16, **more):
        return self.call("/completion", {
            "prompt": prompt, "n_predict": tokens, "temperature": 0, "seed": 1, "cache_prompt": True, **more})

    def resident(self):
        text = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", text)[1]) * 1024

    def proportional(self):
        text = pathlib.Path(f"/proc/{self.process.pid}/smaps_rollup").read_text()
        return int(re.search(r"^Pss:\s+(\d+)", text, re.M)[1]) * 1024


def wait(condition, seconds, what):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return
        time.sleep(0.05)
    raise Failed(what() if callable(what) else what)


def mib(size):
    return f"{size / MIB:.2f} MiB"


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
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            at_once = list(pool.map(lambda p: server.complete(p, 16, ignore_eos=True)["content"], PROMPTS))
        return at_once, server.complete(PROMPTS[0], 16, ignore_eos=True)["content"]

    answers, rss = [], []
    for _ in range(2):
        with b.server(False, "-c", 8192, "-np", 4) as s:
            answers.append(talk(s))
            rss.append(s.proportional())
    with b.broker():
        with b.server(True, "-c", 8192, "-np", 4) as s:
            at_once, after = talk(s)
            held = b.held()
            paged = s.proportional()
    for i, prompt in enumerate(PROMPTS):
        if answers[0][0][i] == answers[1][0][i]:
            must(at_once[i] == answers[0][0][i], f"{prompt!r}: {at_once[i]!r} for {answers[0][0][i]!r}")
        else:
            must(at_once[i], f"{prompt!r}: an empty answer")
    must(after, "an empty answer")
    stock_kv = 8192 * 23040
    must(held <= stock_kv * 0.05, f"{mib(held)} held, stock holds {mib(stock_kv)}")
    return f"KV {mib(held)} for {mib(stock_kv)} ({held / stock_kv:.1%}); proportional set {mib(paged)} for {mib(rss[0])}"


def mixed(b):
    """eight slots with 16 to 2000 tokens each: at most 1.10 bytes held per byte of tokens written"""
    lengths = [round(16 * 125 ** (i / 7)) for i in range(8)]
    with b.broker():
        with b.server(True, "-c", 8 * 2048, "-np", 8) as s:
            for slot, length in enumerate(lengths):
                s.complete([1000 + (i * 7 + slot) % 5000 for i in range(length)], 1, id_slot=slot)
            held = b.held()
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
    with b.broker() as first:
        with b.server(True, "-c", 2048, "-np", 1, env={"KVBROKER_WAIT_MS": "20000"}) as s:
            before = s.complete(PROMPTS[0], 8)["content"]
            first.send_signal(signal.SIGKILL)
            first.wait()
            must(s.complete(PROMPTS[0], 8)["content"] == before, "another answer after the broker's end")
            wait(lambda: "the broker has gone" in s.said(), 5, "the plugin does not say that the broker has gone")
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


def twice(b):
    """the plugin loaded twice, by one path or as a copy, does no harm"""
    shutil.copy(b.o.plugin, b.work / "copy.so")
    args = [f"{b.inside}/logits", b.o.model, "f16", 1, 4, b.threads]
    with b.broker():
        _, stock, _ = b.run(False, *args)
        for path in ("libggml-kvbroker.so", "copy.so"):
            code, out, err = b.run(True, *args, env={"LOGITS_LOAD": f"{b.inside}/{path}"})
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
    return ", ".join(said)


def bypasses(b):
    """partial offload and --no-kv-offload: same text; what does not come here is visible in the books"""
    _, stock, _ = b.complete(False, "-c", 512, tokens=10)
    with b.broker():
        _, some, err = b.complete(True, "-c", 512, "-ngl", 10, tokens=10)
        must(some == stock and re.search(r"freed: [1-9]", err), f"-ngl 10: {some!r} {err[-300:]}")
        _, none, err = b.complete(True, "-c", 512, "--no-kv-offload", tokens=10)
        must(none == stock and "no KV cache in the pool" in err, f"-nkvo: {none!r} {err[-300:]}")


def logits(b):
    """bit-identical logits: 64 tokens, several sequences, copies, shifts, restored state; FA on and off; five kinds"""
    matrix = [("f16", 1), ("f16", 0), ("q8_0", 1), ("q4_0", 1), ("bf16", 1), ("f32", 1), ("mixed", 1)]
    with b.broker():
        for kind, flash in matrix:
            args = [f"{b.inside}/logits", b.o.model, kind, flash, 64 if flash and kind in ("f16", "q8_0", "q4_0") else 16,
                    b.threads]
            code, stock, err = b.run(False, *args, timeout=400)
            must(code == 0 and stock.count("\n") >= 4, f"{kind}, FA {flash}: {code} {err[-400:]}")
            code, paged, err = b.run(True, *args, timeout=400)
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


CHECKS = [completion, nobody_there, embedded, one_slot, four_slots, mixed, shift, save_restore, broker_killed, shared_pool,
          empty_pool, tenant_limit, huge, killed_anytime, twice, window, flash_off, flash_auto, kinds, bypasses, logits, bench]


def versions(options):
    """The ggml of the root, and those that the plugin was run with."""
    files = pathlib.Path(options.library).glob("libggml-base.so.*.*.*")
    found = sorted(f.name.split(".so.")[1] for f in files)
    known = re.search(r"KNOWN: &\[\(u32, u32\)\] = &\[(.*?)\];", pathlib.Path(options.known).read_text())
    pairs = re.findall(r"\((\d+), (\d+)\)", known[1])
    return found[-1] if found else None, [tuple(map(int, p)) for p in pairs]


def main():
    parser = argparse.ArgumentParser()
    for name in ["root", "library", "model", "gemma", "broker", "plugin", "logits", "known"]:
        parser.add_argument("--" + name)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("words", nargs="*")
    options = parser.parse_args()
    if options.list:
        for check in CHECKS:
            print(f"{check.__name__}: {check.__doc__}")
        return 0
    version, known = versions(options)
    print(f"ggml {version} of Debian testing; the plugin was run with {', '.join('%d.%d' % k for k in known)}")
    chosen = [c for c in CHECKS if not options.words or any(w in c.__name__ for w in options.words)]
    passed = failed = skipped = 0
    if version is None or tuple(map(int, version.split(".")[:2])) not in known:
        print(f"SKIPPED, ALL OF IT: ggml {version} is newer than any that the plugin was run with. To take it up: compare "
              f"ggml-backend-impl.h of that version with ggml-plugin/src/abi.rs, add it to KNOWN there, run this again.")
        skipped, chosen = len(chosen), []
    # A run that is stopped takes its servers and its broker along.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    bench_ = Bench(options)
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
