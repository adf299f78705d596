// Exports of masks by rows. Arrays are CPU tensors, C-contiguous.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include <span>
#include <vector>

#include "binding/host_arrays.h"
#include "host/mask.h"

namespace ffi = tvm::ffi;

namespace magi::binding {
namespace {

// (num_runs, 3) row, begin, end of the maximal runs of non-zero bytes in `dense` (rows, cols), rows counted from `row`.
ffi::Tensor dense_runs(ffi::TensorView dense, int64_t row) {
  auto const* const cells = checked_array<int8_t>(dense, 2, "dense");
  int64_t const rows = dense.size(0), cols = dense.size(1);
  std::vector<int32_t> out;
  for (int64_t r = 0; r < rows; ++r) {
    int8_t const* const line = cells + r * cols;
    for (int64_t c = 0; c < cols;) {
      while (c < cols && line[c] == 0) ++c;
      int64_t const begin = c;
      while (c < cols && line[c] != 0) ++c;
      if (begin < c) {
        out.insert(out.end(), {static_cast<int32_t>(row + r), static_cast<int32_t>(begin), static_cast<int32_t>(c)});
      }
    }
  }
  return array_of(out.data(), {static_cast<int64_t>(out.size() / 3), 3});
}

// Bands of (num_runs, 3) runs, sorted by row and column.
ffi::Tensor bands_from_runs(ffi::TensorView runs) {
  auto const* const words = checked_array<int32_t>(runs, 2, "runs");
  if (runs.size(1) != 3) TVM_FFI_THROW(ValueError) << "runs must have shape (num_runs, 3)";
  RowLinker linker;
  std::vector<Range> intervals;
  int64_t const n = runs.size(0);
  for (int64_t i = 0; i < n;) {
    int32_t const q = words[3 * i];
    intervals.clear();
    for (; i < n && words[3 * i] == q; ++i) intervals.push_back({words[3 * i + 1], words[3 * i + 2]});
    linker.row(q, intervals);
  }
  std::vector<Band> const bands = linker.finish();
  return array_of(reinterpret_cast<int32_t const*>(bands.data()),
                  {static_cast<int64_t>(bands.size()), plan::kBandWords});
}

// (rows, cols) int64 visible cells under each cell of a picture.
ffi::Tensor bands_density(ffi::TensorView bands, int64_t total_q, int64_t total_k, int64_t rows, int64_t cols) {
  auto const* const words = checked_array<int32_t>(bands, 2, "bands");
  int64_t const limit = int64_t{1} << 14;
  if (bands.size(1) != plan::kBandWords || rows < 1 || cols < 1 || rows > limit || cols > limit) {
    TVM_FFI_THROW(ValueError) << "a picture must have 1 to " << limit << " rows and columns, got " << rows << " x "
                              << cols;
  }
  std::span<Band const> const b{reinterpret_cast<Band const*>(words), static_cast<size_t>(bands.size(0))};
  auto const out = density(b, static_cast<int32_t>(total_q), static_cast<int32_t>(total_k), static_cast<int32_t>(rows),
                           static_cast<int32_t>(cols));
  return array_of(out.data(), {rows, cols});
}

}  // namespace
}  // namespace magi::binding

TVM_FFI_DLL_EXPORT_TYPED_FUNC(dense_runs, magi::binding::dense_runs);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(bands_from_runs, magi::binding::bands_from_runs);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(bands_density, magi::binding::bands_density);
