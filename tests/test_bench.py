"The bench against servers whose truth is known: what is counted, what is kept when a server dies, what is refused, what other tools' files become."
import json
import os
import signal
import subprocess
import sys
import time

import httpx
import pytest

from kimi_spec.core.errors import KimiSpecError
from kimi_spec.core.paths import root
from kimi_spec.core.records import Records
from kimi_spec.core.rig import load_rig
from kimi_spec.engines import bench
from kimi_spec.engines.bench import Level, read_level, record_level, run_level, sweep, sweep_rows, validity_row
from kimi_spec.engines.bench_results import ResultError, import_results, read_results
from kimi_spec.engines.client import Answer, compare
from kimi_spec.engines.engine import EngineDied
from kimi_spec.engines.metrics import scrape, server_facts
from kimi_spec.engines.mock_server import mock_server
from kimi_spec.engines.validity import alone

SAMPLES = root() / "tests" / "data" / "bench"
PROMPTS = [[{"role": "user", "content": f"prompt {i}"}] for i in range(16)]


@pytest.fixture
def high_ceiling(monkeypatch):
    "A client that is never the slow part, and costs no measurement."
    monkeypatch.setattr(bench, "ceiling", lambda c, refresh=False: bench.Ceiling(1e-9, 1e-9))


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_tokens_come_from_usage_and_reasoning_counts(field):
    "48 tokens in 16 chunks, half of them thinking, behind an empty role chunk."
    with mock_server(tokens=48, k=3, accepted=2, ttft_ms=40, itl_ms=2, field=field) as url:
        level = run_level(url, "nano-k2.5", PROMPTS[:4], 2, 64, warmup=1)
        steps = [line for line in scrape(url).splitlines() if line.startswith("vllm:spec_decode_num_drafts_total")]
    for a in level.answers:
        assert (a.completion_tokens, len(a.chunks), a.token_ids, a.prompt_tokens) == (48, 16, list(range(48)), 5)
        assert len(a.reasoning.split()) == len(a.content.split()) == 24
        assert a.ttft_ms >= 40 and a.start < a.chunks[0] < a.end
    assert (level.output_tokens, level.concurrency, level.errors) == (192, 2, [])
    assert float(steps[0].split()[-1]) == 5 * 16  # the warm-up request reached the server, but not the level


def test_a_level_of_real_text_can_be_compared():
    "Answers keep text and ids, so greedy outputs of two servers can be told apart."
    with mock_server(tokens=8) as one, mock_server(tokens=8, differ_at=5) as other:
        a, b = (run_level(url, "nano-k2.5", PROMPTS[:3], 3, 8).answers for url in (one, other))
    assert [row["parts at"] for row in compare(a, b)] == [5, 5, 5]
    assert all(row["identical"] for row in compare(a, a))


def test_answers_stay_in_the_order_of_the_prompts_and_prompts_are_gone_through_again(tmp_path):
    with mock_server(tokens=4) as url:
        level = run_level(url, "nano-k2.5", PROMPTS, 7, 4, requests=40, out=tmp_path / "level.jsonl")
    assert len(level.answers) == level.requests == 40
    starts = [a.start for a in level.answers]
    assert starts == sorted(starts)  # sent in order
    assert read_level(tmp_path / "level.jsonl") == level
    assert read_results(tmp_path / "level.jsonl") == [level]


def test_never_more_in_flight_than_asked():
    with mock_server(tokens=4, ttft_ms=50, engine="sglang") as url:
        watch = bench.LevelWatch(url, "sglang", interval=0.02, rig=load_rig("nano-sglang-base"))
        run_level(url, "nano-k2.5", PROMPTS, 3, 4, watch=watch)
    assert watch.peak_running == 3 and watch.peak_queued == 0


def test_capped_at_four_of_sixteen(high_ceiling):
    "Like SGLang's silent limit: the row says so."
    rig = load_rig("nano-sglang-base")
    with mock_server(engine="sglang", max_running=4, tokens=16, ttft_ms=150, itl_ms=10) as url:
        levels = sweep(url, "nano-k2.5", PROMPTS, (16,), 16, requests=32, rig=rig)
        facts = server_facts(url, "sglang")
    assert (levels[0].running, levels[0].queued, facts["max_running"]) == (4, 12, 4)
    assert [(row["concurrency"], row["running"], row["queued"]) for row in sweep_rows(levels)] == [(16, 4, 12)]
    assert any("capped at 4, 12 queued" in note.text for note in alone(validity_row(levels, rig, facts)))


def test_a_server_that_dies_ends_the_sweep_and_keeps_what_was_measured(tmp_path, high_ceiling):
    "The first level is whole, the second has the answers that were finished."
    records, done = Records(tmp_path / "records.jsonl", rig="nano-vllm", phase="bench"), []
    with mock_server(tokens=8, itl_ms=1, die_after=6 * 8 + 5 * 8 + 3) as url:
        with pytest.raises(EngineDied, match=r"went away at concurrency 2, [345] of 6 requests answered: .*; what was measured is in .*level-c2-r0.jsonl"):
            sweep(url, "nano-k2.5", PROMPTS, (1, 2), 8, requests=6, warmup=0, folder=tmp_path, done=lambda level: (done.append(level), record_level(level, records)))
    broken = read_level(tmp_path / "level-c2-r0.jsonl")
    assert [level.concurrency for level in done] == [1] and len(done[0].answers) == 6
    assert 3 <= len(broken.answers) <= 5 and broken.requests == 6 and len(broken.errors) == 1
    assert all(a.completion_tokens == 8 for a in broken.answers)
    assert [r.value for r in records if r.name == "throughput.output"] == [done[0].output_rate]


def test_an_interrupt_keeps_what_was_measured(tmp_path):
    "Ctrl-C in the middle of a level."
    out, ready = tmp_path / "level.jsonl", tmp_path / "ready"
    code = f"""
import pathlib, sys, threading
from kimi_spec.engines.bench import run_level
pathlib.Path({str(ready)!r}).touch()
run_level(sys.argv[1], "nano-k2.5", [[{{"role": "user", "content": "?"}}]] * 200, 1, 8, warmup=0, out=pathlib.Path({str(out)!r}))
"""
    with mock_server(tokens=8, ttft_ms=50) as url:
        client = subprocess.Popen([sys.executable, "-c", code, url], stderr=subprocess.PIPE, text=True, cwd=root())
        asked = lambda: httpx.get(f"{url}/metrics", trust_env=False).text
        while "vllm:num_requests_running{model_name=\"nano-k2.5\"} 1.0" not in asked():
            time.sleep(0.05)
        time.sleep(1)
        client.send_signal(signal.SIGINT)
        said = client.communicate(timeout=60)[1]
    assert client.returncode and "KeyboardInterrupt" in said
    level = read_level(out)
    assert 1 <= len(level.answers) < 200 and level.requests == 200


def test_a_silent_server_is_given_up(tmp_path):
    with mock_server(tokens=8, itl_ms=60_000) as url:
        with pytest.raises(EngineDied, match="went away at concurrency 1, 0 of 1 requests answered"):
            run_level(url, "nano-k2.5", PROMPTS[:1], 1, 8, warmup=0, silence=0.5)


def test_no_tokens_no_figures():
    "Chunks are never counted: without usage the ids are, and without both nothing is."
    with mock_server(tokens=9, k=2, usage=0) as url:
        assert run_level(url, "nano-k2.5", PROMPTS[:2], 1, 9).output_tokens == 18
    piece = b'data: {"choices": [{"index": 0, "delta": {"content": "two"}}]}\n\ndata: [DONE]\n\n'
    with pytest.raises(KimiSpecError, match="chunks are no tokens"):
        bench.read(bench.Wire(0.0, [(0.1, piece)], 0.2))


@pytest.mark.parametrize("event", [b'{"choices": [{"index": 0}]}', b'{"choices": [{', b'{"choices": ["text"]}', b'{"choices": [], "usage": {"total": 3}}'])
def test_an_event_that_cannot_be_read_is_quoted_and_the_level_is_kept(tmp_path, monkeypatch, event):
    "A proxy or another release may send anything; what was measured before is on the disk."
    good = b'data: {"choices": [{"index": 0, "delta": {"content": "one"}, "token_ids": [1]}]}\n\ndata: [DONE]\n\n'

    async def fetch(session, body, wire):
        wire.start, wire.end = 0.1, 0.3
        wire.pieces.append((0.2, good if b"prompt 0" in body else b"data: " + event + b"\n\n"))
    monkeypatch.setattr(bench, "fetch", fetch)
    with pytest.raises(bench.BadAnswer) as e:
        run_level("http://127.0.0.1:9", "nano-k2.5", PROMPTS[:2], 1, 8, warmup=0, out=tmp_path / "level.jsonl")
    assert "gave an answer that can't be read at concurrency 1, 1 of 2 requests answered" in str(e.value) and event.decode() in str(e.value)
    kept = read_level(tmp_path / "level.jsonl")
    assert [a.text for a in kept.answers] == ["one"] and len(kept.errors) == 1


def test_chunks_that_came_at_once_have_no_rate():
    "Two chunks in one read: no time lies between them."
    level = Level(2, 2, [Answer("", "a b", [], 5, 2, 0.0, [0.1, 0.1], 0.2), Answer("", "a b", [], 5, 2, 0.0, [0.1, 0.1], 0.2)])
    calm = Level(2, 2, [Answer("", "a b", [], 5, 2, 0.0, [0.1, 0.2], 0.2)] * 2, repeat=1)
    assert level.latency("tpot_ms")["mean"] == 0 and level.per_request_rate is None and calm.per_request_rate == pytest.approx(10)
    assert [row["tok/s of a request"] for row in sweep_rows([calm, level])] == [""]  # and not a mean of one repeat
    assert [row["ITL ms"] for row in sweep_rows([Level(1, 1, [Answer("", "a", [], 5, 1, 0.0, [0.1], 0.2)])])] == [""]


def test_a_refusal_is_no_death():
    with mock_server() as url, pytest.raises(KimiSpecError, match="refused a request.*answered 400: no messages") as e:
        run_level(url, "nano-k2.5", [[]], 1, 8, warmup=0)
    assert not isinstance(e.value, EngineDied)


def test_the_clients_own_ceiling_is_not_reported(tmp_path, monkeypatch):
    "A level that comes near it leaves a note, after the ceiling was measured a second time."
    asked = []
    monkeypatch.setattr(bench, "ceiling", lambda c, refresh=False: asked.append(refresh) or bench.Ceiling(1.0, 0.0))  # one answer a second
    with mock_server(tokens=4) as url:
        (level,) = sweep(url, "nano-k2.5", PROMPTS, (4,), 4)
    records = Records(tmp_path / "records.jsonl", rig="nano-vllm", phase="bench")
    record_level(level, records)
    assert asked == [False, True]
    assert [r.name for r in records] == ["validity.note"] and "near the client's own ceiling" in records.latest()[0].value
    (row,) = sweep_rows([level])
    assert row["output tok/s"] == "" and "ceiling" in row["doubt"]


def test_a_ceiling_is_kept_and_the_better_one_counts(project, monkeypatch):
    found = iter([bench.Ceiling(2e-3, 0.0), bench.Ceiling(1e-3, 0.0), bench.Ceiling(5e-3, 0.0)])
    monkeypatch.setattr(bench, "measure_ceiling", lambda c: next(found))
    assert [bench.ceiling(8, refresh=again).answer_s for again in (False, False, True, True)] == [2e-3, 2e-3, 1e-3, 1e-3]


def test_a_ceiling_is_measured_on_all_cores_though_the_client_is_bound(monkeypatch):
    "Bound to one core, client and mock would share it."
    seen, mine = [], os.sched_getaffinity(0)
    monkeypatch.setattr(bench, "run_level", lambda *a, **k: seen.append(os.sched_getaffinity(0)) or Level(1, 1, [Answer("", "a", [], 5, 1, 0.0, [0.1], 0.2)]))
    key = bench.this_client()
    try:
        os.sched_setaffinity(0, {min(mine)})
        bench.measure_ceiling(1)
        assert os.sched_getaffinity(0) == {min(mine)} and bench.this_client() == key
    finally:
        os.sched_setaffinity(0, mine)
    assert len(seen) == 4 and all(cores == bench.CORES for cores in seen)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="nothing to bind with one core")
def test_cores_are_given_back_whatever_ends(monkeypatch):
    "A thread may end between listing and binding, and the server may be gone: the client is never left on one core."
    cores, real = os.sched_getaffinity(0), os.sched_setaffinity

    def ending(pid, wanted):
        if pid == ends: raise ProcessLookupError(3, "No such process")
        real(pid, wanted)
    monkeypatch.setattr(os, "sched_setaffinity", ending)
    server = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ends = server.pid
    with bench.apart(server.pid, least=2) as words:
        assert words.endswith(f"client on core {max(cores)}") and os.sched_getaffinity(0) == {max(cores)}
    assert os.sched_getaffinity(0) == cores
    with pytest.raises(EngineDied), bench.apart(server.pid, least=2):
        server.communicate(b"\n")
        raise EngineDied("gone")
    assert os.sched_getaffinity(0) == cores
    with bench.apart(server.pid, least=2): assert os.sched_getaffinity(0) == {max(cores)}
    assert os.sched_getaffinity(0) == cores


def test_what_the_log_admits_is_said_once_with_the_line_of_the_file(tmp_path):
    "Two levels, one note, and the number that an editor shows: an earlier start and the command stand above."
    log = tmp_path / "nano-vllm-server.log"
    before = "WARNING Custom allreduce is disabled\n$ vllm serve\n"
    log.write_text(before + "INFO ready\nWARNING Custom allreduce is disabled\n")
    server = type("Started", (), {"log": log, "log_start": len(before), "output": lambda self: log.read_text()[len(before):]})()
    levels = [Level(c, 1, [Answer("", "a b", [], 5, 2, 0.0, [0.1, 0.2], 0.2)]) for c in (1, 2)]
    records = Records(tmp_path / "records.jsonl", rig="nano-vllm", phase="bench")
    said = bench.record_validity(levels, load_rig("nano-vllm"), {}, records, bench.numbered(server), "logs/nano-vllm-server.log")
    assert [(c, note.evidence[:28]) for c, note in said if note.kind == "all_reduce"] == [(None, "logs/nano-vllm-server.log:4:")]
    assert [r.labels.get("concurrency") for r in records if r.labels["kind"] == "all_reduce"] == [None]
    assert {c for c, note in said if note.kind == "few"} == {1, 2}


def test_a_measured_ceiling_falls_with_the_length_of_answers():
    most = bench.measure_ceiling(4, requests=60)
    assert most.rate(4) >= most.rate(64) > 0


@pytest.mark.parametrize("file, tool, concurrency", [("vllm-bench-serve.json", "vllm bench serve", [4]), ("sglang-bench-serving.jsonl", "sglang.bench_serving", [2, 4]),
                                                     ("guidellm.json", "guidellm", [4]), ("aiperf.json", "aiperf", [4])])
def test_results_of_real_tools_agree_with_the_truth(file, tool, concurrency):
    "8 requests of 48 tokens: rates follow from each other, and every latency has its three figures."
    levels = read_results(SAMPLES / file)
    assert [(level.tool, level.concurrency, level.requests, level.errors) for level in levels] == [(tool, c, 8, 0) for c in concurrency]
    for level in levels:
        value = {(name, labels.get("stat")): v for name, v, _, labels in level.figures}
        # guidellm's means over time differ a little from tokens / requests
        assert value["throughput.output", None] / value["throughput.requests", None] == pytest.approx(48, rel=0.01)
        for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
            assert 0 < value[f"latency.{name}", "median"] <= value[f"latency.{name}", "p99"] and value[f"latency.{name}", "mean"] > 0
        assert 90 < value["latency.e2e_ms", "mean"] < 200  # 110 is true
        assert 0.8 < value["latency.tpot_ms", "mean"] < 2.4  # 1.91 is true; SGLang's client misses the reasoning half


def test_percent_and_fractions_of_vllm_end_in_the_same_scale():
    (level,) = read_results(SAMPLES / "vllm-bench-serve.json")
    value = {(name, labels.get("position")): v for name, v, _, labels in level.figures}
    assert value["acceptance.rate", None] == pytest.approx(2 / 3) and value["acceptance.accept_length", None] == 3
    assert [value["acceptance.unconditional", i] for i in (1, 2, 3)] == [1, 1, 0]
    assert value["spec.steps", None] == 128


def test_imported_files_become_records(project):
    "All in one run, with their tool and repeats told apart."
    files = [SAMPLES / name for name in ("vllm-bench-serve.json", "vllm-bench-serve.json", "sglang-bench-serving.jsonl")]
    import_results("nano-vllm", files, say=lambda line: None)
    (path,) = (project / "data" / "runs" / "nano-vllm").glob("*/records.jsonl")
    rows = [(r.labels["tool"], r.labels["concurrency"], r.labels["repeat"]) for r in Records(path) if r.name == "throughput.output"]
    assert rows == [("vllm bench serve", 4, 0), ("vllm bench serve", 4, 1), ("sglang.bench_serving", 2, 0), ("sglang.bench_serving", 4, 0)]


def test_a_level_of_our_own_that_broke_off_is_imported_as_a_note(project, tmp_path):
    "Five of eight answers look like a whole fast level."
    answers = [Answer("", "a b", [], 5, 2, i, [i + 0.1, i + 0.2], i + 0.2) for i in range(5)]
    for name, level in {"errors": Level(1, 5, answers, ["a stream broke off before its end"]), "short": Level(1, 8, answers), "empty": Level(1, 8)}.items():
        bench.write_level(level, tmp_path / f"{name}.jsonl")
    said = []
    import_results("nano-vllm", [tmp_path / f"{name}.jsonl" for name in ("errors", "short", "empty")], say=said.append)
    (path,) = (project / "data" / "runs" / "nano-vllm").glob("*/records.jsonl")
    assert [(r.name, r.value) for r in Records(path)] == [("validity.note", f"not reported: {what}") for what in
                                                          ("5 of 5 requests answered: a stream broke off before its end", "5 of 8 requests answered", "0 of 8 requests answered")]
    assert sum("NOT REPORTED" in line for line in said) == 3


def test_imported_levels_are_judged_like_our_own(project, tmp_path):
    "Tool by tool: what is known of its counting, and what the file shows."
    files = [SAMPLES / name for name in ("vllm-bench-serve.json", "sglang-bench-serving.jsonl", "guidellm.json", "aiperf.json")]
    import_results("nano-sglang", files, say=lambda line: None)
    (path,) = (project / "data" / "runs" / "nano-sglang").glob("*/records.jsonl")
    notes = [(r.labels["kind"], r.evidence.split("/")[-1].split(":")[0]) for r in Records(path) if r.name == "validity.note" and r.labels.get("concurrency") == 4]
    of = lambda kind: [file for k, file in notes if k == kind]
    assert of("counting") == ["sglang-bench-serving.jsonl"] and of("client") == ["vllm-bench-serve.json", "sglang-bench-serving.jsonl"]
    assert of("few") == ["vllm-bench-serve.json", "sglang-bench-serving.jsonl", "guidellm.json", "aiperf.json"] == of("single")  # 8 requests at 4
    assert of("prefill") == ["sglang-bench-serving.jsonl", "guidellm.json", "aiperf.json"]  # vLLM's client takes the role chunk for the first token
    methods = {r.labels["tool"]: r.method for r in Records(path) if r.name == "acceptance.accept_length"}
    assert "average since the server's start" in methods["sglang.bench_serving"] and "average" not in methods["vllm bench serve"]
    data = json.loads((SAMPLES / "vllm-bench-serve.json").read_text()) | {"spec_decode_acceptance_length": 7.0}
    (tmp_path / "odd.json").write_text(json.dumps(data))
    with pytest.raises(ResultError, match="odd.json: an accept length lies between 1 and k"): read_results(tmp_path / "odd.json")


@pytest.mark.parametrize("text, message", [
    ("", "no level in it"),
    ("{", "line 1: neither JSON nor JSON lines"),
    ("[1, 2]", "the file is a list, expected an object"),
    ('{"a": 1}', "no result of a bench that is known here. Found the keys a. Expected one of"),
    ('{"level": {"concurrency": 1}}', ":1: no requests of a level"),
    ('{"metadata": {}, "benchmarks": []}', "metadata.guidellm_version is missing"),
    ('{"metadata": {"guidellm_version": "0.8.1"}, "benchmarks": []}', "no level in it"),
    ('{"aiperf_version": "0.13.0", "output_token_throughput": {"avg": "fast"}}', "output_token_throughput.avg is 'fast', expected a number"),
    ('{"endpoint_type": "openai", "total_token_throughput": 1, "output_throughput": true}', "output_throughput is True, expected a number"),
    ('{"endpoint_type": "openai", "total_token_throughput": 1, "output_throughput": 1, "request_thruput": 1}', "request_throughput is missing; nearest: 'request_thruput'"),
])
def test_what_is_no_result_is_named(tmp_path, text, message):
    file = tmp_path / "result.json"
    file.write_text(text)
    with pytest.raises(KimiSpecError) as e:
        read_results(file)
    assert message in str(e.value) and "result.json" in str(e.value)


def test_a_broken_line_writes_no_record(project, tmp_path):
    file = tmp_path / "two.jsonl"
    file.write_text((SAMPLES / "sglang-bench-serving.jsonl").read_text().splitlines()[0] + "\n{\n")
    with pytest.raises(ResultError, match="line 2"):
        import_results("nano-sglang", [file], say=lambda line: None)
    assert not list((project / "data").glob("runs/*"))


def test_failures_in_an_imported_file_are_a_note_and_no_figures(tmp_path):
    "aiperf ends with exit code 0 when its server was killed; the file knows better."
    data = json.loads((SAMPLES / "aiperf.json").read_text()) | {"error_request_count": {"unit": "requests", "avg": 56.0}}
    (tmp_path / "aiperf.json").write_text(json.dumps(data))
    records = Records(tmp_path / "records.jsonl", rig="nano-vllm", phase="bench")
    read_results(tmp_path / "aiperf.json")[0].record(records)
    assert [(r.name, r.value) for r in records] == [("validity.note", "not reported: 56 of 64 requests failed")]


def test_a_bench_leaves_its_records_and_levels(project, high_ceiling):
    "A whole bench of a rig against a server that runs already."
    nano = project / "data" / "nano"
    nano.mkdir()
    (nano / "eval_prompts.jsonl").write_text("".join(json.dumps({"messages": p}) + "\n" for p in PROMPTS))
    with mock_server(tokens=12, k=3, accepted=2, itl_ms=5) as url:
        rows = bench.bench("nano-vllm", url, (1, 4), requests=6, repeats=2, say=lambda line: None)
    (path,) = (project / "data" / "runs" / "nano-vllm").glob("*/records.jsonl")
    found = [(r.labels["concurrency"], r.labels["repeat"]) for r in Records(path) if r.name == "throughput.output"]
    assert found == [(1, 0), (4, 0), (1, 1), (4, 1)]
    assert {r.value for r in Records(path) if r.name == "level.accept_length"} == {3.0}
    assert [r.value for r in Records(path) if r.name == "spec.steps"] == [4 * 6 * 4]  # four levels, six requests, four steps each: no warm-up
    assert [row["accept length"] for row in rows] == [3.0, 3.0]
    assert len(list(path.parent.glob("logs/nano-vllm-c*-r*.jsonl"))) == 4


def test_levels_below_one_are_refused(project):
    with pytest.raises(KimiSpecError, match="concurrency starts at 1"):
        bench.bench("nano-vllm", "http://127.0.0.1:9", (0, 1))


def test_an_empty_level_has_no_rates():
    level = Level(4, 8)
    assert (level.output_rate, level.request_rate, level.per_request_rate, level.latency("ttft_ms"), level.doubt) == (0.0, 0.0, None, {}, "")
