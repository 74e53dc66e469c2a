"""The replay against loops that share nothing with it: a naive walk, every text of a toy, a drafter with a growing cache, and what real engines counted."""
import json
from itertools import product
from math import ceil, floor, log, pi

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from kimi_spec.core.acceptance import AcceptanceError
from kimi_spec.core.errors import KimiSpecError
from kimi_spec.core.paths import data_dir
from kimi_spec.drafters.drafter import Drafter, drafter_shapes, rope
from kimi_spec.drafters.replay import Habits, Replayed, by_length, by_position, chances, chances_along, habits_of, one_pass, replay, replay_all, walk
from kimi_spec.drafters.states import extract_states, load_target

NANO = data_dir() / "nano" / "k2.5"
SERVED = data_dir() / "drafters" / "replay-against-engines.jsonl"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model():
    return load_target(NANO / "target")[0]


@pytest.fixture(scope="module")
def drafter(model):
    return Drafter(NANO / "drafter", model.get_input_embeddings().weight)


@pytest.fixture(scope="module")
def served():
    return [json.loads(line) for line in SERVED.read_text().splitlines()]


def at_zero(served, engine):
    return [r for r in served if r["engine"] == engine and not r["temperature"]]


# the walk

matrices = st.integers(1, 5).flatmap(lambda k: st.lists(st.lists(st.booleans(), min_size=k, max_size=k), min_size=1, max_size=12))


@settings(max_examples=60, deadline=None)
@given(st.lists(matrices, min_size=1, max_size=4), st.data())
def test_a_walk_is_the_loop_for_every_k(texts, data):
    k_max, longest = min(len(t[0]) for t in texts), max(len(t) for t in texts)
    first = [data.draw(st.integers(0, len(t))) for t in texts]
    kept = torch.zeros(len(texts), longest, k_max)
    for i, t in enumerate(texts): kept[i, :len(t)] = torch.tensor(t)[:, :k_max].float()
    for k in range(1, k_max + 1):
        steps, positions = walk(kept[..., :k], torch.tensor(first), torch.tensor([len(t) for t in texts]))
        for i, t in enumerate(texts):
            place, counts = first[i], []
            while place < len(t):
                n = (t[place][:k] + [False]).index(False)
                counts.append(n)
                place += n + 1
            assert steps[i] == len(counts) and positions[i].tolist() == [sum(n >= j for n in counts) for j in range(1, k + 1)]
            assert positions[i].sum() == sum(counts)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(1, 7), st.integers(0, 10**6))
def test_a_walk_with_chances_is_what_the_dice_give_on_average(k, places, seed):
    kept = torch.rand(1, places, k, generator=torch.Generator().manual_seed(seed))

    def expected(place):
        "Steps, and kept guesses by position, from a place on: every way the dice can fall."
        if place >= places: return np.zeros(k + 1)
        total, chance = np.zeros(k + 1), 1.0
        for n in range(k + 1):
            this = chance * (1 - kept[0, place, n].item() if n < k else 1)
            total += this * (np.array([1] + [1] * n + [0] * (k - n)) + expected(place + n + 1))
            if n < k: chance *= kept[0, place, n].item()
        return total

    steps, positions = walk(kept, torch.tensor([0]), torch.tensor([places]))
    assert np.allclose([steps.item(), *positions[0].tolist()], expected(0), atol=1e-6)


# the rule of sampling, on a toy whose every text can be written down

@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("kind", ["drawn", "most probable"])
def test_expected_steps_are_exact(k, kind):
    "Texts of the target, weighted by their chance, against a server that drafts, keeps and corrects: no dice on either side."
    rng, vocab, n = np.random.default_rng(k), 3, 6
    P, Q = rng.dirichlet(np.ones(vocab), vocab), rng.dirichlet(np.ones(vocab), vocab)
    if kind == "most probable": Q = np.eye(vocab)[Q.argmax(1)]

    def server(last, left):
        "Expected steps and kept guesses from a token on, until so many tokens have been said; guesses behind the end count."
        if left <= 0: return np.zeros(k + 1)
        total = np.array([1.0] + [0.0] * k)

        def guess(i, last, chance, left):
            nonlocal total
            if i == k:
                for y in range(vocab): total += chance * P[last, y] * server(y, left - 1)
                return
            for x in range(vocab):
                kept = min(P[last, x], Q[last, x])
                if kept:
                    total[i + 1] += chance * kept
                    guess(i + 1, x, chance * kept, left - 1)
            for y in range(vocab):
                total += chance * max(P[last, y] - Q[last, y], 0) * server(y, left - 1)  # refused, and corrected to y

        guess(0, last, 1.0, left)
        return total

    texts = torch.tensor(list(product(range(vocab), repeat=n + k - 1)))
    texts = torch.cat([torch.zeros(len(texts), 1, dtype=torch.long), texts], 1)
    weight = torch.tensor(P)[texts[:, :-1], texts[:, 1:]].prod(1)
    places = torch.arange(n)
    kept = torch.stack([chances(torch.tensor(P)[texts[:, places + i]], torch.tensor(Q)[texts[:, places + i]], texts[:, places + i + 1]) for i in range(k)], -1)
    steps, positions = walk(kept, torch.zeros(len(texts), dtype=torch.long), torch.full((len(texts),), n))
    assert np.allclose([(weight * steps).sum().item(), *(weight[:, None] * positions).sum(0).tolist()], server(0, n), atol=1e-6)


def test_a_chance_stays_one():
    p = torch.tensor([0.0, 1.0, 0.0])
    assert chances(p, p, torch.tensor(1)) == 1
    assert chances(p, torch.tensor([1.0, 0.0, 0.0]), torch.tensor(0)) == 0  # a token that the target can't say


# drafters of other shapes, against one that guesses place by place with a cache that grows

ROPES = {
    "plain": (dict(rope_theta=10000.0, rope_scaling=None), 10000.0, None),
    "yarn with mscale": (dict(rope_theta=50000.0, rope_scaling=dict(type="yarn", factor=64.0, original_max_position_embeddings=64, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0)), 50000.0, (64.0, 64, 1.0)),
    "yarn": (dict(rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=32)), 10000.0, (4.0, 32, 0.1 * log(4.0) + 1)),
}
SHAPES = {"as nano": dict(num_key_value_heads=4), "GQA": dict(num_attention_heads=8, head_dim=16, num_key_value_heads=2), "wide heads": dict(num_attention_heads=2, head_dim=96, num_key_value_heads=1),
          "full vocabulary": dict(num_key_value_heads=4, draft_vocab_size=None), "nothing said": dict()}


def angles(dim, base, yarn):
    "Angle of each pair from one place to the next, in radians, after Peng et al., arXiv 2309.00071, section 3."
    plain = [base ** (-2 * j / dim) for j in range(dim // 2)]
    if not yarn: return plain
    factor, length, _ = yarn
    at = lambda rotations: dim * log(length / (rotations * 2 * pi)) / (2 * log(base))
    low, high = max(floor(at(32.0)), 0), min(ceil(at(1.0)), dim - 1)
    slow = [min(max((j - low) / max(high - low, 0.001), 0), 1) for j in range(dim // 2)]
    return [f * (1 - r) + f / factor * r for f, r in zip(plain, slow)]


class Slow:
    "One place, one head, one guess at a time."
    def __init__(self, config, w, embed, base, yarn, late=0):
        self.c, self.w, self.embed, self.late = config, {n.removeprefix("midlayer."): t for n, t in w.items()}, embed, late
        self.dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        self.turns, self.grown = torch.tensor(angles(self.dim, base, yarn), dtype=torch.float64), yarn[2] if yarn else 1.0
        self.to_target = torch.arange(len(w["lm_head.weight"])) + (w["d2t"] if "d2t" in w else 0)

    def norm(self, name, x): return x / (x.pow(2).mean() + 1e-6).sqrt() * self.w[f"{name}.weight"]

    def turned(self, x, place):
        half = self.dim // 2
        z = torch.complex(x[:half].double(), x[half:].double()) * torch.exp(1j * self.turns * place) * self.grown
        return torch.cat([z.real, z.imag]).float()

    def heads(self, name, x): return (self.w[f"self_attn.{name}_proj.weight"] @ x).split(self.dim)

    def step(self, token, state, place, cache):
        x = torch.cat([self.norm("input_layernorm", self.embed[token]), self.norm("hidden_norm", state)])
        cache.append(([self.turned(h, place) for h in self.heads("k", x)], self.heads("v", x)))
        queries, seen = self.heads("q", x), []
        for i, q in enumerate(queries):
            kv, q = i * len(cache[0][0]) // len(queries), self.turned(q, place)
            p = torch.stack([q @ keys[kv] / self.dim**0.5 for keys, _ in cache]).softmax(0)
            seen.append(sum(a * values[kv] for a, (_, values) in zip(p, cache)))
        state = state + self.w["self_attn.o_proj.weight"] @ torch.cat(seen)
        x = self.norm("post_attention_layernorm", state)
        up, gate, down = (self.w[f"mlp.{n}_proj.weight"] for n in ("up", "gate", "down"))
        return state + down @ (F.silu(gate @ x) * (up @ x))

    def logits(self, aux, tokens, k, then=None):
        "From the last place: of each guess, its own guesses or the tokens given read in."
        cache, out = [], []
        for t, token in enumerate(tokens): state = self.step(token, self.w["fc.weight"] @ aux[t], t, cache)
        for i in range(k):
            out.append(self.w["lm_head.weight"] @ self.norm("norm", state))
            token = self.to_target[out[-1].argmax()] if then is None else then[i]
            if i + 1 < k: state = self.step(token, state, len(tokens) + i + self.late, cache)
        return torch.stack(out)


def write_random(folder, **changed):
    "A drafter with random weights for the nano target."
    config = dict(architectures=["LlamaForCausalLMEagle3"], hidden_size=128, intermediate_size=192, vocab_size=896, draft_vocab_size=448, num_attention_heads=4, max_position_embeddings=2048) | changed
    dice = torch.Generator().manual_seed(0)
    w = {n: 1 + 0.2 * torch.randn(s, generator=dice) if "norm" in n else 0.15 * torch.randn(s, generator=dice) for n, s in drafter_shapes(config).items()}
    if "d2t" in w: w |= dict(d2t=torch.arange(448), t2d=torch.arange(896) % 2 == 0)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(w, folder / "model.safetensors")
    return config, w


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("shape, turned", [*((s, "plain") for s in SHAPES), *(("GQA", r) for r in ROPES if r != "plain"), ("full vocabulary", "yarn")])
def test_all_places_at_once_guess_as_one_place_with_a_cache_does(shape, turned, late, model, tmp_path):
    said, base, yarn = ROPES[turned]
    config, w = write_random(tmp_path, **SHAPES[shape], **said)
    embed = model.get_input_embeddings().weight
    drafter, slow = Drafter(tmp_path, embed), Slow(config, w, embed, base, yarn, late)
    assert torch.allclose(drafter.turns.double(), slow.turns, rtol=1e-5) and drafter.grown == pytest.approx(slow.grown)
    ids = torch.randint(20, 800, (2, 33), generator=torch.Generator().manual_seed(1))
    ids[1, 14:] = 0  # padding
    aux = extract_states(model, ids, drafter.layers).aux
    fast = torch.stack(list(drafter.chain(aux[:, :28], ids[:, 1:29], 4, late=late)), -2)
    chains = drafter.guess(aux[:, :28], ids[:, 1:29], 4, late)
    for text, place in ((0, 0), (0, 1), (0, 5), (0, 27), (1, 2), (1, 12)):
        one = slow.logits(aux[text], ids[text, 1:place + 2], 4)
        assert torch.allclose(fast[text, place], one, atol=2e-4), (text, place, (fast[text, place] - one).abs().max())
        assert chains[:, text, place].tolist() == slow.to_target[one.argmax(-1)].tolist()
    fed = torch.stack(list(drafter.chain(aux[:, :28], ids[:, 1:29], 4, [ids[:, i:i + 28] for i in range(2, 5)], late)), -2)
    assert torch.allclose(fed[0, 20], slow.logits(aux[0], ids[0, 1:22], 4, ids[0, 22:]), atol=2e-4)


@pytest.mark.parametrize("drafts", ["greedy", "probabilistic"])
def test_chances_of_real_distributions(drafts, model, tmp_path):
    "p from decoding with a cache, q from the slow drafter that reads the text's own tokens."
    config, w = write_random(tmp_path, **SHAPES["GQA"])
    drafter = Drafter(tmp_path, model.get_input_embeddings().weight)
    text, k, T = torch.randint(20, 800, (18,), generator=torch.Generator().manual_seed(2)).tolist(), 3, 0.7
    aux, logits, ids = one_pass(model, [text], None, k, drawn=True)
    kept = chances_along(drafter, aux, logits, ids, k, T, drafts)[0]
    cache, p = None, []
    for token in text:
        out = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        p.append((out.logits[0, -1] / T).softmax(-1))
    slow = Slow(config, w, drafter.embed, 10000.0, None)
    for place in (0, 3, 9, 13):
        q = slow.logits(aux[0], text[1:place + 2], k, text[place + 2:])
        for i in range(k):
            x, on_text = text[place + 2 + i], p[place + 1 + i]
            if drafts == "greedy": want = float(slow.to_target[q[i].argmax()] == x)
            else:
                full = torch.zeros(896)
                full[slow.to_target] = (q[i] / T).softmax(-1)
                want = min(1.0, (full[x] / on_text[x]).item())
            assert kept[place, i].item() == pytest.approx(want, abs=1e-4), (place, i)


@pytest.mark.parametrize("changed, says", [
    (dict(fc_norm=True), "fc_norm: found True"), (dict(norm_before_residual=True), "norm_before_residual"), (dict(hidden_act="gelu"), "hidden_act: found 'gelu'"), (dict(num_hidden_layers=2), "num_hidden_layers: found 2"),
    (dict(use_sliding_window=True), "use_sliding_window"), (dict(attention_bias=True), "attention_bias"), (dict(eagle_config=dict(use_aux_hidden_state=False)), "use_aux_hidden_state: found False"),
    (dict(rope_scaling=dict(type="dynamic", factor=2.0)), "rope_type: found 'dynamic'"), (dict(rope_parameters=dict(rope_type="longrope")), "longrope")])
def test_drafters_that_compute_something_else_are_refused_by_name(changed, says, model, tmp_path):
    write_random(tmp_path, **changed)
    with pytest.raises(KimiSpecError, match=says): Drafter(tmp_path, model.get_input_embeddings().weight)


def test_angles_of_public_configs():
    "The rope lines of the K2.5 drafter and of one that says nothing."
    turns, grown = rope(dict(hidden_size=7168, num_attention_heads=64, head_dim=128, rope_theta=50000.0, max_position_embeddings=262144,
                             rope_scaling=dict(type="yarn", factor=64.0, mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=4096, beta_fast=32.0, beta_slow=1.0)))
    assert np.allclose(turns, angles(128, 50000.0, (64.0, 4096, 1.0)), rtol=1e-5) and grown == 1.0
    assert np.allclose(rope(dict(hidden_size=4096, num_attention_heads=32))[0], angles(128, 10000.0, None), rtol=1e-5)


# short prompts and padding

def test_short_prompts_decode_as_they_are_read(model, served):
    "A mask that is wrong in short prompts shows here: one batch of 1 to 30 tokens against decoding each alone, token by token from the first."
    prompt = served[0]["texts"][0][0]
    starts = [prompt[i:i + n] for n in (1, 2, 3, 4, 5, 8, 13, 21, 30) for i in (0, 3)]
    aux, logits, ids = one_pass(model, starts, [2, 4, 5], 4, past_end=True)
    for row, text in enumerate(starts):
        cache, said = None, list(text)
        for i in range(len(text) + 2):
            out = model(torch.tensor([[said[i]]]), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            assert torch.allclose(logits[row, i], out.logits[0, -1], atol=1e-4), (row, i)
            if i + 1 >= len(text): said.append(int(out.logits[0, -1].argmax()))
        assert ids[row, :len(text) + 3].tolist() == said
        assert torch.allclose(aux[row, :len(text)], extract_states(model, torch.tensor([text]), [2, 4, 5]).aux[0], atol=1e-5)


@pytest.mark.parametrize("habits", [Habits(), Habits(late=1, past_end=True)])
def test_padding_never_leaks(habits, drafter, model, served):
    texts = sorted(served[0]["texts"][:10], key=lambda t: len(t[0])) + [([7, 8, 9, 10, 11], 1), ([7, 8, 9], 3), ([7, 8, 9], 2)]
    together = replay_all(drafter, model, texts, 4, habits=habits)
    for i, text in enumerate(texts):
        alone = replay_all(drafter, model, [text], 4, habits=habits)
        for k in range(1, 5): assert (alone.steps[k][0], alone.positions[k][0].tolist()) == (together.steps[k][i], together.positions[k][i].tolist())
    assert all(together.steps[k][-2:].tolist() == [0, 0] for k in range(1, 5))  # an answer of one token, or of none, has no step


@pytest.mark.parametrize("drafts", ["greedy", "probabilistic"])
def test_padding_never_leaks_at_a_temperature(drafts, drafter, model, served):
    texts = [r for r in served if r["temperature"]][0]["texts"][:8]
    together = replay_all(drafter, model, texts, 3, 1.0, drafts)
    for i, text in enumerate(texts):
        alone = replay_all(drafter, model, [text], 3, 1.0, drafts)
        assert alone.steps[3][0] == pytest.approx(together.steps[3][i], abs=1e-4) and np.allclose(alone.positions[3][0], together.positions[3][i], atol=1e-4)


# engines

@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_greedy_steps_are_those_that_engines_counted(engine, drafter, model, served):
    "Fifty prompts and five servers of each engine, against one replay."
    runs = at_zero(served, engine)
    assert sorted(r["k"] for r in runs) == [1, 2, 3, 4, 5] and all(r["texts"] == runs[0]["texts"] for r in runs)
    assert len(runs[0]["texts"]) == 50 and set(runs[0]["finish"]) == {"stop", "length"}
    found = replay_all(drafter, model, runs[0]["texts"], habits=habits_of(engine, runs[0]["release"]))
    for r in runs:
        a = found.acceptance(r["k"])
        assert abs(a.accept_length - 1 - r["accepted"] / r["steps"]) < 0.02, r["k"]
        assert abs(a.steps - r["steps"]) <= 0.005 * r["steps"], r["k"]
    if engine == "sglang":  # and the habits make the difference
        right = 1 + next(r["accepted"] / r["steps"] for r in runs if r["k"] == 5)
        for h in (Habits(), Habits(past_end=True), Habits(late=1)):
            assert abs(replay_all(drafter, model, runs[0]["texts"], habits=h).acceptance(5).accept_length - right) > 0.02


@pytest.mark.parametrize("drafts", ["greedy", "probabilistic"])
def test_sampled_steps_are_those_that_vllm_counted(drafts, drafter, model, served):
    r = next(r for r in served if (r["engine"], r["temperature"], r["drafts"]) == ("vllm", 1.0, drafts))
    found = replay_all(drafter, model, r["texts"], 3, 1.0, drafts, habits_of("vllm", r["release"]))
    length = 1 + r["accepted"] / r["steps"]
    if drafts == "greedy": assert abs(found.steps[3].sum() - r["steps"]) <= 3 and abs(found.acceptance(3).accept_length - length) < 0.02
    else:
        row = by_length(found)[-1]
        assert row["low"] < length < row["high"] and abs(found.steps[3].sum() - r["steps"]) < 0.02 * r["steps"]
        greedy = replay_all(drafter, model, r["texts"], 3, 1.0, "greedy", habits_of("vllm", r["release"])).acceptance(3)
        assert greedy.accept_length > row["high"]  # the rule matters: these texts with the other one


@pytest.mark.parametrize("release, late", [("0.5.8", 1), ("0.5.10", 1), ("0.5.11", 1), ("0.5.12", 0)])
def test_habits_by_release(release, late):
    assert habits_of("sglang", release) == Habits(late, True)


@pytest.mark.parametrize("engine, release", [("sglang", "0.5.13"), ("sglang", "0.6.0"), ("vllm", "unknown"), ("vllm", "0.34.0"), ("vllm", "0.11.2"), ("tgi", "1.0")])
def test_habits_nobody_has_read(engine, release):
    with pytest.raises(KimiSpecError): habits_of(engine, release)


# figures

def test_all_k_at_once_are_one_k_at_a_time(drafter, model, served):
    texts = served[0]["texts"][:8]
    whole = replay_all(drafter, model, texts, 5)
    for k in range(1, 6):
        a = whole.acceptance(k)
        assert a == replay(drafter, model, texts, k) and a.engine == "replay" and a.k == k
        assert a.accept_length == pytest.approx(1 + sum(a.unconditional(i) for i in range(1, k + 1)), abs=1e-12)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(1, 20), st.integers(0, 1000))
def test_identities_and_intervals(k, texts, seed):
    rng = np.random.default_rng(seed)
    steps = rng.integers(1, 9, texts).astype(float)
    positions = np.minimum.accumulate(np.stack([rng.binomial(steps.astype(int), 0.7) for _ in range(k)], 1), 1).astype(float)
    r = Replayed({k: steps}, {k: positions}, whole=True)
    row, rows = by_length(r)[0], by_position(r, k)
    assert row["accept_length"] == pytest.approx(1 + sum(p["unconditional"] for p in rows)) and 1 <= row["low"] <= row["high"] <= k + 1
    product_so_far = 1.0
    for p in rows:
        if not p["unconditional"]: break
        product_so_far *= p["conditional"]
        assert p["unconditional"] == pytest.approx(product_so_far) and p["low"] - 1e-9 <= p["unconditional"] + 0.2 and p["low"] <= p["high"] and p["conditional_low"] <= p["conditional_high"]
    assert by_length(r) == by_length(r) and by_length(r, seed=1)[0]["accept_length"] == row["accept_length"]
    if texts == 1: assert row["low"] == pytest.approx(row["high"])


def test_a_drafter_that_is_never_right(recwarn):
    "The story's: accept length 1.00, and beyond the first position nothing is known."
    r = Replayed({3: np.full(4, 9.0)}, {3: np.zeros((4, 3))}, whole=True)
    assert [by_length(r)[0][x] for x in ("accept_length", "low", "high", "rate")] == [1.0, 1.0, 1.0, 0.0]
    first, second, _ = by_position(r, 3)
    assert first["conditional"] == first["conditional_high"] == 0 and np.isnan([second["conditional"], second["conditional_low"]]).all() and not list(recwarn)


def test_intervals_cover_what_they_claim():
    "Many small sets of texts of a known mix: about 95 in 100 intervals hold the truth, though steps of one text are alike."
    rng, held, sets = np.random.default_rng(0), 0, 200
    for i in range(sets):
        p = rng.choice([0.3, 0.9], 40)
        steps = np.full(40, 12.0)
        r = Replayed({1: steps}, {1: rng.binomial(12, p)[:, None].astype(float)}, whole=True)
        row = by_length(r, seed=i)[0]
        held += row["low"] <= 1.6 <= row["high"]
    assert 0.88 * sets < held < 0.99 * sets


def test_refusals(drafter, model):
    with pytest.raises(AcceptanceError, match="no speculative step"): replay(drafter, model, [([7, 8, 9], 2)], 3)
    with pytest.raises(KimiSpecError, match="probabilistic"): replay_all(drafter, model, [([7, 8, 9], 1)], 3, 1.0, "probable")
    with pytest.raises(KimiSpecError, match=r"texts \[1\]"): replay_all(drafter, model, [([7, 8, 9], 1), ([7, 8], 0)], 3)


def test_what_can_not_be_replayed_is_named(drafter, model):
    text = ([7, 8, 9], 1)
    for said, how in {"k is 0": dict(k=0), "temperature is -1": dict(temperature=-1.0)}.items():
        with pytest.raises(KimiSpecError, match=said): replay_all(drafter, model, [text], **how)
    for said, bad in {r"texts \[1\]: token ids from 7 to 896, the target's vocabulary is 0 to 895": ([7, 896, 9], 1), r"texts \[1\]: token ids from -1": ([7, -1, 9], 1),
                      r"texts \[1\]: expected the prompt's length, found a list": ([7, 8, 9], [0, 1, 1])}.items():
        with pytest.raises(KimiSpecError, match=said): replay_all(drafter, model, [text, bad], 3)
    assert replay_all(drafter, model, [([7, 8, 9, 10], np.int64(1))], 1).steps[1].sum() > 0
