"The analytic pair against transformers and against the suite's own drafter, the naming of every fault, and one real fault on each engine."

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from kimi_spec.core.errors import KimiSpecError
from kimi_spec.core.rig import load_rig
from kimi_spec.drafters.drafter import Drafter
from kimi_spec.drafters.replay import replay as drafters_replay
from kimi_spec.engines.analytic_pair import CLASSES, DRAFT_VOCAB, VOCAB, Form, Pair, Shape, accept_lengths, as_trained, draft_tokens, follows, place, readings, save_checkpoint, write_drafter, write_target
from kimi_spec.engines import probe as room
from kimi_spec.engines.probe import FAULTS, Verdict, agreement, dry_run, fault_named, given, is_fault_here, judge, judged, lines, named_right, pair_for, predicted, prepared, probe, rank, record

SHAPES = [("llama", 8, (2, 4, 5)), ("deepseek_v3", 12, (1, 6, 11)), ("llama", 61, (2, 30, 58))]


def changed(rig, **parts):
    "A copy of a rig with some fields of its parts replaced."
    return rig.model_copy(update={part: getattr(rig, part).model_copy(update=fields) for part, fields in parts.items()})


@pytest.mark.parametrize("kind, layers, aux", SHAPES)
def test_transformers_counts_as_we_do(kind, layers, aux, tmp_path):
    pair = Pair(Shape(kind, layers, aux))
    model = AutoModelForCausalLM.from_pretrained(write_target(pair, tmp_path), dtype=torch.float32)
    tokens = torch.tensor([lamp.tokens[-1] for lamp in pair.lamps])
    seen = model(tokens[:, None], output_hidden_states=True)
    assert len(seen.hidden_states) == layers + 1
    for i, stream in enumerate(seen.hidden_states):
        assert torch.equal(stream[:, 0].argmax(-1), (tokens + i) % CLASSES)
        one = stream[:, 0].gather(1, ((tokens + i) % CLASSES)[:, None]).squeeze(1)
        assert (one / stream[:, 0].norm(dim=-1) > 0.999).all()  # nothing else is left in the stream
    assert torch.equal(seen.logits[:, 0].argmax(-1), torch.tensor(follows(pair.lamps))[tokens])


@pytest.mark.parametrize("by", [0, 1, -1])
def test_the_suites_drafter_accepts_what_the_replay_predicts(by, tmp_path):
    "Two replays that share no line: ours computes the states by hand, the other one takes them from transformers."
    pair = Pair(Shape("llama", 8, (2, 4, 6)))
    target = AutoModelForCausalLM.from_pretrained(write_target(pair, tmp_path), dtype=torch.float32)
    folder = write_drafter(pair, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [i + by for i in pair.shape.aux]
    (folder / "config.json").write_text(json.dumps(config))
    drafter = Drafter(folder, target.get_input_embeddings().weight.detach())
    expected = accept_lengths(pair, replace(pair.wiring, aux=tuple(i + by for i in pair.shape.aux)))
    for lamp in pair.lamps:
        text = list(lamp.tokens * 30)[:30]  # the prompt's 6 tokens, the first one, and six steps of 4 less the bonus that nobody checks
        assert drafters_replay(drafter, target, [(text, 6)], 3).accept_length == expected[lamp.name], lamp


@pytest.mark.parametrize("form", [Form(), Form(norm_before_residual=True), Form(norm_before_fc=True), Form(fc_norm=True)])
@pytest.mark.parametrize("k", [1, 3, 6])
def test_right_wiring_lights_every_lamp(form, k):
    pair = Pair(Shape(), form)
    assert set(accept_lengths(pair, replace(pair.wiring, k=k)).values()) == {k + 1.0}
    missing = replace(pair.wiring, k=k, norm_before_residual=False, norm_before_fc=False)
    if form != Form() and k > 1:
        assert set(accept_lengths(pair, missing).values()) != {k + 1.0}


@pytest.mark.parametrize("layers, aux", [(8, (2, 4, 5)), (8, (2, 3, 4)), (12, (1, 2, 11)), (61, (2, 30, 58)), (61, (58, 59, 60))])
def test_lamps_never_share_a_reading(layers, aux):
    lamps = place(Shape("llama", layers, aux))
    for slot in range(3):
        for lamp in lamps:
            mine = set().union(*(readings(lamp, t, slot) for t in lamp.tokens))
            others = {t for other in lamps if other is not lamp for t in other.tokens} | {r for other in lamps if other is not lamp for t in other.tokens for r in readings(other, t, slot)}
            assert not mine & others, (lamp, slot)
    tokens = draft_tokens(lamps)
    offsets = tokens - torch.arange(DRAFT_VOCAB)
    assert (tokens.diff() > 0).all() and (offsets == 0).sum() == 2 and (tokens + torch.arange(DRAFT_VOCAB)).max() < VOCAB


@pytest.mark.parametrize("shape", [("gpt", 8, (2, 4, 5)), ("llama", 8, (2, 4, 8)), ("llama", 8, (2, 2, 5)), ("llama", 8, (2, 5)), ("llama", 119, (2, 4, 5))])
def test_impossible_shapes_are_refused(shape):
    with pytest.raises(KimiSpecError):
        Shape(*shape)


@pytest.fixture(scope="module")
def pair():
    return pair_for(load_rig("nano-sglang"))


def served(pair, *marks):
    "What an engine is given, with the marks of some faults."
    with prepared(load_rig("nano-sglang")) as (_, _, found):
        for fault in marks:
            fault.mark(found)
        return found


@pytest.mark.parametrize("fault", [f for f in FAULTS if f.mark], ids=lambda f: f.name)
def test_every_fault_is_named_by_each_of_its_effects(fault, pair):
    found = served(pair, fault)
    for lamps in predicted(pair, fault, 3):
        best = rank(pair, 3, {name: length or 1.0 for name, length in lamps.items()}, found)[0]
        assert (best.name, best.share) == (fault.name, 1.0)
        assert best.why or fault.name == "aux-order"


def test_effects_differ_where_they_can(pair):
    "Faults that do different things light different lamps, whatever the evidence says."
    first = {f.name: predicted(pair, f, 3)[0] for f in FAULTS if f.mark and f.name not in ("no-head", "unknown-keys", "fc-norm")}
    for a in first:
        for b in first:
            both = [name for name in first[a] if None not in (first[a][name], first[b][name])]
            assert a == b or any(first[a][name] != first[b][name] for name in both), (a, b)


def test_evidence_never_overrules_the_lamps(pair):
    "The mark of one fault, the effect of another: the effect gets the name."
    low = predicted(pair, fault_named("aux-minus-one"), 3)[0]
    ranking = rank(pair, 3, low, served(pair, fault_named("eagle-flag")))
    assert ranking[0].name == "aux-minus-one" and not ranking[0].why


def test_a_pattern_nobody_knows_is_called_unknown(pair):
    odd = {lamp.name: 1.0 + (i % 3) for i, lamp in enumerate(pair.lamps)}
    verdict = Verdict("r", "sglang 0.5.10", 3, odd, rank(pair, 3, odd, served(pair)))
    assert verdict.named == "unknown" and "none of the known faults fits" in lines(verdict)[0]


def test_wrong_text_is_the_targets_fault_not_the_drafters(pair):
    lit = {lamp.name: 4.0 for lamp in pair.lamps}
    verdict = Verdict("r", "vllm 0.32.0", 3, lit, text_right=False)
    assert not verdict.right and "target's own text is wrong" in lines(verdict)[0]
    assert Verdict("r", "vllm 0.32.0", 3, lit).right and not Verdict("r", "vllm 0.32.0", 4, lit).right


def test_open_lamps_count_for_nothing():
    assert agreement({"a": 4.0, "b": 1.0}, {"a": 4.0, "b": None}) == (1.0, 1)
    assert agreement({"a": 4.0, "b": 1.0}, {"a": 4.0, "b": 4.0}) == (0.5, 2)


def test_a_mark_is_a_fault_only_where_the_release_falls_for_it():
    old, new, vllm = load_rig("nano-sglang"), load_rig("nano-sglang-0.5.12"), load_rig("nano-vllm")
    falls = {name: [is_fault_here(fault_named(name), rig) for rig in (old, new, vllm)] for name in ("layers0-keys", "fc-norm", "norm-before-residual", "embed", "no-fc")}
    assert falls == {"layers0-keys": [True, False, False], "fc-norm": [False, True, True], "norm-before-residual": [False, False, True], "embed": [False, False, True], "no-fc": [True, True, True]}


def test_a_marked_copy_is_gone_afterwards_and_the_pair_is_untouched():
    rig = load_rig("nano-vllm")
    with prepared(rig, fault_named("no-fc")) as (pair, placed, found):
        from kimi_spec.core.paths import root
        folder = root() / placed.drafter.path
        assert "fc.weight" not in given(placed, [], pair.form).tensors and any(placed.drafter.path in arg for arg in found.argv)
    assert not folder.exists()
    with prepared(rig) as (_, placed, found):
        assert "fc.weight" in given(placed, [], Form()).tensors


def test_a_drafter_served_as_saved_keeps_its_ids(pair):
    "Nobody translates, so SGLang 0.5.10 reads every layer one too high; the probe knows what would be right."
    rig = load_rig("nano-sglang-custom")
    with prepared(rig) as (_, _, found):
        assert found.ids() == [2, 4, 5] and found.right_ids() == [1, 3, 4]
        assert any(name.startswith("layers.0.") for name in found.tensors)
        assert [f.name for f in FAULTS if f.seen(found)][:1] == ["aux-plus-one"]
        noise = {lamp.name: 1.0 for lamp in pair.lamps}
        assert [fit.name for fit in rank(pair, 3, noise, found)][:2] == ["keys-and-ids", "layers0-keys"]  # both marks are there, so the fault that explains both comes first


def test_a_refusal_is_named_by_its_error_and_its_mark():
    rig, fault = load_rig("nano-vllm"), fault_named("eagle-flag")
    own, port = "ValidationError: Model architectures ['EagleLlamaForCausalLMEagle3'] are not supported", "ValueError: SGLANG_GRPC_PORT (68167) must be between 1 and 65535"
    with prepared(rig, fault) as (pair, _, found):
        verdict = judge(pair, rig, fault, found, crash=own)
        other = judge(pair, rig, fault, found, crash=port)
        stranger = judge(pair, rig, None, replace(found, argv=[]), crash=own)
    assert verdict.named == "eagle-flag" and named_right(verdict)
    said = "\n".join(lines(verdict))
    assert "refuses the pair; eagle-flag" in said and own in said and '"method": "eagle"' in said
    assert other.named == "unknown" and not named_right(other) and "a mark of eagle-flag is there" in "\n".join(lines(other))
    assert stranger.named == "unknown" and lines(stranger)[0].endswith("the engine refuses the pair")


def test_a_record_is_judged_again_as_it_was(pair):
    rig, fault = load_rig("nano-sglang"), fault_named("aux-plus-one")
    with prepared(rig, fault) as (same, _, found):
        verdict = judge(same, rig, fault, found, lamps=predicted(pair, fault, 3)[0])
    again = judged(json.loads(json.dumps(record(verdict))))
    assert again.named == "aux-plus-one" and again.ranking == verdict.ranking and again.lamps == verdict.lamps


def test_the_pair_lacks_what_the_real_drafter_lacks(tmp_path):
    rig = load_rig("nano-sglang")
    with prepared(rig) as (pair, _, found):
        kept = {name: t for name, t in found.tensors.items() if not name.startswith("fc.")}
        save_checkpoint(tmp_path, found.right | {"norm_before_fc": True}, {f"model.{name.replace('midlayer.', 'layers.0.')}": t for name, t in kept.items()})
    form = pair_for(changed(rig, drafter={"path": str(tmp_path)}, target={"vocab": VOCAB})).form
    assert form == Form(norm_before_fc=True, absent=("fc.",)) and pair.form == Form()
    assert not any(name.startswith("fc.") for name in as_trained(pair.tensors, form)) and "midlayer.mlp.up_proj.weight" in as_trained(pair.tensors, form)
    save_checkpoint(tmp_path, found.right, {"fc.weight": torch.zeros(1), "norm.weight": torch.zeros(1), "layers.0.x": torch.zeros(1)})
    assert pair_for(changed(rig, drafter={"path": str(tmp_path)}, target={"vocab": VOCAB})).form.absent == ("lm_head.", "d2t")
    assert pair_for(changed(rig, drafter={"path": str(tmp_path)}, target={"vocab": DRAFT_VOCAB})).form.absent == ()


def test_rigs_that_cannot_be_probed():
    with pytest.raises(KimiSpecError, match="no drafter"):
        pair_for(load_rig("nano-vllm-base"))
    with pytest.raises(KimiSpecError, match="2 nodes"):
        pair_for(changed(load_rig("nano-vllm"), launch={"nodes": 2}))
    with pytest.raises(KimiSpecError, match="eagle-flag"):
        fault_named("eagle")
    with pytest.raises(KimiSpecError, match="no analytic target"):
        pair_for(changed(load_rig("nano-vllm"), target={"model_type": "qwen"}))


@pytest.mark.parametrize("part, fields, says", [
    ("hardware", {"count": 1000, "accelerator": "gpu"}, "needs 1000 GPUs"),
    ("engine", {"release": "0.0.1"}, "0.0.1"),
])
def test_a_machine_that_cannot_run_the_rig_is_no_wrong_wiring(part, fields, says, monkeypatch):
    "Nothing is written or started for it, and it is no verdict."
    monkeypatch.setattr(room, "Server", None)
    monkeypatch.setattr(room, "prepared", None)
    with pytest.raises(KimiSpecError, match=says):
        probe(changed(load_rig("nano-vllm"), **{part: fields}), say=lambda line: None)


def test_a_misspelt_flag_is_no_refused_pair(monkeypatch):
    "The parser's answer is asked for the pair without a fault, so that it is asked once."
    asked = []

    def arguments(rig, node_rank):
        asked.append(rig)
        raise KimiSpecError("unrecognized arguments: --enforce-eagr")
    monkeypatch.setattr("kimi_spec.engines.preflight.arguments_are_right", arguments)
    monkeypatch.setattr(room, "Server", None)
    for fault in (None, "no-fc"):
        with pytest.raises(KimiSpecError, match="enforce-eagr"): probe("nano-vllm", fault, say=lambda line: None)
    assert asked[0] == asked[1] and asked[0].target.name == "analytic-target" and "marked" not in asked[0].drafter.path


def test_a_dry_run_says_that_the_marked_copy_is_gone():
    said = dry_run("nano-vllm", "no-fc")
    marked = next(word for word in said.replace('"', " ").replace(",", " ").split() if "/marked-" in word)
    assert f"note: {marked} is a temporary copy with the mark of no-fc" in said and "marked" not in dry_run("nano-vllm")


@pytest.mark.parametrize("rig, fault", [("nano-vllm", "d2t-zero"), ("nano-sglang", "eagle-flag")])
def test_a_real_engine_with_one_fault(rig, fault):
    verdict = probe(rig, fault, say=lambda line: None)
    assert verdict.named == fault and named_right(verdict) and verdict.ranking[0].why
    assert verdict.text_right and verdict.accept_length < 1.6 and lines(verdict)[0].startswith(f"{rig} ({verdict.engine}): {fault}")
