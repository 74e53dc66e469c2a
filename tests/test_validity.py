"Validity notes: every kind can be earned, no row earns one without its facts, and no pattern can hang on a log."
import re
from dataclasses import replace
from re import _constants as regex, _parser  # what `re` itself compiles from

import pytest
from hypothesis import given, settings, strategies as st

from kimi_spec.core.acceptance import Acceptance
from kimi_spec.core.case import read_case
from kimi_spec.core.records import Records
from kimi_spec.engines.validity import CHECKS, FALLBACKS, PAIR_CHECKS, Row, against, alone, fallbacks, is_degenerate, record_notes, rep_n, rows

settings.register_profile("shared machine", deadline=None, max_examples=60)
settings.load_profile("shared machine")

GOOD = Row("nano-vllm", 8, "vllm", "0.32.0", rates=[100, 104, 102], requests=64, output_tokens=3000, tokens_from="usage", ttft_ms=40, tpot_ms=10, e2e_ms=540, bunched=0.02, request_s_per_token=[0.011, 0.01, 0.012], warmup=2, running=8, queued=0, max_running=16,
           kv_tokens=55184, kv_usage=0.1, k=3, acceptance=Acceptance.from_counts(900, per_position=[800, 700, 600]), rate_scale="accepted/drafted", answers=[list(range(60))], settings={"dtype": "float32"}, ceiling=5000)
SPOILED = dict(capped=dict(concurrency=17), queued=dict(queued=1), few=dict(requests=31), warmup=dict(request_s_per_token=[0.03, 0.01, 0.01]), errors=dict(errors=1), bunched=dict(bunched=0.3), prefill=dict(ttft_ms=60), counting=dict(tokens_from="chunks"), ceiling=dict(ceiling=120),
               single=dict(rates=[100]), spread=dict(rates=[100, 111]), degenerate=dict(answers=[[1, 2] * 40]), few_steps=dict(acceptance=Acceptance.from_counts(199, per_position=[150, 100, 50])), estimated=dict(acceptance=replace(GOOD.acceptance, note="estimated: by tokens")),
               idle=dict(acceptance=Acceptance.from_counts(900, 0, k=3)), maximum=dict(acceptance=Acceptance.from_counts(900, 2700, k=3)), unread_rate=dict(rate_scale="unknown"))


def test_a_good_row_earns_nothing():
    assert alone(GOOD) == [] and against(GOOD, replace(GOOD, rig="nano-vllm-base")) == []


def test_every_check_has_a_case():
    assert set(SPOILED) == set(CHECKS)


@pytest.mark.parametrize("kind", SPOILED)
def test_each_fact_spoils_by_itself(kind):
    notes = alone(replace(GOOD, **SPOILED[kind]))
    assert kind in [n.kind for n in notes]
    assert all(n.text and n.evidence for n in notes)
    assert len(notes) == 1 or kind == "capped" and [n.kind for n in notes] == ["capped", "few"], notes


@given(st.sets(st.sampled_from(sorted(set(GOOD.__dataclass_fields__) - {"rig"}))), st.sampled_from([{}, *SPOILED.values()]))
def test_missing_facts_are_no_faults(missing, spoiled):
    "A check without its facts says nothing, and none of them falls over."
    fields = GOOD.__dataclass_fields__
    gone = {name: fields[name].default_factory() if name == "settings" else fields[name].default for name in missing}
    row = replace(GOOD, **{**spoiled, **gone})
    assert {n.kind for n in alone(row)} <= set(spoiled and SPOILED) | {"few"}
    against(row, GOOD), against(GOOD, row)
    assert alone(Row("bare")) == []


@pytest.mark.parametrize("kind, mine, theirs", [("kv_capacity", dict(kv_tokens=1000), dict(kv_tokens=2000)), ("settings", dict(settings={"max_model_len": "512"}), dict(settings={"max_model_len": "2048"})), ("settings", dict(release="0.31.0"), {}),
                                                ("running_apart", dict(max_running=4), {}), ("rate_scales", dict(rate_scale="len/num_draft_tokens"), {})])
def test_each_pair_of_rows(kind, mine, theirs):
    assert [n.kind for n in against(replace(GOOD, **mine), replace(GOOD, rig="other", **theirs))] == [kind] and kind in PAIR_CHECKS


@given(st.lists(st.integers(0, 5), max_size=80), st.integers(1, 6))
def test_repetition_lies_between_none_and_all(tokens, n):
    share, grams = rep_n(tokens, n), [tuple(tokens[i:i + n]) for i in range(len(tokens) - n + 1)]
    assert 0 <= share < 1 and round(share * len(grams)) == len(grams) - len(set(grams))
    assert rep_n(tokens, n) == pytest.approx(rep_n(" ".join(map(str, tokens)), n))


def test_the_tail_of_a_loop_counts_less_than_a_loop():
    assert is_degenerate([1, 2, 3] * 20) and not is_degenerate(list(range(60)) + [1, 2, 3] * 10) and not is_degenerate([1] * 34)


def endless(parsed, inside=False):
    "Whether a repetition without a limit holds another one: only then can a line cost more than its length squared."
    for op, what in parsed:
        loops = op in (regex.MAX_REPEAT, regex.MIN_REPEAT) and what[1] == regex.MAXREPEAT
        if loops and inside: return True
        parts = what if isinstance(what, (tuple, list)) else [what]
        parts = [part for p in parts for part in (p if isinstance(p, list) else [p])]
        if any(endless(part, inside or loops) for part in parts if isinstance(part, _parser.SubPattern)): return True
    return False


@pytest.mark.parametrize("pattern", FALLBACKS, ids=lambda p: p.kind)
def test_no_pattern_can_hang_on_a_line(pattern):
    assert endless(_parser.parse(r"(a+)+b")) and endless(_parser.parse(r"x|(?:\s*a?)*b")) and not endless(_parser.parse(r"a+ b* [c-d]{0,80}"))
    for said in (pattern.pattern, pattern.unless):
        parsed = _parser.parse(said)
        assert not endless(parsed) and re.compile(said)
    assert pattern.why and pattern.source
    assert [fallbacks(line, patterns=[pattern]) for line in ("fp8 kv cache " * 2000, "Overriding cudagraph_mode " * 2000, "kv cache fp8" + " " * 9000)] == [[], [], []]


def test_the_recorded_case_and_a_run_go_through_the_same_checks(tmp_path):
    records = Records(tmp_path / "records.jsonl", rig="nano-sglang", phase="launches")
    say = lambda name, value, unit, **labels: records.add(name, value, unit, method="m", evidence="logs/x", labels=labels)
    for repeat, speed in enumerate((100.0, 120.0)): say("throughput.output", speed, "tok/s", concurrency=16, repeat=repeat)
    for stat, value in (("mean", 90.0), ("p99", 900.0)): say("latency.ttft_ms", value, "ms", concurrency=16, repeat=0, stat=stat)
    say("latency.e2e_ms", 500.0, "ms", concurrency=16, repeat=0, stat="mean"), say("load.queued", 11, "count", concurrency=16, repeat=0), say("load.queued", 12, "count", concurrency=16, repeat=1)
    say("server.max_running", 4, "count"), say("acceptance.accept_length", 1.5, "tokens/step", k=3), say("spec.steps", 100, "count")
    (row,) = rows(records)
    assert {n.kind for n in alone(row)} == {"capped", "prefill", "spread", "few_steps"} and alone(row)[0].text.startswith("capped at 4, 12 queued")
    record_notes(row, alone(row), records)
    assert [r.labels["kind"] for r in records if r.name == "validity.note"] == [n.kind for n in alone(row)]
    say("level.accept_length", 1.0, "tokens/step", concurrency=16, repeat=0), say("level.accept_length", 1.006, "tokens/step", concurrency=16, repeat=1)
    (own,) = rows(records)
    assert own.acceptance.accept_length == pytest.approx(1.003) and "idle" in {n.kind for n in alone(own)} and row.acceptance.accept_length == 1.5
    found = {(r.rig, r.concurrency): {n.kind for n in alone(r)} for r in rows(read_case())}
    assert "capped" in found["k25-sglang-tp8-custom", 128] and "capped" not in found["k25-sglang-tp8", 128] and "idle" in found["k25-sglang-tp8-custom", 1]


def test_a_note_of_prefill_is_short():
    note = next(n for n in alone(replace(GOOD, ttft_ms=600, tpot_ms=8.6956, e2e_ms=4286)) if n.kind == "prefill")
    assert note.text == "14% of a request is waiting for its first token; after that it decodes at 115.0 tok/s" and len(note.text) <= 110
