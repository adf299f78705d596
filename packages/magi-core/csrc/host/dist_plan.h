// DistPlan: what every rank computes, sends and receives, as one flat int64 buffer that is equal on every rank.
//
// The buffer holds decisions only: owners of queries and keys, the mask, and per (rank, stage) the remote key ranges.
// What one rank needs beyond that (its bands in local coordinates, its transfers) follows from the buffer and is made
// when asked for, so planning costs no more than one rank's share. Keys travel, queries do not.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "host/band.h"
#include "host/owners.h"
#include "host/stage.h"
#include "host/transfer.h"

namespace magi {

namespace dist {

inline constexpr int64_t kMagic = 0x4749'414D'5453'4944;  // "DISTMAGI" read as little-endian bytes: D I S T M A I G
inline constexpr int64_t kVersion = 1;
inline constexpr int kHeaderWords = 32;

// Word index of each header field; offsets count int64 words from the start.
enum Header : int {
  kMagicWord = 0,
  kVersionWord,
  kDigest,  // of every other word
  kNumWords,
  kWorldSize,
  kTotalQ,
  kTotalK,
  kNumStages,    // remote stages, equal on every rank
  kBlocking,     // 1: every remote key is there before anything is computed (degree 0)
  kPredictedFs,  // slowest rank's predicted time where the cost model was asked, else 0
  kNumBands,
  kBands,  // (q0, q1, k0, k1, lo, hi) each, global, canonical
  kNumQRuns,
  kQRuns,  // (rank, begin, end) each, sorted by (rank, begin)
  kNumKRuns,
  kKRuns,
  kAreas,         // visible pairs per rank
  kStageOffsets,  // world_size * num_stages + 1: ranges of (rank, stage) are [o[i], o[i + 1]), i = rank * stages +
                  // stage
  kNumStageRanges,
  kStageRanges,  // (begin, end) each, global, ascending inside a stage
  kHeaderFieldEnd,
};
static_assert(kHeaderFieldEnd <= kHeaderWords);

}  // namespace dist

// A checked view of a buffer.
struct DistPlan {
  int32_t world_size = 0, total_q = 0, total_k = 0, num_stages = 0;
  bool blocking = false;
  std::vector<Band> bands;
  Owners q_owners, k_owners;
  std::vector<int64_t> areas;
  std::vector<std::vector<Range>> stage_ranges;  // rank * num_stages + stage

  std::span<Range const> stage(int32_t rank, int32_t s) const {
    return stage_ranges[static_cast<size_t>(rank) * static_cast<size_t>(num_stages) + static_cast<size_t>(s)];
  }
};

std::vector<int64_t> build_dist_plan(std::span<Band const> bands, Owners const& q_owners, Owners const& k_owners,
                                     StageOptions const& options);

// Throws std::invalid_argument when the buffer is no plan of this version, was changed, or is inconsistent inside.
DistPlan read_dist_plan(std::span<int64_t const> buffer);

uint64_t digest_of(std::span<int64_t const> buffer);

struct StagePlan {
  std::vector<Transfer> recv;  // (src, k0, k1) global, ascending k0; the stage's keys are these, back to back
  std::vector<Transfer> send;  // (dst, l0, l1) local keys, ascending (dst, l0), in dst's order
  std::vector<Band> bands;     // local queries x the stage's keys
};

struct RankPlan {
  std::vector<Band> local_bands;  // local queries x local keys
  std::vector<StagePlan> stages;
};

RankPlan make_rank_plan(DistPlan const& plan, int32_t rank);

// Joins bands whose union is again a band; the cells stay the same, their number falls. Any order in, sorted out.
std::vector<Band> fused(std::vector<Band> bands);

}  // namespace magi
