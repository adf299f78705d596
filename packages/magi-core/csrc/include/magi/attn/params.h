// Parameters of the attention kernels: what a launcher is given. Host code may include this. Strides count elements.
#pragma once
#include <cstdint>

namespace magi::attn {

struct BwdPrepareParams {
  void const *dout, *out;   // (total_q, num_heads_q, head_dim_v), last dim contiguous
  float const *lse, *dlse;  // (total_q, num_heads_q); dlse may be null
  float* delta;             // (total_q, num_heads_q)
  int64_t total_q;
  int num_heads, head_dim_v;
  // Strides in elements of (token, head).
  int64_t dout_strides[2], out_strides[2], lse_strides[2], dlse_strides[2], delta_strides[2];
  bool is_wide;  // every row of dout and out starts on 16 bytes, and head_dim_v % 8 == 0
};

struct FwdParams {
  int32_t const* plan;      // FlexPlan buffer
  void* out;                // (total_q, num_heads_q, head_dim_v), 16-byte rows; written at tiles flagged last
  float* out_acc;           // the same shape; read and written at tiles that span stages, may be null otherwise
  float* lse;               // (total_q, num_heads_q), natural log; -inf where a row sees no key
  float* max_logits;        // (num_heads_q,), raised; may be null
  float const* sink;        // (num_sinks, num_heads_q) or (total_q, num_sinks, num_heads_q), contiguous; may be null
  int32_t* counter;         // one zeroed word: the queue position of the next item
  int32_t* split_arrivals;  // zeroed, two words for each workspace slot and head
  float* split_workspace;   // split_capacity states of a tile, each (head_dim_v as compiled + 16) * 128 words
  int split_capacity;
  int64_t out_strides[2], out_acc_strides[2], lse_strides[2];  // token, head
  int num_heads_q, num_heads_kv, head_dim_v, num_sinks;
  bool is_sink_per_token;
  float softmax_scale, softcap;
};

// The accumulator of dq: blocks of 32 columns, each (row_capacity) rows of 32 words,
//   word(head, dim, row) = ((head * num_blocks + dim / 32) * row_capacity + row) * 32 + 4 * chunk + dim % 4
//   with chunk = dim / 4 % 8 ^ 2 * (row % 4),
// so that 64 rows from any row on are contiguous for the copy engine, and writing a warpgroup's accumulators into such
// a block in shared memory meets no bank conflict.
struct DqWorkspace {
  float* words;
  int num_blocks;    // head_dim rounded up to 64, over 32
  int row_capacity;  // total_q rounded up to 64
};

struct BwdParams {
  int32_t const* plan;
  DqWorkspace dq;
  void *dk, *dv;                  // (total_k, num_heads_kv, head_dim / head_dim_v); every element is stored
  bool is_dk_float, is_dv_float;  // float32 instead of the element type
  int64_t dk_strides[2], dv_strides[2];
  int32_t* counter;         // one zeroed word
  int32_t* split_arrivals;  // zeroed, two words for each workspace slot and kv head
  float* split_workspace;   // split_capacity pairs of (dk, dv), each 128 * (head dims as compiled) words
  int split_capacity;
  int num_heads_q, num_heads_kv, head_dim, head_dim_v;
  float softmax_scale, softcap;
  float dq_scale;  // of the caller's q, which q here may be the negative of
};

// lse and delta as (num_heads_q, row_capacity, 4): lse in base 2, +inf where a row has no gradient; delta; two zeros.
// For the copy engine, which raises an illegal instruction when a box starts off 16 bytes: a row must be that wide.
struct RowStatsParams {
  float const *lse, *delta;
  float* rows;
  int64_t lse_strides[2], delta_strides[2];
  int total_q, num_heads, row_capacity;
};

struct DqConvertParams {
  DqWorkspace dq;
  void* out;  // (total_q, num_heads_q, head_dim)
  int64_t out_strides[2];
  int total_q, num_heads, head_dim;
  bool is_float, is_wide;
};

// to[t, h, d] = factor * from[t, h, d], zeros past from's dims. The padded copy of an operand that the copy engine
// cannot address, and the way back.
struct CopyRowsParams {
  void const* from;
  void* to;
  int64_t from_strides[3], to_strides[2];
  int64_t tokens;
  int heads, from_dim, to_dim;
  float factor;
};

}  // namespace magi::attn
