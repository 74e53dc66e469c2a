"Traces of a run: exports of Nsight Systems, all ranks at once, and the cache between them and the files."
import gzip
import json
import os
import random
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pandas as pd
import psutil
import pyarrow.parquet as pq
import pytest

from kimi_spec.profiling import nsys, reading
from kimi_spec.profiling.nsys import HEADER, read_nsys
from kimi_spec.profiling.reading import read_traces, tidy, traces_dir
from kimi_spec.profiling.trace import COLUMNS, KINDS, Trace, TraceError, events_table

CLOCK = 1_764_000_000_000_000_000
# Tables as NVIDIA documents them for the releases 2022.4 (old) and 2026.4 (new), as far as something is asked of them.
OLD = dict(
    StringIds="id INTEGER PRIMARY KEY, value TEXT NOT NULL",
    CUPTI_ACTIVITY_KIND_KERNEL="start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,"
                               " demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, gridX INTEGER NOT NULL, graphNodeId INTEGER",
    CUPTI_ACTIVITY_KIND_MEMCPY="start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL",
    CUPTI_ACTIVITY_KIND_MEMSET="start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, value INTEGER NOT NULL, bytes INTEGER NOT NULL",
    CUPTI_ACTIVITY_KIND_RUNTIME="start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL",
    NVTX_EVENTS="start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, text TEXT, globalTid INTEGER, textId INTEGER, domainId INTEGER",
    TARGET_INFO_SESSION_START_TIME="utcEpochNs INTEGER, utcTime TEXT, localTime TEXT",
)
NEW = OLD | dict(
    CUPTI_ACTIVITY_KIND_GRAPH_TRACE="start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,"
                                    " graphId INTEGER NOT NULL, graphExecId INTEGER NOT NULL",
    NVTX_EVENTS=OLD["NVTX_EVENTS"] + ", jsonText TEXT, binaryData TEXT",
    NVTX_PAYLOAD_SCHEMA_ENTRIES="domainId INTEGER NOT NULL, schemaId INTEGER NOT NULL, idx INTEGER NOT NULL, flags INTEGER, type INTEGER, name TEXT, offset INTEGER",
    ENUM_CUDA_MEMCPY_OPER="id INTEGER, name TEXT, label TEXT",
    TARGET_INFO_GPU="vmId INTEGER NOT NULL, id INTEGER NOT NULL, name TEXT",
    TARGET_INFO_CUDA_DEVICE="gpuId INTEGER, cudaId INTEGER NOT NULL, pid INTEGER NOT NULL",
    META_DATA_EXPORT="name TEXT NOT NULL, value TEXT",
)


def write_export(path, schema=NEW, lazy=True, **tables):
    "An export: rows are dicts, whatever a row leaves out is empty or 0. Tables without rows are not made, as nsys does it."
    path.unlink(missing_ok=True)
    db = sqlite3.connect(path)
    for table, columns in schema.items():
        if lazy and not tables.get(table):
            continue
        db.execute(f"CREATE TABLE {table} ({columns})")
        types = {c.split()[0]: "NOT NULL" in c for c in columns.split(",")}
        for row in tables.get(table, []):
            assert set(row) <= set(types), row
            full = {c: row.get(c, 0 if needed else None) for c, needed in types.items()}
            db.execute(f"INSERT INTO {table} ({', '.join(f'[{c}]' for c in full)}) VALUES ({', '.join('?' * len(full))})", list(full.values()))
    db.commit()
    db.close()
    return path


def strings(*texts):
    return [dict(id=i, value=text) for i, text in enumerate(texts, 1)]


def kernels(count, pid=100, device=0, begin=1000, name=1, stream=7):
    return [dict(start=begin + 100 * i, end=begin + 100 * i + 60, deviceId=device, streamId=stream, correlationId=i + 1, globalPid=pid << 24, demangledName=name, shortName=name) for i in range(count)]


def blob(schema, layout, *values):
    body = struct.pack(layout, *values)
    return HEADER.pack(1, 0, schema, 0, len(body), 32 + len(body)) + body


SCHEMAS = [dict(domainId=1, schemaId=s, idx=i, type=kind, name=name, offset=offset) for s, entries in {
    7: [(18, nsys.COMMUNICATOR, None), (22, nsys.MESSAGE, 8)],
    8: [(18, nsys.COMMUNICATOR, None), (5, nsys.RANKS, 8), (5, nsys.RANK, 12), (5, nsys.DEVICE, 16)]}.items() for i, (kind, name, offset) in enumerate(entries)]


def test_every_table_of_an_export_becomes_rows(tmp_path):
    pid, tid = 100 << 24, (100 << 24) + 101
    path = write_export(tmp_path / "a.sqlite", StringIds=strings("void gemm<float>(int)", "cudaLaunchKernel_ptsz_v7000", "decode"), CUPTI_ACTIVITY_KIND_KERNEL=kernels(2),
                        CUPTI_ACTIVITY_KIND_MEMCPY=[dict(start=2000, end=2010, streamId=7, correlationId=8, globalPid=pid, bytes=64, copyKind=k) for k in (1, 12, 99)],
                        CUPTI_ACTIVITY_KIND_MEMSET=[dict(start=2100, end=2101, streamId=7, globalPid=pid, bytes=16)], ENUM_CUDA_MEMCPY_OPER=[dict(id=12, name="X", label="Unified DtoH")],
                        CUPTI_ACTIVITY_KIND_RUNTIME=[dict(start=900, end=950, globalTid=tid, correlationId=1, nameId=2)],
                        NVTX_EVENTS=[dict(start=800, end=3000, eventType=59, globalTid=tid, textId=3), dict(start=810, end=820, eventType=60, globalTid=tid, text="step é"), dict(start=1, eventType=34, globalTid=tid, text="mark")],
                        TARGET_INFO_SESSION_START_TIME=[dict(utcEpochNs=CLOCK)], TARGET_INFO_GPU=[dict(id=0, name="NVIDIA H200")], META_DATA_EXPORT=[dict(name="EXPORT_SCHEMA_VERSION", value="3.28.1")])
    before, asked = path.read_bytes(), []
    trace, = read_nsys(path, lambda done, total: asked.append((done, total)))
    e = trace.events
    assert e[["name", "kind", "start", "correlation", "bytes"]].astype(object).values.tolist() == [
        ["decode", "annotation", CLOCK + 800, -1, -1], ["step é", "annotation", CLOCK + 810, -1, -1], ["cudaLaunchKernel", "call", CLOCK + 900, 1, -1],
        ["void gemm<float>(int)", "kernel", CLOCK + 1000, 1, -1], ["void gemm<float>(int)", "kernel", CLOCK + 1100, 2, -1],
        ["Memcpy HtoD", "copy", CLOCK + 2000, 8, 64], ["Memcpy Unified DtoH", "copy", CLOCK + 2000, 8, 64], ["Memcpy", "copy", CLOCK + 2000, 8, 64], ["Memset", "set", CLOCK + 2100, -1, 16]]
    assert e.device.tolist() == [-1] * 3 + [0] * 6 and e.lane.tolist() == [101] * 3 + [7] * 6
    assert trace.counts == {"X/kernel": 2, "X/gpu_memcpy": 3, "X/gpu_memset": 1, "X/cuda_runtime": 1, "X/user_annotation": 2}
    assert (trace.info["schemaVersion"], trace.info["devices"], trace.info["whole"], trace.info["clock"], trace.problems) == ("3.28.1", ["NVIDIA H200"], True, "utc", [])
    assert asked[-1] == (len(before), len(before)) and asked == sorted(asked)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["a.sqlite"]


def test_an_old_export_is_read_too(tmp_path):
    path = write_export(tmp_path / "rank3.sqlite", OLD, lazy=False, StringIds=strings("gemm"), CUPTI_ACTIVITY_KIND_KERNEL=kernels(3), NVTX_EVENTS=[dict(start=0, end=9, eventType=59, text="x", globalTid=(100 << 24) + 1)])
    trace, = read_nsys(path)
    assert (trace.rank, trace.rank_from, len(trace.events), trace.info["clock"]) == (3, "file name", 4, "session")
    assert "no clock" in str(trace.problems[0])
    for name in ("frank12", "rank20251130"):  # a machine, a day
        trace, = read_nsys(path.rename(path.with_name(name + ".sqlite")))
        assert (trace.rank, trace.rank_from) == (0, "order")
        path = path.with_name(name + ".sqlite")


def test_ranks_and_messages_come_from_nccl(tmp_path):
    tids = [(pid << 24) + 1 for pid in (100, 200)]
    nvtx = [row for r, tid in enumerate(tids) for row in (
        dict(start=1, end=5, eventType=59, textId=5, globalTid=tid, binaryData=blob(8, "<Qiii4x", 0xBEEF, 2, 1 - r, 0)),
        dict(start=700, end=760, eventType=59, textId=3, globalTid=tid, binaryData=blob(7, "<QQ", 0xBEEF, 14336)),
        dict(start=770, end=790, eventType=59, textId=4, globalTid=tid, binaryData=blob(7, "<QQ", 0xBEEF, 100).hex()))]
    on_gpu = [dict(row, demangledName=2) for pid in (100, 200) for row in kernels(3, pid=pid)]
    calls = [dict(start=s, end=s + 5, globalTid=tid, correlationId=c, nameId=1) for tid in tids for c, s in ((1, 710), (2, 775), (3, 800))]
    path = write_export(tmp_path / "a.sqlite", StringIds=strings("cudaLaunchKernel_v7000", "ncclDevKernel_AllReduce", "ncclAllReduce", "ncclReduceScatter", "ncclCommInitRank"), CUPTI_ACTIVITY_KIND_KERNEL=on_gpu,
                        CUPTI_ACTIVITY_KIND_RUNTIME=calls, NVTX_EVENTS=nvtx, NVTX_PAYLOAD_SCHEMA_ENTRIES=SCHEMAS, TARGET_INFO_SESSION_START_TIME=[dict(utcEpochNs=CLOCK)],
                        TARGET_INFO_CUDA_DEVICE=[dict(gpuId=0, cudaId=0, pid=100), dict(gpuId=1, cudaId=0, pid=200)])
    traces = read_nsys(path)
    assert [(t.rank, t.ranks, t.rank_from, t.problems) for t in traces] == [(0, 2, "trace", []), (1, 2, "trace", [])]
    k = traces[0].events.query("kind == 'kernel'")
    assert k[["bytes", "collective", "group", "group_size"]].astype(object).values.tolist() == [[14336, "allreduce", "beef", 2], [200, "reduce_scatter", "beef", 2], [-1, "", "", -1]]  # the third launch lies outside of every call
    db = sqlite3.connect(path)
    db.execute("UPDATE NVTX_EVENTS SET binaryData = NULL")
    db.commit()
    db.close()
    traces = read_nsys(path)
    assert traces[0].rank_from == "order" and "export again with --include-blobs=true" in str(traces[0].problems[-1])
    assert (traces[0].events.bytes == -1).all()


def test_processes_on_one_gpu_and_gpus_of_one_number(tmp_path):
    both = kernels(3, pid=100, device=1) + kernels(2, pid=200, device=0) + kernels(1, pid=100, device=0, begin=5000)
    nvtx = [dict(start=0, end=9000, eventType=59, text=f"of {pid}", globalTid=(pid << 24) + 1) for pid in (100, 200, 300)]
    first, second = read_nsys(write_export(tmp_path / "a.sqlite", StringIds=strings("k"), CUPTI_ACTIVITY_KIND_KERNEL=both, NVTX_EVENTS=nvtx, TARGET_INFO_CUDA_DEVICE=[
        dict(gpuId=d, cudaId=d, pid=p) for p in (100, 200) for d in (0, 1)]))
    assert [t.events.query("kind == 'annotation'").name.tolist() for t in (first, second)] == [["of 200"], ["of 100"]]
    assert first.events.query("kind == 'kernel'").correlation.tolist() == [1, 2, (1 << 40) + 1]  # two launches number 1, of two processes
    assert any("process 300" in str(p) for p in first.problems)


def test_a_graph_recorded_as_a_whole_says_what_is_missing(tmp_path):
    trace, = read_nsys(write_export(tmp_path / "a.sqlite", CUPTI_ACTIVITY_KIND_GRAPH_TRACE=[dict(start=10 * i, end=10 * i + 9, streamId=7, correlationId=i, globalPid=1 << 24, graphId=5) for i in range(3)]))
    assert trace.events.name.unique().tolist() == ["CUDA graph 5 (its kernels were not recorded)"]
    assert "--cuda-graph-trace=node" in str(trace.problems[0]) and "2 more rows" in str(trace.problems[0])


def test_rows_that_can_not_be_are_left_out_and_listed(tmp_path):
    bad = kernels(6)
    bad[1]["end"], bad[2]["start"], bad[2]["end"], bad[3]["start"], bad[4]["demangledName"] = 3, 0, 0, "soon", 77
    trace, = read_nsys(write_export(tmp_path / "a.sqlite", StringIds=strings("gemm"), CUPTI_ACTIVITY_KIND_KERNEL=bad, TARGET_INFO_SESSION_START_TIME=[dict(utcEpochNs=CLOCK)],
                                    NVTX_EVENTS=[dict(start=5, eventType=59, text="open", globalTid=(100 << 24) + 1)]))
    assert trace.events.name.tolist() == ["gemm", "string 77", "gemm"]
    text = "\n".join(map(str, trace.problems))
    for said in ("CUPTI_ACTIVITY_KIND_KERNEL row 4: expected whole numbers", "CUPTI_ACTIVITY_KIND_KERNEL row 2: it ends before it starts", "CUPTI_ACTIVITY_KIND_KERNEL row 3: a start and end of 0", "NVTX_EVENTS row 1: a range that was still open",
                 "StringIds: 1 of 2 names that rows refer to are not there, the first is 77"):
        assert said in text, text


def test_an_export_cut_off_anywhere_gives_what_is_there(tmp_path):
    path = write_export(tmp_path / "a.sqlite", StringIds=strings("gemm"), CUPTI_ACTIVITY_KIND_KERNEL=kernels(3000), TARGET_INFO_SESSION_START_TIME=[dict(utcEpochNs=CLOCK)])
    whole, rows, outcomes = path.read_bytes(), 0, set()
    for end in range(0, len(whole), 5_000):
        path.write_bytes(whole[:end])
        try: trace, = read_nsys(path)
        except TraceError as e:
            outcomes.add("error")
            assert path.name in str(e)
            continue
        outcomes.add("rows")
        assert rows <= len(trace.events) <= 3000 and trace.problems and trace.problems[0].place.startswith("table")
        rows = len(trace.events)
        assert (trace.events.end - trace.events.start == 60).all()
    assert outcomes == {"error", "rows"} and rows > 2500
    path.write_bytes(whole[:10 * 4096] + b"\x13" * 4096 + whole[11 * 4096:])
    trace, = read_nsys(path)
    assert 2700 < len(trace.events) < 3000 and "damaged here" in str(trace.problems[0]) and not trace.info["whole"]


KERNEL = "CUPTI_ACTIVITY_KIND_KERNEL"
LOOSE = NEW | {KERNEL: "start, end, deviceId, streamId, correlationId, globalPid, demangledName, shortName"}  # columns that keep whatever is put in


def changed(path, *commands):
    "An export after some SQL."
    db = sqlite3.connect(path)
    for command in commands: db.execute(command)
    db.commit()
    db.close()
    return path


@pytest.mark.parametrize("harm, kept, says", [
    (dict(start=float("inf")), False, "expected whole numbers in start"), (dict(end=float("-inf")), False, "expected whole numbers"), (dict(start=1e300, end=2e300), False, "expected whole numbers"), (dict(start=100.5), False, "expected whole numbers"),
    (dict(start=b"30"), False, "expected whole numbers"), (dict(start=None, end=None), False, "expected whole numbers"), (dict(deviceId=2 ** 40), False, "it ran on no GPU"), (dict(end=2 ** 63 - 1), False, "a time of more than 146 years"),
    (dict(start=-2 ** 63, end=5), False, "a time of more than 146 years"), (dict(start=1100.0, streamId=7.0), True, "")])
def test_a_value_of_any_kind_is_read_rightly_or_said(tmp_path, harm, kept, says):
    rows = kernels(2)
    rows[1] |= harm
    trace, = read_nsys(write_export(tmp_path / "a.sqlite", LOOSE, StringIds=strings("gemm"), CUPTI_ACTIVITY_KIND_KERNEL=rows, TARGET_INFO_SESSION_START_TIME=[dict(utcEpochNs=CLOCK)]))
    assert (trace.events.start - CLOCK).tolist() == ([1000, 1100] if kept else [1000]) and trace.events.lane.tolist() == [7] * len(trace.events)
    assert [str(p).startswith(f"table CUPTI_ACTIVITY_KIND_KERNEL row 2: {says}") for p in trace.problems] == [True] * (not kept)


@pytest.mark.parametrize("commands", [
    [f"ALTER TABLE {KERNEL} RENAME TO real", f"CREATE VIEW {KERNEL} AS SELECT * FROM real"], [f"ALTER TABLE {KERNEL} ADD rowid TEXT", f"UPDATE {KERNEL} SET rowid = 'abc'"], [f"ALTER TABLE {KERNEL} ADD rowid INTEGER", f"UPDATE {KERNEL} SET rowid = 5"],
    [f"UPDATE {KERNEL} SET rowid = -rowid"], [f"ALTER TABLE {KERNEL} RENAME TO old", f"CREATE TABLE {KERNEL} (start INTEGER PRIMARY KEY, end, deviceId, streamId, correlationId, globalPid, demangledName) WITHOUT ROWID",
                                              f"INSERT INTO {KERNEL} SELECT start, end, deviceId, streamId, correlationId, globalPid, demangledName FROM old", "DROP TABLE old"]], ids=["view", "text", "numbers", "negative", "without"])
def test_rows_are_read_however_they_are_numbered(tmp_path, commands):
    path = write_export(tmp_path / "a.sqlite", StringIds=strings("gemm"), CUPTI_ACTIVITY_KIND_KERNEL=kernels(5), TARGET_INFO_SESSION_START_TIME=[dict(utcEpochNs=CLOCK)])
    trace, = read_nsys(changed(path, *commands))
    assert ((trace.events.start - CLOCK).tolist(), trace.problems, trace.info["tables"][KERNEL] >= 0) == ([1000, 1100, 1200, 1300, 1400], [], True)


def test_names_of_any_kind(tmp_path):
    rows = [kernels(1, name=i, begin=1000 * i)[0] for i in (1, 2, 3)]
    path = write_export(tmp_path / "a.sqlite", NEW | dict(StringIds="id TEXT, value"), StringIds=[dict(id="1", value=b"gemm"), dict(id="2", value=None), dict(id="3", value=42)], CUPTI_ACTIVITY_KIND_KERNEL=rows,
                        NVTX_EVENTS=[dict(start=5000, end=5001, eventType=59, globalTid=100 << 24, text=b"step")], TARGET_INFO_GPU=[dict(id=1, name="B"), dict(id=0, name="A")], TARGET_INFO_SESSION_START_TIME=[dict(utcEpochNs=CLOCK)])
    changed(path, "CREATE TABLE fresh (id, name)", "INSERT INTO fresh VALUES (1, 'B'), (0, 'A'), (NULL, 'C'), ('x', NULL)", "DROP TABLE TARGET_INFO_GPU", "ALTER TABLE fresh RENAME TO TARGET_INFO_GPU")
    trace, = read_nsys(path)
    assert trace.events.name.tolist() == ["gemm", "string 2", "42", "step"] and trace.info["devices"] == ["C", "A", "B"]
    assert [str(p) for p in trace.problems] == ["table StringIds: 1 of 3 names that rows refer to are not there, the first is 2; they are called `string 2` and so on"]


def test_gpus_that_are_numbered_by_words_are_told_apart_by_device(tmp_path):
    schema = NEW | dict(TARGET_INFO_CUDA_DEVICE="gpuId, cudaId, pid")
    traces = read_nsys(write_export(tmp_path / "a.sqlite", schema, CUPTI_ACTIVITY_KIND_KERNEL=kernels(1) + kernels(2, device=1), TARGET_INFO_CUDA_DEVICE=[dict(gpuId="x", cudaId=0, pid=100), dict(gpuId=1, cudaId=1, pid=100)]))
    assert [len(t.events) for t in traces] == [1, 2]
    assert len(traces[0].problems) == 2 and traces[1].problems == []  # what concerns the file is said once


@pytest.mark.parametrize("offset, size, says", [(-200, 5, "is at -200, which is no place"), ("x", 5, "is at 'x', which is no place"), (1.5, 5, "is at 1.5, which is no place"), (8, 2 ** 64 - 1, "a message of more than 17,592,186,044,416 bytes")])
def test_a_payload_that_can_not_be_leaves_its_message_unknown(tmp_path, offset, size, says):
    tid = (100 << 24) + 1
    fields = [dict(schemaId=7, type=18, name=nsys.COMMUNICATOR, offset=0), dict(schemaId=7, type=22, name=nsys.MESSAGE, offset=offset)]
    trace, = read_nsys(write_export(tmp_path / "a.sqlite", NEW | dict(NVTX_PAYLOAD_SCHEMA_ENTRIES="schemaId, type, name, offset"), StringIds=strings("ncclDevKernel_AllReduce", "ncclAllReduce", "cudaLaunchKernel"), CUPTI_ACTIVITY_KIND_KERNEL=kernels(1),
                                    CUPTI_ACTIVITY_KIND_RUNTIME=[dict(start=700, end=710, globalTid=tid, correlationId=1, nameId=3)], TARGET_INFO_SESSION_START_TIME=[dict(utcEpochNs=CLOCK)],
                                    NVTX_EVENTS=[dict(start=690, end=720, eventType=59, textId=2, globalTid=tid, binaryData=blob(7, "<QQ", 0xBEEF, size))], NVTX_PAYLOAD_SCHEMA_ENTRIES=fields))
    kernel = trace.events.query("kind == 'kernel'").iloc[0]
    assert (kernel.collective, kernel.group, kernel.bytes) == ("allreduce", "beef", -1)
    assert [says in str(p) for p in trace.problems] == [True]


@pytest.mark.parametrize("name, content, says", [
    ("a.nsys-rep", b"QDREP", "nsys export --type sqlite"), ("a.sqlite", b"", "found a file that begins with b''"), ("a.sqlite", b"{}", "expected an SQLite database"), ("a.sqlite", nsys.HEAD + b"\0" * 90, "a.sqlite")])
def test_what_is_no_export_is_said(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TraceError, match=says):
        read_nsys(tmp_path / name)


def kineto(rank=0, ranks=2, count=50, begin=1000.0, **more):
    "The text of a small trace of torch.profiler."
    events = [dict(ph="X", cat="kernel", name=f"kernel {i % 5}", pid=0, tid=7, ts=begin + 10 * i, dur=5.0, args={"stream": 7, "device": 0, "correlation": i}) for i in range(count)]
    group = {} if rank is None else dict(distributedInfo=dict(rank=rank, world_size=ranks))
    return json.dumps(dict(schemaVersion=1, **group, traceEvents=events, **more)).encode()


@pytest.fixture
def run(project):
    "A folder with the traces of four ranks, one gzipped, in a project of its own."
    folder = project / "run"
    folder.mkdir()
    for rank in range(4):
        text = kineto(rank, 4, begin=1000.0 + rank)
        (folder / f"worker{12 - rank}.pt.trace.json").write_bytes(gzip.compress(text) if rank == 1 else text)
    (folder / "config.json").write_text('{"layers": 2}')
    (folder / "server.log").write_text("ready")
    return folder


def same(some, others):
    assert len(some) == len(others)
    for a, b in zip(some, others):
        pd.testing.assert_frame_equal(a.events, b.events)
        assert (a.path.name, a.rank, a.ranks, a.rank_from, a.counts, a.problems, a.info) == (b.path.name, b.rank, b.ranks, b.rank_from, b.counts, b.problems, b.info)


def test_side_by_side_gives_what_one_after_another_gives(run):
    alone = read_traces(run, jobs=1, cache=False, progress=False)
    assert [str(p) for t in alone for p in t.problems] == ["left out, for no events of a trace were found in the first 16 MB, as far as they can be unpacked: config.json"]
    (run / "config.json").unlink()
    alone[0].problems.clear()
    assert [(t.rank, t.ranks, len(t.events)) for t in alone] == [(r, 4, 50) for r in range(4)]
    assert [t.events.start[0] for t in alone] == [1_000_000 + 1000 * r for r in range(4)]
    same(alone, read_traces([run], jobs=2, cache=False, progress=False))
    assert not traces_dir().exists()
    same(alone, read_traces(list(run.glob("worker*")), jobs=3, progress=False))  # writes the cache
    same(alone, read_traces(run, jobs=2, progress=False))  # reads it
    assert len(list(traces_dir().glob("*/meta.json"))) == 4


def test_the_cache_asks_for_the_content_not_the_place(run, monkeypatch):
    first = read_traces(run, jobs=1, progress=False)
    moved = run.with_name("moved")
    shutil.copytree(run, moved)
    shutil.rmtree(run)
    for reader in ("read_kineto", "read_nsys"):
        monkeypatch.setattr(reading, reader, lambda *_: pytest.fail("a file was read that is in the cache"))
    same(first, read_traces(moved, jobs=1, progress=False))
    with pytest.raises(pytest.fail.Exception):
        read_traces(moved, jobs=1, progress=False, operators=True)  # another question, another answer
    file = sorted(moved.glob("worker*"))[0]
    file.write_bytes(file.read_bytes().replace(b"kernel 1", b"kernel 9"))  # the same size
    with pytest.raises(pytest.fail.Exception):
        read_traces(moved, jobs=1, progress=False)


def test_a_file_known_by_its_inode_and_times_is_not_even_hashed(run, monkeypatch):
    monkeypatch.setattr(reading, "TICK", -1.0)
    first = read_traces(run, jobs=1, progress=False)
    monkeypatch.setattr(reading, "digest_of", lambda path: pytest.fail("hashed again"))
    same(first, read_traces(run, jobs=1, progress=False))
    file = sorted(run.glob("worker*"))[0]
    stat = file.stat()
    file.write_bytes(file.read_bytes().replace(b"kernel 1", b"kernel 9"))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # somebody who hides that it was changed
    with pytest.raises(pytest.fail.Exception, match="hashed again"):
        read_traces(run, jobs=1, progress=False)


def test_a_file_changed_a_moment_ago_is_not_remembered(run):
    read_traces(run, jobs=1, progress=False)
    assert json.loads((traces_dir() / "digests.json").read_text()) == {}


@pytest.mark.parametrize("harm", ["[1]", "[null]", '{"a": 1}', '"x"', "[]", "5", "rank", "bit", "gone", "columns"])
def test_a_damaged_cache_is_read_anew(run, harm):
    first = read_traces(run, jobs=1, progress=False)
    folder = sorted(traces_dir().glob("*-*"))[0]
    events = folder / "events-0.parquet"
    meta = folder / "meta.json"
    if harm[0] in '[{"5': meta.write_text(harm)
    if harm == "rank": meta.write_text(meta.read_text().replace('"ranks": 4', '"ranks": 5'))
    if harm == "gone": events.unlink()
    if harm == "columns": pd.DataFrame(dict(name=["x"])).to_parquet(events)
    if harm == "bit":
        raw = bytearray(events.read_bytes())
        raw[60] ^= 4
        events.write_bytes(raw)
    same(first, read_traces(run, jobs=1, progress=False))
    assert reading.kept(folder, run) is not None  # and mended


@pytest.mark.parametrize("rows, names", [(0, 3), (1, 200), (reading.GROUP, 40_000), (reading.ROWS + reading.GROUP + 1, 200)])  # codes of one, two and four bytes
def test_a_table_of_any_size_comes_back_as_it_was(tmp_path, rows, names):
    dice = np.random.default_rng(rows)
    texts = pd.Index([f"kernel {i} é" for i in range(names)], dtype="str")
    events = events_table({c: dice.integers(-1, 1 << 30, rows) for c, (dtype, _) in COLUMNS.items() if str(dtype).startswith("int")} | dict(
        name=pd.Categorical.from_codes(dice.integers(0, names, rows), texts), kind=pd.Categorical.from_codes(dice.integers(0, len(KINDS), rows), KINDS), start=np.sort(dice.integers(0, 1 << 62, rows)), dtype=pd.Categorical.from_codes(np.full(rows, -1), ["BFloat16"])))
    found = reading.write_events(events, tmp_path / "e.parquet")
    again = reading.read_events(tmp_path / "e.parquet", found)
    reading.give_back([Trace(tmp_path, 0, 1, again), Trace(tmp_path, 0, 1, events)])
    pd.testing.assert_frame_equal(again[:1000], events[:1000])
    assert again.dtypes.to_dict() == events.dtypes.to_dict() and len(again) == rows
    for (name, a), b in zip(reading.numbers_of(again).items(), reading.numbers_of(events).values()): assert a.dtype == b.dtype and np.array_equal(a, b), name
    assert pq.ParquetFile(tmp_path / "e.parquet").num_row_groups == -(-rows // reading.GROUP)
    if rows > 1:
        again.loc[1, ["bytes", "name"]] = [5, texts[2]]  # what is mapped can be written to, and stays written when memory is given back
        reading.give_back([Trace(tmp_path, 0, 1, again)])
        assert again.bytes[1] == 5 and again.name[1] == texts[2] and again.bytes[0] == events.bytes[0]


def test_a_large_table_is_never_in_memory_twice(tmp_path):
    code = """
import sys, numpy as np, pathlib, pandas as pd, pyarrow.parquet
from kimi_spec.profiling import reading
from kimi_spec.profiling.trace import COLUMNS, KINDS, Trace
def used(what): return int(open("/proc/self/status").read().split(what + ":")[1].split()[0]) >> 10
rows, folder = 2_000_000, pathlib.Path(sys.argv[1])
if sys.argv[2] == "keep":
    def column(dtype): return np.arange(rows, dtype=dtype) if str(dtype).startswith("int") else pd.Categorical.from_codes(np.zeros(rows, np.int8), KINDS)
    events = pd.DataFrame({name: column(dtype) for name, (dtype, _) in COLUMNS.items()}, copy=False)
before = used("VmRSS")
if sys.argv[2] == "keep": reading.keep([Trace(folder, 0, 1, events)], folder / "kept")
else: assert reading.kept(folder / "kept", folder)[0].events.start.iloc[-1] == rows - 1
print(used("VmHWM") - before, rows * 81 >> 20)
"""
    for what in ("keep", "kept"):
        more, table = map(int, subprocess.run([sys.executable, "-c", code, tmp_path, what], capture_output=True, text=True, check=True).stdout.split())
        assert more < table / 2, what


def test_no_flipped_bit_of_the_cache_is_taken_for_data(run):
    read_traces(run, jobs=1, progress=False)
    folder, dice = sorted(traces_dir().glob("*-*"))[0], random.Random(1)
    for name in ("events-0.parquet", "meta.json"):
        file = folder / name
        whole = file.read_bytes()
        for at in dice.sample(range(len(whole)), min(300, len(whole))):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << dice.randrange(8)]) + whole[at + 1:])
            assert reading.kept(folder, run) is None, (name, at)
        file.write_bytes(whole)
    assert reading.kept(folder, run) is not None


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_file_that_changes_while_it_is_read_is_not_kept(run, monkeypatch, jobs):
    for file in sorted(run.glob("worker*"))[1:]: file.unlink()
    file, = run.glob("worker*")
    old, new = (gzip.compress(kineto(1, 4).replace(b"kernel 1", name)) if file.read_bytes()[:1] == b"\x1f" else kineto(1, 4).replace(b"kernel 1", name) for name in (b"kernel A", b"kernel B"))
    (run / "rank0.json").write_bytes(kineto(0, 4))
    file.write_bytes(old)
    before = len(old)
    code = f"""
import kimi_spec.profiling.reading as reading
real = reading.read_file
def read_file(path, *rest):
    if path.name == {file.name!r}: path.write_bytes({new!r})  # the same size, within a tick of the clock
    return real(path, *rest)
reading.read_file = read_file
reading.work()"""
    if jobs == 1:
        real = reading.read_file
        monkeypatch.setattr(reading, "read_file", lambda path, *rest: (path.name == file.name and path.write_bytes(new), real(path, *rest))[1])
    monkeypatch.setattr(reading, "CODE", code)
    read = {t.rank: t for t in read_traces(run, jobs=jobs, progress=False)}
    assert "kernel B" in read[1].events.name.tolist() and "changed while it was read" in str(read[1].problems[0]) and len(new) == before
    monkeypatch.undo()
    file.write_bytes(old)
    again = {t.rank: t for t in read_traces(run, jobs=1, progress=False)}
    assert "kernel A" in again[1].events.name.tolist() and not again[1].problems


def test_the_cache_stays_within_its_limit_and_keeps_what_is_used(run):
    read_traces(run, jobs=1, progress=False)
    folders = sorted(traces_dir().glob("*-*"))
    for i, folder in enumerate(folders): os.utime(folder, (1000 + i, 1000 + i))
    size = sum(p.stat().st_size for p in folders[0].iterdir())
    read_traces(sorted(run.glob("worker*")), jobs=1, progress=False)
    os.utime(folders[2], (500, 500))
    (traces_dir() / ".dead.part").mkdir()
    os.utime(traces_dir() / ".dead.part", (1000, 1000))
    assert tidy(3 * size + size // 2) > 0
    assert [folder.exists() for folder in folders] == [True, True, False, True]
    assert not (traces_dir() / ".dead.part").exists()
    assert tidy(0) > 0 and not list(traces_dir().glob("*-*"))


def test_a_full_disk_costs_the_cache_only(run, monkeypatch):
    def full(*_): raise OSError(28, "No space left on device")
    monkeypatch.setattr(reading, "keep", full)
    traces = read_traces(run, jobs=1, progress=False)
    assert len(traces) == 4 and "No space left" in str(traces[0].problems[0])


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_cache_that_can_not_be_one_costs_the_cache_only(run, jobs):
    traces_dir().parent.mkdir(parents=True, exist_ok=True)
    traces_dir().write_text("a file")
    traces = read_traces(run, jobs=jobs, progress=False)
    assert [len(t.events) for t in traces] == [50] * 4 and ["not kept in the cache" in str(t.problems[0]) for t in traces] == [True] * 4
    traces_dir().unlink()
    (traces_dir() / "digests.json").mkdir(parents=True)
    assert [len(t.problems) for t in read_traces(run, jobs=jobs, progress=False)] == [1, 0, 0, 0] and not list(traces_dir().glob(".*"))  # the one names config.json


def test_without_a_cache_nobody_asks_where_it_is(run, monkeypatch):
    monkeypatch.setattr(reading, "traces_dir", lambda: pytest.fail("asked"))
    assert len(read_traces(run, jobs=1, cache=False, progress=False)) == len(read_traces(run, jobs=2, cache=False, progress=False)) == 4


def test_a_file_that_vanishes_is_named(run, monkeypatch):
    first, *_, last = sorted(run.glob("worker*"))
    real = reading.read_file
    monkeypatch.setattr(reading, "read_file", lambda path, *rest: (first.unlink(missing_ok=True), real(path, *rest))[1])
    for cache in (True, False):
        first.write_bytes(last.read_bytes())
        with pytest.raises(TraceError, match=f"{first.name}: No such file"):
            read_traces([last, first], jobs=1, cache=cache, progress=False)


def test_what_killed_processes_left_behind_is_removed(run, tmp_path, monkeypatch):
    monkeypatch.setattr(reading.tempfile, "tempdir", str(tmp_path))
    for file in run.glob("worker*"): file.rename(file.with_name("slow " + file.name))
    code = slow_readers(monkeypatch, log := tmp_path / "pids")
    script = f"import sys, kimi_spec.profiling.reading as reading; reading.CODE = {code!r}; reading.read_traces(sys.argv[1], jobs=2, cache=False, progress=False)"
    process = subprocess.Popen([sys.executable, "-c", script, run], env=os.environ | dict(TMPDIR=str(tmp_path)))
    pids = wait_for(log, 2)
    left, = tmp_path.glob("kimi-spec-traces-*")
    reading.sweep()
    assert left.is_dir()  # its process lives
    process.kill()
    process.wait()
    for pid in pids: os.kill(pid, signal.SIGKILL)
    monkeypatch.undo()
    monkeypatch.setattr(reading.tempfile, "tempdir", str(tmp_path))
    with pytest.raises(TraceError): read_traces([], progress=False)
    assert not left.exists()


def test_two_processes_can_read_the_same_run(run):
    code = "import sys; from kimi_spec.profiling.reading import read_traces; print(len(read_traces(sys.argv[1], jobs=1, progress=False)))"
    both = [subprocess.Popen([sys.executable, "-c", code, run], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in both:
        out, err = process.communicate(timeout=60)
        assert out.strip() == "4", err
    assert len(list(traces_dir().glob("*-*"))) == 4 and not list(traces_dir().glob(".*"))


def slow_readers(monkeypatch, log):
    "Readers that take a minute for a file with `slow` in its name, and write their process down first."
    code = f"""
import time, kimi_spec.profiling.reading as reading
real = reading.read_file
def read_file(path, *rest):
    if "slow" in path.name:
        import os
        open({str(log)!r}, "a").write(f"{{os.getpid()}} ")
        time.sleep(60)
    return real(path, *rest)
reading.read_file = read_file
reading.work()"""
    monkeypatch.setattr(reading, "CODE", code)
    return code


def wait_for(log, count=1, seconds=30):
    deadline = time.monotonic() + seconds
    while not log.exists() or len(log.read_text().split()) < count:
        assert time.monotonic() < deadline, "no reader began"
        time.sleep(0.05)
    return [int(pid) for pid in log.read_text().split()]


def test_a_reader_that_dies_is_named_and_the_others_go_on(run, tmp_path, monkeypatch):
    sorted(run.glob("worker*"))[3].rename(run / "worker9.slow.json")  # rank 3
    slow_readers(monkeypatch, log := tmp_path / "pids")
    killer = threading.Thread(target=lambda: os.kill(wait_for(log)[0], signal.SIGKILL))
    killer.start()
    traces = read_traces(run, jobs=2, cache=False, progress=False)
    killer.join()
    assert [t.rank for t in traces] == [0, 1, 2]
    text = "\n".join(map(str, traces[0].problems))
    assert "worker9.slow.json was not read: its reader was killed by SIGKILL" in text and "rank 3 of 4 is not among the files" in text


def test_ctrl_c_ends_every_reader(run, tmp_path, monkeypatch):
    for file in run.glob("worker*"): file.rename(file.with_name("slow " + file.name))
    code = slow_readers(monkeypatch, log := tmp_path / "pids")
    script = f"import sys, kimi_spec.profiling.reading as reading; reading.CODE = {code!r}; reading.read_traces(sys.argv[1], jobs=2, progress=False)"
    process = subprocess.Popen([sys.executable, "-c", script, run], stderr=subprocess.PIPE, text=True)
    pids = wait_for(log, 2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert "KeyboardInterrupt" in err and process.returncode != 0
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


def test_wrong_files_are_said_by_name(run, project):
    with pytest.raises(TraceError, match="server.log"):
        read_traces([*run.glob("worker*"), run / "server.log"], jobs=2, progress=False)
    with pytest.raises(TraceError, match="none.json: No such file"):
        read_traces(run / "none.json")
    with pytest.raises(TraceError, match="no file was named"):
        read_traces([])
    os.mkfifo(project / "pipe")
    for path, says in ((project / "pipe", "found a pipe"), ("/dev/zero", "found a pipe or a device"), (project / ("x" * 300), "name too long"), ("a\0b", "null byte")):
        with pytest.raises(TraceError, match=says): read_traces(path)
    for jobs in ("2", 0, -1, 1.5):
        with pytest.raises(TraceError, match="expected a whole number from 1"): read_traces(run, jobs=jobs)
    (project / "other" / "inner").mkdir(parents=True)
    (project / "other" / "x.nsys-rep").write_bytes(b"QDREP")
    with pytest.raises(TraceError, match=r"it holds 1 of .nsys-rep and the folders inner/; export reports"):
        read_traces(project / "other")
    with pytest.raises(TraceError, match="nsys export --type sqlite"):
        read_traces(project / "other" / "x.nsys-rep", progress=False)


def test_no_trace_of_a_folder_is_left_out_without_a_word(project):
    folder = project / "large"
    folder.mkdir()
    (folder / "a.json").write_bytes(kineto(0, 4).replace(b"{", b'{"pg_config": "' + b"0, " * 100_000 + b'", ', 1))
    (folder / "b.json.gz").write_bytes(gzip.compress(b"") + gzip.compress(kineto(1, 4)))
    (folder / "c.json").write_bytes(kineto(2, 4)[:60])  # its writer died
    (folder / "d.json.gz").write_bytes(gzip.compress(kineto(3, 4))[:12])
    (folder / "log").write_text("ready")
    first, second = read_traces(folder, jobs=1, progress=False)
    assert (first.rank, second.rank, second.problems) == (0, 1, [])
    assert [str(p) for p in first.problems] == ["ranks 2-3 of 4 are not among the files", "left out, for no events of a trace were found in the first 16 MB, as far as they can be unpacked: c.json, d.json.gz"]
    for name in "ab": next(folder.glob(name + ".json*")).unlink()
    with pytest.raises(TraceError, match="without events are c.json, d.json.gz"): read_traces(folder)


def test_a_run_of_any_size_is_put_in_order(project):
    (project / "a.json").write_bytes(kineto(7, 9))
    (project / "b.json").write_bytes(kineto(None))
    (project / "c.json").write_bytes(kineto(0, None))  # says which rank it is, but not of how many
    traces = read_traces([project / name for name in ("a.json", "b.json", "c.json")], jobs=1, progress=False)
    assert [(t.path.name, t.rank, t.ranks) for t in traces] == [("c.json", 0, 9), ("b.json", 1, 9), ("a.json", 7, 9)]  # an order never takes a rank that another file says
    assert [str(p) for p in traces[0].problems] == ["ranks 2-6, 8 of 9 are not among the files"]
    large, = reading.one_run([replace(traces[2], ranks=10 ** 12)])
    assert [str(p) for p in large.problems] == ["ranks 0-6, 8-999999999999 of 1,000,000,000,000 are not among the files"]


@pytest.mark.parametrize("names", [("1764.1-TP-0-DP-0.trace.json", "1764.1-TP-0-DP-1.trace.json"), ("frank12_77.json", "frank12_78.json")])
def test_names_that_do_not_tell_ranks_apart_are_no_error(project, names):
    for name in names: (project / name).write_bytes(kineto(None))
    traces = read_traces([project / name for name in names], jobs=1, progress=False)
    assert [(t.path.name, t.rank, t.rank_from) for t in traces] == [(names[0], 0, "order"), (names[1], 1, "order")]


def test_files_of_two_runs_are_not_mixed(run, project):
    files = sorted(run.glob("worker*"))
    (run / "again.json").write_bytes(kineto(2, 4, count=3))
    with pytest.raises(TraceError, match="two traces of rank 2: again.json and worker10.pt.trace.json"):
        read_traces(run, jobs=1, progress=False)
    (run / "again.json").write_bytes(kineto(2, 8))
    with pytest.raises(TraceError, match="is of 4 ranks, again.json is of 8 ranks"):
        read_traces([run / "again.json", files[0]], jobs=1, progress=False)
    (run / "again.json").write_bytes(kineto(2, 4, begin=1e9))
    traces = read_traces([run / "again.json", files[3]], jobs=1, progress=False)
    text = "\n".join(map(str, traces[0].problems))
    assert "ranks 0-1 of 4 are not among the files" in text and "begins: either two runs, or clocks that don't agree" in text


def test_files_without_a_rank_take_their_order(project):
    folder = project / "plain"
    folder.mkdir()
    for i in (2, 10, 1): (folder / f"t{i}.json").write_bytes(kineto(None, begin=1000.0 + i))
    traces = read_traces(folder, jobs=1, progress=False)
    assert [(t.path.name, t.rank, t.ranks, t.rank_from) for t in traces] == [("t1.json", 0, 3, "order"), ("t2.json", 1, 3, "order"), ("t10.json", 2, 3, "order")]
    assert "nothing says which rank this is" in str(traces[0].problems[0])
    single, = read_traces(folder / "t2.json", progress=False)
    assert (single.rank, single.ranks, single.problems) == (0, 1, [])


def test_exports_and_traces_look_alike(project):
    write_export(project / "a.json", StringIds=strings("k"), CUPTI_ACTIVITY_KIND_KERNEL=kernels(3) + kernels(3, pid=200, device=1), TARGET_INFO_SESSION_START_TIME=[dict(utcEpochNs=CLOCK)])
    first = read_traces(project / "a.json", progress=False)
    assert [(t.rank, t.ranks, t.rank_from, t.info["format"]) for t in first] == [(0, 2, "order", "nsys"), (1, 2, "order", "nsys")]
    same(first, read_traces(project / "a.json", progress=False))


def test_the_bar_ends_at_the_bytes_of_all_files(run, monkeypatch):
    import tqdm.auto
    bars = []
    class Bar(tqdm.auto.tqdm):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs | dict(disable=False, file=open(os.devnull, "w")))
            bars.append(self)
    monkeypatch.setattr(tqdm.auto, "tqdm", Bar)
    read_traces(run, jobs=2)
    size = sum(p.stat().st_size for p in run.glob("worker*"))
    assert (bars[0].total, bars[0].n) == (size, size)


def test_no_bar_is_written_where_nobody_watches(run, capfd):
    read_traces(run, jobs=1)
    assert capfd.readouterr() == ("", "")
