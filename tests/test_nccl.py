"Local ranks, the reader of all_reduce_perf, the NCCL environment: what notebooks can't hold."
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from kimi_spec.core.errors import KimiSpecError
from kimi_spec.core.paths import data_dir
from kimi_spec.core.reports import start_run
from kimi_spec.core.rig import list_rigs
from kimi_spec.nccl.collectives import PerfError, bus_bandwidth, measure_latency, message_bytes, read_perf
from kimi_spec.nccl.environment import CATALOGUE, NcclEnvError, check_environment
from kimi_spec.nccl.ranks import RankError, run_ranks

ADD_UP = "kimi_spec.nccl.ranks:add_up"
HEADER = """# nThread 1 nGpus 2 minBytes 256 maxBytes 4194304 step: 2(factor) warmup iters: 1 iters: 20 agg iters: 1 validation: 1 graph: 0
#
# Using devices
#  Rank  0 Group  0 Pid  77 on  host device  0 [0x11] NVIDIA H100 PCIe
#  Rank  1 Group  0 Pid  77 on  host device  1 [0x21] NVIDIA H100 PCIe
NCCL version 2.27.3+cuda12.9
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""
ROW = "     1048576        262144     float     sum      -1    100.0   10.49   10.49      0    50.00   20.97   20.97    N/A\n"
FOOTER = "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 15.73 \n#\n"


@pytest.fixture
def perf(tmp_path):
    "Write an output of all_reduce_perf and read it."
    def read(text):
        path = tmp_path / "out.txt"
        path.write_text(text)
        return read_perf(path)
    return read


def alive(pids):
    return [p for p in pids if psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE]


def wait_until(condition, seconds):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end: time.sleep(0.1)
    return condition()


def test_whole_output(perf):
    out = perf(HEADER + ROW + FOOTER)
    assert out.notes == [] and out.devices == ["0 [0x11] NVIDIA H100 PCIe", "1 [0x21] NVIDIA H100 PCIe"]
    assert (out.version, out.out_of_bounds, out.average) == ("NCCL version 2.27.3+cuda12.9", 0, 15.73)
    first, second = out.rows.to_dict("records")
    assert (first["place"], first["time_us"], first["busbw"], first["wrong"], first["line"]) == ("out", 100.0, 10.49, 0, 11)
    assert (second["place"], second["time_us"], second["busbw"]) == ("in", 50.0, 20.97) and second["wrong"] != second["wrong"]
    assert bus_bandwidth(first["size"], first["time_us"], 2) == pytest.approx(first["busbw"], abs=0.01)
    assert out.average == pytest.approx(out.rows.busbw.mean(), abs=0.01)


def test_mpirun_prefix_old_names_and_new_columns(perf):
    whole = HEADER + ROW + FOOTER
    plain = perf(whole).rows
    assert perf("".join(f"[1,0]<stdout>:{line}\n" for line in whole.splitlines())).rows.equals(plain)
    assert perf(whole.replace("#wrong", "error").replace("time ", "cputime ")).rows.equals(plain)
    columns, row = "i_min i_max i_p99 i_cv%", "90.0 110.0 109.0 3.2"
    new = whole.replace("#wrong", f"#wrong {columns}").replace("      0    50.00", f"      0 {row}    50.00").replace("N/A", f"N/A {row} 2026-07-01 10:00:00")
    new = new.replace("i_cv%\n", "i_cv% timestamp\n")
    assert perf(new).rows[["time_us", "busbw", "i_p99"]].values.tolist() == [[100, 10.49, 109], [50, 20.97, 109]]


@pytest.mark.parametrize("keep", [len(ROW) - 1, len(ROW) - 9, 60, 20])
def test_row_cut_short(perf, keep):
    out = perf(HEADER + ROW + ROW.replace("1048576", "2097152")[:keep])
    assert out.rows["size"].tolist() == [1048576] * 2 and out.average is None
    assert "out.txt:12: the last row is cut short" in out.notes[0] and "no footer, so the run was aborted after 1048576 bytes" in out.notes[1]


def test_output_of_a_failed_run(perf):
    out = perf(HEADER + ROW + "host: Test NCCL failure common.cu:958 'unhandled system error'\n")
    assert "out.txt:12: host: Test NCCL failure" in out.notes[0] and len(out.rows) == 2
    assert "aborted before its first row" in perf(HEADER).notes[0]


@pytest.mark.parametrize("old, new, says", [("busbw #wrong\n", "busbw #right\n", "out.txt:9: unknown column '#right'"), ("100.0 ", "fast ", "out.txt:11: not a row"),
                                            (" 20.97    N/A", "", "out.txt:11: 11 fields where the header names 13"), ("#       size", "#       sizes", "out.txt: no table")])
def test_unreadable_output(perf, old, new, says):
    with pytest.raises(PerfError, match=says.replace("(", r"\(")): perf((HEADER + ROW + FOOTER).replace(old, new))


def test_illustrations_are_consistent():
    for path in (data_dir() / "nccl").glob("illustration-*.txt"):
        out = read_perf(path)
        assert "not measured here" in path.read_text().splitlines()[0]
        assert out.notes == [] and len(out.devices) == 8 and out.average == pytest.approx(out.rows.busbw.mean(), abs=0.01)
        assert [bus_bandwidth(r.size, r.time_us, 8) for r in out.rows.itertuples()] == pytest.approx(out.rows.busbw.tolist(), abs=0.01)


def test_bus_bandwidth_and_messages():
    assert bus_bandwidth(131072, 51.6, 8) == pytest.approx(4.445, abs=1e-3)
    assert bus_bandwidth(131072, 51.6, 2) == pytest.approx(131072 / 51.6 / 1e3)
    assert [message_bytes(7168, n) for n in (1, 4, 128)] == [14336, 57344, 1835008]


@pytest.mark.parametrize("name, value", [("NCCL_PROTO", "^LL128"), ("NCCL_PROTO", "allreduce:LL;broadcast:Simple,LL"), ("NCCL_ALGO", "ring,tree"), ("NCCL_P2P_LEVEL", "sys"), ("NCCL_P2P_LEVEL", "7"),
                                         ("NCCL_NTHREADS", "512"), ("NCCL_MIN_NCHANNELS", "64"), ("NCCL_NVLS_ENABLE", "2"), ("CUDA_DEVICE_MAX_CONNECTIONS", "anything")])
def test_values_that_nccl_reads(name, value): check_environment({name: value})


@pytest.mark.parametrize("name, value, says", [("NCCL_PROTO", "Simpel", "NCCL reads LL, LL128, Simple"), ("NCCL_PROTO", "LL,", "NCCL reads"), ("NCCL_P2P_LEVEL", "NODE", "LOC, NVL"), ("NCCL_NTHREADS", "96", "64, 128, 256 or 512"),
                                               ("NCCL_MIN_NCHANNELS", "65", "1 to 64"), ("NCCL_NVLS_ENABLE", "true", "0, 1 or 2"), ("NCCL_GRAPH_FILE", "", "path"),
                                               ("NCCL_P2P_LEVLE", "SYS", "nearest: NCCL_P2P_LEVEL"), ("nccl_algo", "Ring", "nearest: NCCL_ALGO")])
def test_values_that_nccl_does_not_read(name, value, says):
    with pytest.raises(NcclEnvError, match=says): check_environment({name: value})


def test_every_fault_is_told_at_once():
    with pytest.raises(NcclEnvError) as e: check_environment({"NCCL_PROTO": "x", "NCCL_BUFFSIZE": "4MiB"}, "rig.yaml")
    assert str(e.value).count("rig.yaml: ") == 2 and len({v.name for v in CATALOGUE}) == len(CATALOGUE)


def test_plans_of_all_rigs():
    from kimi_spec.nccl.tuning import plan
    for rig in list_rigs():
        steps = plan(rig)
        commands = [s.command for s in steps if s.command]
        assert all(not s.runs_here and s.why_not for s in steps if s.needs == "gpu")
        assert rig.hardware.needs_gpu == bool(commands) and all(c[-9:] == f"all_reduce_perf -b 256 -e 4M -f 2 -g {rig.hardware.count}".split() for c in commands)


def test_nccl_output_becomes_records(perf, tmp_path):
    from kimi_spec.nccl.tuning import record_perf, sweep
    run = start_run("k25-vllm-tp8", str(tmp_path / "run"), "nccl")
    illustration = data_dir() / "nccl" / "illustration-default.txt"
    with pytest.raises(KimiSpecError, match="illustrates the format and was not measured on rig k25-vllm-tp8"): record_perf(run, read_perf(illustration))
    record_perf(run, perf(illustration.read_text()))
    record = next(iter(run.records))
    assert (record.name, record.value, record.unit, record.labels) == ("allreduce.latency", 48.2, "us", dict(backend="nccl", ranks=8, bytes=32768, stat="mean"))
    assert record.evidence.endswith("out.txt:21")
    assert sweep(run) is None
    with pytest.raises(KimiSpecError, match="measured on 2 devices, but rig k25-vllm-tp8 has 8"): record_perf(run, perf(HEADER + ROW + FOOTER))
    with pytest.raises(KimiSpecError, match=r"wrong values \(3\)"): record_perf(run, perf(HEADER + ROW + FOOTER.replace("0 OK", "3 FAILED")))


def test_gloo_latency(tmp_path):
    table = measure_latency(tmp_path, sizes=[1024, 4 << 20], repeats=2)
    assert (table.low <= table["median"]).all() and (table["median"] <= table.high).all()
    assert table["median"].iloc[1] > table["median"].iloc[0]


def test_killed_rank_is_one_message(tmp_path):
    with pytest.raises(RankError, match=r"2 ranks did not finish in 3 s"): run_ranks(ADD_UP, 2, tmp_path, timeout_s=3, hang=1)
    assert not psutil.Process().children()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_rank_outlives_its_parent(tmp_path, how):
    code = f"from kimi_spec.nccl.ranks import run_ranks; run_ranks({ADD_UP!r}, 2, {str(tmp_path)!r}, hang=1)"
    parent = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    assert wait_until(lambda: len(psutil.Process(parent.pid).children()) == 2, 20)
    ranks = [p.pid for p in psutil.Process(parent.pid).children()]
    wait_until(lambda: (tmp_path / "rendezvous").exists(), 30)
    parent.send_signal(how)
    parent.wait(10)
    assert wait_until(lambda: not alive(ranks), 10)


def test_rank_killed_from_outside(tmp_path):
    code = f"""
from kimi_spec.nccl.ranks import *
try: run_ranks({ADD_UP!r}, 2, {str(tmp_path)!r}, hang=1)
except RankError as e: print(e)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert wait_until(lambda: (tmp_path / "rendezvous").exists(), 30)
    ranks = psutil.Process(parent.pid).children()
    victim = next(p for p in ranks if p.cmdline()[-1] == "1")
    os.kill(victim.pid, signal.SIGKILL)
    said = parent.communicate(timeout=20)[0]
    assert said.startswith("rank 1 of 2 was killed by SIGKILL; the other ranks were stopped.") and not alive(p.pid for p in ranks)
