"The phase and what it asks of a step: stopwatch against trace on real ranks, what if, two runs side by side, a step cut out for Perfetto, pictures."
import base64
import gzip
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from kimi_spec.core.errors import KimiSpecError
from kimi_spec.core.reports import start_run
from kimi_spec.core.rig import list_rigs
from kimi_spec.profiling.compare import CLEAR_FROM, compare, compare_steps, times_as_long
from kimi_spec.profiling.kineto import read_kineto
from kimi_spec.profiling.perfetto import PageTooLarge, check_output, cut, cut_step, open_link
from kimi_spec.profiling.pictures import COLOURS, draw_bars, draw_latency, draw_spans, points_of, step_spans, zoomed

from kimi_spec.profiling.summary import as_json, breakdown_table, communication_table, known_step, one_step, parts_table, profile_files, profile_traces, tables, waiting_table, what_if
from kimi_spec.profiling.synthetic import Serving, lay_down, serving_traces
from kimi_spec.profiling.tensor_parallel import by_step, load_target, measure, split, tiny_target, unmarked
from kimi_spec.profiling.trace import Trace, TraceError, events_table
from kimi_spec.profiling.what_if import (KnownStep, WhatIfError, all_reduce_at, break_even, experts_touched, fit_latency, kimi_step, more_tokens, recorded_latency, speed_up, usual_questions,
                                         what_if_table, why_not_more_tokens, with_ranks)


# --- the nano target over real ranks

@pytest.fixture(scope="module")
def tiny(tmp_path_factory): return tiny_target(tmp_path_factory.mktemp("tiny") / "target", layers=3)


@pytest.mark.parametrize("ranks, steps", [(2, 24), (4, 12)])
def test_stopwatch_and_trace_agree_on_real_ranks(tiny, tmp_path, ranks, steps):
    "Real processes: logits, tokens, counts, sizes; and the share by the trace, with the stopwatch's marks and without, within two points of the stopwatch's."
    from kimi_spec.profiling.allreduce import readings
    for attempt in range(3):  # a process that is stopped between two clocks spoils a run; three spoilt ones in a row are no accident
        results = measure(tiny, tmp_path / str(attempt), ranks=ranks, steps=steps)
        profile = profile_files([tmp_path / str(attempt) / "traces"], progress=False, cache=False)
        shares = readings(results, profile)
        by_rank = shares.groupby("rank")
        apart = max((by_rank.mark.mean() - by_rank.stopwatch.mean()).abs().max(), abs(shares.trace.mean() - shares.stopwatch.mean()))
        if apart < 0.02: break
    assert apart < 0.02
    assert all(r["difference"] < 1e-4 for r in results) and len({tuple(r["tokens"]) for r in results}) == 1
    for r in results:
        assert len(r["profiled"]["steps"]) == steps and len(r["profiled"]["calls"]) == steps * 2 * 3
        assert {size for _, _, size in r["plain"]["calls"]} == {32 * 4}
    assert [(t.rank, t.ranks, t.gpu) for t in profile.traces] == [(r, ranks, False) for r in range(ranks)] and profile.kinds == ["decode"]
    for rank, r in enumerate(results):
        times = profile.times.loc[rank]
        assert len(times) == steps
        assert np.median(np.abs(times.total.to_numpy() / np.multiply(r["profiled"]["steps"], 1e6) - 1)) < 0.05
    assert len(shares) == ranks * steps and shares.stopwatch.between(0, 1, inclusive="neither").all()
    assert (shares.trace != shares.mark).any()  # another reading, not the same one again
    bare = profile_traces([unmarked(t) for t in profile.traces])
    assert not any(n.startswith("gloo all_reduce") for t in bare.traces for n in t.events.name.astype(str)) and set(bare.calls.kernel) == {"c10d::allreduce_"} and set(bare.calls.bytes) == {128} and len(bare.calls) == len(profile.calls)
    calls = profile.calls
    assert Counter(calls["rank"]) == {rank: steps * 6 for rank in range(ranks)} and set(calls.bytes) == {128} and set(calls.group_size) == {ranks} and set(calls.algorithm) == {"gloo"}
    assert (calls.waiting >= 0).all() and (calls.moving >= 0).all() and np.allclose(calls.waiting + calls.moving, calls.us)
    assert (calls.groupby(["step", "call"]).waiting.min() == 0).all()  # the last rank waits for nobody
    step = known_step(profile)
    assert (step.calls, step.message, step.ranks) == (6, 128, ranks) and 0 <= step.waiting <= step.exposed and step.hidden == 0


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
    for ranks, says in ((3, "can't be split over 3 ranks"), (1, "nothing to sum"), (0, "nothing to sum")):
        with pytest.raises(KimiSpecError, match=says): measure(tiny, tmp_path / "never", ranks=ranks)
    assert not (tmp_path / "never").exists()  # refused before any process
    broken = tmp_path / "broken"
    broken.mkdir()
    for f in tiny.iterdir(): (broken / f.name).write_bytes(f.read_bytes()[: 2000 if f.suffix == ".safetensors" else None])
    with pytest.raises(KimiSpecError, match="does not load"): load_target(broken)


# --- what if

def test_kimi_arithmetic():
    counted, written = kimi_step(48), kimi_step()
    assert (counted.calls, counted.message, round(counted.total), round(counted.exposed)) == (122, 14336, 12121, 5856)
    assert counted.share == pytest.approx(0.483, abs=5e-4) and written.latency == pytest.approx(51.17, abs=0.01)
    assert all_reduce_at(counted, 26).speed_up == pytest.approx(1.2845, abs=1e-4) and all_reduce_at(written, 26).speed_up == pytest.approx(1.339, abs=1e-3)
    assert all_reduce_at(counted, 0).speed_up == pytest.approx(speed_up(counted.share, float("inf")))
    table = what_if_table(usual_questions(counted, recorded_latency(), 4, 1.68, weights_gb=547, memory_gb=96))
    assert (table.from_ms.round(2) == 12.12).all() and table.speed_up.tolist()[2] == pytest.approx(1.68 * table.from_ms[2] / table.to_ms[2])
    assert "137 GB each, and a GPU has 96" in table.assumes.iloc[-1] and (table.speed_up[table.change.str.contains("ranks")] < 1).all()


@pytest.mark.parametrize("share, factor", [(-0.1, 2), (1.0001, 2), (0.5, 0), (0.5, -3), (float("nan"), 2)])
def test_nonsense_is_refused(share, factor):
    with pytest.raises(WhatIfError): speed_up(share, factor)


@pytest.mark.parametrize("change, says", [
    (dict(parts={"all-reduce": -1.0, "other": 5.0}), "-1 us of all-reduce"), (dict(parts={"other": float("nan")}), "can't be"), (dict(parts={}), "takes no time"), (dict(calls=-1), "nothing below 0"), (dict(ranks=0), "at least 1"), (dict(tokens=float("nan")), "nothing below 0 or infinite"), (dict(kept=float("inf")), "infinite"),
    (dict(waiting=70), "waiting 70 us must lie between 0 and the all-reduce's 60"), (dict(kept=0), "some tokens kept"), (dict(hidden=-1), "nothing below 0"), (dict(hidden=float("nan")), "infinite")])
def test_a_step_that_contradicts_itself(change, says):
    with pytest.raises(WhatIfError, match=re.escape(says)): KnownStep(**dict(dict(name="x", parts={"all-reduce": 60.0, "other": 40.0}, calls=6, message=8, ranks=2), **change))


STEP = KnownStep("x", {"all-reduce": 60.0, "moe experts": 20.0, "dense gemm": 10.0, "norm and elementwise": 10.0}, 6, 1000, 8, waiting=12.0, hidden=6.0, moved_by="NCCL ring or other")


def test_only_what_is_exposed_and_moving_gets_faster():
    assert STEP.latency == (60 - 12 + 6) / 6 == 9
    assert all_reduce_at(STEP, 9).after.parts == STEP.parts
    assert all_reduce_at(STEP, 4.5).after.exposed == 12 + 27 - 6
    assert all_reduce_at(STEP, 0.5).after.exposed == all_reduce_at(STEP, 0).after.exposed == 12  # the rest hides, and the late rank stays late
    assert all_reduce_at(STEP, 18).after.exposed == 12 + 108 - 6
    for us in (-1, float("nan"), float("inf")):
        with pytest.raises(WhatIfError): all_reduce_at(STEP, us)


def test_more_tokens_grow_the_message_and_the_experts():
    line = fit_latency("here", [1000, 2000, 4000], [9.0, 10.0, 12.0])
    assert (line.alpha, line.beta, line.worst) == (pytest.approx(8), pytest.approx(0.001), pytest.approx(0, abs=1e-9))
    four = more_tokens(STEP, 4, line, kept=2.5, draft_us=7, experts=(16, 2))
    touched = experts_touched(4, 16, 2) / experts_touched(1, 16, 2)
    assert four.after.parts == pytest.approx({"all-reduce": 12 + 6 * 12 - 6, "moe experts": 20 * touched, "dense gemm": 10, "norm and elementwise": 10, "draft model": 7})
    assert (four.after.message, four.after.tokens, four.after.kept) == (4000, 4, 2.5) and four.speed_up == pytest.approx(2.5 * 100 / four.after.total)
    assert break_even(four) == pytest.approx(four.after.total / 100)
    assert [round(experts_touched(t)) for t in (1, 4, 16, 64, 128)] == [8, 31, 110, 284, 358]
    for tokens, kept in ((0, None), (2, 3), (2, 0)):
        with pytest.raises(WhatIfError): more_tokens(STEP, tokens, line, kept)
    with pytest.raises(WhatIfError, match="size of its messages isn't known"): more_tokens(KnownStep("x", {"all-reduce": 1.0}, 1, 0, 2), 2, line)


def test_fewer_ranks():
    ring, tree = with_ranks(STEP, 4), with_ranks(STEP, 4, "tree")
    assert ring.after.parts == pytest.approx({"all-reduce": 12 + 54 * 6 / 14 - 6, "moe experts": 40, "dense gemm": 20, "norm and elementwise": 10}) and tree.after.exposed == pytest.approx(12 + 54 * 2 / 3 - 6)
    assert with_ranks(with_ranks(STEP, 4).after, 8).after.parts["moe experts"] == 20
    for ranks, how in ((1, "ring"), (4, "star")):
        with pytest.raises(WhatIfError): with_ranks(STEP, ranks, how)


def asked(step, latency=None, **more): return [re.sub(r"[\d.]+ ?", "", a.change) for a in usual_questions(step, latency, **more)]


@pytest.mark.parametrize("moved_by", ["custom, one stage", "fused one-shot", "shared memory", ""])
def test_hops_are_counted_only_of_what_hops(moved_by):
    step = replace(STEP, moved_by=moved_by)
    assert not any("ranks" in q for q in asked(step)) and sum("ranks" in q for q in asked(replace(STEP, moved_by="gloo"))) == 2
    with pytest.raises(WhatIfError, match="isn't known how they scale"): with_ranks(step, 4)


def test_a_question_that_rests_on_nothing_is_not_asked():
    line = fit_latency("here", [1000, 2000, 4000], [9.0, 10.0, 12.0])
    assert any("tokens" in q for q in asked(STEP, line)) and why_not_more_tokens(STEP, line) == ""
    for step, latency, why in ((replace(STEP, kind="window"), line, "no step"), (replace(STEP, kind="prefill"), line, "prompt"), (replace(STEP, message=0), line, "size of its messages"), (STEP, None, "another size"),
                               (STEP, fit_latency("x", [1000, 4000], [9, 12]), "2 sizes only"), (STEP, fit_latency("x", [8, 64, 512], [1, 9, 1]), "misses by up to")):
        assert why in why_not_more_tokens(step, latency) and not any("tokens" in q for q in asked(step, latency))
    nothing = KnownStep("x", {"dense gemm": 9.0}, 0, 0, 1)
    assert usual_questions(nothing, line) == [] and what_if_table([]).empty and "no all-reduce" in why_not_more_tokens(nothing, line)


def test_assumptions_name_their_figures():
    line = fit_latency("here", [1000, 2000, 4000], [9.0, 12.0, 12.0])
    said = " ".join(more_tokens(STEP, 4, line).assumes)
    assert f"3 sizes that misses them by up to {line.worst:.0%}" in said and line.worst > 0.05 and "picks 8 of 384 at random, as in Kimi-K2.5" in said
    assert "picks 2 of 16 at random;" in " ".join(more_tokens(STEP, 4, line, experts=(16, 2)).assumes)
    for wrong in (dict(tokens_a_second=0), dict(tokens_a_second=float("nan")), dict(layers=0), dict(hidden=0)):
        with pytest.raises(WhatIfError): kimi_step(**wrong)


def test_latency_never_falls_below_zero():
    falling, rising = fit_latency("a", [1, 1000], [10, 5]), fit_latency("b", [1, 1000], [0.001, 100])
    assert falling.beta == 0 and 5 < falling.alpha < 10 and rising.alpha >= 0
    for sizes, us in (([8], [1]), ([8, 8], [1, 2]), ([8, 16], [0, 1]), ([8, 16], [1]), ([8, 16], [1, float("inf")]), ([8, float("nan")], [1, 2]), ([8, float("inf")], [1, 2])):
        with pytest.raises(WhatIfError): fit_latency("x", sizes, us)


# --- from files to tables

@pytest.fixture(scope="module")
def speculating(tmp_path_factory):
    truth = serving_traces(tmp_path_factory.mktemp("run"), compress=True, ranks=3, layers=3, steps=7, draft_tokens=2, skew=30, overlap=0.5, own_stream=True, pauses=1, seed=11)
    return truth, profile_files(truth.paths, layers=3, progress=False, cache=False)


def laid_shares(truth, kind="decode"):
    return truth.breakdown().merge(truth.steps[["rank", "step", "kind"]]).query("kind == @kind").drop(columns=["rank", "step", "kind"]).mean()


def test_a_profile_says_what_was_laid_down(speculating):
    truth, profile = speculating
    for kind in ("decode", "prefill"):
        found, laid = breakdown_table(profile, kind), laid_shares(truth, kind)
        for category, ns in laid.items():
            if ns: assert found["mean"][category] == pytest.approx(ns / 1e3) and found.share[category] == pytest.approx(ns / laid.total, abs=1e-9)
        assert "unclassified" in found.index and found.drop("total")["mean"].sum() == pytest.approx(found["mean"]["total"])
    decodes = truth.collectives[truth.collectives.step.isin(truth.steps.step[truth.steps.kind == "decode"])]
    waits = waiting_table(profile)
    assert waits.waiting.tolist() == pytest.approx((decodes.groupby("rank").waiting.sum() / 7e3).tolist()) and waits.moving.tolist() == pytest.approx((decodes.groupby("rank").moving.sum() / 7e3).tolist())
    assert waits["last"].sum() == pytest.approx(1) and waits.waiting.max() > 10
    hidden = communication_table(profile)
    assert hidden.overlapped["all-reduce"] > 1 and np.allclose(hidden.busy, hidden.exposed + hidden.overlapped)
    assert set(parts_table(profile).index) >= {"target", "draft"} and parts_table(profile).share.sum() == pytest.approx(1)
    step = known_step(profile)
    target = decodes[(decodes["what"] == "all-reduce") & (decodes.part != "draft")]
    assert step.calls == 6 and step.latency == pytest.approx(target.moving.sum() / len(target) / 1e3) and what_if(profile).speed_up.between(1, 2).all()


def test_tables_and_json(speculating):
    truth, profile = speculating
    shown = tables(profile, step=2)
    assert list(shown)[:3] == ["files", "steps", "a decode step, us"] and "not read" not in shown and {"step 2, us", "longest of step 2, us", "what if"} <= set(shown)
    again = json.loads(json.dumps(as_json(profile, 2), allow_nan=False))
    assert again["steps"][0]["decode"] == 7 and {row["category"] for row in again["breakdown"]["decode"]} >= {"all-reduce", "unclassified", "total"} and again["notes"] == profile.notes
    assert one_step(profile, 2).loc["total"].tolist() == (truth.steps.query("step == 2").end - truth.steps.query("step == 2").start).div(1e3).tolist()
    with pytest.raises(TraceError, match="no step 99"): one_step(profile, 99)


def test_what_is_no_run_is_refused(speculating, tmp_path):
    truth, profile = speculating
    with pytest.raises(TraceError, match="not the ranks of one run"): profile_traces([profile.traces[0]] * 2)
    with pytest.raises(TraceError, match="no traces"): profile_traces([])
    cut_short = tmp_path / "rank0.json"
    cut_short.write_bytes(gzip.decompress(truth.paths[0].read_bytes())[:-200_000])
    partly = profile_files([cut_short], progress=False, cache=False)
    assert any("not read whole" in note for note in partly.notes) and any("1 of 3 ranks" in note for note in partly.notes) and "not read" in tables(partly)
    nobody = Trace(Path("x.json"), 0, 1, events_table(dict(name=["what_is_this", "a_gemm"], kind=["kernel"] * 2, device=[0, 0], start=[0, 3000], end=[3000, 4000])))
    alone = profile_traces([nobody])
    lost = profile_traces([profile.traces[0], Trace(Path("y.json"), 1, 3, nobody.events)])
    assert lost.kinds == ["window"] and set(lost.times.index.get_level_values("rank")) == {0, 1} and any("Not every rank has steps" in note for note in lost.notes)
    assert alone.kinds == ["window"] and breakdown_table(alone).share["unclassified"] == 0.75 and known_step(alone) is None and "No serving step" in alone.notes[0]


# --- two runs

def random_steps(mean, n, seed, spread=5.0):
    t = pd.DataFrame({"all-reduce": np.random.default_rng(seed).normal(mean, spread, n), "attention": np.random.default_rng(seed + 1000).normal(40, spread, n)})
    return t.assign(total=t.sum(axis=1))


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    found = [compare_steps(random_steps(60, 20, i), random_steps(50, 20, i + 500), seed=i) for i in range(100)]
    held = sum(t.low["all-reduce"] <= -10 <= t.high["all-reduce"] for t in found)
    assert 86 <= held <= 99 and sum(t.clear["attention"] for t in found) < 6 and all(t.clear["all-reduce"] for t in found)
    assert all(t.difference["total"] == pytest.approx(t.difference.drop("total").sum()) for t in found)


def table_of(rng, n, change=1.0, rows=12):
    "Twelve categories, 100 us each with a spread of 2, that stall now and then; the first is `change` times as long and doesn't."
    x = rng.normal(100, 2, (n, rows)) + rng.exponential(60, (n, rows)) * (rng.random((n, rows)) < 0.05)
    x[:, 0] = rng.normal(100, 2, n) * change
    return pd.DataFrame(x).add_prefix("part ").assign(total=x.sum(1))


@pytest.mark.parametrize("steps", [3, 5, 8, 12, 40])
def test_a_table_without_a_change_seldom_has_a_clear_row_and_five_percent_are_found(steps):
    "Of 150 tables about 3% by construction; 14 of them would happen by chance once in a thousand times. Few steps are never sure."
    rng = np.random.default_rng(steps)
    alarms = sum(compare_steps(table_of(rng, steps), table_of(rng, steps), seed=i).clear.any() for i in range(150))
    seen = [compare_steps(table_of(rng, steps), table_of(rng, steps, 1.05), seed=i) for i in range(40)]
    if steps < CLEAR_FROM: assert alarms == 0 and not any(t.clear.any() for t in seen)
    else: assert alarms < 14 and sum(t.clear["part 0"] for t in seen) >= 28 and sum(t.low["part 0"] <= 5 <= t.high["part 0"] for t in seen) >= 33


def test_a_constant_is_clear_and_a_constant_without_a_change_is_not():
    same, other = (pd.DataFrame({"sampling": [7.0] * 9, "copy": [us] * 9}).assign(total=7.0 + us) for us in (2.0, 3.0))
    found = compare_steps(same, other)
    assert found.clear.to_dict() == {"copy": True, "sampling": False, "total": True} and (found.low["copy"], found.high["copy"]) == (1, 1)


def test_a_ratio_has_its_own_interval():
    rng = np.random.default_rng(3)
    held = [low <= 2 <= high for low, high in (times_as_long(rng.normal(10, 1, 12), rng.normal(20, 4, 12), seed=i)[1:] for i in range(100))]
    assert 82 <= sum(held) <= 99
    mean, median = (times_as_long([10, 11, 9, 10, 50], [20, 21, 19, 20, 20], how)[0] for how in (np.mean, np.median))
    assert (mean, median) == (pytest.approx(100 / 90), 2)
    for before, after in (([1, 2], [1, 2, 3]), ([1, 2, 0], [1, 2, 3])):
        with pytest.raises(TraceError, match="needs 3 steps a side and times above 0"): times_as_long(before, after)


def test_few_steps_have_no_interval_and_none_can_not_be_compared():
    assert compare_steps(random_steps(60, 2, 0), random_steps(50, 20, 1)).low.isna().all()
    with pytest.raises(TraceError, match="20 steps before, 0 after"): compare_steps(random_steps(60, 20, 0), random_steps(50, 0, 1))
    half = compare_steps(random_steps(60, 20, 0), random_steps(60, 20, 0), tokens=([1] * 20, [2] * 20))
    assert half.times["total"] == pytest.approx(0.5) and half.clear["total"]


def test_a_run_against_itself_differs_in_nothing():
    run = lay_down(Serving(steps=8, layers=3, seed=2))
    same = compare(run.traces(), run.traces())
    assert (same.steps["decode"].difference == 0).all() and not same.steps["decode"].clear.any() and same.warnings == ["prefill: 1 steps before and 1 after are few: no change is called clear with less than 8 a side, nor is there an interval with less than 3"]
    assert same.one_sided["decode"].empty


def test_what_changed_that_should_not_have():
    base = dict(steps=8, layers=3, prefill=0)
    plain, custom, wide, deep, drafting, batch = (lay_down(Serving(**dict(base, **more))) for more in (dict(seed=1), dict(seed=2, hardware="custom"), dict(seed=3, ranks=4), dict(seed=4, layers=5), dict(seed=5, draft_tokens=3), dict(seed=6, requests=16)))
    said = lambda other: " | ".join(compare(plain.traces(), other.traces()).warnings)
    assert "1 kernel runs only before" in said(custom) and "cross_device_reduce_1stage" in said(custom)
    assert "ranks in the run differ: 2 before, 4 after" in said(wide) and "group sizes differ: 2 before, 4 after" in said(wide)
    assert "all-reduces a step differ: 6 before, 10 after" in said(deep)
    assert "tokens computed a step differ: 1 before, 4 after" in said(drafting) and "requests a step differ: 1 before, 16 after" in said(batch)
    assert "decode" not in compare(plain.traces(), drafting.traces()).tokens and "decode" in compare(plain.traces(), batch.traces()).tokens
    kept = compare(plain.traces(), drafting.traces(), kept=(1, 2.5))
    assert kept.tokens["decode"].after["total"] == pytest.approx(kept.steps["decode"].after["total"] / 2.5) and kept.steps["decode"].after["draft model"] == pytest.approx(laid_shares(drafting)["draft model"] / 1e3)
    with pytest.raises(TraceError, match="no kind of step is in both"): compare(plain.traces(), lay_down(Serving(steps=0, prefill=2, layers=3)).traces())


# --- a step cut out

def events_in(path):
    text = path.read_bytes()
    return json.loads(gzip.decompress(text) if path.suffix == ".gz" else text)


def test_a_cut_step_has_all_of_it_and_as_it_was_written(speculating, tmp_path):
    truth, profile = speculating
    trace, steps = profile.traces[1], profile.steps[1]
    found = cut_step([trace], [steps], 3, tmp_path / "step.json")
    row, shown, original = steps.table[steps.table.step == 3].iloc[0], events_in(found.path), events_in(truth.paths[1])
    assert Counter(map(json.dumps, shown["traceEvents"])) <= Counter(map(json.dumps, original["traceEvents"]))
    base = original["baseTimeNanoseconds"]
    inside = [e for e in original["traceEvents"] if e["ph"] == "X" and base + round(e["ts"] * 1e3) >= row.start and base + round(e["ts"] * 1e3) < row.end]
    assert len(inside) > 100 and all(e in shown["traceEvents"] for e in inside)
    again = read_kineto(found.path)
    assert (again.rank, again.ranks) == (1, 3) and (again.events.kind == "kernel").sum() == row.kernels
    ends = {ph: Counter(e["id"] for e in shown["traceEvents"] if e["ph"] == ph) for ph in "sf"}
    assert set(ends["s"]) == set(ends["f"]) and ends["s"]
    calls = again.events[again.events.kind == "call"]
    assert set(again.events.correlation[again.events.kind == "kernel"]) <= set(calls.correlation)


def test_ranks_side_by_side_share_nothing(speculating, tmp_path):
    truth, profile = speculating
    found = cut_step(profile.traces, profile.steps, 3, tmp_path / "all.json.gz")
    shown = events_in(found.path)
    assert shown["merged"] is True and shown["distributedInfo"] == {"ranks": [0, 1, 2], "world_size": 3}  # no rank's trace, whatever the file is called
    names = {e["pid"]: e["args"]["name"] for e in shown["traceEvents"] if e["name"] == "process_name"}
    assert len(names) == 6 and {n.split(":")[0] for n in names.values()} == {"rank 0", "rank 1", "rank 2"} and found.ranks == [0, 1, 2]
    arrows = {(names[e["pid"]].split(":")[0], e["id"]) for e in shown["traceEvents"] if e["ph"] in "sf"}
    assert len(arrows) == len({i for _, i in arrows}) > 20  # no arrow has ends on two ranks
    start = {t.rank: t.events.start[(t.events.kind == "kernel") & (t.events.start >= s.table.start[3])].min() for t, s in zip(profile.traces, profile.steps)}
    for rank, ns in start.items():
        own = {pid for pid, n in names.items() if n.startswith(f"rank {rank}:")}
        assert min(shown["baseTimeNanoseconds"] + round(e["ts"] * 1e3) for e in shown["traceEvents"] if e.get("cat") == "kernel" and e["pid"] in own) == ns


def test_bad_text_is_mended_and_a_bad_cut_leaves_nothing(tmp_path):
    text = b'{"traceEvents": [{"ph":"X","cat":"kernel","name":"{a","ts":1,"dur":1,"args":{"x":Infinity,"y":NaN}},{"ph":"X","cat":"kernel","name":"b\xff","ts":2.5,"dur":0.5},{"ph":"X","cat":"cpu_op","name":"all","ts":0,"dur":900},{"ph":"X" "cat"},{"ph":"X","cat":"kernel","name":"c","ts":99,"dur":1}'
    (tmp_path / "odd.json").write_bytes(text)
    found = cut(tmp_path / "odd.json", 500, 4000, tmp_path / "out.json")
    assert [e["name"] for e in events_in(found.path)["traceEvents"]] == ["{a", "b\ufffd"] and events_in(found.path)["traceEvents"][0]["args"] == {"x": None, "y": None} and len(found.problems) == 2
    before = found.path.read_bytes()
    for start, end, out, says in ((10 ** 9, 10 ** 9 + 1, "out.json", "no event between"), (5, 4, "out.json", "before it begins"), (0, 9, "out.txt", r"named \*.json")):
        with pytest.raises(TraceError, match=says): cut(tmp_path / "odd.json", start, end, tmp_path / out)
    assert found.path.read_bytes() == before and sorted(p.name for p in tmp_path.iterdir()) == ["odd.json", "out.json"]


def test_nothing_is_replaced_but_an_earlier_cut(speculating, tmp_path):
    "An input by its name, by a link, by a hard link; another trace; a page that somebody wrote. And what can't be written is said as such."
    truth, profile = speculating
    original = tmp_path / "rank1.json.gz"
    original.write_bytes(truth.paths[1].read_bytes())
    whole = original.read_bytes()
    trace = read_kineto(original)
    row = profile.steps[1].table.iloc[3]
    (tmp_path / "soft.json.gz").symlink_to(original)
    (tmp_path / "hard.json.gz").hardlink_to(original)
    (tmp_path / "other.json").write_text('{"traceEvents": []}')
    (tmp_path / "notes.html").write_text("<h1>notes</h1>")
    (tmp_path / "folder.json").mkdir()
    for name, says in (("rank1.json.gz", "which it is cut from"), ("soft.json.gz", "which it is cut from"), ("hard.json.gz", "which it is cut from"), ("other.json", "isn't replaced"), ("notes.json", "notes.html: is there already"),
                       ("folder.json", "is a folder"), ("other.json/new.json", "other.json is not a folder"), ("new.txt", r"named \*.json")):
        with pytest.raises(TraceError, match=says): cut(trace, row.start, row.end, tmp_path / name)
        with pytest.raises(TraceError, match=says): check_output(tmp_path / name, [original])
    assert original.read_bytes() == whole and (tmp_path / "other.json").read_text() == '{"traceEvents": []}' and (tmp_path / "notes.html").read_text() == "<h1>notes</h1>"
    with pytest.raises(TraceError, match="among the traces of the run"): check_output(tmp_path / "step.json", [tmp_path])
    assert not list(tmp_path.glob(".*"))
    mine = cut(trace, row.start, row.end, tmp_path / "new" / "step.json.gz")
    page, first = open_link(mine), mine.path.read_bytes()
    again = cut(trace, row.start, row.end, check_output(mine.path, [original]))
    assert again.path.read_bytes() == first and open_link(again) == page
    with pytest.raises(TraceError, match="which it is cut from"): cut(mine.path, row.start, row.end, mine.path)  # an earlier cut is an input too
    with pytest.raises(TraceError, match="isn't replaced"): open_link(mine, out=tmp_path / "notes.html")
    with pytest.raises(TraceError, match="can't be written into"): open_link(mine, out=tmp_path / "other.json" / "page.html")


def test_a_cut_too_large_for_a_page_is_kept(speculating, tmp_path, monkeypatch):
    _, profile = speculating
    found = cut_step(profile.traces[:1], profile.steps[:1], 2, tmp_path / "step.json")
    monkeypatch.setattr("kimi_spec.profiling.perfetto.LARGEST", found.bytes - 1)
    with pytest.raises(PageTooLarge, match=f"{found.bytes:,} bytes, and a page holds {found.bytes - 1:,} at most.*the cut trace is kept"): open_link(found)
    assert found.path.stat().st_size == found.bytes and not (tmp_path / "step.html").exists()


def test_the_page_loads_nothing_by_itself(speculating, tmp_path):
    _, profile = speculating
    found = cut_step(profile.traces[:1], profile.steps[:1], 2, tmp_path / "step.json.gz")
    page = open_link(found, "a </script> & a step").read_text()
    assert base64.b64decode(re.search(r'id="trace">([^<]*)</script>', page)[1]) == found.path.read_bytes()
    assert not re.search(r"(src|href|action)\s*=|@import|url\(|fetch\(|XMLHttp|new Image", page) and page.count("</script>") == 2
    assert set(re.findall(r"https?://[\w./-]+", page)) == {"https://ui.perfetto.dev"} and page.index("onclick") < page.index("window.open")


# --- pictures

def test_pictures_show_what_the_tables_count(speculating):
    truth, profile = speculating
    spans = step_spans(profile.traces, profile.steps, 3, profile.waits)
    laid = truth.collectives[truth.collectives.step == 3]
    assert spans.duration[spans.category == "waiting"].sum() == pytest.approx(laid.waiting.sum() / 1e3) and set(spans.category) <= set(COLOURS) and spans.start.min() == 0
    kernels = spans[~spans.category.isin(["waiting", "copy"])]
    assert len(kernels) == truth.busy.query("step == 3 and category != 'copy'").kernels.sum()
    fig = draw_spans(spans)
    assert len(fig.axes[0].get_yticks()) == spans.groupby("rank").lane.nunique().sum() == 6 and draw_spans(zoomed(spans, 10, 60)).axes[0].get_xlim()[1] < 60
    with pytest.raises(TraceError, match="no step 99"): step_spans(profile.traces, profile.steps, 99)


def test_bars_and_curves():
    bars = draw_bars(pd.DataFrame({"all-reduce": [50.0, 5.0], "sampling": [0.0, 0.0], "idle": [50.0, 15.0], "total": [100.0, 20.0]}, index=["a", "b"]))
    widths = [[round(p.get_width(), 6) for p in c] for c in bars.axes[0].containers]
    assert widths == [[50, 5], [50, 15]] and [t.get_text() for t in bars.legends[0].get_texts()] == ["all-reduce", "idle"]
    curves = draw_latency({"mine": pd.DataFrame(dict(bytes=[1024, 2048], us=[3.0, 4.0]))}, marks={"here": 14336})
    labels = [t.get_text() for t in curves.legends[0].get_texts()]
    assert len(labels) == 3 and sum("public figures" in l for l in labels) == 2
    assert points_of(pd.DataFrame()) == {}
    long = draw_bars(pd.DataFrame({"idle": [1.0]}, index=["a run of four words that nobody would shorten"]))
    assert long.axes[0].get_yticklabels()[0].get_text().count("\n") >= 1


def test_idle_is_drawn_and_named_on_a_gpu_too(speculating):
    from matplotlib.colors import to_hex
    _, profile = speculating
    fig = draw_spans(step_spans(profile.traces, profile.steps, 3, profile.waits))
    assert "idle" in [t.get_text() for t in fig.legends[0].get_texts()]
    assert sum(to_hex(c.get_facecolor()[0]) == COLOURS["idle"] for c in fig.axes[0].collections) == 6  # behind every lane


# --- the phase

def test_gpu_rigs_are_not_measured(tmp_path):
    from kimi_spec.profiling.allreduce import plan, profile
    for rig in list_rigs():
        gpu = [s for s in plan(rig) if s.needs == "gpu"]
        assert bool(gpu) == rig.hardware.needs_gpu and all(not s.runs_here and s.why_not for s in gpu)
        assert not gpu or any("start_profile" in " ".join(s.command or []) for s in gpu)
        assert not gpu or f"--layers {rig.target.layers} --hidden {rig.target.hidden}" in plan(rig)[-1].what
    run = start_run("k25-vllm-tp8", str(tmp_path), "profiling")
    assert profile(run) is None
    assert {(r.name, r.value, r.source) for r in run.records} == {("allreduce.calls_per_step", 122, "derived"), ("allreduce.message", 14336, "derived")}


def test_the_kept_traces_of_vllm_compare():
    from kimi_spec.profiling.allreduce import captured, with_and_without
    found = with_and_without()
    total = found.steps["decode"].loc["total"]
    assert found.counts.loc["decode"].tolist() == [8, 8] and total.clear and 1.4 < total.times < 2.2 and found.steps["decode"].after["draft model"] > 1000 and "decode" not in found.tokens
    assert any("tokens computed a step differ: 2 before, 8 after" in w for w in found.warnings)
    side = captured("vllm-0.32.0-nano-k2.5")
    table = side.steps[0].table
    assert (table.end.to_numpy()[:-1] == table.start.to_numpy()[1:]).all() and side.table["unclassified"].sum() == 0


def test_records_of_a_measurement(tmp_path):
    "Names and labels that findings look for, from a run laid down by hand: two ranks, two steps, all-reduce 60 and then 40 of 100 us; c10d's own span begins 4 us late, and the thread goes on when the mark ends."
    from kimi_spec.profiling.allreduce import record_profile
    def trace(rank, late):
        rows = [("decode step 0", "annotation", 0, 100), ("gloo all_reduce 512 bytes", "operator", 20 + late, 80), ("c10d::allreduce_", "operator", 24 + late, 40 + late), ("aten::add", "operator", 82, 84),
                ("decode step 1", "annotation", 100, 200), ("gloo all_reduce 512 bytes", "operator", 150, 190), ("c10d::allreduce_", "operator", 154, 160), ("aten::add", "operator", 190, 194)]
        name, kind, start, end = zip(*rows)
        return Trace(Path(f"rank{rank}.json"), rank, 2, events_table(dict(name=name, kind=kind, lane=[1] * len(rows), start=[s * 1000 for s in start], end=[e * 1000 for e in end])))
    part = dict(steps=[100e-6, 100e-6], calls=[(0, 60e-6, 512), (0, 40e-6, 512)])
    results = [dict(plain=part, profiled=part, whole=[50e-6], difference=1e-6)] * 2
    run = start_run("nano-vllm", str(tmp_path), "profiling")
    record_profile(run, results, profile_traces([trace(0, 0), trace(1, 20)]))
    found = {(r.name, *sorted((k, v) for k, v in r.labels.items() if k != "tp")): r.value for r in run.records}
    assert found["allreduce.share", ("by", "mark"), ("profiler", True), ("stat", "mean")] == pytest.approx((0.6 + 0.4 + 0.4 + 0.4) / 4)
    assert found["allreduce.share", ("by", "trace"), ("profiler", True), ("stat", "mean")] == pytest.approx((0.58 + 0.36 + 0.38 + 0.36) / 4)
    assert found["allreduce.share_gap", ("by", "trace"), ("stat", "mean")] == pytest.approx(100 * (0.5 - 0.42)) and found["allreduce.share_gap", ("by", "trace"), ("stat", "worst")] == pytest.approx(22)
    assert found["allreduce.share_gap", ("by", "mark"), ("stat", "worst")] == pytest.approx(20)
    assert found["allreduce.share", ("by", "stopwatch"), ("profiler", False), ("stat", "mean")] == pytest.approx(0.5)
    assert found["allreduce.waiting_per_step", ("profiler", True), ("stat", "mean")] == pytest.approx(0.005) and found["allreduce.calls_per_step", ("stat", "mean")] == 1
    assert {r.name for r in run.records} >= {"allreduce.time_per_step", "allreduce.moving_per_step", "allreduce.message", "decode.step_time", "logits.max_difference"}


def test_numbers_of_ranks_that_can_not_be_measured(tmp_path):
    from kimi_spec.profiling.allreduce import check_ranks
    nano = next(r for r in list_rigs() if r.name == "nano-vllm")
    (tmp_path / "config.json").write_text('{"num_attention_heads": 4}')
    rig = nano.model_copy(update=dict(target=nano.target.model_copy(update=dict(path=str(tmp_path)))))
    for tensor_parallel, more, says in ((1, 4, "nothing to sum"), (2, 2, "one measurement twice"), (3, 4, "can't be split over 3"), (2, 3, "can't be split over 3"), (0, 4, "nothing to sum")):
        with pytest.raises(KimiSpecError, match=says): check_ranks(rig, tensor_parallel, more)
    check_ranks(rig, 2, 4), check_ranks(rig, 4, 0)
    for gpu in (r for r in list_rigs() if r.hardware.needs_gpu): check_ranks(gpu, 1, 1)  # measures nothing here


def test_predictions_beside_what_was_measured():
    from kimi_spec.profiling.allreduce import against_measured, plain_step
    many = KnownStep("4 ranks", {"all-reduce": 900.0, "dense gemm": 100.0}, 9, 8, 4, moved_by="gloo")
    few = KnownStep("2 ranks", {"all-reduce": 100.0, "dense gemm": 200.0}, 9, 8, 2, moved_by="gloo")
    found = against_measured(usual_questions(many), [[many], [few]])
    assert found.predicted_ms.tolist() == pytest.approx([0.5, 0.65]) and found.measured_ms.tolist() == pytest.approx([0.3, 0.3])
    assert against_measured(usual_questions(many), [[many]]).empty
    by_stopwatch = plain_step([dict(plain=dict(steps=[100e-6, 200e-6], calls=[(0, 60e-6, 512), (0, 40e-6, 512)]))] * 2, "x")
    assert by_stopwatch.parts == pytest.approx({"all-reduce": 50, "everything else": 100}) and (by_stopwatch.calls, by_stopwatch.message, by_stopwatch.ranks) == (1, 512, 2)


def test_a_window_is_not_called_a_step():
    from kimi_spec.profiling.allreduce import draw_step
    nobody = Trace(Path("x.json"), 0, 1, events_table(dict(name=["what_is_this", "a_gemm"], kind=["kernel"] * 2, device=[0, 0], start=[0, 3000], end=[3000, 4000])))
    assert draw_step(profile_traces([nobody])).axes[0].get_title() == "the whole trace, in which no step was found"
    run = lay_down(Serving(steps=0, layers=3, prefill=2))
    assert draw_step(profile_traces(run.traces())).axes[0].get_title().startswith("prefill step ")
