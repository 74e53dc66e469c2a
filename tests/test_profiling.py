"Traces with a known truth, and the split target against the whole one."
import gzip
import json

import numpy as np
import pytest
import torch

from kimi_spec.core.errors import KimiSpecError
from kimi_spec.core.reports import start_run
from kimi_spec.core.rig import list_rigs
from kimi_spec.profiling.tensor_parallel import load_target, measure, split, tiny_target
from kimi_spec.profiling.trace import TraceError, all_reduces, breakdown, read_trace, split_waiting, timeline


def event(name, tid, ts, dur, cat="cpu_op"): return dict(ph="X", cat=cat, name=name, pid=1, tid=tid, ts=ts, dur=dur)


def step_events(number, at, late):
    "One step of 200 us: attention 20-90 with an all-reduce from 50 (+ late), MLP 90-170 with one from 110; each blocks until the next operation."
    first = at + 50 + late
    return [event(f"decode step {number}", 1, at, 200, "user_annotation"), event("attention", 1, at + 20, 70, "user_annotation"), event("dense mlp" if number == 0 else "moe", 1, at + 90, 80, "user_annotation"),
            event("aten::mm", 1, at + 21, 29 + late), event("c10d::allreduce_", 1, first, 5), event("aten::detach", 1, first + 1, 2), event("gloo:all_reduce", 2, first + 3, at + 78 - first - 3, "user_annotation"),
            event("aten::add", 1, at + 80, 3), event("c10d::allreduce_", 1, at + 110, 5), event("gloo:all_reduce", 2, at + 112, 46, "user_annotation"), event("aten::add", 1, at + 160, 3)]


def write_trace(path, rank, late=(0, 0, 0), base=0):
    "Three steps, an all-reduce before and one after them, and events that are no spans."
    events = [event("c10d::allreduce_", 1, 10, 5), event("gloo:all_reduce", 2, 12, 50, "user_annotation"), event("c10d::allreduce_", 1, 5000, 5), event("gloo:all_reduce", 2, 5002, 50, "user_annotation")]
    for number, at in enumerate((1000, 1500, 2000)): events += step_events(number, at, late[number])
    events += [dict(ph="M", name="thread_name", pid=1, tid=2, ts=0, args={"name": "{\"odd\": ["}), dict(ph="i", name="mark", ts=3, s="t")]
    text = json.dumps(dict(traceEvents=events[::-1], distributedInfo=dict(backend="gloo", rank=rank, world_size=2), baseTimeNanoseconds=base))
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return read_trace(path)


@pytest.fixture
def traces(tmp_path): return [write_trace(tmp_path / "rank0.json", 0), write_trace(tmp_path / "rank1.json.gz", 1, late=(20, 0, 10))]


def test_known_shares(traces):
    table = breakdown(traces[0])
    assert table["all-reduce"].tolist() == [30 + 50] * 3 and table.total.tolist() == [200] * 3
    assert table.attention.tolist() == [40] * 3 and table["dense mlp"].tolist() == [30, 0, 0] and table.moe.tolist() == [0, 30, 30] and table.other.tolist() == [50] * 3
    assert np.allclose(table.drop(columns="total").sum(axis=1), table.total)
    late = breakdown(traces[1])
    assert late["all-reduce"].tolist() == [60, 80, 70] and late.attention.tolist() == [60, 40, 50]


def test_neither_event_alone_nor_both(traces):
    calls, e = all_reduces(traces[0]), traces[0].events
    assert len(calls) == 6 and calls.call.tolist() == [0, 1] * 3
    inside = e[e.start.between(1000, 1199)]
    total = {name: (inside.end - inside.start)[inside.name == name].sum() for name in ("gloo:all_reduce", "c10d::allreduce_")}
    assert total["gloo:all_reduce"] < (calls.end - calls.start)[:2].sum() and total["c10d::allreduce_"] == 10


def test_waiting_is_for_the_late_rank(traces):
    calls = split_waiting(traces).set_index(["rank", "step", "call"])
    assert [calls.waiting[0, step, 0] for step in range(3)] == [20, 0, 10] and calls.waiting.sum() == 30
    assert calls.moving[0, 0, 0] == calls.moving[1, 0, 0] == 10
    assert timeline(traces, 1).query("what == 'waiting'").duration.sum() == 0


def test_ranks_on_one_clock(tmp_path):
    a, b = write_trace(tmp_path / "a.json", 0, base=1_000_000), write_trace(tmp_path / "b.json", 1, base=1_005_000)
    assert split_waiting([a, b]).groupby("rank").waiting.sum().to_dict() == {0: 30, 1: 0}


def test_bad_traces(tmp_path, traces):
    whole = (tmp_path / "rank0.json").read_bytes()
    for cut in (0, 1, 1000, len(whole) - 1):
        (tmp_path / "cut.json").write_bytes(whole[:cut])
        with pytest.raises(TraceError, match="cut.json: not whole JSON"): read_trace(tmp_path / "cut.json")
    packed = gzip.compress(whole)
    for cut in (2, 12, len(packed) // 2, len(packed) - 1):
        (tmp_path / "cut.json.gz").write_bytes(packed[:cut])
        with pytest.raises(TraceError, match="cut.json.gz: the gzip file ends early"): read_trace(tmp_path / "cut.json.gz")
    fewer = json.loads(whole)
    fewer["traceEvents"].remove(next(e for e in fewer["traceEvents"] if e["name"] == "gloo:all_reduce" and e["ts"] > 1000))
    (tmp_path / "fewer.json").write_text(json.dumps(fewer))
    with pytest.raises(TraceError, match="6 all-reduces called in decode steps and 5 carried out"): breakdown(read_trace(tmp_path / "fewer.json"))
    (tmp_path / "none.json").write_text('{"traceEvents": []}')
    with pytest.raises(TraceError, match="no decode step is marked"): breakdown(read_trace(tmp_path / "none.json"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory): return tiny_target(tmp_path_factory.mktemp("tiny") / "target", layers=3)


def test_split_equals_whole_over_two_ranks(tiny, tmp_path):
    "Real processes: logits, tokens, counts, sizes, and the trace against the stopwatch."
    results = measure(tiny, tmp_path, ranks=2, steps=4)
    assert all(r["difference"] < 1e-4 for r in results) and results[0]["tokens"] == results[1]["tokens"]
    for r in results:
        assert len(r["profiled"]["steps"]) == 4 and len(r["profiled"]["calls"]) == 4 * 2 * 3
        assert {size for _, _, size in r["plain"]["calls"]} == {32 * 4}
    for rank, r in enumerate(results):
        trace = read_trace(tmp_path / "traces" / f"rank{rank}.json.gz")
        table = breakdown(trace)
        assert (trace.rank, trace.ranks, len(table), len(all_reduces(trace))) == (rank, 2, 4, 24) and (table >= 0).all(axis=None)
        stopwatch = sum(s for _, s, _ in r["profiled"]["calls"]) / sum(r["profiled"]["steps"])
        assert table["all-reduce"].sum() / table.total.sum() == pytest.approx(stopwatch, abs=0.1)


@pytest.mark.parametrize("ranks", [2, 4])
def test_parts_add_up(tiny, ranks):
    "Without processes: attention, dense MLP and experts of all ranks sum to the whole."
    x, position = torch.randn(1, 5, 32), torch.arange(5)[None]
    def parts_of(model):
        rope = model.model.rotary_emb(x, position)
        return [layer.self_attn(x, position_embeddings=rope, attention_mask=None)[0] for layer in model.model.layers] + [layer.mlp(x) for layer in model.model.layers]
    with torch.inference_mode():
        whole, sums = parts_of(load_target(tiny)), 0
        for rank in range(ranks):
            model = load_target(tiny)
            split(model, rank, ranks, all_reduce=lambda t: t)
            sums = [a + b for a, b in zip(sums, parts_of(model))] if sums else parts_of(model)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(sums, whole)) and len(whole) == 6
    assert model.model.layers[1].self_attn.q_b_proj.weight.shape[0] == 4 * 16 // ranks


def test_refusals(tiny, tmp_path):
    with pytest.raises(KimiSpecError, match="4 attention heads can't be split over 3 ranks"): split(load_target(tiny), 0, 3, None)
    with pytest.raises(KimiSpecError, match="kimi-spec nano train"): measure(tmp_path / "nothing", tmp_path)
    broken = tmp_path / "broken"
    broken.mkdir()
    for f in tiny.iterdir(): (broken / f.name).write_bytes(f.read_bytes()[: 2000 if f.suffix == ".safetensors" else None])
    with pytest.raises(KimiSpecError, match="does not load"): load_target(broken)


def test_kimi_arithmetic():
    from kimi_spec.profiling.allreduce import all_reduce_share, speed_up, what_if
    assert all_reduce_share(61, 48, 1e3 / 82.5) == pytest.approx(0.483, abs=5e-4)
    table = what_if()
    assert table.speed_up.tolist() == pytest.approx([1, 1.284, 1.942], abs=1e-3)
    assert table.tokens_a_second["LL or graph file"] == pytest.approx(82.5 * speed_up(table.share.iloc[0], 48.2 / 26.2))


def test_gpu_rigs_are_not_measured(tmp_path):
    from kimi_spec.profiling.allreduce import plan, profile
    for rig in list_rigs():
        gpu = [s for s in plan(rig) if s.needs == "gpu"]
        assert bool(gpu) == rig.hardware.needs_gpu and all(not s.runs_here and "start_profile" in s.command[-1] for s in gpu)
    run = start_run("k25-vllm-tp8", str(tmp_path), "profiling")
    assert profile(run) is None
    assert {(r.name, r.value, r.source) for r in run.records} == {("allreduce.calls_per_step", 122, "derived"), ("allreduce.message", 14336, "derived")}
