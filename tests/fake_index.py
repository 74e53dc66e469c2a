"A package index on 127.0.0.1: some wheels, range requests, and the moods of a real one (busy, slow, without ranges)."
import base64
import hashlib
import http.server
import io
import json
import os
import random
import re
import threading
import time
import zipfile

import pytest

DEMO = b"x = 1  # \xc3\xa9\r\n"
HANG_UP = "hang up"
WHEEL = "demo-1.0-py3-none-any.whl"


def make_wheel(record_of=None, version="1.0", weights=6_000_000):
    "A wheel that can't be compressed, with two small sources; `record_of` falsifies what RECORD says."
    files = {"demo/a.py": DEMO, "demo/sub/b.py": b"y = 2\n" * 500, "demo/weights.bin": random.Random(0).randbytes(weights), "../evil.py": b"z = 3\n", "demo/version.py": version.encode()}
    def line(name, data): return f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip('=')},{len(data)}\n"
    record = "".join(line(n, (record_of or {}).get(n, d)) for n, d in files.items()) + f"demo-{version}.dist-info/RECORD,,\n"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as z:
        for name, data in {**files, f"demo-{version}.dist-info/RECORD": record.encode()}.items(): z.writestr(name, data)
    return buffer.getvalue()


def make_wheels(n):
    "Releases 1.0, 1.1, ... as `Index` takes them."
    return {f"demo-1.{i}-py3-none-any.whl": make_wheel(version=f"1.{i}", weights=700_000) for i in range(n)}


class Index(http.server.ThreadingHTTPServer):
    "Counts what was asked of it; `busy` maps the end of a path to the answers to give there first, as (status, body, headers) or `HANG_UP`."

    def __init__(self, wheels, ranges=True, form="json", name=WHEEL, yanked=(), busy=None, slow=0.0):
        super().__init__(("127.0.0.1", 0), Handler)
        self.wheels = {name: wheels} if isinstance(wheels, bytes) else wheels
        self.ranges, self.form, self.yanked, self.busy, self.slow = ranges, form, dict(yanked), busy or {}, slow
        self.sent, self.requests, self.open, self.most_open, self.lock = 0, [], 0, 0, threading.Lock()

    @property
    def url(self): return f"http://127.0.0.1:{self.server_port}/simple"

    def mood(self, path):
        "The next answer that is no wheel, if there is one for this path."
        with self.lock: return next((answers.pop(0) for end, answers in self.busy.items() if path.endswith(end) and answers), None)

    @property
    def lists(self): return [r for r in self.requests if "/simple/" in r]


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections stay open, as with a real index

    def setup(self):
        super().setup()
        with self.server.lock:
            self.server.open += 1
            self.server.most_open = max(self.server.most_open, self.server.open)

    def finish(self):
        super().finish()
        with self.server.lock: self.server.open -= 1

    def log_message(self, *_): pass

    def do_HEAD(self): self.do_GET()

    def do_GET(self):
        index = self.server
        index.requests.append(f"{self.command} {self.path} {self.headers.get('Range', '')}".strip())
        time.sleep(index.slow)
        if mood := index.mood(self.path): return self.answer(*mood) if mood != HANG_UP else self.hang_up()
        if self.path == "/simple/demo/": return self.answer(200, self.page())
        wheel = index.wheels.get(self.path.removeprefix("/files/"))
        if wheel is None: return self.answer(404, b"")
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not (asked and index.ranges): return self.answer(200, wheel)
        start, end = int(asked[1]), min(int(asked[2]) + 1, len(wheel))
        self.answer(206, wheel[start:end], {"Content-Range": f"bytes {start}-{end - 1}/{len(wheel)}"})

    def page(self):
        index, digests = self.server, {name: hashlib.sha256(wheel).hexdigest() for name, wheel in self.server.wheels.items()}
        if index.form == "html": return "".join(f'<a href="../../files/{n}#sha256={d}">{n}</a>' for n, d in digests.items()).encode()
        return json.dumps({"files": [{"filename": n, "url": f"../../files/{n}", "hashes": {"sha256": d}, "size": len(index.wheels[n]), "yanked": index.yanked.get(n, False)}
                                     for n, d in digests.items()]}).encode()

    def hang_up(self):
        self.close_connection = True

    def answer(self, code, body, headers={}):
        self.send_response(code)
        for key, value in {"Content-Length": len(body), **headers}.items(): self.send_header(key, str(value))
        self.end_headers()
        if self.command == "HEAD": return
        try:
            self.wfile.write(body)
            self.server.sent += len(body)
        except ConnectionError: pass


@pytest.fixture
def home(tmp_path, monkeypatch):
    "A project folder of its own, so that no test sees or fills the real cache."
    (tmp_path / "settings.ini").touch()
    monkeypatch.setenv("KIMI_SPEC_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "PIP_NO_INDEX", "PIP_EXTRA_INDEX_URL"): monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def serve(home, monkeypatch):
    "A function that starts an index and points pip's settings at it."
    running = []
    def start(*args, **kwargs):
        index = Index(*args, **kwargs)
        threading.Thread(target=index.serve_forever, daemon=True).start()
        running.append(index)
        monkeypatch.setenv("PIP_INDEX_URL", index.url)
        return index
    yield start
    for index in running:
        index.shutdown()
        index.server_close()
