// A check of a distributed plan that shares no code with the planner: row by row, token by token.
#pragma once
#include <span>

#include "host/dist_plan.h"

namespace magi {

// Throws std::invalid_argument naming the first thing that is wrong: a visible pair computed no or too many times, a
// pair that the mask does not have, a band outside its index space, a token received twice or never used or already
// owned, a send without its receive (or in another order), a rank with another number of stages, an area that does not
// add up. `plans` has one entry per rank. Cost: visible row intervals, O(rows x bands per row).
void verify_dist_plan(DistPlan const& plan, std::span<RankPlan const> plans);

}  // namespace magi
