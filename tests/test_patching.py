"What the patching notebooks can't hold: an index and wheels over real HTTP, files in other styles, and the real release when there is a network."
import hashlib
import re

import pytest
from fake_index import DEMO, WHEEL, make_wheel
from vllm_shapes import LOADER, MEMBERS, STYLES, TEXTS

from kimi_spec.core.errors import KimiSpecError
from kimi_spec.patching import sources as src
from kimi_spec.patching.kimi_eagle3 import KIMI_TYPES, PATCHES, rehearse_image_token, rehearse_states, rehearse_whitelist
from kimi_spec.patching.patches import APPLIED, NATIVE, NEEDED, UNKNOWN, compiles, diff, patched, status


@pytest.mark.parametrize("form", ["json", "html"])
def test_a_member_costs_a_tenth_of_the_wheel(serve, home, form):
    index = serve(make_wheel(), form=form)
    a = src.source("demo", "1.0", "demo/a.py")
    assert (a.text.encode(), a.sha256, a.wheel) == (DEMO, hashlib.sha256(DEMO).hexdigest(), WHEEL)
    assert index.sent < len(index.wheels[WHEEL]) / 10 and len(index.requests) <= 6
    assert {p.relative_to(home / "data/cache/demo").as_posix() for p in (home / "data/cache").rglob("*") if p.is_file()} == {
        ".wheels.json", "1.0/.tail", "1.0/.wheel.json", "1.0/demo/a.py", "1.0/demo-1.0.dist-info/RECORD"}


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


# The shapes in vllm_shapes

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
