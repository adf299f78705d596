#include "launch/sm90/launch.h"
#include "magi/attn/sm90_bwd_helpers.cuh"

namespace magi::attn {

cudaError_t launch_row_stats(RowStatsParams const& params, cudaStream_t stream) {
  dim3 const grid((params.row_capacity + 31) / 32, (params.num_heads + 31) / 32);
  row_stats_kernel<<<grid, 256, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t launch_bwd_splits(BwdParams const& params, KernelKey const& key, cudaStream_t stream) {
  dim3 const grid(64, params.num_heads_kv);
  if (key.element == ElementType::kFloat16) {
    bwd_splits_kernel<__half><<<grid, 256, 0, stream>>>(params, key.head_dim, key.head_dim_v);
  } else {
    bwd_splits_kernel<__nv_bfloat16><<<grid, 256, 0, stream>>>(params, key.head_dim, key.head_dim_v);
  }
  return cudaGetLastError();
}

cudaError_t launch_copy_rows(CopyRowsParams const& params, ElementType element, bool is_float, cudaStream_t stream) {
  int64_t const threads = params.tokens * params.heads * params.to_dim;
  if (threads == 0) return cudaSuccess;
  int64_t const blocks = (threads + 255) / 256;
  if (blocks > 0x7fffffff) return cudaErrorInvalidValue;
  if (is_float) {
    copy_rows_kernel<float><<<unsigned(blocks), 256, 0, stream>>>(params);
  } else if (element == ElementType::kFloat16) {
    copy_rows_kernel<__half><<<unsigned(blocks), 256, 0, stream>>>(params);
  } else {
    copy_rows_kernel<__nv_bfloat16><<<unsigned(blocks), 256, 0, stream>>>(params);
  }
  return cudaGetLastError();
}

cudaError_t launch_dq_convert(DqConvertParams const& params, ElementType element, cudaStream_t stream) {
  int64_t const threads = int64_t(params.total_q) * params.num_heads * ((params.head_dim + 3) / 4);
  if (threads == 0) return cudaSuccess;
  auto const blocks = unsigned((threads + 255) / 256);
  if (element == ElementType::kFloat16) {
    dq_convert_kernel<__half><<<blocks, 256, 0, stream>>>(params);
  } else {
    dq_convert_kernel<__nv_bfloat16><<<blocks, 256, 0, stream>>>(params);
  }
  return cudaGetLastError();
}

}  // namespace magi::attn
