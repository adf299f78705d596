// Owners: which rank holds which tokens. A rank's local order is its global ranges ascending, back to back.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "host/band.h"

namespace magi {

// Tables of ranks are dense; more ranks than this are a mistake, not a machine.
inline constexpr int32_t kMaxWorldSize = 1 << 16;

// One row of the flat form that crosses the boundary: rank holds global tokens [begin, end).
struct OwnerRow {
  int32_t rank, begin, end;
};

// A maximal run of tokens of one rank; `local` is where its first token lies on that rank.
struct Run {
  int32_t begin, end, local, rank;
};

struct Owners {
  int32_t world_size = 0, total = 0;
  std::vector<Run> runs;          // sorted by (rank, begin), touching runs of a rank fused
  std::vector<int32_t> offsets;   // runs of rank r: [offsets[r], offsets[r + 1])
  std::vector<int32_t> by_begin;  // indices into runs, ascending global begin: a partition of [0, total)

  std::span<Run const> of(int32_t rank) const {
    auto const first = static_cast<size_t>(offsets[static_cast<size_t>(rank)]);
    return {runs.data() + first, static_cast<size_t>(offsets[static_cast<size_t>(rank) + 1]) - first};
  }
  int32_t num_local(int32_t rank) const;
  // The first position in by_begin whose run ends after `token`.
  size_t position_of(int32_t token) const;
};

// Checks that the rows are a partition of [0, total) over ranks [0, world_size); throws std::invalid_argument naming
// `what` ("q_owners"), and the token or rank that is wrong.
Owners make_owners(int32_t world_size, int32_t total, std::span<OwnerRow const> rows, char const* what);

// chunk i of `chunk_size` tokens (the last may be short) belongs to rank_of_chunk[i].
std::vector<OwnerRow> rows_of_chunks(std::span<int32_t const> rank_of_chunk, int32_t chunk_size, int32_t total);

}  // namespace magi
