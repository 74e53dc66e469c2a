"Checkpoint forms: random drafters with every option, there and back; the readers' own loaders; large and broken files; one real engine."
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_file, save_file

from kimi_spec.core.paths import cache_dir, data_dir, relative, root
from kimi_spec.core.rig import load_rig
from kimi_spec.drafters import forms
from kimi_spec.drafters.forms import (CAN, FORMS, IDS, Description, FormError, Target, convert, inventory, native_name, read_checkpoint, read_config, read_json, recognise, refusals,
                                      sglang_reads, tensor_shapes, write_config)

NANO = data_dir() / "nano" / "k2.5"
YARN = dict(rope_type="yarn", rope_theta=50000.0, factor=64.0, original_max_position_embeddings=4096, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0)
PLAIN = dict(attention="llama", hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=4, head_dim=16, hidden_act="silu", rms_norm_eps=1e-5, max_position_embeddings=4096,
             rope=dict(rope_type="default", rope_theta=1e6), vocab_size=200, draft_vocab_size=80, aux_layer_ids=[2, 6, 9], dtype="bfloat16", bos_token_id=3, eos_token_id=[4, 5], pad_token_id=0)
MLA = dict(attention="mla", head_dim=None, q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, rope=YARN)


@pytest.fixture
def target(tmp_path):
    "A target of twelve layers, as far as a drafter sees it."
    return make_target(tmp_path / "target")


def make_target(folder, seed=0, **config):
    torch.manual_seed(seed)
    folder.mkdir()
    tensors = {"model.embed_tokens.weight": torch.randn(200, 64), "lm_head.weight": torch.randn(200, 64), "model.norm.weight": torch.rand(64)}
    save_file({n: t.bfloat16() for n, t in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(dict(architectures=["DeepseekV3ForCausalLM"], model_type="kimi_k2", vocab_size=200, hidden_size=64, num_hidden_layers=12) | config))
    return folder


def make_drafter(folder, form, target, weights=torch.bfloat16, extra=(), without=(), shards=1, **changes):
    "A drafter with random weights in one form, and its description."
    torch.manual_seed(1)
    d = Description(**PLAIN | changes)
    tensors = {n: torch.randn(s).to(weights) for n, s in tensor_shapes(d).items()}
    if "d2t" in tensors:
        chosen = torch.randperm(d.vocab_size)[:d.draft_vocab_size].sort().values
        tensors |= {"d2t": chosen - torch.arange(d.draft_vocab_size), "t2d": torch.isin(torch.arange(d.vocab_size), chosen)}
    theirs = {n.removeprefix("model."): t.to(weights) for n, t in load_file(target / "model.safetensors").items()}
    tensors |= {n: {"embed_tokens.weight": theirs["embed_tokens.weight"], "verifier_norm.weight": theirs["norm.weight"], "verifier_lm_head.weight": theirs["lm_head.weight"][tensors.get("t2d", slice(None))]}[n].clone() for n in extra}
    tensors = {native_name(n, form): t for n, t in tensors.items() if n not in without}
    folder.mkdir(parents=True)
    config = write_config(d, form, {}, Target(target))
    (folder / "config.json").write_text(json.dumps(config))
    parts = [dict(list(tensors.items())[i::shards]) for i in range(shards)]
    names = ["model.safetensors"] if shards == 1 else [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    for name, part in zip(names, parts): save_file(part, folder / name)
    if shards > 1: (folder / "model.safetensors.index.json").write_text(json.dumps(dict(weight_map={n: name for name, part in zip(names, parts) for n in part})))
    return d


def fingerprint(folder): return {n: (t.dtype, t.shape, t.sha256()) for n, t in inventory(folder).items()}


# what is published, in the manner of each writer: config -> form, attention, writer, aux layer ids by entering stream
FLAT = dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, num_hidden_layers=1, hidden_act="silu", rms_norm_eps=1e-5, max_position_embeddings=2048, vocab_size=128256, tie_word_embeddings=False)
SPECFORGE, LATENT = dict(architectures=["LlamaForCausalLMEagle3"], model_type="llama"), dict(q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
PUBLISHED = {
    "SpecForge, no ids": (SPECFORGE | dict(draft_vocab_size=32000), "sglang", "llama", "SpecForge", None),
    "SpecForge, ids by output": (SPECFORGE | dict(draft_vocab_size=32000, eagle_config={IDS: [1, 29, 57], "use_aux_hidden_state": True}), "sglang", "llama", "SpecForge", [2, 30, 58]),
    "SpecForge, ids only": (SPECFORGE | dict(draft_vocab_size=32000, eagle_config={IDS: [1, 17, 33]}), "sglang", "llama", "SpecForge", [2, 18, 34]),
    "SpecForge, Kimi": (SPECFORGE | dict(model_type="kimi_k2", draft_vocab_size=32000, rope_theta=1e6, rope_scaling=None, eagle_config={IDS: [2, 30, 58], "use_aux_hidden_state": True}), "sglang", "llama", "SpecForge", [2, 30, 58]),
    "SpecForge, EAGLE-3.1": (SPECFORGE | dict(draft_vocab_size=32000, fc_norm=True, norm_output=True), "sglang", "llama", "SpecForge", None),
    "TorchSpec, whole vocabulary": (SPECFORGE | dict(rope_theta=5e4, rope_scaling={**{k: v for k, v in YARN.items() if k not in ("rope_type", "rope_theta")}, "type": "yarn"}), "sglang", "llama", "TorchSpec", None),
    "TorchSpec, latent": (LATENT | dict(architectures=["Eagle3DeepseekV2ForCausalLM"], model_type="kimi_k2", draft_vocab_size=128256,
                          eagle_config={IDS: [1, 29, 57], "use_aux_hidden_state": True, "use_last_layernorm": True, "use_mtp_layernorm": False}), "sglang", "mla", "TorchSpec", [2, 30, 58]),
    "AngelSlim": (dict(architectures=["Eagle3LlamaForCausalLM"], model_type="llama", target_model_type="qwen3_moe", draft_vocab_size=32000, rope_theta=1e6), "eagle", "llama", "AngelSlim", None),
    "SafeAILab/EAGLE": (dict(architectures=["LlamaForCausalLM"], model_type="llama", draft_vocab_size=32000), "eagle", "llama", "SafeAILab/EAGLE", None),
    "vLLM's place for ids": (SPECFORGE | {"draft_vocab_size": 32000, IDS: [1, 30, 58]}, "vllm", "llama", "SpecForge", [1, 30, 58]),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_recognised_and_mapped_without_their_tensors(name, tmp_path):
    config, form, attention, writer, ids = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(FLAT | config))
    seen = recognise(tmp_path / "config.json")
    assert (seen.form, seen.attention) == (form, attention) and writer in seen.writer and seen.contradiction == ""
    reading = read_config(FLAT | config, form, attention)
    d = reading.description
    assert any("base of 10,000" in n for n in reading.notes) == (name == "AngelSlim")
    assert d.aux_layer_ids == ids and d.other.get("target_model_type") == config.get("target_model_type")
    assert d.rope == (YARN if "whole" in name else dict(rope_type="default", rope_theta=config.get("rope_theta", 10000.0)))
    assert d.draft_vocab_size == (128256 if name.startswith("TorchSpec") else 32000)


@pytest.mark.parametrize("config", [dict(architectures=["LlamaForCausalLM"], num_hidden_layers=32), dict(architectures=["LlamaForCausalLM"], num_hidden_layers=1), dict(speculators_model_type="dflash"),
                                    dict(speculators_model_type="peagle", transformer_layer_config=dict(model_type="llama")), dict(architectures=["EagleDeepSeekMTPModel"]), {}])
def test_what_is_no_eagle3_drafter_is_named_with_what_was_seen(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    seen = recognise(tmp_path / "config.json")
    assert seen.form == "" and any(str(v) in " ".join(seen.evidence) for v in (config.get("speculators_model_type"), config.get("architectures")))


def test_config_and_tensors_that_disagree_are_both_said(tmp_path, target):
    make_drafter(tmp_path / "d", "speculators", target, extra=["embed_tokens.weight"])
    tensors = load_file(tmp_path / "d" / "model.safetensors")
    save_file({n.replace("layers.0.", "midlayer."): t for n, t in tensors.items()}, tmp_path / "d" / "model.safetensors")
    assert "speculators would load none of the layer" in recognise(tmp_path / "d").contradiction
    flat = write_config(Description(**PLAIN), "sglang", {})
    (tmp_path / "d" / "config.json").write_text(json.dumps(flat))
    save_file(tensors, tmp_path / "d" / "model.safetensors")
    seen = recognise(tmp_path / "d")
    assert seen.form == "vllm" and "as speculators saves them" in seen.contradiction
    assert seen.contradiction in convert(tmp_path / "d", tmp_path / "out", "sglang", target=target).notes


OPTIONS = {
    "plain": ({}, FORMS),
    "whole vocabulary, no d2t": (dict(draft_vocab_size=200), FORMS),
    "grouped queries, yarn": (dict(num_key_value_heads=2, rope=YARN), ("sglang", "vllm", "speculators")),
    "wide heads, float32, shards": (dict(head_dim=48, dtype="float32", _weights=torch.float32, _shards=3), FORMS),
    "with what speculators saves": (dict(_extra=["embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight"]), FORMS),
    "float32 copy of a bfloat16 embedding": (dict(dtype="float32", _weights=torch.float32, _extra=["embed_tokens.weight"]), FORMS),
    "without t2d": (dict(_without=["t2d"]), FORMS),
    "norms of EAGLE-3.1": (dict(fc_norm=True, norm_output=True), ("sglang", "vllm", "speculators")),
    "norm before fc": (dict(norm_before_fc=True), ("sglang", "vllm", "speculators")),
    "norm before residual": (dict(norm_before_residual=True), ("vllm", "speculators")),
    "four aux layers, biases": (dict(aux_layer_ids=[1, 3, 6, 9], attention_bias=True, mlp_bias=True), ("vllm", "speculators")),
    "two layers of Qwen3": (dict(attention="qwen3", num_hidden_layers=2), ("vllm", "speculators")),
    "sliding window": (dict(layer_types=["sliding_attention"], sliding_window=512), ("vllm", "speculators")),
    "latent attention": (MLA | dict(eagle_config=dict(use_last_layernorm=True, use_mtp_layernorm=False), norm_output=True), ("sglang", "vllm")),
    "the target's head": (dict(own_head=False, draft_vocab_size=200), FORMS),
    "ids by the engine": (dict(aux_layer_ids=None, other=dict(initializer_range=0.02, target_model_type="kimi_k2")), FORMS),
    "a first id of 1": (dict(aux_layer_ids=[1, 6, 9]), ("sglang", "vllm", "speculators")),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_there_and_back_with_every_option(option, tmp_path, target):
    changes, able = OPTIONS[option]
    how = {k[1:]: v for k, v in changes.items() if k.startswith("_")}
    d = make_drafter(tmp_path / "source", able[-1] if option == "a first id of 1" else able[0], target, **how, **{k: v for k, v in changes.items() if not k.startswith("_")})
    if "eagle" in able and d.aux_layer_ids: d = d.model_copy(update=dict(aux_layer_ids=[2, 6, 9]))
    assert read_checkpoint(tmp_path / "source").description == d
    assert option == "a first id of 1" or [f for f in FORMS if not refusals(d, f)] == [f for f in FORMS if f in able]
    for a in able:
        start = convert(tmp_path / "source", tmp_path / a, a, target=target).out
        for b in able:
            there = convert(start, tmp_path / f"{a}-{b}", b, target=target).out
            back = convert(there, tmp_path / f"{a}-{b}-{a}", a, target=target).out
            assert fingerprint(back) == fingerprint(start), (a, b)
            assert read_json(back / "config.json") | {"kimi_spec": 0} == read_json(start / "config.json") | {"kimi_spec": 0}, (a, b)
            for folder in (there, back): assert read_checkpoint(folder).description.model_dump() | dict(own_head=0) == d.model_dump() | dict(own_head=0), (a, b)
    for b in set(FORMS) - set(able):
        with pytest.raises(FormError): convert(tmp_path / "source", tmp_path / "refused", b, target=target)
    assert not (tmp_path / "refused").exists() and not list(tmp_path.glob("*.unfinished"))


def test_a_release_decides_what_can_be_said_and_where(tmp_path, target):
    make_drafter(tmp_path / "d", "speculators", target, fc_norm=True, aux_layer_ids=[2, 6, 9])
    for form, old, new in (("sglang", "0.5.11", "0.5.12"), ("vllm", "0.21.0", "0.22.0"), ("speculators", "0.24.0", "0.25.0")):
        with pytest.raises(FormError, match=f"fc_norm: .* {old} doesn't read it, {new} is the first"): convert(tmp_path / "d", tmp_path / form, form, old, target)
        convert(tmp_path / "d", tmp_path / form, form, new, target)
    config = read_json(tmp_path / "sglang" / "config.json")
    assert config["eagle_config"][IDS] == [1, 5, 8] and IDS not in config, "SGLang 0.5.12 adds one on a Kimi target, and looks in eagle_config only"
    assert read_checkpoint(tmp_path / "sglang").description.aux_layer_ids == [2, 6, 9]
    assert read_json(convert(tmp_path / "sglang", tmp_path / "newer", "sglang", "0.5.13", target).out / "config.json")["eagle_config"][IDS] == [2, 6, 9]
    with pytest.raises(FormError, match="depends on the target"): convert(tmp_path / "d", tmp_path / "no", "sglang", "0.5.12")
    with pytest.raises(FormError, match="is no release"): convert(tmp_path / "d", tmp_path / "no", "sglang", "newest")


def test_the_launcher_knows_the_same_releases():
    from kimi_spec.engines.served import DEEPSEEK, FIRST_WITH, layers_read
    assert forms.DEEPSEEK == DEEPSEEK
    for engine, firsts in FIRST_WITH.items():
        for flag, first in firsts.items(): assert CAN[flag][engine] and Version(CAN[flag][engine]) == Version(first) if first else CAN[flag][engine] is None, (engine, flag)
    for release in ("0.5.9", "0.5.10", "0.5.12", "0.5.13", "0.5.23"):
        for model_type in (*DEEPSEEK, "llama"):
            for ids in ([1, 29, 57], [2, 30, 58], [0, 4, 5]): assert sglang_reads(Version(release), model_type, ids) == layers_read("sglang", Version(release), model_type, ids)


def test_what_the_target_supplies_must_be_the_targets(tmp_path, target):
    make_drafter(tmp_path / "d", "speculators", target, extra=["embed_tokens.weight"])
    other = make_target(tmp_path / "other", seed=5)
    with pytest.raises(FormError, match="it is not the target's"): convert(tmp_path / "d", tmp_path / "out", "sglang", target=other)
    convert(tmp_path / "d", tmp_path / "out", "sglang", target=target)
    with pytest.raises(FormError, match="has another one than the target that it was left to"): convert(tmp_path / "out", tmp_path / "back", "speculators", target=other)
    with pytest.raises(FormError, match="give the target"): convert(tmp_path / "out", tmp_path / "back", "speculators")
    with pytest.raises(FormError, match="a target of 300 tokens"): convert(tmp_path / "d", tmp_path / "no", "vllm", target=make_target(tmp_path / "larger", vocab_size=300))
    # without a target nothing is lost, and the doubt is said
    kept = convert(tmp_path / "d", tmp_path / "kept", "sglang")
    assert "embed_tokens.weight" in inventory(kept.out) and any("SGLang will use the target's" in n for n in kept.notes)


def test_a_multimodal_target_in_shards_gives_only_the_shard_that_is_asked_for(tmp_path, target):
    d = make_drafter(tmp_path / "d", "sglang", target)
    large = tmp_path / "large"
    large.mkdir()
    for i, (name, tensor) in enumerate(load_file(target / "model.safetensors").items()): save_file({f"language_model.{name}": tensor}, large / f"model-{i}.safetensors")
    where = {n: f.name for f in large.glob("*.safetensors") for n in load_file(f)}
    (large / "model.safetensors.index.json").write_text(json.dumps(dict(weight_map=where | {"language_model.model.layers.0.mlp.up_proj.weight": "model-9.safetensors"})))
    (large / "model-9.safetensors").write_bytes(b"not to be opened")
    (large / "config.json").write_text(json.dumps(dict(architectures=["KimiK25ForConditionalGeneration"], model_type="kimi_k25", text_config=dict(vocab_size=200, hidden_size=64, num_hidden_layers=12))))
    out = convert(tmp_path / "d", tmp_path / "out", "speculators", target=large).out
    assert inventory(out)["embed_tokens.weight"].sha256() == inventory(target)["model.embed_tokens.weight"].sha256()
    assert read_json(out / "config.json")["speculators_config"]["verifier"]["architectures"] == ["KimiK25ForConditionalGeneration"] and d.aux_layer_ids == [2, 6, 9]


def test_fields_that_can_be_meant_in_two_ways_are_asked_for(tmp_path, target):
    def written(**changed):
        make_drafter(folder := tmp_path / str(len(list(tmp_path.iterdir()))), "speculators", target)
        config = read_json(folder / "config.json") | changed
        (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "gone"}))
        return folder
    unsaid = written(norm_before_residual="gone")
    with pytest.raises(FormError, match="the library reads that as off, vLLM as on"): convert(unsaid, tmp_path / "out", "sglang", target=target)
    assert convert(unsaid, tmp_path / "off", "sglang", target=target, norm_before_residual=False).description.norm_before_residual is False
    with pytest.raises(FormError, match="speculators would take 32,000"): read_checkpoint(written(draft_vocab_size="gone"))
    assert any("secret_sauce = 3" in n for n in read_checkpoint(written(secret_sauce=3)).notes)
    with pytest.raises(FormError, match="Nearest: 'eos_token_id'"): convert(unsaid, tmp_path / "no", "sglang", eos_tokens_id=4)
    tied = make_drafter(tmp_path / "tied", "sglang", target) and tmp_path / "tied"
    (tied / "config.json").write_text(json.dumps(read_json(tied / "config.json") | dict(tie_word_embeddings=True)))
    with pytest.raises(FormError, match="SGLang would drop it"): read_checkpoint(tied)
    assert read_checkpoint(tied, tied=False).description.tied is False


def test_quantised_weights_keep_their_scales_and_the_names_in_their_config(tmp_path, target):
    d = make_drafter(tmp_path / "d", "sglang", target, quantization=dict(quant_method="modelopt", ignore=["midlayer.self_attn*", "lm_head"]))
    tensors = load_file(tmp_path / "d" / "model.safetensors")
    tensors |= {"midlayer.mlp.up_proj.weight": tensors["midlayer.mlp.up_proj.weight"].to(torch.float8_e4m3fn), "midlayer.mlp.up_proj.weight_scale": torch.ones(1)}
    save_file(tensors, tmp_path / "d" / "model.safetensors")
    out = convert(tmp_path / "d", tmp_path / "v", "vllm").out
    assert read_json(out / "config.json")["quantization_config"]["ignore"] == ["layers.0.self_attn*", "lm_head"] and inventory(out)["layers.0.mlp.up_proj.weight"].dtype == "F8_E4M3"
    assert fingerprint(convert(out, tmp_path / "s", "sglang").out) == fingerprint(tmp_path / "d") and read_checkpoint(tmp_path / "s").description == d
    with pytest.raises(FormError, match="plain linear layers"): convert(out, tmp_path / "no", "speculators", target=target)


def test_a_cast_is_the_only_thing_that_changes_bits(tmp_path, target):
    make_drafter(tmp_path / "d", "speculators", target, weights=torch.float32)
    out = convert(tmp_path / "d", tmp_path / "out", "sglang", dtype="bfloat16").out
    before, after = load_file(tmp_path / "d" / "model.safetensors"), load_file(out / "model.safetensors")
    for n, t in before.items():
        cast = t.bfloat16() if t.is_floating_point() else t
        assert torch.equal(after[n.replace("layers.0.", "midlayer.")], cast) and after[n.replace("layers.0.", "midlayer.")].dtype == cast.dtype
    assert read_json(out / "config.json")["torch_dtype"] == "bfloat16"


def test_broken_folders(tmp_path, target):
    make_drafter(tmp_path / "d", "sglang", target, shards=2)
    (tmp_path / "d" / "model-00002-of-00002.safetensors").rename(tmp_path / "away")
    with pytest.raises(FormError, match="names model-00002-of-00002.safetensors, not there"): read_checkpoint(tmp_path / "d")
    shutil.copy(tmp_path / "d" / "model-00001-of-00002.safetensors", tmp_path / "d" / "model-00002-of-00002.safetensors")
    with pytest.raises(FormError, match="the index promises"): read_checkpoint(tmp_path / "d")
    index = read_json(tmp_path / "d" / "model.safetensors.index.json")
    index["weight_map"]["fc.weight"] = "../away"
    (tmp_path / "d" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(Exception, match="can't be a shard"): read_checkpoint(tmp_path / "d")
    (tmp_path / "d" / "config.json").write_text("[]")
    with pytest.raises(FormError, match="expected a JSON object"): recognise(tmp_path / "d")
    with pytest.raises(FormError, match="Nearest: 'sglang'"): convert(tmp_path / "d", tmp_path / "o", "sglan")


def test_a_conversion_that_is_cut_short_leaves_nothing_half_done(tmp_path, target, monkeypatch):
    make_drafter(tmp_path / "d", "sglang", target)
    first = fingerprint(convert(tmp_path / "d", tmp_path / "out", "vllm").out)
    def cut(file, tensors):
        file.write_bytes(b"half")
        raise KeyboardInterrupt
    with monkeypatch.context() as m:
        m.setattr(forms, "write_tensors", cut)
        with pytest.raises(KeyboardInterrupt): convert(tmp_path / "d", tmp_path / "out", "vllm", overwrite=True)
    assert fingerprint(tmp_path / "out") == first and not (tmp_path / "out.unfinished").exists()
    (tmp_path / "new.unfinished").mkdir()  # what kill -9 leaves
    (tmp_path / "new.unfinished" / "stale").write_text("")
    convert(tmp_path / "d", tmp_path / "new", "vllm")
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["config.json", "model.safetensors"] and not (tmp_path / "new.unfinished").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(FormError, match="GB free"): convert(tmp_path / "d", tmp_path / "full", "vllm")


def test_a_large_drafter_takes_little_memory(tmp_path):
    "A sparse file stands for the weights: 300 MB that exist on paper."
    d = Description(**PLAIN | dict(hidden_size=2048, intermediate_size=18432, head_dim=64, num_attention_heads=32, num_key_value_heads=32, draft_vocab_size=200))
    header, at = {}, 0
    for n, s in tensor_shapes(d).items():
        header[n] = dict(dtype="BF16", shape=s, data_offsets=[at, at := at + 2 * int(np.prod(s))])
    text = json.dumps(header).encode()
    (tmp_path / "d").mkdir()
    with (tmp_path / "d" / "model.safetensors").open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        f.truncate(8 + len(text) + at)
    (tmp_path / "d" / "config.json").write_text(json.dumps(write_config(d, "sglang", {})))
    code = """import resource, sys
from kimi_spec.drafters.forms import convert, recognise
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
assert recognise(sys.argv[1]).form == "sglang"
before = peak()
print(convert(sys.argv[1], sys.argv[2], "vllm").nbytes / 2**20, peak() - before)"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "d"), str(tmp_path / "out")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    size, grown = map(float, done.stdout.split())
    assert size > 250 and grown < 100, (size, grown)


def test_speculators_itself_loads_what_is_written(tmp_path, monkeypatch):
    from speculators.models.eagle3.core import Eagle3DraftModel
    from kimi_spec.drafters.drafter import Drafter
    from kimi_spec.drafters.states import extract_states, load_target
    monkeypatch.chdir(root())  # the config names the target as the project does
    out = convert(NANO / "drafter", tmp_path / "d", "speculators", target=NANO / "target").out
    model = Eagle3DraftModel.from_pretrained(out, dtype=torch.float32).eval()
    stored = load_file(out / "model.safetensors")
    loaded = model.state_dict()
    assert set(stored) == set(loaded) - {"verifier_lm_head.weight", "verifier_norm.weight"}
    for n, t in stored.items(): assert torch.equal(loaded[n], t.float() if t.is_floating_point() else t), n
    # and guesses what the suite's own drafter guesses
    target, _ = load_target(NANO / "target")
    ids = torch.randint(0, 896, (1, 40), generator=torch.Generator().manual_seed(0))
    aux = extract_states(target, ids, [2, 4, 5]).aux
    drafter = Drafter(NANO / "drafter", target.model.embed_tokens.weight)
    with torch.no_grad():
        ours = drafter.guess(aux[0, :-1], ids[0, 1:], 1)[0]
        theirs = model(aux[:, :-1], ids[:, 1:], torch.zeros(1, 39, dtype=torch.long), ttt_steps=1)[0][0]
    assert torch.equal(drafter.to_target[theirs], ours)


def test_the_engines_own_config_readers_find_what_is_meant(tmp_path, target):
    from transformers import LlamaConfig
    from vllm.transformers_utils.configs.speculators import SpeculatorsConfig
    d = make_drafter(tmp_path / "d", "vllm", target, rope=YARN, num_key_value_heads=2, head_dim=48, norm_output=True, norm_before_residual=True, aux_layer_ids=[2, 5, 7])
    nested = SpeculatorsConfig.from_pretrained(convert(tmp_path / "d", tmp_path / "s", "speculators", target=target).out)
    flat = LlamaConfig.from_pretrained(tmp_path / "d")
    for config in (nested, flat):
        assert (config.hidden_size, config.head_dim, config.num_key_value_heads, config.draft_vocab_size, config.eagle_aux_hidden_state_layer_ids) == (64, 48, 2, 80, [2, 5, 7])
        assert (config.norm_before_residual, config.norm_output, config.eos_token_id) == (True, True, [4, 5])
        assert {k: v for k, v in config.rope_parameters.items() if k != "type"} == d.rope
    assert nested.architectures == ["Eagle3LlamaForCausalLM"] and flat.architectures == ["LlamaForCausalLMEagle3"]


def test_a_converted_drafter_is_served_as_well_as_the_right_one():
    "The trainer's form, as vLLM reads it, against the drafter that ships: the same prompts, the same acceptance."
    from kimi_spec.engines.broken import asked
    from kimi_spec.engines.server import Server, wait_ready
    rig = load_rig("nano-vllm")
    folder = cache_dir() / "probe" / f"forms-{os.getpid()}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        convert(NANO / "drafter", folder / "speculators", "speculators", rig.engine.release, NANO / "target")
        found = []
        for path in (relative(folder / "speculators"), rig.drafter.path):
            served = rig.model_copy(update=dict(drafter=rig.drafter.model_copy(update=dict(path=path, as_saved=True))))
            server = Server(served, Path(folder) / "server.log")
            with server:
                wait_ready([server], lambda _: None)
                found.append(asked(server, 6, 48))
    finally: shutil.rmtree(folder, ignore_errors=True)
    assert found[0].per_position == found[1].per_position and found[0].steps == found[1].steps > 20 and found[0].accept_length > 3


def test_a_place_that_can_not_be_written(tmp_path, target, monkeypatch):
    make_drafter(tmp_path / "d", "vllm", target)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FormError, match="file: can't be a folder"): convert(tmp_path / "d", tmp_path / "file" / "x", "sglang")
    with pytest.raises(FormError, match="file: can't be a folder|Not a directory"): convert(tmp_path / "d", tmp_path / "file" / "x" / "y", "sglang")
    def full(*_): raise OSError(28, "No space left on device")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FormError, match="could not be written .No space left on device"): convert(tmp_path / "d", tmp_path / "out", "sglang")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d", "file", "target"], "something was left behind"
