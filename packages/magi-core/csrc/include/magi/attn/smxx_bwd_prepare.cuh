// What the backward needs before its main kernel:  delta[t, h] = sum_d dout[t, h, d] * out[t, h, d] - dlse[t, h].
//
// With p = exp(s - lse), dS = p * (dP - delta) holds for any gradient into out and lse together, so a gradient into lse
// costs the main kernel nothing. A row that sees no key (lse = -inf) or whose sink is +inf (lse = +inf) passes no
// gradient: delta = 0 there, whatever dlse holds. One group of 16 lanes owns one (token, head); loads are 16 bytes wide
// where strides allow. Bound by memory: every element of dout and out is read once.
// Source: FlashAttention-2 (arXiv:2307.08691), section 3.1.2; the gradient through lse is ours. Any architecture.
#pragma once
#include <cstdint>

#include "magi/attn/element.cuh"
#include "magi/attn/params.h"

namespace magi::attn {

template <class Element>
struct BwdPrepareTraits {
  static constexpr int kLanes = 16;  // of one (token, head)
  static constexpr int kThreads = 256;
  static constexpr int kRows = kThreads / kLanes;  // (token, head) pairs of a block
  static constexpr int kVector = 16 / sizeof(Element);
};

template <class Element>
__global__ __launch_bounds__(BwdPrepareTraits<Element>::kThreads) void attn_bwd_prepare_kernel(
    BwdPrepareParams const p) {
  using T = BwdPrepareTraits<Element>;
  int64_t const pair = int64_t(blockIdx.x) * T::kRows + threadIdx.x / T::kLanes;
  int const lane = threadIdx.x % T::kLanes;
  int64_t const token = pair / p.num_heads;
  int const head = int(pair - token * p.num_heads);
  bool const is_live = token < p.total_q;
  float sum = 0.0f;
  if (is_live) {
    auto const* dout = static_cast<Element const*>(p.dout) + token * p.dout_strides[0] + head * p.dout_strides[1];
    auto const* out = static_cast<Element const*>(p.out) + token * p.out_strides[0] + head * p.out_strides[1];
    if (p.is_wide) {
      for (int d = lane * T::kVector; d < p.head_dim_v; d += T::kLanes * T::kVector) {
        uint4 const a = *reinterpret_cast<uint4 const*>(dout + d), b = *reinterpret_cast<uint4 const*>(out + d);
        auto const* x = reinterpret_cast<Element const*>(&a);
        auto const* y = reinterpret_cast<Element const*>(&b);
#pragma unroll
        for (int i = 0; i < T::kVector; ++i) sum = fmaf(widen(x[i]), widen(y[i]), sum);
      }
    } else {
      for (int d = lane; d < p.head_dim_v; d += T::kLanes) sum = fmaf(widen(dout[d]), widen(out[d]), sum);
    }
  }
#pragma unroll
  for (int mask = T::kLanes / 2; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
  if (is_live && lane == 0) {
    float const lse = p.lse[token * p.lse_strides[0] + head * p.lse_strides[1]];
    float const dlse = p.dlse == nullptr ? 0.0f : p.dlse[token * p.dlse_strides[0] + head * p.dlse_strides[1]];
    p.delta[token * p.delta_strides[0] + head * p.delta_strides[1]] = isinf(lse) ? 0.0f : sum - dlse;
  }
}

}  // namespace magi::attn
