// Exports of the band algebra. Arrays are CPU tensors, C-contiguous; bands are (num_bands, 6) int32.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <limits>
#include <span>
#include <vector>

#include "binding/host_arrays.h"
#include "binding/host_bands.h"
#include "host/band.h"

namespace ffi = tvm::ffi;

namespace magi::binding {
namespace {

ffi::Tensor to_array(std::vector<Band> const& bands) {
  return array_of(reinterpret_cast<int32_t const*>(bands.data()),
                  {static_cast<int64_t>(bands.size()), plan::kBandWords});
}

// Shrunk bands without the empty ones.
ffi::Tensor bands_shrink(ffi::TensorView bands) {
  std::vector<Band> out;
  for (Band const& b : bands_of(bands)) {
    if (b.q0 < 0 || b.k0 < 0) {  // below 0, diagonals could leave int32
      TVM_FFI_THROW(ValueError) << "bands must start at row 0 and column 0 or later, got q0 " << b.q0 << " and k0 "
                                << b.k0;
    }
    if (Band const s = shrink(b); !is_empty(s)) out.push_back(s);
  }
  return to_array(out);
}

// (num_bands, 7): the bands of the slices that see something, and the index of the slice.
ffi::Tensor bands_from_slices(ffi::TensorView q_ranges, ffi::TensorView k_ranges, ffi::TensorView types) {
  auto const* const q = checked_array<int32_t>(q_ranges, 2, "q_ranges");
  auto const* const k = checked_array<int32_t>(k_ranges, 2, "k_ranges");
  auto const* const t = checked_array<int32_t>(types, 1, "mask_types");
  int64_t const n = types.size(0);
  if (q_ranges.size(0) != n || k_ranges.size(0) != n || q_ranges.size(1) != 2 || k_ranges.size(1) != 2) {
    TVM_FFI_THROW(ValueError) << "q_ranges and k_ranges must have shape (" << n << ", 2) like mask_types, got ("
                              << q_ranges.size(0) << ", " << q_ranges.size(1) << ") and (" << k_ranges.size(0) << ", "
                              << k_ranges.size(1) << ")";
  }
  std::vector<int32_t> out;
  out.reserve(static_cast<size_t>(7 * n));
  for (int64_t i = 0; i < n; ++i) {
    Range const rq{q[2 * i], q[2 * i + 1]}, rk{k[2 * i], k[2 * i + 1]};
    if (rq.begin < 0 || rq.begin > rq.end) {
      TVM_FFI_THROW(ValueError) << "q_ranges[" << i << "] must satisfy 0 <= start <= end, got [" << rq.begin << ", "
                                << rq.end << ")";
    }
    if (rk.begin < 0 || rk.begin > rk.end) {
      TVM_FFI_THROW(ValueError) << "k_ranges[" << i << "] must satisfy 0 <= start <= end, got [" << rk.begin << ", "
                                << rk.end << ")";
    }
    if (t[i] < 0 || t[i] > 3) {
      TVM_FFI_THROW(ValueError) << "mask_types[" << i << "] must be 0 (full), 1 (causal), 2 (inv_causal) or 3 "
                                << "(bi_causal), got " << t[i];
    }
    Band const b = band_of_slice(rq, rk, static_cast<MaskType>(t[i]));
    if (!is_empty(b)) out.insert(out.end(), {b.q0, b.q1, b.k0, b.k1, b.lo, b.hi, static_cast<int32_t>(i)});
  }
  return array_of(out.data(), {static_cast<int64_t>(out.size() / 7), 7});
}

ffi::Tensor bands_canonical(ffi::TensorView bands) {
  auto const b = bands_of(bands);
  return to_array(canonical({b.begin(), b.end()}));
}

ffi::Tensor bands_areas(ffi::TensorView bands) {
  std::vector<int64_t> out;
  for (Band const& b : bands_of(bands)) out.push_back(area(b));
  return array_of(out);
}

ffi::Tensor bands_clip(ffi::TensorView bands, int64_t q0, int64_t q1, int64_t k0, int64_t k1) {
  auto const narrow = [](int64_t x) {
    return static_cast<int32_t>(
        std::clamp<int64_t>(x, std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()));
  };
  Range const q{narrow(q0), narrow(q1)}, k{narrow(k0), narrow(k1)};
  std::vector<Band> out;
  for (Band const& b : bands_of(bands)) {
    if (Band const c = clip(b, q, k); !is_empty(c)) out.push_back(c);
  }
  return to_array(out);
}

ffi::Tensor bands_shift(ffi::TensorView bands, int64_t dq, int64_t dk) {
  int64_t const limit = std::numeric_limits<int32_t>::max();
  std::vector<Band> out;
  for (Band const& b : bands_of(bands)) {
    // With rows and columns in [0, 2^31) the diagonals fit as well.
    if (dq < -limit || dq > limit || b.q0 + dq < 0 || b.q1 + dq > limit) {
      TVM_FFI_THROW(ValueError) << "dq must keep rows within [0, 2**31 - 1], got " << dq << " for rows [" << b.q0
                                << ", " << b.q1 << ")";
    }
    if (dk < -limit || dk > limit || b.k0 + dk < 0 || b.k1 + dk > limit) {
      TVM_FFI_THROW(ValueError) << "dk must keep columns within [0, 2**31 - 1], got " << dk << " for columns [" << b.k0
                                << ", " << b.k1 << ")";
    }
    out.push_back({static_cast<int32_t>(b.q0 + dq), static_cast<int32_t>(b.q1 + dq), static_cast<int32_t>(b.k0 + dk),
                   static_cast<int32_t>(b.k1 + dk), static_cast<int32_t>(b.lo + dk - dq),
                   static_cast<int32_t>(b.hi + dk - dq)});
  }
  return to_array(out);
}

// (num_slices, 5) rows of q start, q end, k start, k end, type.
ffi::Tensor bands_to_slices(ffi::TensorView bands) {
  std::vector<Slice> slices;
  for (Band const& b : bands_of(bands)) append_slices(b, slices);
  static_assert(sizeof(Slice) == 20);
  return array_of(reinterpret_cast<int32_t const*>(slices.data()), {static_cast<int64_t>(slices.size()), 5});
}

int64_t bands_digest(ffi::TensorView bands) { return static_cast<int64_t>(digest(bands_of(bands))); }

// counts[q, k] += number of bands that show the cell.
void bands_count(ffi::TensorView bands, ffi::TensorView counts) {
  auto* const out = checked_array<int32_t>(counts, 2, "counts");
  int64_t const rows = counts.size(0), cols = counts.size(1);
  for (Band const& b : bands_of(bands)) {
    for (int32_t q = std::max(b.q0, 0); q < std::min<int64_t>(b.q1, rows); ++q) {
      Range const c = columns(b, q);
      int32_t* const row = out + q * cols;
      for (int64_t k = std::max(c.begin, 0); k < std::min<int64_t>(c.end, cols); ++k) ++row[k];
    }
  }
}

}  // namespace
}  // namespace magi::binding

TVM_FFI_DLL_EXPORT_TYPED_FUNC(bands_shrink, magi::binding::bands_shrink);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(bands_from_slices, magi::binding::bands_from_slices);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(bands_canonical, magi::binding::bands_canonical);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(bands_areas, magi::binding::bands_areas);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(bands_clip, magi::binding::bands_clip);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(bands_shift, magi::binding::bands_shift);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(bands_to_slices, magi::binding::bands_to_slices);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(bands_digest, magi::binding::bands_digest);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(bands_count, magi::binding::bands_count);
