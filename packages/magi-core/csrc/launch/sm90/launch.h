// The launchers of this library, one a kernel: parameters and a stream in, a CUDA status out. Nothing is allocated.
#pragma once
#include <cuda_runtime_api.h>

#include "magi/attn/params.h"

namespace magi::attn {

enum class ElementType { kFloat16, kBfloat16 };

cudaError_t launch_bwd_prepare(BwdPrepareParams const& params, ElementType element, cudaStream_t stream);

}  // namespace magi::attn
