"""The demo itself: starts a broker and engines, shows what they say, and checks what the broker counts.

Everything it starts ends with it, and everything it writes is in a temporary directory that it removes. The figures
come from the broker (`kvbctl --json`) and from the engines' events; nothing is computed that they did not measure.
"""

import argparse
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

CONTEXT = 2048
TOKENS_PER_BLOCK = 32
SYSTEM = "@examples/infer/prompts/system.txt"
QUESTIONS = [
    # label, question, longest answer; the last one is killed half-way
    ("valve", "关断三号阀门", 8),
    ("spindle", "The spindle of machine 4 is getting hot. What should I check first, and in which order?", 96),
    ("shift", "Write a short hand-over note for the next shift: line 2 stood still for twenty minutes because a "
              "sensor cable was loose, and it has been replaced.", 128),
    ("doomed", "Explain in detail, step by step, how to change the coolant of a milling machine.", 400),
]
KILL_AFTER = 24
COLOURS = {"first": 33, "valve": 36, "spindle": 32, "shift": 35, "doomed": 31}


def mib(size):
    return f"{size / 2**20:.1f} MiB"


def fail(message):
    raise SystemExit(f"scripts/demo: {message}")


class Demo:
    def __init__(self, arguments, directory):
        self.bin, self.engine, self.model = arguments.bin, arguments.engine, arguments.model
        self.socket = os.path.join(directory, "kvbroker.sock")
        self.admin = os.path.join(directory, "admin.sock")
        self.children = []
        self.colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ

    def start_broker(self):
        config = self.model if os.path.isfile(self.model) else os.path.join(self.model, "config.json")
        command = [os.path.join(self.bin, "kvbrokerd"), "--socket", self.socket, "--admin-socket", self.admin,
                   "--model", config, "--tokens-per-block", str(TOKENS_PER_BLOCK)]
        heaps = "/dev/dma_heap"
        cma = [n for n in ("default_cma_region", "reserved", "linux,cma", "cma") if os.access(f"{heaps}/{n}", os.R_OK)]
        if cma:
            command += ["--backend", "dma-heap", "--heap", cma[0]]
        self.broker = subprocess.Popen(command)
        self.children.append(self.broker)
        for _ in range(500):
            if os.path.exists(self.admin):
                return
            if self.broker.poll() is not None:
                fail("the broker did not start")
            time.sleep(0.02)
        fail("the broker did not open its sockets")

    def ctl(self, what, *more):
        command = [os.path.join(self.bin, "kvbctl"), what, "--socket", self.admin, *more]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def ask(self, what):
        return json.loads(self.ctl(what, "--json"))

    def used(self):
        ledger = self.ask("status")["ledger"]
        return sum(ledger[name] for name in ("private", "shared", "pinned", "credit"))

    def start_engine(self, label, question, longest, events, share=False):
        command = [self.engine, "--model", self.model, "--system", SYSTEM, "--prompt", question, "--label", label,
                   "--max-tokens", str(longest), "--context", str(CONTEXT), "--threads", "1", "--json-events"]
        if share:
            command += ["--pin"]
        environment = dict(os.environ, KVBROKER_SOCKET=self.socket)
        environment.pop("KVBROKER_BACKEND", None)
        engine = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        self.children.append(engine)

        def read():
            for line in engine.stdout:
                events.put((label, json.loads(line)))
            events.put((label, None))

        threading.Thread(target=read, daemon=True).start()
        return engine

    def say(self, label, text):
        text = text.strip()
        if text:
            mark = f"\x1b[{COLOURS.get(label, 37)}m{label:>8}\x1b[0m" if self.colour else f"{label:>8}"
            print(f"{mark} | {text}", flush=True)

    def talk(self, engines, events, on_token=lambda label, n: None):
        """Shows the answers as they come, a piece of a line at a time, until all engines have ended.

        What `on_token` returns is the last that is shown of an engine: it has ended it."""
        pending, done, running, ended = {}, {}, set(engines), set()
        while running:
            label, event = events.get(timeout=600)
            if event is None:
                self.say(label, pending.pop(label, ""))
                running.discard(label)
            elif label in ended:
                pass  # said before its end, and read from the pipe after it
            elif event["event"] == "token":
                text = pending.get(label, "") + event["text"]
                if "\n" in text or len(text) > 70 and text[-1] in " .,;:" or len(text) > 90:
                    self.say(label, text)
                    text = ""
                pending[label] = text
                last = on_token(label, event["n"])
                if last:
                    self.say(label, pending.pop(label))
                    self.say(label, last)
                    ended.add(label)
            elif event["event"] == "done":
                done[label] = event
            elif event["event"] == "error":
                fail(f"{label}: {event['message']}")
        return done

    def run(self):
        self.start_broker()
        status = self.ask("status")
        pool = status["pool"]
        print(f"kvbrokerd holds {mib(pool['bytes'])} in {pool['extents']} extents of {mib(pool['extent_bytes'])}, "
              f"{pool['backend']} ({pool['reason']})")
        print(f"model {os.path.basename(self.model)}, blocks of {TOKENS_PER_BLOCK} tokens\n")

        print("--- the first process computes the system prompt, publishes it and ends; the prompt stays pinned")
        events = queue.Queue()
        engine = self.start_engine("first", "Is the plant running?", 16, events, share=True)
        first = self.talk(["first"], events)["first"]
        if engine.wait() != 0:
            fail("the first engine failed")
        print()

        print(f"--- {len(QUESTIONS)} processes at once share it; {QUESTIONS[-1][0]} is killed after {KILL_AFTER} tokens")
        engines = {}
        kill = {}

        def on_token(label, n):
            if label == QUESTIONS[-1][0] and n == KILL_AFTER and not kill:
                before = self.used()
                sessions = {s["label"]: s for s in self.ask("sessions")}
                engines[label].send_signal(signal.SIGKILL)
                engines[label].wait()
                for _ in range(200):
                    if label not in {s["label"] for s in self.ask("sessions")}:
                        break
                    time.sleep(0.01)
                else:
                    fail("the killed process's session is still there")
                kill.update(before=before, after=self.used(), session=sessions[label])
                return "(killed by SIGKILL)"
            return None

        for label, question, longest in QUESTIONS:
            engines[label] = self.start_engine(label, question, longest, events)
        done = self.talk(list(engines), events, on_token)
        for label, process in engines.items():
            expected = -signal.SIGKILL if label == QUESTIONS[-1][0] else 0
            if process.wait() != expected:
                fail(f"{label} ended with {process.returncode}")
        if not kill:
            fail(f"{QUESTIONS[-1][0]} ended before it could be killed")
        self.report(first, done, kill)

    def report(self, first, done, kill):
        block = kill["session"]["block_bytes"]
        print("\n--- each process")
        head = ("process", "prompt", "from prefix", "first token", "tokens/s", "private", "shared")
        print("{:>8} {:>8} {:>12} {:>12} {:>9} {:>8} {:>7}".format(*head))
        for label, d in [("first", first), *done.items()]:
            print(f"{label:>8} {d['prompt_tokens']:>8} {d['shared_tokens']:>12} {d['first_token_seconds']:>10.2f} s "
                  f"{d['tokens_per_second']:>9.1f} {d['blocks_private']:>8} {d['blocks_shared']:>7}")
        warm = [d["first_token_seconds"] for d in done.values()]
        print(f"first token: {first['first_token_seconds']:.2f} s cold and alone, {min(warm):.2f} to {max(warm):.2f} s with "
              f"the shared prefix and {len(QUESTIONS)} processes on {os.cpu_count()} cores")
        back = kill["before"] - kill["after"]
        had = kill["session"]["blocks_private"] + kill["session"]["blocks_credit"]
        print(f"killed: {kill['session']['label']} had {had} blocks of its own; {mib(back)} came back at once")
        if back < kill["session"]["blocks_private"] * block:
            fail("the killed process's blocks did not come back")

        print("\n--- the ledger at the end")
        print(self.ctl("status").rstrip())
        print(self.ctl("map", "--colour", "always" if self.colour else "never").rstrip())
        print(self.ctl("check").rstrip())
        ledger = self.ask("status")["ledger"]
        if ledger["private"] or ledger["credit"]:
            fail("there are blocks in use although everybody has gone")

        token = block // TOKENS_PER_BLOCK
        static = (1 + len(QUESTIONS)) * CONTEXT * token
        print(f"\nreserved the usual way, {1 + len(QUESTIONS)} sessions of {CONTEXT} tokens would hold {mib(static)}; "
              f"the shared prompt, pinned, holds {mib(ledger['pinned'])}")
        valve = done["valve"]
        private = valve["blocks_private"] * TOKENS_PER_BLOCK
        unused = 100 * (1 - private / CONTEXT)
        print(f"{QUESTIONS[0][1]}: {valve['blocks_private']} blocks of its own, {private} tokens' worth: "
              f"{unused:.1f} % of a static reservation would have stayed unused "
              f"(beside {valve['blocks_shared']} shared blocks)")
        if private > 32:
            fail(f"the short answer holds {private} tokens' worth of blocks, more than 32")

    def stop(self):
        for child in self.children:
            if child.poll() is None:
                child.terminate()
        for child in self.children:
            try:
                child.wait(timeout=10)
            except subprocess.TimeoutExpired:
                child.kill()


def main():
    parser = argparse.ArgumentParser()
    for name in ("--bin", "--engine", "--model"):
        parser.add_argument(name, required=True)
    directory = tempfile.mkdtemp(prefix="kvbroker-demo.")
    demo = Demo(parser.parse_args(), directory)
    try:
        demo.run()
    finally:
        demo.stop()
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
