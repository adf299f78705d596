// Small kernels around the main ones: padded copies of operands, row statistics into head-major rows, sums of split
// tiles, dq out of its workspace.
// All are bound by memory and follow the main kernel's layouts (params.h).
#pragma once
#include <cstdint>

#include "magi/attn/element.cuh"
#include "magi/attn/params.h"
#include "magi/attn/score.cuh"
#include "magi/plan_format.h"

namespace magi::attn {

// One thread per (row, head) of a 32 x 32 tile, transposed through shared memory.
__global__ __launch_bounds__(256) void row_stats_kernel(RowStatsParams const p) {
  __shared__ float tile[2][32][33];
  int const row0 = blockIdx.x * 32, head0 = blockIdx.y * 32, x = threadIdx.x % 32, y = threadIdx.x / 32;
  for (int i = y; i < 32; i += 8) {
    int const row = row0 + i, head = head0 + x;
    float lse = INFINITY, delta = 0.0f;
    if (row < p.total_q && head < p.num_heads) {
      lse = p.lse[row * p.lse_strides[0] + head * p.lse_strides[1]];
      delta = p.delta[row * p.delta_strides[0] + head * p.delta_strides[1]];
      lse = isinf(lse) ? INFINITY : lse * kLog2e;  // such a row has no gradient: exp2(s - inf) = 0
    }
    tile[0][i][x] = lse, tile[1][i][x] = delta;
  }
  __syncthreads();
  for (int i = y; i < 32; i += 8) {
    int const row = row0 + x, head = head0 + i;
    if (row < p.row_capacity && head < p.num_heads) {
      reinterpret_cast<float4*>(p.rows)[int64_t(head) * p.row_capacity + row] =
          float4{tile[0][x][i], tile[1][x][i], 0.0f, 0.0f};
    }
  }
}

// Adds the parts of split key tiles in order. A CTA walks tiles of the plan; few are split.
template <class Element>
__global__ __launch_bounds__(256) void bwd_splits_kernel(BwdParams const p, int compiled_dim, int compiled_dim_v) {
  int32_t const* const plan = p.plan;
  int const slots = plan[plan::kBwdSplitSlots];
  if (slots == 0) return;
  if (int64_t(slots) * p.num_heads_kv > p.split_capacity) __trap();  // a plan for a larger device
  auto const* const tiles = reinterpret_cast<plan::Tile const*>(plan + plan[plan::kBwdTiles]);
  int const kv_head = blockIdx.y;
  int const part_words = 128 * (compiled_dim + compiled_dim_v);
  for (int t = blockIdx.x; t < plan[plan::kNumBwdTiles]; t += gridDim.x) {
    plan::Tile const tile = tiles[t];
    if (tile.num_splits <= 1) continue;
    for (int which = 0; which < 2; ++which) {
      int const dims = which == 0 ? p.head_dim : p.head_dim_v, compiled = which == 0 ? compiled_dim : compiled_dim_v;
      void* const to = which == 0 ? p.dk : p.dv;
      bool const is_float = which == 0 ? p.is_dk_float : p.is_dv_float;
      int64_t const stride0 = which == 0 ? p.dk_strides[0] : p.dv_strides[0];
      int64_t const stride1 = which == 0 ? p.dk_strides[1] : p.dv_strides[1];
      int const pairs = dims / 2;
      for (int i = threadIdx.x; i < (tile.end - tile.begin) * pairs; i += blockDim.x) {
        int const row = i / pairs, col = i % pairs * 2;
        float2 sum{0.0f, 0.0f};
        for (int s = 0; s < tile.num_splits; ++s) {
          int64_t const part = int64_t(tile.split_slot + s) * p.num_heads_kv + kv_head;
          float const* const from = p.split_workspace + part * part_words + (which == 0 ? 0 : 128 * compiled_dim);
          float2 const x = *reinterpret_cast<float2 const*>(from + row * compiled + col);
          sum.x += x.x, sum.y += x.y;
        }
        int64_t const at = (tile.begin + row) * stride0 + kv_head * stride1 + col;
        if (is_float) {
          *reinterpret_cast<float2*>(static_cast<float*>(to) + at) = sum;
        } else {
          *reinterpret_cast<uint32_t*>(static_cast<Element*>(to) + at) = pack<Element>(sum.x, sum.y);
        }
      }
    }
  }
}

__device__ __forceinline__ float widen(float x) { return x; }
template <class Element>
__device__ __forceinline__ Element narrow(float x) {
  return Element(x);
}

template <class Element>
__global__ __launch_bounds__(256) void copy_rows_kernel(CopyRowsParams const p) {
  int64_t const index = int64_t(blockIdx.x) * 256 + threadIdx.x;
  int64_t const pair = index / p.to_dim;
  int const dim = int(index - pair * p.to_dim);
  int64_t const token = pair / p.heads;
  int const head = int(pair - token * p.heads);
  if (token >= p.tokens) return;
  Element x = narrow<Element>(0.0f);
  if (dim < p.from_dim) {
    x = static_cast<Element const*>(
        p.from)[token * p.from_strides[0] + head * p.from_strides[1] + dim * p.from_strides[2]];
    if (p.factor != 1.0f) x = narrow<Element>(widen(x) * p.factor);
  }
  static_cast<Element*>(p.to)[token * p.to_strides[0] + head * p.to_strides[1] + dim] = x;
}

// A thread converts four neighbouring words.
template <class Element>
__global__ __launch_bounds__(256) void dq_convert_kernel(DqConvertParams const p) {
  int const quads = (p.head_dim + 3) / 4;
  int64_t const index = int64_t(blockIdx.x) * 256 + threadIdx.x;
  int64_t const pair = index / quads;
  int const dim = int(index - pair * quads) * 4;
  int64_t const row = pair / p.num_heads;
  int const head = int(pair - row * p.num_heads);
  if (row >= p.total_q) return;
  int const chunk = (dim / 4 % 8) ^ (2 * (row % 4));
  float4 const x = *reinterpret_cast<float4 const*>(
      p.dq.words + ((int64_t(head) * p.dq.num_blocks + dim / 32) * p.dq.row_capacity + row) * 32 + 4 * chunk);
  int64_t const at = row * p.out_strides[0] + head * p.out_strides[1] + dim;
  if (!p.is_wide) {  // head_dim or strides that do not allow wide stores
    float const words[4] = {x.x, x.y, x.z, x.w};
    for (int i = 0; i < 4 && dim + i < p.head_dim; ++i) {
      if (p.is_float)
        static_cast<float*>(p.out)[at + i] = words[i];
      else
        static_cast<Element*>(p.out)[at + i] = narrow<Element>(words[i]);
    }
  } else if (p.is_float) {
    *reinterpret_cast<float4*>(static_cast<float*>(p.out) + at) = x;
  } else {
    *reinterpret_cast<uint2*>(static_cast<Element*>(p.out) + at) =
        uint2{pack<Element>(x.x, x.y), pack<Element>(x.z, x.w)};
  }
}

}  // namespace magi::attn
