// Transfers: which keys every rank must receive, and from whom. Only keys travel; queries stay where they are.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "host/band.h"
#include "host/owners.h"

namespace magi {

// Sorted, disjoint ranges with gaps between them; order-free input, touching ranges fused, empty ones dropped.
std::vector<Range> merged(std::vector<Range> ranges);

// a less b, and the common part; both arguments merged.
std::vector<Range> difference(std::span<Range const> a, std::span<Range const> b);
std::vector<Range> intersection(std::span<Range const> a, std::span<Range const> b);

int64_t num_tokens(std::span<Range const> ranges);

// Part of the mask inside one run of query rows. The visible columns of a shrunk band have no hole, because the
// intervals of neighbouring rows touch: its columns are [k0, k1).
struct RowPiece {
  int32_t run;  // index into the runs given
  Band band;    // clipped and shrunk, global coordinates
};

// Every band against every run that it touches. `runs` ascending and disjoint; bands in any order. Pieces come grouped
// by run, ascending.
std::vector<RowPiece> clip_to_runs(std::span<Band const> bands, std::span<Range const> runs);

struct RankNeeds {
  int64_t area = 0;           // visible pairs of the rank's own query rows
  std::vector<Range> remote;  // keys seen and not owned, merged, ascending
};

// For every rank what it computes and what it must receive.
std::vector<RankNeeds> rank_needs(std::span<Band const> bands, Owners const& q_owners, Owners const& k_owners);

struct Transfer {
  int32_t peer, begin, end;
};

// Ranges cut at owner borders: (source, k0, k1), global, ascending k0.
std::vector<Transfer> receives(std::span<Range const> remote, Owners const& k_owners);

}  // namespace magi
