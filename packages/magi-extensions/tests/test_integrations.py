"""The Hugging Face entry and the slicing of sinks by head."""

from types import SimpleNamespace

import pytest
import torch
from magi_attn_extensions import fa2_func_with_sink, slice_sink_heads
from magi_attn_extensions.integrations import hf


def tensors(batch=2, seqlen=6, heads=4, heads_kv=2, dim=8, seed=0):
    """Heads first, as transformers gives them, and s_aux."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, heads, seqlen, dim), (batch, heads_kv, seqlen, dim), (batch, heads_kv, seqlen, dim), (heads,)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


LAYER = SimpleNamespace(is_causal=True)


def eager(q, k, v, s_aux, mask):
    """gpt-oss's own form: one more column of logits, dropped after the softmax."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = (q @ k.transpose(2, 3) * q.shape[3] ** -0.5).masked_fill(~mask, -torch.inf)
    p = torch.softmax(torch.cat((s, s_aux[None, :, None, None].expand(*s.shape[:3], 1)), 3), 3)[..., :-1]
    return (p @ v).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 1, 3])
def test_hf_entry_is_gpt_oss_attention(window):
    q, k, v, s_aux = tensors()
    out, weights = hf.magi_sink_attention_forward(LAYER, q, k, v, None, s_aux=s_aux, sliding_window=window)
    assert weights is None
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    if window is not None:
        mask &= ~torch.ones(6, 6, dtype=torch.bool).tril(-window)
    torch.testing.assert_close(out, eager(q, k, v, s_aux, mask), rtol=1e-6, atol=1e-6)  # the sink is float32


def test_hf_entry_with_padding():
    q, k, v, s_aux = tensors()
    padding = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    out, _ = hf.magi_sink_attention_forward(LAYER, q, k, v, padding, s_aux=s_aux)
    mask = torch.ones(6, 6, dtype=torch.bool).tril() & padding[:, None, None, :].bool()
    want = eager(q, k, v, s_aux, mask)
    torch.testing.assert_close(out[0, 2:], want[0, 2:], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out[1], want[1], rtol=1e-6, atol=1e-6)
    assert (out[0, :2] == 0).all()


def test_hf_entry_with_packed_sequences():
    q, k, v, s_aux = tensors(batch=1, seqlen=9)
    cu = torch.tensor([0, 4, 9])
    out, _ = hf.magi_sink_attention_forward(
        LAYER, q, k, v, None, s_aux=s_aux, cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=5, max_length_k=5
    )
    document = torch.arange(9) >= 4
    mask = torch.ones(9, 9, dtype=torch.bool).tril() & (document[:, None] == document)
    torch.testing.assert_close(out, eager(q, k, v, s_aux, mask), rtol=1e-6, atol=1e-6)
    with pytest.raises(NotImplementedError, match="a batch of one"):
        hf.magi_sink_attention_forward(LAYER, q, k, v, torch.ones(1, 9), cu_seq_lens_q=cu, cu_seq_lens_k=cu)


def test_hf_entry_refuses_a_dense_mask():
    q, k, v, _ = tensors()
    with pytest.raises(NotImplementedError, match=r"attention_mask must be None or \(batch, seqlen_k\)"):
        hf.magi_sink_attention_forward(LAYER, q, k, v, torch.zeros(2, 1, 6, 6))


def test_a_tiny_gpt_oss_gives_the_logits_and_gradients_of_eager():
    transformers = pytest.importorskip("transformers")
    name = hf.register()
    sizes = dict(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=4,
        pad_token_id=0, eos_token_id=1, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    config = transformers.GptOssConfig(**sizes, attn_implementation="eager")
    model = transformers.GptOssForCausalLM(config).float()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ids = torch.randint(2, 64, (2, 12))
    padding = torch.ones_like(ids)
    padding[0, :3] = 0
    results = []
    for implementation in ("eager", name):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        logits = model(ids, attention_mask=padding).logits
        (logits * padding[..., None]).square().mean().backward()
        sinks = torch.stack([layer.self_attn.sinks.grad for layer in model.model.layers])
        results.append((logits[padding.bool()].detach(), sinks))
    assert results[0][1].abs().max() > 0
    for got, want in zip(results[1], results[0]):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("layout", ["sh", "ssh"])
def test_heads_of_all_ranks_are_the_whole(layout, world_size):
    q, k, v, _ = (x.transpose(1, 2) if x.dim() == 4 else x for x in tensors())
    generator = torch.Generator().manual_seed(3)
    shape = (3, 4) if layout == "sh" else (2, 6, 3, 4)
    sink = torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()
    whole = fa2_func_with_sink(q, k, v, sink, layout, causal=True)
    (want,) = torch.autograd.grad(whole.square().sum(), sink)
    share, parts, total = 4 // world_size, [], torch.zeros_like(sink)
    for rank in range(world_size):
        heads = slice(rank * share, (rank + 1) * share)
        b_k, b_v = (x.repeat_interleave(2, 2)[:, :, heads] for x in (k, v))
        mine = slice_sink_heads(sink, rank, world_size, num_heads_kv=2)
        parts.append(fa2_func_with_sink(q[:, :, heads], b_k, b_v, mine, layout, causal=True))
        total += torch.autograd.grad(parts[-1].square().sum(), sink)[0]
    torch.testing.assert_close(torch.cat(parts, 2), whole)
    torch.testing.assert_close(total, want)


@pytest.mark.parametrize(
    ("rank", "world_size", "heads_kv", "message"),
    [
        (2, 2, None, r"rank must be in \[0, world_size=2\), got 2"),
        (0, 3, None, "world_size must divide the 4 heads of sink, got 3"),
        (0, 4, 3, r"world_size must divide num_heads_kv \(3\)"),
    ],
)
def test_heads_that_cannot_be_shared_out(rank, world_size, heads_kv, message):
    with pytest.raises(ValueError, match=message):
        slice_sink_heads(torch.zeros(1, 4), rank, world_size, num_heads_kv=heads_kv)
