"Records survive whatever is written into them, and whatever happens to the writer."
import subprocess
import sys
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_spec.core.errors import KimiSpecError
from kimi_spec.core.records import Record, Records

text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)
scalar = st.one_of(st.booleans(), st.integers(-2**53, 2**53), st.floats(allow_nan=False, allow_infinity=False), text)
record = st.builds(Record, name=st.from_regex(r"[a-z0-9_]+(\.[a-z0-9_]+)*", fullmatch=True), value=scalar, unit=text, rig=text, phase=text, method=text, evidence=text,
                   source=st.sampled_from(["measured", "seed", "derived"]), labels=st.dictionaries(text, scalar, max_size=4))
WRITER = '''
import sys
from kimi_spec.core.records import Records
records = Records(sys.argv[1], rig="nano-vllm", phase="launches")
for i in range(int(sys.argv[3])):
    records.add("spec.steps", i, "count", method="counted", evidence="here", labels={"writer": sys.argv[2]})
    print(i, flush=True)
'''


def add(records, value=1.0, **kw):
    return records.add("throughput.output", value, "tok/s", **dict(dict(method="counted", evidence="bench.json:1", rig="nano-vllm", phase="launches"), **kw))


@given(st.lists(record, max_size=4))
@settings(max_examples=60, deadline=None)
def test_round_trip(tmp_path_factory, written):
    records = Records(tmp_path_factory.mktemp("records") / "records.jsonl")
    for r in written: records.append(r)
    read = list(records)
    assert read == written
    assert [type(r.value) for r in read] == [type(r.value) for r in written]
    assert len(records.frame()) == len(written)


@given(cut=st.integers(1, 200))
@settings(max_examples=25, deadline=None)
def test_torn_end_loses_nothing_before_it(tmp_path_factory, cut):
    records = Records(tmp_path_factory.mktemp("torn") / "records.jsonl")
    first, second = add(records, 1.0), add(records, 2.0)
    data = records.path.read_bytes()
    second_line = len(second.model_dump_json()) + 1
    records.path.write_bytes(data[:-min(cut, second_line - 1)])
    with pytest.warns(UserWarning, match="cut short"): assert list(records) == [first]
    with pytest.warns(UserWarning, match="kept in records.jsonl.torn"): third = add(records, 3.0)
    assert list(records) == [first, third]
    assert records.path.with_name("records.jsonl.torn").read_bytes().strip() == data.splitlines()[1][:second_line - min(cut, second_line - 1)].strip()


def test_killed_writer_leaves_whole_records(tmp_path):
    path = tmp_path / "records.jsonl"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, path, "a", "100000"], stdout=subprocess.PIPE, text=True)
    for _ in range(20): last = int(writer.stdout.readline())
    writer.kill()
    writer.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values = [r.value for r in Records(path)]
    assert values == list(range(len(values))) and len(values) > last
    add(Records(path), 5.0)


def test_two_writers_do_not_mix(tmp_path):
    path = tmp_path / "records.jsonl"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, path, name, "100"], stdout=subprocess.DEVNULL) for name in "ab"]
    assert [w.wait(60) for w in writers] == [0, 0]
    for name in "ab": assert [r.value for r in Records(path) if r.labels["writer"] == name] == list(range(100))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), None, [1]])
def test_refused_values(tmp_path, value):
    with pytest.raises(KimiSpecError, match="record 'throughput.output': value"): add(Records(tmp_path / "r.jsonl"), value)
    with pytest.raises(KimiSpecError, match="labels"): add(Records(tmp_path / "r.jsonl"), 1, labels={"x": value})
    assert not (tmp_path / "r.jsonl").exists()


def test_broken_line_is_named(tmp_path):
    records = Records(tmp_path / "records.jsonl")
    add(records), add(records)
    lines = records.path.read_bytes().splitlines(keepends=True)
    for broken in [b"{}\n", b"\n", b"\xff\xfe\n", lines[0][:20] + b"\n", lines[0].replace(b"1.0", b"NaN", 1)]:
        records.path.write_bytes(lines[0] + broken + lines[1])
        with pytest.raises(KimiSpecError, match=r"records\.jsonl:2: broken record"): list(records)


def test_latest_is_the_last_of_its_kind(tmp_path):
    records = Records(tmp_path / "records.jsonl")
    for value, labels in [(1.0, {"concurrency": 1}), (2.0, {"concurrency": 8}), (3.0, {"concurrency": 1})]: add(records, value, labels=labels)
    add(records, 4.0, labels={"concurrency": 1}, rig="nano-vllm-base")
    assert [r.value for r in records.latest()] == [3.0, 2.0, 4.0]
    assert list(records.frame(latest=True).concurrency) == [1, 8, 1]


def test_full_disk_is_said_and_harmless(tmp_path, monkeypatch):
    records = Records(tmp_path / "records.jsonl")
    first = add(records)
    real = __import__("os").write
    monkeypatch.setattr("kimi_spec.core.records.os.write", lambda fd, line: real(fd, line[:10]))
    with pytest.raises(KimiSpecError, match="earlier records are whole"): add(records)
    assert list(records) == [first]
