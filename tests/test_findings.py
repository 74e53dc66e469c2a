"Findings: known records in, known verdicts out; and a run that lacks this or that still gets its page."
import re
from datetime import datetime, timezone

import pytest

from kimi_spec import findings as f
from kimi_spec.core.case import SGLANG, SGLANG_CUSTOM, SGLANG_PUBLIC, VLLM, VLLM_CUSTOM, case_path, read_case, write_case
from kimi_spec.core.errors import KimiSpecError
from kimi_spec.core.records import Records
from kimi_spec.core.reports import Manifest, PhaseState
from kimi_spec.core.rig import load_rig

RIG = load_rig("nano-vllm")
OLD = f.wrong_generation(RIG)[0]

def fill(folder, leave_out=()):
    "Write a run: small figures that can be checked by hand."
    for rig, phase, name, value, unit, labels in rows():
        if phase not in leave_out: Records(folder / "records.jsonl", rig=rig, phase=phase).add(name, value, unit, method="by hand", evidence="tests/test_findings.py", labels=labels)
    return folder

def rows():
    for rig, one, eight, length in ((RIG.baseline, (50.0, 52.0), (200.0, 204.0), None), (RIG.name, (40.8, 40.8), (180.0, 182.0), 2.8), (OLD.name, (25.0, 25.0), (110.0, 110.0), 1.6)):
        for c, values in ((1, one), (8, eight)):
            for repeat, value in enumerate(values): yield rig, "launches", "throughput.output", value, "tok/s", dict(concurrency=c, repeat=repeat)
        if length:
            yield rig, "launches", "acceptance.accept_length", length, "tokens/step", dict(k=3)
            yield rig, "launches", "acceptance.rate", (length - 1) / 3, "fraction", dict(k=3)
            yield rig, "launches", "spec.steps", 400, "count", dict(k=3)
            yield rig, "launches", "greedy.identical", 8, "count", dict(against=RIG.baseline, prompts=8)
            for i, share in enumerate((0.9, 0.8, 0.7), 1): yield rig, "launches", "acceptance.conditional", share, "fraction", dict(k=3, position=i)
    drafter = dict(drafter=RIG.drafter.name, target=RIG.target.name, k=3, method="replay")
    yield RIG.name, "drafters", "acceptance.accept_length", 2.9, "tokens/step", drafter
    for i, share in enumerate((0.9, 0.8, 0.7), 1): yield RIG.name, "drafters", "acceptance.conditional", share, "fraction", {**drafter, "position": i}
    for by, profiler, share in (("trace", True, 0.45), ("stopwatch", False, 0.4)):
        for stat, value in (("mean", share), ("std", 0.02)): yield RIG.name, "profiling", "allreduce.share", value, "fraction", dict(tp=2, by=by, profiler=profiler, stat=stat)
    for size, us in ((1024, 90.0), (16384, 100.0), (65536, 120.0), (2**20, 900.0)):
        for stat, factor in (("low", 0.5), ("high", 2.0), ("median", 1.0)): yield RIG.name, "nccl", "allreduce.latency", us * factor, "us", dict(backend="gloo", ranks=2, bytes=size, stat=stat)
    for patch in ("whitelist", "image-token", "supports-eagle3"):
        yield RIG.name, "patching", "patch.status", "needed", "text", dict(patch=patch, release="0.15.1", member="m.py")
        yield RIG.name, "patching", "patch.compiles", True, "bool", dict(patch=patch, release="0.15.1", member="m.py")

@pytest.fixture
def whole(tmp_path): return f.gather("nano-vllm", fill(tmp_path))

def verdict(evidence, words):
    [found] = [x for x in f.judge(evidence) if words in x.claim]
    return found

# --- the tables ----------------------------------------------------------------------------------------------------------------

def test_the_recorded_case_as_a_table():
    table = f.comparison_table(read_case()).set_index("configuration")
    assert table.loc[VLLM, "tok/s, C=1"] == 82.5 and table.loc[SGLANG, "tok/s, C=128"] == 2370
    assert table.loc[SGLANG_PUBLIC, "accept length"] == pytest.approx(1.68) and table.loc[SGLANG_PUBLIC, "accepted of drafted"] == pytest.approx(0.68 / 3)
    assert table.loc[SGLANG_CUSTOM, "accepted of drafted"] == 0 and table.loc[SGLANG_CUSTOM, "speed-up, C=1"] == pytest.approx(40.8 / 63.6)
    assert table.loc[VLLM_CUSTOM, "speed-up, stated"] == 0.66 and table.loc[VLLM_CUSTOM, "accept length"] == pytest.approx(1.75)
    assert "C=128: capped at 48" in table.loc[SGLANG_CUSTOM, "remarks"] and "speculation is idle" in table.loc[SGLANG_CUSTOM, "remarks"] and "capped" not in table.loc[SGLANG, "remarks"] and "1.54" in table.loc[SGLANG_PUBLIC, "remarks"]

def test_the_case_file_is_what_the_code_writes(tmp_path):
    assert write_case(tmp_path / "records.jsonl").read_bytes() == case_path().read_bytes()

def test_what_follows_from_the_case():
    derived = {(r.rig, r.name, r.labels.get("argument")): r for r in read_case() if r.source == "derived"}
    assert derived[SGLANG_CUSTOM, "spec.step_cost", None].value == pytest.approx(1.56, abs=0.005)
    assert derived[VLLM_CUSTOM, "spec.step_cost", None].value == pytest.approx(2.65, abs=0.005)
    assert derived[SGLANG_PUBLIC, "throughput.per_request", None].value == pytest.approx(17.7, abs=0.05)
    assert derived[SGLANG, "throughput.per_request", None].value == pytest.approx(18.5, abs=0.05)
    assert derived[SGLANG_PUBLIC, "acceptance.accept_length", "speeds"].value == pytest.approx(1.54, abs=0.005)
    assert derived[SGLANG_PUBLIC, "acceptance.rate", "scale"].value == pytest.approx(0.227, abs=0.0005)
    assert derived[VLLM_CUSTOM, "throughput.implied", None].value == pytest.approx(54.45)

def test_every_stated_rate_names_its_definition():
    rates = [r for r in read_case() if r.name == "acceptance.reported_rate"]
    assert {(r.value, r.labels["definition"]) for r in rates} == {(0.15, "accepted/drafted"), (0.42, "unknown"), (0.25, "len/num_draft_tokens")}

def test_a_run_as_a_table(whole):
    table = f.comparison_table(whole.run).set_index("configuration")
    assert list(table.index)[0] == RIG.baseline
    assert table.loc[RIG.name, "speed-up, C=1"] == pytest.approx(40.8 / 51) and table.loc[RIG.name, "speed-up, C=8"] == pytest.approx(181 / 202)
    assert table.loc[RIG.name, "accepted of drafted"] == pytest.approx(0.6)
    assert "40.8" in f.show_table(f.comparison_table(whole.run)).data

def test_remarks_tell_of_scattered_repeats_and_few_steps(tmp_path):
    records = Records(tmp_path / "records.jsonl", rig="a", phase="launches")
    for repeat, value in enumerate((10.0, 20.0)): records.add("throughput.output", value, "tok/s", method="m", evidence="e", labels=dict(concurrency=1, repeat=repeat))
    records.add("acceptance.accept_length", 2.0, "tokens/step", method="m", evidence="e", labels=dict(k=3))
    records.add("spec.steps", 20, "count", method="m", evidence="e")
    [row] = f.comparison_table(list(records), {"a": None}).remarks
    assert "C=1: repeats differ by 100%" in row and "acceptance from 20 steps only" in row

def test_remarks_are_those_of_the_phase_where_it_left_any(tmp_path):
    records = Records(tmp_path / "records.jsonl", rig="a", phase="launches")
    for c in (1, 8): records.add("throughput.output", 10.0, "tok/s", method="m", evidence="e", labels=dict(concurrency=c, repeat=0))
    for c, note in ((1, "twice"), (8, "twice"), (8, "once"), (None, "the log admits")):
        records.add("validity.note", note, "text", method="m", evidence="e", labels={"kind": note, **({"concurrency": c} if c else {})})
    [row] = f.comparison_table(list(records), {"a": None}).remarks
    assert row == "C=1, 8: twice; C=8: once; the log admits"

@pytest.mark.parametrize("length, rate, expected", [(1.0, 0.25, f.SUPPORTED), (1.02, 0.25, f.REFUTED), (1.0, 0.0, f.REFUTED), (3.8, 0.95, f.REFUTED)])
def test_a_drafter_served_as_it_was_saved(tmp_path, length, rate, expected):
    records = Records(tmp_path / "records.jsonl", rig="nano-sglang-custom", phase="launches")
    records.add("acceptance.accept_length", length, "tokens/step", method="m", evidence="e", labels=dict(k=3))
    records.add("acceptance.reported_rate", rate, "fraction", method="m", evidence="e", labels=dict(k=3, definition="len/num_draft_tokens"))
    records.add("acceptance.accept_length", 3.8, "tokens/step", rig="nano-sglang", method="m", evidence="e", labels=dict(k=3))
    found = verdict(f.gather("nano-sglang", tmp_path), "as its trainer named it")
    assert found.verdict == expected and f"{length:.2f}" in found.because and "3.80" in found.because

# --- the verdicts --------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("words, expected, figures", [
    ("25% means", f.REFUTED, ["accept length 1.00"]), ("42% means", f.REFUTED, ["1.68", "22.7%", "1.54", "92 tok/s"]), ("15% was the worst", f.REFUTED, ["1.75", "2.65", "1.56", "0.66x"]),
    ("128 requests compare", f.REFUTED, ["48", "17.7", "18.5"]), ("wrong generation", f.SUPPORTED, ["1.60", "2.80"]), ("exactly 1.00", f.REFUTED, ["1.60", "1.68"]), ("INT4", f.UNTESTED, ["3.157"]),
    ("All-reduce takes", f.SUPPORTED, ["40%", "51.5%"]), ("latency is flat", f.SUPPORTED, ["4 times the bytes for 1.20 times"]), ("greedy text", f.SUPPORTED, ["8 of 8"]),
    ("faster on this rig", f.REFUTED, ["C=1: 0.80x", "3.50 plain ones"]), ("replay", f.SUPPORTED, ["+3.6%"]), ("three patches", f.SUPPORTED, ["3 of 3"])])
def test_each_verdict(whole, words, expected, figures):
    found = verdict(whole, words)
    assert found.verdict == expected
    assert all(figure in found.because for figure in figures), found.because
    assert found.rests_on and all(r.evidence for r in found.rests_on)

@pytest.mark.parametrize("phase, words", [("launches", "faster on this rig"), ("drafters", "replay"), ("profiling", "All-reduce takes"), ("nccl", "latency is flat"), ("patching", "three patches"), ("launches", "greedy text")])
def test_a_missing_phase_is_a_verdict_with_its_reason(tmp_path, phase, words):
    fill(tmp_path, leave_out=(phase,))
    found = verdict(f.gather("nano-vllm", tmp_path), words)
    assert found.verdict == f.UNMEASURED and f"phase {phase} left none" in found.because
    now = datetime.now(timezone.utc)
    for state, said in ((dict(status="failed", error="cell 7: it broke"), "failed, cell 7: it broke"), (dict(status="done"), "ran and left none"), (None, "was not part of this run")):
        Manifest(rig="nano-vllm", started=now, commit="unknown", versions={}, phases={phase: PhaseState(notebook="n.ipynb", **state)} if state else {}).save(tmp_path)
        assert said in verdict(f.gather("nano-vllm", tmp_path), words).because

def test_a_replay_stands_in_for_a_server_that_was_not_measured(tmp_path):
    fill(tmp_path, leave_out=("launches",))
    Records(tmp_path / "records.jsonl", rig=RIG.name, phase="drafters").add("acceptance.accept_length", 1.7, "tokens/step", method="replay", evidence="e", labels=dict(drafter=OLD.drafter.name, target=OLD.target.name, k=3))
    found = verdict(f.gather("nano-vllm", tmp_path), "wrong generation")
    assert found.verdict == f.SUPPORTED and "1.70" in found.because and "2.90" in found.because

def test_opposite_figures_give_opposite_verdicts(tmp_path):
    fill(tmp_path)
    records = Records(tmp_path / "records.jsonl", rig=RIG.name)
    def put(phase, name, value, unit, **labels): records.add(name, value, unit, phase=phase, method="m", evidence="e", labels=labels)
    for c, value in ((1, 99.0), (8, 999.0)):
        for repeat in (0, 1): put("launches", "throughput.output", value, "tok/s", concurrency=c, repeat=repeat)
    put("launches", "greedy.identical", 7, "count", against=RIG.baseline, prompts=8)
    put("profiling", "allreduce.share", 0.05, "fraction", tp=2, by="stopwatch", profiler=False, stat="mean")
    put("nccl", "allreduce.latency", 400.0, "us", backend="gloo", ranks=2, bytes=65536, stat="median")
    assert verdict(f.gather("nano-vllm", tmp_path), "latency is flat").verdict == f.UNDECIDED  # the repeats of both sizes overlap
    put("nccl", "allreduce.latency", 390.0, "us", backend="gloo", ranks=2, bytes=65536, stat="low")
    put("patching", "patch.compiles", False, "bool", patch="whitelist", release="0.15.1", member="m.py")
    put("drafters", "acceptance.accept_length", 2.0, "tokens/step", drafter=RIG.drafter.name, target=RIG.target.name, k=3, method="replay")
    put("drafters", "acceptance.accept_length", 2.75, "tokens/step", fault="INT4 g32", k=3)
    e = f.gather("nano-vllm", tmp_path)
    assert verdict(e, "faster on this rig").verdict == f.SUPPORTED
    for words in ("greedy text", "All-reduce takes", "latency is flat", "three patches", "replay", "INT4"): assert verdict(e, words).verdict == f.REFUTED

def test_the_step_cost_uses_the_accept_length_of_its_own_concurrency(tmp_path):
    fill(tmp_path)
    Records(tmp_path / "records.jsonl", rig=RIG.name, phase="launches").add("level.accept_length", 2.4, "tokens/step", method="m", evidence="e", labels=dict(concurrency=1, repeat=0))
    found = verdict(f.gather("nano-vllm", tmp_path), "faster on this rig")
    assert "at 2.40 tokens a step a step costs 3.00 plain ones" in found.because and "at 2.80 tokens" in found.because

def test_no_run_at_all_still_judges_the_case():
    verdicts = [x.verdict for x in f.judge(f.gather("nano-vllm", ""))]
    assert verdicts[:4] == [f.REFUTED] * 4 and f.UNMEASURED in verdicts

@pytest.mark.parametrize("name", ["nano-vllm-base", "k25-sglang-tp8", "k25-vllm-tp8-custom"])
def test_every_rig_can_be_judged(name):
    e = f.gather(name, "")
    assert len(f.judge(e)) == len(f.CLAIMS) and f.plan(e.rig)

def test_an_unknown_rig_and_a_broken_record_are_one_message(tmp_path):
    with pytest.raises(KimiSpecError, match="unknown rig"): f.gather("nano-vlm", "")
    (tmp_path / "records.jsonl").write_text("{}\n")
    with pytest.raises(KimiSpecError, match="broken record"): f.gather("nano-vllm", tmp_path)

def test_a_report_goes_before_a_newer_folder_of_one_phase(tmp_path, monkeypatch):
    monkeypatch.setattr(f, "runs_dir", lambda: tmp_path)
    monkeypatch.setattr("kimi_spec.core.reports.runs_dir", lambda: tmp_path)
    assert f.newest_records("nano-vllm") == ""
    for name, file in (("2026-01-01", "run.json"), ("2026-01-02", "records.jsonl"), ("2026-01-03", "other")):
        (tmp_path / "nano-vllm" / name).mkdir(parents=True)
        (tmp_path / "nano-vllm" / name / file).touch()
    assert f.newest_records("nano-vllm").endswith("2026-01-01")
    (tmp_path / "nano-vllm" / "2026-01-01" / "run.json").unlink()
    assert f.newest_records("nano-vllm").endswith("2026-01-02")

# --- what is shown -------------------------------------------------------------------------------------------------------------

def test_what_is_shown_is_escaped(whole):
    html = f.show_findings([f.Finding("a <b> claim", f.SUPPORTED, "because <script>", whole.run[:1])]).data
    assert "<script>" not in html and "a &lt;b&gt; claim" in html and "1 record" in html

def test_plots_and_pictures(whole, tmp_path):
    assert f.plot_positions(whole.run) and f.plot_positions([]) is None and f.plot_scales()
    assert f.plot_speeds(f.comparison_table(whole.run), "t")
    for kind in ("png", "svg"): assert f.draw_table(f.comparison_table(whole.run), tmp_path / f"t.{kind}", "t").stat().st_size > 5000

def test_commands_and_environment(whole, tmp_path):
    manifest = Manifest(rig="nano-vllm", quick=True, params={"seed": 3}, started=datetime.now(timezone.utc), commit="1a2b3c4+", versions={"torch": "2.13.0"}, phases={"nccl": PhaseState(notebook="n", status="failed", error="cell 2: no")})
    e = f.Evidence(whole.rig, whole.run, whole.case, manifest, tmp_path)
    assert f.commands(e)[:2] == ["git checkout 1a2b3c4  # the run had changes on top of it", "kimi-spec report --rig nano-vllm -p seed 3 --quick"]
    table = dict(f.environment_table(manifest).values)
    assert table["torch"] == "2.13.0" and table["phase nccl"] == "failed: cell 2: no"
    assert "not known" in f.environment_table(None).value[0]

# --- the whole notebook, once over a run ---------------------------------------------------------------------------------------

def test_the_notebook_and_its_page(tmp_path):
    from papermill import execute_notebook
    from kimi_spec.core.paths import root
    fill(tmp_path)
    out = tmp_path / "6_findings.ipynb"
    execute_notebook(root() / "nbs" / "6_findings.ipynb", out, dict(rig="nano-vllm", run_dir=str(tmp_path), quick=True), progress_bar=False, cwd=root())
    page = f.write_page(out, tmp_path / "findings.html").read_text()
    loads = [tag for tag in re.findall(r"<[^>]+>", page) if re.search(r"(src|href|action|data)\s*=\s*[\"']?(https?:)?//", tag) and not tag.startswith("<a ")]
    assert loads == [] and "<script" not in page and "@import" not in page and not re.search(r"url\(\s*[\"']?(https?:)?//", page)
    assert all(words in page for words in ("C=1: 0.80x", "A quick run", "wrong generation", "C=128: capped at 48", "supported"))
    assert "start_run(" not in page and "Gathering" not in page
    with pytest.raises(KimiSpecError, match="no findings notebook"): f.write_page(tmp_path / "none.ipynb", tmp_path / "x.html")
