"""magi_triton: dense attention against compiled FlexAttention and torch SDPA, decode against the memory's copy rate."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..case import Case, Check, Setup, register

HEADS_Q, HEADS_KV = 64, 8
# Of the largest exact value: bf16 keeps 8 bits, the softmax is rounded to them before the product.
BUDGET = 2.0**-6
SAMPLES = 16


def _tensors(seqlen: int, dim: int) -> tuple[Any, ...]:
    """q, k, v and dout: bf16 ``(1, heads, seqlen, dim)``, random."""
    import torch

    generator = torch.Generator(device="cuda").manual_seed(0)

    def one(heads: int) -> torch.Tensor:
        x = torch.randn(1, heads, seqlen, dim, device="cuda", dtype=torch.bfloat16, generator=generator)
        return x.requires_grad_()

    return one(HEADS_Q), one(HEADS_KV), one(HEADS_KV), one(HEADS_Q).detach()


def _flex(causal: bool, seqlen: int) -> Callable[..., Any]:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    mask = None
    if causal:
        mask = create_block_mask(lambda b, h, m, n: m >= n, None, None, seqlen, seqlen, device="cuda")
    return functools.partial(compiled, block_mask=mask, enable_gqa=True)


def _implementations(causal: bool, seqlen: int) -> dict[str, Callable[..., Any]]:
    from magi_triton import flash_attention
    from torch.nn.functional import scaled_dot_product_attention

    return {
        "magi": functools.partial(flash_attention, causal=causal),
        "flex": _flex(causal, seqlen),
        "sdpa": functools.partial(scaled_dot_product_attention, is_causal=causal, enable_gqa=True),
    }


def _relative(got: Any, exact: Any) -> float:
    return float((got.double() - exact).abs().max() / exact.abs().max())


def _rows_error(q: Any, k: Any, v: Any, out: Any, causal: bool) -> float:
    """Error of ``out`` on sampled rows against float64."""
    import torch

    rows = torch.linspace(0, q.shape[2] - 1, SAMPLES, device="cuda").long()
    grouped = q[0, :, rows].detach().double().view(HEADS_KV, -1, SAMPLES, q.shape[3])
    s = torch.einsum("hgmd,hnd->hgmn", grouped, k[0].detach().double()) * q.shape[3] ** -0.5
    if causal:
        s.masked_fill_(torch.arange(k.shape[2], device="cuda") > rows[:, None], float("-inf"))
    exact = torch.einsum("hgmn,hnd->hgmd", s.softmax(-1), v[0].detach().double())
    return _relative(out[0, :, rows].detach(), exact.view(HEADS_Q, SAMPLES, -1))


def _columns_error(tensors: tuple[Any, ...], out: Any, lse: Any, grads: Any, causal: bool) -> float:
    """Error of dk and dv on sampled keys, and of dq on sampled rows, against float64 given out and lse."""
    import torch

    q, k, v, dout = (x.detach()[0] for x in tensors)
    scale, seqlen = q.shape[2] ** -0.5, q.shape[1]
    index = torch.linspace(0, seqlen - 1, SAMPLES, device="cuda").long()
    delta = (out.detach()[0].double() * dout.double()).sum(-1)
    worst = 0.0
    for h in range(0, HEADS_KV, 4):
        heads = slice(h * HEADS_Q // HEADS_KV, (h + 1) * HEADS_Q // HEADS_KV)
        qs, dos = q[heads].double(), dout[heads].double()

        def ds_of(rows: Any, cols: Any, heads: slice = heads, h: int = h, qs: Any = qs, dos: Any = dos) -> Any:
            s = qs[:, rows] @ k[h, cols].double().T * scale
            p = (s - lse.detach()[0, heads][:, rows].double()[..., None]).exp()
            if causal:
                at = torch.arange(seqlen, device="cuda")
                p = p.masked_fill(at[cols][None, :] > at[rows][:, None], 0.0)
            return p, p * (dos[:, rows] @ v[h, cols].double().T - delta[heads][:, rows][..., None])

        every = slice(None)
        p, ds = ds_of(every, index)
        worst = max(worst, _relative(grads[1][0, h, index], torch.einsum("gmn,gmd->nd", ds, qs) * scale))
        worst = max(worst, _relative(grads[2][0, h, index], torch.einsum("gmn,gmd->nd", p, dos)))
        _, ds = ds_of(index, every)
        worst = max(worst, _relative(grads[0][0, heads][:, index], ds @ k[h].double() * scale))
    return worst


def _forward(causal: bool, seqlen: int, dim: int) -> Setup:
    import torch

    q, k, v, _ = _tensors(seqlen, dim)
    q, k, v = q.detach(), k.detach(), v.detach()

    def call(attend: Callable[..., Any]) -> Callable[[], Any]:
        def run() -> Any:
            with torch.no_grad():
                return attend(q, k, v)

        return run

    return Setup(
        implementations={name: call(attend) for name, attend in _implementations(causal, seqlen).items()},
        verify=lambda name, out: Check(_rows_error(q, k, v, out, causal), BUDGET, "fp64"),
    )


def _backward(causal: bool, seqlen: int, dim: int) -> Setup:
    import torch
    import torch._functorch.config as compile_options
    from magi_triton import flash_attention

    compile_options.donated_buffer = False  # one forward, many backwards
    q, k, v, dout = tensors = _tensors(seqlen, dim)
    with torch.no_grad():
        out, lse, *_ = flash_attention(q, k, v, causal, return_log_normalizer=True)

    def call(attend: Callable[..., Any]) -> Callable[[], Any]:
        result = attend(q, k, v)
        return lambda: torch.autograd.grad(result, (q, k, v), dout, retain_graph=True)

    return Setup(
        implementations={name: call(attend) for name, attend in _implementations(causal, seqlen).items()},
        verify=lambda name, grads: Check(_columns_error(tensors, out, lse, grads, causal), BUDGET, "fp64"),
    )


def _graph(call: Callable[[], Any]) -> Callable[[], Any]:
    """``call``, captured; a replay returns what the capture returned.

    The graph knows addresses only: ``replay`` holds ``call``, and with it the tensors that the graph reads.
    """
    import torch

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()

    def replay(inputs: Callable[[], Any] = call) -> Any:
        graph.replay()
        return result

    return replay


def _decode(kind: str, batch: int, context: int, page: int, dim: int) -> Setup:
    """Decode in a CUDA graph with a cold L2 cache, beside a copy that moves as many bytes as K and V hold."""
    import torch
    from magi_triton import flash_attention_split_kv, paged_attention

    q = torch.randn(batch, HEADS_Q, dim, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(batch, HEADS_KV, context, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    if kind == "split_kv":
        call = _graph(lambda: flash_attention_split_kv(q.unsqueeze(2), k, v).squeeze(2))
    else:
        width = context // page
        table = torch.randperm(batch * width, device="cuda").int().view(batch, width)
        pages = []
        for x in (k, v):
            cache = torch.empty(batch * width, HEADS_KV, page, dim, device="cuda", dtype=torch.bfloat16)
            cache[table.flatten().long()] = x.view(batch, HEADS_KV, width, page, dim).transpose(1, 2).flatten(0, 1)
            pages.append(cache)
        lens = torch.full((batch,), context, device="cuda", dtype=torch.int32)
        call = _graph(lambda: paged_attention(q, pages[0], pages[1], lens, table, dim**-0.5, context))
    source = k.flatten()
    target = torch.empty_like(source)
    flush = torch.empty(2**28, dtype=torch.int8, device="cuda")

    def verify(name: str, out: Any) -> Check:
        if name == "copy":
            return Check(float(not torch.equal(source, target)), 0.5, "itself")
        b = batch - 1
        grouped = q[b].double().view(HEADS_KV, -1, dim)
        p = (torch.einsum("hgd,hnd->hgn", grouped, k[b].double()) * dim**-0.5).softmax(-1)
        exact = torch.einsum("hgn,hnd->hgd", p, v[b].double()).view(HEADS_Q, dim)
        return Check(_relative(out[b], exact), 2 * BUDGET, "fp64")

    return Setup(
        implementations={"magi": call, "copy": lambda: target.copy_(source)},
        verify=verify,
        before=lambda: torch._foreach_zero_([flush]),
    )


def _params(mask: str, seqlen: int, dim: int) -> dict[str, Any]:
    return {"mask": mask, "seqlen": seqlen, "heads": f"{HEADS_Q}:{HEADS_KV}", "head_dim": dim, "dtype": "bfloat16"}


for _dim, _bound in ((128, 1 / 1.1), (64, 1 / 1.05)):
    for _seqlen in (8192, 16384, 32768):
        for _causal in (False, True):
            _mask = "causal" if _causal else "full"
            _area = _seqlen * (_seqlen + 1) / 2 if _causal else _seqlen**2
            for _kind, _setup, _matmuls in (("fwd", _forward, 2), ("bwd", _backward, 5)):
                register(
                    Case(
                        name=f"triton/flash/{_kind}/{_mask}/d{_dim}/s{_seqlen}",
                        operator=f"triton_flash_{_kind}",
                        setup=functools.partial(_setup, _causal, _seqlen, _dim),
                        params=_params(_mask, _seqlen, _dim),
                        flops=2.0 * _matmuls * _area * HEADS_Q * _dim,
                        device="cuda",
                        bounds={"ratio:flex": _bound},
                    )
                )

for _kind in ("split_kv", "paged"):
    for _batch, _context in ((1, 8192), (1, 131072), (16, 8192), (16, 32768), (64, 8192), (64, 32768)):
        _mib = _batch * _context * HEADS_KV * 128 * 4 / 2**20
        register(
            Case(
                name=f"triton/decode/{_kind}/b{_batch}/s{_context}",
                operator=f"triton_{_kind}",
                setup=functools.partial(_decode, _kind, _batch, _context, 16, 128),
                params={**_params("one query", _context, 128), "batch": _batch, "kv_mib": _mib},
                device="cuda",
                bounds={"ratio:copy": 1 / 0.75 if _mib >= 512 else 2.0} if _mib >= 64 else {},
            )
        )


def _piecewise(backward: bool, seqlen: int, dim: int) -> Setup:
    """Beside our flash attention on the same sizes; the pairs are equal, so that both have one exact result."""
    import torch
    from magi_triton import flash_attention, piecewise_attention

    q, k, v, dout = tensors = _tensors(seqlen, dim)
    with torch.no_grad():
        out, lse, *_ = flash_attention(q, k, v, True, return_log_normalizer=True)
    q2, k2 = (x.detach().clone().requires_grad_() for x in (q, k))

    def piecewise() -> Any:
        return piecewise_attention(q, k, q2, k2, v, seqlen // 2, True)

    def flash() -> Any:
        return flash_attention(q, k, v, True)

    if not backward:

        def call(attend: Callable[[], Any]) -> Callable[[], Any]:
            def run() -> Any:
                with torch.no_grad():
                    return attend()

            return run

        return Setup(
            implementations={"magi": call(piecewise), "flash": call(flash)},
            verify=lambda name, result: Check(_rows_error(q, k, v, result, True), BUDGET, "fp64"),
        )
    wholes = {"magi": (piecewise(), (q, k, q2, k2, v)), "flash": (flash(), (q, k, v))}

    def verify(name: str, grads: Any) -> Check:
        if name == "magi":  # with equal pairs the gradients of the pairs add up to flash attention's
            grads = (grads[0].double() + grads[2], grads[1].double() + grads[3], grads[4])
        return Check(_columns_error(tensors, out, lse, grads, True), 2 * BUDGET, "fp64")

    def grad(name: str) -> Callable[[], Any]:
        result, inputs = wholes[name]
        return lambda: torch.autograd.grad(result, inputs, dout, retain_graph=True)

    return Setup(implementations={name: grad(name) for name in wholes}, verify=verify)


for _kind, _bound in (("fwd", 1.7), ("bwd", 1.8)):
    register(
        Case(
            name=f"triton/piecewise/{_kind}/causal/d128/s8192",
            operator=f"triton_piecewise_{_kind}",
            setup=functools.partial(_piecewise, _kind == "bwd", 8192, 128),
            params=_params("causal, threshold 4096", 8192, 128),
            device="cuda",
            bounds={"ratio:flash": _bound},
        )
    )
