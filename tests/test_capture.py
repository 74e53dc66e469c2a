"Traces taken through the profiler's API: of a stand-in that refuses, stalls and tears files in every way, and of a real engine."
import dataclasses
import functools
import gzip
import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections import namedtuple
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_profiler import FakeProfiler, kineto
from processes import wait_until

from kimi_spec.core.errors import KimiSpecError
from kimi_spec.core.paths import root
from kimi_spec.core.rig import load_rig
from kimi_spec.engines.engine import EngineDied
from kimi_spec.profiling.capture import Driver, Files, Live, address, capture, capture_rig, look, reserved, trace_end
from kimi_spec.profiling.profilers import CaptureError, with_profiler

CERTIFICATES = functools.cache(ssl.create_default_context)
SMALL = dict(steps=5, say=lambda line: None)


@pytest.fixture(autouse=True)
def impatient(request, monkeypatch):
    "The stand-in writes in a tenth of a second; the real engine gets its time. Certificates, which every client loads for 40 ms, are loaded once."
    monkeypatch.setattr(ssl, "create_default_context", CERTIFICATES)
    if "real" not in request.node.name:
        for name, seconds in dict(STILL=0.06, QUIET=0.1, UNSEEN=0.3, LINGER=0.1, LEAVING=1, PULSE=0.1, WORD=0.3).items(): monkeypatch.setattr(f"kimi_spec.profiling.capture.{name}", seconds)


def running(fake, rig):
    "What `capture` wants of a Server that runs a rig: the stand-in's address, the rig, a log."
    return SimpleNamespace(url=fake.url, rig=rig, log=Path("server.log"), output=lambda: "one line\nRuntimeError: Profiling is already in progress.")


@pytest.mark.parametrize("engine, ranks", [("vllm", 1), ("vllm", 4), ("sglang", 1), ("sglang", 4)])
def test_all_ranks_are_taken_whole(tmp_path, engine, ranks):
    with FakeProfiler(tmp_path, engine, ranks=ranks) as fake: taken = capture(fake.url, tmp_path, **SMALL)
    assert list(taken.files) == list(range(ranks)) and {trace_end(p).rank for p in taken.files.values()} == set(range(ranks))
    assert all(trace_end(p).whole for p in taken.files.values())
    assert taken.recorded == dict.fromkeys(range(ranks), 5 if engine == "vllm" else None)
    assert taken.bytes == sum(len(gzip.decompress(p.read_bytes())) for p in taken.files.values())
    assert fake.posts("/stop_profile") == ([{}] if engine == "vllm" else [])


def test_every_prefill_is_over_before_the_profiler_starts(tmp_path):
    with FakeProfiler(tmp_path, step_s=0.02) as fake: capture(fake.url, tmp_path, requests=3, **SMALL)
    order = [path for path, _ in fake.asked]
    assert order.index("/start_profile") == 3 and order[:3] == ["/v1/chat/completions"] * 3
    assert fake.since >= 9  # three chunks of three requests


def test_earlier_files_are_not_taken_for_new_ones(tmp_path):
    with FakeProfiler(tmp_path) as fake:
        first, second = (capture(fake.url, tmp_path, **SMALL) for _ in range(2))
    assert first.files[0] != second.files[0] and len(list(tmp_path.glob("*.gz"))) == 2


def test_a_release_without_a_bound_is_stopped_after_the_steps_were_seen(tmp_path):
    with FakeProfiler(tmp_path, release="0.10.0") as fake: taken = capture(fake.url, tmp_path, **SMALL)
    assert fake.posts("/start_profile") == [{}] and len(fake.posts("/stop_profile")) == 1
    assert taken.recorded[0] >= 5 and "knows no bound" in taken.how


def test_a_bound_that_does_not_hold_ends_all_the_same(tmp_path):
    with FakeProfiler(tmp_path, bounded=False) as fake: taken = capture(fake.url, tmp_path, **SMALL)
    assert 5 <= taken.recorded[0] < 200 and len(fake.posts("/stop_profile")) == 1


def test_an_unknown_release_is_said(tmp_path):
    lines = []
    with FakeProfiler(tmp_path, release="0.99.0") as fake: capture(fake.url, tmp_path, steps=5, say=lines.append)
    assert lines[0] == "the profiler of vllm 0.99.0 was not read: taken for that of 0.33.0"


def test_a_server_on_another_machine(tmp_path):
    "Its files can't be seen from here: what is said is where they are."
    with FakeProfiler(tmp_path / "there") as fake: taken = capture(fake.url, "/data/traces", here=False, **SMALL)
    assert taken.files == {} and "scp -r 127.0.0.1:/data/traces ." in str(taken)
    with FakeProfiler(tmp_path / "there", "sglang") as fake: taken = capture(fake.url, str(tmp_path / "x"), here=False, **SMALL)
    assert fake.posts("/start_profile")[0]["output_dir"] == str(tmp_path / "x") and taken.files == {}


@pytest.mark.parametrize("status, says", [(405, "is this the engine's own address, or that of a router"), (401, "it wants a key"), (403, "it wants a key"), (409, "its profiler runs already"), (500, "the reason is in the server's log"), (503, "busy")])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_what_a_refusal_means(tmp_path, engine, status, says):
    with FakeProfiler(tmp_path, engine, answers={"/start_profile": (status, "busy")}) as fake, pytest.raises(CaptureError, match=f"POST /start_profile with {status}") as refused: capture(fake.url, tmp_path, **SMALL)
    assert says in str(refused.value) and fake.posts("/stop_profile") == []


def test_a_server_that_was_not_started_to_be_profiled_learns_how(tmp_path):
    rig = load_rig("nano-vllm-base")
    for server, says in ((lambda f: f.url, "--profiler-config"), (lambda f: running(f, rig), "--profiler-config"), (lambda f: running(f, at_release(rig, "0.12.0")), "VLLM_TORCH_PROFILER_DIR=")):
        with FakeProfiler(tmp_path, profiler=False) as fake, pytest.raises(CaptureError, match="was not started to be profiled") as refused: capture(server(fake), tmp_path, **SMALL)
        assert says in str(refused.value)


def at_release(rig, release): return rig.model_copy(update={"engine": rig.engine.model_copy(update={"release": release})})


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_profile_under_way_is_left_alone(tmp_path, engine):
    with FakeProfiler(tmp_path, engine) as fake:
        fake.start({})
        with pytest.raises(CaptureError, match="its profiler runs already") as refused: capture(running(fake, load_rig(f"nano-{engine}-base")), tmp_path, **SMALL)
        assert fake.active and fake.posts("/stop_profile") == []
    assert f"curl -X POST {fake.url}/stop_profile" in str(refused.value)
    if engine == "sglang": assert "RuntimeError: Profiling is already in progress." in str(refused.value)


def test_a_missing_rank_is_waited_for_and_then_said(tmp_path):
    lines = []
    with FakeProfiler(tmp_path, "sglang", ranks=2, missing={1}) as fake, pytest.raises(CaptureError, match=r"no trace after \d+ s: .*TP-0.trace.json.gz \d+ bytes"): capture(fake.url, tmp_path, steps=5, timeout=0.7, say=lines.append)
    assert any("TP-0.trace.json.gz" in line for line in lines)  # progress
    assert lines[-1].startswith("stopping the profiler") and len(fake.posts("/stop_profile")) == 1


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_torn_file_is_named(tmp_path, engine):
    rig = load_rig(f"nano-{engine}-base")
    two = rig.model_copy(update={"launch": rig.launch.model_copy(update={"tensor_parallel": 2})})
    with FakeProfiler(tmp_path, engine, ranks=2, torn={1}, write_s=0.04) as fake, pytest.raises(CaptureError, match=r"(rank1|TP-1)\S+ stops in the middle, after \d[\d,]* bytes of JSON"): capture(running(fake, two), tmp_path, timeout=0.5, **SMALL)


def test_a_slow_writer_is_waited_for(tmp_path):
    with FakeProfiler(tmp_path, "sglang", ranks=2, write_s=0.6) as fake: taken = capture(fake.url, tmp_path, **SMALL)
    assert taken.seconds > 1 and all(trace_end(p).whole for p in taken.files.values())


def test_a_start_that_is_never_answered(tmp_path):
    with FakeProfiler(tmp_path, silent={"/start_profile"}) as fake, pytest.raises(CaptureError, match="no answer to POST /start_profile yet"): capture(fake.url, tmp_path, timeout=0.3, **SMALL)
    assert len(fake.posts("/stop_profile")) == 1  # it may have begun all the same


def test_requests_that_do_not_decode(tmp_path):
    with FakeProfiler(tmp_path, begin=False) as fake, pytest.raises(CaptureError, match="2 of 2 requests have no 3 chunks after 0 s"): capture(fake.url, tmp_path, timeout=0.3, **SMALL)
    with FakeProfiler(tmp_path, tokens=2) as fake, pytest.raises(CaptureError, match=r"the requests ended after \[2, 2\] chunks"): capture(fake.url, tmp_path, **SMALL)
    with FakeProfiler(tmp_path, answers={"/v1/chat/completions": (400, "no such model")}) as fake, pytest.raises(CaptureError, match="refused a request: 400 no such model"): capture(fake.url, tmp_path, **SMALL)
    assert fake.posts("/start_profile") == []


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_requests_that_end_before_the_steps(tmp_path, engine):
    "The profiler is told to stop, for it waits for steps that will never come; what there is, is taken, and said."
    with FakeProfiler(tmp_path, engine, tokens=40, bounded=False) as fake: taken = capture(fake.url, tmp_path, steps=100, requests=1, layers=8, ranks=1, say=lambda line: None)
    assert "the requests ended before" in taken.how and len(fake.posts("/stop_profile")) == 1
    assert engine == "sglang" or taken.recorded[0] < 100


def test_a_trace_too_large_is_refused_before_anything_is_asked(tmp_path, monkeypatch):
    rig = load_rig("k25-vllm-tp8")
    with FakeProfiler(tmp_path) as fake:
        with pytest.raises(CaptureError, match=r"about 2\.8 GB of JSON would come \(50 steps x 61 layers x 8 ranks.*take at most \d+ steps") as refused: capture(running(fake, rig), tmp_path, steps=50, say=print)
        assert fake.asked == []
        fewer = int(str(refused.value).split("take at most ")[1].split()[0])
        Usage = namedtuple("Usage", "total used free")
        monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage(1e12, 1e12, 1e6))
        with pytest.raises(CaptureError, match="has 0.00 GB free, and about .* GB will be written there"): capture(running(fake, rig), tmp_path, steps=fewer, say=print)
        assert fake.asked == []


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_load_of_others_is_enough(tmp_path, engine):
    with FakeProfiler(tmp_path, engine, step_s=0.02) as fake, Driver(look(fake.url), 1) as load:
        load.begun(5)
        taken = capture(fake.url, tmp_path, requests=0, **SMALL)
        assert len(fake.posts("/v1/chat/completions")) == 1 and list(taken.files) == [0]


def test_other_requests_are_said(tmp_path, monkeypatch):
    "What decodes beside ours belongs to the trace as well."
    monkeypatch.setattr("kimi_spec.profiling.capture.in_flight", lambda url, engine: (5, 100.0))
    with FakeProfiler(tmp_path) as fake: taken = capture(fake.url, tmp_path, **SMALL)
    assert taken.how.endswith("3 other requests decoded meanwhile")


def test_nobody_there(tmp_path):
    with FakeProfiler(tmp_path) as fake: pass
    with pytest.raises(EngineDied, match="is the server up"): capture(fake.url, tmp_path, **SMALL)
    with FakeProfiler(tmp_path, "neither", release="1") as fake, pytest.raises(CaptureError, match="neither /version as vLLM nor /get_server_info"): capture(fake.url, tmp_path, **SMALL)


def test_a_folder_that_the_server_can_not_be_told(tmp_path):
    rig = with_profiler(load_rig("nano-vllm-base"), tmp_path / "at-launch")
    with FakeProfiler(tmp_path) as fake, pytest.raises(CaptureError, match="was started to write traces into .*at-launch, and can't be told another folder"): capture(running(fake, rig), tmp_path, **SMALL)


CHILD = """
import functools, os, ssl, sys
from kimi_spec.cli import main
from kimi_spec.profiling import capture
capture.LEAVING = 0.3
ssl.create_default_context = functools.cache(ssl.create_default_context)
for url, folder in zip(sys.argv[1::2], sys.argv[2::2]):
    if child := os.fork(): print(child, flush=True)
    else: sys.argv = ["kimi-spec", "capture", "--url", url, "--out", folder, "--steps", "20"]; main()
    if not child: sys.exit(0)
for _ in sys.argv[1::2]: pid, status = os.wait(); print(pid, os.waitstatus_to_exitcode(status))
"""


def test_ctrl_c_at_every_stage(tmp_path):
    "A server that is left profiling fills its memory until it dies; so it is told to stop, and the requests go, wherever the command is interrupted."
    stages = {
        "asking": (dict(silent={"/v1/models"}), lambda f: f.got, 0), "first tokens": (dict(begin=False), lambda f: f.streams == 2, 0), "starting": (dict(silent={"/start_profile"}), lambda f: f.posts("/start_profile"), 1),
        "recording": (dict(step_s=0.1), lambda f: f.active, 1), "stopping": (dict(silent={"/stop_profile"}), lambda f: f.posts("/stop_profile"), 2), "writing": (dict(engine="sglang", ranks=2, missing={1}), lambda f: f.sessions and not f.active, 1)}
    with ExitStack() as opened:
        fakes = {name: opened.enter_context(FakeProfiler(tmp_path / name, **how)) for name, (how, _, _) in stages.items()}
        child = subprocess.Popen([sys.executable, "-c", CHILD, *(x for name, fake in fakes.items() for x in (fake.url, str(tmp_path / name)))], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        pids = {name: int(child.stdout.readline()) for name in fakes}
        def all_interrupted():
            for name in [name for name in pids if name not in sent and stages[name][1](fakes[name])]:
                os.kill(pids[name], signal.SIGINT)
                sent.add(name)
            return len(sent) == len(pids)
        sent = set()
        wait_until(all_interrupted, 60)
        out, err = child.communicate(timeout=30)
        for fake in fakes.values(): wait_until(lambda: fake.streams == 0)
        assert {int(pid): int(code) for pid, code in re.findall(r"^(\d+) (-?\d+)$", out, re.M)} == dict.fromkeys(pids.values(), 130)
        assert {name: len(fake.posts("/stop_profile")) for name, fake in fakes.items()} == {name: stops for name, (_, _, stops) in stages.items()}
        assert not any(fake.active for name, fake in fakes.items() if name != "stopping") and "Traceback" not in err


def test_nobody_listens_to_the_progress(tmp_path):
    "As in `kimi-spec capture ... | head -1`: the profiler is stopped all the same."
    def say(line): raise BrokenPipeError
    with FakeProfiler(tmp_path, "sglang", ranks=2, missing={1}) as fake:
        with pytest.raises(BrokenPipeError): capture(fake.url, tmp_path, steps=5, say=say)
        assert len(fake.posts("/stop_profile")) == 1


@pytest.mark.parametrize("requests", [0, 2])
def test_a_server_that_dies_after_the_stop(tmp_path, requests):
    with FakeProfiler(tmp_path, missing={0}) as fake, Driver(look(fake.url), 1) as load:
        load.begun(5)
        def die():
            wait_until(lambda: fake.posts("/stop_profile"))
            time.sleep(0.1)
            fake.die()
        threading.Thread(target=die, daemon=True).start()
        with pytest.raises(EngineDied, match="vllm 0.32.0 at .* is gone"): capture(fake.url, tmp_path, requests=requests, **SMALL)


ADDRESSES = ["localhost:8000", "ftp://localhost:8000", "http://", "http://[::1", "http://localhost:eight", "http://me:secret@localhost:8000", "http://localhost:8000/?key=secret", ""]

@pytest.mark.parametrize("url", ADDRESSES)
def test_what_is_no_address(url):
    with pytest.raises(CaptureError, match="a server's address should be like http://127.0.0.1:8000") as refused: capture(url)
    assert "secret" not in str(refused.value)


def test_addresses_that_are_some(tmp_path):
    assert [look_at(url) for url in ("http://[::1]:8000/v1/", "https://localhost", "http://127.0.0.2:1", "http://0.0.0.0:80", "http://10.0.0.9:80")] == [True, True, True, True, False]
    with FakeProfiler(tmp_path) as fake:
        assert look(fake.url + "/v1/").url == fake.url
        with pytest.raises(EngineDied, match="no answer from https://.*SSL"): capture(fake.url.replace("http:", "https:"), tmp_path, **SMALL)
        with pytest.raises(KimiSpecError, match="/v1/v1/models|/elsewhere/v1/models.*404"): capture(fake.url + "/elsewhere", tmp_path, **SMALL)


def look_at(url): return Live(address(url), "vllm", "0.32.0", "nano", 4096, 1, 8).here


PAGE = (200, "<html>Welcome</html>")

@pytest.mark.parametrize("engine, answers, says", [
    ("vllm", {"/v1/models": PAGE}, "expected JSON with str at data.0.id"), ("vllm", {"/v1/models": (200, '{"data": []}')}, "expected JSON with str"), ("vllm", {"/v1/models": (302, "")}, "sends on to 'https://elsewhere.example/'"),
    ("vllm", {"/start_profile": (307, "")}, "sent on to 'https://elsewhere.example/'"), ("vllm", {"/version": (200, '{"version": 32}')}, "expected JSON with str at version"), ("vllm", {"/version": PAGE}, "expected JSON with str at version"),
    ("vllm", {"/v1/chat/completions": PAGE}, r"the requests ended after \[0, 0\] chunks"), ("vllm", {"/v1/chat/completions": (200, "data: {torn\n\n")}, "broke off a stream"), ("vllm", {"/v1/chat/completions": (200, 'data: {"error": "out of memory"}\n\n')}, "out of memory"),
    ("vllm", {"/stop_profile": (500, "disk quota")}, "POST /stop_profile with 500: disk quota")])
def test_wrong_answers(tmp_path, engine, answers, says):
    with FakeProfiler(tmp_path, engine, answers=answers) as fake, pytest.raises(KimiSpecError, match=says): capture(fake.url, tmp_path, **SMALL)


@pytest.mark.parametrize("engine, path, answer", [("vllm", "/get_server_info", PAGE), ("vllm", "/v1/models", (200, '{"data": [{"id": "nano", "max_model_len": "many"}]}')), ("vllm", "/metrics", (200, "vllm:num_requests_running NaN\n")),
                                                  ("sglang", "/get_server_info", (200, '{"tp_size": "2", "version": 5, "nnodes": null, "pp_size": -1, "speculative_num_steps": []}'))])
def test_strange_answers_that_do_no_harm(tmp_path, engine, path, answer):
    with FakeProfiler(tmp_path, engine, answers={path: answer}) as fake: assert list(capture(fake.url, tmp_path, **SMALL).files) == [0]


@pytest.mark.parametrize("options, says", [
    (dict(steps=0), "steps should be 1 or more"), (dict(requests=-1), "requests should be 0 or more"), (dict(limit=float("nan")), "limit should be"), (dict(timeout=-1), "timeout should be"), (dict(limit=0), "raise it, not even one step fits"),
    (dict(steps=10**9), r"about 56,?\d{6}\.\d GB of JSON would come"), (dict(steps=5000, limit=1e15, here=False), "none lasts for 5000 steps"), (dict(prompt="\ud800"), "the prompt is no text"), (dict(prompt="数" * 1400), "leaves no room to decode"),
    (dict(folder="traces", here=False), "name it from / on"), (dict(folder="/proc/traces"), "/proc"), (dict(folder="/dev/null"), "no traces can be taken into /dev/null"), (dict(folder="a\0b"), "null byte"), (dict(engine="vlm"), "Nearest: 'vllm'")])
def test_what_can_not_be_asked_for(tmp_path, options, says):
    with FakeProfiler(tmp_path) as fake:
        with pytest.raises(KimiSpecError, match=says): capture(fake.url, **(dict(folder=tmp_path) | SMALL | options))
        assert fake.asked == []


def test_a_release_without_a_bound_needs_requests_that_count(tmp_path):
    with FakeProfiler(tmp_path, release="0.10.0") as fake, pytest.raises(CaptureError, match="keep at least one decoding"): capture(fake.url, tmp_path, requests=0, **SMALL)


def test_a_prompt_in_any_script(tmp_path):
    with FakeProfiler(tmp_path) as fake: capture(fake.url, tmp_path, prompt="数到一百 🐉", **SMALL)
    assert fake.posts("/v1/chat/completions")[0]["messages"][0]["content"] in ("数到一百 🐉 (0)", "数到一百 🐉 (1)")


def test_two_captures_at_once(tmp_path):
    "Of one server, the second is refused by the server; into one folder, by the folder."
    with FakeProfiler(tmp_path) as fake, FakeProfiler(tmp_path) as other, reserved(tmp_path, write=True):
        with pytest.raises(CaptureError, match="another capture waits for its files"): capture(other.url, tmp_path, **SMALL)
        assert other.asked == []
    with FakeProfiler(tmp_path) as fake: assert list(capture(fake.url, tmp_path, **SMALL).files) == [0]  # free again


def test_a_file_of_somebody_else(tmp_path):
    "Two files of one rank: said, and none is lost."
    with FakeProfiler(tmp_path) as fake:
        start = fake.start
        def together(body):
            (tmp_path / "a_rank0.1.pt.trace.json").write_text(kineto())
            (tmp_path / "folder.json").mkdir()
            (tmp_path / "gone.json").symlink_to("nowhere")
            return start(body)
        fake.start = together
        taken = capture(fake.url, tmp_path, **SMALL)
    assert "2 files are of 1 ranks" in taken.how and len(taken.others) == 1 and taken.files[0].name.startswith("dp0")


def test_a_file_that_is_written_again(tmp_path, monkeypatch):
    monkeypatch.setattr("kimi_spec.profiling.capture.STILL", 0)
    files, path = Files(tmp_path), tmp_path / "rank0.json"
    for text, whole in ((kineto(), True), (kineto()[:-5] + "     ", False), (kineto(), True)):  # as long each time
        time.sleep(0.02)
        path.write_text(text)
        files.look()
        assert [end.whole for end in files.look().values()] == [whole] and files.whole(1) is whole
    path.unlink()
    assert files.look() == {} and not files.whole(1)


def test_a_disk_that_fills(tmp_path, monkeypatch):
    Usage = namedtuple("Usage", "total used free")
    with FakeProfiler(tmp_path, "sglang", torn={0}) as fake:
        monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage(1e12, 0, 0 if fake.sessions and not fake.active else 1e12))
        with pytest.raises(CaptureError, match=r"is full, and .*TP-0.trace.json.gz \d+ bytes can't be written to the end"): capture(fake.url, tmp_path, **SMALL)


def test_a_folder_that_goes_away(tmp_path):
    with FakeProfiler(tmp_path / "x", "sglang", missing={0}) as fake:
        start = fake.start
        def together(body):
            shutil.rmtree(tmp_path / "x")
            return start(body | {"output_dir": str(tmp_path / "elsewhere")})
        fake.start = together
        with pytest.raises(CaptureError, match="can't be looked at any more: No such file"): capture(fake.url, tmp_path / "x", **SMALL)


def test_a_launch_that_names_its_folder_from_the_project(tmp_path):
    rig = with_profiler(load_rig("nano-vllm-base"), "data/cache/traces")
    with FakeProfiler(tmp_path) as fake: assert look(running(fake, rig)).folder == str(root() / "data/cache/traces")


def test_a_file_cut_anywhere_is_never_whole(tmp_path):
    text = kineto(steps=8).replace('"External id"', '"Sizes": [[1, 2]], "External id"').encode()  # a list, a key, a brace: as at the end of a whole file
    for name, data in (("a.json", text), ("a.json.gz", gzip.compress(text))):
        path = tmp_path / name
        path.write_bytes(data)
        assert trace_end(path) == dataclasses.replace(trace_end(path), whole=True, bytes=len(text), marks=8, what="")
        for cut in [*range(0, len(data) - 1, 37), *range(len(data) - 250, len(data) - 1, 3)]:  # the last byte of the JSON is the end of a line
            path.write_bytes(data[:cut])
            assert not trace_end(path).whole, cut
    path.write_bytes(gzip.compress(text)[:200] + b"\0" * 50 + gzip.compress(text)[250:])
    assert not trace_end(path).whole
    path.write_bytes(gzip.compress(text[:300]) + gzip.compress(text[300:]))  # two members
    assert trace_end(path).whole
    events = json.loads(text)["traceEvents"] * 9
    for name, ends in (("list.json", "[%s]\n"), ("plain.json", '{"traceEvents": [%s], "displayTimeUnit": "ms"}'), ("logs.json", '{"traceEvents": [%s], "INFO": ["as {Kineto} logs it]"], "traceName": "a\\\\b", "baseTimeNanoseconds": 1}')):
        (tmp_path / name).write_text(ends % ",".join(map(json.dumps, events)))
        assert trace_end(tmp_path / name).whole
    (tmp_path / "empty.json").write_text('{"schemaVersion": 1, "traceEvents": []}')
    assert trace_end(tmp_path / "empty.json").whole
    assert "can't be read" in trace_end(tmp_path / "nowhere.json").what


def test_a_mark_across_two_pieces(tmp_path):
    "Files are read in pieces of 1 MiB; a drafter's mark cut after its bracket is no step."
    mark = '"cat": "user_annotation", "name": "step[DRAFT bs=1]"'
    for at in range(30, 60):
        (tmp_path / "a.json").write_text(" " * (2**20 - at) + mark + mark.replace("DRAFT", "DECODE"))
        assert trace_end(tmp_path / "a.json").marks == 1, at


def test_a_real_engine(tmp_path):
    "SGLang on the CPU: whole steps of decoding, none of a prefill, and the server decodes on afterwards."
    taken = capture_rig("nano-sglang-base", tmp_path / "traces", steps=6, say=lambda line: None)
    events = json.loads(gzip.decompress(taken.files[0].read_bytes()))["traceEvents"]
    argmax = [e for e in events if e.get("name") == "aten::argmax"]
    assert len(argmax) == 6  # one sampling a step
    assert taken.files[0].name.endswith("-TP-0.trace.json.gz") and taken.recorded == {0: None}
    assert 0.5 < taken.bytes / taken.estimated < 2
