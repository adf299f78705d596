// Exports of FlexPlan and of the overlap check.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <limits>
#include <new>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "binding/host_arrays.h"
#include "binding/host_bands.h"
#include "host/flex_plan.h"
#include "host/overlap.h"

namespace ffi = tvm::ffi;

namespace magi::binding {
namespace {

// (num_pairs, 2) indices of bands that share a cell, at most `limit`.
ffi::Tensor bands_overlaps(ffi::TensorView bands, int64_t limit) {
  auto const pairs = find_overlaps(bands_of(bands), static_cast<size_t>(std::max<int64_t>(limit, 0)));
  std::vector<int32_t> out;
  for (auto const& [i, j] : pairs) out.insert(out.end(), {i, j});
  return array_of(out.data(), {static_cast<int64_t>(pairs.size()), 2});
}

int32_t checked(int64_t value, int64_t least, char const* name) {
  if (value < least || value > std::numeric_limits<int32_t>::max()) {
    TVM_FFI_THROW(ValueError) << name << " must be between " << least << " and 2**31 - 1, got " << value;
  }
  return static_cast<int32_t>(value);
}

ffi::Tensor plan_build(ffi::TensorView bands, int64_t total_q, int64_t total_k, int64_t num_heads_q,
                       int64_t num_heads_kv, int64_t block_m, int64_t block_n, int64_t bwd_block_m, int64_t bwd_block_n,
                       ffi::TensorView q_tile_starts, ffi::TensorView tile_flags, int64_t stage, int64_t num_stages,
                       bool allow_overlap, int64_t num_sms) {
  FlexPlanOptions o;
  o.total_q = checked(total_q, 0, "total_q");
  o.total_k = checked(total_k, 0, "total_k");
  o.num_heads_q = checked(num_heads_q, 0, "num_heads_q");
  o.num_heads_kv = checked(num_heads_kv, 0, "num_heads_kv");
  if ((o.num_heads_q == 0) != (o.num_heads_kv == 0) || (o.num_heads_kv > 0 && o.num_heads_q % o.num_heads_kv != 0)) {
    TVM_FFI_THROW(ValueError) << "num_heads_q must be a multiple of num_heads_kv (or both 0), got " << num_heads_q
                              << " and " << num_heads_kv;
  }
  o.block_m = checked(block_m, 1, "block_m");
  o.block_n = checked(block_n, 1, "block_n");
  o.bwd_block_m = checked(bwd_block_m, 1, "bwd_block_m");
  o.bwd_block_n = checked(bwd_block_n, 1, "bwd_block_n");
  o.num_stages = checked(num_stages, 1, "num_stages");
  o.stage = checked(stage, 0, "stage");
  if (o.stage >= o.num_stages) {
    TVM_FFI_THROW(ValueError) << "stage must be less than num_stages (" << num_stages << "), got " << stage;
  }
  o.num_sms = checked(num_sms, 1, "num_sms");
  o.allow_overlap = allow_overlap;

  auto const* const starts = checked_array<int32_t>(q_tile_starts, 1, "q_tile_starts");
  auto const* const flags = checked_array<int32_t>(tile_flags, 1, "tile_flags");
  if (int64_t const n = q_tile_starts.size(0); n > 0) {
    if (starts[0] != 0 || starts[n - 1] != o.total_q) {
      TVM_FFI_THROW(ValueError) << "q_tile_starts must run from 0 to total_q (" << total_q << "), got " << starts[0]
                                << " to " << starts[n - 1];
    }
    for (int64_t i = 1; i < n; ++i) {
      if (starts[i] <= starts[i - 1] || int64_t{starts[i]} - starts[i - 1] > o.block_m) {
        TVM_FFI_THROW(ValueError) << "q_tile_starts must ascend by 1 to block_m (" << block_m << "), got "
                                  << starts[i - 1] << " then " << starts[i] << " at index " << i;
      }
    }
    o.q_tile_starts = {starts, static_cast<size_t>(n)};
  }
  if (int64_t const n = tile_flags.size(0); n > 0) {
    int64_t const num_tiles =
        o.q_tile_starts.empty() ? (total_q + block_m - 1) / block_m : static_cast<int64_t>(o.q_tile_starts.size()) - 1;
    if (n != num_tiles) {
      TVM_FFI_THROW(ValueError) << "tile_flags must have one entry per query tile (" << num_tiles << "), got " << n;
    }
    for (int64_t i = 0; i < n; ++i) {
      if ((flags[i] & ~(plan::kFirst | plan::kLast)) != 0) {
        TVM_FFI_THROW(ValueError) << "tile_flags must be a sum of FIRST (1) and LAST (2), got " << flags[i]
                                  << " at index " << i;
      }
    }
    o.tile_flags = {flags, static_cast<size_t>(n)};
  }

  auto const canonical_bands = bands_of(bands);
  for (Band const& b : canonical_bands) {
    Band const s = shrink(b);
    if (is_empty(s) || std::tie(s.q0, s.q1, s.k0, s.k1, s.lo, s.hi) != std::tie(b.q0, b.q1, b.k0, b.k1, b.lo, b.hi)) {
      TVM_FFI_THROW(ValueError) << "bands must be shrunk to their visible cells, got rows [" << b.q0 << ", " << b.q1
                                << ") and columns [" << b.k0 << ", " << b.k1 << ")";
    }
    if (b.q0 < 0 || b.q1 > o.total_q || b.k0 < 0 || b.k1 > o.total_k) {
      TVM_FFI_THROW(ValueError) << "bands must lie within total_q (" << total_q << ") and total_k (" << total_k
                                << "), got rows [" << b.q0 << ", " << b.q1 << ") and columns [" << b.k0 << ", " << b.k1
                                << ")";
    }
  }
  try {
    std::vector<int32_t> const buffer = build_flex_plan(canonical_bands, o);
    return array_of(buffer);
  } catch (std::length_error const& error) {
    TVM_FFI_THROW(ValueError) << error.what();
  } catch (std::bad_alloc const&) {
    TVM_FFI_THROW(MemoryError) << "not enough memory for a FlexPlan of total_q " << total_q << " and total_k "
                               << total_k;
  }
  return array_of(std::vector<int32_t>());
}

// "name=value" pairs: word index of each header field, then record widths, classes and flags.
ffi::String plan_format() {
  std::string out;
  auto const put = [&out](char const* name, int64_t value) {
    out += std::string(out.empty() ? "" : " ") + name + "=" + std::to_string(value);
  };
#define MAGI_FIELD(name, symbol) put("header." name, plan::symbol)
  MAGI_FIELD("magic", kMagicWord);
  MAGI_FIELD("version", kVersionWord);
  MAGI_FIELD("digest_lo", kDigestLo);
  MAGI_FIELD("digest_hi", kDigestHi);
  MAGI_FIELD("num_words", kNumWords);
  MAGI_FIELD("status", kStatus);
  MAGI_FIELD("status_slice", kStatusSlice);
  MAGI_FIELD("flags", kFlags);
  MAGI_FIELD("total_q", kTotalQ);
  MAGI_FIELD("total_k", kTotalK);
  MAGI_FIELD("num_heads_q", kNumHeadsQ);
  MAGI_FIELD("num_heads_kv", kNumHeadsKv);
  MAGI_FIELD("section_heads", kSectionHeads);
  MAGI_FIELD("stage", kStage);
  MAGI_FIELD("num_stages", kNumStages);
  MAGI_FIELD("num_bands", kNumBands);
  MAGI_FIELD("bands", kBands);
  MAGI_FIELD("num_masks", kNumMasks);
  MAGI_FIELD("masks", kMasks);
  MAGI_FIELD("fwd_block_m", kFwdBlockM);
  MAGI_FIELD("fwd_block_n", kFwdBlockN);
  MAGI_FIELD("num_fwd_tiles", kNumFwdTiles);
  MAGI_FIELD("fwd_tiles", kFwdTiles);
  MAGI_FIELD("num_fwd_jobs", kNumFwdJobs);
  MAGI_FIELD("fwd_jobs", kFwdJobs);
  MAGI_FIELD("num_fwd_items", kNumFwdItems);
  MAGI_FIELD("fwd_items", kFwdItems);
  MAGI_FIELD("fwd_split_slots", kFwdSplitSlots);
  MAGI_FIELD("bwd_block_m", kBwdBlockM);
  MAGI_FIELD("bwd_block_n", kBwdBlockN);
  MAGI_FIELD("num_bwd_tiles", kNumBwdTiles);
  MAGI_FIELD("bwd_tiles", kBwdTiles);
  MAGI_FIELD("num_bwd_jobs", kNumBwdJobs);
  MAGI_FIELD("bwd_jobs", kBwdJobs);
  MAGI_FIELD("num_bwd_items", kNumBwdItems);
  MAGI_FIELD("bwd_items", kBwdItems);
  MAGI_FIELD("bwd_split_slots", kBwdSplitSlots);
  MAGI_FIELD("area_lo", kAreaLo);
  MAGI_FIELD("area_hi", kAreaHi);
#undef MAGI_FIELD
  static_assert(plan::kHeaderFieldEnd == plan::kAreaHi + 1, "name the new header fields above");
  put("magic", plan::kMagic);
  put("version", plan::kVersion);
  put("header_words", plan::kHeaderWords);
  put("band_words", plan::kBandWords);
  put("tile_words", plan::kTileWords);
  put("job_words", plan::kJobWords);
  put("item_words", plan::kItemWords);
  put("mask_words", plan::kMaskWords);
  put("mask_rows", plan::kMaskRows);
  put("mask_cols", plan::kMaskCols);
  put("full", plan::kFull);
  put("one_band", plan::kOneBand);
  put("many", plan::kMany);
  put("first", plan::kFirst);
  put("last", plan::kLast);
  put("walk_all", plan::kWalkAll);
  put("range_outside", plan::kRangeOutside);
  put("range_reversed", plan::kRangeReversed);
  put("bad_type", plan::kBadType);
  put("overflow", plan::kOverflow);
  put("double_cover", plan::kDoubleCover);
  put("device_made", plan::kDeviceMade);
  put("allow_overlap", plan::kAllowOverlap);
  put("has_splits", plan::kHasSplits);
  put("forward_only", plan::kForwardOnly);
  return ffi::String(out);
}

}  // namespace
}  // namespace magi::binding

TVM_FFI_DLL_EXPORT_TYPED_FUNC(bands_overlaps, magi::binding::bands_overlaps);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan_build, magi::binding::plan_build);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan_format, magi::binding::plan_format);
