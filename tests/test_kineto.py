"Traces in every shape: the reader finds what json.loads finds, and what a damaged file still holds."
import gzip
import json
import subprocess
import sys
from collections import Counter
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trace_files import LAYOUTS, template, write_trace

from kimi_spec.profiling import kineto
from kimi_spec.profiling.kineto import by_layout, by_quotes, one_by_one, read_kineto
from kimi_spec.profiling.trace import COLUMNS, TraceError, events_table

KINDS = dict(kernel="kernel", gpu_memcpy="copy", gpu_memset="set", gpu_user_annotation="gpu_annotation", user_annotation="annotation", cuda_runtime="call", cuda_driver="call", cpu_op="operator")
QUIET = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def reference(path):
    "Counts and rows by plain json, with exact decimals."
    raw = Path(path).read_bytes()
    found = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw, parse_float=Decimal)
    events = found if isinstance(found, list) else found["traceEvents"]
    base = 0 if isinstance(found, list) else found.get("baseTimeNanoseconds", 0)
    counts = Counter(f"{e['ph']}/{e['cat']}" if e.get("cat") else e["ph"] for e in events)
    on_gpu, rows = "X/kernel" in counts, []
    for e in events:
        kind, name, args = KINDS.get(e.get("cat")) if e["ph"] == "X" else None, e["name"], e.get("args", {})
        call = any(word in name.lower() for word in ("launch", "memcpy", "memset", "synchronize"))
        if kind and not (kind == "call" and not call) and not (kind == "operator" and on_gpu and name != "record_param_comms"):
            start = base + round(Decimal(e["ts"]) * 1000)
            rows.append((start, start + round(Decimal(e["dur"]) * 1000), name, kind, args.get("correlation", -1), args.get("External id", -1), args.get("Collective name", ""), args.get("In msg nelems", -1)))
    return dict(counts), sorted(rows, key=lambda row: row[0])


def rows(trace):
    e = trace.events
    return [*zip(*(e[c].tolist() for c in ("start", "end", "name", "kind", "correlation", "external", "collective", "elements_in")))]


def agrees(path, whole=True):
    "Read a file both ways."
    trace = read_kineto(path)
    counts, expected = reference(path)
    assert trace.counts == counts
    assert rows(trace) == expected
    assert not trace.problems and trace.info["whole"] is whole
    return trace


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_a_serving_trace_in_every_layout(tmp_path, layout, suffix):
    trace = agrees(write_trace(tmp_path / f"a{suffix}", 2_500_000, 1, layout))
    assert (trace.rank, trace.ranks, trace.rank_from, trace.gpu) == (3, 8, "trace", True)
    assert {column: str(dtype) for column, dtype in trace.events.dtypes.items()} == {column: str(dtype) for column, dtype in events_table(dict(start=[1], end=[2])).dtypes.items()}
    assert list(trace.events) == list(COLUMNS)
    messages = trace.events[trace.events.collective == "allreduce"]
    assert len(messages) > 50 and set(messages.bytes) == {14_336} and set(messages.group_size) == {8} and set(messages.dtype) == {"BFloat16"} and (messages.seq > 0).all()
    assert set(trace.events[trace.events.kind == "kernel"].lane) == {7} and set(trace.events[trace.events.kind == "call"].device) == {-1}


def test_most_events_are_counted_without_being_decoded(tmp_path, monkeypatch):
    decoded = []
    plain = kineto.many.decode
    monkeypatch.setattr(kineto, "many", type("", (), dict(decode=staticmethod(lambda text: decoded.append(len(text)) or plain(text)))))
    for layout in LAYOUTS:
        path = write_trace(tmp_path / "a.json", 16_000_000, 2, layout)
        decoded.clear()
        trace = read_kineto(path)
        assert len(trace.events) < 0.2 * sum(trace.counts.values())
        assert sum(decoded) < 0.55 * path.stat().st_size, layout


NAMES = st.text(st.sampled_from('ab{}[]":,\\ \n\t/é☃phcat') | st.characters(blacklist_categories=["Cs"]), max_size=12)
NAMES |= st.sampled_from(['{"ph": "X", "cat": "kernel"}', "\n  },\n  {\n    ", '"ph"', "cudaLaunchKernel", "cudaEventRecord", "record_param_comms", "a}", "{", '"', "\\", "}, {"])
VALUES = st.recursive(st.integers(-2 ** 70, 2 ** 70) | st.booleans() | st.none() | NAMES | st.floats(allow_nan=False, allow_infinity=False, width=32), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=5)


@st.composite
def events(draw):
    "One event, seldom an ordinary one."
    ph = draw(st.sampled_from("XXXXXXsfMi"))
    event = dict(ph=ph, cat=draw(st.sampled_from([*KINDS, "ac2g", "python_function", "x"])), name=draw(NAMES), pid=draw(st.integers(0, 9) | st.just("Spans")), tid=draw(st.integers(0, 2 ** 40) | NAMES))
    event["ts"] = draw(st.integers(0, 2 ** 42 * 1000).map(lambda ns: Decimal(ns) / 1000) | st.integers(0, 1_700_000_000_000_000) | st.integers(0, 10 ** 18).map(lambda ns: str(Decimal(ns) / 1000)))
    if ph == "X": event["dur"] = draw(st.integers(0, 10 ** 9).map(lambda ns: Decimal(ns) / 1000) | st.integers(0, 10 ** 6))
    args = {key: draw(st.integers(-1, 2 ** 40)) for key in draw(st.sets(st.sampled_from(["correlation", "External id", "In msg nelems"])))} if ph == "X" else {}
    if "In msg nelems" in args: args |= {"Collective name": "allreduce", "dtype": "Half"}
    args |= {f"~{key}": value for key, value in draw(st.dictionaries(NAMES, VALUES, max_size=3)).items()}
    if draw(st.booleans()): event["args"] = args
    if draw(st.integers(0, 3)) == 0: event = dict(draw(st.permutations([*event.items()])))
    return event


def text_of(event, layout):
    def plain(value): return str(value) if isinstance(value, Decimal) else json.dumps(value)
    event = {key: plain(value) if key != "args" else {json.dumps(k)[1:-1]: json.dumps(v) for k, v in value.items()} for key, value in event.items()}
    return template(event, layout)


@QUIET
@given(st.lists(st.tuples(events(), st.sampled_from(LAYOUTS)), max_size=25), st.sampled_from([None, *LAYOUTS]), st.integers(30, 3000), st.sampled_from(["object", "list", "footer first"]))
def test_odd_events_in_odd_layouts_at_odd_cuts(tmp_path, monkeypatch, found, layout, piece, form):
    monkeypatch.setattr(kineto, "PIECE", piece)
    monkeypatch.setattr(kineto, "ROWS", 4)
    body = "".join(text_of(event, layout or own) for event, own in found).rstrip(", \n")
    whole = {"object": '{"schemaVersion": 1, "traceEvents": [%s], "baseTimeNanoseconds": 7}', "list": " [%s]", "footer first": '{"baseTimeNanoseconds": 7, "x": {"traceEvents": ["{"]}, "traceEvents": [%s]\n}\n'}[form]
    path = tmp_path / "odd.json"
    path.write_text(whole % body)
    agrees(path)


@QUIET
@given(st.lists(st.tuples(events(), st.sampled_from(LAYOUTS)), min_size=1, max_size=12))
def test_every_way_to_cut_that_does_not_refuse_cuts_right(found):
    text = "".join(text_of(event, layout) for event, layout in found).lstrip().rstrip(", ").encode()
    expected = [json.dumps(event, default=str) for event in json.loads(f"[{text.decode()}]")]
    for way in (by_layout, by_quotes, lambda t: one_by_one(t, True)[0]):
        if cut := way(text):
            cuts = [json.dumps(json.loads(text[s:e])) for s, e in zip(cut.starts, cut.ends)]
            assert cuts == expected[:len(cuts)]
            assert len(cuts) == len(expected) - (way is by_layout)


def small_trace(path, layout="kineto"):
    return write_trace(path, 40_000, 3, layout).read_bytes()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cut_short_at_every_thousandth_byte(tmp_path, layout):
    data = small_trace(tmp_path / "a.json", layout)
    expected, seen = reference(tmp_path / "a.json")[0], -1
    for size in range(1000, len(data), 1000):
        (tmp_path / "cut.json").write_bytes(data[:size])
        trace = read_kineto(tmp_path / "cut.json")
        assert not trace.info["whole"] and trace.problems and trace.problems[-1].place
        assert sum(trace.counts.values()) >= seen and all(count <= expected[key] for key, count in trace.counts.items())
        begun = data[:size].count(b'"ph"')
        assert begun - 2 <= sum(trace.counts.values()) <= begun  # nothing that was complete is missing
        seen = sum(trace.counts.values())


def test_cut_short_at_every_byte(tmp_path):
    data = b'{"distributedInfo": {"rank": 1, "world_size": 2}, "traceEvents": [' + b"".join(
        template(dict(ph='"X"', cat='"kernel"', name=json.dumps(f'k{i} {{"\\'), pid=0, tid=7, ts=f"{i}.5", dur="0.25", args=dict(stream=7)), layout).encode() for i, layout in enumerate(LAYOUTS * 2))
    data = data.rstrip(b", ") + b'\n], "baseTimeNanoseconds": 1000, "traceName": "x"}'
    ends = [i + 1 for i in range(len(data)) if data[:i + 1].endswith((b"}\n  }", b"}}"))]
    for compress in (False, True):
        raw = gzip.compress(data, 0) if compress else data
        for size in range(1, len(raw), 1 + compress):
            (tmp_path / "cut").write_bytes(raw[:size])
            try: trace = read_kineto(tmp_path / "cut")
            except TraceError as e:
                assert size < 20 and any(said in str(e) for said in ("empty", "not a trace", "decompressed"))
                continue
            assert not trace.info["whole"] or (compress and size > len(raw) - 8)
            assert trace.problems
            if not compress:
                assert len(trace.events) == sum(end <= size for end in ends)
                assert trace.rank == (1 if size > 48 else 0)
    (tmp_path / "cut").write_bytes(raw)
    assert len(read_kineto(tmp_path / "cut").events) == len(ends) == 8


GOOD = '{"ph": "X", "cat": "kernel", "name": "good", "pid": 0, "tid": 7, "ts": 5.125, "dur": 2, "args": {"stream": 7}}'


@pytest.mark.parametrize("layout", ["dumps", "kineto"])
@pytest.mark.parametrize("bad, rows_kept, said", [
    ('"args": {"GB/s": NaN, "b": -Infinity, "c": Infinity}', 1, ""),
    ('"args": {"GB/s": inf, "b": -nan}', 1, ""),
    ('"args": {"addr": 18446744073709551615, "big": 340282366920938463463374607431768211456, "correlation": 18446744073709551615}', 1, ""),
    ('"args": {"x": "\x01 \t"}', 1, ""),
    ('"args": {"x": 1e999}', 1, ""),
    ('"args": {"stream": 7, "stream": 9}', 1, ""),
    ('"args": null', 1, ""),
    ('"args": [1, 2]', 1, ""),
    ('"args": {"stream": [7], "correlation": {"a": 1}}', 1, ""),
    ('"args": {"a": "unescaped " quote"}', 0, "can't be decoded"),
    ('"args": {"a": }', 0, "can't be decoded"),
    ('"dur": null', 0, "its dur is None"),
    ('"dur": -3', 0, "its dur is -3"),
    ('"ts": "soon"', 0, "its ts is 'soon'"),
    ('"ts": 1e40', 0, "its ts is"),
    ('"ts": null', 0, "its ts is None"),
    ('"name": 7', 1, ""),
    ('"name": null', 1, ""),
    ('"tid": {"a": 1}', 1, ""),
    ('"cat": ["kernel"]', 0, "can't be decoded"),
])
def test_a_bad_event_costs_no_other(tmp_path, layout, bad, rows_kept, said):
    start = '{"ph": "X", "cat": "kernel", "name": "bad", "pid": 0, "tid": 7, "ts": 4.5, "dur": 1, '
    event, good = start + bad + "}", GOOD
    if layout == "kineto": event, good = (e.replace('{"ph"', '{\n    "ph"', 1)[:-1] + "\n  }" for e in (event, good))
    comma = ",\n  " if layout == "kineto" else ", "
    path = tmp_path / "bad.json"
    path.write_text('{"traceEvents": [\n  ' + comma.join([good, event, good, good]) + '\n  ], "baseTimeNanoseconds": 1000}')
    trace = read_kineto(path)
    assert (trace.events.name == "good").sum() == 3
    assert len(trace.events) == 3 + rows_kept
    assert [said in str(problem) for problem in trace.problems] == [True] * (not rows_kept), trace.problems
    assert trace.info["whole"] and set(trace.events[trace.events.name == "good"].start) == {6125}
    if not rows_kept: assert int(trace.problems[0].place.removeprefix("byte ")) == path.read_text().index(event)


def test_bytes_that_are_no_text(tmp_path):
    data = ('{"traceEvents": [' + ", ".join([GOOD, GOOD.replace("good", "b\x00d"), GOOD]) + "]}").encode().replace(b"\x00", b"\xff")
    (tmp_path / "a.json").write_bytes(data)
    trace = read_kineto(tmp_path / "a.json")
    assert trace.events.name.tolist() == ["good", "b\ufffdd", "good"] and not trace.problems
    assert trace.info["mended"] == {"bytes that are no UTF-8": 1}


def test_begin_and_end_are_listed_and_not_paired(tmp_path):
    (tmp_path / "a.json").write_text('{"traceEvents": [%s, {"ph": "B", "name": "a", "ts": 1}, {"ph": "E", "ts": 2}]}' % GOOD)
    trace = read_kineto(tmp_path / "a.json")
    assert len(trace.events) == 1 and trace.counts == {"X/kernel": 1, "B": 1, "E": 1}
    assert "2 events are written as a beginning and an end" in str(trace.problems[0])


def test_torn_in_the_middle(tmp_path):
    "A block of the disk is missing, or zeros, or somebody else's."
    data = small_trace(tmp_path / "a.json")
    total = sum(reference(tmp_path / "a.json")[0].values())
    for hole in (b"", bytes(700), b'{"a": "' + b"x" * 700, b"\xff\xfe" * 300):
        for at in range(5_000, 35_000, 1_501):
            (tmp_path / "torn.json").write_bytes(data[:at] + hole + data[at + 700:])
            trace = read_kineto(tmp_path / "torn.json")
            assert sum(trace.counts.values()) >= total - 10
            assert trace.events.start.is_monotonic_increasing


@pytest.mark.parametrize("data, said", [
    (b"", "the file is empty"), (b" \n ", "the file is empty"), (b"SQLite format 3\0...", "SQLite"), (b"<html>", "HTML"), (b"hello", "begins with b'hello'"), (b"\x1f\x8b\x08\0", "nothing in it can be decompressed"),
    (b'{"a": 1, "b": []}', "it has no traceEvents, only 'a', 'b'"), (b"{}", "only nothing"), (b'{"traceEvents": null}', "no traceEvents"), (gzip.compress(gzip.compress(b"{}")), "compressed twice")])
def test_no_trace(tmp_path, data, said):
    (tmp_path / "a.json").write_bytes(data)
    with pytest.raises(TraceError, match=said): read_kineto(tmp_path / "a.json")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(TraceError, match="No such file"): read_kineto(tmp_path / "a.json")
    with pytest.raises(TraceError, match="directory"): read_kineto(tmp_path)


def test_no_events(tmp_path):
    for text in ('{"traceEvents": []}', "[]", '{"traceEvents": [ ], "traceName": "x"} \n'):
        (tmp_path / "rank5.json").write_text(text)
        trace = read_kineto(tmp_path / "rank5.json")
        assert trace.events.empty and trace.info["whole"] and not trace.problems and (trace.rank, trace.rank_from) == (5, "file name")
        assert [str(d) for d in trace.events.dtypes] == [str(d) for d in events_table(dict(start=[1], end=[2])).dtypes]


def test_gzip_in_parts_and_damaged(tmp_path):
    data = small_trace(tmp_path / "a.json")
    expected = rows(read_kineto(tmp_path / "a.json"))
    path = tmp_path / "b.json.gz"
    path.write_bytes(b"".join(gzip.compress(data[i:i + 7_001]) for i in range(0, len(data), 7_001)))
    assert rows(read_kineto(path)) == expected and not read_kineto(path).problems
    packed = gzip.compress(data)
    path.write_bytes(packed[:-8] + b"\1\2\3\4" + packed[-4:])
    trace = read_kineto(path)
    assert rows(trace) == expected and ["checksum" in str(p) for p in trace.problems] == [True]
    path.write_bytes(packed + b"something else")
    assert rows(read_kineto(path)) == expected and "no gzip" in str(read_kineto(path).problems[0])
    random_bytes = [i for i in range(20, len(packed) - 8, max(1, len(packed) // 60))]
    for at in random_bytes:
        path.write_bytes(packed[:at] + bytes([packed[at] ^ 0x55]) + packed[at + 1:])
        try: assert read_kineto(path).problems
        except TraceError as e: assert at < 4096 and "decompressed" in str(e)


def test_operators_where_there_are_no_kernels_or_when_asked(tmp_path):
    op = GOOD.replace("kernel", "cpu_op")
    (tmp_path / "cpu.json").write_text('{"deviceProperties": [], "traceEvents": [%s, %s]}' % (op, op.replace("good", "record_param_comms")))
    (tmp_path / "gpu.json").write_text('{"traceEvents": [%s, %s, %s]}' % (op, GOOD, op.replace("good", "record_param_comms")))
    cpu, gpu = tmp_path / "cpu.json", tmp_path / "gpu.json"
    assert [len(read_kineto(cpu, operators).events) for operators in (None, True, False)] == [2, 2, 1]
    assert [len(read_kineto(gpu, operators).events) for operators in (None, True, False)] == [2, 3, 2]
    assert read_kineto(gpu).counts == {"X/cpu_op": 2, "X/kernel": 1}


def test_progress_reaches_the_end(tmp_path):
    path, seen = write_trace(tmp_path / "a.json.gz", 10_000_000), []
    read_kineto(path, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen) and seen[-1] == (path.stat().st_size,) * 2 and len(seen) > 3


def loose(*events, footer="", gap=", "):
    return '{"traceEvents": [' + gap.join(events) + "]" + "".join(f", {field}" for field in [footer] if field) + "}"


def read(tmp_path, text, operators=None):
    (tmp_path / "x.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_kineto(tmp_path / "x.json", operators)


NESTED = GOOD.replace('"stream": 7', '"in": [{"name": "a"}, {"name": "b"}], "stream": 7')


def test_lists_of_objects_at_the_end_of_a_piece(tmp_path, monkeypatch):
    monkeypatch.setattr(kineto, "PIECE", 300)
    with_ph = NESTED.replace('"stream"', '"ph": 1, "stream"')
    for pad in range(0, 160, 7):
        trace = read(tmp_path, " " * pad + loose(NESTED, with_ph, *[NESTED] * 20, footer='"baseTimeNanoseconds": 1000'))
        assert len(trace.events) == 22 and not trace.problems and set(trace.events.start) == {6125}


@pytest.mark.parametrize("broken", [
    GOOD.replace('"stream": 7', '"x": oops, "y": [{"name": "a"}, {"name": "b"}], "grid": [1, 1, 1]'), GOOD.replace('"stream": 7', '"x": oops, "y": {"ph": "X", "cat": "kernel", "name": "fake", "ts": 9, "dur": 9}'),
    GOOD.replace("good", 'un"quoted'), GOOD[:70], GOOD[:-1], NESTED.replace('"b"', '"b')])
@pytest.mark.parametrize("good", [GOOD, NESTED])
@pytest.mark.parametrize("piece", [300, 1 << 21])
def test_what_is_broken_costs_itself_only(tmp_path, monkeypatch, broken, good, piece):
    monkeypatch.setattr(kineto, "PIECE", piece)
    for before in (0, 3, 12):
        trace = read(tmp_path, loose(*[good] * before, broken, *[good] * (12 - before), footer='"baseTimeNanoseconds": 1000'))
        assert trace.events.name.tolist() == ["good"] * 12 and set(trace.events.start) == {6125}
        assert trace.info["whole"] and [problem.place for problem in trace.problems] == [f"byte {17 + before * (len(good) + 2):,}"]


def test_cut_short_within_a_list_of_objects(tmp_path):
    for keys in (False, True):
        text = json.dumps({"traceEvents": [json.loads(NESTED)] * 3}, sort_keys=keys)
        for size in range(30, len(text)):
            trace = read(tmp_path, text[:size])
            assert not trace.info["whole"] and trace.problems and sum(trace.counts.values()) == len(trace.events) == text[:size].count('"stream": 7}' + ('' if not keys else ', "cat": "kernel", "dur": 2, "name": "good", "ph": "X", "pid": 0, "tid": 7, "ts": 5.125}')) - (
                not keys and text[:size].endswith('"stream": 7}'))


OPERATOR = '{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1, "dur": 1, "args": {"Collective name": "allreduce"}}'


@pytest.mark.parametrize("change", [
    lambda e: e, lambda e: e.replace('aten::mm', r'aten::\u006dm'), lambda e: e.replace("record_", r"record\u005f").replace("rec", r"\u0072ec"), lambda e: e.replace('"cpu_op", "name"', '"cpu_op" ,"name"'),
    lambda e: json.dumps({"ph": "X", "cat": "cpu_op", "pid": 1, **json.loads(e)})])
def test_messages_are_found_among_operators_however_they_are_written(tmp_path, monkeypatch, change):
    monkeypatch.setattr(kineto, "PIECE", 600)
    message = OPERATOR.replace("aten::mm", "record_param_comms")
    for first in (OPERATOR, change(OPERATOR)):
        trace = read(tmp_path, loose(*[first] * 20, change(message), message, GOOD))
        assert trace.counts == {"X/cpu_op": 22, "X/kernel": 1} and (trace.events.collective == "allreduce").sum() == 2


def test_torn_inside_of_an_operators_arguments(tmp_path):
    event = dict(ph='"X"', cat='"cpu_op"', name='"aten::mm"', pid=1, tid=1, ts="1.5", dur="1.5", args={"External id": 1, "Ev Idx": 2})
    operator, kernel = template(event, "kineto"), template(event | dict(cat='"kernel"', name='"lost"'), "kineto")
    text = '{"traceEvents": [' + operator * 30 + kernel + operator * 3 + kernel.rstrip(",") + "]}"
    at = text.index('"kernel"')
    trace = read(tmp_path, text[:at - 60] + text[at + 12:])
    assert len(trace.events) == 1 and trace.counts["X/cpu_op"] >= 32 and "can't be decoded" in str(trace.problems[0])
    for hole in (bytes(60), bytes(700)): assert "can't be decoded" in str(read(tmp_path, (text[:at - 60] + "%s" + text[at:]).encode().replace(b"%s", hole)).problems[0])


@pytest.mark.parametrize("after, whole, said", [
    ("garbage", True, "text after the end"), ("\0" * 50, True, "text after the end"), (" \n", True, ""), (loose(GOOD), False, "a second trace"), ("}, " + GOOD + "]}", True, "text after the end")])
def test_what_follows_the_end_is_said(tmp_path, after, whole, said):
    trace = read(tmp_path, loose(GOOD) + after)
    assert trace.info["whole"] is whole and said in "".join(map(str, trace.problems)) and len(trace.problems) == bool(said)
    assert len(trace.events) == 1 + after.startswith("}")
    assert bool(read(tmp_path, f"[{GOOD}]{after}").problems) == bool(said)


def test_a_checksum_is_looked_at_whatever_the_length(tmp_path, monkeypatch):
    monkeypatch.setattr(kineto, "PIECE", 2000)
    for count in range(15, 40):
        packed = gzip.compress(loose(*[GOOD] * count).encode(), 1)
        assert "checksum" in str(read(tmp_path, packed[:-8] + bytes(4) + packed[-4:]).problems)
        assert not read(tmp_path, packed + bytes(600) + gzip.compress(b" ") + bytes(9000)).problems


GLOO = '{"ph": "X", "cat": "user_annotation", "name": "gloo:all_reduce", "pid": 1, "tid": 1, "ts": 1, "dur": 1, "args": {"Input Dims": [[4, 8]], "Input type": ["float"]}}'


@pytest.mark.parametrize("odd, found", [
    (GOOD.replace('"stream": 7', '"Collective name": "a", "Group size": 1099511627776'), dict(group_size=-1)), (GOOD.replace('"stream": 7', '"Collective name": "a", "In msg nelems": 9223372036854775807, "dtype": "Float"'), dict(bytes=-1)),
    (GLOO, dict(bytes=128)), (GLOO.replace("4, 8", "4611686018427387904, 4611686018427387904"), dict(bytes=-1)), (GLOO.replace("4, 8", "true"), dict(bytes=-1)), (GLOO.replace("4, 8", "-3, 5"), dict(bytes=-1)),
    (GLOO.replace('"float"', '"\xff"'), dict(bytes=-1)), (GLOO.replace('"args": {', '"args": {"x": NaN, '), dict(bytes=128)), (GOOD.replace("good", r"\ud800x"), dict(name="?x")), (GOOD.replace("good", r"\ud83d\ude00"), dict(name="\U0001f600")),
    (GOOD.replace('"stream": 7', '"device": -9223372036854775808, "stream": 7.0, "correlation": 5e0, "bytes": "1_000"'), dict(device=0, lane=7, correlation=5, bytes=-1)),
    (GOOD.replace("5.125", "1764547200000000.125").replace('"stream": 7', '"x": inf'), dict(start=1764547200000000125))])
def test_odd_fields(tmp_path, odd, found):
    trace = read(tmp_path, loose(GOOD, odd).encode("latin-1" if "\xff" in odd else "utf-8"))
    assert len(trace.events) == 2
    row = trace.events.iloc[0 if odd.startswith(GLOO[:40]) else 1]  # by start
    assert {key: row[key] for key in found} == found


@pytest.mark.parametrize("odd", [
    GOOD.replace('"stream": 7', '"x": ' + "[" * 3000 + "]" * 3000), GOOD.replace('"stream": 7', '"x": ' + '{"a":' * 3000 + "1" + "}" * 3000), GOOD.replace("5.125", '"1e999990"'), GOOD.replace("5.125", "1e999990"), GOOD.replace("5.125", "1" * 5000),
    GOOD.replace("5.125", "4e15").replace('"dur": 2', '"dur": 4e15')])
def test_events_that_are_refused_and_said(tmp_path, odd):
    trace = read(tmp_path, loose(GOOD, odd, GOOD, footer='"baseTimeNanoseconds": 1764547200000000000'))
    assert len(trace.events) == 2 and len(trace.problems) == 1 and (trace.events.end > trace.events.start).all()


@pytest.mark.parametrize("written, base", [("1764547200000000001", 1764547200000000001), ('"1764547200000000001"', 1764547200000000001), ("1764547200000000001.0", 1764547200000000001), ("-1000", -1000), ("NaN", None), ("true", None), ("9" * 30, None), ("0.5", None), ("null", None)])
def test_the_time_all_others_are_counted_from(tmp_path, written, base):
    for text in (loose(GOOD, footer=f'"baseTimeNanoseconds": {written}'), loose(GOOD, footer=f'"x": un"q", "baseTimeNanoseconds": {written}')):
        trace = read(tmp_path, text)
        assert trace.events.start.tolist() == [(base or 0) + 5125] and any("counted from" in str(p) for p in trace.problems) is (base is None)
        assert trace.info.get("baseTimeNanoseconds") == base


def test_texts_around_the_events(tmp_path):
    assert read(tmp_path, loose(GOOD, footer=r'"traceName": "caf\u00e9 \ud800☃"')).info["traceName"] == "café ?☃"


@pytest.mark.parametrize("name, distributed, rank, said", [
    ("frank12_77.pt.trace.json", {}, (0, 1, "order"), ""), ("trace_rank_20251130.json", {}, (0, 1, "order"), "can't be a rank"), ("rank1764547200.json", {}, (0, 1, "order"), "can't be a rank"), ("a_rank7.json", {}, (7, 8, "file name"), ""),
    ("17.1-TP-3-DP-1.trace.json", {}, (0, 1, "order"), "several replicas"), ("17.1-TP-3-PP-0.trace.json", {}, (0, 1, "order"), "several replicas"), ("17.1-TP-3-EP-3.trace.json", {}, (3, 4, "file name"), ""),
    ("rank2.json", dict(rank=True, world_size=10 ** 12), (2, 3, "file name"), "world_size 1000000000000"), ("a.json", dict(rank=-1), (0, 1, "order"), "rank -1"), ("a.json", dict(rank="1", world_size=4), (0, 4, "order"), "rank 1"),
    ("rank2.json", dict(rank=1, world_size=4), (1, 4, "trace"), "")])
def test_whose_trace_it_is(tmp_path, name, distributed, rank, said):
    (tmp_path / name).write_text('{"distributedInfo": %s, %s' % (json.dumps(distributed), loose(GOOD)[1:]))
    trace = read_kineto(tmp_path / name)
    assert (trace.rank, trace.ranks, trace.rank_from) == rank and (said in "".join(map(str, trace.problems)) if said else not trace.problems)


SICK = {
    "newlines": loose(GOOD, '{"ph": "X", "x": un"q' + "\n" * 300_000 + "}", GOOD), "heads": loose(GOOD)[:-2] + ", " + '{"ph":' * 300_000, "nests": loose(GOOD)[:-2] + ', {"ph":[' * 100_000, "braces": loose(GOOD)[:-2] + ", " + "{" * 3_000_000,
    "quotes": loose(*[GOOD.replace('"stream"', '"q": "a"b", "stream"')] * 10_000), "not numbers": loose(*[GOOD.replace("7}}", '7, "x": NaN}}')] * 10_000), "categories": loose(*[GOOD.replace("kernel", f"c{i}") for i in range(20_000)]),
    "numbers": loose(*["1"] * 500_000), "a long text": '{"x": "' + "y" * 5_000_000 + '", ' + loose(GOOD)[1:], "long texts": loose(GOOD.replace('"stream"', '"x": "' + "\\\\" * 6_000_000 + '", "stream"'), *[GOOD] * 9),
    "stack frames": loose(GOOD, footer='"stackFrames": {%s}' % ", ".join(f'"{i}": {{"name": "f{{{i}"}}' for i in range(150_000)) + ', "baseTimeNanoseconds": 1000')}


@pytest.mark.parametrize("what", SICK)
def test_sick_texts_take_no_longer_than_their_length(tmp_path, what):
    "Each of these once took time or memory that grew with the square of it, and would not end here."
    trace = read(tmp_path, SICK[what])
    assert len(trace.events) == {"newlines": 2, "quotes": 0, "not numbers": 10_000, "categories": 0, "numbers": 0, "long texts": 9}.get(what, 1)
    assert len(trace.problems) < 60 and bool(trace.problems) is (what not in ("not numbers", "categories"))
    if what == "stack frames": assert trace.events.start.tolist() == [6125] and "stackFrames" in str(trace.problems[0])
    if what == "categories": assert sum(trace.counts.values()) == 20_000 and len(trace.counts) < 5_000


MEASURE = """
import resource, sys
from kimi_spec.profiling.kineto import read_kineto
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
trace = read_kineto(sys.argv[1])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, len(trace.events), trace.info["bytes"])
"""


def test_memory_does_not_grow_with_the_file(tmp_path):
    grown = []
    for megabytes in (6, 48):
        path = write_trace(tmp_path / "a.json", megabytes * 1_000_000)
        found = subprocess.run([sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, check=True)
        grown.append([*map(int, found.stdout.split())])
    (small, few, _), (large, many, size) = grown
    assert size == path.stat().st_size and many > 7 * few
    assert large < 40_000  # KiB, for 48 MB of text
    assert large - small < many * 250 / 1024 + 4_000  # what grows is the table
