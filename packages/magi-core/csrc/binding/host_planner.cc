// Exports of the distributed planner. Arrays are C-contiguous CPU arrays; errors of the caller arrive as ValueError.
#include <algorithm>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include "binding/host_arrays.h"
#include "host/dispatch.h"
#include "host/dist_plan.h"
#include "host/owners.h"
#include "host/stage.h"
#include "host/verify.h"

namespace ffi = tvm::ffi;

namespace magi::binding {
namespace {

int32_t int32_of(int64_t x, char const* name) {
  if (x < std::numeric_limits<int32_t>::min() || x > std::numeric_limits<int32_t>::max()) {
    TVM_FFI_THROW(ValueError) << name << " must fit 32 bits, got " << x;
  }
  return static_cast<int32_t>(x);
}

// What the host code refuses is the caller's mistake.
template <class F>
auto refused_as_value_error(F const& f) {
  try {
    return f();
  } catch (std::invalid_argument const& error) {
    TVM_FFI_THROW(ValueError) << error.what();
  }
  std::abort();  // TVM_FFI_THROW is not noreturn
}

template <class Record, class Word>
std::span<Record const> records(ffi::TensorView array, char const* name) {
  constexpr int64_t words = sizeof(Record) / sizeof(Word);
  Word const* const data = checked_array<Word>(array, 2, name);
  if (array.size(1) != words) {
    TVM_FFI_THROW(ValueError) << name << " must have shape (n, " << words << "), got (" << array.size(0) << ", "
                              << array.size(1) << ")";
  }
  return {reinterpret_cast<Record const*>(data), static_cast<size_t>(array.size(0))};
}

template <class T>
std::span<T const> flat(ffi::TensorView array, char const* name) {
  T const* const data = checked_array<T>(array, 1, name);
  return {data, static_cast<size_t>(array.size(0))};
}

// Bands of the caller, shrunk, empty ones dropped; owned because what comes in may be anything.
std::vector<Band> bands_in(ffi::TensorView array) {
  std::vector<Band> out;
  for (Band const& band : records<Band, int32_t>(array, "bands")) {
    Band const b = shrink(band);
    if (!is_empty(b)) out.push_back(b);
  }
  return out;
}

ffi::Tensor rows_out(std::vector<OwnerRow> const& rows) {
  static_assert(sizeof(OwnerRow) == 3 * sizeof(int32_t));
  return array_of(reinterpret_cast<int32_t const*>(rows.data()), {static_cast<int64_t>(rows.size()), 3});
}

ffi::Tensor planner_chunk_areas(ffi::TensorView bands, int64_t chunk_size, int64_t total_q) {
  return refused_as_value_error([&] {
    return array_of(chunk_areas(bands_in(bands), int32_of(chunk_size, "chunk_size"), int32_of(total_q, "total_q")));
  });
}

int64_t planner_suggest_chunk_size(ffi::TensorView bands, int64_t total_q, int64_t world_size, int64_t limit) {
  return refused_as_value_error([&] {
    return suggest_chunk_size(bands_in(bands), int32_of(total_q, "total_q"), int32_of(world_size, "world_size"),
                              int32_of(limit, "limit"));
  });
}

int64_t planner_dispatch_lower_bound(ffi::TensorView areas, int64_t world_size) {
  if (world_size < 1) TVM_FFI_THROW(ValueError) << "world_size must be at least 1, got " << world_size;
  return dispatch_lower_bound(flat<int64_t>(areas, "areas"), int32_of(world_size, "world_size"));
}

// options: alg, num_candidates, batch, ratio_ppm, seed, node_limit, balance_ppm, pair_cost_fs, token_cost_fs
ffi::Tensor planner_dispatch_chunks(ffi::TensorView areas, int64_t world_size, ffi::TensorView bands,
                                    int64_t chunk_size, int64_t total_q, ffi::TensorView options) {
  auto const o = flat<int64_t>(options, "options");
  if (o.size() != 9) TVM_FFI_THROW(ValueError) << "options must have 9 entries, got " << o.size();
  DispatchOptions dispatch;
  dispatch.alg = static_cast<DispatchAlg>(int32_of(o[0], "alg"));
  dispatch.num_candidates = int32_of(o[1], "num_candidates");
  dispatch.batch = int32_of(o[2], "batch");
  dispatch.ratio_ppm = int32_of(o[3], "ratio_ppm");
  dispatch.seed = static_cast<uint64_t>(o[4]);
  dispatch.node_limit = o[5];
  dispatch.balance_ppm = o[6];
  dispatch.pair_cost_fs = o[7];
  dispatch.token_cost_fs = o[8];
  return refused_as_value_error([&] {
    return array_of(dispatch_chunks(flat<int64_t>(areas, "areas"), int32_of(world_size, "world_size"), bands_in(bands),
                                    int32_of(chunk_size, "chunk_size"), int32_of(total_q, "total_q"), dispatch));
  });
}

ffi::Tensor planner_rows_of_chunks(ffi::TensorView rank_of_chunk, int64_t chunk_size, int64_t total) {
  auto const ranks = flat<int32_t>(rank_of_chunk, "rank_of_chunk");
  int32_t const size = int32_of(chunk_size, "chunk_size"), tokens = int32_of(total, "total");
  if (size < 1) TVM_FFI_THROW(ValueError) << "chunk_size must be at least 1, got " << size;
  if (tokens < 0) TVM_FFI_THROW(ValueError) << "total must not be negative, got " << tokens;
  int64_t const expected = (int64_t{tokens} + size - 1) / size;
  if (static_cast<int64_t>(ranks.size()) != expected) {
    TVM_FFI_THROW(ValueError) << "chunks must be " << expected << " (total " << tokens << " by chunk_size " << size
                              << "), got " << ranks.size();
  }
  return rows_out(rows_of_chunks(ranks, size, tokens));
}

Owners owners_in(ffi::TensorView rows, int64_t world_size, int64_t total, char const* name) {
  return make_owners(int32_of(world_size, "world_size"), int32_of(total, "total"),
                     records<OwnerRow, int32_t>(rows, name), name);
}

// Checked and fused: (rank, begin, end, local) rows sorted by (rank, begin).
ffi::Tensor planner_make_owners(ffi::TensorView rows, int64_t world_size, int64_t total) {
  return refused_as_value_error([&] {
    Owners const owners = owners_in(rows, world_size, total, "owners");
    std::vector<int32_t> out;
    for (Run const& run : owners.runs) out.insert(out.end(), {run.rank, run.begin, run.end, run.local});
    return array_of(out.data(), {static_cast<int64_t>(owners.runs.size()), 4});
  });
}

// options: degree, max_degree, min_chunk_size, max_num_chunks, alg, shuffle, seed, pair_cost_fs, token_cost_fs,
// transfer_start_fs, compute_start_fs
StageOptions stage_options(ffi::TensorView options) {
  auto const o = flat<int64_t>(options, "options");
  if (o.size() != 11) TVM_FFI_THROW(ValueError) << "options must have 11 entries, got " << o.size();
  StageOptions s;
  s.degree = int32_of(o[0], "degree");
  s.max_degree = int32_of(o[1], "max_degree");
  s.min_chunk_size = int32_of(o[2], "min_chunk_size");
  s.max_num_chunks = int32_of(o[3], "max_num_chunks");
  if (o[4] < 0 || o[4] > 1) TVM_FFI_THROW(ValueError) << "stage alg must be 0 or 1, got " << o[4];
  s.alg = static_cast<StageAlg>(o[4]);
  s.shuffle = o[5] != 0;
  s.seed = static_cast<uint64_t>(o[6]);
  s.pair_cost_fs = o[7];
  s.token_cost_fs = o[8];
  s.transfer_start_fs = o[9];
  s.compute_start_fs = o[10];
  if (s.degree < -1 || s.degree > 1024) TVM_FFI_THROW(ValueError) << "degree must be in [0, 1024], got " << s.degree;
  if (s.max_degree < 1 || s.max_degree > 64) {
    TVM_FFI_THROW(ValueError) << "max_degree must be in [1, 64], got " << s.max_degree;
  }
  if (s.min_chunk_size < 1) TVM_FFI_THROW(ValueError) << "min_chunk_size must be at least 1, got " << s.min_chunk_size;
  if (s.max_num_chunks < 1) TVM_FFI_THROW(ValueError) << "max_num_chunks must be at least 1, got " << s.max_num_chunks;
  if (s.pair_cost_fs < 0 || s.token_cost_fs < 0 || s.transfer_start_fs < 0 || s.compute_start_fs < 0) {
    TVM_FFI_THROW(ValueError) << "costs must not be negative";
  }
  return s;
}

ffi::Tensor planner_plan_distributed(ffi::TensorView bands, ffi::TensorView q_rows, ffi::TensorView k_rows,
                                     int64_t world_size, int64_t total_q, int64_t total_k, ffi::TensorView options) {
  return refused_as_value_error([&] {
    return array_of(build_dist_plan(bands_in(bands), owners_in(q_rows, world_size, total_q, "q_owners"),
                                    owners_in(k_rows, world_size, total_k, "k_owners"), stage_options(options)));
  });
}

void planner_check_dist_plan(ffi::TensorView buffer) {
  refused_as_value_error([&] { return read_dist_plan(flat<int64_t>(buffer, "buffer")).world_size; });
}

// Layout of the result, int32 words: number of stages S; then (number of local bands); then per stage (receives, sends,
// bands); then the local bands (6 words each), then per stage its receives, sends (3 words each) and bands.
std::vector<int32_t> packed(RankPlan const& plan) {
  std::vector<int32_t> out;
  auto const count = [&out](size_t n) { out.push_back(static_cast<int32_t>(n)); };
  auto const bands = [&out](std::vector<Band> const& list) {
    for (Band const& b : list) out.insert(out.end(), {b.q0, b.q1, b.k0, b.k1, b.lo, b.hi});
  };
  auto const transfers = [&out](std::vector<Transfer> const& list) {
    for (Transfer const& t : list) out.insert(out.end(), {t.peer, t.begin, t.end});
  };
  count(plan.stages.size());
  count(plan.local_bands.size());
  for (StagePlan const& stage : plan.stages) {
    count(stage.recv.size());
    count(stage.send.size());
    count(stage.bands.size());
  }
  bands(plan.local_bands);
  for (StagePlan const& stage : plan.stages) {
    transfers(stage.recv);
    transfers(stage.send);
    bands(stage.bands);
  }
  return out;
}

ffi::Tensor planner_rank_plan(ffi::TensorView buffer, int64_t rank) {
  return refused_as_value_error([&] {
    return array_of(packed(make_rank_plan(read_dist_plan(flat<int64_t>(buffer, "buffer")), int32_of(rank, "rank"))));
  });
}

// The inverse of packed(); throws on a buffer that does not add up.
RankPlan unpacked(std::span<int32_t const> in) {
  size_t at = 0;
  auto const next = [&] {
    if (at >= in.size()) throw std::invalid_argument("rank plan: buffer ends early");
    return in[at++];
  };
  auto const count = [&] {
    int32_t const n = next();
    if (n < 0 || static_cast<size_t>(n) > in.size()) throw std::invalid_argument("rank plan: bad count");
    return static_cast<size_t>(n);
  };
  RankPlan plan;
  plan.stages.resize(count());
  plan.local_bands.resize(count());
  for (StagePlan& stage : plan.stages) {
    stage.recv.resize(count());
    stage.send.resize(count());
    stage.bands.resize(count());
  }
  auto const bands = [&](std::vector<Band>& list) {
    for (Band& b : list) {
      for (int32_t* const word : {&b.q0, &b.q1, &b.k0, &b.k1, &b.lo, &b.hi}) *word = next();
    }
  };
  auto const transfers = [&](std::vector<Transfer>& list) {
    for (Transfer& t : list) {
      for (int32_t* const word : {&t.peer, &t.begin, &t.end}) *word = next();
    }
  };
  bands(plan.local_bands);
  for (StagePlan& stage : plan.stages) {
    transfers(stage.recv);
    transfers(stage.send);
    bands(stage.bands);
  }
  if (at != in.size()) throw std::invalid_argument("rank plan: buffer is too long");
  return plan;
}

// Rank plans come one behind the other; offsets[r] .. offsets[r + 1] is the packed plan of rank r.
void planner_verify(ffi::TensorView buffer, ffi::TensorView rank_plans, ffi::TensorView offsets) {
  refused_as_value_error([&] {
    DistPlan const plan = read_dist_plan(flat<int64_t>(buffer, "buffer"));
    auto const words = flat<int32_t>(rank_plans, "rank_plans");
    auto const o = flat<int64_t>(offsets, "offsets");
    if (o.size() != static_cast<size_t>(plan.world_size) + 1)
      throw std::invalid_argument("offsets: one per rank and one more");
    std::vector<RankPlan> plans;
    for (size_t r = 0; r + 1 < o.size(); ++r) {
      if (o[r] < 0 || o[r] > o[r + 1] || o[r + 1] > static_cast<int64_t>(words.size())) {
        throw std::invalid_argument("offsets must ascend inside rank_plans");
      }
      plans.push_back(unpacked(words.subspan(static_cast<size_t>(o[r]), static_cast<size_t>(o[r + 1] - o[r]))));
    }
    verify_dist_plan(plan, plans);
    return 0;
  });
}

// Tokens that `dst` receives from `src`, (world, world) row-major by (src, dst), summed over stages.
ffi::Tensor planner_traffic(ffi::TensorView buffer) {
  return refused_as_value_error([&] {
    DistPlan const plan = read_dist_plan(flat<int64_t>(buffer, "buffer"));
    auto const world = static_cast<size_t>(plan.world_size);
    std::vector<int64_t> tokens(world * world * static_cast<size_t>(plan.num_stages), 0);
    for (int32_t s = 0; s < plan.num_stages; ++s) {
      for (int32_t dst = 0; dst < plan.world_size; ++dst) {
        for (Transfer const& t : receives(plan.stage(dst, s), plan.k_owners)) {
          tokens[(static_cast<size_t>(s) * world + static_cast<size_t>(t.peer)) * world + static_cast<size_t>(dst)] +=
              t.end - t.begin;
        }
      }
    }
    return array_of(tokens.data(), {plan.num_stages, plan.world_size, plan.world_size});
  });
}

}  // namespace
}  // namespace magi::binding

TVM_FFI_DLL_EXPORT_TYPED_FUNC(planner_chunk_areas, magi::binding::planner_chunk_areas);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(planner_suggest_chunk_size, magi::binding::planner_suggest_chunk_size);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(planner_dispatch_lower_bound, magi::binding::planner_dispatch_lower_bound);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(planner_dispatch_chunks, magi::binding::planner_dispatch_chunks);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(planner_rows_of_chunks, magi::binding::planner_rows_of_chunks);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(planner_make_owners, magi::binding::planner_make_owners);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(planner_plan_distributed, magi::binding::planner_plan_distributed);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(planner_check_dist_plan, magi::binding::planner_check_dist_plan);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(planner_rank_plan, magi::binding::planner_rank_plan);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(planner_verify, magi::binding::planner_verify);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(planner_traffic, magi::binding::planner_traffic);
