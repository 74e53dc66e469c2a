"The smoke test against a stand-in that can be wrong in every way a server can."
import contextlib
import json
import os
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from kimi_spec.core.paths import root
from kimi_spec.core.records import Records
from kimi_spec.core.rig import load_rig
from kimi_spec.engines import client, metrics, smoke as room
from kimi_spec.engines.engine import Command, EngineDied
from kimi_spec.engines.server import Server, wait_ready
from kimi_spec.engines.smoke import State, judge, record_verdict, smoke_rig

RIG, BASE = load_rig("nano-vllm"), load_rig("nano-vllm-base")


@pytest.fixture
def fake(tmp_path):
    "A function that starts a stand-in engine."
    started = []
    def start(*options):
        server = Server(RIG, tmp_path / f"{len(started)}.log")
        server.command = Command([sys.executable, str(root() / "tests" / "fake_engine.py"), str(server.port), *options])
        server.start()
        started.append(server)
        wait_ready([server], say=lambda line: None)
        return server
    yield start
    for server in started: server.stop()


@pytest.mark.parametrize("options, state, reason", [
    (["--k", "3"], State.WORKS, "accept length 4.00"), (["--k", "3", "--accept", "1"], State.WORKS, "accept length 2.00"), (["--k", "3", "--accept", "0"], State.IDLE, "0 of 864 drafted tokens accepted in 288 steps"),
    ([], State.IDLE, "counted no speculative step"), (["--k", "3", "--lack", "usage"], State.BROKEN, "no usage"), (["--k", "3", "--lack", "reasoning"], State.BROKEN, "no reasoning came"),
    (["--k", "3", "--loop", "--tokens", "60"], State.BROKEN, "24 of 24 answers repeat themselves"), (["--k", "3", "--name", "kimi"], State.BROKEN, "serves kimi, not nano-k2.5"), (["--k", "3", "--tokens", "0"], State.BROKEN, "usage")])
def test_each_fault_has_its_verdict_and_its_reason(fake, options, state, reason):
    verdict = judge(RIG, fake(*options).url, max_tokens=60 if "--loop" in options else 12)
    assert verdict.state == state
    assert any(reason in said for said in verdict.reasons), verdict.text
    assert verdict.text.startswith(f"nano-vllm: {state}\n")


def test_nobody_there_is_broken_and_a_dead_server_says_how_far_it_came(fake):
    assert "no answer from" in judge(RIG, "http://127.0.0.1:9").reasons[0]
    server = fake("--k", "3", "--step-ms", "30")
    threading.Timer(1.0, os.kill, (server.pid, signal.SIGKILL)).start()
    with pytest.raises(EngineDied, match=r"went away at concurrency 1, \d+ of 200 requests answered"): room.one_by_one(server.url, "nano-k2.5", [[{"role": "user", "content": "x"}]] * 200, 12)


@contextlib.contextmanager
def saying(models, chat):
    "An address that answers every question with the same text; gives its url and what was asked."
    asked = []
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_): pass
        def say(self, text): self.send_response(200), self.end_headers(), self.wfile.write(text.encode())
        def do_GET(self): self.say(models)
        def do_POST(self): asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))), self.say(chat)
    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown(), server.server_close()


MODELS = '{"data": [{"id": "nano-k2.5", "max_model_len": %d}]}'


@pytest.mark.parametrize("models, chat, reason", [
    ("<html>Welcome</html>", "", "/v1/models answered '<html>Welcome</html>', expected JSON with list at data"), ('{"data": [{"name": "nano-k2.5"}]}', "", "expected JSON with str at data.0.id"), ('["nano-k2.5"]', "", "expected JSON with list at data"),
    (MODELS % 512, '{"choices": []}', """/v1/chat/completions answered '{"choices": []}', expected JSON with dict at choices.0.message"""), (MODELS % 512, "ok", "expected JSON with dict at choices.0.message"),
    (MODELS % 512, '{"choices": [{"message": {"content": [4]}}]}', "expected JSON with str or NoneType at choices.0.message.content"), (MODELS % 512, '{"choices": [{"message": {"content": "4"}}], "usage": 9}', "expected JSON with dict or NoneType at usage")])
def test_an_address_that_is_no_engine_says_what_it_answered(models, chat, reason):
    with saying(models, chat) as (url, _):
        verdict = judge(RIG, url)
    assert verdict.state == State.BROKEN and reason in verdict.reasons[0] and url in verdict.reasons[0]


@pytest.mark.parametrize("context, most", [(512, 256), (262144, 512)])
def test_a_model_that_still_thinks_is_not_broken(context, most):
    message = {"reasoning": "Two and two, well", "content": None}
    with saying(MODELS % context, json.dumps({"choices": [{"message": message, "finish_reason": "length"}], "usage": {"prompt_tokens": 9, "completion_tokens": most, "total_tokens": 9 + most}})) as (url, asked):
        question = client.smoke(url, "nano-k2.5")
    assert asked[0]["max_tokens"] == most and question.finish == "length"
    answer = room.whole(question, [client.Answer(content="x")], RIG)[0]
    assert (answer.state, answer.good) == (State.WORKS, False) and answer.said.startswith(f"still thinking at token {most}")


def test_a_server_that_dies_between_two_prompts_is_broken(fake, monkeypatch):
    server, ask = fake("--k", "3", "--step-ms", "30"), room.run_level
    def dying(*args, **more):
        threading.Timer(0.3, os.kill, (server.pid, signal.SIGKILL)).start()
        return ask(*args, **more)
    monkeypatch.setattr(room, "run_level", dying)
    verdict = judge(RIG, server.url, max_tokens=12)
    assert verdict.state == State.BROKEN and "of 24 requests answered" in verdict.reasons[0]


def test_a_server_that_dies_after_its_last_answer_is_broken_too(fake, monkeypatch):
    server, ask = fake("--k", "3"), room.one_by_one
    def last(*args):
        answers = ask(*args)
        os.kill(server.pid, signal.SIGKILL)
        return answers
    monkeypatch.setattr(room, "one_by_one", last)
    verdict = judge(RIG, server.url, max_tokens=12)
    assert verdict.state == State.BROKEN and "no answer from" in verdict.reasons[0]


def test_what_fails_beside_the_server_costs_only_the_comparison(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(room, "cache_dir", lambda: tmp_path / "cache")
    with_drafter, without = fake("--k", "3"), fake()
    def text(verdict): return next(c for c in verdict.checks if c.name == "text")
    gone = judge(RIG, with_drafter.url, baseline=BASE, baseline_url="http://127.0.0.1:9", max_tokens=12)
    assert gone.state == State.WORKS and gone.acceptance.accept_length == 4.0 and text(gone).said.startswith("not compared: http://127.0.0.1:9 went away") and not text(gone).good
    kept = room.answers_file(BASE)
    kept.mkdir(parents=True)  # nothing can be written there
    full = judge(BASE, without.url, max_tokens=12)
    assert full.state == State.WORKS and text(full).said.startswith("not kept for comparison: ") and "directory" in text(full).said and list(kept.parent.iterdir()) == [kept]
    kept.rmdir(), kept.write_bytes(b"\xff\xfe")
    unreadable = judge(RIG, with_drafter.url, baseline=BASE, max_tokens=12)
    assert unreadable.state == State.WORKS and "nano-vllm-base.jsonl:1: no kept answer" in text(unreadable).said


def test_counters_that_run_behind_are_waited_for(fake, monkeypatch):
    read, texts = metrics.scrape, []
    def late(*args): return texts.append(read(*args)) or texts[max(0, len(texts) - 2)]  # always one reading old
    monkeypatch.setattr(metrics, "scrape", late)
    verdict = judge(RIG, fake("--k", "3").url, max_tokens=12)
    assert (verdict.state, verdict.acceptance.steps, verdict.acceptance.note) == (State.WORKS, 24 * 3, "")


def test_a_baseline_that_is_up_is_asked(fake):
    verdict = smoke_rig(RIG, fake("--k", "3").url, BASE, fake().url)
    assert "24 of 24 answers equal those of nano-vllm-base at http" in verdict.text


def test_answers_of_the_baseline_are_kept_and_found_again(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(room, "cache_dir", lambda: tmp_path / "cache")
    with_drafter, without = fake("--k", "3"), fake()
    assert "not compared: no answers of nano-vllm-base are kept" in judge(RIG, with_drafter.url, baseline=BASE, max_tokens=12).text
    assert "kept for comparison" in judge(BASE, without.url, max_tokens=12).text
    found = judge(RIG, with_drafter.url, baseline=BASE, max_tokens=12)
    assert found.state == State.WORKS and "24 of 24 answers equal those of nano-vllm-base" in found.text and "by token ids" in found.text
    assert "not compared" in judge(RIG, with_drafter.url, baseline=BASE, max_tokens=11).text
    changed = judge(RIG, fake("--k", "3", "--differ-at", "7").url, baseline=BASE, max_tokens=12)
    assert changed.state == State.BROKEN and "prompt 0 parts at 7: [7, 8, 9, 10] became [99, 8, 9, 10]" in changed.reasons[0]


def test_a_broken_baseline_leaves_no_answers(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(room, "cache_dir", lambda: tmp_path / "cache")
    assert judge(BASE, fake("--loop", "--tokens", "60").url, max_tokens=60).state == State.BROKEN
    assert not (tmp_path / "cache").exists()


def test_a_server_without_metrics_is_judged_without_them(fake):
    server = fake("--k", "3")
    sglang = RIG.model_copy(update={"engine": RIG.engine.model_copy(update={"name": "sglang", "release": "0.5.10"})})
    verdict = judge(sglang, server.url, max_tokens=12)
    assert verdict.state == State.WORKS and "speculation not known" in verdict.text


def test_the_verdict_is_recorded_whole(fake, tmp_path):
    records = Records(tmp_path / "records.jsonl", rig="nano-vllm", phase="launches")
    record_verdict(judge(RIG, fake("--k", "3", "--accept", "0").url, max_tokens=12), records)
    rows = records.frame()
    assert rows[rows.name == "smoke.verdict"].value.tolist() == ["works but speculation idle"]
    assert rows[rows.check == "speculation"].state.tolist() == ["works but speculation idle"]
    assert rows[rows.name == "smoke.accept_length"].value.tolist() == [1.0]
