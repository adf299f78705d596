#include "launch/sm90/launch.h"
#include "magi/attn/smxx_bwd_prepare.cuh"

namespace magi::attn {
namespace {

template <class Element>
cudaError_t launch(BwdPrepareParams const& params, cudaStream_t stream) {
  using T = BwdPrepareTraits<Element>;
  int64_t const pairs = params.total_q * params.num_heads;
  if (pairs == 0) return cudaSuccess;
  int64_t const blocks = (pairs + T::kRows - 1) / T::kRows;
  if (blocks > 0x7fffffff) return cudaErrorInvalidValue;
  attn_bwd_prepare_kernel<Element><<<unsigned(blocks), T::kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_bwd_prepare(BwdPrepareParams const& params, ElementType element, cudaStream_t stream) {
  return element == ElementType::kFloat16 ? launch<__half>(params, stream) : launch<__nv_bfloat16>(params, stream);
}

}  // namespace magi::attn
