// Exports of libmagi_core_sm90: check, launch. What each function means is said in magi_core/backends/arch.py.
#include <cuda_runtime_api.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>
#include <tvm/ffi/string.h>

#include "binding/sm90_checks.h"
#include "launch/sm90/launch.h"
#include "magi/attn/params.h"
#include "magi/plan_format.h"

namespace magi::binding {
namespace {

ffi::String magi_version() { return MAGI_VERSION; }

int64_t magi_plan_format() { return plan::kVersion; }

void attn_bwd_prepare(ffi::TensorView delta, ffi::TensorView dout, ffi::TensorView out, ffi::TensorView lse,
                      ffi::Optional<ffi::TensorView> dlse) {
  check_rank("out", out, 3);
  check_same_shape("dout", dout, "out", out);
  attn::ElementType const element = element_of("out", out);
  check_dtype_of("dout", dout, "out", out);
  check_rank("lse", lse, 2);
  check_row_stats("lse", lse, out);
  check_row_stats("delta", delta, out);
  if (dlse.has_value()) check_row_stats("dlse", dlse.value(), out);
  for (auto const& [name, t] : {std::pair{"dout", dout}, {"out", out}}) check_last_dim_contiguous(name, t);
  int const device = cuda_device_of("out", out);
  for (auto const& [name, t] : {std::pair{"delta", delta}, {"dout", dout}, {"lse", lse}}) check_device(name, t, out);

  attn::BwdPrepareParams params{};
  params.dout = data_of(dout), params.out = data_of(out);
  params.lse = static_cast<float const*>(data_of(lse));
  params.delta = static_cast<float*>(data_of(delta));
  params.total_q = out.size(0);
  params.num_heads = int(out.size(1)), params.head_dim_v = int(out.size(2));
  copy_strides(params.dout_strides, dout);
  copy_strides(params.out_strides, out);
  copy_strides(params.lse_strides, lse);
  copy_strides(params.delta_strides, delta);
  if (dlse.has_value()) {
    check_device("dlse", dlse.value(), out);
    params.dlse = static_cast<float const*>(data_of(dlse.value()));
    copy_strides(params.dlse_strides, dlse.value());
  }
  params.is_wide = has_wide_rows(dout) && has_wide_rows(out);
  check_status("attn_bwd_prepare", attn::launch_bwd_prepare(params, element, stream_of(device)));
}

}  // namespace
}  // namespace magi::binding

TVM_FFI_DLL_EXPORT_TYPED_FUNC(magi_version, magi::binding::magi_version);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(magi_plan_format, magi::binding::magi_plan_format);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attn_bwd_prepare, magi::binding::attn_bwd_prepare);
