"""The shipped models on real vLLM: the same numbers as transformers, the same text with and without drafting, and a drafter that is worth its name.

Three servers start once for the whole file, which takes about a minute on two idle cores."""
import httpx
import pytest
import torch
from processes import started

from kimi_spec.core.acceptance import Acceptance
from kimi_spec.core.paths import root
from kimi_spec.core.rig import load_rig
from kimi_spec.drafters.states import load_target
from kimi_spec.engines.bench import run_level
from kimi_spec.engines.client import compare, read_prompts, smoke
from kimi_spec.engines.metrics import scrape

BASE, OWN, OTHER = "nano-vllm-base", "nano-vllm", "nano-vllm-k2"


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    with started((BASE, OWN, OTHER), tmp_path_factory.mktemp("servers")) as running: yield running


@pytest.fixture(scope="module")
def answers(servers):
    "Greedy answers of every server to the same 24 held-out questions, and what was accepted meanwhile."
    prompts, found = read_prompts("data/nano/eval_prompts.jsonl", 24), {}
    for name, server in servers.items():
        before = scrape(server.url)
        level = run_level(server.url, server.rig.target.name, prompts, 4, 128, warmup=0)
        accepted = Acceptance.from_vllm_counters(before, scrape(server.url), "0.32.0") if server.rig.drafter else None
        found[name] = level.answers, accepted
    return found


@pytest.fixture(scope="module")
def target():
    return load_target(root() / load_rig(OWN).target.path)


def test_the_first_question(servers):
    said = smoke(servers[OWN].url, "nano-k2.5")
    assert said.content == "2 + 2 = 4"
    assert "2 plus 2" in said.reasoning and "think>" not in said.reasoning + said.content
    assert said.usage["total_tokens"] == said.usage["prompt_tokens"] + said.usage["completion_tokens"]


@pytest.mark.parametrize("name", [BASE, OWN])
def test_log_probabilities_agree_with_transformers(servers, target, name):
    "Twenty prompts of 1 to 60 tokens; every token of the prompt and eight generated ones, where the server drafts: verified ones."
    model, tok = target
    text = torch.tensor(tok.apply_chat_template(read_prompts("data/nano/eval_prompts.jsonl", 12), add_generation_prompt=True, return_dict=False)[0] * 6)
    worst = 0.0
    for n in [1, 2, 3, 4, 5, 7, 9, 12, 15, 16, 17, 21, 25, 31, 32, 33, 40, 48, 55, 60]:
        prompt = text[:n].tolist()
        body = dict(model="nano-k2.5", prompt=prompt, max_tokens=8, temperature=0, logprobs=5, prompt_logprobs=5, return_tokens_as_token_ids=True, ignore_eos=True)
        said = httpx.post(f"{servers[name].url}/v1/completions", json=body, timeout=60, trust_env=False).raise_for_status().json()["choices"][0]
        made = [int(t.removeprefix("token_id:")) for t in said["logprobs"]["tokens"]]
        with torch.no_grad(): ours = model(torch.tensor([prompt + made])).logits[0].log_softmax(-1)
        theirs = [{int(t): p["logprob"] for t, p in row.items()} for row in said["prompt_logprobs"][1:]]
        theirs += [{int(t.removeprefix("token_id:")): p for t, p in row.items()} for row in said["logprobs"]["top_logprobs"]]
        assert len(theirs) == n - 1 + 8
        worst = max(worst, *(abs(ours[i, t].item() - p) for i, row in enumerate(theirs) for t, p in row.items() if p > -20))
    print(f"{name}: largest difference {worst:.1e}")
    assert 0 < worst < 1e-3


@pytest.mark.parametrize("name", [OWN, OTHER])
def test_drafting_does_not_change_the_text(answers, name):
    rows = compare(answers[BASE][0], answers[name][0])
    assert [row for row in rows if not row["identical"]] == []
    assert {row["by"] for row in rows} == {"token ids"} and sum(row["tokens"] for row in rows) > 24 * 20


def test_the_right_drafter_is_worth_it(answers):
    accepted = answers[OWN][1]
    print(accepted)
    assert accepted.k == 3 and accepted.steps > 200 and accepted.accept_length >= 2.5


def test_the_wrong_generation_is_clearly_worse(answers):
    own, other = answers[OWN][1], answers[OTHER][1]
    print(own.accept_length, other.accept_length)
    assert other.interval()[1] < own.interval()[0] - 0.3 and other.accept_length > 1.05


def test_a_temperature_gives_sane_text(servers, target):
    "A fault of the CPU backend sampled with uninitialised temperatures as soon as a drafter was there: noise, and nothing accepted."
    body = dict(model="nano-k2.5", messages=[dict(role="user", content="What is 3+4?")], temperature=0.7, seed=1, max_tokens=64)
    said = httpx.post(f"{servers[OWN].url}/v1/chat/completions", json=body, timeout=60, trust_env=False).raise_for_status().json()
    assert said["choices"][0]["message"]["content"].startswith("3 + 4 =")
