// Dispatch: which rank computes which chunk of query rows (and owns its keys).
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "host/band.h"
#include "host/owners.h"

namespace magi {

// Visible pairs of each chunk of `chunk_size` rows; the last chunk may be short. Closed forms: the cost is the number
// of (band, chunk) pairs that touch.
std::vector<int64_t> chunk_areas(std::span<Band const> bands, int32_t chunk_size, int32_t total_q);

enum class DispatchAlg : int32_t {
  kBalanced = 0,    // ours: locality and balance by local search (see locality.h); needs only areas, better with bands
  kMinHeap = 1,     // longest chunk to the least loaded rank
  kSequential = 2,  // contiguous blocks
  kLowerBound = 3,  // min-heap, then swaps until the lower bound is met or nothing improves
  kDynamic = 4,     // exact: least largest load, any counts; small inputs
  kBinarySearch = 5,      // binary search on the largest load with backtracking, any counts
  kBacktracking = 6,      // exact branch and bound at equal counts, bounded effort
  kToppHeap = 7,          // min-heap among the lightest ranks by shared keys
  kBatchToppHeap = 8,     // the same for several chunks at a time
  kRandom = 9,            // seeded shuffle, then blocks
  kSortedSequential = 10  // slice by slice, largest first, in few runs
};
inline constexpr int32_t kNumDispatchAlgs = 11;

struct DispatchOptions {
  DispatchAlg alg = DispatchAlg::kBalanced;
  int32_t num_candidates = 1;     // top-p: lightest ranks looked at
  int32_t batch = 1;              // batch top-p: chunks looked at
  int32_t ratio_ppm = 1'000'000;  // sorted sequential: largest share of a slice's chunks on one rank
  uint64_t seed = 0;
  int64_t node_limit = 2'000'000;  // exact searches give up (keeping their best) after as many steps
  int64_t balance_ppm = 10'000;    // balanced: largest area over the mean that is free of charge
  int64_t pair_cost_fs = 50'000;   // balanced: price of a pair against price of a received token
  int64_t token_cost_fs = 15'000'000;
};

// Rank of each chunk. Counts differ by at most one over the ranks, except for kDynamic and kBinarySearch.
// `bands` may be empty for algorithms that look at areas only. Throws std::invalid_argument.
std::vector<int32_t> dispatch_chunks(std::span<int64_t const> areas, int32_t world_size, std::span<Band const> bands,
                                     int32_t chunk_size, int32_t total_q, DispatchOptions const& options);

// Chunk size for a mask: ceil(total_q / (8 * world_size)), at most `limit`, and halved while the largest chunk has more
// than four fifths of a rank's mean area (it could not be balanced), down to 64 rows and 64 chunks a rank.
int32_t suggest_chunk_size(std::span<Band const> bands, int32_t total_q, int32_t world_size, int32_t limit);

// No assignment has a smaller largest load: max(mean rounded up, largest chunk, sum of the pairs that must share).
int64_t dispatch_lower_bound(std::span<int64_t const> areas, int32_t world_size);

}  // namespace magi
