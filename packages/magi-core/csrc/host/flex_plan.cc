#include "host/flex_plan.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <unordered_map>

namespace magi {
namespace {

using plan::Item;
using plan::Job;
using plan::Tile;

static_assert(std::endian::native == std::endian::little, "a bit mask is written as 64-bit words");

// Sections of kv heads are as large as keys and values of this many bytes, which stay in L2 while they are reread.
constexpr int64_t kSectionBytes = int64_t{16} << 20;
constexpr int64_t kBytesPerKey = 4 * 128;  // one kv head's k and v row, 2 bytes an element, head dim 128

// A forward part is at least this many steps: merging a part costs about one.
constexpr int64_t kMinSplitSteps = 4;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// 128 x 128 bits, rows are queries.
struct BitMask {
  uint64_t words[2 * plan::kMaskRows] = {};

  static std::pair<uint64_t, uint64_t> row_bits(int begin, int end) {
    auto const below = [](int n) { return n <= 0 ? 0 : n >= 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1; };
    return {below(end) & ~below(begin), below(end - 64) & ~below(begin - 64)};
  }

  // Shows the cells of `cells`, rows counted from q and columns from k, unless one of them is shown already.
  bool add(Band const& cells, int32_t q, int32_t k) {
    for (int pass = 0; pass < 2; ++pass) {
      for (int32_t row = cells.q0; row < cells.q1; ++row) {
        Range const c = columns(cells, row);
        auto const [low, high] = row_bits(c.begin - k, c.end - k);
        uint64_t* const w = words + 2 * (row - q);
        if (pass == 0 && ((w[0] & low) | (w[1] & high)) != 0) return false;
        if (pass == 1) w[0] |= low, w[1] |= high;
      }
    }
    return true;
  }

  bool is_full(int rows, int cols) const {
    auto const [low, high] = row_bits(0, cols);
    for (int r = 0; r < rows; ++r) {
      if (words[2 * r] != low || words[2 * r + 1] != high) return false;
    }
    return true;
  }
};

// The bit masks of a plan, equal ones stored once.
class MaskStore {
 public:
  int32_t intern(BitMask const& mask) {
    uint64_t hash = 0;
    for (uint64_t const w : mask.words) {
      hash = (hash ^ w) * 0xBF58476D1CE4E5B9u;
      hash ^= hash >> 29;
    }
    auto [it, end] = by_hash_.equal_range(hash);
    for (; it != end; ++it) {
      if (std::memcmp(&masks_[static_cast<size_t>(it->second)], &mask, sizeof mask) == 0) return it->second;
    }
    auto const index = static_cast<int32_t>(masks_.size());
    masks_.push_back(mask);
    by_hash_.emplace(hash, index);
    return index;
  }

  std::vector<BitMask> const& masks() const { return masks_; }

 private:
  std::vector<BitMask> masks_;
  std::unordered_multimap<uint64_t, int32_t> by_hash_;
};

// An interval of the moving axis that one band of a tile needs.
struct Piece {
  int32_t begin, end;
  int32_t band;
  bool is_full;
};

// Pieces that share one job.
struct Group {
  int32_t begin, end;
  std::vector<Piece> pieces;
  BitMask mask;  // meaningful from the second piece on
};

struct Direction {
  std::vector<Tile> tiles;
  std::vector<Job> jobs;
  std::vector<Item> items;
  int64_t split_slots = 0;
};

// Tiles and jobs of one direction. Bands are oriented: q is the stationary axis, k the moving one.
class TileBuilder {
 public:
  TileBuilder(std::span<Band const> oriented, bool is_backward, int32_t step, int32_t largest_tile, MaskStore& masks)
      : bands_(oriented), is_backward_(is_backward), step_(step), masks_(masks) {
    can_share_ = largest_tile <= plan::kMaskRows && step <= plan::kMaskRows;
    order_.resize(bands_.size());
    for (size_t i = 0; i < order_.size(); ++i) order_[i] = static_cast<int32_t>(i);
    std::stable_sort(order_.begin(), order_.end(), [this](int32_t a, int32_t b) { return at(a).q0 < at(b).q0; });
    for (Band const& b : bands_) covered_.push_back({b.k0, b.k1});
    std::sort(covered_.begin(), covered_.end(), [](Range a, Range b) { return a.begin < b.begin; });
    size_t kept = 0;
    for (size_t i = 1; i < covered_.size(); ++i) {
      if (covered_[i].begin <= covered_[kept].end)
        covered_[kept].end = std::max(covered_[kept].end, covered_[i].end);
      else
        covered_[++kept] = covered_[i];
    }
    if (!covered_.empty()) covered_.resize(kept + 1);
  }

  // Appends the jobs of a tile and the tile. Tiles must come in ascending order.
  void add_tile(int32_t begin, int32_t end, int32_t flags, bool keep_empty, Direction& out) {
    while (next_ < order_.size() && at(order_[next_]).q0 < end) {
      live_.push_back(order_[next_++]);
      first_end_ = std::min(first_end_, at(live_.back()).q1);
    }
    if (begin >= first_end_) {
      std::erase_if(live_, [&](int32_t i) { return at(i).q1 <= begin; });
      first_end_ = std::numeric_limits<int32_t>::max();
      for (int32_t const i : live_) first_end_ = std::min(first_end_, at(i).q1);
    }

    auto const first_job = out.jobs.size();
    int64_t pairs = 0;
    short_.clear();
    for (int32_t const i : live_) {
      Band const& b = at(i);
      bool const is_rectangle = b.lo == b.k0 - (b.q1 - 1) && b.hi == b.k1 - 1 - b.q0;
      Band c;
      if (is_rectangle) {  // the common case in dense block masks
        c.q0 = std::max(b.q0, begin), c.q1 = std::min(b.q1, end), c.k0 = b.k0, c.k1 = b.k1;
        c.lo = c.k0 - (c.q1 - 1), c.hi = c.k1 - 1 - c.q0;
        pairs += int64_t{c.q1 - c.q0} * (c.k1 - c.k0);
      } else {
        c = clip(b, {begin, end}, {b.k0, b.k1});
        if (is_empty(c)) continue;
        pairs += area(c);
      }
      cut(c, i, begin, end, out.jobs);
    }
    share(begin, end, out.jobs);
    if (!keep_empty && out.jobs.size() == first_job) return;

    auto const before = [](Job const& a, Job const& b) {
      return std::tie(a.begin, a.end, a.job_class, a.index) < std::tie(b.begin, b.end, b.job_class, b.index);
    };
    auto const begin_of_jobs = out.jobs.begin() + static_cast<ptrdiff_t>(first_job);
    if (!std::is_sorted(begin_of_jobs, out.jobs.end(), before)) std::sort(begin_of_jobs, out.jobs.end(), before);
    size_t kept = first_job;
    for (size_t i = first_job + 1; i < out.jobs.size(); ++i) {
      Job& a = out.jobs[kept];
      Job const& b = out.jobs[i];
      bool const continues = a.end == b.begin && (a.end - a.begin) % step_ == 0 && a.job_class == b.job_class &&
                             a.index == b.index && a.job_class != plan::kMany;
      if (continues)
        a.end = b.end;
      else
        out.jobs[++kept] = b;
    }
    if (out.jobs.size() > first_job) out.jobs.resize(kept + 1);
    if (out.jobs.size() > static_cast<size_t>(std::numeric_limits<int32_t>::max() / plan::kJobWords)) {
      throw std::length_error("a FlexPlan may hold at most 2**31 words");
    }
    int64_t const cost = std::min<int64_t>(ceil_div(pairs, 128), std::numeric_limits<int32_t>::max());
    out.tiles.push_back({begin, end, static_cast<int32_t>(first_job), static_cast<int32_t>(out.jobs.size()), flags, 1,
                         -1, static_cast<int32_t>(cost)});
  }

 private:
  Band const& at(int32_t i) const { return bands_[static_cast<size_t>(i)]; }

  // Walks the band's part `c` of the tile in steps from its first column: steps in which every row of the tile sees
  // every column need no mask. A last step that is not whole may share a job with others.
  void cut(Band const& c, int32_t band, int32_t begin, int32_t end, std::vector<Job>& jobs) {
    int64_t const length = c.k1 - c.k0, step = step_;
    int64_t full_begin = 0, full_end = 0;  // in steps
    if (c.q0 == begin && c.q1 == end) {
      int64_t const from = std::max<int64_t>(c.k0, int64_t{end} - 1 + c.lo);
      int64_t const to = std::min<int64_t>(c.k1, int64_t{begin} + c.hi + 1);
      full_begin = ceil_div(from - c.k0, step);
      full_end = to == c.k1 ? ceil_div(length, step) : (to - c.k0) / step;
      if (full_begin >= full_end) full_begin = full_end = 0;
    }
    auto const column = [&](int64_t steps) { return static_cast<int32_t>(c.k0 + std::min(length, steps * step)); };
    Piece const runs[3] = {{c.k0, column(full_begin), band, false},
                           {column(full_begin), column(full_end), band, true},
                           {column(full_end), c.k1, band, false}};
    for (Piece run : runs) {
      int32_t const tail = can_share_ ? (run.end - run.begin) % step_ : 0;
      if (tail > 0) {
        short_.push_back({run.end - tail, run.end, band, run.is_full});
        run.end -= tail;
      }
      if (run.begin < run.end) jobs.push_back(job_of(run));
    }
  }

  static Job job_of(Piece const& p) {
    return {p.begin, p.end, p.is_full ? plan::kFull : plan::kOneBand, p.is_full ? 0 : p.band};
  }

  // Packs the short pieces into as few jobs as a greedy pass finds. Pieces that show a cell in common never share.
  void share(int32_t tile_begin, int32_t tile_end, std::vector<Job>& jobs) {
    std::sort(short_.begin(), short_.end(), [](Piece const& a, Piece const& b) {
      return std::tie(a.begin, a.end, a.band) < std::tie(b.begin, b.end, b.band);
    });
    open_.clear();
    auto const close = [&](size_t position) {
      Group const& group = groups_[open_[position]];
      if (group.pieces.size() == 1) {
        jobs.push_back(job_of(group.pieces[0]));
      } else {
        int const stationary = tile_end - tile_begin, moving = group.end - group.begin;
        bool const full =
            is_backward_ ? group.mask.is_full(moving, stationary) : group.mask.is_full(stationary, moving);
        jobs.push_back(
            {group.begin, group.end, full ? plan::kFull : plan::kMany, full ? 0 : masks_.intern(group.mask)});
      }
      free_.push_back(open_[position]);
      open_.erase(open_.begin() + static_cast<ptrdiff_t>(position));
    };
    for (Piece const& p : short_) {
      while (!open_.empty() && p.begin >= groups_[open_[0]].begin + plan::kMaskCols) close(0);  // open ones ascend
      bool placed = false;
      for (size_t i = 0; i < open_.size() && !placed; ++i) placed = join(groups_[open_[i]], p, tile_begin, tile_end);
      if (placed) continue;
      if (open_.size() == kMaxOpen) close(0);
      open_.push_back(free_.back());
      free_.pop_back();
      Group& group = groups_[open_.back()];
      group.begin = p.begin;
      group.end = p.end;
      group.pieces.assign(1, p);
    }
    while (!open_.empty()) close(0);
  }

  bool join(Group& group, Piece const& p, int32_t tile_begin, int32_t tile_end) {
    int32_t const end = std::max(group.end, p.end);
    if (end - group.begin > plan::kMaskCols) return false;
    int64_t const together = ceil_div(end - group.begin, step_);
    int64_t const apart = ceil_div(group.end - group.begin, step_) + ceil_div(p.end - p.begin, step_);
    if (together > apart || (together == apart && group.pieces.size() == 1)) return false;
    // What no slice covers may hold anything, NaN included, so it is never read.
    if (p.begin > group.end && !is_covered(group.end, p.begin)) return false;
    auto const add = [&](Piece const& piece) {
      Band const c = clip(at(piece.band), {tile_begin, tile_end}, {piece.begin, piece.end});
      if (is_backward_) return group.mask.add({c.k0, c.k1, c.q0, c.q1, -c.hi, -c.lo}, group.begin, tile_begin);
      return group.mask.add(c, tile_begin, group.begin);
    };
    if (group.pieces.size() == 1) {
      group.mask = BitMask{};
      add(group.pieces[0]);
    }
    if (!add(p)) return false;
    group.end = end;
    group.pieces.push_back(p);
    return true;
  }

  bool is_covered(int32_t begin, int32_t end) const {
    auto const it = std::upper_bound(covered_.begin(), covered_.end(), begin,
                                     [](int32_t x, Range const& r) { return x < r.begin; });
    return it != covered_.begin() && std::prev(it)->end >= end;
  }

  static constexpr size_t kMaxOpen = 8;

  std::span<Band const> bands_;
  bool is_backward_;
  int32_t step_;
  MaskStore& masks_;
  bool can_share_;
  std::vector<Range> covered_;  // moving axis, merged
  std::vector<int32_t> order_, live_;
  size_t next_ = 0;
  int32_t first_end_ = std::numeric_limits<int32_t>::max();  // smallest end among the live bands
  std::vector<Piece> short_;
  std::vector<Group> groups_{kMaxOpen};
  std::vector<size_t> open_, free_{0, 1, 2, 3, 4, 5, 6, 7};  // indices of groups_
  static_assert(kMaxOpen == 8);
};

int64_t steps_of(Job const& job, int32_t step) { return ceil_div(job.end - job.begin, step); }

// Cuts the moving axis into at most `parts` intervals of about equal steps, none without work: ascending inner cuts.
std::vector<int32_t> even_cuts(std::span<Job const> jobs, int32_t step, int64_t steps, int64_t parts) {
  std::vector<int32_t> cuts;
  size_t j = 0;
  int64_t before = 0;
  for (int64_t part = 1; part < parts; ++part) {
    int64_t const target = steps * part / parts;
    while (before + steps_of(jobs[j], step) <= target) before += steps_of(jobs[j++], step);
    auto cut = static_cast<int32_t>(jobs[j].begin + (target - before) * step);
    // A bit mask is read from its first column only.
    for (bool moved = true; moved;) {
      moved = false;
      for (Job const& job : jobs) {
        if (job.job_class == plan::kMany && job.begin < cut && cut < job.end) cut = job.begin, moved = true;
      }
    }
    int32_t const last = cuts.empty() ? 0 : cuts.back();
    auto const has_work = [&](int32_t a, int32_t b) {
      return std::any_of(jobs.begin(), jobs.end(), [&](Job const& job) { return job.begin < b && a < job.end; });
    };
    if (cut > last && has_work(last, cut) && has_work(cut, std::numeric_limits<int32_t>::max())) cuts.push_back(cut);
  }
  return cuts;
}

struct QueueOptions {
  int32_t step;
  int32_t total_moving;
  int32_t group;       // query heads of a kv head; 0 when unknown
  int64_t item_heads;  // queue entries of an item: query heads forward, kv heads backward
  int64_t num_sms;
  bool is_backward;
};

// Items in queue order. Splits depend on nothing but the plan's arguments.
void queue(QueueOptions const& o, Direction& d) {
  std::vector<int64_t> steps(d.tiles.size());
  int64_t total = 0, longest = 0, busy = 0;
  for (size_t t = 0; t < d.tiles.size(); ++t) {
    for (int32_t j = d.tiles[t].job_begin; j < d.tiles[t].job_end; ++j) {
      steps[t] += steps_of(d.jobs[static_cast<size_t>(j)], o.step);
    }
    total += steps[t];
    longest = std::max(longest, steps[t]);
    busy += steps[t] > 0;
  }
  int64_t const heads_inside = o.is_backward ? std::max(o.group, 1) : 1;
  int64_t const mean = ceil_div(total * heads_inside * o.item_heads, o.num_sms);  // steps of one SM
  int64_t limit = std::numeric_limits<int64_t>::max();
  if (o.group > 0) {
    if (o.is_backward) {
      // The longest item is at most half of an SM's mean load.
      limit = std::max(ceil_div(mean, 2), kMinSplitSteps);
    } else {
      // Keys are split only where tiles do not fill the chip, or one tile would outlast all others.
      bool const fills = busy * o.item_heads >= o.num_sms;
      if (fills ? longest > 2 * mean : 4 * longest > 5 * mean) limit = std::max(mean, kMinSplitSteps);
    }
  }

  struct Queued {
    Item item;
    int64_t load;
  };
  std::vector<Queued> items;
  // Workspace: at most four parts of a tile per SM are kept (at head dim 128, 35 MB forward and 69 MB backward), since
  // kernels are given no more; larger parts otherwise.
  for (;;) {
    items.clear();
    d.split_slots = 0;
    for (size_t t = 0; t < d.tiles.size(); ++t) {
      Tile& tile = d.tiles[t];
      std::span<Job const> const jobs{d.jobs.data() + tile.job_begin,
                                      static_cast<size_t>(tile.job_end - tile.job_begin)};
      int64_t heads = heads_inside, parts = 1;
      if (o.is_backward) {
        if (steps[t] * heads > limit) heads = std::max<int64_t>(1, limit / steps[t]);
        if (steps[t] * heads > limit) parts = ceil_div(steps[t], limit);
      } else if (4 * steps[t] > 5 * std::min(limit, int64_t{1} << 60)) {
        parts = ceil_div(steps[t], limit);
      }
      parts = std::min(parts, std::max<int64_t>(1, steps[t]));
      if (parts == 1 && heads == heads_inside) {
        tile.num_splits = 1;
        tile.split_slot = -1;
        items.push_back({{static_cast<int32_t>(t), tile.job_begin, tile.job_end, 0, o.total_moving, 0, o.group, 0},
                         steps[t] * heads});
        continue;
      }
      std::vector<int32_t> cuts = even_cuts(jobs, o.step, steps[t], parts);
      cuts.insert(cuts.begin(), 0);
      cuts.push_back(o.total_moving);
      int64_t const head_parts = ceil_div(heads_inside, heads);
      int64_t const splits = head_parts * static_cast<int64_t>(cuts.size() - 1);
      tile.num_splits = static_cast<int32_t>(splits);
      tile.split_slot = splits > 1 ? static_cast<int32_t>(d.split_slots) : -1;
      if (splits > 1) d.split_slots += splits;
      int32_t split = 0;
      for (int64_t h = 0; h < head_parts; ++h) {
        auto const head_begin = static_cast<int32_t>(heads_inside * h / head_parts);
        auto const head_end = static_cast<int32_t>(heads_inside * (h + 1) / head_parts);
        for (size_t c = 0; c + 1 < cuts.size(); ++c) {
          int32_t first = tile.job_end, last = tile.job_begin;
          int64_t load = 0;
          for (int32_t j = tile.job_begin; j < tile.job_end; ++j) {
            Job const& job = d.jobs[static_cast<size_t>(j)];
            int32_t const begin = std::max(job.begin, cuts[c]), end = std::min(job.end, cuts[c + 1]);
            if (begin >= end) continue;
            first = std::min(first, j);
            last = j + 1;
            load += ceil_div(end - begin, o.step);
          }
          if (first >= last) first = last = tile.job_begin;
          items.push_back({{static_cast<int32_t>(t), first, last, cuts[c], cuts[c + 1], head_begin,
                            o.is_backward ? head_end : o.group, split++},
                           load * (head_end - head_begin)});
        }
      }
    }
    if (d.split_slots * o.item_heads <= 4 * o.num_sms || limit > longest * heads_inside) break;
    limit += ceil_div(limit, 4);
  }
  std::stable_sort(items.begin(), items.end(), [](Queued const& a, Queued const& b) { return a.load > b.load; });
  d.items.reserve(items.size());
  for (Queued const& q : items) d.items.push_back(q.item);
}

int32_t narrow(int64_t words) {
  if (words > std::numeric_limits<int32_t>::max()) throw std::length_error("a FlexPlan may hold at most 2**31 words");
  return static_cast<int32_t>(words);
}

uint64_t digest_of(std::span<Band const> bands, FlexPlanOptions const& o) {
  std::vector<int32_t> words{plan::kVersion,  o.total_q,
                             o.total_k,       o.num_heads_q,
                             o.num_heads_kv,  o.block_m,
                             o.block_n,       o.bwd_block_m,
                             o.bwd_block_n,   o.stage,
                             o.num_stages,    o.num_sms,
                             o.allow_overlap, static_cast<int32_t>(o.q_tile_starts.size())};
  words.insert(words.end(), o.q_tile_starts.begin(), o.q_tile_starts.end());
  words.insert(words.end(), o.tile_flags.begin(), o.tile_flags.end());
  words.resize(static_cast<size_t>(ceil_div(static_cast<int64_t>(words.size()), plan::kBandWords) * plan::kBandWords));
  std::vector<Band> packed(words.size() / plan::kBandWords);
  std::memcpy(packed.data(), words.data(), words.size() * sizeof(int32_t));
  return digest(bands, digest(packed));
}

}  // namespace

std::vector<int32_t> build_flex_plan(std::span<Band const> bands, FlexPlanOptions const& o) {
  MaskStore masks;
  Direction forward, backward;
  {
    bool const is_staged = o.num_stages > 1;
    int64_t const num_tiles =
        o.q_tile_starts.empty() ? ceil_div(o.total_q, o.block_m) : static_cast<int64_t>(o.q_tile_starts.size()) - 1;
    TileBuilder builder(bands, false, o.block_n, o.block_m, masks);
    for (int64_t t = 0; t < num_tiles; ++t) {
      auto const i = static_cast<size_t>(t);
      bool const is_uniform = o.q_tile_starts.empty();
      auto const begin = is_uniform ? static_cast<int32_t>(t * o.block_m) : o.q_tile_starts[i];
      auto const end =
          is_uniform ? static_cast<int32_t>(std::min<int64_t>((t + 1) * o.block_m, o.total_q)) : o.q_tile_starts[i + 1];
      int32_t const flags = o.tile_flags.empty() ? plan::kFirst | plan::kLast : o.tile_flags[i];
      // A tile that no stage touches is written by stage 0, which then has it with both flags.
      bool const keep_empty = !is_staged || (o.stage == 0 && flags == (plan::kFirst | plan::kLast));
      builder.add_tile(begin, end, flags, keep_empty, forward);
    }
  }
  {
    std::vector<Band> transposed;
    transposed.reserve(bands.size());
    for (Band const& b : bands) transposed.push_back({b.k0, b.k1, b.q0, b.q1, -b.hi, -b.lo});
    TileBuilder builder(transposed, true, o.bwd_block_m, o.bwd_block_n, masks);
    for (int64_t begin = 0; begin < o.total_k; begin += o.bwd_block_n) {
      auto const end = static_cast<int32_t>(std::min<int64_t>(begin + o.bwd_block_n, o.total_k));
      // Every key has its gradient stored, by the stage that holds it.
      builder.add_tile(static_cast<int32_t>(begin), end, plan::kFirst | plan::kLast, true, backward);
    }
  }
  int32_t const group = o.num_heads_kv > 0 ? o.num_heads_q / o.num_heads_kv : 0;
  queue({o.block_n, o.total_k, group, std::max(o.num_heads_q, 1), o.num_sms, false}, forward);
  queue({o.bwd_block_m, o.total_q, group, std::max(o.num_heads_kv, 1), o.num_sms, true}, backward);

  int64_t pairs = 0;
  for (Band const& b : bands) pairs += area(b);

  int64_t words = plan::kHeaderWords;
  auto const place = [&words](size_t count, int64_t record_words, int64_t alignment) {
    words = ceil_div(words, alignment) * alignment;
    int32_t const offset = narrow(words);
    words += static_cast<int64_t>(count) * record_words;
    return offset;
  };
  int32_t const bands_at = place(bands.size(), plan::kBandWords, 4);
  int32_t const fwd_tiles_at = place(forward.tiles.size(), plan::kTileWords, 4);
  int32_t const fwd_jobs_at = place(forward.jobs.size(), plan::kJobWords, 4);
  int32_t const fwd_items_at = place(forward.items.size(), plan::kItemWords, 4);
  int32_t const bwd_tiles_at = place(backward.tiles.size(), plan::kTileWords, 4);
  int32_t const bwd_jobs_at = place(backward.jobs.size(), plan::kJobWords, 4);
  int32_t const bwd_items_at = place(backward.items.size(), plan::kItemWords, 4);
  int32_t const masks_at = place(masks.masks().size(), plan::kMaskWords, 32);
  words = ceil_div(words, 4) * 4;
  std::vector<int32_t> buffer(static_cast<size_t>(narrow(words)));

  auto const copy = [&buffer](int32_t at, auto const& records) {
    if (!records.empty()) std::memcpy(buffer.data() + at, records.data(), records.size() * sizeof(records[0]));
  };
  copy(bands_at, bands);
  copy(fwd_tiles_at, forward.tiles);
  copy(fwd_jobs_at, forward.jobs);
  copy(fwd_items_at, forward.items);
  copy(bwd_tiles_at, backward.tiles);
  copy(bwd_jobs_at, backward.jobs);
  copy(bwd_items_at, backward.items);
  copy(masks_at, masks.masks());

  uint64_t const digest = digest_of(bands, o);
  int64_t const section = std::max<int64_t>(1, kSectionBytes / std::max<int64_t>(1, kBytesPerKey * o.total_k));
  bool const has_splits = forward.split_slots > 0 || backward.split_slots > 0;
  auto const set = [&buffer](plan::Header field, int64_t value) {
    buffer[static_cast<size_t>(field)] = static_cast<int32_t>(static_cast<uint32_t>(value));
  };
  set(plan::kMagicWord, plan::kMagic);
  set(plan::kVersionWord, plan::kVersion);
  set(plan::kDigestLo, static_cast<int64_t>(digest & 0xFFFFFFFFu));
  set(plan::kDigestHi, static_cast<int64_t>(digest >> 32));
  set(plan::kNumWords, words);
  set(plan::kStatus, plan::kOk);
  set(plan::kStatusSlice, -1);
  set(plan::kFlags, (o.allow_overlap ? plan::kAllowOverlap : 0) | (has_splits ? plan::kHasSplits : 0));
  set(plan::kTotalQ, o.total_q);
  set(plan::kTotalK, o.total_k);
  set(plan::kNumHeadsQ, o.num_heads_q);
  set(plan::kNumHeadsKv, o.num_heads_kv);
  set(plan::kSectionHeads,
      o.num_heads_kv > 0 ? std::min<int64_t>(section, o.num_heads_kv) : std::min<int64_t>(section, 1 << 20));
  set(plan::kStage, o.stage);
  set(plan::kNumStages, o.num_stages);
  set(plan::kNumBands, static_cast<int64_t>(bands.size()));
  set(plan::kBands, bands_at);
  set(plan::kNumMasks, static_cast<int64_t>(masks.masks().size()));
  set(plan::kMasks, masks_at);
  set(plan::kFwdBlockM, o.block_m);
  set(plan::kFwdBlockN, o.block_n);
  set(plan::kNumFwdTiles, static_cast<int64_t>(forward.tiles.size()));
  set(plan::kFwdTiles, fwd_tiles_at);
  set(plan::kNumFwdJobs, static_cast<int64_t>(forward.jobs.size()));
  set(plan::kFwdJobs, fwd_jobs_at);
  set(plan::kNumFwdItems, static_cast<int64_t>(forward.items.size()));
  set(plan::kFwdItems, fwd_items_at);
  set(plan::kFwdSplitSlots, forward.split_slots);
  set(plan::kBwdBlockM, o.bwd_block_m);
  set(plan::kBwdBlockN, o.bwd_block_n);
  set(plan::kNumBwdTiles, static_cast<int64_t>(backward.tiles.size()));
  set(plan::kBwdTiles, bwd_tiles_at);
  set(plan::kNumBwdJobs, static_cast<int64_t>(backward.jobs.size()));
  set(plan::kBwdJobs, bwd_jobs_at);
  set(plan::kNumBwdItems, static_cast<int64_t>(backward.items.size()));
  set(plan::kBwdItems, bwd_items_at);
  set(plan::kBwdSplitSlots, backward.split_slots);
  set(plan::kAreaLo, pairs & 0xFFFFFFFF);
  set(plan::kAreaHi, pairs >> 32);
  return buffer;
}

}  // namespace magi
