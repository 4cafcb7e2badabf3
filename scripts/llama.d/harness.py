"""What the checks, the measurements and the demo of scripts/llama share: Debian's programs in their root, a real broker
beside them, and the server's HTTP interface.

Owns every process that it starts, and a directory in the root: `close` ends and removes them.
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
        for program in pathlib.Path(options.programs).iterdir():
            shutil.copy(program, self.work / program.name)
        self.procs = []

    def close(self):
        for p in self.procs:
            if p.poll() is None:
                p.kill()
                p.wait()
        shutil.rmtree(self.work, ignore_errors=True)

    def env(self, plugin, **more):
        env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LC_ALL": "C.UTF-8"}
        if plugin:
            env["GGML_BACKEND_PATH"] = f"{self.inside}/libggml-kvbroker.so"
            env["KVBROKER_SOCKET"] = f"{self.inside}/s.sock"
            env["KVBROKER_LOG"] = "info"
        env.update(more)
        return env

    def command(self, program, *args):
        """In the root, with a /proc of its own that nobody else sees and that goes with the program."""
        enter = 'mount -t proc proc "$0/proc" && exec chroot "$0" "$@"'
        return ["unshare", "--mount", "--propagation", "private", "sh", "-c", enter, str(self.root), program, *map(str, args)]

    def run(self, plugin, program, *args, timeout=240, env=None):
        done = subprocess.run(
            self.command(program, *args), env=self.env(plugin, **(env or {})), timeout=timeout,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")

    def ours(self, plugin, program, *args, **more):
        """One of the programs of scripts/llama.d, over Debian's libllama."""
        return self.run(plugin, f"{self.inside}/{program}", *args, **more)

    def older(self):
        """The libraries of llama.cpp 0.6.0, and what is linked with them, as the programs in the root see them."""
        here = self.work / "older"
        if not self.o.older:
            raise Skipped("llama.cpp 0.6.0 has not been built: scripts/llama --all builds it")
        if not here.exists():
            shutil.copytree(self.o.older, here, symlinks=True)
            shutil.copy(self.work / "logits-older", here / "lib" / "logits")
        return f"{self.inside}/older/lib"

    def complete(self, plugin, *args, prompt=PROMPTS[0], tokens=24, fa="on", env=None, ok=True, model=None):
        args = ["-m", model or self.o.model, "-t", self.threads, "-fa", fa, "--temp", 0, "-n", tokens, "-no-cnv", "-p", prompt,
                *args]
        for _ in range(10):
            code, out, err = self.run(plugin, "/usr/bin/llama-completion", *args, env=env)
            # Its output goes through a thread that it does not wait for at its end (0.7.0): what comes last can be missing.
            said_all = "graph reallocs" if code == 0 else "llama_completion: error"
            if said_all in err or code not in (0, 1) or "KVBROKER_REQUIRE" in err:
                break
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

    def ctl(self, *args):
        """What kvbctl prints."""
        done = subprocess.run([self.o.kvbctl, *args, "--socket", self.work / "a.sock"], stdout=subprocess.PIPE, check=True)
        return done.stdout.decode()

    def version(self):
        """Of Debian's llama.cpp, as its library's file name says."""
        return sorted(f.name for f in pathlib.Path(self.o.library).glob("libllama.so.*.*.*"))[-1].split(".so.")[1]

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

    def complete(self, prompt, tokens=16, timeout=600, **more):
        return self.call("/completion", {
            "prompt": prompt, "n_predict": tokens, "temperature": 0, "seed": 1, "cache_prompt": True, **more}, timeout)

    def resident(self):
        text = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", text)[1]) * 1024

    def proportional(self):
        text = pathlib.Path(f"/proc/{self.process.pid}/smaps_rollup").read_text()
        return int(re.search(r"^Pss:\s+(\d+)", text, re.M)[1]) * 1024


def options():
    """What scripts/llama hands over."""
    parser = argparse.ArgumentParser()
    for name in ["root", "library", "model", "gemma", "q4", "broker", "kvbctl", "plugin", "programs", "older", "python",
                 "arm64", "arm64-plugin", "known", "docs"]:
        parser.add_argument("--" + name)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("words", nargs="*")
    # A run that is stopped takes its servers and its broker along.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return parser.parse_args()


def at_once(calls):
    """The results of calls that are made at the same time."""
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def wait(condition, seconds, what):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return
        time.sleep(0.05)
    raise Failed(what() if callable(what) else what)


def mib(size):
    return f"{size / MIB:.2f} MiB"
