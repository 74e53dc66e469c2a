import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trace_files import write_trace

from kimi_spec.profiling import breakdown as b
from kimi_spec.profiling import communication as c
from kimi_spec.profiling import kernels as k
from kimi_spec.profiling import synthetic as s
from kimi_spec.profiling.kineto import read_kineto
from kimi_spec.profiling.steps import Steps, find_steps, no_steps
from kimi_spec.profiling.trace import Trace, TraceError, events_table

SERVING = st.builds(
    s.Serving, engine=st.sampled_from(["vllm", "sglang"]), hardware=st.sampled_from([h for h in s.HARDWARE if h != "rocm"]), ranks=st.integers(1, 3), steps=st.integers(1, 4), layers=st.integers(1, 4), dense_layers=st.integers(0, 2),
    draft_tokens=st.integers(0, 4), prefill=st.integers(0, 2), mixed=st.integers(0, 1), requests=st.integers(1, 5), communication=st.sampled_from(["all-reduce", "fused", "sequence parallel", "dp attention"]), embedding_reduce=st.booleans(), own_stream=st.booleans(),
    overlap=st.sampled_from([0.0, 0.5, 1.0]), skew=st.sampled_from([0.0, 30.0, 400.0]), spread=st.floats(0, 0.3), pauses=st.integers(0, 2), graphs=st.sampled_from([True, False, "piecewise"]), cpu=st.booleans(), seed=st.integers(0, 10**6))


def laid_down_steps(truth, rank):
    own = [t[t["rank"] == rank].drop(columns="rank").reset_index(drop=True) for t in (truth.steps, truth.parts)]
    return Steps(*own, "laid down", 1.0, [])


def worst_share(truth, traces, steps):
    "Largest difference of any share of any step, in points."
    laid = truth.breakdown().set_index(["rank", "step"])
    worst = 0.0
    for trace, own in zip(traces, steps):
        table = b.breakdown(trace, own)
        np.testing.assert_allclose(table[b.COLUMNS].sum(axis=1), table.total, rtol=1e-9)
        right = laid.loc[trace.rank].reindex(columns=[*b.COLUMNS, "total"], fill_value=0)
        assert table.index.tolist() == right.index.tolist()
        shares = table[b.COLUMNS].div(table.total, axis=0) - right[b.COLUMNS].div(right.total, axis=0)
        worst = max(worst, float(shares.abs().to_numpy().max()) * 100)
    return worst


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(SERVING)
def test_shares_and_waiting_of_random_runs_are_those_laid_down(serving):
    truth = s.lay_down(serving)
    traces, steps = truth.traces(), [laid_down_steps(truth, r) for r in range(serving.ranks)]
    assert worst_share(truth, traces, steps) < 0.1
    hidden = truth.busy[truth.busy.category.isin(k.COLLECTIVES) & (truth.busy.step >= 0)]
    for trace, own in zip(traces, steps):
        laid = hidden[hidden["rank"] == trace.rank].groupby(["step", "category"])[["kernels", "ns", "overlapped"]].sum()
        found = b.busy(trace, own)
        np.testing.assert_allclose(found.loc[laid.index][["count", "busy", "overlapped"]].to_numpy(), laid.to_numpy() * [1, 1e-3, 1e-3], atol=1e-6)
    both = c.aligned(traces, steps)
    laid = truth.collectives[truth.collectives.step >= 0]
    assert len(both.calls) == len(laid) and not [n for n in both.notes if "clock" not in n]
    merged = both.calls.merge(laid, on=["rank", "start", "end"], suffixes=("", "_laid"))
    np.testing.assert_allclose(merged[["waiting", "moving"]].to_numpy(float), merged[["waiting_laid", "moving_laid"]].to_numpy(float) / 1e3, atol=1e-6)


@pytest.mark.parametrize("serving", [dict(steps=6, layers=5), dict(steps=6, layers=4, draft_tokens=3, engine="sglang", overlap=0.5, skew=100), dict(steps=5, layers=4, hardware="custom", draft_tokens=2, own_stream=True)])
def test_from_files_over_steps_to_shares(tmp_path, serving):
    truth = s.serving_traces(tmp_path, **serving, seed=11)
    traces = [read_kineto(p) for p in truth.paths]
    assert worst_share(truth, traces, [find_steps(t) for t in traces]) < 0.1


# --- the rule of who owns an instant, against one that looks at each instant

SPANS = st.lists(st.tuples(st.sampled_from(["_rms_norm_kernel", "fused_moe_kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)", "ncclDevKernel_AllGather_RING_LL(x)", "void deep_ep::intranode::dispatch<8>(x)", "Memcpy DtoD (Device -> Device)"]), st.integers(0, 40), st.integers(0, 12)), min_size=1, max_size=14)


def trace_of(names, starts, ends, **more):
    kinds = more.pop("kind", ["copy" if n.startswith("Mem") else "kernel" for n in names])
    return Trace(Path("rank0.json"), more.pop("rank", 0), more.pop("ranks", 1), events_table(dict(name=names, kind=kinds, start=starts, end=ends, **more)))


def steps_of(*spans):
    return Steps(pd.DataFrame([dict(step=i, kind="decode", start=a, end=z, partial=False) for i, (a, z) in enumerate(spans)]), no_steps("").parts, "by hand", 1.0, [])


@settings(max_examples=200, deadline=None)
@given(SPANS, st.integers(1, 20))
def test_every_instant_has_the_owner_that_the_rule_names(spans, cut):
    trace = trace_of([n for n, _, _ in spans], [a for _, a, _ in spans], [a + d for _, a, d in spans])
    table = b.breakdown(trace, steps_of((0, cut), (cut, 53)))
    ordered = sorted(spans, key=lambda x: x[1])  # stable, as the table of events is
    rank = lambda name: 2 if name.startswith("Mem") else 1 if name.startswith("nccl") or "deep_ep" in name else 0
    slow = {(step, column): 0 for step in (0, 1) for column in b.COLUMNS}
    for t in range(53):
        running = [n for n, a, d in ordered if a <= t < a + d]
        owner = min(running, key=rank, default=None)  # the first of the lowest rank
        slow[int(t >= cut), k.classify([owner])[0] if owner else "idle"] += 1
    assert {(step, column): round(table[column][step] * 1000) for step, column in slow} == slow


TREES = st.recursive(st.just([]), lambda inner: st.lists(st.tuples(st.integers(0, 3), inner, st.sampled_from(["aten::mm", "aten::add", "aten::topk", "attention", "my_op"])), max_size=3), max_leaves=14)


@settings(max_examples=150, deadline=None)
@given(TREES)
def test_a_cpu_thread_s_time_is_that_of_its_innermost_event(tree):
    rows, wanted = [], {column: 0 for column in b.COLUMNS}
    def lay(children, at, around):
        for gap, inside, name in children:
            wanted[around] += gap
            own = dict(zip(["aten::mm", "aten::add", "aten::topk", "attention", "my_op"], ["dense gemm", "norm and elementwise", "sampling", "attention", "unclassified" if around == "idle" else around]))[name]
            own = "attention" if around == "attention" else own
            start = at + gap
            end = lay(inside, start, own) + 1
            wanted[own] += 1
            rows.append((name, start, end))
            at = end
        return at
    end = lay(tree, 0, "idle")
    rows.append(("aten::neg", end, end + 1))
    wanted["norm and elementwise"] += 1
    names, starts, ends = zip(*rows)
    table = b.breakdown(trace_of(names, starts, ends, kind=["operator"] * len(rows), lane=[5] * len(rows)), steps_of((0, end + 1)))
    assert {column: round(table[column][0] * 1000) for column in b.COLUMNS} == wanted


# --- names

def test_an_all_to_all_of_tokens_hides_behind_a_product_and_hides_none():
    rows = [("void deep_ep::internode_ll::dispatch<true, 3, 10, 7168>(x)", 0, 40), ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", 10, 30)]
    table = b.breakdown(rank_trace(0, rows), steps_of((0, 40_000)))
    assert (table["moe dispatch"][0], table["dense gemm"][0]) == (20.0, 20.0)
    assert b.busy(rank_trace(0, rows), steps_of((0, 40_000))).loc[(0, "moe dispatch"), ["busy", "exposed", "overlapped"]].tolist() == [40.0, 20.0, 20.0]
    assert not any(k.communicates(["_fwd_kernel_ep_gather", "void vllm::moe::moe_align_block_size_kernel<int>(x)", "void deep_ep::layout::get_dispatch_layout<256, 32>"]))


def test_two_gpus_in_one_trace_are_two_timelines():
    rows = [("fused_moe_kernel", 0, 50, 0), (AR, 50, 100, 0), (AR, 0, 50, 1), ("fused_moe_kernel", 50, 100, 1), ("cudaLaunchKernel", 0, 1, -1)]
    names, starts, ends, devices = zip(*rows)
    both = trace_of(names, starts, ends, device=devices, kind=["kernel"] * 4 + ["call"], correlation=[1, 2, 3, 4, 3])
    with pytest.raises(TraceError, match=r"rank0.json holds kernels of 2 GPUs \(0, 1\), and a timeline is that of one; `split_by_device` makes a trace of each"): b.breakdown(both, b.window(both))
    apart = b.split_by_device(both)
    assert [(t.rank, t.ranks, t.events.name.tolist()) for t in apart] == [(0, 2, ["fused_moe_kernel", AR]), (1, 2, [AR, "cudaLaunchKernel", "fused_moe_kernel"])]
    assert [b.breakdown(t, b.window(t))[["all-reduce", "moe experts"]].iloc[0].tolist() for t in apart] == [[0.05, 0.05]] * 2
    assert b.split_by_device(apart[0]) == [apart[0]]


def test_idle_time_by_what_kept_the_gpu_waiting():
    truth = s.lay_down(s.Serving(ranks=1, steps=3, layers=3, graphs=False, seed=2))
    trace, steps = truth.traces()[0], laid_down_steps(truth, 0)
    by_cause, idle = b.idle_causes(trace, steps), b.gaps(trace, steps)
    pd.testing.assert_frame_equal(by_cause.stack()[lambda us: us > 0].rename_axis(["step", "cause"]).to_frame("us"), idle.groupby(["step", "cause"])[["us"]].sum().sort_index(key=lambda i: i.map(b.CAUSES.index) if i.name == "cause" else i))
    np.testing.assert_allclose(by_cause.sum(axis=1), b.sums(trace, steps).groupby(level="step").idle.sum() / 1e3)


def test_each_real_name_is_decided_by_the_rule_it_stands_under():
    names = [n for rule in k.rules() for n in rule.names]
    assert len(names) == len(set(names)) >= 300
    assert k.misplaced(k.rules()) == []
    assert {rule.category for rule in k.rules()} == set(k.CATEGORIES) - {"unclassified"}


def test_names_that_another_author_chose_are_classified_as_meant():
    "The synthetic runs' kernels were named without these rules."
    wrong = [(work, name) for engine in ("vllm", "sglang") for hardware in s.HARDWARE for work, name in s.kernel_names(engine, hardware).items() if "Generic" not in name and k.classify([name]) != [s.WORK[work][0]]]
    assert wrong == []


@pytest.mark.parametrize("text, says", [
    ("- {category: moe, from: x, match: [a]}", "rules.yaml:1: unknown category 'moe'. Nearest: 'moe gate'"),
    ("# comment\n- category: copy\n  from: x\n  match: ['a', '(b']", "rules.yaml:2: match: '(b' is no regular expression"),
    ("- category: copy\n  from: x\n  match: a", "rules.yaml:1: match: should be a list of texts; found 'a'"),
    ("- category: copy\n  match: [a]\n  form: x", "rules.yaml:1: unknown key of a rule 'form'. Nearest: 'from'"),
    ("- category: copy\n  from: x", "rules.yaml:1: match: missing or empty"), ("- a\n- - b", "rules.yaml:1: a rule is a mapping"), ("- {category: copy, from: x, match: [a]}\n- {", "rules.yaml:2"), ("- {category: copy, from: x, match: [a], communication: yes please}", "rules.yaml:1: communication: should be true or false; found 'yes please'"), ("", "a file of rules is a list; found NoneType")])
def test_a_bad_rule_is_said_with_its_place(tmp_path, text, says):
    (tmp_path / "rules.yaml").write_text(text)
    with pytest.raises(k.RuleError) as e: k.read_rules(tmp_path / "rules.yaml")
    assert says in str(e.value)


# --- messages, as a real trace of two GPUs writes them

def nccl_event(name, said, elements, out, ts, dur, size=2, dtype="Float", **args):
    message = {"Collective name": said, "In msg nelems": elements, "Out msg nelems": out, "Group size": size, "dtype": dtype, "In split size": "[]", "Out split size": "[]", "Process Group Name": "0", "Process Group Description": "default_pg", "Process Group Ranks": "[0, 1]"} if said else {}
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 40, "ts": ts, "dur": dur, "args": {"External id": 1, "device": 0, "stream": 40, "correlation": 7, **message, **args}}


def test_sizes_groups_and_bandwidths_are_those_worked_out_by_hand(tmp_path):
    signature = "(ncclDevComm*, unsigned long, ncclWork*)"
    events = [
        nccl_event(f"ncclKernel_Broadcast_RING_LL_Sum_int8_t{signature}", "broadcast", 53120, 53120, 4458676423385.774, 30.975),
        nccl_event(f"ncclKernel_AllReduce_RING_LL_Sum_float{signature}", "allreduce", 6637568, 6637568, 4458677009853.422, 2636.669),
        nccl_event("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "_allgather_base", 7168, 57344, 4458677020000.5, 12.5, size=8, dtype="BFloat16"),
        nccl_event("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "_reduce_scatter_base", 57344, 7168, 4458677030000.5, 12.5, size=8, dtype="BFloat16"),
        nccl_event("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", "allreduce", 7168, 7168, 4458677040000.5, 25.0, size=8, dtype="BFloat16"),
        nccl_event("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*)", "", 0, 0, 4458677050000.5, 10.0)]
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps({"schemaVersion": 1, "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 2}, "baseTimeNanoseconds": 1711964646000000000, "traceEvents": events}))
    trace = read_kineto(path)
    found = c.collectives(trace, b.window(trace))
    assert found.name.tolist() == ["broadcast", "all-reduce", "all-gather", "reduce-scatter", "all-reduce", "all-reduce"]
    assert found.bytes.tolist() == [212_480, 26_550_272, 114_688, 114_688, 14_336, -1]
    assert found.group_size.tolist() == [2, 2, 8, 8, 8, 8]
    assert found.bytes_from.tolist() == ["kernel"] * 5 + ["unknown"]
    by_hand = [6.8597, 10.0696, 9.17504 * 7 / 8, 9.17504 * 7 / 8, 0.57344 * 7 / 4, np.nan]  # bytes / us / 1000 times 1, 2 x 1/2, 7/8, 7/8, 2 x 7/8
    np.testing.assert_allclose(found.busbw.to_numpy(), by_hand, rtol=1e-4)
    assert b.breakdown(trace, b.window(trace))["all-reduce"].sum() == pytest.approx(2636.669 + 25.0 + 10.0)
    sizes = c.by_size(found).set_index("algorithm")
    assert sizes.loc["RCCL", "bytes"] == 14_336 and sizes.loc["custom, one stage", "bytes"] == -1 and np.isnan(sizes.loc["custom, one stage", "busbw"])


# --- ranks side by side

AR = "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(vllm::RankData*)"


def rank_trace(rank, calls, **more):
    names, starts, ends = zip(*calls)
    return trace_of(names, [a * 1000 for a in starts], [z * 1000 for z in ends], rank=rank, ranks=2, **more)


def test_an_odd_call_costs_only_its_own_kind():
    first = rank_trace(0, [(AR, 0, 20), ("ncclDevKernel_Broadcast_RING_LL(x)", 25, 30), (AR, 40, 50)])
    second = rank_trace(1, [(AR, 12, 20), (AR, 38, 50)])
    found = c.aligned([first, second], [b.window(first), b.window(second)])
    assert found.calls[["rank", "call", "waiting", "moving", "last"]].values.tolist() == [[0, 0, 12.0, 8.0, 1], [0, 1, 0.0, 10.0, 0], [1, 0, 0.0, 8.0, 1], [1, 1, 2.0, 10.0, 0]]
    assert found.notes == ["step 0: rank 0 made 1, rank 1 made 0 broadcast calls; those that can't be matched are left out"]


def test_sequence_numbers_find_the_same_call_when_the_count_does_not():
    "Rank 1's trace begins one call later."
    more = dict(group=["2"] * 3, group_size=[2] * 3, collective=["allreduce"] * 3)
    first = rank_trace(0, [("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)", t, t + 10) for t in (0, 20, 40)], seq=[7, 8, 9], **more)
    second = rank_trace(1, [("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)", t + 4, t + 10) for t in (20, 40, 60)], seq=[8, 9, 10], **more)
    found = c.aligned([first, second], [b.window(first), b.window(second)]).calls
    assert found[found["rank"] == 0][["seq", "waiting", "moving"]].values.tolist() == [[8, 4.0, 6.0], [9, 4.0, 6.0]]
    assert found[found["rank"] == 1].waiting.tolist() == [0.0, 0.0]


def test_waiting_never_exceeds_the_call():
    "A rank whose call ends before another's begins saw another clock."
    first, second = rank_trace(0, [(AR, 0, 10)]), rank_trace(1, [(AR, 500, 510)])
    found = c.aligned([first, second], [b.window(first), b.window(second)])
    assert found.calls.waiting.tolist() == [10.0, 0.0] and found.calls.moving.tolist() == [0.0, 10.0]
    assert found.offsets == {0: -250.0, 1: 250.0} and len(found.notes) == 2
    assert c.aligned([first, second], [b.window(first), b.window(second)], fix_clocks=True).calls.moving.tolist() == [10.0, 10.0]


def test_ranks_without_any_collective_align_to_nothing():
    alone = [rank_trace(r, [("fused_moe_kernel", 0, 10)]) for r in range(2)]
    found = c.aligned(alone, [b.window(t) for t in alone])
    assert found.calls.empty and found.notes == [] and c.by_size(found.calls).empty


def test_ranks_with_unlike_numbers_of_steps_are_matched_by_time():
    calls = [(AR, t + 2, t + 10) for t in (0, 100, 200)]
    first, second = rank_trace(0, calls), rank_trace(1, [(n, a + 3, z) for n, a, z in calls[1:]])
    found = c.aligned([first, second], [steps_of((0, 100_000), (100_000, 200_000), (200_000, 300_000)), steps_of((100_000, 200_000), (200_000, 300_000))])
    assert found.calls[["rank", "step", "waiting"]].values.tolist() == [[0, 1, 3.0], [0, 2, 3.0], [1, 1, 0.0], [1, 2, 0.0]]
    assert found.notes == ["rank 1: its steps are not at the time of those of their number on rank 0; matched by when they are"]


def test_steps_are_matched_by_their_numbers():
    "Rank 1's profiler began a step later; as many steps on both."
    first, second = (rank_trace(r, [(AR, t + 5 * r, t + 20) for t in range(100 * r, 1000 + 100 * r, 100)]) for r in range(2))
    steps = [steps_of(*[(t * 1000, t * 1000 + 100_000) for t in range(100 * r, 1000 + 100 * r, 100)]) for r in range(2)]
    steps[1].table["step"] += 1
    found = c.aligned([first, second], steps)
    assert found.notes == [] and found.offsets == {0: 0.0, 1: 0.0}
    assert found.calls[found.calls["rank"] == 0][["step", "waiting"]].values.tolist() == [[n, 5.0] for n in range(1, 10)]


def four_ranks(groups, sizes, apart=0, **more):
    "Two pairs; the second begins `apart` us later."
    def trace(r):
        at = np.arange(0, 900, 100) + apart * (r > 1)
        own = dict(group=[groups[r]] * 9, group_size=[sizes] * 9, collective=["allreduce"] * 9) if groups[r] else {}
        return trace_of(["ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)"] * 9, (at + 5 * (r % 2)) * 1000, (at + 20) * 1000, rank=r, ranks=4, **own, **more)
    traces = [trace(r) for r in range(4)]
    return c.aligned(traces, [b.window(t) for t in traces])


@pytest.mark.parametrize("groups, apart, note", [(["tp0", "tp0", "tp1", "tp1"], 0, ""), (["tp0", "tp0", "tp1", "tp1"], 300, ""), (["tp"] * 4, 30, "all-reduce calls in group tp: groups of their own, told by when calls end: ranks 0, 1; ranks 2, 3")])
def test_a_group_has_the_ranks_that_meet_in_it(groups, apart, note):
    found = four_ranks(groups, 2, apart)
    assert found.notes == [note] * bool(note)
    assert found.calls.groupby("rank").waiting.agg(["size", "mean"]).values.tolist() == [[9, 5.0], [9, 0.0], [9, 5.0], [9, 0.0]]
    assert found.calls.groupby("rank")["last"].unique().map(list).tolist() == [[1], [1], [3], [3]]


def test_groups_that_nothing_tells_apart_are_left_out():
    found = four_ranks(["tp"] * 4, 2)
    assert found.calls.empty and found.notes == ["4 ranks made all-reduce calls in group tp, of groups of 2: which ranks are together can't be told by name nor by when calls end, so they are left out"]
    three = [trace_of(["ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)"], [0], [9], rank=r, ranks=4, group=[group], group_size=[2]) for r, group in ((0, "tp0"), (2, "tp1"), (3, "tp1"))]
    found = c.aligned(three, [b.window(t) for t in three])
    assert found.calls["rank"].tolist() == [2, 3] and found.notes == ["rank 0's all-reduce calls in group tp0 are of 2 ranks, and none of the others is here: left out"]


def test_sequence_numbers_that_the_clock_denies_are_not_believed():
    def trace(r): return rank_trace(r, [("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)", t + 5 * r, t + 20) for t in range(0, 500, 100)], seq=[n + r for n in range(5)], group=["2"] * 5, group_size=[2] * 5)
    both = [trace(0), trace(1)]
    found = c.aligned(both, [b.window(t) for t in both])
    assert found.calls.waiting.tolist() == [5.0] * 5 + [0.0] * 5 and "those of one sequence number do not end together; matched by order" in found.notes[0]


def test_two_streams_are_counted_each_by_itself():
    "On rank 1 the second stream's call begins before the first one's."
    first = rank_trace(0, [(AR, 0, 30), (AR, 10, 60)], lane=[7, 8])
    second = rank_trace(1, [(AR, 20, 30), (AR, 5, 60)], lane=[7, 8])
    found = c.aligned([first, second], [b.window(first), b.window(second)]).calls
    assert found[["rank", "lane", "waiting", "moving"]].values.tolist() == [[0, 7, 20.0, 10.0], [0, 8, 0.0, 50.0], [1, 8, 5.0, 50.0], [1, 7, 0.0, 10.0]]


def test_a_clock_is_off_by_what_its_calls_take():
    def ranks(off, length): return [rank_trace(r, [(AR, t + off * r, t + off * r + length) for t in range(0, 1000, 100)]) for r in range(2)]
    def notes(off, length): return c.aligned(own := ranks(off, length), [b.window(t) for t in own]).notes
    assert notes(15, 10)[0].startswith("rank 0's collectives end 8 us before the others': its clock is off") and notes(15, 60) == []


# --- what is said when there is nothing to break down

def test_nothing_to_break_down_is_said():
    trace = rank_trace(0, [("fused_moe_kernel", 0, 10)])
    with pytest.raises(TraceError, match="no steps to break down; `window` makes one"): b.breakdown(trace, no_steps("none"))
    empty = trace_of(["decode step 0"], [0], [9], kind=["annotation"])
    with pytest.raises(TraceError, match="neither kernels nor operators"): b.breakdown(empty, steps_of((0, 9)))
    with pytest.raises(TraceError, match="neither kernels nor operators"): b.window(empty)


def test_partial_steps_are_in_the_table_and_not_in_the_means():
    trace = rank_trace(0, [("fused_moe_kernel", 0, 10), ("fused_moe_kernel", 20, 24), ("fused_moe_kernel", 40, 48)])
    steps = steps_of((0, 20_000), (20_000, 40_000), (40_000, 60_000))
    steps.table.loc[0, "partial"] = True
    table = b.breakdown(trace, steps)
    assert table["moe experts"].tolist() == [10.0, 4.0, 8.0]
    assert b.summary(table).loc["moe experts", ["mean", "steps"]].tolist() == [6.0, 2] and b.share(table)["idle"] == pytest.approx(0.7)
    with pytest.raises(TraceError, match="no whole prefill step to sum up; there are 3 decode, 1 of them partial"): b.summary(table, "prefill")


def test_the_step_a_kernel_reaches_into_gets_its_part():
    table = b.breakdown(rank_trace(0, [("fused_moe_kernel", 5, 25)]), steps_of((0, 20_000), (20_000, 40_000)))
    assert table["moe experts"].tolist() == [15.0, 5.0] and table.idle.tolist() == [5.0, 15.0]


def test_gloo_and_the_call_are_one_all_reduce():
    trace = trace_of(["decode step 0", "c10d::allreduce_", "record_param_comms", "gloo:all_reduce", "aten::add"], [0, 10, 11, 12, 40], [60, 15, 14, 38, 50], kind=["annotation", "operator", "operator", "annotation", "operator"], lane=[1, 1, 1, 2, 1])
    row = b.breakdown(trace, steps_of((0, 60))).iloc[0]
    assert (row["all-reduce"], row["norm and elementwise"], row["idle"]) == (0.030, 0.010, 0.020)
    calls = c.collectives(trace, steps_of((0, 60)))
    assert calls[["name", "kernel", "us"]].values.tolist() == [["all-reduce", "c10d::allreduce_", 0.03]]


# --- lean, and the same

@pytest.mark.parametrize("graphs", [False, True])
def test_a_generated_trace_has_the_steps_that_its_program_knows(tmp_path, graphs):
    laid = []
    trace = read_kineto(write_trace(tmp_path / "a.json", 3_000_000, 4, graphs=graphs, laid_down=laid))
    steps = find_steps(trace)
    assert steps.table[["kind", "start", "kernels", "all_reduces"]].to_dict("records") == laid and len(laid) > 8 and {"decode", "prefill"} == set(steps.table.kind)
    assert steps.layers == 5 and steps.confidence >= 0.9 and not steps.table.partial.any()
    assert set(steps.table.launch[steps.table.kind == "decode"]) == {"graph" if graphs else "eager"}
    assert b.share(b.breakdown(trace, steps))["unclassified"] == 0
    assert len({event["name"] for event in json.loads((tmp_path / "a.json").read_text())["traceEvents"]}) >= 150


@settings(max_examples=20, deadline=None)
@given(SPANS, st.integers(1, 20), st.integers(1, 5))
def test_a_timeline_in_stretches_is_the_same_timeline(spans, cut, rows):
    trace, steps = trace_of([n for n, _, _ in spans], [a for _, a, _ in spans], [a + d for _, a, d in spans]), steps_of((0, cut), (cut, 53))
    whole = b.sums(trace, steps), b.busy(trace, steps), b.gaps(trace, steps), b.idle_causes(trace, steps)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(b, "ROWS", rows)
        for one, other in zip(whole, (b.sums(trace, steps), b.busy(trace, steps), b.gaps(trace, steps), b.idle_causes(trace, steps))): pd.testing.assert_frame_equal(one, other)
        p = b.pieces(trace, steps)
        assert p.start.iloc[0] == 0 and p.end.iloc[-1] == 53 and (p.start.to_numpy()[1:] == p.end.to_numpy()[:-1]).all()


def test_a_call_inside_its_like_is_counted_with_it():
    "The mark around an attention, the operator that it calls, and one that the operator calls."
    trace = trace_of(["decode step 0", "attention", "aten::scaled_dot_product_attention", "aten::mm", "aten::linear", "aten::mm", "c10d::allreduce_", "record_param_comms"],
                     [0, 1, 2, 3, 20, 21, 30, 31], [60, 15, 14, 9, 28, 27, 40, 38], kind=["annotation", "annotation"] + ["operator"] * 6, lane=[1] * 8)
    found = b.busy(trace, steps_of((0, 60))).loc[0]
    assert found["count"].to_dict() == {"attention": 1, "dense gemm": 1, "all-reduce": 1}
    assert found.busy.round(3).to_dict() == {"attention": 0.014, "dense gemm": 0.008, "all-reduce": 0.030} and found.overlapped.tolist() == [0, 0, 0]


def test_late_threads_of_a_cpu_are_not_called_clocks():
    ranks = [trace_of(["c10d::allreduce_", "aten::add"] * 3, [t for s in range(3) for t in (s * 400_000, s * 400_000 + 100_000 + late)], [t for s in range(3) for t in (s * 400_000 + 9, s * 400_000 + 110_000 + late)], kind=["operator"] * 6, lane=[1] * 6, rank=r, ranks=2) for r, late in enumerate((0, 90_000))]
    notes = c.aligned(ranks, [b.window(t) for t in ranks]).notes
    assert len(notes) == 2 and not any("clock is off" in n for n in notes) and "goes on when it gets a core" in notes[0]
    gpu = [rank_trace(r, [(AR, r * 90, r * 90 + 10)]) for r in range(2)]
    assert all("clock is off" in n for n in c.aligned(gpu, [b.window(t) for t in gpu]).notes)


def test_a_trace_of_one_step_has_one_step():
    truth = s.lay_down(s.Serving(ranks=1, steps=0, prefill=1, layers=3))
    steps = find_steps(truth.traces()[0])
    assert len(steps.table) == 1 and steps.table.start[0] == truth.steps.start[0] and steps.table.end[0] == truth.steps.end[0]
