"""States are extracted once, whole, and from the right target: killed runs go on, broken files are made again, and what would poison a training is refused. Then the gate on a real engine."""
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple

import pytest
import torch
from processes import wait_until
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from kimi_spec.core.errors import KimiSpecError
from kimi_spec.core.paths import data_dir
from kimi_spec.core.rig import load_rig
from kimi_spec.drafters import states
from kimi_spec.drafters.alignment import UNKNOWN, gate, neighbours
from kimi_spec.drafters.corpus import dialogues
from kimi_spec.drafters.states import extract_batch, load_target, read_samples, states_file, tokenizer_hash, weights_hash, write_samples, write_states
from kimi_spec.drafters.target import encode

K25, K2 = (data_dir() / "nano" / generation / "target" for generation in ("k2.5", "k2"))
AUX = [2, 4, 5]


@pytest.fixture(scope="module")
def target():
    return load_target(K25)[0]


@pytest.fixture(scope="module")
def samples():
    tok = PreTrainedTokenizerFast.from_pretrained(K25)
    return [encode(tok, d) for d in dialogues(40, "k2.5", seed=5, side="held_out")]


@pytest.fixture(scope="module")
def alone(target, samples):
    "The states of every sample, each computed by itself."
    return [extract_batch(target, [ids], AUX, torch.float32)[0] for ids, _ in samples]


def command(folder, *more, torchrun=0):
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(torchrun), "-m"] if torchrun else ["-m"]
    return [sys.executable, *start, "kimi_spec.drafters.states", "--target", str(K25), "--samples", str(folder / "samples.jsonl"), "--out", str(folder / "out"), *more]


def all_right(folder, samples, alone):
    "Every sample has its own states, to float32's rounding, and nothing else is there."
    assert sorted(p.name for p in (folder / "hidden_states").iterdir()) == sorted(f"hs_{i}.safetensors" for i in range(len(samples)))
    for i, ((ids, _), expected) in enumerate(zip(samples, alone)):
        found = load_file(states_file(folder, i))
        assert found["token_ids"].tolist() == ids
        assert (found["hidden_states"] - expected).norm() / expected.norm() < 1e-5


def test_a_batch_gives_what_one_text_gives(target, samples, alone, tmp_path):
    done = write_states(target, samples, tmp_path, batch_tokens=1000)
    assert done.written == 40 and done.bytes / done.tokens == 4 * 128 * 4
    all_right(tmp_path, samples, alone)
    short = [ids[:n] for n, (ids, _) in zip(range(1, 31), samples)]  # short texts beside long ones
    for one, together in zip([extract_batch(target, [t], AUX, torch.float32)[0] for t in short], extract_batch(target, short, AUX, torch.float32)):
        assert (one - together).norm() / one.norm() < 1e-5


def test_speculators_reads_the_folder(target, samples, tmp_path):
    from datasets import load_from_disk
    write_states(target, [samples[0], (samples[1][0], [0, 1] + [0] * (len(samples[1][0]) - 2))], tmp_path)
    rows = load_from_disk(str(tmp_path))
    assert rows[0]["input_ids"].tolist() == samples[0][0] and rows[0]["loss_mask"].sum() == len(samples[0][0]) - samples[0][1]
    assert rows[1]["loss_mask"].tolist()[:3] == [0, 1, 0] and rows[1]["loss_mask"].sum() == 1
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["complete"] and manifest["samples"] == 2 and manifest["origin"]["layers"] == AUX and manifest["origin"]["weights"] == weights_hash(K25)


def test_killed_and_resumed(target, samples, alone, tmp_path, capsys):
    write_samples(tmp_path / "samples.jsonl", samples)
    out = tmp_path / "out"
    run = subprocess.Popen(command(tmp_path, "--batch-tokens", "1"), stdout=subprocess.DEVNULL, start_new_session=True)
    wait_until(lambda: len(list(out.glob("hidden_states/*.safetensors"))) >= 5 or run.poll() is not None, 120)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    there = {p.name: p.stat().st_mtime_ns for p in out.glob("hidden_states/*.safetensors")}
    assert 5 <= len(there) < 40 and not json.loads((out / "manifest.json").read_text())["complete"]
    (out / "hidden_states" / "hs_39.tmp").write_bytes(b"half a file")
    done = write_states(target, read_samples(tmp_path / "samples.jsonl"), out)
    with capsys.disabled(): print(f"\nkilled after {len(there)} of 40 samples; then {done}")
    assert (done.kept, done.written, done.remade) == (len(there), 40 - len(there), [])
    assert all((out / "hidden_states" / name).stat().st_mtime_ns == t for name, t in there.items()), "made twice"
    all_right(out, samples, alone)
    assert write_states(target, samples, out).written == 0


def test_two_processes_do_what_one_does(samples, alone, tmp_path):
    write_samples(tmp_path / "samples.jsonl", samples)
    run = subprocess.run(command(tmp_path, "--batch-tokens", "600", torchrun=2), capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "40 samples written, 0 kept" in run.stdout and run.stdout.count("samples written") == 1 and "in each of 2 processes" in run.stdout
    all_right(tmp_path / "out", samples, alone)
    refused = subprocess.run(command(tmp_path, "--layers", "3", "4", "5", torchrun=2), capture_output=True, text=True, timeout=300)
    assert refused.returncode != 0 and refused.stdout.count("error:") == 1 and "layers: found [2, 4, 5], expected [3, 4, 5]" in refused.stdout


def test_broken_files_are_named_and_made_again(target, samples, alone, tmp_path):
    write_states(target, samples, tmp_path)
    files = {i: states_file(tmp_path, i) for i in (3, 8, 21, 30)}
    files[3].write_bytes(files[3].read_bytes()[:-100])  # the end is missing
    files[8].write_bytes(b"\xff" * 64)  # no header
    files[21].write_bytes(b"")
    save_file(dict(hidden_states=load_file(files[30])["hidden_states"]), files[30])  # whose tokens?
    said = []
    done = write_states(target, samples, tmp_path, say=said.append)
    assert done.remade == [3, 8, 21, 30] and (done.written, done.kept) == (4, 36)
    assert "hs_3 (" in said[0] and "header or length broken" in said[0]
    all_right(tmp_path, samples, alone)


def test_other_states_are_refused(target, samples, tmp_path):
    write_states(target, samples[:6], tmp_path)
    for problem, how in {
        "layers: found [2, 4, 5], expected [1, 4, 5]": lambda: write_states(target, samples[:6], tmp_path, [1, 4, 5]),
        "weights: found sha256": lambda: write_states(load_target(K2)[0], samples[:6], tmp_path),
        "dtype: found 'float32', expected 'bfloat16'": lambda: write_states(target, samples[:6], tmp_path, dtype=torch.bfloat16),
        "sample 0 is not the text it was|other tokens than sample": lambda: write_states(target, samples[5::-1], tmp_path),
    }.items():
        with pytest.raises(KimiSpecError, match=problem.replace("[", r"\[").replace("]", r"\]")): how()
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(KimiSpecError, match="without a manifest.json, so nobody knows whose"): write_states(target, samples[:6], tmp_path)


def test_samples_that_teach_nothing_or_wrong_things(target, samples, tmp_path):
    ids = samples[0][0]
    for problem, sample in {"the loss mask is empty": (ids, [0] * len(ids)), "another tokenizer": ([*ids, 896], 3), "0 or 1 for each of": (ids, [1, 0])}.items():
        with pytest.raises(KimiSpecError, match=problem): write_states(target, [samples[1], sample], tmp_path)
    with pytest.raises(KimiSpecError, match="no samples"): write_states(target, [], tmp_path)
    with pytest.raises(KimiSpecError, match="tokenizer: found .* the samples were written with"): states.extract(K25, samples, tmp_path, tokenizer="0" * 64)
    with pytest.raises(KimiSpecError, match="tokenizer: found .* the samples were written with"): write_states(target, samples, tmp_path, tokenizer="0" * 64)
    assert not list(tmp_path.glob("hidden_states/*")), "something was written"
    assert states.extract(K25, samples[:2], tmp_path, tokenizer=tokenizer_hash(K25), say=lambda line: None).written == 2


def test_a_target_of_another_tokenizer(samples, tmp_path):
    shutil.copytree(K25, tmp_path / "target")
    tok = json.loads((tmp_path / "target" / "tokenizer.json").read_text())
    tok["model"]["merges"] = tok["model"]["merges"][:-1]
    (tmp_path / "target" / "tokenizer.json").write_text(json.dumps(tok))
    write_states(load_target(K25)[0], samples[:2], tmp_path / "out")
    with pytest.raises(KimiSpecError, match="tokenizer: found"): write_states(load_target(tmp_path / "target")[0], samples[:2], tmp_path / "out")


def test_states_that_are_no_numbers(samples, tmp_path):
    model = load_target(K25)[0]
    model.model.layers[4].mlp.shared_experts.down_proj.weight[:] = torch.inf
    with pytest.raises(KimiSpecError, match=r"state 2 of token 0 is not finite"): write_states(model, samples[:2], tmp_path)
    assert not list(tmp_path.glob("hidden_states/*.safetensors"))


def test_a_disk_that_is_too_small(target, samples, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(states.shutil, "disk_usage", lambda path: usage(10**9, 10**9, 10**6))
    with pytest.raises(KimiSpecError, match=r"need 0\.00\d+ GB, found 0\.001 GB free"): write_states(target, samples, tmp_path)
    assert not list(tmp_path.glob("hidden_states/*"))
    monkeypatch.setattr(states.shutil, "disk_usage", lambda path: usage(10**9, 0, 10**9))
    assert write_states(target, samples[:2], tmp_path).written == 2


def test_two_runs_on_one_folder(target, samples, tmp_path):
    with states.alone(tmp_path), pytest.raises(KimiSpecError, match="another extraction writes to this folder"): write_states(target, samples[:2], tmp_path)


def test_the_gate_names_what_is_wrong(target, samples, tmp_path):
    few = samples[:10]
    write_states(target, few, tmp_path / "a", neighbours(AUX, 8))
    write_states(load_target(K2)[0], few, tmp_path / "k2", neighbours(AUX, 8))
    write_states(target, few, tmp_path / "right")
    assert gate(tmp_path / "a", tmp_path / "right", K25).level == "pass"
    def changed(name, slots):
        "A folder that claims to hold the right states and holds what `slots` makes of them."
        shutil.copytree(tmp_path / "right", tmp_path / name)
        for i in range(len(few)):
            there = {key: load_file(states_file(tmp_path / folder, i))["hidden_states"] for key, folder in (("a", "a"), ("k2", "k2"))}
            save_file(dict(hidden_states=slots(there).contiguous(), token_ids=torch.tensor(few[i][0])), states_file(tmp_path / name, i))
        return tmp_path / name
    at = lambda *ids: [[1, 2, 3, 4, 5, 6, 7, "last"].index(i) for i in ids]
    post = lambda s: torch.cat([s["a"][:, at(2, 4, 5)], target.model.norm(s["a"][:, -1:])], 1)
    named = {
        "aux ids one too high": lambda s: s["a"][:, at(3, 5, 6, "last")], "aux ids one too low": lambda s: s["a"][:, at(1, 3, 4, "last")], "last state post-norm": post,
        "aux order is [4, 2, 5]": lambda s: s["a"][:, at(4, 2, 5, "last")], "states of k2": lambda s: s["k2"][:, at(2, 4, 5, "last")]}
    for n, (name, slots) in enumerate(named.items()):
        verdict = gate(tmp_path / "a", changed(f"f{n}", slots), K25, dict(k2=tmp_path / "k2"))
        assert (verdict.level, verdict.name) == ("fail", name)
    assert gate(tmp_path / "a", tmp_path / "f4", K25).name == UNKNOWN
    assert gate(tmp_path / "a", tmp_path / "k2", K25).name == "states of k2/target, says its manifest"


def test_the_gate_takes_nothing_on_trust(target, samples, tmp_path):
    few, k2 = samples[:6], load_target(K2)[0]
    write_states(target, few, tmp_path / "a", neighbours(AUX, 8))
    write_states(k2, few, tmp_path / "k2", neighbours(AUX, 8))
    write_states(target, few, tmp_path / "right")
    assert gate(tmp_path / "a", tmp_path / "right", K25).level == "pass"
    def changed(name, change):
        shutil.copytree(tmp_path / "right", tmp_path / name)
        for i in range(len(few)):
            there = load_file(states_file(tmp_path / name, i))
            save_file(there | dict(hidden_states=change(i, there["hidden_states"].clone())), states_file(tmp_path / name, i))
        return tmp_path / name
    def hole(i, s):
        if i == 3: s[5:7, 1] = torch.nan
        return s
    verdict = gate(tmp_path / "a", changed("hole", hole), K25)
    assert (verdict.level, verdict.name) == ("fail", "2 tokens of slot 4 are not finite") and str(states_file(tmp_path / "hole", 3)) in str(verdict)
    torch.manual_seed(0)
    noise = lambda s: torch.nn.functional.normalize(torch.randn_like(s), dim=-1) * s.norm(dim=-1, keepdim=True)
    verdict = gate(tmp_path / "a", changed("noise", lambda i, s: s + 0.9 * noise(s)), K25)
    assert (verdict.level, verdict.name) == ("fail", UNKNOWN) and "in every slot" in str(verdict)
    verdict = gate(tmp_path / "a", changed("one-slot", lambda i, s: torch.cat([s[:, :1], noise(s[:, 1:2]), s[:, 2:]], 1)), K25)
    assert (verdict.level, verdict.name) == ("fail", UNKNOWN) and "in every slot" not in str(verdict)
    verdict = gate(tmp_path / "k2", tmp_path / "k2", K25)
    assert (verdict.level, verdict.name) == ("fail", "the reference's states are of another target than the one given")
    with pytest.raises(KimiSpecError, match="nowhere/config.json: not readable"): gate(tmp_path / "a", tmp_path / "right", tmp_path / "nowhere")
    short = changed("short", lambda i, s: s[:-1].contiguous() if i == 2 else s)
    with pytest.raises(KimiSpecError, match=r"hs_2.safetensors: shape .* expected .* extract again"): gate(tmp_path / "a", short, K25)
    states_file(tmp_path / "right", 2).write_bytes(b"\xff" * 64)
    with pytest.raises(KimiSpecError, match="hs_2.safetensors: token_ids can't be read .* extract again"): gate(tmp_path / "a", tmp_path / "right", K25)


@pytest.mark.parametrize("line, said", {
    '{"input_ids": 5, "loss_mask": [1]}': "input_ids: expected a list of whole numbers, found 5", '{"input_ids": [5, 6], "loss_mask": null}': "loss_mask: expected a list of whole numbers, found null",
    '{"input_ids": ["5", "6"], "loss_mask": [0, 1]}': "input_ids: expected", '{"input_ids": [5, 6], "loss_mask": "01"}': "loss_mask: expected", '{"input_ids": [5.0], "loss_mask": [1]}': "input_ids: expected",
    "[1, 2]": "expected a JSON object", "\xff": "expected a JSON object"}.items())
def test_a_line_of_wrong_types_is_named(line, said, tmp_path, capsys):
    (tmp_path / "s.jsonl").write_bytes(b'{"input_ids": [5, 6], "loss_mask": [0, 1]}\n' + line.encode("latin-1") + b"\n")
    assert states.main(["--target", str(K25), "--samples", str(tmp_path / "s.jsonl"), "--out", str(tmp_path / "out")]) == 1
    assert f"s.jsonl:2: {said}" in capsys.readouterr().out


def test_masks_and_lengths_out_of_range():
    for said, sample in {"has 2 at token 1, expected 0 or 1": ([1, 2], [0, 2]), "a prompt of -1 tokens, expected 0 to 1": ([1, 2], -1)}.items():
        with pytest.raises(KimiSpecError, match=said): states.check_samples([sample], 896)


def test_a_file_where_the_folder_should_be(target, samples, tmp_path, capsys):
    (tmp_path / "out").write_text("mine")
    write_samples(tmp_path / "s.jsonl", samples[:2])
    assert states.main(["--target", str(K25), "--samples", str(tmp_path / "s.jsonl"), "--out", str(tmp_path / "out")]) == 1
    assert "can't be a folder of states" in capsys.readouterr().out
    with pytest.raises(KimiSpecError, match="can't be a folder of states"): write_states(target, samples[:2], tmp_path / "out" / "deeper")
    assert (tmp_path / "out").read_text() == "mine"


def test_fewer_samples_than_are_there(target, samples, tmp_path):
    write_states(target, samples[:4], tmp_path)
    with pytest.raises(KimiSpecError, match=r"more than these 3 samples \(1 more, as hs_3.safetensors\)"): write_states(target, samples[:3], tmp_path)
    assert write_states(target, samples[:5], tmp_path).kept == 4


def test_a_real_engine_passes_the_gate(target, samples, tmp_path):
    from kimi_spec.drafters.engine_states import extract_vllm
    few, said = samples[:6], []
    write_states(target, few, tmp_path / "a", neighbours(AUX, 8))
    done = extract_vllm(load_rig("nano-vllm"), few[:4], tmp_path / "vllm", say=said.append)
    assert (done.written, done.kept) == (4, 0)
    verdict = gate(tmp_path / "a", tmp_path / "vllm", K25)
    assert verdict.level == "pass" and max(row["relative error"] for row in verdict.layers) < 1e-4 and verdict.texts == 4
    assert extract_vllm(load_rig("nano-vllm"), few[:4], tmp_path / "vllm", say=said.append).kept == 4, "a second call starts no server"
