"What is typed for a rig, on one machine and on several, judged by the engines' own parsers before anything starts."
import json
import shutil
import socket

import pytest

from kimi_spec.core.errors import KimiSpecError
from kimi_spec.core.paths import cache_dir, root
from kimi_spec.core.rig import list_rigs, load_rig
from kimi_spec.engines import sglang, vllm
from kimi_spec.engines.arguments import ask, check_arguments
from kimi_spec.engines.engine import CheckpointError, read_json
from kimi_spec.engines.environments import interpreter
from kimi_spec.engines.preflight import OURS, Note, arguments_of, checks, command, dry_run
from kimi_spec.engines.served import KEY, served_drafter, tensors, translation
from kimi_spec.engines.server import Server

RELEASE = {"vllm": "0.32.0", "sglang": "0.5.10"}
ENVIRONMENT = {"vllm": "default", "sglang": "sglang-cpu"}
FIELDS = {"vllm": vllm.FIELDS, "sglang": sglang.FIELDS}
def changed(rig, **parts):
    "A copy of a rig with some fields of its parts replaced."
    rig = load_rig(rig) if isinstance(rig, str) else rig
    return rig.model_copy(update={part: getattr(rig, part).model_copy(update=fields) for part, fields in parts.items()})


def full(engine):
    "A rig with every field of the launch section set."
    every = {"nodes": 2, "dist_address": "10.0.0.1:20000", "max_model_len": 4096, "max_running_requests": 128, "reasoning_parser": "kimi_k2", "port": 8123, "executor": "mp" if engine == "vllm" else None}
    return changed(f"k25-{engine}-tp8-custom", launch=every)


def typo(engine):
    "One letter less, in a flag of the engine's own."
    flag = {"vllm": "--max-num-batched-tokns", "sglang": "--max-prefill-tokns"}[engine]
    return changed(f"nano-{engine}-base", launch={"extra_args": [flag, "512"]})


# on several machines


def test_sglang_on_two_nodes():
    rig = changed("k25-sglang-tp8", launch={"nodes": 2, "dist_address": "10.0.0.1:20000"})
    same = ["python", "-m", "sglang.launch_server", "--model-path", "/shared/kimi-k2.5-int4", "--served-model-name", "kimi-k2.5", "--host", "127.0.0.1", "--port", "30000",
            "--tp-size", "8", "--dtype", "auto", "--trust-remote-code", "--nnodes", "2"]
    for rank in (0, 1):
        assert command(rig, node_rank=rank).argv == [*same, "--node-rank", str(rank), "--dist-init-addr", "10.0.0.1:20000", "--enable-metrics", "--log-requests", "--log-requests-level", "0"]
    with pytest.raises(KimiSpecError, match="has no node 2"): command(rig, node_rank=2)


def test_vllm_on_two_nodes_with_its_own_processes():
    rig = changed("k25-vllm-tp8", launch={"nodes": 2, "dist_address": "10.0.0.1:20000", "executor": "mp"})
    same = ["vllm", "serve", "/shared/kimi-k2.5-int4", "--host", "127.0.0.1", "--port", "8000", "--served-model-name", "kimi-k2.5", "--tensor-parallel-size", "8", "--dtype", "auto",
            "--reasoning-parser", "kimi_k2", "--distributed-executor-backend", "mp", "--trust-remote-code", "--nnodes", "2"]
    assert command(rig).argv == [*same, "--node-rank", "0", "--master-addr", "10.0.0.1", "--master-port", "20000"]
    assert command(rig, node_rank=1).argv == [*same, "--node-rank", "1", "--master-addr", "10.0.0.1", "--master-port", "20000", "--headless"]


def test_vllm_on_two_nodes_with_ray():
    rig = changed("k25-vllm-tp8", launch={"nodes": 2, "dist_address": "10.0.0.1:20000", "executor": "ray"})
    head = command(rig)
    assert head.argv[-3:] == ["--distributed-executor-backend", "ray", "--trust-remote-code"] and head.env == {"RAY_ADDRESS": "10.0.0.1:20000"}
    assert command(rig, node_rank=1).argv == ["ray", "start", "--address", "10.0.0.1:20000", "--block"]
    assert vllm.ray_head(rig).argv == ["ray", "start", "--head", "--port", "20000"]


# what the engines' own parsers say


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def parser(request):
    "A function that lets an engine's parser judge a rig; every rig of this module is put to it at once."
    engine = request.param
    python = interpreter(ENVIRONMENT[engine], RELEASE[engine])
    here = lambda rig: changed(rig, engine={"environment": ENVIRONMENT[engine]})
    bases = [here(r) for r in list_rigs() if r.engine.name == engine]
    cases = [command(rig, python=python, node_rank=rank) for rig in (*bases, here(full(engine)), typo(engine)) for rank in range(rig.launch.nodes)]
    ask(engine, RELEASE[engine], python, arguments_of(cases[0]), cases[0].env, [arguments_of(c) for c in cases[1:]])

    def judge(rig, node_rank=0):
        said = command(here(rig), python=python, node_rank=node_rank)
        return check_arguments(engine, RELEASE[engine], python, arguments_of(said), rig.launch.extra_args, said.env, FIELDS[engine], OURS[engine])
    judge.engine, judge.rigs = engine, [r for r in list_rigs() if r.engine.name == engine]
    judge.flags = {name for names, _ in ask(engine, RELEASE[engine], python, arguments_of(cases[0]), cases[0].env).flags for name in names}
    return judge


def test_every_rig_is_accepted(parser):
    assert len(parser.rigs) >= 3
    for rig in parser.rigs: assert parser(rig).startswith(f"accepted by the parser of {parser.engine} {RELEASE[parser.engine]}"), rig.name


def test_every_field_of_the_launch_section_is_accepted_on_every_node(parser):
    for rank in (0, 1): assert "accepted" in parser(full(parser.engine), rank)
    written = {a for rank in (0, 1) for a in command(full(parser.engine), node_rank=rank).argv if a.startswith("--")}
    assert written - {"--enable-metrics", "--log-requests", "--log-requests-level"} <= set(FIELDS[parser.engine]) <= parser.flags


def test_a_typo_fails_before_anything_is_started(parser, tmp_path):
    rig, near = typo(parser.engine), {"vllm": "--max-num-batched-tokens", "sglang": "--max-prefill-tokens"}[parser.engine]
    server = Server(rig, tmp_path / "logs" / "server.log")
    with pytest.raises(KimiSpecError, match=rf"unrecognized arguments: --\S+tokns 512; --\S+tokns: nearest is {near}"): server.start()
    assert server.keeper is None and not (tmp_path / "logs").exists()


@pytest.mark.parametrize("extra, says", [
    (["--port", "9000"], "--port is what launch.port stands for"),
    (["--port=9000"], "--port is what launch.port stands for"),
    (["--tensor-parallel-size", "4"], "--tensor-parallel-size is what launch.tensor_parallel stands for"),
    (["--reasoning-parser", "qwen3"], "--reasoning-parser is what launch.reasoning_parser stands for"),
])
def test_an_extra_argument_may_not_undo_a_field(parser, extra, says, monkeypatch):
    flags = ask_once(parser)
    monkeypatch.setattr("kimi_spec.engines.arguments.ask", lambda *_: flags)
    with pytest.raises(KimiSpecError, match=says): parser(changed(parser.rigs[0], launch={"extra_args": extra}))


@pytest.mark.parametrize("parser", ["sglang"], indirect=True)  # nothing is added to vLLM's command
@pytest.mark.parametrize("extra", [["--log-requests-level", "2"], ["--log_requests_level=3"], ["--log-requests"], ["--enable-metrics"]])
def test_an_extra_argument_may_not_undo_what_the_suite_adds(parser, extra, monkeypatch):
    "SGLang would write every prompt into its log, and the last flag counts."
    flags = ask_once(parser)
    monkeypatch.setattr("kimi_spec.engines.arguments.ask", lambda *_: flags)
    with pytest.raises(KimiSpecError, match=rf"^{extra[0].split('=')[0].replace('_', '-')} is added to every launch, .*: leave it out of launch.extra_args$"):
        parser(changed(parser.rigs[0], launch={"extra_args": extra}))


def ask_once(parser):
    "The flags of a parser, accepting whatever comes."
    python = interpreter(ENVIRONMENT[parser.engine])
    said = command(changed(parser.rigs[0], engine={"environment": ENVIRONMENT[parser.engine]}), python=python)
    return ask(parser.engine, RELEASE[parser.engine], python, arguments_of(said), said.env)


def test_an_engine_that_is_not_installed_is_not_judged():
    answer = checks(load_rig("k25-vllm-tp8"))["arguments"]()
    assert isinstance(answer, Note) and answer.startswith("not checked: vLLM unknown is not installed here")


# the drafter as it is served


def test_one_drafter_three_releases():
    ids = {release: read_json(root() / served_drafter(changed("nano-vllm", engine={"name": "sglang", "release": release})) / "config.json")["eagle_config"][KEY] for release in ("0.5.10", "0.5.12", "0.5.13")}
    assert ids == {"0.5.10": [1, 3, 4], "0.5.12": [1, 3, 4], "0.5.13": [2, 4, 5]}
    assert str(served_drafter(load_rig("nano-vllm"))) == "data/nano/k2.5/drafter"


def test_ids_in_the_wrong_place_are_put_where_the_engine_looks(tmp_path):
    shutil.copytree(root() / "data/nano/k2.5/drafter", tmp_path / "drafter")
    config = read_json(tmp_path / "drafter" / "config.json")
    del config[KEY]
    (tmp_path / "drafter" / "config.json").write_text(json.dumps(config))
    on = lambda release: changed("nano-vllm", engine={"release": release}, drafter={"path": str(tmp_path / "drafter")})
    assert not translation(on("0.28.0")).changes  # reads the nested ids
    assert translation(on("0.32.0")).config[KEY] == [2, 4, 5]  # one of its two model runners does not
    copy = root() / served_drafter(on("0.21.0"))
    assert read_json(copy / "config.json")[KEY] == [2, 4, 5] and (copy / "model.safetensors").is_symlink()
    (tmp_path / "drafter" / "config.json").write_text(json.dumps({**config, "norm_before_fc": True}))
    with pytest.raises(CheckpointError, match="SGLang 0.5.10 leaves out its norm_before_fc silently"): served_drafter(changed(on("0.5.10"), engine={"name": "sglang"}))
    shutil.rmtree(copy)


def test_a_copy_is_made_once_and_anew_when_the_drafter_changes(tmp_path):
    shutil.copytree(root() / "data/nano/k2.5/drafter", tmp_path / "drafter")
    rig = changed("nano-vllm", engine={"name": "sglang", "release": "0.5.10"}, drafter={"path": str(tmp_path / "drafter")})
    first = served_drafter(rig)
    made = (root() / first).stat().st_ctime_ns
    assert served_drafter(rig) == first and (root() / first).stat().st_ctime_ns == made
    (tmp_path / "drafter" / "README.md").write_text("new")
    second = served_drafter(rig)
    assert second != first and sorted(tensors(root() / second)) == sorted(tensors(root() / first))
    assert not list((cache_dir() / "drafters").glob("unfinished-*"))
    for copy in (first, second): shutil.rmtree(root() / copy)


def test_what_nobody_read_is_served_as_it_lies_and_said():
    rig = changed("nano-vllm", engine={"name": "sglang", "release": "0.9.0"})
    assert translation(rig).why == ("engine.release is '0.9.0', of which nothing is known: the drafter is served as it lies",)
    hub = changed("k25-sglang-tp8-aqmedai", engine={"release": "0.5.10"})
    assert "is a hub id" in translation(hub).why[0] and str(served_drafter(hub)) == "AQ-MedAI/Kimi-K2-Instruct-eagle3"


# the dry run


def test_dry_run_shows_every_node_and_says_whether_it_would_start(monkeypatch):
    rig = changed("k25-vllm-tp8", launch={"nodes": 2, "dist_address": "192.0.2.1:20000", "executor": "ray"})
    monkeypatch.setattr("kimi_spec.engines.preflight.load_rig", lambda name: rig)
    said = dry_run("k25-vllm-tp8")
    lines = said.text.splitlines()
    assert lines[0] == rig.title and [line.split(": ")[0] for line in lines[2:5]] == ["node 0, first", "node 0", "node 1"]
    assert not said.ok and "needs 4 GPUs (Blackwell (SM120)) on each of its 2 nodes" in said and "192.0.2.1:20000 was not looked at: by now the Ray head" in said
    assert "it meets the others at 192.0.2.1:20000" in dry_run("k25-vllm-tp8", node_rank=1)
    rig = changed(rig, launch={"executor": "mp"})
    assert "launch.dist_address: nobody can listen on 192.0.2.1:20000" in dry_run("k25-vllm-tp8")


def test_where_nodes_meet_is_taken_by_the_ray_head_and_free_otherwise():
    with socket.socket() as head:
        head.bind(("127.0.0.1", 0))
        head.listen()
        address = f"127.0.0.1:{head.getsockname()[1]}"
        ray = changed("k25-vllm-tp8", launch={"nodes": 2, "dist_address": address, "executor": "ray"})
        assert "was not looked at" in checks(ray)["port"]()
        with pytest.raises(KimiSpecError, match="launch.dist_address: port .* is taken"): checks(changed(ray, launch={"executor": "mp"}))["port"]()
        with pytest.raises(KimiSpecError, match="launch.port"): checks(changed(ray, launch={"port": head.getsockname()[1]}))["port"]()


def test_dry_run_of_a_taken_port(monkeypatch):
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        rig = changed("k25-vllm-tp8", launch={"port": busy.getsockname()[1]})
        monkeypatch.setattr("kimi_spec.engines.preflight.load_rig", lambda name: rig)
        assert f"launch.port: port {busy.getsockname()[1]} on 127.0.0.1 is taken by process" in dry_run("k25-vllm-tp8")


def test_dry_run_of_a_rig_that_runs_here():
    said = dry_run("nano-vllm")
    assert said.ok and "accepted by the parser of vllm 0.32.0" in said and "FAILS" not in said
