"What the notebook on engine behaviour can't hold: real wheels, shapes that must stay unknown, and a table that somebody changed by hand."
import json
import socket

import pytest

from kimi_spec.core.errors import KimiSpecError
from kimi_spec.patching import behaviour as b
from kimi_spec.patching.patches import UNKNOWN, UnknownShape
from kimi_spec.patching.sources import SourceUnavailable

SAMPLE = [("sglang", r) for r in ("0.4.3.post3", "0.5.5", "0.5.5.post3", "0.5.6", "0.5.10", "0.5.11", "0.5.12", "0.5.13")] + [("vllm", r) for r in ("0.17.1", "0.18.0", "0.21.0", "0.22.0", "0.28.0", "0.29.0")]


# The kept table

@pytest.mark.parametrize("engine, release", SAMPLE)
def test_kept_row_is_what_the_wheel_gives(engine, release):
    try:
        fresh = b.derive(engine, release)
    except SourceUnavailable as e:
        pytest.skip(f"no released wheel to read: {str(e).splitlines()[0]}")
    assert b.behaviour(engine, release) == fresh


@pytest.mark.parametrize("engine, release, fact, value", [
    ("sglang", "0.5.5.post2", "accept_rate", "len/(num_steps+1)"), ("sglang", "0.5.10", "accept_rate", "len/num_draft_tokens"), ("sglang", "0.5.11", "accept_rate", "accepted/drafted"),
    ("sglang", "0.5.12", "aux_ids", "+1"), ("sglang", "0.5.13", "aux_ids", "+1 if the first is 1"), ("sglang", "0.5.23", "aux_ids_llama", "+1"),
    ("sglang", "0.4.3.post2", "max_running", "none"), ("sglang", "0.4.4", "max_running", 32), ("sglang", "0.5.23", "max_running", 48), ("sglang", "0.5.3", "max_running_said", "silent"),
    ("sglang", "0.5.11", "layer_names", ["midlayer.", "model.midlayer."]), ("sglang", "0.5.12", "unknown_names", "dropped silently"), ("sglang", "0.5.9", "kimi_eagle3", "no"),
    ("sglang", "0.5.23", "aux_flag", "EAGLE3 only"), ("vllm", "0.21.0", "nested_ids", "ignored"), ("vllm", "0.22.0", "nested_ids", "read"), ("vllm", "0.29.0", "nested_ids", "ignored"),
    ("vllm", "0.17.1", "whitelist", "without DeepSeek and Kimi"), ("vllm", "0.19.1", "cpu_speculation", "refused"), ("vllm", "0.24.0", "mla_unknown_names", "dropped silently")])
def test_turning_points(engine, release, fact, value):
    reading = b.behaviour(engine, release)[fact]
    assert reading.value == value
    assert len(reading.sha256) == 64 and reading.wheel.startswith(f"{engine}-{release}-")


def test_every_release_has_every_fact_and_none_is_of_an_unknown_shape():
    table = b.kept_table()
    for engine, release in table.releases:
        readings = b.looked_up(table, engine, release)
        assert list(readings) == list(b.FACTS[engine])
        assert [name for name, r in readings.items() if r.value == UNKNOWN] == []


def test_lookup_needs_no_network(monkeypatch):
    def refuse(*_, **__): raise AssertionError("no socket for a lookup")
    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert b.behaviour("sglang", "0.5.9")["aux_ids"].value == "+1"


@pytest.mark.parametrize("release, near", [("0.5.99", "0.5.23"), ("0.5.10rc0", "0.5.9"), ("0.1", "0.4.2"), ("0.5.9+cpu", "0.5.9")])
def test_release_that_was_not_read_is_unknown_and_borrows_nothing(release, near):
    readings = b.behaviour("sglang", release)
    assert {r.value for r in readings.values()} == {b.UNREAD}
    assert all(near in r.note and not r.sha256 for r in readings.values())


def test_other_ways_to_write_a_release():
    assert b.behaviour("sglang", "v0.5.5-post3") == b.behaviour("sglang", "0.5.5.post3")


@pytest.mark.parametrize("engine, release, says", [("sglan", "0.5.9", "Nearest: 'sglang'"), ("sglang", "latest", "not a release"), ("sglang", "", "not a release")])
def test_lookup_of_nonsense(engine, release, says):
    with pytest.raises(KimiSpecError, match=says): b.behaviour(engine, release)


# A table that somebody changed

def rows(): return [json.loads(line) for line in (b.data_dir() / b.TABLE).read_text(encoding="utf-8").splitlines()]


def kept(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return b.read_table(path)


def test_table_survives_writing_and_reading(tmp_path):
    table = b.kept_table()
    b.write_table(table, tmp_path / "t.jsonl")
    assert b.read_table(tmp_path / "t.jsonl") == table
    assert (tmp_path / "t.jsonl").read_bytes() == (b.data_dir() / b.TABLE).read_bytes()


@pytest.mark.parametrize("what", ["value", "place", "sha256"])
def test_comparison_finds_a_forged_row(tmp_path, what):
    forged = rows()
    run = next(r for r in forged if r.get("fact") == "aux_ids" and r["last"] == "0.5.23")
    if what == "sha256": next(r for r in forged if r.get("release") == "0.5.20")["files"][run["member"]] = "0" * 64
    else: run[what] = "as written"
    differences = b.compare(kept(tmp_path / "t.jsonl", forged), b.kept_table())
    assert differences and all("sglang 0.5." in d and f"{what} kept" in d for d in differences)
    assert any(" aux_ids: " in d for d in differences)


def test_forged_run_is_found_against_the_wheel(tmp_path):
    forged = rows()
    next(r for r in forged if r.get("fact") == "accept_rate" and r["first"] == "0.5.10")["value"] = "accepted/drafted"
    try:
        fresh = b.derive_all([("sglang", "0.5.10")])
    except SourceUnavailable as e:
        pytest.skip(f"no released wheel to read: {str(e).splitlines()[0]}")
    assert b.compare(kept(tmp_path / "t.jsonl", forged), fresh) == ["sglang 0.5.10 accept_rate: value kept 'accepted/drafted', derived 'len/num_draft_tokens'"]


@pytest.mark.parametrize("change, says", [
    (lambda r: [x for x in r if x.get("fact") != "d2t"], "covers 0 releases"), (lambda r: r + [r[-1]], "covers"), (lambda r: r + [{**r[-1], "fact": "mood"}], "nobody derives"),
    (lambda r: [{k: v for k, v in x.items() if k != "value"} for x in r], "not a row"), (lambda r: [x for x in r if x.get("fact") != "aux_ids" or x["last"] != "0.5.23"], "covers")])
def test_broken_table_is_refused(tmp_path, change, says):
    with pytest.raises(KimiSpecError, match=says): kept(tmp_path / "t.jsonl", change(rows()))


def test_missing_and_torn_tables_are_refused(tmp_path):
    with pytest.raises(KimiSpecError, match="no table"): b.read_table(tmp_path / "none.jsonl")
    (tmp_path / "torn.jsonl").write_text((b.data_dir() / b.TABLE).read_text(encoding="utf-8")[:-40], encoding="utf-8")
    with pytest.raises(KimiSpecError, match="not a row"): b.read_table(tmp_path / "torn.jsonl")


# Shapes that must stay unknown

SETTER = "class DeepseekV2ForCausalLM:\n def set_eagle3_layers_to_capture(self, layer_ids=None):\n  {}"


@pytest.mark.parametrize("body", [
    "self.model.layers_to_capture = sorted(layer_ids)", "self.model.layers_to_capture = [v + 2 for v in layer_ids]", "self.model.layers_to_capture = [v * 2 for v in layer_ids]",
    "self.model.layers_to_capture = [layer_ids[0] + 1, layer_ids[1], layer_ids[2]]", "self.model.layers_to_capture = layer_ids[:2]", "self.model.layers_to_capture = SHIFTED[layer_ids]",
    "self.layers = layer_ids", "pass", "raise ValueError(layer_ids)", "self.model.layers_to_capture = (lambda ids: ids)(layer_ids)",
    "self.model.layers_to_capture = [*layer_ids]", "exec('self.model.layers_to_capture = layer_ids')", "while layer_ids: pass"])
def test_strange_rules_for_ids_are_unknown(body):
    release = b.Release({"sglang/srt/models/deepseek_v2.py": SETTER.format(body)})
    reading = b.read("sglang", release)["aux_ids"]
    assert reading.value == UNKNOWN and reading.note


def test_a_file_that_is_not_python_is_unknown():
    assert b.read("vllm", b.Release({"vllm/config/speculative.py": "class SpeculativeConfig("}))["whitelist"].value == UNKNOWN


@pytest.mark.parametrize("text, value", [
    ("eagle3_target_supported = ['llama', 'qwen']", "without DeepSeek and Kimi"), ("aux_hidden_states_supported = ['llama', 'deepseek', 'kimi']", "with DeepSeek and Kimi"),
    ("class SpeculativeConfig: pass", "no list"), ("aux_hidden_states_supported = families()", UNKNOWN), ("def f(): raise ValueError('only supported for some')", UNKNOWN),
    ("eagle3_target_supported = ['a']\neagle3_target_supported = ['b']", UNKNOWN)])
def test_whitelists(text, value):
    assert b.read("vllm", b.Release({"vllm/config/speculative.py": text}))["whitelist"].value == value


@pytest.mark.parametrize("init, value", [("assert self.speculative_config is None, 'no'", "refused"), ("self.x = 1", "yes"), ("if self.speculative_config is not None: raise ValueError", UNKNOWN),
                                         ("if self.speculative_config is None: self.plain()", UNKNOWN)])
def test_speculation_on_the_cpu(init, value):
    text = f"class CPUModelRunner:\n def __init__(self):\n  {init}"
    assert b.read("vllm", b.Release({"vllm/v1/worker/cpu_model_runner.py": text}))["cpu_speculation"].value == value


def test_nothing_walked_reaches_the_machine(tmp_path):
    for text in ("def f(): return open('x')", "def f(): return ''.__class__", "def f(): return getattr('', '__class__').__mro__", "def f():\n import os\n return os.getcwd()", "def f(): return (1).real",
                 "def f(): return '{0.__class__}'.format('')"):
        with pytest.raises((UnknownShape, AttributeError)): b.walk(b.ast.parse(text).body[0], {})


# Steps of the walker

@pytest.mark.parametrize("text, result", [
    ("def f():\n for i in range(9):\n  if i == 4: break\n return i", 4), ("def f():\n out = []\n for i in range(4):\n  if i % 2: continue\n  out.append(i)\n return out", [0, 2]),
    ("def f():\n try: return {}['x']\n except KeyError: return 'caught'", "caught"), ("def f(): return None or 'right'", "right"), ("def f(): return 1 < 2 < 2", False),
    ("def f(): return (n := 3) + n", 6), ("def f(a=2, *, b=3): return a + b", UnknownShape), ("def f():\n a, b = 1, 2\n return f'{a}{b}'", "12"), ("def f():\n for i in range(2):\n  return i", 0)])
def test_steps(text, result):
    function = b.ast.parse(text).body[0]
    if result is UnknownShape:
        with pytest.raises(UnknownShape): b.walk(function, {})
    else: assert b.walk(function, {}) == result
