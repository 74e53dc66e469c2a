"The smoke test against a stand-in that can be wrong in every way a server can."
import os
import signal
import sys
import threading

import pytest

from kimi_spec.core.paths import root
from kimi_spec.core.records import Records
from kimi_spec.core.rig import load_rig
from kimi_spec.engines import smoke as room
from kimi_spec.engines.engine import Command, EngineDied
from kimi_spec.engines.server import Server, wait_ready
from kimi_spec.engines.smoke import State, judge, record_verdict

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
