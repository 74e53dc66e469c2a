"Steps found in runs whose steps are known: random ones, cut ones, faulty ones, and traces that hold none."
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_spec.profiling import steps as s
from kimi_spec.profiling.kernels import classify
from kimi_spec.profiling.kineto import read_kineto
from kimi_spec.profiling.synthetic import HARDWARE, Serving, lay_down, serving_traces
from kimi_spec.profiling.trace import Trace, events_table

RUNS = st.builds(
    Serving, engine=st.sampled_from(["vllm", "sglang"]), hardware=st.sampled_from(sorted(HARDWARE)), ranks=st.integers(1, 3), steps=st.integers(2, 8), layers=st.integers(3, 7), dense_layers=st.integers(0, 2),
    draft_tokens=st.sampled_from([0, 0, 1, 2, 3, 5]), prefill=st.integers(0, 3), mixed=st.integers(0, 2), requests=st.integers(1, 16), communication=st.sampled_from(["all-reduce", "fused", "sequence parallel", "dp attention"]),
    embedding_reduce=st.booleans(), own_stream=st.booleans(), overlap=st.sampled_from([0, 0.5, 1]), skew=st.sampled_from([0, 10, 60]), spread=st.sampled_from([0.02, 0.1, 0.3]), pauses=st.integers(0, 2),
    graphs=st.sampled_from([True, "piecewise", False]), annotations=st.sampled_from([True, False, "ours"]), cpu=st.booleans(), seed=st.integers(0, 10**6))
COLUMNS = ["kind", "start", "end", "all_reduces", "kernels", "launch"]


def of_rank(table, rank=0): return table[table["rank"] == rank].drop(columns="rank").reset_index(drop=True)
def with_events(trace, events): return replace(trace, events=events.reset_index(drop=True))
def kept(trace, keep): return with_events(trace, trace.events[np.asarray(keep)])


# Runs with known truth

@settings(max_examples=100, deadline=None, derandomize=True)
@given(RUNS)
def test_every_boundary_of_random_runs(serving):
    truth = lay_down(serving)
    for rank, trace in enumerate(truth.traces()):
        found, true = s.find_steps(trace), of_rank(truth.steps, rank)
        pd.testing.assert_frame_equal(found.table[["step", *COLUMNS]], true[["step", *COLUMNS]], check_dtype=False)
        pd.testing.assert_frame_equal(found.parts, of_rank(truth.parts, rank)[["step", "part", "start", "end"]], check_dtype=False)
        assert not found.table.partial.any() and found.layers == serving.layers
        if serving.annotations is True and serving.cpu and serving.engine == "vllm": assert found.table[["requests", "tokens"]].equals(true[["requests", "tokens"]])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(RUNS.map(lambda r: replace(r, ranks=2, steps=max(r.steps, 4))), st.floats(0.05, 0.95), st.floats(0.05, 0.95))
def test_a_trace_cut_at_both_ends_still_gives_the_steps_between(serving, begin, end):
    truth = lay_down(serving)
    true, trace = of_rank(truth.steps), truth.traces()[0]
    first, last = true.iloc[0], true.iloc[-1]
    start, stop = first.start + begin * (first.end - first.start), last.start + end * (last.end - last.start)
    found = s.find_steps(kept(trace, (trace.events.start >= start) & (trace.events.start < stop)))
    inner = true.iloc[1:-1]
    got = found.table[found.table.start.isin(inner.start)]
    assert got[COLUMNS[:-1]].values.tolist() == inner[COLUMNS[:-1]].values.tolist() and not got.partial.any()
    assert set(found.whole.start) - set(inner.start) <= {found.table.start.iloc[0], found.table.start.iloc[-1]}  # no boundary where none is


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("k", [0, 3])
def test_a_step_cut_off_is_partial(engine, k):
    truth = lay_down(Serving(engine=engine, draft_tokens=k, steps=6, prefill=0, annotations=False))
    true, trace = of_rank(truth.steps), truth.traces()[0]
    middle = (true.start + true.end) // 2
    found = s.find_steps(kept(trace, (trace.events.start >= middle.iloc[1]) & (trace.events.start < middle.iloc[4])))
    assert found.table.partial.tolist() == [True, False, False, True] and found.whole.start.tolist() == true.start.iloc[2:4].tolist()
    assert any("2 steps are cut off" in note for note in found.notes)


def test_a_first_or_last_step_that_lacks_few_kernels_is_partial_too():
    truth = lay_down(Serving(steps=6, prefill=0, annotations=False))
    true, trace = of_rank(truth.steps), truth.traces()[0]
    kernels = trace.events.start[trace.events.kind == "kernel"].to_numpy()
    begin, end = np.searchsorted(kernels, [true.start.iloc[1], true.start.iloc[4]])
    found = s.find_steps(kept(trace, (trace.events.start >= kernels[begin + 2]) & (trace.events.start < kernels[end - 1])))
    assert found.table.partial.tolist() == [True, False, True] and found.whole.start.tolist() == [true.start.iloc[2]]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(RUNS.map(lambda r: replace(r, ranks=1)), st.data())
def test_a_kernel_that_the_profiler_lost_moves_no_boundary(serving, data):
    truth = lay_down(serving)
    true, trace = of_rank(truth.steps), truth.traces()[0]
    e = trace.events
    lost = data.draw(st.sampled_from([i for i in e.index[e.kind == "kernel"] if e.start[i] not in set(true.start) and classify([str(e.name[i])]) != ["sampling"]]))
    found = s.find_steps(kept(trace, e.index != lost))
    assert found.table.start.tolist() == true.start.tolist()


def test_files_and_laid_down_events_are_the_same_trace(tmp_path):
    truth = serving_traces(tmp_path, compress=True, steps=3, draft_tokens=2, overlap=0.5, graphs=False, ranks=2)
    for laid, path in zip(truth.traces(), truth.paths):
        read = read_kineto(path, operators=True)
        assert (read.rank, read.ranks, read.problems) == (laid.rank, 2, [])
        rows = [frame[list(frame.columns)].astype(object).sort_values(["start", "end", "kind", "name"]).values.tolist() for frame in (read.events, laid.events)]
        assert rows[0] == rows[1]
        assert s.find_steps(read).table.equals(s.find_steps(laid).table)


# Ways

@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("graphs", [True, "piecewise"])
@pytest.mark.parametrize("k", [0, 2])
def test_each_way_finds_the_same_alone(engine, graphs, k):
    truth = lay_down(Serving(engine=engine, graphs=graphs, draft_tokens=k, layers=6, steps=6, requests=3))
    trace, true = truth.traces()[0], of_rank(truth.steps)
    r = s.ribbon_of(trace)
    ways, _, _ = s.ways_of(trace, r)
    assert {way: r.start[f.begins].tolist() for way, f in ways.items()} == {way: true.start.tolist() for way in s.WAYS}
    found = s.find_steps(trace, layers=6)
    assert found.how == "annotations" and found.confidence == s.SURE[4] and "choices, graphs, repetition" in found.notes[0]


def test_an_annotation_drawn_on_the_gpu_does_without_launches():
    truth = lay_down(Serving(steps=4, draft_tokens=1))
    trace = truth.traces()[0]
    found = s.find_steps(kept(trace, ~trace.events.kind.isin(["call", "annotation", "operator"])))
    assert found.how == "annotations" and found.table.start.tolist() == of_rank(truth.steps).start.tolist() and found.table.tokens.tolist() == of_rank(truth.steps).tokens.tolist()


def test_annotations_of_a_few_steps_do_not_make_them_long():
    truth = lay_down(Serving(steps=8))
    trace = truth.traces()[0]
    marks = trace.events.index[trace.events.kind.isin(["annotation", "gpu_annotation"])]
    found = s.find_steps(kept(trace, ~trace.events.index.isin(marks[4:])))
    assert found.how == "choices" and found.table.start.tolist() == of_rank(truth.steps).start.tolist()


def test_unknown_samplers_leave_repetition_and_doubt():
    truth = lay_down(Serving(steps=8, layers=8, annotations=False, graphs=False))
    trace = truth.traces()[0]
    names = list(trace.events.name.cat.categories)
    opaque = {n: f"kernel_{i}" for i, n in enumerate(names) if classify([n]) == ["sampling"]}
    found = s.find_steps(with_events(trace, trace.events.assign(name=trace.events.name.cat.rename_categories(opaque))))
    assert len(opaque) == 2 and found.how == "repetition" and found.table.start.tolist() == of_rank(truth.steps).start.tolist()
    assert found.confidence < 0.7 and any("No kernel is known to choose a token" in note for note in found.notes)


def test_no_names_at_all_still_gives_the_steps():
    truth = lay_down(Serving(steps=8, layers=8, annotations=False, draft_tokens=1))
    trace = truth.traces()[0]
    names = list(trace.events.name.cat.categories)
    reduces = {n for n in names if classify([n]) == ["all-reduce"]}
    found = s.find_steps(with_events(trace, trace.events.assign(name=trace.events.name.cat.rename_categories({n: n if n in reduces else f"kernel_{i}" for i, n in enumerate(names)}))))
    true = of_rank(truth.steps)
    assert set(true.start[true.kind == "decode"]) <= set(found.table.start) and found.confidence < 0.7


def test_layers_known_from_elsewhere_are_checked():
    trace = lay_down(Serving(layers=5)).traces()[0]
    right, wrong = s.find_steps(trace, layers=5), s.find_steps(trace, layers=61)
    assert wrong.confidence == pytest.approx(right.confidence / 2, abs=0.001) and "5 layers seen in a decode step, 61 expected." in wrong.notes


def test_a_different_number_of_all_reduces_costs_confidence():
    truth = lay_down(Serving(steps=6, annotations=False))
    trace = truth.traces()[0]
    e, fourth = trace.events, of_rank(truth.steps).iloc[4]
    inside = e.index[(e.start >= fourth.start) & (e.start < fourth.end) & e.name.astype(str).str.contains("AllReduce")]
    found = s.find_steps(kept(trace, e.index != inside[3]))
    assert found.confidence < s.find_steps(trace).confidence and any("8 all-reduces in 5 of them, 7 to 8 in the others" in note for note in found.notes)


@pytest.mark.parametrize("communication, count", [("fused", 12), ("sequence parallel", 0), ("dp attention", 0)])
def test_steps_do_not_need_two_all_reduces_a_layer(communication, count):
    truth = lay_down(Serving(communication=communication, layers=6, annotations=False, graphs=False))
    found = s.find_steps(truth.traces()[0])
    assert set(found.table.all_reduces) == {count} and found.table.start.tolist() == of_rank(truth.steps).start.tolist()


def test_a_second_stream_of_other_work_is_part_of_the_step():
    truth = lay_down(Serving(steps=5, annotations=False, graphs=False))
    trace = truth.traces()[0]
    e = trace.events[trace.events.kind == "kernel"]
    other = e[e.name.astype(str).str.contains("rms_norm")].assign(lane=99, name="void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int> >()", end=lambda x: x.end + 700, start=lambda x: x.start + 100)
    both = pd.concat([trace.events.astype({"name": str}), other])
    found = s.find_steps(replace(trace, events=events_table({c: both[c].to_numpy() for c in both})))
    assert found.table.start.tolist() == of_rank(truth.steps).start.tolist() and found.table.kernels.sum() == len(e) + len(other)


def test_ranks_number_their_steps_alike():
    truth = lay_down(Serving(steps=6, ranks=3, skew=20))
    traces, begins = truth.traces(), of_rank(truth.steps, 1).start
    late = kept(traces[1], traces[1].events.start >= begins.iloc[2] - 20_000)
    found = s.find_all_steps([traces[0], late, traces[2]])
    assert found[1].table.step.tolist() == [2, 3, 4, 5, 6] and set(found[1].parts.step) == {2, 3, 4, 5, 6} and found[2].table.step.tolist() == list(range(7))


# No steps

def trace_of(names, kind="kernel"):
    n = len(names)
    return Trace("made.json", 0, 1, events_table(dict(name=np.array(names, object), kind=np.array([kind] * n, object), device=np.zeros(n), lane=np.full(n, 7), start=np.arange(n) * 1000, end=np.arange(n) * 1000 + 900)))


LAYER = ["nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64> >(Flash_fwd_params)", "nvjet_tst_128x8_64x12_2x1_v_bz_TNT", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
         "triton_red_fused_add_rsqrt_0", "triton_poi_fused_silu_mul_1"]
BACK = [n.replace("fwd", "bwd") for n in LAYER]
SOFTMAX = ["void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float>()"]


@pytest.mark.parametrize("trace, why", [
    (trace_of((LAYER * 8 + SOFTMAX + BACK * 8 + ["void at::native::(anonymous namespace)::multi_tensor_apply_kernel<...>()"] * 3) * 5), "looks like a training run, with kernels such as void flash::flash_bwd_kernel"),
    (trace_of([f"kernel_{n}" for n in np.random.default_rng(0).integers(0, 30, 3000)]), "No serving step found among 3,000 kernels"),
    (trace_of(SOFTMAX * 50), "No serving step found among 50 kernels"),
    (trace_of(["triton_poi_fused_add_cos_sin_0"]), "No serving step found among 1 kernels"),
    (trace_of(["ProfilerStep#3"] * 4, "annotation"), "has no kernels, and no annotation"),
    (trace_of(["aten::mm"] * 4, "operator"), "has no kernels, and no annotation"),
    (Trace("empty.json", 0, 1, events_table(dict(start=np.zeros(0, "int64"), end=np.zeros(0, "int64")))), "has no kernels"),
], ids=["training", "noise", "softmax only", "one kernel", "training loop on a CPU", "operators", "empty"])
def test_nothing_is_found_rather_than_something(trace, why):
    found = s.find_steps(trace)
    assert found.table.empty and found.parts.empty and (found.how, found.confidence) == ("", 0.0) and why in found.notes[0]
    assert found.table.columns.tolist() == list(s.TABLE) and found.whole.empty


def test_an_inference_step_with_backward_in_one_name_is_no_training_run():
    trace = trace_of((LAYER * 8 + SOFTMAX) * 30 + ["void backward_looking_kernel()"])
    assert len(s.find_steps(trace).table) == 30


# Runs that mislead

FLASH = "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<2> > > >(flash::Params)"


def renamed(trace, new):
    "The trace with other names: `new` gives one for an old one."
    return with_events(trace, trace.events.assign(name=trace.events.name.astype(str).map(new).astype("category")))


def one_attention(trace): return renamed(trace, lambda name: FLASH if classify([name]) == ["attention"] and "cache" not in name else name)
def without(trace, spans): return kept(trace, ~np.any([(trace.events.start >= a) & (trace.events.end <= b) for a, b in spans], axis=0))


def passes(slowness):
    "A trace of eager passes of 8 layers that take so many times as long; one attention kernel serves all."
    trace = trace_of((LAYER * 8 + SOFTMAX + ["void vllm::reshape_and_cache_flash_kernel<>"]) * len(slowness))
    took = 900 * np.repeat(slowness, len(LAYER) * 8 + 2)
    start = np.cumsum(took + 100) - took
    return with_events(trace, trace.events.assign(start=start, end=start + took))


def test_beside_graphs_the_eager_steps_that_take_longer_are_prefills():
    truth = lay_down(Serving(steps=4, prefill=12, ranks=1, layers=6, annotations=False))
    found, true = s.find_steps(one_attention(truth.traces()[0])), of_rank(truth.steps)
    assert found.table[["start", "kind"]].values.tolist() == true[["start", "kind"]].values.tolist() and found.confidence == s.SURE[3]


def test_quick_and_slow_steps_are_guessed_to_be_decodes_and_prefills():
    found = s.find_steps(passes([1, 1, 8, 8, 7, 9, 8, 1, 8, 8, 1, 30, 8]))
    assert found.table.kind.tolist() == [{1: "decode"}.get(n, "prefill") for n in (1, 1, 8, 8, 7, 9, 8, 1, 8, 8, 1, 30, 8)]
    assert found.confidence <= 0.63 and any("Whether 13 of the steps are decodes or prefills is told by their time alone" in note for note in found.notes)


@pytest.mark.parametrize("slowness", [[1] * 8, [8, 7, 9, 8, 8, 7, 9, 8]])
def test_steps_of_one_sort_are_of_an_unknown_kind(slowness):
    found = s.find_steps(passes(slowness))
    assert set(found.table.kind) == {"unknown"} and len(found.table) == 8 and "Nothing tells what 8 of the steps do, decode or prefill." in found.notes


def test_layers_of_two_kinds_do_not_make_a_decode_mixed():
    truth = lay_down(Serving(steps=6, prefill=0, layers=8, ranks=1, annotations=False, graphs=False))
    trace = truth.traces()[0]
    names = trace.events.name.astype(str)
    decoding = np.flatnonzero(names.str.contains("flash_fwd_splitkv_mla_kernel"))
    names.iloc[decoding[3::4]] = FLASH
    found = s.find_steps(with_events(trace, trace.events.assign(name=names.astype("category"))))
    assert found.table.kind.tolist() == ["decode"] * 6 and found.table.start.tolist() == of_rank(truth.steps).start.tolist()


def smaller(truth, layers, targets=range(0, 100, 4)):
    "Some passes with fewer layers, these and the last one: every step but each fourth one becomes a pass of a drafter."
    trace, true = truth.traces()[0], of_rank(truth.steps)
    e = trace.events
    spans = []
    for i, step in true.iterrows():
        if i in targets: continue
        norms = e.start[(e.start >= step.start) & (e.start < step.end) & e.name.astype(str).str.contains("qkv|64x8_64x16_4x1_v_bz_splitK")].tolist()[::2]  # the first product of each layer
        spans.append((norms[layers], norms[-1] - 1))
    return without(trace, spans), true


@pytest.mark.parametrize("graphs", [True, False])
def test_a_drafter_nearly_as_deep_as_its_target_drafts(graphs):
    trace, true = smaller(lay_down(Serving(steps=24, prefill=0, ranks=1, layers=12, dense_layers=12, annotations=False, graphs=graphs)), 9)
    found = s.find_steps(trace)
    assert found.table.start.tolist() == true.start.iloc[::4].tolist() and (found.parts.part == "draft").sum() == 18 and found.layers == 12


def test_a_drafter_of_two_layers_may_draft_as_it_likes():
    targets = [0, 3, 5, 9, 10, 14, 18, 21]
    trace, true = smaller(lay_down(Serving(steps=24, prefill=0, ranks=1, layers=12, dense_layers=12, annotations=False)), 1, targets)
    found = s.find_steps(trace)
    assert found.table.start.tolist() == true.start.iloc[targets].tolist() and (found.parts.part == "draft").sum() == 16 and found.layers == 12


def test_annotations_that_hold_as_many_choices_each_are_believed():
    "A drafter as deep as its target: three of four steps are made its passes by taking their annotations away."
    truth = lay_down(Serving(steps=24, prefill=0, layers=6))
    trace, true = truth.traces()[0], of_rank(truth.steps)
    e = trace.events
    marks = [e.index[(e.kind == kind).to_numpy() & np.array([s.read_mark(str(n)) is not None for n in e.name])] for kind in ("annotation", "gpu_annotation")]
    gone = {i for of_kind in marks for n, i in enumerate(of_kind) if n % 4}
    found = s.find_steps(kept(trace, ~e.index.isin(gone)))
    assert found.how == "annotations" and found.table.start.tolist() == true.start.iloc[::4].tolist() and not found.table.partial.any()
    assert found.parts.part.value_counts().to_dict() == {"draft": 18, "target": 6, "sample": 6}


def test_an_encoder_of_images_does_not_hide_the_decodes():
    truth = lay_down(Serving(steps=9, prefill=3, ranks=1, layers=6, dense_layers=6, annotations=False))
    trace, true = one_attention(truth.traces()[0]), of_rank(truth.steps)
    rows, e = [], trace.events
    for step in true[true.kind == "prefill"].itertuples():
        for i in range(8 * 5): rows.append((["cutlass_gemm_a", FLASH, "cutlass_gemm_b", "triton_poi_fused_gelu_0", "cutlass_gemm_c"][i % 5], step.start - 40_000 + 1000 * i))
    seen = pd.DataFrame(dict(name=[n for n, _ in rows], kind="kernel", device=0, lane=7, start=[at for _, at in rows])).assign(end=lambda x: x.start + 600)
    moved = e.assign(name=e.name.astype(str))
    # room for the encoder before each prefill
    shift = np.searchsorted(true.start[true.kind == "prefill"].to_numpy(), moved.start.to_numpy(), side="right") * 100_000
    both = pd.concat([moved.assign(start=moved.start + shift, end=moved.end + shift), seen.assign(start=lambda x: x.start + 100_000 * (np.arange(len(x)) // 40 + 1), end=lambda x: x.start + 600)])
    columns = {c: both[c].to_numpy() for c in ("name", "kind", "device", "lane", "start", "end")} | {"correlation": both.correlation.fillna(-1).to_numpy("int64")}
    found = s.find_steps(replace(trace, events=events_table(columns)))
    assert found.table.kind.tolist() == true.kind.tolist() and "draft" not in set(found.parts.part)


@pytest.mark.parametrize("graphs", [True, False])
def test_steps_that_choose_nothing_are_steps(graphs):
    truth = lay_down(Serving(steps=14, prefill=0, ranks=2, layers=8, dense_layers=0, communication="dp attention", annotations=False, graphs=graphs))
    trace, true = truth.traces()[0], of_rank(truth.steps)
    chosen = of_rank(truth.parts)
    chosen = chosen[chosen.part == "sample"]
    found = s.find_steps(without(trace, [(p.start, p.end) for p in chosen.itertuples() if p.step in (2, 3, 6, 11)]))
    assert found.table.start.tolist() == true.start.tolist() and any("After 4 passes of the target no token is chosen" in note for note in found.notes)
    assert set(found.parts.part) == {"target", "sample"} and (found.parts.part == "sample").sum() == 10


def test_steps_that_hold_several_are_doubted():
    truth = lay_down(Serving(steps=12, prefill=0, ranks=1, layers=8, annotations=False, graphs=False))
    trace, chosen = truth.traces()[0], of_rank(truth.parts)
    chosen = chosen[chosen.part == "sample"]
    noisy = without(trace, [(p.start, p.end) for p in chosen.itertuples() if p.step in (2, 3, 7)])
    r = s.ribbon_of(noisy)
    ways, *_ = s.ways_of(noisy, r)
    assert s.doubled(r, ways["choices"]) == 2 and s.doubled(s.ribbon_of(trace), s.ways_of(trace, s.ribbon_of(trace))[0]["choices"]) == 0


@pytest.mark.parametrize("graphs", [True, False])
def test_a_varying_number_of_drafts_before_the_target_is_doubted(graphs):
    truth = lay_down(Serving(engine="sglang", steps=12, draft_tokens=4, prefill=0, ranks=1, layers=6, annotations=False, graphs=graphs))
    trace, parts = truth.traces()[0], of_rank(truth.parts)
    ahead = parts[parts.part == "draft"].groupby("step").head(3)
    gone = ahead[ahead.groupby("step").cumcount() < ahead.step % 3]
    left = parts.drop(gone.index)
    found = s.find_steps(without(trace, list(zip(gone.start, gone.end))))
    assert found.table.start.tolist() == left.groupby("step").start.min().tolist() and found.confidence <= 0.7
    assert any("2 to 4 draft passes in a step" in note for note in found.notes)


def test_a_run_that_makes_images_is_of_unknown_kind_and_doubted():
    layer = ["triton_red_fused_layer_norm_1", "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_TNT", FLASH, "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_TNT_2", "triton_poi_fused_gelu_2", "nvjet_hsh_128x128_64x4_1x2_h_bz_coopA_TNT"]
    noise = ["void at::native::(anonymous namespace)::distribution_elementwise_grid_stride_kernel<float, 4, normal>"]
    for end in ([], noise):
        found = s.find_steps(trace_of((["triton_poi_fused_silu_0"] + layer * 12 + ["void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >()"] + end) * 20))
        assert set(found.table.kind) <= {"unknown"} and found.confidence < 0.4
    assert s.find_steps(trace_of((LAYER * 8 + SOFTMAX + [n.replace('fwd', 'bprop') for n in LAYER] * 8) * 5)).table.empty  # cuDNN's word for backward


# CPU

def test_a_cpu_trace_has_the_steps_that_are_annotated():
    rows = []
    for i in range(3):
        at = 1_000_000 * i
        rows += [(f"decode step {i + 5}", "annotation", at, at + 800_000), ("gpu_model_runner: forward", "annotation", at + 1000, at + 600_000), ("gpu_model_runner: draft", "annotation", at + 610_000, at + 700_000)]
        rows += [(name, "operator", at + 2000 + 3000 * j, at + 4000 + 3000 * j) for j, name in enumerate(["aten::mm", "c10d::allreduce_", "gloo:all_reduce", "aten::mm", "c10d::allreduce_", "gloo:all_reduce"])]
    rows.append(("c10d::allreduce_", "operator", 900_000, 910_000))  # between two steps
    name, kind, start, end = map(list, zip(*rows))
    found = s.find_steps(Trace("cpu.json", 0, 2, events_table(dict(name=name, kind=kind, start=start, end=end, lane=[1] * len(rows)))))
    assert found.table[["step", "kind", "start", "end", "all_reduces", "kernels"]].values.tolist() == [[i + 5, "decode", 1_000_000 * i, 1_000_000 * i + 800_000, 2, 6] for i in range(3)]
    assert found.parts.part.tolist() == ["target", "draft"] * 3 and found.parts.step.tolist() == [5, 5, 6, 6, 7, 7] and found.how == "annotations"


ATTENTIONS = {"vllm": ("vllm::unified_mla_attention_with_output", "_C::cpu_attention_with_kv_cache"), "sglang": ("aten::softmax", "aten::softmax")}  # of target and drafter; SGLang's is written out


def cpu_server(engine, marks, layers, k, steps, seed, requests=2, pause=-1, prefill=-1):
    "A server on a CPU, written down: trace; first operator's time of each step (the mark's, where vLLM writes one); end of its last operator; parts of each step. One step may be a prefill, another come late."
    rng, rows, starts, ends, parts, now, slow = np.random.default_rng(seed), [], [], [], [], 0, 1
    more = [list(rng.choice(["aten::mul", "aten::cat", "aten::index", "aten::view", "aten::add", "aten::copy_"], rng.integers(1, 6))) for _ in range(4)]
    def run(*names, wait=0):
        nonlocal now
        now += wait
        for name in names:
            now += int(rng.integers(200, 2000))
            took = int(rng.integers(2000, 9000)) * slow
            rows.append((name, "operator", now, now + took))
            if name == "aten::linear": rows.append(("aten::mm", "operator", now + 100, now + took - 100))
            now += took
    def model(depth, attention, choose):
        run("aten::embedding", *more[0])
        for _ in range(depth):
            run("aten::rsqrt", "aten::linear", *more[1], "aten::neg", attention, "aten::linear", "aten::rsqrt", "aten::topk", *more[2])
            for _ in range(rng.integers(1, 12) + 10 * (slow > 1)): run("aten::linear", "aten::silu", "aten::linear")  # one an expert that is asked
        run("aten::rsqrt", "aten::linear")
        return lambda: run("aten::slice", *choose)
    def marked(name, call, *args):
        begin = now
        choose = call(*args)
        if marks: rows.append((name, "annotation", begin, now))
        return choose
    own, drafters = ATTENTIONS[engine]
    for i in range(steps):
        slow = 8 if i == prefill else 1
        waited = 300_000 + (10**10 if i == pause else 0) if i else 0
        if engine == "vllm":
            now += waited
            starts.append(now if marks else None)
            first = len(rows)
            def execute():
                run("aten::arange", *more[3])
                return model(layers, own, ["_C::greedy_argmax", *(["aten::eq"] if k else [])])
            marked("execute_context_1(64)_generation_0(0)" if i == prefill else f"execute_context_0(0)_generation_{requests}({requests * (k + 1)})", execute)()
            if k: run("aten::linear")  # hidden states of three layers into one
            for _ in range(k): model(1, drafters, ["aten::argmax"])()
            if not marks: starts[-1] = rows[first][2]
            parts.append(["target", "sample"] + ["draft"] * k)
        else:
            first = len(rows)
            now += waited
            run("aten::arange", *more[3])
            starts.append(rows[first][2])
            for j in range(k - 1 if i != prefill else 0): marked(f"step[DECODE bs={requests}]", model, 1, drafters, ["aten::softmax", "aten::max", *(["aten::sort"] if j == k - 2 else [])])()
            if k > 1: run("aten::tril")
            marked("step[EXTEND bs=1 toks=64]" if i == prefill else f"step[{'TARGET_VERIFY' if k else 'DECODE'} bs={requests}]", model, layers, own, ["aten::argmax"])()
            if k: marked(f"step[DRAFT_EXTEND bs={requests}]", model, 1, drafters, ["aten::softmax", "aten::max"])()
            parts.append(["draft"] * (max(0, k - 1) if i != prefill else 0) + ["target", "sample"] + ["draft"] * (k > 0))
        run("aten::cat")
        ends.append(now)
    name, kind, start, end = map(list, zip(*rows))
    return Trace("cpu.json", 0, 1, events_table(dict(name=name, kind=kind, start=start, end=end, lane=[1] * len(rows)))), starts, ends, parts


CPU_RUNS = st.fixed_dictionaries(dict(engine=st.sampled_from(sorted(ATTENTIONS)), marks=st.booleans(), layers=st.integers(3, 7), k=st.sampled_from([0, 0, 1, 2, 3, 5]), steps=st.integers(4, 7), seed=st.integers(0, 10**6), pause=st.integers(-1, 3), prefill=st.sampled_from([-1, -1, 0, 1, 2])))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(CPU_RUNS)
def test_every_boundary_of_random_cpu_runs(run):
    trace, starts, ends, parts = cpu_server(**run)
    found = s.find_steps(trace)
    assert found.table.start.tolist() == starts and found.how == ("annotations" if run["marks"] else "choices")
    assert found.table.end.tolist() == [end if i + 1 in (run["pause"], len(starts)) and i + 1 > 0 else starts[i + 1] for i, end in enumerate(ends)]
    assert found.parts.groupby("step").part.agg(list).tolist() == parts and not found.table.partial.any()
    assert found.table.kind.tolist() == ["prefill" if i == run["prefill"] else "decode" for i in range(len(starts))]
    assert found.parts.groupby("step").start.min().tolist() == starts and (found.parts.end >= found.parts.start).all() and (found.parts.start.to_numpy()[1:] >= found.parts.end.to_numpy()[:-1]).all()
    decodes = found.table[found.table.kind == "decode"]
    if run["marks"]: assert set(decodes.requests) == {2} and set(decodes.tokens) == {2 * (run["k"] + 1) if run["engine"] == "vllm" else -1 if run["k"] else 2}
    assert found.confidence > 0.85 if run["marks"] else 0.65 < found.confidence <= 0.9


@settings(max_examples=30, deadline=None, derandomize=True)
@given(CPU_RUNS.map(lambda run: {**run, "steps": run["steps"] + 1, "pause": -1}), st.floats(0.02, 0.98), st.floats(0.02, 0.98))
def test_a_cpu_trace_cut_at_both_ends_still_gives_the_steps_between(run, begin, end):
    trace, starts, ends, parts = cpu_server(**run)
    first, last = starts[0] + begin * (ends[0] - starts[0]), starts[-1] + end * (ends[-1] - starts[-1])
    e = trace.events
    found = s.find_steps(kept(trace, (e.start >= first) & (e.end < last)))
    assert set(starts[1:-2]) <= set(found.whole.start) and set(found.table.start) - set(starts) <= {found.table.start.iloc[0]}
    known = found.table[found.table.start.isin(starts[1:-2])]
    assert known.end.tolist() == starts[2:-1]
    assert [found.parts.part[found.parts.step == n].tolist() for n in known.step] == parts[1:-2]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("marks", [True, False])
@pytest.mark.parametrize("k", [0, 3])
def test_the_end_of_a_cpu_trace_cuts_its_last_step_off(engine, marks, k):
    trace, starts, ends, parts = cpu_server(engine, marks, layers=5, k=k, steps=5, seed=1)
    for share in np.arange(0.05, 0.95, 0.05):
        found = s.find_steps(kept(trace, trace.events.end < starts[-1] + share * (ends[-1] - starts[-1])))
        assert found.table.start.tolist() == starts[:len(found.table)] and found.table.partial.tolist()[:3] == [False] * 3 and found.table.partial.tolist()[4:] in ([], [True])
        if not found.table.partial[3]: assert [found.parts.part[found.parts.step == n].tolist() for n in range(4)] == parts[:4]
        else: assert marks and engine == "vllm" and len(found.table) == 4  # no mark yet, so what is there of the last step is taken for the end of the one before


def test_layers_of_a_cpu_are_counted_and_checked():
    trace, *_ = cpu_server("vllm", True, layers=6, k=2, steps=4, seed=3)
    right, wrong = s.find_steps(trace, layers=6), s.find_steps(trace, layers=61)
    assert right.layers == 6 and wrong.confidence == pytest.approx(right.confidence / 2, abs=0.001) and "6 layers seen in a pass of the target, 61 expected." in wrong.notes


def test_draft_passes_of_a_vllm_step_are_its_drafters_however_deep():
    trace, starts, _, parts = cpu_server("vllm", True, layers=1, k=2, steps=4, seed=5)
    found = s.find_steps(trace)
    assert found.table.start.tolist() == starts and found.parts.groupby("step").part.agg(list).tolist() == parts
    assert any("deeper or shallower than the annotations let expect" in note for note in found.notes)


def test_a_training_run_on_a_cpu_has_no_serving_steps():
    trace, *_ = cpu_server("sglang", False, layers=4, k=0, steps=5, seed=7)
    e = trace.events
    back = e[e.name == "aten::silu"].assign(name="autograd::engine::evaluate_function: SiluBackward0", start=lambda x: x.start + 10, end=lambda x: x.end - 10)
    both = pd.concat([e.astype({"name": str}), back])
    found = s.find_steps(replace(trace, events=events_table({c: both[c].to_numpy() for c in both})))
    assert found.table.empty and "looks like a training run" in found.notes[0]


def test_the_threads_that_do_not_compute_are_left_alone():
    trace, starts, *_ = cpu_server("sglang", False, layers=4, k=2, steps=5, seed=8)
    e = trace.events
    other = e[e.name == "aten::embedding"].assign(lane=2, start=lambda x: x.start + 20_000, end=lambda x: x.end + 20_000)
    both = pd.concat([e, other])
    assert s.find_steps(replace(trace, events=events_table({c: both[c].to_numpy() for c in both}))).table.start.tolist() == starts


@pytest.mark.parametrize("name, mark", [
    ("execute_context_1(512)_generation_0(0)", s.Mark("vllm", "prefill", 1, 512)), ("execute_context_0(0)_generation_8(32)", s.Mark("vllm", "decode", 8, 32)), ("execute_context_2(600)_generation_3(3)", s.Mark("vllm", "mixed", 5, 603)),
    ("execute_520_context_1(sq512sk512sqsq262144sqsk262144)_generation_8(sq8sk9000sqsq8sqsk9000)", s.Mark("vllm", "mixed", 9, 520)), ("execute_new_1_cached_0", s.Mark("vllm old", "prefill", 1, -1)),
    ("step[EXTEND bs=2 toks=900]", s.Mark("sglang", "prefill", 2, 900)), ("step[DECODE bs=4]", s.Mark("sglang", "decode", 4, 4)), ("step[VERIFY bs=4 forward_id=12]", s.Mark("sglang", "decode", 4, -1)),
    ("step[DRAFT bs=4 toks=8]", s.Mark("sglang", "draft", 4, 8)), ("step[IDLE bs=0]", s.Mark("sglang", "unknown", 0, -1)), ("prefill step 3", s.Mark("ours", "prefill", -1, -1, 3)),
    ("gpu_model_runner: forward", None), ("Optimizer.step#SGD.step", None), ("ProfilerStep#4", None), ("my execute_context_1(2)_generation_0(0)", None)])
def test_annotations_as_engines_write_them(name, mark): assert s.read_mark(name) == mark
