#include "launch/sm90/launch.h"

namespace magi::attn {

FwdEntry const*& fwd_entries() {
  static FwdEntry const* first = nullptr;
  return first;
}

BwdEntry const*& bwd_entries() {
  static BwdEntry const* first = nullptr;
  return first;
}

}  // namespace magi::attn
