// The launchers of this library, one a kernel: parameters and a stream in, a CUDA status out. Nothing is allocated.
#pragma once
#include <cuda_runtime_api.h>

#include "magi/attn/params.h"

namespace magi::attn {

enum class ElementType { kFloat16, kBfloat16 };

// A (token, head, dim) tensor of 16-bit elements, last dim contiguous; strides of (token, head) in elements, each a
// multiple of 8 where its extent passes 1; data 16-byte aligned.
struct TokenTensor {
  void const* data;
  int64_t tokens;
  int heads, dim;
  int64_t strides[2];
};

struct FwdTensors {
  TokenTensor q, k, v;
};

// What one attention kernel is compiled for.
struct KernelKey {
  ElementType element;
  int head_dim, head_dim_v;  // as compiled: multiples of 64
  bool is_softcapped;
  bool operator==(KernelKey const& o) const {
    return element == o.element && head_dim == o.head_dim && head_dim_v == o.head_dim_v &&
           is_softcapped == o.is_softcapped;
  }
};

cudaError_t launch_bwd_prepare(BwdPrepareParams const& params, ElementType element, cudaStream_t stream);

// Kernels register themselves when the library is loaded, so a build may leave files out.
using FwdLauncher = cudaError_t (*)(FwdParams const&, FwdTensors const&, int num_ctas, cudaStream_t);
struct FwdEntry {
  KernelKey key;
  FwdLauncher launcher;
  FwdEntry const* next;
};
FwdEntry const*& fwd_entries();

struct BwdTensors {
  TokenTensor q, k, v, dout;
  float const* rows;  // RowStatsParams::rows
};
using BwdLauncher = cudaError_t (*)(BwdParams const&, BwdTensors const&, int num_ctas, cudaStream_t);
struct BwdEntry {
  KernelKey key;
  BwdLauncher launcher;
  BwdEntry const* next;
};
BwdEntry const*& bwd_entries();

cudaError_t launch_row_stats(RowStatsParams const& params, cudaStream_t stream);
cudaError_t launch_bwd_splits(BwdParams const& params, KernelKey const& key, cudaStream_t stream);
cudaError_t launch_copy_rows(CopyRowsParams const& params, ElementType element, bool is_float, cudaStream_t stream);
cudaError_t launch_dq_convert(DqConvertParams const& params, ElementType element, cudaStream_t stream);

}  // namespace magi::attn
