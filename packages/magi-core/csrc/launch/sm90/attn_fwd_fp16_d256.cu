#include "launch/sm90/attn_fwd.cuh"

static magi::attn::FwdRegistration<magi::attn::FwdTraits<__half, 256, 256, magi::attn::Scaled>> const registration;
