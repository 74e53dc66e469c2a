"The command line: quick to start, one message for what can be expected, and the right exit code."
import json
import subprocess
import sys

import pytest

from kimi_spec.core.rig import rig_names

SUITE = [sys.executable, "-c", "from kimi_spec.cli import main; main()"]


def suite(*args):
    return subprocess.run([*SUITE, *args], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("module", ["kimi_spec", "kimi_spec.cli"])
def test_import_is_light(module):
    heavy = ["torch", "pandas", "numpy", "papermill", "transformers", "matplotlib", "pydantic", "httpx"]
    code = f"import sys, {module}; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_help_names_every_command():
    said = suite("--help")
    assert said.returncode == 0
    for command in ("rigs", "report", "acceptance", "engines", "launch", "patch", "source", "profile", "capture", "nano", "site"): assert f" {command} " in said.stdout


def test_rigs_for_people_and_machines():
    assert all(name in suite("rigs").stdout for name in rig_names())
    assert [r["name"] for r in json.loads(suite("rigs", "--json").stdout)] == rig_names()
    assert json.loads(suite("rigs", "nano-vllm", "--json").stdout)["drafter"]["k"] == 3
    assert "aux_layer_ids" in suite("rigs", "--fields").stdout


@pytest.mark.parametrize("args, says", [
    (["rigs", "nano-vlm"], "unknown rig 'nano-vlm'. Nearest: 'nano-vllm'"),
    (["report", "--rig", "nano-vlm"], "unknown rig 'nano-vlm'"),
    (["report", "--rig", "nano-vllm", "--phase", "launchs"], "unknown phase 'launchs'"),
    (["report", "--rig", "nano-vllm", "-p", "size"], "each -p takes a name and a value"),
    (["report", "--rig", "nano-vllm", "--run", "data/runs/x"], "add --resume"),
    (["engines", "install", "vlm"], "unknown engine 'vlm'"),
    (["acceptance", "nowhere.log"], "no log at nowhere.log"),
    (["launch", "nano-vlm"], "unknown rig 'nano-vlm'"),
    (["profile", "nowhere.json"], "nowhere.json: No such file"),
    (["capture"], "name a rig to serve, or the server that is up with --url"),
    (["capture", "nano-vlm", "--commands"], "unknown rig 'nano-vlm'"),
])
def test_expected_failures_are_one_message(args, says):
    said = suite(*args)
    assert said.returncode == 1 and said.stdout == ""
    assert said.stderr.startswith("kimi-spec: ") and says in said.stderr and "Traceback" not in said.stderr


def test_misspelt_key_is_named(project):
    path = project / "data" / "rigs" / "nano-vllm.yaml"
    path.write_text(path.read_text().replace("aux_layer_ids", "aux_layer_id"))
    said = suite("rigs", "nano-vllm")
    assert said.returncode == 1
    assert said.stderr == "kimi-spec: data/rigs/nano-vllm.yaml: drafter.aux_layer_id: no such key (found [2, 4, 5]); nearest valid key: aux_layer_ids\n"


@pytest.mark.parametrize("rig", ["k25-sglang-tp8-custom", "nano-vllm"])
def test_dry_run_plans_every_phase(rig):
    from kimi_spec.core.reports import find_phases
    said = suite("report", "--rig", rig, "--dry-run")
    assert said.returncode == 0, said.stderr
    assert all(f"\n{p.name} " in f"\n{said.stdout}" for p in find_phases())


def test_wrong_usage_is_2():
    assert suite("rgis").returncode == 2 and suite("report").returncode == 2


def test_report_runs_and_fails_by_exit_code(project, add_phase):
    add_phase("1_measuring", 'run.records.add("size", size, "count", method="given", evidence="the parameters cell")', "assert size != 4, 'four'")
    said = suite("report", "--rig", "nano-vllm", "-p", "size", "5", "--quick")
    assert said.returncode == 0 and "measuring: done" in said.stdout, said.stderr
    said = suite("report", "--rig", "nano-vllm", "-p", "size", "4")
    assert said.returncode == 1 and said.stderr.startswith("kimi-spec: phase measuring: cell 6: AssertionError: four") and "resume with: kimi-spec report" in said.stderr
