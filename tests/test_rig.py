"Every rig that ships is right, and every slip in one is named with its place."
import json

import pytest
import yaml

from kimi_spec.core.errors import KimiSpecError
from kimi_spec.core.paths import root
from kimi_spec.core.rig import Rig, RigError, list_rigs, load_rig, rig_fields, rig_names


def edit(project, old, new, name="nano-vllm"):
    path = project / "data" / "rigs" / f"{name}.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    return name


def test_shipped_rigs_fit_together():
    rigs = {r.name: r for r in list_rigs()}
    story = {f"k25-{engine}-tp8{drafter}" for engine in ("vllm", "sglang") for drafter in ("", "-aqmedai", "-custom")}
    assert story | {"nano-vllm", "nano-vllm-base", "nano-vllm-k2", "nano-k2-vllm"} <= set(rigs)
    for r in rigs.values():
        assert r.hardware.needs_gpu == r.name.startswith("k25")
        assert bool(r.drafter) == bool(r.baseline)
        if r.baseline:
            plain = rigs[r.baseline]
            assert (plain.target, plain.engine, plain.hardware, plain.launch, plain.bench) == (r.target, r.engine, r.hardware, r.launch, r.bench) and not plain.drafter


def test_facts_of_the_recorded_case():
    vllm, sglang = load_rig("k25-vllm-tp8-custom"), load_rig("k25-sglang-tp8-custom")
    assert (vllm.drafter.k, sglang.drafter.k) == (5, 3) and vllm.drafter.aux_layer_ids == [2, 30, 58]
    assert vllm.engine.release == sglang.engine.release == "unknown" and "release" in vllm.source


def test_every_field_is_explained():
    rows = rig_fields()
    assert all(r["meaning"] for r in rows)
    def keys(data, prefix=""):
        for k, v in data.items():
            yield prefix + k
            if isinstance(v, dict) and prefix + k != "launch.env": yield from keys(v, prefix + k + ".")
    assert set(keys(load_rig("nano-vllm").model_dump())) == {r["key"] for r in rows}


@pytest.mark.parametrize("old, new, says", [
    ("aux_layer_ids: [2, 4, 5]", "aux_layers: [2, 4, 5]", r"data/rigs/nano-vllm\.yaml: drafter\.aux_layers: no such key \(found \[2, 4, 5\]\); nearest valid key: aux_layer_ids"),
    ("bench:", "bnech:", "bnech: no such key .*nearest valid key: bench"),
    ("k: 3", "k: three", r"drafter\.k: should be a whole number \(found 'three'\)"),
    ("k: 3", "k: 0", r"drafter\.k: should be greater than or equal to 1"),
    ("k: 3", "k: true", r"drafter\.k: should be a whole number"),
    ('"0.32.0"', "0.32", r"engine\.release: should be text, in quotes where it looks like a number \(found 0\.32\)"),
    ("OMP_NUM_THREADS: \"1\"", "OMP_NUM_THREADS: 1", r"launch\.env\.OMP_NUM_THREADS: should be text"),
    ("layout: sglang", "layout: sglang\n  as_saved: 1", r"drafter\.as_saved: should be true or false \(found 1\)"),
    ("  extra_args: [--enforce-eager]", "  extra_args: --enforce-eager", r"launch\.extra_args: should be a list \(found '--enforce-eager'\)"),
    ("requests_per_level: 12", "requests_per_level: 3", r"bench\.requests_per_level: 3 can't keep 4 in flight \(bench\.concurrency\); send at least 4"),
    ("baseline: nano-vllm-base", "baseline: nano-vllm", r"baseline: nano-vllm can't be its own"),
    ("[nano-vllm-k2]", "[nano-vllm]", r"siblings: nano-vllm can't be its own"),
    ("executor: uni", "executor: uni\n  nodes: 2", r"launch\.nodes: 1 ranks .launch\.tensor_parallel. can't be shared evenly by 2 nodes"),
    ("executor: uni", "executor: uni\n  nodes: 2\n  tensor_parallel: 2", r"launch\.dist_address: missing; 2 nodes need a host:port"),
    ("executor: uni", "executor: uni\n  nodes: 2\n  tensor_parallel: 2", r"launch\.executor: should be mp or ray for 2 nodes \(found 'uni'\)"),
    ("executor: uni", "executor: mp\n  nodes: 2\n  tensor_parallel: 2\n  dist_address: node0", r"launch\.dist_address: should be host:port, as '10\.0\.0\.1:20000' \(found 'node0'\)"),
    ("executor: uni", "executor: uni\n  dist_address: node0:20000", r"launch\.dist_address: 'node0:20000' is where several nodes meet; launch\.nodes is 1"),
    ("executor: uni", "executor: gloo", r"launch\.executor: should be 'mp', 'ray' or 'uni'"),
    ("accelerator: cpu\n  name: CPU\nlaunch:\n", "accelerator: gpu\n  name: GPU\nlaunch:\n  tensor_parallel: 2\n", r"launch\.tensor_parallel: 2 ranks need as many GPUs; hardware\.count is 1"),
    ("path: data/nano/k2.5/target", "path: data/nano/k2/target", r"baseline: nano-vllm-base has another target\.path: 'data/nano/k2\.5/target', here it is 'data/nano/k2/target'"),
    ('release: "0.32.0"', 'release: "0.31.0"', r"baseline: nano-vllm-base has another engine\.release: '0\.32\.0', here it is '0\.31\.0'"),
    ("[2, 4, 5]", "[2, 4, 9]", r"aux_layer_ids: \[2, 4, 9\] go beyond the target's 8 layers"),
    ("name: vllm\n", "name: vlm\n", r"engine\.name: should be 'vllm' or 'sglang'"),
    ("  max_tokens: 64\n", "", r"bench\.max_tokens: missing; it is the longest answer"),
    ("concurrency: [1, 4]", "concurrency: []", r"bench\.concurrency"),
    ("k: 3", "k: [3", r"nano-vllm\.yaml:15: "),
    ("k: 3", "k: 3\n  k: 5", r"nano-vllm\.yaml:15: key 'k' stands here a second time"),
    ("name: nano-vllm\n", "name: other\n", "name: should be 'nano-vllm'"),
    ("baseline: nano-vllm-base", "baseline: nano-vllm-bass", "baseline: unknown rig 'nano-vllm-bass'. Nearest: 'nano-vllm-base'"),
    ("[nano-vllm-k2]", "[../nano-vllm-k2]", "siblings: unknown rig"),
])
def test_slips(project, old, new, says):
    with pytest.raises(RigError, match=says) as e: load_rig(edit(project, old, new))
    assert not [jargon for jargon in ("valid", "Input", "instance", "validation", "string", "pydantic") if jargon in str(e.value).replace("nearest valid key", "")]


def test_executor_is_for_vllm(project):
    with pytest.raises(RigError, match="launch.executor: is for vllm; the engine here is sglang"): load_rig(edit(project, "tensor_parallel: 8", "tensor_parallel: 8\n  executor: mp", "k25-sglang-tp8"))


@pytest.mark.parametrize("content", [b"", b"- 1", b"\xff\xfe\x00", b"a: &a [*a]", b"!!python/object/apply:os.system [ls]", b"? {a: 1}\n: 2", b"name: \x00"])
def test_anything_else_is_one_message(project, content):
    (project / "data" / "rigs" / "nano-vllm.yaml").write_bytes(content)
    with pytest.raises(RigError, match="nano-vllm.yaml"): load_rig("nano-vllm")


def test_all_faults_at_once(project):
    edit(project, "k: 3", "k: three")
    with pytest.raises(RigError) as e: load_rig(edit(project, "warmup", "warm_up"))
    assert len(str(e.value).splitlines()) == 2


@pytest.mark.parametrize("name", ["nano-vlm", "", "../nano-vllm", "nano-vllm.yaml", "/etc/passwd"])
def test_unknown_rig_lists_the_known(name):
    with pytest.raises(KimiSpecError, match="unknown rig .*Known: k25-sglang-tp8"): load_rig(name)


def test_what_is_shown_can_be_read_again():
    for name in rig_names():
        rig = load_rig(name)
        assert Rig.model_validate(yaml.safe_load(yaml.safe_dump(rig.model_dump()))) == rig


@pytest.mark.parametrize("name", [n for n in rig_names() if n.startswith("nano")])
def test_nano_rigs_say_what_their_checkpoints_say(name):
    rig = load_rig(name)
    target = root() / rig.target.path / "config.json"
    config = json.loads(target.read_text())
    assert (rig.target.layers, rig.target.hidden, rig.target.vocab, rig.target.model_type) == tuple(config[k] for k in ("num_hidden_layers", "hidden_size", "vocab_size", "model_type"))
    if rig.drafter:
        config = json.loads((root() / rig.drafter.path / "config.json").read_text())
        assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == rig.drafter.aux_layer_ids
