"A report keeps what it has, whatever happens to a phase, to its kernel or to itself."
import json
import os
import signal
import subprocess
import sys
import time

import nbformat
import pytest

from kimi_spec.core.errors import KimiSpecError
from kimi_spec.core.records import Records
from kimi_spec.core.reports import Step, dry_run, find_phases, newest_run, only_writer, read_manifest, run_report

MEASURE = 'run.records.add("size", size, "count", method="given", evidence="the parameters cell")'
SLOW = '''import os, time
from pathlib import Path
Path("kernel.pid").write_text(str(os.getpid()))
try:
    if not Path("switch").exists(): time.sleep(60)
finally: Path("cleaned").touch()'''
SUITE = [sys.executable, "-c", "from kimi_spec.cli import main; main()"]


def statuses(folder):
    return {name: state.status for name, state in read_manifest(folder).phases.items()}


def started(folder):
    return {name: state.started for name, state in read_manifest(folder).phases.items()}


def wait_for(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def gone(pid):
    try: return open(f"/proc/{pid}/stat").read().split()[2] == "Z"
    except FileNotFoundError: return True


def test_failure_keeps_and_resume_repairs(project, add_phase, capsys):
    add_phase("1_measuring", MEASURE)
    add_phase("2_failing", MEASURE, "print(open('switch').read())")
    add_phase("3_summing", "from pathlib import Path\nassert Path.cwd() == Path(run.dir).parents[3]", "(run.dir / 'findings.html').write_text(str(len(list(run.records))))")
    with pytest.raises(KimiSpecError) as e: run_report("nano-vllm")
    folder = newest_run("nano-vllm")
    assert statuses(folder) == dict(measuring="done", failing="failed", summing="done")
    assert str(e.value).startswith("phase failing: cell 6: FileNotFoundError: [Errno 2] No such file or directory: 'switch' (see data/runs/nano-vllm/")
    assert str(e.value).endswith(f"resume with: kimi-spec report --rig nano-vllm --resume --run {folder.relative_to(project)}")
    said = capsys.readouterr().out
    assert "failing: cell 1/6" in said and "failing: failed" in said and f"page: {folder.relative_to(project)}/findings.html" in said
    assert any(o.output_type == "error" for c in nbformat.read(folder / "2_failing.ipynb", 4).cells for o in c.get("outputs", []))
    assert [r.phase for r in Records(folder / "records.jsonl")] == ["measuring", "failing"]

    (project / "switch").write_text("on")
    before = started(folder)
    assert run_report("nano-vllm", resume=True) == folder
    after = started(folder)
    assert set(statuses(folder).values()) == {"done"}
    assert [n for n in before if before[n] != after[n]] == ["failing", "summing"]
    assert (folder / "findings.html").read_text() == "3" and len(Records(folder / "records.jsonl").latest()) == 2

    run_report("nano-vllm", resume=True)
    assert started(folder) == after


def test_manifest_tells_the_run(project, add_phase):
    add_phase("1_measuring", MEASURE)
    folder = run_report("nano-vllm", ["measuring"], params={"size": "5"}, quick=True)
    manifest = json.loads((folder / "run.json").read_text())
    assert manifest["rig"] == "nano-vllm" and manifest["quick"] and manifest["ended"] and manifest["versions"]["python"]
    assert manifest["phases"]["measuring"]["parameters"] == {"size": 5}
    assert [r.value for r in Records(folder / "records.jsonl")] == [5]


@pytest.mark.parametrize("kw, says", [
    (dict(params={"sise": 5}), "unknown parameter 'sise'. Nearest: 'size'"),
    (dict(params={"size": "big"}), "parameter 'size': 'big' is no int"),
    (dict(params={"run_dir": "x"}), "set by the report itself"),
    (dict(phases=["measurin"]), "unknown phase 'measurin'. Nearest: 'measuring'"),
    (dict(rig="nano-vlm"), "unknown rig 'nano-vlm'. Nearest: 'nano-vllm'"),
    (dict(resume=True), "no run to resume"),
    (dict(resume=True, run_dir="data"), "data is no run"),
])
def test_refused_before_anything_starts(project, add_phase, kw, says):
    add_phase("1_measuring", MEASURE)
    with pytest.raises(KimiSpecError, match=says): run_report(**{"rig": "nano-vllm", **kw})
    assert not (project / "data" / "runs").exists()


def test_dead_kernel_is_a_failed_phase(project, add_phase):
    add_phase("1_dying", MEASURE, "import os\nos.kill(os.getpid(), 9)")
    add_phase("2_summing", MEASURE)
    with pytest.raises(KimiSpecError, match="phase dying: cell 6: the notebook's kernel died"): run_report("nano-vllm")
    folder = newest_run("nano-vllm")
    assert statuses(folder) == dict(dying="failed", summing="done")
    assert len(list(Records(folder / "records.jsonl"))) == 2


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -9)])
def test_interrupted_and_resumed(project, add_phase, number, code):
    add_phase("1_measuring", MEASURE)
    add_phase("2_waiting", SLOW)
    report = subprocess.Popen([*SUITE, "report", "--rig", "nano-vllm"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for((project / "kernel.pid").exists)
    report.send_signal(number)
    said = report.communicate(timeout=30)[0]
    assert report.returncode == code, said
    wait_for(lambda: gone(int((project / "kernel.pid").read_text())))
    folder = newest_run("nano-vllm")
    assert statuses(folder) == dict(measuring="done", waiting="running" if number == signal.SIGKILL else "interrupted")
    if number != signal.SIGKILL: assert (project / "cleaned").exists() and "interrupted; resume with: kimi-spec report" in said and "Traceback" not in said
    (project / "switch").touch()
    done_at = started(folder)["measuring"]
    run_report("nano-vllm", resume=True)
    assert statuses(folder) == dict(measuring="done", waiting="done") and started(folder)["measuring"] == done_at


def test_one_writer_a_run(project, add_phase):
    add_phase("1_measuring", MEASURE)
    folder = run_report("nano-vllm")
    with only_writer(folder), pytest.raises(KimiSpecError, match="another report is writing"): run_report("nano-vllm", resume=True)


def test_page_is_written_from_the_executed_notebook(project, add_phase, monkeypatch):
    add_phase("1_telling", "print('told')", "def write_page(notebook, page): ...")
    module = type(os)("kimi_spec.fake.telling")
    module.write_page = lambda notebook, page: page.write_text(str("told\\n" in notebook.read_text()))
    monkeypatch.setitem(sys.modules, "kimi_spec.fake", type(os)("kimi_spec.fake"))
    monkeypatch.setitem(sys.modules, "kimi_spec.fake.telling", module)
    assert (run_report("nano-vllm") / "telling.html").read_text() == "True"


def test_phases_are_found(project, add_phase):
    add_phase("2_second")
    add_phase("1_first")
    assert [p.name for p in find_phases()] == ["first", "second"]
    nbformat.write(nbformat.v4.new_notebook(), project / "nbs" / "3_third.ipynb")
    with pytest.raises(KimiSpecError, match="nbs/3_third.ipynb: a phase needs"): find_phases()


def test_dry_run_asks_the_modules(project, add_phase, monkeypatch):
    add_phase("1_first")
    with pytest.raises(KimiSpecError, match="nbs/1_first.ipynb: kimi_spec.fake.first is missing; run nbdev_export"): dry_run("nano-vllm")
    module = type(os)("kimi_spec.fake.first")
    module.plan = lambda rig: [Step(what=f"measure {rig.name}")]
    monkeypatch.setitem(sys.modules, "kimi_spec.fake", type(os)("kimi_spec.fake"))
    monkeypatch.setitem(sys.modules, "kimi_spec.fake.first", module)
    assert dry_run("nano-vllm") == {"first": [Step(what="measure nano-vllm")]}
    assert not (project / "data" / "runs").exists()
