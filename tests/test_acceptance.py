"Acceptance: from counts to every engine's own words and back, and the logs that must not be misread."
import json
from math import isnan

import pytest
from hypothesis import given, settings, strategies as st

from kimi_spec.core.acceptance import Acceptance, AcceptanceError, AmbiguousRate, NothingDrafted, draft_token_range, read_line, read_lines, read_log, read_requests, sglang_definition
from kimi_spec.core.errors import KimiSpecError

settings.register_profile("shared machine", deadline=None, max_examples=60)
settings.load_profile("shared machine")

# --- every engine's own words, written from counts -----------------------------------------------------------------------------

def vllm_metrics(steps, drafted, positions, engines=1):
    "A scrape of /metrics; data-parallel engines share the counts."
    out = []
    for name, value in (("drafts", steps), ("draft_tokens", drafted), ("accepted_tokens", sum(positions))):
        out += [f"# HELP vllm:spec_decode_num_{name}_total Number.", f"# TYPE vllm:spec_decode_num_{name}_total counter"]
        out += [f'vllm:spec_decode_num_{name}_total{{engine="{e}",model_name="m"}} {float(value if e == 0 else 0)}' for e in range(engines)]
    out += ["# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter"]
    out += [f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="{i}"}} {float(n)}' for i, n in enumerate(positions)]
    return "\n".join(out) + "\n"

def vllm_line(a):
    shares = ", ".join(f"{a.unconditional(i):.3f}" for i in range(1, a.k + 1))
    return (f"(APIServer pid=1) INFO 02-14 10:00:00 [metrics.py:120] SpecDecoding metrics: Mean acceptance length: {a.accept_length:.2f}, Accepted throughput: 1.00 tokens/s, "
            f"Drafted throughput: 2.00 tokens/s, Accepted: {a.accepted} tokens, Drafted: {a.drafted} tokens, Per-position acceptance rate: {shares}, Avg Draft acceptance rate: {100 * a.rate:.1f}%")

FORMS = {"0.4.2": "Decode batch. {head}, accept len: {al}, {tail}", "0.4.6.post5": "Decode batch. {head}, accept len: {al}, cuda graph: True, {tail}",
         "0.5.1": "Decode batch. {head}, accept len: {al}, cuda graph: True, {tail}, ", "0.5.3": "Decode batch. {head}, accept len: {al}, cpu graph: False, {tail}, ", "0.5.3.post1": "Decode batch. {head}, accept len: {al}, cuda graph: True, {tail}, ",
         "0.5.3.post3": "Decode batch. {head}, accept len: {al}, accept rate: {rate}, cuda graph: True, {tail}, ", "0.5.4": "Decode batch [123], {head}, accept len: {al}, accept rate: {rate}, cuda graph: True, {tail}, ",
         "0.5.4.post1": "Decode batch, {head}, accept len: {al}, accept rate: {rate}, cuda graph: True, {tail}, ", "0.5.6": "Decode batch, {head}, accept len: {al}, accept rate: {rate}, npu graph: True, {tail}, ",
         "0.5.8": "Decode batch, {head}, accept len: {al}, accept rate: {rate}, cuda graph: True, {tail}, ", "0.5.10": "Decode batch, {head}, accept len: {al}, accept rate: {rate}, cpu graph: False, {tail}",
         "0.5.12": "Decode batch, {head}, accept len: {al}, accept rate: {rate}, cuda graph: True, {tail}", "0.5.16": "Decode batch [7], {head}, accept len: {al}, accept rate: {rate}, cap len: 2.00, cuda graph: True, {tail}", "0.5.23": "Decode batch, {head}, accept len: {al}, accept rate: {rate}, cap len: 2.00, block accept len: 1.50, cuda graph: True, {tail}"}

def sglang_line(a, release, running=1, stamp="[2026-02-14 10:00:00 TP0] "):
    "The decode line as `release` words it, with the rate on that release's scale."
    definition, _ = sglang_definition(release)
    rate = a.rate if definition == "accepted/drafted" else a.accept_length / (a.k + 1)
    return stamp + FORMS[release].format(head=f"#running-req: {running}, #token: 9, token usage: 0.00", al=f"{a.accept_length:.2f}", rate=f"{rate:.2f}", tail="gen throughput (token/s): 40.80, #queue-req: 0")

@st.composite
def acceptances(draw, most_steps=999):
    steps, k = draw(st.integers(1, most_steps)), draw(st.integers(1, 8))
    positions, left = [], steps
    for _ in range(k):
        left = draw(st.integers(0, left))
        positions.append(left)
    return Acceptance.from_counts(steps, per_position=positions)

# --- identities ----------------------------------------------------------------------------------------------------------------

@given(acceptances(10**6))
def test_accept_length_is_one_plus_k_times_rate(a):
    assert a.accept_length == pytest.approx(1 + a.k * a.rate)

@given(acceptances(10**6))
def test_accept_length_is_one_plus_products_of_conditionals(a):
    total, product = 1.0, 1.0
    for i in range(1, a.k + 1):
        conditional = a.conditional(i)
        product = 0.0 if isnan(conditional) else product * conditional
        assert product == pytest.approx(a.unconditional(i))
        total += product
    assert a.accept_length == pytest.approx(total)

@given(st.lists(st.integers(0, 5), min_size=1, max_size=200))
def test_replay_and_the_spread_of_its_steps(kept):
    a = Acceptance.from_replay(kept, k=5)
    mean = sum(kept) / len(kept)
    assert a.accept_length == pytest.approx(1 + mean)
    assert a.standard_error ** 2 * len(kept) == pytest.approx(sum((n - mean) ** 2 for n in kept) / len(kept), abs=1e-9)
    assert Acceptance.from_counts(len(kept), sum(kept), k=5).standard_error >= a.standard_error - 1e-9
    low, high = a.interval()
    assert 1 <= low <= a.accept_length <= high <= 6

@given(acceptances(), st.data())
def test_adding_is_counting_on(a, data):
    more = data.draw(acceptances().filter(lambda b: b.k == a.k)) if a.k <= 2 else Acceptance.from_counts(7, 0, k=a.k, per_position=[0] * a.k)
    both = a + more
    assert (both.steps, both.accepted, both.drafted) == (a.steps + more.steps, a.accepted + more.accepted, a.drafted + more.drafted)
    assert both.accept_length == pytest.approx((a.accept_length * a.steps + more.accept_length * more.steps) / both.steps)

# --- there and back ------------------------------------------------------------------------------------------------------------

@given(acceptances(10**6), st.integers(1, 3))
def test_vllm_counters(a, engines):
    back = Acceptance.from_vllm_counters("", vllm_metrics(a.steps, a.drafted, a.per_position, engines))
    assert (back.accept_length, back.per_position, back.k) == (a.accept_length, a.per_position, a.k)

@given(acceptances())
def test_vllm_line_gives_the_counts_back(a):
    back = Acceptance.from_vllm_log(vllm_line(a))
    assert (back.accept_length, back.rate, back.per_position) == (a.accept_length, a.rate, a.per_position)

@given(acceptances(10**6))
def test_vllm_line_of_a_long_interval_keeps_the_totals(a):
    back = Acceptance.from_vllm_log(vllm_line(a))
    assert back.accept_length == a.accept_length
    assert back.unconditional(1) == pytest.approx(a.unconditional(1), abs=6e-4)

@given(acceptances(), st.sampled_from(sorted(FORMS)))
def test_every_sglang_line_gives_the_same_accept_length(a, release):
    back = Acceptance.from_sglang_log(sglang_line(a, release), release)
    assert back.accept_length == pytest.approx(a.accept_length, abs=0.0051)
    if back.k is not None: assert back.k == a.k
    if back.rate is not None: assert back.rate == pytest.approx(a.rate, abs=0.0102)

@given(acceptances())
def test_sglang_server_info_and_client(a):
    info = dict(speculative_num_draft_tokens=a.k + 1, internal_states=[dict(avg_spec_accept_length=a.accept_length)])
    assert Acceptance.from_sglang_server_info(info, "0.5.10").rate == pytest.approx(a.rate)
    assert Acceptance.from_client(10.0 * a.accept_length, 10.0, a.k).rate == pytest.approx(a.rate)

@given(st.integers(2, 16), st.floats(0, 1), st.sampled_from(["len/num_draft_tokens", "accepted/drafted"]))
def test_the_true_number_of_draft_tokens_is_always_in_range(n, share, definition):
    length = 1 + share * (n - 1)
    rate = share if definition == "accepted/drafted" else length / n
    low, high = draft_token_range(round(length, 2), round(rate, 2), definition)
    assert low <= n <= high

# --- bare rates ----------------------------------------------------------------------------------------------------------------

def test_a_bare_rate_is_refused_with_every_meaning():
    with pytest.raises(AmbiguousRate) as caught: Acceptance.from_rate(0.25)
    text = str(caught.value)
    assert all(part in text for part in ("k=3", "0.75 tokens a step", "0.25 tokens a step", "0.00 tokens a step", "0% of drafted", "len/num_draft_tokens"))
    assert issubclass(AmbiguousRate, KimiSpecError)

def test_the_three_rates_of_the_story():
    assert Acceptance.from_rate(0.25, 3, "len/num_draft_tokens").accept_length == 1
    public = Acceptance.from_rate(0.42, 3, "len/num_draft_tokens")
    assert (round(public.accept_length, 2), round(public.rate, 3)) == (1.68, 0.227)
    assert Acceptance.from_rate(0.15, 5, "accepted/drafted").accept_length == pytest.approx(1.75)

@pytest.mark.parametrize("call, words", [
    (lambda: Acceptance.from_rate(42, 3), "percentage"), (lambda: Acceptance.from_rate(0.1, 3, "len/num_draft_tokens"), "can't be 0.1"), (lambda: Acceptance.from_rate(0.4, 3, "acceptd/drafted"), "Nearest: 'accepted/drafted'"),
    (lambda: Acceptance.from_rate(0.4, None, "alpha"), "needs k"), (lambda: Acceptance.from_counts(5), "give k"), (lambda: Acceptance.from_counts(5, k=3), "give the accepted"),
    (lambda: Acceptance.from_counts(5, 3, [2, 0]), "add up"), (lambda: Acceptance.from_counts(5, per_position=[6, 0]), "fall along"), (lambda: Acceptance.from_replay([4], 3), "can't keep 4 of 3"),
    (lambda: Acceptance.from_replay([], 3), "no speculative step"), (lambda: Acceptance.from_counts(5, 3, k=3).speedup(0), "positive"), (lambda: Acceptance.from_counts(5, 3, k=3).unconditional(4), "outside 1..3"),
    (lambda: Acceptance.from_client(0, 1), "positive"), (lambda: Acceptance.from_client(9, 10, 3), "one chunk"), (lambda: sglang_definition("ten"), "not a release"),
    (lambda: Acceptance.from_vllm_log("SpecDecoding metrics: Draft acceptance rate: 1%"), "known form"),
    (lambda: Acceptance("sglang", stated_length=1.5) + Acceptance("sglang", stated_length=1.5), "ratios only")])
def test_each_wrong_input_gets_one_clear_message(call, words):
    with pytest.raises(AcceptanceError, match=words.replace(".", r"\.")): call()

# --- vLLM counters -------------------------------------------------------------------------------------------------------------

def test_a_restart_between_scrapes_is_an_error():
    with pytest.raises(AcceptanceError, match="restarted"): Acceptance.from_vllm_counters(vllm_metrics(10, 30, [8, 5, 2]), vllm_metrics(5, 15, [3, 2, 1]))

def test_a_restart_shows_even_when_the_counters_have_grown_past_the_old_ones():
    created = "# TYPE vllm:spec_decode_num_drafts_created gauge\nvllm:spec_decode_num_drafts_created{{engine=\"0\",model_name=\"m\"}} {}\n"
    with pytest.raises(AcceptanceError, match="restarted"):
        Acceptance.from_vllm_counters(vllm_metrics(10, 30, [8, 5, 2]) + created.format(1.0), vllm_metrics(50, 150, [30, 20, 10]) + created.format(2.0))

def test_no_counters_means_no_speculation_or_another_engine():
    with pytest.raises(AcceptanceError, match="speculation is off, or the engine is another"): Acceptance.from_vllm_counters("", "# TYPE up gauge\nup 1\n")

def test_drafts_cut_short_keep_rate_and_length_apart():
    a = Acceptance.from_vllm_counters("", vllm_metrics(10, 25, [8, 5, 2]))
    assert (a.accept_length, a.rate, a.k) == (2.5, 0.6, 3)

# --- logs ----------------------------------------------------------------------------------------------------------------------

ARGS = "server_args=ServerArgs(speculative_num_steps=3, speculative_num_draft_tokens={n})\n"

def write(tmp_path, *lines):
    (tmp_path / "server.log").write_text("\n".join(lines) + "\n")
    return tmp_path / "server.log"

NOTHING = Acceptance.from_counts(100, per_position=[0, 0, 0])

def test_a_quarter_on_the_old_scale_is_nothing(tmp_path):
    path = write(tmp_path, ARGS.format(n=4), *[sglang_line(NOTHING, "0.5.10")] * 3)
    reading = read_log(path, "sglang==0.5.10")
    assert (reading.acceptance.accept_length, reading.acceptance.rate) == (1.0, 0.0)
    assert "0%, that is 0.00 of 3 a step" in " ".join(reading.summary())
    as_json = json.loads(json.dumps(reading.to_dict()))
    assert as_json["evidence"] == [f"{path}:3-5"] and as_json["acceptance"]["rate"] == 0

@pytest.mark.parametrize("engine", [None, "auto", "sglang", "sglang==0.5.24", "sglang==0.5.6rc1", "sglang==0.5.2"])
def test_an_unknown_release_leaves_the_rate_unread(tmp_path, engine):
    reading = read_log(write(tmp_path, ARGS.format(n=4), sglang_line(NOTHING, "0.5.10")), engine)
    assert reading.acceptance.rate is None and reading.acceptance.accept_length == 1
    assert reading.rate_means.startswith("unknown") and "can't be read" in " ".join(reading.summary())

def test_lines_that_contradict_the_release_or_the_arguments_are_left_unread(tmp_path):
    for engine, n in (("sglang==0.5.12", 4), ("sglang==0.5.10", 6)):
        reading = read_log(write(tmp_path, ARGS.format(n=n), sglang_line(NOTHING, "0.5.10")), engine)
        assert reading.acceptance.rate is None and "is it really" in reading.rate_means

def test_a_tree_is_divided_by_its_depth_in_the_oldest_scale(tmp_path):
    tree = "server_args=ServerArgs(speculative_num_steps=3, speculative_eagle_topk=4, speculative_num_draft_tokens=16)"
    reading = read_log(write(tmp_path, tree, sglang_line(NOTHING, "0.5.4")), "sglang==0.5.4")
    assert (reading.acceptance.k, reading.acceptance.rate) == (15, 0)

def test_the_newer_scale_gives_the_rate_even_where_k_is_unknown(tmp_path):
    reading = read_log(write(tmp_path, sglang_line(NOTHING, "0.5.12")), "sglang==0.5.12")
    assert (reading.acceptance.rate, reading.acceptance.k) == (0, None)

def test_unknown_forms_are_reported_with_their_line(tmp_path):
    reading = read_log(write(tmp_path, "hello", sglang_line(NOTHING, "0.5.10"), "Decode batch: #running-req 1", "accept length 2"))
    assert [number for number, _ in reading.unread] == [3, 4]

def test_progress_bars_do_not_shift_line_numbers(tmp_path):
    reading = read_log(write(tmp_path, "loading 1%\rloading 50%\rloading 100%", "\x1b[32m" + sglang_line(NOTHING, "0.5.10") + "\x1b[0m"))
    assert reading.lines[0].number == 2

def test_lines_weigh_by_running_requests_and_say_so(tmp_path):
    two = Acceptance.from_counts(100, 100, k=3)
    reading = read_log(write(tmp_path, sglang_line(two, "0.5.10", running=8), sglang_line(NOTHING, "0.5.10", running=2)), "sglang==0.5.10")
    assert reading.acceptance.accept_length == pytest.approx(1.8) and "weighted by #running-req" in reading.weighting
    reading = read_log(write(tmp_path, sglang_line(two, "0.5.10", running=0), sglang_line(NOTHING, "0.5.10", running=0)), "sglang==0.5.10")
    assert reading.acceptance.accept_length == pytest.approx(1.5) and "plain mean" in reading.weighting

def test_vllm_lines_add_up(tmp_path):
    a = Acceptance.from_counts(100, per_position=[80, 60, 30])
    reading = read_log(write(tmp_path, vllm_line(a), vllm_line(NOTHING)))
    assert (reading.acceptance.steps, reading.acceptance.accept_length, reading.acceptance.engine) == (200, 1.85, "vllm")

@pytest.mark.parametrize("lines, engine, words", [
    (["hello"], None, "no decode line"), (["Decode batch, #running-req: 1, #token: 9, gen throughput (token/s): 40.80, #queue-req: 0"], None, "speculation is off"),
    (["Decode batch: strange"], None, "line 1: Decode batch: strange"), ([sglang_line(NOTHING, "0.5.10")], "vllm", "but lines of sglang"), ([sglang_line(NOTHING, "0.5.10")], "sglagn", "Nearest: 'sglang'"),
    ([sglang_line(NOTHING, "0.5.10"), vllm_line(NOTHING)], None, "say which"), ([vllm_line(NOTHING), vllm_line(Acceptance.from_counts(9, 0, k=5, per_position=[0] * 5))], None, "different k")])
def test_logs_that_tell_nothing_say_why(tmp_path, lines, engine, words):
    with pytest.raises(AcceptanceError, match=words): read_log(write(tmp_path, *lines), engine)

def test_a_missing_log_and_a_binary_one(tmp_path):
    with pytest.raises(AcceptanceError, match="no log at"): read_log(tmp_path / "none.log")
    (tmp_path / "x.log").write_bytes(bytes(range(256)) * 50)
    with pytest.raises(AcceptanceError, match="no decode line"): read_log(tmp_path / "x.log")

@settings(max_examples=200)
@given(st.text(max_size=200))
def test_any_text_after_the_marker_is_read_or_refused(text):
    for marker in ("Decode batch, #running-req: ", "SpecDecoding metrics: "):
        for read in (Acceptance.from_vllm_log, lambda line: Acceptance.from_sglang_log(line, "0.5.10")):
            with pytest.raises(AcceptanceError): read(marker + text)

@pytest.mark.parametrize("figures", ["accept len: 0.50, accept rate: 0.12", "accept len: nan, accept rate: 0.25", "accept len: 1.00, accept rate: x", "accept len: 1.00, accept rate: inf"])
def test_figures_that_cannot_be_are_left_unread(tmp_path, figures):
    broken = f"Decode batch, #running-req: 1, #token: 9, token usage: 0.00, {figures}, cuda graph: True"
    with pytest.raises(AcceptanceError): Acceptance.from_sglang_log(broken, "0.5.10")
    assert read_log(write(tmp_path, broken, sglang_line(NOTHING, "0.5.10")), "sglang==0.5.10").unread[0][0] == 1

# --- load and requests ---------------------------------------------------------------------------------------------------------

@given(acceptances(), st.sampled_from(sorted(FORMS)), st.integers(0, 999))
def test_every_sglang_line_tells_its_load(a, release, running):
    said = read_line(sglang_line(a, release, running), 5)
    assert (said.engine, said.kind, said.running, said.queued, said.kv_usage, said.throughput, said.number, said.more) == ("sglang", "decode", running, 0, 0, 40.8, 5, {"#token": "9"})
    assert said.accept_length == pytest.approx(a.accept_length, abs=0.0051) and (said.accept_rate is not None) == (sglang_definition(release)[0] is not None)
    assert said.graph is (None if release == "0.4.2" else "cpu graph" not in FORMS[release]) and said.batch == {"0.5.4": 123, "0.5.16": 7}.get(release)
    assert (said.cap_length, said.block_accept_length) == {"0.5.16": (2, None), "0.5.23": (2, 1.5)}.get(release, (None, None))

@pytest.mark.parametrize("line", ["Decode batch, running: 3", "Decode batch, #running-req: 3, token usage: 0.00, #queue-req: many", "Prefill batch, #new-seq: 1, #queue-req: 0", "prefill batch: 3", "Decode batch, #running-req: 1, #token: 9, token usage: nan, #queue-req: 0",
                                  "Engine 000: Avg prompt throughput: 1.0 tokens/s, Running: x reqs, Waiting: 0 reqs"])
def test_a_line_of_load_that_cannot_be_read_is_reported_with_its_number(tmp_path, line):
    with pytest.raises(AcceptanceError, match="line 3 has an unknown form"): read_line(line, 3)
    found, unread = read_lines(write(tmp_path, "hello", sglang_line(NOTHING, "0.5.10"), line, sglang_line(NOTHING, "0.5.8")))
    assert ([said.number for said in found], unread) == ([2, 4], [(3, line)])

def test_many_unknown_lines_are_counted_and_the_first_is_shown(tmp_path):
    reading = read_log(write(tmp_path, *["Decode batch: strange"] * 500, sglang_line(NOTHING, "0.5.10")))
    assert reading.summary()[-1] == "not read: 500 lines of an unknown form, the first is line 1: Decode batch: strange"

def finished(info, form):
    if form == "text": return f"[2026-02-14 10:00:01] Finish: obj=GenerateReqInput(rid='7', text=\"'spec_verify_ct': 99\"), out={{'text': 'x', 'meta_info': {info}}}"
    return json.dumps({"event": "request.finished", "out": {"meta_info": info}})

@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=5), st.sampled_from(["text", "json"]), st.sampled_from([("spec_accept_token_num", "spec_draft_token_num", "spec_accept_histogram"), ("spec_accepted_drafts", "spec_proposed_drafts", "spec_accept_histogram"),
       ("spec_num_correct_drafts", "spec_num_proposed_drafts", "spec_correct_drafts_histogram")]))
def test_requests_in_a_log_give_every_count_back(tmp_path_factory, kept, form, names):
    "As 0.5.10, 0.5.11 and 0.5.12 name them; a histogram ends at the largest number that occurred."
    infos = [dict(zip(names, (sum(steps), 3 * len(steps), [steps.count(n) for n in range(max(steps) + 1)])), spec_verify_ct=len(steps), completion_tokens=sum(steps) + len(steps), spec_accept_rate=0.5) for steps in kept]
    path = write(tmp_path_factory.mktemp("log"), *[finished(info, form) for info in infos], finished({"completion_tokens": 1}, form))
    truth = Acceptance.from_replay([n for steps in kept for n in steps], 3)
    found = Acceptance.from_sglang_requests(read_requests(path), "0.5.12")
    assert (found.steps, found.drafted, found.accepted, found.per_position) == (truth.steps, truth.drafted, truth.accepted, truth.per_position)

def test_requests_without_speculation_are_nothing_drafted(tmp_path):
    with pytest.raises(NothingDrafted): Acceptance.from_sglang_requests(read_requests(write(tmp_path, finished({"completion_tokens": 1}, "text"))))
    assert read_requests(write(tmp_path, "nothing finished here")) == []

def test_long_logs_and_endless_lines_take_no_time(tmp_path):
    from time import perf_counter
    path, start = write(tmp_path, *[sglang_line(NOTHING, "0.5.10")] * 20_000, "SpecDecoding metrics: " + "A" * 200_000, "Decode batch, #running-req: " + "A: " * 100_000), perf_counter()
    assert len(read_log(path, "sglang==0.5.10").lines) == 20_000
    assert perf_counter() - start < 10

def test_show_prints_the_evidence(tmp_path):
    from io import StringIO
    from rich.console import Console
    out = StringIO()
    read_log(write(tmp_path, *[sglang_line(NOTHING, "0.5.10")] * 20, "Decode batch: strange"), "sglang==0.5.10").show(Console(file=out, width=100), most=5)
    assert all(part in out.getvalue() for part in ("20 intervals", "and 15 more, to line 20", "0%", "not read: 1 line of an unknown form, the first is line 21: Decode batch: strange"))
