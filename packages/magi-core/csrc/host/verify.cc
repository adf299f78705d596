#include "host/verify.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace magi {
namespace {

using std::to_string;

[[noreturn]] void fail(std::string const& message) { throw std::invalid_argument("plan is wrong: " + message); }

std::string place(int32_t rank, int32_t stage) {
  return "rank " + to_string(rank) + (stage < 0 ? ", local stage" : ", stage " + to_string(stage));
}

// Change of the cover count along one row: +1 where an interval of the mask begins, -1 where one of the plan begins.
struct Event {
  int32_t k, step;
};

// Bands by first row, handed out row by row.
class RowSweep {
 public:
  explicit RowSweep(std::vector<Band> bands) : bands_(std::move(bands)) {
    std::sort(bands_.begin(), bands_.end(), [](Band const& a, Band const& b) { return a.q0 < b.q0; });
  }
  template <class F>
  void visit(int32_t row, F const& f) {
    while (next_ < bands_.size() && bands_[next_].q0 <= row) active_.push_back(next_++);
    std::erase_if(active_, [&](size_t i) { return bands_[i].q1 <= row; });
    for (size_t const i : active_) {
      Band const& b = bands_[i];
      int64_t const begin = std::max<int64_t>(b.k0, int64_t{row} + b.lo);
      int64_t const end = std::min<int64_t>(b.k1, int64_t{row} + b.hi + 1);
      if (begin < end) f(static_cast<int32_t>(begin), static_cast<int32_t>(end));
    }
  }

 private:
  std::vector<Band> bands_;
  std::vector<size_t> active_;
  size_t next_ = 0;
};

void check_inside(std::span<Band const> bands, int64_t num_q, int64_t num_k, std::string const& where) {
  for (Band const& b : bands) {
    if (b.q0 < 0 || b.q0 >= b.q1 || b.q1 > num_q || b.k0 < 0 || b.k0 >= b.k1 || b.k1 > num_k || b.lo > b.hi) {
      fail(where + ": band q [" + to_string(b.q0) + ", " + to_string(b.q1) + ") k [" + to_string(b.k0) + ", " +
           to_string(b.k1) + ") is empty or lies outside " + to_string(num_q) + " queries x " + to_string(num_k) +
           " keys");
    }
  }
}

// Global token of every local one.
std::vector<int32_t> tokens_of(std::span<Run const> runs) {
  std::vector<int32_t> tokens;
  for (Run const& run : runs) {
    for (int32_t t = run.begin; t < run.end; ++t) tokens.push_back(t);
  }
  return tokens;
}

}  // namespace

void verify_dist_plan(DistPlan const& plan, std::span<RankPlan const> plans) {
  auto const world = static_cast<size_t>(plan.world_size);
  auto const num_stages = static_cast<size_t>(plan.num_stages);
  if (plans.size() != world)
    fail("it has " + to_string(plans.size()) + " rank plans for " + to_string(world) + " ranks");
  std::vector<std::vector<int32_t>> own_k(world);
  std::vector<int32_t> owner_of_key(static_cast<size_t>(plan.total_k), -1);
  for (size_t r = 0; r < world; ++r) {
    own_k[r] = tokens_of(plan.k_owners.of(static_cast<int32_t>(r)));
    for (int32_t const t : own_k[r]) owner_of_key[static_cast<size_t>(t)] = static_cast<int32_t>(r);
  }

  // Receives: from the owner, ascending, once, and never what the rank holds. keys[r][s]: global key of each buffer
  // slot.
  std::vector<std::vector<std::vector<int32_t>>> keys(world, std::vector<std::vector<int32_t>>(num_stages));
  for (size_t r = 0; r < world; ++r) {
    auto const rank = static_cast<int32_t>(r);
    if (plans[r].stages.size() != num_stages) {
      fail("rank " + to_string(r) + " has " + to_string(plans[r].stages.size()) + " stages, the plan " +
           to_string(num_stages));
    }
    std::vector<bool> received(static_cast<size_t>(plan.total_k), false);
    for (size_t s = 0; s < num_stages; ++s) {
      std::string const where = place(rank, static_cast<int32_t>(s));
      int32_t before = -1;
      for (Transfer const& t : plans[r].stages[s].recv) {
        if (t.begin >= t.end || t.begin < 0 || t.end > plan.total_k) {
          fail(where + ": receives [" + to_string(t.begin) + ", " + to_string(t.end) + "), outside [0, total_k)");
        }
        if (t.begin < before) fail(where + ": receives are not ascending at key " + to_string(t.begin));
        before = t.end;
        for (int32_t k = t.begin; k < t.end; ++k) {
          int32_t const owner = owner_of_key[static_cast<size_t>(k)];
          if (owner == rank) fail(where + ": receives key " + to_string(k) + ", which it owns");
          if (owner != t.peer) {
            fail(where + ": receives key " + to_string(k) + " from rank " + to_string(t.peer) + ", its owner is rank " +
                 to_string(owner));
          }
          if (received[static_cast<size_t>(k)]) fail(where + ": receives key " + to_string(k) + " twice");
          received[static_cast<size_t>(k)] = true;
          keys[r][s].push_back(k);
        }
      }
    }
  }

  // Sends: for every (stage, source, destination) the same tokens in the same order as the receives.
  for (size_t s = 0; s < num_stages; ++s) {
    for (size_t src = 0; src < world; ++src) {
      std::string const where = place(static_cast<int32_t>(src), static_cast<int32_t>(s));
      std::vector<std::vector<int32_t>> sent(world);
      int32_t peer_before = -1, end_before = 0;
      for (Transfer const& t : plans[src].stages[s].send) {
        if (t.peer < 0 || t.peer >= plan.world_size) fail(where + ": sends to rank " + to_string(t.peer));
        if (t.begin < 0 || t.begin >= t.end || static_cast<size_t>(t.end) > own_k[src].size()) {
          fail(where + ": sends local keys [" + to_string(t.begin) + ", " + to_string(t.end) + ") of " +
               to_string(own_k[src].size()));
        }
        if (t.peer < peer_before || (t.peer == peer_before && t.begin < end_before)) {
          fail(where + ": sends are not ascending by (destination, local key)");
        }
        peer_before = t.peer;
        end_before = t.end;
        for (int32_t l = t.begin; l < t.end; ++l) {
          sent[static_cast<size_t>(t.peer)].push_back(own_k[src][static_cast<size_t>(l)]);
        }
      }
      for (size_t dst = 0; dst < world; ++dst) {
        std::vector<int32_t> wanted;
        for (Transfer const& t : plans[dst].stages[s].recv) {
          if (t.peer != static_cast<int32_t>(src)) continue;
          for (int32_t k = t.begin; k < t.end; ++k) wanted.push_back(k);
        }
        if (wanted == sent[dst]) continue;
        auto const [a, b] = std::mismatch(wanted.begin(), wanted.end(), sent[dst].begin(), sent[dst].end());
        fail(where + ": sends " + to_string(sent[dst].size()) + " keys to rank " + to_string(dst) + ", which expects " +
             to_string(wanted.size()) + "; the first difference: " +
             (a == wanted.end()      ? "an unwanted key " + to_string(*b)
              : b == sent[dst].end() ? "key " + to_string(*a) + " is missing"
                                     : "key " + to_string(*b) + " in place of " + to_string(*a)));
      }
    }
  }

  // Pairs: along every query row the plan's intervals, mapped back to global keys, cancel those of the mask.
  std::vector<std::vector<int32_t>> own_q(world);
  std::vector<std::pair<int32_t, int32_t>> owner_of_row(static_cast<size_t>(plan.total_q));
  std::vector<std::vector<RowSweep>> sweeps(world);
  for (size_t r = 0; r < world; ++r) {
    auto const rank = static_cast<int32_t>(r);
    own_q[r] = tokens_of(plan.q_owners.of(rank));
    for (size_t l = 0; l < own_q[r].size(); ++l) {
      owner_of_row[static_cast<size_t>(own_q[r][l])] = {rank, static_cast<int32_t>(l)};
    }
    auto const num_q = static_cast<int64_t>(own_q[r].size());
    check_inside(plans[r].local_bands, num_q, static_cast<int64_t>(own_k[r].size()), place(rank, -1));
    sweeps[r].emplace_back(plans[r].local_bands);
    for (size_t s = 0; s < num_stages; ++s) {
      check_inside(plans[r].stages[s].bands, num_q, static_cast<int64_t>(keys[r][s].size()),
                   place(rank, static_cast<int32_t>(s)));
      sweeps[r].emplace_back(plans[r].stages[s].bands);
    }
  }
  RowSweep mask(plan.bands);
  std::vector<int64_t> areas(world, 0);
  std::vector<Event> events;
  std::vector<std::vector<std::vector<bool>>> used(world);
  for (size_t r = 0; r < world; ++r) {
    for (auto const& buffer : keys[r]) used[r].emplace_back(buffer.size(), false);
  }
  for (int32_t row = 0; row < plan.total_q; ++row) {
    auto const [rank, local] = owner_of_row[static_cast<size_t>(row)];
    auto const r = static_cast<size_t>(rank);
    events.clear();
    mask.visit(row, [&](int32_t begin, int32_t end) {
      events.push_back({begin, 1});
      events.push_back({end, -1});
      areas[r] += end - begin;
    });
    for (size_t part = 0; part < sweeps[r].size(); ++part) {
      auto const& slots = part == 0 ? own_k[r] : keys[r][part - 1];
      sweeps[r][part].visit(local, [&, row = row](int32_t begin, int32_t end) {
        for (int32_t i = begin; i < end;) {  // runs of neighbouring global keys
          int32_t const first = slots[static_cast<size_t>(i)];
          int32_t j = i + 1;
          while (j < end && slots[static_cast<size_t>(j)] == first + (j - i)) ++j;
          events.push_back({first, -1});
          events.push_back({first + (j - i), 1});
          i = j;
        }
        if (part > 0) std::fill(used[r][part - 1].begin() + begin, used[r][part - 1].begin() + end, true);
      });
    }
    std::sort(events.begin(), events.end(), [](Event const& a, Event const& b) { return a.k < b.k; });
    int32_t cover = 0;
    for (size_t i = 0; i < events.size(); ++i) {
      cover += events[i].step;
      if (i + 1 < events.size() && events[i + 1].k == events[i].k) continue;
      if (cover == 0) continue;
      fail("pair (q " + to_string(row) + ", k " + to_string(events[i].k) + ") on rank " + to_string(rank) +
           (cover > 0 ? " is computed " + to_string(cover) + " time(s) too few"
                      : " is computed " + to_string(-cover) + " time(s) too often"));
    }
  }
  for (size_t r = 0; r < world; ++r) {
    if (areas[r] != plan.areas[r]) {
      fail("area of rank " + to_string(r) + " is " + to_string(areas[r]) + ", the plan says " +
           to_string(plan.areas[r]));
    }
    for (size_t s = 0; s < num_stages; ++s) {
      auto const idle = std::find(used[r][s].begin(), used[r][s].end(), false);
      if (idle == used[r][s].end()) continue;
      auto const slot = static_cast<size_t>(idle - used[r][s].begin());
      fail(place(static_cast<int32_t>(r), static_cast<int32_t>(s)) + ": receives key " + to_string(keys[r][s][slot]) +
           " and never uses it");
    }
  }
}

}  // namespace magi
