"Slow or stuck, dead or alive, and nothing left behind: recorded starts replayed at any pace, stand-in engines that load, sleep, spin and hide, full disks, kill -9."

import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial

import processes
import psutil
import pytest
from processes import is_running

from kimi_spec.core.errors import KimiSpecError
from kimi_spec.core.paths import data_dir, root
from kimi_spec.core.records import Records
from kimi_spec.core.rig import load_rig
from kimi_spec.engines.engine import Command, EngineDied, EngineTimeout
from kimi_spec.engines.server import LogLost, Server, log_lost, wait_ready
from kimi_spec.engines.supervision import LogGone, Machine, Patience, State, Teller, cause_of, changes, first_error, replay, slowed, watch
from kimi_spec.engines.vitals import Gpu, Sample, Sampler, gpus

FAKE = str(root() / "tests" / "fake_engine.py")
LOGS = data_dir() / "engines" / "logs"
STARTS = {"sglang": LOGS / "sglang-0.5.10-start.log", "vllm": LOGS / "vllm-0.32.0-start.log"}
FIRST_INIT = {"sglang": "Init torch distributed begin", "vllm": r"world_size=\d+ rank=\d+"}


def text(path):
    return path.read_bytes().decode()


wait_until = partial(processes.wait_until, seconds=15)


# replays


@pytest.mark.parametrize("engine", STARTS)
@pytest.mark.parametrize("rate", [1.0e9, 2.0e9])
def test_547_gb_are_loading_with_time_left(engine, rate):
    log = text(STARTS[engine])
    told = replay(log, slowed(log, 547e9, rate), Machine({"target": 547e9}, engine))
    assert State.STALLED not in {s.state for _, s in told}
    loads = [(t, s) for t, s in told if s.state == State.LOADING and s.left and s.percent > 15]
    end = max(t for t, _ in loads)
    assert end > 0.9 * 547e9 / rate
    assert all(abs(t + s.left - end) < 0.08 * 547e9 / rate for t, s in loads)
    assert all(abs(s.rate / rate - 1) < 0.1 for _, s in loads)
    assert [s.percent for _, s in loads] == sorted(s.percent for _, s in loads)
    assert all("GB/s" in str(s) and "left" in str(s) for _, s in loads)


@pytest.mark.parametrize("engine", STARTS)
def test_a_load_without_a_bar_is_told_by_its_reads(engine):
    log = re.sub(r"[^\r\n]*shards:[^\r\n]*[\r\n]", "", text(STARTS[engine]))
    begin = log.index("Load weight begin" if engine == "sglang" else "Starting to load model")
    at = len(log[: log.index("\n", begin) + 1].encode())
    samples = [Sample(float(t), at, rss=int(4e9), read_bytes=int(1e9 * t), processes=10) for t in range(500)]
    last = replay(log, samples, Machine({"target": 547e9}, engine))[-1][1]
    if engine == "sglang":  # vLLM says no more than "Starting to load model": no percentage, but no stall either
        assert 88 < last.percent < 94 and abs(last.rate - 1e9) < 1e7 and 40 < last.left < 60
    assert last.state == State.LOADING


@pytest.mark.parametrize("engine", STARTS)
@pytest.mark.parametrize("cores", [0, 8])
def test_silence_after_nccl_is_a_stall_within_90_seconds(engine, cores):
    log = re.sub(rf"({FIRST_INIT[engine]}[^\n]*\n)", r"\1x is using nccl==2.27.5" + "\n", text(STARTS[engine]), count=1)
    samples = [replace(s, cpu=cores * s.time) for s in slowed(log, 547e9, 1.3e9, until="nccl==", silence=120)]
    told = replay(log, samples, Machine({"target": 547e9}, engine))
    silent = next(s.time for s in samples if s.log_bytes == samples[-1].log_bytes)  # the log never grows again
    at, status = next((t, s) for t, s in told if s.state == State.STALLED)
    assert 60 <= at - silent <= 90 and status.stage == State.INIT and "P2P" in status.cause.what
    assert "nccl==2.27.5" in status.evidence[0] and ("busy (8.0" in str(status)) == (cores == 8)


@pytest.mark.parametrize("engine", STARTS)
def test_how_the_log_is_cut_changes_nothing(engine):
    data, draw = STARTS[engine].read_bytes(), random.Random(1)
    cuts = sorted(draw.sample(range(len(data)), 400)) + [len(data)]
    by_line = [i + 1 for i, b in enumerate(data) if b == 10]
    states = [[(s.state, s.detail.split(",")[0]) for _, s in changes(replay(data.decode(), [Sample(i * 0.01, n, processes=4) for i, n in enumerate(c)], Machine(engine=engine)))] for c in (cuts, by_line)]
    order = [[state for i, (state, _) in enumerate(found) if i == 0 or found[i - 1][0] != state] for found in states]
    assert order[0] == order[1] and State.LOADING in order[0]
    assert states[0][-1] == states[1][-1]


def test_other_ranks_do_not_turn_the_clock_back():
    log = "[2026-11-29 16:59:10 TP0] Load weight begin.\n\rMulti-thread loading shards:  30% Completed | 20/64 [00:12<00:25]\n[2026-11-29 16:59:11 TP3] Init torch distributed begin.\n(Worker_TP5 pid=9) INFO [x.py:1] world_size=8 rank=5\n"
    assert replay(log, [Sample(0, len(log), processes=9)])[-1][1].state == State.LOADING


def test_garbage_is_survived():
    draw = random.Random(2)
    log = "".join(chr(draw.choice([10, 13, 27, 37, 124, 47, 49, 65, 0x3000, 0xFFFD])) for _ in range(20000))
    told = replay(log, [Sample(float(t), t * 400, processes=1) for t in range(100)])
    assert {s.state for _, s in told} <= {State.STARTING, State.STALLED}


def test_stall_passes_and_is_said_once():
    said, teller, machine = [], Teller("x", None), Machine()
    teller.say = said.append
    for t in range(200):
        teller.tell(t, machine.step("Load weight begin.\n" if t == 0 else "\rLoading shards: 50% Completed | 1/2" if t == 100 else "", Sample(t, 0, processes=3)))
    assert [line.split("x: ")[1].split(":")[0] for line in said] == ["loading weights", "stalled", "goes on", "stalled"]


@pytest.mark.parametrize("line, what", [
    ("OSError: [Errno 28] No space left on device: '/cache/x'", "a disk is full"),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "a GPU is out of memory"),
    ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", "a GPU is out of memory"),
    ("OSError: [Errno 98] error while attempting to bind on address ('127.0.0.1', 30000): address already in use", "an address is in use"),
    ("FileNotFoundError: No such file or directory: model-00007-of-00064.safetensors", "a weight file is missing"),
    ("safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer", "a weight file is missing"),
    ("torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:77, unhandled system error", "NCCL can't get through"),
    ("torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients joined.", "other nodes have not joined"),
])
def test_a_death_names_its_cause(line, what):
    log = f"[2026-11-29 16:59:20 TP5] Scheduler hit an exception: Traceback (most recent call last):\n  File \"m.py\", line 9, in load\n{line}\n\n[2026-11-29 16:59:20] Received sigquit from a child process. It usually means the child failed.\n"
    status = replay(log, [Sample(0, len(log), processes=3), Sample(1, len(log), exit_code=131)])[-1][1]
    assert status.state == State.DEAD and status.cause.what.startswith(what)
    assert status.evidence[0] == f'TP5: {line} (File "m.py", line 9, in load)'


def test_the_kernel_is_blamed_only_when_it_was_the_kernel():
    for kills, what in [(0, "someone sent SIGKILL"), (1, "memory of the machine ran out")]:
        status = replay("", [Sample(0, 0, processes=1, oom_kills=3), Sample(1, 0, exit_code=137, oom_kills=3 + kills)])[-1][1]
        assert status.cause.what.startswith(what) and status.detail == "killed by signal 9 (SIGKILL)"


@pytest.mark.parametrize("code", [0, 1, 3, 119, 128, 193, 255])
def test_a_plain_exit_code_is_no_signal(code):
    status = replay("", [Sample(0, 0, processes=1, oom_kills=3), Sample(1, 0, exit_code=code, oom_kills=4)])[-1][1]
    assert (status.detail, status.cause) == (f"ended with exit code {code}", None)


def test_a_signal_without_a_name_is_a_signal():
    assert replay("", [Sample(0, 0, processes=1), Sample(1, 0, exit_code=160)])[-1][1].detail == "killed by signal 32"


def test_two_nodes_wait_for_each_other():
    assert cause_of("", "Init torch distributed begin.", State.INIT, nodes=2).what == "it waits for the other nodes"


def test_an_error_that_was_survived_does_not_explain_a_death():
    log = text(LOGS / "sglang-0.5.10-scheduler-killed.log")
    assert "ModuleNotFoundError" in log and first_error(log).startswith("Subprocess scheduler_0")
    assert first_error(text(STARTS["vllm"])) == ""


# the real thing, played by a stand-in


@pytest.fixture
def rig():
    return load_rig("nano-vllm-base")


def played(rig, tmp_path, *options, seconds=4, timeout=60, patience=1.5):
    "A stand-in that prints our vLLM log first."
    hurried = rig.model_copy(update={"launch": rig.launch.model_copy(update={"ready_timeout_s": timeout})})
    server = Server(hurried, tmp_path / "server.log")
    server.machine.patience = Patience(patience, 5 * patience)
    log = tmp_path / "play.log"
    log.write_bytes(STARTS["vllm"].read_bytes().split(b"INFO:     Started server process")[0])
    server.command = Command([sys.executable, FAKE, str(server.port), "--play", str(log), "--seconds", str(seconds), *options])
    return server


def test_a_played_load_is_waited_for(rig, tmp_path):
    said = []
    with played(rig, tmp_path, "--grow", "16", seconds=5) as server:
        wait_ready([server], said.append)
    states = [line.split(": ")[1] for line in said]
    assert "loading weights" in states and states[-1] == "ready" and "stalled" not in states, said


def test_silence_with_reads_is_loading(rig, tmp_path):
    reading = "import time\nprint('Load weight begin.', flush=True)\nwith open('/dev/zero', 'rb') as f:\n    while True: f.read(32 << 20); time.sleep(0.2)"
    said, server = [], played(rig, tmp_path, timeout=5)
    server.command = Command([sys.executable, "-c", reading])
    server.machine.sizes = {"target": 547e9}
    with server, pytest.raises(EngineTimeout, match=r"last state: loading weights: target, \d+ % at 0.\d+ GB/s, \d+ min left"):
        wait_ready([server], said.append)
    assert not [line for line in said if "stalled" in line]


@pytest.mark.parametrize("option", [[], ["--spin"]])
def test_silence_without_is_stalled_and_waited_through(rig, tmp_path, option):
    said = []
    with played(rig, tmp_path, "--until", r"world_size=\d+ rank", *option, timeout=7) as server:
        with pytest.raises(EngineTimeout, match="last state: stalled: distributed init.*Likely cause: the ranks wait for each other"):
            wait_ready([server], said.append)
    stalls = [line for line in said if "stalled" in line]
    assert len(stalls) == 1 and "world_size=1 rank=0" in stalls[0] and f"CPU {'busy' if option else 'idle'}" in stalls[0], said


def test_a_lost_scheduler_is_named_while_the_server_lives(rig, tmp_path):
    server = Server(rig, tmp_path / "server.log")
    server.command = Command([sys.executable, FAKE, str(server.port), "--child", "sglang::scheduler_TP0"])
    with server:
        wait_ready([server], str)
        child = psutil.Process(server.pid).children()[0]
        server.status()
        os.kill(child.pid, signal.SIGKILL)
        wait_until(lambda: server.status().state == State.DEAD)
        assert f"sglang::scheduler_TP0 (process {child.pid}) gone while the server process runs" in str(server.death(server.status()))
        assert is_running(server.keeper.pid)


def test_a_child_that_vanishes_takes_nobody_along(monkeypatch):
    others = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    try:
        status = psutil.Process.status

        def vanished(self):
            if self.pid == others[0].pid:
                raise psutil.NoSuchProcess(self.pid)
            return status(self)

        monkeypatch.setattr(psutil.Process, "status", vanished)
        assert {os.getpid(), others[1].pid} <= {p.pid for p in Sampler(os.getpid(), own=True).family()}
    finally:
        for p in others:
            p.kill()
            p.wait()
    assert Sampler(others[0].pid, own=True).family() == []


def test_a_ray_worker_may_become_idle_and_go(monkeypatch):
    "Its title is taken back when its task is done, so its end is no loss."
    worker = subprocess.Popen(["sleep", "60"])
    try:
        sampler, cmdline = Sampler(os.getpid(), own=True), psutil.Process.cmdline
        for title, roles in [("ray::RayWorkerWrapper.execute_method", 1), ("ray::IDLE", 0)]:
            monkeypatch.setattr(psutil.Process, "cmdline", lambda self: [title] if self.pid == worker.pid else cmdline(self))
            assert sampler.sample(0, 0).processes > 1 and len(sampler.roles) == roles
    finally:
        worker.kill()
        worker.wait()
    assert sampler.sample(1, 0).lost == ()


def test_cards_that_spin_are_evidence_wherever_it_stands():
    cards = (Gpu(80 * 2**30, 100.0, 95.0, 600.0),) * 8
    log = "Capture cuda graph begin. This can take up to several minutes.\n"
    told = replay(log, [Sample(float(t), len(log), processes=9, cpu=8.0 * t, gpus=cards) for t in range(70)])
    assert [s.state for t, s in told if t in (59, 60)] == [State.GRAPHS, State.STALLED]
    assert "GPUs 100-100 % busy at 95 of 600 W" in told[-1][1].evidence and told[-1][1].cause.what == "a collective in a graph waits for ever"


def test_gpus_are_sampled(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '1000, 100, 95.5, 600.00'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert gpus() == (Gpu(1000 * 2**20, 100.0, 95.5, 600.0),)
    assert Sampler(os.getpid(), own=True).sample(0, 0).gpus == gpus()


def test_watch_a_server_of_someone_else(rig, tmp_path):
    said, log = [], tmp_path / "theirs.log"
    with log.open("wb") as out:
        theirs = subprocess.Popen([sys.executable, FAKE, "0", "--play", str(STARTS["sglang"]), "--seconds", "3", "--until", "Load weight begin"], stdout=out, stderr=out)
    try:
        time.sleep(0.5)
        watching = subprocess.Popen([sys.executable, "-c", "import sys\nfrom kimi_spec.engines.supervision import *\nprint(watch(sys.argv[1], say=lambda l: print(l, flush=True), every=0.2, patience=Patience(1.0)).state)", str(log)], stdout=subprocess.PIPE, text=True)
        while "stalled: loading weights" not in (line := watching.stdout.readline()):
            assert line, said
            said.append(line)
        watching.send_signal(signal.SIGINT)
        assert watching.communicate(timeout=10)[0].splitlines()[-2:] == ["watched until Ctrl-C; the server goes on (stalled)", "stalled"]
        assert is_running(theirs.pid) and f"process {theirs.pid} " in said[0]
    finally:
        theirs.kill()
        theirs.wait()


def test_watch_says_that_the_log_was_emptied_or_is_gone(tmp_path):
    log = tmp_path / "theirs.log"
    log.write_text("server_args=" + "x" * 100 + "\n")
    told = []

    def say(line):
        told.append(line)
        if "starting" in line:
            log.write_text("Load weight begin.\n")
        elif "loading weights" in line:
            log.unlink()

    with pytest.raises(LogGone, match="the log is gone: .*theirs.log"):
        watch(log, pid=os.getpid(), say=say, every=0.05)
    assert [line.split(": ")[1] for line in told[1:]] == ["starting", "loading weights"]


# full disks


@pytest.fixture
def small_disk(tmp_path):
    "A folder with room for 64 KB."
    folder = tmp_path / "small"
    folder.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True).returncode:
        pytest.skip("mounting a small disk is not allowed here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


TALKING = "import sys, time\nwhile True: print('a line of forty characters, or thereabouts', flush=True); time.sleep(0.001)"


def test_a_full_disk_is_said_and_nothing_stays(rig, small_disk):
    records = Records(small_disk / "records.jsonl", rig=rig.name, phase="launches")
    records.add("kept.record", 1.0, "s", method="test", evidence="test")
    server = Server(rig, small_disk / "server.log", Command([sys.executable, "-c", TALKING]))
    with server, pytest.raises(LogLost, match=rf"no room left in {small_disk} \(0.0 MB free\): the log of the server can't be written"):
        wait_until(lambda: psutil.Process(server.keeper.pid).children())
        family = [server.pid, server.keeper.pid]
        wait_ready([server], str)
    assert not any(map(is_running, family))
    assert [r.name for r in records] == ["kept.record"]


def test_a_full_disk_before_the_start(rig, small_disk):
    with pytest.raises(OSError):
        (small_disk / "rest").write_bytes(bytes(1 << 20))
    server = Server(rig, small_disk / "server.log", Command([sys.executable, "-c", TALKING]))
    with pytest.raises(LogLost, match="no room left in"):
        server.start()
    assert server.keeper is None


def test_a_server_outlives_the_loss_of_its_log(rig, tmp_path):
    server = Server(rig, tmp_path / "server.log")
    server.command = Command([sys.executable, FAKE, str(server.port), "--play", str(STARTS["vllm"]), "--seconds", "3"])
    with server:
        keeper = psutil.Process(server.keeper.pid)
        wait_until(lambda: server.log.stat().st_size > 2000)
        keeper.rlimit(psutil.RLIMIT_FSIZE, (2000, 100_000_000))  # only the keeper's own writes fail
        wait_until(lambda: server.status().state != State.DEAD and server.fault)
        keeper.rlimit(psutil.RLIMIT_FSIZE, (100_000_000, 100_000_000))
        wait_until(lambda: server.status().state == State.READY)
        assert server.fault == 0
        assert re.search(r"\n\[\d+ bytes of this log are lost: File too large\]\n", server.output())
        keeper.rlimit(psutil.RLIMIT_FSIZE, (2000, 100_000_000))
        os.kill(server.pid, signal.SIGKILL)
        server.keeper.wait()
        with pytest.raises(EngineDied, match="killed by signal 9"):
            server.raise_if_dead()


def test_a_deleted_log_is_said_and_the_server_lives(rig, tmp_path):
    server = Server(rig, tmp_path / "server.log")
    server.command = Command([sys.executable, FAKE, str(server.port)])
    with server:
        wait_ready([server], str)
        server.log.unlink()
        assert server.status().state == State.READY
        assert str(log_lost(server.log, server.fault)).startswith(f"the log of the server is gone: {server.log}")


def test_samples_that_meet_a_full_disk_do_not_keep_the_server_alive(rig, tmp_path):
    "The first error stays the one that is told, and a killed keeper's family is ended all the same."
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    server = Server(rig, tmp_path / "server.log", Command([sys.executable, "-c", stubborn]))
    with pytest.raises(EngineDied, match="first"):
        with server:
            wait_until(lambda: "up" in server.output())
            server.status()
            family = [server.pid, server.keeper.pid]
            server.history.close()
            server.history = open("/dev/full", "w")
            server.history.write("a sample")  # written on closing, as what a full disk has refused is
            server.keeper.kill()
            raise EngineDied("first")
    assert not any(map(is_running, family))


def test_a_keeper_that_hangs_is_ended_with_its_family(rig, tmp_path, monkeypatch):
    monkeypatch.setattr("kimi_spec.engines.server.KEEPER_WAIT", 0.5)
    server = Server(rig, tmp_path / "server.log", Command([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]))
    with server:
        wait_until(lambda: "up" in server.output())
        family = [server.pid, server.keeper.pid]
        server.keeper.send_signal(signal.SIGSTOP)
    assert not any(map(is_running, family))


@pytest.mark.parametrize("first", ["", "the first error"])
def test_what_cannot_be_ended_is_named(rig, tmp_path, monkeypatch, first):
    monkeypatch.setattr("kimi_spec.engines.server.KEEPER_WAIT", 0.3)
    monkeypatch.setattr("kimi_spec.engines.server.KILL_WAIT", 0.3)
    server = Server(rig, tmp_path / "server.log", Command([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]))
    with pytest.raises(EngineDied if first else KimiSpecError) as raised:
        with server:
            wait_until(lambda: "up" in server.output())
            family = [server.pid, server.keeper.pid]
            server.keeper.send_signal(signal.SIGSTOP)
            monkeypatch.setattr(psutil.Process, "kill", lambda self: None)  # as if it hung in a driver
            if first:
                raise EngineDied(first)
    monkeypatch.undo()
    server.stop()
    assert str(raised.value).startswith(first) and "could not be ended" in str(raised.value)
    assert all(re.search(rf"\b{pid}\b", str(raised.value)) for pid in family)
    assert not any(map(is_running, family))


def test_a_keeper_says_what_it_could_not_end():
    code = "from kimi_spec.engines import launcher\nlauncher.end_family = lambda *_: [4711, 4712]\nlauncher.main()"
    kept = subprocess.run([sys.executable, "-c", code, "true"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20)
    assert kept.returncode == 1 and "these processes could not be ended: 4711, 4712" in kept.stderr and "Traceback" not in kept.stderr


# nothing stays


SUITE = f"""
import sys, time
from pathlib import Path
from kimi_spec.core.records import Records
from kimi_spec.core.rig import load_rig
from kimi_spec.engines.engine import Command
from kimi_spec.engines.server import Server, wait_ready
folder = Path(sys.argv[1])
Records(folder / "records.jsonl", rig="x", phase="launches").add("kept.record", 1.0, "s", method="test", evidence="test")
server = Server(load_rig("nano-vllm-base"), folder / "server.log")
server.command = Command([sys.executable, {FAKE!r}, str(server.port), "--child", "VLLM::EngineCore", "--step-ms", "50", *sys.argv[2:]])
try:
    with server:
        wait_ready([server], lambda line: print(line, flush=True))
        if not sys.argv[2:]:
            import httpx
            with httpx.stream("POST", server.url + "/v1/chat/completions", json=dict(messages=[dict(role="user", content="x")], max_tokens=10000, stream=True), timeout=60) as answer:
                for chunk in answer.iter_text(): print("serving", flush=True)
        time.sleep(100)
except KeyboardInterrupt:
    sys.exit(130)
"""
PLAY = ["--play", str(STARTS["vllm"]), "--seconds", "3", "--until"]
MOMENTS = {"starting": [*PLAY, "Resolved architecture"], "loading weights": [*PLAY, r"50% Completed"], "building KV cache": [*PLAY, "KV cache size"], "serving": []}


def suite_at(moment, tmp_path):
    "A suite of its own whose server has come so far, and the server's processes."
    suite = subprocess.Popen([sys.executable, "-c", SUITE, str(tmp_path), *MOMENTS[moment]], stdout=subprocess.PIPE, text=True)
    while moment not in (line := suite.stdout.readline()):
        assert line, "the suite has ended"
    wait_until(lambda: len(psutil.Process(suite.pid).children(recursive=True)) == 3)
    return suite, psutil.Process(suite.pid).children(recursive=True)


@pytest.mark.parametrize("moment", MOMENTS)
def test_kill_9_of_the_suite_leaves_nothing(tmp_path, moment):
    suite, family = suite_at(moment, tmp_path)
    suite.kill()
    suite.wait()
    wait_until(lambda: not [p for p in family if is_running(p.pid)])
    assert len(list(Records(tmp_path / "records.jsonl"))) == 1


@pytest.mark.parametrize("moment", ["starting", "loading weights"])
def test_ctrl_c_says_how_far_it_came(tmp_path, moment):
    suite, family = suite_at(moment, tmp_path)
    suite.send_signal(signal.SIGINT)
    said = suite.communicate(timeout=30)[0]
    assert suite.returncode == 130 and re.search(rf"interrupted after \d+ s; nano-vllm-base: {moment}.*log: .*server.log", said)
    assert not [p for p in family if is_running(p.pid)]
    assert len(list(Records(tmp_path / "records.jsonl"))) == 1


@pytest.mark.parametrize("moment", MOMENTS)
def test_kill_9_of_the_server_leaves_nothing(tmp_path, moment):
    suite, family = suite_at(moment, tmp_path)
    keeper, server, child = family
    os.kill(server.pid, signal.SIGKILL)
    wait_until(lambda: not [p for p in (server, child, keeper) if is_running(p.pid)])
    suite.kill()
    suite.wait()


def test_a_keeper_that_is_killed_is_cleaned_up_after(rig, tmp_path):
    stubborn = "import signal, subprocess, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); subprocess.Popen(['sleep', '600'], start_new_session=True); print('up', flush=True); time.sleep(600)"
    server = Server(rig, tmp_path / "server.log", Command([sys.executable, "-c", stubborn]))
    with server:
        wait_until(lambda: "up" in server.output())
        family = psutil.Process(server.keeper.pid).children(recursive=True)
        assert len(family) == 2 and server.status().state == State.STARTING
        server.keeper.kill()
        with pytest.raises(EngineDied):
            wait_ready([server], str)
    assert not [p for p in family if is_running(p.pid)]
