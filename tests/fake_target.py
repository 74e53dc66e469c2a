"A served target whose every answer is known: it talks like vLLM or SGLang, tokenises as the nano target does, and has the moods of a real server."
import json
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tokenizers import Tokenizer

from kimi_spec.core.paths import root

TOKENIZER = Tokenizer.from_file(str(root() / "data" / "nano" / "k2.5" / "target" / "tokenizer.json"))
GONE, BROKEN = "gone", "broken"  # no answer at all; a stream without its end
CONTEXT = 512


def prompt_ids(asked): return encode("".join(f"<|im_{m['role']}|>{m['role']}<|im_middle|>{m['content']}<|im_end|>" for m in asked["messages"]) + "<|im_assistant|>assistant<|im_middle|>")
def encode(text): return TOKENIZER.encode(text, add_special_tokens=False).ids


class Target(ThreadingHTTPServer):
    """`says` maps a question to (reasoning, content); `moods` a question to what happens to it, one after the other, before it is answered: GONE, BROKEN or a status code.
    `ids` tells token ids, as vLLM does; `shift` is added to each; `count` to the number of tokens in the usage."""
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, says=None, moods=None, ids=True, shift=0, count=0, delay=0.0, dies_after=None, name="nano-k2.5"):
        self.says, self.moods, self.ids, self.shift, self.count, self.delay, self.name = says or {}, {k: list(v) for k, v in (moods or {}).items()}, ids, shift, count, delay, name
        self.left, self.asked, self.bodies, self.lock = dies_after, Counter(), [], threading.Lock()
        super().__init__(("127.0.0.1", 0), Handler)

    def __enter__(self):
        threading.Thread(target=self.serve_forever, kwargs=dict(poll_interval=0.05), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    @property
    def url(self): return f"http://127.0.0.1:{self.server_port}"

    @property
    def dead(self): return self.left is not None and self.left <= 0

    def handle_error(self, *_): pass

    def mood(self, question):
        "What happens now; None for an answer."
        with self.lock:
            self.asked[question] += 1
            if self.left is not None: self.left -= 1
            if self.left is not None and self.left < 0: return GONE
            moods = self.moods.get(question)
            return moods.pop(0) if moods else None


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_): pass

    def reply(self, body, status=200):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        if self.server.dead: return
        self.reply(json.dumps(dict(data=[dict(id=self.server.name, max_model_len=CONTEXT)])).encode())

    def do_POST(self):
        target, asked = self.server, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        target.bodies.append(asked)
        question = asked["messages"][-1]["content"]
        mood = target.mood(question)
        if mood == GONE: return
        if isinstance(mood, int): return self.reply(b"in a mood", mood)
        if not target.ids and len(prompt_ids(asked)) + asked["max_tokens"] >= CONTEXT: return self.reply(b"more than the context", 400)  # as SGLang has it
        time.sleep(target.delay)
        self.reply(self.stream(target, asked, question, mood))

    def stream(self, target, asked, question, mood):
        reasoning, content = target.says.get(question, (f"The user says: {question}", f"I heard {question}"))
        prompt = prompt_ids(asked)
        whole = encode(f"<think>{reasoning}</think>{content}<|im_end|>")
        ids = whole[:asked["max_tokens"]]
        if len(ids) < len(whole):
            reasoning, _, content = TOKENIZER.decode(ids, skip_special_tokens=True).removeprefix("<think>").partition("</think>")
        told = dict(token_ids=[i + target.shift for i in ids]) if target.ids else {}
        field = "reasoning" if target.ids else "reasoning_content"
        usage = dict(prompt_tokens=len(prompt), completion_tokens=len(ids) + target.count)
        chunks = [dict(choices=[dict(index=0, delta=dict(role="assistant", content=""))]) | (dict(prompt_token_ids=prompt) if target.ids else {}), dict(choices=[dict(index=0, delta={field: reasoning})]),
                  dict(choices=[dict(index=0, delta=dict(content=content)) | told]), dict(choices=[dict(index=0, delta={}, finish_reason="stop" if len(ids) == len(whole) else "length")]), dict(choices=[], usage=usage)]
        events = [f"data: {json.dumps(c)}\n\n".encode() for c in chunks]
        return b"".join(events[:2] if mood == BROKEN else [*events, b"data: [DONE]\n\n"])
