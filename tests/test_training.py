"Training a drafter for real, in small: killed and resumed, finetuned, under torchrun, and refused."
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file

from kimi_spec.core.errors import KimiSpecError
from kimi_spec.core.paths import data_dir
from kimi_spec.drafters.corpus import dialogues
from kimi_spec.drafters.drafter import read_drafter
from kimi_spec.drafters.forms import FormError
from kimi_spec.drafters.states import load_target, states_file, write_states
from kimi_spec.drafters.target import encode
from kimi_spec.drafters.training import Settings, best, checkpoint_bytes, checkpoint_folders, drafter_layer, judge_checkpoints, read_data, read_rows, serve_form, start_from, train, train_drafter, vocabulary

NANO = data_dir() / "nano"
TARGET, K2 = NANO / "k2.5" / "target", NANO / "k2" / "drafter"
SMALL = Settings(draft_vocab=64, epochs=2, ttt_steps=2, total_seq_len=128, train_data_ratio=0.9)


@pytest.fixture(scope="module")
def model_and_samples():
    model, tok = load_target(TARGET)
    return model, [encode(tok, d) for d in dialogues(10, "k2.5", 3)]


@pytest.fixture(scope="module")
def data(model_and_samples, tmp_path_factory):
    model, samples = model_and_samples
    folder = tmp_path_factory.mktemp("training") / "data"
    write_states(model, samples, folder, target=TARGET)
    return folder


def figures(rows):
    "What must not change by a crash."
    return [{k: v for k, v in r.items() if k not in ("tokens_per_s", "lr")} for r in rows]


def test_a_killed_finetuning_goes_on_to_the_same_losses(model_and_samples, data, tmp_path):
    settings = Settings(**{**vars(SMALL), "checkpoint_freq": 0.4})
    whole = train(TARGET, data, tmp_path / "whole", settings, start=K2)
    steps = [r for r in whole if r["kind"] == "train"]
    assert [r["step"] for r in steps] == list(range(len(steps))) and len(steps) >= 8 and sum(r["kind"] == "val" for r in whole) == 2

    # the same in a process of its own, killed with its children once a checkpoint in the middle of the first epoch is there
    call = f"from pathlib import Path; from kimi_spec.drafters.training import *; train(Path({str(TARGET)!r}), {str(data)!r}, {str(tmp_path / 'killed')!r}, Settings(**{vars(settings)!r}), start={str(K2)!r})"
    process = subprocess.Popen([sys.executable, "-c", call], start_new_session=True)
    state, deadline = tmp_path / "killed" / "checkpoints" / "0" / "training_state.json", time.monotonic() + 240
    while not (state.exists() and len(read_rows(tmp_path / "killed" / "checkpoints")) > json.loads(state.read_text())["global_step"]):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    before = read_rows(tmp_path / "killed" / "checkpoints")
    assert 0 < len(before) < len(whole)
    seen = []
    resumed = train(TARGET, data, tmp_path / "killed", settings, start=K2, report=seen.append)
    assert figures(resumed) == figures(whole)
    begun = next(r["step"] for r in seen if r["kind"] == "begin")
    assert seen[0]["kind"] == "vocabulary" and seen[0]["size"] == 64 and 0.5 < seen[0]["covered"] < 1
    assert 0 < begun <= len(before)
    last = [load_file(tmp_path / name / "checkpoints" / "1" / "model.safetensors") for name in ("whole", "killed")]
    assert all(t.dtype != torch.bfloat16 for t in last[0].values()) and all(torch.equal(t, last[1][n]) for n, t in last[0].items())
    state = torch.load(tmp_path / "whole" / "checkpoints" / "1" / "optimizer_state_dict.pt", weights_only=True)["state"]
    assert {t.dtype for s in state.values() for t in s.values()} == {torch.float32}
    assert not list((tmp_path / "killed" / "checkpoints").glob(".old-*")) and not (tmp_path / "killed" / "checkpoints" / ".saving").exists()

    # every weight of the K2 drafter but the head's was trained, and the head is the target's
    start = load_file(tmp_path / "whole" / "start" / "model.safetensors")
    assert {n for n in start if torch.equal(start[n], last[0][n])} == {"lm_head.weight", "embed_tokens.weight", "d2t", "t2d"}
    model, samples = model_and_samples
    judged = judge_checkpoints(tmp_path / "whole", model, TARGET, samples[:4])
    assert [r["epoch"] for r in judged] == [-1, 0, 1] and judged[0]["loss"] is None and judged[2]["step"] == len(steps) and judged[2]["loss"] == steps[-1]["loss"]
    assert all(1 <= r["low"] <= r["accept_length"] <= r["high"] <= 4 for r in judged)
    chosen = best(judged)["epoch"]
    served = read_drafter(tmp_path / "whole" / "served" / str(chosen))
    assert served[0]["eos_token_id"] == model.config.eos_token_id and served[0]["torch_dtype"] == "bfloat16" and served[0]["draft_vocab_size"] == 64
    size = sum(f.stat().st_size for f in checkpoint_folders(tmp_path / "whole" / "checkpoints")[1].glob("*[se]*"))
    assert size == pytest.approx(checkpoint_bytes(drafter_layer(TARGET), 64), rel=0.02)

    with pytest.raises(KimiSpecError, match="begun with other settings .lr: found 0.003, expected 0.1"): train(TARGET, data, tmp_path / "whole", Settings(**{**vars(settings), "lr": 0.1}), start=K2)


def test_two_processes_train_one_drafter(model_and_samples, data, tmp_path):
    rows = train(TARGET, data, tmp_path, Settings(**{**vars(SMALL), "epochs": 1, "total_seq_len": 96}), processes=2)
    begun = [json.loads(line) for line in (tmp_path / "checkpoints" / "metrics.jsonl").read_text().splitlines()]
    assert [r["kind"] for r in begun].count("begin") == 1  # only the first process writes
    assert "World size: 2" in (tmp_path / "checkpoints" / "train_command.txt").read_text()
    tokens = sum(map(len, (s[0] for s in model_and_samples[1])))
    steps = [r["step"] for r in rows if r["kind"] == "train"]
    assert steps == list(range(len(steps))) and 1 < len(steps) < tokens / 96  # two batches of 96 tokens a step
    serve_form(checkpoint_folders(tmp_path / "checkpoints")[0], tmp_path / "served", TARGET)
    assert read_drafter(tmp_path / "served")[0]["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]


def test_two_trainings_do_not_share_a_folder(data, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with FileLock(tmp_path / "checkpoints" / ".lock"), pytest.raises(KimiSpecError, match="another training writes to this folder"): train(TARGET, data, tmp_path, SMALL)


def test_a_loss_that_is_no_number_stops_the_training(model_and_samples, tmp_path):
    model, samples = model_and_samples
    write_states(model, samples[:4], tmp_path / "data", target=TARGET)
    for i in range(3):
        sample = load_file(states_file(tmp_path / "data", i))
        sample["hidden_states"][-1] = torch.nan
        save_file(sample, states_file(tmp_path / "data", i))
    with pytest.raises(KimiSpecError, match=r"the loss at step 0 is nan"): train(TARGET, tmp_path / "data", tmp_path, Settings(**{**vars(SMALL), "draft_vocab": 32}))
    assert not checkpoint_folders(tmp_path / "checkpoints")


def test_what_cannot_be_trained_is_refused_before_a_process_starts(model_and_samples, data, tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    model, samples = model_and_samples
    with pytest.raises(KimiSpecError, match="states of k2.5/target, not of k2/target"): train(NANO / "k2" / "target", data, tmp_path / "a", SMALL)
    with pytest.raises(KimiSpecError, match=r"draft vocabulary of 800: the answers have \d+ different tokens"): train(TARGET, data, tmp_path / "b", Settings(draft_vocab=800))
    with pytest.raises(KimiSpecError, match="9 samples to train on, and 16 processes"): train(TARGET, data, tmp_path / "b", SMALL, processes=16)
    with pytest.raises(KimiSpecError, match="sample 1: nothing to learn"): train_drafter(model, TARGET, [samples[0], (samples[1][0], len(samples[1][0]))], tmp_path / "c", tmp_path / "out", draft_vocab=8)
    monkeypatch.setattr("kimi_spec.drafters.training.disk_usage", lambda _: type("Free", (), dict(free=10**6)))
    with pytest.raises(KimiSpecError, match=r"checkpoints need 0.00\d+ GB, found 0.001 GB free"): train(TARGET, data, tmp_path / "d", SMALL)
    monkeypatch.undo()
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    write_states(model, samples, tmp_path / "others", [1, 4, 5], target=TARGET)
    with pytest.raises(KimiSpecError, match=r"reads the states of layers \[2, 4, 5\], the data have those of \[1, 4, 5\]"): train(TARGET, tmp_path / "others", tmp_path / "e", SMALL, start=K2)


def test_states_whose_masks_were_emptied_are_refused(model_and_samples, data, tmp_path):
    from datasets import load_from_disk
    rows = load_from_disk(data).map(lambda r, i: dict(loss_mask=[0] * len(r["loss_mask"])) if i == 4 else {}, with_indices=True)
    rows.save_to_disk(tmp_path / "masked")
    (tmp_path / "masked" / "manifest.json").write_text((data / "manifest.json").read_text())
    with pytest.raises(KimiSpecError, match="sample 4: nothing to learn, the loss mask is empty"): read_data(tmp_path / "masked", TARGET)


def test_the_head_of_a_new_vocabulary_is_the_targets(tmp_path):
    vocab = sorted(np.random.default_rng(0).choice(896, 50, replace=False).tolist())
    assert start_from(K2, tmp_path / "start", TARGET, vocab) == vocab
    start, target = load_file(tmp_path / "start" / "model.safetensors"), load_file(TARGET / "model.safetensors")
    assert torch.equal(start["lm_head.weight"], target["lm_head.weight"][vocab].float()) and start["t2d"].nonzero().flatten().tolist() == vocab
    assert {t.dtype for t in start.values() if t.is_floating_point()} == {torch.float32}  # the library trains in the type of the file
    serve_form(tmp_path / "start", tmp_path / "served", TARGET)
    assert torch.equal(read_drafter(tmp_path / "served")[1]["d2t"] + torch.arange(50), torch.tensor(vocab))
    with pytest.raises(FormError): start_from(TARGET, tmp_path / "no", TARGET)


def test_the_vocabulary_takes_ties_by_id():
    assert vocabulary({7: 2, 3: 1, 5: 1, 9: 4}, 3) == [3, 7, 9]
