"""A server that talks like vLLM and knows nothing: standard library only, up in a tenth of a second.

python tests/fake_engine.py PORT [--name nano-k2.5] [--k 3] [--step-ms 2] [--tokens 12] [--role-ms 0] [--differ-at N] [--accept N] [--loop] [--lack usage|reasoning]
                            [--play LOG --seconds 6 [--until PATTERN] [--grow MB] [--spin] [--child TITLE]]

It answers every prompt with the same tokens, up to k + 1 in one chunk (every draft is accepted unless --accept says fewer), and counts steps as vLLM does.
With --play it first prints a recorded log at its own pace, reading as it goes, or stops in the middle of it for good.
"""

import argparse
import json
import re
import subprocess
import sys
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
parser.add_argument("--accept", type=int, help="drafted tokens kept in each step; all of them if not given")
parser.add_argument("--loop", action="store_true", help="say the same token for ever")
parser.add_argument("--lack", choices=["usage", "reasoning"], help="what the answers leave out")
parser.add_argument("--play", help="a recorded log to print first")
parser.add_argument("--seconds", type=float, default=6, help="time that playing takes")
parser.add_argument("--until", help="pattern: after the first line with it nothing more is printed, and nothing is served")
parser.add_argument("--grow", type=int, default=0, help="MB to read with every line that is played")
parser.add_argument("--spin", action="store_true", help="burn CPU where --until has stopped it, instead of sleeping")
parser.add_argument("--child", help="title of a child process in a session of its own")
args = parser.parse_args()
kept = args.k if args.accept is None else args.accept  # drafted tokens kept in each step
counts = {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0}


def metrics() -> str:
    "The counters that vLLM keeps while it speculates."
    lines = [f'vllm:spec_decode_num_{name}_total{{engine="0",model_name="{args.name}"}} {float(value)}' for name, value in counts.items()]
    lines += [f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="{args.name}",position="{i}"}} {float(counts["drafts"] * (i < kept))}' for i in range(args.k)]
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
        bodies = {"/health": "", "/v1/models": json.dumps({"data": [{"id": args.name}]}), "/metrics": metrics(), "/version": '{"version": "0.32.0"}'}
        self.reply(bodies[self.path]) if self.path in bodies else self.send_error(404)

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not asked["messages"]:
            return self.send_error(400, "no messages")
        total = min(args.tokens, asked["max_tokens"])
        ids = [99 if i == args.differ_at else 0 if args.loop else i for i in range(total)]
        usage = {"prompt_tokens": 5, "completion_tokens": total, "total_tokens": 5 + total}
        if not asked.get("stream"):
            time.sleep(total * args.step_ms / 1000)
            message = {"role": "assistant", "reasoning": "" if args.lack == "reasoning" else "easy", "content": "2 + 2 = 4"}
            return self.reply(json.dumps({"choices": [{"message": message, "finish_reason": "stop"}], **({} if args.lack == "usage" else {"usage": usage})}))
        self.reply("", "text/event-stream")
        self.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        time.sleep(args.role_ms / 1000)
        for start in range(0, total, kept + 1):
            time.sleep(args.step_ms / 1000)
            part = ids[start : start + kept + 1]
            if args.k:
                counts["drafts"] += 1
                counts["draft_tokens"] += args.k
                counts["accepted_tokens"] += kept
            where = "reasoning" if start < total // 2 else "content"
            self.event({"choices": [{"index": 0, "delta": {where: "".join(f"t{i} " for i in part)}, "token_ids": part, "finish_reason": None}]})
        self.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        if asked.get("stream_options", {}).get("include_usage") and args.lack != "usage":
            self.event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, body: dict):
        self.wfile.write(f"data: {json.dumps(body)}\n\n".encode())
        self.wfile.flush()


if args.child:
    subprocess.Popen([args.child, "600"], executable="/bin/sleep", start_new_session=True)
if args.play:
    with open(args.play, newline="") as log, open("/dev/zero", "rb") as disk:
        pieces = re.split(r"(?<=[\r\n])", log.read())
        for piece in pieces:
            sys.stdout.write(piece)
            sys.stdout.flush()
            disk.read(args.grow << 20)
            time.sleep(args.seconds / len(pieces))
            while args.until and re.search(args.until, piece):
                time.sleep(0 if args.spin else 1)
print("Resolved architecture: Fake", flush=True)
server = ThreadingHTTPServer(("127.0.0.1", args.port), Handler)
server.daemon_threads = True
print("Application startup complete", flush=True)
server.serve_forever()
