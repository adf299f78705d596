// FlexPlan: the flat int32 buffer in which every attention backend reads what to do.
//
// One buffer holds a header, the canonical bands, and for each direction (forward: query tiles; backward: key tiles)
// tiles, jobs and items, then bit masks. It is the same on the host and on the device; kernels take every count and
// offset from the header, never from launch arguments, so a captured graph follows a copied-in plan.
//
// A *tile* is an interval of the stationary axis (queries forward, keys backward). Its *jobs* are intervals of the
// other axis, each of one class. An *item* is what one CTA takes from the queue: a tile, or a part of a split one.
// Offsets count int32 words from the start of the buffer. Records start on 16 bytes, bit masks on 128.
//
// This file is read by host and device code and by nothing that needs CUDA. Source: ours.
#pragma once
#include <cstdint>

namespace magi::plan {

inline constexpr int32_t kMagic = 0x4947414D;  // "MAGI" in memory order
inline constexpr int32_t kVersion = 1;
inline constexpr int kHeaderWords = 64;

// Word index of each header field.
enum Header : int {
  kMagicWord = 0,
  kVersionWord,
  kDigestLo,  // 64-bit digest of canonical bands, totals and tile sizes
  kDigestHi,
  kNumWords,     // words in use; the buffer may be larger (fixed capacity for device-made plans)
  kStatus,       // Status bits
  kStatusSlice,  // index of the first offending slice, or -1
  kFlags,        // PlanFlags bits
  kTotalQ,
  kTotalK,
  kNumHeadsQ,  // 0 when the plan serves any head count
  kNumHeadsKv,
  kSectionHeads,  // kv heads of one queue section; items of a section precede those of the next
  kStage,
  kNumStages,
  kNumBands,
  kBands,  // offset of Band[num_bands]
  kNumMasks,
  kMasks,      // offset of BitMask[num_masks]
  kFwdBlockM,  // largest rows of a forward tile, and columns of its step
  kFwdBlockN,
  kNumFwdTiles,
  kFwdTiles,
  kNumFwdJobs,
  kFwdJobs,
  kNumFwdItems,
  kFwdItems,
  kFwdSplitSlots,  // workspace slots that split forward tiles need, per query head
  kBwdBlockM,      // rows of a backward step, and largest columns of a backward tile
  kBwdBlockN,
  kNumBwdTiles,
  kBwdTiles,
  kNumBwdJobs,
  kBwdJobs,
  kNumBwdItems,
  kBwdItems,
  kBwdSplitSlots,
  kAreaLo,  // visible pairs, 64 bits, doubly covered ones counted twice
  kAreaHi,
  kHeaderFieldEnd,
};
static_assert(kHeaderFieldEnd <= kHeaderWords, "the header grew past its reserved words");

enum Status : int32_t {
  kOk = 0,
  kRangeOutside = 1,   // a range reached past its tensor and was clamped
  kRangeReversed = 2,  // start > end: treated as empty
  kBadType = 4,        // a mask type outside 0..3: treated as empty
  kOverflow = 8,       // some tile's job list did not fit: it walks all bands
  kDoubleCover = 16,   // found by FlexPlan.check(), never by kernels
};

enum PlanFlags : int32_t {
  kDeviceMade = 1,
  kAllowOverlap = 2,
  kHasSplits = 4,
  kForwardOnly = 8,
};

// Visible pairs of one slice: q in [q0, q1), k in [k0, k1), lo <= k - q <= hi.
struct Band {
  int32_t q0, q1, k0, k1, lo, hi;
};
inline constexpr int kBandWords = 6;

enum TileFlags : int32_t {
  kFirst = 1,    // no earlier stage touched the tile: nothing is read
  kLast = 2,     // no later stage touches it: write the output dtype
  kWalkAll = 4,  // the job list overflowed: walk every band of the plan
};

struct Tile {
  int32_t begin, end;          // interval of the stationary axis
  int32_t job_begin, job_end;  // its jobs
  int32_t flags;
  int32_t num_splits;  // 1 when not split
  int32_t split_slot;  // first workspace slot, -1 when not split
  int32_t cost;        // visible pairs / 128, rounded up, saturating: queue order only
};

enum JobClass : int32_t {
  kFull = 0,     // every pair of (tile, interval) is visible: no mask
  kOneBand = 1,  // index names a band; pairs are visible where the band says so
  kMany = 2,     // index names a bit mask; the interval is at most 128 long
};

struct Job {
  int32_t begin, end;  // interval of the moving axis, walked in steps of the direction's block
  int32_t job_class;
  int32_t index;
};

struct Item {
  int32_t tile;
  int32_t job_begin, job_end;
  int32_t clip_begin, clip_end;  // part of the moving axis this item covers
  int32_t head_begin, head_end;  // query heads inside the kv head's group: [0, group) when not split by head
  int32_t split;                 // position among the tile's splits
};

// Bit (row r, column c) of a 128 x 128 tile: word 4 * r + c / 32, bit c % 32. Rows are queries in both directions,
// counted from the tile (forward) or the job (backward) begin; columns are keys.
inline constexpr int kMaskRows = 128, kMaskCols = 128, kMaskWords = 512;

inline constexpr int kTileWords = sizeof(Tile) / 4, kJobWords = sizeof(Job) / 4, kItemWords = sizeof(Item) / 4;
static_assert(sizeof(Band) == 4 * kBandWords && kTileWords == 8 && kJobWords == 4 && kItemWords == 8,
              "the record layout is an ABI");

}  // namespace magi::plan
