"A server with a profiler's API that writes traces the way the engines do, slowly, and as broken as asked for. Standard library only; runs in a thread."
import gzip
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def kineto(rank=0, ranks=1, steps=3, name="execute_context_0(0)_generation_2(2)"):
    "The text of a CPU trace as torch's profiler writes it: an annotation and two operators a step."
    events = []
    for i in range(steps):
        events += [{"ph": "X", "cat": "user_annotation", "name": name, "pid": 7, "tid": 7, "ts": 1000.5 + 100 * i, "dur": 90, "args": {"External id": 2 * i + 1}}] * bool(name)
        events += [{"ph": "X", "cat": "cpu_op", "name": op, "pid": 7, "tid": 7, "ts": 1001.5 + 100 * i, "dur": 40, "args": {"External id": 2 * i + 2}} for op in ("aten::mm", "_C::shm_allreduce")]
    head = {"schemaVersion": 1, "distributedInfo": {"backend": "gloo", "rank": rank, "world_size": ranks}, "baseTimeNanoseconds": 0, "traceEvents": events, "traceName": "trace.json"}
    return json.dumps(head, indent=2)


class FakeProfiler:
    "Talks like vLLM 0.32.0 (or SGLang 0.5.10), decodes a token every `step_s`, and profiles. As a context manager it has a `url`."

    def __init__(self, folder, engine="vllm", release=None, ranks=1, profiler=True, step_s=0.005, write_s=0.05, tokens=10_000, torn=(), silent=(), missing=(), answers=None, begin=True, bounded=True):
        self.folder, self.engine, self.ranks, self.profiler, self.step_s, self.write_s, self.tokens = Path(folder), engine, ranks, profiler, step_s, write_s, tokens
        self.release = release or {"vllm": "0.32.0", "sglang": "0.5.10"}[engine]
        self.torn, self.missing, self.silent, self.begin, self.bounded = set(torn), set(missing), set(silent), begin, bounded  # ranks that write half a file, or none; paths that never answer
        self.answers = answers or {}  # path -> (status, body) instead of the right one
        self.asked, self.got = [], []  # (path, body) of every POST; path of every GET
        self.steps, self.limit, self.active, self.since, self.busy = 0, 0, False, 0, threading.Lock()
        self.sessions, self.streams = 0, 0  # profiles begun, requests that decode now
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.0"

            def log_message(self, *_): pass

            def reply(self, status, body=b"", kind="application/json"):
                self.send_response(status)
                self.send_header("Content-Type", kind)
                if 300 <= status < 400: self.send_header("Location", "https://elsewhere.example/")
                self.end_headers()
                self.wfile.write(body if isinstance(body, bytes) else body.encode())
                self.wfile.flush()

            def do_GET(self):
                fake.got.append(self.path)
                while self.path in fake.silent and not fake.closed.wait(0.02): pass
                if self.path in fake.answers: return self.reply(*fake.answers[self.path])
                body = fake.get(self.path)
                self.reply(404, '{"detail":"Not Found"}') if body is None else self.reply(200, json.dumps(body))

            def do_POST(self):
                length = int(self.headers["Content-Length"] or 0)
                body = json.loads(self.rfile.read(length)) if length else {}
                fake.asked.append((self.path, body))
                while self.path in fake.silent and not fake.closed.wait(0.02): pass
                if self.path in fake.answers: return self.reply(*fake.answers[self.path])
                if self.path == "/v1/chat/completions": return self.stream(body)
                if self.path == "/start_profile": return self.reply(*fake.start(body))
                if self.path == "/stop_profile": return self.reply(*fake.stop())
                self.reply(404, '{"detail":"Not Found"}')

            def stream(self, body):
                self.reply(200, kind="text/event-stream")
                fake.streams += 1
                try:
                    while not fake.begin and not fake.closed.wait(0.02): self.send(b": still waiting")
                    for i in range(min(fake.tokens, body["max_tokens"])):
                        time.sleep(fake.step_s)
                        if fake.closed.is_set(): return  # dead: no end of the stream
                        fake.step()
                        self.send(f'data: {json.dumps({"choices": [{"index": 0, "delta": {"content": f"t{i} "}}]})}'.encode())
                    self.send(b"data: [DONE]")
                except OSError: pass  # its client has left
                finally: fake.streams -= 1

            def send(self, line):
                self.wfile.write(line + b"\n\n")
                self.wfile.flush()

        self.closed = threading.Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_): self.die()

    def die(self):
        "Refuse connections and break off what is under way."
        self.closed.set()
        self.server.shutdown()
        self.server.server_close()

    def posts(self, path):
        return [body for p, body in self.asked if p == path]

    def get(self, path):
        if path == "/v1/models": return {"data": [{"id": "nano", "max_model_len": 4096}]}
        if path == "/version" and self.engine == "vllm": return {"version": self.release}
        if path in ("/get_server_info", "/server_info") and self.engine == "sglang": return {"version": self.release, "tp_size": self.ranks, "internal_states": [{}]}

    def step(self):
        with self.busy:
            self.steps += 1
            if self.active and self.limit and self.steps - self.since >= self.limit: self.write()

    def start(self, body):
        if not self.profiler: return 404, '{"detail":"Not Found"}'
        with self.busy:
            if self.active and self.engine == "vllm": return 409, '{"error":{"message":"A profiling session is already active. Call /stop_profile before starting another session."}}'
            if self.active: return 500, "Internal Server Error"
            self.active, self.since, self.sessions = True, self.steps, self.sessions + 1
            self.limit = (body.get("max_iterations") or body.get("num_steps") or 0) * self.bounded
            self.folder = Path(body.get("output_dir") or self.folder)
        return 200, "Start profiling.\n" if self.engine == "sglang" else ""

    def stop(self):
        with self.busy:
            if not self.active: return (500, "Internal Server Error") if self.engine == "sglang" else (200, "")
            self.write()
        return 200, ""

    def write(self):
        "Every rank's file, growing; decoding waits as it does in an engine."
        self.active, count = False, self.limit or self.steps - self.since
        self.folder.mkdir(parents=True, exist_ok=True)
        mark = re.match(r"0\.5\.(\d+)", self.release) if self.engine == "sglang" else None
        name = "execute_context_0(0)_generation_2(2)" if self.engine == "vllm" else "step[DECODE bs=2]" if mark and int(mark[1]) >= 11 else ""
        for rank in set(range(self.ranks)) - self.missing:
            data = gzip.compress(kineto(rank, self.ranks, count, name).encode())
            data = data[: len(data) // 2] if rank in self.torn else data
            called = f"dp0_pp0_tp{rank}_dcp0_ep{rank}_rank{rank}.{self.sessions}00.pt.trace.json.gz" if self.engine == "vllm" else f"179600{self.sessions}.5-TP-{rank}.trace.json.gz"
            with (self.folder / called).open("wb") as f:
                for part in range(4):
                    f.write(data[part * len(data) // 4 : (part + 1) * len(data) // 4])
                    f.flush()
                    time.sleep(self.write_s / 4)
