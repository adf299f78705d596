#include "host/dist_plan.h"

#include <algorithm>
#include <stdexcept>
#include <tuple>

namespace magi {
namespace {

using std::to_string;

// A run of the buffer that a set of keys (or queries) is laid out in: global [begin, end) starts at `at`.
struct Segment {
  int32_t begin, end, at;
};

// True, and `a` grown, when a and b touch and their union is exactly one band. The two never overlap here, and the
// bounding band holds both, so equal areas mean equal sets.
bool join(Band& a, Band const& b) {
  bool const rows_touch = a.q1 == b.q0 || b.q1 == a.q0, cols_touch = a.k1 == b.k0 || b.k1 == a.k0;
  if (!rows_touch && !cols_touch) return false;
  Band const both{std::min(a.q0, b.q0), std::max(a.q1, b.q1), std::min(a.k0, b.k0),
                  std::max(a.k1, b.k1), std::min(a.lo, b.lo), std::max(a.hi, b.hi)};
  if (area(both) != area(a) + area(b)) return false;
  a = shrink(both);
  return true;
}

std::vector<Segment> segments_of(std::span<Run const> runs) {
  std::vector<Segment> out;
  for (Run const& run : runs) out.push_back({run.begin, run.end, run.local});
  return out;
}

std::vector<Segment> segments_of(std::span<Range const> ranges) {
  std::vector<Segment> out;
  int32_t at = 0;
  for (Range const& range : ranges) {
    out.push_back({range.begin, range.end, at});
    at += range.length();
  }
  return out;
}

// Row pieces (global) seen through the key segments, in coordinates of the query runs and of the key buffer.
std::vector<Band> localised(std::span<RowPiece const> pieces, std::span<Segment const> q_runs,
                            std::span<Segment const> keys) {
  std::vector<Band> out;
  for (RowPiece const& piece : pieces) {
    Segment const& rows = q_runs[static_cast<size_t>(piece.run)];
    auto seg = std::upper_bound(keys.begin(), keys.end(), piece.band.k0,
                                [](int32_t k, Segment const& s) { return k < s.end; });
    size_t const first = out.size();
    for (; seg != keys.end() && seg->begin < piece.band.k1; ++seg) {
      Band part = clip(piece.band, {rows.begin, rows.end}, {seg->begin, seg->end});
      if (is_empty(part)) continue;
      part = shift(part, rows.at - rows.begin, seg->at - seg->begin);
      if (out.size() == first || !join(out.back(), part)) out.push_back(part);
    }
  }
  return fused(std::move(out));
}

uint64_t mix(uint64_t h, uint64_t x) {
  h ^= x + 0x9E3779B97F4A7C15u + (h << 6) + (h >> 2);
  h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9u;
  h = (h ^ (h >> 27)) * 0x94D049BB133111EBu;
  return h ^ (h >> 31);
}

void append_runs(std::vector<int64_t>& out, Owners const& owners) {
  for (Run const& run : owners.runs) out.insert(out.end(), {run.rank, run.begin, run.end});
}

}  // namespace

std::vector<Band> fused(std::vector<Band> bands) {
  auto const pass = [&bands](auto const& key) {
    if (bands.size() < 2) return false;
    std::sort(bands.begin(), bands.end(), [&](Band const& a, Band const& b) { return key(a) < key(b); });
    size_t kept = 0;
    for (size_t i = 1; i < bands.size(); ++i) {
      if (!join(bands[kept], bands[i])) bands[++kept] = bands[i];
    }
    bool const changed = kept + 1 != bands.size();
    bands.resize(kept + 1);
    return changed;
  };
  for (bool changed = true; changed;) {
    changed = pass([](Band const& b) { return std::tie(b.q0, b.q1, b.k0, b.k1, b.lo, b.hi); });
    changed |= pass([](Band const& b) { return std::tie(b.k0, b.k1, b.q0, b.q1, b.lo, b.hi); });
    changed |= pass([](Band const& b) { return std::tie(b.hi, b.q0, b.q1, b.k0, b.k1, b.lo); });
    changed |= pass([](Band const& b) { return std::tie(b.lo, b.q0, b.q1, b.k0, b.k1, b.hi); });
  }
  std::sort(bands.begin(), bands.end(), [](Band const& a, Band const& b) {
    return std::tie(a.q0, a.k0, a.q1, a.k1, a.lo, a.hi) < std::tie(b.q0, b.k0, b.q1, b.k1, b.lo, b.hi);
  });
  return bands;
}

uint64_t digest_of(std::span<int64_t const> buffer) {
  uint64_t h = 0x6D616769u;
  for (size_t i = 0; i < buffer.size(); ++i) {
    if (i != dist::kDigest) h = mix(h, static_cast<uint64_t>(buffer[i]));
  }
  return h;
}

std::vector<int64_t> build_dist_plan(std::span<Band const> bands, Owners const& q_owners, Owners const& k_owners,
                                     StageOptions const& options) {
  if (q_owners.world_size != k_owners.world_size) {
    throw std::invalid_argument("q_owners and k_owners must be of one world size, got " +
                                to_string(q_owners.world_size) + " and " + to_string(k_owners.world_size));
  }
  for (size_t i = 0; i < bands.size(); ++i) {
    Band const& b = bands[i];
    if (is_empty(b)) continue;
    if (b.q0 < 0 || b.q1 > q_owners.total || b.k0 < 0 || b.k1 > k_owners.total) {
      throw std::invalid_argument("bands: band " + to_string(i) + " covers q [" + to_string(b.q0) + ", " +
                                  to_string(b.q1) + ") and k [" + to_string(b.k0) + ", " + to_string(b.k1) +
                                  "), outside the totals " + to_string(q_owners.total) + " and " +
                                  to_string(k_owners.total));
    }
  }
  auto const needs = rank_needs(bands, q_owners, k_owners);
  auto const world = static_cast<size_t>(q_owners.world_size);
  std::vector<std::vector<Band>> masks(world);
  bool const needs_costs = options.degree < 0 || options.alg == StageAlg::kGreedy;
  std::vector<StageInput> inputs(world);
  std::vector<Range> runs;
  for (size_t rank = 0; rank < world; ++rank) {
    inputs[rank].remote = needs[rank].remote;
    if (!needs_costs) continue;
    runs.clear();
    for (Run const& run : q_owners.of(static_cast<int32_t>(rank))) runs.push_back({run.begin, run.end});
    for (RowPiece const& piece : clip_to_runs(bands, runs)) masks[rank].push_back(piece.band);
    inputs[rank].pieces_of_mask = masks[rank];
    int64_t remote = 0;
    for (Range const& range : needs[rank].remote) remote += area_of_keys(masks[rank], range);
    inputs[rank].local_area = needs[rank].area - remote;
  }
  StageSplit const split = split_stages(inputs, options);

  std::vector<int64_t> out(dist::kHeaderWords, 0);
  auto const here = [&out] { return static_cast<int64_t>(out.size()); };
  out[dist::kMagicWord] = dist::kMagic;
  out[dist::kVersionWord] = dist::kVersion;
  out[dist::kWorldSize] = q_owners.world_size;
  out[dist::kTotalQ] = q_owners.total;
  out[dist::kTotalK] = k_owners.total;
  out[dist::kNumStages] = split.num_stages;
  out[dist::kBlocking] = options.degree == 0;
  out[dist::kPredictedFs] = split.predicted_fs;
  out[dist::kBands] = here();
  for (Band const& b : bands) {
    if (is_empty(b)) continue;
    out.insert(out.end(), {b.q0, b.q1, b.k0, b.k1, b.lo, b.hi});
    ++out[dist::kNumBands];
  }
  out[dist::kNumQRuns] = static_cast<int64_t>(q_owners.runs.size());
  out[dist::kQRuns] = here();
  append_runs(out, q_owners);
  out[dist::kNumKRuns] = static_cast<int64_t>(k_owners.runs.size());
  out[dist::kKRuns] = here();
  append_runs(out, k_owners);
  out[dist::kAreas] = here();
  for (RankNeeds const& need : needs) out.push_back(need.area);
  out[dist::kStageOffsets] = here();
  int64_t count = 0;
  out.push_back(count);
  for (StagePart const& part : split.ranks) {
    for (auto const& ranges : part.ranges) out.push_back(count += static_cast<int64_t>(ranges.size()));
  }
  out[dist::kNumStageRanges] = count;
  out[dist::kStageRanges] = here();
  for (StagePart const& part : split.ranks) {
    for (auto const& ranges : part.ranges) {
      for (Range const& range : ranges) out.insert(out.end(), {range.begin, range.end});
    }
  }
  out[dist::kNumWords] = here();
  out[dist::kDigest] = static_cast<int64_t>(digest_of(out));
  return out;
}

DistPlan read_dist_plan(std::span<int64_t const> buffer) {
  auto const size = static_cast<int64_t>(buffer.size());
  if (size < dist::kHeaderWords || buffer[dist::kMagicWord] != dist::kMagic) {
    throw std::invalid_argument("buffer is not a DistPlan: the magic word is missing");
  }
  if (buffer[dist::kVersionWord] != dist::kVersion) {
    throw std::invalid_argument("buffer is a DistPlan of version " + to_string(buffer[dist::kVersionWord]) +
                                ", this library reads version " + to_string(dist::kVersion));
  }
  if (buffer[dist::kNumWords] != size) {
    throw std::invalid_argument("buffer must have " + to_string(buffer[dist::kNumWords]) + " words, got " +
                                to_string(size));
  }
  if (buffer[dist::kDigest] != static_cast<int64_t>(digest_of(buffer))) {
    throw std::invalid_argument("buffer does not match its digest: it was changed after planning");
  }
  auto const section = [&](int64_t offset, int64_t count, int64_t words, char const* what) {
    if (count < 0 || count > size || offset < dist::kHeaderWords || offset > size || count * words > size - offset) {
      throw std::invalid_argument(std::string("buffer: section ") + what + " lies outside");
    }
    return buffer.subspan(static_cast<size_t>(offset), static_cast<size_t>(count * words));
  };
  auto const narrow = [](int64_t x, char const* what) {
    if (x < 0 || x > INT32_MAX)
      throw std::invalid_argument(std::string("buffer: ") + what + " out of range: " + to_string(x));
    return static_cast<int32_t>(x);
  };
  DistPlan plan;
  plan.world_size = narrow(buffer[dist::kWorldSize], "world_size");
  plan.total_q = narrow(buffer[dist::kTotalQ], "total_q");
  plan.total_k = narrow(buffer[dist::kTotalK], "total_k");
  plan.num_stages = narrow(buffer[dist::kNumStages], "num_stages");
  plan.blocking = buffer[dist::kBlocking] != 0;
  auto const bands = section(buffer[dist::kBands], buffer[dist::kNumBands], 6, "bands");
  for (size_t i = 0; i + 6 <= bands.size(); i += 6) {
    auto const word = [&](size_t j) { return static_cast<int32_t>(bands[i + j]); };
    plan.bands.push_back({word(0), word(1), word(2), word(3), word(4), word(5)});
  }
  auto const owners = [&](int64_t offset, int64_t count, int32_t total, char const* what) {
    auto const words = section(offset, count, 3, what);
    std::vector<OwnerRow> rows;
    for (size_t i = 0; i + 3 <= words.size(); i += 3) {
      rows.push_back({narrow(words[i], what), narrow(words[i + 1], what), narrow(words[i + 2], what)});
    }
    return make_owners(plan.world_size, total, rows, what);
  };
  plan.q_owners = owners(buffer[dist::kQRuns], buffer[dist::kNumQRuns], plan.total_q, "q_owners");
  plan.k_owners = owners(buffer[dist::kKRuns], buffer[dist::kNumKRuns], plan.total_k, "k_owners");
  auto const areas = section(buffer[dist::kAreas], plan.world_size, 1, "areas");
  plan.areas.assign(areas.begin(), areas.end());
  int64_t const cells = int64_t{plan.world_size} * plan.num_stages;
  auto const offsets = section(buffer[dist::kStageOffsets], cells + 1, 1, "stage offsets");
  int64_t const num_ranges = buffer[dist::kNumStageRanges];
  auto const ranges = section(buffer[dist::kStageRanges], num_ranges, 2, "stage ranges");
  plan.stage_ranges.resize(static_cast<size_t>(cells));
  for (size_t i = 0; i < plan.stage_ranges.size(); ++i) {
    if (offsets[i] < 0 || offsets[i] > offsets[i + 1] || offsets[i + 1] > num_ranges) {
      throw std::invalid_argument("buffer: stage offsets must ascend");
    }
    int32_t end_before = 0;
    for (int64_t j = offsets[i]; j < offsets[i + 1]; ++j) {
      Range const range{narrow(ranges[static_cast<size_t>(2 * j)], "stage range"),
                        narrow(ranges[static_cast<size_t>(2 * j + 1)], "stage range")};
      if (range.is_empty() || range.begin < end_before || range.end > plan.total_k) {
        throw std::invalid_argument("buffer: stage ranges must ascend inside [0, total_k), got [" +
                                    to_string(range.begin) + ", " + to_string(range.end) + ")");
      }
      end_before = range.end;
      plan.stage_ranges[i].push_back(range);
    }
  }
  return plan;
}

RankPlan make_rank_plan(DistPlan const& plan, int32_t rank) {
  if (rank < 0 || rank >= plan.world_size) {
    throw std::invalid_argument("rank must be in [0, " + to_string(plan.world_size) + "), got " + to_string(rank));
  }
  RankPlan out;
  auto const q_runs = segments_of(plan.q_owners.of(rank));
  auto const own = plan.k_owners.of(rank);
  auto const k_runs = segments_of(own);
  std::vector<Range> rows;
  for (Segment const& run : q_runs) rows.push_back({run.begin, run.end});
  auto const pieces = clip_to_runs(plan.bands, rows);
  out.local_bands = localised(pieces, q_runs, k_runs);
  for (int32_t s = 0; s < plan.num_stages; ++s) {
    StagePlan& stage = out.stages.emplace_back();
    stage.recv = receives(plan.stage(rank, s), plan.k_owners);
    stage.bands = localised(pieces, q_runs, segments_of(plan.stage(rank, s)));
    for (int32_t dst = 0; dst < plan.world_size; ++dst) {
      auto const wanted = plan.stage(dst, s);
      size_t const first = stage.send.size();
      for (size_t i = 0, j = 0; i < wanted.size() && j < own.size();) {
        int32_t const begin = std::max(wanted[i].begin, own[j].begin), end = std::min(wanted[i].end, own[j].end);
        if (begin < end) {
          int32_t const l0 = begin - own[j].begin + own[j].local, l1 = l0 + end - begin;
          if (stage.send.size() > first && stage.send.back().end == l0)
            stage.send.back().end = l1;
          else
            stage.send.push_back({dst, l0, l1});
        }
        if (wanted[i].end < own[j].end)
          ++i;
        else
          ++j;
      }
    }
  }
  return out;
}

}  // namespace magi
