"The doctor on drafters of every form, broken in one way each, and on what engines tell of them."
import json
import math
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch
from safetensors.torch import load_file, save_file

from kimi_spec.core.acceptance import Acceptance, AcceptanceError
from kimi_spec.core.errors import KimiSpecError
from kimi_spec.core.paths import data_dir
from kimi_spec.drafters.doctor import FATAL, FINE, LIKELY, NOTE, OPEN, across_releases, captured, doctor, facts_of, lines, read_flags
from kimi_spec.drafters.fingerprints import CAUSES, OTHER_PAIR, SAME_PAIR, Seen, ranked, read_library
from kimi_spec.drafters.forms import IDS, FORMS
from kimi_spec.drafters.inventory import differences, papers, sample

NANO = data_dir() / "nano" / "k2.5"
CONFIG = json.loads((NANO / "drafter" / "config.json").read_text())
EAGLE3 = "--speculative-algorithm EAGLE3 --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
SIZES = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=4, head_dim=16, num_hidden_layers=1, hidden_act="silu", rms_norm_eps=1e-6, vocab_size=512, model_type="llama")
LATENT = dict(q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)


def ids(*i): return {"eagle_config": {IDS: list(i), "use_aux_hidden_state": True}}


CONFIGS = {  # one of each form seen in public -> form, first SGLang and first vLLM that load it for a DeepSeek target; "" for none
    "specforge": (dict(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=128, **SIZES) | ids(2, 30, 58), "sglang", "0.5.4.post2", "0.18.0"),
    "norms": (dict(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=128, fc_norm=True, **SIZES), "sglang", "0.5.12", "0.22.0"),
    "residual": (dict(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=128, norm_before_residual=True, **SIZES), "sglang", "", "0.18.0"),
    "mla": (dict(architectures=["Eagle3DeepseekV2ForCausalLM"], draft_vocab_size=512, **SIZES | LATENT | dict(model_type="kimi_k2")) | ids(1, 29, 57), "sglang", "0.5.12", "0.18.0"),
    "no draft_vocab_size": (dict(architectures=["LlamaForCausalLMEagle3"], **SIZES), "sglang", "", "0.18.0"),
    "eagle": (dict(architectures=["LlamaForCausalLM"], draft_vocab_size=128, **SIZES), "eagle", "", "0.18.0"),
    "angelslim": (dict(architectures=["Eagle3LlamaForCausalLM"], draft_vocab_size=128, **SIZES), "eagle", "", "0.18.0"),
    "speculators": (dict(architectures=["Eagle3DraftModel"], speculators_model_type="eagle3", draft_vocab_size=128, norm_before_residual=False, transformer_layer_config=SIZES, **{IDS: [2, 30, 58]}), "speculators", "", "0.18.0")}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_alone_answers_every_engine_question(name, tmp_path):
    config, form, sglang, vllm = CONFIGS[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    p = papers(tmp_path / "config.json")
    assert (p.recognised.form, p.problems, p.stored) == (form, {}, None) and form in FORMS
    for engine, first in (("sglang", sglang), ("vllm", vllm)):
        rows = across_releases(p, engine, "deepseek", 61)
        assert next((r["first"] for r in rows if r["loads"] == "yes"), "") == first
        assert "unknown" not in {r["loads"] for r in rows}
        assert all(len(r["captured"]) == 3 for r in rows if r["loads"] == "yes")


def test_kimi_needs_its_wrapper(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["specforge"][0]))
    rows = across_releases(papers(tmp_path / "config.json"), "sglang", "kimi_k25", 61)
    assert next(r["first"] for r in rows if r["loads"] == "yes") == "0.5.10"
    assert [r["captured"] for r in rows if r["loads"] == "yes"] == [[3, 31, 59], [2, 30, 58]]


@pytest.mark.parametrize("engine, release, config, family, layers", [
    ("sglang", "0.5.12", ids(2, 30, 58), "deepseek", (3, 31, 59)), ("sglang", "0.5.13", ids(2, 30, 58), "deepseek", (2, 30, 58)), ("sglang", "0.5.13", ids(1, 29, 57), "deepseek", (2, 30, 58)),
    ("sglang", "0.5.13", ids(2, 30, 58), "llama", (3, 31, 59)), ("sglang", "0.5.13", {IDS: [4, 5, 6]}, "deepseek", (2, 30, 58)), ("vllm", "0.20.0", ids(4, 5, 6), "deepseek", (2, 30, 58)),
    ("vllm", "0.25.0", ids(4, 5, 6), "deepseek", (4, 5, 6)), ("vllm", "0.32.0", {IDS: [4, 5, 6]}, "deepseek", (4, 5, 6)), ("sglang", "0.5.13", ids(2, 30, 58), "qwen3", None), ("sglang", "7.0", ids(2, 30, 58), "deepseek", None)])
def test_captured_layers(engine, release, config, family, layers): assert captured(facts_of(engine, release), engine, config, family, 61).layers == layers


def test_an_unread_release_is_unknown_not_guessed():
    d = doctor(NANO / "drafter", NANO / "target", "sglang==0.9.9", EAGLE3)
    assert {v.level for v in d.verdicts if v.about in ("release", "aux layers")} == {OPEN}
    assert not [v for v in d.verdicts if "SGLang 0.9.9" in v.says and v.level == FINE]


def test_the_drafter_that_ships_is_well():
    d = doctor(NANO / "drafter", NANO / "target", "sglang==0.5.13", EAGLE3, seen=Acceptance.from_counts(300, per_position=[294, 288, 278]))
    assert d.at(FATAL) + d.at(LIKELY) == []
    assert d.causes[0].cause.name in ("right", "sampling", "aux-order") and sum(s.share for s in d.causes if s.cause.name in ("right", "training", "sampling", "aux-order", "states-differ", "rope")) > 0.8


def broken(tmp_path, change=lambda t: t, **entries):
    "The nano drafter with other tensors and other entries in its config."
    tensors = change(load_file(NANO / "drafter" / "model.safetensors"))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | entries))
    save_file({n: t.contiguous() for n, t in tensors.items()}, tmp_path / "model.safetensors")
    return tmp_path


def fresh(t): return (torch.randn(t.shape, generator=torch.Generator().manual_seed(1)) * 0.02).to(t.dtype)
def but(**changes): return lambda tensors: {n: change(t) if (change := changes.get(n.replace(".", "_"))) else t for n, t in tensors.items() if n.replace(".", "_") not in changes or changes[n.replace(".", "_")]}
def with_one(value):
    def put(t):
        t = t.clone()
        t[3, 4] = value
        return t
    return put


FAULTS = {  # fault -> true cause, level, change of tensors, entries of the config, release of SGLang, more flags
    "layer called layers.0.*": ("names", FATAL, lambda t: {n.replace("midlayer.", "layers.0."): x for n, x in t.items()}, {}, "0.5.11", ""),
    "no layer at all": ("names", FATAL, lambda t: {n: x for n, x in t.items() if "midlayer" not in n}, {}, "0.5.13", ""),
    "no fc": ("fc", FATAL, but(fc_weight=None), {}, "0.5.13", ""),
    "no lm_head": ("head", FATAL, but(lm_head_weight=None), {}, "0.5.13", ""),
    "no d2t": ("d2t", FATAL, but(d2t=None), {}, "0.5.13", ""),
    "d2t absolute": ("d2t", FATAL, but(d2t=lambda t: t + torch.arange(len(t))), {}, "0.5.13", ""),
    "d2t zero": ("d2t", FATAL, but(d2t=torch.zeros_like), {}, "0.5.13", ""),
    "d2t of nothing": ("d2t", FATAL, but(d2t=lambda t: t.flip(0)), {}, "0.5.13", ""),
    "lm_head of the whole vocabulary": ("head", FATAL, but(lm_head_weight=lambda t: torch.cat([t, t])), {}, "0.5.13", ""),
    "lm_head zero": ("head", LIKELY, but(lm_head_weight=torch.zeros_like), {}, "0.5.13", ""),
    "an embedding of its own": ("embed", LIKELY, lambda t: t | {"embed_tokens.weight": fresh(torch.zeros(896, 128, dtype=torch.bfloat16))}, {}, "0.5.13", ""),
    "not a number": ("not-finite", FATAL, but(midlayer_mlp_up_proj_weight=with_one(math.nan)), {}, "0.5.13", ""),
    "too large for float16": ("not-finite", FATAL, but(fc_weight=with_one(1e5)), {}, "0.5.13", " --dtype float16"),
    "aux ids one higher": ("aux-off", LIKELY, lambda t: t, {IDS: [3, 5, 6]} | ids(3, 5, 6), "0.5.13", ""),
    "ids of the release before": ("aux-off", LIKELY, lambda t: t, {}, "0.5.12", ""),
    "ids contradict": ("aux-off", LIKELY, lambda t: t, ids(3, 5, 6), "0.5.13", ""),
    "ids beyond the target": ("aux-order", FATAL, lambda t: t, {IDS: [2, 30, 58]} | ids(2, 30, 58), "0.5.13", ""),
    "norm_before_residual": ("norms", FATAL, lambda t: t, {"norm_before_residual": True}, "0.5.13", ""),
    "norm_output before 0.5.12": ("norms", FATAL, lambda t: t, {"norm_output": True}, "0.5.11", ""),
    "quantised by name": ("drafter-quantised", FATAL, lambda t: t, {"quantization_config": {"quant_method": "compressed-tensors"}}, "0.5.13", ""),
    "made for another vocabulary": ("generation", FATAL, lambda t: t, {"vocab_size": 512}, "0.5.13", "")}


@pytest.mark.parametrize("name", FAULTS)
def test_files_name_the_fault(name, tmp_path):
    cause, level, change, entries, release, more = FAULTS[name]
    d = doctor(broken(tmp_path, change, **entries), NANO / "target", f"sglang=={release}", EAGLE3 + more)
    assert d.causes[0].cause.name == cause, [(s.cause.name, s.share) for s in d.causes[:3]]
    verdict = next(v for v in d.verdicts if cause in v.causes)
    assert (verdict.level, bool(verdict.says and verdict.evidence)) == (level, True)
    assert abs(sum(s.share for s in d.causes) - 1) < 1e-9


@pytest.mark.parametrize("name, cause", [("lm_head.weight", "head"), ("fc.weight", "fc")])
def test_even_rows_are_a_note_and_no_proof(name, cause, tmp_path):
    d = doctor(broken(tmp_path, lambda t: t | {name: fresh(t[name])}), NANO / "target", "sglang==0.5.13", EAGLE3)
    assert d.at(FATAL) + d.at(LIKELY) == [] and any(v.level == NOTE and cause in v.causes and "no proof" in v.says for v in d.verdicts)


def test_the_eagle_flag():
    d = doctor(NANO / "drafter", NANO / "target", "sglang==0.5.13", EAGLE3.replace("EAGLE3", "EAGLE"))
    assert d.causes[0].cause.name == "eagle-flag" and d.causes[0].share > 0.9
    assert "EAGLE3" in d.first
    assert [v.level for v in doctor(NANO / "drafter", engine="vllm==0.32.0", flags=["--speculative-config", '{"method": "eagle", "num_speculative_tokens": 3}']).verdicts if v.causes == ("eagle-flag",)] == [FATAL]


def test_layers0_is_no_fault_where_the_release_reads_it(tmp_path):
    d = doctor(broken(tmp_path, FAULTS["layer called layers.0.*"][2]), NANO / "target", "sglang==0.5.13", EAGLE3)
    assert d.at(FATAL) + d.at(LIKELY) == []


def test_sharded_and_unreadable(tmp_path):
    whole = load_file(NANO / "drafter" / "model.safetensors")
    names = sorted(whole)
    for i, part in enumerate((names[:5], names[5:])): save_file({n: whole[n] for n in part}, tmp_path / f"model-{i}.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(dict(weight_map={n: f"model-{int(n in names[5:])}.safetensors" for n in names})))
    assert differences(papers(tmp_path)).missing == ()
    assert doctor(tmp_path, NANO / "target", "sglang==0.5.13", EAGLE3).at(FATAL) == []
    (tmp_path / "model-1.safetensors").write_bytes((tmp_path / "model-1.safetensors").read_bytes()[:-100])
    cut = doctor(tmp_path, NANO / "target", "sglang==0.5.13", EAGLE3)
    broken_file = next(v for v in cut.at(FATAL) if "not a whole safetensors file" in v.says)
    assert broken_file.evidence.endswith("model-1.safetensors") and broken_file.then.startswith("copy it again") and cut.first == broken_file.then
    assert cut.causes == () and "form" not in [v.about for v in cut.verdicts] and "no causes are ranked" in lines(cut)[-1] and cut.to_dict()["causes"] == []
    (tmp_path / "config.json").write_text("{")
    both = doctor(tmp_path, NANO / "target", "sglang==0.5.13", EAGLE3)
    assert [v.evidence.rsplit("/")[-1] for v in both.at(FATAL) if v.about == "files"] == ["config.json", "model-1.safetensors"]
    with pytest.raises(KimiSpecError, match="no such drafter"): doctor(tmp_path / "nothing")


def test_whole_finds_what_a_sample_misses(tmp_path):
    big = torch.zeros(4000, 8)
    big[1] = math.inf
    big[2] = torch.linspace(1, 2, 8)
    save_file(dict(big=big), tmp_path / "t.safetensors")
    from kimi_spec.drafters.forms import read_header
    t = read_header(tmp_path / "t.safetensors")["big"]
    assert sample(t, whole=True).not_finite == 8 and sample(t, whole=True).count == 32000
    assert sample(t).count < 1000 and not sample(t).whole


def test_the_story_points_at_wiring(tmp_path):
    told = dict(architectures=["LlamaForCausalLMEagle3"], attention_bias=False, bos_token_id=163584, draft_vocab_size=32000, dtype="bfloat16", eos_token_id=163585, head_dim=128, hidden_act="silu", hidden_size=7168, **ids(2, 30, 58))
    (tmp_path / "drafter.json").write_text(json.dumps(told))
    (tmp_path / "target.json").write_text(json.dumps(dict(model_type="kimi_k25", text_config=dict(model_type="kimi_k2", num_hidden_layers=61, quantization_config={"quant_method": "compressed-tensors"}))))
    for release in ("0.5.8", "0.5.9"):
        d = doctor(tmp_path / "drafter.json", tmp_path / "target.json", f"sglang=={release}", EAGLE3, seen=Acceptance.from_rate(0.25, 3, "len/num_draft_tokens", "sglang", release), works="a public drafter, 1.68", made_by="speculators")
        order = [s.cause.name for s in d.causes]
        assert order.index("quantisation") > 15 and all(s.cause.structural for s in d.causes[:6]) and d.causes[0].share < 0.5
        assert {"d2t", "head", "names", "nothing-loaded"} <= set(order[:6])
        assert "drafter's folder" in d.first
        assert any("layers.0.*" in v.says and v.level == OPEN for v in d.verdicts)


def test_a_log_says_flags_and_acceptance(tmp_path):
    log = tmp_path / "server.log"
    log.write_text("[2026-11-29 13:46:20] server_args=ServerArgs(model_path='t', dtype='auto', quantization=None, speculative_algorithm='EAGLE', speculative_num_steps=3, speculative_eagle_topk=1, speculative_num_draft_tokens=4)\n"
                   + "[2026-11-29 13:46:26] Decode batch, #running-req: 1, #token: 9, token usage: 0.00, accept len: 1.00, accept rate: 0.25, cuda graph: False, gen throughput (token/s): 37.73, #queue-req: 0\n" * 5)
    d = doctor(NANO / "drafter", NANO / "target", "sglang==0.5.10", log=log)
    assert d.causes[0].cause.name == "eagle-flag" and d.seen == Seen(3, 200, 1.0, 0.005)
    assert any("server.log" in text for text in lines(d))
    log.write_text(log.read_text().replace("topk=1,", "topk=1, decode_log_interval=5,"))
    assert doctor(NANO / "drafter", NANO / "target", "sglang==0.5.10", log=log).seen.steps == 25
    log.write_text("nothing\n")
    with pytest.raises(AcceptanceError, match="no decode line"): doctor(NANO / "drafter", engine="sglang==0.5.10", log=log)


@contextmanager
def answering(pages):
    "A server with these pages."
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path in pages else 404)
            self.end_headers()
            self.wfile.write(pages.get(self.path, "").encode())
        def log_message(self, *_): pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_live_vllm():
    text = "".join(f"# TYPE vllm:spec_decode_num_{n} counter\nvllm:spec_decode_num_{n}_total{{model_name=\"m\"}} {v}\n" for n, v in dict(drafts=200, draft_tokens=600, accepted_tokens=50).items())
    text += "# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter\n" + "".join(f"vllm:spec_decode_num_accepted_tokens_per_pos_total{{model_name=\"m\",position=\"{i}\"}} {v}\n" for i, v in enumerate((44, 5, 1)))
    with answering({"/metrics": text}) as url: d = doctor(NANO / "drafter", NANO / "target", "vllm==0.32.0", url=url)
    assert d.seen == Seen(3, 200, 1.25, 0.0025, (44, 5, 1))
    assert d.causes[0].share > d.causes[-1].share


def test_a_live_sglang():
    info = dict(version="0.5.13", speculative_num_draft_tokens=4, internal_states=[dict(avg_spec_accept_length=2.5)])
    with answering({"/server_info": json.dumps(info)}) as url: d = doctor(NANO / "drafter", NANO / "target", "sglang==0.5.13", EAGLE3, url=url)
    assert (d.seen.k, d.seen.length) == (3, 2.5) and "server_info" in d.seen_says


def test_what_is_not_known_is_asked_for():
    with pytest.raises(KimiSpecError, match="without the number of drafted tokens"): doctor(NANO / "drafter", engine="sglang==0.5.10", seen=Acceptance("sglang", stated_length=1.5))
    with pytest.raises(KimiSpecError, match="unknown engine"): doctor(NANO / "drafter", engine="sgl==0.5.10")
    with pytest.raises(KimiSpecError, match="not a release"): doctor(NANO / "drafter", engine="sglang==new")
    with pytest.raises(KimiSpecError, match="without the engine"): doctor(NANO / "drafter", flags=EAGLE3)
    with pytest.raises(KimiSpecError, match="expected a number"): read_flags("sglang", "--speculative-num-steps three")


@pytest.mark.parametrize("key", ["architectures", "eagle_config", IDS, "rope_scaling", "rope_theta", "hidden_size", "vocab_size", "draft_vocab_size", "quantization_config", "torch_dtype", "norm_before_residual"])
def test_a_strange_entry_is_a_finding(key, tmp_path):
    for value in ("x", [1, "a"], {}, -1, True, {"a": [None]}, 1e9, ["🎈"]):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | {key: value}))
        d = doctor(tmp_path / "config.json", NANO / "target" / "config.json", "sglang==0.5.13", EAGLE3)
        assert lines(d) and across_releases(papers(tmp_path / "config.json"), "vllm", layers=8)
    (tmp_path / "config.json").write_text(json.dumps(dict(model_type="kimi_k2", vocab_size="many")))
    with pytest.raises(KimiSpecError, match="expected a number"): doctor(NANO / "drafter", tmp_path / "config.json")


def test_json_and_text():
    d = doctor(NANO / "drafter", NANO / "target", "sglang==0.5.13", EAGLE3)
    back = json.loads(json.dumps(d.to_dict()))
    assert len(back["causes"]) == len(CAUSES) and back["first"] and back["limits"] and {"about", "level", "says", "evidence", "then", "causes"} <= set(back["verdicts"][0])
    text = "\n".join(lines(d))
    assert "first: " in text and "limit: " in text and "quantisation" in text


def test_the_library_is_whole():
    library = read_library()
    assert {f.cause for f in library} == set(CAUSES) - {"other"} and len({f.name for f in library}) == len(library) >= 70
    for f in library:
        for k, (steps, *kept) in f.counts.items(): assert len(kept) == k and steps > 0 and [steps, *kept] == sorted([steps, *kept], reverse=True)


@pytest.mark.parametrize("kin", [SAME_PAIR, OTHER_PAIR])
def test_shares(kin):
    for seen in (Seen(3, 400, 1.0, 0.005), Seen(3, 400, 3.8, 0.00125, (392, 380, 350)), Seen(9, 100, 2.0, 0.005), None):
        shares = ranked(seen, kin)
        assert abs(sum(s.share for s in shares) - 1) < 1e-9 and min(s.share for s in shares) >= 0
        assert next(s.share for s in shares if s.cause.name == "quantisation") < 0.05
    names = {s.cause.name: s.share for s in ranked(Seen(3, 4000, 2.9, 0.000125, (3600, 2600, 1400)), kin)}
    assert names["not-finite"] < 0.03
    twice = {s.cause.name: s.share for s in ranked(None, kin, {"fc": 20.0})}
    assert twice["fc"] == max(twice.values())


def test_what_is_no_drafter_is_refused(tmp_path):
    (tmp_path / "README.md").write_text("# a drafter")
    for path in (tmp_path, tmp_path / "README.md", NANO / "drafter" / "model.safetensors"):
        with pytest.raises(KimiSpecError, match="expected a drafter's folder|no drafter: found neither"): doctor(path)


@pytest.mark.parametrize("config, release, way", [("norms", "0.5.9", "serve it with sglang 0.5.1"), ("mla", "0.5.9", "serve it with sglang 0.5.1"), ("eagle", "0.5.13", "convert it to sglang's form")])
def test_a_fatal_verdict_says_what_comes_first(config, release, way, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[config][0]))
    assert doctor(tmp_path / "config.json", engine=f"sglang=={release}", flags=EAGLE3).first.startswith(way)


def test_no_circle_where_folder_and_target_were_given():
    for seen in (None, Acceptance.from_counts(1000, per_position=[0, 0, 0]), Acceptance.from_counts(1000, per_position=[400, 100, 10])):
        d = doctor(NANO / "drafter", NANO / "target", "sglang==0.5.13", EAGLE3, seen=seen)
        assert "give the doctor" not in d.first and "kimi-spec doctor DRAFTER)" not in "".join([d.first, *lines(d)])


@pytest.mark.parametrize("seen", [Acceptance.from_counts(1000, per_position=[1000, 1000, 1000]), Acceptance("sglang", stated_length=4.0), Acceptance("sglang", stated_length=3.93)])
def test_nothing_is_left_to_gain(seen):
    d = doctor(NANO / "drafter", NANO / "target", "sglang==0.5.12", EAGLE3, seen=seen)
    assert (d.causes[0].cause.name, d.causes[0].share > 0.5) == ("right", True)
    assert "nothing is left to gain" in lines(d)[0] and d.first.startswith("nothing")


@pytest.mark.parametrize("kin", [SAME_PAIR, OTHER_PAIR])
def test_more_than_the_library_keeps_is_no_fault(kin):
    for seen in (Seen(3, 1000, 4.0, 0.0005, (1000, 1000, 1000)), Seen(3, 1000, 3.95, 0.0005), Seen(3, 200, 4.0, 0.005)):
        shares = {s.cause.name: s.share for s in ranked(seen, kin)}
        assert max(shares, key=shares.get) == "right", sorted(shares.items(), key=lambda s: -s[1])[:3]


def test_flags_that_can_not_be():
    with pytest.raises(KimiSpecError, match="paired quotes"): read_flags("sglang", "--model-path 'm")
    for spec, match in (('{"method": 3}', "method: found 3"), ('{"num_speculative_tokens": "many"}', "found 'many'"), ('{"num_speculative_tokens": -1}', "found -1"), ('{"num_speculative_tokens": true}', "found True")):
        with pytest.raises(KimiSpecError, match=match): read_flags("vllm", ["--speculative-config", spec])
    dotted = read_flags("vllm", "--speculative-config.method eagle3 --speculative-config.num_speculative_tokens=3 --some-flag x")
    assert (dotted.algorithm, dotted.k) == ("eagle3", 3)
    def warned(more): return any("--max-running-requests" in v.says for v in doctor(NANO / "drafter", engine="sglang==0.5.10", flags=EAGLE3 + more).verdicts)
    assert (warned(""), warned(" --max-running-requests 64")) == (True, False)


def test_a_log_of_another_drafter_or_release(tmp_path):
    log = tmp_path / "server.log"
    log.write_text("Initializing a V1 LLM engine (v0.32.0) with config: speculative_config=SpeculativeConfig(method='eagle3', model='m/other', num_spec_tokens=3), tokenizer='t'\n"
                   + "INFO 11-29 13:46:26 [metrics.py:101] SpecDecoding metrics: Mean acceptance length: 2.00, Accepted throughput: 10.00 tokens/s, Drafted throughput: 30.00 tokens/s, Accepted: 100 tokens, Drafted: 300 tokens, Per-position acceptance rate: 0.600, 0.300, 0.100, Avg Draft acceptance rate: 33.3%\n")
    notes = [v.says for v in doctor(NANO / "drafter", engine="vllm==0.30.0", log=log).verdicts if v.about == "log"]
    assert any("0.32.0" in s and "0.30.0" in s for s in notes) and any("m/other" in s and "drafter" in s for s in notes)
    assert doctor(NANO / "drafter", log=log).engine == "vllm==0.32.0"


def test_words():
    said = {v.says for v in doctor(NANO / "drafter", engine="sglang").verdicts} | {v.says for v in doctor(NANO / "drafter", engine="sglang==9.9").verdicts}
    assert not [s for s in said if "  " in s] and any("9.9 was not read; 81 from 0.4.2 to" in s for s in said) and any("no release of sglang was named" in s for s in said)
