// Parameters of the attention kernels: what a launcher is given. Host code may include this. Strides count elements.
#pragma once
#include <cstdint>

namespace magi::attn {

struct BwdPrepareParams {
  void const *dout, *out;  // (total_q, num_heads_q, head_dim_v), last dim contiguous
  float const *lse, *dlse;  // (total_q, num_heads_q); dlse may be null
  float* delta;             // (total_q, num_heads_q)
  int64_t total_q;
  int num_heads, head_dim_v;
  // Strides in elements of (token, head).
  int64_t dout_strides[2], out_strides[2], lse_strides[2], dlse_strides[2], delta_strides[2];
  bool is_wide;  // every row of dout and out starts on 16 bytes, and head_dim_v % 8 == 0
};

}  // namespace magi::attn
