"What the patching notebooks can't hold: an index and wheels over real HTTP, files in other styles, and the real release when there is a network."
import base64
import hashlib
import http.server
import io
import json
import os
import random
import re
import threading
import zipfile

import pytest

from kimi_spec.core.errors import KimiSpecError
from kimi_spec.patching import sources as src
from kimi_spec.patching.kimi_eagle3 import KIMI_TYPES, PATCHES, rehearse_image_token, rehearse_states, rehearse_whitelist
from kimi_spec.patching.patches import APPLIED, NATIVE, NEEDED, UNKNOWN, compiles, diff, patched, status

DEMO = b"x = 1  # \xc3\xa9\r\n"
WHEEL = "demo-1.0-py3-none-any.whl"


# An index with one wheel, on a free port

def make_wheel(record_of=None):
    "A wheel of 6 MB that can't be compressed, with two small sources; `record_of` falsifies what RECORD says."
    files = {"demo/a.py": DEMO, "demo/sub/b.py": b"y = 2\n" * 500, "demo/weights.bin": random.Random(0).randbytes(6_000_000), "../evil.py": b"z = 3\n"}
    def line(name, data): return f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip('=')},{len(data)}\n"
    record = "".join(line(n, (record_of or {}).get(n, d)) for n, d in files.items()) + "demo-1.0.dist-info/RECORD,,\n"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as z:
        for name, data in {**files, "demo-1.0.dist-info/RECORD": record.encode()}.items(): z.writestr(name, data)
    return buffer.getvalue()


class Index(http.server.ThreadingHTTPServer):
    def __init__(self, wheel, ranges=True, form="json", name=WHEEL):
        super().__init__(("127.0.0.1", 0), Handler)
        self.wheel, self.ranges, self.form, self.name, self.sent, self.requests = wheel, ranges, form, name, 0, []

    @property
    def url(self): return f"http://127.0.0.1:{self.server_port}/simple"


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_): pass

    def do_HEAD(self): self.do_GET()

    def do_GET(self):
        index = self.server
        index.requests.append(f"{self.command} {self.path} {self.headers.get('Range', '')}".strip())
        if self.path == "/simple/demo/": return self.answer(200, self.page())
        if self.path != f"/files/{index.name}": return self.answer(404, b"")
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not (asked and index.ranges): return self.answer(200, index.wheel)
        start, end = int(asked[1]), min(int(asked[2]) + 1, len(index.wheel))
        self.answer(206, index.wheel[start:end], {"Content-Range": f"bytes {start}-{end - 1}/{len(index.wheel)}"})

    def page(self):
        index, digest = self.server, hashlib.sha256(self.server.wheel).hexdigest()
        if index.form == "html": return f'<a href="../../files/{index.name}#sha256={digest}">{index.name}</a>'.encode()
        return json.dumps({"files": [{"filename": index.name, "url": f"../../files/{index.name}", "hashes": {"sha256": digest}, "size": len(index.wheel)}]}).encode()

    def answer(self, code, body, headers={}):
        self.send_response(code)
        for key, value in {"Content-Length": len(body), **headers}.items(): self.send_header(key, str(value))
        self.end_headers()
        if self.command == "HEAD": return
        try:
            self.wfile.write(body)
            self.server.sent += len(body)
        except ConnectionError: pass


@pytest.fixture
def home(tmp_path, monkeypatch):
    "A project folder of its own, so that no test sees or fills the real cache."
    (tmp_path / "settings.ini").touch()
    monkeypatch.setenv("KIMI_SPEC_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "PIP_NO_INDEX", "PIP_EXTRA_INDEX_URL"): monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def serve(home, monkeypatch):
    running = []
    def start(*args, **kwargs):
        index = Index(*args, **kwargs)
        threading.Thread(target=index.serve_forever, daemon=True).start()
        running.append(index)
        monkeypatch.setenv("PIP_INDEX_URL", index.url)
        return index
    yield start
    for index in running:
        index.shutdown()
        index.server_close()


@pytest.mark.parametrize("form", ["json", "html"])
def test_a_member_costs_a_tenth_of_the_wheel(serve, home, form):
    index = serve(make_wheel(), form=form)
    a = src.source("demo", "1.0", "demo/a.py")
    assert (a.text.encode(), a.sha256, a.wheel) == (DEMO, hashlib.sha256(DEMO).hexdigest(), WHEEL)
    assert index.sent < len(index.wheel) / 10 and len(index.requests) <= 6
    assert {p.relative_to(home / "data/cache/demo/1.0").as_posix() for p in (home / "data/cache").rglob("*") if p.is_file()} == {".tail", ".wheel.json", "demo/a.py", "demo-1.0.dist-info/RECORD"}


def test_the_directory_and_the_files_are_read_once(serve):
    index = serve(make_wheel())
    src.source("demo", "1.0", "demo/a.py")
    before = len(index.requests)
    src.source("demo", "1.0", "demo/a.py"), src.members("demo", "1.0")
    assert len(index.requests) == before
    src.source("demo", "1.0", "demo/sub/b.py")
    assert len(index.requests) - before <= 1  # neither the index nor the directory again


def test_no_range_support_is_said_and_the_wheel_not_downloaded(serve, home):
    index = serve(make_wheel(), ranges=False)
    with pytest.raises(src.SourceUnavailable, match="range requests") as e: src.source("demo", "1.0", "demo/a.py")
    assert "unzip demo-1.0-*.whl" in str(e.value)
    assert index.sent < 3_000_000 and not (home / "data/cache/demo/1.0/demo/a.py").exists()


def test_a_false_hash_is_refused_and_nothing_kept(serve, home):
    serve(make_wheel(record_of={"demo/a.py": b"other"}))
    with pytest.raises(src.SourceUnavailable, match="not the file that the wheel's RECORD names"): src.source("demo", "1.0", "demo/a.py")
    assert not (home / "data/cache/demo/1.0/demo/a.py").exists()
    assert src.source("demo", "1.0", "demo/sub/b.py").text.startswith("y = 2")


def test_an_edited_cache_is_noticed(serve, home):
    serve(make_wheel())
    src.source("demo", "1.0", "demo/a.py")
    (home / "data/cache/demo/1.0/demo/a.py").write_text("x = 2\n")
    with pytest.raises(src.SourceUnavailable, match="data/cache/demo/1.0/demo/a.py is not the file"): src.source("demo", "1.0", "demo/a.py")


@pytest.mark.parametrize("name", ["../evil.py", "/etc/passwd", "demo/../../evil.py", "demo\\a.py", "C:/a.py", "", "demo/"])
def test_unsafe_names_are_refused(serve, home, name):
    index = serve(make_wheel())
    with pytest.raises(src.SourceUnavailable, match="not the name of a file"): src.source("demo", "1.0", name)
    assert not index.requests and not (home / "data").exists()


@pytest.mark.parametrize("what, message", [
    (("demo", "1.0", "demo/nothing.py"), "demo 1.0 has no demo/nothing.py"),
    (("demo", "2.0", "demo/a.py"), "lists no wheel of that release"),
    (("other", "1.0", "demo/a.py"), "lists no wheel of that release"),
    (("demo", "one", "demo/a.py"), "Invalid version"),
    (("../demo", "1.0", "demo/a.py"), "name is invalid"),
    (("demo", "1.0", "demo/weights.bin"), "not text")])
def test_what_is_not_there(serve, what, message):
    serve(make_wheel())
    with pytest.raises(src.SourceUnavailable, match=message): src.source(*what)


def test_no_fitting_wheel_lists_the_candidates(serve):
    serve(make_wheel(), name="demo-1.0-cp311-cp311-macosx_11_0_arm64.whl")
    with pytest.raises(src.SourceUnavailable, match="among: demo-1.0-cp311-cp311-macosx_11_0_arm64.whl"): src.source("demo", "1.0", "demo/a.py")


def test_a_truncated_wheel_is_no_wheel(serve):
    serve(make_wheel()[:-100])
    with pytest.raises(src.SourceUnavailable, match="not a zip file"): src.source("demo", "1.0", "demo/a.py")


def test_offline_is_one_message_without_the_password(home, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://me:secret@127.0.0.1:9/simple")
    with pytest.raises(KimiSpecError) as e: src.source("vllm", "0.15.1", "vllm/config/speculative.py")
    message = str(e.value)
    assert "secret" not in message and "can't read vllm/config/speculative.py of vllm 0.15.1" in message
    with pytest.raises(KimiSpecError, match=r"unzip vllm-0.15.1-\*.whl '\*.py'"): src.members("vllm", "0.15.1")
    assert "unzip vllm-0.15.1-*.whl 'vllm/config/speculative.py' 'vllm-0.15.1.dist-info/RECORD' -d data/cache/vllm/0.15.1" in message


# The shapes of 0.16.0 to 0.17.1, written small; those of 0.15 are in the notebook

WHITELIST_017 = '''
class SpeculativeConfig:
    def check(self):
        aux_hidden_states_supported = [
            "llama",
            "qwen",  # and its kin
        ]
        if self.method in ("eagle3", "extract") and not any(
            s in self.target_model_config.hf_text_config.model_type for s in aux_hidden_states_supported
        ):
            raise ValueError(f"{self.method} is only supported for {aux_hidden_states_supported}")
'''
DEEPSEEK_017 = '''
import typing

from .interfaces import MixtureOfExperts, SupportsEagle, SupportsLoRA, SupportsPP


class DeepseekV2Model(nn.Module):
    def __init__(self, *, vllm_config, prefix=""):
        super().__init__()
        self.config = vllm_config.model_config.hf_config
        self.embed_tokens = VocabParallelEmbedding(self.config.vocab_size, self.config.hidden_size)
        self.start_layer, self.end_layer, self.layers = make_layers(self.config.num_hidden_layers, lambda p: DeepseekV2DecoderLayer(vllm_config, p), prefix)
        self.norm = RMSNorm(self.config.hidden_size)

    def embed_input_ids(self, input_ids):
        return self.embed_tokens(input_ids)

    def forward(self, input_ids: "torch.Tensor | None", positions, intermediate_tensors, inputs_embeds=None):
        hidden_states, residual = self.embed_input_ids(input_ids), None
        llama_4_scaling = None
        # Überall gleich: the layers, one by one
        for layer in islice(self.layers, self.start_layer, self.end_layer):
            hidden_states, residual = layer(positions, hidden_states, residual, llama_4_scaling)

        hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states


class DeepseekV2ForCausalLM(
    nn.Module, SupportsPP, DeepseekV2MixtureOfExperts, SupportsLoRA, SupportsEagle
):
    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    pass
'''
KIMI_017 = '''
from vllm.model_executor.models.interfaces import (
    SupportsMultiModal,
    SupportsPP,
    SupportsQuant,
)


@MULTIMODAL_REGISTRY.register_processor(KimiK25MultiModalProcessor, info=KimiK25ProcessingInfo)
class KimiK25ForConditionalGeneration(
    nn.Module, SupportsMultiModal, SupportsPP, SupportsQuant
):
    def __init__(self, vllm_config, prefix=""):
        super().__init__()
        with self._mark_language_model(vllm_config):
            self.language_model = init_vllm_registered_model(vllm_config=vllm_config)

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None, **kwargs):
        hidden_states = self.language_model(
            input_ids=input_ids, positions=positions, intermediate_tensors=intermediate_tensors, inputs_embeds=inputs_embeds
        )

        return hidden_states
'''
LOADER = '''
def load_model(self, target_model):
    if self.get_model_name(target_model) == "Qwen":
        self.model.config.image_token_index = target_model.config.image_token_id
    else:
        self.model.config.image_token_index = target_model.config.image_token_index
'''
MEMBERS = {edit.members[-1]: patch for patch in PATCHES for edit in patch.edits}
TEXTS = dict(zip(MEMBERS, (WHITELIST_017, LOADER, DEEPSEEK_017, KIMI_017)))
STYLES = {"as written": lambda t: t, "windows": lambda t: t.replace("\n", "\r\n"), "tabs": lambda t: t.replace("    ", "\t"), "no newline at the end": lambda t: t.rstrip("\n")}


def vllm(member, text): return src.Source("vllm", "0.17.1", member, text, "")


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("member", TEXTS)
def test_needed_then_applied_then_unchanged(member, style):
    patch, before = MEMBERS[member], vllm(member, STYLES[style](TEXTS[member]))
    assert status(patch, before) == NEEDED
    after = vllm(member, patched(patch, before))
    assert compiles(after.text, member) and status(patch, after) == APPLIED and patched(patch, after) == after.text
    assert not diff(patch, after)
    assert status(patch, vllm(member, after.text.replace(patch.mark, "# ours"))) == NATIVE
    assert ("\r\n" in after.text) == (style == "windows") and not re.search(r"(?<!\r)\n", after.text) if style == "windows" else "\r" not in after.text
    if style == "tabs": assert not re.search(r"^ +\S", after.text, re.M)


@pytest.mark.parametrize("member", TEXTS)
def test_every_other_line_stays_as_it_was(member):
    removed = [line for line in diff(MEMBERS[member], vllm(member, TEXTS[member])).splitlines() if line.startswith("-") and not line.startswith("---")]
    assert all(re.search(r"import|nn\.Module|for layer in", line) for line in removed)


@pytest.mark.parametrize("member, old, new", [
    ("vllm/config/speculative.py", '"llama"', "LLAMA"),
    ("vllm/config/speculative.py", "= [", "= sorted(["),
    ("vllm/config/speculative.py", "aux_hidden_states_supported", "families"),
    ("vllm/v1/spec_decode/eagle.py", "else:", "elif target_model:"),
    ("vllm/v1/spec_decode/eagle.py", "self.get_model_name(target_model)", "type(target_model).__name__"),
    ("vllm/model_executor/models/deepseek_v2.py", "islice(", "reversed("),
    ("vllm/model_executor/models/deepseek_v2.py", "        return hidden_states\n\n\nclass DeepseekV2For", "        return hidden_states, None\n\n\nclass DeepseekV2For"),
    ("vllm/model_executor/models/deepseek_v2.py", "class DeepseekV2Model", "class DeepSeekModel"),
    ("vllm/model_executor/models/deepseek_v2.py", "SupportsEagle\n", "SupportsEagle, SupportsEagle3\n"),
    ("vllm/model_executor/models/kimi_k25.py", "return hidden_states", "return hidden_states[0]"),
    ("vllm/model_executor/models/kimi_k25.py", "init_vllm_registered_model", "make_model"),
    ("vllm/model_executor/models/kimi_k25.py", "class Kimi", "class (Kimi")])
def test_an_unknown_shape_is_never_patched(member, old, new):
    assert old in TEXTS[member]
    other = vllm(member, TEXTS[member].replace(old, new))
    assert status(MEMBERS[member], other) == UNKNOWN
    with pytest.raises(KimiSpecError): patched(MEMBERS[member], other)


def test_what_was_patched_does_what_it_should():
    config, loader, deepseek, kimi = (patched(MEMBERS[m], vllm(m, text)) for m, text in TEXTS.items())
    assert [rehearse_whitelist(config, t) for t in KIMI_TYPES] == ["accepted"] * 4
    assert rehearse_whitelist(config, "mamba").startswith("ValueError")
    assert rehearse_image_token(LOADER, media_placeholder_token_id=5).startswith("AttributeError")
    assert rehearse_image_token(loader, media_placeholder_token_id=5) == 5
    for layers in (8, 61):
        seen = rehearse_states(deepseek, kimi, layers=layers)
        assert seen["ids"] == (2, layers // 2, layers - 3) and seen["states"] == seen["expected"] and seen["output_unchanged"] and seen["supports_eagle3"]


# The real release

def test_the_real_0_15_1():
    "Reads through the project's own cache; skipped only when neither cache nor package index can be reached."
    try:
        names = src.members("vllm", "0.15.1")
        homes = {edit.home(names): patch for patch in PATCHES for edit in patch.edits}
        real = [src.source("vllm", "0.15.1", member) for member in homes]
    except src.SourceUnavailable as e:
        pytest.skip(str(e))
    assert [status(homes[s.member], s) for s in real] == [NEEDED] * 4
    after = [vllm(s.member, patched(homes[s.member], s)) for s in real]
    assert all(compiles(s.text, s.member) for s in after) and [status(homes[s.member], s) for s in after] == [APPLIED] * 4
    config, loader, deepseek, kimi = (s.text for s in after)
    assert rehearse_whitelist(config, "kimi_k2") == "accepted" and rehearse_image_token(loader, media_placeholder_token_id=163605) == 163605
    assert rehearse_states(deepseek, kimi, layers=61)["states"] == [3, 465, 1711]
