"""A server that talks like vLLM and knows nothing: standard library only, up in a tenth of a second.

python tests/fake_engine.py PORT [--name nano-k2.5] [--k 3] [--step-ms 2] [--tokens 12] [--role-ms 0] [--differ-at N]

It answers every prompt with the same tokens, up to k + 1 in one chunk (every draft is accepted), and counts steps as vLLM does.
"""

import argparse
import json
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

parser = argparse.ArgumentParser()
parser.add_argument("port", type=int)
parser.add_argument("--name", default="nano-k2.5")
parser.add_argument("--k", type=int, default=0, help="drafted tokens a step; 0 doesn't speculate")
parser.add_argument("--step-ms", type=float, default=2)
parser.add_argument("--tokens", type=int, default=12)
parser.add_argument("--role-ms", type=float, default=0, help="pause between the empty role chunk and the first token")
parser.add_argument("--differ-at", type=int, default=-1, help="token that comes out different")
args = parser.parse_args()
counts = {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0}


def metrics() -> str:
    "The counters that vLLM keeps while it speculates."
    lines = [f'vllm:spec_decode_num_{name}_total{{engine="0",model_name="{args.name}"}} {float(value)}' for name, value in counts.items()]
    lines += [f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="{args.name}",position="{i}"}} {float(counts["drafts"])}' for i in range(args.k)]
    names = [f"vllm:spec_decode_num_{name}" for name in counts] + ["vllm:spec_decode_num_accepted_tokens_per_pos"]
    return "\n".join([f"# TYPE {n} counter" for n in names] + lines) + "\n"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"  # a stream ends when the connection does

    def log_message(self, *_):
        pass

    def reply(self, body: str, kind: str = "application/json"):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(body.encode())
        self.wfile.flush()

    def do_GET(self):
        bodies = {"/health": "", "/v1/models": json.dumps({"data": [{"id": args.name}]}), "/metrics": metrics()}
        self.reply(bodies[self.path])

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not asked["messages"]:
            return self.send_error(400, "no messages")
        total = min(args.tokens, asked["max_tokens"])
        ids = [99 if i == args.differ_at else i for i in range(total)]
        usage = {"prompt_tokens": 5, "completion_tokens": total, "total_tokens": 5 + total}
        if not asked.get("stream"):
            time.sleep(total * args.step_ms / 1000)
            message = {"role": "assistant", "reasoning": "easy", "content": "2 + 2 = 4"}
            return self.reply(json.dumps({"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}))
        self.reply("", "text/event-stream")
        self.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        time.sleep(args.role_ms / 1000)
        for start in range(0, total, args.k + 1):
            time.sleep(args.step_ms / 1000)
            part = ids[start : start + args.k + 1]
            if args.k:
                counts["drafts"] += 1
                counts["draft_tokens"] += args.k
                counts["accepted_tokens"] += args.k
            where = "reasoning" if start < total // 2 else "content"
            self.event({"choices": [{"index": 0, "delta": {where: "".join(f"t{i} " for i in part)}, "token_ids": part, "finish_reason": None}]})
        self.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        if asked.get("stream_options", {}).get("include_usage"):
            self.event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, body: dict):
        self.wfile.write(f"data: {json.dumps(body)}\n\n".encode())
        self.wfile.flush()


print("Resolved architecture: Fake", flush=True)
server = ThreadingHTTPServer(("127.0.0.1", args.port), Handler)
server.daemon_threads = True
print("Application startup complete", flush=True)
server.serve_forever()
