// Exports of libmagi_core_sm90: check, launch. What each function means is said in magi_core/backends/arch.py.
#include <cuda_runtime_api.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>
#include <tvm/ffi/string.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "binding/sm90_checks.h"
#include "launch/sm90/launch.h"
#include "magi/attn/params.h"
#include "magi/plan_format.h"

namespace magi::binding {
namespace {

ffi::String magi_version() { return MAGI_VERSION; }

int64_t magi_plan_format() { return plan::kVersion; }

// 32-bit words on the device of a tensor, from its framework's allocator.
ffi::Tensor device_words(ffi::TensorView like, int64_t words) {
  return ffi::Tensor::FromEnvAlloc(TVMFFIEnvTensorAlloc, ffi::Shape({words}), DLDataType{kDLInt, 32, 1}, like.device());
}

int64_t round_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

void copy_rows(void const* from, int64_t const* from_strides, int from_dim, void* to, int64_t const* to_strides,
               int to_dim, ffi::TensorView shape, float factor, attn::ElementType element, bool is_float,
               cudaStream_t stream) {
  attn::CopyRowsParams const params{from,
                                    to,
                                    {from_strides[0], from_strides[1], from_strides[2]},
                                    {to_strides[0], to_strides[1]},
                                    shape.size(0),
                                    int(shape.size(1)),
                                    from_dim,
                                    to_dim,
                                    factor};
  check_status("copy_rows", attn::launch_copy_rows(params, element, is_float, stream));
}

// A (token, head, dim) operand as the copy engine takes it: in place, or a copy padded to 16-byte rows and multiplied.
// The copy lives until the call returns; the allocator orders its reuse by stream.
class Operand {
 public:
  Operand(ffi::TensorView t, attn::ElementType element, float factor, cudaStream_t stream)
      : tensor{data_of(t), t.size(0), int(t.size(1)), int(t.size(2)), {t.stride(0), t.stride(1)}} {
    if (t.numel() == 0 || (factor == 1.0f && has_wide_rows(t))) return;
    int64_t const dim = round_up(t.size(2), 8);
    copy_.emplace(device_words(t, t.size(0) * t.size(1) * dim / 2));
    attn::TokenTensor const from = tensor;
    tensor = {copy_->data_ptr(), t.size(0), int(t.size(1)), int(dim), {t.size(1) * dim, dim}};
    int64_t const strides[3] = {from.strides[0], from.strides[1], t.stride(2)};
    copy_rows(from.data, strides, from.dim, copy_->data_ptr(), tensor.strides, int(dim), t, factor, element, false,
              stream);
  }

  attn::TokenTensor tensor;

 private:
  std::optional<ffi::Tensor> copy_;
};

// A (token, head, dim) result: written in place, or into a padded buffer that finish() copies from.
class Result {
 public:
  Result(char const* name, ffi::TensorView t, attn::ElementType element, cudaStream_t stream)
      : data(data_of(t)),
        dim(int(t.size(2))),
        strides{t.stride(0), t.stride(1)},
        is_float(t.dtype().bits == 32),
        view_(t),
        element_(element),
        stream_(stream) {
    bool const is_contiguous = t.stride(2) == 1 || t.size(2) <= 1;
    MAGI_CHECK(is_contiguous, ValueError) << name << " must be contiguous in its last dim, got stride " << t.stride(2);
    if (t.numel() == 0 || has_wide_rows(t)) return;
    int64_t const wide = round_up(t.size(2), 8);
    copy_.emplace(device_words(t, t.size(0) * t.size(1) * wide / (is_float ? 1 : 2)));
    data = copy_->data_ptr(), dim = int(wide), strides[0] = t.size(1) * wide, strides[1] = wide;
  }
  void finish() const {
    if (!copy_) return;
    int64_t const to[2] = {view_.stride(0), view_.stride(1)}, from[3] = {strides[0], strides[1], 1};
    int const dims = int(view_.size(2));
    copy_rows(data, from, dims, data_of(view_), to, dims, view_, 1.0f, element_, is_float, stream_);
  }

  void* data;
  int dim;
  int64_t strides[2];
  bool is_float;

 private:
  ffi::TensorView view_;
  attn::ElementType element_;
  cudaStream_t stream_;
  std::optional<ffi::Tensor> copy_;
};

// The kernels want a positive scale: otherwise q is copied, negated or zeroed, and the scale made positive.
struct Scale {
  explicit Scale(double softmax_scale)
      : q_factor(softmax_scale > 0   ? 1.0f
                 : softmax_scale < 0 ? -1.0f
                                     : 0.0f),
        softmax_scale(softmax_scale == 0 ? 1.0f : float(std::abs(softmax_scale))) {
    MAGI_CHECK(std::isfinite(softmax_scale), ValueError) << "softmax_scale must be finite, got " << softmax_scale;
  }
  float q_factor, softmax_scale;
};

void check_qkv(ffi::TensorView q, ffi::TensorView k, ffi::TensorView v) {
  for (auto const& [name, t] : {std::pair{"q", q}, {"k", k}, {"v", v}}) {
    check_rank(name, t, 3);
    MAGI_CHECK(t.size(2) >= 1 && t.size(2) <= 256, NotImplementedError)
        << name << " must have a head_dim of 1 to 256, got " << t.size(2);
  }
  check_dtype_of("k", k, "q", q);
  check_dtype_of("v", v, "q", q);
  check_device("k", k, q);
  check_device("v", v, q);
  MAGI_CHECK(k.size(0) == v.size(0) && k.size(1) == v.size(1), ValueError)
      << "v must have the tokens and heads of k " << shape_text(k) << ", got " << shape_text(v);
  MAGI_CHECK(k.size(2) == q.size(2), ValueError)
      << "k must have the head_dim of q (" << q.size(2) << "), got " << k.size(2);
  MAGI_CHECK(k.size(1) > 0 && q.size(1) % k.size(1) == 0, ValueError)
      << "the heads of q must be a multiple of those of k, got " << q.size(1) << " and " << k.size(1);
}

void check_plan(ffi::TensorView plan, ffi::TensorView q) {
  check_dtype("plan", plan, kDLInt, 32);
  check_device("plan", plan, q);
  MAGI_CHECK(plan.ndim() == 1 && plan.size(0) >= plan::kHeaderWords && plan.stride(0) == 1, ValueError)
      << "plan must be a contiguous FlexPlan buffer of at least " << plan::kHeaderWords << " words, got "
      << shape_text(plan);
}

// The smallest compiled kernel that holds a case: compiled head dims are padded by the copy engine with zeros.
template <class Entry>
Entry const* find_kernel(Entry const* entry, attn::KernelKey const& key) {
  Entry const* best = nullptr;
  for (; entry != nullptr; entry = entry->next) {
    attn::KernelKey const& has = entry->key;
    if (has.element != key.element || has.is_softcapped != key.is_softcapped) continue;
    if (has.head_dim < key.head_dim || has.head_dim_v < key.head_dim_v) continue;
    if (best == nullptr || has.head_dim + has.head_dim_v < best->key.head_dim + best->key.head_dim_v) best = entry;
  }
  MAGI_CHECK(best != nullptr, NotImplementedError)
      << "this build of magi-core-sm90 has no kernel for head_dim " << key.head_dim << ", head_dim_v " << key.head_dim_v
      << (key.is_softcapped ? ", softcap" : "") << " in this dtype; the published wheel has every "
      << "head_dim up to 256";
  return best;
}

int num_ctas(int device, int64_t sm_margin) {
  int sms = 0;
  check_status("cudaDeviceGetAttribute", cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  MAGI_CHECK(sm_margin >= 0 && sm_margin < sms, ValueError)
      << "sm_margin must be from 0 to " << sms - 1 << " on this device, got " << sm_margin;
  return sms - int(sm_margin);
}

void attn_fwd(ffi::TensorView out, ffi::Optional<ffi::TensorView> out_acc, ffi::TensorView lse,
              ffi::Optional<ffi::TensorView> max_logits, ffi::TensorView q, ffi::TensorView k, ffi::TensorView v,
              ffi::TensorView plan, ffi::Optional<ffi::TensorView> sink, int64_t sink_layout, double softmax_scale,
              double softcap, int64_t sm_margin) {
  int const device = cuda_device_of("q", q);
  attn::ElementType const element = element_of("q", q);
  check_qkv(q, k, v);
  check_plan(plan, q);
  check_rank("out", out, 3);
  check_dtype_of("out", out, "q", q);
  check_device("out", out, q);
  MAGI_CHECK(out.size(0) == q.size(0) && out.size(1) == q.size(1) && out.size(2) == v.size(2), ValueError)
      << "out must have shape (" << q.size(0) << ", " << q.size(1) << ", " << v.size(2) << "), got " << shape_text(out);
  check_row_stats("lse", lse, out);
  check_device("lse", lse, q);
  Scale const scale(softmax_scale);
  MAGI_CHECK(softcap >= 0, ValueError) << "softcap must not be negative, got " << softcap;

  attn::FwdParams params{};
  params.plan = static_cast<int32_t const*>(data_of(plan));
  cudaStream_t const stream = stream_of(device);
  Result const result("out", out, element, stream);  // rows are written 16 bytes at a time
  params.out = result.data;
  params.out_strides[0] = result.strides[0], params.out_strides[1] = result.strides[1];
  params.lse = static_cast<float*>(data_of(lse));
  copy_strides(params.lse_strides, lse);
  if (out_acc.has_value()) {
    ffi::TensorView const acc = out_acc.value();
    check_dtype("out_acc", acc, kDLFloat, 32);
    check_same_shape("out_acc", acc, "out", out);
    check_last_dim_contiguous("out_acc", acc);
    check_device("out_acc", acc, q);
    MAGI_CHECK(acc.stride(0) % 2 == 0 && acc.stride(1) % 2 == 0 && acc.size(2) % 2 == 0, NotImplementedError)
        << "out_acc must have an even head_dim_v and even strides, got " << shape_text(acc);
    params.out_acc = static_cast<float*>(data_of(acc));
    copy_strides(params.out_acc_strides, acc);
  }
  if (max_logits.has_value()) {
    ffi::TensorView const t = max_logits.value();
    check_dtype("max_logits", t, kDLFloat, 32);
    check_device("max_logits", t, q);
    MAGI_CHECK(t.ndim() == 1 && t.size(0) == q.size(1) && (t.stride(0) == 1 || t.size(0) == 1), ValueError)
        << "max_logits must have shape (num_heads_q,) = (" << q.size(1) << ",), got " << shape_text(t);
    params.max_logits = static_cast<float*>(data_of(t));
  }
  if (sink.has_value()) {
    ffi::TensorView const t = sink.value();
    check_dtype("sink", t, kDLFloat, 32);
    check_device("sink", t, q);
    MAGI_CHECK(sink_layout == 0 || sink_layout == 1, ValueError)
        << "sink_layout must be 0 (sh) or 1 (ssh), got " << sink_layout;
    int const rank = sink_layout == 0 ? 2 : 3;
    check_rank("sink", t, rank);
    MAGI_CHECK(t.IsContiguous() && t.size(rank - 1) == q.size(1) && (rank == 2 || t.size(0) == q.size(0)), ValueError)
        << "sink must be contiguous, of shape (s_sink, num_heads_q) or (total_q, s_sink, num_heads_q), got "
        << shape_text(t);
    params.sink = static_cast<float const*>(data_of(t));
    params.num_sinks = int(t.size(rank - 2));
    params.is_sink_per_token = rank == 3;
    if (params.num_sinks == 0) params.sink = nullptr;
  }
  params.num_heads_q = int(q.size(1)), params.num_heads_kv = int(k.size(1)), params.head_dim_v = result.dim;
  params.softmax_scale = scale.softmax_scale, params.softcap = float(softcap);

  attn::FwdEntry const* const kernel =
      find_kernel(attn::fwd_entries(), {element, int(q.size(2)), int(v.size(2)), softcap > 0});
  if (q.size(0) == 0 || q.size(1) == 0) return;
  Operand const operand_q(q, element, scale.q_factor, stream), operand_k(k, element, 1.0f, stream),
      operand_v(v, element, 1.0f, stream);
  attn::FwdTensors const tensors{operand_q.tensor, operand_k.tensor, operand_v.tensor};
  // Per-call state from the caller's allocator: queue counter, arrivals of split tiles, their partial results. A plan
  // has at most 4 parts per SM that it balances for (nominally 132).
  int const ctas = num_ctas(device, sm_margin);
  params.split_capacity = 4 * std::max(132, ctas + int(sm_margin));
  int64_t const flag_words = 4 + 2 * params.split_capacity;
  int64_t const part_words = int64_t(128) * (kernel->key.head_dim_v + 16);
  ffi::Tensor flags = device_words(q, flag_words);
  ffi::Tensor parts = device_words(q, params.split_capacity * part_words);
  params.counter = static_cast<int32_t*>(flags.data_ptr());
  params.split_arrivals = params.counter + 4;
  params.split_workspace = static_cast<float*>(parts.data_ptr());
  check_status("attn_fwd", cudaMemsetAsync(params.counter, 0, flag_words * 4, stream));
  check_status("attn_fwd", kernel->launcher(params, tensors, ctas, stream));
  result.finish();
}

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
  int const device = cuda_device_of("out", out);
  for (auto const& [name, t] : {std::pair{"delta", delta}, {"dout", dout}, {"lse", lse}}) check_device(name, t, out);

  attn::BwdPrepareParams params{};
  cudaStream_t const stream = stream_of(device);
  Operand const operand_dout(dout, element, 1.0f, stream), operand_out(out, element, 1.0f, stream);
  params.dout = operand_dout.tensor.data, params.out = operand_out.tensor.data;
  params.lse = static_cast<float const*>(data_of(lse));
  params.delta = static_cast<float*>(data_of(delta));
  params.total_q = out.size(0);
  params.num_heads = int(out.size(1)), params.head_dim_v = operand_out.tensor.dim;
  for (int i = 0; i < 2; ++i) {
    params.dout_strides[i] = operand_dout.tensor.strides[i], params.out_strides[i] = operand_out.tensor.strides[i];
  }
  copy_strides(params.lse_strides, lse);
  copy_strides(params.delta_strides, delta);
  if (dlse.has_value()) {
    check_device("dlse", dlse.value(), out);
    params.dlse = static_cast<float const*>(data_of(dlse.value()));
    copy_strides(params.dlse_strides, dlse.value());
  }
  params.is_wide = true;  // operands are, padded by zeros where need be
  if (out.numel() == 0) return;
  check_status("attn_bwd_prepare", attn::launch_bwd_prepare(params, element, stream));
}

int dq_row_capacity(int64_t total_q) { return int((total_q + 63) / 64 * 64); }
int dq_num_blocks(int64_t head_dim) { return int((head_dim + 63) / 64 * 2); }

int64_t dq_workspace_words(int64_t total_q, int64_t num_heads_q, int64_t head_dim) {
  return num_heads_q * dq_num_blocks(head_dim) * dq_row_capacity(total_q) * 32;
}

attn::DqWorkspace dq_workspace_of(ffi::TensorView workspace, ffi::TensorView q) {
  check_dtype("dq_workspace", workspace, kDLFloat, 32);
  check_device("dq_workspace", workspace, q);
  int64_t const words = dq_workspace_words(q.size(0), q.size(1), q.size(2));
  MAGI_CHECK(workspace.ndim() == 1 && workspace.size(0) >= words && (words == 0 || workspace.stride(0) == 1),
             ValueError)
      << "dq_workspace must hold dq_workspace_words = " << words << " contiguous words, got " << shape_text(workspace);
  return {static_cast<float*>(data_of(workspace)), dq_num_blocks(q.size(2)), dq_row_capacity(q.size(0))};
}

void dq_convert(ffi::TensorView dq, ffi::TensorView workspace) {
  int const device = cuda_device_of("dq", dq);
  check_rank("dq", dq, 3);
  bool const is_float = dq.dtype().code == kDLFloat && dq.dtype().bits == 32;
  attn::ElementType const element = is_float ? attn::ElementType::kBfloat16 : element_of("dq", dq);
  check_last_dim_contiguous("dq", dq);
  attn::DqConvertParams params{};
  params.dq = dq_workspace_of(workspace, dq);
  params.out = data_of(dq);
  copy_strides(params.out_strides, dq);
  params.total_q = int(dq.size(0)), params.num_heads = int(dq.size(1)), params.head_dim = int(dq.size(2));
  params.is_float = is_float;
  params.is_wide = reinterpret_cast<uintptr_t>(params.out) % 16 == 0 && dq.size(2) % 4 == 0 && dq.stride(0) % 4 == 0 &&
                   dq.stride(1) % 4 == 0;
  check_status("dq_convert", attn::launch_dq_convert(params, element, stream_of(device)));
}

// A gradient of k or v: the element type or float32.
void check_gradient(char const* name, ffi::TensorView t, char const* like_name, ffi::TensorView like) {
  check_same_shape(name, t, like_name, like);
  check_device(name, t, like);
  if (!(t.dtype().code == kDLFloat && t.dtype().bits == 32)) check_dtype_of(name, t, like_name, like);
}

void attn_bwd(ffi::TensorView dq, ffi::TensorView dk, ffi::TensorView dv, ffi::TensorView dout, ffi::TensorView q,
              ffi::TensorView k, ffi::TensorView v, ffi::TensorView lse, ffi::TensorView delta, ffi::TensorView plan,
              double softmax_scale, double softcap, int64_t deterministic, int64_t sm_margin) {
  int const device = cuda_device_of("q", q);
  attn::ElementType const element = element_of("q", q);
  check_qkv(q, k, v);
  check_plan(plan, q);
  check_rank("dout", dout, 3);
  check_dtype_of("dout", dout, "q", q);
  check_device("dout", dout, q);
  MAGI_CHECK(dout.size(0) == q.size(0) && dout.size(1) == q.size(1) && dout.size(2) == v.size(2), ValueError)
      << "dout must have shape (" << q.size(0) << ", " << q.size(1) << ", " << v.size(2) << "), got "
      << shape_text(dout);
  check_row_stats("lse", lse, q);
  check_row_stats("delta", delta, q);
  check_device("lse", lse, q);
  check_device("delta", delta, q);
  Scale const scale(softmax_scale);
  MAGI_CHECK(softcap >= 0, ValueError) << "softcap must not be negative, got " << softcap;
  MAGI_CHECK(deterministic == 0, NotImplementedError)
      << "deterministic=True has no sm90 backward kernel yet; backend=\"reference\" is deterministic on any device";

  attn::BwdParams params{};
  params.plan = static_cast<int32_t const*>(data_of(plan));
  params.dq = dq_workspace_of(dq, q);
  check_gradient("dk", dk, "k", k);
  check_gradient("dv", dv, "v", v);
  cudaStream_t const stream = stream_of(device);
  Result const result_dk("dk", dk, element, stream), result_dv("dv", dv, element, stream);
  params.dk = result_dk.data, params.dv = result_dv.data;
  params.is_dk_float = result_dk.is_float, params.is_dv_float = result_dv.is_float;
  for (int i = 0; i < 2; ++i) params.dk_strides[i] = result_dk.strides[i], params.dv_strides[i] = result_dv.strides[i];
  params.num_heads_q = int(q.size(1)), params.num_heads_kv = int(k.size(1));
  params.head_dim = result_dk.dim, params.head_dim_v = result_dv.dim;
  params.softmax_scale = scale.softmax_scale, params.softcap = float(softcap);
  params.dq_scale = float(softmax_scale);
  attn::BwdEntry const* const kernel =
      find_kernel(attn::bwd_entries(), {element, params.head_dim, params.head_dim_v, softcap > 0});
  if (k.size(0) == 0) return;
  Operand const operand_q(q, element, scale.q_factor, stream), operand_k(k, element, 1.0f, stream),
      operand_v(v, element, 1.0f, stream), operand_dout(dout, element, 1.0f, stream);
  attn::BwdTensors tensors{operand_q.tensor, operand_k.tensor, operand_v.tensor, operand_dout.tensor, nullptr};
  int const capacity = std::max(params.dq.row_capacity, 64);
  ffi::Tensor rows = device_words(q, int64_t(4) * params.num_heads_q * capacity);
  tensors.rows = static_cast<float const*>(rows.data_ptr());
  params.dq.row_capacity = capacity;
  if (q.size(0) > 0) {
    attn::RowStatsParams stats{};
    stats.lse = static_cast<float const*>(data_of(lse)), stats.delta = static_cast<float const*>(data_of(delta));
    stats.rows = static_cast<float*>(rows.data_ptr());
    copy_strides(stats.lse_strides, lse);
    copy_strides(stats.delta_strides, delta);
    stats.total_q = int(q.size(0)), stats.num_heads = params.num_heads_q, stats.row_capacity = capacity;
    check_status("attn_bwd", attn::launch_row_stats(stats, stream));
  }
  int const ctas = num_ctas(device, sm_margin);
  params.split_capacity = 4 * std::max(132, ctas + int(sm_margin));
  ffi::Tensor flags = device_words(q, 4);
  ffi::Tensor parts =
      device_words(q, int64_t(params.split_capacity) * 128 * (kernel->key.head_dim + kernel->key.head_dim_v));
  params.counter = static_cast<int32_t*>(flags.data_ptr());
  params.split_workspace = static_cast<float*>(parts.data_ptr());
  check_status("attn_bwd", cudaMemsetAsync(params.counter, 0, 16, stream));
  check_status("attn_bwd", kernel->launcher(params, tensors, ctas, stream));
  check_status("attn_bwd", attn::launch_bwd_splits(params, kernel->key, stream));
  result_dk.finish();
  result_dv.finish();
}

}  // namespace
}  // namespace magi::binding

TVM_FFI_DLL_EXPORT_TYPED_FUNC(magi_version, magi::binding::magi_version);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(magi_plan_format, magi::binding::magi_plan_format);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attn_fwd, magi::binding::attn_fwd);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attn_bwd, magi::binding::attn_bwd);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(dq_convert, magi::binding::dq_convert);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(dq_workspace_words, magi::binding::dq_workspace_words);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attn_bwd_prepare, magi::binding::attn_bwd_prepare);
