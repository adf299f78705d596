// The default dispatch: balance and locality together, at equal chunk counts.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "host/band.h"
#include "host/dispatch.h"

namespace magi {

// Rank of each chunk. With bands, the price of a placement is the slowest rank's compute and what it must receive;
// without, neighbouring chunks are taken to share keys.
std::vector<int32_t> dispatch_locality(std::span<int64_t const> areas, int32_t world_size, std::span<Band const> bands,
                                       std::span<Range const> chunks, DispatchOptions const& options);

}  // namespace magi
