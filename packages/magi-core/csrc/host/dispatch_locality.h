// The default dispatch: balance and locality together, at equal chunk counts.
//
// Three layouts are made and repaired, and the best is taken. *Sequential*: contiguous blocks, best where every row
// sees about as much (windows). *Fold*: inside each part of the sequence that no band leaves (a document), rows that
// see more than the mean are taken in ascending order, each balanced by rows that see less, from the middle downwards.
// For one causal document this is the least sum of largest positions at equal counts and areas: of groups with one
// mean, those that join the largest rows with the smallest need the fewest large ones. Documents that are light as a
// whole fill up the ranks of heavy ones. *Greedy*: largest chunk first, to the rank where compute and new keys cost
// least (few ranks only). Source: ours; the greedy is the one of the reference figures in docs.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "host/band.h"
#include "host/dispatch.h"

namespace magi {

// Rank of each chunk. With bands, the keys a rank must receive count; without, neighbouring chunks are taken to share
// keys. `chunks` are the rows of each chunk (empty without bands).
std::vector<int32_t> dispatch_locality(std::span<int64_t const> areas, int32_t world_size, std::span<Band const> bands,
                                       std::span<Range const> chunks, DispatchOptions const& options);

}  // namespace magi
