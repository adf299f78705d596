// FlexPlan on the host: bands in, the buffer of magi/plan_format.h out. A pure function of its arguments.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "host/band.h"

namespace magi {

struct FlexPlanOptions {
  int32_t total_q = 0, total_k = 0;
  int32_t num_heads_q = 0, num_heads_kv = 0;  // 0: serves any head count, and nothing is split
  int32_t block_m = 128, block_n = 128;
  int32_t bwd_block_m = 64, bwd_block_n = 128;
  int32_t stage = 0, num_stages = 1;
  int32_t num_sms = 132;
  bool allow_overlap = false;
  std::span<int32_t const> q_tile_starts;  // ascending from 0 to total_q; empty: every block_m rows
  std::span<int32_t const> tile_flags;     // one per tile of q_tile_starts; empty: first and last
};

// `bands` must be canonical and lie within the totals. Throws std::length_error when the buffer would pass 2^31 words.
std::vector<int32_t> build_flex_plan(std::span<Band const> bands, FlexPlanOptions const& options);

}  // namespace magi
