#include "host/overlap.h"

#include <algorithm>
#include <numeric>
#include <set>

namespace magi {
namespace {

// Below this many bands whose rows meet, comparing all pairs is cheaper than building a tree.
constexpr size_t kPairwise = 24;

// Live bands by columns. A band is stored at the O(log n) nodes that tile its columns; the bands whose columns meet
// [a, b) are those on the path to a, and those that begin inside (a, b). Bands that ended are dropped when met.
class ColumnTree {
 public:
  explicit ColumnTree(std::vector<int32_t> points) : points_(std::move(points)) {
    while (leaves_ < points_.size()) leaves_ *= 2;
    nodes_.resize(2 * leaves_);
  }

  void insert(int32_t index, Band const& b) {
    size_t left = rank(b.k0) + leaves_, right = rank(b.k1) + leaves_;
    for (; left < right; left /= 2, right /= 2) {
      if (left & 1) nodes_[left++].push_back(index);
      if (right & 1) nodes_[--right].push_back(index);
    }
    begins_.insert({b.k0, index});
  }

  // Calls visit(index) for live bands whose columns meet those of b, until it returns false.
  template <class Visit>
  bool for_each_meeting(std::span<Band const> bands, Band const& b, Visit const& visit) {
    for (size_t node = rank(b.k0) + leaves_; node >= 1; node /= 2) {
      std::vector<int32_t>& list = nodes_[node];
      for (size_t i = 0; i < list.size();) {
        if (bands[static_cast<size_t>(list[i])].q1 <= b.q0) {
          list[i] = list.back();
          list.pop_back();
        } else if (!visit(list[i++])) {
          return false;
        }
      }
    }
    for (auto it = begins_.upper_bound({b.k0, INT32_MAX}); it != begins_.end() && it->first < b.k1;) {
      if (bands[static_cast<size_t>(it->second)].q1 <= b.q0)
        it = begins_.erase(it);
      else if (!visit((it++)->second))
        return false;
    }
    return true;
  }

 private:
  size_t rank(int32_t k) const {
    return static_cast<size_t>(std::lower_bound(points_.begin(), points_.end(), k) - points_.begin());
  }

  std::vector<int32_t> points_;
  size_t leaves_ = 1;
  std::vector<std::vector<int32_t>> nodes_;
  std::set<std::pair<int32_t, int32_t>> begins_;
};

}  // namespace

Band intersect(Band const& a, Band const& b) {
  return shrink({std::max(a.q0, b.q0), std::min(a.q1, b.q1), std::max(a.k0, b.k0), std::min(a.k1, b.k1),
                 std::max(a.lo, b.lo), std::min(a.hi, b.hi)});
}

std::vector<std::pair<int32_t, int32_t>> find_overlaps(std::span<Band const> bands, size_t limit) {
  std::vector<std::pair<int32_t, int32_t>> found;
  std::vector<int32_t> order(bands.size());
  std::iota(order.begin(), order.end(), 0);
  auto const at = [&bands](int32_t i) -> Band const& { return bands[static_cast<size_t>(i)]; };
  std::sort(order.begin(), order.end(),
            [&](int32_t a, int32_t b) { return std::pair(at(a).q0, a) < std::pair(at(b).q0, b); });
  auto const check = [&](int32_t i, int32_t j) {
    if (found.size() < limit && !is_empty(intersect(at(i), at(j)))) found.push_back(std::minmax(i, j));
    return found.size() < limit;
  };
  // Groups whose rows are apart cannot meet; packed documents fall into groups of one or two.
  for (size_t begin = 0; begin < order.size() && found.size() < limit;) {
    int32_t reach = at(order[begin]).q1;
    size_t end = begin + 1;
    for (; end < order.size() && at(order[end]).q0 < reach; ++end) reach = std::max(reach, at(order[end]).q1);
    if (end - begin <= kPairwise) {
      for (size_t i = begin; i < end; ++i) {
        for (size_t j = i + 1; j < end && at(order[j]).q0 < at(order[i]).q1; ++j) check(order[i], order[j]);
      }
    } else {
      std::vector<int32_t> points;
      for (size_t i = begin; i < end; ++i) {
        points.push_back(at(order[i]).k0);
        points.push_back(at(order[i]).k1);
      }
      std::sort(points.begin(), points.end());
      points.erase(std::unique(points.begin(), points.end()), points.end());
      ColumnTree tree(std::move(points));
      for (size_t i = begin; i < end; ++i) {
        int32_t const index = order[i];
        if (!tree.for_each_meeting(bands, at(index), [&](int32_t other) { return check(other, index); })) break;
        tree.insert(index, at(index));
      }
    }
    begin = end;
  }
  return found;
}

}  // namespace magi
