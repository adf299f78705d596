// Stages: the remote keys of a rank, cut into parts that are fetched one behind the other while the part before is
// computed. A *piece* is a run of consecutive remote tokens (over the merged ranges, gaps skipped); a stage is a run of
// consecutive pieces. All costs are integers (femtoseconds), products 128 bits wide.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "host/band.h"

namespace magi {

enum class StageAlg : int32_t {
  kUniform = 0,  // near-equal numbers of pieces, smaller stages first
  kGreedy = 1,   // the borders that minimise predicted time, found exactly by dynamic programming
};

struct StageOptions {
  int32_t degree = 1;            // 0: one blocking stage; n: at most n stages; -1: the cost model decides
  int32_t max_degree = 8;        // largest degree tried for -1
  int32_t min_chunk_size = 512;  // smallest piece, tokens
  int32_t max_num_chunks = 64;   // most pieces of a rank
  StageAlg alg = StageAlg::kUniform;
  bool shuffle = false;  // deal pieces in an order drawn from `seed` (uniform only)
  uint64_t seed = 0;
  int64_t pair_cost_fs = 50'000;               // computing one (query, key) pair, all heads
  int64_t token_cost_fs = 15'000'000;          // receiving one key and value token
  int64_t transfer_start_fs = 20'000'000'000;  // starting a transfer
  int64_t compute_start_fs = 5'000'000'000;    // starting a stage's kernel
};

// What one rank contributes to the choice.
struct StageInput {
  int64_t local_area = 0;
  std::span<Range const> remote;
  std::span<Band const> pieces_of_mask;  // the rank's row pieces, global coordinates; read only when costs matter
};

struct StagePart {
  std::vector<std::vector<Range>> ranges;  // per stage, ascending
};

struct StageSplit {
  int32_t num_stages = 0;
  std::vector<StagePart> ranks;
  int64_t predicted_fs = 0;  // slowest rank, 0 when no cost was asked for, saturating
};

// The same number of stages for every rank; stages that are empty on all ranks do not exist.
StageSplit split_stages(std::span<StageInput const> ranks, StageOptions const& options);

// Area of bands inside a key interval.
int64_t area_of_keys(std::span<Band const> bands, Range keys);

}  // namespace magi
