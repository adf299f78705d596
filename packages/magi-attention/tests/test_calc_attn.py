"""``calc_attn``: one rank is the plain operator, options reach the stages, gradients are what was asked for."""

from __future__ import annotations

import magi_attention.api as api
import pytest
import torch
from magi_attention import env
from magi_attention.api import DistAttnConfig, OverlapConfig, flex_flash_attn_func
from magi_attention.common.enum import MagiAttentionKernelBackend, MagiAttentionPrecision
from magi_comm.groups import SingleCommunicator
from magi_comm.testing import ThreadWorld
from magi_core.testing import reference_attention

TOTAL, HEADS, KV_HEADS, DIM, DIM_V = 60, 6, 2, 8, 12
SLICES = [(0, 20, 0, 20, 1), (20, 55, 0, 10, 0), (20, 50, 20, 50, 2), (50, 55, 50, 60, 3)]
WORLDS = {n: ThreadWorld(n) for n in (1, 2, 3)}


@pytest.fixture(autouse=True)
def forget_plans():
    yield
    api.clear_cache()


def ranges():
    return [s[:2] for s in SLICES], [s[2:4] for s in SLICES], [s[4] for s in SLICES]


def key_of(comm, *, degree=2, dsink_reduce=None, **changes):
    config = DistAttnConfig(overlap_config=OverlapConfig(degree=degree, min_chunk_size=1), dsink_reduce=dsink_reduce)
    sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "dim": DIM, **changes}
    return api.magi_attn_flex_key(
        *ranges(), TOTAL, TOTAL, sizes["heads"], sizes["kv_heads"], sizes["dim"], 0, comm, config
    )


def inputs(dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q": (TOTAL, HEADS, DIM), "k": (TOTAL, KV_HEADS, DIM), "v": (TOTAL, KV_HEADS, DIM_V)}
    tensors = {n: torch.randn(*s, generator=generator, dtype=torch.float64).to(dtype) for n, s in shapes.items()}
    tensors["sink"] = torch.randn(2, HEADS, generator=generator, dtype=torch.float64)
    tensors["dout"] = torch.randn(TOTAL, HEADS, DIM_V, generator=generator, dtype=torch.float64).to(dtype)
    tensors["dlse"] = torch.randn(TOTAL, HEADS, generator=generator, dtype=torch.float64)
    return tensors


OPTIONS = [
    {},
    {"softmax_scale": 0.3},
    {"softmax_scale": -0.2},
    {"softmax_scale": 0.0},
    {"softcap": 0.7},
    {"return_max_logits": True},
    {"sink": True, "softcap": 2.0, "softmax_scale": 0.5, "return_max_logits": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_one_rank_is_the_plain_operator_bit_for_bit(options, dtype) -> None:
    x = inputs(dtype)
    options = dict(options)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    results = []
    for distributed in (True, False):
        q, k, v = (x[n].clone().requires_grad_() for n in "qkv")
        sink = x["sink"].to(wide).requires_grad_() if options.get("sink") else None
        given = options | {"sink": sink}
        if distributed:
            out, meta = api.calc_attn(q, k, v, key_of(SingleCommunicator()), **given)
        else:
            out, meta = flex_flash_attn_func(q, k, v, *(torch.tensor(r, dtype=torch.int32) for r in ranges()), **given)
        leaves = [q, k, v] if sink is None else [q, k, v, sink]
        grads = torch.autograd.grad((out, meta.lse), leaves, (x["dout"], x["dlse"].to(wide)))
        results.append([out, meta.lse, meta.max_logits, *grads])
    for got, expected in zip(*results, strict=True):
        assert (got is None) == (expected is None)
        assert got is None or (got.dtype == expected.dtype and torch.equal(got, expected))


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("degree", [0, 1, 3, None])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_ranks_together_are_the_reference(world, degree, options) -> None:
    x = inputs()
    leaves = {n: x[n].clone().requires_grad_() for n in ("q", "k", "v", "sink")}
    given = {n: v for n, v in options.items() if n != "return_max_logits"}
    given["sink"] = leaves["sink"] if options.get("sink") else None
    out, lse, max_logits = reference_attention(leaves["q"], leaves["k"], leaves["v"], SLICES, **given)
    wanted = [leaves[n] for n in (("q", "k", "v", "sink") if given["sink"] is not None else ("q", "k", "v"))]
    expected = torch.autograd.grad((out, lse), wanted, (x["dout"], x["dlse"]))

    def rank(comm):
        key = key_of(comm, degree=degree)
        q, k, v = (api.dispatch(x[n], key).requires_grad_() for n in "qkv")
        sink = x["sink"].clone().requires_grad_() if options.get("sink") else None
        got, meta = api.calc_attn(q, k, v, key, **(options | {"sink": sink}))
        close(api.undispatch(got, key), out)
        close(api.undispatch(meta.lse, key), lse)
        assert (meta.max_logits is not None) == bool(options.get("return_max_logits"))
        if meta.max_logits is not None:
            close(meta.max_logits, max_logits)
        dout, dlse = api.dispatch(x["dout"], key), api.dispatch(x["dlse"], key)
        grads = torch.autograd.grad((got, meta.lse), [q, k, v] if sink is None else [q, k, v, sink], (dout, dlse))
        for grad, whole in zip(grads[:3], expected[:3], strict=True):
            close(api.undispatch(grad, key), whole)
        return grads[3:]

    shares = WORLDS[world].run(rank)
    for parts, whole in zip(zip(*shares, strict=True), expected[3:], strict=True):
        close(sum(parts), whole)


def close(got, expected) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def test_rows_that_see_nothing_and_padding_are_empty() -> None:
    x = inputs()

    def rank(comm):
        key = key_of(comm)
        q, k, v = (api.dispatch(x[n], key, pad_value=float("nan")).requires_grad_() for n in "qkv")
        out, meta = api.calc_attn(q, k, v, key)
        ids = api.get_position_ids(key)
        blind = ids >= 55
        assert out[blind].eq(0).all() and meta.lse[blind].isneginf().all() and meta.lse[~blind].isfinite().all()
        dout = api.dispatch(x["dout"], key, pad_value=float("nan"))
        grads = torch.autograd.grad(out, [q, k, v], dout)
        pads = torch.arange(len(ids)) >= int(api.dispatch(torch.ones(TOTAL), key).sum())
        assert all(g.isfinite().all() and g[pads].eq(0).all() for g in grads)
        assert grads[0][blind].eq(0).all()

    WORLDS[3].run(rank)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "s", "qs", "kv", "vs"])
def test_only_the_gradients_asked_for(wanted) -> None:
    x = inputs()

    def rank(comm):
        key = key_of(comm)

        def grads(names):
            tensors = {n: api.dispatch(x[n], key).requires_grad_(n in names) for n in "qkv"}
            tensors["s"] = x["sink"].clone().requires_grad_("s" in names)
            out, meta = api.calc_attn(tensors["q"], tensors["k"], tensors["v"], key, tensors["s"])
            weight = api.dispatch(x["dout"], key)
            given = torch.autograd.grad(
                (out, meta.lse), [tensors[n] for n in names], (weight, api.dispatch(x["dlse"], key))
            )
            return dict(zip(names, given, strict=True))

        everything, some = grads("qkvs"), grads(wanted)
        assert all(torch.equal(some[n], everything[n]) for n in wanted)

    WORLDS[2].run(rank)


def test_expanded_and_partial_output_gradients() -> None:
    x = inputs()

    def rank(comm):
        key = key_of(comm)

        def leaves():
            return [api.dispatch(x[n], key).requires_grad_() for n in "qkv"]

        first = leaves()
        api.calc_attn(*first, key)[0].sum().backward()
        second = leaves()
        out, _ = api.calc_attn(*second, key)
        out.backward(torch.ones_like(out))
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(first, second, strict=True))
        third = leaves()
        _, meta = api.calc_attn(*third, key)
        torch.where(meta.lse.isfinite(), meta.lse, 0.0).sum().backward()  # a gradient into lse alone
        assert third[0].grad.abs().sum() > 0 and third[2].grad.eq(0).all()
        wide = torch.randn(*out.shape[:2], 2 * DIM_V, dtype=torch.float64)
        slices, copies = leaves(), leaves()
        api.calc_attn(*slices, key)[0].backward(wide[..., ::2])
        api.calc_attn(*copies, key)[0].backward(wide[..., ::2].contiguous())
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(slices, copies, strict=True))

    WORLDS[2].run(rank)


def test_any_strides_are_taken() -> None:
    x = inputs()
    views = {
        "permuted": lambda t: t.permute(2, 0, 1).contiguous().permute(1, 2, 0),  # the last dim is not contiguous
        "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
        "offset": lambda t: torch.cat([torch.full_like(t, float("nan")), t], 0)[len(t) :],
        "sliced": lambda t: torch.stack([t, torch.full_like(t, float("nan"))], -2)[..., 0, :],
    }

    def rank(comm):
        key = key_of(comm)
        local = {n: api.dispatch(x[n], key) for n in ("q", "k", "v", "dout")}

        def run(view):
            leaves = [view(local[n]).requires_grad_() for n in "qkv"]
            out, meta = api.calc_attn(*leaves, key)
            return [out, meta.lse, *torch.autograd.grad(out, leaves, view(local["dout"]))]

        expected = run(lambda t: t.clone())
        for name, view in views.items():
            for got, wanted in zip(run(view), expected, strict=True):
                torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")

    WORLDS[2].run(rank)


@pytest.mark.parametrize(("how", "source"), [("sum", "config"), ("avg", "config"), ("sum", "env"), (None, "env")])
def test_dsink_is_reduced_as_the_key_says(how, source) -> None:
    x = inputs()

    def rank(comm, reduce):
        key = key_of(comm, dsink_reduce=reduce)
        q, k, v = (api.dispatch(x[n], key) for n in "qkv")
        sink = x["sink"].clone().requires_grad_()
        out, _ = api.calc_attn(q, k, v, key, sink)
        out.backward(api.dispatch(x["dout"], key))
        return sink.grad

    shares = WORLDS[3].run(rank, "none")
    whole = sum(shares)
    assert not torch.allclose(shares[0], shares[1])
    if source == "config":
        got = WORLDS[3].run(rank, how)
    else:
        with env.override(dsink_all_reduce_op=how or "none"):
            got = WORLDS[3].run(rank, None)
    for rank_index, dsink in enumerate(got):
        close(dsink, {"sum": whole, "avg": whole / 3, None: shares[rank_index]}[how])


def test_a_sink_per_query_travels_with_its_query() -> None:
    x = inputs()
    per_row = torch.randn(TOTAL, 3, HEADS, dtype=torch.float64)
    leaves = [x[n].clone().requires_grad_() for n in "qkv"] + [per_row.clone().requires_grad_()]
    out, _, _ = reference_attention(*leaves[:3], SLICES, sink=leaves[3], sink_layout="ssh")
    expected = torch.autograd.grad(out, leaves, x["dout"])

    def rank(comm):
        key = key_of(comm)
        mine = [api.dispatch(t, key).requires_grad_() for t in (x["q"], x["k"], x["v"], per_row)]
        got, _ = api.calc_attn(*mine[:3], key, mine[3])
        close(api.undispatch(got, key), out)
        for grad, whole in zip(torch.autograd.grad(got, mine, api.dispatch(x["dout"], key)), expected, strict=True):
            close(api.undispatch(grad, key), whole)

    WORLDS[3].run(rank)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_thirty_repeats_are_bitwise_equal(dtype) -> None:
    x = inputs(dtype)

    def rank(comm):
        key = key_of(comm, degree=3)
        first = None
        for _ in range(30):
            q, k, v = (api.dispatch(x[n], key).requires_grad_() for n in "qkv")
            sink = x["sink"].float().requires_grad_()
            out, meta = api.calc_attn(q, k, v, key, sink)
            now = [out, meta.lse, *torch.autograd.grad(out, [q, k, v, sink], api.dispatch(x["dout"], key))]
            first = first or now
            assert all(torch.equal(a, b) for a, b in zip(first, now, strict=True))

    with env.override(deterministic_mode=True):
        WORLDS[2].run(rank)


def test_precision_of_the_environment_computes_in_it_and_returns_the_input_dtype() -> None:
    x = inputs(torch.float32)
    with env.override(precision=MagiAttentionPrecision.FP64):
        key = key_of(SingleCommunicator())
    q, k, v = (x[n].clone().requires_grad_() for n in "qkv")
    out, meta = api.calc_attn(q, k, v, key)
    exact, _, _ = reference_attention(q, k, v, SLICES)
    assert out.dtype == torch.float32 and meta.lse.dtype == torch.float64
    assert torch.equal(out, exact.float())
    out.sum().backward()
    assert q.grad.dtype == torch.float32


def test_backend_of_the_environment_reaches_the_stages() -> None:
    with env.override(kernel_backend=MagiAttentionKernelBackend.SDPA):
        key = key_of(SingleCommunicator())
    assert api.dist_attn_runtime_dict_mgr.get(key).runtime.backend == "reference"
    assert api.dist_attn_runtime_dict_mgr.get(key_of(SingleCommunicator())).runtime.backend is None


def test_sanity_check_verifies_the_plan(monkeypatch) -> None:
    from magi_attention.planning import solve

    seen = []
    monkeypatch.setattr(solve, "verify", lambda plan: seen.append(plan))
    with env.override(sanity_check=True):
        key = key_of(SingleCommunicator(), degree=7)
    assert seen == [api.dist_attn_runtime_dict_mgr.get(key).dist_plan]


def test_double_backward_is_refused() -> None:
    x = inputs()
    q, k, v = (x[n].clone().requires_grad_() for n in "qkv")
    out, _ = api.calc_attn(q, k, v, key_of(SingleCommunicator()))
    (dq,) = torch.autograd.grad(out.square().sum(), [q], create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiable once"):
        dq.sum().backward()
    # A gradient penalty of a loss that is linear in out: its second term must not be dropped in silence.
    out, _ = api.calc_attn(q, k, v, key_of(SingleCommunicator()))
    (dq,) = torch.autograd.grad(out.sum(), [q], create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiable once"):
        (out.sum() + dq.square().sum()).backward()


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda x, key: api.roll(x, 1.5, 0, key), TypeError, "shift must be an integer, got float 1.5"),
        (lambda x, key: api.roll(x, 1, 0.0, key), TypeError, "dim must be an integer, got float 0.0"),
        (lambda x, key: api.undispatch(x, key, "no"), TypeError, "is_partial_grad must be a bool, got str 'no'"),
    ],
    ids=["shift", "dim", "is_partial_grad"],
)
def test_options_of_transport_are_checked(call, error, message) -> None:
    key = key_of(SingleCommunicator())
    with pytest.raises(error, match=message):
        call(torch.zeros(key.shard_q, 2), key)


def test_xattn_arguments_are_the_mask_in_local_query_order() -> None:
    x = inputs()
    memory_k, memory_v = torch.randn(31, KV_HEADS, DIM).double(), torch.randn(31, KV_HEADS, DIM_V).double()
    slices = [(0, 25, 0, 12, 0), (25, 60, 5, 31, 1)]
    expected, _, _ = reference_attention(x["q"], memory_k, memory_v, slices)

    def rank(comm):
        key = key_of(comm)
        manager = api.dist_attn_runtime_dict_mgr.get(key)
        q_ranges, k_ranges, types = manager.get_xattn_args(
            [s[:2] for s in slices], [s[2:4] for s in slices], ["full", "causal"], total_k=31
        )
        q = api.dispatch(x["q"], key)
        out, _ = flex_flash_attn_func(
            q, memory_k, memory_v, q_ranges.to_tensor(), k_ranges.to_tensor(), torch.tensor(types, dtype=torch.int32)
        )
        close(api.undispatch(out, key), expected)

    WORLDS[2].run(rank)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": torch.zeros(TOTAL, HEADS)}, ValueError, r"q must have 3 dims .*, got shape \(60, 6\)"),
        (
            {"q": torch.zeros(9, HEADS, DIM)},
            ValueError,
            r"q must have the key's 60 local tokens and 6 heads .*\(9, 6, 8\)",
        ),
        (
            {"k": torch.zeros(TOTAL, 3, DIM)},
            ValueError,
            r"k must have the key's 60 local tokens and 2 heads .*\(60, 3, 8\)",
        ),
        ({"v": torch.zeros(TOTAL, 1, DIM)}, ValueError, r"v must have the key's 60 local tokens and 2 heads"),
        ({"k": torch.zeros(TOTAL, 2, 4)}, ValueError, r"k must have the key's head_dim 8, got 4"),
        (
            {"v": torch.zeros(TOTAL, 2, DIM).double()},
            TypeError,
            r"v must have the dtype of q \(torch.float32\), got torch.float64",
        ),
        ({"q": [0.0]}, TypeError, r"q must be a tensor, got list"),
        (
            {"sink": torch.zeros(2, 3)},
            ValueError,
            r"sink .* must have shape \(s_sink, num_heads_q=6\) .*, got \(2, 3\)",
        ),
        ({"sink": torch.zeros(0, HEADS)}, ValueError, r"sink .* must have shape .* with s_sink >= 1, got \(0, 6\)"),
        (
            {"sink": torch.zeros(9, 1, HEADS)},
            ValueError,
            r"sink .* must have shape \(total_q=60, s_sink, num_heads_q=6\) .*, got \(9, 1, 6\)",
        ),
        ({"sink": torch.zeros(2, HEADS).half()}, TypeError, r"sink must be float32 .*, got torch.float16"),
        ({"softcap": -1.0}, ValueError, r"softcap must be 0 \(off\) or positive, got -1.0"),
        ({"softcap": float("nan")}, ValueError, r"softcap must be finite, got nan"),
        ({"softmax_scale": "1"}, TypeError, r"softmax_scale must be a float, got str '1'"),
        ({"return_max_logits": 1}, TypeError, r"return_max_logits must be a bool, got int 1"),
        ({"colour": 1}, TypeError, r"unexpected keyword argument 'colour'"),
        ({"key": "key"}, TypeError, r"key must be a DistAttnRuntimeKey, got str"),
    ],
)
def test_wrong_arguments_are_refused(change, error, message) -> None:
    given = {
        "q": torch.zeros(TOTAL, HEADS, DIM),
        "k": torch.zeros(TOTAL, KV_HEADS, DIM),
        "v": torch.zeros(TOTAL, KV_HEADS, DIM),
        "key": key_of(SingleCommunicator()),
    }
    with pytest.raises(error, match=message):
        api.calc_attn(**(given | change))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16, torch.int8, torch.bool], ids=str)
def test_roll_takes_any_dtype(dtype) -> None:
    key = key_of(SingleCommunicator())
    whole = (torch.arange(2 * TOTAL).reshape(TOTAL, 2) % 2).to(dtype)
    rolled = api.undispatch(api.roll(api.dispatch(whole, key), 5, 0, key), key)
    assert rolled.dtype == dtype and torch.equal(rolled.float(), whole.float().roll(5, 0))
