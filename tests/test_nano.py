"Making the nano models: the one-minute form, killed in the middle and taken up again."
import json
import subprocess
import sys
import time
from random import Random

import pytest

from kimi_spec.core.errors import KimiSpecError
from kimi_spec.core.paths import data_dir
from kimi_spec.drafters.drafter import read_drafter
from kimi_spec.drafters.nano import train_all, weights_hash
from kimi_spec.drafters.states import load_target
from kimi_spec.drafters.training import train_drafter

NANO = data_dir() / "nano"


def test_a_killed_training_goes_on(tmp_path):
    command = [sys.executable, "-c", "from kimi_spec.cli import main; main()", "nano", "train", "--quick", "--out", str(tmp_path)]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not (tmp_path / "k2" / "target").exists():
        assert first.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    first.kill()
    first.wait()
    done = weights_hash(tmp_path / "k2" / "target")
    second = subprocess.run(command, capture_output=True, text=True)
    assert second.returncode == 0, second.stderr[-2000:]
    assert "k2 target:" not in second.stderr and "k2.5 target:" in second.stderr
    card = json.loads(second.stdout)
    assert card["weights"]["k2/target"] == done == weights_hash(tmp_path / "k2" / "target")
    for generation in ("k2", "k2.5"):
        load_target(tmp_path / generation / "target")
        config, tensors = read_drafter(tmp_path / generation / "drafter")
        assert len(tensors["d2t"]) == config["draft_vocab_size"] == 448 and tensors["t2d"].sum() == 448
        # offsets lead to distinct tokens that t2d marks
        assert (tensors["t2d"].nonzero().flatten() == tensors["d2t"] + tensors["d2t"].new_tensor(range(448))).all()
    assert not list(tmp_path.rglob("*.unfinished"))

    # the library goes on from its own checkpoint as well: a second epoch on top of the first
    model, _ = load_target(tmp_path / "k2" / "target")
    samples = json.loads((tmp_path / ".work" / "k2-answers-0.json").read_text())
    Random(0).shuffle(samples)  # as they were for the first epoch: states of other samples would be refused
    work = tmp_path / ".work" / "k2-drafter"
    train_drafter(model, tmp_path / "k2" / "target", samples, work, tmp_path / "two-epochs", epochs=2, fill=True)
    assert "Resuming training on epoch 1" in (work / "training.log").read_text()
    assert (work / "checkpoints" / "1" / "model.safetensors").is_file() and read_drafter(tmp_path / "two-epochs")
    with pytest.raises(KimiSpecError, match="other settings"): train_all(tmp_path, quick=True, seed=1)


def test_what_ships_is_small_and_what_the_card_says():
    card = json.loads((NANO / "card.json").read_text())
    files = [p for p in NANO.rglob("*") if p.is_file() and ".work" not in p.parts]
    assert sum(p.stat().st_size for p in files) < 25e6
    assert {name: weights_hash(NANO / name) for name in card["weights"]} == card["weights"] and len(card["weights"]) == 4
    assert all(right >= 23 and asked == 25 for right, asked in card["sums_1_to_5"].values())
    for marks in card["exam"].values():
        assert all(right >= 0.75 * asked for right, asked in marks.values()), marks
    lengths = card["accept_length_by_replay_k3"]
    assert lengths["k2.5 drafter on k2.5"] >= 2.5 and lengths["k2 drafter on k2.5"] < lengths["k2.5 drafter on k2.5"] - 0.3


@pytest.mark.parametrize("generation", ["k2", "k2.5"])
def test_the_targets_have_kimis_shape(generation):
    config = json.loads((NANO / generation / "target" / "config.json").read_text())
    assert (config["model_type"], config["kv_lora_rank"], config["qk_rope_head_dim"], config["topk_method"]) == ("deepseek_v3", 512, 64, "noaux_tc")
    assert config["num_hidden_layers"] >= 8 and config["n_shared_experts"] == 1 and config["rope_parameters"]["rope_type"] == "yarn"
